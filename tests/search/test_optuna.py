"""Studies of Optuna: what is released goes into them, and no loss."""

import pickle
import struct

import jax
import numpy as np
import pytest

import dpbilevel as dpb
from tests.cases import slow
from tests.contract.test_imports import output

optuna = pytest.importorskip("optuna")
optuna.logging.set_verbosity(optuna.logging.WARNING)
Float = optuna.distributions.FloatDistribution
Int = optuna.distributions.IntDistribution
Choice = optuna.distributions.CategoricalDistribution

RECORDS = 0.3 + 0.2 * np.random.default_rng(0).normal(size=200)
SPACE = {"x": Float(-1.0, 1.0), "kind": Choice(["near", "far"])}
RANDOM = dpb.search.RandomSearch(20, 2.0)
UCB = dpb.search.NoisyUCB(5, 2.0, num_candidates=20)
BEST = dpb.search.RepeatAndSelect(40, 2.0, mean=2.0)
BUDGET = dpb.PrivacyBudget(4.0, 1e-5)


class Objective:
    """Every record's loss; says it to its trial by all ways that there are."""

    def __init__(self):
        self.secrets = []

    def __call__(self, trial):
        x = trial.suggest_float("x", -1.0, 1.0)
        kind = trial.suggest_categorical("kind", ["near", "far"])
        losses = (x - RECORDS) ** 2 + (kind == "far") * RECORDS**2
        self.secrets += [*losses[:5], losses.mean(), np.clip(losses, 0, 2).mean()]
        trial.report(float(losses.mean()), step=0)
        trial.set_user_attr("losses", losses.tolist())
        assert not trial.should_prune()
        return losses


def studied(study, objective, solver=RANDOM, space=SPACE, key=0, **options):
    options = {"num_records": 200, "budget": BUDGET} | options
    return dpb.search.optimize_study(
        study, objective, space, solver, key=jax.random.key(key), **options
    )


def states(study):
    return [trial.state.name for trial in study.get_trials()]


def released(answer):
    return [value for _, value in answer.trials]


@pytest.fixture
def stored(tmp_path):
    """A study in a file, and what the file and the study hold."""
    file = tmp_path / "study.db"
    storage = optuna.storages.RDBStorage(f"sqlite:///{file}")
    study = optuna.create_study(storage=storage)

    def content():
        trials = [pickle.dumps(trial) for trial in study.get_trials()]
        attributes = str([trial.user_attrs for trial in study.get_trials()])
        return b"".join([file.read_bytes(), *trials, attributes.encode()])

    yield study, content
    storage.remove_session()
    storage.engine.dispose()


def holds(content, number):
    """Whether bytes hold a number, as one of either order or as text."""
    forms = struct.pack("<d", number), struct.pack(">d", number)
    return any(form in content for form in (*forms, f"{number:.9f}"[:-1].encode()))


@pytest.mark.parametrize(
    "solver", [RANDOM, *slow(UCB), pytest.param(BEST, marks=pytest.mark.slow)]
)
def test_no_loss_of_a_record_and_no_mean_is_in_the_storage(solver, stored):
    study, content = stored
    objective = Objective()
    answer = studied(study, objective, solver)
    assert len(objective.secrets) >= 5 * 7
    assert not [v for v in objective.secrets if holds(content(), v)]
    for params, value in answer.trials:  # the control: what is released is there
        assert holds(content(), params["x"])
        assert holds(content(), value)


def test_a_plain_study_has_the_losses():
    """The control."""
    study, objective = optuna.create_study(), Objective()
    study.optimize(lambda trial: float(objective(trial).mean()), n_trials=2)
    content = b"".join(pickle.dumps(trial) for trial in study.get_trials())
    assert [v for v in objective.secrets if holds(content, v)]


def test_noisy_losses_become_finished_trials():
    study = optuna.create_study()
    answer = studied(study, Objective(), UCB)
    trials = study.get_trials()
    assert [trial.state.name for trial in trials] == 5 * ["COMPLETE"]
    assert [(t.params, t.value) for t in trials] == list(answer.trials)
    assert study.best_value == min(value for _, value in answer.trials)
    for trial in trials:
        exact = np.clip(Objective()(optuna.trial.FixedTrial(trial.params)), 0, 2)
        assert 0 < abs(trial.value - exact.mean()) < 0.2
        assert trial.user_attrs["privacy"].startswith("epsilon = 4 at delta = 1e-05")
        assert not trial.intermediate_values
    assert answer.params in [trial.params for trial in trials]


def test_where_no_loss_is_released_the_answer_waits_for_public_records():
    study = optuna.create_study()
    answer = studied(study, Objective(), budget=dpb.PrivacyBudget(50.0, 0.0))
    *hidden, trial = study.get_trials()
    assert [v.state.name for v in hidden] == 20 * ["PRUNED"]
    assert not [v for v in hidden if v.params or v.value is not None]
    assert trial.state.name == "WAITING"
    assert "not released" in trial.user_attrs["loss"]
    assert answer.params["kind"] == "near"
    assert abs(answer.params["x"] - RECORDS.mean()) < 0.2
    seen = []

    def on_public_records(trial):
        trial.suggest_float("x", -1.0, 1.0)
        trial.suggest_categorical("kind", ["near", "far"])
        seen.append(trial.params)
        return 0.5

    study.optimize(on_public_records, n_trials=1)
    assert seen == [answer.params]
    assert study.best_params == answer.params


