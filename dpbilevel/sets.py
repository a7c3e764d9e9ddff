"""Closed convex sets: exact projection, membership, support function, diameter."""

import abc
import math
from typing import Any, ClassVar
from typing import ClassVar as AbstractVar  # for type checkers

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from equinox import AbstractVar  # noqa: F811
from jaxtyping import Array, Bool, Float, PyTree
from typing_extensions import override

from . import _checks

__all__ = [
    "AbstractSet",
    "Ball",
    "Box",
    "Euclidean",
    "NonNegative",
    "Product",
    "Simplex",
]


_LEAST = 1e-12  # an entry of zero would stay zero in mirror steps


class AbstractSet(eqx.Module):
    """A closed convex set of pytrees with its Euclidean projection.

    Attributes:
        diameter: The largest distance between two members; `inf` if it has no bound.
            A float, or a traced value in a program that has the set as an argument.
        reach: Upper bound of the norm of a member; `inf` if there is none.
    """

    diameter: AbstractVar[float]
    reach: AbstractVar[float]

    @abc.abstractmethod
    def project(self, w: PyTree) -> PyTree:
        """Return the point of the set nearest to `w` in the Euclidean norm."""

    def step(self, w: PyTree, update: PyTree) -> PyTree:
        """Return the point of the set after a step by `update` from `w`."""
        return self.project(optax.apply_updates(w, update))

    @abc.abstractmethod
    def contains(self, w: PyTree, tolerance: float = 1e-6) -> Bool[Array, ""]:
        """Return whether `w` is in the set, up to an absolute `tolerance`."""

    @abc.abstractmethod
    def support(self, g: PyTree) -> Float[Array, ""]:
        r"""Return the support function $h(g) = \sup_{w \in W} \langle g, w \rangle$.

        It is `inf` if the set is unbounded in the direction of `g`, a pytree like `w`.
        """

    def dimension(self, w: PyTree) -> int:
        """Return the dimension of the affine hull; `w` is a member, or its shapes."""
        return sum(math.prod(v.shape) for v in jax.tree.leaves(w))


class AbstractUnboundedSet(AbstractSet):
    """A set with members of any norm."""

    diameter: ClassVar[float] = math.inf
    reach: ClassVar[float] = math.inf


class Euclidean(AbstractUnboundedSet):
    """The whole space: every finite pytree."""

    @override
    def project(self, w: PyTree) -> PyTree:
        return w

    def contains(self, w: PyTree, tolerance: float = 1e-6) -> Bool[Array, ""]:
        """Return whether every entry is finite."""
        return _all(jax.tree.map(jnp.isfinite, w))

    def support(self, g: PyTree) -> Float[Array, ""]:
        """Return the support function: 0 if `g` is zero, else `inf`."""
        return jnp.where(_all(jax.tree.map(lambda v: v == 0, g)), 0.0, jnp.inf)


class Ball(AbstractSet):
    r"""The Euclidean ball $\{w : \|w - c\|_2 \le r\}$ over the whole pytree.

    Args:
        radius: $r > 0$.
        center: $c$, a pytree like `w`; by default the origin.
    """

    radius: float | Float[Array, ""]
    center: PyTree | None = None

    def __check_init__(self):
        _checks.positive("Ball", radius=self.radius)

    def project(self, w: PyTree) -> PyTree:
        """Project `w` onto the ball: scale `w - center` to at most the radius."""
        offset = _minus(w, self.center)
        inside = optax.projections.projection_l2_ball(offset, self.radius)
        return inside if self.center is None else optax.tree.add(inside, self.center)

    def contains(self, w: PyTree, tolerance: float = 1e-6) -> Bool[Array, ""]:
        """Return whether the distance to the center is at most radius + tolerance."""
        return optax.tree.norm(_minus(w, self.center)) <= self.radius + tolerance

    def support(self, g: PyTree) -> Float[Array, ""]:
        r"""Return the support function $\langle g, c \rangle + r \|g\|_2$."""
        at_center = 0.0 if self.center is None else optax.tree.vdot(g, self.center)
        return jnp.asarray(at_center + self.radius * optax.tree.norm(g))

    @property
    def reach(self) -> float:
        """Upper bound on a member's norm: the center's norm plus the radius."""
        center = 0.0 if self.center is None else optax.tree.norm(self.center)
        return _checks.number(center) + _checks.number(self.radius)

    @property
    def diameter(self) -> float:
        """Largest distance between two members: twice the radius."""
        return 2.0 * _checks.number(self.radius)


