"""The methods that `auto` compares, each with its settings, and the model they fit."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.optimize import minimize
from jaxtyping import Array, Float, PyTree

from ..applications.mixed_sources import MixedSources
from ..applications.penalties import ScaledGroups
from ..applications.recalibration import Recalibration, constants_of, is_array
from ..applications.selected_sources import ScoringModel, SelectedSources
from ..applications.warm_start import WarmStarted
from ..bilevel.certificates.certified import certificate_of
from ..bilevel.implicit import ImplicitBilevel
from ..bilevel.penalty import PenaltyBilevel
from ..bilevel.pipeline import OneLevel
from ..bilevel.problem import BilevelProblem
from ..bilevel.refitted import LowerFirst, Refitted
from ..core.outputs import TailMean
from ..core.problem import AbstractProblem
from ..core.solver import AbstractSolver
from ..draws.exponential import ExponentialMechanism
from ..draws.samplers.grid import Grid
from ..onelevel.noisy_gd import NoisyGD
from ..sets import AbstractSet, Box


def model_of(problem: AbstractProblem, w0: PyTree) -> PyTree:
    """Return the model among the variables: y of two levels, else all of them."""
    return w0[1] if isinstance(problem, BilevelProblem) else w0


def is_linear(model: PyTree) -> bool:
    """Return whether a model is one array, the coefficients of features."""
    return len(jax.tree.leaves(model)) == 1


def is_vector(model: PyTree) -> bool:
    """Return whether a model is one vector, and so has one score."""
    return is_array(model) and jnp.ndim(model) == 1


def num_classes(model: PyTree) -> int:
    """Return the number of columns of a matrix, one for each class; 0 for others."""
    return jnp.shape(model)[1] if is_array(model) and jnp.ndim(model) == 2 else 0


def constant_feature(owner: str, model: PyTree, intercept: int | None) -> int | None:
    """Return `intercept`, checked to be a feature; `None` if a model is not linear."""
    if intercept is None or not is_array(model) or jnp.ndim(model) not in (1, 2):
        return None
    constants_of(owner, model, intercept)
    return intercept


@jax.jit
def mean_loss(problem: Any, value: PyTree, test: PyTree) -> Float[Array, ""]:
    """Return the mean loss of a released model on test records."""
    if isinstance(problem, BilevelProblem):
        x, y = value
        losses = jax.vmap(functools.partial(problem.upper, x), (None, 0))(y, test)
    else:
        losses = jax.vmap(problem.loss, (None, 0))(value, test)
    return jnp.mean(losses)


def constant_loss(
    problem: Any, w0: PyTree, test: PyTree, intercept: int | None
) -> float:
    """Return the loss of the best constant answer, or of the initial point if less.

    On synthetic test records; `intercept` is the index of the constant feature.
    """
    try:
        initial = float(mean_loss(problem, w0, test))
    except (TypeError, KeyError, IndexError, AttributeError) as error:
        shapes = jax.tree.map(lambda v: (v.shape[1:], str(v.dtype)), test)
        raise ValueError(
            f"auto: the loss cannot read synthetic records of shapes {shapes} "
            f"({type(error).__name__}: {error}). Pass records=, their description, or "
            "synthetic=, a function that draws some (docs/auto.md)."
        ) from error
    if intercept is None:
        return initial
    fitted = float(_fitted_constant_loss(problem, w0, test, intercept))
    return min(initial, fitted) if np.isfinite(fitted) else initial


# Jitted, because every draw of synthetic data has a constant answer of its own.
@functools.partial(jax.jit, static_argnames="intercept")
def _fitted_constant_loss(
    problem: Any, w0: PyTree, test: PyTree, intercept: int
) -> Float[Array, ""]:
    zero = jnp.zeros_like(model_of(problem, w0))

    def loss(constant):
        y = zero.at[intercept].set(constant.reshape(zero.shape[1:]))
        two = isinstance(problem, BilevelProblem)
        return mean_loss(problem, (w0[0], y) if two else y, test)

    initial = jnp.zeros(zero[intercept].size, zero.dtype)
    return minimize(loss, initial, method="BFGS").fun


# Norm of a record's gradients in the model of its source and, at the default weight of
# one half, in the common one: the root of 1 + 1/4.
_BOTH_MODELS = 1.118
# Clip norms in largest norms of a gradient, which only records far on the wrong side
# have: a logistic gradient at 0 has half of it. A model for the signs of losses alone
# may be biased more; with several classes noise costs more than bias. Gradients of a
# network have no largest norm.
_CLIP, _CLIP_FIRST, _CLIP_CLASSES, _CLIP_NETWORK = 0.7, 0.5, 0.4, 1.0
# Step sizes in inverse squares of the largest norm of a gradient. A logistic loss has a
# curvature of at most a quarter of that square, so that accelerated steps above 5.3
# diverge. Momentum makes longer moves.
_STABLE, _MOST_MOMENTUM = 4.0, 0.95
# Parts of the squared budget of a fit on lower records and of a `Recalibration`, a
# twentieth of which reads lower records: disjoint people of both spend all.
_LOWER_THEN_UPPER = 0.95, 1.05
# Number of points that a mechanism draws from.
_POINTS = 64
# Parts of the squared budget for x; the model has the rest.
_PARTS_FOR_X = 0.1, 0.5


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A method with its settings; each number of steps among them compiles once.

    Attributes:
        name: Name in the table of a plan.
        solvers: Solvers to be calibrated, one for each setting.
        levels: Number of levels that the method uses.
    """

    name: str
    solvers: tuple[AbstractSolver, ...]
    levels: int


