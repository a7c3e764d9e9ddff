"""Descent of linear models whose settings follow from the noise, without dry runs."""

import dataclasses
import functools
import math
from typing import Any

import jax.numpy as jnp

from ..core.outputs import TailMean
from ..core.plan import calibrate
from ..core.solution import Plan
from ..onelevel.noisy_gd import NoisyGD
from ..onelevel.problem import FiniteSum
from ..privacy.budget import PrivacyBudget
from .base import Planned


@functools.lru_cache(maxsize=128)
def planned_descent(
    problem: FiniteSum,
    shape: tuple[int, ...],
    budget: PrivacyBudget,
    planned: Planned,
    *,
    steps: int,
    clip_norm: float,
    walk: float,
    longest: float,
) -> Plan[NoisyGD]:
    r"""A calibrated descent on full batches; kept for the next fit of these sizes.

    The step size is $\min(\eta_{\max},\ a / (s \sqrt T))$ with the deviation $s$ of the
    noise of a step: noise alone moves a coordinate by $a$ in $T$ steps. It depends on
    public numbers alone, like the plan.

    Args:
        problem: The problem, of rows of length about 1.
        shape: Of the model.
        budget: The budget.
        planned: The public number of records and the neighbouring relation.
        steps: $T$.
        clip_norm: The bound on one record's gradient.
        walk: $a$.
        longest: $\eta_{\max}$.
    """
    solver = NoisyGD(steps, clip_norm, longest, output=TailMean())
    solver = solver.with_neighbours(planned.relation)
    plan = calibrate(problem, solver, budget, sizes=planned.size, w0=jnp.zeros(shape))
    noise: Any = plan.report.ledger[0]["noise_std"]  # s
    step_size = min(longest, walk / (noise * math.sqrt(steps)))
    # What is released does not depend on it, so that the report stays true.
    return Plan(dataclasses.replace(plan.solver, step_size=step_size), plan.report)
