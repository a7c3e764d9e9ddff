"""Small problems and records that tests of several packages share."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import dpbilevel as dpb
from dpbilevel.privacy.keys import step_keys
from tests.zoo import two_levels
from tests.zoo import two_levels as zoo


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
SPARSE = dpb.FiniteSum(dpb.logistic_loss, dpb.proximal.l1(0.05))
IN_BOX = dataclasses.replace(ONE_LEVEL, w_set=dpb.sets.Box(-1.0, 1.0))
WEIGHTING = dpb.source_weighting(dpb.logistic_loss, 3, ridge=0.05)
TUNING = dpb.penalty_tuning(dpb.logistic_loss, jnp.asarray([0, 0, 1, 1]))
LASSO = dpb.penalty_tuning(dpb.logistic_loss, np.asarray([0, 0, 1, 1]), penalty="l1")
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
SHARED_QUADRATIC = dpb.Levels.shared(QUADRATIC.data.lower)
EXACT = zoo.quadratic_bilevel(QUADRATIC.data.upper, QUADRATIC.data.lower, radius=1.0)
SEARCHED = dpb.FiniteSum(
    lambda w, r: jnp.sum((w - r["features"]) ** 2),
    lambda w: 0.05 * jnp.sum(w * w),
    w_set=dpb.sets.Box(-1.0, 1.0),
)
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
# Where no gradient vanishes.
SADDLE_START = (jnp.full(4, 0.25), jnp.asarray([0.7, 0.3]))


@jax.jit
def found_by(problem, solver, data, w0, key):
    """Return the solution of a pipeline, and the outputs of its stages."""
    state = solver.init(problem, w0)
    for step in step_keys(key, solver.num_steps)[1]:
        state = solver.step(problem, data, state, key=step)
    return solver.answer(problem, state), state.outputs


# Accelerators round the factors of matrix products by default.
exact = jax.default_matmul_precision("highest")


def ridge_tuning(upper, lower):
    r"""Return a zoo `Example`: the penalty $\frac12 e^x \|y\|^2$ of least squares.

    $y^*(x) = (A + e^x I)^{-1} c$ with $A$, $c$ the lower level's second moments.
    """

    @exact
    def moments(records):
        a, b = records["features"], records["label"]
        return a.T @ a / len(b), a.T @ b / len(b), jnp.mean(b**2)

    (a_up, c_up, b_up), (a_low, c_low, _) = moments(upper), moments(lower)
    eye = jnp.eye(len(c_low), dtype=c_low.dtype)

    def loss(_, y, record):
        return dpb.squared_loss(y, record)

    def lower_public(x, y):
        return 0.5 * jnp.exp(x[0]) * jnp.sum(y**2)

    def lower_solution(x):
        return jnp.linalg.solve(a_low + jnp.exp(x[0]) * eye, c_low)

    def penalized_solution(x, penalty):
        system = a_up + penalty * (a_low + jnp.exp(x[0]) * eye)
        return jnp.linalg.solve(system, c_up + penalty * c_low)

    @exact
    def hyper_objective(x):
        y = lower_solution(x)
        return 0.5 * (y @ a_up @ y) - c_up @ y + 0.5 * b_up

    @exact
    def hypergradient(x):
        y = lower_solution(x)
        system = a_low + jnp.exp(x[0]) * eye
        adjoint = jnp.linalg.solve(system, a_up @ y - c_up)  # v
        return -jnp.exp(x) * (adjoint @ y)  # the cross derivative e^x y, times v

    problem = dpb.BilevelProblem(
        loss, loss, lower_public=lower_public, x_in_records=False
    )
    return two_levels.Example(
        problem,
        dpb.Levels(upper, lower),
        (jnp.zeros(1, c_low.dtype), jnp.zeros_like(c_low)),
        lower_solution,
        penalized_solution,
        hyper_objective,
        hypergradient,
    )
