"""SelectedSources and MixedSources: budgets, refusals and losses of both."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpbilevel as dpb
from dpbilevel.applications import (
    MixedSources,
    SelectedSources,
)
from dpbilevel.bilevel import OneLevel
from dpbilevel.privacy.accounting import profiles
from tests.applications.sources import (
    ADD_OR_REMOVE,
    BUDGET,
    DATA,
    GD,
    LONG,
    LONG_MIXED,
    MIXED,
    SELECTED,
    W0,
    WEIGHTING,
    K,
    levels,
    mean_loss,
    records,
    runs,
)
from tests.cases import slow


@pytest.mark.parametrize("unknown", [-1, K])
@pytest.mark.parametrize("solver", [LONG, *slow(LONG_MIXED)])
def test_records_of_unknown_sources_have_no_influence(solver, unknown):
    def with_others(seed):
        lower = records(60, seed)
        lower["source"] = jnp.where(jnp.arange(60) < 6, unknown, DATA.lower["source"])
        own = jnp.arange(60) < 6
        lower["features"] = jnp.where(
            own[:, None], 5 * lower["features"], DATA.lower["features"]
        )
        lower["label"] = jnp.where(own, lower["label"], DATA.lower["label"])
        return dpb.Levels(DATA.upper, lower)

    first, second = (runs(solver, with_others(seed)) for seed in (7, 8))
    jax.tree.map(np.testing.assert_array_equal, first, second)


PAID = {
    SELECTED: {"model": "upper", "score": "lower", "fit": "lower"},
    MIXED: {
        "models": "lower",
        "moments": "lower",
        "mixture": "upper",
        "score": "lower",
        "fit": "lower",
        "remoments": "lower",
        "remixture": "upper",
    },
}

both = pytest.mark.parametrize("solver", PAID, ids=lambda s: type(s).__name__)
# MixedSources, whose programs take longest to compile, in the slow suite.
one_at_once = pytest.mark.parametrize(
    "solver",
    [SELECTED, pytest.param(MIXED, marks=pytest.mark.slow)],
    ids=lambda solver: type(solver).__name__,
)


@pytest.mark.slow
@one_at_once
def test_the_answer_is_finite_whatever_the_noise(solver):
    sizes = WEIGHTING.sizes_of(DATA, "disjoint")

    @jax.jit
    def answer(noise):
        noisy = solver.with_noise(noise).with_precision("float").with_sizes(sizes)
        return dpb.solve(WEIGHTING, noisy, DATA, W0, key=jax.random.key(0)).value

    for noise in (1.0, 1e20, 1e37, 1e38):
        assert all(np.isfinite(v).all() for v in answer(noise))


@both
def test_each_run_is_paid_by_people_of_the_level_that_it_reads(solver):
    ledger = solver.with_noise(1.0).ledger(WEIGHTING, dpb.Sizes(30, 60, "disjoint"))
    paid = {r.name.split(":")[0]: {q.role for q in r.queries} for r in ledger.releases}
    assert paid == {name: {role} for name, role in PAID[solver].items()}
    shares = dict(zip(PAID[solver], solver.budget_split, strict=True))
    for role, event in ledger.events().items():
        share = sum(shares[name] for name, of in PAID[solver].items() if of == role)
        mu = (share / sum(shares.values())) ** 0.5
        assert profiles.gaussian_mu(event) == pytest.approx(mu)


@both
def test_disjoint_people_of_both_levels_spend_the_whole_budget_by_default(solver):
    sizes = dpb.Sizes(30, 60, "disjoint")
    plan = dpb.calibrate(WEIGHTING, solver, BUDGET, sizes=sizes)
    spent = plan.solver.ledger(WEIGHTING, sizes).epsilons(BUDGET.delta)
    assert set(spent) == {"upper", "lower"}
    for epsilon in spent.values():
        assert epsilon == pytest.approx(BUDGET.epsilon, rel=1e-6)


@both
def test_people_in_both_levels_pay_for_every_run(solver):
    ledger = solver.with_noise(2.0).ledger(WEIGHTING, dpb.Sizes(30, 60, "overlapping"))
    (event,) = ledger.events().values()
    assert profiles.gaussian_mu(event) == pytest.approx(1 / 2.0)
    shares = [r.count / r.noise_multiplier**2 for r in ledger.releases]
    expected = np.asarray(solver.budget_split) / sum(solver.budget_split)
    np.testing.assert_allclose(np.asarray(shares) / sum(shares), expected, rtol=1e-6)


@both
def test_a_score_has_norm_one_and_other_runs_their_own_clip_norm(solver):
    wide = dataclasses.replace(solver, fit=dataclasses.replace(GD, clip_norm=3.0))
    ledger = wide.with_noise(1.0).ledger(WEIGHTING, dpb.Sizes(30, 60))
    clips = {r.name.split(":")[0]: r.queries[0].clip_norm for r in ledger.releases}
    assert clips == dict.fromkeys(PAID[solver], 1.0) | {"fit": 3.0}


@pytest.mark.slow
@one_at_once
def test_float32_records_are_solved_where_float64_is_enabled(solver, x64):
    answer = jax.eval_shape(
        lambda data: runs(solver, data)[0], jax.tree.map(np.asarray, DATA)
    )
    assert {v.dtype for v in jax.tree.leaves(answer)} == {jnp.dtype("f4")}


@one_at_once
@pytest.mark.parametrize("dtypes", [("f4", "f8"), *slow((("f8", "f4"),))])
def test_weights_and_model_may_differ_in_precision(solver, dtypes, x64):
    w0 = tuple(np.zeros(len(w), dtype) for w, dtype in zip(W0, dtypes, strict=True))
    data = jax.tree.map(
        lambda v: v.astype(dtypes[1]) if v.dtype == jnp.float32 else v, DATA
    )
    answer = jax.eval_shape(lambda data: runs(solver, data, w0=w0)[0], data)
    assert tuple(v.dtype for v in answer) == dtypes


@both
def test_under_add_or_remove_one_the_score_is_given_too(solver):
    means = [name for name in PAID[solver] if name in ("moments", "score", "remoments")]
    parts = {name: getattr(solver, name) for name in PAID[solver] if name not in means}
    parts = {
        k: dataclasses.replace(v, neighbours=ADD_OR_REMOVE) for k, v in parts.items()
    }
    words = "=, ".join(means)
    with pytest.raises(ValueError, match=f"same relation, {words}= too"):
        dataclasses.replace(solver, **parts)
    mean = dataclasses.replace(solver.score, neighbours=ADD_OR_REMOVE)
    given = dataclasses.replace(solver, **parts, **dict.fromkeys(means, mean))
    sizes = dpb.Sizes(30, 60, "disjoint")
    plan = dpb.calibrate(WEIGHTING, given, BUDGET, sizes=sizes)
    assert plan.solver.neighbours is dpb.Neighbours.ADD_OR_REMOVE_ONE


@both
def test_other_problems_and_splits_are_refused_with_the_remedy(solver):
    mixing = dpb.applications.source_mixing(dpb.logistic_loss, K)
    sizes = dpb.Sizes(30, 60)
    with pytest.raises(TypeError, match=r"SourceWeighting.*Give dpb.source_weighting"):
        dpb.calibrate(mixing, solver, BUDGET, sizes=sizes)
    count = len(solver.budget_split)
    with pytest.raises(ValueError, match=f"budget_split must be {count} positive"):
        dataclasses.replace(solver, budget_split=(0.5, 0.5))
    with pytest.raises(ValueError, match=r"keep_above must be in \[-1, 1\]"):
        dataclasses.replace(solver, keep_above=2.0)
    with pytest.raises(TypeError, match="fit must"):
        dataclasses.replace(solver, fit=SELECTED)


@functools.cache
def losses():
    """Of released models, where validation records are few and one source is flipped.

    With a fixed key; in this order: one level alone, kept sources, mixtures.
    """
    data, test = levels(100, 6000, d=20), records(4000, 2, d=20)
    rule = dpb.outputs.TailMean()

    def descent(num_steps, clip_norm, step_size):
        return dpb.NoisyGD(num_steps, clip_norm, step_size, output=rule)

    model, fit = descent(30, 1.0, 0.3), descent(50, 1.0, 5.0)
    models, mixture = descent(50, 1.2, 10.0), descent(10, 2.0, 0.15)
    solvers = (
        OneLevel(model, "upper"),
        *(OneLevel(fit, level) for level in ("lower", "both")),
        SelectedSources(model, fit),
        MixedSources(models, mixture, fit, mixture),
    )

    def loss(solver):
        found = dpb.fit(
            dpb.source_weighting(dpb.logistic_loss, K),
            solver,
            data,
            (jnp.zeros(K), jnp.zeros(20)),
            budget=BUDGET,
            people="disjoint",
            key=jax.random.key(1),
        )
        return float(mean_loss(found.value[1], test))

    return [loss(solver) for solver in solvers]


@pytest.mark.slow
@pytest.mark.parametrize("ours", [pytest.param(3, marks=pytest.mark.slow), 4])
def test_kept_sources_and_mixtures_are_better_than_one_level_alone(ours):
    found = losses()
    assert found[ours] < min(found[:3]) - 0.03
