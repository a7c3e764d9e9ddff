import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpbilevel as dpb
from dpbilevel.bilevel.levels import penalized_level
from tests.cases import slow
from tests.problems import ridge_tuning
from tests.zoo import two_levels as zoo

RECORDS = jnp.asarray(np.random.default_rng(0).normal(size=(20, 3)), jnp.float32)
W0 = (jnp.zeros(3), jnp.zeros(3))
LEVELS = dpb.Levels(RECORDS, RECORDS)
SOLVER = dpb.PenaltyBilevel(
    2, 1.0, dpb.NoisyGD(2, 1.0, step_size=0.1), step_size=0.1
).with_noise(1.0)


def bare(x, y, z):
    return jnp.sum((y - z) ** 2)


def with_x(x, y, z):
    return jnp.sum((y - z) ** 2) * jnp.sum(x)


def hidden_x(x, y, z):
    scaled, _ = jax.lax.scan(lambda c, v: (c + v, None), jnp.zeros(()), x)
    return jax.jit(lambda s: s * jnp.sum(y * z))(scaled)


def run(problem, data=LEVELS, w0=W0):
    return dpb.solve(problem, SOLVER, data, w0, key=jax.random.key(0))


@pytest.mark.parametrize(
    ("upper", "lower", "readers"),
    [
        (bare, bare, ()),
        (bare, with_x, ("lower",)),
        (hidden_x, bare, ("upper",)),
        (hidden_x, with_x, ("upper", "lower")),
    ],
)
def test_tracing_decides_which_records_meet_x(upper, lower, readers):
    problem = dpb.BilevelProblem(upper, lower).traced(W0, LEVELS)
    assert problem.x_in_records == readers


@pytest.mark.parametrize("lower", [with_x, hidden_x])
def test_a_false_claim_that_x_is_public_is_refused(lower):
    problem = dpb.BilevelProblem(bare, lower, x_in_records=False)
    with pytest.raises(ValueError, match=r"losses of \['lower'\] read x"):
        run(problem)


@pytest.mark.slow
def test_fit_drops_the_outer_release_by_tracing():
    problem = dpb.BilevelProblem(
        bare, bare, lower_public=lambda x, y: jnp.sum(jnp.exp(x) * y**2)
    )
    result = dpb.fit(
        problem,
        SOLVER,
        dpb.Levels(RECORDS, RECORDS + 0),
        W0,
        budget=dpb.PrivacyBudget(1.0, 1e-4),
        people="disjoint",
        key=jax.random.key(0),
    )
    assert not [r for r in result.report.ledger if "outer" in r.release]


def test_people_defaults_to_the_careful_reading():
    problem = dpb.BilevelProblem(bare, bare)
    assert problem.sizes_of(LEVELS).people is dpb.People.OVERLAPPING
    shared = dpb.Levels.shared(RECORDS)
    assert problem.sizes_of(shared).people is dpb.People.SHARED


def test_shared_data_cannot_be_called_disjoint():
    problem = dpb.BilevelProblem(bare, bare)
    with pytest.raises(ValueError, match="contradicts the data"):
        problem.sizes_of(dpb.Levels.shared(RECORDS), "disjoint")
    with pytest.raises(ValueError, match="contradicts the data"):
        problem.sizes_of(LEVELS, "shared")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 5), "upper must be an integer of at least 1"),
        ((5, 5.0), "lower must be an integer"),
        ((5, 5, "strangers"), "people must be one of"),
        ((5, 6, "shared"), "shared levels differ"),
    ],
)
def test_bad_sizes_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        dpb.Sizes(*arguments)


def test_data_that_are_not_levels_are_refused():
    with pytest.raises(TypeError, match=r"Levels\(upper=..., lower=...\)"):
        run(dpb.BilevelProblem(bare, bare), data=(RECORDS, RECORDS))


def test_start_that_is_no_pair_is_refused():
    with pytest.raises(ValueError, match=r"pair \(x, y\)"):
        run(dpb.BilevelProblem(bare, bare), w0=jnp.zeros(3))


