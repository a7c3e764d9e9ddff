"""Successive halving, and conclusions from dry runs."""

import dataclasses

import numpy as np
import pytest

import dpbilevel as dpb
from dpbilevel import planning
from dpbilevel.bilevel import OneLevel
from dpbilevel.planning import conclusions, race

BUDGET = dpb.PrivacyBudget(2.0, 1e-5)
FIT = dpb.NoisyGD(20, 1.0, 4.0)


def trial(levels, loss):
    return conclusions.Trial(f"of {levels}", OneLevel(FIT), levels, (loss,), 0.0, 1)


def outlook(one, two):
    """With these losses of one and of two levels by epsilon, planned at 1."""
    ranked = [trial(1, one[0]), trial(2, two[0])]
    found = {2.0**i: v for i, v in enumerate(zip(one, two, strict=True))}

    def losses(solvers, budget):
        assert len(solvers) == 2
        return [[loss] for loss in found[budget.epsilon]]

    budget = dpb.PrivacyBudget(1.0, 1e-5)
    return conclusions.outlook_of(ranked, [1.0], budget, losses, [1.0])


def test_the_epsilon_from_which_on_two_levels_are_better_is_found():
    one, two = (0.5, 0.5, 0.5, 0.5, 0.5), (0.9, 0.7, 0.4, 0.3, 0.2)
    assert outlook(one, two) == " Two levels may be better from about epsilon = 4."
    assert outlook(one, one) == " Two levels are no better at epsilon = 16 either."
    ranked = [trial(2, 0.1), trial(1, 0.2)]
    assert conclusions.outlook_of(ranked, [1.0], BUDGET, None, [1.0]) == ""


def test_the_epsilon_from_which_on_any_method_is_useful_is_found():
    # A start of 1: one level is better from 4 on, two levels from 2 on.
    one, two = (1.5, 1.2, 0.5, 0.5, 0.5), (1.6, 0.7, 0.7, 0.7, 0.7)
    assert outlook(one, two) == " of 2 may improve on it from about epsilon = 2."
    never = (1.5,) * 5
    assert outlook(never, never) == " No method improves on it at epsilon = 16 either."


def test_where_a_method_of_two_levels_is_better_is_said_if_one_level_is_planned():
    one, two = (
        conclusions.Trial(f"of {n}", OneLevel(FIT), n, (0.5, 0.5), regret, 1, (), lead)
        for n, regret, lead in ((1, 0.0, (0.0, 0.0)), (2, 0.6, (0.15, -0.6)))
    )
    reason = conclusions.reason_of([one, two], BUDGET, ["Tables", "Alike"], [1.0, 1.0])
    assert "of 1 is expected to reach at least 85 % of the achievable" in reason
    assert "on 2 kinds of synthetic data (Tables, Alike). Pass synthetic=" in reason
    assert "of 2 is better on Tables by up to 15 %, and worse on Alike by" in reason
    assert "60 %. If your data are like Tables, use plan.trials[1].solver." in reason
    # A method that was dropped early has no advantage, and hides none.
    dropped = dataclasses.replace(two, method="dropped", advantage=())
    more = [one, dropped, two]
    found = conclusions.reason_of(more, BUDGET, ["Tables", "Alike"], [1.0, 1.0])
    assert found == reason.replace("trials[1]", "trials[2]")
    for alone in ([one], [one, dropped]):
        reason = conclusions.reason_of(alone, BUDGET, ["Tables", "Alike"], [1.0, 1.0])
        assert "better on" not in reason


def test_the_smallest_loss_is_claimed_by_the_method_that_has_it():
    one, two = (
        conclusions.Trial(f"of {n}", OneLevel(FIT), n, (loss,), 0.0, 1, (), (0.0,))
        for n, loss in ((1, 0.5), (2, 0.49))
    )
    reason = conclusions.reason_of([one, two], BUDGET, ["own"], [1.0])
    assert "(own) the test loss of of 1 is at most 3 % of the improvement" in reason
    assert "above that of of 2." in reason
    reason = conclusions.reason_of([two, one], BUDGET, ["own"], [1.0])
    assert "of 2 has the smallest test loss on synthetic data (own)." in reason


