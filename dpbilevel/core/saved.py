"""Folders of saved solutions: arrays as safetensors, everything else as JSON.

Neither of them can run code, as a pickle could.
"""

import hashlib
import importlib
import itertools
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import PyTree

PAGE = "solution.json"
ARRAYS = "arrays.safetensors"
_FORMAT = 1
_PLAIN, _REAL = (bool, int, float, str), (jnp.floating, jnp.integer, jnp.bool_)
# Types that safetensors returns as NumPy's; others are kept as integers of their size.
_NATIVE = {f"{sign}int{size}" for sign in ("", "u") for size in (8, 16, 32, 64)}
_NATIVE |= {"bool", "float16", "float32", "float64"}
Arrays = dict[str, np.ndarray]


class _NotLike(Exception):
    """Raised if a template is missing or does not fit what was saved."""


def write(
    folder: Path, parts: dict[str, PyTree], facts: dict[str, Any], *, overwrite: bool
) -> None:
    """Write pytrees and facts into a folder at once; may replace some if `overwrite`.

    Parts are pytrees of arrays by name, facts further values of JSON. Errors are those
    of `Solution.save`.
    """
    inside = {file.name for file in folder.iterdir()} if folder.exists() else set()
    if not inside <= {PAGE, ARRAYS} or (inside and not overwrite):
        raise ValueError(
            f"save: {folder} is not empty. Give a new folder, or overwrite=True if it "
            "holds a saved solution and nothing else."
        )
    arrays: Arrays = {}
    page = {"format": _FORMAT, **facts}
    page["parts"] = {}
    for name, part in parts.items():
        leaves = [
            (path := jax.tree_util.keystr(keys), _leaf(leaf, f"{name}{path}", arrays))
            for keys, leaf in jax.tree_util.tree_leaves_with_path(part)
        ]
        structure = _structure(part, itertools.count())
        page["parts"][name] = {"structure": structure, "leaves": leaves}
    content = importlib.import_module("safetensors.numpy").save(arrays)
    page["sha256"] = hashlib.sha256(content).hexdigest()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".save-") as room:
        fresh = Path(room, "new")
        fresh.mkdir()
        (fresh / ARRAYS).write_bytes(content)
        (fresh / PAGE).write_text(json.dumps(page, indent=2) + "\n", encoding="utf-8")
        old = Path(f"{room}.old")  # not in the room: it stays if something fails
        if folder.exists():
            folder.rename(old)
        fresh.rename(folder)
        shutil.rmtree(old, ignore_errors=True)


def read(folder: Path, like: PyTree = None) -> tuple[dict[str, PyTree], dict[str, Any]]:
    """Return two dicts: the pytrees (of NumPy) and facts that `write` put in a folder.

    Nodes of other kinds than dictionaries, lists and tuples need `like`, a pytree with
    the structure of the parts. Errors are those of `load`.
    """
    try:
        page = json.loads((folder / PAGE).read_text(encoding="utf-8"))
        content = (folder / ARRAYS).read_bytes()
        if page["format"] != _FORMAT:
            raise ValueError(f"{PAGE} is of another version of dpbilevel")
        if hashlib.sha256(content).hexdigest() != page["sha256"]:
            raise ValueError(f"{ARRAYS} is not the file that {PAGE} belongs to")
        arrays = importlib.import_module("safetensors.numpy").load(content)
        parts = {
            name: _decoded(part, arrays, like, int(name == "trajectory"))
            for name, part in page["parts"].items()
        }
    except _NotLike:
        what = "needs like=, a" if like is None else "does not fit like=: give a"
        raise ValueError(
            f"load: {folder} {what} value of the saved structure and shapes, "
            "such as the model before training, with its adapters if it has some."
        ) from None
    except Exception as error:  # files of others may raise anything
        raise unreadable(folder, error) from error
    return parts, page


def unreadable(folder: Path, error: Exception) -> ValueError:
    """Return a `ValueError` that says why files of a solution cannot be read."""
    known = isinstance(error, OSError | ValueError)
    why = str(error).rstrip(".") if known else "a part is missing or of another kind"
    return ValueError(
        f"load: {folder} is no solution of this version, or damaged: {why}."
    )


def _structure(node: Any, places: Iterator[int]) -> Any:
    """Return the nesting of containers as JSON values, with numbered leaves."""
    if node is None:
        return None
    if type(node) in (list, tuple):
        return {type(node).__name__: [_structure(v, places) for v in node]}
    if type(node) is dict and all(type(key) in (str, int) for key in node):
        return {"dict": [[k, _structure(node[k], places)] for k in sorted(node)]}
    if jax.tree_util.all_leaves([node]):
        return next(places)
    return {"object": type(node).__name__}


def _leaf(leaf: Any, name: str, arrays: Arrays) -> dict[str, Any]:
    if type(leaf) in _PLAIN:
        return {"plain": leaf}
    if not isinstance(leaf, np.generic | np.ndarray | jax.Array):
        return {"object": type(leaf).__name__}  # such as a function
    real = any(jnp.issubdtype(leaf.dtype, kind) for kind in _REAL)  # a key is not
    if isinstance(leaf, Tracer) or not real:
        raise ValueError(
            f"save: {name} is a key, no real number, or traced by JAX. Save what a run "
            "released, outside of jax.jit."
        )
    array = np.asarray(leaf, order="C")
    kind = array.dtype.name
    arrays[name] = array if kind in _NATIVE else array.view(f"u{array.itemsize}")
    return {"array": name, "dtype": kind}


def _decoded(part: Any, arrays: Arrays, like: PyTree, axes: int) -> PyTree:
    """Return a pytree from JSON values and arrays, shaped like a template if given.

    The arrays have `axes` leading axes that those of the template do not have.
    """
    if like is None or not part["leaves"]:
        leaves = [_value(leaf, arrays, None, axes) for _, leaf in part["leaves"]]
        return _built(part["structure"], leaves)
    templates, structure = jax.tree_util.tree_flatten_with_path(like)
    paths = [jax.tree_util.keystr(keys) for keys, _ in templates]
    if paths != [path for path, _ in part["leaves"]]:
        raise _NotLike
    pairs = zip(part["leaves"], templates, strict=True)
    leaves = [_value(leaf, arrays, of, axes) for (_, leaf), (_, of) in pairs]
    return jax.tree.unflatten(structure, leaves)


def _value(leaf: Any, arrays: Arrays, like: Any, axes: int) -> Any:
    if "plain" in leaf:
        return leaf["plain"]
    if "object" in leaf:
        if like is None:
            raise _NotLike
        return like
    array = arrays[leaf["array"]].view(jnp.dtype(leaf["dtype"])).copy()
    if like is not None and array.shape[axes:] != getattr(like, "shape", ()):
        raise _NotLike
    return array


def _built(node: Any, leaves: list[Any]) -> PyTree:
    """Return the containers that `_structure` described, with these leaves."""
    if node is None or type(node) is int:
        return None if node is None else leaves[node]
    ((kind, below),) = node.items()
    if kind == "dict":
        return {key: _built(v, leaves) for key, v in below}
    if kind not in ("list", "tuple"):
        raise _NotLike
    found = [_built(v, leaves) for v in below]
    return found if kind == "list" else tuple(found)
