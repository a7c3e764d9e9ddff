"""An Optuna study on private validation records.

C and gamma of a support vector machine for digits. The objective returns the loss of
every validation record; the study gets noisy mean losses alone, at 15 points, under
one guarantee. Its storage, its plots and its dashboard can be shared.

    python examples/optuna_study.py [--smoke] [--storage URL] [--figure FILE]

With --storage, such as sqlite:///study.db, the study is kept. With --figure the
released trials are drawn into a file; no display is needed.
"""

import argparse

import numpy as np
import optuna
from sklearn.datasets import load_digits
from sklearn.svm import SVC

import dpbilevel as dpb

DISTRIBUTIONS = {
    "C": optuna.distributions.FloatDistribution(1e-2, 1e3, log=True),
    "gamma": optuna.distributions.FloatDistribution(1e-4, 1e1, log=True),
}


def records():
    """Public training records, private validation records, and others."""
    pixels, digit = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(digit))
    pixels, digit = pixels[order] / 16, digit[order]
    parts = slice(0, 300), slice(300, 1300), slice(1300, None)
    return [(pixels[part], digit[part]) for part in parts]


def model(params):
    """Return the estimator with such parameters."""
    return SVC(C=params["C"], gamma=params["gamma"])


def draw(study, answer, file: str) -> None:
    """Draws the released trials: where they are, and their noisy losses."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5, 3.8), layout="constrained")
    axes = figure.subplots()
    trials = study.get_trials()
    points = axes.scatter(
        [trial.params["C"] for trial in trials],
        [trial.params["gamma"] for trial in trials],
        c=[trial.value for trial in trials],
        cmap="viridis_r",
    )
    axes.plot(
        answer.params["C"], answer.params["gamma"], "r*", markersize=16, mfc="none"
    )
    axes.set(xscale="log", yscale="log", xlabel="C", ylabel="gamma")
    axes.set_title("released trials; the star is the answer")
    figure.colorbar(points, label="error of validation records, with noise")
    figure.savefig(file)


def main(smoke: bool, storage: str | None, figure: str | None) -> None:
    """Run the study and print what it released."""
    train, private, others = records()

    def objective(trial):
        C = trial.suggest_float("C", 1e-2, 1e3, log=True)
        gamma = trial.suggest_float("gamma", 1e-4, 1e1, log=True)
        fitted = model({"C": C, "gamma": gamma}).fit(*train)
        return (fitted.predict(private[0]) != private[1]).astype(
            float
        )  # of each record

    study = optuna.create_study(storage=storage)
    budget = dpb.PrivacyBudget(epsilon=1.0, delta=1e-6)
    answer = dpb.search.optimize_study(
        study,
        objective,
        DISTRIBUTIONS,
        dpb.search.NoisyUCB(3 if smoke else 15, clip_range=1.0),
        num_records=len(private[1]),
        budget=budget,
        key=dpb.root_key(),
    )
    print(answer.report)
    for trial in study.get_trials():
        params = ", ".join(f"{k} = {v:.3g}" for k, v in trial.params.items())
        print(f"trial {trial.number}: {params}, noisy error {trial.value:.3f}")
    fitted = model(answer.params).fit(*train)
    print(f"released: {answer.params}")
    print(f"accuracy on other records: {fitted.score(*others):.3f}")
    if figure is not None:
        draw(study, answer, figure)
        print(f"figure: {figure}")
    assert answer.report.epsilon <= budget.epsilon
    assert smoke or fitted.score(*others) > 0.8


if __name__ == "__main__":
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--smoke", action="store_true", help="a short run")
    parser.add_argument("--storage", help="where the study is kept, as in Optuna")
    parser.add_argument("--figure", help="a file for the figure")
    arguments = parser.parse_args()
    main(arguments.smoke, arguments.storage, arguments.figure)
