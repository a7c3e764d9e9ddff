import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpbilevel as dpb
from tests.cases import Audited, Case, planned
from tests.problems import LOWER, ONE_LEVEL, POISSON, SPARSE, Y0

POINTS = jnp.asarray(np.random.default_rng(0).normal(size=(50, 3)), jnp.float32)
MEAN = POINTS.mean(0) / 1.5
PROBLEM = dpb.FiniteSum(
    lambda w, z: 0.5 * jnp.sum((w - z) ** 2), lambda w: 0.25 * jnp.sum(w**2)
)
START = jnp.full(3, 2.0)


ADD_OR_REMOVE = dpb.Neighbours.ADD_OR_REMOVE_ONE


def small(**fields):
    return dpb.NoisyGD(6, 1.0, **({"step_size": 0.5} | fields))


def localized(**fields):
    return dpb.onelevel.LocalizedGD((4.0, 2.0), 3, 0.1, 1.0, **fields)


CONTRACT = {
    "noisy_gd_adam": Case(
        ONE_LEVEL,
        small(step_size=optax.adam(0.1), sampling=dpb.FixedSize(10)),
        LOWER,
        Y0,
    ),
    "noisy_gd": Case(ONE_LEVEL, small(), LOWER, Y0, fitted=True),
    "noisy_gd_poisson": Case(
        ONE_LEVEL, small(sampling=POISSON, output=dpb.outputs.Mean()), LOWER, Y0
    ),
    "noisy_gd_momentum": Case(ONE_LEVEL, small(momentum=0.8), LOWER, Y0),
    "noisy_gd_proximal": Case(SPARSE, small(), LOWER, Y0),
    "localized": Case(ONE_LEVEL, localized(), LOWER, Y0),
    "localized_proximal": Case(SPARSE, localized(), LOWER, Y0),
    "localized_sgd": Case(ONE_LEVEL, localized(sampling=POISSON), LOWER, Y0),
}


def planned_noisy_gd(scale=1.0, **fields):
    defaults = {"num_steps": 4, "clip_norm": 0.7, "step_size": 0.1}
    return planned(dpb.NoisyGD(**(defaults | fields)), scale=scale)


def sampled(
    sampling, neighbours=dpb.Neighbours.REPLACE_ONE, multiplier=0.5, num_steps=1
):
    """With this noise multiplier at every step."""
    noise = {"noise_multiplier": multiplier, "neighbours": neighbours}
    solver = dpb.NoisyGD(num_steps, 0.7, step_size=0.1, sampling=sampling, **noise)
    return solver.with_sizes(10)


AUDITS = {
    "NoisyGD": Audited(planned_noisy_gd()),
    "NoisyGD, precision float": Audited(planned_noisy_gd(), precision="float"),
    "NoisyGD, add or remove": Audited(planned_noisy_gd(neighbours=ADD_OR_REMOVE)),
    "NoisyGD, Poisson": Audited(
        sampled(dpb.Poisson(0.2), ADD_OR_REMOVE, num_steps=2), exact=False
    ),
    "NoisyGD, Poisson, replace": Audited(sampled(dpb.Poisson(0.2)), exact=False),
    "NoisyGD, fixed size": Audited(sampled(dpb.FixedSize(2)), exact=False),
    "LocalizedGD": Audited(planned(dpb.onelevel.LocalizedGD((1e3, 5e2), 20, 1.0, 0.7))),
}


def run(solver, problem=PROBLEM, data=POINTS):
    return jax.jit(dpb.solve)(problem, solver, data, START, key=jax.random.key(0)).value


def test_noiseless_descent_reaches_the_minimizer():
    w = run(
        dpb.NoisyGD(200, 1e6, step_size=0.3, noise_multiplier=0.0, precision="float")
    )
    np.testing.assert_allclose(w, MEAN, atol=1e-5)


