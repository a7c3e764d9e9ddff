"""Deliberately broken mechanisms, each with the sound one that it was made from."""

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
from dpbilevel.applications.source_levels import Kept, Mixture, Moments, Scores
from dpbilevel.audit.worst_cases import BEYOND
from dpbilevel.bilevel.certificates import certified, sensitivities
from dpbilevel.bilevel.certificates.fixed_count import Spectrum
from dpbilevel.bilevel.penalized import PenalizedLevel
from dpbilevel.draws.scores.mean_loss import MeanLoss
from dpbilevel.games.resolvents import Resolvent
from dpbilevel.onelevel import AdaptiveClipGD, AllocatedGD
from dpbilevel.onelevel.noisy_gd import gradient_release
from dpbilevel.privacy.exact.normal import standard_normal
from dpbilevel.privacy.noise import step_keys
from dpbilevel.privacy.per_example.clipping import unsealed
from dpbilevel.privacy.queries import Query
from dpbilevel.privacy.records.rows import unpacked
from dpbilevel.privacy.releases import Release
from dpbilevel.privacy.sampling.allocation import RandomAllocation
from tests.applications.test_group_runs import planned_scaled
from tests.applications.test_recalibration import planned_recalibration
from tests.applications.test_source_runs import (
    planned_fit_of_both,
    planned_moments,
    planned_selected,
)
from tests.applications.test_warm_start import planned_refit_of_both
from tests.audit import mutants_gibo
from tests.audit.runs import audited, claim_of
from tests.bilevel.test_finite_difference import planned_differences
from tests.bilevel.test_implicit import planned_implicit
from tests.bilevel.test_penalty import CANARY_INNER, planned_penalty
from tests.bilevel.test_single_loop import planned_single_loop
from tests.cases import Mutant, with_mechanism
from tests.draws.test_exponential import planned_draw
from tests.draws.test_localized_draws import planned_localized
from tests.draws.test_regularized import UNTIMED, planned_regularized
from tests.games.test_extragradient import planned_extragradient, planned_once
from tests.games.test_group_descent import planned_group_descent
from tests.games.test_proximal_point import planned_extrapolated, planned_proximal
from tests.onelevel.test_adaptive_clip import planned_adaptive
from tests.onelevel.test_allocated import planned_allocated
from tests.onelevel.test_inner_solvers import ADD_OR_REMOVE, planned_noisy_gd, sampled


def survivors(mutants):
    """The names of the mutants that no audit rejects."""
    return [name for name, mutant in mutants.items() if mutant.broken().passed]


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

        with mock.patch.object(
            AllocatedGD, "release", lambda s, *a: known(gradient_release(s, *a))
        ):
            return AllocatedGD.step(self, problem, data, state, key=key)


@functools.cache
def allocated(kind=AllocatedGD):
    return audited(planned_allocated(kind))


@functools.cache
def sound_penalty(**fields):
    return audited(planned_penalty("overlapping", **fields))


class Silent(dpb.privacy.Gaussian):
    """Releases without noise and says nothing."""

    def release(self, bounded, *, key):
        return unsealed(bounded)


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


class SilentInOneBlock(dpb.privacy.Gaussian):
    """Releases the second block without noise."""

    def release(self, bounded, *, key):
        noisy = dpb.privacy.Gaussian.release(self, bounded, key=key)
        second = list(vars(noisy))[1]
        return dataclasses.replace(
            noisy, **{second: getattr(unsealed(bounded), second)}
        )


class WarmStartsFromExactSolution(dpb.PenaltyBilevel):
    def step(self, problem, data, state, *, key):
        key_batch, key = jax.random.split(key)
        level = PenalizedLevel(problem, state.x)
        queries, _ = level.queries(0.5, self.sampling, self.sizes)
        release = Release("exact", 1, queries, dpb.privacy.Gaussian(precision="float"))
        exact = release.read(level.record_gradients(state.y), data, key=key_batch).raw
        warm = eqx.tree_at(lambda s: s.y, state, state.y - exact)
        return dpb.PenaltyBilevel.step(self, problem, data, warm, key=key)


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
    event = dpb.Poisson(1 / EPOCH).event(0.5, ADD_OR_REMOVE, EPOCH)
    whole = dp_accounting.SelfComposedDpEvent(event, EPOCH)
    return audit.event_claim(whole, ADD_OR_REMOVE)


UTILITIES = (jnp.eye(10)[0], 1 - jnp.eye(10)[0])  # of two neighbours: they differ by 1
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


def short_penalty(inner):
    return planned_penalty("overlapping", num_steps=1, inner=inner)


class CoarseInner(dpb.ImplicitBilevel):
    """Counts the error of its inner solves, as it must."""


