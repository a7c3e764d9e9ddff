"""The guarantee to meet: budget, neighbouring relation, people of both levels."""

import dataclasses
import enum

from .. import _checks


class Neighbours(enum.Enum):
    """The relation of two datasets that a private output must not distinguish.

    `REPLACE_ONE`: one record is replaced by another; the number of records is public.
    `ADD_OR_REMOVE_ONE`: one record is added or removed; means are divided by a public,
    fixed number. An epsilon under one relation is not an epsilon under the other.
    """

    REPLACE_ONE = "replace_one"
    ADD_OR_REMOVE_ONE = "add_or_remove_one"

    @property
    def contributions(self) -> float:
        """Contributions by which neighbours differ: 2.0 under replace-one, else 1.0."""
        return 2.0 if self is Neighbours.REPLACE_ONE else 1.0


class People(enum.Enum):
    """The levels of a two-level problem in which one person may have records.

    `DISJOINT`: in one level only. `OVERLAPPING`: one record in each. `SHARED`: every
    record enters both levels.
    """

    DISJOINT = "disjoint"
    OVERLAPPING = "overlapping"
    SHARED = "shared"


@dataclasses.dataclass(frozen=True)
class PrivacyBudget:
    r"""The guarantee to meet: $(\varepsilon, \delta)$ differential privacy.

    Args:
        epsilon: $\varepsilon > 0$.
        delta: $0 \le \delta < 1$, well below one over the number of records. Zero asks
            for pure differential privacy, which Gaussian noise cannot give.

    Raises:
        ValueError: A value out of range.
    """

    epsilon: float
    delta: float

    def __post_init__(self):
        _checks.positive("PrivacyBudget", epsilon=self.epsilon)
        _checks.non_negative("PrivacyBudget", delta=self.delta)
        _ = float(self.epsilon)  # raises inside a program: plans are made on the host
        if self.delta >= 1:
            raise ValueError(f"PrivacyBudget: delta must be below 1, got {self.delta}.")
