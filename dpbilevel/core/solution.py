"""Plans and solutions: a calibrated solver, a released answer, and its guarantee."""

import dataclasses
import json
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import equinox as eqx
from jaxtyping import Array, Int, PyTree

from .. import _checks
from .._version import __version__
from ..privacy.report import PrivacyReport
from ..privacy.rows import html_table
from . import saved
from .problem import StaticLeaves
from .solver import Solver

Report = TypeVar("Report", bound=PrivacyReport | None)


@dataclasses.dataclass(frozen=True, repr=False)
class Plan(Generic[Solver]):
    """A calibrated solver and the guarantee of running it once.

    Attributes:
        solver: The solver with its noise and the planned sizes.
        report: The guarantee.
        remarks: Texts to warn of before the run.
    """

    solver: Solver
    report: PrivacyReport
    remarks: tuple[str, ...] = dataclasses.field(default=(), kw_only=True)

    def warn(self, owner: str) -> None:
        """Warn of the remarks, at the line of the user.

        Args:
            owner: The name of the function that the user called.
        """
        for text in self.remarks:
            _checks.warn(f"{owner}: {text}.")

    def __repr__(self) -> str:
        """Return the method and the guarantee; `print` shows all of both."""
        kind, method = type(self).__name__, type(self.solver).__name__
        return f"{kind}({method}, {self.report.claim})"

    def rows(self) -> dict[str, object]:
        """Return a dict of the rows that a notebook shows of the plan, by name."""
        solver = self.solver
        method = {"method": type(solver).__name__, "steps": solver.num_steps}
        return method | {"sizes": solver.sizes} | self.report.rows()

    def _repr_html_(self) -> str:
        return html_table(type(self).__name__, self.rows())

    def __str__(self) -> str:
        """Return the calibrated solver and the guarantee as text."""
        return f"solver: {self.solver}\n\n{self.report}"


class Solution(eqx.Module, Generic[Report]):
    """The released result of a run.

    Attributes:
        value: The released answer: `w` for one level, `(x, y)` for two and for saddle
            points; `y` is `None` if the solver does not release it.
        trajectory: The released iterates with a leading axis of steps, or `None`.
        rejected_updates: Number of updates of an iterate, those of inner runs included,
            that were skipped because their result was not finite. If it is above 0 the
            run diverged: the answer is finite, but take a smaller step size.
            Counted from released values: as private as the rest.
        report: The guarantee, if the call planned the run: `fit`, or
            `search.minimize` with `budget`; otherwise `None`, as the plan has it.
            Static.
    """

    value: PyTree
    trajectory: PyTree | None = None
    rejected_updates: Int[Array, ""] | int = 0
    report: Report = eqx.field(static=True, default=None)

    def with_leaves(self, leaves: StaticLeaves) -> Self:
        """Return a copy with untrained leaves put back into value and trajectory."""
        parts: dict[str, Any] = {"value": leaves.merge(self.value)}
        if self.trajectory is not None:
            parts["trajectory"] = leaves.merge(self.trajectory)
        return dataclasses.replace(self, **parts)

    def __repr__(self) -> str:
        """Return the shapes of the answer and the guarantee."""
        parts = [f"{name}={value}" for name, value in self._shapes().items()]
        report: Any = self.report  # its type depends on the call
        return f"Solution({', '.join(parts + ([report.claim] if report else []))})"

    def _repr_html_(self) -> str:
        report: Any = self.report  # its type depends on the call
        rows = report.rows() if report else {}
        return html_table("Solution", self._shapes() | rows)

    def _shapes(self) -> dict[str, object]:
        shown: dict[str, object] = {"value": eqx.tree_pformat(self.value)}
        if self.trajectory is not None:
            shown["trajectory"] = eqx.tree_pformat(self.trajectory)
        rejected = self.rejected_updates
        if not _checks.concrete(rejected) or int(rejected):
            shown["rejected_updates"] = rejected
        return shown

    def save(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """Write the solution into a folder, for `load`; may replace one if `overwrite`.

        `solution.json` has the report and the structure, `arrays.safetensors` the
        arrays; neither can run code. The folder appears at once, or not at all.

        Args:
            folder: The folder; new or empty.
            overwrite: Whether to replace an earlier solution in it.

        Raises:
            ValueError: The folder holds something, or the solution holds a key, or
                dictionaries with other keys than texts and integers.
            OSError: The disk refuses.

        Privacy:
            Released values and the report alone: as private as the solution.
        """
        report: Any = self.report  # its type depends on the call
        parts = {"value": self.value, "trajectory": self.trajectory}
        facts: dict[str, Any] = {"dpbilevel": __version__}
        facts["rejected_updates"] = int(self.rejected_updates)
        facts["report"] = json.loads(report.to_json()) if report else None
        saved.write(Path(folder), parts, facts, overwrite=overwrite)

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
            raise AttributeError("only answers of two parts have x and y; use .value.")
        return self.value


def divergence(rejected_updates: int) -> str | None:
    """Return a text that warns of a diverged run; `None` if no update was skipped."""
    if not rejected_updates:
        return None
    return (
        f"the run diverged: {rejected_updates} updates were left out because their "
        "result was not finite, so the answer is of little use, but as private as "
        "stated. Take a smaller step size, or sets that bound the variables; another "
        "run is another release. See docs/errors.md#the-run-diverged."
    )