def test_advantages_compare_the_runs_that_both_made():
    first, other = [[0.5, 0.6], [0.1, 0.1]], [[0.3, 0.8]]
    lead = race.advantage(other, first, [1.0, 1.0])
    np.testing.assert_allclose(lead, [0.2 / 0.7, -0.2 / 0.4])
    back = race.advantage(first, other, [1.0, 1.0])
    np.testing.assert_allclose(back, np.negative(lead))


def test_the_worst_population_decides_the_regret():
    fails_on_one, never_fails = [[0.1, 0.9]], [[0.4, 0.6]]  # of equal means
    regrets = race.worst_regrets([fails_on_one, never_fails], [[1.0, 1.0]])
    np.testing.assert_allclose(regrets, [0.75, 1 / 3])
    # Worse than the start on one drawn, and best on the other.
    assert race.worst_regrets([[[1.2, 0.5]]], [[1.0, 1.0]])[0] > 1


def test_a_population_with_nothing_to_gain_decides_nothing():
    # All of a gain of a hundredth, against a third of a large gain.
    tiny, large = [[0.99, 0.7]], [[1.0, 0.55]]
    assert np.argmin(race.worst_regrets([tiny, large], [[1.0, 1.0]])) == 1
    # The control: as much is nearly all that can be gained where the start is better.
    assert (
        np.argmin(race.worst_regrets([[[0.01, 0.7]], [[0.1, 0.55]]], [[0.1, 1.0]])) == 0
    )


def test_a_plan_that_is_worse_than_the_start_somewhere_says_so():
    for loss, said in (
        (0.9, "is expected to reach at least 70 %"),
        (1.0, "may be worse than"),
    ):
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


def test_bad_luck_on_one_population_in_the_first_run_drops_no_setting():
    # Two of five settings stay: the last is the best but on one population of one run.
    def dry_run(index, number):
        unlucky = index == 4 and number == 0
        return [0.3 if index < 4 else 0.1] * 3 + [0.6 if unlucky else 0.4 - index / 20]

    found, _ = race.race(
        [METHODS[0]] * 5, (1, 3, 4), dry_run, lambda _: [1.0] * 4, lambda *_: None
    )
    assert [index for index, *_ in found] == [4]


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
def test_one_level_is_planned_where_it_is_near_on_the_other_populations_too(
    worst, elsewhere, first
):
    one = conclusions.Trial("one", None, 1, (worst, elsewhere), worst - 0.41, 5)
    two = conclusions.Trial("two", None, 2, (0.61, 0.30), 0.20, 5)
    ranked = conclusions.ranked_best({1: one, 2: two}, [1.0, 1.0])
    assert ranked[0] == first


@pytest.mark.parametrize(("worst", "first"), [(0.6, 2), (0.75, 2), (0.78, 1)])
def test_the_mean_over_the_populations_decides_unless_one_is_far_worse(worst, first):
    usual = conclusions.Trial("usual", None, 2, (0.3, 0.5, 0.5), 4 / 9, 5)
    better = conclusions.Trial("better", None, 2, (worst, 0.1, 0.1), worst - 0.3, 5)
    ranked = conclusions.ranked_best({1: usual, 2: better}, [1.0, 1.0, 1.0])
    # Missed: 0, 4/9 and 4/9 of one, (worst - .3) / .7, 0 and 0 of the other: a quarter
    # of the worst and three of the mean are equal at 2/3, for a loss of .767.
    assert ranked[0] == first


def test_a_score_is_a_quarter_of_the_worst_share_and_three_of_the_mean():
    shares = np.asarray([[0.0, 0.4], [0.2, 0.2]])
    np.testing.assert_allclose(race.scores(shares), [0.25, 0.2])


def test_the_share_of_runs_that_are_done_never_falls():
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
