"""What a task of the command line is: the table `[model]` of a config."""

import abc
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Array, Float, PyTree

from ..bilevel.problem import BilevelProblem
from ..games.problem import AbstractSaddleProblem, AbstractVariationalInequality
from ..onelevel.problem import FiniteSum
from .columns import named
from .datasets import SOURCES
from .files import AbstractData
from .sources import Groups, Sources
from .tables import Location

_OF = {"sources": '"source_weighting"', "groups": '"group_fair" and "group_robust"'}

Problem = BilevelProblem | AbstractSaddleProblem | FiniteSum
Start = tuple[Float[Array, " k"], Float[Array, " d"]]
Blocks = tuple[tuple[str, int], ...]  # name and number of features of each block


class AbstractTask(abc.ABC):
    """What is solved: the table `[model]` of a config, one field per key.

    Attributes:
        label: What an entry of the answer is called.
        of: What each entry belongs to.
        problem_type: The class of its problems.
        has_model: Whether the solution holds a linear model.
        shows_model: Whether that model is what is shown, and there is nothing besides.
        data_types: The sources of its records, by name.
        places: The table of `[data]` that says where records belong, if it needs one:
            `"sources"` or `"groups"`.
        declared: How `[model]` says the number of these places.
        planned: Keys of `[model]` that `dpbilevel auto` sets where they are missing.
        remark: What the released values do not say, for every report.
    """

    label: ClassVar[str]
    of: ClassVar[str]
    problem_type: ClassVar[type]
    has_model: ClassVar[bool] = True
    shows_model: ClassVar[bool] = False
    data_types: ClassVar[dict[str, type[AbstractData]]] = SOURCES
    places: ClassVar[str] = ""
    declared: ClassVar[str] = "{}"
    planned: ClassVar[dict[str, Any]] = {}
    remark: ClassVar[str] = ""

    @classmethod
    def two_levels(cls) -> bool:
        """Whether its problems have two levels."""
        return issubclass(cls.problem_type, BilevelProblem)

    @classmethod
    def is_game(cls) -> bool:
        """Whether its problems are games, whose settings follow from theorems."""
        return issubclass(cls.problem_type, AbstractVariationalInequality)

    @property
    def count(self) -> int:
        """The number of places that `[model]` declares; 0 where records have none."""
        return 0

    def check(self, data: Any, place: Location) -> None:
        """Raises `ValueError` where data lack what the task reads, or have more.

        Args:
            data: What `[data]` describes.
            place: That table.
        """
        wanted = self.count
        for name, kind in {"sources": Sources, "groups": Groups}.items():
            found, where = getattr(data, name), place.child(name)
            if found is None and name == self.places:
                raise where.error(f"missing table. The task needs it: {kind.choice}.")
            if found is not None and name != self.places:
                raise where.error(f"is for task = {_OF[name]} only; remove it.")
            if found is not None and found.count != wanted:
                raise where.error(
                    f"lists {found.count} {name}, but [model] has "
                    f"{self.declared.format(wanted)}."
                )

    @abc.abstractmethod
    def problem(self, blocks: Blocks) -> Problem:
        """The problem on records with these blocks of features."""

    @abc.abstractmethod
    def start(self, blocks: Blocks) -> PyTree:
        """The starting point on records with these blocks of features."""

    @abc.abstractmethod
    def names(self, data: AbstractData) -> tuple[str, ...]:
        """What each entry of the answer belongs to, by name."""

    @abc.abstractmethod
    def shown(self, w: PyTree) -> np.ndarray:
        """The entries of the answer in released variables.

        Args:
            w: The variables, `(x, y)` but for training, with any leading axes.

        Privacy:
            A function of released values: free.
        """


def listed_names(
    places: Sources | Groups | None, kind: str, count: int
) -> tuple[str, ...]:
    """The values of the column that names them, or numbers."""
    values = places.values if places is not None else ()
    return tuple(map(named, values)) or tuple(f"{kind} {i}" for i in range(count))


def dimension(blocks: Blocks) -> int:
    """The number of features of all blocks."""
    return sum(size for _, size in blocks)
