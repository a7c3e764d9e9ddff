"""Plans of a run of a config, from public values alone."""

import dataclasses

import numpy as np
from jaxtyping import PyTree

from ..audit.claims import TradeOffCurve, ledger_claims
from ..core.plan import calibrate
from ..core.solver import AbstractSolver
from ..core.usability import RecordsCheck
from ..privacy.ledger import Ledger
from ..privacy.report import PrivacyReport, describe
from . import evaluation
from .config import Config
from .task import Problem

FALSE_ALARMS = 0.05


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
        """Ledger of a run, of its check of the records as well."""
        rest = self.solver.ledger(self.problem, self.config.sizes)
        releases = (*self.check.releases, *rest.releases)
        return dataclasses.replace(rest, releases=releases)

    @property
    def power(self) -> float:
        """Largest power of any attack with 5 % false alarms, on the worst-off person.

        By the whole privacy profile, which is below the bound by one epsilon and delta.
        People of a counted test file are charged by a ledger of their own.
        """
        test = self.config.data.test
        is_counted = test is not None and test.accuracy == "counted"
        others = [evaluation.ledger_of(self.config)] if is_counted else []
        return largest_power(self.ledger, *others)

    @property
    def report_of_check(self) -> PrivacyReport | None:
        """Report of the check alone; `None` if records are not checked."""
        if not self.check.releases:
            return None
        ledger = dataclasses.replace(self.ledger, releases=self.check.releases)
        two = self.config.privacy.people is not None
        return describe(ledger, self.config.privacy.budget, levels=two)


def largest_power(*ledgers: Ledger) -> float:
    """Return the largest power of any test with 5 % false alarms.

    Args:
        ledgers: Ledgers of different people.
    """
    claims = (claim for led in ledgers for claim in ledger_claims(led).values())
    rates = np.asarray([FALSE_ALARMS])
    powers = (float(TradeOffCurve(claim)(rates)[0]) for claim in claims)
    return max(powers, default=FALSE_ALARMS)


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
