"""One instance of every solver, small, for the contract suite."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpbilevel as dpb
from dpbilevel.bilevel import zoo


def records(n, d, seed=0):
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(n, d))
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    label = np.sign(features @ np.arange(1, d + 1) + 0.1 * rng.normal(size=n))
    return {
        "features": jnp.asarray(features, jnp.float32),
        "label": jnp.asarray(label, jnp.float32),
    }


def with_source(batch, num_sources=3):
    source = jnp.arange(len(batch["label"]), dtype=jnp.int32) % num_sources
    return batch | {"source": source}


# The numbers among the fields of declared constants.
DECLARED = [f.name for f in dataclasses.fields(dpb.bilevel.SecondOrderConstants)]
DECLARED = [name for name in DECLARED if name not in ("terms", "per_record")]

ONE_LEVEL = dpb.FiniteSum(dpb.logistic_loss, lambda w: 0.05 * jnp.sum(w * w))
WEIGHTING = dpb.source_weighting(dpb.logistic_loss, 3, ridge=0.05)
TUNING = dpb.penalty_tuning(dpb.logistic_loss, jnp.asarray([0, 0, 1, 1]))
UPPER, LOWER = records(30, 4, 1), with_source(records(60, 4, 2))
LEVELS = dpb.Levels(UPPER, LOWER)
SHARED = dpb.Levels.shared(LOWER)
POISSON = dpb.Poisson(0.4)
INNER = dpb.NoisyGD(3, 1.0, step_size=0.5)
X0, Y0 = jnp.zeros(3), jnp.zeros(4)
CERTIFIED = dpb.linear_tuning(
    dpb.Logistic(), jnp.asarray([0, 0, 1, 1]), bounds=(0.0, 1.0)
)
QUADRATIC = zoo.quadratic_bilevel(
    jnp.asarray(np.random.default_rng(3).normal(size=(20, 4)), jnp.float32),
    jnp.asarray(np.random.default_rng(4).normal(size=(40, 4)), jnp.float32),
)
EXACT = zoo.quadratic_bilevel(QUADRATIC.data.upper, QUADRATIC.data.lower, radius=1.0)


CANDIDATES = dpb.draws.Grid(jnp.asarray([[0.0] * 4, [0.1] * 4, [-0.1] * 4]))


LINE = dpb.FiniteSum(
    lambda w, r: jnp.abs(w[0] - r["features"][0]),
    w_set=dpb.sets.Box(-jnp.ones(1), jnp.ones(1)),
    lipschitz=1.0,
)


LEANING = dpb.FiniteSum(
    lambda w, r: -w[0] * r["features"][0],
    w_set=LINE.w_set,
    lipschitz=1.0,
    smoothness=0.0,
)


def implicit(**fields):
    return dpb.ImplicitBilevel(**({"num_steps": 3, "step_size": 0.05} | fields))


def penalty(**fields):
    defaults = {"num_steps": 4, "penalty": 5.0, "inner": INNER, "step_size": 1.0}
    return dpb.PenaltyBilevel(**(defaults | fields))


def single_loop(**fields):
    defaults = {"num_steps": 6, "step_size": 0.5, "linear_step_size": 0.5}
    defaults["lower_step_size"] = 0.5
    return dpb.SingleLoopBilevel(**(defaults | fields))


def f2sa(**fields):
    defaults = {"num_steps": 6, "penalty": 5.0, "step_size": 0.5}
    return dpb.bilevel.F2SA(**(defaults | {"lower_step_size": 0.5} | fields))


# name -> (problem, solver, data, w0, people)
SOLVERS = {
    "noisy_gd": (ONE_LEVEL, dpb.NoisyGD(6, 1.0, step_size=0.5), LOWER, Y0, None),
    "noisy_gd_poisson": (
        ONE_LEVEL,
        dpb.NoisyGD(6, 1.0, step_size=0.5, sampling=POISSON, output=dpb.outputs.Mean()),
        LOWER,
        Y0,
        None,
    ),
    "noisy_gd_adam": (
        ONE_LEVEL,
        dpb.NoisyGD(6, 1.0, step_size=optax.adam(0.1), sampling=dpb.FixedSize(10)),
        LOWER,
        Y0,
        None,
    ),
    "localized": (
        ONE_LEVEL,
        dpb.onelevel.LocalizedGD((4.0, 2.0), 3, 0.1, 1.0),
        LOWER,
        Y0,
        None,
    ),
    "localized_sgd": (
        ONE_LEVEL,
        dpb.onelevel.LocalizedGD((4.0, 2.0), 3, 0.1, 1.0, sampling=POISSON),
        LOWER,
        Y0,
        None,
    ),
    "penalty": (WEIGHTING, penalty(), LEVELS, (X0, Y0), "disjoint"),
    "penalty_overlapping": (WEIGHTING, penalty(), LEVELS, (X0, Y0), "overlapping"),
    "penalty_both_levels": (
        QUADRATIC.problem,
        penalty(step_size=0.1),
        QUADRATIC.data,
        QUADRATIC.w0,
        "overlapping",
    ),
    "penalty_shared": (WEIGHTING, penalty(), SHARED, (X0, Y0), "shared"),
    "penalty_shared_poisson": (
        QUADRATIC.problem,
        penalty(step_size=0.1, sampling=POISSON),
        dpb.Levels.shared(QUADRATIC.data.lower),
        QUADRATIC.w0,
        "shared",
    ),
    "penalty_poisson": (
        WEIGHTING,
        penalty(
            inner=dpb.NoisyGD(3, 1.0, step_size=0.5, sampling=POISSON),
            sampling=POISSON,
            step_size=optax.adam(0.1),
            output=dpb.outputs.Last(),
        ),
        LEVELS,
        (X0, Y0),
        "disjoint",
    ),
    "penalty_localized": (
        WEIGHTING,
        penalty(inner=dpb.onelevel.LocalizedGD((4.0,), 3, 0.1, 1.0)),
        LEVELS,
        (X0, Y0),
        "disjoint",
    ),
    "penalty_free_outer": (
        TUNING,
        penalty(),
        LEVELS,
        (jnp.zeros(2), Y0),
        "disjoint",
    ),
    "single_loop": (WEIGHTING, single_loop(), LEVELS, (X0, Y0), "disjoint"),
    "single_loop_poisson": (
        WEIGHTING,
        single_loop(
            sampling=POISSON, lower_step_size=optax.adam(0.1), output=dpb.outputs.Mean()
        ),
        LEVELS,
        (X0, Y0),
        "overlapping",
    ),
    "single_loop_shared_poisson": (
        QUADRATIC.problem,
        single_loop(sampling=POISSON, step_size=0.1),
        dpb.Levels.shared(QUADRATIC.data.lower),
        QUADRATIC.w0,
        "shared",
    ),
    "single_loop_free_x": (
        TUNING,
        single_loop(),
        LEVELS,
        (jnp.zeros(2), Y0),
        "disjoint",
    ),
    "f2sa": (WEIGHTING, f2sa(), LEVELS, (X0, Y0), "disjoint"),
    "f2sa_shared_poisson": (
        QUADRATIC.problem,
        f2sa(sampling=POISSON, step_size=0.1, output=dpb.outputs.Mean()),
        dpb.Levels.shared(QUADRATIC.data.lower),
        QUADRATIC.w0,
        "shared",
    ),
    "refitted": (
        WEIGHTING,
        dpb.Refitted(penalty(), INNER, (0.7, 0.3)),
        LEVELS,
        (X0, Y0),
        "disjoint",
    ),
    "implicit": (EXACT.problem, implicit(), EXACT.data, EXACT.w0, "disjoint"),
    "implicit_at_x": (
        CERTIFIED,
        implicit(step_size=optax.adam(0.1)),
        LEVELS,
        (jnp.zeros(2), Y0),
        "disjoint",
    ),
    "warm_started": (
        EXACT.problem,
        dpb.bilevel.WarmStarted(implicit(num_steps=2), implicit(num_steps=2)),
        EXACT.data,
        EXACT.w0,
        "disjoint",
    ),
}

SOLVERS |= {
    "exponential": (
        dataclasses.replace(ONE_LEVEL, w_set=dpb.sets.Ball(2.0)),
        dpb.draws.ExponentialMechanism(CANDIDATES, clip_range=2.0),
        LOWER,
        Y0,
        None,
    ),
    "exponential_gradient_norm": (
        EXACT.problem,
        dpb.draws.ExponentialMechanism(CANDIDATES, "gradient_norm"),
        EXACT.data,
        EXACT.w0,
        "disjoint",
    ),
    "exponential_walk": (
        LINE,
        dpb.draws.ExponentialMechanism(dpb.draws.GridWalk(tabulate=True), dimension=1),
        LOWER,
        jnp.zeros(1),
        None,
    ),
    "regularized": (
        LEANING,
        dpb.draws.RegularizedExponentialMechanism(
            dpb.draws.AlternatingSampler(dpb.draws.ConvexEnvelope(), 1e-9),
            convex=True,
            dimension=1,
        ),
        LOWER,
        jnp.zeros(1),
        None,
    ),
}

SADDLE = dpb.games.SaddleProblem(
    lambda x, y, r: (y[0] - y[1]) * jnp.dot(x, r["features"]) * r["label"],
    lambda x, y: 0.05 * jnp.sum(x * x) - 0.05 * jnp.sum(y * y),
    x_set=dpb.sets.Ball(1.0),
    y_set=dpb.sets.Simplex(),
    lipschitz=2.5,
    bound=2.5,
    public_lipschitz=0.1,
    public_bound=0.1 * 2**0.5,
)
SADDLE_START = (Y0, jnp.full(2, 0.5))


def extragradient(**fields):
    defaults = {"num_steps": 4, "clip_norm": 1.0, "step_size": 0.2}
    return dpb.games.NoisyExtragradient(**(defaults | fields))


def proximal(**fields):
    defaults = {"num_steps": 4, "clip_norm": 2.5, "strength": 6.0, "inner_steps": 3}
    return dpb.games.InexactProximalPoint(**(defaults | fields))


SOLVERS |= {
    "extragradient": (
        SADDLE,
        extragradient(sampling=dpb.privacy.SinglePass(7)),
        LOWER,
        SADDLE_START,
        None,
    ),
    "proximal_point": (
        SADDLE,
        proximal(sampling=dpb.privacy.SinglePass(10)),
        LOWER,
        SADDLE_START,
        None,
    ),
}

IN_BOX = dataclasses.replace(ONE_LEVEL, w_set=dpb.sets.Box(-1.0, 1.0))

SOLVERS |= {
    "gradient_informative": (
        IN_BOX,
        dpb.search.GradientInformativeBO(
            3,
            1.0,
            step_size=0.5,
            keep=8,
            max_batch=8,
            polish=2,
            output=dpb.outputs.TailMean(0.2),
        ).with_sizes(len(LOWER["label"])),
        jax.tree.map(np.float64, {k: LOWER[k] for k in ("features", "label")}),
        np.zeros(4),
        None,
    ),
}

SEARCHED = dpb.FiniteSum(
    lambda w, r: jnp.sum((w - r["features"]) ** 2),
    lambda w: 0.05 * jnp.sum(w * w),
    w_set=dpb.sets.Box(-1.0, 1.0),
)

SOLVERS |= {
    "random_search": (SEARCHED, dpb.search.RandomSearch(20, 2.0), LOWER, Y0, None),
    "repeat_and_select": (
        SEARCHED,
        dpb.search.RepeatAndSelect(12, 2.0, mean=2.0),
        LOWER,
        Y0,
        None,
    ),
    "repeat_and_select_poisson": (
        SEARCHED,
        dpb.search.RepeatAndSelect(12, 2.0, mean=2.0, shape=math.inf),
        LOWER,
        Y0,
        None,
    ),
    "noisy_ucb": (
        SEARCHED,
        dpb.search.NoisyUCB(4, 2.0, num_candidates=20),
        LOWER,
        Y0,
        None,
    ),
}

# They compute in float64 or not at all.
DOUBLE = {"gradient_informative"}
# They draw one of a few candidates.
FEW_ANSWERS = {"exponential", "exponential_gradient_norm"}
# Their noise follows a sensitivity that depends on released values.
ADAPTIVE = {"implicit_at_x"}


def sizes_of(problem, data, people):
    return problem.sizes_of(data) if people is None else problem.sizes_of(data, people)
