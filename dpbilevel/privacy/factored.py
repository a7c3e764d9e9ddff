r"""Per-record gradients of matrices as products of thin factors, which are not formed.

The gradient of one record's loss with respect to a matrix that the loss multiplies with
inputs at $T$ places is $\sum_t l_t r_t^\top$, with the inputs $l_t$ and the derivatives
$r_t$ with respect to the outputs. Its norm and weighted sums over records follow from the
factors at the cost of a plain gradient.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.extend import core
from jaxtyping import Array, Float, PyTree

_HIGHEST = jax.lax.Precision.HIGHEST
# Calls that only name what they contain.
_CALLS = ("jit", "pjit", "closed_call", "core_call", "checkpoint", "remat2")


class Factored(eqx.Module):
    r"""The array $\sum_t l_t r_t^\top$ by its factors, of one record.

    Attributes:
        left: $l$, one place a row.
        right: $r$, likewise.
        shape: Of the array. Static.
        left_axes: Its axes that a row of `left` runs over. Static.
        right_axes: Those of `right`: all others. Static.
    """

    left: Float[Array, "places p"]
    right: Float[Array, "places q"]
    shape: tuple[int, ...] = eqx.field(static=True)
    left_axes: tuple[int, ...] = eqx.field(static=True)
    right_axes: tuple[int, ...] = eqx.field(static=True)

    @property
    def dtype(self) -> Any:
        """That of the array."""
        return self.left.dtype

    def folded(self, product: Float[Array, "p q"]) -> Array:
        """A sum of products of rows of the factors, as an array of this shape."""
        order = self.left_axes + self.right_axes
        array = product.reshape([self.shape[axis] for axis in order])
        return jnp.transpose(array, [order.index(axis) for axis in range(len(order))])

    def dense(self) -> Array:
        """The array."""
        product = jnp.einsum("tp,tq->pq", self.left, self.right, precision=_HIGHEST)
        return self.folded(product)

    def turned(self) -> "Factored":
        """The same array with its factors exchanged."""
        return Factored(
            self.right, self.left, self.shape, self.right_axes, self.left_axes
        )

    def __add__(self, other: "Factored") -> "Factored":
        """The sum: all places of both."""
        if other.left_axes != self.left_axes:
            other = other.turned()
        pairs = (self.left, other.left), (self.right, other.right)
        left, right = (jnp.concatenate(pair) for pair in pairs)
        return dataclasses.replace(self, left=left, right=right)


def is_factored(leaf: Any) -> bool:
    """Whether a leaf of a value is given by its factors."""
    return isinstance(leaf, Factored)


def unfactored(value: PyTree) -> PyTree:
    """The shapes of a record's value, with arrays instead of their factors."""

    def shape(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)

    return jax.tree.map(shape, value, is_leaf=is_factored)


@dataclasses.dataclass(frozen=True)
class _Parameter:
    """A parameter as a loss sees it: which, its value, and its axes, maybe reordered."""

    index: int
    value: Any
    axes: tuple[int, ...]

    def transposed(self, permutation: Sequence[int]) -> "_Parameter":
        value = jax.lax.transpose(self.value, permutation)
        return _Parameter(self.index, value, tuple(self.axes[i] for i in permutation))


@dataclasses.dataclass(frozen=True)
class _Use:
    """A product of a parameter with inputs, and how to read its factors."""

    index: int
    left_axes: tuple[int, ...]
    right_axes: tuple[int, ...]
    first: bool  # whether the parameter is the first operand
    places: int

    def right(self, of_output: Array) -> Float[Array, "places q"]:
        """The derivative with respect to the output, one place a row."""
        if self.first:
            return of_output.reshape(-1, self.places).T
        return of_output.reshape(self.places, -1)