def test_a_loss_over_the_batch_is_refused():
    problem = dpb.BilevelProblem(lambda x, y, z: y - z, bare)
    with pytest.raises(ValueError, match="upper must return one floating-point scalar"):
        run(problem)


def test_unknown_level_in_x_in_records_is_refused():
    with pytest.raises(ValueError, match="x_in_records must be one of"):
        dpb.BilevelProblem(bare, bare, x_in_records=("inner",))


def test_x_and_y_of_a_one_level_solution_are_refused():
    solution = dpb.Solution(jnp.zeros(3))
    with pytest.raises(AttributeError, match=r"use \.value"):
        _ = solution.x


def zoo_examples():
    rng = np.random.default_rng(1)
    batch = {
        "features": jnp.asarray(rng.normal(size=(30, 4))),
        "label": jnp.asarray(rng.normal(size=30)),
    }
    return {
        "quadratic": zoo.quadratic_bilevel(
            jnp.asarray(rng.normal(size=(9, 4))), jnp.asarray(rng.normal(size=(8, 4)))
        ),
        "ridge": ridge_tuning(batch, batch),
        "leak": zoo.leak(jnp.asarray(rng.normal(size=(9, 4)))),
        "hard": zoo.hard_instance(jnp.asarray(rng.choice([-0.5, 0.5], size=(9, 4)))),
        "wide x": zoo.hard_instance(
            jnp.asarray(rng.normal(size=(9, 4))), dimension_x=6
        ),
        "wide y": zoo.hard_instance(
            jnp.asarray(rng.normal(size=(9, 4))), dimension_x=2
        ),
    }


ZOO = pytest.mark.parametrize(
    "name", ["quadratic", "ridge", "leak", "hard", "wide x", "wide y"]
)


@ZOO
def test_zoo_lower_solutions_are_stationary(name):
    with jax.enable_x64(True):
        example = zoo_examples()[name]
        x = 0.1 * jnp.ones_like(example.w0[0])
        problem, data, penalty = example.problem, example.data, 50.0
        y, z = example.lower_solution(x), example.penalized_solution(x, penalty)

        def penalized(y):
            lower = dpb.debug.lower_objective(problem, x, y, data)
            upper = dpb.debug.upper_objective(problem, x, y, data)
            return upper / penalty + lower

        lower = jax.grad(lambda y: dpb.debug.lower_objective(problem, x, y, data))
        np.testing.assert_allclose(lower(y), 0, atol=1e-12)
        np.testing.assert_allclose(jax.grad(penalized)(z), 0, atol=1e-12)


@ZOO
def test_zoo_hypergradients_equal_finite_differences(name):
    with jax.enable_x64(True):
        example = zoo_examples()[name]
        x = 0.1 * jnp.ones_like(example.w0[0])

        def objective(x):
            y = example.lower_solution(x)
            return dpb.debug.upper_objective(example.problem, x, y, example.data)

        np.testing.assert_allclose(objective(x), example.hyper_objective(x), rtol=1e-12)
        steps = 1e-5 * jnp.eye(x.size)
        slopes = [(objective(x + s) - objective(x - s)) / 2e-5 for s in steps]
        np.testing.assert_allclose(slopes, example.hypergradient(x), rtol=1e-7)


@ZOO
def test_zoo_claims_about_x_survive_tracing(name):
    example = zoo_examples()[name]
    traced = example.problem.traced(example.w0, example.data)
    assert traced.x_in_records == example.problem.x_in_records


def test_debug_hyper_objective_solves_the_lower_level_exactly():
    with jax.enable_x64(True):
        example = zoo_examples()["ridge"]
        x = jnp.asarray([-1.0])
        found = dpb.debug.hyper_objective(
            example.problem, x, *example.w0[1:], example.data
        )
        # Steps that change values by their rounding, 1e-16, change y by its root.
        np.testing.assert_allclose(found, example.hyper_objective(x), rtol=2e-9)


