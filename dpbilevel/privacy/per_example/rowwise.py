"""Functions of one record that `jax.vmap` computes for many without mixing them.

The batching rules of some primitives combine records in one computation. Zero times
NaN, or an option of a backend, then carries the values of one record to another. So a
function of a record may use only primitives whose batching rules keep records apart,
and convolutions are batched here.
"""

import functools
import math
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal, Primitive, primitives
from jaxtyping import Array

from ..exact.floats import accumulation_dtype
from ..jaxprs import bound, inner_jaxprs, retraced
from ..keys import GENERATORS

CONVOLUTION = "conv_general_dilated"
_POOLED = "select_and_scatter_add"  # the derivative of maxima over windows
_MOST_SLICES = 16
# Primitives whose batching rules compute each record's result from that record alone,
# for every value of the others. Each has a canary in tests/attacks/canaries.py.
ROWWISE = frozenset(
    # entry by entry
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e
    bitcast_convert_type cbrt ceil clamp clz complex conj convert_element_type copy cos
    cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt igamma
    igamma_grad_a igammac imag integer_pow is_finite le lgamma log log1p log2
    logistic lt max min mul mulhi name ne neg nextafter not one_minus_square
    optimization_barrier or polygamma population_count pow real
    reduce_precision regularized_incomplete_beta rem round rsqrt select_n shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient
    sub tan tanh xor zeta
    """
    # movements of entries
    """
    broadcast_in_dim concatenate device_put dynamic_slice dynamic_update_slice gather
    pad reshape rev scatter scatter-add scatter-max scatter-min scatter-mul scatter-sub
    sharding_constraint slice split squeeze stack tile transpose unstack
    """
    # reductions, windows, orders
    """
    approx_top_k argmax argmin cumlogsumexp cummax cummin cumprod cumsum reduce
    reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_window
    reduce_window_max reduce_window_min reduce_window_sum reduce_xor
    select_and_gather_add select_and_scatter_add sort top_k
    """
    # products and decompositions
    """
    cholesky conv_general_dilated dot_general eig eigh fft hessenberg
    householder_product lu lu_pivots_to_permutation qr schur svd triangular_solve
    tridiagonal tridiagonal_solve
    """
    # random bits
    """
    random_bits random_clone random_fold_in random_gamma random_seed random_split
    random_unwrap random_wrap threefry2x32
    """
    # calls and loops
    """
    call_hi_primitive closed_call cond custom_jvp_call custom_linear_solve
    custom_vjp_call debug_callback debug_print eval_jaxpr jit pure_callback remat2 scan
    while
    """.split()
)
_OF_JAX: set[Primitive] = set()
# Generators that batch key by key; the rbg family uses the first record's key.
_GENERATORS = *GENERATORS, "philox2x32"


def check_rowwise(owner: str, jaxpr: Any, dependent: Sequence[Any]) -> None:
    """Raise `ValueError` if a primitive may mix records when the jaxpr is batched.

    Only equations that read the record, the variables `dependent`, are checked; others
    are not batched.

    Raises:
        ValueError: A value that depends on the record enters a primitive that is not
            in `ROWWISE`, or that mixes records with these parameters; `owner` is named.
    """
    known = set(dependent)
    for eqn in jaxpr.eqns:
        if not any(not isinstance(v, Literal) and v in known for v in eqn.invars):
            continue
        if not _is_rowwise(eqn):
            name = eqn.primitive.name
            raise ValueError(
                f"{owner}: primitive {name!r} may combine records. {_remedy(name)} See "
                "docs/errors.md#may-combine-records."
            )
        for inner in inner_jaxprs(eqn):
            check_rowwise(owner, inner, inner.invars)
        known.update(eqn.outvars)


def _remedy(name: str) -> str:
    """Return advice for a primitive that is refused."""
    if name.startswith("ragged_dot"):
        return "Replace ragged_dot by a masked matrix product."
    if name == "pure_callback":
        return "Set vmap_method='sequential'."
    if name.startswith("random_"):
        return "Use threefry keys."
    return "Use other functions of jax.numpy or jax.lax, or loop with jax.lax.scan."


def _is_rowwise(eqn: Any) -> bool:
    name = eqn.primitive.name
    if eqn.primitive not in _OF_JAX:  # also of modules that were imported since
        modules = [v for k, v in [*sys.modules.items()] if k.startswith("jax._src")]
        found = (v for module in modules for v in vars(module).values())
        _OF_JAX.update(v for v in found if isinstance(v, Primitive))
    # JAX must have the primitive itself, and not only one of the same name.
    if name not in ROWWISE or eqn.primitive not in _OF_JAX:
        return False
    if name == "call_hi_primitive":  # jax.numpy.searchsorted and nonzero, or one's own
        return type(eqn.params["_prim"]).__module__ == "jax._src.numpy.hijax"
    if name == "pure_callback":
        return eqn.params["vmap_method"] == "sequential"
    dtypes = {v.aval.dtype for v in (*eqn.invars, *eqn.outvars)}
    keys = [v for v in dtypes if jnp.issubdtype(v, jax.dtypes.prng_key)]
    return all(v in _key_dtypes() for v in keys)


@functools.cache
def _key_dtypes() -> frozenset:
    makers = (functools.partial(jax.random.key, 0, impl=name) for name in _GENERATORS)
    return frozenset(jax.eval_shape(make).dtype for make in makers)


def computed(eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
    """Return an equation's results, in a form of which `jax.vmap` mixes no records."""
    params = eqn.params
    if eqn.primitive.name == CONVOLUTION:
        return [_convolution(tuple(params.items()), *operands)]
    if eqn.primitive.name == _POOLED:
        # Slices replace the primitive: few, of maxima, not padded.
        few = math.prod(params["window_dimensions"]) <= _MOST_SLICES
        of_maxima = params["select_prim"].name == "ge"
        if few and of_maxima and not np.any(params["padding"]):
            return [_by_slices(params, *operands)]
    if any(map(_convolves, inner_jaxprs(eqn))):
        params = {key: retraced(value, _inside) for key, value in params.items()}
    return bound(eqn, operands, params)


def _inside(eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
    with eqn.ctx.manager:
        return computed(eqn, operands)


def _convolves(jaxpr: Any) -> bool:
    return any(
        eqn.primitive.name == CONVOLUTION or any(map(_convolves, inner_jaxprs(eqn)))
        for eqn in jaxpr.eqns
    )


def _by_slices(params: dict[str, Any], source: Array, operand: Array) -> Array:
    """Return an array with `source` added at the maxima of windows of `operand`.

    Many times faster on a CPU than the primitive, and equal but for the order of sums.
    """
    strides, sizes = params["window_strides"], operand.shape
    spans = [(n - 1) * step + 1 for n, step in zip(source.shape, strides, strict=True)]
    places = [*np.ndindex(*params["window_dimensions"])]

    def seen(place):
        ends = np.add(place, spans).tolist()
        return jax.lax.slice(operand, place, ends, strides)

    largest, chosen = seen(places[0]), jnp.zeros(source.shape, jnp.int32)
    for number, place in enumerate(places[1:], 1):
        found = seen(place)
        kept = largest >= found  # never where one of them is NaN, like the primitive
        largest = jnp.where(kept, largest, found)
        chosen = jnp.where(kept, chosen, number)
    total = jnp.zeros(sizes, source.dtype)
    for number, place in enumerate(places):
        part = jnp.where(chosen == number, source, 0)
        zipped = zip(place, spans, sizes, strides, strict=True)
        padding = [(at, n - at - span, step - 1) for at, span, n, step in zipped]
        total += jax.lax.pad(part, jnp.zeros((), part.dtype), padding)
    return total


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _convolution(items: tuple, lhs: Array, rhs: Array) -> Array:
    """Return a convolution of two arrays, never made groups of one by `jax.vmap`.

    If both operands are batched, JAX makes one convolution with a group for each
    record. Backends may compute a group with zeros times the values of other groups.
    """
    params = dict(items)

    @jax.custom_batching.custom_vmap
    def convolution(lhs, rhs):
        return primitives.conv_general_dilated_p.bind(lhs, rhs, **params)

    @convolution.def_vmap
    def rule(size, batched, lhs, rhs):
        if batched == [True, False] and params["batch_group_count"] == 1:
            numbers = params["dimension_numbers"]
            axis, out = numbers.lhs_spec[0], numbers.out_spec[0]
            merged = jnp.moveaxis(lhs, 0, axis)
            rows = size * merged.shape[axis + 1]
            shape = (*merged.shape[:axis], rows, *merged.shape[axis + 2 :])
            # The result may be batched once more, by a `jax.vmap` around this one.
            result = _convolution(items, merged.reshape(shape), rhs)
            own = result.shape[out] // size
            shape = (*result.shape[:out], size, own, *result.shape[out + 1 :])
            return jnp.moveaxis(result.reshape(shape), out, 0), True
        axes = [0 if given else None for given in batched]
        return jax.vmap(functools.partial(_by_products, params), axes)(lhs, rhs), True

    return convolution(lhs, rhs)


@_convolution.defjvp
def _convolution_jvp(items, primals, tangents):
    lhs, rhs = primals
    convolve = functools.partial(primitives.conv_general_dilated_p.bind, **dict(items))
    change = convolve(tangents[0], rhs) + convolve(lhs, tangents[1])
    return _convolution(items, lhs, rhs), change


def _by_products(params: dict[str, Any], lhs: Array, rhs: Array) -> Array:
    """Return a convolution as matrix products, one for each place of the window.

    The places are those of the output or of the second operand, whichever has fewer.
    """
    numbers = params["dimension_numbers"]
    zipped = zip(params["padding"], params["lhs_dilation"], strict=True)
    padding = [(0, 0, 0), (0, 0, 0), *((*p, gap - 1) for p, gap in zipped)]
    lhs = jnp.transpose(lhs, numbers.lhs_spec)
    lhs = jax.lax.pad(lhs, jnp.zeros((), lhs.dtype), padding)
    rhs = jnp.transpose(rhs, numbers.rhs_spec)
    strides, gaps = params["window_strides"], params["rhs_dilation"]
    kernel = rhs.shape[2:]
    spans = [(k - 1) * gap + 1 for k, gap in zip(kernel, gaps, strict=True)]
    zipped = zip(lhs.shape[2:], spans, strides, strict=True)
    window = tuple(max(0, (n - span) // stride + 1) for n, span, stride in zipped)

    # Axes: groups, batch, features, then places.
    features, batches = params["feature_group_count"], params["batch_group_count"]
    groups, spatial = features * batches, lhs.shape[2:]
    batch, outputs = len(lhs) // batches, len(rhs) // groups
    if batches > 1:
        lhs = lhs.reshape(groups, batch, lhs.shape[1], *spatial)
    else:
        lhs = lhs.reshape(batch, groups, rhs.shape[1], *spatial).swapaxes(0, 1)
    rhs = rhs.reshape(groups, outputs, rhs.shape[1], math.prod(kernel))

    def seen(place, count, steps):
        """Return `count` entries of each axis, `steps` apart, from a place on."""
        ends = [
            a + (n - 1) * s + 1 for a, n, s in zip(place, count, steps, strict=True)
        ]
        lead = lhs.shape[:3]
        begin, end = [0, 0, 0, *place], [*lead, *ends]
        found = jax.lax.slice(lhs, begin, end, [1, 1, 1, *steps])
        return found.reshape(*lead, math.prod(count))

    out = params["preferred_element_type"] or jnp.result_type(lhs, rhs)
    wide = accumulation_dtype(out) if jnp.issubdtype(out, jnp.floating) else out
    product = functools.partial(
        jnp.einsum, precision=params["precision"], preferred_element_type=wide
    )
    shape = groups, batch, outputs, math.prod(window)
    if 0 in (*shape, *kernel):
        result = jnp.zeros(shape, out)
    elif math.prod(kernel) <= math.prod(window):
        places = [np.multiply(place, gaps).tolist() for place in np.ndindex(*kernel)]
        result = jnp.zeros(shape, wide)
        for i, place in enumerate(places):
            terms = seen(place, window, strides)
            result += product("gbfp,gof->gbop", terms, rhs[..., i])
    else:
        places = [np.multiply(place, strides).tolist() for place in np.ndindex(*window)]
        found = [product("gbfp,gofp->gbo", seen(p, kernel, gaps), rhs) for p in places]
        result = jnp.stack(found, axis=-1)
    result = jnp.swapaxes(result.astype(out), 0, 1)
    result = result.reshape(batch, groups * outputs, *window)
    return jnp.transpose(result, np.argsort(numbers.out_spec).tolist())
