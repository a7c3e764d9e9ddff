"""The host loop: what `solve` does, with losses from Python, and safe to interrupt."""

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpbilevel as dpb
from dpbilevel.search import ask_tell as searching
from tests.cases import slow

RECORDS = 0.2 + 0.3 * np.random.default_rng(0).normal(size=(30, 2))
BOX = dpb.sets.Box(-1.0, 1.0)
FINITE_SUM = dpb.FiniteSum(lambda w, z: jnp.sum((w - z) ** 2), w_set=BOX)
START = np.zeros(2)
BUDGET = dpb.PrivacyBudget(2.0, 1e-3)
SOLVERS = {
    "random_search": dpb.search.RandomSearch(12, 2.0),
    "repeat_and_select": dpb.search.RepeatAndSelect(12, 2.0, mean=2.0),
    "noisy_ucb": dpb.search.NoisyUCB(4, 2.0, num_candidates=20),
    "gradient_informative": dpb.search.GradientInformativeBO(
        3,
        1.0,
        step_size=0.3,
        batch=3,
        keep=8,
        polish=2,
        portfolio=dpb.search.Portfolio(5),
    ),
}
EVALUATIONS = {"random_search": 12, "repeat_and_select": 12, "noisy_ucb": 4}
EVALUATIONS["gradient_informative"] = 5 + 2 * 3
NAME = "noisy_ucb"
FINISHED = ["search.json", "spending.jsonl"]
# The search by gradients compiles longest.
QUICK = [name for name in SOLVERS if name != "gradient_informative"]
solvers = pytest.mark.parametrize("name", [*QUICK, *slow("gradient_informative")])


class Counted:
    """The losses of the records, counting calls, failing at one of them."""

    def __init__(self, fails_at=None):
        self.points, self.fails_at = [], fails_at

    def __call__(self, point):
        if len(self.points) == self.fails_at:
            raise RuntimeError("the cluster went away")
        self.points.append(point)
        return np.sum((point - RECORDS) ** 2, axis=1)


def black_box(losses=None):
    return dpb.search.BlackBox(Counted() if losses is None else losses, 30, BOX, "r")


def search(name="noisy_ucb", losses=None, key=0, **options):
    options = {"budget": BUDGET} | options
    return dpb.search.minimize(
        black_box(losses), SOLVERS[name], START, key=jax.random.key(key), **options
    )


def programs():
    """How many programs of steps were compiled in this process."""
    parts = searching._ask, searching._tell, searching._short_ask, searching._short_tell
    return [part._cache_size() for part in parts]


def same(left, right):
    return np.array_equal(left.value, right.value) and np.array_equal(
        left.trajectory, right.trajectory
    )


@pytest.fixture(scope="module")
def whole():
    return functools.cache(lambda name: search(name, trajectory=True))


@pytest.mark.parametrize(
    "name",
    [
        "noisy_ucb",
        *slow("gradient_informative"),
        pytest.param("random_search", marks=pytest.mark.slow),
        pytest.param("repeat_and_select", marks=pytest.mark.slow),
    ],
)
def test_search_is_solve_with_the_same_losses_and_key(name, whole):
    with jax.enable_x64(True):
        plan = dpb.calibrate(FINITE_SUM, SOLVERS[name], BUDGET, sizes=30)
        solution = jax.jit(dpb.solve, static_argnames="trajectory")(
            FINITE_SUM,
            plan.solver,
            jnp.asarray(RECORDS),
            jnp.asarray(START),
            key=jax.random.key(0),
            trajectory=True,
        )
        assert plan.report.epsilon == whole(name).report.epsilon
    np.testing.assert_allclose(whole(name).value, solution.value, rtol=1e-12)
    np.testing.assert_allclose(whole(name).trajectory, solution.trajectory, rtol=1e-12)
    assert whole(name).value.dtype == np.float64
    assert not np.array_equal(search(name, key=1).value, whole(name).value)


@solvers
def test_the_number_of_evaluations_is_fixed(name):
    for key in range(3):
        losses = Counted()
        search(name, losses, key)
        assert len(losses.points) == EVALUATIONS[name]


def test_nothing_is_compiled_twice():
    search("noisy_ucb")
    before = programs()
    louder = dpb.PrivacyBudget(1.0, 1e-3)
    search("noisy_ucb", lambda point: np.ones(30), key=5, budget=louder)
    assert before == programs()


