"""Solvers of several stages, each with a part of the budget."""

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

from typing_extensions import override

from .. import _checks
from .._checks import Number
from ..core.solver import AbstractSolver, State
from ..privacy.budget import Neighbours
from ..privacy.per_example.clipping import Basis
from .problem import BilevelProblem, Sizes

if TYPE_CHECKING:  # type checkers let fields override a class variable
    from typing import ClassVar as AbstractVar
else:
    from equinox import AbstractVar


class AbstractStages(AbstractSolver[BilevelProblem, State]):
    """Solvers in turn, in fields that `stages` names.

    Attributes:
        stages: The fields of the solvers, and the problems that these must solve.
        budget_split: The split of the squared budget over the stages.
    """

    stages: ClassVar[Mapping[str, type]]
    budget_split: AbstractVar[tuple[float, ...]]
    problem_type: ClassVar[type] = BilevelProblem
    in_config: ClassVar[bool] = False

    def __check_init__(self):
        owner = type(self).__name__
        for name, kind in self.stages.items():
            part = getattr(self, name)
            _checks.instance(owner, AbstractSolver, **{name: part})
            if not issubclass(kind, part.problem_type):
                raise TypeError(
                    f"{owner}: {name} must solve a {kind.__name__} or a base "
                    f"class of it, but {type(part).__name__} solves a "
                    f"{_checks.names_of(part.problem_type)}."
                )
        _checks.budget_split(owner, self.budget_split, *self.stages)
        relations = {name: getattr(self, name).neighbours for name in self.stages}
        if len(set(relations.values())) > 1:
            named = [f"{name} to {value}" for name, value in relations.items()]
            defaults = [
                f"{field.name}="
                for field in dataclasses.fields(self)
                if field.name in relations and field.default is not dataclasses.MISSING
            ]
            too = f", {', '.join(defaults)} too" if defaults else ""
            raise ValueError(
                f"{owner}: the stages refer to different relations ("
                f"{', '.join(named)}). Give all the same relation{too}."
            )

    @property
    def parts(self) -> tuple[AbstractSolver, ...]:
        """Solvers of the stages, bound to the sizes."""
        parts = (getattr(self, name) for name in self.stages)
        return tuple(part.with_sizes(self.sizes) for part in parts)

    @property
    @override
    def neighbours(self) -> Neighbours:
        return self.parts[0].neighbours

    @property
    def basis(self) -> Basis:
        """Weakest basis of all stages."""
        return functools.reduce(Basis.worse, (part.basis for part in self.parts))

    @override
    def with_noise(self, scale: Number) -> Self:
        total = sum(self.budget_split)
        noisy: dict[str, Any] = {
            name: getattr(self, name).with_noise(scale / (part / total) ** 0.5)
            for name, part in zip(self.stages, self.budget_split, strict=True)
        }
        return dataclasses.replace(self, **noisy)

    @property
    def _bilevel_stages(self) -> list[str]:
        """Names of the stages that solve the bilevel problem itself."""
        return [
            k for k, kind in self.stages.items() if issubclass(kind, BilevelProblem)
        ]

    @override
    def forecast(self, problem, sizes, w0):
        """Return the rows of the stages that solve the bilevel problem."""
        parts = (getattr(self, name) for name in self._bilevel_stages)
        rows = (
            part.with_sizes(self.sizes).forecast(problem, sizes, w0) for part in parts
        )
        return tuple(itertools.chain(*rows))

    @override
    def with_counts(self, problem: BilevelProblem, sizes: Sizes | None = None) -> Self:
        sizes = self.sizes if sizes is None else sizes
        # The problem of a refit is known only when x is.
        counted: dict[str, Any] = {
            name: getattr(self, name).with_sizes(sizes).with_counts(problem, sizes)
            for name in self._bilevel_stages
        }
        return dataclasses.replace(self, **counted)


def with_prefix(name: str, dimensions: Mapping[str, int]) -> dict[str, int]:
    """Return the dimensions of a stage under the names of its releases in a ledger."""
    return {f"{name}: {release}": size for release, size in dimensions.items()}