class CoarseInnerLeftOut(dpb.ImplicitBilevel):
    """Takes its inner solves for exact."""


def coarse_inner(kind):
    """One inner step, whose error is as large as allowed and follows the data."""
    radius = BEYOND
    allowed = 0.06 * radius

    def adversary(spectrum, gradient, start, num_steps):
        exact = jax.tree.map(jnp.subtract, start, gradient(start))
        return jax.tree.map(lambda y: y + allowed * jnp.sign(y), exact)

    changes = {"step_counts": lambda *_: sensitivities.StepCounts(1, 1)}
    if kind is CoarseInnerLeftOut:
        changes["solve_error"] = lambda *_: 0.0
    with (
        mock.patch.multiple(sensitivities, **changes),
        mock.patch.object(Spectrum, "accelerated_gradient", adversary),
        mock.patch.object(Spectrum, "accelerated_error", return_value=allowed),
    ):
        return audited(planned_implicit("overlapping", kind=kind), runs=20_000)


class HalfSensitive(dpb.ImplicitBilevel):
    """Takes a record's share for its sensitivity."""

    def step(self, problem, data, state, *, key):
        half = dataclasses.replace(self, noise_multiplier=0.5 * self.noise_multiplier)
        return dpb.ImplicitBilevel.step(half, problem, data, state, key=key)


class ClipsAtTwice(Query):
    """Clips upper contributions at twice the norm that is charged."""

    def read(self, fun, records, **options):
        wide = dataclasses.replace(self, clip_norm=2 * self.clip_norm)
        return Query.read(wide, fun, records, **options)


def chargeless(clipped, x, shares, clip, precision):
    """Upper records are clipped, so lower ones are taken to move nothing."""
    del x, clip, precision
    return clipped, dpb.Levels(shares.upper, 0 * shares.lower)


def clipped_upper(**changes):
    solver = planned_implicit("overlapping", upper_clip_norm=BEYOND / 2)
    jax.clear_caches()  # compiled programs do not show what was patched
    with mock.patch.multiple(certified, **({"Query": Query} | changes)):
        outcome = audited(solver, runs=20_000)
    jax.clear_caches()
    return outcome


def of_clipped_upper(**changes):
    return Mutant(
        "ImplicitBilevel, clipped, overlapping",
        lambda: clipped_upper(**changes),
        clipped_upper,
    )


@functools.cache
def sound_implicit(**fields):
    return audited(planned_implicit("overlapping", **fields))


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


class FirstStep(Resolvent):
    """Takes what a record moves in the first inner step for what it moves in all."""

    def contribution(self, dtype, precision):
        step = 1 / (2 * (self.lipschitz + self.strength))
        return step * self.problem.constant("bound") / self.denominator


class FirstStepSensitive(dpb.games.InexactProximalPoint):
    """Forgets that its steps add up."""

    def resolvent(self, problem, sizes):
        found = dpb.games.InexactProximalPoint.resolvent(self, problem, sizes)
        return FirstStep(**vars(found))


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


class SealedAtHalf(Query):
    """Seals a mean with half of what a record moves."""

    def read(self, fun, records, **options):
        value = Query.read(self, fun, records, **options)
        return dataclasses.replace(value, contribution=value.contribution / 2)


class ForgetsTheFactor(dpb.games.GroupDescent):
    """Weighs records by more than one and charges them as one."""

    def _relative_weights(self, factors):
        return factors, 1.0

    def release(self, problem, sizes):
        sound = dpb.games.GroupDescent.release(self, problem, sizes)
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


def sealed_at_half(kind):
    class Broken(kind):
        def queries(self, clip_norm, sampling, sizes):
            queries, joint = kind.queries(self, clip_norm, sampling, sizes)
            return tuple(SealedAtHalf(**vars(query)) for query in queries), joint

    return Broken


HalfScores, HalfKept, HalfMoments = map(sealed_at_half, (Scores, Kept, Moments))


class ScoresAtHalf(dpb.applications.SelectedSources):
    """Takes a score for half as long as it is."""

    def scored(self, problem, w0, model):
        sound = dpb.applications.SelectedSources.scored(self, problem, w0, model)
        return HalfScores(**vars(sound))


class WeighsAfterTheClip(dpb.applications.SelectedSources):
    """Gives the clipped gradients of kept sources a weight of two."""

    def of_kept(self, problem, w0, found):
        sound = dpb.applications.SelectedSources.of_kept(self, problem, w0, found)
        return HalfKept(**vars(sound))


