"""Broken copies of gradient-informative Bayesian optimization."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp

import dpbilevel as dpb
from dpbilevel import audit
from dpbilevel.privacy.queries import Query
from dpbilevel.search import losses as told
from tests.search.test_gibo import planned_gibo, planned_portfolio

GIBO = dpb.search.GradientInformativeBO
OTHERS = 0.5  # the slope of everyone else's loss, below the clip norm


class ClippedMean(Query):
    """Averages over records first, then clips."""

    def read(self, fun, records, **_):
        mean = fun(jnp.mean(records, axis=0))
        clipped = mean * jnp.minimum(1, self.clip_norm / jnp.linalg.norm(mean))
        return dpb.privacy.Bounded(clipped, self.clip_norm / self.size)


class ClipsTheMean(GIBO):
    def release(self, problem, sizes):
        release = GIBO.release(self, problem, sizes)
        queries = tuple(ClippedMean(**vars(query)) for query in release.queries)
        return dataclasses.replace(release, queries=queries)


class FitsItsKernel(GIBO):
    """Takes the length-scale from how far losses are spread."""

    def tell(self, problem, state, asked, losses, *, key):
        kernel = dpb.search.RBF(1 / (1 + jnp.std(losses)))
        fitted = dataclasses.replace(self, kernel=kernel)
        return GIBO.tell(fitted, problem, state, asked, losses, key=key)


class Standardizes(GIBO):
    """Centres and scales losses over the records."""

    def tell(self, problem, state, asked, losses, *, key):
        centred = losses - jnp.mean(losses, axis=0, keepdims=True)
        losses = centred / (jnp.std(losses, axis=0, keepdims=True) + 1e-3)
        return GIBO.tell(self, problem, state, asked, losses, key=key)


class AsksByLosses(GIBO):
    """Moves its points to the side where losses are lower."""

    def ask(self, problem, state, *, key):
        asked = GIBO.ask(self, problem, state, key=key)
        slope = jnp.sum(state.history.losses @ state.history.points)
        side = 1e-3 * jnp.sign(slope - 1e3)
        return dataclasses.replace(asked, points=asked.points - side)


@functools.cache
def outcome(kind):
    """An audit where one of ten records has a huge slope, or everyone else's."""
    with jax.enable_x64(True):
        solver = planned_gibo(kind=kind).with_precision("float")
        problem = dpb.FiniteSum(lambda w, z: z * jnp.sum(w))
        same = jnp.full(10, OTHERS)
        return audit.trade_off(
            audit.SolverRun(problem, solver, jnp.zeros(1)),
            same.at[0].set(1e6),
            same,
            audit.ledger_claims(solver.ledger(problem, solver.sizes))["records"],
            key=jax.random.key(17),
            runs=20_000,
        )


class ForgetsTheDraw(GIBO):
    """Charges the gradients alone."""

    def ledger(self, problem, sizes):
        ledger = GIBO.ledger(self, problem, sizes)
        return dataclasses.replace(ledger, releases=ledger.releases[1:])


def raw_mean(losses, clip_range, size, precision):
    return dpb.privacy.Bounded(jnp.sum(losses) / size - clip_range / 2, 1.0)


class DrawsByRawLosses(GIBO):
    """Draws the start by losses that are not clipped."""

    def _draw_step(self, *args):
        with mock.patch.object(told, "clipped_loss", raw_mean):
            return GIBO._draw_step(self, *args)


@functools.cache
def drawn(kind):
    """An audit where one of ten records prefers the other end of a box."""
    with jax.enable_x64(True):
        solver = planned_portfolio(kind, share=0.8)
        problem = dpb.FiniteSum(lambda w, z: z * w[0], w_set=dpb.sets.Box(-1.0, 1.0))
        same = jnp.zeros(10)
        return audit.trade_off(
            audit.SolverRun(problem, solver, jnp.zeros(1)),
            same.at[0].set(1e6),
            same.at[0].set(-1e6),
            audit.ledger_claims(solver.ledger(problem, solver.sizes))["records"],
            key=jax.random.key(18),
            runs=20_000,
        )


def broken_draw(kind):
    return (
        "GradientInformativeBO, portfolio",
        functools.partial(drawn, kind),
        functools.partial(drawn, GIBO),
    )


def broken(kind):
    return (
        "GradientInformativeBO",
        functools.partial(outcome, kind),
        functools.partial(outcome, GIBO),
    )


MUTANTS = {
    "gradients clipped after averaging": broken(ClipsTheMean),
    "kernel fitted to private losses": broken(FitsItsKernel),
    "losses standardized over records": broken(Standardizes),
    "points chosen by losses": broken(AsksByLosses),
    "a draw of the start that is not counted": broken_draw(ForgetsTheDraw),
    "a start drawn by losses that are not clipped": broken_draw(DrawsByRawLosses),
}
