"""Lower solutions and hypergradients: derivatives of every kind, and refusals."""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpbilevel as dpb
from dpbilevel.oracles import objectives
from tests.cases import slow


@pytest.fixture
def double():
    with jax.enable_x64(True):
        yield


def logistic(n=60, d=4):
    """Penalty tuning of a logistic regression: x has one log-penalty per feature."""
    rng = np.random.default_rng(3)
    features = rng.normal(size=(n, d))
    label = np.sign(features @ rng.normal(size=d) + rng.normal(size=n))
    rows = {"features": jnp.asarray(features), "label": jnp.asarray(label)}
    half = n // 2
    data = dpb.Levels(
        jax.tree.map(lambda v: v[:half], rows), jax.tree.map(lambda v: v[half:], rows)
    )
    problem = dpb.penalty_tuning(dpb.logistic_loss, jnp.arange(d))
    return problem, data, jnp.linspace(-2.0, 0.0, d), jnp.zeros(d)


def weighted(n=40, d=3):
    """Source weights with logits: x meets the lower level's records."""
    problem, data, _, y0 = logistic(n, d)
    lower = data.lower | {"source": jnp.arange(len(data.lower["label"])) % 4}
    problem = dpb.source_weighting(dpb.logistic_loss, 4, ridge=0.1)
    return problem, dpb.Levels(data.upper, lower), jnp.linspace(-0.5, 0.5, 4), y0


CASES = {"penalty": logistic, "sources": weighted}
SOLVERS = {
    "newton": dpb.oracles.NewtonCG(tolerance=1e-11),
    "lbfgs": dpb.oracles.LBFGS(tolerance=1e-11),
    "accelerated": dpb.oracles.AcceleratedGradient(tolerance=1e-11),
}
solvers = pytest.mark.parametrize("name", ["newton", "accelerated", *slow("lbfgs")])
EXACT = {
    "solver": dpb.oracles.AcceleratedGradient(5000, 0.5, 0.7, 1e-12),
    "linear_solver": dpb.oracles.ConjugateGradient(tolerance=1e-13),
}


# Operation by operation they take ten times as long.
lower_solution, lower_solve, implicit_hypergradient = map(
    eqx.filter_jit,
    (
        dpb.oracles.lower_solution,
        dpb.oracles.lower_solve,
        dpb.oracles.implicit_hypergradient,
    ),
)
unrolled_hypergradient = eqx.filter_jit(dpb.oracles.unrolled_hypergradient)
penalty_hypergradient = eqx.filter_jit(dpb.oracles.penalty_hypergradient)


def hyper_objective(problem, data, y0, x, **settings):
    y = dpb.oracles.lower_solution(problem, x, data, y0=y0, **(EXACT | settings))
    return objectives.upper_objective(problem, data).value(x, y)


def central_difference(fun, x, step=1e-5):
    rows = step * np.eye(x.size)
    return np.stack([(fun(x + row) - fun(x - row)) / (2 * step) for row in rows])


def relative(a, b):
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


LINEAR = {
    "conjugate": dpb.oracles.ConjugateGradient(tolerance=1e-12),
    "cholesky": dpb.oracles.Cholesky(),
    "fixed": dpb.oracles.ConjugateGradient(tolerance=None, num_steps=30),
    "neumann": dpb.oracles.Neumann(5000, 0.5),
}


