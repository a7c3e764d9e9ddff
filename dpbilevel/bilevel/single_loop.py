"""Two levels in one loop: one joint release of the directions of all variables."""

from typing import Any, ClassVar

import equinox as eqx
import jax
import optax
from typing_extensions import override

from .._checks import Count, Positive
from ..core.descent import Descent, StepSize, as_rule
from ..core.proximal import operator, smooth_entries
from ..sets import Euclidean
from .blocks import AbstractBlocks, AbstractJointSolver, JointState
from .levels import lower_objective, public_penalty_gradient


class _Blocks(AbstractBlocks):
    y: Any
    v: Any  # tracks the solution of the linear system
    x: Any


class SingleLoopBilevel(AbstractJointSolver):
    r"""Stochastic bilevel optimization with one clipped, noisy release a step.

    A third variable $v$ tracks $[\nabla_{yy}^2 g]^{-1} \nabla_y f$. One step moves all
    three from the same point and the same batch:

    $$
    q_y = \nabla_y g, \qquad q_v = \nabla_{yy}^2 g \, v - \nabla_y f, \qquad
    q_x = \nabla_x f - \nabla_{xy}^2 g \, v,
    $$
    $$
    y \leftarrow \Pi_Y(y - \rho_y q_y), \qquad v \leftarrow v - \rho_v q_v, \qquad
    x \leftarrow \Pi_X(x - \eta q_x),
    $$

    all at $(x, y, v)$. A lower record enters with $(\nabla_y g, \nabla_{yy}^2 g \, v,
    -\nabla_{xy}^2 g \, v)$ at the cost of about two gradients, an upper one with $(0,
    -\nabla_y f, \nabla_x f)$. A record's three blocks are clipped together: a record
    whose blocks are within their clip norms is left as it is. Unlike in the penalty
    method there is no inner loop, and no large factor multiplies the noise of the lower
    level.

    The hypergradient formula holds where $y^*(x)$ is in the interior of `y_set`. Steps
    are shorter if they would overshoot the public terms, as in `NoisyGD`: those of
    $x$ the upper one, the others the lower one. If `lower_public` is a term of
    `proximal`, its proximal step follows that of $y$, which is then taken as it is. The
    linear system is that of the entries of $y$ that are not zero: the others of $v$
    count as zero and do not move.

    Args:
        num_steps: The number of steps. Static.
        step_size: The step size $\eta$ of $x$, or an optax optimizer fed with $q_x$.
        lower_step_size: The step size $\rho_y$ of $y$, or an optax optimizer fed with
            $q_y$.
        linear_step_size: The step size $\rho_v$ of $v$, below two over the largest
            eigenvalue of $\nabla_{yy}^2 g$; or an optax optimizer fed with $q_v$.
        clip_norm: The bound $C_y$ on $\nabla_y g$ of one lower record.
        hessian_clip_norm: The bound $C_v$ on $\nabla_{yy}^2 g \, v$ of one lower
            record. `None` takes $\max(C_y, C_f n_g / n_f)$ with the records of a batch
            of each level: below that the share of one upper record decides the noise of
            all blocks.
        cross_clip_norm: The bound $C_x$ on $\nabla_{xy}^2 g \, v$ of one lower record;
            if no lower loss reads x, it is the unit of $\nabla_x f$.
        upper_clip_norm: The bound $C_f$ on $\nabla_y f$ and on $\nabla_x f$ of one
            upper record.
        budget_split: How the squared budget is split over $y$, $v$ and $x$: the noise
            of a block is $C_b / \sqrt{s_b}$ times a common factor. If no record's loss
            reads x, it is split over the first two.

    Privacy:
        `num_steps` Gaussian releases of all blocks at once, from one batch per level.
        In the blocks' units a lower record moves the mean by at most $1 / n_g$ and an
        upper record by at most $\sqrt{(C_f / u_v)^2 + (C_f / u_x)^2} / n_f$, the second
        term only if upper losses read x; twice that under replace-one. Enforced by
        clipping, for any functions. If no record's loss reads x, $q_x$ is a function
        of released values and needs no noise and no budget. $x$, $y$, $v$ and the whole
        trajectory are released.

    References:
        Dagréou, Ablin, Vaiter and Moreau, "A framework for bilevel optimization that
        enables stochastic and global variance reduction algorithms", NeurIPS 2022,
        Algorithm 1 (SOBA), here with clipped and noisy directions.
    """

    num_steps: Count = eqx.field(static=True)
    linear_step_size: StepSize = eqx.field(converter=as_rule)
    hessian_clip_norm: Positive | None = None
    blocks: ClassVar = _Blocks
    second_clip_norm: ClassVar = "hessian_clip_norm"
    proximal: ClassVar = ("lower_step_size",)

    @override
    def descents(self, problem, *x) -> _Blocks:
        prox = operator(problem.lower_public, *x)
        return _Blocks(
            Descent(self.lower_step_size, problem.y_set, prox=prox),
            Descent(self.linear_step_size, Euclidean()),
            Descent(self.step_size, problem.x_set),
        )

    @override
    def step(self, problem, data, state, *, key) -> JointState:
        x, y = state.w.x, state.w.y
        # Zero where a proximal term holds y at zero.
        v = smooth_entries(problem.lower_public, x, y, state.w.v)

        def upper(f):
            of_x, of_y = jax.grad(f, (0, 1))(x, y)
            of_v = optax.tree.scale(-1, of_y)
            return _Blocks(optax.tree.zeros_like(y), of_v, of_x)

        def lower(g):
            gradients, products = jax.jvp(
                lambda y: jax.grad(g, (0, 1))(x, y), (y,), (v,)
            )
            return _Blocks(gradients[1], products[1], optax.tree.scale(-1, products[0]))

        # Algorithm 1 (SOBA): all directions at the same point and on the same batch.
        q = self.directions(problem, data, upper, lower, like=x, key=key)
        q = self.with_public(problem, q, upper, lower)
        q = _Blocks(q.y, smooth_entries(problem.lower_public, x, y, q.v), q.x)
        return self.moved(problem, state, self.curvature_limited(problem, q, x, y))


