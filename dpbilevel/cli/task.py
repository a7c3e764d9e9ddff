"""Declaration of a task, and the base class of its table `[model]`."""

import abc
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal

import numpy as np
from jaxtyping import Array, Float, PyTree

from ..bilevel.problem import BilevelProblem
from ..games.problem import AbstractSaddleProblem
from ..onelevel.problem import FiniteSum
from .columns import named
from .data import CsvData
from .toml_tables import Location

Problem = BilevelProblem | AbstractSaddleProblem | FiniteSum
Start = tuple[Float[Array, " k"], Float[Array, " d"]]
Blocks = tuple[tuple[str, int], ...]  # name and number of features of each block


class AbstractModel(abc.ABC):
    """The table `[model]` of a config, one field per key.

    Attributes:
        axis: Public range of the answer; `None` if it begins at 0.
    """

    axis: ClassVar[tuple[float, float] | None] = None

    @property
    def count(self) -> int:
        """Number of sources or groups; 0 for tasks without them."""
        return len(self.marks)

    @property
    def marks(self) -> tuple[float, ...]:
        """Tuple of public values to compare the answer's entries with, or empty."""
        return ()

    def mistakes(self, data: CsvData, place: Location) -> Iterable[ValueError]:
        """Return an iterable of errors if the shapes of `[data]` do not fit this."""
        del data, place
        return ()

    @abc.abstractmethod
    def problem(self, blocks: Blocks) -> Problem:
        """Return the problem on records with these blocks of features."""

    @abc.abstractmethod
    def start(self, blocks: Blocks) -> PyTree:
        """Return the initial point on records with these blocks of features."""

    def names(self, data: CsvData) -> tuple[str, ...]:
        """Return a tuple of each answer entry's name; default: sources or groups."""
        places = filter(None, (data.sources, data.groups))
        return tuple(named(value) for place in places for value in place.values)

    @abc.abstractmethod
    def shown(self, w: PyTree) -> np.ndarray:
        """Return the shown entries of the answer, such as weights, from variables.

        Args:
            w: The variables, `(x, y)` but for training, with any leading axes.

        Privacy:
            A function of released values: free.
        """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """Everything that the command line knows about a task.

    Attributes:
        name: Name of the task in a config.
        summary: What the task does, in one line.
        model: Class of the table `[model]`.
        problem_type: Class of its problems.
        label: Name of an entry of the answer, such as `"weight"`.
        of: Owner of an entry of the answer, such as `"source"`.
        terms: Meaning of each release that its solvers make, for the page of a report.
        template: Lines of `[model]` and further tables in a config that `init` writes,
            as a jinja2 template; empty if `init` does not offer the task.
        shows_model: Whether the linear model is the whole answer.
        places: Table of `[data]` that says where records belong, if the task needs one.
        planned: Keys of `[model]` that `dpbilevel auto` sets if they are missing.
        remark: Limit of what the released values say, for every report.
        marked: Name of the values in `AbstractModel.marks`.
        two_levels: Whether the task's problems have two levels.
        is_game: Whether the task is a game, whose settings follow from theorems.
    """

    name: str
    summary: str
    model: type[AbstractModel]
    problem_type: type
    label: str
    of: str
    terms: Mapping[str, str]
    template: str = ""
    shows_model: bool = False
    places: Literal["", "sources", "groups"] = ""
    planned: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    remark: str = ""
    marked: str = ""
    two_levels: bool = False
    is_game: bool = False
