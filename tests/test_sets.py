import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
from hypothesis import given
from hypothesis import strategies as st

import dpbilevel as dpb

DIM = 5
CENTER = jnp.asarray([1.0, -2.0, 0.5, 0.0, 3.0])
LOWER = jnp.asarray([-1.0, 0.0, -np.inf, 2.0, -3.0])
UPPER = jnp.asarray([1.0, 0.5, 0.0, 2.0, np.inf])
SETS = {
    "euclidean": dpb.sets.Euclidean(),
    "ball": dpb.sets.Ball(1.5),
    "centered_ball": dpb.sets.Ball(0.7, CENTER),
    "box": dpb.sets.Box(-0.5, 2.0),
    "array_box": dpb.sets.Box(LOWER, UPPER),
    "non_negative": dpb.sets.NonNegative(),
    "simplex": dpb.sets.Simplex(),
    "scaled_simplex": dpb.sets.Simplex(3.0),
}
every_set = pytest.mark.parametrize("name", SETS)
project = jax.jit(lambda convex, w: convex.project(w))
contains = jax.jit(lambda convex, w: convex.contains(w))
vectors = st.lists(
    st.floats(-1e3, 1e3, width=32, allow_subnormal=False), min_size=DIM, max_size=DIM
).map(lambda v: np.asarray(v, np.float32))


def random_points(count=20, scale=3.0):
    return scale * np.random.default_rng(0).normal(size=(count, DIM)).astype(np.float32)


def simplex_by_root(w, scale):
    def excess(shift):
        return np.maximum(w - shift, 0).sum() - scale

    shift = scipy.optimize.brentq(excess, w.max() - scale, w.max(), xtol=1e-14)
    return np.maximum(w - shift, 0)


def shortened(w, radius):
    return w * (radius / max(radius, np.linalg.norm(w)))


def argmin(name, w):
    w = w.astype(np.float64)
    center = np.asarray(CENTER, np.float64)
    closed_form = {
        "euclidean": lambda: w,
        "ball": lambda: shortened(w, 1.5),
        "centered_ball": lambda: center + shortened(w - center, 0.7),
        "box": lambda: np.clip(w, -0.5, 2.0),
        "array_box": lambda: np.clip(w, LOWER, UPPER),
        "non_negative": lambda: np.maximum(w, 0),
        "simplex": lambda: simplex_by_root(w, 1.0),
        "scaled_simplex": lambda: simplex_by_root(w, 3.0),
    }
    return np.asarray(closed_form[name](), np.float64)


@every_set
@given(w=vectors)
def test_projection_is_the_nearest_point(name, w):
    np.testing.assert_allclose(
        project(SETS[name], w), argmin(name, w), atol=1e-6 * (1 + np.abs(w).max())
    )


@every_set
@given(w=vectors)
def test_projection_is_feasible_and_idempotent(name, w):
    once = project(SETS[name], w)
    assert contains(SETS[name], once)
    np.testing.assert_allclose(project(SETS[name], once), once, atol=2e-6, rtol=1e-6)


@every_set
@given(v=vectors, w=vectors)
def test_projection_does_not_expand_distances(name, v, w):
    moved = np.linalg.norm(project(SETS[name], v) - project(SETS[name], w))
    assert moved <= np.linalg.norm(v - w) * (1 + 1e-5) + 1e-5


@every_set
def test_no_feasible_direction_from_a_projection_comes_closer(name):
    convex = SETS[name]
    for w in random_points(3):
        value = project(convex, w)
        for other in random_points(200):
            rival = project(convex, other)
            # First-order optimality: every feasible direction points uphill.
            assert np.dot(w - value, rival - value) <= 1e-4


@pytest.mark.parametrize("name", ["ball", "box", "non_negative", "simplex"])
def test_projection_of_a_pytree_is_that_of_its_entries_in_one_vector(name):
    for w in random_points(5):
        tree = {"a": jnp.asarray(w[:2]), "b": jnp.asarray(w[2:]).reshape(1, 3)}
        parts = project(SETS[name], tree)
        flat = np.concatenate([parts["a"], parts["b"].ravel()])
        np.testing.assert_allclose(flat, project(SETS[name], w), atol=1e-6)
        assert parts["b"].shape == (1, 3)


