r"""Solves whose error is known before they start: public coefficients, fixed counts.

Both methods know the least and largest eigenvalue of the Hessian, $\mu$ and $\beta$,
and nothing else decides a coefficient: unlike in conjugate gradients no number computed
from records is ever divided by. The bounds hold for every right-hand side, and rounding
errors add up as in any linear recursion.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Int, PyTree

from ... import _checks
from ..._checks import Number
from ...onelevel.linear_models import module_of

# Eigenvalues that coincide would make a quotient of zeros of the coefficients.
_APART = 1.001


@dataclasses.dataclass(frozen=True)
class Spectrum:
    r"""Bounds on the eigenvalues of a Hessian, and what can be solved with them.

    Attributes:
        smallest: $\mu$, at most the least eigenvalue.
        largest: $\beta$, at least the largest one.
    """

    smallest: Number
    largest: Number

    @property
    def condition_number(self) -> Number:
        r"""$\kappa = \beta / \mu$, kept above 1 as the methods here need it."""
        return _APART * self.largest / self.smallest

    def accelerated_gradient(
        self,
        gradient: Callable[[PyTree], PyTree],
        start: PyTree,
        num_steps: int | Int[Array, ""],
    ) -> PyTree:
        r"""Minimizes a strongly convex function by a fixed number of accelerated steps.

        With $q = \mu / \beta$, $w_0 = 0$, $x_0 = z_0$ and $S_k = \sqrt{q (q + (1 - q)
        w_k)}$:

        $$y_k = x_k + \frac{2 q}{q + S_k} (z_k - x_k), \qquad x_{k+1} = y_k -
        \tfrac{1}{\beta} \nabla(y_k),$$
        $$z_{k+1} = (1 - \tau_k) z_k + \tau_k (y_k - \tfrac{1}{\mu} \nabla(y_k)),
        \qquad \tau_k = \frac{q + S_k}{1 + S_k}, \quad w_{k+1} = \tau_k^2 / q.$$

        Of all methods that see $k$ gradients, this one has the smallest error in $z_k$.

        Args:
            gradient: Its gradient, on pytrees like `start`; $\beta$-Lipschitz.
            start: $z_0$.
            num_steps: $k$: exactly that many gradients; public.

        Returns:
            $z_k$, off by at most `accelerated_error`, and by at most $2 e / \mu$ more
            where gradients are off by $e$.

        References:
            Taylor and Drori, "An optimal gradient method for smooth strongly convex
            minimization", 2023: ITEM, in other variables. The effect of inexact
            gradients is derived in docs/mathematics.md.
        """
        w = jnp.zeros((), jnp.result_type(*jax.tree.leaves(start)))
        q = _like(1 / self.condition_number, w)
        short, long = 1 / (_APART * self.largest), 1 / self.smallest

        def step(_, state):
            x, z, w = state
            root = jnp.sqrt(q * (q + (1 - q) * w))  # S_k
            weight = (q + root) / (1 + root)  # tau_k
            y = _add(x, 2 * q / (q + root), optax.tree.sub(z, x))
            slope = gradient(y)
            x = _add(y, -short, slope)  # a gradient step
            z = _add(z, weight, optax.tree.sub(_add(y, -long, slope), z))
            return x, z, weight**2 / q  # w_{k+1}

        return jax.lax.fori_loop(0, num_steps, step, (start, start, w))[1]

    def accelerated_error(self, distance: Number, num_steps: int) -> Number:
        r"""$\|z_k - z^*\| \le D / \cosh((k + 1) \operatorname{artanh} \kappa^{-1/2})$.

        With `distance` $D \ge \|z_0 - z^*\|$ and `num_steps` $k \ge 1$.
        """
        angle = self._angle
        decay = module_of(angle).exp(-(num_steps + 1) * angle)
        return distance * 2 * decay / (1 + decay**2)

    def accelerated_steps(self, distance: Number, error: Number) -> Number:
        """Return a number of steps that makes `accelerated_error` at most `error` > 0.

        A whole number: a float on the host, an array for arrays.
        """
        angle, ratio = self._angle, distance / error
        module = module_of(ratio / angle)
        # One more than needed, for the rounding of this formula.
        steps = module.ceil(module.arccosh(module.maximum(ratio, 1.0)) / angle)
        return module.maximum(steps, 1.0)

    @property
    def _angle(self) -> Number:
        kappa = self.condition_number
        return module_of(kappa).arctanh(kappa**-0.5)

    def chebyshev(
        self, matvec: Callable[[PyTree], PyTree], b: PyTree, num_steps: int
    ) -> PyTree:
        r"""Solves $A v = b$ by a fixed number of steps of Chebyshev's iteration.

        A fixed polynomial of $A$ times $b$, the best one for a spectrum in $[\mu,
        \beta]$.

        Args:
            matvec: $v \mapsto A v$, symmetric, on pytrees like `b`.
            b: The right-hand side.
            num_steps: $m$: exactly that many products.

        Returns:
            $v$ with $\|v - A^{-1} b\| \le$ `chebyshev_error` $\cdot \|A^{-1} b\|$, in
            the Euclidean norm as in $\|v\|_A = \sqrt{v^T A v}$.

        References:
            Saad, "Iterative methods for sparse linear systems", 2003, Algorithm 12.1.
        """
        _checks.count("chebyshev", num_steps=num_steps)
        center = (_APART * self.largest + self.smallest) / 2
        half = (_APART * self.largest - self.smallest) / 2
        ratio = center / half

        def step(_, state):
            value, residual, move, weight = state
            value = optax.tree.add(value, move)
            residual = _add(residual, -1.0, matvec(move))
            new = 1 / (2 * ratio - weight)  # from public numbers alone
            move = _add(_scale(new * weight, move), 2 * new / half, residual)
            return value, residual, move, new

        zero = optax.tree.zeros_like(b)
        dtype = jnp.result_type(*jax.tree.leaves(b))
        weight = jnp.asarray(1 / ratio, dtype)
        state = (zero, b, _scale(1 / center, b), weight)
        return jax.lax.fori_loop(0, num_steps, step, state)[0]

    def chebyshev_error(self, num_steps: int) -> Number:
        r"""$2 q^m$ with $q = (\sqrt\kappa - 1) / (\sqrt\kappa + 1)$ in $m$ steps."""
        root = self.condition_number**0.5
        return 2 * ((root - 1) / (root + 1)) ** num_steps

    def chebyshev_steps(self, factor: Number) -> Number:
        """Return a number of steps that makes `chebyshev_error` at most `factor` > 0.

        A whole number, at least 1: a float on the host, an array for arrays.
        """
        root = self.condition_number**0.5
        ratio, rate = 2 / factor, (root + 1) / (root - 1)
        module = module_of(ratio * rate)
        steps = module.ceil(module.log(ratio) / module.log(rate))
        return module.maximum(steps, 0.0) + 1


def _scale(factor: Number, tree: PyTree) -> PyTree:
    return jax.tree.map(lambda v: _like(factor, v) * v, tree)


def _add(tree: PyTree, factor: Number, direction: PyTree) -> PyTree:
    return jax.tree.map(lambda u, v: u + _like(factor, u) * v, tree, direction)


def _like(factor: Number, leaf: Array) -> Array:
    known = isinstance(factor, float | int | np.number)
    return jnp.asarray(float(factor) if known else factor, leaf.dtype)
