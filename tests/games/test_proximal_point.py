import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpbilevel as dpb
from dpbilevel.games.proximal_point import ResolventQuery, approximate_resolvent
from dpbilevel.games.resolvents import Resolvent
from dpbilevel.privacy.sampling.base import Batch
from tests.cases import Audited, Case, planned, slow
from tests.games.saddle_zoo import N, example, point
from tests.problems import LOWER, SADDLE, SADDLE_START
from tests.zoo import games as zoo

BUDGET = dpb.PrivacyBudget(1.0, 1e-5)


CONTRACT = {
    "proximal_point": Case(
        SADDLE,
        dpb.games.InexactProximalPoint(
            4,
            clip_norm=2.5,
            strength=6.0,
            inner_steps=3,
            sampling=dpb.privacy.SinglePass(10),
        ),
        LOWER,
        SADDLE_START,
    ),
}


def planned_proximal(kind=dpb.games.InexactProximalPoint, **fields):
    defaults = {"num_steps": 3, "clip_norm": 0.7, "strength": 1.0, "inner_steps": 2}
    defaults |= {"dimension": 1}
    return planned(kind(**(defaults | fields)))


AUDITS = {
    "InexactProximalPoint": Audited(planned_proximal()),
}


@jax.jit
def solve(problem, solver, data, w0):
    return dpb.solve(problem, solver, data, w0, key=jax.random.key(0)).value


def proximal(steps=60, multiplier=0.0, **fields):
    defaults = {"clip_norm": 1e3, "strength": 4.0, "inner_steps": 8}
    solver = dpb.games.InexactProximalPoint(steps, **(defaults | fields))
    return solver if multiplier is None else solver.with_noise(multiplier)


def resolvent(problem, **fields):
    defaults = {"clip_norm": 1.0, "strength": 4.0, "steps": 4}
    defaults |= {"dimension": 5, "rows": N, "denominator": float(N)}
    return Resolvent(problem, **(defaults | fields))


@pytest.mark.parametrize("name", ["rotation", *slow("strong")])
def test_without_noise_the_gap_vanishes_within_its_bound(name):
    made = example(name)
    strength = 3 * (made.problem.lipschitz + (made.problem.public_lipschitz or 0))
    solver, start = proximal(150, strength=strength), point(name)
    w = solve(made.problem, solver, made.data, start)
    assert bool(made.problem.w_set.contains(w))
    assert float(made.gap(w)) <= solver.with_sizes(N).bound(made.problem, dimension=5)
    assert float(made.gap(w)) < 0.1 * float(made.gap(start))


@functools.cache
def skewed():
    """Monotone affine operators of three variables, and their Lipschitz constant."""
    return example("affine")


def inaccuracy(made, u, centre, strength):
    """The largest <G(u), u - w>, of the regularized operator G, over the set."""
    pull = optax.tree.scale(strength, optax.tree.sub(u, centre))
    operator = zoo.mean_operator(made.problem, u, made.data)
    operator = optax.tree.add(operator, pull)
    reverse = optax.tree.scale(-1, operator)
    return optax.tree.vdot(operator, u) + made.problem.w_set.support(reverse)


def distance(steps, strength):
    made = skewed()
    plan = resolvent(made.problem, clip_norm=1e3, strength=strength, steps=steps)
    far = dataclasses.replace(plan, steps=100)
    batch = Batch(made.data, None, plan.denominator)
    centre = point("affine")
    found, exact = (approximate_resolvent(p, batch, centre) for p in (plan, far))
    cert = inaccuracy(made, found, centre, strength)
    apart = float(optax.tree.norm(optax.tree.sub(found, exact)))
    plan = dataclasses.replace(plan, clip_norm=made.problem.bound)
    return apart, float(cert), plan


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 3])
def test_picards_iteration_ends_within_its_bounds(steps):
    apart, cert, plan = distance(steps, 2 * skewed().problem.lipschitz)
    assert apart <= plan.distance + 1e-6
    assert cert <= plan.accuracy + 1e-5
    assert apart > 1e-5


TURNS = dpb.games.VariationalInequality(
    lambda w, z: z["turn"] * jnp.stack([w[1], -w[0]]) + z["stretch"] * w + z["push"],
    w_set=dpb.sets.Ball(3.0),
    lipschitz=1.0,
)
BATCH = 8


