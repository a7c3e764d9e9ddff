"""What solvers of several stages have in common: each has a part of the budget."""

import dataclasses
import functools
import itertools
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from typing_extensions import override

from .. import _checks
from .._checks import AbstractVar, Number
from ..core.solver import AbstractSolver, State
from ..privacy.budget import Neighbours
from ..privacy.per_example.clipping import Basis
from .problem import BilevelProblem, Sizes


class AbstractStages(AbstractSolver[BilevelProblem, State]):
    """Solvers in turn, in fields that `stages` names.

    Attributes:
        stages: The fields of the solvers, and the problems that these must solve.
        budget_split: How the squared budget is split over the stages.
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
                f"{', '.join(named)}); give all the same relation{too}."
            )

    @property
    def parts(self) -> tuple[AbstractSolver, ...]:
        """The solvers, bound to the sizes."""
        parts = (getattr(self, name) for name in self.stages)
        return tuple(part.with_sizes(self.sizes) for part in parts)

    @property
    @override
    def neighbours(self) -> Neighbours:
        return self.parts[0].neighbours

    @property
    def basis(self) -> Basis:
        """The weakest one of all runs."""
        return functools.reduce(Basis.worse, (part.basis for part in self.parts))

    def with_noise(self, scale: Number) -> Self:
        """Splits the squared budget by `budget_split`."""
        total = sum(self.budget_split)
        return dataclasses.replace(
            self,
            **{
                name: getattr(self, name).with_noise(scale / (part / total) ** 0.5)
                for name, part in zip(self.stages, self.budget_split, strict=True)
            },
        )

    @override
    def forecast(self, problem, sizes, w0):
        """Of the stages that solve the bilevel problem."""
        stages = zip(self.stages.values(), self.parts, strict=True)
        rows = [
            part.forecast(problem, sizes, w0)
            for kind, part in stages
            if issubclass(kind, BilevelProblem)
        ]
        return tuple(itertools.chain(*rows))

    @override
    def with_counts(self, problem: BilevelProblem, sizes: Sizes | None = None) -> Self:
        sizes = self.sizes if sizes is None else sizes
        counted: dict[str, Any] = {
            name: getattr(self, name).with_sizes(sizes).with_counts(problem, sizes)
            for name, kind in self.stages.items()
            if issubclass(
                kind, BilevelProblem
            )  # a refit meets its problem only at the chosen x
        }
        return dataclasses.replace(self, **counted)
