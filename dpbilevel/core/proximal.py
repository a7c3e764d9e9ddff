"""Convex public terms with a proximal operator, which make entries exactly zero."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PyTree

from .. import _checks
from ..sets import AbstractSet, Ball, Box, Euclidean, NonNegative

__all__ = ["Proximal", "elastic_net", "group_lasso", "l1", "l2_norm"]


@dataclasses.dataclass(frozen=True, eq=False)
class Proximal:
    r"""Public term of a proximal step, from `l1`, `l2_norm`, `group_lasso`, ....

    $$r(x, y) = \sum_g w_g(x)\, \|y_g\|_2 + \frac{\rho(x)}{2} \|y\|_2^2$$

    with groups $g$ of entries of $y$. It is given as `public` of a `FiniteSum` or as
    `lower_public` of a `BilevelProblem`, and called with the same arguments as any
    public term. Descents take gradient steps along the losses, each followed by a
    proximal step of $r$: entries of $y$ become exactly zero.

    Args:
        weight: $w \ge 0$: a number or an array, or a function of $x$ that returns one;
            what is negative there counts as 0.
        ridge: $\rho$: a number, or a function of $x$ that returns a scalar, likewise.
        groups: A pytree like $y$ of integers in $[0, k)$; `None` if every entry is a
            group, `"one"` if all entries are one.

    Raises:
        ValueError: A negative weight, or groups that are no integers of at least 0. On
            use, weights or groups do not fit the variable.

    Privacy:
        Proximal steps are post-processing of released values: free. Weights and groups
        must hold no private data.

    References:
        Parikh and Boyd, "Proximal algorithms", 2014, Section 6.5.
    """

    weight: Any
    ridge: Any = 0.0
    groups: PyTree = None

    def __post_init__(self):
        numbers = [v for v in (self.weight, self.ridge) if not callable(v)]
        for value in filter(_checks.concrete, jax.tree.leaves(numbers)):
            if not np.all(np.asarray(value) >= 0):
                raise ValueError("Proximal: weights and ridge must be at least 0.")
        if self.groups is not None and not isinstance(self.groups, str):
            object.__setattr__(self, "groups", as_groups("group_lasso", self.groups)[0])

    def __call__(self, *at: PyTree) -> Float[Array, ""]:
        r"""Return the term's value $r(x, y)$; for one level it is $r(w)$."""
        *x, whole = at
        y = eqx.filter(whole, eqx.is_inexact_array)
        norms = self._norms(y)
        total = optax.tree.vdot(self._weights(norms, x), norms)
        square = optax.tree.norm(y, squared=True)
        return jnp.asarray(total + _at(self.ridge, x, square.dtype) / 2 * square)

    def prox(self, step_size: Any, *at: PyTree) -> PyTree:
        r"""Return the proximal point $\arg\min_u \eta\, r(x, u) + \frac12 \|u - y\|^2$.

        Args:
            step_size: $\eta \ge 0$.
            *at: $(x, y)$; of a problem of one level $w$ alone.
        """
        *x, y = at
        norms = self._norms(y)

        def kept(norm, weight):
            shorter = jnp.asarray(step_size, norm.dtype) * weight
            return jnp.maximum(1 - shorter / jnp.where(norm > 0, norm, 1), 0)

        def shrunk(v, factor):
            ridge = jnp.asarray(step_size, v.dtype) * _at(self.ridge, x, v.dtype)
            return factor.astype(v.dtype) * v / (1 + ridge)

        factors = jax.tree.map(kept, norms, self._weights(norms, x))
        return jax.tree.map(shrunk, y, self._spread(factors, y))

    def is_smooth(self, *at: PyTree) -> PyTree:
        """Return masks, a pytree like $y$: whether the term is smooth at each entry.

        It is not at groups of zeros that have a weight.
        """
        *x, y = at
        norms = self._norms(y)
        weights = self._weights(norms, x)
        is_off = jax.tree.map(lambda n, w: (n > 0) | (w <= 0), norms, weights)
        return self._spread(is_off, y)

    def _of_groups(self, y: PyTree) -> PyTree:
        if not isinstance(self.groups, str):
            return self.groups
        return jax.tree.map(lambda v: np.zeros(v.shape, int), y)

    def _norms(self, y: PyTree) -> PyTree:
        """Return the norm of every group: a pytree like y, or an array over groups."""
        groups = self._of_groups(y)
        if groups is None:
            return jax.tree.map(jnp.abs, y)
        count = 1 + max(int(v.max()) for v in jax.tree.leaves(groups))
        leaves = zip(*map(jax.tree.leaves, (y, groups)), strict=True)
        square = sum(jnp.zeros(count, v.dtype).at[g].add(v * v) for v, g in leaves)
        # The derivative at zero is zero.
        return jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1)), 0)

    def _spread(self, values: PyTree, y: PyTree) -> PyTree:
        """Return a pytree like `y` with the value of each entry's group."""
        groups = self._of_groups(y)
        return values if groups is None else jax.tree.map(lambda g: values[g], groups)

    def _weights(self, norms: PyTree, x: list[PyTree]) -> PyTree:
        """Return the weight of every group, a pytree like `norms`."""
        weight = self.weight(*x) if callable(self.weight) else self.weight
        if jax.tree_util.all_leaves([weight]):
            weight = jax.tree.map(lambda _: weight, norms)
        return jax.tree.map(
            lambda n, w: jnp.broadcast_to(_at(w, [], n.dtype), n.shape), norms, weight
        )


