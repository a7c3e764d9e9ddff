"""Private correction of probabilities: a slope and constants of the scores.

A network that is trained with noisy gradients takes noise for signal, and its
probabilities are too close to 0 and 1. After the training, one slope for all scores and
a constant for each class are fitted by noisy descent, for a fifth of the squared
budget. The descent starts at a slope of 0 and has a ridge that grows with its noise: if
there are too few records, the answer is nearly constant.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from ..core.loop import solved
from ..core.outputs import TailMean
from ..core.plan import least_multiplier
from ..onelevel.noisy_gd import NoisyGD
from ..onelevel.problem import FiniteSum
from ..privacy.budget import PrivacyBudget
from ..privacy.ledger import AbstractRelease
from ..privacy.noise import PRNGKey
from ..privacy.sampling.base import FullBatch

PART = 0.2  # of the squared budget
_STEPS, _CLIP_NORM, _LONGEST_STEP = 50, 1.8, 4.0
_RIDGE = 4.0  # times the squared noise of one release and the number of classes
_WALK = 1.0  # about the largest distance that noise moves a coordinate
# Largest length of the scores of a record, and the unit of the slope.
_LENGTH = 4.0
_SLOPES = 0.0, 1.0  # a slope above 1 would follow what the training has overfitted


def _loss(model: Any, record: Any) -> Float[Array, ""]:
    slope, constants = model
    return optax.losses.softmax_cross_entropy_with_integer_labels(
        slope * record["scores"] + constants, record["label"]
    )


@functools.lru_cache(maxsize=64)
def _problem(ridge: float) -> FiniteSum:
    """Return the problem of a ridge, cached so that it is compiled once."""

    def penalty(model):
        return ridge * optax.tree.norm(model, squared=True)

    return FiniteSum(_loss, public=penalty)


_run = jax.jit(
    lambda problem, solver, records, w0, key: (
        solved(problem, solver, records, w0, key=key).value
    )
)


@dataclasses.dataclass(frozen=True)
class Recalibration:
    """A planned fit of a slope and constants.

    Attributes:
        problem: Problem with its ridge.
        solver: Solver with its noise and sizes.
        releases: Releases of the fit, for `calibrate(before=)`.
    """

    problem: FiniteSum
    solver: NoisyGD
    releases: tuple[AbstractRelease, ...]

    @classmethod
    def plan(cls, budget: PrivacyBudget, public: Any, classes: int) -> "Recalibration":
        """Return the fit for a fifth of the squared budget.

        Args:
            budget: The budget of the whole fit; delta is not 0.
            public: The public number of records, `size`, and the `relation`.
            classes: The number of classes.

        Privacy:
            Touches no data.
        """
        multiplier = least_multiplier(FullBatch(), 1, 1, budget)
        multiplier *= math.sqrt(_STEPS / PART)
        solver = NoisyGD(
            _STEPS,
            _CLIP_NORM,
            _LONGEST_STEP,
            output=TailMean(),
            noise_multiplier=multiplier,
            neighbours=public.relation,
        ).with_sizes(public.size)
        release = solver.release(FiniteSum(_loss), public.size)
        noise: Any = release.noise_std / math.sqrt(_STEPS)  # of one release alone
        ridge = _RIDGE * noise**2 * classes
        longest = 1 / (1 / _LONGEST_STEP + 2 * ridge)
        step = min(longest, _WALK / (_STEPS * noise))
        solver = dataclasses.replace(solver, step_size=step)
        charged = dataclasses.replace(release, name="recalibration", count=_STEPS)
        return cls(_problem(ridge), solver, (charged,))

    def fit(
        self, scores: Float[np.ndarray, "n k"], labels: np.ndarray, *, key: PRNGKey
    ) -> tuple[float, Float[np.ndarray, " k"]]:
        """Release the slope and the constants.

        Args:
            scores: The scores of a released model, in the planned number of rows; NaN
                for records that do not count.
            labels: The numbers of the classes.
            key: A typed key for this run alone.

        Returns:
            A slope from 0 to 1, and a constant for each class.

        Privacy:
            One run of `solver`.
        """
        with np.errstate(all="ignore"):  # a warning would reveal a record
            centred = scores - scores.mean(axis=1, keepdims=True)
            length = np.linalg.norm(centred, axis=1, keepdims=True)
            shortened = centred / np.maximum(length, _LENGTH)
        records = {"scores": shortened, "label": labels}
        w0 = jnp.zeros(()), jnp.zeros(scores.shape[1])
        slope, constants = _run(self.problem, self.solver, records, w0, key)
        least, most = _SLOPES
        return min(max(float(slope) / _LENGTH, least), most), np.asarray(constants)
