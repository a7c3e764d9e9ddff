"""Localized noisy gradient descent: DP-Loc-GD and DP-Loc-SGD."""

import dataclasses
import math
from typing import Any, ClassVar, Self

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int, PyTree
from typing_extensions import override

from .. import _checks
from .._checks import Count, Positive
from ..core.descent import SkippedUpdates, add_scaled, finite_or
from ..core.outputs import running_mean
from ..privacy import FullBatch, PrivacyBudget
from ..privacy.sampling.base import AbstractSampling, check_sampling
from ..sets import Ball
from .noisy_gd import AbstractGradientSolver
from .problem import FiniteSum


class _State(eqx.Module):
    w: PyTree
    center: PyTree  # of the round's ball
    mean: PyTree  # of the round's iterates so far
    rejections: SkippedUpdates
    t: Int[Array, ""]


class LocalizedGD(AbstractGradientSolver[_State]):
    r"""Noisy gradient descent in rounds, each in a smaller ball around the last mean.

    Round $m$ starts at its center $c_m$ and runs $T_{in}$ steps

    $$w_{t+1} = \Pi_{B(c_m, R_m)}\bigl(w_t - \eta_t (\nabla h(w_t) + \nu_t)\bigr),
    \qquad \eta_t = \frac{1}{\mu (t + 1)},$$

    and $c_{m+1}$ is the mean of the round's iterates $w_0, \dots, w_{T_{in} - 1}$. For
    a strongly convex $h$ the last center is within $\tilde O(L \sqrt d / (\mu
    \varepsilon n))$ of the minimizer with high probability when $T_{in} = n^2$; here
    $T_{in}$ is a parameter and the noise is calibrated to it.

    Args:
        radii: The radii $R_0, \dots, R_{M-1}$ of the balls, one a round.
        steps_per_round: The number of steps $T_{in}$ of a round. Static.
        strong_convexity: That of the whole objective, $\mu$; it sets the step size.
        clip_norm: The bound $C$ on one record's gradient in $\ell_2$.
        sampling: `FullBatch` gives DP-Loc-GD, `Poisson` DP-Loc-SGD.
        first_radii: The radii of the first of several runs, each of which starts at the
            answer of the last, as in `PenaltyBilevel`; by default `radii`.

    Privacy:
        `len(radii) * steps_per_round` Gaussian releases of $\ell_2$ sensitivity $2C/m$
        under replace-one ($C/m$ under add-or-remove-one), enforced by clipping. Radii
        and $\mu$ affect accuracy only.

    References:
        Kornowski, "Differentially private bilevel optimization", Algorithms 2 and 4
        (their average divides by T, meant is $T_{in}$); Feldman, Koren and Talwar,
        STOC 2020.
    """

    radii: tuple[float, ...]
    steps_per_round: Count = eqx.field(static=True)
    strong_convexity: Positive
    clip_norm: Positive
    sampling: AbstractSampling = eqx.field(default=FullBatch(), kw_only=True)
    first_radii: tuple[float, ...] | None = eqx.field(default=None, kw_only=True)
    proximal: ClassVar = ()

    def __check_init__(self):
        check_sampling("LocalizedGD", self.sampling, numbers=False)
        if not isinstance(self.radii, tuple) or not self.radii:
            raise ValueError(
                f"LocalizedGD: radii must be one number per round, got {self.radii!r}."
            )
        first = self.first_radii
        if first is not None and (
            not isinstance(first, tuple) or len(first) != len(self.radii)
        ):
            raise ValueError("LocalizedGD: first_radii must be as many as radii.")
        for radius in self.radii + (first or ()):
            _checks.positive("LocalizedGD", radii=radius)

    @classmethod
    def from_theorem(
        cls,
        problem: FiniteSum,
        budget: PrivacyBudget,
        sizes: int,
        *,
        dimension: int,
        strong_convexity: float,
        radius: float,
        steps_per_round: int,
        **fields: Any,
    ) -> Self:
        r"""Return a solver with the theorem's parameters; hidden constants are 1.

        $M = \lceil \log_2 \log(\mu \varepsilon n / L) \rceil$ rounds and $R_{m} =
        \sqrt{R_{m-1} L / (\mu \varepsilon n)} + L \sqrt d / (\mu \varepsilon n)$.

        Args:
            problem: A problem with `lipschitz`, $L$ of one record's loss, which is the
                clip norm.
            budget: $\varepsilon$ of this run.
            sizes: $n$.
            dimension: $d$.
            strong_convexity: $\mu$.
            radius: $R_0$, a bound on the distance from start to minimizer.
            steps_per_round: $T_{in}$; the theorem needs $n^2$, too many to run.
            **fields: Further fields of `LocalizedGD`, such as `sampling`.

        Raises:
            ValueError: $L$ is not declared, or $\mu \varepsilon n \le e L$: too few
                records for the theorem.

        References:
            Kornowski, Theorems 18 and 28 (the printed distance of Theorem 28 lacks
            $1/n$).
        """
        owner = "LocalizedGD.from_theorem"
        _checks.instance(owner, FiniteSum, problem=problem)
        _checks.instance(owner, PrivacyBudget, budget=budget)
        problem.check_sizes(owner, sizes)
        lipschitz = problem.lipschitz
        if lipschitz is None:
            raise ValueError(
                f"{owner}: give the problem a FiniteSum(loss, lipschitz=...)."
            )
        ratio = strong_convexity * budget.epsilon * sizes / lipschitz
        return cls(
            radii=theorem_radii(owner, ratio, dimension, radius),
            steps_per_round=steps_per_round,
            strong_convexity=strong_convexity,
            clip_norm=lipschitz,
            **fields,
        )

    @property
    def num_steps(self) -> int:
        """Number of rounds times steps per round."""
        return len(self.radii) * self.steps_per_round

    @override
    def init(self, problem, w0) -> _State:
        w = problem.w_set.project(jax.tree.map(jnp.asarray, w0))
        zero = optax.tree.zeros_like(w)
        return _State(w, w, zero, SkippedUpdates(), jnp.zeros((), jnp.int32))

    @override
    def step(self, problem, data, state, *, key) -> _State:
        # Algorithm 2: one step within the ball of the round.
        gradient = self.noisy_gradient(problem, data, state.w, key=key)
        round_index, t = jnp.divmod(state.t, self.steps_per_round)
        mean = running_mean(state.mean, state.w, t)
        radius = jnp.stack([jnp.asarray(r) for r in self.radii])[round_index]
        step_size = 1 / (self.strong_convexity * (t + 1).astype(radius.dtype))  # eta_t
        moved = add_scaled(state.w, -step_size, gradient)
        prox = problem.proximal_step()
        moved = moved if prox is None else prox(step_size, moved)
        # The center is feasible, so projecting onto the set keeps w inside the ball.
        w = problem.w_set.project(Ball(radius, state.center).project(moved))
        w, rejections = finite_or(w, state.w, state.rejections)
        # The next round starts at the mean of this one.
        ends = t == self.steps_per_round - 1
        center = jax.tree.map(lambda m, c: jnp.where(ends, m, c), mean, state.center)
        w = jax.tree.map(lambda m, v: jnp.where(ends, m, v), mean, w)
        return _State(w, center, mean, rejections, state.t + 1)

    @override
    def answer(self, problem, state):
        """Return the mean of the iterates of the last round."""
        return state.center


