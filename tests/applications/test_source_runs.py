"""OneLevel, SelectedSources, MixedSources: runs one after the other, at one budget."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpbilevel as dpb
from dpbilevel.applications import (
    MixedSources,
    ScoringModel,
    SelectedSources,
    source_weights,
)
from dpbilevel.applications.mixtures import Mixture, moments_objective
from dpbilevel.applications.source_pipeline import score_objective
from dpbilevel.audit.worst_cases import worst_case
from dpbilevel.bilevel import OneLevel
from dpbilevel.privacy.accounting import profiles
from dpbilevel.privacy.noise import derive, step_keys
from tests.cases import Audited, Case, planned
from tests.problems import found_by

K, D = 3, 3
RIDGE = 0.05
GD = dpb.NoisyGD(4, clip_norm=1.0, step_size=0.5)
BUDGET = dpb.PrivacyBudget(1.0, 1e-6)
W0 = jnp.zeros(K), jnp.zeros(D)
WEIGHTING = dpb.source_weighting(dpb.logistic_loss, K, ridge=RIDGE)


def records(n, seed, *, flipped=(), d=D, counts=None):
    """Unit features, labels of one model, negated in the flipped sources."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, d))
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    label = np.sign(x @ np.linspace(1.0, -2.0, d))
    source = np.arange(n) % K if counts is None else np.repeat(np.arange(K), counts)
    label = np.where(np.isin(source, flipped), -label, label)
    found = {"features": x, "label": label}
    tree = jax.tree.map(lambda v: jnp.asarray(v, jnp.float32), found)
    return tree | {"source": jnp.asarray(source, jnp.int32)}


def levels(n_upper=30, n_lower=60, flipped=(2,), **options):
    upper = records(n_upper, 0, d=options.get("d", D))
    del upper["source"]
    return dpb.Levels(upper, records(n_lower, 1, flipped=flipped, **options))


def of_sources(data, kept):
    """The training records of these sources."""
    rows = np.isin(np.asarray(data.lower["source"]), kept)
    return jax.tree.map(lambda v: v[rows], data.lower)


DATA = levels()
SELECTED = SelectedSources(GD, dataclasses.replace(GD, num_steps=3))
OF_BOTH = dataclasses.replace(SELECTED, fit_reads="both")


def squared_loss_of_two(y, record):
    """A model of two parameters, of another shape than the released one."""
    return (record["features"][1:] @ y["w"] - record["label"]) ** 2 / 4


SCORING = ScoringModel(squared_loss_of_two, {"w": jnp.zeros(2)})
SCORED = dataclasses.replace(OF_BOTH, scoring=SCORING)
MIXED = MixedSources(*(dataclasses.replace(GD, num_steps=n) for n in (2, 3, 4, 2)))
CONTRACT = {
    "one_level": Case(WEIGHTING, OneLevel(GD), DATA, W0, "disjoint", keeps_x=True),
    "one_level_both": Case(
        WEIGHTING, OneLevel(GD, "both"), DATA, W0, "overlapping", keeps_x=True
    ),
    "selected_sources": Case(WEIGHTING, SELECTED, DATA, W0, "disjoint"),
    "selected_sources_both": Case(WEIGHTING, OF_BOTH, DATA, W0, "disjoint"),
    "selected_sources_scored": Case(WEIGHTING, SCORED, DATA, W0, "overlapping"),
    "mixed_sources": Case(WEIGHTING, MIXED, DATA, W0, "disjoint"),
}
TWO = dataclasses.replace(GD, num_steps=2)


def planned_selected(kind=SelectedSources, **fields):
    """For canary records; with much of the budget in each run, so that each shows.

    Among 1 000 records the released share of the one is below the least that counts:
    its noise, which would hide the noise of the fit, does not move the fit's steps.
    """
    solver = kind(TWO, TWO, budget_split=(0.3, 0.4, 0.3), **fields).with_noise(1.0)
    return solver.with_sizes(dpb.Sizes(10, 1000, "overlapping"))


def planned_fit_of_both(kind=SelectedSources):
    """The same with nearly all of it in a fit that people of either level pay for."""
    solver = kind(TWO, TWO, budget_split=(0.05, 0.05, 0.9), fit_reads="both")
    return planned(solver, "disjoint")


def planned_selected_by_another():
    """The same with a scoring model, which is the worst case's own."""
    problem, (_, start) = worst_case(planned_selected(), True, jnp.zeros(()))
    return planned_selected(scoring=ScoringModel(problem.loss, start))


