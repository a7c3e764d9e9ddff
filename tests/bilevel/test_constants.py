"""Constants, what follows from them, and searches for neighbours that exceed it."""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpbilevel as dpb
from dpbilevel import audit
from dpbilevel.bilevel.certificates import certified, sensitivities
from dpbilevel.onelevel.losses import shortened
from tests.cases import slow
from tests.problems import DECLARED
from tests.zoo import two_levels as zoo

RADIUS = 0.7
N = 6
SIZES = dpb.Sizes(N, N, "overlapping")
GROUPS = jnp.asarray([0, 0, 1])
MODELS = {"logistic": dpb.Logistic(), "huber": dpb.onelevel.PseudoHuber(0.5)}
models = pytest.mark.parametrize("model", MODELS)
one_at_once = pytest.mark.parametrize(
    "model", ["logistic", pytest.param("huber", marks=pytest.mark.slow)]
)
KEY = 0


def quadratic():
    rows = jnp.asarray(np.random.default_rng(0).normal(size=(2, N, 3)))
    return zoo.quadratic_bilevel(rows[0], rows[1], radius=RADIUS)


def tuning(model, bounds=(-1.0, 1.0)):
    return dpb.linear_tuning(MODELS[model], GROUPS, bounds=bounds)


def linear_records(n=40, scale=3.0):
    rng = np.random.default_rng(1)
    label = np.sign(rng.normal(size=n))
    return {"features": scale * rng.normal(size=(n, 3)), "label": scale * label}


def test_constants_of_the_quadratic_problem_are_those_of_its_closed_form(x64):
    example = quadratic()
    constants = example.problem.constants
    gain, mu = 4 / 3, 1.5
    assert constants.upper_total == pytest.approx(gain * 3 * RADIUS)
    assert constants.error_constant == pytest.approx(gain)
    assert constants.smoothness == pytest.approx(gain**2)
    expected = 2 * (2 * constants.upper_total + gain * RADIUS / mu)
    assert constants.sensitivity_constant == pytest.approx(expected)
    # The hypergradient is linear with this slope, and so is its error in y.
    x = jnp.ones(3)
    moved = example.hypergradient(x) - example.hypergradient(0 * x)
    assert jnp.linalg.norm(moved) == pytest.approx(
        constants.smoothness * jnp.linalg.norm(x)
    )


@pytest.mark.parametrize("seed", range(5))
def test_the_sum_of_sensitivities_is_at_most_k_over_n(seed):
    whole = [name for name in DECLARED if "spread" not in name]
    values = np.random.default_rng(seed).lognormal(size=len(whole))
    chosen = dict(zip(whole, values, strict=True))
    chosen["lower_yy"] += chosen["strong_convexity"]
    constants = dpb.bilevel.SecondOrderConstants(**chosen)
    bounds = constants.bounds(SIZES)
    assert bounds.upper + bounds.lower <= constants.sensitivity_constant / N
    # The paper's bound is four times that.
    assert 4 * (bounds.upper + bounds.lower) > constants.sensitivity_constant / N


@pytest.mark.parametrize("role", ["upper", "lower"])
def test_sensitivities_of_the_quadratic_problem_are_attained(role, x64):
    example = quadratic()
    direction = jnp.asarray([RADIUS, 0.0, 0.0])

    def hypergradient(first):
        rows = jnp.zeros((N, 3)).at[0].set(first)
        levels = {"upper": jnp.zeros((N, 3)), "lower": jnp.zeros((N, 3)), role: rows}
        other = zoo.quadratic_bilevel(levels["upper"], levels["lower"], radius=RADIUS)
        return other.hypergradient(jnp.zeros(3))

    moved = jnp.linalg.norm(hypergradient(direction) - hypergradient(-direction))
    bounds = example.problem.constants.bounds(SIZES)
    assert moved == pytest.approx(getattr(bounds, role), rel=1e-12)


