"""What all runs below a folder have spent together, and a limit to it."""

import contextlib
import dataclasses
import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .. import _checks
from ..core.spent import total, totals
from ..privacy.budget import PrivacyBudget
from ..privacy.report import PrivacyReport
from . import checkpoint, spending
from .spending import LIMIT, NAME, Run, RunLog

_ROUNDING = 1e-12  # of a sum, relative


@dataclasses.dataclass(frozen=True)
class TotalSpent:
    r"""What all runs recorded in a folder and in folders below it have spent together.

    Attributes:
        records: The spending record of each folder that has one, by its path.
        unknown: Folders in which runs were made of which there is no record.

    Privacy:
        A run counts in full, with the epsilon and delta of its plan, from its start on,
        whether or not it is finished. The totals are the sums of epsilons and of deltas
        (basic composition). For any $\varepsilon$ and $\delta$ fixed in advance, all
        that is released while the sums are at most these is
        $(\varepsilon, \delta)$-DP, also where budget, solver and the decision to start
        a run depend on what others released, and where runs overlap in time. It holds
        for runs that read the same records; runs on records of different people cost
        less together.

    References:
        Rogers, Roth, Ullman and Vadhan, "Privacy odometers and filters: pay-as-you-go
        composition", NeurIPS 2016; for runs that overlap, Haney et al., "Concurrent
        composition for interactive differential privacy with adaptive privacy-loss
        parameters", CCS 2023.
    """

    records: dict[str, RunLog]
    unknown: tuple[str, ...] = ()

    @property
    def runs(self) -> tuple[Run, ...]:
        """All runs."""
        return tuple(run for record in self.records.values() for run in record.runs)

    @property
    def epsilon(self) -> float:
        """The sum of epsilons; infinite where a record is lost or there is no total.

        There is none of runs whose relations or people differ.
        """
        return total(run.epsilon for run in self.runs) if self._adds_up else math.inf

    @property
    def delta(self) -> float:
        """The sum of deltas, at most 1; 1 where a record is lost or there is no total.

        There is none of runs whose relations or people differ.
        """
        return min(1.0, total(r.delta for r in self.runs)) if self._adds_up else 1.0

    @property
    def _adds_up(self) -> bool:
        whole = not self.unknown and all(v.whole for v in self.records.values())
        return whole and len({(run.relation, run.people) for run in self.runs}) <= 1

    def __str__(self) -> str:
        """The totals, and one line per run."""
        lines = totals(self.runs) or ["spending: no run is recorded"]
        lines += [f"  unknown: no record of the runs in {v}" for v in self.unknown]
        for folder, record in self.records.items():
            if not record.whole:
                lines += [f"  at least: the record in {folder} is damaged"]
            lines += [f"  {folder}: run {run.number}, {run}" for run in record.runs]
        return "\n".join(lines)


def spent(folder: Path | str) -> TotalSpent:
    """Adds up all runs that were started in a folder, or in any folder below it.

    Over processes and restarts, of searches and of the command line. A folder that was
    deleted or copied elsewhere is not seen: keep all runs on the same records below one
    folder, and delete none.

    Args:
        folder: A folder of one or more runs.

    Raises:
        ValueError: There is no such folder.
        OSError: A folder below it cannot be read.

    Privacy:
        As in `TotalSpent`. Records and total are public.
    """
    if not Path(folder).is_dir():
        raise ValueError(f"spent: there is no folder {folder}.")
    records, unknown = {}, []
    for path in _folders(Path(folder)):
        found = spending.read(path)
        if (path / NAME).is_file():
            records[str(path)] = found
        if found.whole and not found.runs and _has_run(path):
            unknown.append(str(path))  # the record is lost, or empty
    return TotalSpent(records, tuple(unknown))


def limit_spending(folder: Path | str, budget: PrivacyBudget) -> None:
    """Refuses runs below a folder that would take its total above a budget.

    From now on a run of a search with `folder=`, or of the command line, in this folder
    or in any folder below it starts or goes on only if what `spent` adds up, with that
    run included, is at most the budget. Several processes may start runs at once. The
    limit is a file in the folder, `spending_limit.json`; another call replaces it.
    Where a link below the folder leads elsewhere, runs have to be given the path with
    the link: those that are given another path count, but are not refused.

    Args:
        folder: The folder; created if need be.
        budget: The limit, for all runs together.

    Raises:
        TypeError: `budget` is no `PrivacyBudget`.
        OSError: The disk refuses.

    Privacy:
        All runs below the folder together are (epsilon, delta)-DP with these of the
        budget, up to the rounding of a sum; a filter by basic composition, as in
        `TotalSpent`, of a budget that is fixed before the first run.
    """
    _checks.instance("limit_spending", PrivacyBudget, budget=budget)
    Path(folder).mkdir(parents=True, exist_ok=True)
    page = {"epsilon": float(budget.epsilon), "delta": float(budget.delta)}
    checkpoint.replace_json(Path(folder) / LIMIT, page)