def test_centers_and_bounds_may_be_pytrees():
    tree = {"a": jnp.full(2, 9.0), "b": jnp.full(3, -9.0)}
    ball = dpb.sets.Ball(1.0, jax.tree.map(jnp.zeros_like, tree)).project(tree)
    flat = np.concatenate([ball["a"], ball["b"]])
    np.testing.assert_allclose(np.linalg.norm(flat), 1.0, rtol=1e-6)
    lower = {"a": jnp.zeros(2), "b": jnp.full(3, -2.0)}
    box = dpb.sets.Box(lower, 1.0).project(tree)
    np.testing.assert_array_equal(box["a"], np.ones(2))
    np.testing.assert_array_equal(box["b"], np.full(3, -2.0))


def test_product_projects_every_part_onto_its_own_set():
    convex = dpb.sets.Product(
        (dpb.sets.Ball(1.0), {"p": dpb.sets.Simplex(), "q": dpb.sets.NonNegative()})
    )
    w = (
        jnp.asarray([3.0, 4.0]),
        {"p": jnp.asarray([2.0, 0.0]), "q": jnp.full(2, -1.0)},
    )
    x, rest = convex.project(w)
    np.testing.assert_allclose(x, [0.6, 0.8], rtol=1e-6)
    np.testing.assert_allclose(rest["p"], [1.0, 0.0])
    np.testing.assert_array_equal(rest["q"], [0.0, 0.0])
    assert convex.contains((x, rest))
    assert not convex.contains(w)


