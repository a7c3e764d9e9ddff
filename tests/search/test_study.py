"""What users of Optuna rely on: the queue, trial numbers, ranges, failures."""

import jax
import numpy as np
import pytest

import dpbilevel as dpb
from tests.search.test_optuna import (
    BEST,
    RANDOM,
    RECORDS,
    UCB,
    Float,
    Int,
    Objective,
    optuna,
    released,
    states,
    studied,
)

QUEUE = [{"x": 0.3, "kind": "far"}, {"x": -0.7, "kind": "near"}]
BATCHES = dpb.search.GradientInformativeBO(2, 1.0, step_size=0.1, batch=2)


class Seeing(Objective):
    """Keeps the number and the parameters of each trial, and the study's states."""

    def __init__(self, study):
        super().__init__()
        self.study, self.seen = study, []

    def __call__(self, trial):
        losses = super().__call__(trial)
        self.seen.append((trial.number, dict(trial.params), states(self.study)))
        return losses

    @property
    def numbers(self):
        return [number for number, *_ in self.seen]


@pytest.mark.parametrize("solver", [UCB, RANDOM])
def test_queued_trials_come_first_under_their_numbers(solver):
    study = optuna.create_study()
    study.add_trial(optuna.trial.create_trial(value=1.0))
    for params in QUEUE:
        study.enqueue_trial(params, user_attrs={"mine": 1})
    objective = Seeing(study)
    answer = studied(study, objective, solver)
    assert [params for _, params, _ in objective.seen[:2]] == QUEUE
    assert objective.numbers == [*range(1, 1 + solver.most_evaluations)]
    first, second = study.get_trials()[1:3]
    assert [first.params, second.params] == QUEUE
    assert first.user_attrs["mine"] == 1
    if solver is UCB:
        assert [params for params, _ in answer.trials[:2]] == QUEUE
        assert [first.value, second.value] == released(answer)[:2]


@pytest.mark.slow
def test_a_queue_that_is_longer_than_the_search_goes_on_waiting():
    study = optuna.create_study()
    for j in range(7):
        study.enqueue_trial({"x": j / 10, "kind": "near"})
    objective = Seeing(study)
    studied(study, objective, UCB)
    assert [params["x"] for _, params, _ in objective.seen] == [0, 0.1, 0.2, 0.3, 0.4]
    assert states(study) == 5 * ["COMPLETE"] + 2 * ["WAITING"]
    starts = np.zeros((19, 2))
    own = dpb.search.RandomSearch(20, 2.0, starts=starts)
    objective = Seeing(study)
    with pytest.warns(dpb.PrivacyWarning, match="a further release"):
        studied(study, objective, own)
    assert [params["x"] for _, params, _ in objective.seen[:2]] == [0.5, 0]
    assert states(study)[6] == "WAITING"


@pytest.mark.slow
def test_a_queued_trial_may_leave_parameters_open_and_has_steps():
    space = {"a": Float(0.1, 1.0, step=0.3), "b": Int(2, 11, step=3), "c": Float(1, 9)}
    seen = []

    def objective(trial):
        trial.suggest_float("a", 0.1, 1.0, step=0.3)
        trial.suggest_int("b", 2, 11, step=3)
        trial.suggest_float("c", 1, 9)
        seen.append(trial.params)
        return np.zeros(200)

    study = optuna.create_study()
    study.enqueue_trial({"a": 0.7, "b": 8})
    studied(study, objective, UCB, space)
    assert (seen[0]["a"], seen[0]["b"]) == (0.7, 8)
    assert 1 <= seen[0]["c"] <= 9
    assert study.trials[0].params == seen[0]


@pytest.mark.parametrize(
    ("params", "solver", "words"),
    [
        (
            {"x": 7.0},
            UCB,
            "queued trial 0 has .*7.0.*Declare these, or drop",
        ),
        ({"z": 0.0}, UCB, "queued trial 0 has .*'z'"),
        ({"kind": "nearby"}, RANDOM, "queued trial 0 has .*'nearby'"),
        ({"x": 0.1}, BEST, "takes no queued trials"),
    ],
)
def test_a_queue_that_does_not_fit_is_refused_and_stays(params, solver, words):
    study = optuna.create_study()
    study.enqueue_trial(params)
    objective = Objective()
    with pytest.raises(ValueError, match=words):
        studied(study, objective, solver)
    assert not objective.secrets
    assert states(study) == ["WAITING"]
    study.tell(study.ask(), state=optuna.trial.TrialState.FAIL)  # as the message says
    studied(study, objective, solver)


