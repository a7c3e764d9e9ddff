"""Choose what a mutual covers so that households with large costs count for more.

A record is a household's medical expenses of five kinds in a year. The variable x holds
the fraction of each kind that is covered, at a public premium. The risk is the mean
cost plus the mean excess over the mean: an expectation inside an expectation. The lower
variable y is the mean cost, the upper loss reads y, and both levels read every record.
At epsilon = 1 `SingleLoopBilevel` has a smaller risk than descent on the mean cost. It
does NOT beat descent on one level with a good guess: a third of the households are
above the mean. The risk is then a minimum over one more variable, as for the CVaR.

Every method has the same budget. Settings were chosen on records like these. The risks
on test households and the oracle, two levels without noise, are NON-PRIVATE.

    python examples/compositional_risk.py [--smoke] [--out runs/compositional_risk]
"""

import argparse
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

import dpbilevel as dpb

# Thousands of euros in a year: visits, drugs, teeth, hospital and care.
MEAN_THOUSANDS = np.array([0.9, 0.5, 0.4, 0.35, 0.25])
PREMIUM_THOUSANDS = np.array([1.08, 0.60, 0.47, 0.39, 0.27])  # for full cover
SPREAD = np.array([0.4, 0.8, 1.2, 1.5, 1.8])  # standard deviations of the logarithms
LARGEST_THOUSANDS = 5.0  # per kind; the state pays the rest
HOUSEHOLDS, GUESS = 5_000, 1 / 3
TAIL = dpb.outputs.TailMean()


def households(count, seed):
    """Generate expenses with heavy tails, larger in frail households."""
    rng = np.random.default_rng(seed)
    frail, own = rng.normal(size=(count, 1)), rng.normal(size=(count, len(SPREAD)))
    exponent = SPREAD * (0.5 * frail + 0.75**0.5 * own) - SPREAD**2 / 2
    thousands = (MEAN_THOUSANDS * np.exp(exponent)).clip(0, LARGEST_THOUSANDS)
    return jnp.asarray(thousands, jnp.float32)


def cost(x, expenses):
    """Return what a household pays in a year, in thousands of euros."""
    return jnp.sum((1 - x) * expenses + x * PREMIUM_THOUSANDS)


def upper(x, y, expenses):
    """Return the cost and its excess over y."""
    return cost(x, expenses) + jnp.maximum(cost(x, expenses) - y, 0)


def lower(x, y, expenses):
    """Return the squared loss whose minimizer in y is the mean cost."""
    return 0.5 * (y - cost(x, expenses)) ** 2


def guessed(w, expenses):
    """Return a loss whose mean, at the best t, is the risk if the guess is right."""
    paid, t = cost(w[0], expenses), w[1]
    return (1 - GUESS) * paid + GUESS * t + jnp.maximum(paid - t, 0)


def single_loop(norm):
    """Return a solver of both levels with one clip norm."""
    rates = dict.fromkeys(("step_size", "lower_step_size", "linear_step_size"), 0.3)
    norms = {"clip_norm": norm, "upper_clip_norm": norm, "cross_clip_norm": norm / 2}
    return dpb.SingleLoopBilevel(100, **rates, **norms, output=TAIL)


def methods():
    """Return problem, solver and initial point by name."""
    x, y = jnp.full(len(SPREAD), 0.5), jnp.asarray(2.5)
    box = dpb.sets.Box(jnp.zeros_like(x), jnp.ones_like(x))
    mean = dpb.FiniteSum(cost, w_set=box)
    one = dpb.FiniteSum(guessed, w_set=dpb.sets.Product((box, dpb.sets.Euclidean())))
    two = dpb.BilevelProblem(upper, lower, x_set=box)
    return {
        "mean cost, NoisyGD": (mean, dpb.NoisyGD(100, 3.0, 0.3, output=TAIL), x),
        "one level, guess": (one, dpb.NoisyGD(100, 6.0, 0.3, output=TAIL), (x, y)),
        "two levels, SingleLoop": (two, single_loop(3.0), (x, y)),
    }


@jax.jit
def risk_euros(x, records):
    """Return the mean cost plus the mean excess over it, in euros."""
    paid = 1000 * jax.vmap(cost, (None, 0))(x, records)
    return jnp.mean(paid) + jnp.mean(jnp.maximum(paid - jnp.mean(paid), 0))


def main(smoke: bool, out: pathlib.Path) -> None:
    """Run all methods at equal budgets and compare what they release."""
    training, test = households(HOUSEHOLDS, seed=0), households(40_000, seed=1)
    keys = jax.random.split(dpb.root_key(), 5 if smoke else 15)  # as many budgets
    found, run = {}, jax.jit(dpb.solve)
    for name, (problem, solver, w0) in list(methods().items())[smoke:]:
        two = isinstance(problem, dpb.BilevelProblem)
        data = dpb.Levels.shared(training) if two else training
        sizes = dpb.Sizes(HOUSEHOLDS, HOUSEHOLDS, "shared") if two else HOUSEHOLDS
        for epsilon in (1.0,) if smoke else (1.0, 4.0):
            budget = dpb.PrivacyBudget(epsilon, delta=1e-5)
            plan = dpb.calibrate(problem, solver, budget, sizes=sizes, w0=w0)
            runs = [run(problem, plan.solver, data, w0, key=k).value for k in keys]
            shares = [w[0] if isinstance(w, tuple) else w for w in runs]
            found[name, epsilon] = [float(risk_euros(x, test)) for x in shares]
    print(plan.report)  # the guarantee of the last method
    quiet = single_loop(100.0).with_noise(1e-6).with_sizes(sizes)  # NON-PRIVATE
    best = run(problem, quiet, data, w0, key=keys[0]).x
    lines = {"oracle": best, "half of all covered": w0[0]}
    lines = {name: float(risk_euros(x, test)) for name, x in lines.items()}
    print("NON-PRIVATE evaluation: risk of test households, in euros")
    for (name, epsilon), values in found.items():
        low, middle, high = np.min(values), np.median(values), np.max(values)
        print(f"  {name:25}  {epsilon=:g}: {middle:.0f} ({low:.0f} to {high:.0f})")
    print(*(f"  {name}: {value:.0f}" for name, value in lines.items()), sep="\n")
    print("Two levels do NOT beat one level with a guess of the fraction.")
    if not smoke:
        draw(found, lines, out)
    *mean, guess, both = (np.median(v) for (_, e), v in found.items() if e == 1)
    assert both < min([*mean, lines["half of all covered"]]) - 30
    assert abs(both - guess) < 15


def draw(found, lines, out: pathlib.Path) -> None:
    """Save a figure of the risk of all runs."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3), layout="constrained")
    axes, names = figure.subplots(), [f"{n}, epsilon {e:g}" for n, e in found]
    for i, values in enumerate(found.values()):
        axes.plot(values, [-i] * len(values), ".", color=("#D55E00", "#0072B2")[i % 2])
    for (name, value), style in zip(lines.items(), ("--", ":"), strict=True):
        axes.axvline(value, color="0.4", linestyle=style, label=name)
    axes.set_yticks(-np.arange(len(names)), names)
    axes.set_xlabel("mean cost plus mean excess, euros, test households (NON-PRIVATE)")
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    out.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_png(out / "figure.png")
    print(f"figure: {out / 'figure.png'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="few runs, no figure")
    parser.add_argument("--out", type=pathlib.Path, default="runs/compositional_risk")
    arguments = parser.parse_args()
    main(arguments.smoke, arguments.out)
