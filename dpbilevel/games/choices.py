"""Parameters of the saddle-point methods: the theorems', and the bounds' minimizers."""

import math
import warnings
from typing import Any, Literal

import numpy as np
import scipy

from .. import _checks
from ..core.outputs import Mean
from ..core.plan import least_multiplier
from ..privacy import accounting
from ..privacy.budget import PrivacyBudget
from ..privacy.sampling import AbstractSampling, FixedSize
from ..privacy.single_pass import SinglePass
from . import rates
from .problem import AbstractVariationalInequality
from .rates import Scene

Passes = Literal["single", "multi"]
Fields = dict[str, Any]
_MANY_STEPS = 10**7


def scene_of(
    owner: str,
    problem: AbstractVariationalInequality,
    budget: PrivacyBudget,
    sizes: int,
    dimension: int,
    passes: Passes,
) -> tuple[Scene, float]:
    r"""Checks arguments; the problem as theorems see it, and the privacy dimension.

    Args:
        owner: The constructor to name in an error.
        problem: The problem.
        budget: The budget.
        sizes: $n$.
        dimension: $d$.
        passes: `"single"` or `"multi"`.

    Returns:
        The scene and $a = \sqrt{d \log(1 / \delta)} / \varepsilon$.

    Raises:
        ValueError: Fewer than two records, pure privacy, or a missing constant.
    """
    _checks.instance(owner, AbstractVariationalInequality, problem=problem)
    _checks.instance(owner, PrivacyBudget, budget=budget)
    _checks.count(owner, sizes=sizes, dimension=dimension)
    _checks.one_of(owner, "passes", passes, ("single", "multi"))
    _checks.fraction(owner, delta=budget.delta)
    if sizes < 2:
        raise ValueError(f"{owner}: needs at least two records, got sizes={sizes}.")
    scene = Scene.of(problem, dimension, sizes)
    a = math.sqrt(dimension * math.log(1 / budget.delta)) / budget.epsilon
    if a >= sizes:
        warnings.warn(
            f"{owner}: hopeless: sqrt(d log(1/delta)) / epsilon = {a:.3g} is not below "
            f"the {sizes} records, so no bound here is below its trivial value "
            f"M D = {scene.bound * scene.diameter:.3g}. Use more records, a larger "
            "epsilon or fewer dimensions.",
            stacklevel=3,
        )
    return scene, a


def bound_inputs(
    solver: Any, problem: AbstractVariationalInequality, dimension: int
) -> tuple[Scene, float, float, bool]:
    """What a bound needs of a calibrated solver.

    Args:
        solver: The solver.
        problem: The problem.
        dimension: $d$.

    Returns:
        The scene, the noise per coordinate, the batch size, and whether every record
        is read once.

    Raises:
        ValueError: The solver is not bound to sizes, averages another part of its
            path, clips below the bound, or goes over disjoint batches several times.
    """
    owner = type(solver).__name__
    if solver.sizes is None:
        raise ValueError(
            f"{owner}.bound: not bound to sizes; take the solver from "
            "dpbilevel.calibrate(...).solver."
        )
    if type(solver.output) is not Mean:
        raise ValueError(
            f"{owner}.bound: no theorem covers output={type(solver.output).__name__}; "
            "use output=Mean()."
        )
    scene = Scene.of(problem, dimension, solver.sizes)
    if solver.clip_norm < scene.spread:
        raise ValueError(
            f"{owner}.bound: no theorem covers clip_norm={solver.clip_norm:.3g} below "
            f"the declared bound {scene.spread:.3g}."
        )
    (release,) = solver.ledger(problem, solver.sizes).releases
    charged = solver.sampling.charged(release.count, solver.sizes)
    if solver.sampling.numbered and charged > 1:
        raise ValueError(
            f"{owner}.bound: no theorem covers {charged} passes over disjoint batches."
        )
    batch = solver.sampling.denominator(solver.sizes)
    return scene, release.noise_std, batch, solver.sampling.numbered


