"""NON-PRIVATE. Releases of a run, opened for an auditor who brings the records."""

import contextlib
import dataclasses
import functools
import math
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jaxtyping import Float, PyTree

from ..core.process_spending import PrivacyWarning
from ..draws.mechanisms import AbstractDrawMechanism
from ..privacy import Bounded
from ..privacy.exact.grid import Grid
from ..privacy.exact.int61 import is_limbs
from ..privacy.mechanisms import AbstractNoise
from ..privacy.releases import AbstractNoisyRelease

# Relative rounding of float32 sums and multipliers that mechanisms' noise covers.
ROUNDING = 2.0**-11
_PATCHING = threading.RLock()  # classes are patched by one thread at a time
Leaves = tuple[Float[np.ndarray, " d"], ...]


def open_value(bounded: Bounded) -> list[Float[np.ndarray, " d"]]:
    """Return the leaves of a sealed value, a list of flat float64 arrays. NON-PRIVATE.

    Takes a value of public or synthetic records, or a batch of such values.
    """
    if not isinstance(bounded.raw, Grid):
        return [np.ravel(v).astype(np.float64) for v in jax.tree.leaves(bounded.raw)]
    exponent = np.asarray(bounded.raw.exponent, np.float64)
    # A batch of values has a batch of exponents: leading axes that the counts share.
    return [
        np.ravel(np.asarray(v, np.float64).T * 2.0**exponent.T, order="F")
        for v in jax.tree.leaves(bounded.raw.counts, is_leaf=is_limbs)
    ]


@dataclasses.dataclass(frozen=True, eq=False)
class Recorded:
    """A release of a run, opened. NON-PRIVATE: `noiseless` has no noise.

    Attributes:
        name: Name of the release, as in the ledger of the solver that makes it; empty
            for a draw.
        mechanism: Name of the class of the mechanism.
        sensitivity: Declared largest change of `noiseless`, in the l2 norm; of a draw
            the declared change of its scores.
        multiplier: Standard deviation of the noise, in units of the sensitivity; of a
            draw the number that sets it.
        noise_std: Standard deviation of the noise per coordinate; NaN for a draw.
        key: Words of the key of the noise.
        noiseless: Value before noise, one flat float64 array per leaf; empty for a
            draw.
        released: Released value, in the same form.
    """

    name: str
    mechanism: str
    sensitivity: float
    multiplier: float
    noise_std: float
    key: tuple[int, ...]
    noiseless: Leaves
    released: Leaves


def _as_it_is(key: tuple[int, ...], value: PyTree) -> PyTree:
    del key
    return value


class Tape:
    """Recorder of releases of programs traced inside `patched`. NON-PRIVATE.

    What other threads trace meanwhile is as without the tape.

    Attributes:
        notes: The releases since the last `take`.
        shown: Function of a release's key and value that returns what the program sees.
        is_open: Whether releases are noted; otherwise they pass.
    """

    def __init__(self):
        self.notes: list[Recorded] = []
        self.shown: Callable[[tuple[int, ...], PyTree], PyTree] = _as_it_is
        self.is_open = True
        self._names, self._inside = [""], False
        self._thread = threading.get_ident()

    def take(self) -> list[Recorded]:
        """Wait for running programs; return a list of the notes and clear the tape."""
        jax.effects_barrier()
        taken = self.notes[:]
        self.notes.clear()
        return taken

    @contextlib.contextmanager
    def patched(self) -> Iterator[None]:
        """Record in `notes` the releases of all code traced or run in the context."""
        with contextlib.ExitStack() as stack:
            for base, name in (
                (AbstractNoise, "release"),
                (AbstractDrawMechanism, "draw"),
            ):
                for kind in _kinds(base, name):
                    noting = self._noting(getattr(kind, name))
                    stack.enter_context(mock.patch.object(kind, name, noting))
            for kind in _kinds(AbstractNoisyRelease, "apply"):
                naming = self._naming(kind.apply)
                stack.enter_context(mock.patch.object(kind, "apply", naming))
            yield

    def _naming(self, apply: Callable) -> Callable:
        def named(release, *args, **options):
            if threading.get_ident() != self._thread:
                return apply(release, *args, **options)
            self._names.append(release.name)
            try:
                return apply(release, *args, **options)
            finally:
                self._names.pop()

        return named

    def _noting(self, method: Callable) -> Callable:
        def noted(mechanism, value, *args, key, **options):
            if threading.get_ident() != self._thread:
                return method(mechanism, value, *args, key=key, **options)
            outermost, self._inside = not self._inside, True
            try:
                released = method(mechanism, value, *args, key=key, **options)
            finally:
                self._inside = not outermost
            if not outermost:  # a mechanism inside another one
                return released
            is_noise = isinstance(value, Bounded)
            sensitivity = value.sensitivity(mechanism.neighbours)
            strength = getattr(mechanism, getattr(mechanism, "parameter", "multiplier"))
            std = mechanism.deviation * sensitivity if is_noise else math.nan
            numbers = sensitivity, strength, std
            sealed = value if is_noise else None
            seen = jax.random.key_data(key), numbers, sealed, released
            note = self._note, self._names[-1], type(mechanism).__name__
            return _called(functools.partial(*note), seen, released)

        return noted

    def _note(self, name, mechanism, words, numbers, value, released) -> PyTree:
        if not self.is_open:
            return released
        key = tuple(np.ravel(words).tolist())
        raw = () if value is None else tuple(open_value(value))
        leaves = map(np.ravel, jax.tree.leaves(released))
        known = tuple(leaf.astype(np.float64) for leaf in leaves)
        moves, strength, std = map(float, numbers)
        found = Recorded(name, mechanism, moves, strength, std, key, raw, known)
        self.notes.append(found)
        return self.shown(key, released)


