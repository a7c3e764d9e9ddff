"""Share a mobile clinic's days among sites so that no group travels too far, privately.

A record is a resident: a group and the minutes of travel to each of six sites. In a
bilinear game, x holds the fraction of days at each site and y the weights of groups.
Its value is the mean travel of the worst-off group. `NoisyPayoff` releases the mean
table once and solves the game. At epsilon = 1 it is far better than one level, which is
`NoisyGD` on the average resident or with equal weights of the groups. It does NOT beat
a linear program on a noisy table, whose entries of large groups have less noise.

Every method has the same budget. Settings were chosen on records like these. Fractions
of the groups are declared, never computed. The minutes of test residents and the
oracle, which is the game without noise, are NON-PRIVATE.

    python examples/fair_allocation.py [--smoke] [--out runs/fair_allocation]
"""

import argparse
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import linprog

import dpbilevel as dpb

SHARES = np.array([0.55, 0.25, 0.12, 0.08])  # declared fractions of the groups
TOWNS_KM = np.array([[0, 0], [9, 2], [-4, 10], [7, -8]])  # where the groups live
SITES_KM = np.array([[0, 1], [5, 3], [9, 1], [-3, 7], [6, -6], [2, -1]])
LONGEST_MINUTES, MINUTES_PER_KM = 60.0, 4.0
GROUPS, SITES, RESIDENTS = len(SHARES), len(SITES_KM), 3_000
LENGTH = SITES**0.5  # no `travel` is longer


def residents(count, seed):
    """Generate residents around the towns of their groups."""
    rng = np.random.default_rng(seed)
    group = rng.choice(GROUPS, count, p=SHARES)
    home_km = TOWNS_KM[group] + 2.5 * rng.normal(size=(count, 2))
    distance_km = np.linalg.norm(home_km[:, None] - SITES_KM, axis=2)
    minutes = 5 + MINUTES_PER_KM * distance_km * rng.lognormal(0, 0.2, (count, 1))
    minutes = minutes.clip(0, LONGEST_MINUTES).astype("f4")
    return jax.tree.map(jnp.asarray, {"minutes": minutes, "group": group})


def travel(record):
    """Return the travel to each site in [-1, 1], from 0 to the longest minutes."""
    return jnp.clip(2 * record["minutes"] / LONGEST_MINUTES - 1, -1, 1)


def table(record):
    """Return a resident's part of the table of minutes by site and group."""
    return jnp.outer(travel(record), jax.nn.one_hot(record["group"], GROUPS))


def weighted(factors):
    """Return the loss of a mixture x for a resident, times a factor of the group."""
    factors = jnp.asarray(factors, jnp.float32)
    return lambda x, record: factors[record["group"]] * (x @ travel(record))


def solve_program(sums):
    """Return the shares of days that are best for a released table."""
    means, days = np.asarray(sums) / SHARES, np.r_[np.ones(SITES), 0]
    rows = np.hstack([means.T, -np.ones((GROUPS, 1))])  # the last variable is the value
    bounds = [(0, None)] * SITES + [(None, None)]
    found = linprog(1 - days, rows, np.zeros(GROUPS), [days], [1], bounds)
    return jnp.asarray(found.x[:-1], jnp.float32)


def methods():
    """Return by name the problem, solver and initial point, and how to read x."""
    x, y, found = jnp.full(SITES, 1 / SITES), jnp.asarray(SHARES, jnp.float32), {}
    factors = {"average resident": np.ones(GROUPS), "equal groups": 1 / SHARES / GROUPS}
    for name, factor in factors.items():
        one = dpb.FiniteSum(weighted(factor), w_set=dpb.sets.Simplex())
        descent = dpb.NoisyGD(50, LENGTH * float(max(factor)), step_size=0.1)
        found[f"{name}, NoisyGD"] = one, descent, x, jnp.asarray
    # A step of 1 from zero on a linear loss leads to the noisy mean of the tables.
    mean = dpb.FiniteSum(lambda w, record: -jnp.vdot(w, table(record)))
    once, zero = dpb.NoisyGD(1, LENGTH, step_size=1.0), jnp.zeros((SITES, GROUPS))
    found["noisy table, program"] = mean, once, zero, solve_program
    most = LENGTH / float(min(SHARES))
    game = dpb.games.BilinearGame(lambda r: table(r) / y, coefficient_bound=most)
    found["game, NoisyPayoff"] = game, dpb.games.NoisyPayoff(), (x, y), lambda w: w[0]
    return found


def worst_minutes(x, test):
    """Return the mean travel of the group that is worst off, in minutes."""
    minutes, group = np.asarray(test["minutes"] @ x), np.asarray(test["group"])
    return max(float(np.mean(minutes[group == g])) for g in range(GROUPS))


def main(smoke: bool, out: pathlib.Path) -> None:
    """Run all methods at equal budgets and compare what they release."""
    training, test = residents(RESIDENTS, seed=0), residents(20_000, seed=1)
    keys = jax.random.split(dpb.root_key(), 5 if smoke else 15)  # as many budgets
    found, run = {}, jax.jit(dpb.solve)
    for name, (problem, solver, w0, read) in list(methods().items())[2 * smoke :]:
        for epsilon in (1.0,) if smoke else (1.0, 4.0):
            budget = dpb.PrivacyBudget(epsilon, delta=1e-5)
            plan = dpb.calibrate(problem, solver, budget, sizes=RESIDENTS, w0=w0)
            runs = [run(problem, plan.solver, training, w0, key=k).value for k in keys]
            found[name, epsilon] = [worst_minutes(read(w), test) for w in runs]
    print(plan.report)  # the guarantee of the last method
    quiet = plan.solver.with_noise(1e-6)  # NON-PRIVATE
    best, _ = run(problem, quiet, training, w0, key=keys[0]).value
    lines = {"oracle": best, "equal days, no records": w0[0]}
    lines = {name: worst_minutes(x, test) for name, x in lines.items()}
    print("NON-PRIVATE evaluation: minutes of the worst-off group, test residents")
    for (name, epsilon), values in found.items():
        low, middle, high = np.min(values), np.median(values), np.max(values)
        print(f"  {name:25}  {epsilon=:g}: {middle:.1f} ({low:.1f} to {high:.1f})")
    print(*(f"  {name}: {value:.1f}" for name, value in lines.items()), sep="\n")
    print("NoisyPayoff does NOT beat the noisy table with its linear program.")
    if not smoke:
        draw(found, lines, out)
    middle = {name: np.median(v) for (name, e), v in found.items() if e == 1}
    *single, program, game = middle.values()
    assert game < min([*single, lines["equal days, no records"]]) - 1
    assert abs(game - program) < 2.5


def draw(found, lines, out: pathlib.Path) -> None:
    """Save a figure of the minutes of all runs."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    axes, names = figure.subplots(), [f"{n}, epsilon {e:g}" for n, e in found]
    for i, values in enumerate(found.values()):
        axes.plot(values, [-i] * len(values), ".", color=("#D55E00", "#0072B2")[i % 2])
    for (name, value), style in zip(lines.items(), ("--", ":"), strict=True):
        axes.axvline(value, color="0.4", linestyle=style, label=name)
    axes.set_yticks(-np.arange(len(names)), names)
    axes.set_xlabel("minutes of the worst-off group, test residents (NON-PRIVATE)")
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    out.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure).print_png(out / "figure.png")
    print(f"figure: {out / 'figure.png'}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="few runs, no figure")
    parser.add_argument("--out", type=pathlib.Path, default="runs/fair_allocation")
    arguments = parser.parse_args()
    main(arguments.smoke, arguments.out)
