"""What a run hands out: the released answer, and its guarantee."""

import dataclasses

import equinox as eqx
from jaxtyping import PyTree

from ..privacy.report import PrivacyReport


class Solution(eqx.Module):
    """What a run releases.

    Attributes:
        value: The released answer: `w` for one level, `(x, y)` for two and for saddle
            points; `y` is `None` where a solver does not release it.
        trajectory: The released iterates with a leading axis of steps, or `None`.
    """

    value: PyTree
    trajectory: PyTree | None = None

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


@dataclasses.dataclass(frozen=True)
class PrivateResult:
    """A released answer and its guarantee.

    Attributes:
        value: As in `Solution`.
        report: The guarantee.
        trajectory: As in `Solution`.
    """

    value: PyTree
    report: PrivacyReport
    trajectory: PyTree | None = None

    @property
    def x(self) -> PyTree:
        """The upper variable of a two-level answer, the minimizer of a saddle point."""
        return Solution(self.value).x

    @property
    def y(self) -> PyTree:
        """The lower variable of a two-level answer, the maximizer of a saddle point."""
        return Solution(self.value).y
