"""Symmetric positive definite linear systems given by their products with vectors.

Frozen settings that `implicit_hypergradient` and `lower_solution` take as
`linear_solver=`, and that solve a system of any other origin by `solve`.
"""

import abc
import math
from collections.abc import Callable, Sequence
from typing import Annotated, NamedTuple

import equinox as eqx
import jax
import jax.flatten_util
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PyTree

from .._checks import Checked, Count, positive
from ..core.descent import add_scaled, scaled

Scalar = Float[Array, ""]
Matvec = Callable[[PyTree], PyTree]

# JAX does not declare the type of its result.
_custom_solve: Callable[..., tuple[PyTree, PyTree]] = jax.lax.custom_linear_solve


class _Conjugate(NamedTuple):
    value: PyTree
    residual: PyTree
    direction: PyTree
    square: Scalar  # of the residual; negative once a direction had no curvature


class LinearSolution(NamedTuple):
    r"""Solution of a linear system, its residual norm, and the products it took.

    Attributes:
        value: $v$, a pytree like $b$.
        residual_norm: $\|b - A v\|_2$ over the pytree, computed anew from $v$.
            It takes one product, which `jax.jit` leaves out if the norm is not used.
        num_products: How many products with $A$ the solve took, that one left out.
    """

    value: PyTree
    residual_norm: Scalar
    num_products: Int[Array, ""]


class AbstractLinearSolver(Checked):
    """Solver of symmetric positive definite systems."""

    @abc.abstractmethod
    def solve(
        self, matvec: Matvec, b: PyTree, x0: PyTree | None = None
    ) -> LinearSolution:
        r"""Return a `LinearSolution` of the system `matvec(v)` = `b`.

        Args:
            matvec: $v \mapsto A v$.
            b: The right-hand side.
            x0: An initial point; zeros when omitted.
        """


class ConjugateGradient(AbstractLinearSolver):
    r"""Conjugate gradients: to a tolerance, or for a fixed number of steps.

    With $\kappa$ the condition number, the error in the norm $\sqrt{v^T A v}$ falls by
    $2 ((\sqrt\kappa - 1) / (\sqrt\kappa + 1))^m$ in $m$ steps. Once rounding is all
    that is left of the residual a step is zero, so more steps than needed change
    nothing: no division of zero by zero.

    The answer is NaN if numbers are not finite, or if a direction shows that $A$ is not
    positive definite while a relative residual of more than about $\sqrt\varepsilon$ is
    left.

    Args:
        num_steps: The most steps, or the number of steps if `tolerance` is `None`.
            Static.
        tolerance: Stops once $\|b - A v\| \le$ tolerance $\cdot \|b\|$. `None` never
            stops early: `num_steps` products whatever the values are, one more with
            `x0`, and forward and reverse mode go through the steps.

    Example:
        >>> import jax.numpy as jnp
        >>> from dpbilevel.oracles import ConjugateGradient
        >>> diagonal = jnp.asarray([1.0, 4.0])
        >>> solver = ConjugateGradient(num_steps=10, tolerance=None)
        >>> v = solver.solve(lambda v: diagonal * v, jnp.ones(2)).value
        >>> [round(float(entry), 6) for entry in v]
        [1.0, 0.25]
    """

    num_steps: Count = eqx.field(static=True, default=500)
    tolerance: Annotated[float | Scalar, positive] | None = 1e-5

    def solve(self, matvec, b, x0=None):
        """Return a `LinearSolution`; NaN if positive definiteness fails."""
        start, scale = _start(matvec, b, x0)
        unit = _unit_square(b, scale)
        value, products, solves = self._iterated(matvec, start, unit, b)
        value = jax.tree.map(lambda v: jnp.where(solves, v, jnp.nan), value)
        value = scaled(scale, value)
        products = products + (0 if x0 is None else 1)
        return LinearSolution(value, _residual_norm(matvec, value, b), products)

    def truncated(self, matvec: Matvec, b: PyTree) -> PyTree:
        """Return the last iterate for a unit `b`, before a direction lacks curvature.

        The right-hand side has the length one.
        """
        nothing = jax.tree.map(jnp.zeros_like, b)
        one = jnp.ones_like(_dot(b, b))
        start = _Conjugate(nothing, b, b, one)
        return self._iterated(matvec, start, one, b)[0]

    def _iterated(
        self, matvec: Matvec, state: _Conjugate, unit: Scalar, b: PyTree
    ) -> tuple[PyTree, Int[Array, ""], Bool[Array, ""]]:
        """Return last iterate, number of steps, whether curvature stayed positive."""
        first, tolerance = state.square, self.tolerance
        wanted = jnp.asarray(0.0 if tolerance is None else tolerance, unit.dtype)
        rounding = 0.01 * _epsilon(b, min)  # the residual below is rounding alone
        enough = jnp.maximum(wanted, rounding) ** 2 * unit

        def step(carry):
            steps, state = carry
            return steps + 1, _conjugate_step(matvec, state, enough)

        def unfinished(carry):
            steps, state = carry
            return (steps < self.num_steps) & (state.square > enough)

        start = (jnp.asarray(0, jnp.int32), state)
        if tolerance is None:
            steps, state = jax.lax.fori_loop(
                0, self.num_steps, lambda _, carry: step(carry), start
            )
        else:
            steps, state = jax.lax.while_loop(unfinished, step, start)
        # Rounding may hide a positive curvature from a small residual.
        small = _epsilon(b, max) * jnp.maximum(first, unit)
        solves = (state.square >= -small) & (state.square < jnp.inf)
        return state.value, steps, solves