def test_the_exact_hypergradient_at_zero_is_the_mean_of_the_data():
    example = zoo.leak(RECORDS)
    np.testing.assert_allclose(example.hypergradient(jnp.zeros(3)), RECORDS.mean(0))


def test_the_private_solver_does_not_publish_the_mean_of_the_data():
    example = zoo.leak(RECORDS)
    mean = RECORDS.mean(0)[None]
    inner = dpb.NoisyGD(10, 2.0, step_size=0.3)
    solver = dpb.PenaltyBilevel(
        1, 10.0, inner, step_size=1.0, output=dpb.outputs.Last()
    )

    sizes = example.problem.sizes_of(example.data, "disjoint")
    budget = dpb.PrivacyBudget(1.0, 1e-5)
    plan = dpb.calibrate(example.problem, solver, budget, sizes=sizes)

    @jax.jit
    @jax.vmap
    def found(key):
        run = dpb.solve(example.problem, plan.solver, example.data, example.w0, key=key)
        return -run.value[0]

    found = found(jax.random.split(jax.random.key(0), 8))
    spread = jnp.std(found, axis=0)
    assert bool(jnp.all(jnp.abs(found - mean) > 1e-4))
    assert bool(jnp.all(spread > 0.3))


RELATIONS = {
    "replace": dpb.Neighbours.REPLACE_ONE,
    "add_or_remove": dpb.Neighbours.ADD_OR_REMOVE_ONE,
}


FULL = dpb.FullBatch()


def planned(relation, people, sampling=FULL):
    inner = dpb.NoisyGD(2, 1.0, step_size=0.1, sampling=sampling)
    solver = dpb.PenaltyBilevel(2, 1.0, inner, step_size=0.1)
    solver = solver.with_neighbours(RELATIONS[relation])
    return solver.with_noise(1.0).with_sizes(dpb.Sizes(20, 20, people))


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize(
    ("people", "data"),
    [("disjoint", dpb.Levels.shared(RECORDS)), ("shared", LEVELS)],
)
def test_plan_and_data_must_agree_on_sharing(relation, people, data):
    problem, solver = dpb.BilevelProblem(bare, bare), planned(relation, people)
    with pytest.raises(ValueError, match="contradicts the data"):
        dpb.solve(problem, solver, data, W0, key=jax.random.key(0))


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [dpb.FullBatch(), *slow(dpb.Poisson(0.3))])
@pytest.mark.parametrize("empty", ["upper", *slow("lower")])
def test_an_empty_level_runs_where_the_number_of_records_is_private(sampling, empty):
    problem = dpb.BilevelProblem(with_x, with_x)
    parts = {"upper": RECORDS, "lower": RECORDS + 0} | {empty: RECORDS[:0]}
    solver = planned("add_or_remove", "disjoint", sampling)
    found = dpb.solve(problem, solver, dpb.Levels(**parts), W0, key=jax.random.key(0))
    assert bool(jnp.isfinite(found.x).all())


ONE_LEVEL = dpb.FiniteSum(lambda w, z: jnp.sum((w - z) ** 2))
TWO_LEVELS = dpb.BilevelProblem(bare, bare)
SGD = dpb.NoisyGD(2, 1.0, step_size=0.1)
BUDGET = dpb.PrivacyBudget(1.0, 1e-5)


@pytest.mark.parametrize(
    ("arguments", "sizes", "message"),
    [
        ((ONE_LEVEL, SGD, (1.0, 1e-5)), 5, "budget must be an instance of Privacy"),
        ((TWO_LEVELS, SOLVER, BUDGET), (5, 5), "sizes must be an instance of Sizes"),
        ((TWO_LEVELS, SGD, BUDGET), dpb.Sizes(5, 5), "NoisyGD solves a FiniteSum"),
        ((ONE_LEVEL, SOLVER, BUDGET), 5, "PenaltyBilevel solves a BilevelProblem"),
        ((SOLVER, TWO_LEVELS, BUDGET), 5, "solver must be an instance of"),
    ],
)
def test_calibrate_names_the_argument_of_the_wrong_kind(arguments, sizes, message):
    with pytest.raises(TypeError, match=message):
        dpb.calibrate(*arguments, sizes=sizes)