@functools.cache
def neighbours_apart(steps, strength, tries=2000):
    """The largest distance of the resolvents of random neighbouring batches.

    Operators push away, turn or stretch; some are beyond the clip norm.
    """
    plan = resolvent(
        TURNS,
        clip_norm=5.0,
        steps=steps,
        strength=strength,
        dimension=2,
        rows=BATCH,
        denominator=float(BATCH),
    )

    def once(key):
        keys = jax.random.split(key, 5)
        kind = jax.random.randint(keys[0], (2,), -1, 2).astype(jnp.float32)
        turns = jax.random.bernoulli(keys[1])
        some = jax.random.uniform(keys[2], (BATCH,)) < 0.2
        push = jnp.where(some[:, None], 10.0, 0.1) * jax.random.normal(
            keys[3], (BATCH, 2)
        )
        rows = {
            "turn": jnp.full(BATCH, jnp.where(turns, kind[0], 0.0)),
            "stretch": jnp.full(BATCH, jnp.where(turns, 0.0, kind[1])),
            "push": push.at[0].set(1e3),
        }
        other = rows | {"push": push.at[0].set(-1e3)}
        centre = TURNS.w_set.project(jax.random.normal(keys[4], (2,)))
        ends = [
            approximate_resolvent(plan, Batch(v, None, float(BATCH)), centre)
            for v in (rows, other)
        ]
        return jnp.linalg.norm(ends[0] - ends[1])

    found = jax.jit(jax.vmap(once))(jax.random.split(jax.random.key(3), tries))
    return float(found.max()), 2 * float(plan.contribution(jnp.float32, "float"))


@pytest.mark.parametrize(("steps", "strength"), [(1, 1.5), *slow((2, 2.5), (8, 3.0))])
def test_neighbouring_batches_come_close_to_the_sensitivity_and_stay_below(
    steps, strength
):
    found, claimed = neighbours_apart(steps, strength)
    assert 0.85 * claimed < found <= claimed


def test_the_sensitivity_of_one_step_is_too_small_for_several():
    found, _ = neighbours_apart(8, 3.0)
    assert found > 1.2 * 2 * 5.0 / (3.0 * BATCH)


def test_the_sensitivity_is_the_geometric_sum_with_public_terms_and_full_batches():
    public = {"public": lambda w: 0.5 * w, "public_lipschitz": 0.5, "public_bound": 1.0}
    problem = dataclasses.replace(TURNS, **public)
    plan = resolvent(problem, steps=3, strength=5.0, rows=20, denominator=10.0)
    q = (1.0 * 2 + 0.5) / 5.0
    expected = 1.0 / (5.0 * 10) * (1 + q + q**2)
    with jax.enable_x64(True):
        found = plan.contribution(jnp.float64, "float")
        assert found == pytest.approx(expected, rel=1e-9)
        gridded = plan.contribution(jnp.float64, "grid")
        assert 1 < gridded / found < 1 + 1e-6
    # In float32 the rounding shows, and is an addition.
    assert 1e-5 < plan.contribution(jnp.float32, "float") / expected - 1 < 0.05
    one = dataclasses.replace(plan, steps=1)
    assert one.contribution(jnp.float64, "float") == pytest.approx(1 / 50, rel=1e-9)


@pytest.mark.slow
def test_computed_resolvents_round_less_than_granted():
    made, centre = skewed(), point("affine")
    plan = resolvent(
        made.problem,
        clip_norm=made.problem.bound,
        steps=12,
        strength=2 * made.problem.lipschitz,
    )
    single = approximate_resolvent(plan, Batch(made.data, None, float(N)), centre)
    with jax.enable_x64(True):
        wide = jax.tree.map(
            lambda v: jnp.asarray(np.asarray(v, np.float64)), (made.data, centre)
        )
        exact = approximate_resolvent(plan, Batch(wide[0], None, float(N)), wide[1])
    both = [np.asarray(v, np.float64) for v in (single, exact)]
    worst = np.linalg.norm(both[0] - both[1])
    assert 0 < worst <= 2 * plan.step_rounding(jnp.float32)


def test_a_record_that_is_not_finite_contributes_nothing():
    rows = {"turn": jnp.ones(3), "stretch": jnp.zeros(3), "push": jnp.ones((3, 2))}
    sick = jax.tree.map(lambda v: v.at[0].set(jnp.nan), rows)
    empty = Batch(rows, jnp.asarray([False, True, True]), 3.0)
    plan, centre = resolvent(TURNS, dimension=2, rows=3), jnp.ones(2)
    found = approximate_resolvent(plan, Batch(sick, None, 3.0), centre)
    np.testing.assert_array_equal(found, approximate_resolvent(plan, empty, centre))


