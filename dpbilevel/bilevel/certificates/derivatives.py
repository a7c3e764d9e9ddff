"""Derivatives of two levels' objectives, in the dtype of the variables. NON-PRIVATE."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from ... import _checks
from ...privacy.exact.floats import all_finite
from ...privacy.per_example.structure import rowwise
from ..problem import BilevelProblem, Levels, Sizes
from . import sensitivities


def common_dtype(w: PyTree, owner: str = "ImplicitBilevel") -> jnp.dtype:
    """Return the one dtype of all variables `w`, which the bound on rounding refers to.

    Raises:
        ValueError: There are several dtypes, or one of half precision.
    """
    dtypes = {jnp.dtype(v.dtype) for v in jax.tree.leaves(w)}
    if len(dtypes) != 1 or not dtypes <= {jnp.dtype("f4"), jnp.dtype("f8")}:
        raise ValueError(f"{owner}: variables must be all float32 or all float64.")
    return dtypes.pop()


@dataclasses.dataclass(frozen=True)
class Means:
    """Derivatives of both levels' objectives, public terms included. NON-PRIVATE."""

    problem: BilevelProblem
    data: Levels
    sizes: Sizes

    def lower_y(self, x: PyTree, y: PyTree) -> PyTree:
        r"""Return $\nabla_y G$ at `x` and `y`."""
        return self._lower(1, x, y)

    def lower_x(self, x: PyTree, y: PyTree) -> PyTree:
        r"""Return the lower objective's gradient in x, $\nabla_x G$, at `x` and `y`."""
        if self.problem.reads_x("lower"):
            return self._lower(0, x, y)
        return _plus(optax.tree.zeros_like(x), self.problem.lower_public, 0, x, y)

    def lower_yx(self, x: PyTree, y: PyTree, direction: PyTree) -> PyTree:
        r"""Return $\nabla_{yx} G$ at `x` and `y`, times a direction of `x`."""
        lower_y = functools.partial(self.lower_y, y=y)
        if not self.problem.reads_x("lower"):
            zeros = optax.tree.zeros_like(y)

            def lower_y(x):
                return _plus(zeros, self.problem.lower_public, 1, x, y)

        return jax.jvp(lower_y, (x,), (direction,))[1]

    def _lower(self, argument: int, x: PyTree, y: PyTree) -> PyTree:
        def gradient(total):
            loss = functools.partial(total, self.problem.lower)
            return jax.grad(loss, argument)(x, y)

        mean = _mean(gradient, self.data.lower, self.sizes.lower)
        return _plus(mean, self.problem.lower_public, argument, x, y)

    def upper(self, x: PyTree, y: PyTree) -> tuple[PyTree, PyTree]:
        r"""Return $\nabla_x F$ and $\nabla_y F$ at `x` and `y`."""

        def gradients(total):
            return jax.grad(lambda w: total(self.problem.upper, *w))((x, y))

        mean_x, mean_y = _mean(gradients, self.data.upper, self.sizes.upper)
        public = self.problem.upper_public
        return _plus(mean_x, public, 0, x, y), _plus(mean_y, public, 1, x, y)


def _plus(mean: PyTree, public, argument: int, x, y) -> PyTree:
    if public is None:
        return mean
    return optax.tree.add(mean, jax.grad(public, argument)(x, y))


def _mean(derivative: Callable, records: PyTree, size: int) -> PyTree:
    """Return the mean of a derivative, summed over chunks of records.

    `derivative` maps `total(loss, x, y)`, the sum of a loss over the records of a
    chunk, to the derivative of that sum.
    """
    n = _checks.leading_axis("records", records)
    rows = min(n, sensitivities.ROWS)

    def part(index):
        start = jnp.minimum(index * rows, n - rows)
        # The last chunk reaches back; what others have summed is left out.
        fresh = start + jnp.arange(rows, dtype=index.dtype) >= index * rows
        piece = jax.tree.map(
            lambda v: jax.lax.dynamic_slice_in_dim(v, start, rows), records
        )

        def total(loss, x, y):
            dtype = common_dtype((x, y))
            chunk = jax.vmap(lambda record: readable(record, dtype))(piece)
            own = functools.partial(loss, x, y)
            losses = jax.vmap(rowwise("BilevelProblem", own))(chunk)
            return jnp.sum(jnp.where(fresh, losses, 0))

        return derivative(total)

    indices = jnp.arange(-(-n // rows), dtype=jnp.int32)
    if n == rows:
        total = part(indices[0])
    else:
        empty = optax.tree.zeros_like(jax.eval_shape(part, indices[0]))

        def add(total, index):
            return optax.tree.add(total, part(index)), None

        total, _ = jax.lax.scan(add, empty, indices)
    return jax.tree.map(lambda v: v / size, total)


def wide(records: PyTree, dtype: jnp.dtype) -> PyTree:
    """Return one or many records with their floating-point entries in a dtype."""

    def widened(v):
        return v.astype(dtype) if jnp.issubdtype(v.dtype, jnp.floating) else v

    return jax.tree.map(widened, records)


def readable(record: PyTree, dtype: jnp.dtype) -> PyTree:
    """Return the record in a dtype, or zeros if one of its numbers is not finite."""
    record = wide(record, dtype)
    readable = all_finite(record)
    return jax.tree.map(lambda v: jnp.where(readable, v, jnp.zeros_like(v)), record)
