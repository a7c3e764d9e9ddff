"""A search whose points are evaluated elsewhere."""

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
from jaxtyping import Float

from .. import _checks
from ..core.solution import Solution
from ..privacy.budget import PrivacyBudget
from ..privacy.noise import PRNGKey
from ..privacy.per_example.clipping import Precision
from ..privacy.report import PrivacyReport
from .base import AbstractAskTellSolver
from .folder import NoisyLosses
from .problem import BlackBox
from .rounds import Rounds
from .run import planned


class AskTell:
    """A search in steps: `ask` names points, `tell` takes everyone's losses there.

    It works like `minimize`, but the evaluations are made elsewhere: on a cluster, by
    another process, days later. With the same losses and the same key it makes the
    releases of `minimize`, bit for bit, if both have a folder or both have none.

    Args:
        problem: The black box; its `losses` may be `None`, and are not called.
        solver: A solver that asks for losses: calibrated, or with `budget` any.
        w0: The starting point, one vector, public or already private.
        key: One typed key; consumed by this search.
        budget: The guarantee to reach: the solver is calibrated first.
        precision: As in `calibrate`; read with `budget` only.
        folder: Folder for the losses that are told, and for a checkpoint of every step.
            A later object with the same arguments and folder goes on where this one
            stopped, in this process or another one; after the end it has the result. It
            is locked until the search is done, closed or no longer referred to.

    Raises:
        TypeError: As `minimize`.
        ValueError: As `minimize`; or the folder is in use.
        OSError: The disk refuses.

    Warns:
        UserWarning: As `minimize`.

    Privacy:
        As `minimize`: one run under the solver's ledger, counted in the folder before
        the first point is asked for, whether or not it is finished. Points are
        functions of released values, and so is how many there are. With a folder the
        noise of a step also depends on all losses told so far, as in `minimize`. The
        object is SECRET: it holds losses and the key of noise to come. It cannot be
        copied, pickled or used after `os.fork`: two objects would release with the same
        noise. How long evaluations take, and whatever else is done with losses outside,
        is not covered.
    """

    _owner: ClassVar[str] = "AskTell"  # in errors and warnings

    def __init__(
        self,
        problem: BlackBox,
        solver: AbstractAskTellSolver,
        w0: Float[np.ndarray, " d"],
        *,
        key: PRNGKey,
        budget: PrivacyBudget | None = None,
        precision: Precision = "grid",
        folder: Path | str | None = None,
    ):
        plan = planned(
            self._owner,
            problem,
            solver,
            w0,
            key=key,
            budget=budget,
            precision=precision,
            folder=folder,
        )
        self._rounds = Rounds(plan, folder)
        self._warn()

    def ask(self) -> Float[np.ndarray, "k d"]:
        """Return the points to evaluate next, float64; none when the search is done.

        Until `tell` has taken losses, every call returns the same points.

        Raises:
            ValueError: The search was closed, or belongs to the process from which this
                one was forked, or the folder's lock file was deleted or replaced.
            OSError: The disk refuses.
        """
        found = self._rounds.ask()
        self._warn()
        return found

    def tell(self, losses: Sequence[Float[np.ndarray, " n"]]) -> None:
        """Takes losses at the points of `ask`, in their order.

        Once all points have losses, the step is released.

        Args:
            losses: One row for each point, or for the first ones: a table of shape `(k,
                n)`, or a sequence of vectors. A record's loss is at the same place in
                every row. NaN counts as the worst loss there is.

        Raises:
            TypeError: They are no real numbers.
            ValueError: Their shapes do not fit, `ask` was not called, or as in `ask`.
                Nothing is taken then; the message names shapes and no loss.
            OSError: The disk refuses.
        """
        self._rounds.tell(losses)
        self._warn()

    @property
    def result(self) -> Solution | None:
        """What was released, with the report; `None` until the search is done.

        The trajectory has one iterate a step.
        """
        return self._rounds.solution

    @property
    def report(self) -> PrivacyReport | None:
        """The guarantee, known before the first point; `None` without `budget`."""
        return self._rounds.report

    @property
    def noisy_losses(self) -> NoisyLosses:
        """Points whose noisy mean losses were released so far, and these losses.

        Shapes `(k, d)` and `(k,)`: all points of `NoisyUCB`, one of `RepeatAndSelect`
        once it is done, none of solvers that release no loss.
        """
        return self._rounds.noisy_losses

    def close(self) -> None:
        """Unlocks the folder, so that another object can go on, and this one cannot.

        Without a folder it does nothing.
        """
        self._rounds.close()

    def __enter__(self) -> "AskTell":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _warn(self) -> None:
        while self._rounds.remarks:
            _checks.warn(f"{self._owner}: {self._rounds.remarks.pop(0)}")