def test_noiseless_steps_equal_the_formula():
    w = np.asarray(START)
    total = np.zeros(3)
    for _ in range(5):
        w = w - 0.3 * (w - np.mean(POINTS, 0) + w / 2)
        total += w
    last = run(
        dpb.NoisyGD(5, 1e6, step_size=0.3, noise_multiplier=0.0, precision="float")
    )
    mean = run(
        dpb.NoisyGD(
            5,
            1e6,
            step_size=0.3,
            noise_multiplier=0.0,
            precision="float",
            output=dpb.outputs.Mean(),
        )
    )
    np.testing.assert_allclose(last, w, rtol=1e-5)
    np.testing.assert_allclose(mean, total / 5, rtol=1e-5)


def test_steps_with_momentum_equal_the_formula():
    w, v = np.asarray(START), np.zeros(3)
    for _ in range(5):
        gradient = w - np.mean(POINTS, 0) + w / 2
        v = 0.6 * v + gradient
        w = w - 0.3 * (gradient + 0.6 * v)
    solver = dpb.NoisyGD(5, 1e6, 0.3, momentum=0.6, noise_multiplier=0.0)
    np.testing.assert_allclose(run(solver.with_precision("float")), w, rtol=1e-5)


@pytest.mark.parametrize("momentum", [1.0, -0.1, float("nan"), "fast"])
def test_momentum_is_at_least_0_and_below_1(momentum):
    with pytest.raises(ValueError, match="momentum must be"):
        small(momentum=momentum)


def test_an_optimizer_and_momentum_are_refused():
    with pytest.raises(ValueError, match=r"set momentum in the optax"):
        small(step_size=optax.sgd(0.1), momentum=0.9)


def test_optimizer_state_is_carried():
    rule = optax.sgd(0.1, momentum=0.9)
    found = run(
        dpb.NoisyGD(20, 1e6, step_size=rule, noise_multiplier=0.0, precision="float")
    )
    w, memory = START, rule.init(START)
    for _ in range(20):
        updates, memory = rule.update(w - POINTS.mean(0) + w / 2, memory, w)
        w = optax.apply_updates(w, updates)
    np.testing.assert_allclose(found, w, rtol=1e-4)


def test_iterates_stay_in_the_set():
    problem = dpb.FiniteSum(PROBLEM.loss, w_set=dpb.sets.Ball(0.1))
    w = run(dpb.NoisyGD(20, 1.0, step_size=0.3).with_noise(3.0), problem)
    assert float(jnp.linalg.norm(w)) <= 0.1 + 1e-6


def test_radii_of_a_first_run_are_as_many_as_of_others():
    with pytest.raises(ValueError, match="first_radii must be as many as radii"):
        dpb.onelevel.LocalizedGD((1.0, 0.5), 3, 1.0, 1.0, first_radii=(1.0,))


def test_localized_rounds_equal_the_pseudocode():
    radii, mu = (0.5, 0.2), 1.5
    center = np.asarray(START)
    for radius in radii:
        w, visited = center, []
        for t in range(4):
            visited.append(w)
            w = w - (w - np.mean(POINTS, 0) + w / 2) / (mu * (t + 1))
            offset = w - center
            w = center + offset * min(1, radius / np.linalg.norm(offset))
        center = np.mean(visited, 0)
    found = run(
        dpb.onelevel.LocalizedGD(
            radii, 4, mu, 1e6, noise_multiplier=0.0, precision="float"
        )
    )
    np.testing.assert_allclose(found, center, rtol=1e-5)


def test_localized_trajectory_stays_in_each_ball():
    solver = dpb.onelevel.LocalizedGD((0.5, 0.1), 5, 1.5, 1.0).with_noise(5.0)
    path = dpb.solve(
        PROBLEM, solver, POINTS, START, key=jax.random.key(0), trajectory=True
    ).trajectory
    first, second = np.asarray(path[:5]), np.asarray(path[5:])
    center = first[-1]  # the round's last state is its mean
    assert np.linalg.norm(first - np.asarray(START), axis=1).max() <= 0.5 + 1e-5
    assert np.linalg.norm(second - center, axis=1).max() <= 0.1 + 1e-5


