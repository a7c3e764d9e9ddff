"""NON-PRIVATE. Searches for records beyond their sensitivity, and for reused noise."""

import dataclasses
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jaxtyping import PyTree

from .. import _checks
from ..core.solver import AbstractSolver
from ..privacy import Bounded, Neighbours
from ..privacy.keys import PRNGKey, check_key
from .canaries import canaries, check_solver
from .recording import ROUNDING, open_value, record
from .tradeoff import ALPHA, SolverRun

_SCALES = (1e-45, 1e-39, 1e-30, 1e-19, 1e-3, 1.0, 1.0, 1e3, 1e10, 1e19, 1e30, 3e38)
_SPECIAL = (0.0, -0.0, np.nan, np.inf, -np.inf)
_SURVIVORS = 8
_LENGTH = 2000  # of the noise vectors that are compared


@dataclasses.dataclass(frozen=True, eq=False)
class SensitivitySearch:
    """Outcome of a search for a violated sensitivity. NON-PRIVATE.

    Attributes:
        tried: Number of pairs of neighbouring datasets.
        neighbours: The relation.
        ratio: Largest distance of two neighbours' values over the sensitivity that
            they claim; infinite if a value is NaN.
        records: Records of the pair with the largest ratio.
        neighbour: The same with the last record replaced, or missing.
    """

    tried: int
    neighbours: Neighbours
    ratio: float
    records: PyTree
    neighbour: PyTree

    @property
    def passed(self) -> bool:
        """Whether no pair exceeds its bound by more than noise covers; not a proof."""
        return self.ratio <= 1 + ROUNDING

    def __str__(self) -> str:
        """Return the outcome in a sentence."""
        verdict = "no violation found" if self.passed else "VIOLATION"
        return (
            f"{verdict} in {self.tried} pairs under {self.neighbours.value}: the "
            f"largest distance is {self.ratio:.6g} of the claimed sensitivity"
        )


