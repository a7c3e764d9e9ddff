"""Proximal oracle that proposes from under a tangent of the potential."""

import dataclasses
import math
from typing import Any, ClassVar, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree
from typing_extensions import override

from ...core.descent import add_scaled, scaled
from ...privacy.exact.floats import all_finite
from ...privacy.keys import derive
from ...privacy.noise import standard_exponential
from ...sets import AbstractSet
from . import proximal, restricted
from .base import Regularity

_MOST_GRADIENT_STEPS = 12
_FEW_DRAWS = 4


class _Tangent(eqx.Module):
    point: PyTree  # c
    value: Array  # U(c)
    gradient: PyTree


class ConvexEnvelope(proximal.AbstractExactOracle):
    r"""Oracle that proposes from the Gaussian of a quadratic below the potential $U$.

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
    $E R \le \frac{\beta - \alpha}{2} e^2$ if $U$ is smooth, $E R \le 2 L e$ always.
    The step size is the larger of $1 / (\beta \max(d, 2))$ and $1 / (2 d L^2)$.

    **Inexact values.** If values are within $\zeta$ of those of $U$ and gradients
    within $\epsilon$, both with rounding, the support holds up to $\kappa = 2 \zeta +
    \epsilon D$: tries are accepted with probability $e^{-R - \kappa}$, $R$ being
    computed, which draws from the density of the computed potential exactly; $E R$
    grows by $\kappa$, $\rho_0$ is $L + \epsilon$ and $\rho_{i+1} = \beta \eta \rho_i +
    2 \epsilon$.

    Args:
        gradient_steps: $J$. Static; set by `with_counts`, as all fields.
        draw_tries: The tries of one Gaussian draw on the set. Static.
        curvature: $\alpha$.
        slack: $\kappa$.
        drop: $L D + \frac{\alpha}{2} D^2$: how much lower the support is, and without
            slope, if the gradient is not finite.

    References:
        The tries and their bounds are ours; the step that they serve is that of Lee,
        Shen and Tian, "Structured Logconcave Sampling with a Restricted Gaussian
        Oracle", COLT 2021.
    """

    gradient_steps: int | None = eqx.field(static=True, default=None)
    draw_tries: int | None = eqx.field(static=True, default=None)
    curvature: float = 0.0
    slack: float = 0.0
    drop: float = 0.0
    draws: ClassVar[int] = 1
    assumptions: ClassVar[tuple[str, ...]] = (
        "declared: derivatives that JAX computes of the score are subgradients, and "
        "finite almost everywhere on the set, for every dataset",
    )

    def largest_step(self, regularity: Regularity, feasible: AbstractSet) -> float:
        """Return a step size by smoothness or slope, at most the squared diameter."""
        d, steepest = regularity.dimension, regularity.lipschitz
        if not steepest < math.inf:
            raise ValueError("ConvexEnvelope: needs a finite Lipschitz constant.")
        most = restricted.diameter(feasible, d) ** 2
        smooth = regularity.smoothness * max(d, 2)
        rate = min(smooth, 2 * d * steepest**2)
        return min(most, 1 / rate) if rate > 0 else most

    @override
    def with_counts(self, plan: proximal.ProximalPlan) -> Self:
        counts: Any = {"gradient_steps": self._best_steps(plan)}
        counts["draw_tries"] = self.enough_draw_tries(plan)
        return dataclasses.replace(self, **counts, **_numbers(plan))

    def without_counts(self, plan: proximal.ProximalPlan) -> Self:
        """Return a copy for the plan, by default with 0 gradient steps, few tries.

        Gradient steps rarely help. A try is rejected if no draw of its proposal is
        accepted, so that few are enough.
        """
        counts: Any = {"gradient_steps": self.gradient_steps or 0}
        counts["draw_tries"] = self.draw_tries or _FEW_DRAWS
        return dataclasses.replace(self, **counts, **_numbers(plan))

    def serves(self, plan: proximal.ProximalPlan) -> bool:
        """Return whether all numbers are as `with_counts` sets them for this plan."""
        return all(getattr(self, k) == v for k, v in _numbers(plan).items())

    def bias(self, plan: proximal.ProximalPlan) -> float:
        """Return zero: accepted tries follow the computed potential exactly."""
        return 0.0

    @override
    def acceptance(self, plan: proximal.ProximalPlan) -> float:
        return _acceptance(plan, self._best_steps(plan))

    def gaussian(self, plan: proximal.ProximalPlan) -> tuple[float, float, float]:
        """Return proposals' deviation; w, b: mean within w dist(y) + b of the set."""
        weight = 1 / (1 + plan.convexity * plan.step_size)  # 1 / (eta P)
        steepest = plan.regularity.lipschitz + _gradient_error(plan)
        shift = weight * plan.step_size * steepest
        return math.sqrt(plan.step_size * weight), weight, shift

    def evaluations(self) -> tuple[float, int]:
        """Return mean and maximum of evaluations per try: equal, as all are made."""
        count = 2 + (self.gradient_steps or 0)
        return float(count), count

    def prepare(self, target: proximal.ProximalTarget, y: PyTree) -> PyTree:
        """Return the `_Tangent` after `gradient_steps` projected steps from `y`."""

        def move(_, point):
            gradient = self._tangent(target, point).gradient
            return feasible.project(add_scaled(y, -step_size, gradient))

        _, feasible, step_size = target
        point = feasible.project(y)
        if self.gradient_steps:
            point = jax.lax.fori_loop(0, self.gradient_steps, move, point)
        return self._tangent(target, point)

    def move(self, target, y, common) -> PyTree:
        r"""Return a tighter `_Tangent`: a weighted mean of `common` and a new one.

        A mean of quadratics below $U$ is below $U$. With the gap $\gamma$ between both
        at $p$ and the change $\delta$ of the gradient, the weight $P \gamma /
        \|\delta\|^2$ makes the proposals' mass least if the set does not cut it.

        References:
            Kiwiel, "An aggregate subgradient method for nonsmooth convex minimization",
            Mathematical Programming, 1983.
        """
        curvature = self.curvature
        point = target.feasible.project(self._middle(target, y, common))
        other = self._tangent(target, point)
        # Value and gradient of `common` at that point.
        offset = optax.tree.sub(point, common.point)
        square = optax.tree.vdot(offset, offset)
        value = common.value + optax.tree.vdot(common.gradient, offset)
        value = value + 0.5 * curvature * square
        gradient = add_scaled(common.gradient, curvature, offset)
        change, gap = optax.tree.sub(other.gradient, gradient), other.value - value
        weight = (curvature + 1 / target.step_size) * gap
        weight = proximal.finite_part(weight / optax.tree.vdot(change, change))
        weight = jnp.clip(weight, 0, 1)
        gradient = add_scaled(gradient, weight, change)
        return _Tangent(point, value + weight * gap, gradient)

    @override
    def attempt(self, target, y, common, *, key) -> proximal.Attempt:
        key_proposal, key_accept = derive(key, "proposal", "accept")
        x, above = self.proposal(target, y, common, key=key_proposal)
        coin = standard_exponential((), above.dtype, key=key_accept)
        needed = jnp.asarray(self.evaluations()[0], above.dtype)
        return x, coin >= above, needed

    @override
    def proposal(self, target, y, common, *, key) -> tuple[PyTree, Array]:
        potential, feasible, step_size = target
        curvature, c = self.curvature, common.point
        mean, tries = self._middle(target, y, common), self.draw_tries or 1
        deviation = (step_size / (1 + curvature * step_size)) ** 0.5
        x, accepted = restricted.try_normal(feasible, mean, deviation, tries, key=key)
        # Accepted with probability exp(-R(x) - kappa).
        offset = optax.tree.sub(x, c)
        support = optax.tree.vdot(common.gradient, offset)
        support = support + 0.5 * curvature * optax.tree.vdot(offset, offset)
        above = proximal.finite_part(potential(x)) - common.value - support + self.slack
        return x, jnp.where(accepted, above, jnp.inf)

    def _tangent(self, target: proximal.ProximalTarget, point: PyTree) -> _Tangent:
        """Return the `_Tangent` at a point; if no slope is finite, a lower constant."""
        value, gradient = target.potential.value_and_gradient(point)
        finite = all_finite(gradient)
        gradient = jax.tree.map(lambda v: jnp.where(finite, v, 0), gradient)
        drop = jnp.where(finite, 0, jnp.asarray(self.drop, value.dtype))
        return _Tangent(point, proximal.finite_part(value) - drop, gradient)

    def _middle(
        self, target: proximal.ProximalTarget, y: PyTree, tangent: _Tangent
    ) -> PyTree:
        """Return the mean of the Gaussian proposals at `y` under `tangent`."""
        mean = add_scaled(y, -target.step_size, tangent.gradient)
        mean = add_scaled(mean, target.step_size * self.curvature, tangent.point)
        return scaled(1 / (1 + self.curvature * target.step_size), mean)

    def _best_steps(self, plan: proximal.ProximalPlan) -> int:
        """Return the number of gradient steps, by default the most efficient."""
        if self.gradient_steps is not None:
            return self.gradient_steps
        most = _MOST_GRADIENT_STEPS if plan.regularity.smoothness < math.inf else 0
        return max(range(most + 1), key=lambda j: _acceptance(plan, j) / (2 + j))