@pytest.mark.parametrize("case", ["sources", *slow("penalty")])
@pytest.mark.parametrize(
    "names", [("conjugate", "cholesky"), *slow((("fixed", "neumann"),))]
)
def test_hypergradients_agree_with_central_differences(case, names, double):
    problem, data, x, y0 = CASES[case]()
    objective = jax.jit(functools.partial(hyper_objective, problem, data, y0))
    expected = central_difference(objective, x)
    assert relative(jax.jit(jax.grad(objective))(x), expected) < 1e-6
    y = lower_solution(problem, x, data, y0=y0, **EXACT)
    for name in names:
        solve = functools.partial(
            dpb.oracles.implicit_hypergradient, problem, linear_solver=LINEAR[name]
        )
        gradient, solution = jax.jit(solve)(x, y, data)
        assert relative(gradient, expected) < 1e-6
        assert solution.residual_norm < 1e-8


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_unrolled_and_penalized_ones_agree_too(case, double):
    problem, data, x, y0 = CASES[case]()
    objective = jax.jit(functools.partial(hyper_objective, problem, data, y0))
    expected = central_difference(objective, x)
    steps = dpb.oracles.AcceleratedGradient(300, 0.5, 0.7, tolerance=None)
    unrolled = unrolled_hypergradient(problem, x, data, solver=steps, y0=y0)
    assert relative(unrolled, expected) < 1e-6
    penalized = penalty_hypergradient(
        problem,
        x,
        data,
        penalty=1e4,
        solver=dpb.oracles.NewtonCG(tolerance=1e-12),
        y0=y0,
    )
    assert relative(penalized, expected) < 1e-3


@solvers
def test_solvers_find_the_solution_and_say_so(name, double):
    problem, data, x, y0 = logistic()
    y, info = jax.jit(
        functools.partial(dpb.oracles.lower_solve, problem, solver=SOLVERS[name], y0=y0)
    )(x, data)
    objective = objectives.lower_objective(problem, data)
    gradient = jax.jit(lambda x, y: objective.gradient(x, y))(x, y)
    assert info.converged
    np.testing.assert_allclose(info.gradient_norm, np.linalg.norm(gradient), atol=1e-14)
    exact = dpb.debug.lower_solution(problem, x, y0, data)
    np.testing.assert_allclose(y, exact, atol=1e-7)


@solvers
def test_an_unconverged_solve_says_so(name):
    problem, data, x, y0 = logistic()
    solver = dataclasses.replace(SOLVERS[name], num_steps=1)
    _, info = lower_solve(problem, x, data, solver=solver, y0=y0)
    assert not info.converged
    assert info.gradient_norm > 1e-3
    assert info.num_steps == 1


@pytest.mark.parametrize(
    "solver", [dpb.oracles.NewtonCG(), dpb.oracles.LBFGS()], ids=["newton", "lbfgs"]
)
def test_single_precision_converges(solver):
    problem, data, x, y0 = logistic(4000)
    _, info = lower_solve(problem, x, data, solver=solver, y0=y0)
    assert info.converged
    assert info.num_steps < 40


@pytest.mark.slow
def test_second_derivatives_in_both_modes_and_under_vmap(double):
    problem, data, x, y0 = logistic()
    objective = functools.partial(hyper_objective, problem, data, y0)
    single = jax.jit(jax.grad(objective))
    expected = central_difference(single, x)
    for hessian in (
        jax.hessian(objective),
        jax.jacrev(jax.jacrev(objective)),
    ):
        assert relative(jax.jit(hessian)(x), expected) < 1e-6
    direction = jnp.ones_like(x)
    slope = jax.jit(lambda x: jax.jvp(objective, (x,), (direction,))[1])(x)
    np.testing.assert_allclose(slope, single(x) @ direction, rtol=1e-9)
    points = jnp.stack([x, x - 1, x + 0.5])
    batched = jax.jit(jax.vmap(single))(points)
    for row, point in zip(batched, points, strict=True):
        np.testing.assert_allclose(row, single(point), rtol=1e-8)


@pytest.mark.slow
def test_closures_over_the_outer_variable_and_the_data(double):
    problem, data, x, y0 = logistic()

    @jax.jit
    def closed(x, scale):
        inner = dpb.BilevelProblem(
            problem.upper,
            lambda _, y, record: scale * problem.lower(x, y, record),
            lower_public=lambda _, y: problem.lower_public(x, y),
        )
        return hyper_objective(inner, data, y0, x)

    scale = jnp.asarray(1.5)
    for place in (0, 1):
        found = jax.jit(jax.grad(closed, place))(x, scale)
        step = 1e-5
        if place == 1:
            expected = (closed(x, scale + step) - closed(x, scale - step)) / (2 * step)
        else:
            expected = central_difference(lambda x: closed(x, scale), x)
        np.testing.assert_allclose(found, expected, rtol=1e-6)

    @jax.jit
    def moved(shift):
        lower = data.lower | {"features": data.lower["features"] + shift}
        return hyper_objective(problem, dpb.Levels(data.upper, lower), y0, x)

    expected = (moved(1e-5) - moved(-1e-5)) / 2e-5
    np.testing.assert_allclose(jax.jit(jax.grad(moved))(0.0), expected, rtol=1e-6)


