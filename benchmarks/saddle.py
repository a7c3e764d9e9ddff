"""How the strong gap of private saddle-point methods falls with the number of records.

One pass and many passes, with the parameters that minimize the bounds, on families
whose gap is known: a fixed vector per record on a ball (the instance of the lower
bounds), x'Ay + b'x - c'y on two balls, and matrix games with entries -1 or 1. Several
passes take at most n steps, as the theory asks of NISPP. Another table compares the
methods with one noisy mean matrix.

`python -m benchmarks saddle`; `--only=matrix` stops after the second table. Prints the
tables of results/games.md, which also go to runs/saddle. NON-PRIVATE evaluation.
"""

import dataclasses
import math
import pathlib
import time
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

FOLDER = pathlib.Path("runs/saddle")
KEYS = 10
SIDE = 5
BUDGET = dpb.PrivacyBudget(1.0, 1e-6)
# Cost of d = 10 coordinates in privacy: sqrt(d log(1 / delta)) / epsilon.
PRIVACY = math.sqrt(2 * SIDE * math.log(1 / BUDGET.delta)) / BUDGET.epsilon
METHODS = {
    "NSEG": dpb.games.NoisyExtragradient,
    "NISPP": dpb.games.InexactProximalPoint,
}
SINGLE = (1_000, 3_000, 10_000, 30_000, 100_000)
MULTI = (500, 1_000, 2_000, 5_000, 10_000)


@dataclasses.dataclass(frozen=True)
class Variant:
    """A method, how often it goes over the records, and for how many of them."""

    method: str
    passes: str
    sizes: tuple[int, ...]

    @property
    def name(self):
        """Name in a table."""
        return f"{self.method}, {self.passes} pass"


VARIANTS = (
    Variant("NSEG", "single", SINGLE),
    Variant("NISPP", "single", SINGLE),
    Variant("NSEG", "multi", MULTI),
    Variant("NISPP", "multi", MULTI),
)


@dataclasses.dataclass(frozen=True)
class Family:
    """Problems of one kind: records drawn from a law whose saddle point is known."""

    problem: dpb.games.SaddleProblem | dpb.games.VariationalInequality
    w0: tuple
    draw: Callable  # (key, n) -> records
    gap: Callable  # w -> the strong gap on the law of the records
    mean: object  # the record whose operator is the mean of all


def signs(key, mean, n):
    """Independent signs with this mean, one array like it per record."""
    uniform = jax.random.uniform(key, (n, *mean.shape))
    return jnp.where(uniform < (1 + mean[None]) / 2, 1.0, -1.0)


def constant(n):
    d = 2 * SIDE
    force = min(0.6, n**-0.5 + PRIVACY / n)
    mean = jnp.full(d, force)

    problem = dpb.games.VariationalInequality(
        lambda w, z: z, w_set=dpb.sets.Ball(0.5), lipschitz=0.0, bound=1.0
    )
    unit = 1 / d**0.5
    law = games.constant_operator(mean[None] / d**0.5, radius=0.5)

    def draw(key, n):
        return unit * signs(key, mean, n)

    return Family(problem, law.w0, draw, law.gap, unit * mean)


def bilinear(_):
    rng = np.random.default_rng(0)
    means = [
        jnp.asarray(rng.uniform(-0.6, 0.6, shape), jnp.result_type(float))
        for shape in ((SIDE, SIDE), (SIDE,), (SIDE,))
    ]
    # Entries are signs over these, so that |A| <= 1/2 and |b|, |c| <= 1/4.
    units = (1 / (2 * SIDE), 1 / (4 * SIDE**0.5), 1 / (4 * SIDE**0.5))
    a, b, c = (unit * mean for unit, mean in zip(units, means, strict=True))
    radius = 0.5

    def payoff(x, y, z):
        return x @ z["a"] @ y + z["b"] @ x - z["c"] @ y

    def draw(key, n):
        keys = jax.random.split(key, 3)
        found = zip("abc", keys, means, units, strict=True)
        return {name: unit * signs(k, mean, n) for name, k, mean, unit in found}

    ball = dpb.sets.Ball(radius)
    problem = dpb.games.SaddleProblem(
        payoff, x_set=ball, y_set=ball, lipschitz=0.5, bound=math.sqrt(0.5)
    )
    law = games.bilinear_saddle(a[None], b[None], c[None], radius=radius)
    return Family(problem, law.w0, draw, law.gap, {"a": a, "b": b, "c": c})


def matrix(_, rows=SIDE, columns=SIDE):
    rng = np.random.default_rng(1)
    return around(rng.uniform(-0.6, 0.6, (rows, columns)))


def around(mean):
    """Return the matrix game of records with entries of -1 or 1 and this mean."""
    mean = jnp.asarray(mean, float)
    law = games.matrix_game(mean[None])
    problem = dpb.games.matrix_game(*mean.shape)
    return Family(problem, law.w0, lambda key, n: signs(key, mean, n), law.gap, mean)


FAMILIES = {"constant": constant, "bilinear": bilinear, "matrix game": matrix}


def evaluated(family, solver, n):
    """Return the gap of every key's answer, by a calibrated solver."""

    @jax.jit
    def one(solver, key):
        key_data, key_noise = jax.random.split(key)
        records = family.draw(key_data, n)
        answer = dpb.solve(family.problem, solver, records, family.w0, key=key_noise)
        return family.gap(answer.value)

    return [float(one(solver, k)) for k in jax.random.split(jax.random.key(0), KEYS)]