def test_a_plan_in_place_of_its_solver_is_named():
    plan = dpb.calibrate(ONE_LEVEL, SGD, BUDGET, sizes=20)
    with pytest.raises(TypeError, match=r"pass plan\.solver"):
        dpb.solve(ONE_LEVEL, plan, RECORDS, W0[0], key=jax.random.key(0))


def test_a_two_level_solver_as_inner_solver_is_refused():
    with pytest.raises(TypeError, match="must solve a one-level problem"):
        dpb.PenaltyBilevel(2, 1.0, SOLVER, step_size=0.1)


def test_words_among_the_records_are_refused_without_being_shown():
    secret = np.asarray(["alice"] * 20)
    with pytest.raises(ValueError, match="must be a numeric array") as refused:
        dpb.solve(ONE_LEVEL, SGD, secret, W0[0], key=jax.random.key(0))
    assert "alice" not in str(refused.value)


@pytest.mark.parametrize("start", [jnp.zeros(3, jnp.int32), {"w": 1}, "w"])
def test_a_start_that_is_not_floating_point_is_refused(start):
    with pytest.raises(ValueError, match="must be a floating-point array"):
        dpb.solve(ONE_LEVEL, SGD, RECORDS, start, key=jax.random.key(0))


def test_an_error_inside_a_loss_says_which_loss_and_which_shapes():
    problem = dpb.BilevelProblem(bare, lambda x, y, z: y @ z["features"])
    with pytest.raises(TypeError, match=r"lower fails for x .*, record float32\[3\]: "):
        run(problem)


def test_a_field_that_records_lack_is_named_with_those_they_have():
    problem = dpb.FiniteSum(lambda w, z: w @ z["age"])
    with pytest.raises(ValueError, match=r"record\['bmi'\] float.* KeyError: 'age'\. "):
        problem.check(W0[1], {"bmi": RECORDS})


def test_bad_terms_and_sets_are_refused_at_construction():
    with pytest.raises(TypeError, match="upper must be a function"):
        dpb.BilevelProblem(3, bare)
    with pytest.raises(TypeError, match="x_set must be an instance of AbstractSet"):
        dpb.BilevelProblem(bare, bare, x_set=dpb.sets.Simplex)
    with pytest.raises(TypeError, match="sampling must be an instance of"):
        dpb.NoisyGD(2, 1.0, step_size=0.1, sampling="poisson")


BUDGET = dpb.PrivacyBudget(1.0, 1e-5)
SMALL_BOX = dpb.sets.Box(jnp.zeros(5), jnp.ones(5))
BAD_ARGUMENTS = {
    "data that are no levels": ({"data": (RECORDS, RECORDS)}, r"dpb\.Levels\("),
    "a start that is no pair": ({"w0": jnp.zeros(3)}, r"w0 must be a pair \(x, y\)"),
    "a start of words": ({"w0": ("a", "b")}, r"w0\[0\] must be a floating-point"),
    "a start of NaN": ({"w0": (W0[0], W0[1] * jnp.nan)}, r"w0\[1\] holds NaN"),
    "a set of another size": (
        {"problem": dpb.BilevelProblem(bare, with_x, x_set=SMALL_BOX)},
        r"x_set=Box.* does not fit a point of shape float32\[3\]",
    ),
}


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_fit_names_what_is_wrong_before_tracing_a_loss(name):
    arguments, message = BAD_ARGUMENTS[name]
    fields = {"problem": dpb.BilevelProblem(bare, with_x), "data": LEVELS, "w0": W0}
    fields |= {"solver": SOLVER, "budget": BUDGET, "key": jax.random.key(0)}
    with pytest.raises((ValueError, TypeError), match=message):
        dpb.fit(**(fields | arguments))


