"""Train a detector of tampered electricity meters that thieves try to evade.

A record is a household: 24 hourly readings in kW, and whether an inspection found the
meter tampered with. A thief can shift each reading by up to 0.15 kW, in the worst way
for the detector. This attack is a lower level inside the loss of one record. It reads
no other record, so it makes no release and costs no budget: `NoisyGD` is enough.

Without a lower level one trains on the readings as they are, or with random shifts.
Every method gets the same guarantee for every household. NON-PRIVATE are the accuracies
on test households, also under a longer attack than that of training, and the oracle.

    python examples/adversarial.py [--smoke] [--out DIR]
"""

import argparse
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpbilevel as dpb

SHIFT_KW, HOURS, HIDDEN, SIZE = 0.15, 24, 16, 4000
EVENING = np.isin(np.arange(HOURS), (18, 19, 20))
ATTACK, ORACLE = "attack in the loss", "oracle: the same, no noise"


def households(count, seed):
    """Generate daily profiles in kW; tampered meters, of label 1, show less."""
    rng = np.random.default_rng(seed)
    tampered = rng.random(count) < 0.5
    missing_kW = np.where(EVENING, 0.9, 0.12)  # few hours show a lot, many a little
    usual_kW = 0.8 + 1.2 * EVENING + 0.5 * missing_kW
    noise_kW = np.where(EVENING, 0.9, 0.3) * rng.normal(size=(count, HOURS))
    readings_kW = usual_kW - missing_kW * tampered[:, None] + noise_kW
    shifts_kW = SHIFT_KW * rng.choice([-1.0, 1.0], (count, HOURS))
    records = {"readings_kW": readings_kW, "shifts_kW": shifts_kW}
    return jax.tree.map(jnp.asarray, records | {"label": 2.0 * tampered - 1.0})


def margin(network, household, shifts_kW):
    """Return the margin of a network with one hidden layer, positive if it is right."""
    readings = household["readings_kW"] + shifts_kW
    hidden = jnp.tanh((readings - 1.0) @ network["in"] + network["bias"])
    return household["label"] * (hidden @ network["out"])


def loss(network, household, shifts_kW=0.0):
    """Return the logistic loss at shifted readings."""
    return jnp.logaddexp(0.0, -margin(network, household, shifts_kW))


def worst(network, household, steps=5):
    """Return the shifts in kW that projected sign ascent finds from zero on."""

    def step(_, shifts):
        slope = jax.grad(loss, 2)(network, household, shifts)
        moved = shifts + 2.0 * SHIFT_KW / steps * jnp.sign(slope)
        return jnp.clip(moved, -SHIFT_KW, SHIFT_KW)

    shifts = jax.lax.fori_loop(0, steps, step, jnp.zeros(HOURS))
    return jax.lax.stop_gradient(shifts)  # as Danskin's theorem allows


# Losses and numbers of steps, chosen on generated households of another seed.
METHODS = {
    "readings as they are": (loss, 30),
    "random shifts": (lambda w, z: loss(w, z, z["shifts_kW"]), 30),
    ATTACK: (lambda w, z: loss(w, z, worst(w, z)), 100),
}


def released(loss, steps, epsilon, train, w0, runs):
    """Return the networks that noisy descent releases, one for each key."""
    # Steps of optax are taken as they are. Others get shorter if gradients turn, and
    # gradients turn if the worst shifts do.
    solver = dpb.NoisyGD(steps, 1.0, optax.sgd(1.0), output=dpb.outputs.TailMean())
    problem, budget = dpb.FiniteSum(loss), dpb.PrivacyBudget(epsilon, delta=1e-5)
    plan = dpb.calibrate(problem, solver, budget, sizes=SIZE, w0=w0)
    assert plan.report.epsilon <= epsilon
    solve, keys = jax.jit(dpb.solve), jax.random.split(dpb.root_key(), runs)
    return [solve(problem, plan.solver, train, w0, key=key).value for key in keys]


def oracle(train, w):
    """Train NON-PRIVATELY with the attack in the loss, by Adam."""
    optimizer, (attacked, _) = optax.adam(0.01), METHODS[ATTACK]

    def step(_, state):
        w, memory = state
        slope = jax.grad(lambda w: jnp.mean(jax.vmap(attacked, (None, 0))(w, train)))(w)
        updates, memory = optimizer.update(slope, memory)
        return optax.apply_updates(w, updates), memory

    return jax.lax.fori_loop(0, 200, step, (w, optimizer.init(w)))[0]


def draw(found, out):
    """Save a figure: both accuracies of every run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for name, values in found.items():
        axes.plot(*np.transpose(values), "o", alpha=0.6, label=name)
    axes.set(xlabel="accuracy on test households", title="epsilon = 1; NON-PRIVATE")
    axes.set_ylabel(f"accuracy, readings shifted by up to {SHIFT_KW} kW")
    axes.legend(frameon=False)
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / "figure.png", dpi=150)


def main(smoke: bool, out: pathlib.Path) -> None:
    """Compare the detectors on test households, with and without an attack."""
    train, test = households(SIZE, 0), households(SIZE, 1)
    weights = jax.random.normal(jax.random.key(0), (HOURS, HIDDEN)) / HOURS**0.5
    w0 = {"in": weights, "bias": jnp.zeros(HIDDEN), "out": jnp.zeros(HIDDEN)}

    @jax.jit
    def accuracies(network):
        shifts = jax.vmap(lambda z: worst(network, z, steps=20))(test)
        margins = jax.vmap(margin, (None, 0, 0))
        pair = margins(network, test, 0 * shifts), margins(network, test, shifts)
        return jnp.mean(jnp.stack(pair) > 0, 1)

    networks = {} if smoke else {ORACLE: [oracle(train, w0)]}
    for epsilon in (1.0,) if smoke else (4.0, 1.0):
        for name in [ATTACK] if smoke else METHODS:
            loss, steps = METHODS[name]
            steps, runs = (10, 1) if smoke else (steps, 5)
            networks[name] = released(loss, steps, epsilon, train, w0, runs)
        found = {k: np.array([accuracies(w) for w in v]) for k, v in networks.items()}
        print(f"epsilon = {epsilon:g}: accuracy on test households, under attack")
        for name, values in found.items():
            (plain, attacked), low = np.median(values, 0), np.min(values[:, 1])
            print(f"  {name:26} {plain:.3f}  {attacked:.3f} (at least {low:.3f})")
    assert np.all(found[ATTACK][:, 0] > 0.5)
    if not smoke:
        lowest = {name: np.min(found[name][:, 1]) for name in METHODS}
        assert lowest.pop(ATTACK) > max(lowest.values()) + 0.1
        draw(found, out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--smoke", action="store_true", help="a short run, no figure")
    parser.add_argument("--out", type=pathlib.Path, default="runs/adversarial")
    main(**vars(parser.parse_args()))
