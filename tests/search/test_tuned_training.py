"""Trainings and their validation losses in one selection: price, law, what shows."""

import dataclasses
import math

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import dpbilevel as dpb
from dpbilevel.core.descent import SkippedUpdates, rejected_updates
from dpbilevel.core.loop import scan_steps
from dpbilevel.onelevel import AdaptiveClipGD
from dpbilevel.privacy.accounting import profiles
from dpbilevel.privacy.accounting.repetitions import Repetitions
from dpbilevel.privacy.keys import step_keys
from tests.cases import Audited, Case, planned
from tests.problems import LEVELS, WEIGHTING, X0, Y0
from tests.search.test_repeat_and_select import chances, exact_delta, selected

REPLACE = dpb.Neighbours.REPLACE_ONE
TRAININGS = tuple(dpb.NoisyGD(2, 1.0, step_size=size) for size in (0.5, 1.0, 2.0))


def tuned(kind=dpb.search.TunedTraining, candidates=TRAININGS, **fields):
    fields = {"num_steps": 12, "clip_range": 2.0, "mean": 2.0} | fields
    return kind(candidates, **fields)


CONTRACT = {
    "tuned_training": Case(
        WEIGHTING, tuned(), LEVELS, (X0, Y0), "disjoint", keeps_x=True
    ),
    "tuned_training_overlapping": Case(
        WEIGHTING,
        tuned(shape=math.inf, budget_split=(0.8, 0.2)),
        LEVELS,
        (X0, Y0),
        "overlapping",
        keeps_x=True,
    ),
}


def planned_tuning(kind=dpb.search.TunedTraining, people="disjoint", **fields):
    training = dpb.NoisyGD(1, 1.0, step_size=1.0)
    solver = tuned(kind, (training,), num_steps=16, clip_range=1.0, **fields)
    return planned(solver, people)


AUDITS = {
    "TunedTraining": Audited(planned_tuning(), exact=False),
    "TunedTraining, overlapping": Audited(
        planned_tuning(people="overlapping"), exact=False
    ),
}

# ---------------------------------------------------------------------- the price


def ledger_of(people, **fields):
    solver = tuned(**fields).with_noise(2.0)
    return solver.ledger(WEIGHTING, dpb.Sizes(60, 60, people))


def test_all_releases_have_the_precision_and_the_relation_of_the_plan():
    added = dpb.Neighbours.ADD_OR_REMOVE_ONE
    solver = tuned().with_precision("grid").with_neighbours(added).with_noise(2.0)
    (best,) = solver.ledger(WEIGHTING, dpb.Sizes(60, 60, "disjoint")).releases
    trainings = [release for training in best.trainings for release in training]
    found = {
        (r.mechanism.precision, r.mechanism.neighbours) for r in (best, *trainings)
    }
    assert len(trainings) == len(TRAININGS)
    assert found == {("grid", added)}


@pytest.mark.parametrize(
    ("people", "mus"),
    [
        ("disjoint", {"lower": 0.5 * 0.8**0.5, "upper": 0.5 * 0.2**0.5}),
        ("overlapping", {"person": 0.5}),
        ("shared", {"person": 0.5}),
    ],
)
@pytest.mark.parametrize("shape", [0.0, 1.0, math.inf])
def test_each_kind_of_person_pays_a_selection_among_what_reads_their_records(
    people, mus, shape
):
    ledger = ledger_of(people, shape=shape, num_steps=60, budget_split=(0.8, 0.2))
    law = Repetitions(2.0, shape)
    found = ledger.events()
    assert found.keys() == mus.keys()
    for person, mu in mus.items():
        one = law.event(dp_accounting.GaussianDpEvent(1 / mu))
        for epsilon in (0.5, 1.5):
            assert profiles.delta(found[person], REPLACE, epsilon) == pytest.approx(
                profiles.delta(one, REPLACE, epsilon), rel=1e-9
            )
    (release,) = ledger.releases
    assert ledger.failure == release.failure == float(law.beyond(60)[-1])


