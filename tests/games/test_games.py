import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpbilevel as dpb
from tests.cases import slow
from tests.zoo import games as zoo

SHARES = (0.5, 0.3, 0.2)
RADIUS, ROW_NORM = 2.0, 1.5


def fair(scale=None, shares=SHARES, **fields):
    return dpb.games.group_fair(
        dpb.Logistic(),
        shares,
        radius=RADIUS,
        row_norm=ROW_NORM,
        scale=scale,
        **fields,
    )


def two_groups(n=400, turn=2.0):
    """Two groups whose labels follow different directions, one of them small."""
    rng = np.random.default_rng(0)
    features = rng.normal(size=(n, 4))
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    group = (np.arange(n) % 5 == 0).astype(int)
    truth = np.asarray([[1, 0, 0, 0], [np.cos(turn), np.sin(turn), 0, 0]])
    label = np.sign(np.sum(features * truth[group], 1))
    return {
        "features": jnp.asarray(features, jnp.float32),
        "label": jnp.asarray(label, jnp.float32),
        "group": jnp.asarray(group, jnp.int32),
    }


def probes(problem, count=300):
    """Points of the set and records, many of them in corners."""
    rng = np.random.default_rng(1)
    scale, k = problem.y_set.scale, len(SHARES)
    x = rng.normal(size=(count, 3))
    x *= RADIUS / np.linalg.norm(x, axis=1, keepdims=True)
    x[::3] *= rng.uniform(size=(len(x[::3]), 1))
    y = scale * np.where(
        rng.uniform(size=(count, 1)) < 0.5,
        np.eye(k)[rng.integers(0, k, count)],
        rng.dirichlet(np.ones(k), count),
    )
    features = np.where(
        rng.uniform(size=(count, 1)) < 0.7, -x, rng.normal(size=(count, 3))
    )
    length = np.linalg.norm(features, axis=1, keepdims=True)
    features *= 10.0 ** rng.integers(-1, 3, (count, 1)) / length
    records = {
        "features": jnp.asarray(features, jnp.float32),
        "label": jnp.asarray(rng.choice([1.0, 7.0, -1.0], count), jnp.float32),
        "group": jnp.asarray(rng.integers(-1, k + 1, count), jnp.int32),
    }
    return (jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)), records


@pytest.mark.parametrize("scale", [None, *slow(0.5, 4.0)])
def test_no_record_exceeds_the_constants_of_a_linear_model(scale):
    problem = fair(scale)
    points, records = probes(problem)

    def flat(x, y, record):
        return jnp.concatenate(problem.record_operator((x, y), record))

    def slope(x, y, record):
        blocks = jax.jacfwd(flat, (0, 1))(x, y, record)
        return jnp.linalg.norm(jnp.concatenate(blocks, 1), 2)

    def size(x, y, record):
        return jnp.linalg.norm(flat(x, y, record))

    sizes, slopes = (
        float(jnp.max(jax.jit(jax.vmap(fun))(*points, records)))
        for fun in (size, slope)
    )
    assert 0.8 < sizes / problem.bound <= 1 + 1e-5
    # A margin cannot have the steepest slope and the largest curvature at once.
    assert 0.5 < slopes / problem.lipschitz <= 1 + 1e-5


@pytest.mark.slow
def test_public_constants_hold_and_are_attained():
    problem = dpb.games.group_robust(
        dpb.Logistic(), SHARES, 0.7, radius=RADIUS, ridge=0.1, scale=1.3
    )
    (x, y), _ = probes(problem)
    parts = jax.vmap(lambda x, y: problem.public_operator((x, y)))(x, y)
    sizes = jnp.linalg.norm(jnp.concatenate(parts, 1), axis=1)
    assert 0.9 < float(jnp.max(sizes)) / problem.public_bound <= 1 + 1e-5
    ends = problem.public_operator((x[0], y[0])), problem.public_operator((x[1], y[1]))
    moved = jnp.concatenate([a - b for a, b in zip(*ends, strict=True)])
    away = jnp.concatenate([x[0] - x[1], y[0] - y[1]])
    ratio = jnp.linalg.norm(moved) / jnp.linalg.norm(away)
    assert float(ratio) <= problem.public_lipschitz * (1 + 1e-5)


