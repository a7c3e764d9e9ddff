"""The single-loop method with differences of gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpbilevel as dpb
from tests.bilevel.test_single_loop import (
    CLIPPED,
    HUGE,
    mean_before_the_noise,
    with_first_record_scaled,
)
from tests.cases import Audited, Case, fast_first, planned
from tests.problems import (
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

RATES = {"step_size": 0.05, "lower_step_size": 0.2}


def differences(steps=3, **fields):
    return dpb.bilevel.FiniteDifferenceBilevel(steps, **(RATES | fields))


small = functools.partial(differences, 6, step_size=0.5, lower_step_size=0.5)
CONTRACT = {
    "finite_difference": Case(WEIGHTING, small(), LEVELS, (X0, Y0), "disjoint"),
    "finite_difference_shared_poisson": Case(
        QUADRATIC.problem,
        small(sampling=POISSON, step_size=0.1, output=dpb.outputs.Mean()),
        SHARED_QUADRATIC,
        QUADRATIC.w0,
        "shared",
    ),
}


def planned_differences(people, scale=1.0, **fields):
    defaults = {"step_size": 0.1, "lower_step_size": 0.1, "upper_clip_norm": 1.5}
    defaults |= {"difference_clip_norm": 1.0}
    return planned(differences(**(defaults | fields)), people, scale)


AUDITS = {
    "FiniteDifferenceBilevel, disjoint": Audited(planned_differences("disjoint", 0.5)),
    "FiniteDifferenceBilevel, shared": Audited(planned_differences("shared"), True),
    "FiniteDifferenceBilevel, Poisson": Audited(
        planned_differences("shared", 0.5, sampling=dpb.Poisson(0.2)), True, exact=False
    ),
}


def unclipped(of, *names):
    fields = (*names, "clip_norm", "cross_clip_norm", "upper_clip_norm")
    return functools.partial(of, **dict.fromkeys(fields, HUGE))


def noiseless(*args, **fields):
    make = unclipped(differences, "difference_clip_norm")
    return make(*args, **fields).with_noise(0.0).with_precision("float")


def ridge_example(seed=1):
    rng = np.random.default_rng(seed)
    records = [
        {"features": rng.normal(size=(n, 4)), "label": np.sign(rng.normal(size=n))}
        for n in (30, 40)
    ]
    return ridge_tuning(*jax.tree.map(jnp.asarray, records))


def logistic_example():
    """Records of both levels meet x, and no second derivative is constant."""

    def loss(x, y, record):
        return jnp.log1p(jnp.exp(-jnp.sum(record * y) + jnp.sum(record * x) ** 2))

    rng = np.random.default_rng(2)
    rows = [jnp.asarray(rng.normal(size=(n, 3))) for n in (10, 20)]
    problem = dpb.BilevelProblem(
        loss,
        loss,
        upper_public=lambda x, y: 0.1 * jnp.sum(x * x * y),
        lower_public=lambda x, y: 0.5 * jnp.sum((y - x) ** 2),
    )
    start = jnp.asarray([0.3, -0.2, 0.5]), jnp.asarray([0.1, 0.4, -0.3])
    return problem, dpb.Levels(*rows), start


def runs_of(*solvers):
    problem, data, w0 = logistic_example()
    run = jax.jit(dpb.solve)
    return [run(problem, s, data, w0, key=jax.random.key(0)).value for s in solvers]


@pytest.mark.slow
def test_without_noise_the_iterates_are_those_of_f2sa(x64):
    peer = unclipped(functools.partial(dpb.bilevel.F2SA, **RATES))
    ours, theirs, other = runs_of(
        noiseless(8, penalty=4.0),
        *(
            peer(num_steps=8, penalty=p).with_noise(0.0).with_precision("float")
            for p in (4.0, 5.0)
        ),
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-9), ours, theirs)
    assert not np.allclose(ours[0], other[0], rtol=1e-5)  # the control


@pytest.mark.slow
def test_for_large_penalties_it_is_the_single_loop_method(x64):
    peer = unclipped(dpb.SingleLoopBilevel, "hessian_clip_norm")
    peer = (
        peer(num_steps=8, linear_step_size=0.2, **RATES)
        .with_noise(0.0)
        .with_precision("float")
    )
    penalties = (1e2, 1e4, 1e6)
    *ours, theirs = runs_of(*(noiseless(8, penalty=p) for p in penalties), peer)
    errors = [float(jnp.abs(found[0] - theirs[0]).max()) for found in ours]
    slopes = np.diff(np.log(errors)) / np.diff(np.log(penalties))
    np.testing.assert_allclose(slopes, -1, atol=0.05)


def test_at_rest_it_shows_the_hypergradient_up_to_one_over_the_penalty(x64):
    example, x = ridge_example(), jnp.asarray([-0.3])
    exact, penalties = example.hypergradient(x), (10.0, 100.0, 1000.0)

    def found(penalty):
        solver = noiseless(501, penalty=penalty, step_size=1e-9, lower_step_size=0.5)
        start = (x, example.lower_solution(x))
        run = dpb.solve(
            example.problem,
            solver,
            example.data,
            start,
            key=jax.random.key(0),
            trajectory=True,
        )
        before, after = run.trajectory[0][-2:]
        return (before - after) / 1e-9

    errors = [float(jnp.abs(found(p) - exact).max()) for p in penalties]
    slopes = np.diff(np.log(errors)) / np.diff(np.log(penalties))
    np.testing.assert_allclose(slopes, -1, atol=0.1)


def scatter(kind, **fields):
    """How far the last x of noisy runs scatters, for a small and a large penalty."""
    example = ridge_example()
    wide = dict.fromkeys(("clip_norm", "upper_clip_norm"), 20.0)

    def run(penalty, key):
        solver = kind(20, penalty=penalty, **(RATES | wide | fields)).with_noise(0.02)
        at = example.problem, solver.with_precision("float"), example.data, example.w0
        return dpb.solve(*at, key=key).value[0]

    over_keys = jax.vmap(run, (None, 0))
    keys = jax.random.split(jax.random.key(0), 200)
    found = jax.jit(jax.vmap(over_keys, (0, None)))(jnp.asarray([20.0, 200.0]), keys)
    return np.asarray(found).std(axis=1)


@pytest.mark.slow
def test_no_noise_is_multiplied_by_the_penalty():
    wide = {"difference_clip_norm": 20.0}
    small, large = scatter(dpb.bilevel.FiniteDifferenceBilevel, **wide)
    assert large == pytest.approx(small, rel=0.1)
    small, large = scatter(dpb.bilevel.F2SA)
    assert large > 5 * small  # the control


@pytest.mark.parametrize(
    "role", [pytest.param("upper", marks=pytest.mark.slow), "lower"]
)
@pytest.mark.parametrize("name", fast_first(CLIPPED))
def test_a_huge_record_moves_the_release_by_what_the_ledger_says(name, role):
    problem, data, w0 = CLIPPED[name]
    clip_norms = {"clip_norm": 0.5, "cross_clip_norm": 0.3, "upper_clip_norm": 2.0}
    solver = (
        differences(1, difference_clip_norm=0.2, **clip_norms)
        .with_noise(0.0)
        .with_precision("float")
    )
    (release,) = solver.ledger(problem, problem.sizes_of(data)).releases
    claimed = {q.role: q.contribution for q in release.queries}[role]
    with_it, without = (
        mean_before_the_noise(
            problem, solver, with_first_record_scaled(data, role, scale), w0
        )
        for scale in (1e5, jnp.nan)
    )
    change = float(jnp.linalg.norm(with_it - without))
    assert 0.99 * claimed <= change <= claimed * (1 + 1e-5)  # float32


def test_no_contribution_depends_on_the_penalty():
    sizes = dpb.Sizes(30, 60, "disjoint")
    contributions = [
        [
            query.contribution
            for query in solver.with_noise(1.0)
            .ledger(WEIGHTING, sizes)
            .releases[0]
            .queries
        ]
        for solver in (differences(1, penalty=p) for p in (2.0, 1e5))
    ]
    assert contributions[0] == contributions[1]


def test_few_upper_records_do_not_decide_the_noise_at_the_default_clip_norm():
    def shares(n_f, **fields):
        sizes = dpb.Sizes(n_f, 60, "disjoint")
        solver = differences(1, upper_clip_norm=2.0, **fields).with_noise(1.0)
        (release,) = solver.ledger(WEIGHTING, sizes).releases
        upper, lower = (query.contribution for query in release.queries)
        return upper / lower

    for n_f in (3, 15):
        assert shares(n_f) == pytest.approx(0.4**0.5)
        assert shares(n_f) == shares(n_f, difference_clip_norm=2.0 * 60 / n_f)
    assert shares(3, difference_clip_norm=1.0) > 20  # the control


def test_the_x_block_is_free_exactly_where_no_record_meets_x():
    sizes = dpb.Sizes(30, 60, "disjoint")
    names = [
        differences().with_noise(1.0).ledger(problem, sizes).releases[0].name
        for problem in (TUNING, WEIGHTING)
    ]
    assert names == [
        "directions of (y / 1.41, delta / 2.83)",
        "directions of (y / 1.58, delta / 3.16, x / 2.24)",
    ]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"penalty": 0.0}, "penalty must be positive"),
        ({"difference_clip_norm": -1.0}, "difference_clip_norm must be positive"),
        ({"budget_split": (1.0, 1.0)}, "for y, delta, x"),
        ({"output": dpb.outputs.UniformIterate()}, "draws at random"),
    ],
)
def test_a_wrong_field_is_named_with_the_remedy(fields, message):
    with pytest.raises(ValueError, match=f"FiniteDifferenceBilevel: .*{message}"):
        differences(**fields)