def begin(
    folder: Path,
    number: int,
    report: PrivacyReport,
    config: dict[str, Any],
    *,
    first: PrivacyReport | None = None,
) -> None:
    """Record that a run starts or continues; call this before it reads a record.

    Args:
        folder: The result folder.
        number: The run's number in the folder, from 1.
        report: The guarantee of the run.
        config: The config as it was given.
        first: The guarantee of the part of the run that comes first, if `charge` is
            called before the rest. It is on record alone until then.

    Raises:
        ValueError: The whole run would take the total above a limit; the record is as
            before.
        OSError: The disk refuses, or a folder below a limit cannot be read; the record
            is as before.
    """
    goes_on = any(run.number == number for run in spending.read(folder).runs)
    with _kept(folder):
        # On record first: of two runs that start at once, at least one sees the other.
        spending.begin(folder, number, first or report, config)
        # A resumed run is checked, too: it may have been killed here, or moved since.
        _check_limits(folder, number, report, goes_on=goes_on)


def charge(folder: Path, number: int, report: PrivacyReport) -> None:
    """Record the cost of the whole run; call this before the rest reads a record.

    Arguments and errors are those of `begin`.
    """
    with _kept(folder):
        spending.charge(folder, number, report)
        _check_limits(folder, number, report, goes_on=True)


@contextlib.contextmanager
def _kept(folder: Path) -> Iterator[None]:
    """Restore the spending record of a folder if an error is raised."""
    file = folder / NAME
    before = file.read_bytes() if file.is_file() else None
    try:
        yield
    except BaseException:  # or a second attempt would find it on record
        if before is None:
            file.unlink(missing_ok=True)
        else:
            checkpoint.replace(file, before)
        raise


def _folders(top: Path) -> Iterator[Path]:
    """A folder and all below it, those that links lead to as well, each once."""
    seen = set()

    def refuse(error: OSError) -> None:
        raise error

    for path, names, _ in os.walk(top, followlinks=True, onerror=refuse):
        names.sort()
        status = os.stat(path)
        if (status.st_dev, status.st_ino) in seen:
            names.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        yield Path(path)


def _has_run(folder: Path) -> bool:
    """Whether a run was made in a folder that has no record of its own."""
    if (folder / checkpoint.SEARCH).exists():
        return True
    if (folder / checkpoint.RESULT).exists():
        # Or an earlier result of the folder above, which has its record.
        moved = re.fullmatch(r"run-\d+", folder.name)
        return not (moved and (folder.parent / NAME).is_file())
    file = folder / checkpoint.NAME
    if not file.exists():
        return False
    content = file.read_bytes()
    notice = content[: content.find(b"\n") + 1]
    try:
        return checkpoint.parsed(file, content, notice=notice).has_released
    except Exception:  # damaged
        return True


def _check_limits(
    folder: Path, number: int, report: PrivacyReport, *, goes_on: bool
) -> None:
    """Raises `ValueError` where a run that is on record leads above a limit."""
    recorded = {run.number: run.cost for run in spending.read(folder).runs}[number]
    whole = spending.cost(report)  # the record may hold only a first part
    ahead = [max(0.0, b - a) for a, b in zip(recorded, whole, strict=True)]
    absolute = Path(os.path.abspath(folder))
    above = [p for end in (absolute, folder.resolve()) for p in (end, *end.parents)]
    for place in dict.fromkeys(above):
        try:
            text = (place / LIMIT).read_text()
        except (FileNotFoundError, NotADirectoryError):
            continue
        try:
            page = json.loads(text)
            limits = float(page["epsilon"]), float(page["delta"])
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f"{place / LIMIT} is damaged; declare the limit again by "
                "dpbilevel.search.limit_spending(folder, budget). Nothing was spent."
            ) from None
        found = spent(place)
        costs = found.epsilon + ahead[0], min(1.0, found.delta + ahead[1])
        pairs = zip(costs, limits, strict=True)
        if not all(cost <= limit * (1 + _ROUNDING) for cost, limit in pairs):
            raise ValueError(_over(place, found, costs, limits, report, goes_on))


def _over(place, found, costs, limits, report, goes_on) -> str:
    known = math.isfinite(found.epsilon)
    unknown = f"what was spent there is unknown, or for other neighbours:\n{found}\n"
    together = f"epsilon = {costs[0]:.6g} at delta = {costs[1]:.3g}"
    advice = "Give a smaller budget. Nothing was spent."
    if goes_on:
        advice = "It goes on where limit_spending declares a larger one."
    return (
        f"this run of epsilon = {report.epsilon:.6g} at delta = "
        f"{report.delta:.3g} is refused by the limit of {place}, epsilon = "
        f"{limits[0]:.6g} at delta = {limits[1]:.3g}: with it "
        f"{f'the runs there cost {together}. ' if known else unknown}"
        f"{advice}"
    )
