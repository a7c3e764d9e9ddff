import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpbilevel as dpb


def two_sources(n=4000, d=5, seed=0):
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(n, d))
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    label = np.sign(features @ rng.normal(size=d))
    source = rng.integers(0, 2, n)
    flipped = np.where(source == 1, -label, label)

    def batch(rows, labels):
        return {
            "features": jnp.asarray(features[rows], jnp.float32),
            "label": jnp.asarray(labels[rows], jnp.float32),
        }

    half = n // 2
    lower = batch(slice(half), flipped)
    lower["source"] = jnp.asarray(source[:half], jnp.int32)
    return dpb.Levels(batch(slice(half, n), label), lower)


@pytest.mark.slow
@pytest.mark.parametrize(
    "parametrization", ["logits", pytest.param("simplex", marks=pytest.mark.slow)]
)
def test_weight_goes_to_the_clean_source(parametrization):
    data = two_sources()
    problem = dpb.source_weighting(
        dpb.logistic_loss, 2, ridge=0.01, parametrization=parametrization
    )
    logits = parametrization == "logits"
    solver = dpb.PenaltyBilevel(
        20, 10.0, dpb.NoisyGD(10, 1.0, step_size=1.0), step_size=3.0 if logits else 1.0
    )
    x0 = jnp.zeros(2) if logits else jnp.full(2, 0.5)
    result = dpb.fit(
        problem,
        solver,
        data,
        (x0, jnp.zeros(5)),
        budget=dpb.PrivacyBudget(2.0, 1e-5),
        people="disjoint",
        key=jax.random.key(1),
    )
    weights = dpb.source_weights(result.value[0], parametrization)
    assert float(weights[0]) > 0.8
    assert float(jnp.sum(weights)) == pytest.approx(1.0, abs=1e-5)


def test_uniform_logits_and_uniform_simplex_are_the_same_problem():
    data = two_sources(40)
    y = jnp.arange(5.0)
    values = []
    for parametrization, x in (("logits", jnp.zeros(2)), ("simplex", jnp.full(2, 0.5))):
        problem = dpb.source_weighting(
            dpb.logistic_loss, 2, ridge=0.1, parametrization=parametrization
        )
        objective = jax.jit(dpb.debug.lower_objective)
        values.append(objective(problem, x, y, data))
    np.testing.assert_allclose(values[0], values[1], rtol=1e-6)


@pytest.mark.slow
def test_penalties_grow_on_useless_features_and_shrink_on_useful_ones():
    rng = np.random.default_rng(1)
    features = jnp.asarray(rng.normal(size=(400, 6)), jnp.float32)
    label = features[:, :3] @ jnp.asarray([1.0, -1.0, 2.0])
    label = label + jnp.asarray(rng.normal(size=400), jnp.float32)
    batch = {"features": features, "label": label}
    data = dpb.Levels(
        jax.tree.map(lambda v: v[40:], batch), jax.tree.map(lambda v: v[:40], batch)
    )
    groups = jnp.asarray([0, 0, 0, 1, 1, 1])
    problem = dpb.penalty_tuning(dpb.squared_loss, groups, bounds=(-6.0, 3.0))
    inner = dpb.NoisyGD(60, 1e6, step_size=0.05, precision="float")
    solver = dpb.PenaltyBilevel(
        60,
        10.0,
        inner,
        step_size=1.0,
        upper_clip_norm=1e6,
        run_noise=dpb.privacy.Gaussian(0.0, precision="float"),
        output=dpb.outputs.Last(),
    )
    x = dpb.solve(
        problem, solver, data, (jnp.zeros(2), jnp.zeros(6)), key=jax.random.key(0)
    ).x
    assert float(x[0]) < -0.5
    assert float(x[1]) > float(x[0]) + 1


def test_groups_may_be_a_pytree_like_the_model():
    groups = {"w": jnp.asarray([0, 0]), "b": jnp.asarray(1)}
    problem = dpb.penalty_tuning(lambda y, z: jnp.sum(y["w"] * z) + y["b"], groups)
    y = {"w": jnp.asarray([1.0, 2.0]), "b": jnp.asarray(3.0)}
    value = problem.lower_public(jnp.log(jnp.asarray([2.0, 4.0])), y)
    np.testing.assert_allclose(value, 0.5 * (2 * 5 + 4 * 9), rtol=1e-6)


def test_refit_is_paid_from_its_share():
    problem = dpb.source_weighting(dpb.logistic_loss, 2, ridge=0.1)
    search = dpb.PenaltyBilevel(
        5, 10.0, dpb.NoisyGD(3, 1.0, step_size=1.0), step_size=1.0
    )
    solver = dpb.Refitted(search, dpb.NoisyGD(7, 1.0, step_size=1.0), (0.75, 0.25))
    releases = solver.with_noise(2.0).ledger(problem, dpb.Sizes(10, 20)).releases
    spent = {r.name: r.count / r.noise_multiplier**2 * 4 for r in releases}
    assert spent.pop("refit: gradient") == pytest.approx(0.25)
    assert sum(spent.values()) == pytest.approx(0.75)


