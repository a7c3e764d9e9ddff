"""NON-PRIVATE views of a problem, for developers only.

Nothing here is released, counted or noisy. Do not publish what these functions return
on sensitive records.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax
import scipy
from jaxtyping import PyTree

from .. import _checks
from ..bilevel import AbstractCertificate, BilevelProblem, Levels
from ..games.groups import read_group
from ..games.problem import AbstractVariationalInequality
from ..oracles import objectives
from ..privacy.keys import PRNGKey, check_key

__all__ = [
    "ConstantsSearch",
    "group_losses",
    "hyper_objective",
    "lower_objective",
    "lower_solution",
    "operator_norms",
    "refute_constants",
    "upper_objective",
]

# Second derivatives are exact to many digits; their differences are not.
_ROUNDING = 1e-6
# Lower solutions are computed one by one.
_SOLUTIONS = 5


def upper_objective(
    problem: BilevelProblem, x: PyTree, y: PyTree, data: Levels
) -> jax.Array:
    r"""Return $f(x, y)$, the mean upper loss plus its public term. NON-PRIVATE."""
    return objectives.upper_objective(problem, data).value(x, y)


def lower_objective(
    problem: BilevelProblem, x: PyTree, y: PyTree, data: Levels
) -> jax.Array:
    r"""Return $g(x, y)$, the mean lower loss plus its public term. NON-PRIVATE."""
    return objectives.lower_objective(problem, data).value(x, y)


def hyper_objective(
    problem: BilevelProblem, x: PyTree, y0: PyTree, data: Levels
) -> float:
    """Return the upper objective at the lower solution of `x`, in float64. NON-PRIVATE.

    The solve for $y^*(x)$ starts at `y0`.
    """
    with jax.enable_x64(True):
        y = lower_solution(problem, x, y0, data)
        x, data = as_float64(x), as_float64(data)
        return float(upper_objective(problem, x, y, data))


def group_losses(
    loss: Callable[[PyTree, PyTree], jax.Array],
    x: PyTree,
    data: PyTree,
    num_groups: int,
    *,
    group: Callable[[PyTree], jax.Array] = read_group,
) -> jax.Array:
    """Return an array: mean loss of each group's records, NaN if none. NON-PRIVATE.

    The loss of a record is `loss(x, record)`, and its group is `group(record)`, below
    `num_groups`. The mean of a group without records is NaN.
    """
    losses, index = jax.vmap(lambda record: (loss(x, record), group(record)))(data)
    member = (index[:, None] == jnp.arange(num_groups)[None]).astype(losses.dtype)
    # Accelerators multiply matrices in reduced precision otherwise.
    return jnp.matmul(losses, member, precision="highest") / jnp.sum(member, 0)


def operator_norms(
    problem: AbstractVariationalInequality, w: PyTree, data: PyTree
) -> jax.Array:
    """Return the norm of every record's operator at `w` before clipping. NON-PRIVATE.

    If most records of a group exceed the clip norm, clipping undoes the weights of the
    group. The problem is a `SaddleProblem` or a `VariationalInequality`.
    """
    return jax.vmap(lambda z: optax.tree.norm(problem.record_operator(w, z)))(data)


def lower_solution(
    problem: BilevelProblem, x: PyTree, y0: PyTree, data: Levels
) -> PyTree:
    """Return the lower solution at `x`, in float64, by L-BFGS. NON-PRIVATE.

    It checks `dpbilevel.oracles.lower_solution`: another implementation, in float64
    for every setting of JAX, without derivatives and not inside `jax.jit`. It starts at
    `y0`, and does not use `y_set`.

    Returns:
        A float64 pytree like `y0`, with a gradient norm of about 1e-8 where losses are
        about 1; smaller changes are lost in rounding.
    """
    with jax.enable_x64(True):
        x, y0, data = (as_float64(tree) for tree in (x, y0, data))
        flat0, unravel = jax.flatten_util.ravel_pytree(y0)

        @jax.jit
        def objective(flat, x, data):
            return objectives.lower_objective(problem, data).value(x, unravel(flat))

        value_and_gradient = jax.jit(jax.value_and_grad(objective))
        result = scipy.optimize.minimize(
            lambda flat: tuple(
                np.asarray(v, np.float64) for v in value_and_gradient(flat, x, data)
            ),
            np.asarray(flat0),
            jac=True,
            method="L-BFGS-B",
            options={"maxiter": 2000, "gtol": 1e-9, "ftol": 1e-15},
        )
        return unravel(jnp.asarray(result.x))


def as_float64(tree: PyTree) -> PyTree:
    """Return a pytree with its floating-point leaves in float64."""

    def convert(leaf):
        host = np.asarray(leaf)
        wide = np.issubdtype(host.dtype, np.floating)
        return jnp.asarray(host.astype(np.float64) if wide else host)

    return jax.tree.map(convert, tree)


@dataclasses.dataclass(frozen=True)
class ConstantsSearch:
    """Outcome of a search for violated constants. NON-PRIVATE.

    Attributes:
        tried: Number of points.
        ratios: Largest value found over the declared one, by name; for
            `strong_convexity` the declared one over the least found. Above 1 is a
            violation. 0 if both are 0, infinite if only the declared one is.
    """

    tried: int
    ratios: dict[str, float]

    @property
    def violated(self) -> tuple[str, ...]:
        """Tuple of names of the constants that the search refuted."""
        return tuple(k for k, v in self.ratios.items() if not v <= 1 + _ROUNDING)

    @property
    def passed(self) -> bool:
        """Whether no violation was found; not a proof."""
        return not self.violated

    def __str__(self) -> str:
        """Return the outcome in a few lines."""
        verdict = f"VIOLATED: {', '.join(self.violated)}" if self.violated else "none"
        lines = [f"constants violated at {self.tried} points: {verdict}"]
        lines += [
            f"  {k}: the declared one is {v:.3g} of the least found"
            if k == "strong_convexity"
            else f"  {k}: the largest found is {v:.3g} of the declared one"
            for k, v in self.ratios.items()
        ]
        return "\n".join(lines)


def refute_constants(
    problem: BilevelProblem,
    w0: tuple[PyTree, PyTree],
    records: Levels,
    *,
    key: PRNGKey,
    tries: int = 500,
) -> ConstantsSearch:
    """Return a `ConstantsSearch` for violations of a problem's constants. NON-PRIVATE.

    Derivatives up to second order are formed densely, in float64, at random $x$ of the
    set, $y$ of the ball of `solution_radius` and single records; those of third order
    are differences. Means over records are no worse than their worst record. Lower
    solutions are computed for a few datasets of one record each.

    Args:
        problem: A problem whose `constants` are a certificate; its constants over all
            x are tested.
        w0: The center `(x, y)` of the search.
        records: Public or synthetic records, as different from each other as records
            can be.
        key: A typed key.
        tries: The number of points.

    Returns:
        The largest ratios found: above 1 they refute a constant, below 1 they do not
        prove it.

    Raises:
        ValueError: The problem has no certificate.
    """
    check_key(key)
    _checks.count("refute_constants", tries=tries)
    if not isinstance(problem.constants, AbstractCertificate):
        raise ValueError("refute_constants: problem.constants must be a certificate.")
    declared = problem.constants.second_order
    random = np.random.default_rng(np.asarray(jax.random.key_data(key)))
    with jax.enable_x64(True):
        w0, records = as_float64(w0), as_float64(records)
        radius = declared.solution_radius
        points = [_points(problem, w0, random, tries, radius) for _ in range(2)]
        levels = records.upper, records.lower
        datasets = [[_drawn(v, random, tries) for v in levels] for _ in range(2)]
        measure = jax.jit(lambda *points: _measure(problem, points))
        found = {k: float(v.max()) for k, v in measure(*points, *datasets).items()}
        found["solution_radius"] = max(
            _solution_norm(problem, points[0], datasets[0], i)
            for i in range(min(_SOLUTIONS, tries))
        )
    found = {k: math.inf if math.isnan(v) else v for k, v in found.items()}
    least = -found.pop("strong_convexity")
    ratios = {name: _ratio(v, getattr(declared, name)) for name, v in found.items()}
    convexity = declared.strong_convexity
    ratios["strong_convexity"] = convexity / least if least > 0 else math.inf
    return ConstantsSearch(tries, ratios)


def _points(problem, w0, random, count: int, radius: float):
    """Draw `count` points, stacked: x in its set, y in the ball of `radius`."""
    (x0, unravel_x), (y0, unravel_y) = map(jax.flatten_util.ravel_pytree, w0)
    near = np.asarray(x0)[None] + random.normal(size=(count, x0.size))
    project = jax.vmap(lambda v: problem.x_set.project(unravel_x(v)))
    directions = random.normal(size=(count, y0.size))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    lengths = radius * random.choice([0.1, 0.5, 1.0], size=(count, 1))
    y = jax.vmap(unravel_y)(jnp.asarray(lengths * directions))
    return project(jnp.asarray(near)), y


def _drawn(level: PyTree, random, count: int) -> PyTree:
    """Draw `count` records of a level, with replacement, as a batched pytree."""
    rows = random.integers(_checks.leading_axis("records", level), size=count)
    return jax.tree.map(lambda v: v[rows], level)


def _solution_norm(problem, points, dataset, index: int) -> float:
    (x, y), one = jax.tree.map(lambda v: v[index], points), slice(index, index + 1)
    data = Levels(*jax.tree.map(lambda v: v[one], dataset))
    y = lower_solution(problem, x, y, data)
    return float(np.linalg.norm(jax.flatten_util.ravel_pytree(y)[0]))


def _ratio(found: float, declared: float) -> float:
    # Differences of rounded derivatives are not exactly zero.
    if found <= 1e-9:
        return 0.0
    return found / declared if declared > 0 else math.inf


def _measure(problem: BilevelProblem, points: tuple) -> dict[str, jax.Array]:
    """Return a dict of the values that constants bound, by name, an entry a point.

    Without `jax.vmap`: jaxlib 0.10 gives a batch of singular values to the threads of
    its own pool and waits for them, on few cores for ever.
    """
    return jax.lax.map(lambda at: _measure_at(problem, *at), points)


def _measure_at(problem: BilevelProblem, w, w_other, z, z_other):
    """Return a dict by constant of values at one point; strong convexity is negated."""
    (x, y), (other_x, other_y) = w, w_other
    f, f_other = (_derivatives(problem, "upper", x, y, r[0]) for r in (z, z_other))
    g, g_other = (_derivatives(problem, "lower", x, y, r[1]) for r in (z, z_other))
    in_x = _derivatives(problem, "lower", other_x, y, z[1])
    in_y = _derivatives(problem, "lower", x, other_y, z[1])
    pairs = (other_x, x), (other_y, y)
    flat = (jax.flatten_util.ravel_pytree(optax.tree.sub(*pair))[0] for pair in pairs)
    step_x, step_y = (jnp.maximum(_size(step), 1e-12) for step in flat)
    found = {
        "strong_convexity": -jnp.linalg.eigvalsh(g["yy"])[0],
        "lower_y": jnp.maximum(_size(g["record_y"]), _size(g["y"] - g["record_y"])),
        "lower_y_spread": _size(g["y"] - g_other["y"]) / 2,
    }
    found |= {f"upper_{k}": _size(f[k]) for k in ("xx", "xy", "yy")}
    found |= {f"upper_{k}": _both(f, k) for k in ("x", "y")}
    found |= {f"upper_{k}_spread": _size(f[k] - f_other[k]) / 2 for k in ("x", "y")}
    for block in ("xy", "yy"):
        found |= {
            f"lower_{block}": _both(g, block),
            f"lower_{block}_spread": _size(g[block] - g_other[block]) / 2,
            f"lower_{block}_in_x": _size(in_x[block] - g[block]) / step_x,
            f"lower_{block}_in_y": _size(in_y[block] - g[block]) / step_y,
        }
    return found


def _derivatives(problem: BilevelProblem, role: str, x, y, record):
    """Return a dict of first and second derivatives of a level at one record."""
    flat_x, unravel_x = jax.flatten_util.ravel_pytree(x)
    flat_y, unravel_y = jax.flatten_util.ravel_pytree(y)
    loss, term = getattr(problem, role), getattr(problem, f"{role}_public")

    def alone(x, y):
        return loss(unravel_x(x), unravel_y(y), record)

    def whole(x, y):
        public = 0.0 if term is None else term(unravel_x(x), unravel_y(y))
        return alone(x, y) + public

    found = {}
    for name, fun in ("", whole), ("record_", alone):
        first = jax.grad(fun, (0, 1))(flat_x, flat_y)
        (xx, xy), (_, yy) = jax.hessian(fun, (0, 1))(flat_x, flat_y)
        found |= {f"{name}x": first[0], f"{name}y": first[1]}
        found |= {f"{name}xx": xx, f"{name}xy": xy, f"{name}yy": yy}
    return found


def _both(found: dict[str, jax.Array], name: str) -> jax.Array:
    """Return the larger norm of a derivative with and without the public term."""
    return jnp.maximum(_size(found[name]), _size(found[f"record_{name}"]))


def _size(value: jax.Array) -> jax.Array:
    """Return the Euclidean norm of a vector or the spectral norm of a matrix."""
    return jnp.linalg.norm(value, 2) if value.ndim == 2 else jnp.linalg.norm(value)
