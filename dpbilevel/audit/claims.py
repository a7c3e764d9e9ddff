"""Claims that an audit tests, and observations of many runs to test them on."""

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import scipy
from jaxtyping import Array, Float, Key, PyTree

from .. import _checks
from .._extras import dp_accounting
from ..privacy import Ledger, Neighbours
from ..privacy.accounting import profiles
from ..privacy.accounting.closed_forms import pure_delta
from ..privacy.keys import PRNGKey

Claim: TypeAlias = Callable[[Float[np.ndarray, " n"]], Float[np.ndarray, " n"]]
"""A privacy profile: the largest allowed delta at each epsilon of an array."""

# Any set of epsilons gives valid bounds; a dense one gives tight ones.
_EPSILONS = np.concatenate([[0.0], np.geomspace(1e-3, 60.0, 1600)])
FALSE_ALARMS = (0.01, 0.05)


def gaussian_claim(mu: float) -> Claim:
    r"""Return the privacy profile, a function, of $\mu$-Gaussian differential privacy.

    Args:
        mu: $\mu \ge 0$.

    Raises:
        ValueError: $\mu$ is negative or not finite.
    """
    _checks.non_negative("gaussian_claim", mu=mu)
    return functools.partial(profiles.gaussian_delta, mu)


def pure_claim(epsilon: float) -> Claim:
    r"""Return the privacy profile, a function, of $\varepsilon_0$-differential privacy.

    Randomized response is the worst such mechanism, so $\delta(\varepsilon) =
    (e^{\varepsilon_0} - e^\varepsilon)_+ / (1 + e^{\varepsilon_0})$.

    Args:
        epsilon: $\varepsilon_0 \ge 0$.

    Raises:
        ValueError: $\varepsilon_0$ is negative or not finite.

    References:
        Kairouz, Oh and Viswanath, "The composition theorem for differential privacy",
        ICML 2015.
    """
    _checks.non_negative("pure_claim", epsilon=epsilon)
    return functools.partial(pure_delta, epsilon)


def event_claim(event: "dp_accounting.DpEvent", neighbours: Neighbours) -> Claim:
    """Return an event's privacy profile, a function, by this library's accountant.

    Multipliers of the event are relative to the sensitivity under the relation. The
    profile is computed when first called; it then raises `ValueError` if the library
    does not account for the event.
    """
    mu = profiles.gaussian_mu(event)
    if mu is not None:
        return functools.partial(profiles.gaussian_delta, mu)
    return lambda e: np.vectorize(profiles.profile(event, neighbours))(e)


def ledger_claims(ledger: Ledger) -> dict[str, Claim]:
    """Return the privacy profiles that a ledger promises, functions by kind of person.

    Each includes the chance of overflowing batches.
    """
    failure, neighbours = ledger.failure, ledger.neighbours

    def with_slack(claim: Claim) -> Claim:
        return lambda e: claim(e) + failure * (1 + np.exp(e))

    events = ledger.events().items()
    return {person: with_slack(event_claim(e, neighbours)) for person, e in events}


class TradeOffCurve:
    r"""Largest true positive rate of any test under a claim, by false positive rate.

    A test and its complement both obey the claim, so at false positive rate $\alpha$
    the rate is

    $$\inf_{\varepsilon \ge 0} \min\bigl(\delta(\varepsilon) + e^\varepsilon \alpha,\;
    1 - e^{-\varepsilon} (1 - \delta(\varepsilon) - \alpha)\bigr).$$

    Args:
        claim: The profile; called once, on non-negative epsilons.

    Raises:
        ValueError: The profile is NaN somewhere.

    References:
        Kairouz, Oh and Viswanath, "The composition theorem for differential privacy",
        ICML 2015, Theorem 2.1.
    """

    def __init__(self, claim: Claim):
        self._deltas = np.asarray(claim(_EPSILONS), np.float64)
        if np.isnan(self._deltas).any():
            raise ValueError("the claim is NaN at some epsilon; return a delta.")

    def __call__(self, false_positives: Float[np.ndarray, " n"]) -> np.ndarray:
        """Return the largest true positive rates at these false positive rates."""
        rates = np.asarray(false_positives, np.float64)[..., None]
        direct = self._deltas + np.exp(_EPSILONS) * rates
        mirrored = 1 - np.exp(-_EPSILONS) * (1 - self._deltas - rates)
        return np.minimum(1.0, np.minimum(direct, mirrored).min(axis=-1))

    def least_false_positives(self, true_positives: float) -> float:
        """Return the least false positive rate at this true positive rate."""
        direct = np.exp(-_EPSILONS) * (true_positives - self._deltas)
        mirrored = 1 - self._deltas - np.exp(_EPSILONS) * (1 - true_positives)
        return float(max(0.0, direct.max(), mirrored.max()))