def test_what_is_sealed_lies_on_the_grid_with_its_contribution():
    rows = {"turn": jnp.ones(3), "stretch": jnp.zeros(3), "push": jnp.ones((3, 2))}
    plan = resolvent(TURNS, dimension=2, rows=3, denominator=3.0)
    batch, centre = Batch(rows, None, 3.0), jnp.ones(2)
    query = ResolventQuery(plan, 3, dpb.FullBatch())

    @jax.jit
    def read(centre, rows):
        return query.read(centre, rows, precision="grid", key=jax.random.key(0))

    sealed = read(centre, rows)
    assert sealed.precision == "grid"
    assert sealed.basis is dpb.privacy.Basis.CONSTANTS
    plain = jax.jit(lambda centre: approximate_resolvent(plan, batch, centre))(centre)
    np.testing.assert_allclose(sealed.raw.values(), plain, atol=1e-6)
    assert float(sealed.contribution) == pytest.approx(
        plan.contribution(jnp.float32, "grid")
    )


def test_centres_are_projected_and_points_averaged_before_projection():
    problem = dpb.games.VariationalInequality(
        lambda w, z: jnp.zeros_like(w) + 0 * z,
        w_set=dpb.sets.Ball(1.0),
        lipschitz=0.0,
        bound=1.0,
    )
    solver = proximal(2, 1.0, inner_steps=1, clip_norm=40.0, strength=1.0).with_sizes(
        10
    )
    path = dpb.solve(
        problem,
        solver,
        jnp.zeros(10),
        jnp.zeros(3),
        key=jax.random.key(11),
        trajectory=True,
    )
    points = np.asarray(path.trajectory)
    assert (np.linalg.norm(points, axis=1) > 2).all()
    noise = points[1] - np.asarray(problem.w_set.project(jnp.asarray(points[0])))
    std = solver.ledger(problem, 10).releases[0].noise_std
    assert np.linalg.norm(noise) < 4 * std
    expected = problem.w_set.project(jnp.asarray(points.mean(0)))
    np.testing.assert_allclose(path.value, expected, rtol=1e-5)


def ledger_of(problem, precision="grid", **fields):
    return (
        proximal(multiplier=1.0, **fields).with_precision(precision).ledger(problem, N)
    )


def test_one_step_is_enforced_by_clipping_and_more_rest_on_the_constants():
    problem = example("strong").problem
    fields = {"sampling": dpb.privacy.SinglePass(4), "clip_norm": 2.0, "strength": 20.0}
    statuses = []
    for steps in (1, 3):
        solver = proximal(10, None, inner_steps=steps, **fields)
        report = dpb.calibrate(problem, solver, BUDGET, sizes=N).report
        statuses.append(report.status)
        assert ("public_lipschitz=0.5" in str(report)) == (steps == 3)
        assert (f" lipschitz={problem.lipschitz:.3g}" in str(report)) == (steps == 3)
    assert statuses == [dpb.privacy.Status.ENFORCED, dpb.privacy.Status.CONDITIONAL]


def test_plans_without_grounds_for_a_sensitivity_are_refused():
    strong = example("strong").problem
    refused = functools.partial(pytest.raises, ValueError)
    with refused(match="needs a strength above"):
        ledger_of(strong, strength=1.0)
    with refused(match="lipschitz, which is not declared"):
        ledger_of(dataclasses.replace(strong, lipschitz=None))
    with refused(match="public_lipschitz, which is not declared"):
        ledger_of(dataclasses.replace(strong, public_lipschitz=None))
    with refused(match="bounded Ball, Box or Simplex"):
        ledger_of(dataclasses.replace(strong, y_set=dpb.sets.NonNegative()))
    with refused(match="float32, roundings of a resolvent"):
        ledger_of(strong, clip_norm=1e-3, strength=20.0)
    with refused(match="replace-one only"):
        added = dpb.Neighbours.ADD_OR_REMOVE_ONE
        dpb.games.InexactProximalPoint(1, 1.0, 1.0, 1, neighbours=added)
    with refused(match="Give dimension=5"):
        few = proximal(1, dimension=4, strength=20.0)
        solve(strong, few, example("strong").data, point("strong"))


def test_tuned_parameters_promise_a_small_gap():
    problem = dataclasses.replace(
        example("bilinear").problem,
        lipschitz=1.0,
        bound=1.0,
        x_set=dpb.sets.Ball(0.5**1.5),
        y_set=dpb.sets.Ball(0.5**1.5),
    )
    budget, tuned = dpb.PrivacyBudget(1.0, 1e-6), dpb.games.InexactProximalPoint.tuned
    with jax.enable_x64(True):
        solver = tuned(problem, budget, 10_000, dimension=10, passes="single")
        plan = dpb.calibrate(problem, solver, budget, sizes=10_000)
        promised = plan.solver.bound(problem, dimension=10)
    assert solver.inner_steps in (3, 4)
    assert promised == pytest.approx(0.25, abs=0.01)