@pytest.mark.parametrize(
    "name",
    ["noisy_ucb", *slow("repeat_and_select", "gradient_informative", "random_search")],
)
def test_programs_that_are_optimized_less_release_the_same(name, whole, monkeypatch):
    before = searching._ask._cache_size()
    monkeypatch.setattr(searching, "_SHORT", 0)
    found = search(name, trajectory=True)
    assert searching._ask._cache_size() == before + 1  # the control
    np.testing.assert_allclose(found.trajectory, whole(name).trajectory, rtol=1e-9)


def test_the_black_box_sees_its_own_point_in_float64_under_the_callers_setting():
    seen = []

    def losses(point):
        seen.append((point.copy(), jax.config.jax_enable_x64))
        point[:] = 7.0
        return np.ones(30)

    answer = search(losses=losses)
    assert {(p.dtype, p.shape, wide) for p, wide in seen} == {
        (np.dtype("f8"), (2,), False)
    }
    assert any(np.array_equal(answer.value, point) for point, _ in seen)


def test_a_plan_made_before_gives_the_same_run(whole):
    plan = dpb.calibrate(black_box(), SOLVERS[NAME], BUDGET, sizes=30)
    solution = dpb.search.minimize(
        black_box(), plan.solver, START, key=jax.random.key(0)
    )
    assert isinstance(solution, dpb.Solution)
    assert solution.trajectory is None
    np.testing.assert_allclose(solution.value, whole(NAME).value, rtol=1e-12)
    wider = dpb.search.BlackBox(lambda point: np.ones(31), 31, BOX)
    with pytest.raises(ValueError, match="the plan is for 30"):
        dpb.search.minimize(wider, plan.solver, START, key=jax.random.key(0))


SECRET = 0.123456789


@pytest.mark.parametrize(
    ("returned", "error", "words"),
    [
        (np.full(29, SECRET), ValueError, r"shape \(30,\), got shape \(29,\)"),
        (np.full((30, 1), SECRET), ValueError, r"got shape \(30, 1\)"),
        (SECRET, ValueError, r"got shape \(\)"),
        (np.full(30, SECRET, complex), TypeError, "complex128"),
        (np.full(30, SECRET).astype(str), TypeError, "real numbers"),
        ([[SECRET], [SECRET, 2.0]], ValueError, r"got shape \(2,\)"),
        (None, TypeError, "got NoneType"),
    ],
)
def test_losses_that_do_not_fit_are_refused_without_their_values(
    returned, error, words
):
    with pytest.raises(error, match=words) as caught:
        search(losses=lambda point: returned)
    assert str(SECRET)[2:6] not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


@pytest.mark.parametrize(
    "convert", [jnp.asarray, np.float32, list, lambda v: v.astype(np.int64)]
)
def test_any_vector_of_real_numbers_will_do(convert):
    search(losses=lambda point: convert(np.ones(30)))


@solvers
@pytest.mark.parametrize("bad", [np.nan, *slow(np.inf)])
def test_a_model_that_fails_counts_as_the_worst_there_is(name, bad):
    def losses(point):
        # The least loss is away from where models fail: a slope that tells the sides.
        return np.full(30, bad if point[0] < 0 else 0.5 - 0.4 * point[0])

    # One that repeats a random number of times may see nothing but failures: a third of
    # its runs are on that side, and two thirds were if failures counted as the best.
    keys = range(8) if name == "repeat_and_select" else [0]
    budget = dpb.PrivacyBudget(200.0, 1e-3)
    found = [search(name, losses, key, budget=budget).value[0] > 0 for key in keys]
    assert np.mean(found) > 0.5


def test_losses_of_single_records_may_be_nan():
    def losses(point):
        found = np.sum((point - RECORDS) ** 2, axis=1)
        found[3] = np.nan
        return found

    assert np.isfinite(search(losses=losses).value).all()


class Private(dpb.search.NoisyUCB):
    def ask(self, problem, state, *, key):
        problem.losses(np.zeros(2))
        return dpb.search.NoisyUCB.ask(self, problem, state, key=key)


def searched(solver=None, problem=None, w0=START, **options):
    solver = SOLVERS[NAME] if solver is None else solver
    problem = black_box() if problem is None else problem
    options = {"key": jax.random.key(0), "budget": BUDGET} | options
    return dpb.search.minimize(problem, solver, w0, **options)


