"""Bilinear games, and `NoisyPayoff`: a noisy mean payoff, solved as a public game."""

import math
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree
from typing_extensions import override

from .. import _checks
from .._checks import Count, NonNegative, Number, Positive
from ..core.descent import add_scaled
from ..core.solver import AbstractNoisySolver
from ..privacy.queries import RECORDS, Query
from ..privacy.releases import Release
from ..sets import AbstractSet, Simplex
from .problem import AbstractSaddleProblem, Scalar, ascent

# A, and b and c, of which a game may lack either or both.
Coefficients = tuple[Array, Array | None, Array | None]
Vector = Callable[[PyTree], Float[Array, " _"]]


class BilinearGame(AbstractSaddleProblem):
    r"""Game $\min_{x \in X} \max_{y \in Y}$ of payoffs that are linear in $x$ and $y$.

    $$\frac1n \sum_i \bigl(x^\top A_i y + b_i^\top x + c_i^\top y\bigr) + r(x, y).$$

    The mean of the records' coefficients determines the game, and `NoisyPayoff`
    releases that mean once. The solvers of `SaddleProblem` solve the game as well.

    Args:
        matrix: $A$ as a function of a record, of shape `(m, k)`. Static.
        x_term: $b$ as a function of a record, of shape `(m,)`. Static.
        y_term: $c$ as a function of a record, of shape `(k,)`. Static.
        public: $r(x, y)$, as in `SaddleProblem`. Static.
        x_set: $X$, of vectors of shape `(m,)`.
        y_set: $Y$, of vectors of shape `(k,)`.
        coefficient_bound: A declared constant: at least $(\|A_i\|_F^2 + \|b_i\|^2 +
            \|c_i\|^2)^{1/2}$ for every possible record. Static.
        lipschitz: $L$, as in `SaddleProblem`. Static.
        bound: $M$, as in `SaddleProblem`. Static.
        public_lipschitz: A Lipschitz constant of the public operator. Static.
        public_bound: A bound on its norm. Static.
        largest_gap: At least the gap of every point, for every dataset. Static.

    Privacy:
        As for `SaddleProblem`.
    """

    matrix: Callable[[PyTree], Float[Array, "m k"]] = eqx.field(static=True)
    x_term: Vector | None = eqx.field(static=True, default=None)
    y_term: Vector | None = eqx.field(static=True, default=None)
    public: Callable[..., Scalar] | None = eqx.field(static=True, default=None)
    x_set: AbstractSet = Simplex()
    y_set: AbstractSet = Simplex()
    coefficient_bound: Positive | None = eqx.field(
        static=True, default=None, kw_only=True
    )

    def coefficients(self, record: PyTree) -> Coefficients:
        """Return a record's (matrix, x term, y term); an absent term is `None`."""
        x_term, y_term = (term and term(record) for term in (self.x_term, self.y_term))
        return self.matrix(record), x_term, y_term

    @override
    def fun(self, x, y, record) -> Scalar:
        return payoff(self.coefficients(record), x, y)


def payoff(coefficients: Coefficients, x: Array, y: Array) -> Scalar:
    """Return the payoff of `x` against `y` by its coefficients, in the dtype of `x`.

    Raises:
        ValueError: The shapes of coefficients and variables do not fit.
    """
    shapes = (*jnp.shape(x), *jnp.shape(y)), jnp.shape(x), jnp.shape(y)
    for value, shape in zip(coefficients, shapes, strict=True):
        if value is not None and jnp.shape(value) != shape:
            raise ValueError(
                f"BilinearGame: needs coefficients of shape {shape}, got "
                f"{jnp.shape(value)}."
            )
    matrix, b, c = jax.tree.map(lambda v: v.astype(x.dtype), coefficients)
    value = x @ (matrix @ y)
    value = value if b is None else value + b @ x
    return value if c is None else value + c @ y


