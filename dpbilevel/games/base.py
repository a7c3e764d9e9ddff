"""Base class of solvers of saddle points and variational inequalities."""

import abc
import typing
import warnings
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import equinox as eqx

from .. import _checks
from ..core.outputs import AbstractOutput, Mean
from ..core.solver import AbstractIterative, AbstractNoisySolver, State
from ..privacy.budget import PrivacyBudget
from .problem import AbstractVariationalInequality
from .rates import TheoremConstants

if TYPE_CHECKING:  # type checkers let fields override a class variable
    from typing import ClassVar as AbstractVar
else:
    from equinox import AbstractVar

Passes = Literal["single", "multi"]
Fields = dict[str, Any]


class AbstractSaddleSolver(
    AbstractNoisySolver[AbstractVariationalInequality, State], AbstractIterative
):
    r"""Solver with explicit bounds, which choose its parameters before any data.

    Attributes:
        clip_norm: The bound on one record's operator in $\ell_2$.
        output: The output rule; the theorems are about `Mean()`.
    """

    problem_type: ClassVar[type] = AbstractVariationalInequality

    clip_norm: AbstractVar[float]
    output: AbstractOutput = eqx.field(default=Mean(), kw_only=True)
    numbers_batches: ClassVar[bool] = True

    @classmethod
    def from_theorem(
        cls,
        problem: AbstractVariationalInequality,
        budget: PrivacyBudget,
        sizes: int,
        *,
        dimension: int,
        passes: Passes,
        **fields: Any,
    ) -> Self:
        r"""Return the solver with the paper's parameters, in whole numbers.

        Args:
            problem: A problem with declared constants on a bounded set.
            budget: $\varepsilon$ and $\delta$ of the run.
            sizes: $n \ge 2$.
            dimension: $d$; `problem.w_set.dimension(w0)`.
            passes: `"single"` or `"multi"`.
            **fields: Further fields.

        Returns:
            A solver without noise, for `calibrate`. It warns if $a = \sqrt{d
            \log(1 / \delta)} / \varepsilon \ge n$, so that all bounds are trivial, or
            if the steps are too many to be run.

        Raises:
            ValueError: A constant is not declared, the set is unbounded, or there are
                fewer than two records.
        """
        constants = cls._constants(problem, budget, sizes, dimension, passes)
        return cls(**(cls.theorem_fields(constants, budget, passes) | fields))

    @classmethod
    def tuned(
        cls,
        problem: AbstractVariationalInequality,
        budget: PrivacyBudget,
        sizes: int,
        *,
        dimension: int,
        passes: Passes,
        most_steps: int | None = None,
        **fields: Any,
    ) -> Self:
        r"""Return the solver with the least `bound`, of at most `most_steps` steps.

        Exact noise multipliers decide for a single pass. For several, candidates are
        compared by a central limit theorem and the one with the fewest operator values
        is taken among those within 5 % of the least bound. `most_steps` is $n$ by
        default; all else is as in `from_theorem`.
        """
        most_steps = sizes if most_steps is None else most_steps
        _checks.count(f"{cls.__name__}.tuned", most_steps=most_steps)
        constants = cls._constants(problem, budget, sizes, dimension, passes)
        return cls(**(cls.tuned_fields(constants, budget, passes, most_steps) | fields))

    @classmethod
    def _constants(cls, problem, budget, sizes, dimension, passes) -> TheoremConstants:
        """Check the arguments and return the problem as theorems see it."""
        owner = cls.__name__
        _checks.instance(owner, AbstractVariationalInequality, problem=problem)
        _checks.instance(owner, PrivacyBudget, budget=budget)
        _checks.count(owner, sizes=sizes, dimension=dimension)
        _checks.one_of(owner, "passes", passes, typing.get_args(Passes))
        _checks.fraction(owner, delta=budget.delta)  # bounds have log(1 / delta)
        if sizes < 2:
            raise ValueError(f"{owner}: needs at least two records, got sizes={sizes}.")
        constants = TheoremConstants.of(problem, dimension, sizes)
        if (a := constants.privacy_dimension(budget)) >= sizes:
            warnings.warn(
                f"{owner}: hopeless: sqrt(d log(1/delta)) / epsilon = {a:.3g} is not "
                f"below the {sizes} records, so that every bound is trivial. Use more "
                "records, a larger epsilon or fewer dimensions.",
                stacklevel=3,
            )
        return constants

    @classmethod
    @abc.abstractmethod
    def theorem_fields(
        cls, constants: TheoremConstants, budget: PrivacyBudget, passes: Passes
    ) -> Fields:
        """Return the fields that `from_theorem` sets."""

    @classmethod
    @abc.abstractmethod
    def tuned_fields(
        cls,
        constants: TheoremConstants,
        budget: PrivacyBudget,
        passes: Passes,
        most_steps: int,
    ) -> Fields:
        """Return the fields that `tuned` sets."""

    def bound(self, problem: AbstractVariationalInequality, *, dimension: int) -> float:
        """Return a bound on the expected gap of the answer, known before any data.

        For a single pass over fresh records it is that of `TheoremConstants` on the
        strong gap on the population. For several passes that, plus $M$ times the
        stability of the answer, bounds the weak gap. It holds for monotone operators
        within the declared constants and a clip norm of at least `bound`.

        Args:
            problem: A problem with declared constants on a bounded set.
            dimension: $d$; `problem.w_set.dimension(w0)`.

        Raises:
            ValueError: The solver is not calibrated or bound to sizes, or no theorem
                covers it: it averages another part of its path, clips below the bound,
                goes over disjoint batches several times, or takes steps too large.
        """
        owner = f"{type(self).__name__}.bound"
        if self.sizes is None:
            text = f"{owner}: no planned sizes. Take the solver from "
            raise ValueError(f"{text}dpbilevel.calibrate(...).solver.")
        constants = TheoremConstants.of(problem, dimension, self.sizes)
        release: Any = self.ledger(problem, self.sizes).releases[0]
        passes = self.sampling.charged(release.count, self.sizes)
        outside = {
            f"output={type(self.output).__name__}; use output=Mean()": (
                type(self.output) is not Mean
            ),
            f"clip_norm={self.clip_norm:.3g} below the declared bound "
            f"{constants.spread:.3g}": self.clip_norm < constants.spread,
            f"{passes} passes over disjoint batches": (
                self.sampling.numbered and passes > 1
            ),
        }
        for text, is_outside in outside.items():
            if is_outside:
                raise ValueError(f"{owner}: no theorem covers {text}.")
        batch = self.sampling.denominator(self.sizes)
        gap, moved = self.gap_and_stability(
            problem, constants, batch, release.noise_std
        )
        # A numbered batch is a fresh sample of the population; others are not.
        return float(gap if self.sampling.numbered else gap + constants.bound * moved)

    @abc.abstractmethod
    def gap_and_stability(
        self,
        problem: AbstractVariationalInequality,
        constants: TheoremConstants,
        batch: float,
        std: float,
    ) -> tuple[Any, Any]:
        """Bound the strong gap, and how far one record moves the answer."""

    def clip_ratio(self, problem: AbstractVariationalInequality) -> float | None:
        """Return the clip norm over the problem's bound, if one is declared."""
        bound = problem.bound
        return None if bound is None else self.clip_norm / bound