def test_lemma_b6_misses_the_change_of_the_implicit_derivative(x64):
    n, mu, slope, cross, factor = 100, 0.5, 2.0, 3.0, 10.0

    def hypergradient(curvatures):
        problem = dpb.BilevelProblem(
            lambda x, y, z: slope * jnp.sum(y),
            lambda x, y, z: 0.5 * z * jnp.sum(y * y) - cross * jnp.sum(x * y),
        )
        records = dpb.Levels(curvatures, curvatures)

        def objective(x):
            y = cross * x / jnp.mean(curvatures)  # the lower solution
            return dpb.debug.upper_objective(problem, x, y, records)

        return jax.grad(objective)(jnp.ones(1))[0]

    flat = jnp.full(n, mu)
    moved = hypergradient(flat) - hypergradient(flat.at[0].set(factor * mu))
    lemma = 2 * slope * cross / (mu * n)
    assert abs(moved) > 4 * lemma
    ours = dpb.bilevel.SecondOrderConstants(
        **(
            dict.fromkeys(DECLARED, 0.0)
            | {"strong_convexity": mu, "lower_yy": factor * mu, "solution_radius": 1.0}
            | {"upper_y": slope, "lower_xy": cross, "lower_y": 1.0}
            | {"lower_yy_spread": (factor - 1) * mu / 2}
        )
    )
    bound = ours.bounds(dpb.Sizes(n, n)).lower
    assert abs(moved) <= bound < 1.2 * abs(moved)


def refuted(problem, tries=300):
    records = jax.tree.map(jnp.asarray, linear_records())
    w0 = jnp.zeros(2), jnp.zeros(3)
    levels = dpb.Levels(records, records)
    key = jax.random.key(KEY)
    return dpb.debug.refute_constants(problem, w0, levels, key=key, tries=tries)


@pytest.mark.slow
@one_at_once
def test_proved_constants_are_not_refuted(model, x64):
    outcome = refuted(tuning(model))
    assert outcome.passed, str(outcome)
    assert "violated at 300 points: none" in str(outcome)


@pytest.mark.parametrize(
    ("name", "factor"),
    [
        ("strong_convexity", 1.05),
        *slow(("lower_xy", 0.9), ("lower_yy_in_y", 0.3)),
        pytest.param("upper_y", 0.5, marks=pytest.mark.slow),
        pytest.param("lower_yy_spread", 0.9, marks=pytest.mark.slow),
        pytest.param("lower_xy_in_y", 0.9, marks=pytest.mark.slow),
    ],
)
def test_a_constant_that_does_not_hold_is_refuted(name, factor, x64):
    problem = tuning("logistic")
    true = problem.constants.second_order
    wrong = dataclasses.replace(true, **{name: factor * getattr(true, name)})
    outcome = refuted(dataclasses.replace(problem, constants=wrong))
    assert outcome.violated == (name,), str(outcome)


def test_only_certificates_are_tried():
    with pytest.raises(ValueError, match="must be a certificate"):
        refuted(dataclasses.replace(tuning("logistic"), constants=None))


def test_rows_are_shortened_whatever_they_hold():
    problem = tuning("logistic")
    rows = [
        [3e38, 1.0, 0.0],
        [np.nan, 0.0, 0.0],
        [np.inf, 0, 0],
        [30, 40, 0],
        [0, 0, 0],
    ]
    for row in rows:
        record = {"features": jnp.asarray(row, jnp.float32), "label": jnp.float32(9.0)}
        gradient = jax.grad(problem.lower, 1)(jnp.zeros(2), jnp.zeros(3), record)
        assert jnp.linalg.norm(gradient) <= 0.5
    # The control: a row that can be read is read.
    assert jnp.linalg.norm(
        jax.grad(problem.lower, 1)(
            jnp.zeros(2),
            jnp.zeros(3),
            {"features": jnp.asarray([30.0, 40.0, 0.0]), "label": jnp.float32(1.0)},
        )
    ) == pytest.approx(0.5, rel=1e-5)


def exact_solution(problem, x, data, size=3):
    """The lower objective and its minimizer, by Newton's method."""

    def lower(y):
        return dpb.debug.lower_objective(problem, x, y, data)

    def newton(y, _):
        return y - jnp.linalg.solve(jax.hessian(lower)(y), jax.grad(lower)(y)), None

    return lower, jax.lax.scan(newton, jnp.zeros(size), length=12)[0]


def exact_hypergradient(problem, x, data):
    """By Newton's method and dense solves."""
    lower, y = exact_solution(problem, x, data)
    direct, right = jax.grad(
        functools.partial(dpb.debug.upper_objective, problem, data=data), (0, 1)
    )(x, y)
    v = jnp.linalg.solve(jax.hessian(lower)(y), right)

    def pull(x):
        slope = jax.grad(lambda y: dpb.debug.lower_objective(problem, x, y, data))(y)
        return slope @ v

    return direct - jax.grad(pull)(x)


