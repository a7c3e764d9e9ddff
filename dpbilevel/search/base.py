"""Solvers that see losses at points and no derivatives: the ask/tell contract."""

import abc
import functools
from typing import Any, ClassVar, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree
from typing_extensions import override

from .. import _checks
from ..core.solver import AbstractSolver
from ..onelevel.problem import FiniteSum
from ..privacy.budget import People
from ..privacy.ledger import AbstractRelease, Ledger
from ..privacy.noise import PRNGKey, derive
from ..privacy.per_example.structure import rowwise
from ..privacy.records.rows import Padded, unpacked
from .declared import TRAINING, Trainings
from .problem import BlackBox, SearchProblem

State = TypeVar("State")


class Proposal(eqx.Module):
    """The points at which a step wants all records' losses."""

    points: Float[Array, "q d"]
    count: Int[Array, ""]  # losses are evaluated at the first so many, at least 0


class AbstractAskTellSolver(AbstractSolver[SearchProblem, State]):
    """A solver that sees losses at points of its choice, never a derivative.

    `ask` proposes points and reads no record; `tell` takes the losses there and makes
    the release. Between the two, losses come from a compiled function (`solve`) or from
    Python (`minimize`): the same keys give the same run.
    """

    problem_type: ClassVar[Any] = FiniteSum | BlackBox
    in_config: ClassVar[bool] = False
    # Whether the noisy loss of every evaluation is released, in their order.
    shows_every_loss: ClassVar[bool] = False

    @property
    def most_evaluations(self) -> int | None:
        """How many a run makes at most; `None` where that depends on the dimension."""
        return self.num_steps

    @abc.abstractmethod
    def ask(self, problem: SearchProblem, state: State, *, key: PRNGKey) -> Proposal:
        """The next points: a function of released values, public ones and the key."""

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
        """The next state; all that is read of `losses` is released by a mechanism.

        Args:
            problem: Its set and public term are read.
            state: The state that proposed.
            proposal: The points.
            losses: One row a record, one column a point, infinity for NaN; columns
                from `proposal.count` on hold zeros.
            key: A typed key of its own.
        """

    def remark(self, state: State) -> str | None:
        """What `minimize` warns of at the end, from released values, or `None`."""

    def noisy_losses(self, state: State) -> tuple[Array, Array]:
        """Return the points whose noisy losses were released so far, and these losses.

        One row a point, of shapes `(k, d)` and `(k,)`, in the order of their releases;
        none for a solver that releases no loss.
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
        """What a run releases of the losses.

        Args:
            problem: The problem.
            sizes: The planned number of records.
        """

    @override
    def ledger(self, problem: SearchProblem, sizes: int) -> Ledger:
        """Its own releases, and the trainings that the problem declares.

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
        """How many trainings are charged besides `releases`: one an evaluation.

        Raises:
            ValueError: There is no public bound on the number of evaluations.
        """
        if self.most_evaluations is None:
            raise ValueError(
                "BlackBox: training is charged once for every evaluation, so there "
                "must be a public bound on their number; give the solver batch= or "
                "max_batch=."
            )
        return self.most_evaluations

    def assumptions(self, problem: SearchProblem, sizes: int) -> tuple[str, ...]:
        """What a guarantee on a black box assumes."""
        if not isinstance(problem, BlackBox):
            return ()
        rows = (
            "every record moves its own loss only, at every point",
            "unprotected: how long an evaluation takes, which may depend on records, "
            "as where a model refuses one",
        )
        if problem.training is None:
            return (
                *rows,
                "what the losses are computed from besides the records, such as "
                "training data, is not protected",
            )
        apart = problem.training.people is People.DISJOINT
        return (
            *rows,
            f"every training, at any point, is as declared: {problem.training}",
            f"{'nobody has' if apart else 'somebody may have'} a record among those "
            "that are trained on and one among those that are evaluated",
        )


def _losses_at(problem: FiniteSum, proposal: Proposal, data: PyTree) -> PyTree:
    """Every record's loss at every point proposed, zero elsewhere; `Padded` as data."""
    records, present = unpacked(data)
    _checks.leading_axis("data", records)

    def at_one(row):
        point, index = row

        def evaluated():
            loss = rowwise("SearchProblem", functools.partial(problem.loss, point))
            found = jax.vmap(loss)(records)
            # No worse, and a run that is debugged must not stop where a loss is NaN.
            return jnp.where(jnp.isnan(found), jnp.inf, found)

        shape = jax.eval_shape(evaluated)
        return jax.lax.cond(
            index < proposal.count,
            evaluated,
            lambda: jnp.zeros(shape.shape, shape.dtype),
        )

    indices = jnp.arange(len(proposal.points), dtype=proposal.count.dtype)
    # One after another: a `cond` that is vectorized evaluates both of its branches.
    losses = jax.lax.map(at_one, (proposal.points, indices)).T
    return losses if present is None else Padded(losses, present)
