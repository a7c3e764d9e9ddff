"""What a run returns: the released answer, and its guarantee."""

import dataclasses
from typing import Generic, TypeVar

import equinox as eqx
from jaxtyping import Array, Int, PyTree

from ..privacy.report import PrivacyReport
from .solver import Solver

Report = TypeVar("Report", bound=PrivacyReport | None)


@dataclasses.dataclass(frozen=True)
class Plan(Generic[Solver]):
    """A calibrated solver and the guarantee of running it once.

    Attributes:
        solver: The solver with its noise and the planned sizes.
        report: The guarantee.
    """

    solver: Solver
    report: PrivacyReport

    def __str__(self) -> str:
        """The calibrated solver and the guarantee."""
        return f"solver: {self.solver}\n\n{self.report}"


class Solution(eqx.Module, Generic[Report]):
    """What a run releases.

    Attributes:
        value: The released answer: `w` for one level, `(x, y)` for two and for saddle
            points; `y` is `None` where a solver does not release it.
        trajectory: The released iterates with a leading axis of steps, or `None`.
        rejected_updates: How many updates of an iterate, those of inner runs included,
            were left out because their result was not finite. More than 0 means that
            the run diverged: the answer is finite, but take a smaller step size.
            Counted from released values: as private as the rest.
        report: The guarantee, where the call planned the run: `fit`, or
            `search.minimize` with `budget`; otherwise `None`, as the plan has it.
            Static.
    """

    value: PyTree
    trajectory: PyTree | None = None
    rejected_updates: Int[Array, ""] | int = 0
    report: Report = eqx.field(static=True, default=None)

    @property
    def x(self) -> PyTree:
        """The upper variable of a two-level answer, the minimizer of a saddle point."""
        return self._pair()[0]

    @property
    def y(self) -> PyTree:
        """The lower variable of a two-level answer, the maximizer of a saddle point."""
        return self._pair()[1]

    def _pair(self) -> tuple[PyTree, PyTree]:
        if not isinstance(self.value, tuple) or len(self.value) != 2:
            raise AttributeError(
                "only the solution of a bilevel problem or a saddle point has x and y; "
                "use .value."
            )
        return self.value


def divergence(rejected_updates: int) -> str | None:
    """The warning for the user, or `None` where no update was left out."""
    if not rejected_updates:
        return None
    return (
        f"the run diverged: {rejected_updates} updates were left out because their "
        "result was not finite, so the answer is finite but of little use. What was "
        "released is as private as stated. Take a smaller step size, or sets that "
        "bound the variables; another run is another release."
    )