def worst_neighbours(
    problem, x, role, rounds=12, count=300, hypergradient=exact_hypergradient
):
    """The largest change by one record of a level, by random search and mutation."""
    rng = np.random.default_rng(5)

    @jax.jit
    @jax.vmap
    def change(upper, lower, other):
        record = {"features": other[:3], "label": other[3]}

        def value(replaced):
            levels = {
                name: {"features": rows[:, :3], "label": rows[:, 3]}
                for name, rows in (("upper", upper), ("lower", lower))
            }
            if replaced:
                levels[role] = jax.tree.map(
                    lambda v, r: v.at[0].set(r), levels[role], record
                )
            return hypergradient(problem, x, dpb.Levels(**levels))

        return jnp.linalg.norm(value(True) - value(False))

    def rows(*shape):
        base = rng.normal(size=(*shape, 4)) * [1, 1, 1, 3]
        aligned = np.sign(base) * np.asarray([5.0, 0.0, 0.0, 3.0])
        return np.where(rng.random((*shape, 1)) < 0.5, aligned, base)

    tried = [rows(count, N), rows(count, N), rows(count)]
    scores = np.asarray(change(*tried))
    for _ in range(rounds):
        best = np.argsort(-scores)[:20]
        parents = [v[best] for v in tried]
        children = [
            np.concatenate(
                [v, *(v + rng.normal(size=v.shape) * s for s in (0.1, 0.5, 2.0))]
            )
            for v in parents
        ]
        tried, scores = children, np.asarray(change(*children))
    return float(scores.max())


