"""Checkpoints of a run in progress, and how it begins, goes on and ends.

SECRET: they hold the key of future noise.
"""

import contextlib
import dataclasses
import enum
import hashlib
import importlib.metadata
import io
import json
import os
import platform
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from .._version import __version__
from ..core.descent import rejected_updates
from ..core.problem import AbstractProblem
from ..core.solution import Solution
from ..core.solver import AbstractSolver
from ..privacy.keys import PRNGKey, wrapped
from . import guards
from .guards import uninterruptible

NAME = "checkpoint.SECRET"
TEMPORARY = f"{NAME}.tmp"
RESULT = "result.json"  # the result of a run of the command line
ARRAYS = "solution.npz"  # its arrays
SEARCH = "search.json"  # the result of a search
RUN, SOLUTION = "run.json", "solution"  # facts and result of a run of `fit`
LIMIT = "spending_limit.json"  # of all runs in a folder and below it
EVALUATIONS = "evaluation-*.SECRET"  # losses at the points of a search
CHECK = "usability"  # in a fingerprint: the released check of the records
FIRST_KEY = "first key"  # in a fingerprint: a hash that identifies the run
_PACKAGES = ("dp-accounting", "equinox", "jax", "jaxlib", "numpy", "optax")
_NOTICE = (
    b"dpbilevel checkpoint 3. SECRET: it holds the key of the noise still to come (of "
    b"correlated noise also of the last) and a hash of the records; whoever has it can "
    b"subtract that noise. Of a search it may hold losses of single records without "
    b"noise, else no value of a record. Keep it, or delete it; do not share it.\n"
)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A run between two chunks: steps done, key, state, trajectory. SECRET.

    Attributes:
        done: Number of steps done.
        key: The key of the steps to come. Earlier noise cannot be computed from it.
        state: The solver's state, on the host; after `read` a list of its leaves.
        path: The released trajectory so far, likewise.
        fingerprint: Facts that must not change between the parts of a run.
    """

    done: int
    key: PRNGKey
    state: PyTree
    path: PyTree
    fingerprint: dict[str, Any]

    def __repr__(self) -> str:
        """Return the number of steps; never the key."""
        return f"Checkpoint(done={self.done})"


def write(folder: Path, checkpoint: Checkpoint) -> None:
    """Write a `Checkpoint` into a folder, atomically, readable by its owner alone."""
    states, paths = map(jax.tree.leaves, (checkpoint.state, checkpoint.path))
    arrays = {f"state_{i}": v for i, v in enumerate(states)}
    arrays |= {f"path_{i}": v for i, v in enumerate(paths)}
    arrays["key"] = np.asarray(jax.random.key_data(checkpoint.key))
    public = {
        "done": checkpoint.done,
        "generator": str(jax.random.key_impl(checkpoint.key)),
        "fingerprint": checkpoint.fingerprint,
        "leaves": [len(states), len(paths)],
    }
    arrays["public"] = np.frombuffer(json.dumps(public).encode(), np.uint8)
    body = npz(arrays)
    digest = hashlib.sha256(body).hexdigest().encode()
    replace(folder / NAME, _NOTICE + digest + b"\n" + body, mode=0o600)  # holds a key


def read(folder: Path) -> Checkpoint:
    """Read the `Checkpoint` in a folder; `ValueError` if there is none, or damaged."""
    file = folder / NAME
    if not file.is_file():
        raise ValueError(f"nothing to resume: {folder} holds no checkpoint.")
    content = file.read_bytes()
    digest, _, body = content.removeprefix(_NOTICE).partition(b"\n")
    intact = hashlib.sha256(body).hexdigest().encode() == digest
    if not content.startswith(_NOTICE) or not intact:
        raise ValueError(
            f"{file} is damaged or not a checkpoint of this version of dpbilevel. Put "
            "back a copy of it, or start a new run, which is another release."
        )
    arrays = np.load(io.BytesIO(body), allow_pickle=False)  # a pickle could run code
    public = json.loads(arrays["public"].tobytes())
    states, paths = public["leaves"]
    return Checkpoint(
        done=public["done"],
        key=wrapped(arrays["key"], public["generator"]),
        state=[arrays[f"state_{i}"] for i in range(states)],
        path=[arrays[f"path_{i}"] for i in range(paths)],
        fingerprint=public["fingerprint"],
    )


def has_released(folder: Path) -> bool:
    """Return whether a folder's checkpoint, if any, has releases or is damaged."""
    if not (folder / NAME).exists():
        return False
    try:
        saved = read(folder)
    except Exception:  # damaged
        return True
    return saved.done > 0 or CHECK in saved.fingerprint