@pytest.mark.slow
def test_the_implicit_hypergradient_is_itself_differentiable(double):
    problem, data, x, y0 = logistic()

    def gradient(x):
        y = dpb.oracles.lower_solution(problem, x, data, y0=y0, **EXACT)
        return dpb.oracles.implicit_hypergradient(
            problem,
            x,
            y,
            data,
            linear_solver=dpb.oracles.ConjugateGradient(tolerance=1e-13),
        )[0]

    expected = central_difference(jax.jit(gradient), x)
    assert relative(jax.jit(jax.jacrev(gradient))(x), expected) < 1e-6
    assert relative(jax.jit(jax.jacfwd(gradient))(x), expected) < 1e-6


@pytest.mark.slow
def test_pieces_of_the_records_change_nothing(double, monkeypatch):
    problem, data, x, y0 = weighted()
    y = dpb.oracles.lower_solution(problem, x, data, y0=y0, **EXACT)

    def answers():
        lower = objectives.lower_objective(problem, data)
        objective = functools.partial(hyper_objective, problem, data, y0)
        cholesky = {"linear_solver": dpb.oracles.Cholesky()}
        return (
            lower.value_and_gradient(x, y),
            lower.gradient(x, y, "x"),
            dpb.oracles.implicit_hypergradient(problem, x, y, data, **cholesky)[0],
            jax.jit(jax.jacrev(jax.grad(objective)))(x),
        )

    whole = answers()
    # Not a divisor of the rows: the last piece reaches back and masks.
    size = sum(v.nbytes for v in jax.tree.leaves(data.lower)) // 3 + 1
    monkeypatch.setattr(objectives, "_BYTES", {})
    monkeypatch.setattr(objectives, "_BYTES_ACCELERATOR", (0, size))
    pieces = answers()
    jax.tree.map(
        lambda u, v: np.testing.assert_allclose(u, v, rtol=1e-8, atol=1e-12),
        whole,
        pieces,
    )


def test_a_linearization_keeps_no_copy_of_long_records(monkeypatch):
    monkeypatch.setattr(objectives, "_BYTES", {})
    monkeypatch.setattr(objectives, "_BYTES_ACCELERATOR", (0, 4000))
    problem, data, x, y0 = logistic(4000, 8)
    objective = objectives.lower_objective(problem, data)

    def kept(y):
        *_, product = objective.linearize(x, y)
        return jax.closure_convert(product, y)[1]

    sizes = [v.size for v in jax.eval_shape(kept, y0)]
    assert sum(sizes) < data.lower["features"].size


def rounded_products(fun, x):
    """The products of matrices in `fun` over two x that are not in full precision.

    Inner products do not count: accelerators round the factors of matrices alone.
    """

    def equations(jaxpr):
        for equation in jaxpr.eqns:
            yield equation
            for inner in jax.extend.core.jaxprs_in_params(equation.params):
                yield from equations(inner)

    def is_rounded(equation):
        if equation.primitive is not jax.lax.dot_general_p:
            return False
        contracted, batch = equation.params["dimension_numbers"]
        used = [len(c) + len(b) for c, b in zip(contracted, batch, strict=True)]
        rows = [v.aval.ndim - n for v, n in zip(equation.invars, used, strict=True)]
        highest = (jax.lax.Precision.HIGHEST,) * 2
        return any(rows) and equation.params["precision"] != highest

    both = jax.make_jaxpr(jax.vmap(fun))(jnp.stack([x, x]))
    return sum(map(is_rounded, equations(both.jaxpr)))