def test_a_run_is_charged_as_the_dearest_of_its_trainings():
    quiet, loud = (dpb.NoisyGD(3, 1.0, 1.0) for _ in range(2))
    solver = tuned(candidates=(quiet, loud)).with_noise(2.0)
    less = loud.with_noise(1.0)
    solver = dataclasses.replace(solver, candidates=(solver.candidates[0], less))
    (release,) = solver.ledger(WEIGHTING, dpb.Sizes(60, 60)).releases
    loss = solver.release_noise.noise_multiplier
    expected = math.hypot(1 / 1.0, 1 / loss)
    assert release.run_mus(dpb.People.OVERLAPPING)["person"] == pytest.approx(expected)


def binned(shift, bins=61):
    edges = np.concatenate([[-np.inf], np.linspace(-5, 5, bins - 1), [np.inf]])
    return np.diff(scipy.stats.norm.cdf(edges - shift))


def runs_in_order(of_model, of_loss, weight):
    """The law of model and loss of one run, in order of loss plus weighted model."""
    law = np.outer(binned(of_model), binned(of_loss))
    places = np.arange(len(law))
    order = np.argsort((weight * places[:, None] + places[None]).ravel(), kind="stable")
    return law.ravel()[order]


@pytest.mark.parametrize("weight", [0.0, 2.0])
@pytest.mark.parametrize("shape", [1.0, math.inf])
def test_the_claim_holds_for_the_exact_law_of_model_and_loss(shape, weight):
    # A model that tells more than a loss, of a person with a record in both levels.
    of_model, of_loss = 0.8, 0.4
    law = chances(5.0, shape, 300)
    pair = [
        selected(law, runs_in_order(s * of_model, s * of_loss, weight)) for s in (0, 1)
    ]
    claims = [
        Repetitions(5.0, shape).event(dp_accounting.GaussianDpEvent(1 / mu))
        for mu in (math.hypot(of_model, of_loss), of_loss)
    ]
    both, loss_alone = (profiles.profile(event, REPLACE) for event in claims)
    exact = [exact_delta(*pair, epsilon) for epsilon in (1.0, 2.0, 3.0)]
    assert all(d <= both(e) for d, e in zip(exact, (1.0, 2.0, 3.0), strict=True))
    # The control: the price of the loss alone does not cover the model.
    assert any(d > loss_alone(e) for d, e in zip(exact, (1.0, 2.0, 3.0), strict=True))


@pytest.mark.parametrize("people", ["disjoint", "overlapping"])
def test_a_plan_protects_the_records_of_both_levels(people):
    solver = tuned(num_steps=80, mean=5.0)
    budget, sizes = dpb.PrivacyBudget(2.0, 1e-5), dpb.Sizes(200, 400, people)
    report = dpb.calibrate(WEIGHTING, solver, budget, sizes=sizes).report
    assert report.status is dpb.privacy.Status.ENFORCED
    kinds = {"lower", "upper"} if people == "disjoint" else {"person"}
    assert report.epsilon_by_person.keys() == kinds
    # Shares of a half are all that disjoint people pay, on either side.
    assert all(1.99 < value <= 2.0 for value in report.epsilon_by_person.values())
    assert "towards lower records" in report.certificates[1]
    assert report.accountant == "profile and Renyi divergences of private selection"


@pytest.mark.slow
def test_the_report_counts_the_rows_of_both_levels():
    added = dpb.Neighbours.ADD_OR_REMOVE_ONE
    trainings = tuple(dataclasses.replace(part, neighbours=added) for part in TRAININGS)
    solver = tuned(candidates=trainings, num_steps=40, neighbours=added)
    budget = dpb.PrivacyBudget(2.0, 1e-5)
    plan = dpb.calibrate(WEIGHTING, solver, budget, sizes=dpb.Sizes(200, 400))
    (rows,) = (text for text in plan.report.assumptions if "padded" in text)
    assert "upper: " in rows
    assert "lower: " in rows


# ---------------------------------------------------------------------- the run

