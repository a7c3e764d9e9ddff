"""Broken copies of solvers of two levels."""

import dataclasses
import functools
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp

import dpbilevel as dpb
from dpbilevel.audit.worst_cases import BEYOND
from dpbilevel.bilevel.certificates import certified, sensitivities
from dpbilevel.bilevel.certificates.fixed_count import Spectrum
from dpbilevel.bilevel.levels import lower_level
from dpbilevel.privacy.per_example.clipping import unsealed
from dpbilevel.privacy.queries import Query
from dpbilevel.privacy.releases import Release
from tests.applications.test_warm_start import planned_refit_of_both
from tests.audit.mutants_onelevel import SameInEveryRun, reuse
from tests.audit.runs import audited, claim_of
from tests.bilevel.test_finite_difference import planned_differences
from tests.bilevel.test_implicit import planned_implicit
from tests.bilevel.test_penalty import CANARY_INNER, planned_penalty
from tests.bilevel.test_single_loop import planned_single_loop
from tests.cases import Mutant, with_mechanism


@functools.cache
def sound_penalty(**fields):
    return audited(planned_penalty("overlapping", **fields))


class Silent(dpb.privacy.Gaussian):
    """Releases without noise and says nothing."""

    def release(self, bounded, *, key):
        return unsealed(bounded)


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
        level = lower_level(problem, state.x)
        queries, _ = level.queries(0.5, self.sampling, self.sizes)
        release = Release("exact", 1, queries, dpb.privacy.Gaussian(precision="float"))
        exact = release.read(level.record_gradients(state.y), data, key=key_batch).raw
        warm = eqx.tree_at(lambda s: s.y, state, state.y - exact)
        return dpb.PenaltyBilevel.step(self, problem, data, warm, key=key)


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
def refit_of_both(kind=dpb.Refitted):
    return audited(planned_refit_of_both(kind), runs=20_000, person="upper")


def of_penalty(broken, sound=sound_penalty):
    return Mutant("PenaltyBilevel, overlapping", broken, sound)


def of_implicit(broken, sound=sound_implicit):
    return Mutant("ImplicitBilevel, overlapping", broken, sound)


def of_single_loop(broken, sound=lambda: audited(planned_single_loop("shared"))):
    return Mutant("SingleLoopBilevel, shared", broken, sound)


MUTANTS = {
    "overlapping people accounted as disjoint": of_penalty(
        # As many runs as of the sound one, which are then one program.
        lambda: audited(
            planned_penalty("overlapping"), claim_of(planned_penalty("disjoint"))
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
    "key reused across levels": of_penalty(
        lambda: reuse(short_penalty(SameInEveryRun(2, 0.5, step_size=0.1))),
        lambda: reuse(short_penalty(CANARY_INNER)),
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
    "a refit of both levels charged to one": Mutant(
        "Refitted, both levels",
        lambda: refit_of_both(charging_lower_alone(dpb.Refitted)),
        refit_of_both,
    ),
}
