r"""Choice of the next evaluations: few points that inform a gradient most.

Designs are functions of points, a kernel and a key. They do not read losses, so that
the choice of points costs no privacy.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from ..privacy.keys import PRNGKey
from ..sets import AbstractSet
from .gp import GradientPosterior, Scalar
from .kernels import cast

# Radii of structured designs, in units of the best radius without earlier points.
_SCALES = (1.0, 0.5, 2.0)
_HALF_SIDE = 2.0  # of the box of points around the iterate, in reaches of the kernel
_TIE = 1e-6  # perturbation of the covariance that breaks ties of eigenvalues
_STALLED = 1e-5  # relative decrease of the trace below which L-BFGS ends


class Design(eqx.Module):
    """Points to evaluate, their number, and the posterior trace after it."""

    points: Float[Array, "q d"]  # only the first `count` are evaluated
    count: Int[Array, ""]
    trace: Scalar  # of the gradient's posterior covariance after the evaluations


def choose_batch(
    posterior: GradientPosterior,
    feasible: AbstractSet,
    tolerance: float | Scalar,
    *,
    capacity: int,
    batch: int | None = None,
    polish: int = 30,
    at_least: int = 1,
    key: PRNGKey,
) -> Design:
    r"""Return the smallest `Design` with trace up to `tolerance`, or one at `capacity`.

    The number of points is found by bisection, because the smallest trace that $b$
    points can reach decreases with $b$. For each number, structured designs are tried
    and improved by L-BFGS on all coordinates together.

    The tolerance limits the trace, in squared units of the gradient. If it cannot be
    reached, all `capacity` points are used; `batch` fixes their number instead, and
    zero for `at_least` allows an empty design. There are at most `polish` L-BFGS steps
    per design. The key orients the designs.
    """
    # Orthonormal directions, one a row, with decreasing posterior variance. Those of
    # equal variance are rotated at random, so that none is preferred in every step: the
    # eigenvectors of the random matrix are uniform among all bases.
    size = posterior.theta.size
    random = jax.random.normal(key, (size, size), posterior.theta.dtype)
    random = _TIE * posterior.prior_trace / size * (random + random.T)
    basis = jnp.linalg.eigh(posterior.covariance + random)[1][:, ::-1].T
    height = posterior.kernel.radius(jnp.asarray(2, jnp.int32), posterior.nugget)
    tolerance = cast(tolerance, posterior.theta)
    first = jnp.asarray(at_least if batch is None else batch, jnp.int32)
    last = jnp.asarray(capacity if batch is None else batch, jnp.int32)

    def narrow(carry):
        low, high, design, _ = carry
        # The last pass has one number left, and finds its best points.
        final = low >= high
        count = jnp.where(final, high, (low + high) // 2)
        target = jnp.where(final, -jnp.inf, tolerance)
        start = _best_start(posterior, feasible, basis, height, count, capacity, design)
        new = _polish(posterior, feasible, start, target, polish)
        accept = (new.trace <= tolerance) | final
        low = jnp.where(accept, low, count + 1)
        high = jnp.where(accept, count, high)
        design = jax.tree.map(lambda a, b: jnp.where(accept, a, b), new, design)
        return low, high, design, final

    empty = jnp.broadcast_to(posterior.theta, (capacity, size))
    known = posterior.trace <= tolerance
    none = Design(empty, jnp.asarray(0, jnp.int32), posterior.trace)
    last = jnp.where(known & (batch is None), first, last)
    carry = first, last, none, last == 0
    return jax.lax.while_loop(lambda carry: ~carry[3], narrow, carry)[2]


def _offsets(posterior, basis, height, count, capacity, pairs):
    r"""Return offsets of `count` points: opposite pairs, and corners of a simplex.

    With $r$ directions, $k$ of them spanned by pairs and the other $r - k$ by a
    simplex, there are $r + k + 1$ points; pairs inform most and simplices cost least.
    """
    size = posterior.theta.size
    row = jnp.arange(capacity, dtype=jnp.int32)
    flat = jnp.clip(size - pairs, 0, count - 2 * pairs - 1)  # dimension of the simplex
    column = jnp.arange(size, dtype=jnp.int32)
    # Corners in the coordinates of Helmert contrasts of length one.
    corner, axis = (row - 2 * pairs)[:, None], column[None] + 1
    entry = jnp.where(corner < axis, 1, jnp.where(corner == axis, -axis, 0))
    entry = jnp.where(axis <= flat, entry, 0).astype(basis.dtype)
    axis = axis.astype(basis.dtype)
    corners = entry / jnp.sqrt(axis * (axis + 1))
    ratio = (flat + 1).astype(basis.dtype) / jnp.maximum(flat, 1).astype(basis.dtype)
    simplex = corners * jnp.sqrt(ratio) @ jnp.roll(basis, -pairs, axis=0)
    sign = jnp.where(row % 2 == 0, 1, -1).astype(basis.dtype)
    # Points beyond two per direction have larger distances.
    shell = 1.5 ** (row // (2 * size)).astype(basis.dtype)
    opposite = (sign * shell)[:, None] * basis[(row // 2) % size]
    radius = posterior.kernel.radius(flat + 1, posterior.nugget)
    is_corner = (row >= 2 * pairs) & (row - 2 * pairs <= flat)
    return jnp.where(is_corner[:, None], radius * simplex, height * opposite)


def _best_start(posterior, feasible, basis, height, count, capacity, design) -> Design:
    """Return the `Design` of least trace: structured, or first points of `design`."""
    size = posterior.theta.size
    mixed = jnp.clip(count - size - 1, 0, size)
    pairs = jnp.stack([mixed, (count + 1) // 2])
    shapes = jax.vmap(
        lambda number: _offsets(posterior, basis, height, count, capacity, number)
    )(pairs)
    scales = jnp.asarray(_SCALES, shapes.dtype)[:, None, None, None]
    structured = (scales * shapes[None]).reshape(-1, capacity, size)
    earlier = (design.points - posterior.theta[None])[None]
    offsets = jnp.concatenate([structured, earlier])
    starts = jax.vmap(lambda rows: _inside(posterior, feasible, rows))(offsets)
    mask = jnp.arange(capacity, dtype=jnp.int32) < count
    traces = jax.lax.map(lambda points: posterior.trace_with(points, mask), starts)
    best = jnp.argmin(traces)
    return Design(starts[best], count, traces[best])


def _inside(posterior, feasible, offsets):
    """Return points at offsets from the iterate; those outside a set are mirrored."""
    theta = posterior.theta[None]
    points = theta + offsets
    nearest = jax.vmap(feasible.project)(points)
    crossed = jnp.any(jnp.abs(points - nearest) > 0, axis=1, keepdims=True)
    # Twice as far, because another point may be at the mirror image.
    mirrored = theta + 2 * (2 * nearest - points - theta)
    return jnp.where(crossed, _project(posterior, feasible, mirrored), points)


def _project(posterior, feasible, points):
    """Project points onto the box around the iterate, then onto the set."""
    theta = posterior.theta[None]
    half = _HALF_SIDE * cast(posterior.kernel.reach, theta)
    boxed = jnp.clip(points, theta - half, theta + half)
    return jax.vmap(feasible.project)(boxed)


def _polish(posterior, feasible, start: Design, target, steps: int) -> Design:
    """Improve a `Design` by L-BFGS until its trace reaches the target or stalls."""
    if steps == 0:
        return start
    mask = jnp.arange(len(start.points), dtype=jnp.int32) < start.count

    def trace(points):
        return posterior.trace_with(_project(posterior, feasible, points), mask)

    rule = optax.lbfgs(
        memory_size=10,
        linesearch=optax.scale_by_backtracking_linesearch(max_backtracking_steps=20),
    )
    evaluate = jax.value_and_grad(trace)

    def step(carry):
        number, points, (value, slope), memory, _ = carry
        at: Any = {"value": value, "grad": slope, "value_fn": trace}
        updates, memory = rule.update(slope, memory, points, **at)
        points = optax.apply_updates(points, updates)
        new = evaluate(points)
        return number + 1, points, new, memory, new[0] > (1 - _STALLED) * value

    def unfinished(carry):
        number, _, (value, _), _, stalled = carry
        return (number < steps) & (value > target) & ~stalled

    # optax needs dtype and rank promotion, which users may have turned off.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        first = jnp.asarray(0, jnp.int32), start.points, evaluate(start.points)
        carry = *first, rule.init(start.points), jnp.asarray(False)
        _, points, (value, _), *_ = jax.lax.while_loop(unfinished, step, carry)
    points = _project(posterior, feasible, points)
    better = value < start.trace
    points = jnp.where(better, points, start.points)
    return Design(points, start.count, jnp.where(better, value, start.trace))
