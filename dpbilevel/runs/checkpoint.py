"""Checkpoints of a run in progress. SECRET: they hold the key of future noise."""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import io
import json
import os
import platform
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from .._version import __version__
from ..privacy.noise import PRNGKey
from .interrupts import uninterruptible

NAME = "checkpoint.SECRET"
TEMPORARY = f"{NAME}.tmp"
RESULT = "result.json"  # the result of a run of the command line
SEARCH = "search.json"  # the result of a search
CHECK = "usability"  # in a fingerprint: the released check of the records
_PACKAGES = ("dp-accounting", "equinox", "jax", "jaxlib", "numpy", "optax")
_NOTICE = (
    b"dpbilevel checkpoint 2. SECRET: it holds the key of the noise still to come and "
    b"a hash of the records; whoever has it can subtract that noise. It holds no value "
    b"of a record and no value without noise. Keep it, or delete it; do not share it.\n"
)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A run between two chunks. SECRET.

    Attributes:
        done: Number of steps done.
        key: The key of the steps to come. Earlier noise cannot be computed from it.
        state: The solver's state, on the host; a list of its leaves after `read`.
        path: The released trajectory so far, on the host; a list of its leaves after
            `read`.
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


def write(folder: Path, checkpoint: Checkpoint, *, notice: bytes = _NOTICE) -> None:
    """Replace the folder's checkpoint in one step; only its owner can read it.

    The file starts with `notice`, a text that says what the file holds.

    Raises:
        OSError: The disk refuses; the previous checkpoint is intact.
    """
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
    replace(folder / NAME, notice + digest + b"\n" + body, mode=0o600)  # holds a key


def read(folder: Path, *, notice: bytes = _NOTICE) -> Checkpoint:
    """Return the checkpoint of a folder.

    Raises:
        ValueError: There is none, or it is damaged or of another program.
    """
    file = folder / NAME
    if not file.is_file():
        raise ValueError(
            f"nothing to resume: {folder} holds no checkpoint. Give the folder of the "
            "checkpoint, or start a new run."
        )
    return parsed(file, file.read_bytes(), notice=notice)


def parsed(file: Path, content: bytes, *, notice: bytes = _NOTICE) -> Checkpoint:
    """Return the checkpoint that a file holds.

    Raises:
        ValueError: The content is damaged or of another program.
    """
    digest, _, body = content.removeprefix(notice).partition(b"\n")
    intact = hashlib.sha256(body).hexdigest().encode() == digest
    if not content.startswith(notice) or not intact:
        raise ValueError(
            f"{file} is damaged or not a checkpoint of this version of dpbilevel, so "
            "the run cannot go on. Put back a copy of it, or start a new run: another "
            "release, which adds to the folder's spending record."
        )
    arrays = np.load(io.BytesIO(body), allow_pickle=False)  # a pickle could run code
    public = json.loads(arrays["public"].tobytes())
    states, paths = public["leaves"]
    return Checkpoint(
        done=public["done"],
        key=jax.random.wrap_key_data(arrays["key"], impl=public["generator"]),
        state=[arrays[f"state_{i}"] for i in range(states)],
        path=[arrays[f"path_{i}"] for i in range(paths)],
        fingerprint=public["fingerprint"],
    )


def has_released(folder: Path) -> bool:
    """Return whether the run of a folder's checkpoint, if any, released anything."""
    file = folder / NAME
    if not file.exists():
        return False
    content = file.read_bytes()
    notice = content[: content.find(b"\n") + 1]  # of a run or a search
    try:
        saved = parsed(file, content, notice=notice)
    except Exception:  # damaged
        return True
    return saved.done > 0 or CHECK in saved.fingerprint


def remove(folder: Path) -> None:
    """Delete the checkpoint of a finished run, and the leftovers of a crash."""
    for name in (NAME, TEMPORARY):
        (folder / name).unlink(missing_ok=True)


def replace(file: Path, content: bytes, *, mode: int = 0o644) -> None:
    """Write a file so that at any time it is completely the old or the new one.

    Raises:
        OSError: The disk refuses; the old file is intact.
    """
    temporary = file.with_name(f"{file.name}.tmp")
    with uninterruptible():
        try:
            temporary.unlink(missing_ok=True)  # of a crash
            _create(temporary, content, mode)
            os.replace(temporary, file)  # at once, or not at all
            _sync_folder(file.parent)
        except OSError as error:
            raise OSError(f"cannot write {file}: {error.strerror}") from error
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def replace_json(file: Path, page: dict[str, Any]) -> None:
    """Write a page of JSON by `replace`, which raises `OSError`."""
    replace(file, (json.dumps(page, indent=2) + "\n").encode())


def npz(arrays: dict[str, Any]) -> bytes:
    """Return arrays as a file in NumPy's format."""
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def versions() -> dict[str, str]:
    """Return the versions of the software that a run's bits depend on."""
    found = {name: importlib.metadata.version(name) for name in _PACKAGES}
    return {"dpbilevel": __version__} | found | {"python": platform.python_version()}


def software() -> dict[str, str | bool]:
    """Return all that a run's bits depend on besides its arguments."""
    settings: Any = jax.config  # without the names of all settings for type checkers
    return {
        **versions(),
        "backend": jax.default_backend(),
        "floats": str(jnp.result_type(float)),
        "partitionable": settings.jax_threefry_partitionable,
    }


def _create(file: Path, content: bytes, mode: int) -> None:
    """Write a new file, down to the disk."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL  # refuses a link at that name
    descriptor = os.open(file, flags, mode)
    with os.fdopen(descriptor, "wb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())  # the content before its name


def _sync_folder(folder: Path) -> None:
    """Make a rename last through a power cut, if the system can sync folders."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