@dataclasses.dataclass(frozen=True)
class Methods:
    """Maker of `Candidate`s for models of one shape."""

    clip_norm: float  # the largest norm of a gradient, as for `candidates`
    model: PyTree  # the initial one
    intercept: int | None = None  # index of the constant feature

    def descent(self) -> tuple[Candidate, ...]:
        """Return a tuple of `Candidate`s: descent on a problem of one level."""
        sizes = 0.5, 1.0, 2.0, 4.0, 8.0, 16.0
        return tuple(
            Candidate(f"NoisyGD, {n} steps", tuple(self._fit(n, s) for s in sizes), 1)
            for n in (30, 100)
        )

    def one_level(self) -> tuple[Candidate, ...]:
        """Return a tuple of `Candidate`s that read one level, or pool the records."""
        # Large problems try the first and the third.
        sizes = (64.0, 16.0, 4.0, 1.0) if self._several else (1.0, 4.0, 16.0, 64.0)
        many = [self._fit(100, size) for size in sizes]
        # Few validation records admit few steps.
        upper = [self._fit(10, s) for s in (0.5, 1.0, 2.0)]
        upper += [self._fit(100, s) for s in (2.0, 8.0)]
        lower, both = (
            tuple(OneLevel(fit, reads=reads) for fit in many)
            for reads in ("lower", "both")
        )
        found = (
            Candidate("upper level only", tuple(map(OneLevel, upper)), 1),
            Candidate("lower level only", lower, 1),
            Candidate("both levels' records", both, 1),
        )
        then = self._recalibration
        if then is None:
            return found
        fits = [OneLevel(self._fit(100, size), "lower") for size in (8.0, 32.0, 64.0)]
        recalibrated = tuple(WarmStarted(v, then, _LOWER_THEN_UPPER) for v in fits)
        found += (Candidate("lower level, recalibrated", recalibrated, 1),)
        if then.intercept is None:
            return found
        return (*found, Candidate("base rate", (then,), 1))

    def penalty_descent(self) -> Candidate:
        """Return a `Candidate`: penalty descent, then a fit of the model at its x."""
        clip = self.clip_norm
        inner = NoisyGD(10, clip, 1 / clip**2)
        clips: Any = {"clip_norm": clip, "upper_clip_norm": 0.5 * clip}
        searches = [
            PenaltyBilevel(20, 10.0, inner, **clips, step_size=v) for v in (5.0, 20.0)
        ]
        fits = [self._fit(100, size) for size in (4.0, 8.0)]
        pairs = itertools.product(searches, fits)
        solvers = tuple(Refitted(*pair, (0.5, 0.5)) for pair in pairs)
        return Candidate("PenaltyBilevel, refitted", solvers, 2)

    def lower_first(self) -> Candidate:
        """Return a `Candidate`: the lower level, then the upper at its solution."""
        solvers = tuple(
            LowerFirst(self._fit(100, lower), self._fit(30, upper))
            for lower, upper in itertools.product((8.0, 32.0), (1.0, 4.0, 16.0))
        )
        return Candidate("LowerFirst", solvers, 2)

    def scaled_groups(self) -> Candidate:
        """Return a `Candidate` that scales groups of coefficients."""
        # Rows are shorter without the groups that are dropped, by an unknown factor. No
        # public bound is near their curvature: descent undoes steps that are too long.
        settings = itertools.product((0.2, 0.4, 0.7), (10.0, 30.0, 100.0, 200.0))
        fits = (_plain(self.clip_norm, 50, size, clip) for clip, size in settings)
        return Candidate("ScaledGroups", tuple(map(ScaledGroups, fits)), 2)

    def certified(self, problem: BilevelProblem, x: PyTree) -> tuple[Candidate, ...]:
        r"""Return a tuple of `Candidate`s that rest on the problem's certificate.

        Steps of size $1 / (2 \beta_\Phi)$ along hypergradients. If the set is a box,
        also a draw from 64 of its points by the hyper-objective or by the norm of the
        gradient mapping, and steps from a drawn point. All release $x$ alone; the model
        is fitted at that $x$.
        """
        step_size = 1 / (2 * certificate_of(problem).second_order.smoothness)
        steps = [ImplicitBilevel(t, step_size=step_size) for t in (1, 5, 20)]
        searches: dict[str, list[Any]] = {"ImplicitBilevel": steps}
        points = _points(problem.x_set, x)
        if points is not None:
            grid = Grid(points)
            draws = [
                ExponentialMechanism(grid, score=score, dimension=points.shape[1])
                for score in ("value", "gradient_norm")
            ]
            searches["ExponentialMechanism"] = draws
            searches["WarmStarted"] = [WarmStarted(draws[0], steps[1])]
        fit, candidates = self._fit(100, 8.0), []
        for name, found in searches.items():
            pairs = itertools.product(found, _PARTS_FOR_X)
            solvers = tuple(Refitted(v, fit, (part, 1 - part)) for v, part in pairs)
            candidates.append(Candidate(f"{name}, refitted", solvers, 2))
        return tuple(candidates)

    def selection(
        self, sizes: tuple[float, ...], scoring: ScoringModel | None = None
    ) -> Candidate:
        """Return a `Candidate` that selects sources, with fits of these step sizes."""
        # Gradients of the library's own model do not depend on the user's clip norm.
        clip = self.clip_norm if scoring is None else 1.0

        def lower(size: float, first: float = 1.0) -> SelectedSources:
            model = _fast(clip, 10, first, _CLIP_FIRST)
            return SelectedSources(model, self._fit(100, size), scoring=scoring)

        def pooled(size: float, part: float) -> SelectedSources:
            both: Any = {"fit_reads": "both", "budget_split": (part, part, 1.0)}
            return dataclasses.replace(lower(size), **both)

        # Every second setting of a large problem is tried: here one of each size.
        solvers = [pooled(*pair) for pair in itertools.product(sizes, (0.03, 0.1))]
        if scoring is None and self._several:
            # A first model of many classes needs longer steps if there is little noise.
            solvers.append(lower(sizes[0], 4.0))
        solvers += map(lower, sizes)
        return Candidate("SelectedSources", tuple(solvers), 2)

    def mixture(self) -> Candidate:
        """Return a `Candidate` that mixes the models of the sources."""
        clip, vector = self.clip_norm, is_vector(self.model)
        descent = _fast if vector else _plain

        def solver(
            first: float, then: float, clipped: float, size: float
        ) -> MixedSources:
            # Gradients along mixtures are short: no public bound of their curvature.
            mixture = _plain(clip, 10, size, clipped)
            # A step reads every record with every source's model: half as many steps.
            models = descent(_BOTH_MODELS * clip, 50, _BOTH_MODELS**2 * first)
            return MixedSources(models, mixture, self._fit(100, then), mixture)

        # Shorter steps for large noise, longer ones for little noise.
        longer, shorter = (20.0, 24.0, 0.5, 3.0), (15.0, 4.0, 0.2, 4.0)
        settings = [longer, (15.0, 4.0, 0.1, 4.0), shorter, (15.0, 4.0, 0.35, 2.0)]
        # A mixture moves few of many parameters: its gradients are short.
        if self._several:
            # Shorter steps keep sources of other features, such as turned images.
            settings = [(30.0, 64.0, 0.1, 4096.0), (30.0, 32.0, 0.1, 1024.0)]
        elif not vector:
            settings = [(30.0, 16.0, 0.1, 1024.0), longer, shorter]
        return Candidate("MixedSources", (*itertools.starmap(solver, settings),), 2)

    def recalibrate(self, method: Candidate) -> Candidate:
        """Return a `Candidate`: the given one for sources, then a fit of two numbers.

        Upper records say more about the two numbers than about the sources. So disjoint
        people of the upper level spend all of the squared budget, those of the lower
        level three to four fifths.
        """
        then = self._recalibration
        assert then is not None

        def solver(search: Any) -> WarmStarted:
            inner, outer = (0.4, 0.05, 0.95), (1.0, 0.6)
            if isinstance(search, MixedSources):
                inner = (0.25, 0.02, 0.21, 0.03, 0.68, 0.02, 0.49)
                outer = (1.0, 0.3)
            elif search.fit_reads == "both":
                # A quarter of the fit's part counts, which is most of the budget.
                inner = search.budget_split
                outer = (1.0, 2 * inner[0])
            search = dataclasses.replace(search, budget_split=inner)
            return WarmStarted(search, then, outer)

        solvers = tuple(map(solver, method.solvers))
        return Candidate(f"{method.name}, recalibrated", solvers, 2)

    def _fit(self, steps: int, size: float) -> NoisyGD:
        """Return a `NoisyGD` that fits the model, with steps of this size."""
        if is_vector(self.model):
            return _fast(self.clip_norm, steps, size)
        # Other losses curve mostly far less than any bound, and long steps are undone.
        clip = _CLIP if is_linear(self.model) else _CLIP_NETWORK
        clip = _CLIP_CLASSES if self._several else clip
        return _plain(self.clip_norm, steps, size, clip)

    @property
    def _several(self) -> bool:
        return num_classes(self.model) > 2

    @functools.cached_property
    def _recalibration(self) -> Recalibration | None:
        """Solver that recalibrates a linear model; `None` for other models."""
        if not is_array(self.model):
            return None
        default = Recalibration(intercept=self.intercept)
        clip = _rounded(default.curvature.clip_norm * self.clip_norm**2)
        curvature = dataclasses.replace(default.curvature, clip_norm=clip)
        return dataclasses.replace(default, curvature=curvature)


