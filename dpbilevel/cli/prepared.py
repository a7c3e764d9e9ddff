"""Plans of a run of a config, from public values alone."""

import dataclasses

from jaxtyping import PyTree

from ..core.plan import calibrate
from ..core.solver import AbstractSolver
from ..core.usability import RecordsCheck
from ..privacy.ledger import Ledger
from ..privacy.report import PrivacyReport, describe
from . import evaluation
from .config import Config
from .task import Problem


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A planned run that has not touched data."""

    config: Config
    problem: Problem
    solver: AbstractSolver  # calibrated
    w0: PyTree  # public
    report: PrivacyReport  # the guarantee of one run
    check: RecordsCheck  # the first release of a run

    @property
    def ledger(self) -> Ledger:
        """All releases of a run from its records."""
        rest = self.solver.ledger(self.problem, self.config.sizes)
        releases = (*self.check.releases, *rest.releases)
        return dataclasses.replace(rest, releases=releases)

    @property
    def report_of_check(self) -> PrivacyReport | None:
        """The report of the check alone; `None` if records are not checked."""
        if not self.check.releases:
            return None
        ledger = dataclasses.replace(self.ledger, releases=self.check.releases)
        two = self.config.privacy.people is not None
        return describe(ledger, self.config.privacy.budget, levels=two)


def prepare(config: Config) -> Prepared:
    """Plan a run from the config alone.

    Raises:
        ValueError: No noise reaches the budget with this solver and sampling.

    Privacy:
        Touches no data.
    """
    problem, w0 = config.problem, config.model.start(config.data.blocks)
    check = config.check
    try:
        plan = calibrate(
            problem,
            config.solver,
            config.privacy.budget,
            sizes=config.sizes,
            w0=w0,
            precision=config.privacy.precision,
            before=check.releases,
        )
    except ValueError as error:
        raise config.place.error(str(error)) from error
    report = evaluation.reported(plan.report, config)
    return Prepared(config, problem, plan.solver, w0, report, check)
