"""The method of a search where none is given, by the number of parameters."""

import numpy as np
import optax
from jaxtyping import Float

from ..privacy.budget import PrivacyBudget
from .base import AbstractAskTellSolver
from .gibo import GradientInformativeBO
from .portfolio import Portfolio
from .random_search import RandomSearch
from .ranges import Categorical
from .row_losses import RowLosses
from .space import Space

_FEW = 3  # coordinates of which uniform points find as good ones as descent
# AdaGrad's first step would be as long for pure noise as for a steep slope, but for its
# initial accumulator. One object, or every search would compile anew.
_RULE = optax.adagrad(0.2, initial_accumulator_value=0.01)


def default_solver(
    space: Space,
    budget: PrivacyBudget,
    rows: RowLosses,
    starts: Float[np.ndarray, "k d"],
) -> AbstractAskTellSolver:
    """The method for a space, and the unit of the losses, which is set in `rows`.

    Args:
        space: The space.
        budget: The guarantee.
        rows: The losses; training rows tell their unit.
        starts: Likely points.
    """
    size, entries = space.coordinates, space.entries.values()
    whole = any(isinstance(v, Categorical) or v.integer for v in entries)
    if size <= _FEW or whole or budget.delta == 0:
        rows.unit = rows.usual_loss(space.middles())
        return RandomSearch(30 + 10 * size, 1.0)
    rows.unit = rows.usual_slope(size)
    return _descent(size, starts)


def _descent(size: int, starts: Float[np.ndarray, "k d"]) -> GradientInformativeBO:
    """Descent along inferred gradients, in units of a record's usual slope."""
    return GradientInformativeBO(
        21,
        1.0,
        step_size=_RULE,
        evaluation_noise=0.02,
        max_batch=2 * size + 16,
        keep=max(128, 4 * size),  # older points add little to the gradient
        polish=0,
        portfolio=Portfolio(60 + len(starts), starts),
    )