def forgetting(kind, name):
    """A copy that does not count one of its runs."""

    class Broken(kind):
        def ledger(self, problem, sizes):
            ledger = kind.ledger(self, problem, sizes)
            counted = [r for r in ledger.releases if not r.name.startswith(name)]
            return dataclasses.replace(ledger, releases=tuple(counted))

    return Broken


def charging_lower_alone(kind):
    """A solver that charges nobody in the upper level for a last fit of both."""

    class Broken(kind):
        def ledger(self, problem, sizes):
            ledger = kind.ledger(self, problem, sizes)
            *others, fit = ledger.releases
            lower = tuple(query for query in fit.queries if query.role == "lower")
            fit = dataclasses.replace(fit, queries=lower)
            return dataclasses.replace(ledger, releases=(*others, fit))

    return Broken


@functools.cache
def selected(kind=dpb.applications.SelectedSources):
    return audited(planned_selected(kind), runs=20_000)


@functools.cache
def fit_of_both(kind=dpb.applications.SelectedSources):
    return audited(planned_fit_of_both(kind), runs=20_000)


@functools.cache
def refit_of_both(kind=dpb.Refitted):
    return audited(planned_refit_of_both(kind), runs=20_000, person="upper")


def of_selected(kind):
    return Mutant("SelectedSources", lambda: selected(kind), selected)


class QuieterMoments(dpb.applications.MixedSources):
    """Adds a tenth of the noise that is charged to second moments."""

    def run(self, name, found):
        solver = dpb.applications.MixedSources.run(self, name, found)
        if name not in ("moments", "remoments"):
            return solver
        return solver.with_noise(solver.run_noise.noise_multiplier / 10)


@functools.cache
def mixed_moments(kind=dpb.applications.MixedSources):
    return audited(planned_moments(kind), runs=20_000)


@functools.cache
def moments_of_mixtures(kind=Moments):
    """A person whose gradient has another direction than in the neighbour."""
    models = jnp.eye(3)
    weighting = dpb.source_weighting(dpb.logistic_loss, 2)
    level = kind(weighting, Mixture(models, models[2]))
    sizes = dpb.Sizes(4, 8, "overlapping")
    solver = dpb.NoisyGD(1, 1.0, 1.0).with_noise(1.0).with_sizes(sizes)

    def levels(canary):
        features = jnp.zeros((8, 3)).at[0, canary].set(1.0)  # of all others 0
        lower = {"features": features, "label": jnp.ones(8)}
        upper = jax.tree.map(lambda v: v[4:], lower)
        return dpb.Levels(upper, lower | {"source": jnp.zeros(8, jnp.int32)})

    (claim,) = audit.ledger_claims(solver.ledger(level, sizes)).values()
    return audit.trade_off(
        audit.SolverRun(level, solver, jnp.zeros((3, 3))),
        levels(0),
        levels(1),
        claim,
        key=jax.random.key(10),
        runs=20_000,
    )


class QuieterCurvature(dpb.applications.Recalibration):
    """Adds a tenth of the noise that is charged to its curvature."""

    def run(self, name, found):
        solver = dpb.applications.Recalibration.run(self, name, found)
        if name != "curvature":
            return solver
        return solver.with_noise(solver.run_noise.noise_multiplier / 10)


@functools.cache
def recalibration(kind=dpb.applications.Recalibration):
    return audited(planned_recalibration(kind, "overlapping"), runs=20_000)


@functools.cache
def scaled(kind=dpb.applications.ScaledGroups):
    return audited(planned_scaled(kind), runs=20_000)


SUBSET = sampled(dpb.FixedSize(2))
ADDED = planned_noisy_gd(neighbours=ADD_OR_REMOVE)


def of_noisy_gd(broken, sound=sound_noisy_gd):
    return Mutant("NoisyGD", broken, sound)


def of_penalty(broken, sound=sound_penalty):
    return Mutant("PenaltyBilevel, overlapping", broken, sound)


def of_implicit(broken, sound=sound_implicit):
    return Mutant("ImplicitBilevel, overlapping", broken, sound)


def of_single_loop(broken, sound=lambda: audited(planned_single_loop("shared"))):
    return Mutant("SingleLoopBilevel, shared", broken, sound)


def of_extragradient(
    broken, sound=lambda: audited(planned_extragradient(), runs=20_000)
):
    return Mutant("NoisyExtragradient", broken, sound)


@functools.cache
def sound_proximal():
    return audited(planned_proximal(), runs=20_000)


def of_proximal(broken):
    return Mutant("InexactProximalPoint", broken, sound_proximal)


def of_exponential(broken):
    return Mutant("ExponentialMechanism", broken, drawn)