class _Differences(AbstractBlocks):
    y: Any
    delta: Any  # the penalty times the way from y to the penalized solution
    x: Any


class FiniteDifferenceBilevel(AbstractJointSolver):
    r"""First-order bilevel optimization that tracks a scaled difference of solutions.

    $y$ follows the solution of the lower level and $\delta = \lambda (z - y)$ the
    difference to the solution $z$ of the penalized level $g + f / \lambda$, with a
    large penalty $\lambda$. One step moves all three variables from the same point
    and the same batch:

    $$
    z = y + \delta / \lambda, \qquad q_y = \nabla_y g(x, y), \qquad q_\delta = \lambda
    \bigl(\nabla_y g(x, z) - \nabla_y g(x, y)\bigr) + \nabla_y f(x, z),
    $$
    $$
    q_x = \lambda \bigl(\nabla_x g(x, z) - \nabla_x g(x, y)\bigr) + \nabla_x f(x, z),
    $$
    $$
    y \leftarrow \Pi_Y(y - \rho\, q_y), \qquad \delta \leftarrow \delta - \rho\,
    q_\delta, \qquad x \leftarrow \Pi_X(x - \eta\, q_x).
    $$

    A lower record enters with $(\nabla_y g, \lambda (\nabla_y g - \nabla_y g), \lambda
    (\nabla_x g - \nabla_x g))$ at the cost of two gradients, an upper one with $(0,
    \nabla_y f, \nabla_x f)$. A record's three blocks are clipped together: a record
    whose blocks are within their clip norms is left as it is.

    The directions are those of `F2SA` in other coordinates. There the noise of y and z
    is multiplied by $\lambda$ in the hypergradient; here noise enters y and $\delta$,
    and nothing multiplies it by $\lambda$, which can thus be large: the bias falls like
    $1 / \lambda$. In the limit $\delta$ tracks $-[\nabla_{yy}^2 g]^{-1} \nabla_y f$,
    and this is `SingleLoopBilevel` with finite differences for products with second
    derivatives. Losses are evaluated at $z$, which is $\delta / \lambda$ from `y_set`
    at most. The hypergradient formula holds where $y^*(x)$ is in its interior.

    Steps are shorter if they would overshoot the public terms, as in `NoisyGD`:
    those of $x$ the upper one, the others the lower one.

    Args:
        num_steps: The number of steps. Static.
        step_size: The step size $\eta$ of $x$, or an optax optimizer fed with $q_x$.
        lower_step_size: The step size $\rho$ of $y$ and $\delta$, below two over the
            largest eigenvalue of $\nabla_{yy}^2 g$; or an optax optimizer fed with
            $q_y$ and $q_\delta$.
        penalty: The penalty $\lambda$. Rounding of gradients is multiplied by it: in
            float32 keep it below $10^5$ or so.
        clip_norm: The bound $C_y$ on $\nabla_y g$ of one lower record.
        difference_clip_norm: The bound $C_\delta$ on $\lambda (\nabla_y g - \nabla_y
            g)$ of one lower record; it includes the factor $\lambda$. `None` takes
            $\max(C_y, C_f n_g / n_f)$ with the records of a batch of each level: below
            that the share of one upper record decides the noise of all blocks.
        cross_clip_norm: The bound $C_x$ on $\lambda (\nabla_x g - \nabla_x g)$ of one
            lower record; it includes the factor $\lambda$. If no lower loss reads x, it
            is the unit of $\nabla_x f$.
        upper_clip_norm: The bound $C_f$ on $\nabla_y f$ and on $\nabla_x f$ of one
            upper record.
        budget_split: How the squared budget is split over $y$, $\delta$ and $x$: the
            noise of a block is $C_b / \sqrt{s_b}$ times a common factor. If no record's
            loss reads x, it is split over the first two.

    Privacy:
        `num_steps` Gaussian releases of all blocks at once, from one batch per level.
        In units $u_b = C_b / \sqrt{s_b}$ of the blocks a lower record moves the mean by
        at most $1 / n_g$ and an upper record by at most $\sqrt{(C_f / u_\delta)^2 +
        (C_f / u_x)^2} / n_f$, the second term only if upper losses read x; twice
        that under replace-one. Enforced by clipping, for any functions and any penalty.
        If no record's loss reads x, $q_x$ is a function of released values and needs
        no noise and no budget. $x$, $y$, $\delta$ and the whole trajectory are
        released.

    References:
        Yang, Xiao and Ji, "Achieving O(epsilon^-1.5) complexity in
        Hessian/Jacobian-free stochastic bilevel optimization", NeurIPS 2023 (FdeHBO).
        Here with clipped and noisy directions, without momentum and without a bound on
        $\delta$; and $\nabla f$ at $z$ instead of $y$, so that a fixed point is one of
        the penalty method (Kwon, Kwon, Wright and Nowak, ICML 2023).
    """

    num_steps: Count = eqx.field(static=True)
    penalty: Positive = 100.0
    difference_clip_norm: Positive | None = None
    blocks: ClassVar = _Differences
    second_clip_norm: ClassVar = "difference_clip_norm"

    @override
    def descents(self, problem, *x) -> _Differences:
        return _Differences(
            Descent(self.lower_step_size, problem.y_set),
            Descent(self.lower_step_size, Euclidean()),
            Descent(self.step_size, problem.x_set),
        )

    @override
    def step(self, problem, data, state, *, key) -> JointState:
        x, y, delta = state.w.x, state.w.y, state.w.delta
        z = jax.tree.map(lambda a, b: a + b / self.penalty, y, delta)

        def upper(f):
            of_x, of_delta = jax.grad(f, (0, 1))(x, z)
            return _Differences(optax.tree.zeros_like(y), of_delta, of_x)

        def lower(g):
            at_y, at_z = (jax.grad(g, (0, 1))(x, w) for w in (y, z))
            difference = optax.tree.sub(at_z, at_y)
            of_x, of_delta = optax.tree.scale(self.penalty, difference)
            return _Differences(at_y[1], of_delta, of_x)

        # All directions at the same point and on the same batch.
        q = self.directions(problem, data, upper, lower, like=x, key=key)
        q = self.with_public(problem, q, upper, lower)
        return self.moved(problem, state, self.curvature_limited(problem, q, x, y))


