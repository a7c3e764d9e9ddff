"""Values that are not formed: equal to formed ones, whatever the loss is made of."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpbilevel.privacy.budget import Neighbours
from dpbilevel.privacy.per_example.clipping import clipped_mean, one_record, unsealed
from dpbilevel.privacy.per_example.factored import Factored, SparseRows, is_structured
from dpbilevel.privacy.per_example.structure import opened
from dpbilevel.privacy.records.rows import Shards
from tests.cases import fast_first, slow

ADDED = Neighbours.ADD_OR_REMOVE_ONE


def normal(*shape, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal(shape, np.float32)


def opaque(value):
    """The same value, by an operation that the interpreter does not look through."""
    return jax.lax.reduce_precision(value, 8, 23)


def formed(tree):
    return jax.tree.map(
        lambda v: v.dense() if is_structured(v) else v, tree, is_leaf=is_structured
    )


@jax.custom_vjp
def doubled(x):
    return 2 * x


doubled.defvjp(lambda x: (2 * x, None), lambda _, g: (3 * g,))


def linear(w, record):
    return jnp.logaddexp(0, -record[1] * (record[0] @ w))


def mlp(w, record):
    hidden = jax.nn.relu(record[0] @ w["a"] + w["b"])
    return -jax.nn.log_softmax(hidden @ w["c"])[record[1]]


def shared(w, record):
    return jnp.sum(jnp.tanh(jnp.tanh(record @ w) @ w.T) ** 2)


def called_twice(w, record):
    layer = jax.jit(lambda x: jnp.sin(x @ w))
    return jnp.sum(layer(record) * layer(record + 1))


def attention(w, record):
    q, k, v = (jnp.einsum("td,dhk->thk", record, w[name]) for name in "qkv")
    shares = jax.nn.softmax(jnp.einsum("thk,shk->hts", q, k))
    mixed = jnp.einsum("hts,shk->thk", shares, v)
    return jnp.sum(jnp.einsum("thk,hkd->td", mixed, w["o"]) ** 2)


def convolution(w, image, strides=(1, 1), padding="SAME", **options):
    layout = ("NHWC", "HWIO", "NHWC")
    out = jax.lax.conv_general_dilated(
        image[None], w, strides, padding, dimension_numbers=layout, **options
    )
    return jnp.sum(jnp.tanh(out) ** 2)


def embedding(w, record):
    return jnp.sum(jnp.tanh(w["table"][record] @ w["a"]) ** 2)


def layer_norm(w, record):
    x = record @ w["a"]
    x = w["scale"] * (x - x.mean()) / jnp.sqrt(x.var() + 1e-3) + w["shift"]
    return jnp.sum(jnp.sin(x))


def adapted(w, record):
    x = jnp.tanh((w["b"] @ w["a"]) @ record)
    return jnp.sum(jnp.sin(record @ (w["a"].T @ w["b"].T)) * x)


def by_side(w, record):
    whole = jnp.einsum("ia,abk->ibk", w["whole"], w["rest"])
    part = jnp.einsum("ia,abk->ibk", w["part"], w["some"])
    along = jnp.einsum("i,ibk->bk", record[:, 0], whole)
    return jnp.sum(jnp.sin(along)) + jnp.sum(
        jnp.sin(jnp.einsum("ib,ibk->k", record, part))
    )


def reshaped(w, record):
    heads = record @ w.reshape(8, 30)
    return jnp.sum(jnp.tanh(heads.reshape(5, 6)) ** 2)


HEADS = {name: normal(40, 2, 20, seed=i) for i, name in enumerate("qkv")}
HEADS |= {"o": normal(2, 20, 40, seed=3)}
LAYERS = {"a": normal(5, 7), "b": normal(7, seed=2), "c": normal(7, 3, seed=3)}
TABLE = {"table": normal(50, 8), "a": normal(8, 6, seed=1)}
NORMED = {"a": normal(5, 7), "scale": jnp.ones(7), "shift": jnp.zeros(7)}
LOW_RANK = {"b": normal(9, 6), "a": normal(6, 5, seed=1)}
SIDES = {"whole": normal(5, 4), "rest": normal(4, 3, 6, seed=1)}
SIDES |= {"part": normal(5, 4, seed=2), "some": normal(4, 3, 6, seed=3)}
ROWS = jnp.asarray([3, 7, 3, -1, 60])
VECTOR, MATRIX = normal(5, seed=3), normal(5, 7)
IMAGE, KERNEL = normal(6, 6, 2), normal(3, 3, 2, 4, seed=1)
# Loss, parameters, record, and how many leaves are factored and sparse.
LOSSES = {
    "linear": (linear, normal(5), (normal(5, seed=1), 1.0), 1, 0),
    "a sum of products": (lambda w, r: jnp.sum(w * r) ** 2, normal(5), VECTOR, 1, 0),
    "mlp": (mlp, LAYERS, (normal(5, seed=4), 1), 2, 0),
    "weights shared with their transpose": (shared, MATRIX, VECTOR, 1, 0),
    "a layer called twice": (called_twice, MATRIX, VECTOR, 1, 0),
    "a difference": (
        lambda w, r: jnp.sum(jnp.sin(r @ w) - jnp.sin(2 * r @ -w) / 3),
        MATRIX,
        VECTOR,
        1,
        0,
    ),
    "checkpoint": (
        lambda w, r: jnp.sum(jax.checkpoint(lambda x: jnp.sin(x @ w))(r)),
        MATRIX,
        VECTOR,
        1,
        0,
    ),
    "attention": (attention, HEADS, normal(3, 40, seed=7), 4, 0),
    "matrix on the left": (
        lambda w, r: jnp.sum((w @ r) ** 2),
        normal(40, 50),
        normal(50, 6, seed=2),
        1,
        0,
    ),
    "custom_vjp": (lambda w, r: jnp.sum(doubled(r @ w)), MATRIX, VECTOR, 1, 0),
    "stop_gradient": (
        lambda w, r: jnp.sum(jnp.sin(r @ w) * jax.lax.stop_gradient(r @ w)),
        MATRIX,
        VECTOR,
        1,
        0,
    ),
    "low rank": (adapted, LOW_RANK, VECTOR, 2, 0),
    "products by one side": (by_side, SIDES, normal(5, 3, seed=4), 3, 0),
    "reshaped weights": (reshaped, normal(8, 5, 6), normal(8, seed=3), 1, 0),
    "no gradient": (lambda w, r: jnp.sum(r) + 0 * jnp.sum(w), MATRIX, VECTOR, 0, 0),
    "layer norm": (layer_norm, NORMED, VECTOR, 1, 0),
    "embedding": (embedding, TABLE, ROWS, 0, 1),
    "convolution": (convolution, KERNEL, IMAGE, 0, 0),
    "convolution with strides": (
        functools.partial(convolution, strides=(2, 1), padding=((2, 0), (1, 3))),
        KERNEL,
        IMAGE,
        0,
        0,
    ),
    "dilated convolution": (
        functools.partial(
            convolution,
            padding=((1, 2), (0, 1)),
            rhs_dilation=(2, 1),
            lhs_dilation=(1, 2),
        ),
        KERNEL,
        IMAGE,
        0,
        0,
    ),
    "convolution in groups": (
        functools.partial(convolution, feature_group_count=2),
        normal(3, 3, 1, 4),
        IMAGE,
        0,
        0,
    ),
    "wide convolution of few places": (
        functools.partial(convolution, padding="VALID"),
        normal(5, 5, 8, 64, seed=1),
        normal(6, 6, 8),
        1,
        0,
    ),
    "scan": (
        lambda w, r: jnp.sum(
            jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), r, None, length=3)[0]
        ),
        normal(5, 5),
        VECTOR,
        0,
        0,
    ),
    "a penalty beside the product": (
        lambda w, r: jnp.sum(jnp.sin(r @ w)) + jnp.sum(w**2),
        MATRIX,
        VECTOR,
        0,
        0,
    ),
    "a batched product": (
        lambda w, r: jnp.sum(jnp.einsum("bi,bij->bj", r, w) ** 2),
        normal(4, 5, 6),
        normal(4, 5, seed=2),
        0,
        0,
    ),
    "places enough to form the matrix": (
        lambda w, r: jnp.sum(jnp.sin(r @ w)),
        normal(3, 4),
        normal(50, 3, seed=2),
        0,
        0,
    ),
    "a scalar": (lambda w, r: w * r, jnp.asarray(2.0), jnp.asarray(3.0), 0, 0),
}


def factored(fun, record, *, products):
    """The function of a record, with leaves that are not formed if that is cheaper."""
    run, constants = opened(fun, record, Shards())
    return lambda record: run(constants, record, products=products)


def wide(leaf):
    leaf = jnp.asarray(leaf)
    return leaf.astype(float) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf


def shapes(record):
    return one_record(jax.tree.map(lambda v: jnp.asarray(v)[None], record))


def check_equal(found, expected):
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    for ours, theirs in pairs:
        scale = float(jnp.max(jnp.abs(theirs), initial=1e-3))
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12 * scale)


# Those that compile longest, beside shorter ones of the same rules.
LONG = {"attention", "low rank", "convolution in groups", "products by one side"}
LONG |= {"wide convolution of few places", "dilated convolution", "layer norm"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(v, marks=pytest.mark.slow if v in LONG else ()) for v in LOSSES],
)
def test_the_gradient_is_that_of_jax(name, x64):
    loss, w, record, products, sparse = LOSSES[name]
    w, record = jax.tree.map(wide, (w, record))

    def gradient(record):
        fun = functools.partial(jax.grad(loss), w)
        return factored(fun, shapes(record), products=True)(record)

    leaves = jax.tree.leaves(jax.eval_shape(gradient, record), is_leaf=is_structured)
    kinds = [
        sum(isinstance(v, kind) for v in leaves) for kind in (Factored, SparseRows)
    ]
    assert kinds == [products, sparse]

    @jax.jit
    def both(rows):
        found = jax.vmap(lambda r: formed(gradient(r)))(rows)
        return found, jax.vmap(functools.partial(jax.grad(loss), w))(rows)

    check_equal(*both(jax.tree.map(lambda v: jnp.stack([v, v]), record)))


@pytest.mark.parametrize("name", ["mlp", *slow("attention", "embedding", "layer norm")])
def test_the_derivative_of_a_gradient_is_structured_and_that_of_jax(name, x64):
    loss, w, record, products, sparse = LOSSES[name]
    w, record = jax.tree.map(wide, (w, record))
    tangent = jax.tree.map(lambda v: normal(*v.shape, seed=9).astype(float), w)

    def product(record):
        return jax.jvp(lambda w: jax.grad(loss)(w, record), (w,), (tangent,))

    fun = factored(product, shapes(record), products=True)
    check_equal(*jax.jit(lambda r: (formed(fun(r)), product(r)))(record))
    _, along = jax.eval_shape(fun, record)
    leaves = jax.tree.leaves(along, is_leaf=is_structured)
    assert sum(map(is_structured, leaves)) == products + sparse


def test_without_products_only_multiples_of_rows_are_left_unformed():
    record = shapes((normal(5), 1))
    fun = factored(
        lambda r: (jax.grad(mlp)(LAYERS, r), jax.grad(embedding)(TABLE, r[1] + ROWS)),
        record,
        products=False,
    )
    found = jax.eval_shape(fun, (normal(5), 1))
    leaves = jax.tree.leaves(found, is_leaf=is_structured)
    assert [type(v) for v in leaves if is_structured(v)] == [SparseRows]
    fun = factored(
        lambda r: jax.grad(linear)(normal(5), r),
        shapes((normal(5), 1.0)),
        products=False,
    )
    assert jax.eval_shape(fun, (normal(5), 1.0)).narrow


def batch_of(record, n):
    return jax.tree.map(
        lambda v: jnp.stack([jnp.asarray(v) * (1 + i % 7) for i in range(n)]), record
    )


@pytest.mark.parametrize("precision", ["float", *slow("grid")])
@pytest.mark.parametrize(
    "name",
    [
        *("linear", "a layer called twice"),
        *(pytest.param(v, marks=pytest.mark.slow) for v in ("attention", "mlp")),
    ],
)
def test_the_clipped_mean_is_that_of_formed_gradients(name, precision):
    loss, w, record, *_ = LOSSES[name]
    records = batch_of(record, 70)
    records = jax.tree.map(
        lambda v: v % 3 if v.dtype == jnp.int32 else v, records
    )  # classes

    def mean(change):
        def fun(record):
            return jax.tree.map(change, jax.grad(loss)(w, record))

        return unsealed(clipped_mean(fun, records, clip_norm=1.0, precision=precision))

    ours = jax.jit(mean, static_argnums=0)(lambda v: v)
    theirs = jax.jit(mean, static_argnums=0)(opaque)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-2 * float(jnp.abs(b).max()))


@pytest.mark.parametrize("precision", ["float", *slow("grid")])
def test_rows_of_a_table_add_up_and_those_out_of_range_are_none(precision):
    w = normal(50, 3)
    records = jnp.asarray([[3, 7, 3], [-1, 3, 49], [60, 7, -80]])

    def mean(fun, rows):
        return unsealed(clipped_mean(fun, rows, clip_norm=0.5, precision=precision))

    def gradient(record):
        return jax.grad(lambda w: jnp.sum(jnp.sin(w[record])))(w)

    def means(rows):
        return mean(gradient, rows), mean(lambda r: opaque(gradient(r)), rows)

    found, expected = jax.jit(means)(records)
    np.testing.assert_allclose(found, expected, atol=3e-6)
    assert np.flatnonzero(np.any(np.asarray(found) != 0, axis=1)).tolist() == [3, 7, 49]


@pytest.mark.parametrize("neighbours", fast_first(Neighbours))
def test_no_array_of_the_size_of_a_matrix_is_formed_for_a_record(neighbours):
    w, n = {"a": normal(300, 200), "b": jnp.zeros(200), "c": normal(200, 3)}, 128
    records = jax.ShapeDtypeStruct((n, 300), jnp.float32), jnp.zeros(n, jnp.int32)

    def peak(change):
        def mean(records):
            return clipped_mean(
                lambda record: jax.tree.map(change, jax.grad(mlp)(w, record)),
                records,
                clip_norm=1.0,
                microbatch=n,
                neighbours=neighbours,
                precision="float",
            ).raw

        compiled = jax.jit(mean).lower(records).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    matrices = n * 4 * 300 * 200
    assert peak(lambda v: v) < 0.2 * matrices
    assert peak(opaque) > matrices  # the control


@pytest.mark.slow
def test_a_mean_summed_for_replace_one_is_refused_under_the_other_relation():
    records = (normal(8, 5), jnp.zeros(8, jnp.int32))
    fun = functools.partial(jax.grad(mlp), LAYERS)
    options = {"clip_norm": 1.0, "denominator": 8.0}
    bounded = clipped_mean(fun, records, **options)
    with pytest.raises(ValueError, match="give clipped_mean neighbours="):
        bounded.sensitivity(ADDED)
    bounded = clipped_mean(fun, records, neighbours=ADDED, **options)
    assert float(bounded.sensitivity(ADDED)) == 1 / 8
    # Multiples of rows are rounded one by one: such a mean is good for either.
    linear_mean = clipped_mean(
        functools.partial(jax.grad(linear), normal(5)),
        (records[0], jnp.ones(8)),
        **options,
    )
    assert float(linear_mean.sensitivity(ADDED)) == 1 / 8


@pytest.mark.slow
def test_integers_on_the_way_to_a_value_are_left_alone():
    counts = jnp.arange(12).reshape(3, 4)

    def words(row):
        return jnp.zeros(20, int).at[row].add(1).astype(jnp.float32)

    for fun in (words, lambda row: (row * row[0] // 2).astype(jnp.float32)):
        found = unsealed(clipped_mean(fun, counts, clip_norm=100.0, precision="float"))
        np.testing.assert_allclose(found, jax.vmap(fun)(counts).mean(0), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [jnp.int8, *slow(jnp.uint8, jnp.int16)])
def test_rows_out_of_range_take_no_part_in_the_norm(kind):
    indices = jnp.asarray([[1, 100, 100, 100, 100]], kind)

    def gradient(row):
        def loss(table):
            rows = table.at[row].get(mode="fill", fill_value=0)
            return jnp.sum(rows * jnp.where(row[:, None] < 100, 1.0, jnp.inf))

        return jax.grad(loss)(jnp.zeros((30, 4)))

    bounded = clipped_mean(gradient, indices, clip_norm=2.0, precision="grid")
    found = np.asarray(unsealed(bounded))
    np.testing.assert_allclose(found, np.eye(30)[1][:, None] * np.ones(4), atol=1e-5)


@pytest.mark.parametrize("bias", [0.0, 0.5])
def test_numbers_that_a_loss_closes_over_are_read_inside_loops(bias):
    params = {"w": jnp.ones(3), "b": jnp.asarray(bias)}
    rng = np.random.default_rng(0)
    records = rng.normal(size=(200, 3)).astype(np.float32), np.ones(200, np.float32)

    def loss(params, record):
        return jnp.logaddexp(0.0, -record[1] * (record[0] @ params["w"] + params["b"]))

    def mean(params, microbatch):
        gradient = lambda record: jax.grad(loss)(params, record)  # noqa: E731
        bounded = clipped_mean(
            gradient, records, clip_norm=1.0, microbatch=microbatch, precision="grid"
        )
        return unsealed(bounded)

    chex.assert_trees_all_close(
        mean(params, 64), jax.jit(lambda v: mean(v, 200))(params), atol=1e-6
    )
