"""What the solvers of saddle points and variational inequalities have in common."""

import abc
from typing import TYPE_CHECKING, Any, ClassVar, Self

from .. import _checks
from ..core.outputs import AbstractOutput, check_output
from ..core.solver import AbstractNoisySolver, State
from ..privacy.budget import PrivacyBudget
from ..privacy.sampling import AbstractSampling
from .choices import Fields, Passes, scene_of
from .problem import AbstractVariationalInequality
from .rates import Scene

if TYPE_CHECKING:
    from typing import ClassVar as AbstractVar
else:
    from equinox import AbstractVar


class AbstractSaddleSolver(AbstractNoisySolver[AbstractVariationalInequality, State]):
    r"""A solver with explicit bounds, which choose its parameters before any data.

    Attributes:
        clip_norm: The bound on one record's operator in $\ell_2$.
        sampling: How each query's batch is drawn.
        output: Which point is the answer; the theorems are about `Mean()`.
    """

    problem_type: ClassVar[type] = AbstractVariationalInequality

    clip_norm: AbstractVar[float]
    sampling: AbstractVar[AbstractSampling]
    output: AbstractVar[AbstractOutput]

    def __check_init__(self):
        check_output(type(self).__name__, self.output)

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
        r"""The parameters of the paper, in whole numbers: `theorem_fields` has them.

        Args:
            problem: A problem with declared constants on a bounded set.
            budget: $\varepsilon$ and $\delta$ of the whole run.
            sizes: $n \ge 2$.
            dimension: $d$; `problem.w_set.dimension(w0)`.
            passes: `"single"` or `"multi"`.
            **fields: Further fields.

        Returns:
            A solver without noise, for `calibrate`. A warning where $a = \sqrt{d
            \log(1 / \delta)} / \varepsilon \ge n$, so that all bounds are trivial, or
            where the steps are too many to be run.

        Raises:
            ValueError: A constant is not declared, the set is unbounded, or there are
                fewer than two records.
        """
        owner = f"{cls.__name__}.from_theorem"
        scene, a = scene_of(owner, problem, budget, sizes, dimension, passes)
        return cls(**(cls.theorem_fields(scene, a, budget, passes) | fields))

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
        r"""The parameters with the least `bound`.

        Exact noise multipliers decide for a single pass. For several, candidates are
        compared by a central limit theorem and the one with the fewest operator values
        is taken among those within 5 % of the least bound.

        Args:
            problem: As in `from_theorem`.
            budget: Likewise.
            sizes: Likewise.
            dimension: Likewise.
            passes: Likewise.
            most_steps: The largest number of steps to consider; $n$ by default.
            **fields: Further fields.

        Returns:
            A solver without noise, for `calibrate`.

        Raises:
            ValueError: As `from_theorem`.
        """
        owner = f"{cls.__name__}.tuned"
        most_steps = sizes if most_steps is None else most_steps
        _checks.count(owner, most_steps=most_steps)
        scene, _ = scene_of(owner, problem, budget, sizes, dimension, passes)
        return cls(**(cls.tuned_fields(scene, budget, passes, most_steps) | fields))

    @classmethod
    @abc.abstractmethod
    def theorem_fields(
        cls, scene: Scene, a: float, budget: PrivacyBudget, passes: Passes
    ) -> Fields:
        """The fields that `from_theorem` sets."""

    @classmethod
    @abc.abstractmethod
    def tuned_fields(
        cls, scene: Scene, budget: PrivacyBudget, passes: Passes, most_steps: int
    ) -> Fields:
        """The fields that `tuned` sets."""

    @abc.abstractmethod
    def bound(self, problem: AbstractVariationalInequality, *, dimension: int) -> float:
        """The bound on the expected gap of the answer: a promise, before any data.

        For a single pass over fresh records it holds for the strong gap on the
        population, for several passes for the weak gap.

        Args:
            problem: A problem with declared constants on a bounded set.
            dimension: $d$; `problem.w_set.dimension(w0)`.

        Raises:
            ValueError: The solver is not calibrated or bound to sizes, or no theorem
                covers its parameters.
        """

    def clip_ratio(self, problem: AbstractVariationalInequality) -> float | None:
        """The clip norm over the problem's bound, where one is declared.

        Args:
            problem: The problem.
        """
        bound = problem.bound
        return None if bound is None else self.clip_norm / bound
