"""Broken copies of one-level solvers, samplings and mechanisms."""

import dataclasses
import functools
from unittest import mock

import dp_accounting
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import dpbilevel as dpb
from dpbilevel import audit
from dpbilevel.onelevel import AdaptiveClipGD, AdaptiveGD, AllocatedGD
from dpbilevel.onelevel.noisy_gd import AbstractGradientSolver
from dpbilevel.privacy.exact.normal import standard_normal
from dpbilevel.privacy.keys import step_keys
from dpbilevel.privacy.per_example.clipping import unsealed
from dpbilevel.privacy.queries import Query
from dpbilevel.privacy.records.rows import unpacked
from dpbilevel.privacy.releases import Release
from dpbilevel.privacy.sampling.fixed_size import RandomAllocation
from tests.audit.runs import audited, claim_of
from tests.cases import Mutant, with_mechanism
from tests.onelevel.test_adaptive_clip import planned_adaptive
from tests.onelevel.test_adaptive_step import planned_step
from tests.onelevel.test_allocated import planned_allocated
from tests.onelevel.test_inner_solvers import ADD_OR_REMOVE, planned_noisy_gd, sampled


@functools.cache
def sound_noisy_gd():
    return audited(planned_noisy_gd())


class CountedAside(AdaptiveClipGD):
    """Noise for the gradient alone: the coordinate of its length is not charged."""

    def step(self, problem, data, state, *, key):
        factor = (1 + self.weight**2) ** -0.5
        less = dataclasses.replace(
            self, noise_multiplier=factor * self.noise_multiplier
        )
        return AdaptiveClipGD.step(less, problem, data, state, key=key)


@functools.cache
def adaptive_clip(kind=AdaptiveClipGD):
    return audited(planned_adaptive(kind), runs=20_000)


class LengthAside(AdaptiveGD):
    """The coordinate that moves the clip norm is not charged."""

    def step(self, problem, data, state, *, key):
        factor = (1 + self.weight**2) ** -0.5
        less = dataclasses.replace(
            self, noise_multiplier=factor * self.noise_multiplier
        )
        return AdaptiveGD.step(less, problem, data, state, key=key)


class StepsByRawGradient(AdaptiveGD):
    """The step size follows a gradient that is not released, nor counted."""

    def step(self, problem, data, state, *, key):
        rows = unpacked(data)[0]
        gradients = jax.vmap(jax.grad(problem.loss), (None, 0))(state.w, rows)
        longer = 1 + 0.1 * jnp.tanh(jnp.nansum(gradients))
        raw = dataclasses.replace(state, length=state.length * longer)
        return AdaptiveGD.step(self, problem, data, raw, key=key)


@functools.cache
def adaptive_step(kind=AdaptiveGD):
    return audited(planned_step(kind), runs=20_000)


class InOrder(RandomAllocation):
    """The batch of a record follows from its row."""

    def in_pass(self, records, *, key):
        rows = jnp.arange(len(jax.tree.leaves(records)[0]))
        return dataclasses.replace(self, places=rows % self.batches)


class AllocatedInOrder(AllocatedGD):
    """Batches that everybody knows, charged as if they were secret."""

    def step(self, problem, data, state, *, key):
        def known(release):
            queries = tuple(
                dataclasses.replace(q, sampling=InOrder(self.batches))
                for q in release.queries
            )
            return dataclasses.replace(release, queries=queries)

        release = AbstractGradientSolver.release
        with mock.patch.object(
            AllocatedGD, "release", lambda s, *a: known(release(s, *a))
        ):
            return AllocatedGD.step(self, problem, data, state, key=key)


@functools.cache
def allocated(kind=AllocatedGD):
    return audited(planned_allocated(kind))


class SameForEveryLeaf(dpb.privacy.Gaussian):
    def release(self, bounded, *, key):
        std = self.noise_multiplier * bounded.sensitivity(self.neighbours)
        return jax.tree.map(
            lambda v: v + std * standard_normal(v, key=key), unsealed(bounded)
        )


class FreshForEveryLeaf(dpb.privacy.Gaussian):
    def release(self, bounded, *, key):
        std = self.noise_multiplier * bounded.sensitivity(self.neighbours)
        values = unsealed(bounded)
        noise = standard_normal(values, key=key)
        return jax.tree.map(lambda v, z: v + std * z, values, noise)


class SameAtEveryStep(dpb.NoisyGD):
    def step(self, problem, data, state, *, key):
        return dpb.NoisyGD.step(self, problem, data, state, key=jax.random.key(0))


class SameInEveryRun(dpb.NoisyGD):
    """Fresh at every step of one inner run, the same again in the next."""

    def step(self, problem, data, state, *, key):
        again = jax.random.fold_in(jax.random.key(0), state.t)
        return dpb.NoisyGD.step(self, problem, data, state, key=again)


class StopsOnRawGradient(dpb.NoisyGD):
    def step(self, problem, data, state, *, key):
        rows = unpacked(data)[0]
        gradients = jax.vmap(jax.grad(problem.loss), (None, 0))(state.w, rows)
        moved = dpb.NoisyGD.step(self, problem, data, state, key=key)
        goes_on = jnp.abs(jnp.nansum(gradients)) > 1e-3
        return jax.tree.map(lambda a, b: jnp.where(goes_on, a, b), moved, state)


