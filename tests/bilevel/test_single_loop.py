"""The single-loop solver against its pseudocode, closed forms and sensitivities."""

import dataclasses

import equinox as eqx
import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpbilevel as dpb
from dpbilevel.privacy.mechanisms import Gaussian
from tests.cases import Audited, Case, fast_first, planned, slow
from tests.problems import (
    LASSO,
    LEVELS,
    POISSON,
    QUADRATIC,
    SHARED_QUADRATIC,
    TUNING,
    WEIGHTING,
    X0,
    Y0,
    ridge_tuning,
)
from tests.zoo import two_levels as zoo

HUGE = 1e6
STEPS = {"step_size": 0.05, "lower_step_size": 0.2, "linear_step_size": 0.2}


def small(**fields):
    defaults = {"num_steps": 6, "step_size": 0.5, "linear_step_size": 0.5}
    defaults["lower_step_size"] = 0.5
    return dpb.SingleLoopBilevel(**(defaults | fields))


CONTRACT = {
    "single_loop": Case(WEIGHTING, small(), LEVELS, (X0, Y0), "disjoint"),
    "single_loop_poisson": Case(
        WEIGHTING,
        small(
            sampling=POISSON, lower_step_size=optax.adam(0.1), output=dpb.outputs.Mean()
        ),
        LEVELS,
        (X0, Y0),
        "overlapping",
    ),
    "single_loop_shared_poisson": Case(
        QUADRATIC.problem,
        small(sampling=POISSON, step_size=0.1),
        SHARED_QUADRATIC,
        QUADRATIC.w0,
        "shared",
    ),
    "single_loop_proximal": Case(
        LASSO, small(), LEVELS, (jnp.full(2, 0.1), Y0), "disjoint"
    ),
    "single_loop_free_x": Case(TUNING, small(), LEVELS, (jnp.zeros(2), Y0), "disjoint"),
}


def planned_single_loop(people, scale=1.0, **fields):
    defaults = {"num_steps": 3, "step_size": 0.1, "lower_step_size": 0.1}
    defaults |= {"linear_step_size": 0.1, "upper_clip_norm": 1.5}
    defaults |= {"hessian_clip_norm": 1.0}
    return planned(dpb.SingleLoopBilevel(**(defaults | fields)), people, scale)


AUDITS = {
    "SingleLoopBilevel, disjoint": Audited(planned_single_loop("disjoint", 0.5)),
    # A person's two records fill different blocks here, and need not.
    "SingleLoopBilevel, overlapping": Audited(
        planned_single_loop("overlapping"), exact=False
    ),
    "SingleLoopBilevel, shared": Audited(planned_single_loop("shared"), True),
    "SingleLoopBilevel, Poisson": Audited(
        planned_single_loop("shared", 0.5, sampling=dpb.Poisson(0.2)), True, exact=False
    ),
    "SingleLoopBilevel, free x": Audited(planned_single_loop("disjoint", 0.5), False),
}


def quadratic():
    rng = np.random.default_rng(0)
    return zoo.quadratic_bilevel(
        jnp.asarray(rng.normal(size=(11, 3))), jnp.asarray(rng.normal(size=(23, 3)))
    )


def solver_of(num_steps=4, **fields):
    return dpb.SingleLoopBilevel(num_steps, **(STEPS | fields))


def noiseless(num_steps=4, **fields):
    clip_norms = ("clip_norm", "hessian_clip_norm", "cross_clip_norm")
    wide = dict.fromkeys((*clip_norms, "upper_clip_norm"), HUGE)
    return solver_of(
        num_steps, noise_multiplier=0.0, precision="float", **(wide | fields)
    )


def solved(example, solver, **options):
    run = jax.jit(dpb.solve, static_argnames="trajectory")
    return run(
        example.problem,
        solver,
        example.data,
        example.w0,
        key=jax.random.key(0),
        **options,
    )


def mean_before_the_noise(problem, solver, data, w0):
    """The clipped mean that the first step would release."""
    solver = solver.with_sizes(problem.sizes_of(data))

    def step(data):
        seen = []

        def release(self, bounded, *, key):
            seen.append(bounded.raw)
            return bounded.raw

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Gaussian, "release", release)
            state = solver.init(problem, w0)
            solver.step(problem, data, state, key=jax.random.key(0))
        return seen[0]

    return jax.flatten_util.ravel_pytree(jax.jit(step)(data))[0]


def with_first_record_scaled(data, role, scale):
    def scaled(v):
        floating = jnp.issubdtype(v.dtype, jnp.floating)
        return v.at[0].set(scale * v[0]) if floating else v

    return dataclasses.replace(
        data, **{role: jax.tree.map(scaled, getattr(data, role))}
    )