def remove(folder: Path) -> None:
    """Delete a folder's checkpoint and its temporary file, if they exist."""
    for name in (NAME, TEMPORARY):
        (folder / name).unlink(missing_ok=True)


def folders_below(top: Path) -> Iterator[Path]:
    """Yield a folder and all below it, also behind links, each once."""
    seen = set()

    def refuse(error: OSError) -> None:
        raise error

    for path, names, _ in os.walk(top, followlinks=True, onerror=refuse):
        names.sort()
        status = os.stat(path)
        if (status.st_dev, status.st_ino) in seen:
            names.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        yield Path(path)


def check_empty(name: str, folder: Path) -> None:
    """Raise `ValueError` if a folder is a file or holds more than our leftovers."""
    if folder.is_file():
        raise ValueError(f"{name} {folder} is a file; give a new folder.")
    ours = (TEMPORARY, guards.LOCK, LIMIT)
    others = sorted(p.name for p in folder.glob("*") if p.name not in ours)
    if others:
        raise ValueError(
            f"{name} {folder} is not empty (it holds {others[0]!r}); give a new folder."
        )


def replace(file: Path, content: bytes, *, mode: int = 0o644) -> None:
    """Write bytes to a file, atomically and synced; an `OSError` leaves the old file.

    Raises:
        OSError: The disk refuses; the old file is intact.
    """
    temporary = file.with_name(f"{file.name}.tmp")
    with uninterruptible():
        try:
            temporary.unlink(missing_ok=True)  # of a crash
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL  # refuses a link at that name
            with os.fdopen(os.open(temporary, flags, mode), "wb") as out:
                out.write(content)
                out.flush()
                os.fsync(out.fileno())  # the content before its name
            os.replace(temporary, file)  # at once, or not at all
            if os.name == "posix":  # makes the rename last through a power cut
                folder = os.open(file.parent, os.O_RDONLY)
                try:
                    os.fsync(folder)
                finally:
                    os.close(folder)
        except OSError as error:
            raise OSError(f"cannot write {file}: {error.strerror}") from error
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def replace_json(file: Path, page: dict[str, Any]) -> None:
    """Write a dict to a file as JSON, atomically; `OSError` if the disk refuses."""
    replace(file, (json.dumps(page, indent=2) + "\n").encode())


def npz(arrays: dict[str, Any]) -> bytes:
    """Return the bytes of an `.npz` file that holds these arrays by name."""
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def versions() -> dict[str, str]:
    """Return a dict of the versions of the packages that a run's bits depend on."""
    found = {name: importlib.metadata.version(name) for name in _PACKAGES}
    return {"dpbilevel": __version__} | found | {"python": platform.python_version()}


def software() -> dict[str, str | bool]:
    """Return a dict of versions, and JAX's backend, floats and threefry kind."""
    settings: Any = jax.config  # without the names of all settings for type checkers
    return {
        **versions(),
        "backend": jax.default_backend(),
        "floats": str(jnp.result_type(float)),
        "partitionable": settings.jax_threefry_partitionable,
    }


def hashed(values: Iterable[Any]) -> str:
    """Return the SHA-256 of arrays and bytes together, as hexadecimal text."""
    found = hashlib.sha256()
    for value in values:
        found.update(value if isinstance(value, bytes) else np.asarray(value).tobytes())
    return found.hexdigest()