@pytest.mark.parametrize("case", ["penalty", *slow("sources")])
def test_no_oracle_multiplies_matrices_in_reduced_precision(case):
    problem, data, x, y0 = CASES[case]()

    def objective(x):
        y = dpb.oracles.lower_solution(problem, x, data, y0=y0)
        return objectives.upper_objective(problem, data).value(x, y)

    def implicit(x):
        solver = dpb.oracles.Cholesky()
        return dpb.oracles.implicit_hypergradient(
            problem, x, y0, data, linear_solver=solver
        )[0]

    # Derivatives from outside of `jax.jit` are traced when the oracle has returned.
    for fun in (objective, jax.grad(jax.jit(objective)), jax.hessian(objective)):
        assert rounded_products(fun, x) == 0
    assert rounded_products(implicit, x) == 0
    # The control: the same loss in the precision that JAX takes by default.
    losses = jax.vmap(dpb.logistic_loss, in_axes=(None, 0))
    assert rounded_products(lambda y: losses(y, data.upper), y0) == 1


@pytest.mark.slow
def test_a_warm_start_takes_fewer_products():
    problem, data, x, y0 = logistic()
    y = lower_solution(problem, x, data, y0=y0)
    _, cold = implicit_hypergradient(problem, x, y, data)
    _, warm = implicit_hypergradient(problem, x, y, data, v0=cold.value)
    assert warm.num_products == 1 < cold.num_products


@pytest.mark.slow
def test_an_extrapolated_start_halves_the_products_of_a_trajectory():
    problem, data, x, y = logistic(200, 20)

    @jax.jit
    def step(x, y, solutions):
        y = dpb.oracles.lower_solution(problem, x, data, y0=y)
        exact, _ = dpb.oracles.implicit_hypergradient(
            problem, x, y, data, linear_solver=dpb.oracles.Cholesky()
        )
        starts = [dpb.oracles.extrapolate(solutions[:k]) for k in range(4)]
        found = [
            dpb.oracles.implicit_hypergradient(problem, x, y, data, v0=v0)
            for v0 in starts
        ]
        counts = jnp.stack([v.num_products for _, v in found])
        return exact, y, found[-1][1].value, counts, [g - exact for g, _ in found]

    solutions = 3 * [jnp.zeros_like(y)]
    total, step_size = 0, None
    for _ in range(20):
        exact, y, v, counts, wrong = step(x, y, solutions)
        solutions = [v, *solutions][:3]
        step_size = step_size or 0.05 / jnp.max(jnp.abs(exact))
        x = x - step_size * exact
        total = total + counts
        assert np.linalg.norm(wrong, axis=1).max() < 1e-4 * np.linalg.norm(exact)
    assert list(total) == sorted(total, reverse=True)
    assert 2 * total[3] <= total[0]


def test_extrapolation_is_exact_on_polynomials_and_keeps_dtypes():
    square = {"a": jnp.asarray([1.0, 2.0]), "b": jnp.ones(3, jnp.bfloat16)}
    at = [jax.tree.map(lambda v, t=t: v * t**2, square) for t in (3, 2, 1, 0)]
    assert dpb.oracles.extrapolate([]) is None
    for count, exact in ((1, False), (2, False), (3, True)):
        found = dpb.oracles.extrapolate(at[1 : 1 + count])
        assert bool(jnp.all(found["a"] == at[0]["a"])) == exact
        assert bool(jnp.all(found["b"] == at[0]["b"])) == exact
        assert found["b"].dtype == jnp.bfloat16