def test_a_study_that_stopped_goes_on_and_is_added_once(tmp_path):
    class Stopping(Objective):
        def __call__(self, trial):
            if len(self.secrets) >= 3 * 7:
                raise RuntimeError("the cluster went away")
            return super().__call__(trial)

    options = {"solver": UCB, "folder": tmp_path / "run", "records": "r"}
    study = optuna.create_study()
    with pytest.raises(RuntimeError):
        studied(study, Stopping(), **options)
    assert states(study) == 3 * ["COMPLETE"] + ["FAIL"]
    objective = Objective()
    answer = studied(study, objective, key=1, **options)
    assert len(objective.secrets) == 2 * 7
    with pytest.warns(UserWarning, match="finished run"):
        again = studied(study, objective, **options)
    assert again == answer
    assert states(study) == 3 * ["COMPLETE"] + ["FAIL"] + 2 * ["COMPLETE"]
    assert [t.value for t in study.get_trials() if t.value] == released(answer)
    whole = options | {"folder": tmp_path / "whole"}
    assert studied(optuna.create_study(), Objective(), **whole) == answer
    with pytest.warns(dpb.PrivacyWarning, match="a further release: .* add up"):
        studied(study, Objective(), UCB)
    assert states(study)[6:] == 5 * ["COMPLETE"]


def test_the_ledger_of_a_study_has_its_trainings():
    training = dpb.search.DeclaredTraining.gdp(0.01, 1_000)
    report = studied(
        optuna.create_study(), Objective(), training=training, trainings_after=1
    ).report
    (row,) = (row for row in report.ledger if row.declared is not None)
    assert row.count == RANDOM.num_candidates + 1


@pytest.mark.slow
def test_every_value_of_a_distribution_comes_up_and_no_other():
    space = {
        "a": Float(0.1, 1.0, step=0.3),
        "b": Int(2, 11, step=3),
        "c": Int(1, 3),
        "d": Float(1e-3, 1e3, log=True),
        "e": Int(1, 1000, log=True),
        "f": Choice([None, True, 3, 0.5, "text"]),
    }
    seen = {name: [] for name in space}

    def objective(trial):
        trial.suggest_float("a", 0.1, 1.0, step=0.3)
        trial.suggest_int("b", 2, 11, step=3)
        trial.suggest_int("c", 1, 3)
        trial.suggest_float("d", 1e-3, 1e3, log=True)
        trial.suggest_int("e", 1, 1000, log=True)
        trial.suggest_categorical("f", [None, True, 3, 0.5, "text"])
        for name, value in trial.params.items():
            seen[name].append(value)
        return np.zeros(200)

    study = optuna.create_study()
    studied(study, objective, dpb.search.RandomSearch(200, 2.0), space)
    assert sorted(set(np.round(seen["a"], 9))) == [0.1, 0.4, 0.7, 1.0]
    assert max(seen["a"]) <= 1.0
    assert sorted(set(seen["b"])) == [2, 5, 8, 11]
    assert sorted(set(seen["c"])) == [1, 2, 3]
    assert {type(v) for name in "bce" for v in seen[name]} == {int}
    assert len(set(map(repr, seen["f"]))) == 5
    logs = np.log10(seen["d"])
    assert abs(np.mean(logs)) < 0.5
    assert (np.abs(logs) <= 3).all()
    assert min(seen["e"]) < 10
    assert max(seen["e"]) > 100


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"space": {}}, ValueError, "names no parameter"),
        ({"space": {"x": (0, 1)}}, TypeError, r"\['x'\] must be an instance of Float"),
        ({"space": {"x": Float(1.0, 1.0)}}, ValueError, "'x' has one value"),
        ({"space": [Float(0.0, 1.0)]}, TypeError, "instance of Mapping"),
        (
            {"solver": dpb.search.GradientInformativeBO(2, 1.0, step_size=0.1)},
            ValueError,
            "takes no category",
        ),
        ({"solver": dpb.NoisyGD(3, 1.0, step_size=0.1)}, TypeError, "asks for losses"),
        ({"num_records": 199}, ValueError, r"shape \(199,\), got shape \(200,\)"),
        ({"folder": "run"}, ValueError, "by BlackBox"),
    ],
)
def test_what_does_not_fit_is_named(change, error, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=words):
        studied(optuna.create_study(), Objective(), **change)


@pytest.mark.parametrize("directions", [["maximize"], ["minimize", "minimize"]])
def test_studies_with_other_directions_are_refused(directions):
    study = optuna.create_study(directions=directions)
    with pytest.raises(ValueError, match="the study must minimize"):
        studied(study, Objective())
    with pytest.raises(TypeError, match="study must be an instance of Study"):
        studied(None, Objective())


@pytest.mark.slow
def test_without_optuna_a_message_says_what_to_install():
    code = """import sys; sys.modules["optuna"] = None
import dpbilevel
try:
    dpbilevel.search.optimize_study(None, None, {}, None, num_records=1, budget=None,
                                    key=None)
except ImportError as error:
    print(error)"""
    assert output(code).strip() == (
        "optimize_study needs optuna: run pip install -e '.[optuna]' in a clone of "
        "dpbilevel, or pip install optuna"
    )
