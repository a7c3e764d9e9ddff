r"""Solves whose error is known before they start: public coefficients, fixed counts.

Both methods know the least and largest eigenvalue of the Hessian, $\mu$ and $\beta$,
and nothing else decides a coefficient: unlike in conjugate gradients no number computed
from records is ever divided by. The bounds hold for every right-hand side, and rounding
errors add up as in any linear recursion.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PyTree

from .. import _checks

Number = float | Float[Array, ""]

# Eigenvalues that coincide would make a quotient of zeros of the coefficients.
_APART = 1.001


def condition_number(smallest: Number, largest: Number) -> Number:
    r"""$\kappa = \beta / \mu$, kept above 1 as the methods here need it.

    Args:
        smallest: $\mu$.
        largest: $\beta$.
    """
    return _APART * largest / smallest


def accelerated_gradient(
    gradient: Callable[[PyTree], PyTree],
    start: PyTree,
    *,
    smallest: Number,
    largest: Number,
    num_steps: int | Int[Array, ""],
) -> PyTree:
    r"""Minimizes a strongly convex function by a fixed number of accelerated steps.

    $$y_{k+1} = u_k - \tfrac{1}{\beta} \nabla(u_k), \qquad u_{k+1} = y_{k+1} +
    \frac{\sqrt\kappa - 1}{\sqrt\kappa + 1} (y_{k+1} - y_k).$$

    Args:
        gradient: Its gradient, on pytrees like `start`.
        start: $y_0 = u_0$.
        smallest: $\mu$.
        largest: $\beta$, also a Lipschitz constant of the gradient.
        num_steps: $k$: exactly that many gradients; public.

    Returns:
        $y_k$, off by at most `accelerated_error`.

    References:
        Nesterov, "Lectures on convex optimization", 2018, Section 2.2.
    """
    root = condition_number(smallest, largest) ** 0.5
    rate, momentum = 1 / (_APART * largest), (root - 1) / (root + 1)

    def step(_, state):
        ahead, last = state
        value = _add(ahead, -rate, gradient(ahead))
        return _add(value, momentum, optax.tree.sub(value, last)), value

    return jax.lax.fori_loop(0, num_steps, step, (start, start))[1]


def accelerated_error(
    smallest: Number, largest: Number, distance: Number, num_steps: int
) -> Number:
    r"""$\|y_k - y^*\| \le D \sqrt{\kappa + 1} (1 - \kappa^{-1/2})^{k/2}$.

    From $G(y_k) - G^* \le (1 - \kappa^{-1/2})^k (G(y_0) - G^* + \frac{\mu}{2} D^2)$,
    $G(y_0) - G^* \le \frac{\beta}{2} D^2$ and strong convexity.

    Args:
        smallest: $\mu$.
        largest: $\beta$.
        distance: $D \ge \|y_0 - y^*\|$.
        num_steps: $k$.
    """
    kappa = condition_number(smallest, largest)
    return distance * (kappa + 1) ** 0.5 * (1 - kappa**-0.5) ** (num_steps / 2)


def accelerated_steps(
    smallest: Number, largest: Number, distance: Number, error: Number
) -> Number:
    r"""The fewest steps after which `accelerated_error` is at most `error`.

    Args:
        smallest: $\mu$.
        largest: $\beta$.
        distance: $D \ge \|y_0 - y^*\|$.
        error: $\alpha > 0$.

    Returns:
        A whole number: a float on the host, an array for arrays.
    """
    kappa = condition_number(smallest, largest)
    ratio = distance * (kappa + 1) ** 0.5 / error
    module = jnp if isinstance(ratio, jax.Array) else np
    # One more, for the rounding of this formula.
    steps = 2 * module.log(ratio) / -module.log1p(-(kappa**-0.5))
    return module.ceil(module.maximum(steps, 0.0)) + 1


def chebyshev(
    matvec: Callable[[PyTree], PyTree],
    b: PyTree,
    *,
    smallest: Number,
    largest: Number,
    num_steps: int,
) -> PyTree:
    r"""Solves $A v = b$ by a fixed number of steps of Chebyshev's iteration.

    A fixed polynomial of $A$ times $b$, the best one for a spectrum in $[\mu, \beta]$.

    Args:
        matvec: $v \mapsto A v$, symmetric, on pytrees like `b`.
        b: The right-hand side.
        smallest: $\mu$, at most the least eigenvalue of $A$.
        largest: $\beta$, at least the largest one.
        num_steps: $m$: exactly that many products.

    Returns:
        $v$ with $\|v - A^{-1} b\| \le$ `chebyshev_error` $\cdot \|A^{-1} b\|$, in the
        Euclidean norm as in $\|v\|_A = \sqrt{v^T A v}$.

    References:
        Saad, "Iterative methods for sparse linear systems", 2003, Algorithm 12.1.
    """
    _checks.count("chebyshev", num_steps=num_steps)
    center, half = (_APART * largest + smallest) / 2, (_APART * largest - smallest) / 2
    ratio = center / half

    def step(_, state):
        value, residual, move, weight = state
        value = optax.tree.add(value, move)
        residual = _add(residual, -1.0, matvec(move))
        new = 1 / (2 * ratio - weight)
        move = _add(_scale(new * weight, move), 2 * new / half, residual)
        return value, residual, move, new

    zero = optax.tree.zeros_like(b)
    dtype = jnp.result_type(*jax.tree.leaves(b))
    weight = jnp.asarray(1 / ratio, dtype)
    state = (zero, b, _scale(1 / center, b), weight)
    return jax.lax.fori_loop(0, num_steps, step, state)[0]


def chebyshev_error(smallest: Number, largest: Number, num_steps: int) -> Number:
    r"""$2 q^m$ with $q = (\sqrt\kappa - 1) / (\sqrt\kappa + 1)$.

    Args:
        smallest: $\mu$.
        largest: $\beta$.
        num_steps: $m$.
    """
    root = condition_number(smallest, largest) ** 0.5
    return 2 * ((root - 1) / (root + 1)) ** num_steps


def _scale(factor: Number, tree: PyTree) -> PyTree:
    return jax.tree.map(lambda v: _like(factor, v) * v, tree)


def _add(tree: PyTree, factor: Number, direction: PyTree) -> PyTree:
    return jax.tree.map(lambda u, v: u + _like(factor, u) * v, tree, direction)


def _like(factor: Number, leaf: Array) -> Array:
    known = isinstance(factor, float | int | np.number)
    return jnp.asarray(float(factor) if known else factor, leaf.dtype)
