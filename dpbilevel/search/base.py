"""`BlackBox` problems, the base class of ask/tell solvers, and points of boxes."""

import abc
import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PyTree
from typing_extensions import override

from .. import _checks
from .._checks import Count, check_fields
from ..core.problem import AbstractOneLevel
from ..core.solver import AbstractSolver
from ..onelevel.problem import FiniteSum
from ..privacy.budget import People
from ..privacy.keys import PRNGKey, derive
from ..privacy.ledger import AbstractRelease, Ledger
from ..privacy.per_example.structure import rowwise
from ..privacy.records.rows import Padded, unpacked
from ..sets import AbstractSet, Box
from .declared import TRAINING, DeclaredTraining, Trainings

State = TypeVar("State")
LOSS = "mean loss"


class BlackBox(AbstractOneLevel):
    r"""Minimize $\frac{1}{n} \sum_i L(\theta, z_i)$ from values of $L$ alone.

    Args:
        losses: Function of a point, a float64 array of shape `(d,)`, that returns the
            losses of all $n$ records there, of shape `(n,)`. It may train a model with
            these hyperparameters and return every validation record's loss. It is
            called on the host, outside every trace. `None` if losses are evaluated
            elsewhere, for `AskTell`. Static.
        num_records: $n$, public. Static.
        w_set: Set of points: a `Box` with finite ends, or any set for
            `GradientInformativeBO`.
        records: Text that identifies the records, their order and what is evaluated on
            them, such as a hash. It is needed with a `folder`, and compared before an
            interrupted run continues. SECRET. Static.
        evaluates: Public description of `losses`, stored in a folder with the result.
            A folder with another description is refused. Static.
        training: Releases of one training, if `losses` trains privately on other
            records, such as `DeclaredTraining([(1.1, 0.01, 1_000)],
            num_records=50_000)`. The ledger counts every training that a search may
            run, and the budget covers it. Static.
        trainings_after: Number of trainings on the same records after the search, such
            as that of the final model. They are counted too. Static.

    Privacy:
        The privacy unit is one record: one row of what `losses` returns, the same row
        at every point, also after an interruption. A record must change its own loss
        only: losses that are standardized, centred or ranked over records break the
        guarantee, and cannot be detected here. Evaluations must keep no state. The
        other inputs of `losses`, above all training data, are protected only if
        `training` declares it.
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
    public: ClassVar[None] = None  # as in `FiniteSum`

    def __check_init__(self):
        check_fields(self)
        if self.trainings_after != 0:
            _checks.count("BlackBox", trainings_after=self.trainings_after)
        kind = DeclaredTraining | None
        _checks.instance("BlackBox", kind, training=self.training)
        texts = {"records": self.records, "evaluates": self.evaluates}
        _checks.instance("BlackBox", str, **texts)

    @override
    def with_functions(self, functions, unit):
        raise ValueError("BlackBox: return one loss for each person from `losses`.")

    def public_gradient(self, w: PyTree) -> PyTree:
        """Return zeros: the problem has no public term."""
        return optax.tree.zeros_like(w)

    @override
    def sizes_of(self, data: PyTree = None, people: People | str | None = None) -> int:
        return self.num_records

    def check(self, w0: PyTree, data: PyTree) -> None:
        """Raise `TypeError`: only `minimize` and `AskTell` run a black box."""
        raise TypeError("BlackBox: calls Python; run it by dpbilevel.search.minimize.")


SearchProblem = FiniteSum | BlackBox


class Proposal(eqx.Module):
    """Points at which a step needs the losses of all records."""

    points: Float[Array, "q d"]
    count: Int[Array, ""]  # number of points to evaluate, the first ones


class AbstractAskTellSolver(AbstractSolver[SearchProblem, State]):
    """A solver that sees losses at points of its choice, never a derivative.

    `ask` proposes points and reads no record; `tell` takes the losses there and makes
    the release. Between the two, losses come from a compiled function (`solve`) or from
    Python (`minimize`): the same keys give the same run.
    """

    problem_type: ClassVar[Any] = FiniteSum | BlackBox
    in_config: ClassVar[bool] = False

    @property
    def most_evaluations(self) -> int | None:
        """Largest number of evaluations of a run; `None` if the dimension decides."""
        return self.num_steps

    @abc.abstractmethod
    def ask(self, problem: SearchProblem, state: State, *, key: PRNGKey) -> Proposal:
        """Return a `Proposal` of points, from released and public values and key."""

    @abc.abstractmethod
    def tell(
        self,
        problem: SearchProblem,
        state: State,
        proposal: Proposal,
        losses: Float[Array, "n q"],
        *,
        key: PRNGKey,
    ) -> State:
        """Release what is needed of `losses`, and return the next state.

        Args:
            problem: The problem; its set and public term are read.
            state: The state that proposed.
            proposal: The points.
            losses: One row per record, one column per point, infinity for NaN; columns
                from `proposal.count` on hold zeros.
            key: A typed key for this release alone.
        """

    @override
    def released(self, state: Any) -> PyTree:
        return state.w  # the iterate

    def remark(self, state: State) -> str | None:
        """Return a warning for the end of a run, from released values, or `None`."""

    def noisy_losses(self, state: State) -> tuple[Array, Array]:
        """Return points whose noisy losses are released, and losses; default: none.

        Their shapes are `(k, d)` and `(k,)`, in the order of the releases; k is 0 for
        solvers that release no loss.
        """
        del state
        return jnp.zeros((0, 0)), jnp.zeros(0)

    @override
    def step(self, problem, data, state, *, key) -> State:
        key_ask, key_tell = derive(key, "ask", "tell")
        proposal = self.ask(problem, state, key=key_ask)
        assert isinstance(problem, FiniteSum)  # a black box refuses to be solved
        losses = _losses_at(problem, proposal, data)
        return self.tell(problem, state, proposal, losses, key=key_tell)

    @abc.abstractmethod
    def releases(
        self, problem: SearchProblem, sizes: int
    ) -> tuple[AbstractRelease, ...]:
        """Return a tuple of a run's planned releases of losses; reads no record.

        Args:
            problem: The problem.
            sizes: The planned number of records.
        """

    def ledger(self, problem: SearchProblem, sizes: int) -> Ledger:
        """Return a `Ledger` of the releases of losses and of the declared trainings.

        Raises:
            ValueError: There is no public bound on the number of trainings.
        """
        releases = self.releases(problem, sizes)
        assumptions = self.assumptions(problem, sizes)
        if not isinstance(problem, BlackBox) or problem.training is None:
            return Ledger(releases, assumptions=assumptions)
        training = problem.training
        count = self.charged_trainings() + problem.trainings_after
        if count:
            releases = *releases, Trainings(TRAINING, count, (), training)
        return Ledger(releases, training.people, assumptions)

    def charged_trainings(self) -> int:
        """Return the number of trainings that a ledger counts: one per evaluation.

        Raises:
            ValueError: There is no public bound on the number of evaluations.
        """
        if self.most_evaluations is None:
            raise ValueError("BlackBox: to bound trainings give batch= or max_batch=.")
        return self.most_evaluations

    def assumptions(self, problem: SearchProblem, sizes: int) -> tuple[str, ...]:
        """Return the assumptions on a `BlackBox` problem as sentences, else `()`."""
        if not isinstance(problem, BlackBox):
            return ()
        rows = (
            "every record changes its own loss only, at every point: what evaluates "
            "the losses treats each record alone and keeps no state between points; no "
            "cell has changed the type of its column when the table was made",
            "unprotected: the time of an evaluation, which may depend on records, for "
            "example if an estimator rejects one",
        )
        training = problem.training
        if training is None:
            rest = "training data and other inputs of the losses are not protected"
            return (*rows, rest)
        disjoint = training.people is People.DISJOINT
        some = "nobody has" if disjoint else "anybody may have"
        return (
            *rows,
            "every training, at any point, is as declared, and no record decides "
            f"whether it fails: {training}",
            f"{some} a record in both the training and the evaluation data",
        )


def _losses_at(problem: FiniteSum, proposal: Proposal, data: PyTree) -> PyTree:
    """Return losses, one row a record and one column a point; zero beyond `count`."""
    records, present = unpacked(data)
    _checks.leading_axis("data", records)

    def at_one(row):
        point, index = row

        def evaluated():
            loss = rowwise("SearchProblem", functools.partial(problem.loss, point))
            losses = jax.vmap(loss)(records)
            # Infinity is as bad as NaN, and jax_debug_nans does not raise for it.
            return jnp.where(jnp.isnan(losses), jnp.inf, losses)

        shape = jax.eval_shape(evaluated)
        absent = functools.partial(jnp.zeros, shape.shape, shape.dtype)
        return jax.lax.cond(index < proposal.count, evaluated, absent)

    indices = jnp.arange(len(proposal.points), dtype=proposal.count.dtype)
    # Not vmap, under which `cond` evaluates both of its branches.
    losses = jax.lax.map(at_one, (proposal.points, indices)).T
    return losses if present is None else Padded(losses, present)


def box_of(owner: str, problem: SearchProblem) -> Box:
    """Return a problem's set, checked to be a `Box` with finite ends."""
    box: Any = problem.w_set
    corners = (box.lower, box.upper) if isinstance(box, Box) else (math.inf,)
    known = filter(_checks.concrete, jax.tree.leaves(corners))
    if not all(np.isfinite(np.asarray(v)).all() for v in known):
        raise ValueError(f"{owner}: w_set must be a finite Box(a, b), got {box}.")
    return box