def _called(note: Callable[..., PyTree], seen: PyTree, like: PyTree) -> PyTree:
    """Call `note` on the host with the values `seen`; return its result as arrays.

    A callback would round numbers of 64 bits, so they travel as pairs of 32 bits.
    """
    leaves, tree = jax.tree.flatten(jax.lax.stop_gradient(seen))
    arrays = [jnp.asarray(leaf) for leaf in leaves]
    types = [array.dtype for array in arrays]
    wide = [dtype.itemsize == 8 for dtype in types]

    def on_host(*halves):
        parts = zip(map(np.asarray, halves), types, wide, strict=True)
        whole = [half.view(t)[..., 0] if w else half for half, t, w in parts]
        found = [
            np.asarray(leaf) for leaf in jax.tree.leaves(note(*tree.unflatten(whole)))
        ]
        return [
            leaf[..., None].view(np.uint32) if leaf.itemsize == 8 else leaf
            for leaf in found
        ]

    sent = [
        jax.lax.bitcast_convert_type(array, jnp.uint32) if is_wide else array
        for array, is_wide in zip(arrays, wide, strict=True)
    ]
    outputs, outside = jax.tree.flatten(like)
    count = len(outputs)  # the last leaves of `seen`
    shapes = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in sent[-count:]]
    back = io_callback(on_host, shapes, *sent)
    ends = zip(back, types[-count:], wide[-count:], strict=True)
    return outside.unflatten(
        jax.lax.bitcast_convert_type(v, t) if w else v for v, t, w in ends
    )


@functools.cache  # no import and no other run changes what JAX compiles
def _context() -> Callable[[Tape], contextlib.AbstractContextManager[None]]:
    """Make a function from a tape to a JAX context that keeps its programs apart.

    Programs compiled under one tape are never called without it, nor the other way
    round.
    """
    return jax.make_user_context()


@contextlib.contextmanager
def _recording() -> Iterator[Tape]:
    tape = Tape()
    try:
        with _PATCHING, tape.patched(), _context()(tape), warnings.catch_warnings():
            warnings.simplefilter("ignore", PrivacyWarning)  # the key is used again
            yield tape
            jax.effects_barrier()
    finally:  # compiled programs keep the tape, but nothing of the records
        tape.is_open, tape.notes, tape.shown = False, [], _as_it_is


@contextlib.contextmanager
def record() -> Iterator[list[Recorded]]:
    """Yield a list that collects the releases of every run in the context. NON-PRIVATE.

    The runs return what they return otherwise, with the same noise. Every program is
    compiled anew in the context. Runs of other threads are not recorded.

    Returns:
        A context manager of a list of `Recorded`. The list is complete at the end of
        the context, in the order in which the device made the releases.

    Privacy:
        Opens sealed values: for public or synthetic records only. Do not publish what
        the list holds on sensitive records.
    """
    with _recording() as tape:
        yield tape.notes