@pytest.mark.slow
def test_refit_starts_from_the_search_and_keeps_its_x():
    data = two_sources(400)
    problem = dpb.source_weighting(dpb.logistic_loss, 2, ridge=0.1)
    search = dpb.PenaltyBilevel(
        3,
        10.0,
        dpb.NoisyGD(3, 1.0, step_size=1.0),
        step_size=1.0,
        output=dpb.outputs.Last(),
    )
    solver = dpb.Refitted(search, dpb.NoisyGD(300, 100.0, step_size=1.0), (0.75, 0.25))
    solver = solver.with_noise(1e-7).with_precision("float")
    w0 = (jnp.zeros(2), jnp.zeros(5))
    solution = dpb.solve(
        problem, solver, data, w0, key=jax.random.key(0), trajectory=True
    )
    exact = np.asarray(dpb.debug.lower_solution(problem, solution.x, w0[1], data))
    np.testing.assert_allclose(solution.y, exact, atol=1e-4)
    np.testing.assert_array_equal(solution.x, solution.trajectory[0][-1])
    before = np.asarray(solution.trajectory[1][-2])
    assert np.linalg.norm(before - exact) > 1e-2


@pytest.mark.slow
def test_refit_of_both_levels_weighs_all_records_alike():
    data = two_sources(300)
    data = dpb.Levels(jax.tree.map(lambda v: v[:50], data.upper), data.lower)
    problem = dpb.source_weighting(dpb.logistic_loss, 2, ridge=0.1)
    search = dpb.PenaltyBilevel(
        2, 10.0, dpb.NoisyGD(2, 1.0, step_size=1.0), step_size=1.0
    )
    fit = dpb.NoisyGD(300, 100.0, step_size=1.0)
    w0 = (jnp.zeros(2), jnp.zeros(5))

    def solved(reads):
        solver = (
            dpb.Refitted(search, fit, (0.5, 0.5), reads)
            .with_noise(1e-7)
            .with_precision("float")
        )
        return dpb.solve(problem, solver, data, w0, key=jax.random.key(0)).value

    (x, y), (same, of_lower) = solved("both"), solved("lower")
    np.testing.assert_array_equal(x, same)
    sums = [
        jnp.sum(jax.vmap(lambda z, f=f: jax.grad(f, 1)(x, y, z))(records), 0)
        for f, records in ((problem.upper, data.upper), (problem.lower, data.lower))
    ]
    # The mean over the lower records of what all of them and the upper ones add up to.
    gradient = sum(s[0] if s.ndim > 1 else s for s in map(np.asarray, sums)) / 150
    np.testing.assert_allclose(gradient + 2 * 0.1 * np.asarray(y), 0, atol=1e-4)
    assert float(jnp.linalg.norm(y - of_lower)) > 1e-2


def test_refit_of_both_levels_is_charged_to_both():
    problem = dpb.source_weighting(dpb.logistic_loss, 2, ridge=0.1)
    search = dpb.PenaltyBilevel(
        5, 10.0, dpb.NoisyGD(3, 1.0, step_size=1.0), step_size=1.0
    )
    fit = dpb.NoisyGD(7, 0.5, step_size=1.0)
    solver = dpb.Refitted(search, fit, (0.75, 0.25), "both").with_noise(2.0)
    refit = solver.ledger(problem, dpb.Sizes(10, 20)).releases[-1]
    assert refit.name == "refit: gradient"
    # n_f / n_g of one upper record's gradient in a mean over 10 of them.
    assert [(q.role, q.size, q.clip_norm) for q in refit.queries] == [
        ("upper", 10, 0.25),
        ("lower", 20, 0.5),
    ]


def test_refit_of_another_relation_is_refused():
    other = dpb.Neighbours.ADD_OR_REMOVE_ONE
    search = dpb.PenaltyBilevel(
        3, 10.0, dpb.NoisyGD(3, 1.0, step_size=1.0), step_size=1.0
    )
    refit = dpb.NoisyGD(3, 1.0, step_size=1.0)
    with pytest.raises(ValueError, match="same relation"):
        dpb.Refitted(search, dataclasses.replace(refit, neighbours=other))


