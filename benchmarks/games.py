"""Worth of group games: `python -m benchmarks games`, or with `--task=NAME`.

The setting with the best median of 2 keys ON THE TEST RECORDS runs for 10 keys;
NON-PRIVATE evaluation. Writes results/games.md if all tasks ran.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import scipy.optimize

import dpbilevel as dpb
from dpbilevel.cli.tables import read_csv
from dpbilevel.core.plan import least_multiplier
from dpbilevel.games.base import TheoremConstants
from tests.zoo import games as zoo

from . import pages
from .source_tasks import WORK, encoded, parts
from .utility import widened

TRAINING, KEYS, TRIALS = 26_000, 10, 2
RADIUS = 20.0
BUDGET = dpb.PrivacyBudget(1.0, 1e-5)
MATRIX_BUDGET = dpb.PrivacyBudget(1.0, 1e-6)
TAIL = dpb.outputs.TailMean()
# Steps, clip norms and step sizes.
AVERAGE = ((100, 1, 8), (100, 1, 16), (200, 1, 8), (200, 1, 16))
EQUAL = ((100, 1, 16), (100, 2, 16), (200, 2, 8), (100, 4, 8), (100, 7, 8))
GAMES = ((100, 2, 8), (100, 2, 16), (100, 4, 8), (100, 1.5, 16))


def split(features, label, group, shares):
    order = np.random.default_rng(0).permutation(len(label))
    rows = order[:TRAINING], order[TRAINING:]
    training, test = parts(features.astype("f4"), label.astype("f4"), rows)
    training["group"], test["group"] = (jnp.asarray(group[r], jnp.int32) for r in rows)
    return training, test, shares


def census(groups, columns=None):
    table = read_csv(pages.ADULT)
    features, label = encoded(table, columns)
    male = (pages.texts(table, "sex") == "Male").astype(int)
    races = ["White", "Black", "Asian-Pac-Islander"]
    race = [races.index(r) if r in races else 3 for r in pages.texts(table, "race")]
    race = np.array(race)
    group, shares = {
        "sex and income": (2 * male + (label > 0), (0.29, 0.04, 0.47, 0.20)),
        "sex": (male, (0.33, 0.67)),
        "race": (race, (0.85, 0.10, 0.03, 0.02)),
        "sex and race": (2 * male + (race > 0), (0.27, 0.06, 0.59, 0.08)),
    }[groups]
    return split(features, label, group, shares)


def generated():
    rng = np.random.default_rng(1)
    n = TRAINING + 6_500
    features = np.concatenate([rng.normal(size=(n, 20)), np.ones((n, 1))], 1)
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    sex = (rng.random(n) < 0.67).astype(int)
    margin = 6 * features[:, :20] @ rng.normal(size=20) / 20**0.5 - 2 + 1.2 * sex
    features[:, 20] += 0.3 * sex
    label = np.where(rng.random(n) < 1 / (1 + np.exp(-4 * margin)), 1, -1)
    return split(features, label, 2 * sex + (label > 0), (0.3, 0.03, 0.52, 0.15))


TASKS = {
    "census, sex and income": functools.partial(census, "sex and income"),
    "census, sex": functools.partial(census, "sex"),
    "census, race": functools.partial(census, "race"),
    "census, columns about work, sex and race": functools.partial(
        census, "sex and race", WORK[:3]
    ),
    "generated, sex and label": generated,
}


def descent(loss, steps, clip, size):
    problem = dpb.FiniteSum(loss, w_set=dpb.sets.Ball(RADIUS))
    return problem, dpb.NoisyGD(steps, clip, step_size=size, output=TAIL)


def equal_weights(shares):
    weights = 1 / (len(shares) * np.asarray(shares))

    def loss(x, record):
        weight = jnp.asarray(weights, x.dtype)[record["group"]]
        return weight * dpb.logistic_loss(x, record)

    return loss


def methods(shares, size):
    games, logistic = dpb.games, dpb.Logistic()
    fair = games.group_fair(logistic, shares, radius=RADIUS)
    scaled = games.group_fair(logistic, shares, radius=RADIUS, scale=6.0)
    single = {"inner_steps": 1, "dimension": size + len(shares), "output": TAIL}
    steps = [games.NoisyExtragradient(*s, output=TAIL) for s in GAMES]
    points = [games.InexactProximalPoint(t, c, 1 / e, **single) for t, c, e in GAMES]
    return {
        "average loss, `NoisyGD`": [descent(dpb.logistic_loss, *s) for s in AVERAGE],
        "equal weights, `NoisyGD`": [descent(equal_weights(shares), *s) for s in EQUAL],
        "`NoisyExtragradient`": [(scaled, solver) for solver in steps],
        "`InexactProximalPoint`, one inner step": [(scaled, p) for p in points],
        "`GroupDescent`": [(fair, games.GroupDescent())],
        "game without privacy": [(fair, games.GroupDescent(2_000))],
    }


def models(problem, solver, data, start, count):
    double = isinstance(solver, dpb.games.InexactProximalPoint)  # or rounding is large
    with jax.enable_x64(double):
        data, start = widened((data, start)) if double else (data, start)
        plan = dpb.calibrate(problem, solver, BUDGET, sizes=TRAINING, w0=start)
        assert plan.report.status is dpb.privacy.Status.ENFORCED
        solver, run = plan.solver, jax.jit(dpb.solve)
        if solver.num_steps == 2_000:  # the reference without privacy
            solver, count = solver.with_noise(0.0), 1
        for key in jax.random.split(jax.random.key(0), count):
            value = run(problem, solver, data, start, key=key).value
            yield np.asarray(value[0] if isinstance(value, tuple) else value, "f4")


def worst_loss(test, shares):
    """Return a function from a model to the largest mean loss of a group."""
    groups, loss = len(shares), dpb.logistic_loss
    return jax.jit(lambda x: jnp.max(dpb.debug.group_losses(loss, x, test, groups)))


def evaluate(data, test, shares):
    zeros, loss = jnp.zeros(data["features"].shape[1]), worst_loss(test, shares)

    def worst(problem, solver, count):
        start = zeros
        if isinstance(problem, dpb.games.GroupGame):
            start = dpb.games.group_start(problem, zeros, shares)
        found = models(problem, solver, data, start, count)
        return [float(loss(x)) for x in found]

    rows = {}
    for name, pairs in methods(shares, len(zeros)).items():
        trials = [worst(*pair, TRIALS) for pair in pairs] if len(pairs) > 1 else [[0]]
        best = pages.best_of(trials, higher_is_better=False)
        rows[name] = worst(*pairs[trials.index(best)], KEYS)
        print(f"  {name}: {np.median(rows[name]):.4f}", flush=True)
    return rows


def main():
    names = pages.chosen(TASKS)
    if not pages.ADULT.is_file():
        print(f"census: left out, there is no {pages.ADULT.name}")
        names = [name for name in names if not name.startswith("census")]
    tasks = {name: TASKS[name]() for name in names}
    settings = {"higher_is_better": False, "complete": len(tasks) == len(TASKS)}
    pages.compare("games", tasks, evaluate, "loss of the worst group", **settings)


@dataclasses.dataclass(frozen=True)
class Family:
    """A matrix game, and records drawn from a law whose saddle point is known."""

    problem: dpb.games.SaddleProblem
    w0: tuple
    gap: Callable  # w -> the strong gap on the law of the records
    mean: jax.Array  # of the records

    def draw(self, key, n):
        """Return records whose entries are -1 or 1."""
        uniform = jax.random.uniform(key, (n, *self.mean.shape))
        return jnp.where(uniform < (1 + self.mean) / 2, 1.0, -1.0)


def matrix(rows, columns):
    rng = np.random.default_rng(1)
    return around(rng.uniform(-0.6, 0.6, (rows, columns)))


def around(mean):
    mean = jnp.asarray(mean, float)
    law = zoo.matrix_game(mean[None])
    return Family(dpb.games.matrix_game(*mean.shape), law.w0, law.gap, mean)


def evaluated(family, problem, solver, n):
    @jax.jit
    def one(solver, key):
        key_data, key_noise = jax.random.split(key)
        records = family.draw(key_data, n)
        answer = dpb.solve(problem, solver, records, family.w0, key=key_noise)
        return family.gap(answer.value)

    return [float(one(solver, k)) for k in jax.random.split(jax.random.key(0), KEYS)]


def sparse(side):
    rng = np.random.default_rng(1)
    mean, good = rng.uniform(-0.2, 0.2, (side, side)), 3
    mean[:good] -= 0.5
    mean[:, :good] += 0.5
    mean[:good, :good] = rng.uniform(-0.5, 0.5, (good, good))
    return around(mean)


# How games are made, their records, and their rows and columns.
MATRICES = {
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
    tuned = nseg(**nseg.tuned_fields(constants, MATRIX_BUDGET, "single", n))
    tail = {"output": dpb.outputs.TailMean(0.5)}
    rounds = dpb.games.RecursiveRegularization(nseg(25, 2.0, 0.2, **tail), 4, 0.03)
    return {
        "NSEG, one pass, tuned": tuned,
        "`NoisyExtragradient`, 100 steps": nseg(100, 2.0, 0.2, **tail),
        "the same, steps of the entropy": nseg(100, 2.0, 0.3, **tail),
        "`RecursiveRegularization`, 4 x 25 steps": rounds,
        "noisy matrix, linear program": None,
        "`NoisyPayoff`, the default": dpb.games.NoisyPayoff(),
    }


def pure_game(make, n, *shape):
    family = make(*shape)
    dimension, found = family.problem.w_set.dimension(family.w0), {}
    entropy = dpb.games.matrix_game(*family.mean.shape, entropy=True)
    found["uniform mixtures"] = [float(family.gap(family.w0))]
    for name, solver in solvers_of(family.problem, n, dimension).items():
        problem = entropy if "entropy" in name else family.problem
        if solver is None:
            found[name] = exact(family, n)
        else:
            options = {"sizes": n, "w0": family.w0}
            plan = dpb.calibrate(problem, solver, MATRIX_BUDGET, **options)
            found[name] = evaluated(family, problem, plan.solver, n)
        print(f"  {name}: {np.mean(found[name]):.4f}", flush=True)
    return {name: f"{np.mean(values):.4f}" for name, values in found.items()}


def exact(family, n):
    """Gaps of the saddle points of noisy mean matrices, each released once."""
    multiplier = least_multiplier(dpb.FullBatch(), 1, n, MATRIX_BUDGET)
    noise = dpb.privacy.Gaussian(multiplier, precision="float")
    settings = {"clip_norm": family.mean.size**0.5, "denominator": float(n)}

    @jax.jit
    def released(key):
        key_data, key_noise = jax.random.split(key)
        mean = dpb.privacy.clipped_mean(
            lambda v: v, family.draw(key_data, n), precision="float", **settings
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


def saddle():
    """Strong gaps of private methods on matrix games: `python -m benchmarks saddle`.

    Entries are -1 or 1, and the gap is that on the law of the records. Prints the table
    of results/games.md. NON-PRIVATE evaluation.
    """
    columns = {}
    for name, (make, *numbers) in MATRICES.items():
        print(name, flush=True)
        columns[name] = pure_game(make, *numbers)
    methods = next(iter(columns.values()))
    rows = [[m, *(column[m] for column in columns.values())] for m in methods]
    print(pages.table(("method", *columns), rows))