class Box(AbstractSet):
    r"""The box $\{w : l \le w \le u\}$, entry by entry.

    Args:
        lower: $l$: a number for all entries, or an array or pytree like `w`.
        upper: $u \ge l$: a number for all entries, or an array or pytree like `w`.
    """

    lower: PyTree
    upper: PyTree

    def __check_init__(self):
        ends = [jax.tree.flatten(end) for end in (self.lower, self.upper)]
        (lower, of_lower), (upper, of_upper) = ends
        known = of_lower == of_upper and all(map(_checks.concrete, [*lower, *upper]))
        pairs = zip(lower, upper, strict=False)
        if known and not all(np.all(np.asarray(a) <= np.asarray(b)) for a, b in pairs):
            raise ValueError(
                f"Box: lower must be at most upper, got {self.lower}, {self.upper}."
            )

    def project(self, w: PyTree) -> PyTree:
        """Clip every entry to its bounds."""
        return jax.tree.map(jnp.clip, w, *self._bounds(w))

    def contains(self, w: PyTree, tolerance: float = 1e-6) -> Bool[Array, ""]:
        """Return whether every entry is within its bounds, up to `tolerance`."""

        def within(v, low, high):
            return (v >= low - tolerance) & (v <= high + tolerance)

        return _all(jax.tree.map(within, w, *self._bounds(w)))

    def support(self, g: PyTree) -> Float[Array, ""]:
        r"""Return the support function $\sum_j \max(g_j l_j, g_j u_j)$."""

        def largest(v, low, high):
            ends = jnp.maximum(v * low, v * high)
            return jnp.sum(jnp.where(v == 0, 0, ends))  # zero times inf is NaN

        return jnp.asarray(optax.tree.sum(jax.tree.map(largest, g, *self._bounds(g))))

    @property
    def reach(self) -> float:
        """Upper bound on a member's norm; raises `ValueError` if bounds are numbers."""
        squares = optax.tree.norm(self.lower) ** 2 + optax.tree.norm(self.upper) ** 2
        return _checks.number(squares**0.5) + 0 * self.diameter  # raises its error

    @property
    def diameter(self) -> float:
        """Largest distance between two members: the length of the diagonal.

        Raises:
            ValueError: The bounds are plain numbers, so that it is unknown.
        """
        leaves = jax.tree.leaves((self.lower, self.upper))
        if any(np.ndim(v) == 0 for v in leaves):
            raise ValueError("Box: the diameter needs bounds shaped like w.")
        if not all(map(_checks.concrete, leaves)):
            diagonal = optax.tree.sub(self.upper, self.lower)
            return _checks.number(optax.tree.norm(diagonal))
        lower, upper = (jax.tree.map(np.asarray, v) for v in (self.lower, self.upper))
        sides = jax.tree.leaves(optax.tree.sub(upper, lower))
        return math.sqrt(sum(float(np.sum(s**2)) for s in sides))

    def _bounds(self, w: PyTree) -> tuple[PyTree, PyTree]:
        def spread(bound):
            # Numbers only: an array for several leaves would be measured once.
            number = jax.tree_util.all_leaves([bound]) and not np.ndim(bound)
            values = jax.tree.map(lambda _: bound, w) if number else bound
            _check_shapes("Box", "bounds", values, w, numbers=True)
            return jax.tree.map(
                lambda v, b: jnp.asarray(b, jnp.result_type(v)), w, values
            )

        return spread(self.lower), spread(self.upper)


class NonNegative(AbstractUnboundedSet):
    r"""The non-negative orthant $\{w : w \ge 0\}$."""

    def project(self, w: PyTree) -> PyTree:
        """Return `w` with negative entries replaced by zero."""
        return optax.projections.projection_non_negative(w)

    def contains(self, w: PyTree, tolerance: float = 1e-6) -> Bool[Array, ""]:
        """Return whether every entry is at least `-tolerance`."""
        return _all(jax.tree.map(lambda v: v >= -tolerance, w))

    def support(self, g: PyTree) -> Float[Array, ""]:
        """Return the support function: 0 if no entry is positive, else `inf`."""
        return jnp.where(_all(jax.tree.map(lambda v: v <= 0, g)), 0.0, jnp.inf)