def _rounded(value: float) -> float:
    """Return a number rounded to six digits, as a plan prints it."""
    return float(f"{value:.6g}")


def _plain(clip_norm: float, steps: int, size: float, clip: float = _CLIP) -> NoisyGD:
    """Return a `NoisyGD` with steps of `size` over the square of the clip norm."""
    step_size = _rounded(size / clip_norm**2)
    return NoisyGD(steps, _rounded(clip * clip_norm), step_size, output=TailMean())


def _fast(clip_norm: float, steps: int, size: float, clip: float = _CLIP) -> NoisyGD:
    """Return a `NoisyGD` that replaces steps above the stable size by momentum."""
    plain = _plain(clip_norm, steps, min(size, _STABLE), clip)
    if size <= _STABLE:
        return plain
    momentum = min(round(1 - _STABLE / size, 3), _MOST_MOMENTUM)
    return dataclasses.replace(plain, momentum=momentum)


def _points(x_set: AbstractSet, x: PyTree) -> jax.Array | None:
    """Return 64 points of a finite box, one a row; `None` for any other set.

    `None` for other sets.
    """
    if not isinstance(x_set, Box) or len(jax.tree.leaves(x)) != 1 or np.ndim(x) != 1:
        return None
    low, high = (np.broadcast_to(v, np.shape(x)) for v in (x_set.lower, x_set.upper))
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        return None
    if len(low) <= 3:
        side = round(_POINTS ** (1 / len(low)))
        axes = np.meshgrid(*[np.linspace(0, 1, side)] * len(low))
        unit = np.stack([axis.ravel() for axis in axes], 1)
    else:
        unit = np.random.default_rng(0).random((_POINTS, len(low)))  # public
    return jnp.asarray(low + unit * (high - low), jnp.result_type(float))
