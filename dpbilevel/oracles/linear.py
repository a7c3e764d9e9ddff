"""Symmetric positive definite linear systems given by their products with vectors.

Functions for one system, and the same methods as frozen settings that
`implicit_hypergradient` and `lower_solution` take as `linear_solver=`.
"""

import abc
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.flatten_util
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from .. import _checks

Scalar = Float[Array, ""]
Matvec = Callable[[PyTree], PyTree]


class LinearSolution(NamedTuple):
    r"""What a linear solver found.

    Attributes:
        value: $v$, a pytree like $b$.
        residual_norm: $\|b - A v\|_2$ over the whole pytree, computed anew from $v$.
            One product, which `jax.jit` leaves out where nobody reads it.
        num_products: How many products with $A$ the solve took, that one left out.
    """

    value: PyTree
    residual_norm: Scalar
    num_products: Int[Array, ""]


def conjugate_gradient(
    matvec: Matvec, b: PyTree, *, num_steps: int, x0: PyTree | None = None
) -> tuple[PyTree, Scalar]:
    r"""Solves $A v = b$ by a fixed number of conjugate gradient steps.

    With $\kappa$ the condition number, the error in the norm $\sqrt{v^T A v}$ falls by
    $2 ((\sqrt\kappa - 1) / (\sqrt\kappa + 1))^m$ in $m$ steps. The number of steps
    never depends on values. Once rounding is all that is left of the residual a step is
    zero, so more steps than needed change nothing: no division of zero by zero.

    Args:
        matvec: $v \mapsto A v$, symmetric positive definite, on pytrees like `b`.
        b: The right-hand side: a pytree of floating-point arrays.
        num_steps: $m \ge 1$: exactly that many products, one more with `x0`.
        x0: A starting point; zeros when omitted.

    Returns:
        $v$ and the norm of its residual, as in `LinearSolution`.

    Raises:
        ValueError: `num_steps` is not an integer of at least 1.

    Example:
        >>> import jax.numpy as jnp
        >>> from dpbilevel.oracles.linear import conjugate_gradient
        >>> diagonal = jnp.asarray([1.0, 4.0])
        >>> v, residual = conjugate_gradient(
        ...     lambda v: diagonal * v, jnp.ones(2), num_steps=10
        ... )
        >>> [round(float(entry), 6) for entry in v]
        [1.0, 0.25]
    """
    _checks.count("conjugate_gradient", num_steps=num_steps)
    state, scale = _start(matvec, b, x0)
    floor = _rounding(b, scale)
    state = jax.lax.fori_loop(
        0, num_steps, lambda _, state: _conjugate_step(matvec, state, floor), state
    )
    value = _scaled(scale, state.value)
    return value, _residual_norm(matvec, value, b)


def neumann(
    matvec: Matvec,
    b: PyTree,
    *,
    num_steps: int,
    step_size: float | Scalar,
    x0: PyTree | None = None,
) -> tuple[PyTree, Scalar]:
    r"""Solves $A v = b$ by the truncated series $\eta \sum_k (I - \eta A)^k b$.

    Args:
        matvec: $v \mapsto A v$ on pytrees like `b`.
        b: The right-hand side.
        num_steps: The number of terms, at least 1: as many products, one less without
            `x0`.
        step_size: $\eta > 0$, below 2 over the largest eigenvalue of $A$.
        x0: A starting point; zeros when omitted.

    Returns:
        $v$ and the norm of its residual, as in `LinearSolution`.

    Raises:
        ValueError: `num_steps` or `step_size` out of range.
    """
    _checks.count("neumann", num_steps=num_steps)
    _checks.positive("neumann", step_size=step_size)
    rate = jnp.asarray(step_size)

    def step(_, value):
        return _add_scaled(value, rate, _subtract(b, matvec(value)))

    steps, start = (num_steps, x0) if x0 is not None else (num_steps - 1, None)
    if start is None:
        start = _scaled(rate, b)
    value = jax.lax.fori_loop(0, steps, step, start)
    return value, _residual_norm(matvec, value, b)


