import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import dpbilevel as dpb

ALPHA = 1e-4
SIZE, CLIP_NORM, RECORDS = 50_000, 3.0, 40


# Programs, which compile sooner than all of their operations.
@jax.jit
def released_by(mechanism, bounded, key):
    return mechanism.release(bounded, key=key)


@functools.partial(jax.jit, static_argnums=0)
def zeros(dtype=jnp.float32):
    records = jnp.zeros((RECORDS, 1), dtype)

    def nothing(record):
        return {"a": jnp.zeros(SIZE, dtype) * record, "b": record}

    return dpb.privacy.clipped_mean(
        nothing, records, clip_norm=CLIP_NORM, denominator=RECORDS, precision="float"
    )


@pytest.mark.parametrize("neighbours", dpb.Neighbours)
@pytest.mark.parametrize(
    "multiplier", [0.5, pytest.param(20.0, marks=pytest.mark.slow)]
)
def test_noise_has_the_standard_deviation_that_the_event_claims(
    neighbours, multiplier, getkey
):
    mechanism = dpb.privacy.Gaussian(multiplier, neighbours, precision="float")
    released = released_by(mechanism, zeros(), getkey())
    claimed = mechanism.event().noise_multiplier * (
        neighbours.contributions * CLIP_NORM / RECORDS
    )
    sample = np.asarray(released["a"]) / claimed
    assert scipy.stats.kstest(sample, "norm").pvalue > ALPHA
    # The test must be able to fail: a 5% smaller scale is rejected.
    assert scipy.stats.kstest(0.95 * sample, "norm").pvalue < ALPHA


@pytest.mark.reuses_keys
def test_the_released_value_is_the_mean_plus_the_noise_of_its_key(getkey):
    records = jnp.arange(6.0).reshape(3, 2)

    @jax.jit
    def released(multiplier, key):
        bounded = dpb.privacy.clipped_mean(
            lambda z: z, records, clip_norm=100.0, precision="float"
        )
        return dpb.privacy.Gaussian(multiplier, precision="float").release(
            bounded, key=key
        )

    key = getkey()
    silent = released(0.0, key)
    np.testing.assert_allclose(silent, [2.0, 3.0], rtol=1e-6)
    one, two = (released(m, key) - silent for m in (1.0, 2.0))
    np.testing.assert_allclose(two, 2 * one, rtol=1e-4)
    other = released(1.0, getkey()) - silent
    assert not np.any(np.isclose(one, other))


def test_half_precision_values_are_released_in_float32(getkey):
    mechanism = dpb.privacy.Gaussian(1.0, precision="float")
    released = released_by(mechanism, zeros(jnp.bfloat16), getkey())
    assert released["a"].dtype == jnp.float32
    # bfloat16 noise would have 128 values.
    assert len(np.unique(released["a"])) > 0.99 * SIZE


def test_noise_is_relative_to_the_sum_of_sensitivities(getkey):
    mechanism = dpb.privacy.Gaussian(1.0, precision="float")
    released = released_by(mechanism, zeros() + zeros(), getkey())
    std = 2 * 2 * CLIP_NORM / RECORDS
    assert np.std(released["a"]) == pytest.approx(std, rel=0.02)


@pytest.mark.reuses_keys
def test_a_multiplier_is_traced_not_compiled_in(getkey):
    traces = []

    @jax.jit
    def release(mechanism, key):
        traces.append(None)
        return mechanism.release(dpb.privacy.Bounded(jnp.zeros(1000), 1.0), key=key)

    key = getkey()
    stds = [
        float(release(dpb.privacy.Gaussian(m, precision="float"), key).std())
        for m in (1.0, 3.0)
    ]
    assert stds[1] == pytest.approx(3 * stds[0], rel=1e-4)
    assert len(traces) == 1


def test_nothing_is_released_without_a_multiplier_a_bound_or_a_typed_key(getkey):
    bounded = dpb.privacy.Bounded(jnp.zeros(2), 1.0)
    with pytest.raises(ValueError, match="Take the solver from dpbilevel"):
        dpb.privacy.Gaussian(precision="float").release(bounded, key=getkey())
    with pytest.raises(TypeError, match="bounded must be an instance of Bounded"):
        dpb.privacy.Gaussian(1.0, precision="float").release(jnp.zeros(2), key=getkey())
    with pytest.raises(TypeError, match="must be a typed key"):
        dpb.privacy.Gaussian(1.0, precision="float").release(
            bounded, key=jnp.zeros(2, jnp.uint32)
        )
    with pytest.raises(TypeError, match="neighbours must be an instance"):
        dpb.privacy.Gaussian(1.0, "replace_one", precision="float")


