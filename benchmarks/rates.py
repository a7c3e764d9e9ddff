"""How errors of bilevel solvers fall with records, budget and coordinates.

1. The hypergradient at the answer on the problem of the zoo, with exact constants.
2. All solvers on `hard_instance` of `tests/zoo/two_levels.py`, the instance of the
   lower bound: the largest mean excess over means of the records from the bound to 1.

`python -m benchmarks rates` prints tables and draws results/lower_bound.svg.
NON-PRIVATE evaluation.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import dpbilevel as dpb
from dpbilevel.bilevel.penalty_plans import PenaltyPlanner, PenaltyTheorem
from tests.zoo import two_levels

from .pages import RESULTS, spread, table

FIGURE = RESULTS / "lower_bound.svg"
DELTA, KEYS, MEANS = 1e-5, 8, 9
START = 1.0  # the worst excess of x = 0
GAP = 2.0  # the most that values of F on the ball differ by
STEPS = 20
INNER_STEPS = 20  # of a round of LocalizedGD, where the theorem takes n^2
SAMPLER = dpb.draws.AlternatingSampler(dpb.draws.ConvexEnvelope(), 1e-8)
DRAWN = 1_000  # the most records for draws, which evaluate F many times


class Setting(NamedTuple):
    """Place where solvers are compared; what one axis changes."""

    records: int = 10_000
    epsilon: float = 1.0
    dimension_x: int = 10
    dimension_y: int = 10

    @property
    def budget(self):
        """The budget of a run."""
        return dpb.PrivacyBudget(self.epsilon, DELTA)

    @property
    def sizes(self):
        """Return sizes with as many records in both levels."""
        return dpb.Sizes(self.records, self.records, "disjoint")

    def noise(self, dimension):
        """sqrt(d log(1/delta)) / (n epsilon)."""
        logs = math.sqrt(dimension * math.log(1 / DELTA))
        return logs / (self.records * self.epsilon)


AXES = {
    "records": (300, 1_000, 3_000, 10_000, 30_000),
    "epsilon": (0.3, 1.0, 3.0),
    "dimension_x": (10, 40, 160),
    "dimension_y": (10, 40, 160),
}


def lower_bound(setting):
    return min(1.0, setting.noise(min(setting.dimension_x, setting.dimension_y)))


def accuracy(setting, constants):
    """Kornowski, Theorem 4, without its constant, where no loss of a record reads x."""
    scale = GAP ** (1 / 6) * constants.ell ** (5 / 6) * constants.kappa ** (11 / 6)
    root = math.sqrt(setting.dimension_y) / (setting.records * setting.epsilon)
    return scale * root ** (1 / 3)


def first_order_bound(setting):
    """Theorem 4, times the diameter, because F is convex."""
    problem = instance(setting._replace(records=2), 1.0).problem
    return 2 * accuracy(setting, problem.constants)


CURVES = {
    "lower bound": lower_bound,  # Lowy and Liu, Theorem 3.10, without its constant
    # On the records, without its constant: G D sqrt(...).
    "regularized draw, Theorem 3.3": lambda s: 2 * s.noise(s.dimension_x),
    "penalty, Theorem 4": first_order_bound,
}


def instance(setting, mean):
    n, d = setting.records, min(setting.dimension_x, setting.dimension_y)
    signs = np.where(np.arange(n) < round(n * (1 + mean) / 2), 1.0, -1.0)
    records = np.zeros((n, setting.dimension_y))
    records[:, :d] = signs[:, None] / math.sqrt(d)
    records = jnp.asarray(records)
    return two_levels.hard_instance(records, dimension_x=setting.dimension_x)


def certified(problem):
    """Return the problem with constants; its solutions stay in the ball without it.

    No record enters the lower level. `lower_yy_spread` is 0; draws need a positive one.
    """
    zeros = ["upper_x", "upper_xx", "upper_xy", "upper_yy", "lower_y_spread"]
    zeros.append("lower_xy_spread")
    zeros += [f"lower_{h}_in_{v}" for h in ("xy", "yy") for v in ("x", "y")]
    ones = ["strong_convexity", "solution_radius", "upper_y", "lower_xy", "lower_yy"]
    terms = "upper", "lower", "upper_public", "lower_public"
    constants = dpb.bilevel.SecondOrderConstants(
        **dict.fromkeys(ones, 1.0),
        **dict.fromkeys(zeros, 0.0),
        lower_y=2.0,
        lower_yy_spread=1e-6,
        per_record=True,
        terms=tuple(getattr(problem, name) for name in terms),
    )
    return dataclasses.replace(problem, y_set=dpb.sets.Euclidean(), constants=constants)


def solvers(setting, problem):
    """Every method that applies, with its problem.

    Steps of x add up to the inverse of the noise of a hypergradient, so that a mean of
    that norm moves x through the ball; noise of y that does not reach x is left out.
    The penalty grows as the theory asks.
    """
    proved = certified(problem)
    noise_x = min(1.0, setting.noise(setting.dimension_x))
    noise_y = min(1.0, setting.noise(min(setting.dimension_x, setting.dimension_y)))
    penalty = 2 * min(1.0, setting.noise(setting.dimension_y)) ** (-1 / 3)
    large, last = 4 / noise_x / STEPS, dpb.outputs.Last()
    yield "implicit", proved, dpb.ImplicitBilevel(STEPS, step_size=large, output=last)
    single = {"step_size": 1 / noise_y / STEPS, "lower_step_size": 0.5}
    loop = dpb.SingleLoopBilevel(STEPS, linear_step_size=0.5, **single)
    yield "single loop", proved, loop
    slow = {"step_size": 1 / noise_y / penalty / STEPS}
    inner = dpb.NoisyGD(2, clip_norm=1.0, step_size=0.3)
    yield "penalty", problem, dpb.PenaltyBilevel(STEPS, penalty, inner, **slow)
    first_order = dpb.bilevel.F2SA(STEPS, penalty, lower_step_size=0.5, **slow)
    yield "F2SA", problem, first_order
    difference = dpb.bilevel.FiniteDifferenceBilevel(STEPS, **single)
    yield "finite difference", problem, difference
    yield "Algorithms 1 + 2, tuned", problem, localized(setting, problem)
    if setting != Setting(setting.records):
        return
    if setting.records <= DRAWN:
        settings = {"dimension": setting.dimension_x, "convex": True}
        draw = dpb.draws.RegularizedExponentialMechanism(SAMPLER, **settings)
        yield "regularized draw", proved, draw
    yield "penalty, as in Theorem 4", problem, as_in_theorem(setting, problem, inner)


def localized(setting, problem):
    theorem = PenaltyTheorem.of("", problem, *setting[2:], GAP, population=False)
    given = "", theorem, problem, setting.budget, INNER_STEPS
    planner = PenaltyPlanner(dpb.PenaltyBilevel, *given)
    return planner.planned("localized", setting.sizes, {})


def as_in_theorem(setting, problem, inner):
    theorem = PenaltyTheorem.of("", problem, *setting[2:], GAP, population=False)
    alpha = accuracy(setting, theorem.constants)
    steps = math.ceil(GAP * theorem.smoothness / alpha**2)
    clip_norms = theorem.outer_lipschitz, theorem.constants.upper_lipschitz
    fields = {"step_size": 1 / theorem.smoothness, "output": dpb.outputs.SmallestStep()}
    penalty = theorem.smoothness / alpha
    return dpb.PenaltyBilevel(steps, penalty, inner, *clip_norms, **fields)


@functools.cache
def runner(setting):
    """Return compiled functions from solver, records, keys to excesses, by name.

    It serves all epsilons, whose solvers differ in numbers alone.
    """
    example = instance(setting, 0.5)
    lower, w0 = example.data.lower, example.w0

    def excess(problem, solver, records, key):
        data = dpb.Levels(records, lower)
        x = dpb.solve(problem, solver, data, w0, key=key).x
        shared = min(setting.dimension_x, setting.dimension_y)
        mean = jnp.mean(records, 0)[:shared]
        return jnp.linalg.norm(mean) - mean @ x[:shared]

    @jax.jit
    def run(problem, solver, datasets, keys):
        def over_keys(records):
            return jax.vmap(lambda key: excess(problem, solver, records, key))(keys)

        return jax.lax.map(over_keys, datasets)

    return example.problem, run


@functools.cache
def measure(setting):
    problem, run = runner(setting._replace(epsilon=1.0))
    means = np.geomspace(lower_bound(setting), 1.0, MEANS)
    datasets = jnp.stack([instance(setting, mean).data.upper for mean in means])
    keys = jax.random.split(jax.random.key(0), KEYS)
    worst = {}
    for name, chosen, solver in solvers(setting, problem):
        plan = dpb.calibrate(chosen, solver, setting.budget, sizes=setting.sizes)
        values = np.mean(run(chosen, plan.solver, datasets, keys), axis=1)
        worst[name], hardest = float(values.max()), means[values.argmax()]
        text = f"{worst[name]:.2e} at a mean of {hardest:.2e}"
        print(f"{setting}, {name}: {text}", flush=True)
    return worst


def measured():
    return {a: [measure(Setting()._replace(**{a: v})) for v in AXES[a]] for a in AXES}


def slope(values, results, start=START):
    """Fit the power of an axis, over results below half of those at the start."""
    rows = zip(values, results, strict=True)
    used = [(value, result) for value, result in rows if result < start / 2]
    if len(used) < 2:
        return None
    return np.polyfit(*np.log(np.transpose(used)), 1)[0]


def series(found, axis, name):
    rows = zip(AXES[axis], found[axis], strict=True)
    pairs = [(value, row[name]) for value, row in rows if name in row]
    return zip(*pairs, strict=True) if pairs else ((), ())


def names_of(found):
    return list(dict.fromkeys(name for row in found["records"] for name in row))


def points(curve, axis):
    return [curve(Setting()._replace(**{axis: value})) for value in AXES[axis]]


def tables(found):
    names, excesses, slopes = names_of(found), [], []
    bounds = [points(curve, "records") for curve in CURVES.values()]
    for n, row, *values in zip(AXES["records"], found["records"], *bounds, strict=True):
        cells = [row.get(name) for name in names] + values
        excesses.append([str(n), *("-" if v is None else f"{v:.2g}" for v in cells)])
    for axis, values in AXES.items():
        powers = [slope(*series(found, axis, name)) for name in names]
        for curve in CURVES.values():
            powers.append(slope(values, points(curve, axis), math.inf))
        slopes.append([axis, *("-" if p is None else f"{p:z.2f}" for p in powers)])
    head = [*names, *CURVES]
    yield table(["records", *head], excesses)
    yield table(["power of", *head], slopes)


def draw(found):
    # Narrow enough to be read on a phone.
    figure, panels = plt.subplots(4, 1, figsize=(4.8, 13.5), layout="constrained")
    colors = "#0072B2 #009E73 #E69F00 #CC79A7 #B8A800 #56B4E9 #D55E00 #7B3294".split()
    styles = dict(zip(CURVES, ("-", "--", ":"), strict=True))
    names = names_of(found)
    labels = {"records": "records per level, n", "epsilon": "epsilon"}
    labels |= {"dimension_x": "d_x", "dimension_y": "d_y"}
    for axes, (axis, values) in zip(panels, AXES.items(), strict=True):
        for name, curve in CURVES.items():
            bound = points(curve, axis)
            axes.plot(values, bound, styles[name], color="0.35", lw=1.3, label=name)
        for name, color, marker in zip(names, colors, "osD^X*vP", strict=False):
            where, results = series(found, axis, name)
            style = {"color": color, "marker": marker}
            axes.plot(where, results, lw=1.2, label=name, **style)
            for value, result in zip(where, results, strict=True):
                if result >= START / 2:
                    axes.plot(value, result, mfc="white", **style)
        axes.set(xscale="log", yscale="log", xlabel=labels[axis], ylabel="worst excess")
        axes.set_xticks(values, [f"{value:g}" for value in values])
        axes.yaxis.set_major_formatter("{x:g}")  # exponents would be too small
        axes.minorticks_off()
        axes.spines[["top", "right"]].set_visible(False)
    handles = panels[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper left", frameon=False)
    figure.savefig(FIGURE, metadata={"Date": None})


# -------------------------------------------------------------------- the quadratic

ZOO_KEYS, DIMENSION = 10, 10
ZOO_START = 1.1  # the norm of the hypergradient at the start
ZOO_SIZES = (1_000, 3_000, 10_000, 30_000, 100_000)
ZOO_BUDGET = dpb.PrivacyBudget(1.0, 1e-6)


def quadratic(n):
    """Return the problem of the zoo, with records around means 1/2 and -1/2 long.

    Their distances from the means are 1/2 in the mean.
    """
    rng = np.random.default_rng(0)
    mean = np.full(DIMENSION, 0.5 / DIMENSION**0.5)
    levels = (
        jnp.asarray(s * mean + 0.5 * rng.normal(size=(n, DIMENSION)) / DIMENSION**0.5)
        for s in (1, -1)
    )
    return two_levels.quadratic_bilevel(*levels, radius=1.0)


def solvers_of_zoo(n):
    growth = n / ZOO_SIZES[0]
    steps, penalty = round(20 * growth**0.5), 2.0 * growth ** (1 / 3)
    sizes = {"lower_step_size": 0.5, "linear_step_size": 0.5}
    norms = {"clip_norm": 2.0, "hessian_clip_norm": 2.0, "cross_clip_norm": 4.0}
    inner = dpb.NoisyGD(5, clip_norm=2.0, step_size=0.5)
    common = {"step_size": 0.2, "upper_clip_norm": 2.0}
    found = (
        dpb.PenaltyBilevel(steps, penalty, inner, clip_norm=4.0, **common),
        dpb.ImplicitBilevel(steps, step_size=0.2, output=dpb.outputs.Last()),
        dpb.SingleLoopBilevel(steps, **sizes, **norms, **common),
    )
    return {type(solver).__name__: solver for solver in found}


def quadratics():
    """Return median norms of the hypergradient at the answers, and fitted powers."""
    run, found, rows = jax.jit(dpb.solve), {}, []
    for n in ZOO_SIZES:
        example = quadratic(n)
        problem, data = example.problem, example.data
        sizes = problem.sizes_of(data, "disjoint")
        for name, solver in solvers_of_zoo(n).items():
            solver = dpb.calibrate(problem, solver, ZOO_BUDGET, sizes=sizes).solver
            keys = jax.random.split(jax.random.key(0), ZOO_KEYS)
            answers = [run(problem, solver, data, example.w0, key=k).x for k in keys]
            norms = [jnp.linalg.norm(example.hypergradient(x)) for x in answers]
            found.setdefault(name, []).append(np.median(norms))
            print(f"{n}, {name}: {spread(norms, '.2e')}", flush=True)
        rows.append([str(n), *(f"{medians[-1]:.2e}" for medians in found.values())])
    powers = [slope(ZOO_SIZES, medians, ZOO_START) for medians in found.values()]
    rows.append(["fitted power", *("-" if p is None else f"{p:.2f}" for p in powers)])
    return table(["records", *(f"`{name}`" for name in found)], rows)


def main():
    with jax.enable_x64(True):
        hardest = measured()
        print(quadratics(), *tables(hardest), sep="\n\n")
    draw(hardest)