class Neumann(AbstractLinearSolver):
    r"""Solver of $A v = b$ by truncated Neumann series $\eta \sum_k (I - \eta A)^k b$.

    Args:
        num_steps: The number of terms: as many products, one less without `x0`.
            Static.
        step_size: $\eta > 0$, below 2 over the largest eigenvalue of $A$.
    """

    num_steps: Count = eqx.field(static=True)
    step_size: Annotated[float | Scalar, positive]

    def solve(self, matvec, b, x0=None):
        """Return the `LinearSolution` of the series, summed from `x0` on."""
        rate = jnp.asarray(self.step_size)

        def step(_, value):
            return add_scaled(value, rate, optax.tree.sub(b, matvec(value)))

        products = self.num_steps - (x0 is None)  # the first one from zero is free
        start = scaled(rate, b) if x0 is None else x0
        value = jax.lax.fori_loop(0, products, step, start)
        norm = _residual_norm(matvec, value, b)
        return LinearSolution(value, norm, jnp.asarray(products, jnp.int32))


class Cholesky(AbstractLinearSolver):
    """Solver that forms the matrix, one product per coordinate, and factors it.

    For few coordinates $d$, in leaves of one dtype: takes $d^2$ numbers of memory and
    of the order of $d^3$ operations. NaN if it is not positive definite.
    """

    def solve(self, matvec, b, x0=None):
        """Return the `LinearSolution` of a factored matrix; `x0` is not used."""
        flat, unravel = jax.flatten_util.ravel_pytree(b)

        def column(v):
            return jax.flatten_util.ravel_pytree(matvec(unravel(v)))[0]

        matrix = jax.vmap(column, out_axes=1)(jnp.eye(flat.size, dtype=flat.dtype))  # A
        factor = jax.scipy.linalg.cho_factor(matrix, lower=True)
        value = unravel(jax.scipy.linalg.cho_solve(factor, flat))
        norm = _residual_norm(matvec, value, b)
        return LinearSolution(value, norm, jnp.asarray(flat.size, jnp.int32))