class _Solutions(AbstractBlocks):
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
    blocks: ClassVar = _Solutions
    proximal: ClassVar = ("lower_step_size",)

    @override
    def start(self, x, y) -> _Solutions:
        return _Solutions(y, y, x)

    @override
    def descents(self, problem, *x) -> _Solutions:
        prox = operator(problem.lower_public, *x)
        lower = Descent(self.lower_step_size, problem.y_set, prox=prox)
        return _Solutions(lower, lower, Descent(self.step_size, problem.x_set))

    @override
    def upper_bounds(self):
        return None, self.upper_clip_norm / self.penalty, self.upper_clip_norm

    @override
    def step(self, problem, data, state, *, key) -> JointState:
        x, y, z = state.w.x, state.w.y, state.w.z

        def upper(f):
            of_x, of_z = jax.grad(f, (0, 1))(x, z)
            of_z = jax.tree.map(lambda v: v / self.penalty, of_z)
            return _Solutions(optax.tree.zeros_like(y), of_z, of_x)

        def lower(g):
            slopes = jax.grad(g, (0, 1))
            (x_at_y, of_y), (x_at_z, of_z) = slopes(x, y), slopes(x, z)
            of_x = optax.tree.scale(self.penalty, optax.tree.sub(x_at_z, x_at_y))
            return _Solutions(of_y, of_z, of_x)

        # Algorithm 1: all gradients at the same point and on the same batch.
        q = self.directions(problem, data, upper, lower, like=x, key=key)
        # The public terms; blocks are shortened if they would overshoot these.
        of_lower = lower_objective(problem, x).public
        of_penalized = lower_objective(problem, x, self.penalty).public
        of_x = public_penalty_gradient(problem, self.penalty, x, y, z)
        q = optax.tree.add(q, _Solutions(of_lower(y), of_penalized(z), of_x))
        descents = self.descents(problem)
        q_y = descents.y.curvature_limited(q.y, of_lower, y)
        q_z = descents.z.curvature_limited(q.z, of_penalized, z)
        # The inner steps and the outer one.
        return self.moved(problem, state, _Solutions(q_y, q_z, q.x))