def planned_moments(kind=MixedSources):
    """Nearly all of the budget in second moments, for canaries against nothing."""
    split = (0.03, 1.0, 0.03, 0.03, 0.03, 1.0, 0.03)
    solver = kind(TWO, TWO, TWO, TWO, budget_split=split)
    added = dpb.Neighbours.ADD_OR_REMOVE_ONE
    return planned(solver.with_neighbours(added), "overlapping")


# Second moments of a canary are those of its opposite: they have a row of their own.
OF_MEANS = (0.2, 0.002, 0.2, 0.2, 0.2, 0.002, 0.2)
AUDITS = {
    "OneLevel, both levels": Audited(planned(OneLevel(TWO, "both"), "overlapping")),
    "OneLevel": Audited(planned(OneLevel(TWO), "disjoint")),
    "SelectedSources": Audited(planned_selected()),
    "SelectedSources, both levels": Audited(planned_selected(fit_reads="both")),
    "SelectedSources, another model": Audited(planned_selected_by_another()),
    "MixedSources": Audited(
        planned(
            MixedSources(TWO, TWO, TWO, TWO, budget_split=OF_MEANS),
            "overlapping",
        )
    ),
    "MixedSources, add or remove": Audited(planned_moments(), exact=False),
}


def exact(solver, people="disjoint", data=DATA, problem=WEIGHTING):
    """The solver without noise, bound to the sizes of the data."""
    solver = solver.with_noise(0.0).with_precision("float")
    return solver.with_sizes(problem.sizes_of(data, people))


def long(num_steps, step_size=0.5):
    """Descent that clips nothing."""
    return dpb.NoisyGD(num_steps, 100.0, step_size)


def runs(solver, data=DATA, problem=WEIGHTING, w0=W0):
    solver = exact(solver, "disjoint", data, problem)
    return found_by(problem, solver, data, w0, jax.random.key(0))


# The same everywhere, because compiling takes the time.
LONG = SelectedSources(long(20), long(30))
LONG_MIXED = MixedSources(long(30), long(20), long(15), long(10, 0.2))


@functools.cache
def selected():
    return runs(LONG)


@functools.cache
def mixed():
    return runs(LONG_MIXED)


def one_level(records, solver, *, ridge=RIDGE, key=None):
    """Noisy gradient descent on a finite sum of these records."""
    problem = dpb.FiniteSum(dpb.logistic_loss, public=lambda w: ridge * jnp.sum(w * w))
    key = jax.random.key(0) if key is None else key
    solver = solver.with_sizes(len(records["label"]))
    return jax.jit(dpb.solve)(problem, solver, records, W0[1], key=key).value


def alone(records, solver, ridge=RIDGE):
    return one_level(
        records,
        solver.with_noise(0.0).with_precision("float"),
        ridge=ridge,
    )


@pytest.mark.parametrize("level", ["upper", "lower"])
def test_one_level_is_noisy_descent_on_the_records_of_that_level(level):
    noisy = GD.with_noise(1.0)
    solver = OneLevel(noisy, level).with_sizes(WEIGHTING.sizes_of(DATA, "disjoint"))
    ours = jax.jit(dpb.solve)(WEIGHTING, solver, DATA, W0, key=jax.random.key(0)).value
    # The key of the only run, so that the noise is the same.
    key = derive(step_keys(jax.random.key(0), 1)[1][0], "model")[0]
    ridge = RIDGE if level == "lower" else 0.0
    theirs = one_level(getattr(DATA, level), noisy, ridge=ridge, key=key)
    np.testing.assert_allclose(ours[1], theirs, rtol=1e-6)
    np.testing.assert_array_equal(ours[0], W0[0])


def test_one_level_on_both_descends_on_the_mean_over_all_records():
    lower = {name: DATA.lower[name] for name in DATA.upper}
    pooled = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), DATA.upper, lower)
    # In units of the lower mean: 90 records over 60.
    (_, y), _ = runs(OneLevel(long(20), "both"))
    expected = alone(pooled, long(20, 0.5 * 90 / 60), ridge=RIDGE * 60 / 90)
    np.testing.assert_allclose(y, expected, rtol=1e-4)


