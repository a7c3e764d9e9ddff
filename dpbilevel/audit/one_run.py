"""One-run audit: many canaries in one run, and how many of them can be guessed."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import scipy

from .. import _checks
from ..core.loop import solve
from ..onelevel.noisy_gd import NoisyGD
from ..onelevel.problem import FiniteSum
from ..privacy.noise import PRNGKey, check_key
from .canaries import check_solver
from .worst_cases import BEYOND

_LARGEST = 60.0


@dataclasses.dataclass(frozen=True)
class OneRun:
    r"""The outcome of a one-run audit.

    Attributes:
        canaries: Coin flips hidden in the run.
        guesses: How many of them were guessed; on the others the auditor abstained.
        correct: How many guesses were right.
        delta: $\delta$.
        significance: The chance that the bound is wrong.
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
        """Whether no violation was found: not a proof of privacy."""
        return self.measured_epsilon <= self.claimed_epsilon

    def __str__(self) -> str:
        """The outcome in a sentence."""
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
    r"""Guesses many coin flips from one run of noisy gradient descent.

    Record $i$ is $\pm e_i$, by a fair coin, far beyond the clip norm. The auditor sees
    the answer, guesses the signs of the largest coordinates and abstains on the others.
    A demonstration: far weaker than `trade_off`, which makes thousands of runs.

    Args:
        solver: `NoisyGD` under replace-one, with noise. It is bound to `canaries`
            records here; its own sizes are not used.
        key: A typed key.
        canaries: The number of records and of coordinates.
        guesses: How many signs to guess, fixed beforehand.
        delta: $\delta$ at which to bound $\varepsilon$.
        significance: The chance that the bound is wrong.

    Raises:
        ValueError: More guesses than canaries, or no noise multiplier yet.
        TypeError: A plan instead of its solver, or no solver.

    Privacy:
        Reads no records: the data are canaries.

    References:
        Steinke, Nasr and Jagielski, "Privacy auditing with one (1) training run",
        NeurIPS 2023.
    """
    check_key(key)
    check_solver(solver, "one_run")
    _checks.count("one_run", canaries=canaries, guesses=guesses)
    _checks.fraction("one_run", delta=delta, significance=significance)
    if guesses > canaries:
        raise ValueError(
            f"one_run: cannot guess {guesses} of {canaries} canaries; give fewer "
            "guesses."
        )
    key_signs, key_run = jax.random.split(key)
    signs = jax.random.rademacher(key_signs, (canaries,), float)
    problem = FiniteSum(jnp.vdot)  # a record is its own gradient
    planned = solver.with_sizes(canaries)
    records, start = jnp.diag(BEYOND * signs), jnp.zeros(canaries)
    answer = jax.jit(solve)(problem, planned, records, start, key=key_run).value
    # Descent moves against the record.
    moved, hidden = -np.asarray(answer), np.asarray(signs)
    chosen = np.argsort(-np.abs(moved))[:guesses]
    correct = int((np.sign(moved[chosen]) == hidden[chosen]).sum())
    measured = epsilon_from_guesses(correct, guesses, canaries, delta, significance)
    claimed = planned.ledger(problem, canaries).epsilon(delta)
    return OneRun(canaries, guesses, correct, delta, significance, measured, claimed)


def epsilon_from_guesses(
    correct: int, guesses: int, canaries: int, delta: float, significance: float
) -> float:
    r"""Lower bound on $\varepsilon$ from the number of right guesses of fair coins.

    Given the other coins and the output of an $\varepsilon$-private mechanism, each
    coin has odds of at most $e^\varepsilon$, so the right ones among $r$ guesses are
    stochastically dominated by $W \sim \mathrm{Bin}(r, e^\varepsilon / (1 +
    e^\varepsilon))$. A $\delta > 0$ lets each of the $m$ coins be revealed with small
    probability, which can move $W$ by $i$ at a cost shared among $i$ coins:

    $$P[\text{correct} \ge v] \le P[W \ge v] + 2 m \delta \max_{1 \le i \le m}
    \frac{P[v - i \le W < v]}{i}.$$

    The result is the largest $\varepsilon$ at which the right side is at most
    `significance`, or 0.

    Args:
        correct: $v$.
        guesses: $r$, at least $v$.
        canaries: $m$, at least $r$.
        delta: $\delta$.
        significance: The chance that the bound is wrong.

    Raises:
        ValueError: Counts out of order.

    References:
        Steinke, Nasr and Jagielski, "Privacy auditing with one (1) training run",
        NeurIPS 2023, Theorem 3.3.
    """
    if not 0 <= correct <= guesses <= canaries:
        raise ValueError(
            "epsilon_from_guesses: needs 0 <= correct <= guesses <= canaries, got "
            f"{correct}, {guesses} and {canaries}."
        )
    below = np.arange(1, max(correct, 1) + 1)

    def excess(epsilon: float) -> float:
        law = scipy.stats.binom(guesses, scipy.special.expit(epsilon))
        tail = law.sf(correct - 1)
        revealed = np.max((law.sf(correct - 1 - below) - tail) / below)
        return float(tail + 2 * canaries * delta * revealed - significance)

    if excess(0.0) > 0:  # fair coins may do as well
        return 0.0
    if excess(_LARGEST) < 0:
        return _LARGEST
    return float(scipy.optimize.brentq(excess, 0.0, _LARGEST))