def sensitivity_search(
    query: Callable[[PyTree], Bounded],
    records: PyTree,
    *,
    neighbours: Neighbours = Neighbours.REPLACE_ONE,
    key: PRNGKey,
    tries: int = 2000,
    rounds: int = 20,
) -> SensitivitySearch:
    """Return a `SensitivitySearch`: neighbours whose values differ most. NON-PRIVATE.

    Datasets are rows of `records` in which some numbers are replaced by extreme ones:
    zeros, denormals, values up to 3e38, NaN and infinities. The pair differs in the
    last record, which is often the opposite of another. In further rounds entries of
    the worst pairs are changed.

    Args:
        query: A function of records (a pytree with a leading axis, one row fewer if a
            record is removed) that returns a `Bounded`; traced and mapped over
            datasets.
        records: Two or more rows. Public or synthetic. Floating-point leaves are made
            extreme; others keep values found in their column.
        neighbours: The relation. Add-or-remove-one needs a public denominator.
        key: A typed key.
        tries: The number of datasets in the first round.
        rounds: The number of further rounds, of `tries / 10` datasets each.

    Raises:
        ValueError: Fewer than two rows; or `query` divides by the private number of
            records under add-or-remove-one.
        TypeError: `query` does not return a `Bounded`.

    Privacy:
        Opens sealed values: for public or synthetic records only.
    """
    check_key(key)
    _checks.count("sensitivity_search", tries=tries)
    if _checks.leading_axis("records", records) < 2:
        raise ValueError("sensitivity_search: give at least two rows of records.")
    random = np.random.default_rng(np.asarray(jax.random.key_data(key)))
    rows = jax.tree.map(np.asarray, records)
    compare = _comparison(query, neighbours)
    pairs = _stack([_hostile_dataset(rows, random) for _ in range(tries)])
    ratios, tried = compare(pairs), tries
    for _ in range(rounds):
        best = np.argsort(-ratios)[:_SURVIVORS]
        parents = [jax.tree.map(lambda v, i=i: v[i], pairs) for i in best]
        chosen = itertools.islice(itertools.cycle(parents), max(tries // 10, 1))
        children = [_mutate(parent, rows, random) for parent in chosen]
        tried += len(children)
        found = _stack(children)
        pairs = jax.tree.map(lambda *v: np.concatenate(v), _stack(parents), found)
        ratios = np.concatenate([ratios[best], compare(found)])
    worst = int(np.argmax(ratios))
    left, right = _sides(jax.tree.map(lambda v: v[worst], pairs), neighbours)
    return SensitivitySearch(tried, neighbours, float(ratios[worst]), left, right)


def _sides(pair: PyTree, neighbours: Neighbours) -> tuple[PyTree, PyTree]:
    """Split `pair` in two neighbours: the second's last row is replaced or cut."""
    left = jax.tree.map(lambda v: v[:-1], pair)
    if neighbours is Neighbours.ADD_OR_REMOVE_ONE:  # the replacement is not used
        return left, jax.tree.map(lambda v: v[:-2], pair)

    def replaced(v):
        concatenate = np.concatenate if isinstance(v, np.ndarray) else jnp.concatenate
        return concatenate([v[:-2], v[-1:]])

    return left, jax.tree.map(replaced, pair)


def _comparison(query, neighbours) -> Callable[[PyTree], np.ndarray]:
    """Return a function from many pairs to an array of distances over sensitivity."""

    @jax.jit
    @jax.vmap
    def values(pair):
        both = [query(side) for side in _sides(pair, neighbours)]
        for bounded in both:
            found = {"the value of query": bounded}
            _checks.instance("sensitivity_search", Bounded, **found)
        claimed = [jnp.asarray(bounded.sensitivity(neighbours)) for bounded in both]
        return both, jnp.minimum(*claimed)

    def compare(pairs):
        (left, right), claimed = values(jax.tree.map(jnp.asarray, pairs))
        count = len(claimed)
        leaves = zip(open_value(left), open_value(right), strict=True)
        with np.errstate(invalid="ignore"):
            squares = [((a - b).reshape(count, -1) ** 2).sum(axis=1) for a, b in leaves]
            ratios = np.sqrt(sum(squares)) / np.asarray(claimed, np.float64)
        return np.where(np.isnan(ratios), np.inf, ratios)

    return compare


def _hostile_dataset(rows: PyTree, random: np.random.Generator) -> PyTree:
    """Draw rows like `rows` with some extreme numbers, and one row more to replace."""
    tame = random.choice([0.0, 0.5, 1.0])  # fraction of numbers that are kept

    def leaf(column):
        drawn = column[random.integers(len(column), size=len(column) + 1)]
        if np.issubdtype(column.dtype, np.floating):
            wild = random.random(drawn.shape) >= tame
            drawn = np.where(wild, _entries(drawn.shape, random), drawn)
            if random.random() < 0.5:
                drawn[-1] = -drawn[-2]
        return drawn.astype(column.dtype)

    with np.errstate(over="ignore"):
        return jax.tree.map(leaf, rows)


def _mutate(pair: PyTree, rows: PyTree, random: np.random.Generator) -> PyTree:
    """Return a copy of `pair` with some floats rescaled, negated or replaced."""

    def leaf(values, column):
        if not np.issubdtype(column.dtype, np.floating):
            return values
        factors = random.choice([-1.0, 1.0, 2.0, 0.5, 10.0, 0.1], size=values.shape)
        change = random.choice([0, 0, 0, 1, 2], size=values.shape)
        options = [values * factors, _entries(values.shape, random)]
        changed = np.select([change == 1, change == 2], options, values)
        if random.random() < 0.3:
            changed[-1] = -changed[-2]
        return changed.astype(column.dtype)

    with np.errstate(over="ignore", invalid="ignore"):
        return jax.tree.map(leaf, pair, rows)


def _entries(shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    values = random.choice(_SCALES, size=shape) * random.uniform(-1, 1, size=shape)
    special = random.random(shape) < 0.1
    return np.where(special, random.choice(_SPECIAL, size=shape), values)


def _stack(pairs: list[PyTree]) -> PyTree:
    return jax.tree.map(lambda *v: np.stack(v), *pairs)


@dataclasses.dataclass(frozen=True)
class NoiseReuse:
    """Outcome of a search for noise that is used twice.

    Attributes:
        streams: Number of noise vectors that were compared: one per release and leaf.
        coordinates: Length of each vector.
        left_out: Number of vectors of other lengths, which were not compared.
        correlation: Largest absolute correlation of two vectors.
        pair: Positions of these two, in the order in which the device made them.
        bound: Correlation that fresh noise exceeds with probability 1e-4.
    """

    streams: int
    coordinates: int
    left_out: int
    correlation: float
    pair: tuple[int, int]
    bound: float

    @property
    def passed(self) -> bool:
        """Whether no two noise vectors are correlated beyond chance."""
        # Not `>`: constant noise has the correlation NaN.
        return self.correlation <= self.bound

    def __str__(self) -> str:
        """Return the outcome in a sentence."""
        verdict = "no reused noise found" if self.passed else "NOISE IS REUSED"
        others = f"; {self.left_out} of other lengths were not compared"
        return (
            f"{verdict}: the largest correlation of {self.streams} noises in "
            f"{self.coordinates} coordinates is {self.correlation:.3f} (between "
            f"{self.pair[0]} and {self.pair[1]}), chance stays below {self.bound:.3f}"
            f"{others if self.left_out else ''}"
        )


def noise_reuse(
    solver: AbstractSolver, *, key: PRNGKey, x_in_records: bool | tuple[str, ...] = True
) -> NoiseReuse:
    """Return a `NoiseReuse`: the largest correlation of two noise vectors of one run.

    Noise that is used twice cancels in a difference and protects nothing. It looks
    right in every single release, so releases are compared. The run is made on canary
    records with two leaves per variable. Releases that do not have the length of
    a leaf, such as scores of sources, are counted and not compared.

    Args:
        solver: A calibrated solver, bound to its sizes, with few steps.
        key: A typed key.
        x_in_records: As in `canaries`.

    Raises:
        ValueError: The run makes fewer than two noise vectors, or as in `canaries`.
        TypeError: A plan, no solver, or a solver that JAX cannot trace.

    Privacy:
        Reads no records: the data are canaries. The noise is a release minus the sealed
        value, which is opened.
    """
    check_key(key)
    check_solver(solver, "noise_reuse")
    leaves = {"a": np.zeros(_LENGTH, "f4"), "b": np.zeros(_LENGTH, "f4")}
    found = canaries(solver, x_in_records=x_in_records, coordinates=leaves)
    canary = next(iter(found.values()))
    run = SolverRun(canary.problem, canary.solver, canary.w0)
    with record() as releases:
        jax.jit(lambda data, key: run(data, key=key))(canary.data, key)
    notes = [note for note in releases if note.noiseless]
    pairs = [p for n in notes for p in zip(n.released, n.noiseless, strict=True)]
    streams = [noisy - value for noisy, value in pairs if value.size == _LENGTH]
    if len(streams) < 2:
        raise ValueError(f"noise_reuse: give two noise vectors, got {len(streams)}.")
    table = np.abs(np.corrcoef(np.stack(streams)))
    positions = itertools.combinations(range(len(streams)), 2)
    pair = max(positions, key=lambda p: np.nan_to_num(table[p], nan=np.inf))
    # Correlations of fresh noise are nearly normal; Bonferroni over all pairs.
    level = ALPHA / (len(streams) * (len(streams) - 1))
    bound = float(scipy.stats.norm.isf(level)) / _LENGTH**0.5
    left_out = len(pairs) - len(streams)
    largest = float(table[pair])
    return NoiseReuse(len(streams), _LENGTH, left_out, largest, pair, bound)
