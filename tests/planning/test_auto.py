"""auto: which solver, by dry runs on synthetic records."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpbilevel as dpb
from dpbilevel import planning
from dpbilevel.applications import SelectedSources, WarmStarted
from dpbilevel.bilevel import OneLevel
from dpbilevel.planning import conclusions, dry_runs, race

SIZES = dpb.Sizes(100, 3000, "disjoint")
SOURCES = dpb.source_weighting(dpb.logistic_loss, 5)
W0 = (jnp.zeros(5), jnp.zeros(6))
BUDGET = dpb.PrivacyBudget(2.0, 1e-5)
ONE = dpb.FiniteSum(dpb.logistic_loss)
FIT = dpb.NoisyGD(20, 1.0, 4.0)

LAYOUT = {
    "features": jax.ShapeDtypeStruct((3, 2), jnp.float32),
    "label": planning.Classes(3),
}


def few(problem, w0, clip_norm, records=None, intercept=None):
    """One setting of a method of one level and one of two."""
    fit = dpb.NoisyGD(20, clip_norm, 4.0)
    return (
        planning.Candidate("both", (OneLevel(fit, reads="both"),), 1),
        planning.Candidate("selected", (SelectedSources(fit, fit),), 2),
    )


@functools.cache
def plan_for(*laws):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dry_runs, "candidates", few)
        return dpb.auto(SOURCES, BUDGET, sizes=SIZES, w0=W0, twins=laws)


@functools.cache
def plan_of_one_level():
    return dpb.auto(ONE, BUDGET, sizes=2000, w0=jnp.zeros(6))


def test_the_plan_stays_within_the_budget_and_is_that_of_calibrate():
    plan = plan_of_one_level()
    again = dpb.calibrate(
        ONE, plan.trials[0].solver, BUDGET, sizes=2000, w0=jnp.zeros(6)
    )
    assert plan.report.epsilon <= BUDGET.epsilon
    assert plan.report.to_json() == again.report.to_json()
    assert str(plan.solver) == str(again.solver)


def test_every_method_is_listed_best_first():
    regrets = [trial.regret for trial in plan_of_one_level().trials]
    assert regrets == sorted(regrets)
    methods = {c.name for c in planning.candidates(ONE, jnp.zeros(6), 1.0)}
    assert {trial.method for trial in plan_of_one_level().trials} == methods


def test_the_chosen_setting_is_better_than_the_start_on_fresh_records():
    plan = plan_of_one_level()
    twin = planning.Alike(rate=0.5).draw(ONE, jnp.zeros(6), 2000, jax.random.key(77))
    w = dpb.solve(ONE, plan.solver, twin.data, jnp.zeros(6), key=jax.random.key(1))
    loss = jnp.mean(jax.vmap(dpb.logistic_loss, (None, 0))(w.value, twin.test))
    assert loss < 0.8 * np.log(2)


def test_two_levels_are_planned_where_sources_are_good_or_bad():
    plan = plan_for(planning.GoodOrBad())
    assert plan.pays
    assert isinstance(plan.solver, SelectedSources)
    assert "best method of one level" in plan.reason
    assert "(GoodOrBad). If your data differ, pass twins= or synthetic=" in plan.reason
    assumed = "gradients have norm 1 at most, and feature -1 is the same for all"
    assert assumed in str(plan)


def test_one_level_is_planned_where_all_records_are_alike():
    plan = plan_for(planning.Alike(rate=0.5))
    assert not plan.pays
    assert isinstance(plan.solver, OneLevel)
    assert "Two levels do not pay here" in plan.reason
    assert "Nor do they on these records at epsilon = 32." in plan.reason


def trial(levels, loss):
    return conclusions.Trial(f"of {levels}", OneLevel(FIT), levels, (loss,), 0.0, 1)


def outlook(one, two):
    """With these losses of one and of two levels by epsilon, planned at 1."""
    ranked = [trial(1, one[0]), trial(2, two[0])]
    found = {2.0**i: v for i, v in enumerate(zip(one, two, strict=True))}

    def table(solvers, budget):
        assert len(solvers) == 2
        return [[[loss]] for loss in found[budget.epsilon]]

    budget = dpb.PrivacyBudget(1.0, 1e-5)
    return conclusions.outlook_of(ranked, [1.0], budget, table, [1.0])


def test_the_epsilon_from_which_on_two_levels_pay_is_found():
    one, two = (0.5, 0.5, 0.5, 0.5, 0.5), (0.9, 0.7, 0.4, 0.3, 0.2)
    assert outlook(one, two) == " Two levels may pay from about epsilon = 4 on."
    assert outlook(one, one) == " Nor do they on these records at epsilon = 16."
    ranked = [trial(2, 0.1), trial(1, 0.2)]
    assert conclusions.outlook_of(ranked, [1.0], BUDGET, None, [1.0]) == ""


def test_the_epsilon_from_which_on_any_method_is_useful_is_found():
    # A start of 1: one level is better from 4 on, two levels from 2 on.
    one, two = (1.5, 1.2, 0.5, 0.5, 0.5), (1.6, 0.7, 0.7, 0.7, 0.7)
    assert outlook(one, two) == " From about epsilon = 2 on of 2 may improve on it."
    never = (1.5,) * 5
    assert outlook(never, never) == " No method does so at epsilon = 16 either."


def test_where_a_method_of_two_levels_is_better_is_said_if_one_level_is_planned():
    one, two = (
        conclusions.Trial(f"of {n}", OneLevel(FIT), n, (0.5, 0.5), regret, 1, (), leads)
        for n, regret, leads in ((1, 0.0, (0.0, 0.0)), (2, 0.6, (0.15, -0.6)))
    )
    reason = conclusions.reason_of([one, two], BUDGET, ["Tables", "Alike"], [1.0, 1.0])
    assert "of 1 misses at most 15% of" in reason
    assert "of 2 is better on Tables, by up to 15%, and worse on Alike" in reason
    assert "up to 60%: where your records are like the former, fit plan.tr" in reason
    assert "plan.trials[1].solver" in reason
    reason = conclusions.reason_of([one], BUDGET, ["Tables", "Alike"], [1.0, 1.0])
    assert "better on" not in reason


def test_leads_compare_the_runs_that_both_made():
    first, other = [[0.5, 0.6], [0.1, 0.1]], [[0.3, 0.8]]
    leads = planning.race.leads_of(other, first, [1.0, 1.0])
    np.testing.assert_allclose(leads, [0.2 / 0.7, -0.2 / 0.4])
    back = planning.race.leads_of(first, other, [1.0, 1.0])
    np.testing.assert_allclose(back, np.negative(leads))


def test_a_plan_shows_why_settings_and_guarantee():
    text = str(plan_for(planning.GoodOrBad()))
    for part in ("GoodOrBad", "constant answer", "SelectedSources(", "epsilon = 2"):
        assert part in text


def test_the_worst_twin_decides():
    fails_on_one, never_fails = [[0.1, 0.9]], [[0.4, 0.6]]  # of equal means
    regrets = race.regrets_of([fails_on_one, never_fails], [1.0, 1.0])
    np.testing.assert_allclose(regrets, [0.75, 1 / 3])
    # Worse than the start on one twin, and best on the other.
    assert race.regrets_of([[[1.2, 0.5]]], [1.0, 1.0])[0] > 1


def test_a_twin_with_nothing_to_gain_decides_nothing():
    # All of a gain of a hundredth, against a third of a large gain.
    tiny, large = [[0.99, 0.7]], [[1.0, 0.55]]
    assert np.argmin(race.regrets_of([tiny, large], [1.0, 1.0])) == 1
    # The control: as much is nearly all that can be gained where the start is better.
    assert np.argmin(race.regrets_of([[[0.01, 0.7]], [[0.1, 0.55]]], [0.1, 1.0])) == 0


def test_a_plan_that_is_worse_than_the_start_somewhere_says_so():
    for loss, said in ((0.9, "misses at most"), (1.0, "may be worse than")):
        found = conclusions.Trial("a", OneLevel(FIT), 1, (0.2, loss), 0.3, 1)
        reason = conclusions.reason_of([found], BUDGET, ["b", "c"], [1.0, 1.0])
        assert said in reason


METHODS = [
    planning.Candidate(name, (), levels)
    for name, levels in (("ahead", 2), ("far behind", 2), ("one level", 1))
]


def test_methods_far_behind_are_left_out_early_but_for_one_level():
    losses, made = [0.1, 1.2, 0.8], [0, 0, 0]

    def dry_run(index, number):
        made[index] += 1
        return [losses[index]]

    found, _ = race.race(METHODS, (1, 2, 3), dry_run, lambda _: [1.0], lambda *_: None)
    assert made == [6, 1, 6]
    assert [(index, len(runs)) for index, runs, _ in found] == [(0, 6), (2, 6), (1, 1)]
    np.testing.assert_allclose([regret for *_, regret in found], [0, 7 / 9, 11 / 9])
    losses[1] = 0.5  # by four ninths, which is only too much after the second round
    race.race(METHODS, (1, 2, 3), dry_run, lambda _: [1.0], lambda *_: None)
    assert made == [12, 4, 12]
    losses[1] = 0.25
    race.race(METHODS, (1, 2, 3), dry_run, lambda _: [1.0], lambda *_: None)
    assert made == [18, 10, 18]


def test_failures_after_the_first_nine_runs_decide():
    # As where sources are drawn anew: good in the first nine runs, then sometimes not.
    methods = [METHODS[0]] * 8 + [METHODS[1]] * 8
    made = [0] * len(methods)

    def dry_run(index, number):
        made[index] += 1
        fails = index < 8 and number > 8 and number % 3 == 0
        return [(0.9 if fails else 0.1 if index < 8 else 0.12) + index / 1e4] * 4

    rounds = race.rounds_of("fast", 4, large=False)
    found, _ = race.race(methods, rounds, dry_run, lambda _: [1.0] * 4, lambda *_: None)
    assert rounds == (1, 3, 4, 6)
    assert made == [14, 4, 4, *[1] * 5] * 2
    assert {index for index, *_ in found} == {0, 8}
    regrets = {index: regret for index, _, regret in found}
    assert regrets[8] == 0 < 0.1 < regrets[0]


def test_bad_luck_on_one_twin_in_the_first_run_drops_no_setting():
    # Of five settings two go on: the last is the best but on one twin of the first run.
    def dry_run(index, number):
        unlucky = index == 4 and number == 0
        return [0.3 if index < 4 else 0.1] * 3 + [0.6 if unlucky else 0.4 - index / 20]

    found, _ = race.race(
        [METHODS[0]] * 5, (1, 3, 4), dry_run, lambda _: [1.0] * 4, lambda *_: None
    )
    assert [index for index, *_ in found] == [4]


@pytest.mark.parametrize(
    ("limit", "effort", "runs"),
    [
        (2000 * 6, "fast", 3 * 1 + 3 + 6 + 8),
        (2000 * 6 - 1, "fast", 2 * 1 + 1 + 2 + 3),  # the first and the third setting
        (2000 * 6 - 1, "thorough", 3 * 2 + 6 + 22 + 22),
    ],
)
def test_large_problems_are_planned_from_fewer_settings_and_runs(
    limit, effort, runs, monkeypatch
):
    def three(*args):
        return [planning.Candidate("NoisyGD", (FIT, FIT, FIT), 1)]

    made = []
    monkeypatch.setattr(dry_runs, "candidates", three)
    monkeypatch.setattr(dry_runs, "_LARGE", limit)
    options = {"sizes": 2000, "w0": jnp.zeros(6), "effort": effort}
    dpb.auto(ONE, BUDGET, **options, progress=lambda *of: made.append(of))
    assert made[-1] == (runs, runs)


def test_the_share_of_dry_runs_that_is_done_never_falls():
    shown = []
    settings = [METHODS[0]] * 10 + [METHODS[1]] * 5
    race.race(
        settings,
        (1, 3, 8),
        lambda index, number: [index / 20],
        lambda _: [1.0],
        lambda done, total: shown.append(done / total),
    )
    assert shown == sorted(shown)
    assert shown[-1] == 1.0


def test_what_a_method_showed_on_easy_records_is_no_measure_of_later_runs(monkeypatch):
    def dry_run(index, number):
        easy, later = (0.05, 0.4, 0.1), (0.5, None, 0.6)
        return [(later if number else easy)[index]]

    monkeypatch.setattr(race, "_HOPELESS", (0.25, 0.1))
    found, _ = race.race(METHODS, (1, 9), dry_run, lambda _: [1.0], lambda *_: None)
    assert [(index, len(runs)) for index, runs, _ in found] == [
        (0, 10),
        (2, 10),
        (1, 1),
    ]
    assert np.mean(found[2][1]) < np.mean(found[0][1])
    assert found[0][2] == 0


def test_a_method_of_few_runs_is_not_planned():
    lucky, sure = (
        conclusions.Trial(f"{runs} runs", None, 2, (0.5,), regret, runs)
        for runs, regret in ((1, 0.0), (9, 0.4))
    )
    assert conclusions.ranked_best({0: lucky, 1: sure}, [1.0]) == [1, 0]


@pytest.mark.parametrize(
    ("worst", "elsewhere", "first"), [(0.62, 0.31, 1), (0.62, 0.5, 2), (0.65, 0.31, 2)]
)
def test_one_level_is_planned_where_it_is_near_on_the_other_twins_too(
    worst, elsewhere, first
):
    one = conclusions.Trial("one", None, 1, (worst, elsewhere), worst - 0.41, 5)
    two = conclusions.Trial("two", None, 2, (0.61, 0.30), 0.20, 5)
    ranked = conclusions.ranked_best({1: one, 2: two}, [1.0, 1.0])
    assert ranked[0] == first


@pytest.mark.parametrize(("worst", "first"), [(0.6, 2), (0.75, 2), (0.78, 1)])
def test_the_mean_over_the_twins_decides_unless_one_is_far_worse(worst, first):
    usual = conclusions.Trial("usual", None, 2, (0.3, 0.5, 0.5), 4 / 9, 5)
    better = conclusions.Trial("better", None, 2, (worst, 0.1, 0.1), worst - 0.3, 5)
    ranked = conclusions.ranked_best({1: usual, 2: better}, [1.0, 1.0, 1.0])
    # Missed: 0, 4/9 and 4/9 of one, (worst - .3) / .7, 0 and 0 of the other: a quarter
    # of the worst and three of the mean are equal at 2/3, for a loss of .767.
    assert ranked[0] == first


def test_a_score_is_a_quarter_of_the_worst_share_and_three_of_the_mean():
    shares = np.asarray([[0.0, 0.4], [0.2, 0.2]])
    np.testing.assert_allclose(race.scores_of(shares), [0.25, 0.2])


def test_candidates_for_networks_leave_out_mixtures_and_searches_of_weights():
    network = (jnp.zeros(5), {"w1": jnp.zeros((6, 3)), "w2": jnp.zeros(3)})
    kinds = [
        {type(s) for c in planning.candidates(SOURCES, w0, 1.0) for s in c.solvers}
        for w0 in (W0, network)
    ]
    assert kinds[0] - kinds[1] == {WarmStarted}


def test_the_lower_level_first_is_a_candidate_where_it_reads_no_x():
    mixing = dpb.applications.source_mixing(dpb.logistic_loss, 2)
    w0 = dpb.applications.mixing_start(jnp.zeros(6), 2)

    def reading(x, y):
        return jnp.sum(x) * jnp.sum(y**2)

    problems = [
        mixing,
        dataclasses.replace(mixing, lower_public=lambda _, y: jnp.sum(y**2)),
        dataclasses.replace(mixing, lower_public=reading),
        dataclasses.replace(mixing, x_in_records=True),
    ]
    offered = [
        "LowerFirst" in {c.name for c in planning.candidates(problem, w0, 1.0)}
        for problem in problems
    ]
    assert offered == [True, True, False, False]


def test_step_sizes_are_in_units_of_the_clip_norm():
    solvers = [
        planning.candidates(ONE, jnp.zeros(6), c)[0].solvers[0] for c in (1.0, 2.0)
    ]
    assert solvers[0].step_size == 4 * solvers[1].step_size


@pytest.mark.parametrize(
    ("law", "expected"),
    [(planning.GoodOrBad(), np.ones(5)), (planning.Tables(), 1 / np.arange(1.0, 6))],
)
def test_twins_have_the_planned_sizes_and_sources(law, expected):
    twin = law.draw(SOURCES, W0, SIZES, jax.random.key(0))
    assert SOURCES.sizes_of(twin.data, "disjoint") == SIZES
    source = np.asarray(twin.data.lower["source"])
    shares = np.bincount(source, minlength=5) / SIZES.lower
    np.testing.assert_allclose(shares, expected / np.sum(expected), atol=0.03)
    norms = np.linalg.norm(twin.data.lower["features"], axis=1)
    np.testing.assert_allclose(norms, 1, rtol=1e-5)


def test_labels_of_a_twin_follow_the_law_of_its_models():
    law = planning.GoodOrBad(test_size=1)
    twin = law.draw(SOURCES, W0, dpb.Sizes(1, 50_000, "disjoint"), jax.random.key(3))
    target, models = law.models(
        SOURCES, (6,), jax.random.split(jax.random.key(3), 5)[0]
    )
    lower = twin.data.lower
    # An opposite one last, for the control.
    for source, sign in zip((0, 2, 3, 4, 1), (1, 0, 1, -1, -1), strict=True):
        rows = np.asarray(lower["source"]) == source
        margin = np.asarray(lower["features"])[rows] @ np.asarray(target) * sign
        np.testing.assert_allclose(models[source], sign * target)
        excess = (np.asarray(lower["label"])[rows] > 0) - 1 / (1 + np.exp(-margin))
        assert abs(np.mean(excess)) < 4 * 0.5 / np.sqrt(rows.sum())
    wrong = (np.asarray(lower["label"])[rows] > 0) - 1 / (1 + np.exp(margin))
    assert abs(np.mean(wrong * np.sign(margin))) > 0.1  # the control: another sign


def test_twins_of_classes_have_labels_of_the_columns():
    def loss(y, record):
        return -jax.nn.log_softmax(record["features"] @ y)[record["label"]]

    problem = dpb.FiniteSum(loss)
    twin = planning.Alike(test_size=10).draw(
        problem, jnp.zeros((4, 3)), 500, jax.random.key(0)
    )
    assert set(np.asarray(twin.data["label"]).tolist()) == {0, 1, 2}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"effort": "more"}, "effort"),
        ({"clip_norm": 0.0}, "clip_norm"),
        ({"twins": []}, "at least one law"),
        ({"w0": {"a": jnp.zeros(2), "b": jnp.zeros(2)}}, "Pass records="),
        ({"records": {"rows": jnp.zeros(2)}}, "one leaf of Classes"),
    ],
)
def test_wrong_arguments_are_refused_with_what_to_do(changes, message):
    options = {"sizes": 100, "w0": jnp.zeros(6)} | changes
    with pytest.raises(ValueError, match=message):
        dpb.auto(ONE, BUDGET, **options)


def test_a_population_of_tables_is_none_of_the_sources_and_near_a_mixture_of_them():
    columns, law = 40, planning.Tables()
    problem = dpb.source_weighting(dpb.logistic_loss, 12)
    target, models = map(np.asarray, law.models(problem, (columns,), jax.random.key(0)))
    rows = np.asarray(law.features(jax.random.key(1), 2000, columns))
    far = np.std(rows @ (models - target).T, axis=0) / np.std(rows @ target)
    assert far.min() > 0.2
    mean = models.mean(0) - target
    assert np.std(rows @ mean) / np.std(rows @ target) < 0.5 * far.mean()
    agrees = np.mean(np.isclose(models, target))
    assert 0.3 < agrees < 0.7
    # Categories: each block of columns has one entry that is not zero.
    entries = np.count_nonzero(rows, axis=1)
    assert (entries == entries[0]).all()
    assert entries[0] < 10


@pytest.mark.parametrize(("useful", "count"), [(0.5, 5), (0.3, 3), (0.01, 1)])
def test_a_share_of_the_groups_of_noise_groups_matters(useful, count):
    groups = np.arange(40) // 4
    problem = dpb.penalty_tuning(dpb.logistic_loss, groups)
    law = planning.NoiseGroups(useful=useful)
    target, _ = law.models(problem, (40,), jax.random.key(0))
    matters = np.abs(np.asarray(target)).reshape(10, 4).max(1) > 0
    assert matters.sum() == count


def test_coefficients_of_groups_fall_with_their_rank():
    groups = np.arange(60_000) // 10_000
    problem = dpb.penalty_tuning(dpb.logistic_loss, groups)
    for useful, decay in ((0.5, 1.0), (1.0, 0.0)):
        law = planning.NoiseGroups(useful=useful, decay=decay)
        target, _ = law.models(problem, (60_000,), jax.random.key(0))
        sizes = np.sort(np.asarray(target).reshape(6, -1).std(1))[::-1]
        rank = np.arange(1, 7)
        expected = np.where(rank <= 6 * useful, rank**-decay, 0.0)
        np.testing.assert_allclose(sizes / sizes[0], expected, atol=0.05)


@pytest.mark.parametrize("shape", [(6,), (6, 3)])
def test_features_have_the_norm_of_the_largest_gradient_and_labels_are_the_same(shape):
    problem, w0 = dpb.source_weighting(dpb.logistic_loss, 3), (jnp.zeros(3),)
    w0 = (*w0, jnp.zeros(shape))
    drawn = [
        [
            law.draw(problem, w0, SIZES, jax.random.key(5)).data.lower
            for law in dry_runs._laws(problem, w0, norm, None, None, None)
        ]
        for norm in (1.0, 8.0)
    ]
    for short, long in zip(*drawn, strict=True):
        np.testing.assert_allclose(8 * short["features"], long["features"], rtol=1e-6)
        lengths = np.linalg.norm(short["features"], axis=1)
        np.testing.assert_allclose(lengths, 1, rtol=1e-5)
        assert np.mean(short["label"] == long["label"]) > 0.999  # up to rounding


def test_the_clip_norm_of_a_network_is_no_norm_of_features():
    problem, model = dpb.source_weighting(dpb.logistic_loss, 3), [jnp.zeros(3)] * 2
    laws = dry_runs._laws(problem, (jnp.zeros(3), model), 8.0, LAYOUT, None, None)
    assert {law.norm for law in laws} == {1.0}


def test_a_start_above_the_least_penalties_is_remarked():
    problem = dpb.penalty_tuning(dpb.logistic_loss, np.arange(4) // 2)
    start = dpb.applications.penalty_start(problem, jnp.zeros(4))
    assert np.array_equal(start[0], [-8.0, -8.0])
    assert dry_runs._remark_on(problem, start) == ""
    above = start[0].at[1].set(-4.0), start[1]
    assert "start at applications.penalty_start" in dry_runs._remark_on(problem, above)


def network_loss(y, record):
    hidden = jnp.tanh(jnp.ravel(record["features"]) @ y["in"])
    return -jax.nn.log_softmax(hidden @ y["out"])[record["label"]]


def test_a_network_is_planned_on_records_of_the_declared_layout():
    keys = jax.random.split(jax.random.key(0))
    start = {
        "in": jax.random.normal(keys[0], (6, 8)),
        "out": jax.random.normal(keys[1], (8, 3)),
    }
    problem = dpb.source_weighting(network_loss, 5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dry_runs, "candidates", few)
        plan = dpb.auto(
            problem, BUDGET, sizes=SIZES, w0=(jnp.zeros(5), start), records=LAYOUT
        )
    kinds = ("GoodOrBad", "Shifted", "Tables", "MissingPositives", "Alike (skewed)")
    assert plan.twins == kinds
    best = min(plan.trials, key=lambda trial: trial.losses[0])
    assert best.losses[0] < 0.95 * plan.start_losses[0]  # there is something to learn
    key = jax.random.key(5)
    twin = planning.Alike(LAYOUT).draw(problem, (jnp.zeros(5), start), SIZES, key)
    assert twin.data.lower["features"].shape == (3000, 3, 2)
    assert twin.data.upper["label"].dtype == jnp.int32


def test_sources_of_a_network_are_scored_by_a_linear_model_of_its_records():
    layout = {
        "features": jax.ShapeDtypeStruct((3, 2), jnp.float32),
        "label": planning.Classes((-1.0, 0.5, 1.0)),
    }
    network = {"in": jnp.zeros((6, 8)), "out": jnp.zeros((8, 3))}
    w0 = jnp.zeros(5), network
    found = planning.candidates(SOURCES, w0, 2.0, layout)
    (selected,) = (c for c in found if c.name == "SelectedSources")
    scoring = selected.solvers[0].scoring
    assert scoring.start.shape == (7, 3)
    y = jax.random.normal(jax.random.key(0), (7, 3))
    rows = jnp.arange(6.0).reshape(3, 2)
    record = {"features": rows, "label": jnp.asarray(0.5), "source": 1}
    unit = np.append(np.ravel(rows) / np.linalg.norm(rows), 0.5)
    expected = -jax.nn.log_softmax(unit @ y)[1]
    np.testing.assert_allclose(scoring.loss(y, record), expected, rtol=1e-5)
    # Its gradients are not clipped at the norm of the network's.
    assert selected.solvers[0].model.clip_norm == 0.5  # half of its own largest one
    assert selected.solvers[0].fit.clip_norm == 2.0  # a network has no largest norm
    (alone,) = (
        c for c in planning.candidates(SOURCES, w0, 2.0) if c.name == "SelectedSources"
    )
    assert alone.solvers[0].scoring is None
    assert alone.solvers[0].model.clip_norm == 1.0


@pytest.mark.slow
def test_a_plan_under_add_or_remove_one_is_that_of_calibrate_under_it():
    relation = dpb.Neighbours.ADD_OR_REMOVE_ONE
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dry_runs, "candidates", few)
        plan = dpb.auto(
            SOURCES,
            BUDGET,
            sizes=SIZES,
            w0=W0,
            twins=[planning.Alike(rate=0.5)],
            neighbours=relation,
        )
    again = dpb.calibrate(SOURCES, plan.trials[0].solver, BUDGET, sizes=SIZES, w0=W0)
    assert plan.solver.neighbours is relation
    assert plan.report.relation == "add_or_remove_one"
    assert plan.report.to_json() == again.report.to_json()


TUNING = dpb.linear_tuning(dpb.Logistic(), [0, 0, 1], bounds=(-1.0, 1.0))


def test_problems_with_a_certificate_have_draws_and_implicit_steps_too():
    x = jnp.full(2, -1.0), jnp.zeros(3)
    plain = dpb.penalty_tuning(dpb.logistic_loss, np.asarray([0, 0, 1]))
    names = [{c.name for c in planning.candidates(p, x, 1.0)} for p in (TUNING, plain)]
    assert names[0] - names[1] == {
        "ImplicitBilevel, refitted",
        "ExponentialMechanism, refitted",
        "WarmStarted, refitted",
    }
    assert "ScaledGroups" in names[1]


@pytest.mark.slow
@pytest.mark.usefixtures("x64")
@pytest.mark.filterwarnings("ignore:auto. The plan")  # penalties start far too large
def test_methods_with_and_without_a_certificate_are_compared_on_the_same_twins():
    x = jnp.full(2, -1.0), jnp.zeros(3)
    sizes = dpb.Sizes(300, 1000, "disjoint")
    plan = dpb.auto(TUNING, BUDGET, sizes=sizes, w0=x)
    tried = {trial.method for trial in plan.trials}
    assert {"ImplicitBilevel, refitted", "ScaledGroups"} <= tried
    relation = dpb.Neighbours.ADD_OR_REMOVE_ONE
    added = dpb.auto(TUNING, BUDGET, sizes=sizes, w0=x, neighbours=relation)
    assert "ImplicitBilevel, refitted" in added.left_out
    assert added.report.relation == "add_or_remove_one"


def test_a_budget_that_no_method_reaches_is_refused_with_the_reasons():
    with pytest.raises(ValueError, match=r"no method reaches the budget.*delta = 0"):
        dpb.auto(ONE, dpb.PrivacyBudget(1.0, 0.0), sizes=100, w0=jnp.zeros(6))


def test_losses_that_do_not_read_the_twins_are_refused_with_what_to_do():
    problem = dpb.FiniteSum(lambda w, z: jnp.sum(w * z["rows"]))
    with pytest.raises(ValueError, match="The loss cannot read"):
        dpb.auto(problem, BUDGET, sizes=100, w0=jnp.zeros(6))


def test_problems_without_candidates_are_refused():
    game = dpb.games.VariationalInequality(lambda w, z: w)
    with pytest.raises(TypeError, match=r"no candidates are known.*GroupDescent\(\)"):
        dpb.auto(game, BUDGET, sizes=100, w0=jnp.zeros(6))


def test_a_start_of_two_levels_that_is_no_pair_is_refused():
    problem = dpb.source_weighting(dpb.logistic_loss, 2)
    sizes = dpb.Sizes(10, 20, "disjoint")
    with pytest.raises(ValueError, match=r"w0 must be a pair \(x, y\).*got"):
        dpb.auto(problem, BUDGET, sizes=sizes, w0=jnp.zeros(17))


def test_a_solver_that_cannot_serve_a_relation_refuses_it():
    output, sizes = dpb.outputs.Last(), dpb.Sizes(100, 100, "disjoint")
    certified = dpb.ImplicitBilevel(num_steps=2, step_size=1.0, output=output)
    planned = certified.with_noise(1.0).with_sizes(sizes)
    with pytest.raises(ValueError, match="proved under replace-one only"):
        planned.with_neighbours(dpb.Neighbours.ADD_OR_REMOVE_ONE)


LAWS = [
    planning.GoodOrBad(),
    planning.Shifted(),
    planning.Tables(),
    planning.Alike(rate=0.5),
]


def chances_of(law, shape):
    """Of every class, for records of the law's population."""
    features = law.gathered(jax.random.key(0), 4000, shape)
    scores = features @ law.teachers(jax.random.key(1), 1, shape)[0]
    if scores.ndim == 1:
        scores = jnp.stack([jnp.zeros_like(scores), scores], 1)
    return jax.nn.softmax(scores)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