@pytest.mark.parametrize("people", ["disjoint", "overlapping"])
def test_a_person_of_each_level_weighs_the_same_where_both_are_read(people):
    sizes = dpb.Sizes(30, 60, people)
    ledger = OneLevel(GD, "both").with_noise(2.0).ledger(WEIGHTING, sizes)
    (release,) = ledger.releases
    assert len({q.clip_norm / q.size for q in release.queries}) == 1
    for event in ledger.events().values():
        # Someone with two records moves the joint sum by their two lengths.
        assert profiles.gaussian_mu(event) == pytest.approx(
            1 / 2.0 if people == "overlapping" else 0.5 / 2.0
        )


def test_people_of_a_level_that_is_not_read_spend_nothing():
    sizes = dpb.Sizes(30, 60, "disjoint")
    for level in ("upper", "lower"):
        plan = dpb.calibrate(WEIGHTING, OneLevel(GD, level), BUDGET, sizes=sizes)
        spent = plan.solver.ledger(WEIGHTING, sizes).epsilons(BUDGET.delta)
        assert spent == {level: pytest.approx(BUDGET.epsilon, rel=1e-6)}


def scores(model, loss=dpb.logistic_loss, start=W0[1]):
    """Mean signs of improvement and shares of records, by source, in their units."""
    losses = jax.vmap(loss, (None, 0))
    better = np.asarray(losses(model, DATA.lower) < losses(start, DATA.lower))
    signs, source = np.where(better, 1.0, -1.0), np.asarray(DATA.lower["source"])
    means = [
        [np.mean((source == s) * of) for s in range(K)] for of in (signs, signs**2)
    ]
    return np.array([[0.96], [0.28]]) * means


def test_sources_are_scored_by_signs_of_improvement_and_their_sizes():
    _, found = selected()
    np.testing.assert_allclose(found["score"], scores(found["model"]), 1e-5, 1e-7)


@pytest.mark.parametrize(
    ("field", "value"),
    [("label", jnp.nan), ("features", jnp.inf), ("source", -1), ("source", K)],
)
def test_records_that_no_model_is_fitted_to_say_nothing_about_their_source(
    field, value
):
    spoilt = {**DATA.lower, field: DATA.lower[field].at[:30].set(value)}
    with_them = scored_by(jax.tree.map(jnp.asarray, spoilt))
    rest = jax.tree.map(lambda v: v[30:], DATA.lower)
    np.testing.assert_allclose(with_them, scored_by(rest), rtol=1e-5)
    # The control: they count where nothing is wrong with them.
    assert not np.allclose(scored_by(DATA.lower), scored_by(rest), rtol=1e-2)


def scored_by(lower):
    """The sums of the scores of training records by a fixed model."""
    model = jnp.array([1.0, -2.0, 0.5])
    value_of = score_objective(WEIGHTING, model, W0[1]).records["lower"]
    return jnp.sum(jax.vmap(value_of, (None, 0))(jnp.zeros((2, K)), lower), axis=0)


def test_a_source_is_kept_for_its_own_score_whatever_its_size():
    units = jnp.array([[0.96], [0.28]])
    found = {"score": units * jnp.array([[0.022, 0.04, 0.001], [0.1, 0.86, 0.001]])}
    # Scores of 0.22 and 0.05; the last is far below a tenth of the mean size.
    np.testing.assert_array_equal(LONG.kept(found), [1, 0, 0])
    assert LONG.kept_fraction(found) == pytest.approx(0.1)
    over_mean_size = 3 * found["score"][0] / 0.96
    assert not np.array_equal(over_mean_size > LONG.keep_above, [True, False, False])


def test_the_model_of_kept_sources_is_a_fit_on_their_records_alone():
    (x, y), found = selected()
    np.testing.assert_allclose(source_weights(x), [0.5, 0.5, 0.0], atol=1e-12)
    np.testing.assert_allclose(found["model"], alone(DATA.upper, long(20), 0.0), 1e-5)
    np.testing.assert_allclose(y, alone(of_sources(DATA, [0, 1]), long(30)), 1e-4)
    np.testing.assert_array_equal(y, found["fit"])


def test_a_fit_on_both_levels_is_one_on_kept_and_validation_records_pooled():
    (_, y), _ = runs(dataclasses.replace(LONG, fit_reads="both"))
    kept = of_sources(DATA, [0, 1])
    kept = {name: kept[name] for name in DATA.upper}
    pooled = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), DATA.upper, kept)
    np.testing.assert_allclose(y, alone(pooled, long(30)), rtol=1e-4)


