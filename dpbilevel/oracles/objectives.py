"""NON-PRIVATE mean losses of a level: values, gradients, Hessian products."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PyTree
from typing_extensions import override

from .. import _checks
from ..bilevel.problem import BilevelProblem, Levels
from ..core.descent import add_scaled
from ..core.proximal import smooth_part
from ..privacy.jaxprs import bound, evaluated
from ..privacy.records.rows import reader

_ROWS_BY_ROWS = (((0,), (0,)), ((), ()))
_PLAIN = (((1,), (0,)), ((), ()))

# The default tolerance of `if_converged`, as the docstrings of its callers say.
CONVERGED = 1e-3

Scalar = Float[Array, ""]
Variable = Literal["x", "y"]

# Up to the first number of bytes, records are read in one piece, beyond it in pieces of
# the second, by backend. On a CPU a piece stays in a core's cache between the two
# products with the features that a Hessian product needs.
_BYTES = {"cpu": (2**25, 2**21)}
_BYTES_ACCELERATOR = (2**30, 2**28)

# A subsample has one of this many records.
_STRIDE = 16


class AbstractObjective(abc.ABC):
    """Interface of a function of x and y for minimizers over y.

    Attributes:
        prox: The proximal operator of a term that value and gradients leave out, a
            function of (step size, x, y); or `None`.
    """

    prox: Callable | None = None

    @abc.abstractmethod
    def value(self, x: PyTree, y: PyTree) -> Scalar:
        """Return the value of the objective at a point."""

    @abc.abstractmethod
    def gradient(self, x: PyTree, y: PyTree, wrt: Variable = "y") -> PyTree:
        """Return the gradient in one variable, a pytree like that variable."""

    @abc.abstractmethod
    def value_and_gradient(self, x: PyTree, y: PyTree) -> tuple[Scalar, PyTree]:
        """Return the value and the gradient in y, in one pass."""

    def subsample(self) -> "AbstractObjective | None":
        """Return the objective on a subsample, or `None`, the default.

        Its Hessian is similar but cheaper. `None` if that would gain nothing.
        """
        return None

    def linearize(self, x: PyTree, y: PyTree) -> tuple[Scalar, PyTree, Callable]:
        """Return the value, gradient in y, and Hessian product in y as a function.

        All that does not depend on the vector is computed here, once, in one pass.
        """

        def gradient(y):
            value, slope = self.value_and_gradient(x, y)
            return slope, value

        slope, product, value = jax.linearize(gradient, y, has_aux=True)
        return value, slope, lay_out(product, y)


@dataclasses.dataclass(frozen=True)
class Objective(AbstractObjective):
    r"""NON-PRIVATE. Mean of a loss over records, plus a public term of (x, y).

    Differentiable to any order, in forward and reverse mode. Products of matrices are
    in full precision on every backend. Long records are read in pieces: beyond them,
    memory does not grow with $n$ but for what a linearization at a point keeps, the
    numbers that the loss computes from one record.

    Args:
        loss: $\ell(x, y, z)$: one record's loss, a scalar.
        public: $r(x, y)$, or `None`.
        records: A pytree whose leaves share the leading axis of length $n$.
        rest: The leaves of $y$ that are no arrays of floats, as `split` returns.
        prox: As in `AbstractObjective`.
    """

    loss: Callable
    public: Callable | None
    records: PyTree
    rest: PyTree = None
    prox: Callable | None = None

    def composite(self) -> "Objective":
        """Return the objective with its proximal term moved to the field `prox`."""
        prox = getattr(self.public, "prox", None)
        return dataclasses.replace(self, public=smooth_part(self.public), prox=prox)

    @override
    def value(self, x: PyTree, y: PyTree) -> Scalar:
        total = _over_records(lambda *piece: self._total(x, y, *piece), self.records)
        return total + self._public(x, y) if self.public else total

    @override
    def gradient(self, x: PyTree, y: PyTree, wrt: Variable = "y") -> PyTree:
        place = ("x", "y").index(wrt)
        over_piece = jax.grad(self._total, place)
        slope = _over_records(lambda *piece: over_piece(x, y, *piece), self.records)
        if self.public is None:
            return slope
        public = jax.grad(self._public, place)(x, y)
        return jax.tree.map(jnp.add, slope, public)

    @override
    def value_and_gradient(self, x: PyTree, y: PyTree) -> tuple[Scalar, PyTree]:
        over_piece = jax.value_and_grad(self._total, 1)
        pair = _over_records(lambda *piece: over_piece(x, y, *piece), self.records)
        if self.public is None:
            return pair
        return jax.tree.map(jnp.add, pair, jax.value_and_grad(self._public, 1)(x, y))

    def cross_product(self, x: PyTree, y: PyTree, v: PyTree) -> PyTree:
        """Return how the gradient in x changes along `v` in y, a pytree like `x`."""
        return jax.jvp(lambda y: self.gradient(x, y, "x"), (y,), (v,))[1]

    def subsample(self) -> "Objective | None":
        """Return the objective of every 16th record, or `None` if records are few."""
        if _num_pieces(self.records) == 1:
            return None
        few = jax.tree.map(lambda v: v[::_STRIDE], self.records)
        return dataclasses.replace(self, records=few)

    def _total(self, x, y, piece, keep, n) -> Scalar:
        y = merge(y, self.rest)
        with jax.default_matmul_precision("highest"):
            losses = jax.vmap(lambda record: self.loss(x, y, record))(piece)
        losses = losses if keep is None else jnp.where(keep, losses, 0)
        return jnp.sum(losses) / max(n, 1)  # an empty level has the mean 0

    def _public(self, x, y) -> Scalar:
        assert self.public is not None
        with jax.default_matmul_precision("highest"):
            return self.public(x, merge(y, self.rest))


@dataclasses.dataclass(frozen=True)
class WeightedSum(AbstractObjective):
    """NON-PRIVATE. Objective `first` plus `weight` times objective `second`."""

    first: AbstractObjective
    second: AbstractObjective
    weight: Scalar
    prox: Callable | None = None

    @override
    def value(self, x: PyTree, y: PyTree) -> Scalar:
        return self._sum(lambda h: h.value(x, y))

    @override
    def gradient(self, x: PyTree, y: PyTree, wrt: Variable = "y") -> PyTree:
        return self._sum(lambda h: h.gradient(x, y, wrt))

    @override
    def value_and_gradient(self, x: PyTree, y: PyTree) -> tuple[Scalar, PyTree]:
        return self._sum(lambda h: h.value_and_gradient(x, y))

    def _sum(self, of: Callable[[AbstractObjective], Any]) -> Any:
        return add_scaled(of(self.first), self.weight, of(self.second))


def upper_objective(
    problem: BilevelProblem, data: Levels, rest: PyTree = None
) -> Objective:
    """NON-PRIVATE. Return the `Objective`: the upper mean loss plus its public term."""
    return Objective(problem.upper, problem.upper_public, data.upper, rest)


def lower_objective(
    problem: BilevelProblem, data: Levels, rest: PyTree = None
) -> Objective:
    """NON-PRIVATE. Return the `Objective`: the lower mean loss plus its public term."""
    return Objective(problem.lower, problem.lower_public, data.lower, rest)


def split(y: PyTree) -> tuple[PyTree, PyTree]:
    """Return a pair: the float arrays of `y`, and all of its other leaves.

    Both pytrees have the structure of `y`, with `None` for each leaf of the other.
    """
    y = jax.tree.map(
        lambda v: jnp.asarray(v) if isinstance(v, float | np.ndarray) else v, y
    )
    return eqx.partition(y, eqx.is_inexact_array)


def merge(y: PyTree, rest: PyTree) -> PyTree:
    """Return `y` with the leaves of `rest` put back, undoing `split`."""
    return y if rest is None else eqx.combine(y, rest)


def nan_unless_finite(tree: PyTree, *by: PyTree) -> PyTree:
    """Return `tree`, with all leaves NaN unless all floats in `by` are finite."""
    finite = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(by)]
    factor = jnp.where(jnp.all(jnp.stack(finite)), 1.0, jnp.nan)
    return jax.tree.map(lambda v: factor.astype(v.dtype) * v, tree)


def if_converged(
    owner: str,
    tree: PyTree,
    y: PyTree,
    linearization: tuple[Scalar, PyTree, Callable],
    tolerance: float | None,
) -> PyTree:
    r"""Return `tree`; if `y` is no minimizer raise, or return NaN in `jax.jit`.

    `y` does so if $\|\nabla_y g\|$ is at most `tolerance` times the larger of 1 and
    $\|\nabla^2_{yy} g\, y\|$; `None` skips the check. The `linearization` is that of
    `linearize` at `y`; an infinite gradient stands for an uncertain active set.

    Raises:
        ValueError: `y` does not minimize the objective, outside `jax.jit`.
    """
    if tolerance is None:
        return tree
    _checks.positive(owner, tolerance=tolerance)
    _, slope, product = linearization
    norm, scale = optax.tree.norm(slope), optax.tree.norm(product(y))
    norm, limit = jax.lax.stop_gradient((norm, tolerance * jnp.maximum(scale, 1)))
    if _checks.concrete(norm) and bool(norm > limit):  # a NaN is passed on
        found = f"with a gradient of norm {float(norm):.3g} above {float(limit):.3g}"
        if bool(jnp.isinf(norm)):
            found = "or which entries are at a kink or a bound is uncertain"
        raise ValueError(
            f"{owner}: the lower solution has not converged, {found}. Take more steps, "
            "or pass tolerance=None."
        )
    return nan_unless_finite(tree, jnp.where(norm > limit, jnp.nan, 0.0))


def _over_records(fun: Callable, records: PyTree) -> PyTree:
    """Sum `fun(piece, keep, n)` over pieces of records; `keep` is a mask or `None`."""
    n = _checks.leading_axis("records", records)
    pieces = _num_pieces(records)
    if pieces == 1:
        return fun(records, None, n)
    rows = -(-n // pieces)  # rounded up
    read = reader(records, None, n, rows)

    # A linearization keeps sums and products over a record's numbers; slices and
    # numbers entry by entry are computed again, which costs less than reading them.
    def over_piece(index):
        piece, fresh = read(index)
        return fun(piece, None if rows * pieces == n else fresh, n)

    over_piece = jax.checkpoint(over_piece, prevent_cse=False, policy=_is_contraction)

    def add(total, index):
        return jax.tree.map(jnp.add, total, over_piece(index)), None

    indices = jnp.arange(pieces, dtype=jnp.int32)
    shapes = jax.eval_shape(over_piece, indices[0])
    zero = jax.tree.map(lambda v: jnp.zeros(v.shape, v.dtype), shapes)
    return jax.lax.scan(add, zero, indices)[0]


def _is_contraction(primitive, *_, **__) -> bool:
    return primitive.name.startswith(("dot_general", "conv_general", "reduce_"))


def _num_pieces(records: PyTree) -> int:
    undivided, piece = _BYTES.get(jax.default_backend(), _BYTES_ACCELERATOR)
    leaves = jax.tree.leaves(records)
    size = sum(v.size * v.dtype.itemsize for v in leaves)
    return 1 if size <= undivided else min(-(-size // piece), len(leaves[0]))


def lay_out(linear: Callable[[PyTree], PyTree], example: PyTree) -> Callable:
    r"""Return the linear map, with a matrix stored transposed if that is faster.

    A Hessian product reads the features $A$ twice: for $A V$ and for $A^T U$. On a CPU
    the second takes about twice as long as with $A^T$ in memory. The copy is made here,
    once, and not by each product of a loop. It is `linear` itself that is returned if
    no product of matrices would gain, or on another backend.
    """
    if jax.default_backend() != "cpu":
        return linear
    closed, shape = jax.make_jaxpr(linear, return_shape=True)(example)
    read = [eqn.invars for eqn in closed.jaxpr.eqns if _contracts_rows(eqn)]
    constants = zip(closed.jaxpr.constvars, closed.consts, strict=True)
    transposed = {v: c.T for v, c in constants if any(v in pair for pair in read)}
    if not transposed:
        return linear

    def compute(eqn, operands):
        if not _contracts_rows(eqn):
            return bound(eqn, operands, eqn.params)
        left, right = eqn.invars
        is_swapped = left not in transposed and right in transposed
        if is_swapped:  # $B^T A = (A^T B)^T$
            left, operands = right, operands[::-1]
        if left not in transposed:
            return bound(eqn, operands, eqn.params)
        operands = [transposed[left], operands[1]]
        params = eqn.params | {"dimension_numbers": _PLAIN}
        results = bound(eqn, operands, params)
        return [v.T for v in results] if is_swapped else results

    def apply(v):
        arguments = [*closed.consts, *jax.tree.leaves(v)]
        leaves = evaluated(closed.jaxpr, arguments, compute)
        return jax.tree.unflatten(jax.tree.structure(shape), leaves)

    return apply


def _contracts_rows(eqn) -> bool:
    """Return whether a jaxpr equation is the product A^T B of two matrices."""
    return (
        eqn.primitive is jax.lax.dot_general_p
        and eqn.params["dimension_numbers"] == _ROWS_BY_ROWS
        and all(v.aval.ndim == 2 for v in eqn.invars)
    )