@pytest.mark.parametrize(
    ("parametrization", "x", "weights"),
    [
        ("logits", jnp.asarray([0.0, 1.0, -2.0]), None),
        ("simplex", jnp.asarray([0.0, 0.25, 0.75]), [0.0, 0.25, 0.75]),
    ],
)
def test_penalty_of_weights_is_half_their_chi_squared_divergence_from_equal_ones(
    parametrization, x, weights
):
    problem = dpb.source_weighting(
        dpb.logistic_loss, 3, weight_penalty=0.5, parametrization=parametrization
    )
    p = np.asarray(jax.nn.softmax(x) if weights is None else weights)
    expected = 0.5 / 2 * np.sum((p - 1 / 3) ** 2 / (1 / 3))
    assert problem.upper_public(x, None) == pytest.approx(expected, rel=1e-5)
    equal = jnp.zeros(3) if parametrization == "logits" else jnp.full(3, 1 / 3)
    assert problem.upper_public(equal, None) == pytest.approx(0.0, abs=1e-6)
    plain = dpb.source_weighting(dpb.logistic_loss, 3)
    assert plain.upper_public is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "parametrization", ["logits", pytest.param("simplex", marks=pytest.mark.slow)]
)
def test_penalty_of_weights_keeps_them_equal_where_it_is_large(parametrization):
    data = two_sources(400)
    logits = parametrization == "logits"
    x0 = jnp.zeros(2) if logits else jnp.full(2, 0.5)
    solver = (
        dpb.PenaltyBilevel(
            20,
            10.0,
            dpb.NoisyGD(10, 1.0, step_size=1.0),
            step_size=3.0 if logits else 0.5,
        )
        .with_noise(1e-6)
        .with_precision("float")
    )

    def largest(weight_penalty):
        problem = dpb.source_weighting(
            dpb.logistic_loss,
            2,
            ridge=0.01,
            weight_penalty=weight_penalty,
            parametrization=parametrization,
        )
        start = x0, jnp.zeros(5)
        x, _ = dpb.solve(problem, solver, data, start, key=jax.random.key(0)).value
        return float(jnp.max(dpb.source_weights(x, parametrization)))

    found = [largest(tau) for tau in (0.0, 0.3, 3.0)]
    assert found[0] > 0.9
    assert found[0] > found[1] > found[2]
    assert found[2] < 0.75


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_sources": 0}, "num_sources must be an integer"),
        ({"num_sources": 2, "weight_penalty": -1.0}, "weight_penalty must be non-neg"),
        ({"num_sources": 2, "ridge": -1.0}, "ridge must be non-negative"),
        ({"num_sources": 2, "parametrization": "log"}, "parametrization must be one"),
    ],
)
def test_bad_source_weighting_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        dpb.source_weighting(dpb.logistic_loss, **arguments)


def test_bad_penalty_tuning_is_named():
    for bounds in ((1.0, 0.0), (-jnp.inf, 0.0), (0.0, jnp.nan)):
        with pytest.raises(ValueError, match="bounds must be finite and increasing"):
            dpb.penalty_tuning(dpb.squared_loss, jnp.asarray([0]), bounds=bounds)
    with pytest.raises(ValueError, match="counted from 0, got -1"):
        dpb.penalty_tuning(dpb.squared_loss, jnp.asarray([0, -1]))
    for groups in (jnp.asarray([0.5]), ["a", "b"], [], None, [[0, 1, 2], [3, 4]]):
        with pytest.raises(ValueError, match="groups must hold the group"):
            dpb.penalty_tuning(dpb.squared_loss, groups)


def test_a_list_of_groups_is_an_array():
    assert dpb.penalty_tuning(dpb.squared_loss, [0, 0, 2]).groups.shape == (3,)


def test_record_of_an_unknown_source_weighs_nothing_even_unclipped():
    problem = dpb.source_weighting(dpb.logistic_loss, 2)
    record = {"features": jnp.ones(3), "label": jnp.asarray(1.0)}
    gradient = jax.jit(jax.grad(problem.lower, (0, 1)))
    gradients = [
        gradient(jnp.zeros(2), jnp.ones(3), record | {"source": jnp.asarray(source)})
        for source in (7, -1, 0)
    ]
    sizes = [sum(float(jnp.abs(v).sum()) for v in pair) for pair in gradients]
    assert sizes[0] == sizes[1] == 0 < sizes[2]


def test_x_of_another_size_than_the_sources_is_refused():
    problem = dpb.source_weighting(dpb.logistic_loss, 2)
    with pytest.raises(ValueError, match=r"x must have shape \(2,\)"):
        dpb.debug.lower_objective(problem, jnp.zeros(3), jnp.zeros(5), two_sources(40))


@pytest.mark.slow
def test_a_record_of_an_unknown_source_has_no_influence():
    problem = dpb.source_weighting(dpb.logistic_loss, 2)
    data = two_sources(40)
    stray = data.lower | {"source": data.lower["source"].at[0].set(7)}
    gradient = jax.grad(problem.lower, 1)
    x, y = jnp.zeros(2), jnp.zeros(5)
    mean = dpb.privacy.clipped_mean(
        lambda z: gradient(x, y, z), stray, clip_norm=1.0, precision="float"
    )
    rest = jax.tree.map(lambda v: v[1:], data.lower)
    expected = dpb.privacy.clipped_mean(
        lambda z: gradient(x, y, z),
        rest,
        clip_norm=1.0,
        denominator=20.0,
        precision="float",
    )
    np.testing.assert_allclose(mean.raw, expected.raw, rtol=1e-5)
