"""Kernels and posteriors of gradients against closed forms and derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpbilevel as dpb
from dpbilevel.search.gp import gradient_posterior
from tests.cases import fast_first, slow

KERNELS = [
    dpb.search.RBF(0.7, 1.3),
    dpb.search.Matern52(0.7, 1.3),
    dpb.search.Quadratic(1.3),
]
kernels = pytest.mark.parametrize("kernel", fast_first(KERNELS))
pytestmark = pytest.mark.usefixtures("x64")
UNIT = dpb.search.RBF()


def rows(count, d, seed=0, scale=1.0):
    return jnp.asarray(scale * np.random.default_rng(seed).normal(size=(count, d)))


@jax.jit
def known(kernel, theta, points, mask=None, *, nugget, constant=1e4):
    posterior = gradient_posterior(
        kernel, theta, points, mask, nugget=nugget, constant=constant
    )
    return posterior, posterior.trace, posterior.weights


def trace(points, nugget=0.0, kernel=UNIT):
    theta = np.zeros(points.shape[1])
    return float(known(kernel, theta, points, nugget=nugget, constant=0.0)[1])


def star(d, h):
    return np.concatenate([np.zeros((1, d)), h * np.eye(d)])


def cross(d, h):
    return np.concatenate([h * np.eye(d), -h * np.eye(d)])


@pytest.mark.parametrize(
    ("points", "nugget", "kernel", "expected"),
    [
        (star(1, 0.5), 0.0, UNIT, 0.1197971),
        (star(1, 0.1), 0.0, UNIT, 0.00499167),
        (cross(1, 0.5), 0.0, UNIT, 0.01034121),
        (cross(1, 0.1), 0.0, UNIT, 1.66665e-5),
        (star(3, 0.1), 0.0, UNIT, 0.01497500),
        (star(3, 0.1), 1e-4, UNIT, 0.07295094),
        (cross(3, 0.3), 0.0, UNIT, 0.004046176),
        (cross(3, 0.3), 0.0025, UNIT, 0.04883416),
        (cross(3, 0.3), 0.0025, dpb.search.Matern52(), 0.3120399),
    ],
)
def test_traces_are_those_of_hand_computed_designs(points, nugget, kernel, expected):
    assert trace(points, nugget, kernel) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("h", [0.1, 0.5])
def test_traces_of_two_points_on_a_line_have_a_closed_form(h):
    assert trace(star(1, h)) == pytest.approx(1 - h**2 / np.expm1(h**2), rel=1e-9)
    assert trace(cross(1, h)) == pytest.approx(1 - h**2 / np.sinh(h**2), rel=1e-6)


def test_weights_of_a_cross_are_central_differences_with_shrinkage():
    *_, weights = known(UNIT, np.zeros(3), cross(3, 0.3), nugget=0.0025, constant=0.0)
    expected = [1.715001, 0, 0, -1.715001, 0, 0]
    np.testing.assert_allclose(weights[0], expected, atol=1e-6)


@kernels
def test_slopes_and_prior_covariance_are_the_kernels_derivatives(kernel):
    theta, z = rows(1, 4)[0], rows(5, 4, 1)

    def k(a, b):
        return kernel.covariance(a[None], b[None], jnp.zeros(4))[0, 0]

    @jax.jit
    def derived(kernel, theta, z):
        near = theta[None] + 1e-5 * jnp.eye(4)
        mixed = kernel.slope(theta, near) - kernel.slope(theta, theta[None])
        by_autodiff = jax.vmap(jax.grad(k), (None, 0))(theta, z)
        higher = jax.vmap(k, (0, None))(near, z[0])
        lower = jax.vmap(k, (0, None))(2 * theta[None] - near, z[0])
        return by_autodiff, (higher - lower) / 2e-5, mixed / 1e-5

    by_autodiff, differences, mixed = derived(kernel, theta, z)
    found = kernel.slope(theta, z)
    np.testing.assert_allclose(found, by_autodiff, atol=1e-9)
    np.testing.assert_allclose(found[0], differences, atol=1e-8)
    np.testing.assert_allclose(kernel.prior(theta), mixed, atol=1e-3)


def test_prior_traces_are_those_of_the_closed_forms():
    theta, d = rows(1, 4)[0], 4
    norm = float(theta @ theta)
    traces = [float(jnp.trace(kernel.prior(theta))) for kernel in KERNELS]
    expected = [d * 1.3 / 0.49, d * 5 * 1.3 / (3 * 0.49)]
    expected.append(1.3 * (2 * d * (norm + 1) + 2 * norm))
    np.testing.assert_allclose(traces, expected, rtol=1e-12)


@pytest.mark.parametrize("kernel", fast_first(KERNELS))
def test_equal_points_have_finite_slopes_and_traces(kernel):
    theta = rows(1, 3)[0]
    points = jnp.stack([theta, theta, theta + 0.1])

    @jax.jit
    def total(points):
        some = gradient_posterior(kernel, theta, points, nugget=1e-6)
        return some.trace_with(points[::-1], jnp.ones(3, bool))

    value, slope = jax.value_and_grad(total)(points)
    assert bool(jnp.isfinite(value)) and bool(jnp.isfinite(slope).all())  # noqa: PT018


@kernels
def test_masked_rows_change_nothing(kernel):
    theta, points = rows(1, 3)[0], rows(7, 3, 2)
    mask = jnp.arange(7) < 4
    _, padded, wide = known(kernel, theta, points, mask, nugget=1e-3)
    _, plain, weights = known(kernel, theta, points[:4], nugget=1e-3)
    np.testing.assert_allclose(padded, plain, rtol=1e-8)
    np.testing.assert_allclose(wide[:, :4], weights, rtol=1e-6)
    assert not wide[:, 4:].any()


@pytest.mark.parametrize("kernel", fast_first(KERNELS))
def test_trace_with_further_points_is_the_trace_of_all(kernel):
    theta, points, more = rows(1, 3)[0], rows(5, 3, 2), rows(4, 3, 3)
    some, *_ = known(kernel, theta, points, nugget=1e-2)
    everything = jnp.concatenate([points, more[:3]])
    whole, expected, _ = known(kernel, theta, everything, nugget=1e-2)
    found = jax.jit(type(some).trace_with)(some, more, jnp.arange(4) < 3)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    np.testing.assert_allclose(jnp.trace(whole.covariance), expected, rtol=1e-6)


@kernels
@pytest.mark.parametrize("constant", [0.0, 10.0])
def test_weights_and_trace_are_those_of_the_kernel_plus_a_constant(kernel, constant):
    theta, points = rows(1, 3)[0], rows(6, 3, 2)
    scaled = constant * float(kernel.variance)
    dense = np.asarray(kernel.covariance(points, points, theta)) + scaled
    slope = np.asarray(kernel.slope(theta, points)).T
    expected = np.linalg.solve(dense + 1e-2 * np.eye(6), slope.T).T
    posterior, trace, weights = known(
        kernel, theta, points, nugget=1e-2, constant=constant
    )
    np.testing.assert_allclose(weights, expected, rtol=1e-9, atol=1e-10)
    covariance = np.asarray(kernel.prior(theta)) - expected @ slope.T
    np.testing.assert_allclose(posterior.covariance, covariance, atol=1e-9)
    assert trace == pytest.approx(np.trace(covariance), rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", fast_first(KERNELS))
def test_the_slope_of_a_trace_agrees_with_central_differences(kernel):
    theta, points, more = rows(1, 3)[0], rows(5, 3, 2), rows(4, 3, 3)
    some, *_ = known(kernel, theta, points, nugget=1e-2)

    @jax.jit
    def trace(more):
        return some.trace_with(more, jnp.arange(4) < 3)

    found, step = jax.grad(trace)(more), 1e-5
    moves = step * jnp.eye(more.size).reshape(-1, *more.shape)
    expected = [(trace(more + v) - trace(more - v)) / (2 * step) for v in moves]
    np.testing.assert_allclose(found.ravel(), expected, rtol=1e-5, atol=1e-7)
    assert not found[3:].any()
    np.testing.assert_allclose(jax.jacfwd(trace)(more), found, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_a_negative_trace_is_not_taken_for_precision():
    # Two equal points without a nugget: no Cholesky factor.
    empty, *_ = known(
        UNIT, np.zeros(1), np.zeros((1, 1)), np.zeros(1, bool), nugget=0.0
    )
    assert empty.trace_with(jnp.ones((2, 1)), jnp.ones(2, bool)) == jnp.inf


@pytest.mark.parametrize("constant", [0.0, *slow(1e4)])
def test_a_constant_loss_feigns_no_gradient_where_the_constant_is_unknown(constant):
    points = rows(6, 5, 4, 0.5)
    *_, weights = known(UNIT, np.zeros(5), points, nugget=1e-8, constant=constant)
    feigned = np.linalg.norm(weights @ np.full(6, 5.0))
    # Without the constant the gradient is spurious: the control.
    assert feigned < 1e-2 if constant else feigned > 0.5
    symmetric = cross(5, 0.3)
    *_, centred = known(UNIT, np.zeros(5), symmetric, nugget=1e-8, constant=constant)
    assert np.linalg.norm(centred.sum(axis=1)) < 1e-6


@kernels
def test_error_is_at_most_the_trace_times_the_squared_norm_of_the_function(kernel):
    # f = sum_j c_j k(., p_j) has the norm sqrt(c^T K c) in the kernel's space.
    for seed in range(5):
        theta, centres = rows(1, 3, seed)[0], rows(4, 3, seed + 10)
        c, points = rows(1, 4, seed + 20)[0], rows(6, 3, seed + 30)
        covariance = kernel.covariance(centres, centres, theta)
        exact = c @ kernel.slope(theta, centres)
        values = kernel.covariance(points, centres, theta) @ c
        _, trace, weights = known(kernel, theta, points, nugget=1e-10, constant=0.0)
        error = exact - weights @ values
        assert error @ error <= (c @ covariance @ c) * trace + 1e-6


@pytest.mark.slow
def test_quadratic_kernel_knows_all_after_as_many_points_as_features():
    points, theta = rows(30, 5, 6), jnp.full(5, 0.3)
    covariance = np.asarray(dpb.search.Quadratic().covariance(points, points, theta))
    ranks = [np.linalg.matrix_rank(covariance[:m, :m]) for m in (18, 20, 21, 22, 30)]
    assert ranks == [18, 20, 21, 21, 21]
    traces = [
        known(dpb.search.Quadratic(), theta, points[:m], nugget=1e-9, constant=0.0)[1]
        for m in (20, 21)
    ]
    assert traces[0] > 1e-2
    assert traces[1] < 1e-5


@pytest.mark.parametrize(
    ("nugget", "simplex", "pair"),
    [
        (0.0025, 0.2630, 0.3931),
        (1e-4, 0.1188, 0.2304),
        (1e-8, 0.01191, 0.04966),
        (0.04, 0.5050, 0.6143),
        (1.0, 0.8766, 0.9081),
    ],
)
def test_radii_are_the_best_ones_of_simplex_and_cross(nugget, simplex, pair):
    radius = jax.jit(dpb.search.RBF.radius)
    found = [radius(UNIT, jnp.asarray(n), jnp.asarray(nugget)) for n in (16, 2)]
    np.testing.assert_allclose(found, [simplex, pair], rtol=4e-3)
    # In other units: lengths scale with the length-scale, noise with the variance.
    wide = radius(dpb.search.RBF(3.0, 4.0), jnp.asarray(16), jnp.asarray(4 * nugget))
    np.testing.assert_allclose(wide, 3 * found[0], rtol=1e-6)


def test_single_precision_is_refused_with_the_remedy():
    theta = jnp.zeros(2, jnp.float32)
    with pytest.raises(ValueError, match="jax_enable_x64"):
        gradient_posterior(UNIT, theta, jnp.zeros((1, 2), jnp.float32), nugget=1e-3)


@pytest.mark.parametrize("kind", [dpb.search.RBF, dpb.search.Matern52])
def test_hyperparameters_out_of_range_are_refused(kind):
    for fields in ({"lengthscale": 0.0}, {"variance": -1.0}):
        with pytest.raises(ValueError, match="positive"):
            kind(**fields)
    with pytest.raises(ValueError, match="positive"):
        dpb.search.Quadratic(reach=0.0)
