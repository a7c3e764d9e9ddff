"""Alternating sampler whose step size and number of tries depend on the records."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PyTree
from typing_extensions import override

from ...core.descent import add_scaled
from ...privacy.exact.floats import all_finite
from ...privacy.exact.normal import standard_normal
from ...privacy.keys import PRNGKey, computed_once, derive
from . import proximal
from .base import AbstractPotential

_DESCENT_STEPS = 200
_PARTICLES = 16
_GRADIENT = 2.0  # what a gradient costs, in values
_PATIENCE = 4  # tries before what they have in common is moved
_WORSE = 0.5  # of the best efficiency: larger steps are not looked at


# Keys of states pass `computed_once`: under `jax.vmap` lanes that have ended keep the
# state of before, whose key `jax.debug_key_reuse` would see as used again.
class _Descent(eqx.Module):
    x: PyTree
    ahead: PyTree  # the point that is extrapolated to
    momentum: Float[Array, ""]
    steepness: Float[Array, ""]  # of the quadratic that should lie above U


class _Ladder(eqx.Module):
    step_size: Float[Array, ""]
    points: PyTree  # of the particles
    best: Float[Array, ""]  # step size so far
    efficiency: Float[Array, ""]  # of it
    last: Float[Array, ""]  # efficiency
    key: PRNGKey


class _Tries(eqx.Module):
    x: PyTree
    common: PyTree
    accepted: Bool[Array, ""]
    count: Int[Array, ""]
    key: PRNGKey


def require_exact(
    oracle: proximal.AbstractProximalOracle,
) -> proximal.AbstractExactOracle:
    """Return `oracle`, checked to be exact at any step size."""
    if not isinstance(oracle, proximal.AbstractExactOracle):
        raise ValueError("running_time: the oracle must be exact at any step size.")
    return oracle


class _Quick(AbstractPotential):
    """Potential that takes the sum's gradient, which is faster, if it is finite.

    Elsewhere its tangent is that of the potential; under `jax.vmap` both are computed.
    NON-PRIVATE: how long it takes depends on the records.
    """

    potential: AbstractPotential

    def __call__(self, x: PyTree) -> Float[Array, ""]:
        return self.potential(x)

    @override
    def value_and_gradient(self, x: PyTree) -> tuple[Float[Array, ""], PyTree]:
        pair = jax.value_and_grad(self.potential)(x)
        slow = functools.partial(self.potential.value_and_gradient, x)
        return jax.lax.cond(all_finite(pair), lambda: pair, slow)


def draw(
    oracle: proximal.AbstractExactOracle,
    target: proximal.ProximalTarget,
    mixing: proximal.Mixing,
    distance: float,
    start: PyTree,
    *,
    key: PRNGKey,
) -> PyTree:
    """Return one drawn point; `target.step_size` is the least step size tried."""
    key_pilot, key_walk = derive(key, "search", "walk")
    quick = target._replace(potential=_Quick(target.potential))
    center = minimizer(quick, target.feasible.project(jax.tree.map(jnp.asarray, start)))
    step_size = best_step(oracle, target, mixing.width**2, center, key=key_pilot)
    # One more than asked for, as logarithms round.
    steps = 1 + mixing.num_steps(step_size, distance, jnp).astype(jnp.int32)
    target = quick._replace(step_size=step_size)
    return walk(oracle, target, center, steps, key=key_walk)


def minimizer(target: proximal.ProximalTarget, start: PyTree) -> PyTree:
    """Return a point of small potential. NON-PRIVATE; no guarantee depends on it.

    By accelerated projected gradient steps whose size is halved wherever the quadratic
    that they minimize is below the potential.

    References:
        Beck and Teboulle, "A fast iterative shrinkage-thresholding algorithm for linear
        inverse problems", SIAM Journal on Imaging Sciences, 2009.
    """
    potential, feasible, _ = target

    def step(_, state):
        pair = potential.value_and_gradient(state.ahead)
        value, gradient = proximal.finite_part(pair)
        size = 1 / state.steepness
        x = feasible.project(add_scaled(state.ahead, -size, gradient))
        offset = optax.tree.sub(x, state.ahead)
        square = optax.tree.vdot(offset, offset)
        above = value + optax.tree.vdot(gradient, offset) + square / (2 * size)
        lower = proximal.finite_part(potential(x)) <= above
        momentum = (1 + jnp.sqrt(1 + 4 * state.momentum**2)) / 2
        moved = optax.tree.sub(x, state.x)
        ahead = add_scaled(x, (state.momentum - 1) / momentum, moved)
        uphill = jnp.asarray(optax.tree.vdot(gradient, moved)) > 0
        restarted = x, jnp.ones_like(momentum)
        ahead, momentum = optax.tree.where(uphill, restarted, (ahead, momentum))
        taken = _Descent(x, feasible.project(ahead), momentum, 0.9 * state.steepness)
        steeper = eqx.tree_at(lambda s: s.steepness, state, 2 * state.steepness)
        return optax.tree.where(lower, taken, steeper)

    one = jnp.ones((), jnp.result_type(*jax.tree.leaves(start)))
    state = _Descent(start, start, one, one)
    return jax.lax.fori_loop(0, _DESCENT_STEPS, step, state).x


def best_step(
    oracle: proximal.AbstractExactOracle,
    target: proximal.ProximalTarget,
    longest: float,
    center: PyTree,
    *,
    key: PRNGKey,
) -> Float[Array, ""]:
    r"""Return the step size with most progress per evaluation at `center`. NON-PRIVATE.

    From the distribution's own $\eta$ on it is doubled, up to about `longest`. A few
    particles estimate which part of the tries is accepted; progress is $\eta$ over the
    number of evaluations that a step takes.
    """
    potential, feasible, least = target
    least = jnp.asarray(least, jnp.result_type(*jax.tree.leaves(center)))

    def efficiency(ladder):
        wider = proximal.ProximalTarget(potential, feasible, ladder.step_size)

        def one(x, key):
            key_noise, key_try = derive(key, "smooth", "reject")
            noise = standard_normal(x, key=key_noise)
            y = add_scaled(x, ladder.step_size**0.5, noise)
            x, above = oracle.proposal(wider, y, oracle.prepare(wider, y), key=key_try)
            return x, jnp.exp(-jnp.maximum(above, 0))

        key, key_tries = derive(computed_once(ladder.key), "next", "step")
        keys = jax.random.split(key_tries, _PARTICLES)
        points, chances = jax.vmap(one)(ladder.points, keys)
        tries = 1 / jnp.maximum(jnp.mean(chances), 1e-6)
        return key, points, ladder.step_size / (_GRADIENT + tries)

    def worth(ladder):
        within = ladder.step_size <= longest
        return (ladder.last >= _WORSE * ladder.efficiency) & within

    def longer(ladder):
        key, points, value = efficiency(ladder)
        better = value > ladder.efficiency
        best = jnp.where(better, ladder.step_size, ladder.best)
        most = jnp.maximum(value, ladder.efficiency)
        return _Ladder(2 * ladder.step_size, points, best, most, value, key)

    points = jax.tree.map(lambda v: jnp.broadcast_to(v, (_PARTICLES, *v.shape)), center)
    zero = jnp.zeros_like(least)
    ladder = _Ladder(least, points, least, zero, zero, key)
    return jax.lax.while_loop(worth, longer, ladder).best


def walk(
    oracle: proximal.AbstractExactOracle,
    target: proximal.ProximalTarget,
    start: PyTree,
    num_steps: Int[Array, ""],
    *,
    key: PRNGKey,
) -> PyTree:
    """Return the point after `num_steps` steps, each of as many tries as it takes."""

    def step(chain):
        x, done, key = chain
        keys = derive(computed_once(key), "next", "smooth", "reject")
        # Algorithm 1 of Gopi, Lee and Liu: y_t.
        noise = standard_normal(x, key=keys[1])
        y = add_scaled(x, target.step_size**0.5, noise)

        def attempt(tries):
            after, now = derive(computed_once(tries.key), "next", "restart")
            x, accepted, _ = oracle.attempt(target, y, tries.common, key=now)
            return _Tries(x, tries.common, accepted, tries.count + 1, after)

        def block(tries):
            tries = jax.lax.while_loop(
                lambda t: ~t.accepted & (t.count < _PATIENCE), attempt, tries
            )
            # Common values of tries may depend on those that were rejected.
            common = tries.common
            move = functools.partial(oracle.move, target, y, common)
            moved = jax.lax.cond(tries.accepted, lambda: common, move)
            zero = jnp.zeros_like(tries.count)
            return _Tries(tries.x, moved, tries.accepted, zero, tries.key)

        # Line 1 of that algorithm: x_t given y_t.
        zero = jnp.zeros((), jnp.int32)
        tries = _Tries(x, oracle.prepare(target, y), zero > 0, zero, keys[2])
        tries = jax.lax.while_loop(lambda t: ~t.accepted, block, tries)
        return tries.x, done + 1, keys[0]

    chain = start, jnp.zeros((), jnp.int32), key
    return jax.lax.while_loop(lambda chain: chain[1] < num_steps, step, chain)[0]