def extragradient_theorem(
    scene: Scene, a: float, budget: PrivacyBudget, passes: Passes
) -> Fields:
    """The fields of `NoisyExtragradient.from_theorem`."""
    n, spread = scene.records, scene.spread
    if passes == "single":
        batch = min(max(math.ceil(a), 1), n // 2)
        steps = n // (2 * batch)
        sampling: AbstractSampling = SinglePass(batch)
        multiplier = least_multiplier(sampling, 2 * steps, n, budget)
        std = multiplier * 2 * spread / batch
        step_size = _extragradient_step(scene, steps, batch, std)
    else:
        steps, sampling = n**2, FixedSize(1)
        if steps > _MANY_STEPS:
            warnings.warn(
                f"NoisyExtragradient.from_theorem: several passes take n^2 = {steps} "
                "steps of one record, which takes hours. Use tuned(), whose most_steps "
                "is n by default.",
                stacklevel=4,
            )
        step_size = 1 / (scene.scale * n * max(math.sqrt(n), a))
        step_size = min(step_size, scene.largest_step)
    return _extragradient_fields(scene, steps, step_size, sampling)


def extragradient_tuned(
    scene: Scene, budget: PrivacyBudget, passes: Passes, most_steps: int
) -> Fields:
    """The fields of `NoisyExtragradient.tuned`."""
    n = scene.records
    if passes == "single":
        batch = np.arange(max(1, -(-n // (2 * most_steps))), n // 2 + 1)
        steps = n // (2 * batch)
        std = least_multiplier(SinglePass(1), 1, n, budget) * 2 * scene.spread / batch
        step_size = _extragradient_step(scene, steps, batch, std)
        gap = rates.extragradient_gap(scene, steps, step_size, batch, std)
        best = int(np.argmin(gap))
        sampling = SinglePass(int(batch[best]))
        return _extragradient_fields(scene, int(steps[best]), step_size[best], sampling)
    batch, steps = np.meshgrid(_whole(n // 2, 25), _whole(most_steps, 40))
    std = _estimate(batch / n, 2 * steps, budget) * 2 * scene.spread / batch
    _, gap = _multi_step(scene, steps, batch, std)
    best = _cheapest(gap, steps * batch)
    size, count = int(batch.flat[best]), int(steps.flat[best])
    multiplier = least_multiplier(FixedSize(size), 2 * count, n, budget)
    exact = np.asarray(multiplier * 2 * scene.spread / size)
    step_size, _ = _multi_step(scene, np.asarray(count), np.asarray(size), exact)
    return _extragradient_fields(scene, count, step_size, FixedSize(size))


def proximal_theorem(scene: Scene, a: float, passes: Passes) -> Fields:
    """The fields of `InexactProximalPoint.from_theorem`."""
    n = scene.records
    if passes == "single":
        batch = max(1, round(n ** (1 / 3)))
        rounds, sampling = n // batch, SinglePass(batch)
        strength = scene.scale * max(n ** (1 / 3), a)
        return _proximal_fields(scene, rounds, strength, sampling)
    strength = scene.scale * max(math.sqrt(n), a)
    return _proximal_fields(scene, n, strength, FixedSize(max(1, math.isqrt(n))))


def proximal_tuned(
    scene: Scene, budget: PrivacyBudget, passes: Passes, most_steps: int
) -> Fields:
    """The fields of `InexactProximalPoint.tuned`."""
    n = scene.records
    strength = scene.scale * np.logspace(-2, 5, 211)
    strength = strength[strength > 1.05 * scene.lipschitz]
    if passes == "single":
        batch, strength = np.meshgrid(_whole(n, 200), strength)
        rounds = n // batch
        fits = rounds <= most_steps
        batch, rounds, strength = batch[fits], rounds[fits], strength[fits]
        multiplier: Any = least_multiplier(SinglePass(1), 1, n, budget)
    else:
        batch, rounds, strength = np.meshgrid(
            _whole(n // 2, 25), _whole(most_steps, 40), strength
        )
        multiplier = _estimate(batch / n, rounds, budget)
    steps = rates.picard_steps(scene, strength)
    ratio = scene.lipschitz / strength
    share = 2 * scene.spread / ((strength - scene.lipschitz) * batch)
    std = multiplier * share * (1 - ratio**steps)
    accuracy = scene.bound * scene.diameter * ratio**steps
    gap = rates.proximal_gap(scene, rounds, strength, batch, std, accuracy)
    if passes == "multi":
        distance = ratio**steps * scene.bound / strength
        gap += scene.bound * rates.proximal_stability(scene, rounds, strength, distance)
    best = _cheapest(gap, rounds * batch * steps)
    kind = SinglePass if passes == "single" else FixedSize
    chosen = kind(int(batch.flat[best]))
    return _proximal_fields(
        scene, int(rounds.flat[best]), float(strength.flat[best]), chosen
    )


def _extragradient_fields(
    scene: Scene, steps: int, step_size: Any, sampling: AbstractSampling
) -> Fields:
    return {
        "num_steps": steps,
        "clip_norm": scene.spread,
        "step_size": float(step_size),
        "sampling": sampling,
    }


def _proximal_fields(
    scene: Scene, rounds: int, strength: float, sampling: AbstractSampling
) -> Fields:
    return {
        "num_steps": rounds,
        "clip_norm": scene.spread,
        "strength": strength,
        "inner_steps": int(rates.picard_steps(scene, strength)),
        "sampling": sampling,
    }


def _extragradient_step(scene: Scene, steps: Any, batch: Any, std: Any):
    r"""$\gamma = \min(D / \sqrt{\frac72 T (M^2 / B + d \sigma^2)}, 1 / (\sqrt3 L))$."""
    noise = scene.spread**2 / batch + scene.dimension * std**2
    best = scene.diameter / np.sqrt(3.5 * steps * noise)
    return np.minimum(best, scene.largest_step)


def _multi_step(scene: Scene, steps, batch, std) -> tuple[np.ndarray, np.ndarray]:
    """The step sizes with the least bounds on the weak gap, and these bounds."""
    shrunk = _extragradient_step(scene, steps, batch, std)
    step_size = shrunk[None] * np.logspace(-4, 0, 81).reshape(-1, *[1] * shrunk.ndim)
    gap = rates.extragradient_gap(scene, steps, step_size, batch, std)
    gap += scene.bound * rates.extragradient_stability(scene, steps, step_size, std)
    best = np.argmin(gap, axis=0)[None]
    return tuple(np.take_along_axis(v, best, 0)[0] for v in (step_size, gap))


def _cheapest(gap: np.ndarray, cost: np.ndarray) -> int:
    """The cheapest of the candidates whose bound is within 5 % of the least."""
    return int(np.argmin(np.where(gap <= 1.05 * np.min(gap), cost, np.inf)))


def _whole(most: int, count: int) -> np.ndarray:
    """Integers from 1 to `most`, evenly spread over their logarithms."""
    return np.unique(np.round(np.geomspace(1, max(most, 1), count)).astype(int))


def _estimate(rate, count, budget: PrivacyBudget):
    r"""The multiplier by the central limit, to compare candidates: never to be claimed.

    $\mu = q \sqrt{k (e^{1 / z^2} - 1)}$.
    """

    def excess(log_mu: float) -> float:
        delta = accounting.gaussian_delta(math.exp(log_mu), budget.epsilon)
        return float(delta) - budget.delta

    mu = math.exp(scipy.optimize.brentq(excess, -20.0, 5.0))
    return 1 / np.sqrt(np.log1p((mu / rate) ** 2 / count))
