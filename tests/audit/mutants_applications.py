"""Broken copies of pipelines."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

import dpbilevel as dpb
from dpbilevel import audit
from dpbilevel.applications.mixed_sources import Mixture, moments_objective
from dpbilevel.bilevel.levels import Level, queries_of
from dpbilevel.privacy.queries import Query
from tests.applications.test_mixed_sources import planned_moments
from tests.applications.test_recalibration import planned_recalibration
from tests.applications.test_scaled_groups import planned_scaled
from tests.applications.test_selected_sources import (
    planned_fit_of_both,
    planned_selected,
)
from tests.audit.mutants_bilevel import charging_lower_alone
from tests.audit.runs import audited
from tests.cases import Mutant


class SealedAtHalf(Query):
    """Seals a mean with half of what a record moves."""

    def read(self, fun, records, **options):
        value = Query.read(self, fun, records, **options)
        return dataclasses.replace(value, contribution=value.contribution / 2)


LOWER = queries_of("lower")


def sealed_at_half(sound):
    def broken(clip_norm, sampling, sizes):
        queries, joint = sound(clip_norm, sampling, sizes)
        return tuple(SealedAtHalf(**vars(query)) for query in queries), joint

    return broken


def half_in_stage(stage):
    """A copy that takes the values of one stage for half as long as they are."""

    class Broken(dpb.applications.SelectedSources):
        def queries(self, name):
            sound = dpb.applications.SelectedSources.queries(self, name)
            return sealed_at_half(sound) if name == stage else sound

    return Broken


def forgetting(kind, name):
    """A copy that does not count one of its runs."""

    class Broken(kind):
        def ledger(self, problem, sizes):
            ledger = kind.ledger(self, problem, sizes)
            counted = [r for r in ledger.releases if not r.name.startswith(name)]
            return dataclasses.replace(ledger, releases=tuple(counted))

    return Broken


@functools.cache
def selected(kind=dpb.applications.SelectedSources):
    return audited(planned_selected(kind), runs=20_000)


@functools.cache
def fit_of_both(kind=dpb.applications.SelectedSources):
    return audited(planned_fit_of_both(kind), runs=20_000)


def of_selected(kind):
    return Mutant("SelectedSources", lambda: selected(kind), selected)


class QuieterMoments(dpb.applications.MixedSources):
    """Adds a tenth of the noise that is charged to second moments."""

    def stage_solver(self, name, outputs):
        solver = dpb.applications.MixedSources.stage_solver(self, name, outputs)
        if name not in ("moments", "remoments"):
            return solver
        return solver.with_noise(solver.run_noise.noise_multiplier / 10)


@functools.cache
def mixed_moments(kind=dpb.applications.MixedSources):
    return audited(planned_moments(kind), runs=20_000)


@functools.cache
def moments_of_mixtures(queries=LOWER):
    """A person whose gradient has another direction than in the neighbour."""
    models = jnp.eye(3)
    weighting = dpb.source_weighting(dpb.logistic_loss, 2)
    objective = moments_objective(weighting, Mixture(models, models[2]))
    level = Level(weighting, queries, objective)
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

    def stage_solver(self, name, outputs):
        solver = dpb.applications.Recalibration.stage_solver(self, name, outputs)
        if name != "curvature":
            return solver
        return solver.with_noise(solver.run_noise.noise_multiplier / 10)


@functools.cache
def recalibration(kind=dpb.applications.Recalibration):
    return audited(planned_recalibration(kind, "overlapping"), runs=20_000)


@functools.cache
def scaled(kind=dpb.applications.ScaledGroups):
    return audited(planned_scaled(kind), runs=20_000)


MUTANTS = {
    "a score charged at half of its clip norm": of_selected(half_in_stage("score")),
    "weights of kept sources after the clip": of_selected(half_in_stage("fit")),
    "a model of kept sources that is not counted": of_selected(
        forgetting(dpb.applications.SelectedSources, "fit")
    ),
    "second moments charged at half of their clip norm": Mutant(
        "MixedSources",
        lambda: moments_of_mixtures(sealed_at_half(LOWER)),
        moments_of_mixtures,
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
}