def matrix_game(rows: int, columns: int, *, entropy: bool = False) -> BilinearGame:
    r"""Return the `BilinearGame` of mixed strategies for mean payoff matrices.

    $$\min_{x \in \Delta_m} \max_{y \in \Delta_k} \frac1n \sum_i x^\top A_i y.$$

    For instance $m$ plans, $k$ scenarios and the cost to each person of each plan in
    each scenario: the answer is the mixture of plans whose mean cost is least in the
    worst scenario. Entries are cut to $[-1, 1]$ and those that are not finite read as
    0, so that $\|A_i y\| \le \sqrt m$, $\|A_i^\top x\| \le \sqrt k$ and $\|A_i\| \le
    \|A_i\|_F \le \sqrt{m k}$: hence $M = \sqrt{m + k}$, and $\sqrt{m k}$ is both $L$
    and the bound on the coefficients. A matrix of ones attains all of them.

    Divide payoffs by a public bound first: in euros, say, most entries would be cut to
    1, and the game would be another one without a warning.

    Args:
        rows: $m$.
        columns: $k$.
        entropy: Whether `NoisyExtragradient` moves mixtures by mirror steps of the
            entropy, as in `Simplex`.

    Returns:
        A problem over records `A`, of shape `(m, k)`, with all constants declared.
        `NoisyPayoff()` solves it.

    Raises:
        ValueError: A number of rows or columns below 1.

    Privacy:
        The bounds are enforced by the cut, for every possible record.

    References:
        Boob and Guzman, 2024, Section 2.
    """
    _checks.count("matrix_game", rows=rows, columns=columns)

    def matrix(record: Float[Array, "m k"]) -> Float[Array, "m k"]:
        if (given := jnp.shape(record)) != (rows, columns):
            raise ValueError(
                f"matrix_game: needs records of shape {(rows, columns)}, got {given}."
            )
        value = jnp.clip(record, -1, 1)
        return jnp.where(jnp.isfinite(record), value, jnp.zeros_like(value))

    length = math.sqrt(rows * columns)
    constants = {"lipschitz": length, "bound": math.sqrt(rows + columns)}
    constants["largest_gap"] = 2.0
    sets: dict[str, Any] = dict.fromkeys(("x_set", "y_set"), Simplex(entropy=entropy))
    return BilinearGame(matrix, coefficient_bound=length, **constants, **sets)


PAYOFF = "payoff"
_ROUNDS = 10  # of steps on the released game; each starts at the last one's average


class _State(eqx.Module):
    coefficients: Coefficients  # of the mean payoff, as released
    w: tuple[Array, Array]


