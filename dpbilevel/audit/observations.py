"""Observations of many runs of a mechanism; runs that show nothing are refused."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key, PyTree

from .. import _checks
from ..privacy.noise import PRNGKey

_FEWEST = 1000
_AT_ONCE = 10_000  # runs per batch, to bound memory


def check_arguments(run: Any, claim: Any, runs: Any) -> None:
    """Check that an audit can call `run` and `claim`, and has enough runs."""
    _checks.function("trade_off", run=run)
    if not callable(claim):
        raise TypeError(
            "trade_off: claim must be a function, such as audit.gaussian_claim(mu)."
        )
    if not isinstance(runs, int | np.integer) or isinstance(runs, bool):
        got = _checks.shown(runs)
        raise TypeError(f"trade_off: runs must be an integer, got {got}.")
    if runs < _FEWEST:
        raise ValueError(f"trade_off: runs must be at least {_FEWEST}, got {runs}.")


def check_pair(data: PyTree, neighbour: PyTree) -> None:
    """Check that two datasets have equal structures and shapes, and differ."""
    left, right = (str(jax.tree.structure(side)) for side in (data, neighbour))
    if left != right:
        raise ValueError("trade_off: data and neighbour have different structures.")
    paths = jax.tree_util.tree_leaves_with_path(data)
    same = True
    for (path, one), other in zip(paths, jax.tree.leaves(neighbour), strict=True):
        if np.shape(one) != np.shape(other):
            where = jax.tree_util.keystr(path)
            raise ValueError(
                f"trade_off: data{where} and neighbour{where} must have the same "
                f"shape, got {np.shape(one)} and {np.shape(other)}."
            )
        same &= np.array_equal(np.asarray(one), np.asarray(other), equal_nan=True)
    if same:
        raise ValueError("trade_off: data and neighbour are equal; change a record.")


def observe(
    run: Callable[..., PyTree],
    data: PyTree,
    neighbour: PyTree,
    *,
    key: PRNGKey,
    runs: int,
) -> tuple[Float[np.ndarray, "runs d"], Float[np.ndarray, "runs d"]]:
    """Return two arrays of features, one for each dataset, with a row for each run.

    Raises:
        ValueError: All runs show the same, or some numbers are never finite.
        TypeError: `run` returns something else than real numbers.
    """
    if not isinstance(run, eqx.Module):
        run = jax.tree_util.Partial(run)
    sides = zip((data, neighbour), jax.random.split(key), strict=True)
    keyed = ((records, jax.random.split(side, runs)) for records, side in sides)
    raw = [np.asarray(_features(run, *side), np.float64) for side in keyed]
    # A value that is not finite on one side only tells the two apart.
    present, absent = (np.clip(np.nan_to_num(side), -1e30, 1e30) for side in raw)
    first = present[0]  # a number that never varies shows nothing
    constant = np.all(present == first, axis=0) & np.all(absent == first, axis=0)
    lost = constant & ~np.any([np.isfinite(side).any(axis=0) for side in raw], axis=0)
    if lost.any():
        raise ValueError(
            f"trade_off: {lost.sum()} observed numbers are never finite; omit them."
        )
    if constant.all():
        raise ValueError("trade_off: all runs agree; let run draw from its key.")
    return present, absent


def scores_of(
    statistic: Callable[[np.ndarray], np.ndarray], rows: np.ndarray
) -> Float[np.ndarray, " runs"]:
    """Return the statistic of every run, checked to be one number a run."""
    scores = np.asarray(statistic(rows), np.float64)
    if scores.shape != rows.shape[:1]:
        raise ValueError("trade_off: statistic must return one number a run.")
    if np.isnan(scores).any():
        raise ValueError("trade_off: statistic returned NaN. Return numbers.")
    return np.clip(scores, -1e300, 1e300)  # quantiles of infinities are NaN


@jax.jit
def _features(
    run: Callable[..., PyTree], data: PyTree, keys: Key[Array, " runs"]
) -> Float[Array, "runs d"]:
    def one(key):
        flat = map(jnp.ravel, _numbers(run(data, key=key)))
        return jnp.concatenate([v.astype(jnp.result_type(float)) for v in flat])

    return jax.lax.map(one, keys, batch_size=min(_AT_ONCE, len(keys)))


def _numbers(shown: PyTree) -> list[Any]:
    """Return the leaves of the result of a run, checked to be real numbers."""
    leaves = jax.tree.leaves(shown)
    groups = jnp.floating, jnp.integer, jnp.bool_
    for leaf in leaves:
        kind = getattr(leaf, "dtype", type(leaf))
        known = isinstance(leaf, int | float | jax.Array | np.ndarray | np.generic)
        if not known or not any(jnp.issubdtype(kind, group) for group in groups):
            name = kind.__name__ if isinstance(kind, type) else kind
            raise TypeError(
                f"trade_off: run must return arrays of real numbers, got {name}."
            )
    if not sum(np.size(leaf) for leaf in leaves):
        raise TypeError("trade_off: run returned no numbers; return arrays.")
    return leaves