@jax.jit
def mean_operator(problem, w, data):
    parts = jax.vmap(lambda record: problem.record_operator(w, record))(data)
    return jax.tree.map(lambda v: jnp.mean(v, 0), parts)


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_gradient_in_the_weights_is_the_losses_of_the_groups(scale):
    data, x = two_groups(), jnp.asarray([0.3, -1.0, 0.5, 0.2])
    problem = dpb.games.group_fair(dpb.logistic_loss, (0.8, 0.2), scale=scale)
    w = dpb.games.group_start(problem, x, (0.8, 0.2))
    _, ascent = mean_operator(problem, w, data)
    losses = dpb.debug.group_losses(dpb.logistic_loss, x, data, 2)
    np.testing.assert_allclose(-scale * ascent, losses, rtol=1e-5)


def test_wrong_share_scales_the_loss_of_its_group():
    data, x = two_groups(), jnp.ones(4)
    problem = dpb.games.group_fair(dpb.logistic_loss, (0.6, 0.4))
    _, ascent = mean_operator(problem, (x, jnp.ones(2) / 2), data)
    losses = dpb.debug.group_losses(dpb.logistic_loss, x, data, 2)
    ratio = jnp.asarray([0.8 / 0.6, 0.2 / 0.4])
    np.testing.assert_allclose(-ascent, ratio * losses, rtol=1e-5)


