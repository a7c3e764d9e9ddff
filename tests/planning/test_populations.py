"""The default populations: sizes, labels and features of their synthetic data."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpbilevel as dpb
from dpbilevel import planning
from dpbilevel.planning import auto_plan
from tests.cases import fast_first, slow

SIZES = dpb.Sizes(100, 3000, "disjoint")
SOURCES = dpb.source_weighting(dpb.logistic_loss, 5)
W0 = (jnp.zeros(5), jnp.zeros(6))


@pytest.mark.parametrize(
    ("population", "expected"),
    [
        (planning.GoodOrBad(), np.ones(5)),
        *slow((planning.Tables(), 1 / np.arange(1.0, 6))),
    ],
)
def test_synthetic_data_have_the_planned_sizes_and_sources(population, expected):
    drawn = population.draw(SOURCES, W0, SIZES, jax.random.key(0))
    assert SOURCES.sizes_of(drawn.data, "disjoint") == SIZES
    source = np.asarray(drawn.data.lower["source"])
    shares = np.bincount(source, minlength=5) / SIZES.lower
    np.testing.assert_allclose(shares, expected / np.sum(expected), atol=0.03)
    norms = np.linalg.norm(drawn.data.lower["features"], axis=1)
    np.testing.assert_allclose(norms, 1, rtol=1e-5)


@pytest.mark.slow
def test_labels_follow_the_distribution_of_the_models():
    population = planning.GoodOrBad(test_size=1)
    drawn = population.draw(
        SOURCES, W0, dpb.Sizes(1, 50_000, "disjoint"), jax.random.key(3)
    )
    target, models = population.models(
        SOURCES, (6,), jax.random.split(jax.random.key(3), 5)[0]
    )
    lower = drawn.data.lower
    # An opposite one last, for the control.
    for source, sign in zip((0, 2, 3, 4, 1), (1, 0, 1, -1, -1), strict=True):
        rows = np.asarray(lower["source"]) == source
        margin = np.asarray(lower["features"])[rows] @ np.asarray(target) * sign
        np.testing.assert_allclose(models[source], sign * target)
        excess = (np.asarray(lower["label"])[rows] > 0) - 1 / (1 + np.exp(-margin))
        assert abs(np.mean(excess)) < 4 * 0.5 / np.sqrt(rows.sum())
    wrong = (np.asarray(lower["label"])[rows] > 0) - 1 / (1 + np.exp(margin))
    assert abs(np.mean(wrong * np.sign(margin))) > 0.1  # the control: another sign


@pytest.mark.slow
def test_synthetic_data_of_classes_have_labels_of_the_columns():
    def loss(y, record):
        return -jax.nn.log_softmax(record["features"] @ y)[record["label"]]

    problem = dpb.FiniteSum(loss)
    drawn = planning.Alike(test_size=10).draw(
        problem, jnp.zeros((4, 3)), 500, jax.random.key(0)
    )
    assert set(np.asarray(drawn.data["label"]).tolist()) == {0, 1, 2}


@pytest.mark.slow
def test_a_population_of_tables_is_none_of_the_sources_and_near_a_mixture_of_them():
    columns, population = 40, planning.Tables()
    problem = dpb.source_weighting(dpb.logistic_loss, 12)
    target, models = map(
        np.asarray, population.models(problem, (columns,), jax.random.key(0))
    )
    rows = np.asarray(population.features(jax.random.key(1), 2000, columns))
    far = np.std(rows @ (models - target).T, axis=0) / np.std(rows @ target)
    assert far.min() > 0.2
    mean = models.mean(0) - target
    assert np.std(rows @ mean) / np.std(rows @ target) < 0.5 * far.mean()
    agrees = np.mean(np.isclose(models, target))
    assert 0.3 < agrees < 0.7
    # Categories: each block of columns has one entry that is not zero.
    entries = np.count_nonzero(rows, axis=1)
    assert (entries == entries[0]).all()
    assert entries[0] < 10


@pytest.mark.parametrize(("useful", "count"), [(0.5, 5), *slow((0.3, 3), (0.01, 1))])
def test_a_share_of_the_groups_of_noise_groups_matters(useful, count):
    groups = np.arange(40) // 4
    problem = dpb.penalty_tuning(dpb.logistic_loss, groups)
    population = planning.NoiseGroups(useful=useful)
    target, _ = population.models(problem, (40,), jax.random.key(0))
    matters = np.abs(np.asarray(target)).reshape(10, 4).max(1) > 0
    assert matters.sum() == count


@pytest.mark.slow
def test_coefficients_of_groups_fall_with_their_rank():
    groups = np.arange(6_000) // 1_000
    problem = dpb.penalty_tuning(dpb.logistic_loss, groups)
    for useful, decay in ((0.5, 1.0), (1.0, 0.0)):
        population = planning.NoiseGroups(useful=useful, decay=decay)
        target, _ = population.models(problem, (6_000,), jax.random.key(0))
        sizes = np.sort(np.asarray(target).reshape(6, -1).std(1))[::-1]
        rank = np.arange(1, 7)
        expected = np.where(rank <= 6 * useful, rank**-decay, 0.0)
        np.testing.assert_allclose(sizes / sizes[0], expected, atol=0.1)


@pytest.mark.parametrize(
    ("shape", "longest"), [((6,), 1.0), *slow(((6, 3), 2**0.5), ((6, 2), 2**0.5))]
)
def test_gradients_have_the_largest_norm_at_most_and_labels_do_not_depend_on_it(
    shape, longest
):
    # A softmax gradient is up to the root of 2 times as long as the features.
    problem, w0 = dpb.source_weighting(dpb.logistic_loss, 3), (jnp.zeros(3),)
    w0 = (*w0, jnp.zeros(shape))
    drawn = [
        [
            population.draw(problem, w0, SIZES, jax.random.key(5)).data.lower
            for population in auto_plan._populations(problem, w0, norm, None, None)
        ]
        for norm in (1.0, 8.0)
    ]
    for short, long in zip(*drawn, strict=True):
        np.testing.assert_allclose(8 * short["features"], long["features"], rtol=1e-6)
        lengths = np.linalg.norm(short["features"], axis=1)
        np.testing.assert_allclose(longest * lengths, 1, rtol=1e-5)
        assert np.mean(short["label"] == long["label"]) > 0.999  # up to rounding


POPULATIONS = [
    planning.GoodOrBad(),
    planning.Shifted(),
    planning.Tables(),
    planning.Alike(rate=0.5),
]


def chances_of(population, shape):
    """Of every class, for records of the population's population."""
    features = population.clustered_features(jax.random.key(0), 4000, shape)
    scores = features @ population.teachers(jax.random.key(1), 1, shape)[0]
    if scores.ndim == 1:
        scores = jnp.stack([jnp.zeros_like(scores), scores], 1)
    return jax.nn.softmax(scores)