def of_regularized(broken):
    return Mutant(
        "RegularizedExponentialMechanism",
        broken,
        lambda: audited(planned_regularized(), runs=20_000),
    )


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
    "steps of operator extrapolation that do not add up": Mutant(
        "InexactProximalPoint, extrapolation",
        lambda: audited(planned_extrapolated(kind=FirstStepSensitive), runs=20_000),
        lambda: audited(planned_extrapolated(), runs=20_000),
    ),
    "weights of groups that the sensitivity leaves out": Mutant(
        "GroupDescent", lambda: of_a_small_group(ForgetsTheFactor), of_a_small_group
    ),
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
    "overlapping people accounted as disjoint": of_penalty(
        lambda: audited(
            planned_penalty("overlapping"),
            claim_of(planned_penalty("disjoint")),
            runs=20_000,
        )
    ),
    "inner noise missing": of_penalty(
        lambda: audited(
            planned_penalty(
                "overlapping",
                inner=with_mechanism(CANARY_INNER, Silent),
            ),
            runs=20_000,
        )
    ),
    "outer noise missing": of_penalty(
        lambda: audited(planned_penalty("overlapping", run_noise=Silent()), runs=20_000)
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
    "key reused across levels": of_penalty(
        lambda: reuse(short_penalty(SameInEveryRun(2, 0.5, step_size=0.1))),
        lambda: reuse(short_penalty(CANARY_INNER)),
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
    "one block of a joint release without noise": of_single_loop(
        lambda: audited(
            with_mechanism(planned_single_loop("shared"), SilentInOneBlock), runs=20_000
        )
    ),
    "the tracked difference released without noise": Mutant(
        "FiniteDifferenceBilevel, shared",
        lambda: audited(
            with_mechanism(planned_differences("shared"), SilentInOneBlock), runs=20_000
        ),
        lambda: audited(planned_differences("shared")),
    ),
    "warm start from an exact iterate": of_penalty(
        lambda: audited(
            planned_penalty("overlapping", kind=WarmStartsFromExactSolution),
            runs=20_000,
        )
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
    "half the sensitivity of the hypergradient": of_implicit(
        lambda: audited(
            planned_implicit("overlapping", kind=HalfSensitive), runs=20_000
        )
    ),
    "inner error left out of the sensitivity": of_implicit(
        lambda: coarse_inner(CoarseInnerLeftOut), lambda: coarse_inner(CoarseInner)
    ),
    "upper contributions clipped at twice the norm": of_clipped_upper(
        Query=ClipsAtTwice
    ),
    "lower records free where upper ones are clipped": of_clipped_upper(
        _with_lower=chargeless
    ),
    "a coordinate of the clip norm that is not charged": Mutant(
        "AdaptiveClipGD", lambda: adaptive_clip(CountedAside), adaptive_clip
    ),
    "batches of a pass in the order of the records": Mutant(
        "AllocatedGD", lambda: allocated(AllocatedInOrder), allocated
    ),
    "a score charged at half of its clip norm": of_selected(ScoresAtHalf),
    "weights of kept sources after the clip": of_selected(WeighsAfterTheClip),
    "a model of kept sources that is not counted": of_selected(
        forgetting(dpb.applications.SelectedSources, "fit")
    ),
    "second moments charged at half of their clip norm": Mutant(
        "MixedSources", lambda: moments_of_mixtures(HalfMoments), moments_of_mixtures
    ),
    "second moments with a tenth of their noise": Mutant(
        "MixedSources, add or remove",
        lambda: mixed_moments(QuieterMoments),
        mixed_moments,
    ),
    "a fit on both levels charged to one": Mutant(
        "SelectedSources, both levels",
        lambda: fit_of_both(charging_lower_alone(dpb.applications.SelectedSources)),
        fit_of_both,
    ),
    "a refit of both levels charged to one": Mutant(
        "Refitted, both levels",
        lambda: refit_of_both(charging_lower_alone(dpb.Refitted)),
        refit_of_both,
    ),
    "slope and constant that are not counted": Mutant(
        "Recalibration",
        lambda: recalibration(forgetting(dpb.applications.Recalibration, "fit")),
        recalibration,
    ),
    "curvature that is not counted": Mutant(
        "Recalibration",
        lambda: recalibration(forgetting(dpb.applications.Recalibration, "curvature")),
        recalibration,
    ),
    "curvature with a tenth of its noise": Mutant(
        "Recalibration", lambda: recalibration(QuieterCurvature), recalibration
    ),
    "scales of a gradient that is not counted": Mutant(
        "ScaledGroups",
        lambda: scaled(forgetting(dpb.applications.ScaledGroups, "screen")),
        scaled,
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

MUTANTS |= {name: Mutant(*parts) for name, parts in mutants_gibo.MUTANTS.items()}
