"""Exact draws from a finite set of points."""

import math
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree
from typing_extensions import override

from ... import _checks
from ...onelevel.problem import check_set
from ...privacy.exact.floats import double_precision
from ...privacy.keys import derive
from ...privacy.noise import standard_gumbel
from ...privacy.per_example.clipping import one_record
from ...sets import AbstractSet
from .base import AbstractSampler, Regularity, SamplerGuarantee


class Grid(AbstractSampler):
    r"""Sampler of one of finitely many public points, of weights $e^{-U}$.

    The potential is evaluated at all of them in one batched pass; the index of the
    largest $-U(x_j) + $ Gumbel noise has exactly that distribution.

    Args:
        candidates: The points, stacked along the leading axis of every leaf; public.

    Privacy:
        No error of sampling: the distribution is the target on these points.

    Example:
        >>> import jax.numpy as jnp
        >>> from dpbilevel.draws import Grid
        >>> log_penalties = Grid.product(jnp.linspace(-4.0, 0.0, 9), jnp.asarray([0.0]))
        >>> log_penalties.candidates.shape
        (9, 2)
    """

    candidates: PyTree
    continuous: ClassVar[bool] = False

    def __check_init__(self):
        if _checks.leading_axis("candidates", self.candidates) < 1:
            raise ValueError("Grid: needs at least one candidate, got none.")
        for leaf in jax.tree.leaves(self.candidates):
            if not jnp.issubdtype(dtype := jnp.result_type(leaf), jnp.floating):
                raise TypeError(f"Grid: candidates must be floats, got {dtype}.")
            if _checks.concrete(leaf) and not np.isfinite(np.asarray(leaf)).all():
                raise ValueError("Grid: candidates hold NaN or infinity.")

    @classmethod
    def product(cls, *axes: PyTree) -> "Grid":
        """Return a `Grid` of every combination of one value per coordinate.

        Args:
            *axes: The values of each coordinate, one vector per coordinate.
        """
        if not axes or any(jnp.ndim(axis) != 1 for axis in axes):
            shapes = [jnp.shape(axis) for axis in axes]
            raise ValueError(f"Grid.product: needs one vector per axis, got {shapes}.")
        columns = jnp.meshgrid(*map(jnp.asarray, axes), indexing="ij")
        return cls(jnp.stack([column.ravel() for column in columns], axis=-1))

    @property
    def dimension(self) -> int:
        """Number of coordinates of a point."""
        leaves = jax.tree.leaves(self.candidates)
        return sum(math.prod(jnp.shape(leaf)[1:]) for leaf in leaves)

    def with_counts(self, regularity: Regularity, feasible: AbstractSet) -> "Grid":
        """Return this grid, checked to have all its candidates in the set.

        Raises:
            ValueError: A candidate is outside the set, or of another shape.
        """
        check_set("the problem's set", feasible, one_record(self.candidates))
        inside = jax.vmap(feasible.contains)(self.candidates)
        if _checks.concrete(inside) and not bool(inside.all()):
            first = int(np.argmin(np.asarray(inside)))
            raise ValueError(f"Grid: candidate {first} is outside the set {feasible}.")
        return self

    @override
    def guarantee(self, regularity, feasible) -> SamplerGuarantee:
        count = _checks.leading_axis("candidates", self.candidates)
        notes = (f"drawn exactly from {count} public candidates",)
        return SamplerGuarantee(1, count, notes=notes)

    def draw(self, potential, feasible, start, *, key) -> PyTree:
        """Return one of the candidates, drawn exactly, in the dtype of `start`.

        Bounds on a potential hold on the set, so that candidates are projected onto it.
        A potential that is not finite counts as the largest finite number.

        Raises:
            ValueError: A candidate is of another structure than `start`.
        """
        candidate = jax.tree.map(jnp.shape, one_record(self.candidates))
        if candidate != (shapes := jax.tree.map(jnp.shape, start)):
            raise ValueError(f"Grid: a candidate is {candidate}, the start {shapes}.")
        (key,) = derive(key, "select")
        dtypes = jax.tree.map(jnp.result_type, start)
        points = jax.tree.map(jnp.asarray, self.candidates, dtypes)
        points = jax.vmap(feasible.project)(points)
        values = potential.many(points)
        with double_precision():  # the noise and its comparison in double precision
            noise = standard_gumbel(values.shape, jnp.float64, key=key)
            double = values.astype(jnp.float64)
            double = jnp.where(jnp.isfinite(double), double, jnp.finfo(jnp.float64).max)
            scores = noise - double
            # Not argmax: its program would be finished outside of 64-bit mode.
            best = scores == jnp.max(scores)
        indices = jnp.arange(len(best), dtype=jnp.int32)
        index = jnp.min(jnp.where(best, indices, len(best) - 1))
        return jax.tree.map(lambda v: v[index], points)