def test_another_model_scores_the_sources_and_is_not_released():
    solver = dataclasses.replace(LONG, scoring=SCORING)
    (x, y), found = runs(solver)

    def mean(w, records):
        return jnp.mean(jax.vmap(SCORING.loss, (None, 0))({"w": w}, records))

    model = descend(lambda w: mean(w, DATA.upper), SCORING.start["w"], 20)
    np.testing.assert_allclose(found["model"]["w"], model, rtol=1e-4)
    expected = scores({"w": model}, SCORING.loss, SCORING.start)
    np.testing.assert_allclose(found["score"], expected, 1e-5, 1e-7)
    np.testing.assert_allclose(source_weights(x), [0.5, 0.5, 0.0], atol=1e-12)
    np.testing.assert_allclose(y, alone(of_sources(DATA, [0, 1]), long(30)), 1e-4)


def test_a_fit_on_both_levels_is_paid_by_both():
    sizes = dpb.Sizes(30, 60, "disjoint")
    solver = dataclasses.replace(OF_BOTH, budget_split=(0.03, 0.02, 0.95))
    ledger = solver.with_noise(1.0).ledger(WEIGHTING, sizes)
    paid = {r.name.split(":")[0]: {q.role for q in r.queries} for r in ledger.releases}
    assert paid == {"model": {"upper"}, "score": {"lower"}, "fit": {"upper", "lower"}}
    for role, share in {"upper": 0.03, "lower": 0.02}.items():
        mu = (share + 0.95 / 4) ** 0.5  # half of what someone in each level moves
        assert profiles.gaussian_mu(ledger.events()[role]) == pytest.approx(mu)


def test_a_step_on_kept_sources_is_one_of_the_mean_over_their_records():
    data = levels(counts=(10, 20, 30))
    (x, y), _ = runs(LONG, data)
    np.testing.assert_allclose(source_weights(x), [0.5, 0.5, 0.0], atol=1e-12)
    expected = alone(of_sources(data, [0, 1]), long(30))
    np.testing.assert_allclose(y, expected, rtol=1e-4)


def test_a_step_on_few_kept_records_is_at_most_four_times_as_long():
    data = levels(counts=(6, 24, 30), flipped=(1, 2))
    (x, y), _ = runs(LONG, data)
    np.testing.assert_allclose(source_weights(x), [1.0, 0.0, 0.0], atol=1e-12)
    # A tenth of the records is kept: four tenths of a step on these alone.
    expected = alone(of_sources(data, [0]), long(30, 0.4 * 0.5))
    np.testing.assert_allclose(y, expected, rtol=1e-4)
    unlimited = alone(of_sources(data, [0]), long(30))
    assert not np.allclose(y, unlimited, rtol=1e-2)


@pytest.mark.slow
def test_steps_of_an_optax_rule_are_taken_as_they_are():
    rule = dpb.NoisyGD(3, 100.0, optax.sgd(0.5))
    (_, y), _ = runs(SelectedSources(long(20), rule))
    expected = alone(of_sources(DATA, [0, 1]), long(3, 0.5 * 2 / 3))
    np.testing.assert_allclose(y, expected, rtol=1e-4)


def test_all_sources_are_kept_where_none_passes():
    data = levels(flipped=(0, 1, 2))
    (x, y), found = runs(LONG, data)
    assert jnp.all(found["score"][0] < 0)
    np.testing.assert_array_equal(x, jnp.zeros(K))
    np.testing.assert_allclose(y, alone(data.lower, long(30)), rtol=1e-4)


@pytest.mark.parametrize("unknown", [-1, K])
@pytest.mark.parametrize("solver", [LONG, LONG_MIXED])
def test_records_of_unknown_sources_have_no_influence(solver, unknown):
    def with_others(seed):
        lower = records(60, seed)
        lower["source"] = jnp.where(jnp.arange(60) < 6, unknown, DATA.lower["source"])
        own = jnp.arange(60) < 6
        lower["features"] = jnp.where(
            own[:, None], 5 * lower["features"], DATA.lower["features"]
        )
        lower["label"] = jnp.where(own, lower["label"], DATA.lower["label"])
        return dpb.Levels(DATA.upper, lower)

    first, second = (runs(solver, with_others(seed)) for seed in (7, 8))
    jax.tree.map(np.testing.assert_array_equal, first, second)


