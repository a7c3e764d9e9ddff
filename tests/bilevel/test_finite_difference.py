"""The single-loop method with differences of gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpbilevel as dpb
from dpbilevel.bilevel import zoo
from tests.bilevel.test_single_loop import (
    CLIPPED,
    HUGE,
    mean_before_the_noise,
    quadratic,
    solved,
    with_first_record_scaled,
)
from tests.cases import Audited, Case, planned
from tests.problems import (
    LEVELS,
    POISSON,
    QUADRATIC,
    SHARED_QUADRATIC,
    TUNING,
    WEIGHTING,
    X0,
    Y0,
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


def planned_differences(
    people, scale=1.0, kind=dpb.bilevel.FiniteDifferenceBilevel, **fields
):
    defaults = {"step_size": 0.1, "lower_step_size": 0.1, "upper_clip_norm": 1.5}
    return planned(kind(3, **(defaults | fields)), people, scale)


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
    return make(*args, **fields).with_noise(0.0)


def ridge_example(seed=1):
    rng = np.random.default_rng(seed)
    records = [
        {"features": rng.normal(size=(n, 4)), "label": np.sign(rng.normal(size=n))}
        for n in (30, 40)
    ]
    return zoo.ridge_tuning(*jax.tree.map(jnp.asarray, records))


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
    return [
        dpb.solve(problem, solver, data, w0, key=jax.random.key(0)).value
        for solver in solvers
    ]


def test_without_noise_the_iterates_are_those_of_f2sa(x64):
    peer = unclipped(dpb.bilevel.F2SA, **RATES)
    for penalty in (4.0, 30.0):
        ours, theirs = runs_of(
            noiseless(8, penalty=penalty),
            peer(num_steps=8, penalty=penalty).with_noise(0.0),
        )
        start = logistic_example()[2]
        assert float(jnp.abs(ours[0] - start[0]).max()) > 1e-2
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-9), ours, theirs)


def test_for_large_penalties_it_is_the_single_loop_method(x64):
    peer = unclipped(dpb.SingleLoopBilevel, "hessian_clip_norm")
    peer = peer(num_steps=8, linear_step_size=0.2, **RATES).with_noise(0.0)
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


def scatter(solver):
    """How far the last x of a noisy run scatters over keys."""
    example = quadratic()
    solver = solver.with_noise(0.02)

    def run(key):
        return dpb.solve(
            example.problem, solver, example.data, example.w0, key=key
        ).value[0]

    keys = jax.random.split(jax.random.key(0), 400)
    return float(jnp.std(jax.jit(jax.vmap(run))(keys), 0).mean())


def test_no_noise_is_multiplied_by_the_penalty():
    # Losses are quadratic: without noise the iterates differ by the bias alone.
    fields = {"num_steps": 20, "clip_norm": 20.0, "upper_clip_norm": 20.0} | RATES
    wide = {"difference_clip_norm": 20.0, "cross_clip_norm": 20.0}
    ours = [
        scatter(differences(fields["num_steps"], penalty=p, **_without(fields), **wide))
        for p in (20.0, 200.0)
    ]
    assert ours[1] == pytest.approx(ours[0], rel=0.1)
    peer = [
        scatter(dpb.bilevel.F2SA(penalty=p, cross_clip_norm=HUGE, **fields))
        for p in (20.0, 200.0)
    ]
    assert peer[1] > 5 * peer[0]  # the control
