"""Private descent on the worst group, with multiplicative group weights."""

import math
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PyTree

from .._checks import Count, Fraction, Number, Positive
from ..core.descent import Descent, Memory, SkippedUpdates, finite_or
from ..core.outputs import AbstractOutput, TailMean
from ..core.solver import AbstractIterative, AbstractNoisySolver
from ..privacy.keys import PRNGKey
from ..privacy.queries import RECORDS, Query
from ..privacy.releases import Release
from .groups import GroupGame

_LEAST = 1e-12  # weight of a group, so that every group can come back
_HALVINGS = 40
Weights = Float[Array, " k"]


class _State(eqx.Module):
    x: PyTree  # the model
    y: Weights  # of the groups, of the sum of the game's scale
    losses: Weights  # of the groups, as released last
    kept: PyTree  # by the output rule
    memory: Memory
    rejections: SkippedUpdates
    t: Int[Array, ""]


class GroupDescent(AbstractNoisySolver[GroupGame, _State], AbstractIterative):
    r"""Group-robust learning: noisy descent on weighted groups, multiplicative weights.

    A step releases the weighted gradient and the losses of the groups,

    $$
    \tilde q_t = \frac1m \sum_{i \in B_t} \frac{y_{t, g_i}}{p_{g_i}}\,
    \mathrm{clip}_C(\nabla \ell(x_t, z_i)) + \text{noise}, \qquad
    \tilde L_{t, g} = \frac{1}{m p_g} \sum_{i \in B_t, g_i = g} [\ell(x_t, z_i)]_0^B +
    \text{noise},
    $$

    and moves both players, the model by a projected step and the weights by entropy:

    $$
    x_{t+1} = \Pi_X(x_t - \eta_t\, \tilde q_t), \qquad y_{t+1} = \arg\max_{y \in \Delta}
    \ \langle \tilde L_t, y \rangle - \frac{1}{\rho} \mathrm{KL}(y \,\|\, y_t) -
    \frac{\eta_t d s^2}{2 \sqrt T} \max_g \frac{y_g^2}{p_g^2}.
    $$

    A gradient is clipped before it is weighted, so that the influence of a small group
    is its weight, and in a linear model the clipped gradients are those of a convex
    loss. A record of weight $y_g / p_g$ needs as much noise, $s \max_g y_g / p_g$ with
    $s$ that of equal weights per record. The last term is what this costs the model:
    the average of $T$ iterates has between $\frac12 \eta d s^2$ of it, if the loss
    is flat, and a $T$-th of that, if it is as curved as the step size admits; the
    geometric mean is charged. So a group of few records is followed only if that is
    worth its noise, and without noise the term vanishes.

    The gradient of every record of a micro-batch is formed, as it is clipped before it
    is weighted: for networks choose small batches.

    By default all numbers follow from the plan: $\eta_t = \min(2 / \beta,\ r / (s_t
    \sqrt{d T}))$ with the smoothness $\beta$, the radius $r$ of the models and the
    noise $s_t$ of the step, and $\rho = \sqrt{8 \log k / (T (B^2 + 16 \nu^2))}$ with
    the mean $\nu^2$ of the variances of the losses. For `Logistic` no setting is
    needed.

    Args:
        num_steps: The number of steps $T$. Static.
        clip_norm: The bound $C$ on the gradient of one record in $\ell_2$, the length
            of a row for `Logistic`.
        loss_bound: The bound $B$ on the loss of one record: about twice the loss of no
            model. By default that of the game, $2 \log 2$ for `Logistic`.
        step_size: $\eta$; by default one that follows from the smoothness of the game
            and the noise.
        loss_share: The fraction of the squared budget that is spent on the losses.
        sampling: How each step's batch is drawn, but not by passes.
        output: The rule that selects or averages the pairs.

    Privacy:
        `num_steps` Gaussian releases of both at once. With $u_g \le 1$ the weights
        $y_g / p_g$ over the largest of them, a released number, and $a^2 + b^2 = 1$, a
        record contributes

        $$\Bigl(\frac{a\, u_{g_i}}{C} \mathrm{clip}_C(\nabla \ell),\ b\, \Bigl(\frac{2
        [\ell]_0^B}{B} - 1\Bigr) e_{g_i}\Bigr), \qquad b^2 = \texttt{loss\_share},$$

        whose norm is at most 1 whatever the weights are: an $\ell_2$ sensitivity of
        $2 / m$ under replace-one ($1 / m$ under add-or-remove-one), enforced by
        clipping. It is that of the unweighted problem, and attained by two records of
        the group with the largest weight. Ledger and report are in these units; what is
        released is multiplied by public numbers. Everything else is post-processing.

    References:
        Sagawa, Koh, Hashimoto and Liang, "Distributionally robust neural networks for
        group shifts", ICLR 2020, Algorithm 1, here with noise, a term for its cost, and
        averages.
    """

    num_steps: Count = eqx.field(static=True, default=200)
    clip_norm: Positive = 1.0
    loss_bound: Positive | None = None
    step_size: Positive | None = None
    loss_share: Fraction = 0.1
    output: AbstractOutput = eqx.field(default=TailMean(), kw_only=True)
    problem_type: ClassVar[type] = GroupGame
    release_name: ClassVar[str] = "gradient and losses"
    numbers_batches: ClassVar[bool] = True

    def init(self, problem, w0) -> _State:
        """Return the state at `w0`, model and weights projected onto their sets."""
        x, y = problem.w_set.project(jax.tree.map(jnp.asarray, w0))
        kept, memory = self.output.init((x, y)), Descent(1.0, problem.x_set).init(x)
        none = SkippedUpdates()
        zero = jnp.zeros((), jnp.int32)
        return _State(x, y, jnp.zeros_like(y), kept, memory, none, zero)

    def step(self, problem, data, state, *, key) -> _State:
        """Make one release and one step of each player, and return the state."""
        x, y, t = state.x, state.y, state.t
        weights = y / problem.scale
        factors = weights / _shares(problem, y)  # y_g / p_g
        q, losses = self._release_terms(problem, data, x, factors, index=t, key=key)
        length = self._step_length(problem, x, jnp.max(factors))
        descent = Descent(length, problem.x_set)
        pull, against = problem.public_operator((x, y))
        q = descent.curvature_limited(
            optax.tree.add(q, pull), lambda x: problem.public_operator((x, y))[0], x
        )
        x, memory = descent.update(q, state.memory, x)
        payoffs = losses - problem.scale * against  # the public term's, too
        weights = self._ascend(problem, state.x, weights, payoffs, length)
        y, rejections = finite_or(problem.scale * weights, y, state.rejections)
        kept = self.remembered(state.kept, (x, y), before=(state.x, state.y), t=t)
        return _State(x, y, losses, kept, memory, rejections, t + 1)

    def released(self, state) -> PyTree:
        """Return the model and the game's $y$: the groups' weights times its scale."""
        return state.x, state.y

    def adversary_view(self, state) -> PyTree:
        """Return the model, the scaled group weights, and the noisy group losses."""
        return state.x, state.y, state.losses

    def release(self, problem, sizes) -> Release:
        """Return a step's planned `Release` of gradient and losses; reads no data.

        Raises:
            ValueError: No bound on losses or no step size is given or declared.
        """
        self._bound(problem)
        if self.step_size is None and problem.smoothness is None:
            raise ValueError("GroupDescent: no smoothness is declared. Give step_size.")
        query = Query(RECORDS, sizes, 1.0, self.sampling)
        return Release(self.release_name, 1, (query,), self.release_noise)

    def _relative_weights(self, factors: Weights) -> tuple[Weights, Number]:
        """Return the groups' factors over the largest one, and the largest."""
        largest = jnp.max(factors)
        return factors / largest, largest

    def _release_terms(
        self, problem: GroupGame, data, x, factors: Weights, *, index, key: PRNGKey
    ) -> tuple[PyTree, Weights]:
        """Return the model's noisy weighted gradient and the noisy group losses."""
        half = self._bound(problem) / 2
        units = self._units
        relative, largest = self._relative_weights(factors)

        def terms(record):
            group, listed = problem.member(record)
            loss, gradient = jax.value_and_grad(problem.loss)(x, record)
            excess = jnp.clip((loss - half) / half, -1, 1)
            row = jnp.zeros_like(factors).at[group].set(excess)
            # In clip norms. If an entry is not finite, the record is left out.
            norm = optax.tree.norm(gradient) / self.clip_norm
            shorter = 1 / self.clip_norm / jnp.maximum(norm, 1)
            gradient = optax.tree.scale(shorter, gradient)
            gradient = optax.tree.scale(units[0] * relative[group], gradient)
            both = gradient, units[1] * row
            return jax.tree.map(lambda v: jnp.where(listed, v, jnp.zeros_like(v)), both)

        release = self.release(problem, self.sizes)
        q, row = release.apply(
            {RECORDS: problem.of_record(terms)}, data, key=key, index=index
        )
        q = optax.tree.scale(self.clip_norm * largest / units[0], q)
        return q, half * (1 + row / units[1] / _shares(problem, row))

    def _ascend(
        self, problem: GroupGame, x, y: Weights, payoffs: Weights, length: Number
    ) -> Weights:
        """Return the group weights after an entropic step that penalizes noise."""
        shares, steps = _shares(problem, y), self.num_steps
        total, bound = jnp.sum(shares), self._bound(problem)
        loss_noise = self._noise(bound / 2 / self._units[1])  # nu, over a share
        spread = jnp.sqrt(bound**2 + 16 * loss_noise**2 * jnp.sum(1 / shares) / total)
        rate = math.sqrt(8 * math.log(len(shares)) / steps) / spread  # rho
        noise = self._noise(self.clip_norm / self._units[0] / total)  # s, at y = p
        price = length * optax.tree.size(x) * noise**2 / (2 * math.sqrt(steps))
        return entropic_step(y, rate * payoffs, shares / total, rate * price)

    def _step_length(self, problem: GroupGame, x, largest: Number) -> Number:
        """Return the model's step size: as given, or by noise and smoothness."""
        if self.step_size is not None:
            return self.step_size
        assert problem.smoothness is not None
        noise = self._noise(self.clip_norm / self._units[0] * largest)  # s_t
        walk = noise * math.sqrt(optax.tree.size(x) * self.num_steps)
        return jnp.minimum(2 / problem.smoothness, problem.x_set.reach / walk)

    def _noise(self, unit: Number) -> Array:
        """Return the noise's standard deviation on means of terms of norm `unit`."""
        mechanism = self.release_noise
        factor = mechanism.neighbours.contributions
        factor = factor / self.sampling.denominator(self.sizes)
        return jnp.asarray(mechanism.multiplier * factor * unit)

    @property
    def _units(self) -> tuple[Number, Number]:
        """Norms of gradient and loss in a record's released vector, of norm 1."""
        return (1 - self.loss_share) ** 0.5, self.loss_share**0.5

    def _bound(self, problem: GroupGame) -> Number:
        bound = problem.loss_bound if self.loss_bound is None else self.loss_bound
        if bound is None:
            raise ValueError(
                "GroupDescent: no loss bound is declared. Give loss_bound."
            )
        return bound