@pytest.mark.parametrize("shape", [(20,), (20, 3), (20, 10), (200, 10), (200, 30)])
def test_labels_of_many_classes_follow_the_features_no_less_than_of_two(law, shape):
    chances = chances_of(law, shape)
    assert 0.7 < float(jnp.mean(jnp.max(chances, 1))) < 0.99


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
def test_records_of_several_classes_gather_by_class_and_those_of_two_do_not(law):
    def between(shape):
        """How far apart the means of the classes are, in spreads of the features."""
        rows = law.gathered(jax.random.key(0), 4000, shape)
        nearest = np.asarray(jnp.argmax(chances_of(law, shape), 1))
        means = np.stack([rows[nearest == k].mean(0) for k in np.unique(nearest)])
        return np.linalg.norm(np.std(means, 0)) / np.linalg.norm(np.std(rows, 0))

    assert between((200, 10)) > 0.45
    assert between((200,)) < 0.25


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("columns", [1, 2, 3])
def test_twins_of_few_features_have_finite_features_and_several_labels(
    law, columns, classes
):
    feature = jax.ShapeDtypeStruct((columns,), "float32")
    record = {"features": feature, "label": planning.Classes(classes)}
    law = dataclasses.replace(law, records=record)
    problem = dpb.source_weighting(dpb.logistic_loss, 4)
    sizes = dpb.Sizes(10, 40, "disjoint")
    key = jax.random.key(1)
    twin = law.draw(problem, (jnp.zeros(4), jnp.zeros(columns)), sizes, key)
    assert jnp.all(jnp.isfinite(twin.data.lower["features"]))
    # An intercept alone decides nearly all labels of a law of one or two features.
    fewest = 1 if classes == 2 else classes
    assert len(np.unique(twin.test["label"])) >= fewest