@pytest.mark.slow
def test_a_module_is_a_lower_variable(double):
    rng = np.random.default_rng(1)
    rows = {"a": jnp.asarray(rng.normal(size=(30, 2))), "b": jnp.arange(30.0) / 30}
    model = eqx.nn.MLP(2, "scalar", 3, 1, jnp.tanh, key=jax.random.key(0))

    def loss(_, model, record):
        return (model(record["a"]) - record["b"]) ** 2

    def ridge(x, model):
        leaves = jax.tree.leaves(eqx.filter(model, eqx.is_array))
        return jnp.exp(x) * sum(jnp.sum(leaf**2) for leaf in leaves)

    problem = dpb.BilevelProblem(loss, loss, lower_public=ridge)
    data, x = dpb.Levels(rows, rows), jnp.asarray(0.5)

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def objective(x):
        solver = dpb.oracles.NewtonCG(tolerance=1e-12)
        y = dpb.oracles.lower_solution(
            problem, x, data, y0=model, **EXACT | {"solver": solver}
        )
        return objectives.upper_objective(problem, data).value(x, y), y.layers

    (_, layers), gradient = objective(x)
    (above, _), _ = objective(x + 1e-5)
    (below, _), _ = objective(x - 1e-5)
    expected = (above - below) / 2e-5
    np.testing.assert_allclose(gradient, expected, rtol=1e-6)
    found = eqx.tree_at(lambda model: model.layers, model, layers)
    again, v = implicit_hypergradient(problem, x, found, data)
    np.testing.assert_allclose(again, expected, rtol=1e-4)
    assert isinstance(v.value, eqx.nn.MLP)


@pytest.mark.slow
def test_an_accelerated_gradient_of_fixed_count_keeps_its_bound(double):
    problem, data, x, y0 = logistic()
    mu, smoothness = float(np.exp(-2.0)), float(np.exp(0.0)) + 2.0
    exact = lower_solution(problem, x, data, y0=y0, **EXACT)
    for steps in (5, 20, 80):
        solver = dpb.oracles.AcceleratedGradient.from_constants(
            steps, smoothness=smoothness, strong_convexity=mu
        )
        y, info = lower_solve(problem, x, data, solver=solver, y0=y0)
        kappa = smoothness / mu
        bound = np.sqrt(kappa + 1) * (1 - kappa**-0.5) ** (steps / 2)
        assert np.linalg.norm(y - exact) <= bound * np.linalg.norm(exact)
        assert info.num_steps == steps
        assert not info.converged


@pytest.mark.slow
def test_a_projected_solve_has_a_value_but_no_implicit_derivative(double):
    problem, data, x, y0 = logistic()
    problem = dataclasses.replace(problem, y_set=dpb.sets.Ball(0.3))
    solver = dpb.oracles.AcceleratedGradient(tolerance=1e-9)
    y, info = lower_solve(problem, x, data, solver=solver, y0=y0)
    assert info.converged
    assert abs(np.linalg.norm(y) - 0.3) < 1e-8
    with pytest.raises(ValueError, match="inside y_set only"):
        jax.grad(
            lambda x: lower_solution(problem, x, data, solver=solver, y0=y0).sum()
        )(x)
    with pytest.raises(ValueError, match="inside y_set"):
        implicit_hypergradient(problem, x, y, data)
    with pytest.raises(ValueError, match="or use Euclidean"):
        lower_solution(problem, x, data, y0=y0)
    steps = dpb.oracles.AcceleratedGradient(300, 0.5, 0.7, tolerance=None)
    unrolled = unrolled_hypergradient(problem, x, data, solver=steps, y0=y0)
    penalized = penalty_hypergradient(
        problem, x, data, penalty=1e4, solver=solver, y0=y0
    )
    assert np.linalg.norm(unrolled - penalized) < 1e-3


def test_refusals_say_what_to_do():
    problem, data, x, y0 = logistic()
    with pytest.raises(ValueError, match="needs a step_size"):
        dpb.oracles.AcceleratedGradient(10, tolerance=None)
    with pytest.raises(ValueError, match="exceeds smoothness"):
        dpb.oracles.AcceleratedGradient.from_constants(
            5, smoothness=1.0, strong_convexity=2.0
        )
    with pytest.raises(ValueError, match="tolerance=None"):
        dpb.oracles.unrolled_hypergradient(
            problem, x, data, solver=dpb.oracles.AcceleratedGradient(), y0=y0
        )
