"""Tasks of the command line, each declared in a file of its own."""

from typing import Any

from ..task import Task
from .groups import GROUP_FAIR, GROUP_ROBUST
from .matrix_game import MATRIX_GAME
from .penalty_tuning import PENALTY_TUNING
from .source_weighting import SOURCE_WEIGHTING
from .training import TRAINING

TASKS: dict[str, Task[Any]] = {
    task.name: task
    for task in (
        TRAINING,
        SOURCE_WEIGHTING,
        PENALTY_TUNING,
        GROUP_FAIR,
        GROUP_ROBUST,
        MATRIX_GAME,
    )
}