def cholesky(matvec: Matvec, b: PyTree) -> tuple[PyTree, Scalar]:
    r"""Solves $A v = b$ by factoring $A$, formed by one product per coordinate.

    For few coordinates $d$: takes $d^2$ numbers of memory and of the order of $d^3$
    operations.

    Args:
        matvec: $v \mapsto A v$, symmetric positive definite, on pytrees like `b`.
        b: The right-hand side: leaves of one dtype.

    Returns:
        $v$ and the norm of its residual, as in `LinearSolution`. Not finite where $A$
        is not positive definite.
    """
    flat, unravel = jax.flatten_util.ravel_pytree(b)

    def column(v):
        return jax.flatten_util.ravel_pytree(matvec(unravel(v)))[0]

    matrix = jax.vmap(column, out_axes=1)(jnp.eye(flat.size, dtype=flat.dtype))
    factor = jax.scipy.linalg.cho_factor(matrix, lower=True)
    value = unravel(jax.scipy.linalg.cho_solve(factor, flat))
    return value, _residual_norm(matvec, value, b)


class AbstractLinearSolver(eqx.Module):
    """How to solve a symmetric positive definite system."""

    @abc.abstractmethod
    def solve(
        self, matvec: Matvec, b: PyTree, x0: PyTree | None = None
    ) -> LinearSolution:
        r"""Solves $A v = b$.

        Args:
            matvec: $v \mapsto A v$.
            b: The right-hand side.
            x0: A starting point; zeros when omitted.
        """


class ConjugateGradient(AbstractLinearSolver):
    r"""Conjugate gradients: to a tolerance, or for a fixed number of steps.

    Args:
        tolerance: Stops once $\|b - A v\| \le$ tolerance $\cdot \|b\|$. `None` never
            stops early, as `conjugate_gradient`: the number of products is then public.
        num_steps: The most steps, or the number of steps where `tolerance` is `None`.
            Static.
    """

    tolerance: float | Scalar | None = 1e-5
    num_steps: int = eqx.field(static=True, default=500)

    def __check_init__(self):
        _checks.count("ConjugateGradient", num_steps=self.num_steps)
        if self.tolerance is not None:
            _checks.positive("ConjugateGradient", tolerance=self.tolerance)

    def solve(self, matvec, b, x0=None):
        """Solves the system; `num_products` tells when it stopped."""
        first = 0 if x0 is None else 1
        if self.tolerance is None:
            value, residual_norm = conjugate_gradient(
                matvec, b, num_steps=self.num_steps, x0=x0
            )
            products = jnp.asarray(self.num_steps + first, jnp.int32)
            return LinearSolution(value, residual_norm, products)
        state, scale = _start(matvec, b, x0)
        floor = _rounding(b, scale)
        enough = jnp.asarray(self.tolerance, floor.dtype) ** 2 * _unit_square(b, scale)

        def unfinished(carry):
            steps, state = carry
            return (steps < self.num_steps) & (state.square > enough) & ~state.is_stuck

        def step(carry):
            steps, state = carry
            return steps + 1, _conjugate_step(matvec, state, floor)

        start = (jnp.asarray(0, jnp.int32), state)
        steps, state = jax.lax.while_loop(unfinished, step, start)
        value = _scaled(scale, state.value)
        return LinearSolution(value, _residual_norm(matvec, value, b), steps + first)


class Neumann(AbstractLinearSolver):
    """The truncated Neumann series, as `neumann`.

    Args:
        num_steps: The number of terms. Static.
        step_size: Positive, below 2 over the largest eigenvalue.
    """

    num_steps: int = eqx.field(static=True)
    step_size: float | Scalar

    def __check_init__(self):
        _checks.count("Neumann", num_steps=self.num_steps)
        _checks.positive("Neumann", step_size=self.step_size)

    def solve(self, matvec, b, x0=None):
        """Sums the series, from `x0` on."""
        value, residual_norm = neumann(
            matvec, b, num_steps=self.num_steps, step_size=self.step_size, x0=x0
        )
        products = self.num_steps - (x0 is None)
        return LinearSolution(value, residual_norm, jnp.asarray(products, jnp.int32))


class Cholesky(AbstractLinearSolver):
    """A dense factorization, as `cholesky`: exact, for few coordinates."""

    def solve(self, matvec, b, x0=None):
        """Factors the matrix; has no use for `x0`."""
        del x0
        value, residual_norm = cholesky(matvec, b)
        products = sum(jnp.size(leaf) for leaf in jax.tree.leaves(b))
        return LinearSolution(value, residual_norm, jnp.asarray(products, jnp.int32))