class ReadsUnclipped(Query):
    def read(self, fun, records, **_):
        mean = jax.tree.map(lambda v: v.sum(axis=0) / self.size, jax.vmap(fun)(records))
        return dpb.privacy.Bounded(mean, self.clip_norm / self.size)


class ClipsTheBatch(Query):
    def read(self, fun, records, **_):
        mean = jnp.sum(jax.vmap(fun)(records)) / self.size
        clipped = mean * jnp.minimum(1.0, self.clip_norm / jnp.abs(mean))
        return dpb.privacy.Bounded(clipped, self.clip_norm / self.size)


def read_by(kind):
    """Finite sums whose query reads in another way than it charges for."""

    class Broken(dpb.FiniteSum):
        def queries(self, clip_norm, sampling, sizes):
            return (kind("records", sizes, clip_norm, sampling),), False

    return Broken


Unclipped, ClippedAsABatch = read_by(ReadsUnclipped), read_by(ClipsTheBatch)


def on_problem(kind):
    """Noisy gradient descent on a canary problem of another class."""
    canary = audit.canaries(planned_noisy_gd().with_precision("float"))["records"]
    problem = kind(canary.problem.loss)
    return audit.trade_off(
        audit.SolverRun(problem, canary.solver, canary.w0),
        canary.data,
        canary.neighbour,
        canary.claim,
        key=jax.random.key(9),
        runs=20_000,
    )


class TwoReads(Release):
    """Two queries of one batch or, if sound, the second one of a batch of its own."""

    def read(self, funs, data, *, key, index=None):
        first, second = (
            query.read(
                funs["records"],
                getattr(data, query.role),
                precision=self.mechanism.precision,
                key=k,
            )
            for query, k in zip(self.queries, self.keys(key), strict=True)
        )
        return first + second

    def keys(self, key):
        return key, key


class TwoBatches(TwoReads):
    def keys(self, key):
        return jax.random.split(key)


class ReadsTwice(dpb.NoisyGD):
    one_batch: bool = eqx.field(static=True, default=True)

    def step(self, problem, data, state, *, key):
        both = dpb.Levels(data, data)
        return dpb.NoisyGD.step(self, problem, both, state, key=key)

    def release(self, problem, sizes):
        kind = TwoReads if self.one_batch else TwoBatches
        roles = ("upper", "lower")
        queries = tuple(Query(r, sizes, self.clip_norm, self.sampling) for r in roles)
        return kind("gradient", self.num_steps, queries, self.release_noise)


TWICE = sampled(dpb.Poisson(0.1), ADD_OR_REMOVE, 0.5, num_steps=20)


@functools.cache
def twice():
    """The canary, its two readings' noise, and what two batches would claim."""
    canary = audit.canaries(TWICE)["records"]
    ledger = ReadsTwice(**vars(canary.solver)).ledger(
        canary.problem, canary.solver.sizes
    )
    claim = audit.ledger_claims(ledger)["person"]
    return canary, ledger.releases[0].noise_std, claim


def reading_twice(one_batch):
    canary, noise_std, claim = twice()

    def likelihood_ratio(rows):
        # In units of the noise, a batch with the person is 1 / 0.5 away.
        steps = -np.diff(rows, axis=1, prepend=0.0) / (0.1 * noise_std)
        return np.log1p(0.1 * np.expm1(2 * steps - 2)).sum(axis=1)

    solver = ReadsTwice(**vars(canary.solver), one_batch=one_batch)
    return audit.trade_off(
        audit.SolverRun(canary.problem, solver, canary.w0),
        canary.data,
        canary.neighbour,
        claim,
        key=jax.random.key(10),
        statistic=likelihood_ratio,
    )


EPOCH = 10


def epoch(sampling):
    """Ten noisy sums over ten records; the largest shows where the person took part."""

    def run(first, *, key):
        key_batch, key_noise = jax.random.split(key)
        records = jnp.full(EPOCH, -1.0).at[0].set(first)
        if sampling == "shuffled":
            sums = jax.random.permutation(key_batch, records)
        else:
            taken = jax.random.bernoulli(key_batch, 1 / EPOCH, (EPOCH, EPOCH))
            sums = taken.astype(records.dtype) @ records
        return jnp.max(sums + 0.5 * standard_normal(sums, key=key_noise))

    present, absent = jnp.asarray(1.0), jnp.asarray(0.0)
    return audit.trade_off(
        run, present, absent, epoch_claim(), key=jax.random.key(11), runs=20_000
    )


@functools.cache
def epoch_claim():
    noise = dp_accounting.GaussianDpEvent(0.5)
    event = dpb.Poisson(1 / EPOCH).event(noise, ADD_OR_REMOVE, EPOCH)
    whole = dp_accounting.SelfComposedDpEvent(event, EPOCH)
    return audit.event_claim(whole, ADD_OR_REMOVE)


FIRST = np.eye(10, dtype=np.float32)[0]
UTILITIES = FIRST, 1 - FIRST  # of two neighbours: they differ by 1