def test_start_at_the_shares_descends_on_the_mean_loss():
    data, x = two_groups(), jnp.asarray([0.3, -1.0, 0.5, 0.2])
    problem = dpb.games.group_fair(dpb.logistic_loss, (0.8, 0.2), scale=2.0)
    w = dpb.games.group_start(problem, x, (0.8, 0.2))
    descent, _ = mean_operator(problem, w, data)
    losses = jax.vmap(dpb.logistic_loss, (None, 0))
    expected = jax.grad(lambda x: jnp.mean(losses(x, data)))(x)
    np.testing.assert_allclose(descent, expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(
        dpb.games.group_weights(problem, w[1]), [0.8, 0.2], rtol=1e-6
    )


@pytest.mark.parametrize("group", [-1, 3, 2**30])
def test_record_of_an_unknown_group_has_no_influence(group):
    problem = fair()
    record = {
        "features": jnp.ones(4),
        "label": jnp.asarray(1.0),
        "group": jnp.asarray(group, jnp.int32),
    }
    operator = problem.record_operator((jnp.ones(4), jnp.ones(3)), record)
    assert all(float(jnp.max(jnp.abs(part))) == 0 for part in operator)


def test_robust_value_is_the_mean_plus_the_variance_over_twice_the_strength():
    data, x, tau = two_groups(), jnp.asarray([0.3, -0.2, 0.5, 0.2]), 2.0
    shares = np.asarray([0.8, 0.2])
    problem = dpb.games.group_robust(dpb.logistic_loss, shares, tau, scale=1.5)
    losses = np.asarray(dpb.debug.group_losses(dpb.logistic_loss, x, data, 2))
    mean = shares @ losses
    best = jnp.asarray(1.5 * shares * (1 + (losses - mean) / tau), jnp.float32)
    terms = jax.vmap(lambda record: problem.fun(x, best, record))(data)
    value = float(jnp.mean(terms) + problem.public(x, best))
    assert value == pytest.approx(mean + shares @ (losses - mean) ** 2 / (2 * tau))
    _, ascent = mean_operator(problem, (x, best), data)
    _, public = problem.public_operator((x, best))
    both = np.asarray(ascent + public)  # equal entries: nothing to gain on the simplex
    assert both[0] == pytest.approx(both[1], abs=1e-5)


def noiseless(problem, data, steps=200, step_size=1.0):
    solver = dpb.games.NoisyExtragradient(
        steps, 1e3, step_size, noise_multiplier=0.0, precision="float"
    )
    w0 = dpb.games.group_start(problem, jnp.zeros(4), (0.8, 0.2))
    return jax.jit(dpb.solve)(problem, solver, data, w0, key=jax.random.key(0)).value


def worst(x, data):
    return float(jnp.max(dpb.debug.group_losses(dpb.logistic_loss, x, data, 2)))


def on_average(data):
    problem = dpb.FiniteSum(dpb.logistic_loss, w_set=dpb.sets.Ball(5.0))
    solver = dpb.NoisyGD(
        200,
        1e3,
        step_size=1.0,
        noise_multiplier=0.0,
        precision="float",
        output=dpb.outputs.Mean(),
    )
    return jax.jit(dpb.solve)(
        problem, solver, data, jnp.zeros(4), key=jax.random.key(0)
    ).value


@pytest.mark.parametrize("scale", [1.0, *slow(2.0)])
def test_worst_group_gains_where_groups_disagree(scale):
    data = two_groups()
    problem = dpb.games.group_fair(dpb.Logistic(), (0.8, 0.2), radius=5.0, scale=scale)
    x, y = noiseless(problem, data)
    assert worst(x, data) < worst(on_average(data), data) - 0.1
    weights = dpb.games.group_weights(problem, y)
    assert float(weights[1]) > 0.4  # a group of one in five
    assert float(jnp.sum(weights)) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.slow
def test_worst_group_gains_nothing_where_groups_agree():
    data = two_groups(turn=0.0)
    problem = dpb.games.group_fair(dpb.Logistic(), (0.8, 0.2), radius=5.0, scale=2.0)
    x, _ = noiseless(problem, data)
    assert worst(x, data) == pytest.approx(worst(on_average(data), data), abs=0.03)


@pytest.mark.slow
def test_strong_robustness_penalty_gives_the_mean_loss():
    data = two_groups()
    loss, shares = dpb.Logistic(), (0.8, 0.2)
    far = dpb.games.group_robust(loss, shares, 20.0, radius=5.0, scale=20.0)
    near = dpb.games.group_robust(loss, shares, 0.1, radius=5.0, scale=2.0)
    reference = worst(on_average(data), data)
    assert worst(noiseless(far, data)[0], data) == pytest.approx(reference, abs=0.03)
    assert worst(noiseless(near, data)[0], data) < reference - 0.1


def test_extragradient_enforces_and_proximal_point_rests_on_the_derived_constants():
    problem, budget = fair(), dpb.PrivacyBudget(1.0, 1e-5)
    enforced = dpb.games.NoisyExtragradient(5, 1.0, 0.1)
    derived = dpb.games.InexactProximalPoint(
        5,
        problem.bound,
        2 * problem.lipschitz,
        3,
        sampling=dpb.privacy.SinglePass(100),
        dimension=6,
    )
    reports = [
        dpb.calibrate(problem, solver, budget, sizes=10_000).report
        for solver in (enforced, derived)
    ]
    assert [r.status.name for r in reports] == ["ENFORCED", "CONDITIONAL"]


def test_matrix_game_constants_are_attained_and_never_exceeded():
    problem, rng = dpb.games.matrix_game(3, 4), np.random.default_rng(0)

    def both(record, x, y):
        w = (x, y)
        operator = jnp.concatenate(problem.record_operator(w, record))
        matrix = jax.jacobian(lambda y: problem.record_operator((x, y), record)[0])(y)
        return jnp.linalg.norm(operator), jnp.linalg.norm(matrix, 2)

    records = 10.0 ** rng.integers(-1, 9, (200, 1, 1)) * rng.normal(size=(200, 3, 4))
    records[0], records[1, 0, 0] = 1e30, np.nan
    x, y = rng.dirichlet(np.ones(3), 200), rng.dirichlet(np.ones(4), 200)
    given = (np.asarray(v, np.float32) for v in (records, x, y))
    found = jax.jit(jax.vmap(both))(*given)
    for values, constant in zip(found, (problem.bound, problem.lipschitz), strict=True):
        assert bool(jnp.all(jnp.isfinite(values)))
        assert float(jnp.max(values)) == pytest.approx(constant, rel=1e-5)


@pytest.mark.slow
def test_private_matrix_game_finds_the_even_mixture():
    scissors = jnp.asarray([[0.0, 1.0, -1.0], [-1.0, 0.0, 1.0], [1.0, -1.0, 0.0]])
    data = jnp.tile(scissors[None], (20_000, 1, 1))
    w0 = (jnp.asarray([1.0, 0.0, 0.0]), jnp.asarray([1.0, 0.0, 0.0]))
    solver = dpb.games.NoisyExtragradient(100, 2.5, 0.3)
    budget, key = dpb.PrivacyBudget(1.0, 1e-5), jax.random.key(0)
    x, y = dpb.fit(
        dpb.games.matrix_game(3, 3), solver, data, w0, budget=budget, key=key
    ).value
    gap = zoo.matrix_game(scissors[None]).gap
    assert float(gap((x, y))) < 0.1
    assert float(gap(w0)) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: fair(shares=(0.5, 0.6)), "shares must be positive numbers of sum"),
        (lambda: fair(shares=(1.5, -0.5)), r"got \[1.5, -0.5\] of sum 1"),
        (lambda: fair(shares=()), "shares must be positive"),
        (lambda: dpb.games.group_fair(dpb.Logistic(), SHARES), "needs radius="),
        (
            lambda: dpb.games.group_fair(
                dpb.onelevel.PseudoHuber(), SHARES, radius=1.0
            ),
            "no bound",
        ),
        (lambda: fair(scale=0.0), "scale must be positive"),
        (lambda: fair(ridge=-1.0), "ridge must be non-negative"),
        (
            lambda: dpb.games.group_robust(dpb.Logistic(), SHARES, -1.0, radius=1.0),
            "strength must be non-negative",
        ),
        (lambda: dpb.games.matrix_game(0, 2), "rows must be an integer of at least 1"),
    ],
)
def test_bad_game_is_refused_with_the_remedy(build, said):
    with pytest.raises(ValueError, match=said):
        build()


