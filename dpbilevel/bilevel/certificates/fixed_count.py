r"""Bounds at one x, and inner solvers with fixed step counts and known errors.

Both methods know the least and largest eigenvalue of the Hessian, $\mu$ and $\beta$,
and nothing else decides a coefficient: unlike in conjugate gradients no number computed
from records is ever divided by. The bounds hold for every right-hand side, and rounding
errors add up as in any linear recursion.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int, PyTree

from ... import _checks
from ..._checks import Number
from ...core.descent import add_scaled, scaled
from ...onelevel.losses import module_of

# Equal bounds on the eigenvalues would make coefficients 0 / 0.
_APART = 1.001


@dataclasses.dataclass(frozen=True)
class Spectrum:
    r"""Bounds on the eigenvalues of a Hessian, and solvers that need them alone."""

    smallest: Number  # mu, at most the least eigenvalue
    largest: Number  # beta, at least the largest one

    @property
    def condition_number(self) -> Number:
        """Condition number: 1.001 times `largest` over `smallest`."""
        return _APART * self.largest / self.smallest

    def accelerated_gradient(
        self,
        gradient: Callable[[PyTree], PyTree],
        start: PyTree,
        num_steps: int | Int[Array, ""],
    ) -> PyTree:
        r"""Return an approximate minimizer after a fixed number of accelerated steps.

        With $q = \mu / \beta$, $w_0 = 0$, $x_0 = z_0$ and $S_k = \sqrt{q (q + (1 - q)
        w_k)}$:

        $$y_k = x_k + \frac{2 q}{q + S_k} (z_k - x_k), \qquad x_{k+1} = y_k -
        \tfrac{1}{\beta} \nabla(y_k),$$
        $$z_{k+1} = (1 - \tau_k) z_k + \tau_k (y_k - \tfrac{1}{\mu} \nabla(y_k)),
        \qquad \tau_k = \frac{q + S_k}{1 + S_k}, \quad w_{k+1} = \tau_k^2 / q.$$

        Of all methods that see $k$ gradients, this one has the smallest error in $z_k$.
        It is off by at most `accelerated_error`, and by at most $2 e / \mu$ more if
        gradients are off by $e$. `num_steps` is $k$, public.

        References:
            Taylor and Drori, "An optimal gradient method for smooth strongly convex
            minimization", 2023: ITEM, in other variables. The effect of inexact
            gradients is derived in docs/mathematics.md.
        """
        w = jnp.zeros((), jnp.result_type(*jax.tree.leaves(start)))
        q = jnp.asarray(1 / self.condition_number, w.dtype)
        short, long = 1 / (_APART * self.largest), 1 / self.smallest

        def step(_, state):
            x, z, w = state
            root = jnp.sqrt(q * (q + (1 - q) * w))  # S_k
            weight = (q + root) / (1 + root)  # tau_k
            y = add_scaled(x, 2 * q / (q + root), optax.tree.sub(z, x))
            slope = gradient(y)
            x = add_scaled(y, -short, slope)  # a gradient step
            z = add_scaled(z, weight, optax.tree.sub(add_scaled(y, -long, slope), z))
            return x, z, weight**2 / q  # w_{k+1}

        return jax.lax.fori_loop(0, num_steps, step, (start, start, w))[1]

    def accelerated_error(self, distance: Number, num_steps: int) -> Number:
        r"""Return a bound on the distance of `accelerated_gradient` from the minimizer.

        It is $D / \cosh((k + 1) \operatorname{artanh} \kappa^{-1/2})$, with
        `distance` $D \ge \|z_0 - z^*\|$ and `num_steps` $k \ge 1$.
        """
        angle = self._angle
        decay = module_of(angle).exp(-(num_steps + 1) * angle)
        return distance * 2 * decay / (1 + decay**2)

    def accelerated_steps(self, distance: Number, error: Number) -> Number:
        """Return a number of steps that makes `accelerated_error` at most `error`.

        They are a float on the host, an array for arrays; `error` is positive.
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
        r"""Return an approximate $v$ with `matvec(v)` = `b`, by Chebyshev steps.

        A fixed polynomial of the symmetric matrix $A$, times $b$; best for a spectrum
        in $[\mu, \beta]$, by exactly $m$ products. $\|v - A^{-1} b\| \le$
        `chebyshev_error` $\cdot \|A^{-1} b\|$, in the Euclidean norm as in $\|v\|_A =
        \sqrt{v^T A v}$.

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
            residual = add_scaled(residual, -1.0, matvec(move))
            new = 1 / (2 * ratio - weight)  # from public numbers alone
            move = add_scaled(scaled(new * weight, move), 2 * new / half, residual)
            return value, residual, move, new

        zero = optax.tree.zeros_like(b)
        dtype = jnp.result_type(*jax.tree.leaves(b))
        weight = jnp.asarray(1 / ratio, dtype)
        state = (zero, b, scaled(1 / center, b), weight)
        return jax.lax.fori_loop(0, num_steps, step, state)[0]

    def chebyshev_error(self, num_steps: int) -> Number:
        r"""Return a bound on the relative error of `chebyshev` after its steps.

        It is $2 q^m$ with $q = (\sqrt\kappa - 1) / (\sqrt\kappa + 1)$ and $m$ steps.
        """
        root = self.condition_number**0.5
        return 2 * ((root - 1) / (root + 1)) ** num_steps

    def chebyshev_steps(self, factor: Number) -> Number:
        """Return a number of steps that makes `chebyshev_error` at most `factor`.

        They are at least 1: a float on the host, an array for arrays.
        """
        root = self.condition_number**0.5
        ratio, rate = 2 / factor, (root + 1) / (root - 1)
        module = module_of(ratio * rate)
        steps = module.ceil(module.log(ratio) / module.log(rate))
        return module.maximum(steps, 0.0) + 1


@dataclasses.dataclass(frozen=True)
class Bounds:
    r"""Bounds that a certificate proves about the hypergradient at one $x$, or all.

    For all records of both levels, so also if all upper ones are copies of one, with
    $y^*$ the lower solution and $H = \nabla_{yy} G$. $\|\bar\nabla F(x, y) - \nabla
    \Phi(x)\| \le C \|y - y^*\|$ for $\|y\| \le r$, and a $v$ with $\|v - H^{-1}
    \nabla_y F\|_H \le \tau / \sqrt \mu_g$ moves the hypergradient by at most $c \tau$.
    """

    strong_convexity: Number  # mu_g, the least eigenvalue of H anywhere
    smoothness: Number  # beta, the largest one
    solution_radius: Number  # r, at least the norm of y^*
    solution_shift: Number  # d, how far one replaced lower record moves y^*
    upper: Number  # S_up, how far a replaced upper record moves the hypergradient
    lower: Number  # S_low, how far one replaced lower record does
    lower_error: Number  # C
    linear_error: Number  # c
    gradient: Number  # L-bar, at least the norm of the hypergradient
    upper_gradient: Number  # L_fy, at least the norm of grad_y F where |y| <= r
    # Bound on |grad_y| of a record's lower loss plus |grad_y| of the public term, for
    # |y| <= 3 r. `parts` is the factor from the bounds above to such sums of norms:
    # more than 1 if records and a public term may cancel.
    lower_gradient: Number
    parts: float = 1.0
    clip: Number | None = None  # norm at which upper records' contributions are clipped
    rows: int = 1  # of a record, at most, for people

    @property
    def largest(self) -> Number:
        """Bound on the norm of the hypergradient; the clip norm if there is one."""
        return self.gradient if self.clip is None else self.clip

    @property
    def spectrum(self) -> Spectrum:
        """`Spectrum` that holds the eigenvalues of the lower Hessian."""
        return Spectrum(self.strong_convexity, self.smoothness)


@dataclasses.dataclass(frozen=True)
class Metric:
    """Public diagonal $M$, a scaling of y that conditions the lower level better."""

    diagonal: PyTree  # positive, like y
    least: Any  # its least entry
    spectrum: Spectrum  # of M^{-1/2} H M^{-1/2}
    radius: Any  # at least the norm of M^{1/2} y^*
