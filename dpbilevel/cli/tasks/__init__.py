"""Tasks of the command line, each declared once."""

from ..task import Task
from .groups import GROUP_FAIR, GROUP_ROBUST
from .linear import PENALTY_TUNING, SOURCE_WEIGHTING, TRAINING

_TASKS = TRAINING, SOURCE_WEIGHTING, PENALTY_TUNING
_GAMES = GROUP_FAIR, GROUP_ROBUST
TASKS: dict[str, Task] = {task.name: task for task in (*_TASKS, *_GAMES)}
