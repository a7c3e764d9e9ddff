"""LowerFirst: the lower level once, then the upper one at its released solution."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpbilevel as dpb
from dpbilevel.applications import mixed_model, mixing_start, source_mixing
from dpbilevel.bilevel import LowerFirst
from dpbilevel.privacy.accounting import profiles
from tests.cases import Audited, Case, planned

SOURCES, D = 2, 3
GD = dpb.NoisyGD(4, clip_norm=1.0, step_size=0.5)
MIXING = source_mixing(dpb.logistic_loss, SOURCES)
W0 = mixing_start(jnp.zeros(D), SOURCES)
BUDGET = dpb.PrivacyBudget(1.0, 1e-6)


def records(n, seed, d=D, flipped=()):
    """Unit features, labels of one model, negated in the flipped sources."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, d))
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    label = np.sign(x @ np.linspace(1.0, -2.0, d))
    source = rng.integers(0, SOURCES, n)
    label = np.where(np.isin(source, flipped), -label, label)
    found = {"features": x, "label": label}
    tree = jax.tree.map(lambda v: jnp.asarray(v, jnp.float32), found)
    return tree | {"source": jnp.asarray(source, jnp.int32)}


def levels(n=40, flipped=(1,), d=D):
    upper = records(n, 0, d)
    del upper["source"]
    return dpb.Levels(upper, records(2 * n, 1, d, flipped))


DATA = levels()
CONTRACT = {
    "lower_first": Case(
        MIXING,
        LowerFirst(GD, dataclasses.replace(GD, num_steps=3)),
        DATA,
        W0,
        "disjoint",
    )
}
AUDITS = {
    "LowerFirst": Audited(
        planned(
            LowerFirst(
                dataclasses.replace(GD, num_steps=2),
                dataclasses.replace(GD, num_steps=2),
                (0.3, 0.7),
            ),
            "overlapping",
        )
    )
}


@functools.cache
def noiseless(steps=(300, 300)):
    lower, upper = (dpb.NoisyGD(n, 100.0, 1.0) for n in steps)
    solver = LowerFirst(lower, upper).with_noise(0.0).with_precision("float")
    sizes = MIXING.sizes_of(DATA, "disjoint")
    return jax.jit(dpb.solve)(
        MIXING, solver.with_sizes(sizes), DATA, W0, key=jax.random.key(0)
    )


@pytest.mark.slow
def test_the_solution_is_that_of_the_two_problems_one_after_the_other():
    found = noiseless()

    def lower(y):
        return jnp.mean(jax.vmap(MIXING.lower, (None, None, 0))(None, y, DATA.lower))

    def upper(x):
        losses = jax.vmap(MIXING.upper, (None, None, 0))(x, found.y, DATA.upper)
        return jnp.mean(losses)

    def descend(loss, w):
        step = jax.jit(lambda w: w - jax.grad(loss)(w))
        for _ in range(300):
            w = step(w)
        return w

    np.testing.assert_allclose(found.y, descend(lower, W0[1]), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.x, descend(upper, W0[0]), rtol=1e-4, atol=1e-5)


def test_a_flipped_source_gets_a_smaller_coefficient_than_a_clean_one():
    x = noiseless().x
    assert x[0] > x[1]


def test_a_mixture_of_linear_models_mixes_their_predictions():
    x, y = noiseless().x, noiseless().y
    features = DATA.upper["features"]
    mixed = sum(x[s] * (features @ y[s]) for s in range(SOURCES + 1))
    np.testing.assert_allclose(
        features @ mixed_model(x, y), mixed, rtol=1e-5, atol=1e-5
    )


@pytest.mark.slow
def test_records_of_unknown_sources_change_nothing():
    outside = DATA.lower | {"source": jnp.full(80, SOURCES, jnp.int32)}
    both = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), DATA.lower, outside)

    def gradient(data):
        total = jax.grad(
            lambda y: jnp.sum(jax.vmap(MIXING.lower, (None, None, 0))(W0[0], y, data))
        )
        return total(W0[1])

    np.testing.assert_allclose(gradient(both), gradient(DATA.lower), rtol=1e-5)