NUMBERS = np.random.default_rng(1).normal(size=(30, 3)).astype(np.float32)
PROBLEM = dpb.BilevelProblem(bare, with_x)
SAME = {
    "one array": (RECORDS, RECORDS),
    "one of two arrays": (
        {"z": RECORDS, "a": RECORDS + 1},
        {"z": RECORDS, "a": RECORDS},
    ),
    "one array of NumPy": (NUMBERS, NUMBERS),
    "overlapping parts": (NUMBERS[:20], NUMBERS[10:]),
    "an array and a part of it": (NUMBERS, NUMBERS[1::2]),
}
APART = {
    "a copy": (RECORDS, RECORDS + 0),
    "halves": (NUMBERS[:15], NUMBERS[15:]),
    "even and odd rows": (NUMBERS[::2], NUMBERS[1::2]),
    "no records": (NUMBERS[:0], NUMBERS[:0]),
}


@pytest.mark.parametrize("name", SAME)
def test_the_same_records_in_both_levels_are_not_those_of_disjoint_people(name):
    data = dpb.Levels(*SAME[name])
    with pytest.raises(ValueError, match="are the same array or parts of it"):
        PROBLEM.sizes_of(data, "disjoint")
    assert PROBLEM.sizes_of(data, "overlapping").upper > 0


@pytest.mark.parametrize("name", APART)
def test_different_records_may_be_those_of_disjoint_people(name):
    PROBLEM.check_people(dpb.Levels(*APART[name]), dpb.People.DISJOINT)


@pytest.mark.parametrize("data", [LEVELS, dpb.Levels(NUMBERS[:20], NUMBERS[:20])])
def test_no_run_takes_the_same_records_for_those_of_disjoint_people(data):
    fields = {"budget": BUDGET, "people": "disjoint", "key": jax.random.key(0)}
    with pytest.raises(ValueError, match="upper and lower are the same array"):
        dpb.fit(PROBLEM, SOLVER, data, W0, **fields)
    planned = SOLVER.with_sizes(dpb.Sizes(20, 20, "disjoint"))

    def run(records):
        levels = dpb.Levels(records, records)
        return dpb.solve(PROBLEM, planned, levels, W0, key=jax.random.key(0))

    for made in (run, jax.jit(run)):
        with pytest.raises(ValueError, match="are the same array"):
            made(data.upper)


def test_people_of_one_level_are_refused():
    with pytest.raises(TypeError, match="is for the problems of two levels"):
        dpb.fit(
            dpb.FiniteSum(lambda w, z: jnp.sum(w * z)),
            dpb.NoisyGD(2, 1.0, step_size=0.1),
            RECORDS,
            jnp.zeros(3),
            budget=BUDGET,
            people="disjoint",
            key=jax.random.key(0),
        )


@pytest.mark.parametrize(
    ("people", "data"),
    [
        ("disjoint", dpb.Levels.shared(RECORDS)),
        ("disjoint", dpb.Levels(RECORDS, RECORDS)),
        ("shared", dpb.Levels(RECORDS, RECORDS + 1)),
    ],
)
@pytest.mark.parametrize("relation", dpb.Neighbours)
def test_the_level_of_a_bilevel_problem_refuses_people_as_it_does(
    relation, people, data
):
    problem = dpb.BilevelProblem(bare, bare)
    level = penalized_level(problem, jnp.zeros(1), 2.0, 1.0)
    solver = dpb.NoisyGD(2, 1.0, step_size=0.1, neighbours=relation)
    sizes = dpb.Sizes(len(RECORDS), len(RECORDS), people)
    plan = dpb.calibrate(level, solver, dpb.PrivacyBudget(1.0, 1e-5), sizes=sizes)
    with pytest.raises(ValueError, match="contradicts the data"):
        dpb.solve(level, plan.solver, data, W0[1], key=jax.random.key(0))