def _shares(problem: GroupGame, like: Array) -> Weights:
    return jnp.asarray(problem.shares, like.dtype)


def entropic_step(
    y: Weights, gain: Weights, shares: Weights, price: Float[Array, ""]
) -> Weights:
    r"""Return weights after an entropic step that prices the largest weight / share.

    $$\arg\max_{v \in \Delta}\ \langle g, v \rangle - \mathrm{KL}(v \,\|\, y) - c
    \max_j \frac{v_j^2}{q_j^2}, \qquad v_j \propto q_j \min(r_j, m), \quad r_j =
    \frac{y_j}{q_j} e^{g_j}.$$

    With a bound $\kappa$ on the ratios, the solution is $v_j = \min(\kappa q_j,
    \vartheta r_j q_j)$ with multipliers $\lambda_j = [\log(r_j / m)]_+$ for $m = \kappa
    / \vartheta$, and raising $\kappa$ gains $\sum_j q_j \lambda_j$. The best $m$ makes
    that equal to the marginal price $2 c \kappa$ with $\kappa = m / \sum_j q_j
    \min(r_j, m)$; one side decreases in $m$ and the other one increases, so that
    bisection finds it. Without a price this is multiplicative weights; with a large one
    $v = q$.

    Args:
        y: The weights, positive and of sum 1.
        gain: $g$, payoffs times the step size.
        shares: $q$, positive and of sum 1.
        price: $c \ge 0$.
    """
    ratio = jnp.log(jnp.maximum(y, _LEAST)) - jnp.log(shares) + gain
    ratio = ratio - jnp.max(ratio)  # log r: any common factor is normalized away

    def halved(_, ends):
        low, high = ends
        middle = (low + high) / 2
        worth = jnp.sum(shares * jnp.maximum(ratio - middle, 0))
        total = jnp.sum(shares * jnp.exp(jnp.minimum(ratio - middle, 0)))
        pays = worth > 2 * price / total  # to raise the bound
        return jnp.where(pays, middle, low), jnp.where(pays, high, middle)

    ends = jnp.min(ratio), jnp.zeros_like(ratio[0])
    _, bound = jax.lax.fori_loop(0, _HALVINGS, halved, ends)
    v = shares * jnp.exp(jnp.minimum(ratio, bound))
    return v / jnp.sum(v)