def descend(loss, w, num_steps, step_size=0.5):
    def one_step(_, w):
        return w - step_size * jax.grad(loss)(w)

    return jax.jit(lambda w: jax.lax.fori_loop(0, num_steps, one_step, w))(w)


def mean_loss(w, records):
    return jnp.mean(jax.vmap(dpb.logistic_loss, (None, 0))(w, records))


def power(matrix, exponent, least=0.0):
    """Of a symmetric matrix plus a share of its norm."""
    values, vectors = np.linalg.eigh(matrix)
    values = values + least * np.linalg.norm(matrix)
    return vectors * values**exponent @ vectors.T


def coordinates(models, moments):
    """The directions that a mixture moves along, by their formula."""
    models, moments = (np.asarray(v, float) for v in (models, moments))
    basis = power(models @ models.T, -0.5, 0.01) @ models
    return power(moments @ moments, -0.25, 0.2**2) @ basis


def second_moments(models, start):
    """Of the directions of the training records' gradients, by differences."""
    models = np.asarray(models, float)
    basis = power(models @ models.T, -0.5, 0.01) @ models
    y = np.asarray(start) @ models
    features, label = (np.asarray(DATA.lower[k], float) for k in ("features", "label"))
    slope = -label / (1 + np.exp(label * (features @ y)))
    gradients = slope[:, None] * (features @ basis.T)
    gradients /= np.linalg.norm(gradients, axis=1, keepdims=True)
    return gradients.T @ gradients / len(gradients)


def test_the_fit_of_a_mixture_starts_at_the_mean_of_kept_models_by_their_sizes():
    sizes = np.array([30, 10, 20])
    data = levels(counts=sizes)
    found = runs(dataclasses.replace(LONG_MIXED, fit=long(15, 1e-7)), data)[1]
    kept = sizes * [1, 1, 0]
    expected = kept @ np.asarray(found["models"])[:K] / kept.sum()
    np.testing.assert_allclose(found["fit"], expected, rtol=1e-4)


def test_mixtures_are_found_for_a_loss_with_a_derivative_of_its_own():
    @jax.custom_vjp
    def loss(y, record):
        return dpb.logistic_loss(y, record)

    def backward(saved, g):
        return g * jax.grad(dpb.logistic_loss)(*saved), None

    loss.defvjp(lambda *args: (dpb.logistic_loss(*args), args), backward)
    problem = dpb.source_weighting(loss, K)
    (_, y), _ = runs(MIXED, problem=problem)
    (_, expected), _ = runs(MIXED, problem=dpb.source_weighting(dpb.logistic_loss, K))
    np.testing.assert_allclose(y, expected, rtol=1e-5)


def test_a_mixture_is_that_of_seven_problems_one_after_the_other():
    (x, y), found = mixed()
    by_source = [of_sources(DATA, [s]) for s in range(K)]

    def lower(models):  # equal numbers of records, and half the weight of the last
        own = sum(mean_loss(models[s], by_source[s]) for s in range(K)) / K
        return own + 0.5 * mean_loss(models[K], DATA.lower)

    def descent_along(start, basis, *options):
        def upper(u):
            return mean_loss(start + u @ basis, DATA.upper)

        u = descend(upper, jnp.zeros(len(basis)), *options)
        return u, start + u @ basis

    models = descend(lower, jnp.zeros((K + 1, D)), 30)
    moments = second_moments(models, jnp.eye(K + 1)[K])
    mixture, mixed_model = descent_along(models[K], coordinates(models, moments), 20)
    kept = of_sources(DATA, [0, 1])
    of_kept = jnp.mean(models[:2], 0)  # where the fit starts
    fit = descend(lambda y: mean_loss(y, kept) + RIDGE * jnp.sum(y * y), of_kept, 15)
    # One source is dropped.
    candidates = jnp.stack([*models[:2], jnp.zeros(D), mixed_model, fit])
    start = jnp.eye(K + 2)[K:].T @ jnp.array([1 / 6, 5 / 6])  # two thirds are kept
    remoments = second_moments(candidates, start)
    basis = coordinates(candidates, remoments)
    remixture, expected_y = descent_along(start @ candidates, basis, 10, 0.2)
    for name, expected in (
        ("models", models),
        ("moments", moments),
        ("mixture", mixture),
        ("fit", fit),
        ("remoments", remoments),
        ("remixture", remixture),
    ):
        np.testing.assert_allclose(
            found[name], expected, rtol=1e-3, atol=1e-5, err_msg=name
        )
    np.testing.assert_allclose(y, expected_y, rtol=2e-4)
    np.testing.assert_allclose(source_weights(x), [0.5, 0.5, 0.0], atol=1e-12)


