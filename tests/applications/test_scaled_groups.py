"""ScaledGroups: groups of coefficients scaled by one noisy gradient, at one budget."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpbilevel as dpb
from dpbilevel.applications import ScaledGroups
from dpbilevel.bilevel import OneLevel
from dpbilevel.privacy.accounting import profiles
from tests.cases import Audited, Case, planned, slow
from tests.problems import found_by, records

GROUPS = np.asarray([0, 0, 1, 2])
LOW, HIGH = -6.0, 2.0
TUNING = dpb.penalty_tuning(dpb.logistic_loss, GROUPS, bounds=(LOW, HIGH))
GD = dpb.NoisyGD(4, clip_norm=1.0, step_size=0.5)
W0 = jnp.full(3, LOW), jnp.zeros(4)
DATA = dpb.Levels(records(30, 4, 1), records(60, 4, 2))
SIZES = TUNING.sizes_of(DATA, "disjoint")
LONG = dpb.NoisyGD(20, 100.0, 0.5)
WIDE = dpb.NoisyGD(1, 100.0, 1.0)
BUDGET = dpb.PrivacyBudget(1.0, 1e-6)
TWO = dataclasses.replace(GD, num_steps=2)
CONTRACT = {
    "scaled_groups": Case(TUNING, ScaledGroups(GD), DATA, W0, "disjoint"),
    "scaled_groups_overlapping": Case(
        TUNING, ScaledGroups(GD), DATA, W0, "overlapping"
    ),
}


def planned_scaled(kind=ScaledGroups):
    """For canary records."""
    return planned(kind(TWO), "overlapping")


AUDITS = {"ScaledGroups": Audited(planned_scaled())}


def exact(solver, problem=TUNING, data=DATA, w0=W0):
    """Without noise."""
    solver = solver.with_noise(0.0).with_precision("float")
    solver = solver.with_sizes(problem.sizes_of(data, "disjoint"))
    return found_by(problem, solver, data, w0, jax.random.key(0))


def both(y):
    """The sum of the losses of all 90 records, over 60."""
    losses = [
        jax.vmap(dpb.logistic_loss, (None, 0))(y, v) for v in (DATA.upper, DATA.lower)
    ]
    return sum(jnp.sum(v) for v in losses) / 60


def descend(loss, u, num_steps, step_size=0.5):
    def step(_, u):
        return u - step_size * jax.grad(loss)(u)

    return jax.lax.fori_loop(0, num_steps, step, u)


def scales_of(q, above=0.95):
    """The square roots of mean squares, in shares of the largest one."""
    energy = np.asarray([np.mean(q[GROUPS == j] ** 2) ** 0.5 for j in range(3)])
    return np.minimum(1, energy / (above * energy.max()))


@pytest.mark.parametrize("start", [0.0, *slow(0.3)])
def test_without_noise_it_is_descent_in_coordinates_scaled_by_the_first_gradient(start):
    w0 = W0[0], jnp.full(4, start)
    (x, y), found = exact(ScaledGroups(LONG, full_above=0.95, screen=WIDE), w0=w0)
    gradient = np.asarray(jax.jit(jax.grad(both))(w0[1]))
    np.testing.assert_allclose(found["screen"], -gradient, rtol=1e-4)
    scales = scales_of(gradient)
    assert scales.min() < 1  # or nothing is tested
    np.testing.assert_allclose(x, LOW - 2 * np.log(scales), rtol=1e-4)

    def loss(u):
        y = w0[1] + scales[GROUPS] * u
        return both(y) + 0.5 * jnp.sum(jnp.exp(x)[GROUPS] * y * y)

    u = descend(loss, jnp.zeros(4), 20)
    np.testing.assert_allclose(y, w0[1] + scales[GROUPS] * u, rtol=1e-4, atol=1e-6)


def test_the_energy_of_the_noise_is_taken_off_with_its_margin():
    solver = ScaledGroups(GD, margin=1.5, full_above=0.9).with_noise(3.0)
    solver = solver.with_sizes(SIZES)
    event = solver.ledger(TUNING, SIZES).releases[0]
    # Replace-one: twice the clip norm over 60, for a person of each level.
    sigma = event.noise_multiplier * 2 * (1 / 60 + 1 / 60)
    q = sigma * jnp.asarray([3.0, 4.0, 2.0, 1.5])
    squares = np.asarray([12.5, 4.0, 2.25])
    above = squares - (1 + 1.5 * np.sqrt(2 / np.asarray([2, 1, 1])))
    energy = np.sqrt(np.maximum(above, 0))
    expected = np.minimum(1, energy / (0.9 * energy.max()))
    assert expected[2] == 0.0
    np.testing.assert_allclose(solver.scales(TUNING, {"screen": q}), expected, 1e-5)


@pytest.mark.slow
def test_the_noise_of_a_screen_has_the_energy_that_is_taken_off():
    zero = jax.tree.map(jnp.zeros_like, DATA)  # gradients of zero
    solver = ScaledGroups(TWO).with_noise(2.0).with_precision("float")
    solver = solver.with_sizes(SIZES)
    keys = jax.random.split(jax.random.key(0), 2000)
    found = jax.vmap(lambda key: found_by(TUNING, solver, zero, W0, key)[1])(keys)
    sigma = solver.ledger(TUNING, SIZES).releases[0].noise_multiplier * 4 / 60
    # 8000 squares: a standard deviation of 1.6 percent.
    np.testing.assert_allclose(jnp.mean(found["screen"] ** 2), sigma**2, rtol=0.07)


@pytest.mark.slow
def test_a_group_without_energy_stays_at_the_start_and_gets_the_largest_penalty():
    data = jax.tree.map(lambda v: v.at[..., 2].set(0) if v.ndim > 1 else v, DATA)
    w0 = W0[0], jnp.asarray([0.0, 0.0, 0.7, 0.0])
    (x, y), _ = exact(ScaledGroups(LONG, screen=WIDE), data=data, w0=w0)
    assert float(x[1]) == HIGH
    assert float(y[2]) == float(w0[1][2])
    assert jnp.all(y[jnp.asarray([0, 1, 3])] != 0)


@pytest.mark.slow
def test_all_groups_have_scale_one_where_none_stands_out():
    solver = ScaledGroups(GD).with_noise(1.0).with_sizes(SIZES)
    scales = solver.scales(TUNING, {"screen": jnp.zeros(4)})
    np.testing.assert_array_equal(scales, jnp.ones(3))
    (x, y), _ = exact(ScaledGroups(LONG), data=jax.tree.map(jnp.zeros_like, DATA))
    np.testing.assert_array_equal(x, W0[0])
    np.testing.assert_array_equal(y, W0[1])


@pytest.mark.slow
def test_with_equal_scales_it_is_one_level_on_both():
    one_group = dpb.penalty_tuning(dpb.logistic_loss, np.zeros(4, int), bounds=(-6, 2))
    w0 = jnp.full(1, -6.0), W0[1]
    (_, ours), _ = exact(ScaledGroups(LONG), one_group, w0=w0)
    baseline = (
        OneLevel(LONG, "both").with_noise(0.0).with_precision("float").with_sizes(SIZES)
    )
    theirs = jax.jit(dpb.solve)(
        one_group, baseline.with_precision("float"), DATA, w0, key=jax.random.key(0)
    ).value[1]
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)


@pytest.mark.slow
def test_groups_may_cross_the_leaves_of_a_model():
    def loss(w, record):
        return dpb.logistic_loss(jnp.concatenate([w["a"], w["b"].ravel()]), record)

    groups = {"a": GROUPS[:2], "b": GROUPS[2:].reshape(2, 1)}
    problem = dpb.penalty_tuning(loss, groups, bounds=(LOW, HIGH))
    w0 = W0[0], {"a": jnp.zeros(2), "b": jnp.zeros((2, 1))}
    solver = ScaledGroups(LONG, full_above=0.95, screen=WIDE)
    (x, y), _ = exact(solver, problem, w0=w0)
    (expected, vector), _ = exact(solver)
    np.testing.assert_allclose(x, expected, rtol=1e-5)
    np.testing.assert_allclose(
        jnp.concatenate([y["a"], y["b"].ravel()]), vector, rtol=1e-4
    )


def test_a_record_moves_the_scaled_gradient_by_the_clip_norm_at_most():
    solver = (
        ScaledGroups(GD, full_above=0.5)
        .with_noise(0.0)
        .with_precision("float")
        .with_sizes(SIZES)
    )
    found = {"screen": jnp.asarray([1.0, 1.0, 0.1, 0.0]), "fit": jnp.zeros(4)}
    objective = solver.objective("fit", TUNING, W0, found)
    long = jax.tree.map(lambda v: 1e6 * v[0], DATA.lower)
    long = long | {"label": DATA.lower["label"][0]}
    raw = jax.grad(dpb.logistic_loss)(W0[1], long)
    scales = np.asarray([1, 1, 0.2, 0])
    for role, weight in (("lower", 1.0), ("upper", 0.5)):
        gradient = objective.records[role](jnp.zeros(4), long)
        np.testing.assert_allclose(gradient, weight * scales * raw, rtol=1e-5)
    queries, _ = solver.queries("fit")(1.0, GD.sampling, SIZES)
    clips = {query.role: query.clip_norm for query in queries}
    assert clips == {"lower": 1.0, "upper": 0.5}


@pytest.mark.parametrize("people", ["disjoint", "overlapping"])
def test_both_runs_are_counted_by_their_shares(people):
    sizes = dpb.Sizes(30, 60, people)
    ledger = ScaledGroups(GD).with_noise(2.0).ledger(TUNING, sizes)
    assert [r.name for r in ledger.releases] == ["screen: gradient", "fit: gradient"]
    shares = [r.count / r.noise_multiplier**2 for r in ledger.releases]
    np.testing.assert_allclose(np.asarray(shares) / sum(shares), [0.25, 0.75], 1e-6)
    for event in ledger.events().values():
        assert profiles.gaussian_mu(event) == pytest.approx(
            1 / 2.0 if people == "overlapping" else 0.5 / 2.0
        )


def test_what_it_cannot_do_is_refused_with_the_remedy():
    for screen in (GD, dataclasses.replace(WIDE, step_size=0.5)):
        with pytest.raises(ValueError, match="screen must be one step of size 1"):
            ScaledGroups(GD, screen=screen)
    with pytest.raises(ValueError, match="screen must be one step of size 1"):
        ScaledGroups(GD, screen=dataclasses.replace(WIDE, step_size=optax.sgd(1.0)))
    with pytest.raises(ValueError, match=r"call solver.with_sizes\(sizes\)"):
        ScaledGroups(GD).objective("screen", TUNING, W0, {})
    with pytest.raises(ValueError, match=r"full_above must be strictly between"):
        ScaledGroups(GD, full_above=1.0)
    other = dpb.source_weighting(dpb.logistic_loss, 3)
    with pytest.raises(TypeError, match=r"PenaltyTuning.*dpb.penalty_tuning"):
        dpb.calibrate(other, ScaledGroups(GD), BUDGET, sizes=SIZES)


@pytest.mark.slow
def test_where_most_groups_are_noise_it_is_better_than_one_level_alone():
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(10), 10)

    def drawn(n):
        features = rng.normal(size=(n, 100)) / 5
        label = np.sign(features[:, :10] @ np.full(10, 3.0) + rng.logistic(size=n))
        found = {"features": features, "label": label}
        return jax.tree.map(lambda v: jnp.asarray(v, jnp.float32), found)

    data, test = dpb.Levels(drawn(1000), drawn(3000)), drawn(4000)
    problem = dpb.penalty_tuning(dpb.logistic_loss, groups, bounds=(-12.0, 2.0))
    w0 = jnp.full(10, -12.0), jnp.zeros(100)
    fit = dpb.NoisyGD(30, 1.0, 8.0, output=dpb.outputs.TailMean())
    solvers = [OneLevel(fit, reads) for reads in ("upper", "lower", "both")]

    def loss(solver):
        found = dpb.fit(
            problem,
            solver,
            data,
            w0,
            budget=BUDGET,
            people="disjoint",
            key=jax.random.key(1),
        )
        return float(
            jnp.mean(jax.vmap(dpb.logistic_loss, (None, 0))(found.value[1], test))
        )

    assert loss(ScaledGroups(fit)) < min(map(loss, solvers)) - 0.03


def uncentred(seed, n):
    """Rows of 200 columns in 8 groups with a common mean: curvatures of about 1/4."""
    rng = np.random.default_rng(seed)
    rows = 1 + 0.5 * rng.normal(size=(n, 200))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    truth = np.random.default_rng(5).normal(size=200) * 8 * (np.arange(200) < 50)
    margin = rows @ (truth - truth[:50].mean() * (np.arange(200) < 50))
    label = np.where(rng.random(n) < 1 / (1 + np.exp(1 - margin)), 1.0, -1.0)
    return {"features": rows.astype("f4"), "label": label.astype("f4")}


@pytest.mark.slow
def test_steps_too_long_for_the_kept_groups_end_below_the_constant_answer():
    problem = dpb.penalty_tuning(dpb.logistic_loss, np.repeat(np.arange(8), 25))
    data = dpb.Levels(uncentred(0, 500), uncentred(1, 2000))
    test = uncentred(2, 2000)
    w0 = dpb.applications.penalty_start(problem, jnp.zeros(200))
    share = np.mean(test["label"] > 0)
    constant = -share * np.log(share) - (1 - share) * np.log(1 - share)

    def loss(step_size):
        fit = dpb.NoisyGD(50, 0.7, step_size, output=dpb.outputs.TailMean())
        plan = dpb.calibrate(
            problem,
            ScaledGroups(fit),
            dpb.PrivacyBudget(3.0, 1e-5),
            sizes=dpb.Sizes(500, 2000, "disjoint"),
        )
        y = dpb.solve(problem, plan.solver, data, w0, key=jax.random.key(0)).y
        losses = jax.vmap(dpb.logistic_loss, (None, 0))(y, test)
        return float(jnp.mean(losses))

    assert loss(163.0) < constant
    assert loss(optax.sgd(51.0)) > constant  # as they are
