"""Per-example gradients in factored form, found by walking a jaxpr.

A jaxpr is evaluated equation by equation. What a matrix product, a convolution or an
addition into rows of zeros makes is kept with its `Factored` or `SparseRows` form until
something else than a sum, a multiple or a transpose reads it, which forms it.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, PyTree

from ..exact.floats import accumulation_dtype
from ..jaxprs import evaluated
from ..records.rows import Shards
from .factored import Factored, SparseRows, Structured
from .rowwise import check_rowwise, computed

_MOST_WINDOW = 256  # positions of a convolution's output that become slices
# Calls that only name what they contain, with the name of that parameter.
_CALLS = {"jit": "jaxpr", "closed_call": "call_jaxpr", "remat2": "jaxpr"}


def opened(
    fun: Callable[[PyTree], PyTree],
    record: PyTree,
    shards: Shards,
    owner: str = "clipped_mean",
) -> tuple[Callable[..., PyTree], list[Any]]:
    """Return a function of (closure, record) that computes `fun`, and the closure.

    It runs on every device that records are spread over. Under `jax.vmap` it computes
    the value of each record from that record alone. Its leaves are the arrays of `fun`
    unless `products` says whether `Factored` leaves may be more than one row times a
    number. Leaves are then `Factored` or `SparseRows` if that is cheaper: values that
    are made by a matrix product, a convolution or an addition into rows of zeros, and
    by sums, multiples and transposes of such. So are gradients of layers, and
    derivatives of gradients.

    Raises:
        ValueError: `fun` uses a primitive that may mix records; `owner` is named.
    """
    jaxpr, constants, shapes = shards.traced(fun, record)
    tree = jax.tree.structure(shapes)
    variables = [*jaxpr.constvars, *jaxpr.invars]
    check_rowwise(owner, jaxpr, variables[len(constants) :])

    def run(constants, record: PyTree, *, products: bool | None = None) -> PyTree:
        leaves = jax.tree.leaves(record)
        results = evaluated(jaxpr, [*constants, *leaves], _Run(leaves).equation)
        found = []
        for value in results:
            if products is None or (form := _form_of(value)) is None:
                found.append(jnp.asarray(_array(value)))
            else:
                found.append(form.cheapest(products))
        return tree.unflatten(found)

    return run, constants


def rowwise(owner: str, fun: Callable[[PyTree], PyTree]) -> Callable[[PyTree], PyTree]:
    """Return `fun`, of one record, in a form that mixes no records in `jax.vmap`.

    It raises a `ValueError` that names `owner`, before anything is computed, if a
    primitive of `fun` may mix records.
    """

    def apart(record: PyTree) -> PyTree:
        run, constants = opened(fun, record, Shards(), owner)
        return run(constants, record)

    return apart


@dataclasses.dataclass(frozen=True)
class _Lazy:
    """An array that is computed only if needed, and its factored or sparse form."""

    array: Callable[[], Array]
    form: Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class _Filled:
    """An array of equal numbers: the number, and a function that makes the array."""

    number: Any
    array: Callable[[], Array]


def _array(value: Any) -> Any:
    return value.array() if isinstance(value, _Lazy | _Filled) else value


@dataclasses.dataclass(frozen=True)
class _Run:
    """Evaluation of a jaxpr that keeps products factored until they are needed."""

    record: list[Any]  # its arrays

    def equation(self, eqn, operands: list[Any]) -> list[Any]:
        """Return the results of an equation: arrays, `_Lazy` ones or `_Filled` ones."""
        name = eqn.primitive.name
        if name in _CALLS:
            inner = eqn.params[_CALLS[name]]
            if eqn.params.get("prevent_cse"):  # else what is recomputed is kept
                operands = [_barrier(_array(v)) for v in operands]
            if hasattr(inner, "jaxpr"):  # with the constants that it closes over
                inner, operands = inner.jaxpr, [*inner.consts, *operands]
            return evaluated(inner, operands, self.equation)

        @functools.cache
        def results() -> list[Any]:
            # On each device of a mesh, not on the mesh where it was traced.
            mesh = jax.sharding.use_abstract_mesh(jax.sharding.get_abstract_mesh())
            with eqn.ctx.manager, mesh:
                return list(computed(eqn, list(map(_array, operands))))

        if name == "broadcast_in_dim" and not eqn.invars[0].aval.shape:
            return [_Filled(_array(operands[0]), lambda: results()[0])]
        rule = _RULES.get(name) if _is_floating(*eqn.outvars) else None
        form = None if rule is None else rule(self, eqn, operands)
        if form is None:
            return results()
        return [_Lazy(lambda: results()[0], functools.cache(form))]


def _barrier(operand: Any) -> Any:
    floating = jnp.issubdtype(jnp.result_type(operand), jnp.floating)
    return jax.lax.optimization_barrier(operand) if floating else operand


def _form_of(operand: Any) -> Structured | None:
    return operand.form() if isinstance(operand, _Lazy) else None


def _number(operand: Any) -> Any:
    """Return the number that all entries of an operand are equal to, or `None`."""
    if isinstance(operand, _Filled):
        return operand.number
    return None if isinstance(operand, _Lazy) or np.ndim(operand) else operand


def _is_zero(operand: Any) -> bool:
    number = _number(operand)
    known = number is not None and not isinstance(number, Tracer)
    return known and bool(np.asarray(number) == 0)  # in NumPy: JAX would trace it


def _product(run: _Run, eqn, operands: list[Any]):
    """Return a function that computes a matrix product as `Factored`, or `None`.

    The contracted axes are the places, unless those of an operand's form are fewer.
    """
    contracted, batched = eqn.params["dimension_numbers"]
    if batched[0] or not _is_floating(*eqn.invars):
        return None
    count = math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted[0])
    for i, found in enumerate(map(_form_of, operands)):
        for made in (found, found.turned()) if isinstance(found, Factored) else ():
            axes = contracted[i], contracted[1 - i]
            if made.places < count and set(axes[0]) <= set(made.left_axes):
                options = axes, i == 0, eqn.params["precision"]
                return lambda: made.multiplied(_array(operands[1 - i]), *options)

    def form():
        sides, widths, dtype = [], [], eqn.outvars[0].aval.dtype
        for operand, axes in zip(operands, contracted, strict=True):
            array = _array(operand)
            free = [i for i in range(array.ndim) if i not in axes]
            places = math.prod(array.shape[i] for i in axes)
            side = jnp.transpose(array, [*axes, *free]).reshape(places, -1)
            more_bits = jnp.finfo(side).bits < jnp.finfo(dtype).bits
            sides.append(side.astype(dtype) if more_bits else side)
            widths.append(len(free))
        axes = tuple(range(sum(widths)))
        split = axes[: widths[0]], axes[widths[0] :]
        left, right = sides
        made = Factored(left, right, eqn.outvars[0].aval.shape, *split)
        # Longer factors are left, and marked if they are the record's.
        p, q = made.widths
        made, longer = (made, operands[0]) if p >= q else (made.turned(), operands[1])
        return dataclasses.replace(made, given=any(longer is v for v in run.record))

    return form


def _convolution(run: _Run, eqn, operands: list[Any]):
    """Return a function that computes a convolution as `Factored`, or `None`.

    The factors are windows of one operand, and the other operand. For a kernel's
    gradient the places are those where the kernel was applied.
    """
    params = eqn.params
    numbers = params["dimension_numbers"]
    shape = eqn.outvars[0].aval.shape
    window = [shape[axis] for axis in numbers.out_spec[2:]]
    groups = params["feature_group_count"] * params["batch_group_count"]
    if groups > 1 or math.prod(window) > _MOST_WINDOW or not _is_floating(*eqn.invars):
        return None

    out = numbers.out_spec
    # Rows of the left factor in the order of the result's axes, mostly that of memory.
    batch_last = out[0] > min(out[2:], default=0)
    left_axes = (*out[2:], out[0]) if batch_last else (out[0], *out[2:])

    def form():
        # Left (feature, *window, batch) or (batch, feature, *window).
        batch, feature, *spatial = numbers.lhs_spec
        order = (feature, *spatial, batch) if batch_last else numbers.lhs_spec
        lhs = jnp.transpose(_array(operands[0]), order)
        rhs = jnp.transpose(_array(operands[1]), numbers.rhs_spec)
        first = order.index(spatial[0]) if spatial else 0
        zipped = zip(params["padding"], params["lhs_dilation"], strict=True)
        padding = [(0, 0, 0)] * lhs.ndim
        padding[first : first + len(window)] = [(*p, gap - 1) for p, gap in zipped]
        lhs = jax.lax.pad(lhs, jnp.zeros((), lhs.dtype), padding)

        def seen(place):
            """Return the window of the first operand for one place of the output."""
            starts = np.multiply(place, params["window_strides"])
            gaps = params["rhs_dilation"]
            stops = starts + (np.asarray(rhs.shape[2:]) - 1) * gaps + 1
            begin, end, step = [0] * lhs.ndim, [*lhs.shape], [1] * lhs.ndim
            axes = slice(first, first + len(window))
            begin[axes], end[axes], step[axes] = [*starts], [*stops], [*gaps]
            return jax.lax.slice(lhs, begin, end, step)

        places = [seen(place) for place in np.ndindex(*window)]
        left = jnp.stack(places, axis=-2 if batch_last else 1)
        left = left if batch_last else jnp.moveaxis(left, (0, 1), (-2, -1))
        left = left.reshape(rhs[0].size, -1)
        right = rhs.reshape(len(rhs), -1).T
        made = Factored(left, right, shape, left_axes, (out[1],))
        p, q = made.widths
        return made if p >= q else made.turned()

    return form


def _rows(run: _Run, eqn, operands: list[Any]):
    """Return a function that computes a scatter-add as `SparseRows`, or `None`."""
    table, indices, updates = operands
    numbers = eqn.params["dimension_numbers"]
    count, *window = eqn.outvars[0].aval.shape
    last = eqn.invars[2].aval.ndim - len(window)
    plain = (
        _is_zero(table)
        and numbers.inserted_window_dims == (0,)
        and numbers.scatter_dims_to_operand_dims == (0,)
        and not numbers.operand_batching_dims
        and numbers.update_window_dims == tuple(range(last, last + len(window)))
        and list(eqn.invars[2].aval.shape[last:]) == window
        and eqn.params["mode"] != jax.lax.GatherScatterMode.CLIP
    )
    if not plain:
        return None

    def form():
        rows = _array(updates).reshape(-1, *window)
        return SparseRows(_array(indices).reshape(-1).astype(jnp.int32), rows, count)

    return form


def _transposed(run: _Run, eqn, operands: list[Any]):
    form = _form_of(operands[0])
    shape, order = eqn.outvars[0].aval.shape, list(eqn.params["permutation"])
    if isinstance(form, Factored):
        return lambda: form.moved(shape, order.index)


def _reshaped(run: _Run, eqn, operands: list[Any]):
    """Return a function that computes a reshape as `Factored`, or `None`.

    The reshape may split or join axes of one factor.
    """
    form = _form_of(operands[0])
    reordered = eqn.primitive.name == "reshape" and eqn.params["dimensions"] is not None
    if not isinstance(form, Factored) or reordered:
        return None
    shape = eqn.outvars[0].aval.shape
    first, second = sorted((form.left_axes, form.right_axes))
    if (*first, *second) != tuple(range(len(form.shape))):
        return None
    size = math.prod(form.shape[axis] for axis in first)
    cuts = [i for i in range(len(shape) + 1) if math.prod(shape[:i]) == size]
    if not cuts:
        return None
    sides = tuple(range(cuts[0])), tuple(range(cuts[0], len(shape)))
    left, right = sides if first == form.left_axes else sides[::-1]
    changes: Any = {"shape": shape, "left_axes": left, "right_axes": right}
    return lambda: dataclasses.replace(form, **changes)


def _multiplied(run: _Run, eqn, operands: list[Any]):
    """Return a function that computes number times value as `Structured`, or `None`.

    It is a multiple of a factored value or of a record's array.
    """
    for value, other in (operands, operands[::-1]):
        number = _number(other)
        if number is None:
            continue
        if (form := _form_of(value)) is not None:
            return functools.partial(_times, form, number)
        given = any(value is leaf for leaf in run.record)
        if given and isinstance(number, jax.Array):
            axes = tuple(range(value.ndim))
            numbers = jnp.reshape(number, (1, 1)).astype(value.dtype)
            row = value.reshape(1, -1)
            return lambda: Factored(row, numbers, value.shape, axes, (), given=True)
    return None


def _times(form: Structured, number: Any) -> Structured:
    return form.times(lambda v: v * jnp.asarray(number).astype(v.dtype))


def _divided(run: _Run, eqn, operands: list[Any]):
    number = _number(operands[1])
    form = _form_of(operands[0])
    if form is None or number is None:
        return None
    return lambda: form.times(lambda v: v / jnp.asarray(number).astype(v.dtype))


def _added(run: _Run, eqn, operands: list[Any], sign: int = 1):
    """Return a function that computes a sum or difference as `Structured`, or `None`.

    It is a sum or difference of two factored values or of one and zero, or minus one.
    """
    if not all(isinstance(v, _Lazy) or _is_zero(v) for v in operands):
        return None  # as where a bias is added to a layer
    forms = [form for v in operands if (form := _form_of(v)) is not None]
    if not forms or len(forms) < sum(isinstance(v, _Lazy) for v in operands):
        return None
    if sign < 0 and not _is_zero(operands[-1]):
        forms[-1] = forms[-1].times(jnp.negative)
    total = forms[0].plus(forms[1]) if forms[1:] else forms[0]
    return None if total is None else lambda: total


def _converted(run: _Run, eqn, operands: list[Any]):
    form, dtype = _form_of(operands[0]), accumulation_dtype(eqn.outvars[0].aval.dtype)
    if form is None:
        return None

    def converted(v):
        halves = not jnp.issubdtype(v.dtype, jnp.floating) or jnp.finfo(v).bits == 16
        return v if halves else v.astype(dtype)

    return lambda: jax.tree.map(converted, form.times(lambda v: v.astype(dtype)))


def _is_floating(*variables) -> bool:
    """Return whether all variables are floating-point arrays."""
    return all(jnp.issubdtype(v.aval.dtype, jnp.floating) for v in variables)


_RULES: dict[str, Callable] = {
    "dot_general": _product,
    "conv_general_dilated": _convolution,
    "scatter-add": _rows,
    "transpose": _transposed,
    "reshape": _reshaped,
    "squeeze": _reshaped,
    "mul": _multiplied,
    "div": _divided,
    "neg": functools.partial(_added, sign=-1),
    "add": _added,
    "add_any": _added,
    "sub": functools.partial(_added, sign=-1),
    "convert_element_type": _converted,
}