class _Run:
    """Evaluates a jaxpr and finds the products of parameters with inputs.

    `added` are summands of the outputs of these products; without them every product is
    noted and every parameter that is used in another way is in `others`.
    """

    def __init__(self, added: Sequence[Array] | None = None):
        self.added = None if added is None else iter(added)
        self.uses: list[_Use] = []
        self.outputs: list[jax.ShapeDtypeStruct] = []
        self.lefts: list[Array] = []
        self.others: set[int] = set()

    def __call__(self, jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        values = dict(zip(jaxpr.constvars, consts, strict=True))
        values |= dict(zip(jaxpr.invars, args, strict=True))

        def read(v):
            return v.val if isinstance(v, core.Literal) else values[v]

        for eqn in jaxpr.eqns:
            operands = [read(v) for v in eqn.invars]
            results = self._equation(eqn, operands)
            values |= dict(zip(eqn.outvars, results, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _equation(self, eqn, operands: list[Any]) -> list[Any]:
        name = eqn.primitive.name
        if any(isinstance(v, _Parameter) for v in operands):
            if name in _CALLS:
                inner = eqn.params["jaxpr"]
                closed = isinstance(inner, core.ClosedJaxpr)
                consts = inner.consts if closed else ()
                return self(inner.jaxpr if closed else inner, consts, operands)
            if name == "transpose":
                return [operands[0].transposed(eqn.params["permutation"])]
            if name == "dot_general":
                made = self._product(eqn, operands)
                if made is not None:
                    return [made]
            operands = [self.used_otherwise(v) for v in operands]
        params = eqn.primitive.get_bind_params(eqn.params)
        results = eqn.primitive.bind(*operands, **params)
        return results if eqn.primitive.multiple_results else [results]

    def used_otherwise(self, operand: Any) -> Any:
        """The value of an operand that is no factor of a product."""
        if not isinstance(operand, _Parameter):
            return operand
        self.others.add(operand.index)
        return operand.value

    def _product(self, eqn, operands: list[Any]) -> Array | None:
        first = isinstance(operands[0], _Parameter)
        parameter, inputs = operands if first else operands[::-1]
        (contracted, batched) = eqn.params["dimension_numbers"]
        if isinstance(inputs, _Parameter) or batched[0]:
            return None
        of_parameter, of_inputs = contracted if first else contracted[::-1]
        free = [i for i in range(inputs.ndim) if i not in of_inputs]
        left = jnp.transpose(inputs, [*free, *of_inputs])
        places = math.prod(inputs.shape[i] for i in free)
        others = [i for i in range(parameter.value.ndim) if i not in of_parameter]
        use = _Use(
            parameter.index,
            tuple(parameter.axes[i] for i in of_parameter),
            tuple(parameter.axes[i] for i in others),
            first,
            places,
        )
        pair = (parameter.value, inputs) if first else (inputs, parameter.value)
        output = eqn.primitive.bind(*pair, **eqn.params)
        self.uses.append(use)
        self.outputs.append(jax.ShapeDtypeStruct(output.shape, output.dtype))
        self.lefts.append(left.reshape(places, -1))
        return output if self.added is None else output + next(self.added)


def per_record_gradient(loss: Callable[..., Array]) -> Callable[..., PyTree]:
    """`jax.grad(loss)` for one record, with `Factored` leaves where that is cheaper.

    Args:
        loss: A function of parameters and further arguments.

    Returns:
        A function of the same arguments. Where it maps many records by `jax.vmap`, no
        array of the size of a matrix is formed for each of them.
    """

    def gradient(params: PyTree, *args: Any) -> PyTree:
        leaves, tree = jax.tree.flatten(params)
        leaves = [jnp.asarray(v) for v in leaves]
        closed = jax.make_jaxpr(lambda v: loss(tree.unflatten(v), *args))(leaves)
        matrices = _matrices(closed, leaves)

        def value(dense, added):
            rest = iter(dense)
            run = _Run(added)
            full = [
                _parameter(i, v) if i in matrices else next(rest)
                for i, v in enumerate(leaves)
            ]
            (out,) = run(closed.jaxpr, closed.consts, full)
            return out, run

        plan = _Run()
        full = [_parameter(i, v) if i in matrices else v for i, v in enumerate(leaves)]
        jax.eval_shape(lambda: plan(closed.jaxpr, closed.consts, full) and None)
        added = [jnp.zeros(like.shape, like.dtype) for like in plan.outputs]
        dense = [v for i, v in enumerate(leaves) if i not in matrices]

        def lossy(dense, added):
            out, run = value(dense, added)
            return out, run.lefts

        (grads, rights), lefts = jax.grad(lossy, (0, 1), has_aux=True)(dense, added)
        found: dict[int, Factored] = {}
        for use, left, right in zip(plan.uses, lefts, rights, strict=True):
            shape = leaves[use.index].shape
            axes = use.left_axes, use.right_axes
            made = Factored(left, use.right(right), shape, *axes)
            index = use.index
            found[index] = found[index] + made if index in found else made
        rest = iter(grads)
        return tree.unflatten(
            [
                _cheapest(found[i]) if i in found else next(rest)
                for i in range(len(leaves))
            ]
        )

    return gradient


def _parameter(index: int, value: Array) -> _Parameter:
    return _Parameter(index, value, tuple(range(value.ndim)))


def _matrices(closed, leaves: list[Array]) -> set[int]:
    """The parameters that are used in products alone, with axes that fit each other."""
    run = _Run()

    def note():
        outs = run(
            closed.jaxpr,
            closed.consts,
            [_parameter(i, v) for i, v in enumerate(leaves)],
        )
        for out in outs:
            run.used_otherwise(out)

    jax.eval_shape(note)
    axes: dict[int, set[frozenset]] = {}
    for use in run.uses:
        axes.setdefault(use.index, set()).add(
            frozenset((use.left_axes, use.right_axes))
        )
    return {i for i, sides in axes.items() if len(sides) == 1 and i not in run.others}


def _cheapest(leaf: Factored) -> Factored | Array:
    """The factors where they are smaller than the array, or of one place."""
    places, p = leaf.left.shape
    q = leaf.right.shape[1]
    return leaf if places == 1 or places * (p + q) < p * q else leaf.dense()