def first_mixture(found):
    """The model of the mixture of line 3."""
    basis = coordinates(found["models"], found["moments"])
    return found["models"][-1] + jnp.asarray(found["mixture"] @ basis, jnp.float32)


def test_a_mixture_is_scored_and_not_the_common_model():
    _, found = mixed()
    expected = scores(first_mixture(found))
    np.testing.assert_allclose(found["score"], expected, 1e-5, 1e-7)


@pytest.mark.parametrize("noise", [0.0, 1e-3, 1.0, 1e3])
def test_coordinates_of_a_mixture_are_finite_whatever_the_noise(noise):
    rng = np.random.default_rng(0)
    models = jnp.asarray(rng.normal(size=(5, 4)), jnp.float32)  # they span four numbers
    moments = jnp.asarray(np.eye(5) / 5 + noise * rng.normal(size=(5, 5)), jnp.float32)
    symmetric = np.asarray(moments + moments.T, float) / 2
    for scale in (0.0, 1e-30, 1.0, 1e30):
        mixture = Mixture(scale * models, jnp.zeros(5), moments)
        basis = jax.jacobian(mixture.model)(jnp.zeros(5)).T
        expected = 0 if scale == 0 else coordinates(models, symmetric)
        np.testing.assert_allclose(basis, expected, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("kind", ["moments", "scores"])
def test_a_training_record_is_of_norm_1_in_moments_and_scores(kind):
    models = jnp.asarray(np.random.default_rng(0).normal(size=(K + 1, D)), jnp.float32)
    if kind == "moments":
        mixture = Mixture(models, jnp.eye(K + 1)[K])
        objective = moments_objective(WEIGHTING, mixture)
        w = jnp.zeros((K + 1, K + 1))
    else:
        objective = score_objective(WEIGHTING, models[0], W0[1])
        w = jnp.zeros((2, K))
    spoilt = {
        "known": DATA.lower,
        "unknown": {**DATA.lower, "source": jnp.full(60, K)},
        "not finite": {**DATA.lower, "label": jnp.full(60, jnp.nan)},
    }
    for name, rows in spoilt.items():
        values = jax.vmap(objective.records["lower"], (None, 0))(w, rows)
        norms = jnp.linalg.norm(values.reshape(60, -1), axis=1)
        expected = 1.0 if name == "known" else 0.0
        np.testing.assert_allclose(norms, expected, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_the_fewer_records_are_dropped_the_nearer_the_last_run_starts_to_the_mixture():
    still = dataclasses.replace(LONG_MIXED, remixture=long(1, 1e-9))
    for flipped, share in (((), 0.5), ((0,), 1 / 6), ((0, 1), 0.0)):
        (_, y), found = runs(still, levels(flipped=flipped))
        mixture = first_mixture(found)
        expected = share * mixture + (1 - share) * found["fit"]
        np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-6)
        assert not np.allclose(mixture, found["fit"], rtol=0.01)


def test_weights_are_in_the_parametrization_of_the_problem():
    simplex = dpb.source_weighting(
        dpb.logistic_loss, K, ridge=RIDGE, parametrization="simplex"
    )
    w0 = jnp.full(K, 1 / K), W0[1]
    (x, y), _ = runs(LONG, problem=simplex, w0=w0)
    np.testing.assert_allclose(x, [0.5, 0.5, 0.0])
    np.testing.assert_allclose(y, selected()[0][1], rtol=1e-5)


@pytest.mark.slow
def test_a_mixture_is_projected_onto_the_models_of_the_problem():
    ball = dataclasses.replace(WEIGHTING, y_set=dpb.sets.Ball(0.1))
    (_, y), found = runs(MixedSources(*[long(5)] * 4), problem=ball)
    assert float(jnp.linalg.norm(found["fit"])) <= 0.1 + 1e-6
    assert float(jnp.linalg.norm(y)) == pytest.approx(0.1, rel=1e-5)


PAID = {
    SELECTED: {"model": "upper", "score": "lower", "fit": "lower"},
    MIXED: {
        "models": "lower",
        "moments": "lower",
        "mixture": "upper",
        "score": "lower",
        "fit": "lower",
        "remoments": "lower",
        "remixture": "upper",
    },
}
both = pytest.mark.parametrize("solver", PAID, ids=lambda s: type(s).__name__)


@both
def test_the_answer_is_finite_whatever_the_noise(solver):
    sizes = WEIGHTING.sizes_of(DATA, "disjoint")

    @jax.jit
    def answer(noise):
        noisy = solver.with_noise(noise).with_precision("float").with_sizes(sizes)
        return dpb.solve(WEIGHTING, noisy, DATA, W0, key=jax.random.key(0)).value

    for noise in (1.0, 1e20, 1e37, 1e38):
        assert all(np.isfinite(v).all() for v in answer(noise))


@both
def test_each_run_is_paid_by_people_of_the_level_that_it_reads(solver):
    ledger = solver.with_noise(1.0).ledger(WEIGHTING, dpb.Sizes(30, 60, "disjoint"))
    paid = {r.name.split(":")[0]: {q.role for q in r.queries} for r in ledger.releases}
    assert paid == {name: {role} for name, role in PAID[solver].items()}
    shares = dict(zip(PAID[solver], solver.budget_split, strict=True))
    for role, event in ledger.events().items():
        share = sum(shares[name] for name, of in PAID[solver].items() if of == role)
        mu = (share / sum(shares.values())) ** 0.5
        assert profiles.gaussian_mu(event) == pytest.approx(mu)


@both
def test_disjoint_people_of_both_levels_spend_the_whole_budget_by_default(solver):
    sizes = dpb.Sizes(30, 60, "disjoint")
    plan = dpb.calibrate(WEIGHTING, solver, BUDGET, sizes=sizes)
    spent = plan.solver.ledger(WEIGHTING, sizes).epsilons(BUDGET.delta)
    assert set(spent) == {"upper", "lower"}
    for epsilon in spent.values():
        assert epsilon == pytest.approx(BUDGET.epsilon, rel=1e-6)


@both
def test_people_in_both_levels_pay_for_every_run(solver):
    ledger = solver.with_noise(2.0).ledger(WEIGHTING, dpb.Sizes(30, 60, "overlapping"))
    (event,) = ledger.events().values()
    assert profiles.gaussian_mu(event) == pytest.approx(1 / 2.0)
    shares = [r.count / r.noise_multiplier**2 for r in ledger.releases]
    expected = np.asarray(solver.budget_split) / sum(solver.budget_split)
    np.testing.assert_allclose(np.asarray(shares) / sum(shares), expected, rtol=1e-6)


@both
def test_a_score_has_norm_one_and_other_runs_their_own_clip_norm(solver):
    wide = dataclasses.replace(solver, fit=dataclasses.replace(GD, clip_norm=3.0))
    ledger = wide.with_noise(1.0).ledger(WEIGHTING, dpb.Sizes(30, 60))
    clips = {r.name.split(":")[0]: r.queries[0].clip_norm for r in ledger.releases}
    assert clips == dict.fromkeys(PAID[solver], 1.0) | {"fit": 3.0}


def test_a_record_moves_a_sign_whatever_its_length():
    # The model of the validation records, by which it is scored, does not see it.
    first = DATA.lower | {"features": DATA.lower["features"].at[0].multiply(1e6)}
    second = first | {"label": first["label"].at[0].multiply(-1)}
    scores = [
        60 * runs(LONG, dpb.Levels(DATA.upper, lower))[1]["score"]
        for lower in (first, second)
    ]
    moved = np.ravel(scores[0] - scores[1])
    np.testing.assert_allclose(np.sort(np.abs(moved)), [0, 0, 0, 0, 0, 1.92], atol=1e-5)


@both
def test_float32_records_are_solved_where_float64_is_enabled(solver, x64):
    answer = jax.eval_shape(
        lambda data: runs(solver, data)[0], jax.tree.map(np.asarray, DATA)
    )
    assert {v.dtype for v in jax.tree.leaves(answer)} == {jnp.dtype("f4")}


@both
@pytest.mark.parametrize("dtypes", [("f4", "f8"), ("f8", "f4")])
def test_weights_and_model_may_differ_in_precision(solver, dtypes, x64):
    w0 = tuple(np.zeros(len(w), dtype) for w, dtype in zip(W0, dtypes, strict=True))
    data = jax.tree.map(
        lambda v: v.astype(dtypes[1]) if v.dtype == jnp.float32 else v, DATA
    )
    answer = jax.eval_shape(lambda data: runs(solver, data, w0=w0)[0], data)
    assert tuple(v.dtype for v in answer) == dtypes


ADD_OR_REMOVE = dpb.Neighbours.ADD_OR_REMOVE_ONE


@both
def test_under_add_or_remove_one_the_score_is_given_too(solver):
    means = [name for name in PAID[solver] if name in ("moments", "score", "remoments")]
    parts = {name: getattr(solver, name) for name in PAID[solver] if name not in means}
    parts = {
        k: dataclasses.replace(v, neighbours=ADD_OR_REMOVE) for k, v in parts.items()
    }
    words = "=, ".join(means)
    with pytest.raises(ValueError, match=f"same relation, {words}= too"):
        dataclasses.replace(solver, **parts)
    mean = dataclasses.replace(solver.score, neighbours=ADD_OR_REMOVE)
    given = dataclasses.replace(solver, **parts, **dict.fromkeys(means, mean))
    sizes = dpb.Sizes(30, 60, "disjoint")
    plan = dpb.calibrate(WEIGHTING, given, BUDGET, sizes=sizes)
    assert plan.solver.neighbours is dpb.Neighbours.ADD_OR_REMOVE_ONE


@both
def test_other_problems_and_splits_are_refused_with_the_remedy(solver):
    mixing = dpb.applications.source_mixing(dpb.logistic_loss, K)
    sizes = dpb.Sizes(30, 60)
    with pytest.raises(TypeError, match=r"SourceWeighting.*Give dpb.source_weighting"):
        dpb.calibrate(mixing, solver, BUDGET, sizes=sizes)
    count = len(solver.budget_split)
    with pytest.raises(ValueError, match=f"budget_split must be {count} positive"):
        dataclasses.replace(solver, budget_split=(0.5, 0.5))
    with pytest.raises(ValueError, match=r"keep_above must be in \[-1, 1\]"):
        dataclasses.replace(solver, keep_above=2.0)
    with pytest.raises(TypeError, match="fit must"):
        dataclasses.replace(solver, fit=SELECTED)


def test_fits_on_both_levels_need_sizes():
    with pytest.raises(ValueError, match=r"Call solver.with_sizes\(sizes\)"):
        OneLevel(GD, "both").objective("model", WEIGHTING, W0, {})
    with pytest.raises(ValueError, match="reads must be one of"):
        OneLevel(GD, "all")
    with pytest.raises(ValueError, match=r"Call solver.with_sizes\(sizes\)"):
        _ = OF_BOTH.fit_penalty
    with pytest.raises(ValueError, match="fit_reads must be one of"):
        dataclasses.replace(OF_BOTH, fit_reads="all")


def test_starts_of_another_number_of_sources_are_refused():
    with pytest.raises(ValueError, match=r"x must have shape \(3,\)"):
        WEIGHTING.check((jnp.zeros(2), W0[1]), DATA)


@functools.cache
def losses():
    """Of released models, where validation records are few and one source is flipped.

    With a fixed key; in this order: one level alone, kept sources, mixtures.
    """
    data, test = levels(100, 6000, d=20), records(4000, 2, d=20)
    rule = dpb.outputs.TailMean()

    def descent(num_steps, clip_norm, step_size):
        return dpb.NoisyGD(num_steps, clip_norm, step_size, output=rule)

    model, fit = descent(30, 1.0, 0.3), descent(50, 1.0, 5.0)
    models, mixture = descent(50, 1.2, 10.0), descent(10, 2.0, 0.15)
    solvers = (
        OneLevel(model, "upper"),
        *(OneLevel(fit, level) for level in ("lower", "both")),
        SelectedSources(model, fit),
        MixedSources(models, mixture, fit, mixture),
    )

    def loss(solver):
        found = dpb.fit(
            dpb.source_weighting(dpb.logistic_loss, K),
            solver,
            data,
            (jnp.zeros(K), jnp.zeros(20)),
            budget=BUDGET,
            people="disjoint",
            key=jax.random.key(1),
        )
        return float(mean_loss(found.value[1], test))

    return [loss(solver) for solver in solvers]


@pytest.mark.parametrize("ours", [3, 4])
def test_kept_sources_and_mixtures_are_better_than_one_level_alone(ours):
    found = losses()
    assert found[ours] < min(found[:3]) - 0.03