def extrapolate(solutions: Sequence[PyTree]) -> PyTree | None:
    r"""Return the next system's initial point, extrapolated; `None` without solutions.

    The value at the next step of the polynomial through the $k$ past solutions,

    $$\sum_{j=1}^k (-1)^{j-1} \binom{k}{j} v_{t+1-j}.$$

    Along a smooth trajectory with steps of size $h$ it is off by $O(h^k)$, and the
    error of a single solve enters it $2^k - 1$ times at most.

    Args:
        solutions: $v_t, v_{t-1}, \dots$, the latest first: `value` of each
            `LinearSolution`. All of them are used; three are a good number.

    Returns:
        A pytree like each, for `x0` of a solver or `v0` of a hypergradient; `None`
        without solutions.

    Example:
        >>> import jax.numpy as jnp
        >>> from dpbilevel.oracles import extrapolate
        >>> squares = [jnp.asarray([9.0]), jnp.asarray([4.0]), jnp.asarray([1.0])]
        >>> extrapolate(squares[:2]).tolist(), extrapolate(squares).tolist()
        ([14.0], [16.0])
    """
    if not solutions:
        return None
    count = len(solutions)
    weights = [(-1) ** j * math.comb(count, j + 1) for j in range(count)]
    return jax.tree.map(
        lambda *vs: sum(w * v for w, v in zip(weights, vs, strict=True)), *solutions
    )


def differentiable_solve(
    solver: AbstractLinearSolver, matvec: Matvec, b: PyTree, x0: PyTree | None = None
) -> LinearSolution:
    """Return a `LinearSolution` whose value has the exact solution's derivatives.

    Forward and reverse mode, to any order: a derivative of $v$ is the solution of
    another system with `matvec`, by the same solver. Only `value` has one. `matvec` may
    close over what is differentiated.
    """

    def solve(matvec, b):
        solution = solver.solve(matvec, b, x0)
        return solution.value, solution[1:]

    value, rest = _custom_solve(matvec, b, solve, symmetric=True, has_aux=True)
    return LinearSolution(value, *rest)


def _start(matvec: Matvec, b: PyTree, x0: PyTree | None) -> tuple[_Conjugate, Scalar]:
    """Return conjugate gradients' state at `x0` for a scaled system, and the scale.

    Squares of the entries of a small right-hand side would underflow in float32.
    """
    residual = b if x0 is None else optax.tree.sub(b, matvec(x0))
    largest = jnp.maximum(_largest(b), _largest(residual))
    scale = jnp.where(largest > 0, largest, 1)
    residual = scaled(1 / scale, residual)
    value = jax.tree.map(jnp.zeros_like, b) if x0 is None else scaled(1 / scale, x0)
    square = _dot(residual, residual)
    return _Conjugate(value, residual, residual, square), scale


def _conjugate_step(matvec: Matvec, state: _Conjugate, enough: Scalar) -> _Conjugate:
    """Return the state after one step of conjugate gradients.

    The step is zero if the residual is small or curvature is missing.
    """
    product = matvec(state.direction)
    curvature = _dot(state.direction, product)
    is_curved = (state.square >= 0) & (curvature > 0) & (curvature < jnp.inf)
    moves = is_curved & (state.square > enough)
    # A negative length stands for missing curvature: one kernel less.
    length = jnp.where(moves, state.square, jnp.where(is_curved, 0.0, -1.0))
    length = length / jnp.where(moves, curvature, 1)
    step = jnp.maximum(length, 0)  # alpha
    residual = add_scaled(state.residual, -step, product)  # b - A v
    square = jnp.where(length < 0, -1.0, 1.0) * _dot(residual, residual)
    ratio = jnp.where(step > 0, square, 0) / jnp.where(step > 0, state.square, 1)
    value = add_scaled(state.value, step, state.direction)
    direction = add_scaled(residual, ratio, state.direction)
    return _Conjugate(value, residual, direction, square)


def _epsilon(b: PyTree, among: Callable) -> float:
    return among(float(jnp.finfo(leaf.dtype).eps) for leaf in jax.tree.leaves(b))


def _unit_square(b: PyTree, scale: Scalar) -> Scalar:
    unit = scaled(1 / scale, b)
    return _dot(unit, unit)


def _residual_norm(matvec: Matvec, value: PyTree, b: PyTree) -> Scalar:
    residual = optax.tree.sub(b, matvec(value))
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
    """Return the leaf in at least single precision, for norms and inner products."""
    return leaf if jnp.finfo(leaf.dtype).bits > 32 else leaf.astype(jnp.float32)