def largest_powers(*ledgers: Ledger) -> dict[str, float]:
    """Return a dict of any attack's largest detection rate, by rate of false alarms.

    Ledgers are of different people, and the worst-off person decides. The dict has the
    keys "0.01" and "0.05"; rates are by the exact trade-off curves.

    Privacy:
        Public: a function of ledgers.
    """
    claims = (claim for led in ledgers for claim in ledger_claims(led).values())
    alarms = np.asarray(FALSE_ALARMS)
    curves = [TradeOffCurve(claim)(alarms) for claim in claims]
    worst = np.max(np.stack([alarms, *curves]), axis=0)
    return dict(zip(map(str, FALSE_ALARMS), worst.tolist(), strict=True))


def refutes(
    correct: int, guesses: int, canaries: int, significance: float, claim: Claim
) -> bool:
    r"""Return whether `correct` of `guesses` coin guesses refute a privacy profile.

    Let $m$ coins be hidden, $r$ of them guessed, and $p_i$ the chance that $i$ guesses
    are right. With $\bar f(\beta)$ the largest chance under one of two neighbours of an
    event that has chance $\beta$ under the other, which is concave, flipping one coin
    turns its right guess into a wrong one and leaves one right guess less, so that for
    every $v$

    $$\sum_{i \ge v} \tfrac{i}{m} p_i \le
    \bar f\Bigl(\sum_{i \ge v - 1} \tfrac{r - i}{m} p_i\Bigr) .$$

    If $v$ or more are right with a chance of `significance`, this forces a least
    $p_{v-1}$, then a least $p_{v-2}$, and so on. The claim is refuted if these sum
    to more than 1 (`docs/mathematics.md`, "Audits of one run").

    Args:
        correct: $v$.
        guesses: $r$, at least $v$, a number that is fixed beforehand.
        canaries: $m$, at least $r$.
        significance: The chance that a true claim is refuted.
        claim: Its profile $\delta(\varepsilon)$, for one coin.

    Raises:
        ValueError: Counts out of order.

    References:
        Mahloujifar, Melis and Chaudhuri, "Auditing f-differential privacy in one run",
        ICML 2025.
    """
    if not 0 <= correct <= guesses <= canaries:
        raise ValueError("refutes: needs 0 <= correct <= guesses <= canaries.")
    curve = TradeOffCurve(claim)
    right = significance * correct / canaries
    wrong = significance * (guesses - correct) / canaries
    for count in range(correct - 1, -1, -1):
        more = max(0.0, curve.least_false_positives(right) - wrong)
        wrong += more
        right += more * count / (guesses - count)
        if right + wrong > guesses / canaries:
            return True
    return False


def gaussian_mu_of(true_positives: float, false_positives: float) -> float:
    r"""Return the Gaussian $\mu$ at which the best test has these two rates."""
    # Rates of 0 and 1 have no quantile; no number of runs measures rates so near.
    rates = np.clip([true_positives, false_positives], 1e-16, 1 - 1e-16)
    return float(np.subtract(*scipy.special.ndtri(rates)))


_FEWEST = 1000
_AT_ONCE = 10_000  # runs per batch, to bound memory


def check_arguments(run: Any, claim: Any, runs: Any) -> None:
    """Raise an error unless `run` and `claim` are functions and there are 1000 runs."""
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
    """Raise `ValueError` if two datasets differ in structure or shape, or are equal."""
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
    groups = jnp.floating, jnp.integer, jnp.bool_

    def one(key):
        leaves = jax.tree.leaves(run(data, key=key))
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
        flat = map(jnp.ravel, leaves)
        return jnp.concatenate([v.astype(jnp.result_type(float)) for v in flat])

    return jax.lax.map(one, keys, batch_size=min(_AT_ONCE, len(keys)))
