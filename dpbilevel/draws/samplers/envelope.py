"""A proximal oracle that proposes from under a tangent of the potential."""

import dataclasses
import math
from typing import ClassVar, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, PyTree

from ...privacy.noise import PRNGKey, derive, standard_exponential
from ...sets import AbstractSet
from . import restricted
from .base import AbstractPotential, Regularity
from .proximal import (
    AbstractProximalOracle,
    combination,
    finite,
    planned_draw_tries,
    scaled,
)

_MOST_GRADIENT_STEPS = 12


class _Tangent(eqx.Module):
    point: PyTree  # c
    value: Array  # U(c)
    gradient: PyTree


class ConvexEnvelope(AbstractProximalOracle):
    r"""Proposes from the Gaussian under the quadratic that supports $U$ at a point.

    At any point $c$ of the set, with $g = \nabla U(c)$, strong convexity gives $U(x)
    \ge U(c) + \langle g, x - c \rangle + \frac{\alpha}{2} \|x - c\|^2$. A try draws $x$
    from the Gaussian with density proportional to $e^{-w(x)}$ on the set,

    $$w(x) = \langle g, x - c \rangle + \frac{\alpha}{2} \|x - c\|^2
        + \frac{1}{2 \eta} \|x - y\|^2,$$

    and accepts with probability $e^{-R(x)}$, $R(x) = U(x) - U(c) - \langle g, x - c
    \rangle - \frac{\alpha}{2} \|x - c\|^2 \ge 0$: exact at every $c$. Here $c = c_J$
    with $c_0 = \Pi(y)$ and $c_{i+1} = \Pi(y - \eta \nabla U(c_i))$, which contracts to
    the minimizer of $U + \|\cdot - y\|^2 / (2 \eta)$ by $\beta \eta$ a step.

    **Acceptance.** Let $P = \alpha + 1/\eta$, $\rho_0 = L$ and $\rho_{i+1} = \beta
    \eta \rho_i$. Then $\langle \nabla w(c), x - c \rangle \ge -\rho_J \|x - c\|$ on
    the set: for $J = 0$ as $\langle c - y, x - c \rangle \ge 0$ and $\|g\| \le L$;
    further, as $\langle c_{i+1} - y + \eta \nabla U(c_i), x - c_{i+1} \rangle \ge 0$
    and $\|c_{i+1} - c_i\| \le \eta \rho_i$. Integrating the divergence of $(x - c)
    e^{-w}$ over the set, whose boundary terms are not negative, $E \langle \nabla
    w(x), x - c \rangle \le d$, hence $P e^2 - \rho_J e \le d$ for $e^2 = E \|x -
    c\|^2$ and

    $$e \le \frac{\rho_J + \sqrt{\rho_J^2 + 4 P d}}{2 P} .$$

    By Jensen's inequality a try is accepted with probability at least $e^{-E R}$, and
    $E R \le \frac{\beta - \alpha}{2} e^2$ where $U$ is smooth, $E R \le 2 L e$ always.
    The step size is the larger of $1 / (\beta \max(d, 2))$ and $1 / (2 d L^2)$.

    **Inexact values.** If values are within $\zeta$ of those of $U$ and gradients
    within $\epsilon$, both with rounding, the support holds up to $\kappa = 2 \zeta +
    \epsilon D$: tries
    are accepted with probability $e^{-R - \kappa}$, $R$ being computed, which draws
    from the density of the computed potential exactly; $E R$ grows by $\kappa$,
    $\rho_0$ is $L + \epsilon$ and $\rho_{i+1} = \beta \eta \rho_i + 2 \epsilon$.

    Args:
        gradient_steps: $J$. Static; planned.
        draw_tries: Of one Gaussian draw on the set. Static; planned.
        curvature: $\alpha$; set by planning.
        slack: $\kappa$; set by planning.

    References:
        The tries and their bounds are ours; the step that they serve is that of Lee,
        Shen and Tian, "Structured Logconcave Sampling with a Restricted Gaussian
        Oracle", COLT 2021.
    """

    gradient_steps: int | None = eqx.field(static=True, default=None)
    draw_tries: int | None = eqx.field(static=True, default=None)
    curvature: float | None = None
    slack: float | None = None
    draws: ClassVar[int] = 1

    def largest_step(self, regularity: Regularity, feasible: AbstractSet) -> float:
        r"""The larger of $1 / (\beta \max(d, 2))$ and $1 / (2 d L^2)$.

        Args:
            regularity: What is known of the potential.
            feasible: The set.

        Raises:
            ValueError: No finite Lipschitz constant.
        """
        if not regularity.lipschitz < math.inf:
            raise ValueError(
                "ConvexEnvelope: needs a finite Lipschitz constant of the potential, "
                f"got {regularity.lipschitz}."
            )
        d, steepest = regularity.dimension, regularity.lipschitz
        most = restricted.diameter(feasible, d) ** 2
        smooth = regularity.smoothness * max(d, 2)
        rate = min(smooth, 2 * d * steepest**2)
        return min(most, 1 / rate) if rate > 0 else most

    def planned(
        self,
        regularity: Regularity,
        feasible: AbstractSet,
        *,
        step_size: float,
        num_steps: int,
        tries: int,
        share: float,
    ) -> Self:
        r"""Chooses the gradient steps and the tries of a draw.

        Args:
            regularity: What is known of the potential.
            feasible: The set.
            step_size: $\eta$.
            num_steps: How many accepted tries are needed.
            tries: How many tries are made in all.
            share: What the draws of all tries may fail with.
        """
        steps = self._best_steps(regularity, feasible, step_size)
        draw_tries = self.draw_tries or planned_draw_tries(
            self,
            regularity,
            feasible,
            step_size=step_size,
            num_steps=num_steps,
            tries=tries,
            share=share,
        )
        return dataclasses.replace(
            self,
            gradient_steps=steps,
            draw_tries=draw_tries,
            curvature=float(regularity.strong_convexity or 0.0),
            slack=self._slack(regularity, feasible),
        )

    def serves(self, regularity: Regularity, feasible: AbstractSet) -> bool:
        """Where curvature and slack are those that it was planned for.

        Args:
            regularity: What is known of the potential.
            feasible: The set.
        """
        needed = float(regularity.strong_convexity or 0.0)
        fixed = self.curvature, self.slack
        return fixed == (needed, self._slack(regularity, feasible))

    def bias(self, regularity: Regularity, step_size: float) -> float:
        """Zero: accepted tries have the law of the computed potential.

        Args:
            regularity: Not needed.
            step_size: Not needed.
        """
        del regularity, step_size
        return 0.0

    def acceptance(
        self, regularity: Regularity, feasible: AbstractSet, step_size: float
    ) -> float:
        r"""The bound of the class.

        Args:
            regularity: What is known of the potential.
            feasible: The set.
            step_size: $\eta$.
        """
        steps = self._best_steps(regularity, feasible, step_size)
        return self._accepted(regularity, feasible, step_size, steps)

    def gaussian(
        self, regularity: Regularity, feasible: AbstractSet, step_size: float
    ) -> tuple[float, float, float]:
        r"""The mean is $(\alpha c + y / \eta - g) / P$, the variance $1 / P$.

        Args:
            regularity: What is known of the potential.
            feasible: The set.
            step_size: $\eta$.
        """
        weight = 1 / (1 + (regularity.strong_convexity or 0.0) * step_size)
        steepest = regularity.lipschitz + _gradient_error(regularity, feasible)
        return math.sqrt(step_size * weight), weight, weight * step_size * steepest

    def evaluations(self) -> tuple[float, int]:
        """One value, and a value with its gradient for each gradient step and one."""
        count = 2 + (self.gradient_steps or 0)
        return float(count), count

    def prepared(
        self,
        potential: AbstractPotential,
        feasible: AbstractSet,
        y: PyTree,
        step_size: float,
    ) -> PyTree:
        r"""The tangent at $c_J$.

        Args:
            potential: $U$.
            feasible: The set.
            y: $y$.
            step_size: $\eta$.
        """

        def tangent(point):
            value, gradient = potential.value_and_gradient(point)
            return _Tangent(point, finite(value), finite(gradient))

        def move(_, point):
            gradient = tangent(point).gradient
            return feasible.project(combination(1, y, -step_size, gradient))

        point = feasible.project(y)
        if self.gradient_steps:
            point = jax.lax.fori_loop(0, self.gradient_steps, move, point)
        return tangent(point)

    def attempt(
        self,
        potential: AbstractPotential,
        feasible: AbstractSet,
        y: PyTree,
        prepared: PyTree,
        step_size: float,
        *,
        key: PRNGKey,
    ) -> tuple[PyTree, Bool[Array, ""], Float[Array, ""]]:
        r"""One try.

        Args:
            potential: $U$.
            feasible: The set.
            y: $y$.
            prepared: The tangent.
            step_size: $\eta$.
            key: A typed key.
        """
        key_proposal, key_accept = derive(key, "proposal", "accept")
        curvature = 0.0 if self.curvature is None else self.curvature
        slack, c = 0.0 if self.slack is None else self.slack, prepared.point
        shrink = 1 / (1 + curvature * step_size)
        pulled = combination(1, y, -step_size, prepared.gradient)
        pulled = combination(1, pulled, step_size * curvature, c)
        x = restricted.restricted_normal(
            feasible,
            scaled(shrink, pulled),
            (step_size * shrink) ** 0.5,
            self.draw_tries or 1,
            key=key_proposal,
        )
        offset = optax.tree.sub(x, c)
        support = optax.tree.vdot(prepared.gradient, offset)
        support = support + 0.5 * curvature * optax.tree.vdot(offset, offset)
        above = finite(potential(x)) - prepared.value - support + slack
        coin = standard_exponential((), above.dtype, key=key_accept)
        needed = jnp.asarray(self.evaluations()[0], above.dtype)
        return x, coin >= above, needed

    def _best_steps(self, regularity, feasible, step_size) -> int:
        if self.gradient_steps is not None:
            return self.gradient_steps
        most = _MOST_GRADIENT_STEPS if regularity.smoothness < math.inf else 0
        return max(
            range(most + 1),
            key=lambda steps: (
                self._accepted(regularity, feasible, step_size, steps) / (2 + steps)
            ),
        )

    def _accepted(self, regularity, feasible, step_size, steps: int) -> float:
        dimension, steepest = regularity.dimension, regularity.lipschitz
        curvature = regularity.strong_convexity or 0.0
        smoothness = regularity.smoothness
        error = _gradient_error(regularity, feasible)
        residual = steepest + error
        for _ in range(steps):
            residual = smoothness * step_size * residual + 2 * error
        precision = curvature + 1 / step_size
        distance = min(
            restricted.diameter(feasible, dimension),
            (residual + math.sqrt(residual**2 + 4 * precision * dimension))
            / (2 * precision),
        )
        smooth = max(smoothness - curvature, 0.0) / 2 * distance**2
        loss = min(smooth, 2 * steepest * distance)
        return math.exp(-loss - 2 * self._slack(regularity, feasible))

    def _slack(self, regularity, feasible) -> float:
        width = restricted.diameter(feasible, regularity.dimension)
        value_error = regularity.error + regularity.rounding
        return 2 * value_error + _gradient_error(regularity, feasible) * width


def _gradient_error(regularity: Regularity, feasible: AbstractSet) -> float:
    width = restricted.diameter(feasible, regularity.dimension)
    return regularity.gradient_error + regularity.rounding / width
