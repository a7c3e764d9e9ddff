"""White-box audit: confidence bounds on runs that tell neighbours apart."""

import dataclasses
from collections.abc import Callable

import equinox as eqx
import jax
import numpy as np
import scipy
from jaxtyping import Float, PyTree

from ..core.loop import planned_rows
from ..core.problem import AbstractProblem
from ..core.solver import AbstractSolver
from ..privacy.keys import PRNGKey, check_key, step_keys
from .canaries import Canary, canaries, check_solver
from .claims import (
    Claim,
    TradeOffCurve,
    check_arguments,
    check_pair,
    gaussian_mu_of,
    observe,
    scores_of,
)

ALPHA = 1e-4  # chance that a sound mechanism is rejected
PILOT = 0.2  # fraction of runs that chooses statistic and thresholds
# Quantiles of the pooled pilot runs: the middle shows a Gaussian shift best, the ends
# show rare and large losses.
_QUANTILES = (0.02, 0.2, 0.5, 0.8, 0.98, 0.998)
# A pass that measures less than this fraction of the claim is inconclusive.
_CONCLUSIVE = 0.25
_MOST_VIEWS = 32  # steps per run that an audit looks at

Statistic = Callable[[Float[np.ndarray, " runs d"]], Float[np.ndarray, " runs"]]


class SolverRun(eqx.Module):
    """Callable that runs a solver once and returns its `adversary_view`s, stacked.

    Unlike `dpbilevel.solve` it takes fewer records than planned also under replace-one,
    so that a canary may leave out records that contribute nothing.

    Args:
        problem: The problem.
        solver: A calibrated solver, bound to its sizes.
        w0: The initial point.
    """

    problem: AbstractProblem
    solver: AbstractSolver
    w0: PyTree

    def __call__(self, data: PyTree, *, key: PRNGKey) -> PyTree:
        """Return the `adversary_view`s of one run at up to 32 of its steps.

        They are a pytree with a leading axis of steps, the last one included. The
        records are public or synthetic.
        """
        data = planned_rows(self.solver, data)

        def one_step(state, key):
            state = self.solver.step(self.problem, data, state, key=key)
            return state, self.solver.adversary_view(state)

        steps = self.solver.num_steps
        state = self.solver.init(self.problem, self.w0)
        _, keys = step_keys(key, steps)
        _, views = jax.lax.scan(one_step, state, keys)
        shown = np.unique(np.linspace(0, steps - 1, min(steps, _MOST_VIEWS)).round())
        return jax.tree.map(lambda v: v[shown.astype(int)], views)


@dataclasses.dataclass(frozen=True)
class Cut:
    r"""Result of the audit at one threshold: the test's rates, measured and claimed mu.

    Attributes:
        threshold: Least statistic of runs that are taken for runs on the data.
        true_positives: Lower confidence bound on the rate of runs on the data that
            reach the threshold.
        false_positives: Upper confidence bound on the same rate for the neighbour.
        measured_mu: Least Gaussian $\mu$ with these rates.
        claimed_mu: Largest $\mu$ that the claim allows here.
    """

    threshold: float
    true_positives: float
    false_positives: float
    measured_mu: float
    claimed_mu: float

    @property
    def violated(self) -> bool:
        """Whether the measured mu exceeds the mu that the claim allows."""
        return self.measured_mu > self.claimed_mu

    @property
    def row(self) -> str:
        """Line of text in the table that a `TradeOff` prints."""
        return (
            f"  {self.threshold:9.3g}  {self.true_positives:12.5f}  "
            f"{self.false_positives:13.5f}  {self.measured_mu:11.3f}  "
            f"{self.claimed_mu:10.3f}{'  violated' if self.violated else ''}"
        )