def first_checkpoint(
    problem: AbstractProblem,
    solver: AbstractSolver,
    w0: PyTree,
    *,
    key: PRNGKey,
    fingerprint: dict[str, Any],
    with_start: bool,
) -> Checkpoint:
    """Return the `Checkpoint` of a run before its first step.

    With `with_start` the initial point is row 0 of its path.
    """
    state = _on_host(solver.init(problem, w0))
    start = _on_host(solver.released(state))
    path = jax.tree.map(lambda v: v[None] if with_start else v[None][:0], start)
    return Checkpoint(0, key, state, path, fingerprint)


def after(
    saved: Checkpoint, key: PRNGKey, steps: int, state: PyTree, rows: PyTree
) -> Checkpoint:
    """Return `saved` after more steps: new key and state, `rows` added to its path.

    The key is that of the steps to come, the rows are the released iterates.
    """
    # Through the host each time, as after a resume, so that no bit can differ.
    state, rows = _on_host(state), _on_host(rows)
    path = jax.tree.map(lambda *v: np.concatenate(v), saved.path, rows)
    return Checkpoint(saved.done + steps, key, state, path, saved.fingerprint)


def resume_run(
    folder: Path, saved: Checkpoint, first: Checkpoint, records: str = "the records"
) -> Checkpoint:
    """Return `saved` with its pytrees rebuilt; `ValueError` if it is of another run.

    `first` is the run before its first step, as it would begin now. A `ValueError`
    names what has changed; `records` are what `fingerprint["records"]` identifies.
    """
    then, now = (str(jax.random.key_impl(run.key)) for run in (saved, first))
    if then != now:
        raise ValueError(
            f"cannot resume {folder}: it began with a key of {then}, this key is of "
            f"{now}. Give a key of that generator, as of dpbilevel.root_key({then!r})."
        )
    check_same_run(folder, saved.fingerprint, first.fingerprint)
    if saved.fingerprint["records"] != first.fingerprint["records"]:
        raise ValueError(
            f"cannot resume {folder}: {records} are not those the run began with. Give "
            "the same ones, or a new folder for a second release."
        )
    state, path = (
        jax.tree.unflatten(jax.tree.structure(tree), leaves)
        for tree, leaves in ((first.state, saved.state), (first.path, saved.path))
    )
    return dataclasses.replace(saved, state=state, path=path)


def check_same_run(folder: Path, then: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise `ValueError` if fingerprints differ, but for keys and records (SECRET).

    The `ValueError` says what changed.
    """
    for part in [k for k in now if k not in (FIRST_KEY, "records")]:
        changed = _differences(then.get(part), now[part], part)
        if changed and part == "program":  # it is a hash
            changed = ["the loss or the solver has changed"]
        if changed:
            raise ValueError(
                f"cannot resume {folder}: {'; '.join(changed[:3])}. Change it back, or "
                "give a new folder for a second release."
            )


def solution_of(
    problem: AbstractProblem, solver: AbstractSolver, saved: Checkpoint
) -> Solution:
    """Return the `Solution` of a run by its last checkpoint, in NumPy arrays."""
    state = jax.tree.map(jnp.asarray, saved.state)
    value = _on_host(solver.answer(problem, state))
    return Solution(value, saved.path, int(rejected_updates(state)))


def _on_host(tree: PyTree) -> PyTree:
    return jax.tree.map(np.asarray, jax.device_get(tree))


def as_json(value: Any) -> Any:
    """Convert a value to types that JSON can hold; functions to their names."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return {"class": type(value).__name__} | fields
    match value:
        case enum.Enum():
            return value.value
        case np.ndarray() | np.generic() | jax.Array():
            return np.asarray(value).tolist()
    return getattr(value, "__qualname__", type(value).__qualname__)


def _differences(then: Any, now: Any, name: str) -> list[str]:
    """Return a list of texts on the differences between two nested values."""
    if isinstance(then, dict) and isinstance(now, dict):
        return [
            difference
            for key in then | now
            for difference in _differences(then.get(key), now.get(key), f"{name}.{key}")
        ]
    return [] if then == now else [f"{name} was {_brief(then)}, is {_brief(now)}"]


def _brief(value: Any) -> str:
    text = "absent" if value is None else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