def tuned(kind, problem, n, dimension, passes, most_steps):
    """Return the solver of `tuned`, even if that refuses its bound."""
    constants = TheoremConstants.of(problem, dimension, n)
    return kind(**kind.tuned_fields(constants, BUDGET, passes, most_steps))


def unhidden(family, solver):
    """Return the gap of the same steps on the true mean, without noise."""
    exact = dataclasses.replace(
        solver, sampling=dpb.FullBatch(), noise_multiplier=0.0, sizes=1
    )
    record = jax.tree.map(lambda v: jnp.asarray(v, float)[None], family.mean)
    run = jax.jit(dpb.solve)
    answer = run(family.problem, exact, record, family.w0, key=jax.random.key(0))
    return float(family.gap(answer.value))


def gaps(name, variant, n):
    """Return the gap per key, its bound, the steps, and the gap without noise."""
    family = FAMILIES[name](n)
    # Noise across a simplex is projected away, but a proximal point rounds there, too.
    nseg = variant.method == "NSEG"
    dimension = family.problem.w_set.dimension(family.w0) if nseg else 2 * SIDE
    given = family.problem, n, dimension, variant.passes, n
    solver = tuned(METHODS[variant.method], *given)
    solver = dpb.calibrate(family.problem, solver, BUDGET, sizes=n, w0=family.w0).solver
    promised = solver.bound(family.problem, dimension=dimension)
    found = evaluated(family, solver, n)
    return found, promised, solver.num_steps, unhidden(family, solver)


def slope(sizes, values):
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def measure(name):
    """Rows by variant: sizes, gaps per size and key, bounds and steps per size."""
    print(f"{name}; at the start {start_gap(name):.3f}", flush=True)
    rows = {}
    for variant in VARIANTS:
        found = []
        for n in variant.sizes:
            clock = time.perf_counter()
            # In float32, rounding of a proximal point in large batches is refused.
            with jax.enable_x64(variant.method == "NISPP"):
                found.append(gaps(name, variant, n))
            values, bound, steps, without = found[-1]
            text = f"{pages.spread(values, '.2e')}, bound {bound:.2e}, without noise "
            text += f"{without:.2e}, {steps} steps, {time.perf_counter() - clock:.1f} s"
            print(f"  {variant.name}, n = {n}: {text}", flush=True)
        values, *rest = zip(*found, strict=True)
        rows[variant.name] = variant.sizes, np.asarray(values), *rest
    return rows


def start_gap(name):
    family = FAMILIES[name](MULTI[-1])
    return float(family.gap(family.w0))


def table(results):
    """Medians over keys and fitted slopes, as Markdown."""
    head = ("family", "method", "n", "steps", "gap", "without noise", "slope")
    lines = []
    for family, rows in results.items():
        for name, (sizes, found, bounds, steps, without) in rows.items():
            medians = np.median(found, axis=1)
            lines.append([family, name])
            lines[-1] += [f"{pair[0]} to {pair[-1]}" for pair in (sizes, steps)]
            pairs = medians, without
            lines[-1] += [f"{pair[0]:.4f} to {pair[-1]:.4f}" for pair in pairs]
            slopes = slope(sizes, medians), slope(sizes[-2:], medians[-2:])
            slopes += (slope(sizes, bounds),)
            lines[-1] += [f"{value:.2f}" for value in slopes]
    return pages.table([*head, "at the end", "of the bound"], lines)


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
    """Return the solvers of the table by name; `None` stands for a linear program."""
    nseg = METHODS["NSEG"]
    tail = {"output": dpb.outputs.TailMean(0.5)}
    rounds = nseg(25, 2.0, 0.2, **tail)
    return {
        "NSEG, one pass, tuned": tuned(nseg, problem, n, dimension, "single", n),
        "`NoisyExtragradient`, 100 steps": nseg(100, 2.0, 0.2, **tail),
        "the same, steps of the entropy": nseg(100, 2.0, 0.3, **tail),
        "`RecursiveRegularization`, 4 x 25 steps": dpb.games.RecursiveRegularization(
            rounds, 4, 0.03
        ),
        "noisy matrix, linear program": None,
        "`NoisyPayoff`, the default": dpb.games.NoisyPayoff(),
    }


def with_entropy(family):
    """Return the family on simplices that are stepped through by the entropy."""
    mirrored = dpb.sets.Simplex(entropy=True)
    game = dataclasses.replace(family.problem, x_set=mirrored, y_set=mirrored)
    return dataclasses.replace(family, problem=game)


def pure_game(make, n, *shape):
    """Return the mean gap over keys of every method, on the law of fresh records."""
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


def pure_games():
    """Return the table of results/games.md on matrix games alone."""
    columns = {}
    for name, (make, *numbers) in GAMES.items():
        print(name, flush=True)
        columns[name] = pure_game(make, *numbers)
    methods = next(iter(columns.values()))
    rows = [[m, *(column[m] for column in columns.values())] for m in methods]
    return pages.table(("method", *columns), rows)


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
    """Return the optimal mixtures of both players, by linear programming."""

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
    pure = pure_games()
    print(pure)
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "matrix_game.md").write_text(pure + "\n")
    if pages.options().get("only") == "matrix":
        return
    text = table({name: measure(name) for name in FAMILIES})
    print(text)
    (FOLDER / "table.md").write_text(text + "\n")