EPSILON = 2.0


def exponential_mechanism(sensitivity):
    def run(utilities, *, key):
        logits = EPSILON * utilities / (2 * sensitivity)
        return jax.nn.one_hot(jax.random.categorical(key, logits), 10)

    return audit.trade_off(
        run,
        *UTILITIES,
        audit.pure_claim(EPSILON),
        key=jax.random.key(12),
        runs=20_000,
    )


def metropolis(steps):
    """Samples the exponential mechanism by a chain from the best outcome."""

    def run(utilities, *, key):
        def move(state, key):
            key_proposal, key_accept = jax.random.split(key)
            proposal = jax.random.randint(key_proposal, (), 0, 10)
            gain = EPSILON * (utilities[proposal] - utilities[state]) / 2
            accepted = jnp.log(jax.random.uniform(key_accept)) < gain
            return jnp.where(accepted, proposal, state), None

        start = jnp.argmax(utilities).astype(jnp.int32)
        state, _ = jax.lax.scan(move, start, step_keys(key, steps)[1])
        return jax.nn.one_hot(state, 10)

    return audit.trade_off(
        run,
        *UTILITIES,
        audit.pure_claim(EPSILON),
        key=jax.random.key(13),
        runs=20_000,
    )


def reuse(solver):
    return audit.noise_reuse(solver, key=jax.random.key(14))


def one_step_reuse(mechanism):
    solver = with_mechanism(dpb.NoisyGD(1, 1.0, step_size=1.0), mechanism)
    return reuse(solver.with_noise(1.0).with_sizes(10))


SUBSET = sampled(dpb.FixedSize(2))


ADDED = planned_noisy_gd(neighbours=ADD_OR_REMOVE)


def of_noisy_gd(broken, sound=sound_noisy_gd):
    return Mutant("NoisyGD", broken, sound)


MUTANTS = {
    "noise x 0.9": of_noisy_gd(
        lambda: audited(planned_noisy_gd(0.9), claim_of(planned_noisy_gd()))
    ),
    "noise x 0.707": of_noisy_gd(
        lambda: audited(
            planned_noisy_gd(0.707), claim_of(planned_noisy_gd()), runs=20_000
        )
    ),
    "replaced records with the noise for removed ones": of_noisy_gd(
        lambda: audited(
            dataclasses.replace(ADDED, noise_multiplier=ADDED.noise_multiplier / 2),
            claim_of(ADDED),
            runs=20_000,
        )
    ),
    "clip removed": of_noisy_gd(
        lambda: on_problem(Unclipped), lambda: on_problem(dpb.FiniteSum)
    ),
    "clip of the batch instead of the record": of_noisy_gd(
        lambda: on_problem(ClippedAsABatch), lambda: on_problem(dpb.FiniteSum)
    ),
    "key reused across steps": of_noisy_gd(
        lambda: reuse(
            SameAtEveryStep(2, 0.7, step_size=0.1).with_noise(1.0).with_sizes(10)
        ),
        lambda: reuse(planned_noisy_gd(num_steps=2)),
    ),
    "key reused across leaves": of_noisy_gd(
        lambda: one_step_reuse(SameForEveryLeaf),
        lambda: one_step_reuse(FreshForEveryLeaf),
    ),
    "one batch accounted as two independent ones": of_noisy_gd(
        lambda: reading_twice(True), lambda: reading_twice(False)
    ),
    "shuffled batches accounted as Poisson": of_noisy_gd(
        lambda: epoch("shuffled"), lambda: epoch("Poisson")
    ),
    "fixed-size batches accounted as Poisson": of_noisy_gd(
        lambda: audited(
            SUBSET,
            claim_of(dataclasses.replace(SUBSET, sampling=dpb.Poisson(0.2))),
        ),
        lambda: audited(SUBSET),
    ),
    "stops when the raw gradient is small": of_noisy_gd(
        lambda: audited(
            StopsOnRawGradient(4, 0.7, step_size=0.1, neighbours=ADD_OR_REMOVE)
            .with_noise(1.0)
            .with_sizes(10),
            runs=20_000,
        ),
        lambda: audited(ADDED, runs=20_000),
    ),
    "a coordinate of the clip norm that is not charged": Mutant(
        "AdaptiveClipGD", lambda: adaptive_clip(CountedAside), adaptive_clip
    ),
    "a coordinate beside the gradient that is not charged": Mutant(
        "AdaptiveGD", lambda: adaptive_step(LengthAside), adaptive_step
    ),
    "a step size from records that is not counted": Mutant(
        "AdaptiveGD", lambda: adaptive_step(StepsByRawGradient), adaptive_step
    ),
    "batches of a pass in the order of the records": Mutant(
        "AllocatedGD", lambda: allocated(AllocatedInOrder), allocated
    ),
    "half the sensitivity of the utility": Mutant(
        "exponential mechanism",
        lambda: exponential_mechanism(0.5),
        lambda: exponential_mechanism(1.0),
    ),
    "chain cut short at the exact optimum": Mutant(
        "Metropolis sampler", lambda: metropolis(2), lambda: metropolis(60)
    ),
}