def l1(weight: Any) -> Proximal:
    r"""Return the `Proximal` of the lasso, $\sum_j w_j(x) |y_j|$ with weights $w(x)$.

    Args:
        weight: $w$: a number, or numbers like $y$; or a function of $x$.

    Example:
        >>> import jax.numpy as jnp, dpbilevel as dpb
        >>> dpb.proximal.l1(0.5).prox(1.0, jnp.asarray([2.0, 0.25]))
        Array([1.5, 0. ], dtype=float32)
    """
    return Proximal(weight)


def elastic_net(weight: Any, ridge: Any) -> Proximal:
    r"""Return the `Proximal` $\sum_j w_j(x) |y_j| + \frac{\rho(x)}{2} \|y\|_2^2$.

    Args:
        weight: $w$, as in `l1`.
        ridge: $\rho$: a number, or a function of $x$ that returns a scalar.
    """
    return Proximal(weight, ridge)


def group_lasso(weight: Any, groups: PyTree) -> Proximal:
    r"""Return the `Proximal` $\sum_g w_g(x) \|y_g\|_2$ with weights of groups $g$.

    Args:
        weight: $w$: a number, or one number per group; or a function of $x$.
        groups: A pytree like $y$ of integers in $[0, k)$: the group of each entry.
    """
    return Proximal(weight, groups=groups)


def l2_norm(weight: Any) -> Proximal:
    r"""Return the `Proximal` $w(x) \|y\|_2$ of the whole variable, with a weight $w$.

    Args:
        weight: $w$: a number, or a function of $x$ that returns an array of shape (1,)
            or a scalar.
    """
    return Proximal(weight, groups="one")


def smooth_part(term: Any) -> Any:
    """Return a public term unchanged, or `None` if it is a `Proximal`."""
    return None if isinstance(term, Proximal) else term


def operator(term: Any, *x: PyTree) -> Any:
    """Return the function (step size, y) of a term's proximal step; `None` if smooth.

    Its arguments are a step size and a point.
    """
    is_proximal = isinstance(term, Proximal)
    return (lambda size, y: term.prox(size, *x, y)) if is_proximal else None


def smooth_entries(term: Any, x: PyTree, y: PyTree, v: PyTree) -> PyTree:
    """Return `v` with zeros where a proximal term is not smooth at (x, y)."""
    if not isinstance(term, Proximal):
        return v
    return jax.tree.map(lambda s, u: jnp.where(s, u, 0), term.is_smooth(x, y), v)


def check_smooth(owner: str, problem: Any) -> None:
    """Raise `ValueError` if the problem has a proximal term."""
    if problem.has_proximal:
        raise ValueError(
            f"{owner}: proximal terms are not planned for. Give all fields."
        )


def check_proximal(owner: str, term: Proximal, feasible: AbstractSet) -> None:
    """Raise `ValueError` if a term's proximal step does not go with the feasible set.

    Raises:
        ValueError: The set is not the whole space, a ball around the origin or, for
            `l1` and `elastic_net`, a box or the non-negative orthant.
    """
    if isinstance(feasible, Euclidean):
        return
    fits = isinstance(feasible, Ball) and feasible.center is None
    fits |= term.groups is None and isinstance(feasible, Box | NonNegative)
    if not fits:
        kind = type(feasible).__name__
        raise ValueError(
            f"{owner}: this proximal term takes no set {kind}. Use Euclidean(), "
            "Ball(r) or, for l1 and elastic_net, Box."
        )


def as_groups(owner: str, groups: PyTree) -> tuple[PyTree, int]:
    """Return groups as arrays of int32, and the number of groups.

    Raises:
        ValueError: Groups are not integers of at least 0.
    """
    if isinstance(groups, list | tuple) and not any(
        map(np.ndim, jax.tree.leaves(groups))
    ):
        # A list of numbers is an array, not a tree of single coefficients. Lists of
        # several lengths make an array of objects, which is refused.
        lengths = {np.size(g) for g in groups if isinstance(g, list | tuple)}
        groups = np.asarray(groups, object if len(lengths) > 1 else None)
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(groups)]
    if not leaves or not all(
        leaf.size and np.issubdtype(leaf.dtype, np.integer) for leaf in leaves
    ):
        raise ValueError(
            f"{owner}: groups must hold the group of each coefficient, such as "
            f"numpy.repeat([0, 1, 2], 5), got {_checks.shown(groups)}."
        )
    if (least := min(int(leaf.min()) for leaf in leaves)) < 0:
        raise ValueError(f"{owner}: groups must be counted from 0, got {least}.")
    # One dtype, whether or not float64 is enabled.
    groups = jax.tree.map(lambda leaf: np.asarray(leaf, np.int32), groups)
    return groups, 1 + max(int(leaf.max()) for leaf in leaves)


def _at(weight: Any, x: list[PyTree], dtype: Any) -> Array:
    """Return a weight at x as an array of `dtype`; negative weights become 0."""
    value = jnp.asarray(weight(*x) if callable(weight) else weight, dtype)
    return jnp.where(value >= 0, value, 0)  # at 0 the derivative from above