def test_disjoint_people_spend_the_whole_budget_in_each_level():
    solver = LowerFirst(GD, GD)
    sizes = dpb.Sizes(40, 80, "disjoint")
    plan = dpb.calibrate(MIXING, solver, BUDGET, sizes=sizes)
    spent = plan.solver.ledger(MIXING, sizes).epsilons(BUDGET.delta)
    assert set(spent) == {"upper", "lower"}
    for epsilon in spent.values():
        assert epsilon == pytest.approx(BUDGET.epsilon, rel=1e-6)
    # The control: people in both levels pay for both runs.
    both = dpb.Sizes(40, 80, "overlapping")
    more = dpb.calibrate(MIXING, solver, BUDGET, sizes=both).solver
    assert (
        more.lower.run_noise.multiplier > 1.4 * plan.solver.lower.run_noise.multiplier
    )


def test_shares_split_the_squared_budget_of_people_in_both_levels():
    sizes = dpb.Sizes(40, 80, "overlapping")
    ledger = LowerFirst(GD, GD, (0.3, 0.7)).with_noise(2.0).ledger(MIXING, sizes)
    assert [r.name for r in ledger.releases] == ["lower: gradient", "upper: gradient"]
    (event,) = ledger.events().values()
    assert profiles.gaussian_mu(event) == pytest.approx(1 / 2.0)
    shares = [r.count / r.noise_multiplier**2 for r in ledger.releases]
    assert shares[0] / sum(shares) == pytest.approx(0.3)


def test_each_level_is_clipped_to_the_norm_of_its_own_solver():
    upper = dataclasses.replace(GD, clip_norm=3.0)
    ledger = LowerFirst(GD, upper).with_noise(1.0).ledger(MIXING, dpb.Sizes(40, 80))
    queries = [query for release in ledger.releases for query in release.queries]
    assert [(q.role, float(q.clip_norm)) for q in queries] == [
        ("lower", 1.0),
        ("upper", 3.0),
    ]


def test_lower_levels_that_read_x_are_refused():
    weighted = dpb.source_weighting(dpb.logistic_loss, SOURCES, ridge=0.1)
    start = jnp.zeros(SOURCES), jnp.zeros(D)
    fit = functools.partial(
        dpb.fit, data=DATA, w0=start, budget=BUDGET, key=jax.random.key(0)
    )
    with pytest.raises(ValueError, match=r"lower losses read x.*Use PenaltyBilevel"):
        fit(weighted, LowerFirst(GD, GD))
    tuned = dpb.penalty_tuning(dpb.logistic_loss, jnp.zeros(D, int))
    with pytest.raises(ValueError, match="lower_public reads x"):
        fit(tuned, LowerFirst(GD, GD), w0=(jnp.zeros(1), jnp.zeros(D)))


@pytest.mark.parametrize(
    ("w0", "message"),
    [
        ((jnp.zeros(2), W0[1]), r"x must have shape \(3,\)"),
        ((W0[0], jnp.zeros((2, D))), "leading axis of 3"),
    ],
)
def test_starts_of_other_shapes_are_refused(w0, message):
    with pytest.raises(ValueError, match=message):
        MIXING.check(w0, DATA)


def test_a_source_that_is_no_integer_is_refused():
    lower = DATA.lower | {"source": DATA.lower["label"]}
    with pytest.raises(TypeError, match="source_mixing: sources must"):
        MIXING.check(W0, dpb.Levels(DATA.upper, lower))


@pytest.mark.slow
def test_a_mixture_is_better_than_descent_on_few_validation_records():
    """In test loss, by the medians of 5 keys."""
    data, budget = levels(400, d=20), dpb.PrivacyBudget(1.0, 1e-5)
    bigger = [levels(4000, d=20).lower, levels(4000, d=20).upper]
    data, test = dpb.Levels(data.upper, bigger[0]), bigger[1]
    rule = dpb.outputs.TailMean()
    solver = LowerFirst(
        dpb.NoisyGD(50, 1.2, 10.0, output=rule), dpb.NoisyGD(10, 2.0, 0.15, output=rule)
    )
    w0 = mixing_start(jnp.zeros(20), SOURCES)
    alone = dpb.FiniteSum(dpb.logistic_loss)

    def loss(w):
        return float(jnp.mean(jax.vmap(dpb.logistic_loss, (None, 0))(w, test)))

    def mixed(key):
        found = dpb.fit(
            MIXING, solver, data, w0, budget=budget, people="disjoint", key=key
        )
        return loss(mixed_model(*found.value))

    def single(key):
        plain = dpb.NoisyGD(30, 1.0, 2.0, output=rule)
        found = dpb.fit(alone, plain, data.upper, w0[1][0], budget=budget, key=key)
        return loss(found.value)

    keys = jax.random.split(jax.random.key(0), 5)
    ours, theirs = (np.median([run(key) for key in keys]) for run in (mixed, single))
    assert ours < theirs - 0.05
