"""Records spread over several devices: every device reads its own.

On a laptop, eight virtual devices of the CPU stand for eight accelerators. On a cluster
the script runs unchanged, once in every process: there `jax.distributed` finds the
others (set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID where there is
no Slurm).

    python examples/sharded.py [--smoke]
"""

import argparse
import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import dpbilevel as dpb

FEATURES = 20


def join() -> None:
    """Join the other processes, where the environment names them."""
    settings = os.environ
    if "JAX_COORDINATOR_ADDRESS" in settings:
        jax.distributed.initialize(
            settings["JAX_COORDINATOR_ADDRESS"],
            int(settings["JAX_NUM_PROCESSES"]),
            int(settings["JAX_PROCESS_ID"]),
        )
    elif int(settings.get("SLURM_NTASKS", "1")) > 1:
        jax.distributed.initialize()


def rows(n: int, index: slice) -> tuple[np.ndarray, np.ndarray]:
    """Return some of `n` records; a real loader reads its own devices' alone."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, FEATURES)).astype(np.float32) / np.sqrt(FEATURES)
    label = np.sign(x @ rng.normal(size=FEATURES)).astype(np.float32)
    return x[index], label[index]


def logistic(w, record):
    """Return the loss of one record."""
    x, label = record
    return jnp.logaddexp(0, -label * (x @ w))


def main(smoke: bool) -> None:
    """Spreads records over all devices and fits a private logistic regression."""
    join()
    devices = jax.device_count()
    n = (4_096 if smoke else 524_288) // devices * devices  # as many on each
    sharding = NamedSharding(jax.make_mesh((devices,), ("records",)), P("records"))
    shapes = (n, FEATURES), (n,)
    data = tuple(
        jax.make_array_from_callback(
            shape, sharding, lambda index, leaf=leaf: rows(n, index[0])[leaf]
        )
        for leaf, shape in enumerate(shapes)
    )
    solution = dpb.fit(
        dpb.FiniteSum(logistic),
        dpb.NoisyGD(10 if smoke else 100, clip_norm=1.0, step_size=4.0),
        data,
        np.zeros(FEATURES, np.float32),
        budget=dpb.PrivacyBudget(1.0, 1e-6),
        key=dpb.root_key(),  # the same in all processes
    )
    if jax.process_index() == 0:  # others have the same values
        w = np.asarray(solution.value)
        x, label = rows(n, slice(None, 10_000))
        right = np.mean(np.sign(x @ w) == label)
        print(solution.report)
        print(f"{n} records on {devices} devices; right signs: {right:.3f}")
        assert right > 0.8


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--smoke", action="store_true", help="a few records and steps")
    main(parser.parse_args().smoke)