# The model is the mean of the lower records after steps of a size; its validation loss
# is least at the size of 1, which reaches it.
CENTRE = dpb.BilevelProblem(
    lambda x, y, z: (y - z) ** 2,
    lambda x, y, z: 0.5 * (y - z) ** 2,
    x_in_records=False,
)
SIZES = (0.25, 0.5, 1.0, 1.5)
RECORDS = dpb.Levels(jnp.full(20, 0.6), jnp.full(30, 0.6))
START = (jnp.zeros(1), jnp.zeros(()))
RUNS = 3000


def one_step(kind=dpb.search.TunedTraining, **fields):
    """Hardly any noise, so that the answer tells which candidates were among the K."""
    candidates = tuple(dpb.NoisyGD(1, 5.0, size) for size in SIZES)
    solver = tuned(kind, candidates, num_steps=24, clip_range=1.0, **fields)
    return (
        solver.with_noise(1e-4)
        .with_precision("float")
        .with_sizes(CENTRE.sizes_of(RECORDS, "disjoint"))
    )


@pytest.fixture(scope="module")
def answers():
    solver = one_step()

    def one(key):
        solution = dpb.solve(CENTRE, solver, RECORDS, START, key=key, trajectory=True)
        shown, value = jax.tree.map(lambda v: v[-1], solution.trajectory)
        return solution.y, shown.setting, value

    keys = jax.random.split(jax.random.key(4), RUNS)
    found = jax.jit(lambda k: jax.lax.map(one, k, batch_size=300))(keys)
    return tuple(map(np.asarray, found))


@pytest.mark.slow
def test_what_is_shown_is_one_run(answers):
    y, setting, value = answers
    np.testing.assert_allclose(y, 0.6 * np.asarray(SIZES)[setting], atol=2e-3)
    np.testing.assert_allclose(value, (y - 0.6) ** 2, atol=2e-3)


@pytest.mark.slow
def test_the_setting_is_the_best_of_a_number_with_the_stated_law(answers):
    # In order of their losses: a size is shown if it is drawn and no better one is.
    order = [2, 1, 3, 0]
    assert np.argsort((np.asarray(SIZES) - 1) ** 2, kind="stable")[0] == order[0]
    shares = np.bincount(answers[1], minlength=4)[order] / RUNS

    def expected(mean):
        law = chances(mean, 1.0, 400)
        left = [np.sum(law * (1 - k / 4) ** np.arange(401)) for k in range(5)]
        return -np.diff(left)

    # The sizes of 0.5 and 1.5 miss by the same: which of them wins is noise.
    def distance(mean):
        law = expected(mean)
        merged = [np.array([v[0], v[1] + v[2], v[3]]) for v in (shares, law)]
        return np.abs(merged[0] - merged[1]).max()

    assert distance(2.0) < 0.04  # four standard deviations
    assert distance(3.0) > 0.06  # the control: another mean is seen


def test_without_an_upper_variable_the_answer_names_the_selected_candidate():
    solver, run = one_step(), jax.jit(dpb.solve)
    start = None, START[1]
    for key in range(3):
        found = run(CENTRE, solver, RECORDS, start, key=jax.random.key(key))
        assert float(found.y) == pytest.approx(0.6 * SIZES[int(found.x)], abs=2e-3)


def path_of(kind, problem=CENTRE, solver=None, key=0):
    solver = one_step(kind) if solver is None else solver
    run = jax.jit(dpb.solve, static_argnames="trajectory")
    key = jax.random.key(key)
    return run(problem, solver, RECORDS, START, key=key, trajectory=True).trajectory


class ShowsTheBestSoFar(dpb.search.TunedTraining):
    def released(self, state):
        return state.runs.best, state.runs.best_value


def test_nothing_shows_before_the_last_run():
    def early(kind):
        shown, value = path_of(kind)
        return bool(jnp.any(shown.setting[:-1] != -1) | jnp.any(value[:-1] != 0))

    assert not early(dpb.search.TunedTraining)
    assert early(ShowsTheBestSoFar)  # the control


class CountsAllRuns(dpb.search.TunedTraining):
    """Tells how many updates were left out in runs that are not shown."""

    def step(self, problem, data, state, *, key):
        after = dpb.search.TunedTraining.step(self, problem, data, state, key=key)
        hidden = after.runs.best.rejected
        return dataclasses.replace(after, rejections=SkippedUpdates(hidden))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [dpb.search.TunedTraining, CountsAllRuns])