def differentiable_solve(
    solver: AbstractLinearSolver, matvec: Matvec, b: PyTree, x0: PyTree | None = None
) -> LinearSolution:
    r"""Solves $A v = b$ with derivatives of the solution instead of the iteration.

    Forward and reverse mode, to any order: a derivative of $v$ is the solution of
    another system with $A$, by the same solver. Only `value` has one.

    Args:
        solver: The solver.
        matvec: $v \mapsto A v$, linear; may close over what is differentiated.
        b: The right-hand side.
        x0: A starting point.
    """

    def solve(matvec, b):
        found = solver.solve(matvec, b, x0)
        return found.value, found[1:]

    value, rest = jax.lax.custom_linear_solve(
        matvec, b, solve, symmetric=True, has_aux=True
    )
    return LinearSolution(value, *rest)


class _Conjugate(NamedTuple):
    value: PyTree
    residual: PyTree
    direction: PyTree
    square: Scalar
    is_stuck: Array


def _start(matvec: Matvec, b: PyTree, x0: PyTree | None) -> tuple[_Conjugate, Scalar]:
    """The state at `x0` of the system divided by a scale, and that scale.

    Squares of the entries of a small right-hand side would underflow in float32.
    """
    residual = b if x0 is None else _subtract(b, matvec(x0))
    largest = jnp.maximum(_largest(b), _largest(residual))
    scale = jnp.where(largest > 0, largest, 1)
    residual = _scaled(1 / scale, residual)
    value = jax.tree.map(jnp.zeros_like, b) if x0 is None else _scaled(1 / scale, x0)
    square = _dot(residual, residual)
    return _Conjugate(value, residual, residual, square, jnp.asarray(False)), scale


def _conjugate_step(matvec: Matvec, state: _Conjugate, floor: Scalar) -> _Conjugate:
    """One step; a zero one where only rounding is left or no curvature."""
    product = matvec(state.direction)
    curvature = _dot(state.direction, product)
    moves = (state.square > floor) & (curvature > 0)
    length = jnp.where(moves, state.square / jnp.where(moves, curvature, 1), 0)
    residual = _add_scaled(state.residual, -length, product)
    square = _dot(residual, residual)
    share = jnp.where(moves, square / jnp.where(moves, state.square, 1), 0)
    return _Conjugate(
        _add_scaled(state.value, length, state.direction),
        residual,
        _add_scaled(residual, share, state.direction),
        square,
        ~moves,
    )


def _rounding(b: PyTree, scale: Scalar) -> Scalar:
    """The squared residual below which only rounding is left."""
    epsilon = min(float(jnp.finfo(leaf.dtype).eps) for leaf in jax.tree.leaves(b))
    return (0.01 * epsilon) ** 2 * _unit_square(b, scale)


def _unit_square(b: PyTree, scale: Scalar) -> Scalar:
    unit = _scaled(1 / scale, b)
    return _dot(unit, unit)


def _residual_norm(matvec: Matvec, value: PyTree, b: PyTree) -> Scalar:
    residual = _subtract(b, matvec(value))
    largest = _largest(residual)
    scale = jnp.where(largest > 0, largest, 1)
    return scale * jnp.sqrt(_unit_square(residual, scale))


def _largest(tree: PyTree) -> Scalar:
    leaves = [leaf for leaf in jax.tree.leaves(tree) if leaf.size]
    return jnp.max(jnp.stack([jnp.max(jnp.abs(_wide(leaf))) for leaf in leaves]))


def _dot(one: PyTree, other: PyTree) -> Scalar:
    products = jax.tree.map(lambda u, v: jnp.vdot(_wide(u), _wide(v)), one, other)
    leaves = jax.tree.leaves(products)
    dtype = max((v.dtype for v in leaves), key=lambda kind: jnp.finfo(kind).bits)
    return sum((v.astype(dtype) for v in leaves), jnp.zeros((), dtype))


def _wide(leaf: Array) -> Array:
    """Norms and inner products are never taken in half precision."""
    return leaf if jnp.finfo(leaf.dtype).bits > 32 else leaf.astype(jnp.float32)


def _subtract(one: PyTree, other: PyTree) -> PyTree:
    return jax.tree.map(jnp.subtract, one, other)


def _scaled(factor: Scalar, tree: PyTree) -> PyTree:
    return jax.tree.map(lambda v: factor.astype(v.dtype) * v, tree)


def _add_scaled(tree: PyTree, factor: Scalar, direction: PyTree) -> PyTree:
    """`tree + factor * direction`, in the dtypes of `tree`."""
    return jax.tree.map(lambda u, v: u + factor.astype(u.dtype) * v, tree, direction)