def test_three_steps_equal_the_pseudocode_in_numpy(x64):
    example = quadratic()
    found = solved(example, noiseless(3), trajectory=True)
    a, b = np.mean(example.data.upper, 0), np.mean(example.data.lower, 0)
    x = y = v = np.zeros(3)
    for _ in range(3):
        q_y = (y - 2 * x - b) + y / 2
        q_v = 1.5 * v - (y - a)
        q_x = 2 * v
        x, y, v = x - 0.05 * q_x, y - 0.2 * q_y, v - 0.2 * q_v
    np.testing.assert_allclose(found.x, x, rtol=1e-10)
    np.testing.assert_allclose(found.y, y, rtol=1e-10)


@pytest.mark.parametrize("rule", [dpb.outputs.Last(), *slow(dpb.outputs.Mean())])
def test_without_noise_it_reaches_the_closed_form_optimum(x64, rule):
    example = quadratic()
    found = solved(example, noiseless(4000, output=rule))
    gradient = np.abs(example.hypergradient(found.x)).max()
    assert gradient < (1e-9 if isinstance(rule, dpb.outputs.Last) else 3e-2)


@pytest.mark.slow
def test_the_x_block_at_the_solutions_is_the_hypergradient(x64):
    rng = np.random.default_rng(1)
    records = [
        {"features": rng.normal(size=(n, 4)), "label": np.sign(rng.normal(size=n))}
        for n in (30, 40)
    ]
    example = ridge_tuning(*jax.tree.map(jnp.asarray, records))
    x = jnp.asarray([-0.3])
    y = example.lower_solution(x)

    @jax.jit
    def linear_solution(x, y):
        at = example.problem, x, y, example.data
        upper = jax.grad(dpb.debug.upper_objective, 2)(*at)
        hessian = jax.hessian(dpb.debug.lower_objective, 2)(*at)
        return jnp.linalg.solve(hessian, upper)

    v = linear_solution(x, y)
    solver = noiseless(1)
    state = solver.init(example.problem, (x, y))
    state = eqx.tree_at(lambda s: s.w.v, state, v)
    sizes = example.problem.sizes_of(example.data)
    moved = jax.jit(type(solver).step)(
        solver.with_sizes(sizes),
        example.problem,
        example.data,
        state,
        key=jax.random.key(0),
    )
    moved = moved.w
    found = (x - moved.x) / solver.step_size
    np.testing.assert_allclose(found, example.hypergradient(x), rtol=1e-9)
    # At the solutions the other two blocks vanish.
    np.testing.assert_allclose(moved.y, y, atol=1e-12)
    np.testing.assert_allclose(moved.v, v, atol=1e-12)


@pytest.mark.slow
def test_public_and_record_terms_are_differentiated_alike(x64):
    def loss(x, y, c):
        return jnp.sum(jnp.cosh(y - c * x)) + jnp.sum(x * x * y)

    rows = jnp.full((5, 1), 0.7)
    private = dpb.BilevelProblem(loss, loss)
    public = dpb.BilevelProblem(
        lambda x, y, c: 0.0 * jnp.sum(c),
        lambda x, y, c: 0.0 * jnp.sum(c),
        upper_public=lambda x, y: loss(x, y, 0.7),
        lower_public=lambda x, y: loss(x, y, 0.7),
        x_in_records=False,
    )
    start = (jnp.asarray([0.3, -0.2]), jnp.asarray([0.1, 0.4]))
    runs = [
        dpb.solve(
            problem, noiseless(5), dpb.Levels(rows, rows), start, key=jax.random.key(0)
        ).value
        for problem in (private, public)
    ]
    assert float(jnp.abs(runs[0][0] - start[0]).min()) > 1e-3
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), *runs)


@pytest.mark.slow
def test_a_record_within_its_clip_norms_is_not_clipped():
    example = quadratic()
    runs = []
    for clip_norm in (40.0, HUGE):
        fields = dict.fromkeys(
            (
                "clip_norm",
                "hessian_clip_norm",
                "cross_clip_norm",
                "upper_clip_norm",
            ),
            clip_norm,
        )
        runs.append(solved(example, noiseless(4, **fields)).value)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), *runs)
    small = solved(example, noiseless(4, clip_norm=0.1)).value
    assert float(jnp.abs(small[1] - runs[0][1]).max()) > 1e-2  # the control


CLIPPED = {
    "weighting": (WEIGHTING, LEVELS, (X0, Y0)),
    "tuning": (TUNING, LEVELS, (jnp.zeros(2), Y0)),
    "both levels": (
        dpb.BilevelProblem(
            lambda x, y, z: jnp.sum(z * (x + y)),
            lambda x, y, z: jnp.sum(z * x * y) + jnp.sum((z * y) ** 2),
        ),
        dpb.Levels(jnp.ones((30, 4)), jnp.ones((60, 4))),
        (jnp.ones(4), Y0),
    ),
}


