"""The default solver of a search of estimators."""

import functools

import numpy as np
import optax
from jaxtyping import Float

from ..privacy.budget import PrivacyBudget
from .base import AbstractAskTellSolver
from .gibo import GradientInformativeBO
from .portfolio import Portfolio
from .random_search import RandomSearch
from .row_losses import RowLosses, evaluations, zero_one_loss
from .space import Categorical, Space

_FEW = 3  # coordinates up to which uniform points do as well as descent
_TRIED = 6  # points tried on training rows for each that is chosen
_STARTS = 60  # chosen initial points of a descent
# Without the initial accumulator, AdaGrad's first step is as long for pure noise as for
# a steep slope. One object: another one would compile every search anew.
_RULE = optax.adagrad(0.2, initial_accumulator_value=0.01)


def default_solver(
    space: Space,
    budget: PrivacyBudget,
    rows: RowLosses,
    starts: Float[np.ndarray, "k d"],
    n_jobs: int | None = None,
) -> AbstractAskTellSolver:
    """Return the default solver for a space, and set the unit of the losses in `rows`.

    Args:
        space: The space.
        budget: The guarantee.
        rows: The losses; their unit and likely points follow from training rows.
        starts: Likely points.
        n_jobs: Number of processes that train on training rows, as in `PrivateSearch`.
    """
    size, entries = space.coordinates, space.entries.values()
    flat = any(isinstance(v, Categorical) or v.integer for v in entries)
    flat |= rows.losses is zero_one_loss  # without slopes
    scale = rows.loss_scale(space.middles())
    held_out = evaluations(functools.partial(rows.held_out_loss, worst=scale), n_jobs)

    def likely(count):
        """Return the best of uniform points on training rows, at no privacy cost.

        The points do not depend on the key, so that a stopped search can continue.
        """
        points = np.random.default_rng(0).uniform(-1, 1, (_TRIED * count, size))
        losses = np.fromiter(held_out(points), np.float64)
        return points[np.argsort(losses, kind="stable")[:count]]

    if size <= _FEW or flat or budget.delta == 0:
        count = 30 + 10 * size
        if size > _FEW:
            starts = np.concatenate([starts, likely(count // 2)])
        rows.unit = scale
        return RandomSearch(max(count, len(starts)), 1.0, starts=starts)
    starts = np.concatenate([starts, likely(_STARTS)])
    rows.unit = rows.gradient_scale(size)
    return _descent(size, starts, scale / rows.unit)


def _descent(
    size: int, starts: Float[np.ndarray, "k d"], clip_range: float
) -> GradientInformativeBO:
    """Return a descent with a portfolio of the starts, the middle and diagonal points.

    No others are added: more points that are worse make the best one less likely.
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
