"""Strong gaps of private methods on matrix games: `python -m benchmarks saddle`.

Entries are -1 or 1, and the gap is that on the law of the records. Prints the table of
results/games.md. NON-PRIVATE evaluation.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import scipy.optimize

import dpbilevel as dpb
from dpbilevel.core.plan import least_multiplier
from dpbilevel.games.base import TheoremConstants
from tests.zoo import games

from . import pages

KEYS = 10
SIDE = 5
BUDGET = dpb.PrivacyBudget(1.0, 1e-6)


@dataclasses.dataclass(frozen=True)
class Family:
    """A game, and records drawn from a law whose saddle point is known."""

    problem: dpb.games.SaddleProblem
    w0: tuple
    draw: Callable  # (key, n) -> records
    gap: Callable  # w -> the strong gap on the law of the records
    mean: object  # the record whose operator is the mean of all


def signs(key, mean, n):
    uniform = jax.random.uniform(key, (n, *mean.shape))
    return jnp.where(uniform < (1 + mean[None]) / 2, 1.0, -1.0)


def matrix(_, rows=SIDE, columns=SIDE):
    rng = np.random.default_rng(1)
    return around(rng.uniform(-0.6, 0.6, (rows, columns)))


def around(mean):
    """Return the matrix game of records with entries of -1 or 1 and this mean."""
    mean = jnp.asarray(mean, float)
    law = games.matrix_game(mean[None])
    problem = dpb.games.matrix_game(*mean.shape)
    return Family(problem, law.w0, lambda key, n: signs(key, mean, n), law.gap, mean)


def evaluated(family, solver, n):
    @jax.jit
    def one(solver, key):
        key_data, key_noise = jax.random.split(key)
        records = family.draw(key_data, n)
        answer = dpb.solve(family.problem, solver, records, family.w0, key=key_noise)
        return family.gap(answer.value)

    return [float(one(solver, k)) for k in jax.random.split(jax.random.key(0), KEYS)]


def sparse(n, side):
    """Return a game in which three rows and three columns are better than others."""
    rng = np.random.default_rng(1)
    mean, good = rng.uniform(-0.2, 0.2, (side, side)), 3
    mean[:good] -= 0.5
    mean[:, :good] += 0.5
    mean[:good, :good] = rng.uniform(-0.5, 0.5, (good, good))
    return around(mean)


# Name and records of the games that are small enough to be released whole.
GAMES = {
    "5 x 5, n = 1 000": (matrix, 1_000, 5, 5),
    "5 x 5, n = 20 000": (matrix, 20_000, 5, 5),
    "20 x 15, n = 1 000": (matrix, 1_000, 20, 15),
    "20 x 15, n = 5 000": (matrix, 5_000, 20, 15),
    "60 x 60, three good rows, n = 1 000": (sparse, 1_000, 60),
}


def solvers_of(problem, n, dimension):
    nseg = dpb.games.NoisyExtragradient
    constants = TheoremConstants.of(problem, dimension, n)
    # Even if `tuned` refuses its bound.
    tuned = nseg(**nseg.tuned_fields(constants, BUDGET, "single", n))
    tail = {"output": dpb.outputs.TailMean(0.5)}
    rounds = nseg(25, 2.0, 0.2, **tail)
    return {
        "NSEG, one pass, tuned": tuned,
        "`NoisyExtragradient`, 100 steps": nseg(100, 2.0, 0.2, **tail),
        "the same, steps of the entropy": nseg(100, 2.0, 0.3, **tail),
        "`RecursiveRegularization`, 4 x 25 steps": dpb.games.RecursiveRegularization(
            rounds, 4, 0.03
        ),
        "noisy matrix, linear program": None,
        "`NoisyPayoff`, the default": dpb.games.NoisyPayoff(),
    }


def with_entropy(family):
    mirrored = dpb.sets.Simplex(entropy=True)
    game = dataclasses.replace(family.problem, x_set=mirrored, y_set=mirrored)
    return dataclasses.replace(family, problem=game)


def pure_game(make, n, *shape):
    family = make(n, *shape)
    dimension, found = family.problem.w_set.dimension(family.w0), {}
    found["uniform mixtures"] = [float(family.gap(family.w0))]
    for name, solver in solvers_of(family.problem, n, dimension).items():
        chosen = with_entropy(family) if "entropy" in name else family
        if solver is None:
            found[name] = exact(chosen, n)
        else:
            options = {"sizes": n, "w0": chosen.w0}
            plan = dpb.calibrate(chosen.problem, solver, BUDGET, **options)
            found[name] = evaluated(chosen, plan.solver, n)
        print(f"  {name}: {np.mean(found[name]):.4f}", flush=True)
    return {name: f"{np.mean(values):.4f}" for name, values in found.items()}


def exact(family, n):
    """Gaps of the saddle points of noisy mean matrices, each released once."""
    noise = dpb.privacy.Gaussian(
        least_multiplier(dpb.FullBatch(), 1, n, BUDGET), precision="float"
    )

    @jax.jit
    def released(key):
        key_data, key_noise = jax.random.split(key)
        mean = dpb.privacy.clipped_mean(
            lambda record: record,
            family.draw(key_data, n),
            clip_norm=math.prod(family.mean.shape) ** 0.5,
            denominator=float(n),
            precision="float",
        )
        return noise.release(mean, key=key_noise)

    keys = jax.random.split(jax.random.key(0), KEYS)
    answers = [mixtures(np.asarray(released(key), float)) for key in keys]
    return [float(family.gap(answer)) for answer in answers]


def mixtures(matrix):
    def best(payoff):
        """Return the mixture whose largest payoff over the columns is least."""
        m, k = payoff.shape
        below = {"A_ub": np.c_[payoff.T, -np.ones(k)], "b_ub": np.zeros(k)}
        mixture = {"A_eq": np.r_[np.ones(m), 0][None], "b_eq": [1]}
        bounds = [(0, None)] * m + [(None, None)]
        value = np.r_[np.zeros(m), 1]
        found = scipy.optimize.linprog(value, bounds=bounds, **below, **mixture)
        return jnp.asarray(found.x[:m], jnp.float32)

    return best(matrix), best(-matrix.T)


def main():
    columns = {}
    for name, (make, *numbers) in GAMES.items():
        print(name, flush=True)
        columns[name] = pure_game(make, *numbers)
    methods = next(iter(columns.values()))
    rows = [[m, *(column[m] for column in columns.values())] for m in methods]
    print(pages.table(("method", *columns), rows))