def test_wrong_shapes_are_told_before_any_release():
    data = two_groups()
    solver = dpb.games.NoisyExtragradient(1, 1.0, 0.1, noise_multiplier=1.0)
    for problem, records, w0, said in (
        (fair(), data, (jnp.zeros(4), jnp.ones(2)), "y must have shape"),
        (
            dpb.games.matrix_game(2, 3),
            jnp.zeros((9, 3, 2)),
            (jnp.ones(2), jnp.ones(3)),
            r"matrix_game: needs records of shape \(2, 3\)",
        ),
        (
            dpb.games.matrix_game(2, 3),
            jnp.zeros((9, 2, 3)),
            (jnp.ones(3), jnp.ones(2)),
            r"needs coefficients of shape \(3, 2\), got \(2, 3\)",
        ),
        (fair(), data, (jnp.zeros(5), jnp.ones(3)), "one coefficient per feature"),
    ):
        with pytest.raises(ValueError, match=said):
            dpb.solve(problem, solver, records, w0, key=jax.random.key(0))


def test_records_of_two_levels_are_refused_where_there_is_one():
    data = two_groups()
    game, mean = fair(shares=(0.8, 0.2)), dpb.FiniteSum(dpb.logistic_loss)
    solver = dpb.games.NoisyExtragradient(1, 1.0, 0.1, noise_multiplier=1.0)
    w0 = dpb.games.group_start(game, jnp.zeros(4), (0.8, 0.2))
    descent = dpb.NoisyGD(1, 1.0, step_size=0.1, noise_multiplier=1.0)
    levels, key = dpb.Levels(data, data), jax.random.key(0)
    for problem, method, start in ((game, solver, w0), (mean, descent, w0[0])):
        with pytest.raises(TypeError, match="give data"):
            dpb.solve(problem, method, levels, start, key=key)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: dpb.games.group_weights(fair(), (jnp.ones(3), jnp.ones(3))),
            "y must be an array",
        ),
        (
            lambda: dpb.games.group_weights(fair, jnp.ones(3)),
            "problem must be an instance",
        ),
        (
            lambda: dpb.games.group_weights(dpb.games.matrix_game(2, 2), jnp.ones(2)),
            "problem must be",
        ),
        (
            lambda: dpb.games.group_start(
                dpb.games.matrix_game(2, 2), jnp.ones(2), SHARES
            ),
            "problem must be",
        ),
    ],
)
def test_what_is_no_game_is_refused(call, said):
    with pytest.raises(TypeError, match=said):
        call()


