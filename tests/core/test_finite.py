"""No run ends in NaN, and what was left out for that is counted and told."""

import dataclasses
import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpbilevel as dpb
from dpbilevel._checks import Positive
from dpbilevel.cli import main as cli
from dpbilevel.core.descent import Descent, Rule, SkippedUpdates, finite_or
from tests.cases import found, slow
from tests.cli.test_runner import GENERATED
from tests.problems import EXACT, IN_BOX, LOWER, Y0

SOLVERS = found("CONTRACT")
BUDGET = dpb.PrivacyBudget(1.0, 1e-5)
INNER = dpb.NoisyGD(num_steps=8, clip_norm=1.0, step_size=1.0)
# The README's solver.
README = dpb.PenaltyBilevel(num_steps=15, penalty=10.0, step_size=5.0, inner=INNER)


# Compiled once for all numbers.
solve = jax.jit(dpb.solve, static_argnames="trajectory")


def run(case, scale=1.0, **options):
    """The case's solution with this noise."""
    solver = case.solver.with_noise(scale).with_sizes(case.sizes)
    key = jax.random.key(0)
    return solve(case.problem, solver, case.data, case.w0, key=key, **options)


def finite(tree):
    return all(np.isfinite(v).all() for v in jax.tree.leaves(tree))


def breast_cancer():
    sklearn = pytest.importorskip("sklearn.datasets")
    features, label = sklearn.load_breast_cancer(return_X_y=True)
    features = (features - features.mean(0)) / features.std(0)
    order = np.random.default_rng(0).permutation(len(label))
    records = {
        "features": jnp.asarray(features[order], jnp.float32),
        "label": jnp.asarray(2.0 * label[order] - 1, jnp.float32),
    }
    half, rest = len(label) // 2, len(label) // 2 + len(label) // 4
    parts = (slice(half), slice(half, rest), slice(rest, None))
    return [jax.tree.map(lambda v, part=part: v[part], records) for part in parts]


@pytest.mark.slow
def test_penalties_of_breast_cancer_are_tuned_without_nan():
    training, validation, test = breast_cancer()
    problem = dpb.penalty_tuning(dpb.logistic_loss, jnp.arange(30))
    wide = dpb.sets.Box(jnp.full(30, -8.0), jnp.full(30, 2.0))
    data = dpb.Levels(validation, training)
    sizes = dpb.Sizes(len(validation["label"]), len(training["label"]), "disjoint")
    solver = dpb.calibrate(problem, README, BUDGET, sizes=sizes).solver

    @jax.jit
    def run(problem, keys):
        start = jnp.zeros(30), jnp.zeros(30)
        return jax.vmap(lambda k: dpb.solve(problem, solver, data, start, key=k))(keys)

    for seed, x_set in enumerate((problem.x_set, wide)):
        keys = jax.random.split(jax.random.key(seed), 20)
        solution = run(dataclasses.replace(problem, x_set=x_set), keys)
        assert finite(solution)
        assert not np.any(solution.rejected_updates)
        right = jnp.sign(solution.y @ test["features"].T) == test["label"][None]
        assert np.median(right.mean(1)) > 0.85


def steep(w):
    return 50.0 * jnp.sum(w**2)


def quiet(solver):
    return dataclasses.replace(solver, noise_multiplier=0.0, precision="float")


@pytest.mark.slow
def test_step_beyond_public_curvature_ends_at_the_minimum_of_the_public_term():
    problem = dpb.FiniteSum(lambda w, r: 0.0 * jnp.sum(w), steep)
    solver = quiet(dpb.NoisyGD(1, 1.0, step_size=7.0))
    solution = solve(problem, solver, LOWER, Y0 + 1, key=jax.random.key(0))
    np.testing.assert_allclose(solution.value, 0, atol=1e-6)
    # The control: an optimizer of one's own is followed as it is.
    own = dataclasses.replace(solver, step_size=optax.sgd(7.0))
    solution = solve(problem, own, LOWER, Y0 + 1, key=jax.random.key(0))
    np.testing.assert_allclose(solution.value, 1 - 700.0)


