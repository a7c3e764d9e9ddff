"""Broken copies of solvers of games."""

import dataclasses
import functools

import jax

import dpbilevel as dpb
from dpbilevel import audit
from dpbilevel.privacy.queries import Query
from tests.audit.runs import audited
from tests.cases import Mutant
from tests.games.test_extragradient import planned_extragradient, planned_once
from tests.games.test_group_descent import planned_group_descent
from tests.games.test_noisy_payoff import planned_payoff
from tests.games.test_proximal_point import planned_proximal
from tests.games.test_recursive import planned_recursive


class CountsSteps(dpb.games.NoisyExtragradient):
    """Counts one release a step, as the paper does."""

    def ledger(self, problem, sizes):
        ledger = dpb.games.NoisyExtragradient.ledger(self, problem, sizes)
        (release,) = ledger.releases
        half = dataclasses.replace(release, count=self.num_steps)
        return dataclasses.replace(ledger, releases=(half,))


class SameBatch(dpb.privacy.SinglePass):
    """Reads its first batch again and again."""

    def draw(self, records, size, *, key, index=None):
        return dpb.privacy.SinglePass.draw(
            self, records, size, key=key, index=0 * index
        )


class HalfSensitiveResolvent(dpb.games.InexactProximalPoint):
    """Takes the share of a record for its sensitivity."""

    def step(self, problem, data, state, *, key):
        half = dataclasses.replace(self, noise_multiplier=0.5 * self.noise_multiplier)
        return dpb.games.InexactProximalPoint.step(half, problem, data, state, key=key)


class WarmResolvent(dpb.games.InexactProximalPoint):
    """Starts from the resolvent that it found, not from the one it released."""

    def step(self, problem, data, state, *, key):
        silent = dataclasses.replace(self, noise_multiplier=0.0)
        found, noisy = (
            dpb.games.InexactProximalPoint.step(kind, problem, data, state, key=k)
            for kind, k in zip((silent, self), jax.random.split(key), strict=True)
        )
        return dataclasses.replace(found, kept=noisy.w)

    def released(self, state):
        return state.kept


class ForgetsTheFactor(dpb.games.GroupDescent):
    """Weighs records by more than one and charges them as one."""

    def _relative_weights(self, factors):
        return factors, 1.0

    def release(self, problem, sizes):
        sound = dpb.games.GroupDescent.release(self, problem, sizes)
        (query,) = sound.queries
        return dataclasses.replace(sound, queries=(ReadsLonger(**vars(query)),))


class CountsOneRound(dpb.games.RecursiveRegularization):
    """Counts the releases of one round."""

    def ledger(self, problem, sizes):
        ledger = dpb.games.RecursiveRegularization.ledger(self, problem, sizes)
        (release,) = ledger.releases
        fewer = dataclasses.replace(release, count=release.count // self.rounds)
        return dataclasses.replace(ledger, releases=(fewer,))


class ClipsEntries(dpb.games.NoisyPayoff):
    """Clips each coefficient, not all of them together."""

    def release(self, problem, sizes):
        sound = dpb.games.NoisyPayoff.release(self, problem, sizes)
        (query,) = sound.queries
        return dataclasses.replace(sound, queries=(ReadsLonger(**vars(query)),))


class ReadsLonger(Query):
    """Clips at five times the norm that it charges."""

    def read(self, fun, records, **options):
        longer = Query(self.role, self.size, 5 * self.clip_norm, self.sampling)
        value = longer.read(fun, records, **options)
        return dataclasses.replace(value, contribution=value.contribution / 5)


@functools.cache
def of_a_small_group(kind=dpb.games.GroupDescent):
    """A person of a group with five times the weight of its share."""
    solver = planned_group_descent(kind)
    canary = audit.canaries(solver)["records"]
    game = dpb.games.group_fair(
        canary.problem.loss, (0.1, 0.9), group=lambda z: (z == 0).astype(int)
    )
    w0 = dpb.games.group_start(game, canary.w0[0], (0.5, 0.5))
    return audit.trade_off(
        audit.SolverRun(game, canary.solver, w0),
        canary.data,
        canary.neighbour,
        canary.claim,
        key=jax.random.key(9),
        runs=20_000,
    )


def of_extragradient(
    broken, sound=lambda: audited(planned_extragradient(), runs=20_000)
):
    return Mutant("NoisyExtragradient", broken, sound)


@functools.cache
def sound_proximal():
    return audited(planned_proximal(), runs=20_000)


def of_proximal(broken):
    return Mutant("InexactProximalPoint", broken, sound_proximal)


MUTANTS = {
    "one of two releases a step counted": of_extragradient(
        lambda: audited(planned_extragradient(kind=CountsSteps), runs=20_000)
    ),
    "a single pass that reads one batch": of_extragradient(
        lambda: audited(planned_once(SameBatch), runs=20_000),
        lambda: audited(planned_once(), runs=20_000),
    ),
    "half the sensitivity of the resolvent": of_proximal(
        lambda: audited(planned_proximal(kind=HalfSensitiveResolvent), runs=20_000)
    ),
    "inner solver started from an unreleased point": of_proximal(
        lambda: audited(planned_proximal(kind=WarmResolvent), runs=20_000)
    ),
    "rounds that count as one": Mutant(
        "RecursiveRegularization",
        lambda: audited(planned_recursive(CountsOneRound), runs=20_000),
        lambda: audited(planned_recursive(), runs=20_000),
    ),
    "coefficients of a payoff that are clipped one by one": Mutant(
        "NoisyPayoff",
        lambda: audited(planned_payoff(ClipsEntries), runs=20_000),
        lambda: audited(planned_payoff(), runs=20_000),
    ),
    "weights of groups that the sensitivity leaves out": Mutant(
        "GroupDescent", lambda: of_a_small_group(ForgetsTheFactor), of_a_small_group
    ),
}