def start_of(owner: str, problem: SearchProblem, w0: PyTree) -> Float[Array, " d"]:
    """Return the initial point, checked to be one vector, projected onto the box."""
    if getattr(w0, "ndim", None) != 1:
        shapes = jax.tree.map(jnp.shape, w0)
        raise ValueError(f"{owner}: w0 must be one vector, got {shapes}.")
    return box_of(owner, problem).project(jnp.asarray(w0))


def starts_of(
    owner: str, starts: Any, box: Box, like: Float[Array, " d"]
) -> Float[Array, "k d"]:
    """Return a solver's `starts`, projected onto the box; no points for `None`."""
    if starts is None:
        return like[None, :][:0]
    if np.ndim(starts) != 2 or np.shape(starts)[1] != like.size:
        shape = np.shape(starts)
        raise ValueError(f"{owner}: starts need shape (k, {like.size}), got {shape}.")
    return jax.vmap(box.project)(jnp.asarray(starts, like.dtype))


def check_starts(solver: Any, name: str) -> None:
    """Raise `ValueError` if a solver has more `starts` than its field `name` allows."""
    owner, limit = type(solver).__name__, getattr(solver, name)
    number = 0 if solver.starts is None else len(solver.starts)
    if number > limit:
        raise ValueError(f"{owner}: {name}={limit} is below {number} starts.")


def uniform(
    box: Box, like: Float[Array, " d"], count: int, *, key: PRNGKey
) -> Float[Array, "count d"]:
    """Sample `count` points uniformly from a box, one a row, in the dtype of `like`."""
    lower, upper = ends(box, like)
    unit = jax.random.uniform(key, (count, *like.shape), like.dtype)
    return lower[None] + unit * (upper - lower)[None]


def ends(
    box: Box, like: Float[Array, " d"]
) -> tuple[Float[Array, " d"], Float[Array, " d"]]:
    """Return the lower and upper corner of a box, in the shape and dtype of `like`."""
    largest = jnp.full_like(like, jnp.finfo(like.dtype).max)
    return box.project(-largest), box.project(largest)