def test_shorter_steps_do_not_move_the_solution():
    def loss(w, r):
        return 0.5 * jnp.sum((w - r["features"]) ** 2)

    def public(w):
        return 0.5 * jnp.sum(jnp.asarray([0.1, 1.0, 3.0, 9.0]) * w**2)

    solver = quiet(dpb.NoisyGD(300, 1e3, step_size=0.8))
    problem = dpb.FiniteSum(loss, public)
    w = dpb.solve(problem, solver, LOWER, Y0, key=jax.random.key(0)).value
    expected = LOWER["features"].mean(0) / jnp.asarray([1.1, 2.0, 4.0, 10.0])
    np.testing.assert_allclose(w, expected, atol=1e-5)


@pytest.mark.slow
def test_step_within_public_curvature_is_not_shortened():
    problem = dpb.FiniteSum(dpb.logistic_loss, lambda w: 0.3 * jnp.sum(w**2))
    plain = quiet(dpb.NoisyGD(5, 1.0, step_size=1.5))
    own = dataclasses.replace(plain, step_size=optax.sgd(1.5))
    answers = [
        np.asarray(dpb.solve(problem, s, LOWER, Y0, key=jax.random.key(0)).value)
        for s in (plain, own)
    ]
    np.testing.assert_array_equal(*answers)


HUGE = optax.sgd(1e30, momentum=0.9)


def divergent(name):
    """The case without sets, its solver with steps of length 1e30."""
    case = SOLVERS[name]
    problem = case.problem
    # Proximal terms take no optimizer; without momentum steps have to be longer.
    solver = moved_far(case.solver, 3e38 if "proximal" in name else HUGE)
    free = dpb.sets.Euclidean()
    sets = {k: free for k in ("x_set", "y_set", "w_set") if hasattr(problem, k)}
    if isinstance(problem, dpb.games.SaddleProblem):
        sets = {"x_set": free, "y_set": free}
    if isinstance(problem, dpb.games.GroupGame):  # on a simplex; ridges shorten steps
        sets = {"x_set": free, "public": None}
    problem = dataclasses.replace(problem, **sets)
    return dataclasses.replace(case, problem=problem, solver=solver)


def moved_far(solver, huge):
    """The solver and its parts with huge steps."""
    if isinstance(solver, dpb.onelevel.LocalizedGD):  # which has no step size
        radii = tuple(1e37 for _ in solver.radii)
        return dataclasses.replace(solver, strong_convexity=1e-39, radii=radii)
    parts: dict[str, object] = {
        name: moved_far(part, huge)
        for name, part in vars(solver).items()
        if isinstance(part, dpb.AbstractSolver)
    }
    steps = {
        # A number alone, or an optimizer as well.
        field.name: 1e30 if field.type in (Positive, Positive | None) else huge
        for field in dataclasses.fields(solver)
        if field.name.endswith("step_size")
    }
    if "momentum" in vars(solver):  # the optimizer has its own
        parts["momentum"] = None
    return dataclasses.replace(solver, **parts, **steps)


def moves(case):
    """Whether steps along clipped gradients may go anywhere."""
    fields = {*vars(case.solver)} & {"step_size", "search", "radii"}
    clipped = case.solver.basis is dpb.privacy.Basis.CLIPPED
    return fields and clipped and case.package != "search"


FREE = {name: case for name, case in SOLVERS.items() if moves(case)}
AT_ONCE = ("noisy_gd_adam",)
MOVING = [*AT_ONCE, *slow(*(name for name in FREE if name not in AT_ONCE))]


@pytest.mark.parametrize("name", MOVING)
def test_diverging_run_stays_finite_and_says_how_often(name):
    solution = run(divergent(name), trajectory=True)
    assert finite((solution.value, solution.trajectory))
    assert int(solution.rejected_updates) > 0


@pytest.mark.slow
def test_certified_solver_that_diverges_stays_finite():
    solver = dpb.ImplicitBilevel(3, step_size=HUGE, output=dpb.outputs.Last())
    problem = dataclasses.replace(EXACT.problem, x_set=dpb.sets.Box(-1e38, 1e38))
    solver = solver.with_sizes(problem.sizes_of(EXACT.data)).with_noise(1.0)
    solution = solve(
        problem, solver, EXACT.data, EXACT.w0, key=jax.random.key(0), trajectory=True
    )
    assert finite((solution.value, solution.trajectory))
    assert int(solution.rejected_updates) == 3


@pytest.mark.slow
def test_point_that_overflows_with_noise_is_left_out():
    case = SOLVERS["proximal_point"]
    solution = run(case, 1e30)
    assert finite(solution.value)
    assert int(solution.rejected_updates) == case.solver.num_steps