@pytest.mark.slow
@one_at_once
@pytest.mark.parametrize(
    "role", ["upper", pytest.param("lower", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "x", [pytest.param((-1.0, 1.0), marks=pytest.mark.slow), (0.5, 0.3)]
)
def test_no_neighbours_are_further_apart_than_certified(model, role, x, x64):
    problem = tuning(model)
    found = worst_neighbours(problem, jnp.asarray(x), role)
    here = problem.constants.bounds(SIZES, jnp.asarray(x))
    paper = problem.constants.second_order.bounds(SIZES)
    ratio = found / float(getattr(here, role))
    assert 0.02 < ratio <= 1
    assert getattr(here, role) <= getattr(paper, role)
    if x == (0.5, 0.3):
        assert ratio > 0.1


@pytest.mark.parametrize(
    ("role", "precision"),
    [
        ("lower", "grid"),
        pytest.param("upper", "grid", marks=pytest.mark.slow),
        pytest.param("lower", "float", marks=pytest.mark.slow),
        pytest.param("upper", "float", marks=pytest.mark.slow),
    ],
)
def test_hostile_records_move_the_computed_value_no_further(role, precision):
    problem = tuning("logistic", (0.0, 1.0))
    x = jnp.asarray([0.2, 0.4])
    rng = np.random.default_rng(2)
    records = {
        "features": rng.normal(size=(5, 3)).astype(np.float32),
        "label": np.sign(rng.normal(size=5)).astype(np.float32),
    }
    sizes = dpb.Sizes(4, 4)
    others = jax.tree.map(lambda v: jnp.asarray(v[:4]), records)

    def query(rows):
        levels = {"upper": others, "lower": others, role: rows}
        value = certified.HypergradientQuery(problem, sizes)
        start = x, jnp.zeros(3)
        bounded = value.read(
            start, dpb.Levels(**levels), precision=precision, key=jax.random.key(0)
        )
        claimed = sensitivities.hypergradient_sensitivity(
            problem.constants, sizes, jnp.float32, x
        )
        half = getattr(claimed, role) / 2
        return eqx.tree_at(lambda b: b.contribution, bounded, half)

    found = audit.sensitivity_search(
        query,
        jax.tree.map(lambda v: v[:4], records),
        key=jax.random.key(KEY),
        tries=300,
        rounds=5,
    )
    assert found.passed, str(found)
    assert found.ratio > 0.1


@pytest.mark.slow
def test_declared_constants_must_make_sense():
    good = quadratic().problem.constants
    with pytest.raises(ValueError, match="upper_y must be non-negative"):
        dataclasses.replace(good, upper_y=-1.0)
    with pytest.raises(ValueError, match="must be at least strong_convexity"):
        dataclasses.replace(good, lower_yy=1.0)
    assert dataclasses.replace(good, upper_y_spread=None).upper_y_spread == good.upper_y


def test_the_problem_of_a_linear_model_refuses_other_models():
    with pytest.raises(TypeError, match="AbstractLinearModel"):
        dpb.linear_tuning(dpb.logistic_loss, GROUPS, bounds=(0.0, 1.0))


def test_an_exchanged_box_is_refused_and_a_smaller_one_is_not():
    problem = dpb.linear_tuning(dpb.Logistic(), [0, 1], bounds=(-1.0, 1.0))
    wide = dataclasses.replace(
        problem, x_set=dpb.sets.Box(-3 * jnp.ones(2), jnp.ones(2))
    )
    narrow = dataclasses.replace(problem, x_set=dpb.sets.Box(jnp.zeros(2), jnp.ones(2)))
    for other in (wide, dataclasses.replace(problem, x_set=dpb.sets.Euclidean())):
        with pytest.raises(ValueError, match=r"log-penalties must be in \[-1, 1\]"):
            other.constants.check(other)
    narrow.constants.check(narrow)
    problem.constants.check(problem)


@pytest.mark.slow
def test_derivatives_in_the_features_pass_the_shortening():
    rows = jnp.asarray([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])
    slopes = jax.vmap(jax.jacobian(lambda row: shortened(row, 1.0)))(rows)
    unit = rows[0] / 5
    np.testing.assert_allclose(
        slopes[0], (jnp.eye(2) - jnp.outer(unit, unit)) / 5, atol=1e-4
    )
    np.testing.assert_allclose(slopes[1:], jnp.stack([jnp.eye(2)] * 2))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("norm", [1e-15, 1e-3, 1.0, 1e15])
@pytest.mark.parametrize("size", [1e-40, 1.7e-4, 1.0, 6e4, 1e38])
def test_no_row_is_longer_than_its_public_norm(dtype, norm, size):
    with np.errstate(over="ignore"):
        row = np.full(1000, size).astype(dtype)
    found = np.asarray(shortened(jnp.asarray(row), norm), np.float64)
    assert np.isfinite(found).all()
    assert np.linalg.norm(found) <= norm
    if np.isfinite(row).all() and np.linalg.norm(row.astype(np.float64)) <= norm / 2:
        np.testing.assert_allclose(found, row.astype(np.float64), rtol=1e-6, atol=2e-38)


@pytest.mark.parametrize(
    "dtypes",
    [("f2", "f4"), ("f4", "f2"), ("bfloat16", "f4"), ("f2", "f2"), ("f4", "f8")],
)
def test_starts_of_mixed_or_half_precision_are_refused(dtypes):
    # Promotion would compute in the coarser dtype and count the finer one's rounding.
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        example = zoo.quadratic_bilevel(
            jnp.zeros((8, 2)), jnp.zeros((8, 2)), radius=1.0
        )
        solver = dpb.ImplicitBilevel(2, step_size=0.1).with_noise(1.0)
        start = tuple(jnp.zeros(2, dtype) for dtype in dtypes)
        with pytest.raises(ValueError, match=r"float32 or (all )?float64"):
            dpb.solve(
                example.problem, solver, example.data, start, key=jax.random.key(0)
            )


@pytest.mark.slow
def test_records_are_read_in_the_dtype_of_the_variables():
    with jax.enable_x64(True):
        rows = jnp.asarray(np.random.default_rng(0).normal(size=(8, 2)), jnp.float16)
        values = [
            certified_value(rows.astype(dtype), jnp.float64)
            for dtype in (jnp.float16, jnp.float64)
        ]
    np.testing.assert_array_equal(*values)


def certified_value(rows, dtype):
    example = zoo.quadratic_bilevel(rows, rows, radius=1.0)
    data = dpb.Levels(rows, rows)
    sizes = example.problem.sizes_of(data)
    start = jnp.zeros(2, dtype)
    query = certified.HypergradientQuery(example.problem, sizes)
    read = jax.jit(
        lambda w, data: (
            query.read(w, data, precision="float", key=jax.random.key(0)).raw
        )
    )
    return read((start, start), data)


@pytest.mark.parametrize("groups", [[[0], [0]], 0, [0, 0, 0]])
def test_groups_of_another_shape_than_y_are_refused(groups):
    # They would broadcast, and the proof is about one penalty per coefficient.
    def penalty():
        problem = dpb.linear_tuning(dpb.Logistic(), groups, bounds=(0.0, 1.0))
        return problem.lower_public(jnp.zeros(1), jnp.zeros(2))

    with pytest.raises(ValueError, match="groups must"):
        penalty()


def test_constants_of_an_exchanged_zoo_problem_are_refused():
    example = zoo.quadratic_bilevel(jnp.zeros((8, 2)), jnp.zeros((8, 2)), radius=1.0)
    other = dataclasses.replace(example.problem, lower=lambda x, y, z: jnp.sum(y * z))
    with pytest.raises(ValueError, match="was exchanged"):
        other.constants.check(other)
    example.problem.constants.check(example.problem)
