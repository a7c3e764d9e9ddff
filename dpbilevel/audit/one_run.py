"""One-run audit: the number of canaries in one run that can be guessed."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from .. import _checks
from ..core.loop import solved
from ..onelevel import FiniteSum, NoisyGD
from ..privacy.noise import PRNGKey, check_key
from .canaries import check_solver
from .claims import Claim, TradeOffCurve, ledger_claims
from .worst_cases import BEYOND

# Range of the search for the least refuted noise, in units of the claimed noise.
_MOST_NOISE, _LEAST_NOISE = 2.0**8, 2.0**-4


@dataclasses.dataclass(frozen=True)
class OneRun:
    r"""Outcome of a one-run audit.

    Attributes:
        canaries: Number of coin flips hidden in the run.
        guesses: Number of guesses; the auditor abstained on the other coins.
        correct: Number of right guesses.
        delta: $\delta$.
        significance: Chance that the bound is wrong.
        measured_epsilon: Lower bound on $\varepsilon$ at `delta`.
        claimed_epsilon: The accountant's $\varepsilon$ at `delta`.
    """

    canaries: int
    guesses: int
    correct: int
    delta: float
    significance: float
    measured_epsilon: float
    claimed_epsilon: float

    @property
    def passed(self) -> bool:
        """Whether no violation was found; not a proof of privacy."""
        return self.measured_epsilon <= self.claimed_epsilon

    def __str__(self) -> str:
        """Return the outcome in a sentence."""
        verdict = "no violation found" if self.passed else "VIOLATION"
        return (
            f"{verdict} in one run with {self.canaries} canaries: {self.correct} of "
            f"{self.guesses} guesses right, so epsilon is at least "
            f"{self.measured_epsilon:.3f} at delta = {self.delta:.3g} "
            f"({1 - self.significance:.2%} confidence); claimed: "
            f"{self.claimed_epsilon:.3f}"
        )


def one_run(
    solver: NoisyGD,
    *,
    key: PRNGKey,
    canaries: int = 1000,
    guesses: int = 100,
    delta: float = 1e-5,
    significance: float = 0.05,
) -> OneRun:
    r"""Return a `OneRun`: coin flips guessed from one run of noisy gradient descent.

    Record $i$ is $\pm e_i$, by a fair coin, far beyond the clip norm. The auditor sees
    the answer, guesses the signs of the largest coordinates and abstains on the others.
    The audit is far weaker than `trade_off`, which makes thousands of runs.

    Args:
        solver: `NoisyGD` under replace-one, with noise. It is bound to `canaries`
            records here; its own sizes are not used.
        key: A typed key.
        canaries: The number of records and of coordinates.
        guesses: The number of signs to guess, fixed beforehand.
        delta: $\delta$ at which to bound $\varepsilon$.
        significance: The chance that the bound is wrong.

    Raises:
        ValueError: More guesses than canaries, or no noise multiplier yet.
        TypeError: A plan instead of its solver, or no solver.

    Privacy:
        Reads no records: the data are canaries.

    References:
        Steinke, Nasr and Jagielski, "Privacy auditing with one (1) training run",
        NeurIPS 2023; Mahloujifar, Melis and Chaudhuri, "Auditing f-differential privacy
        in one run", ICML 2025 (the bound).
    """
    check_key(key)
    check_solver(solver, "one_run")
    _checks.count("one_run", canaries=canaries, guesses=guesses)
    _checks.fraction("one_run", delta=delta, significance=significance)
    if guesses > canaries:
        raise ValueError(f"one_run: guesses must be at most {canaries}, got {guesses}.")
    key_signs, key_run = jax.random.split(key)
    signs = jax.random.rademacher(key_signs, (canaries,), float)
    problem = FiniteSum(jnp.vdot)  # a record is its own gradient
    planned = solver.with_sizes(canaries)
    records, start = jnp.diag(BEYOND * signs), jnp.zeros(canaries)
    answer = jax.jit(solved)(problem, planned, records, start, key=key_run).value
    # Descent moves against the record.
    moved, hidden = -np.asarray(answer), np.asarray(signs)
    chosen = np.argsort(-np.abs(moved))[:guesses]
    correct = int((np.sign(moved[chosen]) == hidden[chosen]).sum())
    counts = correct, guesses, canaries, significance

    def with_noise(factor: float) -> NoisyGD:
        noise = factor * planned.release_noise.multiplier
        return dataclasses.replace(planned, noise_multiplier=noise)

    def is_refuted(factor: float) -> bool:
        (claim,) = ledger_claims(with_noise(factor).ledger(problem, canaries)).values()
        return refutes(*counts, claim)

    most = _least_refuted(is_refuted)
    measured = 0.0
    if most is not None:
        measured = with_noise(most).ledger(problem, canaries).epsilon(delta)
    claimed = planned.ledger(problem, canaries).epsilon(delta)
    return OneRun(canaries, guesses, correct, delta, significance, measured, claimed)


def refutes(
    correct: int, guesses: int, canaries: int, significance: float, claim: Claim
) -> bool:
    r"""Return whether so many right guesses of fair coins refute a privacy profile.

    Let $m$ coins be hidden, $r$ of them guessed, and $p_i$ the chance that $i$ guesses
    are right. With $\bar f(\beta)$ the largest chance under one of two neighbours of an
    event that has chance $\beta$ under the other, which is concave, flipping one coin
    turns its right guess into a wrong one and leaves one right guess less, so that for
    every $v$

    $$\sum_{i \ge v} \tfrac{i}{m} p_i \le
    \bar f\Bigl(\sum_{i \ge v - 1} \tfrac{r - i}{m} p_i\Bigr) .$$

    If $v$ or more are right with a chance of `significance`, this forces a least
    $p_{v-1}$, then a least $p_{v-2}$, and so on. The claim is refuted if these sum
    to more than 1 (`docs/audit.md`, "One run").

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


def _least_refuted(is_refuted: Callable[[float], bool]) -> float | None:
    """Return the least noise factor whose claim is refuted, to 2 %, or `None`."""
    low, high = (_LEAST_NOISE, 1.0) if is_refuted(1.0) else (1.0, _MOST_NOISE)
    if high > 1 and not is_refuted(high):
        return None
    while high > 1.02 * low:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if is_refuted(middle) else (middle, high)
    return high  # which is refuted