def theorem_radii(
    owner: str, ratio: float, dimension: int, radius: float
) -> tuple[float, ...]:
    r"""Return the radii of `LocalizedGD.from_theorem`, one for each round, as a tuple.

    A `ValueError` refuses a ratio of at most $e$.
    """
    if ratio <= math.e:
        raise ValueError(
            f"{owner}: strong_convexity * epsilon * sizes / lipschitz must be "
            f"above 2.72, got {ratio:.3g}. Use more records or a larger epsilon."
        )
    radii = [radius]
    for _ in range(1, max(1, math.ceil(math.log2(math.log(ratio))))):
        radii.append(math.sqrt(radii[-1] / ratio) + math.sqrt(dimension) / ratio)
    return tuple(radii)


def restarted(solvers: tuple[Any, ...], t: Int[Array, ""]) -> tuple[Any, ...]:
    """Return a tuple of solvers, with `first_radii` of `LocalizedGD` at step 0 alone.

    Radii affect accuracy only, so the ledger is the same at all steps.
    """

    def at(solver):
        if not isinstance(solver, LocalizedGD) or solver.first_radii is None:
            return solver
        pairs = zip(solver.first_radii, solver.radii, strict=True)
        radii = tuple(jnp.where(t == 0, *pair) for pair in pairs)
        return dataclasses.replace(solver, radii=radii, first_radii=None)

    return tuple(map(at, solvers))