def test_scaling_and_setting_the_multiplier_keep_the_relation():
    removal = dpb.Neighbours.ADD_OR_REMOVE_ONE
    mechanism = dpb.privacy.Gaussian(2.0, removal, precision="float")
    assert mechanism.scaled(1.5) == dpb.privacy.Gaussian(
        3.0, removal, precision="float"
    )
    assert mechanism.with_multiplier(5.0) == dpb.privacy.Gaussian(
        5.0, removal, precision="float"
    )


@pytest.mark.reuses_keys
def test_derivatives_through_a_release_see_released_values_only(getkey):
    problem = dpb.FiniteSum(lambda w, z: 0.5 * jnp.sum((w - z) ** 2))
    solver = dpb.NoisyGD(1, 100.0, step_size=0.25).with_noise(1e-6)
    data, start, key = jnp.ones((10, 2)), jnp.zeros(2), getkey()

    def answer(start, step_size):
        stepped = dataclasses.replace(solver, step_size=step_size)
        return dpb.solve(problem, stepped, data, start, key=key).value

    by_start, by_step = jax.jit(jax.jacobian(answer, (0, 1)))(start, 0.25)
    released = (start - jax.jit(answer)(start, 0.25)) / 0.25
    # The exact map has the derivative 1 - step_size, which is about the records.
    np.testing.assert_allclose(by_start, np.eye(2), rtol=1e-6)
    np.testing.assert_allclose(by_step, -released, rtol=1e-5)


HALF = {
    "numpy float16": np.float16,
    "jax float16": lambda v: jnp.asarray(v, jnp.float16),
    "jax bfloat16": lambda v: jnp.asarray(v, jnp.bfloat16),
}


@pytest.mark.parametrize("kind", HALF)
@pytest.mark.parametrize("field", ["clip_norm", "noise_multiplier"])
def test_a_solver_with_numbers_of_half_precision_is_refused(kind, field):
    # Multipliers would be rounded by more than the margin of the noise.
    problem, n = dpb.FiniteSum(lambda w, z: -w * z), 100
    solver = dpb.NoisyGD(1, 1.0, step_size=1.0).with_noise(2.01).with_sizes(n)
    half = HALF[kind](1.01)
    cast = dataclasses.replace(solver, **{field: half})
    for run in (dpb.solve, jax.jit(dpb.solve)):
        with pytest.raises(TypeError, match=f"{field}.*too coarse for the noise"):
            run(problem, cast, jnp.zeros(n), jnp.zeros(()), key=jax.random.key(0))


def test_a_mechanism_of_half_precision_is_refused():
    mechanism = dpb.privacy.Gaussian(jnp.asarray(1.01, jnp.bfloat16), precision="float")
    with pytest.raises(TypeError, match="noise_multiplier is bfloat16"):
        mechanism.release(zeros(), key=jax.random.key(0))


@pytest.mark.parametrize("precision", ["grid", "float"])
def test_noise_that_underflows_releases_nothing_of_the_value(precision):
    @jax.jit
    def run(records, multiplier):
        mean = dpb.privacy.clipped_mean(
            lambda z: z, records, clip_norm=1e-20, precision=precision
        )
        mechanism = dpb.privacy.Gaussian(multiplier, precision=precision)
        return mechanism.release(mean, key=jax.random.key(0))

    # Much longer ones would not count: squares in units of the clip norm overflow.
    sides = [jnp.full(4, value) for value in (1e-20, -1e-20)]
    left, right = (run(side, jnp.float32(1e-30)) for side in sides)
    assert left == right
    # The control: without noise the two differ.
    left, right = (run(side, jnp.float32(0.0)) for side in sides)
    assert left != right


def test_fast_math_is_refused(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    with pytest.raises(ValueError, match="fast math in XLA_FLAGS"):
        dpb.privacy.clipped_mean(
            lambda z: z, jnp.ones(3), clip_norm=1.0, precision="float"
        )
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    dpb.privacy.clipped_mean(lambda z: z, jnp.ones(3), clip_norm=1.0, precision="float")