@dataclasses.dataclass(frozen=True)
class TradeOff:
    """Outcome of a trade-off audit: how well runs on two neighbours were told apart.

    Attributes:
        name: Name of the mechanism.
        runs: Number of tested runs per side, without the pilot.
        pilot: Number of runs per side that chose statistic and thresholds.
        alpha: Chance that a mechanism which keeps its claim is rejected.
        cuts: Results of the thresholds, at most six, which the pilot fixed.
        claim: The claimed profile.
    """

    name: str
    runs: int
    pilot: int
    alpha: float
    cuts: tuple[Cut, ...]
    claim: Claim = dataclasses.field(repr=False, compare=False)

    @property
    def violations(self) -> tuple[Cut, ...]:
        """Tuple of the `Cut`s whose measured mu exceeds the claimed one."""
        return tuple(cut for cut in self.cuts if cut.violated)

    @property
    def passed(self) -> bool:
        """Whether no violation was found; not a proof of privacy."""
        return not self.violations

    @property
    def conclusive(self) -> bool:
        """Whether the audit failed, or measured a quarter of the claimed mu or more."""
        seen = self.measured_mu >= _CONCLUSIVE * self.claimed_mu > 0
        return seen or not self.passed

    @property
    def verdict(self) -> str:
        """Outcome in a few words: a violation, none found, or inconclusive."""
        if not self.passed:
            return "VIOLATION"
        return f"{'' if self.conclusive else 'inconclusive: '}no violation found"

    @property
    def counted(self) -> str:
        """Number of tested runs, in words."""
        total = self.runs + self.pilot
        return f"{self.runs} of {total} runs a side ({self.pilot} for the pilot)"

    @property
    def measured_mu(self) -> float:
        r"""Lower confidence bound on $\mu$, at the cut nearest to its claim."""
        return max(0.0, self._tightest.measured_mu)

    @property
    def claimed_mu(self) -> float:
        r"""The claimed $\mu$: exact for Gaussian claims, else its equivalent.

        The equivalent Gaussian mechanism allows as much at the rates of the cut nearest
        to its claim.
        """
        return self._tightest.claimed_mu

    @property
    def _caveat(self) -> str:
        """Sentence beside the verdict: its condition, or defects that could hide."""
        if not self.passed:
            return (
                "the claim is refuted if the two datasets differ in one person's "
                "records only"
            )
        remedy = "give more runs, or a pair or statistic that shows more"
        if self.measured_mu == 0:
            return f"nothing of the claimed mu is seen either; {remedy}"
        factor = self.claimed_mu / self.measured_mu
        hidden = f"a defect that inflates mu by less than {factor:.2f} can hide"
        return hidden if self.conclusive else f"{hidden}; {remedy}"

    @property
    def _tightest(self) -> Cut:
        return max(self.cuts, key=lambda c: c.measured_mu / max(c.claimed_mu, 1e-9))

    def __str__(self) -> str:
        """Return the outcome in words, and a row per threshold."""
        least, claimed = f"{self.measured_mu:.3f}", f"{self.claimed_mu:.3f}"
        lines = [
            f"{self.name}: leaks mu of at least {least}, claims {claimed}",
            f"  {self.verdict} at {self.counted}, {1 - self.alpha:.2%} confidence",
            f"  {self._caveat}",
            "  threshold  true pos. >=  false pos. <=  measured mu  claimed mu",
            *(cut.row for cut in self.cuts),
        ]
        return "\n".join(lines)


def trade_off(
    run: Callable[..., PyTree],
    data: PyTree,
    neighbour: PyTree,
    claim: Claim,
    *,
    key: PRNGKey,
    runs: int = 50_000,
    statistic: Statistic | None = None,
    name: str = "mechanism",
) -> TradeOff:
    r"""Return a `TradeOff`: how well runs tell two neighbours apart. NON-PRIVATE.

    Runs on either dataset give features; a statistic of them, fitted on the first fifth
    of the runs, is cut at up to six thresholds fixed on the same fifth. The other runs
    bound the rate of true positives from below and that of false positives from above
    (Clopper-Pearson, Bonferroni over all bounds). $(\varepsilon, \delta(\varepsilon))$
    differential privacy implies, for every $\varepsilon \ge 0$,

    $$\mathrm{TPR} \le \delta(\varepsilon) + e^\varepsilon \mathrm{FPR}, \qquad
    1 - \mathrm{FPR} \le \delta(\varepsilon) + e^\varepsilon (1 - \mathrm{TPR}),$$

    and a cut whose bounds contradict one of these is a violation.

    Args:
        run: `run(data, *, key)` returns one run's observations, a pytree of arrays with
            some hundred numbers at most; it is traced, and mapped over keys.
        data: The records. Public or synthetic.
        neighbour: The same with one person's records changed, by the relation of the
            claim, with the same structure and shapes. The caller answers for the other
            records: a violation on a pair that differs more refutes nothing.
        claim: The profile $\delta(\varepsilon)$: `gaussian_claim`, `pure_claim`,
            `ledger_claims` or any function of an array of epsilons.
        key: A typed key.
        runs: The number of runs per side.
        statistic: A function of features `[runs, d]` (flattened, float64, on the host)
            that returns one number a run, large on `data`. By default Fisher's linear
            discriminant.
        name: The name of the mechanism in the result.

    Raises:
        ValueError: There are fewer than 1000 runs, structures or shapes differ, or no
            violation could be found: the pair is equal, all runs show the same, numbers
            are not finite on both sides, or the statistic or the claim is NaN.
        TypeError: The key is not typed, the claim is no function, `runs` is no
            integer, or `run` returns no numbers.

    Privacy:
        Makes thousands of releases of its data: for public or synthetic records only.
        A pass says that no violation was found on this pair with this statistic.

    References:
        Nasr, Hayes, Steinke, Balle, Tramèr, Jagielski, Carlini and Terzis, "Tight
        auditing of differentially private machine learning", USENIX Security 2023;
        Dong, Roth and Su, "Gaussian differential privacy", 2022.
    """
    check_key(key)
    check_arguments(run, claim, runs)
    check_pair(data, neighbour)
    curve = TradeOffCurve(claim)
    present, absent = observe(run, data, neighbour, key=key, runs=runs)
    pilot = int(PILOT * runs)
    if statistic is None:
        statistic = _discriminant(present[:pilot], absent[:pilot])
    present, absent = (scores_of(statistic, side) for side in (present, absent))
    pooled = np.concatenate([present[:pilot], absent[:pilot]])
    thresholds = np.unique(np.quantile(pooled, _QUANTILES))
    cuts = _cuts(present[pilot:], absent[pilot:], thresholds, curve)
    return TradeOff(name, runs - pilot, pilot, ALPHA, cuts, claim)