class Simplex(AbstractSet):
    r"""The simplex $\{w \ge 0, \sum_j w_j = s\}$ over all entries of the pytree.

    Args:
        scale: $s > 0$; 1 is the probability simplex.
        entropy: Whether descents move by mirror steps of the entropy, $w_j \propto w_j
            e^{u_j}$ for an update $u$, in place of projected ones. Static.

    References:
        Beck and Teboulle, "Mirror descent and nonlinear projected subgradient methods
        for convex optimization", Operations Research Letters 2003, Section 5.
    """

    scale: float = 1.0
    entropy: bool = eqx.field(static=True, default=False)

    def __check_init__(self):
        _checks.positive("Simplex", scale=self.scale)

    def project(self, w: PyTree) -> PyTree:
        """Project `w` onto the simplex exactly, by sorting."""
        # A common shift of all entries does not change the projection. It removes the
        # rounding of large entries from the sum of the result.
        with jax.numpy_dtype_promotion("standard"):  # optax mixes integers in
            top = jnp.asarray(optax.tree.max(w))
            shifted = jax.tree.map(lambda v: v - top.astype(v.dtype), w)
            return optax.projections.projection_simplex(shifted, self.scale)

    @override
    def step(self, w: PyTree, update: PyTree) -> PyTree:
        if not self.entropy:
            return super().step(w, update)
        least = _LEAST * self.scale
        logs = jax.tree.map(
            lambda v, u: jnp.log(jnp.maximum(v, least)) + u.astype(v.dtype), w, update
        )
        top = jnp.asarray(optax.tree.max(logs))
        powers = jax.tree.map(lambda v: jnp.exp(v - top.astype(v.dtype)), logs)
        factor = jnp.asarray(self.scale / optax.tree.sum(powers))
        return jax.tree.map(lambda v: factor.astype(v.dtype) * v, powers)

    def contains(self, w: PyTree, tolerance: float = 1e-6) -> Bool[Array, ""]:
        """Return whether entries are non-negative and sum to `scale`, nearly."""
        total = optax.tree.sum(w)
        return NonNegative().contains(w, tolerance) & (
            jnp.abs(total - self.scale) <= tolerance * max(1, optax.tree.size(w))
        )

    def support(self, g: PyTree) -> Float[Array, ""]:
        """Return the support function: the largest entry times the scale."""
        return jnp.asarray(self.scale * optax.tree.max(g))

    def dimension(self, w: PyTree) -> int:
        """Return the dimension: the number of entries minus one."""
        return AbstractSet.dimension(self, w) - 1

    @property
    @override
    def reach(self) -> float:
        return _checks.number(self.scale)

    @property
    def diameter(self) -> float:
        """Largest distance between two members, `sqrt(2) * scale`."""
        return math.sqrt(2.0) * _checks.number(self.scale)


class Product(AbstractSet):
    """A Cartesian product: each part of the pytree in its own set.

    Args:
        sets: A pytree of sets that is a prefix of `w`, for instance `(Ball(1.0),
            Simplex())` for `w = (x, y)`.
    """

    sets: PyTree

    def project(self, w: PyTree) -> PyTree:
        """Project every part onto its own set."""
        return self._map(lambda part, v: part.project(v), w)

    @override
    def step(self, w: PyTree, update: PyTree) -> PyTree:
        return self._map(lambda part, v, u: part.step(v, u), w, update)

    def contains(self, w: PyTree, tolerance: float = 1e-6) -> Bool[Array, ""]:
        """Return whether every part is in its own set."""
        return _all(self._map(lambda part, v: part.contains(v, tolerance), w))

    def support(self, g: PyTree) -> Float[Array, ""]:
        """Return the sum of the support functions of the parts."""
        supports = self._map(lambda part, v: part.support(v), g)
        return jnp.asarray(optax.tree.sum(supports))

    def dimension(self, w: PyTree) -> int:
        """Return the sum of the dimensions of the parts."""
        return sum(jax.tree.leaves(self._map(lambda part, v: part.dimension(v), w)))

    @property
    def reach(self) -> float:
        """Upper bound of a member's norm: the root of the parts' squared bounds."""
        return sum(jax.tree.leaves(self._map(lambda part: part.reach**2))) ** 0.5

    @property
    def diameter(self) -> float:
        """Root of the sum of the parts' squared diameters."""
        return sum(jax.tree.leaves(self._map(lambda part: part.diameter**2))) ** 0.5

    def _map(self, fun, *points):
        def is_set(node):
            return isinstance(node, AbstractSet)

        return jax.tree.map(fun, self.sets, *points, is_leaf=is_set)


def _minus(w: PyTree, center: PyTree | None) -> PyTree:
    if center is None:
        return w
    _check_shapes("Ball", "center", center, w)
    return optax.tree.sub(w, center)


def _check_shapes(owner: str, name: str, part: PyTree, w: PyTree, numbers=False):
    """Raise `ValueError` unless `part`, bounds or a center, has the shapes of `w`."""
    like: Any = jax.tree.structure(w)
    if jax.tree.structure(part) == like:
        shapes = [list(map(jnp.shape, jax.tree.leaves(tree))) for tree in (part, w)]
        if all(p == v or (numbers and p == ()) for p, v in zip(*shapes, strict=True)):
            return
    raise ValueError(
        f"{owner}: {name} must be shaped like the points, {jax.tree.map(jnp.shape, w)}."
    )


def _all(tree: PyTree) -> Bool[Array, ""]:
    return jnp.stack([jnp.all(v) for v in jax.tree.leaves(tree)]).all()


def parts(w_set: Any) -> list[Any]:
    """Return a list of the sets in a product, nested ones too, or of the set alone."""
    if type(w_set) is not Product:
        return [w_set]
    sets = jax.tree.leaves(w_set.sets, is_leaf=lambda v: isinstance(v, AbstractSet))
    return [part for each in sets for part in parts(each)]


def corners(box: AbstractSet, w: PyTree) -> list[PyTree]:
    """Return a list of both corners of a box, of boxes or of an orthant, like `w`."""
    # Each entry of infinity is projected to its end.
    return [box.project(optax.tree.full_like(w, v)) for v in (-jnp.inf, jnp.inf)]


def moves_by_entropy(w_set: AbstractSet) -> bool:
    """Return whether steps in the set, or in a part of it, are mirror steps."""
    return any(isinstance(p, Simplex) and p.entropy for p in parts(w_set))
