"""The fully first-order method: gradients alone, one joint release a step."""

from typing import Any, ClassVar

import equinox as eqx
import jax
import optax
from typing_extensions import override

from .._checks import Count, Positive
from ..core.descent import Descent
from ..core.proximal import operator
from .blocks import AbstractBlocks, AbstractJointSolver, JointState
from .levels import lower_objective
from .penalty_gradients import public_penalty_gradient


class _Blocks(AbstractBlocks):
    y: Any  # follows the solution of the lower level
    z: Any  # follows the solution of the penalized level
    x: Any


class F2SA(AbstractJointSolver):
    r"""Fully first-order bilevel optimization with one clipped, noisy release a step.

    $y$ follows the solution of the lower level and $z$ that of the penalized level $g +
    f / \lambda$. One step moves all three variables from the same point and the same
    batch:

    $$
    q_y = \nabla_y g(x, y), \qquad q_z = \nabla_y g(x, z) + \tfrac1\lambda \nabla_y f(x,
    z), \qquad q_x = \nabla_x f(x, z) + \lambda \bigl(\nabla_x g(x, z) - \nabla_x g(x,
    y)\bigr),
    $$
    $$
    y \leftarrow \Pi_Y(y - \rho\, q_y), \qquad z \leftarrow \Pi_Y(z - \rho\, q_z),
    \qquad x \leftarrow \Pi_X(x - \eta\, q_x).
    $$

    A lower record enters with $(\nabla_y g(x, y), \nabla_y g(x, z), \lambda (\nabla_x
    g(x, z) - \nabla_x g(x, y)))$ at the cost of two gradients, an upper one with $(0,
    \nabla_y f / \lambda, \nabla_x f)$. A record's three blocks are clipped together: a
    record whose blocks are within their clip norms is left as it is. Compared with
    `PenaltyBilevel` there is no inner loop; compared with `SingleLoopBilevel` there is
    no Hessian, and a bias that falls like $1 / \lambda$.

    Steps are shorter if they would overshoot the public terms, as in `NoisyGD`:
    those of $x$ the upper one, that of $y$ the lower one, that of $z$ both. If
    `lower_public` is a term of `proximal`, its proximal step follows those of $y$ and
    $z$, which are then taken as they are.

    Args:
        num_steps: The number of steps. Static.
        penalty: The penalty $\lambda$. The bias of the hypergradient falls like
            $1/\lambda$, the effect of the noise of y and z on it grows like $\lambda$.
        step_size: The step size $\eta$ of $x$, or an optax optimizer fed with $q_x$.
        lower_step_size: The step size $\rho$ of $y$ and $z$, or an optax optimizer fed
            with $q_y$ and $q_z$.
        clip_norm: The bound $C_y$ on $\nabla_y g$ of one lower record.
        cross_clip_norm: The bound $C_x$ on $\lambda (\nabla_x g - \nabla_x g)$ of one
            lower record; it includes the factor $\lambda$. If no lower loss reads x, it
            is the unit of $\nabla_x f$.
        upper_clip_norm: The bound $C_f$ on $\nabla_y f$ and on $\nabla_x f$ of one
            upper record.
        budget_split: How the squared budget is split over $y$, $z$ and $x$: the noise
            of a block is $C_b / \sqrt{s_b}$ times a common factor. If no record's loss
            reads x, it is split over the first two. If upper records are few, about
            $(\lambda C_y n_f / (C_f n_g))^2$ of it for $z$, with the numbers of
            records: above that the share of an upper record decides the noise of all
            blocks.

    Privacy:
        `num_steps` Gaussian releases of all blocks at once, from one batch per level.
        In units $u_b = C_b / \sqrt{s_b}$ of the blocks a lower record moves the mean by
        at most $1 / n_g$ and an upper record by at most $\sqrt{(C_f / (\lambda u_z))^2
        + (C_f / u_x)^2} / n_f$, the second term only if upper losses read x; twice
        that under replace-one. Enforced by clipping, for any functions. If no
        record's loss reads x, $q_x$ is a function of released values and needs no noise
        and no budget. $x$, $y$, $z$ and the whole trajectory are released.

    References:
        Kwon, Kwon, Wright and Nowak, "A fully first-order method for stochastic bilevel
        optimization", ICML 2023, Algorithm 1 (F2SA). Here with clipped and noisy
        directions, one inner step, all directions at the same point, a constant
        penalty, and $q_z$ divided by $\lambda$, which makes its steps those of $q_y$.
        There $y$ and $z$ change places.
    """

    num_steps: Count = eqx.field(static=True)
    penalty: Positive
    blocks: ClassVar = _Blocks
    proximal: ClassVar = ("lower_step_size",)

    @override
    def start(self, x, y) -> _Blocks:
        return _Blocks(y, y, x)

    @override
    def descents(self, problem, *x) -> _Blocks:
        prox = operator(problem.lower_public, *x)
        lower = Descent(self.lower_step_size, problem.y_set, prox=prox)
        return _Blocks(lower, lower, Descent(self.step_size, problem.x_set))

    @override
    def lower_bounds(self, sizes):
        return self.clip_norm, self.clip_norm, self.cross_clip_norm

    @override
    def upper_bounds(self):
        return None, self.upper_clip_norm / self.penalty, self.upper_clip_norm

    @override
    def step(self, problem, data, state, *, key) -> JointState:
        x, y, z = state.w.x, state.w.y, state.w.z

        def upper(f):
            of_x, of_z = jax.grad(f, (0, 1))(x, z)
            of_z = jax.tree.map(lambda v: v / self.penalty, of_z)
            return _Blocks(optax.tree.zeros_like(y), of_z, of_x)

        def lower(g):
            slopes = jax.grad(g, (0, 1))
            (x_at_y, of_y), (x_at_z, of_z) = slopes(x, y), slopes(x, z)
            of_x = optax.tree.scale(self.penalty, optax.tree.sub(x_at_z, x_at_y))
            return _Blocks(of_y, of_z, of_x)

        # Algorithm 1: all gradients at the same point and on the same batch.
        q = self.directions(problem, data, upper, lower, like=x, key=key)
        # The public terms; blocks are shortened if they would overshoot these.
        of_lower = lower_objective(problem, x).public
        of_penalized = lower_objective(problem, x, self.penalty).public
        of_x = public_penalty_gradient(problem, self.penalty, x, y, z)
        q = optax.tree.add(q, _Blocks(of_lower(y), of_penalized(z), of_x))
        descents = self.descents(problem)
        q_y = descents.y.curvature_limited(q.y, of_lower, y)
        q_z = descents.z.curvature_limited(q.z, of_penalized, z)
        # The inner steps and the outer one.
        return self.moved(problem, state, _Blocks(q_y, q_z, q.x))
