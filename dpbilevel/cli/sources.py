"""Tables inside `[data]`: the sources and groups of records, and the test file."""

import dataclasses
from typing import ClassVar, Literal

import numpy as np

from .columns import AbstractPlaces, Records, check_values


@dataclasses.dataclass(frozen=True)
class Sources(AbstractPlaces):
    r"""The sources of the training records, for source weighting.

    Either a column holds the source, or sources are drawn at random and the labels of
    source $s$ are flipped with probability `flip[s]`: a benchmark with a known answer.

    Args:
        flip: Flip probability of each source.
        label_seed: Public seed of the corruption. Not a privacy seed.
    """

    choice: ClassVar[str] = (
        "either flip, one probability per source (a benchmark with known corruption), "
        "or column and values (the sources of real records)"
    )

    flip: tuple[float, ...] = ()
    label_seed: int = 0

    def __post_init__(self):
        check_values("values", self.values)
        drawn, column, listed = map(bool, (self.flip, self.column, self.values))
        if drawn == column or column != listed:
            raise ValueError(f"give {self.choice}.")
        if not all(0 <= p <= 1 for p in self.flip):
            raise ValueError(f"flip must hold probabilities, got {list(self.flip)}.")

    @property
    def count(self) -> int:
        """Number of sources."""
        return len(self.flip or self.values)

    def corrupted(self, records: Records) -> Records:
        """Return records with random sources, and labels flipped at their rates."""
        rng = np.random.default_rng(self.label_seed)
        source = rng.integers(0, self.count, len(records.label))  # uniform
        flipped = rng.random(len(source)) < np.asarray(self.flip)[source]
        label = np.where(flipped, -records.label, records.label)
        source = source.astype(np.int32)
        return dataclasses.replace(records, label=label, source=source)


@dataclasses.dataclass(frozen=True)
class Groups(AbstractPlaces):
    r"""The groups of the records, for learning that is fair to them.

    Either a column holds the group, or records are generated: each is in group $g$ with
    probability `frequency[g]`, and its label follows the true coefficients turned by
    `turn[g]` degrees towards a direction of their own, so that groups disagree.

    Args:
        frequency: Probability of each group, for generated records.
        turn: Angle of each group, in degrees, for generated records.
    """

    choice: ClassVar[str] = (
        "either column and values (the groups of real records), or frequency and turn, "
        "one number per group each (generated records)"
    )

    frequency: tuple[float, ...] = ()
    turn: tuple[float, ...] = ()

    def __post_init__(self):
        check_values("values", self.values)
        listed = bool(self.column) and bool(self.values)
        drawn = bool(self.frequency) and len(self.frequency) == len(self.turn)
        given = (self.column, self.values), (self.frequency, self.turn)
        if listed == drawn or any(given[listed]):
            raise ValueError(f"give {self.choice}.")
        chances = list(self.frequency)
        if drawn and not (min(chances) >= 0 and abs(sum(chances) - 1) <= 1e-6):
            raise ValueError(f"frequency must be probabilities of sum 1, got {chances}")

    @property
    def count(self) -> int:
        """Number of groups."""
        return len(self.values or self.frequency)

    def generated(
        self, rng: np.random.Generator, features: np.ndarray, truth: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return arrays of each record's random group and its margin in that group.

        Args:
            rng: Generator of the public records.
            features: One row per record.
            truth: Coefficients of a group that is not turned.
        """
        group = rng.choice(self.count, len(features), p=self.frequency)
        length = float(np.linalg.norm(truth))
        along = truth / max(length, 1e-12)
        side = rng.standard_normal(len(truth))
        side -= (side @ along) * along  # at right angles to the truth
        side *= length / max(float(np.linalg.norm(side)), 1e-12)  # of the same length
        angle = np.deg2rad(self.turn)[:, None]
        turned = np.cos(angle) * truth + np.sin(angle) * side
        margin = np.sum(features * turned[group], axis=1)
        return group.astype(np.int32), margin


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """A file of records on which the released model is tested.

    Args:
        path: The file, relative to the config; it has the columns of the features and
            the label.
        accuracy: Protection of its people: `"public"`, none is needed; `"counted"`,
            noise, within the budget of the config, which they spend on nothing else,
            because they are in no other file; `"non_private"`, none, as every report
            says.
        records: Number of records of the file that are read; 0 reads all, which
            `"counted"` does not take.
    """

    path: str
    accuracy: Literal["public", "counted", "non_private"]
    records: int = 0

    def __post_init__(self):
        least = int(self.accuracy == "counted")
        if self.records < least:
            raise ValueError(
                f'records must be at least {least} if accuracy = "{self.accuracy}".'
            )