OUTSIDE = {
    "ball": [1.5, 0, 0, 0, 0],
    "box": [2.0, 0, 0, 0, 0],
    "non_negative": [0.0, 0, 0, 0, 0],
    "simplex": [1.0, 0, 0, 0, 0],
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_membership_has_the_stated_tolerance(name):
    corner = jnp.asarray(OUTSIDE[name])
    direction = -1.0 if name == "non_negative" else 1.0
    nudge = jnp.zeros(DIM).at[0].set(direction)
    assert SETS[name].contains(corner)
    assert SETS[name].contains(corner + 0.9e-3 * nudge, 1e-3)
    assert not SETS[name].contains(corner + 1e-2 * nudge, 1e-3)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_the_whole_space_contains_finite_points_only(bad):
    assert dpb.sets.Euclidean().contains({"a": jnp.zeros(2)})
    assert not dpb.sets.Euclidean().contains({"a": jnp.asarray([0.0, bad])})


@pytest.mark.parametrize(
    ("convex", "expected"),
    [
        (dpb.sets.Euclidean(), math.inf),
        (dpb.sets.NonNegative(), math.inf),
        (dpb.sets.Ball(1.5), 3.0),
        (dpb.sets.Simplex(3.0), 3.0 * math.sqrt(2)),
        (dpb.sets.Box(jnp.zeros(4), jnp.ones(4)), 2.0),
        (dpb.sets.Box({"a": np.zeros(3)}, {"a": np.ones(3)}), math.sqrt(3)),
        (dpb.sets.Product((dpb.sets.Ball(1.5), dpb.sets.Ball(2.0))), 5.0),
        (dpb.sets.Product((dpb.sets.Ball(1.5), dpb.sets.Euclidean())), math.inf),
    ],
)
def test_diameter(convex, expected):
    assert convex.diameter == pytest.approx(expected)


@pytest.mark.parametrize("name", sorted(SETS.keys() - {"box"}))
def test_diameter_bounds_every_distance(name):
    points = np.stack([project(SETS[name], w) for w in random_points(scale=30.0)])
    distances = np.linalg.norm(points[:, None] - points[None], axis=-1)
    assert distances.max() <= SETS[name].diameter * (1 + 1e-6)


def test_box_of_plain_numbers_has_no_diameter_and_says_what_to_do():
    with pytest.raises(ValueError, match="needs bounds shaped like w"):
        _ = dpb.sets.Box(0.0, 1.0).diameter


@every_set
def test_projection_maps_over_a_batch(name):
    batch = random_points(4)
    rows = jnp.stack([project(SETS[name], w) for w in batch])
    mapped = jax.jit(jax.vmap(SETS[name].project))(batch)
    np.testing.assert_allclose(mapped, rows, atol=1e-6)


def test_numbers_of_a_set_are_traced_not_compiled_in():
    traces = []

    @jax.jit
    def shorten(ball, w):
        traces.append(None)
        return ball.project(w)

    for radius in (0.5, 2.0):
        norm = np.linalg.norm(shorten(dpb.sets.Ball(radius), jnp.full(3, 9.0)))
        assert norm == pytest.approx(radius, rel=1e-6)
    assert len(traces) == 1


@every_set
def test_projection_keeps_float64(name):
    with jax.enable_x64(True):
        w = jnp.asarray(random_points(1)[0].astype(np.float64))
        convex = jax.tree.map(lambda v: jnp.asarray(v, jnp.float64), SETS[name])
        value = jax.jit(lambda c, w: c.project(w))(convex, w)
        assert value.dtype == jnp.float64
        np.testing.assert_allclose(value, argmin(name, np.asarray(w)), atol=1e-12)


@pytest.mark.parametrize("offset", [1e3, 1e6, -1e6])
def test_simplex_projection_of_large_entries_still_sums_to_one(offset):
    w = jnp.asarray(offset + random_points(1, 0.2)[0])
    value = project(dpb.sets.Simplex(), w)
    assert float(value.sum()) == pytest.approx(1.0, abs=1e-6)
    np.testing.assert_allclose(value, argmin("simplex", np.asarray(w)), atol=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dpb.sets.Ball(0.0), "Ball: radius must be positive"),
        (lambda: dpb.sets.Ball(-1.0), "Ball: radius must be positive"),
        (lambda: dpb.sets.Ball(math.inf), "finite"),
        (lambda: dpb.sets.Ball(jnp.nan), "finite"),
        (lambda: dpb.sets.Ball(None), "got None"),
        (lambda: dpb.sets.Simplex(0.0), "Simplex: scale must be positive"),
        (lambda: dpb.sets.Box(1.0, 0.0), "lower must be at most upper"),
        (lambda: dpb.sets.Box(math.nan, 0.0), "lower must be at most upper"),
        (lambda: dpb.sets.Box(jnp.zeros(2), jnp.asarray([1.0, -1.0])), "at most upper"),
    ],
)
def test_bad_sets_are_refused_with_a_reason(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_step_by_the_entropy_multiplies_entries_and_keeps_their_sum():
    w = {"a": jnp.asarray([0.5, 1.0]), "b": jnp.asarray([0.5, 0.0])}
    update = {"a": jnp.asarray([1.0, -2.0]), "b": jnp.asarray([0.0, 3.0])}
    found = dpb.sets.Simplex(2.0, entropy=True).step(w, update)
    expected = np.asarray([0.5, 1.0, 0.5, 2e-12]) * np.exp([1.0, -2.0, 0.0, 3.0])
    expected *= 2 / expected.sum()
    np.testing.assert_allclose(np.concatenate([*found.values()]), expected, rtol=1e-5)
    both = dpb.sets.Product((dpb.sets.Simplex(2.0, entropy=True), dpb.sets.Ball(1.0)))
    mirrored, projected = both.step((w, jnp.ones(2)), (update, jnp.ones(2)))
    np.testing.assert_allclose(mirrored["a"], found["a"])
    np.testing.assert_allclose(projected, np.ones(2) / 2**0.5, rtol=1e-6)


def test_a_step_is_projected_unless_the_entropy_is_asked_for():
    w, update = jnp.asarray([0.5, 0.5]), jnp.asarray([0.2, 0.0])
    np.testing.assert_allclose(
        dpb.sets.Simplex().step(w, update), [0.6, 0.4], rtol=1e-6
    )
    far = dpb.sets.Simplex(entropy=True).step(w, jnp.asarray([1e4, 0.0]))
    np.testing.assert_allclose(far, [1.0, 0.0], atol=1e-6)  # no overflow
