"""Plans of fits; the settings of descent follow from the noise, without dry runs."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp

from .. import _checks
from ..core.levels import Sizes
from ..core.outputs import TailMean
from ..core.plan import calibrated
from ..core.problem import AbstractProblem
from ..core.solution import Plan
from ..core.solver import AbstractSolver
from ..onelevel.noisy_gd import NoisyGD
from ..onelevel.problem import FiniteSum
from ..privacy.budget import PrivacyBudget
from ..privacy.ledger import AbstractRelease
from .linear import ridge_on
from .public_size import PublicSize


@dataclasses.dataclass(frozen=True)
class Settings:
    r"""Constants of a descent that follows from the noise, for rows of length about 1.

    Attributes:
        walk: $a$, about the largest distance that noise alone moves a coordinate.
        longest: $\eta_{\max}$, the step size that the curvature of the loss admits.
        steps: Least number of steps $T$, largest number at the least clip norm, and
            largest number of all.
        clip_norm: Range of the bound $C$ on one record's gradient.
    """

    walk: float
    longest: float
    steps: tuple[int, int, int]
    clip_norm: tuple[float, float]

    def with_parameters(self, owner: str, max_iter: Any, clip_norm: Any) -> "Settings":
        """Return a copy of the settings with the parameters of an estimator.

        Raises:
            ValueError: A parameter is out of range.
        """
        _checks.count(owner, max_iter=max_iter)
        least, some, most = (min(count, int(max_iter)) for count in self.steps)
        given = self.clip_norm
        if clip_norm != "auto":
            _checks.positive(owner, clip_norm=clip_norm)
            given = (float(clip_norm), float(clip_norm))
        return dataclasses.replace(self, steps=(least, some, most), clip_norm=given)


@functools.lru_cache(maxsize=128)
def plan_descent(
    loss: Any,
    ridge: float,
    constant: bool,
    shape: tuple[int, ...],
    budget: PrivacyBudget,
    public: PublicSize,
    settings: Settings,
    before: tuple[AbstractRelease, ...],
    kind: type[NoisyGD] = NoisyGD,
) -> tuple[FiniteSum, Plan[NoisyGD]]:
    r"""Return a problem, and the `Plan` of a full-batch descent, cached by the sizes.

    A single release has noise of the deviation $s C$, and each of $T$ has $s C \sqrt
    T$, so that steps of size $\eta$ walk by $\eta s C T$ by noise alone. This walk is
    limited to $a$: first for steps of the longest size, then for a larger clip norm,
    which biases the model less, then for more steps. If $a$ is too little for the
    fewest steps and the least clip norm, steps are shorter. A ridge shortens them, too.
    All depend on public numbers alone.

    Args:
        loss: The loss of a record.
        ridge: The weight of the penalty.
        constant: Whether the last row of the model is a constant.
        shape: The shape of the model.
        budget: The budget.
        public: The public number of records and the neighbouring relation.
        settings: The constants of the descent.
        before: As for `calibrate`.
        kind: The class of the solver.
    """

    def plan(steps: int, clip_norm: float, step_size: float, ridge: float) -> Any:
        problem = public.problem(FiniteSum(loss, public=ridge_on(ridge, constant)))
        solver = kind(steps, clip_norm, step_size, output=TailMean())
        solver = solver.with_neighbours(public.relation)
        start = jnp.zeros(shape)
        options: Any = {"sizes": public.size, "w0": start, "before": before}
        found = calibrated(problem, solver, budget, **options)
        # An estimator has no step size to change, so this remark is dropped.
        said = tuple(text for text in found.remarks if not text.startswith("steps"))
        return problem, dataclasses.replace(found, remarks=said)

    noise: Any = plan(1, 1.0, 1.0, 0.0)[1].report.ledger[-1].noise_std  # s
    longest = 1 / (1 / settings.longest + 2 * ridge)
    reach = settings.walk / noise  # of the product of all three
    least, most = settings.clip_norm
    fewest, some, many = settings.steps
    steps = min(max(int(reach / (least * longest)), fewest), some)
    clip_norm = min(max(reach / (longest * steps), least), most)
    steps = min(max(int(reach / (clip_norm * longest)), steps), many)
    return plan(steps, clip_norm, min(longest, reach / (clip_norm * steps)), ridge)


@functools.lru_cache(maxsize=128)
def plan_of(
    problem: AbstractProblem,
    solver: AbstractSolver,
    budget: PrivacyBudget,
    sizes: Sizes | int,
    shapes: tuple[tuple[int, ...], ...],
    before: tuple[AbstractRelease, ...],
) -> Plan[Any]:
    """Return the `Plan` of a calibrated solver, cached for fits of these sizes.

    Args:
        problem: The problem.
        solver: The solver, with the intended relation.
        budget: The budget.
        sizes: The numbers of records.
        shapes: Shapes of the leaves of the initial point.
        before: As for `calibrate`.
    """
    w0 = tuple(jnp.zeros(shape) for shape in shapes)
    start = w0[0] if len(w0) == 1 else w0
    return calibrated(problem, solver, budget, sizes=sizes, w0=start, before=before)