def _numbers(plan: proximal.ProximalPlan) -> dict[str, float]:
    """Return the oracle's curvature, slack and drop for a plan, by field name."""
    # Bounds on the decrease of the potential and of the tangent's quadratic term.
    drop = plan.regularity.lipschitz * plan.width + plan.convexity / 2 * plan.width**2
    return {"curvature": plan.convexity, "slack": _slack(plan), "drop": drop}


def _acceptance(plan: proximal.ProximalPlan, gradient_steps: int) -> float:
    """Return a lower bound on the probability that a try is accepted."""
    lipschitz, smoothness = plan.regularity.lipschitz, plan.regularity.smoothness
    error = _gradient_error(plan)
    residual = lipschitz + error  # rho_0
    for _ in range(gradient_steps):
        residual = smoothness * plan.step_size * residual + 2 * error
    precision = plan.convexity + 1 / plan.step_size
    root = math.sqrt(residual**2 + 4 * precision * plan.regularity.dimension)
    distance = min(plan.width, (residual + root) / (2 * precision))
    smooth = max(smoothness - plan.convexity, 0.0) / 2 * distance**2
    loss = min(smooth, 2 * lipschitz * distance)
    return math.exp(-loss - 2 * _slack(plan))  # once in R, once in the coin


def _slack(plan: proximal.ProximalPlan) -> float:
    """Return the slack of acceptance that covers errors of values and gradients."""
    value_error = plan.regularity.error + plan.regularity.rounding
    return 2 * value_error + _gradient_error(plan) * plan.width


def _gradient_error(plan: proximal.ProximalPlan) -> float:
    return plan.regularity.gradient_error + plan.regularity.rounding / plan.width
