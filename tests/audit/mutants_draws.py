"""Broken copies of draws."""

import dataclasses
import functools

import jax

import dpbilevel as dpb
from dpbilevel import audit
from dpbilevel.audit.worst_cases import BEYOND
from dpbilevel.draws.mean_loss import MeanLoss
from tests.audit.runs import audited, claim_of
from tests.cases import Mutant
from tests.draws.test_exponential import planned_draw
from tests.draws.test_localized_draws import planned_localized
from tests.draws.test_regularized import UNTIMED, planned_regularized


class Hotter(dpb.draws.Exponential):
    """Draws at the rate for a removed record where records are replaced, twice over."""

    def rate(self, sensitivity, convexity=0.0):
        return 4 * dpb.draws.Exponential.rate(self, sensitivity)


class Unbounded(MeanLoss):
    """Seals the mean of losses as they are, with the share of clipped ones."""

    def potential(self, data, start):
        whole = dataclasses.replace(self, clip_range=1e3 * self.clip_range)
        return MeanLoss.potential(whole, data, start)


class SteeperThanDeclared(MeanLoss):
    """Seals losses of any slope with the declared one."""

    def potential(self, data, start):
        steep = dataclasses.replace(
            self.problem, loss=lambda w, z: 3 * self.problem.loss(w, z)
        )
        return MeanLoss.potential(dataclasses.replace(self, problem=steep), data, start)


class DrawsBySteeper(dpb.draws.RegularizedExponentialMechanism):
    def score_of(self, problem, sizes):
        return SteeperThanDeclared(problem, "slope", sizes)


class RateOfRemoved(dpb.draws.RegularizedExponential):
    """Takes a record's share for its sensitivity."""

    def rate(self, sensitivity, convexity=0.0):
        return dpb.draws.RegularizedExponential.rate(self, sensitivity / 2, convexity)


class RoundsOfWholeNoise(dpb.draws.LocalizedDraws):
    """Draws every round as if it were the only one."""

    @property
    def rounds(self):
        rounds = dpb.draws.LocalizedDraws.rounds.fget(self)
        return tuple(
            part.with_noise(self.draw.mechanism.calibrated()) for part in rounds
        )


class DrawsUnclipped(dpb.draws.ExponentialMechanism):
    def score_of(self, problem, sizes):
        return Unbounded(problem, "spread", sizes, self.clip_range)


@functools.cache
def drawn(**fields):
    """Audits a draw between two candidates of which the others dislike one."""
    solver = planned_draw(clip_range=1.0, **fields)
    canary = audit.canaries(solver, others=-0.4 / BEYOND)["records"]
    return audit.trade_off(
        audit.SolverRun(canary.problem, canary.solver, canary.w0),
        canary.data,
        canary.neighbour,
        canary.claim,
        key=jax.random.key(16),
        runs=20_000,
    )


def of_exponential(broken):
    return Mutant("ExponentialMechanism", broken, drawn)


def of_regularized(broken):
    return Mutant(
        "RegularizedExponentialMechanism",
        broken,
        lambda: audited(planned_regularized(), runs=20_000),
    )


MUTANTS = {
    "draws by steeper losses than declared": of_regularized(
        lambda: audited(planned_regularized(kind=DrawsBySteeper), runs=20_000)
    ),
    "draws of unprotected time by steeper losses than declared": Mutant(
        "RegularizedExponentialMechanism, unprotected time",
        lambda: audited(
            planned_regularized(kind=DrawsBySteeper, sampler=UNTIMED), runs=4_000
        ),
        lambda: audited(planned_regularized(sampler=UNTIMED), runs=4_000),
    ),
    "draws at the rate for a removed record": of_regularized(
        lambda: audited(
            planned_regularized(mechanism=RateOfRemoved()),
            claim_of(planned_regularized()),
            runs=20_000,
        )
    ),
    "localized draws that each spend the whole budget": Mutant(
        "LocalizedDraws",
        lambda: audited(
            planned_localized(kind=RoundsOfWholeNoise),
            claim_of(planned_localized()),
            runs=20_000,
        ),
        lambda: audited(planned_localized(), runs=20_000),
    ),
    "draws at a wrong rate": of_exponential(lambda: drawn(mechanism=Hotter())),
    "draws by losses that are not clipped": of_exponential(
        lambda: drawn(kind=DrawsUnclipped)
    ),
}