def test_a_search_that_cannot_start_leaves_the_queue():
    study = optuna.create_study()
    for params in QUEUE:
        study.enqueue_trial(params, user_attrs={"mine": 1})
    with pytest.raises(ValueError, match="one per record"):
        studied(study, lambda trial: np.zeros(3), UCB)
    assert states(study) == ["FAIL", "FAIL", "WAITING"]  # the second waits again
    with pytest.raises(TypeError, match="instance of PrivacyBudget"):
        studied(study, Objective(), UCB, budget=4.0)
    waiting = study.get_trials()[-1]
    assert waiting.state.name == "WAITING"
    assert waiting.system_attrs["fixed_params"] == QUEUE[1]
    assert waiting.user_attrs == {"mine": 1}


def test_a_search_goes_on_with_the_queue_that_it_began_with(tmp_path):
    class Stopping(Objective):
        def __call__(self, trial):
            if len(self.secrets) == 7:
                raise RuntimeError("the cluster went away")
            return super().__call__(trial)

    options = {"solver": UCB, "folder": tmp_path, "records": "r"}
    study = optuna.create_study()
    for params in QUEUE:
        study.enqueue_trial(params)
    with pytest.raises(RuntimeError):
        studied(study, Stopping(), **options)
    assert states(study) == ["COMPLETE", "FAIL"]
    study.enqueue_trial({"x": 0.9, "kind": "far"})
    objective = Seeing(study)
    answer = studied(study, objective, **options)
    assert objective.seen[0][1]["x"] == pytest.approx(-0.7)
    assert len(objective.seen) == 4
    assert states(study)[2] == "WAITING"
    assert [t.value for t in study.get_trials() if t.value] == released(answer)


@pytest.mark.parametrize("solver", [UCB, RANDOM, BEST])
def test_a_trial_runs_while_it_is_evaluated_and_no_other_does(solver):
    study, ended = optuna.create_study(), "COMPLETE" if solver is UCB else "PRUNED"
    objective = Seeing(study)
    studied(study, objective, solver)
    for number, _, seen in objective.seen:
        assert seen == number * [ended] + ["RUNNING"]
    assert objective.numbers == [*range(solver.most_evaluations)]
    assert "RUNNING" not in states(study)


def test_the_study_does_not_tell_which_run_was_selected():
    """Its number would tell how many runs there were, which costs nothing if hidden."""
    study = optuna.create_study()
    objective = Seeing(study)
    answer = studied(study, objective, BEST)
    ((best, value),) = answer.trials
    *hidden, last = study.get_trials()
    assert len(hidden) == len(objective.seen)
    assert (last.params, last.value) == (best, value)
    assert best in [params for _, params, _ in objective.seen]
    attributes = {str(trial.user_attrs) for trial in hidden}
    assert len(attributes) == 1
    assert not [v for v in hidden if v.params or v.values or v.state.name != "PRUNED"]


def suggest(**other):
    def objective(trial):
        found = {
            "x": lambda: trial.suggest_float("x", -1.0, 1.0),
            "kind": lambda: trial.suggest_categorical("kind", ["near", "far"]),
        } | {name: lambda call=call: call(trial) for name, call in other.items()}
        for call in found.values():
            call()
        return np.zeros(200)

    return objective


@pytest.mark.parametrize(
    ("objective", "words"),
    [
        (suggest(x=lambda t: t.suggest_float("x", -5, 5)), "from .*5.0.* declares"),
        (suggest(x=lambda t: t.suggest_int("x", -1, 1)), "Write the same in both"),
        (
            suggest(kind=lambda t: t.suggest_categorical("kind", ["near"])),
            "'kind' from",
        ),
        (suggest(z=lambda t: t.suggest_float("z", 0, 1)), "'z' from .* declares None"),
    ],
)
@pytest.mark.parametrize("catch", [(), Exception])
def test_ranges_that_differ_and_unknown_names_are_refused(objective, words, catch):
    study = optuna.create_study()
    with pytest.raises(ValueError, match=words):
        studied(study, objective, UCB, catch=catch)
    assert states(study) == ["FAIL"]