@pytest.mark.parametrize(
    "role", [pytest.param("upper", marks=pytest.mark.slow), "lower"]
)
@pytest.mark.parametrize("name", fast_first(CLIPPED))
def test_a_huge_record_moves_the_release_by_what_the_ledger_says(name, role):
    problem, data, w0 = CLIPPED[name]
    fields = {"clip_norm": 0.5, "hessian_clip_norm": 0.2, "upper_clip_norm": 2.0}
    solver = noiseless(1, cross_clip_norm=0.3, **fields)
    (release,) = solver.ledger(problem, problem.sizes_of(data)).releases
    claimed = {q.role: q.contribution for q in release.queries}[role]
    with_it, without = (
        mean_before_the_noise(
            problem, solver, with_first_record_scaled(data, role, scale), w0
        )
        for scale in (1e5, jnp.nan)
    )
    change = float(jnp.linalg.norm(with_it - without))
    assert 0.99 * claimed <= change <= claimed


def test_shares_decide_the_noise_of_the_blocks():
    problem = dpb.BilevelProblem(
        lambda x, y, z: 0.0 * (jnp.sum(x) + jnp.sum(y) + z),
        lambda x, y, z: 0.0 * (jnp.sum(x) + jnp.sum(y) + z),
    )
    size = 40_000
    fields = {"clip_norm": 2.0, "hessian_clip_norm": 0.5, "cross_clip_norm": 3.0}
    solver = solver_of(1, budget_split=(5.0, 3.0, 2.0), **fields).with_noise(1.0)
    data = dpb.Levels(jnp.zeros(10), jnp.zeros(20))
    solver = solver.with_sizes(problem.sizes_of(data))
    start = (jnp.zeros(size), jnp.zeros(size))
    state = solver.init(problem, start)
    step = jax.jit(type(solver).step)
    moved = step(solver, problem, data, state, key=jax.random.key(3))
    (release,) = solver.ledger(problem, solver.sizes).releases
    stds = [
        float(jnp.std(block)) / step
        for block, step in zip(
            (moved.w.y, moved.w.v, moved.w.x), (0.2, 0.2, 0.05), strict=True
        )
    ]
    expected = [
        release.noise_std * clip_norm / share**0.5
        for clip_norm, share in zip((2.0, 0.5, 3.0), (0.5, 0.3, 0.2), strict=True)
    ]
    np.testing.assert_allclose(stds, expected, rtol=0.02)
    assert not np.allclose(stds[::-1], expected, rtol=0.1)  # the control


def test_the_x_block_is_free_exactly_where_no_record_meets_x():
    sizes = dpb.Sizes(30, 60, "disjoint")
    names = [
        solver_of().with_noise(1.0).ledger(problem, sizes).releases[0].name
        for problem in (TUNING, WEIGHTING)
    ]
    assert names == [
        "directions of (y / 1.41, v / 2.83)",
        "directions of (y / 1.58, v / 3.16, x / 2.24)",
    ]
    plan = dpb.calibrate(
        TUNING,
        solver_of(),
        dpb.PrivacyBudget(1.0, 1e-5),
        sizes=sizes,
        w0=(jnp.zeros(2), Y0),
    )
    assert plan.report.forecast[0].coordinates == 8


def test_the_scale_is_that_of_one_full_batch_release():
    sizes = dpb.Sizes(30, 60, "overlapping")
    ledger = solver_of(9).with_noise(2.0).ledger(WEIGHTING, sizes)
    assert ledger.delta(1.0) == pytest.approx(
        dpb.NoisyGD(1, 1.0, step_size=1.0)
        .with_noise(2.0)
        .ledger(dpb.FiniteSum(dpb.logistic_loss), 10)
        .delta(1.0),
        rel=1e-9,
    )


@pytest.mark.slow
def test_optax_optimizers_replace_the_step_sizes_of_all_blocks():
    rules = {
        "step_size": optax.sgd(0.05),
        "lower_step_size": optax.sgd(0.2),
        "linear_step_size": optax.sgd(0.2),
    }
    runs = [
        solved(quadratic(), solver.with_noise(0.1)).value
        for solver in (solver_of(), dpb.SingleLoopBilevel(4, **rules))
    ]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), *runs)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"step_size": None}, "give step_size="),
        ({"lower_step_size": jnp.sin}, "optax.sgd"),
        ({"linear_step_size": -1.0}, "linear_step_size must be"),
        ({"hessian_clip_norm": 0.0}, "hessian_clip_norm must be"),
        ({"budget_split": (1.0, 1.0)}, "for y, v, x"),
        ({"budget_split": (1.0, 0.0, 1.0)}, "budget_split must be from 1e-30"),
        ({"output": dpb.outputs.UniformIterate()}, "draws at random"),
    ],
)
def test_a_wrong_field_is_named_with_the_remedy(fields, message):
    with pytest.raises(ValueError, match=f"SingleLoopBilevel: .*{message}"):
        solver_of(**fields)
