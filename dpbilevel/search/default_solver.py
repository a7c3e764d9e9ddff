"""The method of a search where none is given, by the number of parameters."""

import functools

import numpy as np
import optax
from jaxtyping import Float

from ..privacy.budget import PrivacyBudget
from .base import AbstractAskTellSolver
from .default_losses import zero_one_loss
from .gibo import GradientInformativeBO
from .loop import Evaluations
from .parallel import evaluations
from .portfolio import Portfolio
from .random_search import RandomSearch
from .ranges import Categorical
from .row_losses import RowLosses
from .space import Space

_FEW = 3  # coordinates of which uniform points find as good ones as descent
_TRIED = 6  # points tried on training rows for each that is kept
_STARTS = 60  # of those, in the portfolio of a descent
# AdaGrad's first step would be as long for pure noise as for a steep slope, but for its
# initial accumulator. One object, or every search would compile anew.
_RULE = optax.adagrad(0.2, initial_accumulator_value=0.01)


def default_solver(
    space: Space,
    budget: PrivacyBudget,
    rows: RowLosses,
    starts: Float[np.ndarray, "k d"],
    n_jobs: int | None = None,
) -> AbstractAskTellSolver:
    """The method for a space, and the unit of the losses, which is set in `rows`.

    Args:
        space: The space.
        budget: The guarantee.
        rows: The losses; their unit and likely points come from training rows.
        starts: Likely points.
        n_jobs: As in `PrivateSearch`, for trainings on some of the training rows.
    """
    size, entries = space.coordinates, space.entries.values()
    steps = any(isinstance(v, Categorical) or v.integer for v in entries)
    steps |= rows.losses is zero_one_loss  # without slopes
    usual = rows.usual_loss(space.middles())
    judge = evaluations(functools.partial(rows.held_out, most=usual), n_jobs)
    likely = functools.partial(_likely, size, judge)
    if size <= _FEW or steps or budget.delta == 0:
        count = 30 + 10 * size
        if size > _FEW:
            starts = np.concatenate([starts, likely(count // 2)])
        rows.unit = usual
        return RandomSearch(max(count, len(starts)), 1.0, starts=starts)
    starts = np.concatenate([starts, likely(_STARTS)])
    rows.unit = rows.usual_slope(size)
    return _descent(size, starts, usual / rows.unit)


def _likely(size: int, judge: Evaluations, count: int) -> Float[np.ndarray, "count d"]:
    """The best of some uniform points for training rows, which cost no privacy.

    The points are the same for every key, so that a search that stopped goes on.
    """
    points = np.random.default_rng(0).uniform(-1, 1, (_TRIED * count, size))
    losses = np.fromiter(judge(points), np.float64)
    return points[np.argsort(losses, kind="stable")[:count]]


def _descent(
    size: int, starts: Float[np.ndarray, "k d"], clip_range: float
) -> GradientInformativeBO:
    """Descent along inferred gradients, in units of a record's usual slope.

    `clip_range` is what losses of the draw are clipped at. Its points are the starts,
    the middle twice and diagonals: more that are worse make the best less likely.
    """
    return GradientInformativeBO(
        21,
        1.0,
        step_size=_RULE,
        evaluation_noise=0.02,
        max_batch=2 * size + 16,
        keep=max(128, 4 * size),  # older points add little to the gradient
        polish=0,
        portfolio=Portfolio(21 + len(starts), starts, clip_range=clip_range),
    )