def test_an_exception_that_is_caught_counts_as_the_worst_for_everyone():
    class Failing(Objective):
        def __call__(self, trial):
            losses = super().__call__(trial)
            if len(self.secrets) == 2 * 7:
                raise FloatingPointError(f"loss {RECORDS[0]}")
            return losses

    study, loud = optuna.create_study(), dpb.PrivacyBudget(1e4, 1e-5)
    answer = studied(study, Failing(), UCB, catch=FloatingPointError, budget=loud)
    assert states(study) == ["COMPLETE", "FAIL", *3 * ["COMPLETE"]]
    assert released(answer)[1] == pytest.approx(2.0, abs=0.01)  # the clip range
    assert str(RECORDS[0]) not in str([vars(t) for t in study.get_trials()])
    assert [v for v in answer.report.assumptions if "catch= names" in v]
    with pytest.raises(FloatingPointError):
        studied(optuna.create_study(), Failing(), UCB, catch=(ValueError,))
    plain = studied(optuna.create_study(), Objective(), UCB)
    assert not [v for v in plain.report.assumptions if "catch=" in v]


class Pruning(Objective):
    """Fails at its second call, by an exception with a loss in its text."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.calls = kind, 0

    def __call__(self, trial):
        self.calls += 1
        if self.calls == 2:
            raise self.kind(f"loss {RECORDS[0]}")
        return super().__call__(trial)


def test_a_failed_evaluation_leaves_the_one_release_of_hidden_runs_in_the_study():
    study = optuna.create_study()
    objective = Pruning(FloatingPointError)
    answer = studied(study, objective, BEST, catch=FloatingPointError)
    assert "FAIL" in states(study)
    kept = [v for v in study.get_trials() if v.value is not None]
    assert [v.value for v in kept] == released(answer)
    assert [v.params for v in kept] == [answer.params]
    assert study.best_params == answer.params


def test_pruning_is_refused_without_the_words_of_the_objective():
    study = optuna.create_study()
    with pytest.raises(ValueError, match="pruning is not supported") as error:
        studied(study, Pruning(optuna.TrialPruned), UCB)
    assert str(RECORDS[0]) not in str(error.value)
    assert error.value.__suppress_context__
    assert states(study)[1] == "FAIL"


@pytest.mark.parametrize("catch", [RuntimeError("no"), [3], KeyboardInterrupt, None])
def test_what_is_no_exception_cannot_be_caught(catch):
    with pytest.raises(TypeError, match="catch must be exception classes"):
        studied(optuna.create_study(), Objective(), catch=catch)


@pytest.mark.slow
def test_a_second_search_of_a_study_warns_and_takes_the_first_answer_first():
    study = optuna.create_study()
    first = studied(study, Objective())
    objective = Seeing(study)
    with pytest.warns(dpb.PrivacyWarning, match="a further release: .* add up"):
        studied(study, objective, UCB, key=1)
    assert objective.seen[0][1] == first.params
    assert len(set(objective.numbers)) == 5
    with pytest.warns(dpb.PrivacyWarning, match="a further release"):
        studied(study, Objective(), BEST, key=2)


@pytest.mark.slow
def test_starts_of_noisy_ucb_are_evaluated_first():
    starts = np.asarray([[0.3, -0.2], [3.0, 0.0]])
    solver = dpb.search.NoisyUCB(3, 2.0, num_candidates=20, starts=starts)
    seen = []

    def losses(point):
        seen.append(point.copy())
        return np.ones(30)

    problem = dpb.search.BlackBox(losses, 30, dpb.sets.Box(-1.0, 1.0))
    budget = dpb.PrivacyBudget(2.0, 1e-3)
    key = jax.random.key(0)
    dpb.search.minimize(problem, solver, np.zeros(2), key=key, budget=budget)
    np.testing.assert_array_equal(seen[:2], [[0.3, -0.2], [1.0, 0.0]])
    with pytest.raises(ValueError, match="num_steps=1 is below 2 starts"):
        dpb.search.NoisyUCB(1, 2.0, starts=starts)
    flat = dpb.search.NoisyUCB(3, 2.0, starts=starts[0])
    with pytest.raises(ValueError, match=r"starts need shape \(k, 2\)"):
        dpb.search.minimize(
            problem, flat, np.zeros(2), key=jax.random.key(1), budget=budget
        )