@pytest.mark.slow
@pytest.mark.parametrize("name", ["noisy_gd_adam", "single_loop", "extragradient"])
def test_healthy_run_leaves_nothing_out(name):
    assert int(run(SOLVERS[name]).rejected_updates) == 0


@pytest.mark.slow
def test_search_that_diverges_stays_finite_and_warns():
    def losses(w):
        return np.abs(w[0] - np.linspace(0, 1, 30))

    huge = dpb.sets.Box(-np.full(1, 1e150), np.full(1, 1e150))
    solver = dpb.search.GradientInformativeBO(
        3,
        1.0,
        step_size=optax.sgd(1e300),
        keep=4,
        batch=2,
        polish=1,
        portfolio=None,
    )
    black_box = dpb.search.BlackBox(losses, 30, huge)
    with pytest.warns(UserWarning, match="the run diverged: 3 updates"):
        solution = dpb.search.minimize(
            dataclasses.replace(black_box, w_set=dpb.sets.Box(-np.inf, np.inf)),
            solver.with_sizes(30).with_noise(1.0),
            np.zeros(1),
            key=jax.random.key(0),
        )
    assert finite(solution.value)
    assert solution.rejected_updates == 3


def test_rejected_update_leaves_variable_and_optimizer_as_they_were():
    descent, w = Descent(Rule(optax.adam(0.1)), dpb.sets.Euclidean()), jnp.ones(2)
    w, memory = descent.update(jnp.ones(2), descent.init(w), w)
    bad = jnp.asarray([jnp.nan, 1.0])
    again, after = descent.update(bad, memory, w)
    np.testing.assert_array_equal(again, w)
    jax.tree.map(np.testing.assert_array_equal, after.rule, memory.rule)
    assert (int(memory.rejections.count), int(after.rejections.count)) == (0, 1)


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf, 1e20])
def test_what_has_no_finite_square_is_not_kept(value):
    new, old = {"a": jnp.asarray([1.0, value]), "b": jnp.ones(1)}, None
    old = jax.tree.map(jnp.zeros_like, new)
    kept, rejections = finite_or(new, old, SkippedUpdates())
    assert not any(v.any() for v in jax.tree.leaves(kept))
    assert int(rejections.count) == 1


def test_memory_may_start_at_infinity():
    new = {"best": jnp.asarray(jnp.inf), "w": jnp.ones(2)}
    old = {"best": jnp.asarray(jnp.inf), "w": jnp.zeros(2)}
    kept, rejections = finite_or(new, old, SkippedUpdates())
    np.testing.assert_array_equal(kept["w"], 1)
    assert int(rejections.count) == 0


def fitted(optimizer):
    solver = dpb.NoisyGD(4, 1.0, step_size=optimizer)
    problem = dataclasses.replace(IN_BOX, w_set=dpb.sets.Euclidean())
    key = jax.random.key(0)
    return dpb.fit(problem, solver, LOWER, Y0, budget=BUDGET, key=key)


def test_fit_warns_of_a_run_that_diverged_and_of_no_other():
    with pytest.warns(RuntimeWarning, match="fit: the run diverged: 4 updates"):
        result = fitted(optax.sgd(1e30))
    assert finite(result.value)
    assert result.rejected_updates == 4
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert fitted(optax.sgd(0.1)).rejected_updates == 0


@pytest.mark.slow
def test_command_line_tells_of_a_run_that_diverged(tmp_path, capsys, monkeypatch):
    (tmp_path / "a.toml").write_text(GENERATED)
    out = tmp_path / "out"
    monkeypatch.setattr("dpbilevel.runs.checkpoint.rejected_updates", lambda state: 5)
    cli.main(["run", str(tmp_path / "a.toml"), "--out", str(out)])
    assert json.loads((out / "result.json").read_text())["rejected_updates"] == 5
    assert "WARNING: the run diverged: 5 updates" in capsys.readouterr().out
    cli.main(["report", str(out)])
    assert "WARNING: the run diverged: 5 updates" in capsys.readouterr().out


@pytest.mark.slow
def test_mean_of_the_pairs_is_that_of_the_trajectory():
    case = SOLVERS["penalty"]
    solver = dataclasses.replace(case.solver, output=dpb.outputs.Mean())
    solution = run(dataclasses.replace(case, solver=solver), trajectory=True)
    means = jax.tree.map(lambda v: v.mean(0), solution.trajectory)
    for mean, expected in zip(solution.value, means, strict=True):
        np.testing.assert_allclose(mean, expected, rtol=1e-5)
