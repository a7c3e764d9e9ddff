"""Search for noise that a run uses twice, which a trade-off audit cannot detect."""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from unittest import mock

import jax
import numpy as np
import scipy
from jaxtyping import Float

from ..core.solver import AbstractSolver
from ..privacy.mechanisms import AbstractNoise
from ..privacy.noise import PRNGKey, check_key
from .canaries import canaries, check_solver
from .sensitivity import open_value
from .tradeoff import ALPHA, SolverRun


@dataclasses.dataclass(frozen=True)
class NoiseReuse:
    """Outcome of a search for noise that is used twice.

    Attributes:
        streams: Number of noise vectors that were compared: one per release and leaf.
        coordinates: Length of each vector.
        left_out: Number of vectors of other lengths, which were not compared.
        correlation: Largest absolute correlation of two vectors.
        pair: Positions of these two, in the order of the draws.
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
    solver: AbstractSolver,
    *,
    key: PRNGKey,
    x_in_records: bool | tuple[str, ...] = True,
    coordinates: int = 2000,
) -> NoiseReuse:
    """Return a `NoiseReuse`: the largest correlation of two noises of one run.

    Noise that is used twice cancels in a difference and protects nothing. It looks
    right in every single release, so releases are compared. The run is made eagerly on
    canary records with two leaves per variable. Releases that do not have the length of
    a leaf, such as scores of sources, are counted and not compared.

    Args:
        solver: A calibrated solver, bound to its sizes, with few steps.
        key: A typed key.
        x_in_records: As in `canaries`.
        coordinates: The length of a leaf.

    Raises:
        ValueError: The run makes fewer than two noise vectors, or as in `canaries`.
        TypeError: A plan instead of its solver, or no solver.

    Privacy:
        Reads no records: the data are canaries. The noise is a release minus the sealed
        value, which is opened.
    """
    check_key(key)
    check_solver(solver, "noise_reuse")
    leaves = {"a": np.zeros(coordinates, "f4"), "b": np.zeros(coordinates, "f4")}
    found = canaries(solver, x_in_records=x_in_records, coordinates=leaves)
    canary = next(iter(found.values()))
    run = SolverRun(canary.problem, canary.solver, canary.w0)
    with _record_noise() as tape, jax.disable_jit():
        run(canary.data, key=key)
    streams = [stream for stream in tape if stream.size == coordinates]
    if len(streams) < 2:
        raise ValueError(f"noise_reuse: give two noise vectors, got {len(streams)}.")
    largest, pair = _largest_correlation(np.stack(streams))
    # Correlations of fresh noise are nearly normal; Bonferroni over all pairs.
    level = ALPHA / (len(streams) * (len(streams) - 1))
    bound = float(scipy.stats.norm.isf(level)) / coordinates**0.5
    left_out = len(tape) - len(streams)
    return NoiseReuse(len(streams), coordinates, left_out, largest, pair, bound)


@contextlib.contextmanager
def _record_noise() -> Iterator[list[Float[np.ndarray, " d"]]]:
    """Yield a list that collects the noise of every release in the context."""
    tape: list[Float[np.ndarray, " d"]] = []
    with contextlib.ExitStack() as stack:
        for kind in _kinds(AbstractNoise):
            taped = _recording(kind, tape)
            stack.enter_context(mock.patch.object(kind, "release", taped))
        yield tape


def _kinds(kind: type[AbstractNoise]) -> Iterator[type[AbstractNoise]]:
    """Yield the classes of mechanisms that define a `release` of their own."""
    if "release" in vars(kind):
        yield kind
    for other in kind.__subclasses__():
        yield from _kinds(other)


def _recording(kind: type[AbstractNoise], tape: list):
    release = kind.release

    def taped(self, bounded, *, key):
        before = len(tape)
        released = release(self, bounded, key=key)
        del tape[before:]  # records of a mechanism inside this one
        pairs = zip(jax.tree.leaves(released), open_value(bounded), strict=True)
        tape.extend(np.ravel(noisy).astype(np.float64) - raw for noisy, raw in pairs)
        return released

    return taped


def _largest_correlation(streams: np.ndarray) -> tuple[float, tuple[int, int]]:
    table = np.abs(np.corrcoef(streams))
    pairs = itertools.combinations(range(len(streams)), 2)
    first, second = max(pairs, key=lambda p: np.nan_to_num(table[p], nan=np.inf))
    return float(table[first, second]), (first, second)
