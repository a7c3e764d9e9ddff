"""A mean of losses that can only be evaluated, not differentiated."""

from collections.abc import Callable
from typing import ClassVar

import equinox as eqx
import numpy as np
import optax
from jaxtyping import Float, PyTree
from typing_extensions import override

from .. import _checks
from .._checks import Count, check_fields
from ..core.problem import AbstractOneLevel
from ..onelevel.problem import FiniteSum
from ..privacy.budget import People
from ..sets import AbstractSet, Box
from .declared import DeclaredTraining


class BlackBox(AbstractOneLevel):
    r"""Minimize $\frac{1}{n} \sum_i L(\theta, z_i)$ from values of $L$ alone.

    Args:
        losses: Maps a point, a float64 array of shape `(d,)`, to the losses of all $n$
            records there, of shape `(n,)`: train a model with these hyperparameters,
            then return every validation record's loss. Called on the host, outside
            every trace. `None` where losses are evaluated elsewhere, for `AskTell`.
            Static.
        num_records: $n$, public. Static.
        w_set: Where it may be evaluated: a `Box` with both ends, for
            `GradientInformativeBO` any set.
        records: Text that identifies the records, their order and what is evaluated on
            them, such as a hash; needed with a `folder`, and compared
            before an interrupted run goes on. SECRET. Static.
        evaluates: What `losses` computes, in words, public: kept in a folder with the
            result, where another one is refused. Static.
        training: Declared, where `losses` trains privately on other records, such as
            `DeclaredTraining([(1.1, 0.01, 1_000)], num_records=50_000)`: every training
            that a search may run is in its ledger, and the budget covers it. Static.
        trainings_after: How many trainings on the same records follow the search, such
            as that of the final model; counted with the others. Static.

    Privacy:
        The unit is one record: one row of what `losses` returns, the same row at every
        point, also after an interruption. A record may move its own row only. Where
        rows change places, or are scaled, centred or otherwise computed from other
        records, one record moves many rows and no guarantee holds; nothing can check
        that from outside. Whatever else `losses` reads, training data above all, is
        protected only where `training` declares it.
    """

    losses: Callable[[Float[np.ndarray, " d"]], Float[np.ndarray, " n"]] | None = (
        eqx.field(static=True)
    )
    num_records: Count = eqx.field(static=True)
    w_set: AbstractSet = Box(-1.0, 1.0)
    records: str = eqx.field(static=True, default="", repr=False)
    evaluates: str = eqx.field(static=True, default="", repr=False)
    training: DeclaredTraining | None = eqx.field(static=True, default=None)
    trainings_after: int = eqx.field(static=True, default=0)
    public: ClassVar[None] = None  # what a `FiniteSum` may have

    def __check_init__(self):
        check_fields(self)
        if self.trainings_after != 0:
            _checks.count("BlackBox", trainings_after=self.trainings_after)
        if self.training is not None:
            _checks.instance("BlackBox", DeclaredTraining, training=self.training)
        for name, example in (
            ("records", "hashlib.sha256(X.tobytes()).hexdigest()"),
            ("evaluates", "'digits, two layers'"),
        ):
            if not isinstance(getattr(self, name), str):
                raise TypeError(
                    f"BlackBox: {name} must be text, such as {example}, got an "
                    f"instance of {type(getattr(self, name)).__name__}."
                )

    def public_gradient(self, w: PyTree) -> PyTree:
        """Zeros, the gradient of no public term."""
        return optax.tree.zeros_like(w)

    @override
    def sizes_of(self, data: PyTree = None, people: People | str | None = None) -> int:
        return self.num_records

    def check(self, w0: PyTree, data: PyTree) -> None:
        """Raises `TypeError`: only `minimize` and `AskTell` run a black box."""
        raise TypeError(
            "BlackBox: calls Python between steps, which no compiled loop can; run it "
            "by dpbilevel.search.minimize(problem, solver, w0, budget=budget, key=key)."
        )


SearchProblem = FiniteSum | BlackBox
