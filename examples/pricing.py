"""Set the prices of a charging park whose drivers react to prices and to the crowd.

The operator leads and drivers follow: each chooses one of four time slots or stays
away, and a crowded slot is worth less to everybody. The loads of the slots are the
equilibrium of all choices, the solution of a lower level whose records are drivers.
With `SingleLoopBilevel` the equilibrium moves with the prices. Without two levels one
optimizes prices against a crowd that does not move, or tries eight common markups and
measures the loads of each. Every method gets the same guarantee for every driver.

NON-PRIVATE are the profits at the equilibrium of test drivers, and the oracle, which
ascends along exact derivatives.

    python examples/pricing.py [--smoke] [--out DIR]
"""

import argparse
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

import dpbilevel as dpb

SLOTS, SIZE = ("morning", "noon", "evening", "night"), 4000
COST_EUR = jnp.array([4.0, 3.0, 5.0, 2.0])  # of one charge, to the operator
WAIT_EUR = 12.0  # what waiting costs a driver, times the fraction of drivers in a slot
START_EUR, LOADS = COST_EUR + 2.0, jnp.full(4, 0.2)  # guesses that read no record
TRIALS_EUR = COST_EUR + jnp.linspace(2.0, 9.0, 8)[:, None]  # common markups
BOX_EUR = dpb.sets.Box(0.0, 20.0)


def drivers(count, seed):
    """Generate what a charge is worth to drivers, and their sensitivity to prices."""
    rng = np.random.default_rng(seed)
    worth = rng.normal((9.0, 7.0, 13.0, 5.0), 2.0, (count, 4))
    worth += rng.normal(0.0, 2.0, (count, 1))  # a driver's need, in all slots
    temper = jnp.asarray(rng.lognormal(np.log(0.8), 0.3, count))
    return {"worth_EUR": jnp.asarray(worth), "sensitivity_per_EUR": temper}


def surplus(prices, load, driver):
    """Return the expected surplus of a driver in EUR; to stay away is worth zero."""
    b, gains = driver["sensitivity_per_EUR"], driver["worth_EUR"] - prices
    return jax.nn.logsumexp(jnp.append(b * (gains - WAIT_EUR * load), 0.0)) / b


def profit(prices, load):
    """Return the operator's profit in EUR per driver."""
    return jnp.sum((prices - COST_EUR) * load, -1)


# The gradient in the load is the load less a driver's choice probabilities.
GAME = dpb.BilevelProblem(
    upper=lambda prices, load, nothing: 0.0 * nothing,
    lower=lambda prices, load, driver: surplus(prices, load, driver) / WAIT_EUR,
    upper_public=lambda prices, load: -profit(prices, load),
    lower_public=lambda prices, load: 0.5 * jnp.sum(load**2),
    x_set=BOX_EUR,
    x_in_records=("lower",),
)
# One level: loads that stay as they are guessed, and loads at all trial prices.
STILL = dpb.FiniteSum(
    lambda prices, driver: -profit(prices, -jax.grad(surplus)(prices, LOADS, driver)),
    w_set=BOX_EUR,
)
AT_EACH = jax.vmap(GAME.lower, (0, 0, None))
MEASURE = dpb.FiniteSum(
    lambda loads, driver: jnp.sum(AT_EACH(TRIALS_EUR, loads, driver)),
    public=lambda loads: 0.5 * jnp.sum(loads**2),
)
TAIL, MANY = dpb.outputs.TailMean(), jnp.tile(LOADS, (8, 1))
TWO_LEVELS = dpb.SingleLoopBilevel(
    50, step_size=2.0, lower_step_size=0.4, linear_step_size=0.3, output=TAIL,
    hessian_clip_norm=10.0, cross_clip_norm=2.0,
    upper_clip_norm=1e-3,  # of one record of zero, which is nobody's
)  # fmt: skip
METHODS = {  # problem, solver, initial point; set on other generated drivers
    "best of 8 markups": (MEASURE, dpb.NoisyGD(20, 3.0, 0.4, output=TAIL), MANY),
    "crowd does not move": (STILL, dpb.NoisyGD(50, 1.5, 5.0), START_EUR),
    "SingleLoopBilevel": (GAME, TWO_LEVELS, (START_EUR, LOADS)),
}


def released(problem, solver, w0, train, epsilon, runs):
    """Return the prices that a method releases, one row for each key."""
    sizes = dpb.Sizes(1, SIZE, "disjoint") if problem is GAME else SIZE
    data = train if problem is GAME else train.lower
    budget = dpb.PrivacyBudget(epsilon, delta=1e-5)
    plan = dpb.calibrate(problem, solver, budget, sizes=sizes, w0=w0)
    assert plan.report.epsilon <= epsilon
    keys = jax.random.split(dpb.root_key(), runs)  # as many budgets
    solve = jax.jit(jax.vmap(dpb.solve, (None,) * 4))
    found = solve(problem, plan.solver, data, w0, key=keys)
    if problem is MEASURE:
        return TRIALS_EUR[jnp.argmax(profit(TRIALS_EUR, found.value), 1)]
    return found.x if problem is GAME else found.value


@jax.jit
def exact(prices, data):
    """Return the NON-PRIVATE profit at the equilibrium, in EUR per driver."""
    return profit(prices, dpb.oracles.lower_solution(GAME, prices, data, y0=LOADS))


def draw(found, prices, out):
    """Save a figure: profits of all runs, and the prices of the first ones."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, values in found.items():
        left.plot(values, [name] * len(values), "o", alpha=0.6)
        right.plot(SLOTS, prices[name][0], "o-")
    left.set_xlabel("NON-PRIVATE: profit on test drivers, EUR per driver")
    right.set_ylabel("price, EUR per charge")
    figure.suptitle("epsilon = 1 (not the oracle); right: prices of one run")
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / "figure.png", dpi=150)


def main(smoke: bool, out: pathlib.Path) -> None:
    """Compare the methods at the equilibrium of test drivers."""
    train, test = (dpb.Levels(jnp.zeros(1), drivers(SIZE, seed)) for seed in (0, 1))
    best, slope, prices = START_EUR, jax.jit(jax.grad(exact)), {}
    for _ in range(0 if smoke else 100):
        best = BOX_EUR.project(best + 2.0 * slope(best, train))
        prices["oracle"] = best[None]
    for epsilon in (1.0,) if smoke else (4.0, 1.0):
        for name in ["SingleLoopBilevel"] if smoke else METHODS:
            runs = 1 if smoke else 10
            prices[name] = released(*METHODS[name], train, epsilon, runs)
        found = {k: [float(exact(p, test)) for p in v] for k, v in prices.items()}
        print(f"epsilon = {epsilon:g}: NON-PRIVATE profit on test drivers, EUR each")
        for name, values in found.items():
            low, middle, high = np.min(values), np.median(values), np.max(values)
            print(f"  {name:20} {middle:.3f}  ({low:.3f} to {high:.3f})")
    middle = {name: np.median(values) for name, values in found.items()}
    assert middle["SingleLoopBilevel"] > exact(START_EUR, test)
    if not smoke:
        assert sorted(middle, key=middle.get)[-2:] == ["SingleLoopBilevel", "oracle"]
        draw(found, prices, out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--smoke", action="store_true", help="a short run, no figure")
    parser.add_argument("--out", type=pathlib.Path, default="runs/pricing")
    main(**vars(parser.parse_args()))