def test_updates_left_out_count_for_the_shown_run_alone(kind):
    # Every step of the only candidate is longer than any number, and left out.
    solver = tuned(kind, (dpb.NoisyGD(3, 5.0, 3e38),), num_steps=24).with_noise(1e5)
    solver = solver.with_sizes(CENTRE.sizes_of(RECORDS, "disjoint"))
    state, counts = solver.init(CENTRE, START), []
    step = jax.jit(lambda s, k: scan_steps(CENTRE, solver, RECORDS, s, k)[0])
    for key in step_keys(jax.random.key(0), 24)[1]:
        state = step(state, key[None])
        counts.append(int(rejected_updates(state)))
    assert counts[-1] == int(state.runs.w.rejected) > 0
    assert any(counts[:-1]) == (kind is CountsAllRuns)


@pytest.mark.slow
def test_candidates_of_different_counts_train_as_they_say():
    trainings = tuple(dpb.NoisyGD(count, 5.0, 0.1) for count in (1, 3, 7))
    solver = (
        tuned(candidates=trainings, num_steps=24)
        .with_noise(1e-4)
        .with_precision("float")
    )
    solver = solver.with_sizes(CENTRE.sizes_of(RECORDS, "disjoint"))
    seen = set()
    for key in range(12):
        shown, _ = path_of(None, solver=solver, key=key)
        setting = int(shown.setting[-1])
        expected = 0.6 * (1 - 0.9 ** trainings[setting].num_steps)
        assert float(shown.pair[1][-1]) == pytest.approx(expected, abs=2e-3)
        seen.add(setting)
    assert 2 in seen
    assert len(seen) > 1


@pytest.mark.slow
def test_a_public_term_of_the_upper_level_takes_part():
    problem = dataclasses.replace(CENTRE, upper_public=lambda x, y: 10.0 * y)
    solver = one_step()
    settings = [
        int(path_of(None, problem, solver, key)[0].setting[-1]) for key in range(8)
    ]
    assert 0 in settings  # the smallest step, which is never better without it
    assert settings.count(2) < settings.count(0)


def test_the_ledger_says_where_time_tells_what_was_drawn():
    different = (*TRAININGS, dpb.NoisyGD(3, 1.0, 1.0))
    timed = [
        any(
            "the time of the runs" in text
            for text in ledger_of("disjoint", **fields).assumptions
        )
        for fields in ({"candidates": different}, {})
    ]
    assert timed == [True, False]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"candidates": ()}, "candidates is empty"),
        (
            {"candidates": (dpb.NoisyGD(2, 1.0, 1.0, sampling=dpb.Poisson(0.1)),)},
            r"candidates\[0\] samples by Poisson",
        ),
        ({"num_steps": 5}, r"TunedTraining: more than num_steps=5"),
        ({"mean": 1.0}, "mean must be above 1"),
        ({"budget_split": (1.0,)}, "training, loss"),
    ],
)
def test_what_cannot_be_accounted_for_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        tuned(**fields)


def test_one_relation_for_training_and_loss():
    added = dpb.Neighbours.ADD_OR_REMOVE_ONE
    solver = tuned(neighbours=added).with_noise(1.0)
    with pytest.raises(ValueError, match="the same `neighbours`"):
        solver.ledger(WEIGHTING, dpb.Sizes(60, 60))


def test_assumptions_of_candidates_and_time_of_different_programs_are_listed():
    sizes = dpb.Sizes(10, 10, "disjoint")

    def listed(*candidates):
        solver = tuned(candidates=candidates).with_noise(1.0).with_sizes(sizes)
        return " ".join(solver.ledger(WEIGHTING, sizes).assumptions)

    plain = dpb.NoisyGD(2, 1.0, 0.5)
    mixed = listed(plain, AdaptiveClipGD(2, 1.0, 0.5))
    assert "the noise follows the clip norm" in mixed
    assert "the time of the runs" in mixed
    assert listed(plain, dpb.NoisyGD(2, 0.5, 1.0)) == ""
