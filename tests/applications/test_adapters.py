"""Low-rank adapters, and initial points of which a part is trained."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpbilevel as dpb
from dpbilevel.applications import LowRankLinear, adapters, low_rank, merged
from dpbilevel.core import problem as problems
from dpbilevel.runs import run as run_module
from tests.zoo.networks import mlp

PLAIN = mlp(3, 2, 4, 1)
MODEL = eqx.filter_jit(low_rank)(PLAIN, 2, scale=0.5, key=jax.random.key(1))
TRAINABLE = adapters(MODEL)
ROWS = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)
BUDGET = dpb.PrivacyBudget(8.0, 1e-3)
SOLVER = dpb.NoisyGD(2, clip_norm=1.0, step_size=0.5)


def error(model, row):
    return jnp.sum((model(row) - 1.0) ** 2)


PROBLEM = dpb.FiniteSum(error)


def fitted(model=MODEL, trainable=TRAINABLE, **options):
    given = {"budget": BUDGET, "precision": "float", "key": jax.random.key(2)}
    given |= {"trainable": trainable} | options
    return dpb.fit(PROBLEM, SOLVER, ROWS, model, **given)


@pytest.fixture(scope="module")
def solution():
    return fitted()


def deltas(model):
    return [np.asarray(jnp.asarray(v.up) @ v.down) for v in model.layers]


def test_an_adapter_starts_as_its_layer_and_merges_into_one(solution):
    row = ROWS[0]
    np.testing.assert_array_equal(MODEL(row), PLAIN(row))
    layer = solution.value.layers[0]
    assert isinstance(layer, LowRankLinear)
    want = layer.linear(row) + 0.5 * layer.up @ (layer.down @ row)
    np.testing.assert_allclose(layer(row), want, rtol=1e-6)
    plain = merged(solution.value)
    assert jax.tree.structure(plain) == jax.tree.structure(PLAIN)
    np.testing.assert_allclose(plain(row), solution.value(row), rtol=1e-5)


def test_what_is_not_trained_keeps_its_bits(solution):
    for before, after in zip(MODEL.layers, solution.value.layers, strict=True):
        np.testing.assert_array_equal(after.linear.weight, before.linear.weight)
        np.testing.assert_array_equal(after.linear.bias, before.linear.bias)
        assert not np.array_equal(after.up, before.up)
    assert solution.value.activation is MODEL.activation


def test_noise_and_clipping_see_the_trained_part_alone(solution):
    trained = jax.tree.leaves(eqx.filter(MODEL, TRAINABLE))
    numbers = sum(v.size for v in trained)
    assert solution.report.forecast[0].coordinates == numbers
    plan = dpb.calibrate(
        PROBLEM, SOLVER, BUDGET, sizes=20, w0=MODEL, trainable=TRAINABLE
    )
    assert plan.report.forecast[0].coordinates == numbers


def products(trainable):
    """The number of matrix products in the gradient of one record."""
    problem, w0, _ = problems.arrays_of("fit", PROBLEM, MODEL, trainable)
    gradient = problem.record_gradients(w0)["records"]
    jaxpr = jax.make_jaxpr(gradient)(ROWS[0])
    return str(jaxpr).count("dot_general")


def test_no_gradient_of_what_is_not_trained_is_computed():
    first = jax.tree.map(lambda _: False, MODEL)
    first = eqx.tree_at(lambda m: m.layers[-1].up, first, True)
    counts = [products(spec) for spec in (first, TRAINABLE, eqx.is_array)]
    assert counts == sorted(set(counts))


@pytest.mark.slow
def test_models_with_other_constants_share_a_program(solution, tmp_path):
    run_module._steps.clear_cache()
    moved = jax.tree.map(lambda v: v + 1 if eqx.is_array(v) else v, PLAIN)
    other = low_rank(moved, 2, scale=0.5, key=jax.random.key(1))
    folder = tmp_path / "a"
    plan = dpb.calibrate(PROBLEM, SOLVER, BUDGET, sizes=20, precision="float")

    def start(model):
        options = {"key": jax.random.key(2), "trainable": TRAINABLE}
        return dpb.start(PROBLEM, plan, ROWS, model, **options)

    one, two = (dpb.advance(start(model), 1) for model in (MODEL, other))
    assert run_module._steps._cache_size() == 1
    assert not np.array_equal(one.value.layers[0].up, two.value.layers[0].up)
    one.save(folder)
    run = dpb.resume(folder, PROBLEM, plan, ROWS, MODEL, trainable=TRAINABLE)
    for got, want in zip(
        deltas(dpb.advance(run).value), deltas(solution.value), strict=True
    ):
        np.testing.assert_array_equal(got, want)
    with pytest.raises(ValueError, match="the loss or the solver has changed"):
        dpb.resume(folder, PROBLEM, plan, ROWS, other, trainable=TRAINABLE)


def test_a_saved_model_has_the_same_adapters_in_the_same_layers(solution, tmp_path):
    solution.save(tmp_path / "a")
    # The new model has other weights and adapters, all of which are replaced.
    fresh = low_rank(
        mlp(3, 2, 4, 1, seed=8),
        2,
        scale=0.5,
        key=jax.random.key(9),
    )
    found = dpb.load(tmp_path / "a", like=fresh).value
    for got, want in zip(deltas(found), deltas(solution.value), strict=True):
        assert np.any(want)
        np.testing.assert_array_equal(got, want)
    np.testing.assert_allclose(found(ROWS[0]), solution.value(ROWS[0]), rtol=1e-5)
    wider = low_rank(PLAIN, 3, key=jax.random.key(9))
    with pytest.raises(ValueError, match="does not fit like="):
        dpb.load(tmp_path / "a", like=wider)


def test_layers_can_be_chosen():
    model = low_rank(PLAIN, 1, where=lambda m: [m.layers[1]], key=jax.random.key(3))
    kinds = [type(layer) for layer in model.layers]
    assert kinds == [eqx.nn.Linear, LowRankLinear]
    with pytest.raises(ValueError, match=r"no equinox.nn.Linear"):
        low_rank({"w": np.ones(3)}, 1, key=jax.random.key(0))


def ridge(x, model, row):
    decay = sum(jnp.sum(v**2) for v in jax.tree.leaves(eqx.filter(model, TRAINABLE)))
    return error(model, row) + jnp.exp(x) * decay


def upper(x, model, row):
    return error(model, row)


@pytest.mark.reuses_keys
@pytest.mark.slow  # two programs of two levels
def test_on_two_levels_a_trained_part_gives_the_bits_of_losses_split_by_hand():
    part, rest = eqx.partition(MODEL, TRAINABLE)

    def split(loss):
        return lambda x, part, row: loss(x, eqx.combine(part, rest), row)

    whole = dpb.BilevelProblem(upper=upper, lower=ridge)
    by_hand = dpb.BilevelProblem(upper=split(upper), lower=split(ridge))
    solver = dpb.SingleLoopBilevel(
        2, linear_step_size=0.1, step_size=0.5, lower_step_size=0.5
    )
    x, data = jnp.zeros(()), dpb.Levels(ROWS[:8], ROWS[8:])
    given = {"budget": BUDGET, "sizes": dpb.Sizes(8, 12, "disjoint")}
    given |= {"precision": "float", "key": jax.random.key(2)}
    options = {"trainable": (True, TRAINABLE)}
    got = dpb.fit(whole, solver, data, (x, MODEL), **options, **given).value
    want = dpb.fit(by_hand, solver, data, (x, part), **given).value
    np.testing.assert_array_equal(got[0], want[0])
    assert got[0] != x
    for mine, theirs in zip(
        deltas(got[1]), deltas(eqx.combine(want[1], rest)), strict=True
    ):
        assert np.any(mine)
        np.testing.assert_array_equal(mine, theirs)
    frozen = [eqx.filter(m, TRAINABLE, inverse=True) for m in (got[1], MODEL)]
    for mine, theirs in zip(*map(jax.tree.leaves, frozen), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize(
    ("trainable", "message"),
    [
        (lambda leaf: False, "selects no array"),
        ((True, False), "trainable= must be a function"),
        # The activation is a leaf, too, and has no axes.
        (lambda leaf: leaf.ndim == 2, "of any leaf, also of those that are no arrays"),
    ],
)
def test_a_filter_that_does_not_fit_is_refused(trainable, message):
    with pytest.raises(ValueError, match=f"fit: .*{message}"):
        fitted(trainable=trainable)
