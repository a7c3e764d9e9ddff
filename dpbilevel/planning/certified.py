"""Methods whose sensitivities rest on a problem's certificate, for `auto`."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ..applications.warm_start import WarmStarted
from ..bilevel.certificates.certified import certificate_of
from ..bilevel.implicit import ImplicitBilevel
from ..bilevel.problem import BilevelProblem
from ..bilevel.refitted import Refitted
from ..core.solver import AbstractSolver
from ..draws.exponential import ExponentialMechanism
from ..draws.samplers.grid import Grid
from ..onelevel.noisy_gd import NoisyGD
from ..sets import AbstractSet, Box

# Of the points that a draw chooses from.
_POINTS = 64
# Of the squared budget for x; the rest is for the model.
_SHARES = (0.1, 0.5)


def certified(
    problem: BilevelProblem, w0: PyTree, fit: NoisyGD
) -> dict[str, tuple[AbstractSolver, ...]]:
    r"""Methods for problems with a certificate, each with its settings.

    Steps of size $1 / (2 \beta_\Phi)$ along hypergradients; where the set is a box, a
    draw from 64 of its points by the hyper-objective or by the norm of the gradient
    mapping, and steps from a drawn point. All release $x$ alone; the model is fitted
    at that $x$.

    Args:
        problem: A problem with a certificate.
        w0: The starting point.
        fit: The solver of the lower level for the model.

    Raises:
        ValueError: The certificate is of another problem.
    """
    constants = certificate_of(problem).second_order
    step_size = 1 / (2 * constants.smoothness)
    steps = tuple(ImplicitBilevel(t, step_size=step_size) for t in (1, 5, 20))
    searches: dict[str, tuple[AbstractSolver, ...]] = {"ImplicitBilevel": steps}
    points = _points(problem.x_set, w0[0])
    if points is not None:
        draws = [
            ExponentialMechanism(Grid(points), score=score, dimension=points.shape[1])
            for score in ("value", "gradient_norm")
        ]
        searches["ExponentialMechanism"] = tuple(draws)
        searches["WarmStarted"] = (WarmStarted(draws[0], steps[1]),)
    return {
        f"{name}, refitted": tuple(
            Refitted(search, fit, (share, 1 - share))
            for search in found
            for share in _SHARES
        )
        for name, found in searches.items()
    }


def _points(x_set: AbstractSet, x: PyTree) -> jax.Array | None:
    """Points of a box of vectors: a lattice up to three dimensions, else at random."""
    if not isinstance(x_set, Box) or len(jax.tree.leaves(x)) != 1 or np.ndim(x) != 1:
        return None
    low, high = (
        np.broadcast_to(np.asarray(v), np.shape(x)) for v in (x_set.lower, x_set.upper)
    )
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        return None
    if len(low) <= 3:
        side = round(_POINTS ** (1 / len(low)))
        axes = np.meshgrid(*[np.linspace(0, 1, side)] * len(low))
        unit = np.stack([axis.ravel() for axis in axes], 1)
    else:
        unit = np.random.default_rng(0).random((_POINTS, len(low)))  # public
    return jnp.asarray(low + unit * (high - low), jnp.result_type(float))