def audit_solver(
    solver: AbstractSolver,
    *,
    key: PRNGKey,
    runs: int = 50_000,
    x_in_records: bool | tuple[str, ...] = True,
    others: float | None = None,
) -> tuple[TradeOff, ...]:
    """Return a tuple of `TradeOff`s, one per kind of person, for a calibrated solver.

    Args:
        solver: A calibrated solver, bound to its sizes, such as a plan's.
        key: A typed key.
        runs: The number of runs per side.
        x_in_records: As in `canaries`.
        others: As in `canaries`.

    Returns:
        One outcome per kind of person in the ledger.

    Raises:
        ValueError: As in `canaries` and `trade_off`.
        TypeError: A plan instead of its solver, or no solver.

    Privacy:
        Reads no records: the data are canaries.
    """
    check_solver(solver, "audit_solver")
    found = canaries(solver, x_in_records=x_in_records, others=others)
    return audit_canaries(found, key=key, runs=runs)


def audit_canaries(
    found: dict[str, Canary], *, key: PRNGKey, runs: int = 50_000
) -> tuple[TradeOff, ...]:
    """Return a tuple of `TradeOff`s, one for each canary, as `audit_solver` does.

    Raises:
        ValueError: As in `trade_off`.

    Privacy:
        Reads no records: the data are canaries.
    """
    check_key(key)
    keys = jax.random.split(key, len(found))
    outcomes = []
    for (person, canary), subkey in zip(found.items(), keys, strict=True):
        run = SolverRun(canary.problem, canary.solver, canary.w0)
        pair = canary.data, canary.neighbour, canary.claim
        name = f"{type(canary.solver).__name__}, {person}"
        outcomes.append(trade_off(run, *pair, key=subkey, runs=runs, name=name))
    return tuple(outcomes)


def _discriminant(present: np.ndarray, absent: np.ndarray) -> Statistic:
    """Return Fisher's linear discriminant, a function of rows of features."""
    both = np.concatenate([present, absent])
    spread = both.std(axis=0)
    spread = np.where(spread > 0, spread, 1.0)
    gap = (present.mean(axis=0) - absent.mean(axis=0)) / spread
    within = (np.cov((present / spread).T) + np.cov((absent / spread).T)) / 2
    ridge = 1e-9 * np.eye(len(gap))  # features may determine each other
    direction = np.linalg.solve(np.atleast_2d(within) + ridge, gap) / spread
    return lambda rows: rows @ direction


def _cuts(
    present: np.ndarray, absent: np.ndarray, thresholds, curve: TradeOffCurve
) -> tuple[Cut, ...]:
    runs, level = len(present), ALPHA / (2 * len(thresholds))  # two bounds at each
    cuts = []
    for threshold in thresholds:
        found, false = (int(np.sum(side >= threshold)) for side in (present, absent))
        low = _lower_bound(found, runs, level)
        high = 1 - _lower_bound(runs - false, runs, level)
        allowed = float(curve(np.asarray(high)))
        measured, claimed = (gaussian_mu_of(rate, high) for rate in (low, allowed))
        cuts.append(Cut(float(threshold), low, high, measured, claimed))
    return tuple(cuts)


def _lower_bound(hits: int, runs: int, level: float) -> float:
    """Return a Clopper-Pearson lower bound on a rate, wrong with chance `level`."""
    return float(scipy.stats.beta.ppf(level, hits, runs - hits + 1)) if hits else 0.0