@pytest.mark.parametrize(
    "population", POPULATIONS, ids=lambda population: population.name
)
@pytest.mark.parametrize("shape", [(20,), *slow(((20, 3),), ((200, 30),))])
def test_labels_of_many_classes_follow_the_features_no_less_than_of_two(
    population, shape
):
    chances = chances_of(population, shape)
    assert 0.7 < float(jnp.mean(jnp.max(chances, 1))) < 0.99


@pytest.mark.slow
@pytest.mark.parametrize(
    "population", fast_first(POPULATIONS), ids=lambda population: population.name
)
def test_records_of_several_classes_gather_by_class_and_those_of_two_do_not(population):
    def between(shape):
        """How far apart the means of the classes are, in spreads of the features."""
        rows = population.clustered_features(jax.random.key(0), 4000, shape)
        nearest = np.asarray(jnp.argmax(chances_of(population, shape), 1))
        means = np.stack([rows[nearest == k].mean(0) for k in np.unique(nearest)])
        return np.linalg.norm(np.std(means, 0)) / np.linalg.norm(np.std(rows, 0))

    assert between((200, 10)) > 0.45
    assert between((200,)) < 0.25


@pytest.mark.parametrize(
    "population", POPULATIONS, ids=lambda population: population.name
)
@pytest.mark.parametrize("classes", [2, *slow(4)])
@pytest.mark.parametrize("columns", [1, *slow(3)])
def test_synthetic_data_of_few_features_have_finite_features_and_several_labels(
    population, columns, classes
):
    feature = jax.ShapeDtypeStruct((columns,), "float32")
    record = {"features": feature, "label": planning.Classes(classes)}
    population = dataclasses.replace(population, records=record)
    problem = dpb.source_weighting(dpb.logistic_loss, 4)
    sizes = dpb.Sizes(10, 40, "disjoint")
    key = jax.random.key(1)
    drawn = population.draw(problem, (jnp.zeros(4), jnp.zeros(columns)), sizes, key)
    assert jnp.all(jnp.isfinite(drawn.data.lower["features"]))
    # An intercept alone decides nearly all labels if there are one or two features.
    fewest = 1 if classes == 2 else classes
    assert len(np.unique(drawn.test["label"])) >= fewest