@dataclasses.dataclass(frozen=True, eq=False)
class Replay:
    """Releases of a run on data and on neighbouring data. NON-PRIVATE.

    Attributes:
        pairs: Each release on the data and on the neighbour, for the same released
            values before it.
        same_answer: Whether all numbers that the two runs return are equal.
    """

    pairs: tuple[tuple[Recorded, Recorded], ...]
    same_answer: bool = True

    @property
    def movements(self) -> Float[np.ndarray, " n"]:
        """Array: each pair's distance of noiseless values, in units of the sensitivity.

        Infinite if a value is NaN; NaN for a draw, whose scores are not opened.
        """
        return np.asarray([_movement(*pair) for pair in self.pairs])

    @property
    def largest(self) -> float:
        """Largest of `movements` over all releases but draws."""
        return float(np.nanmax(self.movements))

    @property
    def mu(self) -> float:
        """Distance of the two runs in units of the noise: mu of Gaussian DP.

        It is at most `PrivacyReport.mu` if the ledger counts all releases and their
        noise is independent. The noise of `Correlated` is not, so there it is no bound.
        With disjoint people compare it with the mu of the level of the changed person.
        Releases of programs that were compiled before by `.lower().compile()` are not
        in it: compare the number of `pairs` with the ledger. Infinite if a value moves
        without noise.
        """
        pairs = zip(self.pairs, self.movements, strict=True)
        with np.errstate(divide="ignore", invalid="ignore"):  # a draw is NaN
            parts = [m * a.sensitivity / a.noise_std for (a, _), m in pairs if m > 0]
        return math.hypot(*parts)

    @property
    def passed(self) -> bool:
        """Whether no release moves too far, and answers are equal; not a proof.

        No release moves by more than is declared, or moves without noise. And the
        answers are equal: they depend on records through releases only.
        """
        return self.same_answer and self.mu < math.inf and self.largest <= 1 + ROUNDING

    def __str__(self) -> str:
        """Return the outcome, and the largest movement of each kind of release."""
        found: dict[str, list[float]] = {}
        for (first, _), movement in zip(self.pairs, self.movements, strict=True):
            found.setdefault(first.name or first.mechanism, []).append(movement)
        verdict = "no violation found" if self.passed else "VIOLATION"
        moved = f"the largest movement is {self.largest:.6g} sensitivities"
        lines = [f"{verdict}: {moved}, and mu is {self.mu:.6g}"]
        if not self.same_answer:
            lines.append("the answer depends on records, but through no release")
        lines += [
            f"  {len(v)} x {k}: at most {np.max(v):.6g}" for k, v in found.items()
        ]
        return "\n".join(lines)


def replay(run: Callable[[Any], Any], data: PyTree, neighbour: PyTree) -> Replay:
    """Return the `Replay` of a run on two neighbouring sets of records. NON-PRIVATE.

    The second run sees the released values of the first one. So both take the same
    steps, and a release moves by the difference of the records alone.

    Args:
        run: A function of the records that makes the run and returns its answer, such
            as `lambda data: dpb.solve(problem, solver, data, w0, key=key)`. Its key is
            the same in both calls.
        data: The records.
        neighbour: The records with those of one person replaced, or, under
            add-or-remove-one, left out.

    Raises:
        ValueError: The run makes no release with noise, uses a key twice, or makes
            other releases on the neighbour.

    Privacy:
        Opens sealed values: for public or synthetic records only.
    """
    with _recording() as tape:
        kept: dict[tuple[int, ...], PyTree] = {}
        tape.shown = kept.setdefault  # of the second run that of the first
        answer = run(data)
        notes = tape.take()
        first = {note.key: note for note in notes}
        if not any(note.noiseless for note in notes):
            raise ValueError("replay: the run makes no release with noise.")
        if len(first) < len(notes):
            raise ValueError("replay: the run uses a key for two releases.")
        other = run(neighbour)
        notes = tape.take()
        second = {note.key: note for note in notes}
        if second.keys() != first.keys() or len(notes) != len(first):
            raise ValueError(
                "replay: the runs make different releases, or under different keys. "
                "Let neither depend on records, and give both the same key."
            )
    pairs = tuple((note, second[key]) for key, note in first.items())
    return Replay(pairs, _bits(answer) == _bits(other))


def _bits(answer: PyTree) -> list[tuple[tuple[int, ...], bytes]]:
    """Return a list of shapes and bits of all numbers in an answer, without keys."""
    found = filter(eqx.is_array_like, jax.tree.leaves(answer))
    key = jax.dtypes.prng_key
    numbers = (v for v in found if not jnp.issubdtype(getattr(v, "dtype", float), key))
    return [(np.shape(v), np.asarray(v).tobytes()) for v in numbers]


def _movement(first: Recorded, second: Recorded) -> float:
    if not first.noiseless:
        return math.nan
    parts = zip(first.noiseless, second.noiseless, strict=True)
    with np.errstate(invalid="ignore"):
        distance = math.hypot(*(float(np.linalg.norm(a - b)) for a, b in parts))
    claimed = min(first.sensitivity, second.sensitivity)
    if distance <= 0:
        return 0.0
    return distance / claimed if claimed > 0 and distance < math.inf else math.inf


def _kinds(kind: type, method: str) -> Iterator[type]:
    """Yield `kind` and its subclasses, if they define the method themselves."""
    if method in vars(kind):
        yield kind
    for other in kind.__subclasses__():
        yield from _kinds(other, method)