class NoisyPayoff(AbstractNoisySolver[BilinearGame, _State]):
    r"""Noisy mean payoff of a bilinear game, released once and solved as a public game.

    $$
    \tilde A = \frac1n \sum_i \mathrm{clip}_C(A_i) + \mathcal N(0, s^2 I), \qquad
    (x, y) = \arg \min_{x \in X} \max_{y \in Y}\ x^\top \tilde A y + s\, t\, r_Y \|x\|
    - s\, t\, r_X \|y\| + r(x, y),
    $$

    with the linear terms $b$ and $c$ of the payoff beside $A$. The noise of the payoff
    of $x$ against $y$ has the standard deviation $s \|x\| \|y\|$. Each player expects
    $t$ of these deviations against itself, with $r$ the largest norm of a point of the
    other player's set. The exact solution of the noisy game, $t = 0$, would follow the
    entries whose noise favours it.

    The solver to begin with for a bilinear game: one release, and nothing to set where
    the game declares `coefficient_bound`. The noise in each entry of the matrix grows
    like $\sqrt{m k}$. If the report prints a ratio of noise to signal above 0.2,
    `NoisyExtragradient` is better.

    Args:
        clip_norm: The bound $C$ on the $\ell_2$ norm of all coefficients of one
            record's payoff; by default the `coefficient_bound` of the problem.
        caution: The number $t \ge 0$ of standard deviations of noise that each player
            expects against itself.
        game_steps: The number of extragradient steps on the released game. Static.

    Raises:
        ValueError: The set of a player is unbounded.

    Privacy:
        One Gaussian release, of $\ell_2$ sensitivity $2 C / n$ under replace-one ($C /
        n$ under add-or-remove-one), enforced by clipping. The solution of the game is
        post-processing.

    References:
        Dwork, McSherry, Nissim and Smith, "Calibrating noise to sensitivity in private
        data analysis", TCC 2006 (with Gaussian noise); Nemirovski, "Prox-method with
        rate of convergence O(1/t)", SIAM Journal on Optimization 2004 (the solution of
        the game). The terms of $t$ are ours.
    """

    clip_norm: Positive | None = None
    caution: NonNegative = 1.0
    game_steps: Count = eqx.field(static=True, default=2000)
    problem_type: ClassVar[type] = BilinearGame
    in_config: ClassVar[bool] = False
    num_steps: ClassVar[int] = 1

    @override
    def init(self, problem, w0) -> _State:
        x, y = problem.w_set.project(jax.tree.map(jnp.asarray, w0))
        reach = problem.w_set.reach
        if _checks.concrete(reach) and reach == jnp.inf:
            raise ValueError("NoisyPayoff: needs bounded sets. Give x_set= and y_set=.")
        b = None if problem.x_term is None else jnp.zeros_like(x)
        c = None if problem.y_term is None else jnp.zeros_like(y)
        return _State((jnp.zeros((len(x), len(y)), x.dtype), b, c), (x, y))

    @override
    def step(self, problem, data, state, *, key) -> _State:
        release = self.release(problem, self.sizes)

        def coefficients(record):
            found = problem.coefficients(record)
            return jax.tree.map(lambda v: v.astype(state.w[0].dtype), found)

        funs = {RECORDS: problem.of_record(coefficients)}
        released = release.apply(funs, data, key=key)
        price = self.caution * release.deviation
        w = solved(problem, released, price, state.w, self.game_steps)
        return _State(released, w)

    @override
    def adversary_view(self, state) -> PyTree:
        """Return the released coefficients and the answer, which follows from them."""
        return state.coefficients, state.w

    @override
    def release(self, problem, sizes) -> Release:
        """Return the planned `Release` of the mean coefficients; reads no records.

        Raises:
            ValueError: Neither `clip_norm` nor `coefficient_bound` is given, or no
                `public_lipschitz` of a public term.
        """
        clip_norm = self.clip_norm
        problem.constant("public_lipschitz")  # the steps after the release need it
        if clip_norm is None:
            clip_norm = problem.constant("coefficient_bound")
        query = Query(RECORDS, sizes, clip_norm)
        return Release(PAYOFF, 1, (query,), self.release_noise)

    @override
    def dimensions(self, w0) -> dict[str, int]:
        x, y = w0
        return {PAYOFF: x.size * y.size}


def solved(
    problem: BilinearGame, mean: Coefficients, price: Number, w: PyTree, num_steps: int
) -> tuple[Array, Array]:
    """Return an approximate saddle point (x, y) of a public game, norms priced.

    Each norm is replaced by a multiple of its square near zero, on norms below those
    of the simplex. The steps are extragradient steps of one over the curvature, in
    rounds from the average of the last round. Their number is rounded up to rounds.

    Args:
        problem: The sets and the public term.
        mean: The coefficients of the game.
        price: The standard deviation $s$ of their noise, times $t$.
        w: The initial point, in the set.
        num_steps: The number of extragradient steps.

    Privacy:
        Reads released values alone: free.
    """
    game, (x, y) = problem.w_set, w
    costs = problem.y_set.reach * price, problem.x_set.reach * price
    least = x.size**-0.5, y.size**-0.5

    def along(slope, pull, v, cost, norm):
        cost = cost / jnp.maximum(jnp.linalg.norm(v), norm)
        return slope + pull + cost.astype(v.dtype) * v

    def operator(w):
        slopes = ascent(jax.grad(payoff, (1, 2))(mean, *w))
        return jax.tree.map(along, slopes, problem.public_operator(w), w, costs, least)

    curvature = jnp.linalg.norm(mean[0], 2) + jnp.maximum(*costs) / min(least)
    curvature += problem.constant("public_lipschitz")
    size = 1 / jnp.where(curvature > 0, curvature, 1)
    count = -(-num_steps // _ROUNDS)

    def moved(u, along):
        return game.project(add_scaled(u, -size, along))

    def step(_, state):
        u, total = state
        middle = moved(u, operator(u))
        return moved(u, operator(middle)), optax.tree.add(total, middle)

    def in_a_round(_, w):
        start = w, optax.tree.zeros_like(w)
        total = jax.lax.fori_loop(0, count, step, start)[1]
        return game.project(optax.tree.scale(1 / count, total))

    return jax.lax.fori_loop(0, _ROUNDS, in_a_round, w)