def test_starts_of_wrong_shapes_are_refused():
    with pytest.raises(ValueError, match="floating-point array, got int32"):
        dpb.games.group_start(fair(), jnp.zeros(4, jnp.int32), SHARES)
    with pytest.raises(ValueError, match="one coefficient per feature"):
        fair().check((jnp.zeros(3), jnp.ones(3)), two_groups())
    with pytest.raises(ValueError, match="must be a tuple"):
        fair().check(jnp.zeros(3), two_groups())


def test_a_clip_norm_far_below_the_declared_bound_is_told_in_the_report():
    budget, w0 = dpb.PrivacyBudget(1.0, 1e-5), (jnp.zeros(4), jnp.ones(3) / 3)
    game = fair()
    for part, told in ((0.25, True), (1.0, False)):
        solver = dpb.games.NoisyExtragradient(2, part * game.bound, 0.1)
        plan = dpb.calibrate(game, solver, budget, sizes=100, w0=w0)
        assert ("clips at 0.25 of the declared bound" in str(plan.report)) == told
    undeclared = dataclasses.replace(game, bound=None)
    plan = dpb.calibrate(undeclared, solver, budget, sizes=100, w0=w0)
    assert plan.report.forecast[0].clip_norm_over_bound is None


def test_groups_are_integers_and_truth_values_two_of_them():
    data = two_groups()
    flags = data | {"group": data["group"] == 1}
    game = dpb.games.group_fair(dpb.logistic_loss, (0.8, 0.2))
    w = (jnp.ones(4), jnp.asarray([0.5, 0.5]))
    operators = [
        jax.vmap(lambda r: game.record_operator(w, r))(d) for d in (data, flags)
    ]
    jax.tree.map(np.testing.assert_array_equal, *operators)
    record = jax.tree.map(lambda v: v[0], data)
    for group, said in (
        (jnp.float32(1), r"must be one integer, got float32\[\]"),
        (jnp.ones(2, jnp.int32), r"got int32\[2\]"),
    ):
        with pytest.raises(TypeError, match=said):
            game.record_operator(w, record | {"group": group})
    del record["group"]
    with pytest.raises(ValueError, match=r"an entry 'group'.*give group="):
        game.record_operator(w, record)


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: dpb.games.group_fair(3, SHARES), "must be a function of"),
        (lambda: dpb.games.group_fair(dpb.Logistic, SHARES), r"such as Logistic\(\)"),
        (lambda: fair(group="site"), "group must be a function"),
    ],
)
def test_what_is_no_function_is_named(build, said):
    with pytest.raises(TypeError, match=said):
        build()


def test_shares_that_are_no_numbers_are_refused():
    with pytest.raises(ValueError, match="shares must be positive numbers"):
        fair(shares={"a": 0.5, "b": 0.5})
    game = dpb.games.group_fair(dpb.logistic_loss, (0.8, 0.2))
    with pytest.raises(ValueError, match="group_start: shares must be positive"):
        dpb.games.group_start(game, jnp.zeros(3), (0.0, 0.0))


def test_the_norms_of_operators_tell_which_group_is_clipped():
    data, game = (
        two_groups(),
        dpb.games.group_fair(dpb.logistic_loss, (0.8, 0.2), scale=9.0),
    )
    w = (jnp.zeros(4), 9.0 * jnp.asarray([0.5, 0.5]))
    norms = dpb.debug.operator_norms(game, w, data)
    # 0.5 times the weight over the share, and log 2 over scale and share.
    for group, share in ((0, 0.8), (1, 0.2)):
        expected = np.hypot(0.25 / share, np.log(2) / (9 * share))
        np.testing.assert_allclose(norms[data["group"] == group], expected, rtol=1e-4)


def test_declared_constants_may_be_replaced_for_a_loss_of_ones_own():
    problem = dpb.games.group_fair(dpb.logistic_loss, SHARES)
    assert problem.bound is None
    assert dataclasses.replace(problem, bound=2.0).constant("bound") == 2.0