ADD_OR_REMOVE = dpb.Neighbours.ADD_OR_REMOVE_ONE


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (
            {"solver": dpb.NoisyGD(3, 1.0, step_size=0.1)},
            TypeError,
            r"losses, .*got NoisyGD",
        ),
        ({"solver": dpb.search.NoisyUCB}, TypeError, r"losses, .*got NoisyUCB"),
        ({"w0": [0.0, 0.0]}, ValueError, r"got \[\(\), \(\)\] in a list"),
        ({"problem": FINITE_SUM}, TypeError, "instance of BlackBox"),
        ({"key": 0}, TypeError, "typed key"),
        ({"w0": np.zeros((2, 1))}, ValueError, "w0 must be one vector"),
        ({"w0": (START[0], START[1:])}, ValueError, r"(d,).*got \(\(\), "),
        ({"w0": np.zeros(2, int)}, ValueError, "floating-point array"),
        ({"w0": np.full(2, np.nan)}, ValueError, "NaN or infinity"),
        (
            {"problem": dpb.search.BlackBox(Counted(), 30, dpb.sets.Ball(1.0))},
            ValueError,
            "a finite Box",
        ),
        (
            {"problem": dpb.search.BlackBox(Counted(), 30, dpb.sets.Box(0.0, jnp.inf))},
            ValueError,
            "a finite Box",
        ),
        (
            {"solver": dpb.search.NoisyUCB(4, 2.0, neighbours=ADD_OR_REMOVE)},
            ValueError,
            "Use REPLACE_ONE",
        ),
        ({"solver": Private(4, 2.0)}, TypeError, "must not call losses"),
    ],
)
def test_what_cannot_be_searched_is_refused(change, error, words):
    with pytest.raises(error, match=words):
        searched(**change)


def test_solve_and_fit_send_black_boxes_to_search():
    plan = dpb.calibrate(black_box(), SOLVERS[NAME], BUDGET, sizes=30)
    with pytest.raises(TypeError, match=r"run it by dpbilevel.search.minimize"):
        dpb.solve(black_box(), plan.solver, None, START, key=jax.random.key(0))
    with pytest.raises(TypeError, match=r"run it by dpbilevel.search.minimize"):
        dpb.fit(
            black_box(),
            SOLVERS[NAME],
            None,
            START,
            budget=BUDGET,
            key=jax.random.key(0),
        )


def test_progress_tells_steps_and_evaluations_and_no_loss(capsys):
    search("random_search", lambda point: np.full(30, SECRET), progress=True)
    shown = capsys.readouterr().err
    assert "1/1" in shown
    assert "evaluations=12" in shown
    # Rates of the bar, in steps a second, are numbers of two digits, too.
    assert "0.123" not in re.sub(r"[\d.]+step/s", "", shown)


def test_the_report_says_what_a_black_box_must_keep_to(whole):
    texts = whole(NAME).report.assumptions
    assert any("every record changes its own loss only" in text for text in texts)
    assert any("training data and other inputs" in text for text in texts)


@pytest.mark.slow
def test_the_examples_of_the_pages_run_in_their_order(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    docs = Path(__file__).parents[2] / "docs"
    # As the first block has them, so that nothing more is compiled.
    names = {"np": np, "dpb": dpb}
    for page in ("private_search.md", "black_box.md"):
        for part in (docs / page).read_text().split("```python\n")[1:]:
            code = part.split("```")[0]
            code = re.sub(r"num_steps=2\d,", "num_steps=2,", code)
            if "PrivateSearch" not in code:  # docs/coming_from/scikit_learn.md has it
                exec(compile(code, page, "exec"), names)
    assert "ENFORCED: epsilon = 1 at delta = 1e-06" in capsys.readouterr().out


def test_a_solver_without_noise_is_refused_before_the_first_evaluation():
    for solver in SOLVERS.values():
        counted = Counted()
        with pytest.raises(ValueError, match="give budget="):
            dpb.search.minimize(
                black_box(counted), solver, START, key=jax.random.key(0)
            )
        assert not counted.points


def test_a_search_inside_a_program_is_refused():
    with pytest.raises(TypeError, match="cannot be used inside"):
        jax.jit(
            lambda w: (
                dpb.search.minimize(
                    black_box(), SOLVERS[NAME], w, budget=BUDGET, key=jax.random.key(0)
                ).value
            )
        )(jnp.zeros(2))


@pytest.mark.filterwarnings("ignore:A JAX array is being set as static")
def test_records_in_the_wrong_place_are_not_shown():
    for arguments in ((RECORDS, 30), (lambda point: point, RECORDS)):
        with pytest.raises((TypeError, ValueError)) as error:
            dpb.search.BlackBox(*arguments)
        assert "0." not in str(error.value)


def test_lazily_imported_names_are_listed():
    assert {"PrivateSearch", "search"} <= set(dir(dpb))


def test_a_loss_of_nan_stops_no_run_that_is_debugged():
    def losses(point):
        return np.where(np.arange(30) == 3, np.nan, np.ones(30))

    with jax.debug_nans(True):
        found = search("noisy_ucb", losses).value
    np.testing.assert_array_equal(found, search("noisy_ucb", losses).value)
