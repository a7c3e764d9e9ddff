"""Descent of linear models whose settings follow from the noise, without dry runs."""

import dataclasses
import functools
import math
from typing import Any

import jax.numpy as jnp

from .. import _checks
from ..core.outputs import TailMean
from ..core.plan import calibrate
from ..core.solution import Plan
from ..onelevel.noisy_gd import NoisyGD
from ..onelevel.problem import FiniteSum
from ..privacy.budget import PrivacyBudget
from .base import Planned


@dataclasses.dataclass(frozen=True)
class Settings:
    r"""How a descent follows from the noise, for rows of length about 1.

    Attributes:
        steps: $T$.
        walk: $a$: the noise of a run moves no coordinate by much more.
        longest: $\eta_{\max}$, which the curvature of the loss admits.
        clip_norm: The range of the bound $C$ on one record's gradient.
    """

    steps: int
    walk: float
    longest: float
    clip_norm: tuple[float, float]

    def with_parameters(self, owner: str, steps: Any, clip_norm: Any) -> "Settings":
        """With those that an estimator was given.

        Raises:
            ValueError: One is out of range.
        """
        _checks.count(owner, max_iter=steps)
        given = self.clip_norm
        if clip_norm != "auto":
            _checks.positive(owner, clip_norm=clip_norm)
            given = (float(clip_norm), float(clip_norm))
        return dataclasses.replace(self, steps=int(steps), clip_norm=given)


@functools.lru_cache(maxsize=128)
def planned_descent(
    problem: FiniteSum,
    shape: tuple[int, ...],
    budget: PrivacyBudget,
    planned: Planned,
    settings: Settings,
) -> Plan[NoisyGD]:
    r"""A calibrated descent on full batches; kept for the next fit of these sizes.

    With $s C$ the deviation of the noise of a step: the clip norm $C$ is the largest in
    its range at which $T$ steps of size $\eta_{\max}$ walk no farther than $a$ by noise
    alone, $\eta_{\max} s C \sqrt T \le a$, and the step size is $\min(\eta_{\max},\ a /
    (s C \sqrt T))$. Both depend on public numbers alone.

    Args:
        problem: The problem.
        shape: Of the model.
        budget: The budget.
        planned: The public number of records and the neighbouring relation.
        settings: What the steps follow from.
    """
    steps, longest = settings.steps, settings.longest

    def plan(clip_norm: float, step_size: float) -> Plan[NoisyGD]:
        solver = NoisyGD(steps, clip_norm, step_size, output=TailMean())
        solver = solver.with_neighbours(planned.relation)
        start = jnp.zeros(shape)
        return calibrate(problem, solver, budget, sizes=planned.size, w0=start)

    noise: Any = plan(1.0, longest).report.ledger[0]["noise_std"]  # s
    reach = settings.walk / (noise * math.sqrt(steps))  # the size of C times the step
    least, most = settings.clip_norm
    clip_norm = min(most, max(least, reach / longest))
    return plan(clip_norm, min(longest, reach / clip_norm))