@pytest.mark.slow
@pytest.mark.reuses_keys
def test_localized_error_is_proportional_to_the_noise():
    keys = jax.random.split(jax.random.key(0), 200)

    def error(scale):
        solver = dpb.onelevel.LocalizedGD((8.0, 4.0), 25, 1.5, 20.0).with_noise(scale)

        def one(key):
            w = dpb.solve(PROBLEM, solver, POINTS, MEAN, key=key).value
            return jnp.sum((w - MEAN) ** 2)

        return float(jnp.mean(jax.jit(jax.vmap(one))(keys)))

    assert 3.5**2 < error(0.2) / error(0.05) < 4.5**2


def test_localized_from_theorem_follows_the_theorem():
    solver = dpb.onelevel.LocalizedGD.from_theorem(
        dpb.FiniteSum(PROBLEM.loss, lipschitz=2.0),
        dpb.PrivacyBudget(1.0, 1e-6),
        10**6,
        dimension=16,
        strong_convexity=0.5,
        radius=3.0,
        steps_per_round=10,
    )
    ratio = 0.5 * 1e6 / 2.0
    assert len(solver.radii) == int(np.ceil(np.log2(np.log(ratio))))
    expected = np.sqrt(3.0 / ratio) + 4.0 / ratio
    np.testing.assert_allclose(solver.radii[1], expected, rtol=1e-12)
    assert solver.clip_norm == 2.0


def test_localized_from_theorem_refuses_too_few_records():
    with pytest.raises(ValueError, match="more records"):
        dpb.onelevel.LocalizedGD.from_theorem(
            dpb.FiniteSum(PROBLEM.loss, lipschitz=2.0),
            dpb.PrivacyBudget(1.0, 1e-6),
            50,
            dimension=16,
            strong_convexity=0.1,
            radius=3.0,
            steps_per_round=10,
        )


def test_public_denominator_of_the_plan_is_used_when_a_record_leaves():
    noise = {"noise_multiplier": 0.0, "neighbours": dpb.Neighbours.ADD_OR_REMOVE_ONE}
    noise["precision"] = "float"
    problem = dpb.FiniteSum(PROBLEM.loss)
    solver = dpb.NoisyGD(1, 1e6, step_size=1.0, **noise).with_sizes(50)
    w = run(solver, problem, POINTS[1:])
    gradient = (49 * START - jnp.sum(POINTS[1:], 0)) / 50
    np.testing.assert_allclose(w, START - gradient, rtol=1e-5)


def test_add_or_remove_without_a_plan_is_refused():
    noise = {"noise_multiplier": 1.0, "neighbours": dpb.Neighbours.ADD_OR_REMOVE_ONE}
    solver = dpb.NoisyGD(1, 1.0, step_size=1.0, **noise)
    with pytest.raises(ValueError, match="needs public sizes"):
        run(solver)
    with pytest.raises(ValueError, match="needs public numbers; give sizes="):
        dpb.fit(
            PROBLEM,
            solver,
            POINTS,
            START,
            budget=dpb.PrivacyBudget(1.0, 1e-5),
            key=jax.random.key(0),
        )


def test_loss_that_returns_a_vector_is_refused():
    problem = dpb.FiniteSum(lambda w, z: w - z)
    with pytest.raises(ValueError, match="one floating-point scalar"):
        run(dpb.NoisyGD(1, 1.0, step_size=1.0).with_noise(1.0), problem)


def test_records_of_unequal_length_are_refused_by_name():
    problem = dpb.FiniteSum(lambda w, z: jnp.sum(w * z["a"]) + z["b"])
    data = {"a": jnp.ones((4, 3)), "b": jnp.ones(5)}
    with pytest.raises(ValueError, match=r"\['a'\]': \(4,\), \"\['b'\]\": \(5,\)|'b'"):
        run(dpb.NoisyGD(1, 1.0, step_size=1.0).with_noise(1.0), problem, data)
