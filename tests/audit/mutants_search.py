"""Deliberately broken searches by losses, each with the sound one it was made from."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp

import dpbilevel as dpb
from dpbilevel import audit
from dpbilevel.privacy.keys import derive
from dpbilevel.privacy.queries import Query
from dpbilevel.search import losses as told
from dpbilevel.search.losses import clipped_loss
from tests.audit.mutants_bilevel import Silent
from tests.audit.mutants_draws import Hotter
from tests.audit.runs import audited
from tests.cases import Mutant, with_mechanism
from tests.search.test_baselines import planned_random_search, planned_ucb
from tests.search.test_repeat_and_select import planned_selection
from tests.search.test_tuned_training import planned_tuning

RUNS = 8_000


class RawMean(Query):
    """The mean of losses that are not clipped."""

    def read(self, fun, records, **_):
        mean = jnp.sum(records) / self.size - self.clip_norm
        return dpb.privacy.Bounded(mean, self.clip_norm / self.size)


class ClippedAsAMean(Query):
    def read(self, fun, records, **_):
        mean = jnp.clip(jnp.sum(records) / self.size, 0, 2 * self.clip_norm)
        return dpb.privacy.Bounded(mean - self.clip_norm, self.clip_norm / self.size)


def raw_score(losses, clip_range, size, precision):
    return dpb.privacy.Bounded(jnp.sum(losses) / size - clip_range / 2, 1.0)


class DrawsByRawScores(dpb.search.RandomSearch):
    def tell(self, *args, **kwargs):
        with mock.patch.object(told, "clipped_loss", raw_score):
            return dpb.search.RandomSearch.tell(self, *args, **kwargs)


def reading_by(kind):
    class Mutated(dpb.search.NoisyUCB):
        def release(self, problem, sizes):
            release = dpb.search.NoisyUCB.release(self, problem, sizes)
            queries = tuple(kind(**vars(query)) for query in release.queries)
            return dataclasses.replace(release, queries=queries)

    return Mutated


class ForgetsNoiseOnce(dpb.search.NoisyUCB):
    def tell(self, problem, state, asked, losses, *, key):
        quiet = with_mechanism(self, Silent)
        first, later = (
            dpb.search.NoisyUCB.tell(solver, problem, state, asked, losses, key=k)
            for solver, k in zip((quiet, self), jax.random.split(key), strict=True)
        )
        return jax.tree.map(lambda a, b: jnp.where(state.t == 0, a, b), first, later)


class CountsOneQuery(dpb.search.NoisyUCB):
    def ledger(self, problem, sizes):
        (release,) = dpb.search.NoisyUCB.ledger(self, problem, sizes).releases
        return dpb.privacy.Ledger((dataclasses.replace(release, count=1),))


class ShowsEveryRepetition(dpb.search.RepeatAndSelect):
    def tell(self, problem, state, asked, losses, *, key):
        key, again = jax.random.split(key)
        after = dpb.search.RepeatAndSelect.tell(
            self, problem, state, asked, losses, key=again
        )
        precision = self.release_noise.precision
        mean = clipped_loss(losses[:, 0], self.clip_range, self.sizes, precision)
        (key,) = derive(key, "noise")
        return dataclasses.replace(
            after, value=self.release_noise.release(mean, key=key)
        )


class SelectsByRawLoss(dpb.search.RepeatAndSelect):
    """Shows the noisy loss of the point that is best without noise."""

    def tell(self, problem, state, asked, losses, *, key):
        quiet = with_mechanism(self, Silent)
        return dpb.search.RepeatAndSelect.tell(
            quiet, problem, state, asked, losses, key=key
        )

    def adversary_view(self, state):
        return state.w


class RepeatsUntilTheRawLossIsGood(dpb.search.RepeatAndSelect):
    def tell(self, problem, state, asked, losses, *, key):
        after = dpb.search.RepeatAndSelect.tell(
            self, problem, state, asked, losses, key=key
        )
        good = jnp.sum(losses) <= 0
        number = jnp.where(good, 1, self.num_steps).astype(jnp.int32)
        return dataclasses.replace(after, repeats=number)


def tilted(kind):
    """A selection where a record moves two points against each other."""
    solver = planned_selection(kind, num_steps=40, mean=5.0, scale=4.0)
    canary = audit.canaries(solver)["records"]
    problem = audit.canaries(planned_random_search())["records"].problem
    return audit.trade_off(
        audit.SolverRun(problem, canary.solver, canary.w0),
        canary.data,
        canary.neighbour,
        canary.claim,
        key=jax.random.key(9),
        runs=RUNS,
    )


def audited_draw(solver):
    canary = audit.canaries(solver, others=-1.0)["records"]
    return audit.trade_off(
        audit.SolverRun(canary.problem, canary.solver, canary.w0),
        canary.data,
        canary.neighbour,
        canary.claim,
        key=jax.random.key(8),
        runs=RUNS,
    )


@functools.cache
def sound_draw():
    return audited_draw(planned_random_search())


@functools.cache
def sound_ucb():
    return audited(planned_ucb(), runs=RUNS)


@functools.cache
def selection(kind=dpb.search.RepeatAndSelect):
    # So much noise that the number of repetitions tells more than their values.
    return audited(planned_selection(kind, scale=3.0), runs=RUNS)


def of_ucb(kind):
    def broken():  # its means are floats
        return audited(planned_ucb(kind).with_precision("float"), runs=RUNS)

    return Mutant("NoisyUCB", broken, sound_ucb)


def of_draw(kind=dpb.search.RandomSearch, **fields):
    return Mutant(
        "RandomSearch",
        lambda: audited_draw(planned_random_search(kind, **fields)),
        sound_draw,
    )


class ChargesTheLossAlone(dpb.search.TunedTraining):
    """As where the training of a selection counts as free."""

    def ledger(self, problem, sizes):
        (release,) = (ledger := super().ledger(problem, sizes)).releases
        free = dataclasses.replace(release, trainings=())
        return dataclasses.replace(ledger, releases=(free,))


class ShowsEveryModel(dpb.search.TunedTraining):
    """Shows the mean of the models of all runs."""

    def step(self, problem, data, state, *, key):
        key, again = jax.random.split(key)
        after = dpb.search.TunedTraining.step(self, problem, data, state, key=key)
        alone = dataclasses.replace(self, num_steps=1, mean=1.0009)
        run = dpb.search.TunedTraining.step(
            alone, problem, data, alone.init(problem, state.runs.w.pair), key=again
        )
        mean = state.runs.value + run.runs.w.pair[1] / self.num_steps
        runs = dataclasses.replace(after.runs, value=mean)
        return dataclasses.replace(after, runs=runs)


class TrainsWithLessNoise(dpb.search.TunedTraining):
    """The first candidate has half of the noise that it is charged for."""

    def step(self, problem, data, state, *, key):
        first, *rest = self.candidates
        louder = dataclasses.replace(
            first, noise_multiplier=0.5 * first.noise_multiplier
        )
        broken = dataclasses.replace(self, candidates=(louder, *rest))
        return dpb.search.TunedTraining.step(broken, problem, data, state, key=key)


def tuning(kind=dpb.search.TunedTraining):
    # Most of what a person with a record in both levels pays is for the training.
    return audited(
        planned_tuning(kind, "overlapping", budget_split=(0.9, 0.1)), runs=RUNS
    )


def of_tuning(kind):
    return Mutant("TunedTraining, overlapping", lambda: tuning(kind), tuning)


def of_selection(kind):
    return Mutant("RepeatAndSelect", lambda: selection(kind), selection)


MUTANTS = {
    "draws by scores that are not clipped": of_draw(DrawsByRawScores),
    "draws a candidate at a wrong rate": of_draw(mechanism=Hotter()),
    "queries that are not clipped": of_ucb(reading_by(RawMean)),
    "queries clipped as a mean": of_ucb(reading_by(ClippedAsAMean)),
    "noise forgotten in one query": of_ucb(ForgetsNoiseOnce),
    "all queries counted as one": of_ucb(CountsOneQuery),
    "every repetition is shown": of_selection(ShowsEveryRepetition),
    "repeats until the raw loss is good": of_selection(RepeatsUntilTheRawLossIsGood),
    "a training that is free": of_tuning(ChargesTheLossAlone),
    "the models of all runs": of_tuning(ShowsEveryModel),
    "half of the noise in a training": of_tuning(TrainsWithLessNoise),
    "selects by the loss without noise": Mutant(
        "RepeatAndSelect",
        lambda: tilted(SelectsByRawLoss),
        lambda: tilted(dpb.search.RepeatAndSelect),
    ),
}
