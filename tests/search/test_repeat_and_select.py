"""The best of a random number of repetitions: its law, its price, what shows of it."""

import math

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
import scipy.stats

import dpbilevel as dpb
from dpbilevel.privacy.accounting import profiles, repetitions
from dpbilevel.privacy.accounting.repetitions import BestOf
from dpbilevel.search.repeat_and_select import Repetitions, Selection
from tests.cases import Audited, Case, planned, slow
from tests.problems import LOWER, SEARCHED, Y0

LAWS = [(5.0, 0.0), (5.0, 0.5), (10.0, 1.0), (10.0, 3.0), (10.0, math.inf)]
laws = pytest.mark.parametrize(("mean", "shape"), LAWS)
REPLACE = dpb.Neighbours.REPLACE_ONE
GAUSSIAN = dp_accounting.GaussianDpEvent(2.0)
MU = 0.5


CONTRACT = {
    "repeat_and_select": Case(
        SEARCHED, dpb.search.RepeatAndSelect(12, 2.0, mean=2.0), LOWER, Y0
    ),
    "repeat_and_select_poisson": Case(
        SEARCHED,
        dpb.search.RepeatAndSelect(12, 2.0, mean=2.0, shape=math.inf),
        LOWER,
        Y0,
    ),
}


def planned_selection(kind=dpb.search.RepeatAndSelect, scale=1.0, **fields):
    solver = kind(**({"num_steps": 16, "clip_range": 1.0, "mean": 2.0} | fields))
    return planned(solver, scale=scale)


AUDITS = {
    "RepeatAndSelect": Audited(planned_selection(), exact=False),
    "RepeatAndSelect, Poisson": Audited(planned_selection(shape=math.inf), exact=False),
}


def chances(mean, shape, count):
    """The law of K from the definition in the paper, term by term."""
    k = np.arange(count + 1)
    if math.isinf(shape):
        return scipy.stats.poisson.pmf(k, mean)
    gamma = Repetitions(mean, shape).gamma
    ratios = (1 - gamma) * (k[1:-1] + shape) / (k[1:-1] + 1)
    found = np.cumprod(np.concatenate([[1.0], ratios]))
    return np.concatenate([[0.0], found / found.sum()])


@laws
def test_the_law_of_the_number_is_the_papers(mean, shape):
    law, found = Repetitions(mean, shape), chances(mean, shape, 4000)
    beyond = law.beyond(200)
    np.testing.assert_allclose(
        beyond, 1 - np.cumsum(found)[:201], rtol=1e-9, atol=1e-11
    )
    assert np.dot(found, np.arange(4001)) == pytest.approx(mean, rel=1e-8)


def test_far_tails_of_the_number_keep_their_digits():
    geometric = Repetitions(5.0, 1.0).beyond(400)
    np.testing.assert_allclose(geometric[[100, 400]], 0.8 ** np.asarray([100, 400.0]))
    logarithmic = Repetitions(5.0, 0.0)
    tail = (1 - logarithmic.gamma) ** np.arange(301, 5000) / np.arange(301, 5000)
    expected = tail.sum() / -math.log(logarithmic.gamma)
    assert logarithmic.beyond(300)[-1] == pytest.approx(expected, rel=1e-9)


def largest_weight(mean, shape):
    """At every order, of f'(q)^a f'(q')^(1 - a) over a Gaussian's pairs of chances."""
    law, z = chances(mean, shape, 1000), np.linspace(-12, 8, 4001)
    slopes = law[1:] * np.arange(1, len(law))

    def log_slope(tail):
        return np.log(np.polynomial.polynomial.polyval(1 - tail, slopes))

    near, far = (log_slope(scipy.stats.norm.cdf(z + s)) for s in (0.0, MU))
    orders = repetitions._ORDERS[:, None]
    return (orders * near + (1 - orders) * far).max(axis=1)


@laws
def test_divergences_are_those_of_the_theorem_with_exact_chances(mean, shape):
    orders = repetitions._ORDERS
    expected = orders * MU**2 / 2 + largest_weight(mean, shape) / (orders - 1)
    expected = np.minimum.accumulate(expected[::-1])[::-1]
    curve = repetitions._curve(Repetitions(mean, shape).event(GAUSSIAN))
    np.testing.assert_allclose(curve, expected, rtol=1e-5)
    assert (curve >= expected * (1 - 1e-9)).all()


def brute_force(law, mu, epsilon):
    """The mean of kappa over the loss, each by a fine grid."""
    z = np.linspace(-12, 9, 8_001)
    near, far = (law.slope(scipy.stats.norm.cdf(z + shift)) for shift in (0.0, mu))
    loss = mu * mu / 2 + mu * np.linspace(-9, 9, 1_501)
    kappa = [np.max(np.maximum(near - math.exp(epsilon - v) * far, 0)) for v in loss]
    return scipy.integrate.trapezoid(
        kappa * scipy.stats.norm.pdf(loss, mu * mu / 2, mu), loss
    )


@laws
@pytest.mark.parametrize("mu", [0.1, 1.0])
def test_the_profile_is_the_mean_of_the_convex_function_and_hardly_above(
    mean, shape, mu
):
    law, claimed = Repetitions(mean, shape), BestOf(Repetitions(mean, shape), mu)
    event = law.event(dp_accounting.GaussianDpEvent(1 / mu))
    by_divergences = repetitions.renyi_profile([(event, 1)])
    for epsilon in (0.0, 2 * mu, 6 * mu):
        exact = min(1.0, brute_force(law, mu, epsilon))
        assert exact * (1 - 1e-3) < claimed.delta(epsilon) < 1.3 * exact
    assert claimed.delta(6 * mu) < by_divergences(6 * mu)
    # The control: the price of one run would be too little.
    assert brute_force(law, mu, 6 * mu) > 2 * profiles.gaussian_delta(mu, 6 * mu)


@pytest.mark.parametrize("mean", [1.003, 1.01])
def test_of_hardly_more_than_one_run_the_price_is_that_of_one(mean):
    claimed = BestOf(Repetitions(mean, 1.0), 0.5)
    for epsilon in (0.5, 1.5):
        single = profiles.gaussian_delta(0.5, epsilon)
        assert single < claimed.delta(epsilon) < 1.1 * single


@laws
def test_slopes_are_those_of_the_generating_function(mean, shape):
    law, found = chances(mean, shape, 1000), Repetitions(mean, shape)
    p = np.linspace(0, 1, 11)
    slopes = law[1:] * np.arange(1, len(law))
    expected = np.polynomial.polynomial.polyval(1 - p, slopes)
    np.testing.assert_allclose(found.slope(p), expected, rtol=1e-6)


def selected(law, base):
    """The law of the smallest of K outcomes, with outcomes in order."""
    beyond = np.concatenate([[1.0], 1 - np.cumsum(base)])
    generated = np.sum(law[:, None] * beyond[None] ** np.arange(len(law))[:, None], 0)
    found = generated[:-1] - generated[1:]
    return np.concatenate([found, [law[0]]])  # the last: no repetition at all


def exact_delta(left, right, epsilon):
    return max(
        np.maximum(p - math.exp(epsilon) * q, 0).sum()
        for p, q in ((left, right), (right, left))
    )


def binned(shift):
    """A unit Gaussian's outcomes told in 400 bins: no more private than all of it."""
    edges = np.concatenate([[-np.inf], np.linspace(-7, 7, 399), [np.inf]])
    return np.diff(scipy.stats.norm.cdf(edges - shift))


EPSILONS = (0.5, 1.0, 2.0, 3.0)


@laws
def test_the_claim_holds_for_the_exact_law_of_two_neighbours(mean, shape):
    law = chances(mean, shape, 1000)
    left, right = selected(law, binned(0.0)), selected(law, binned(MU))
    claimed = profiles.profile(Repetitions(mean, shape).event(GAUSSIAN), REPLACE)
    exact = np.asarray([exact_delta(left, right, e) for e in EPSILONS])
    promised = np.asarray([claimed(e) for e in EPSILONS])
    assert (exact <= promised).all()
    single = profiles.gaussian_delta(MU, np.asarray(EPSILONS))
    # The control: one repetition's price would not cover the best of many.
    assert (exact > single).any()


def tilted(shift, share):
    """Two kinds of candidates, which a record moves in opposite directions."""
    sides = share * binned(shift), (1 - share) * binned(-shift)
    return np.stack(sides, axis=1).ravel()  # in order of their values


@laws
@pytest.mark.parametrize("share", [0.5, 0.1, 0.9])
def test_the_claim_holds_where_a_record_moves_candidates_apart(mean, shape, share):
    law = chances(mean, shape, 1000)
    # Half the shift, so that two neighbours are one shift apart.
    pair = [selected(law, tilted(s * MU / 2, share)) for s in (1, -1)]
    event = Repetitions(mean, shape).event(GAUSSIAN)
    claimed = profiles.profile(event, REPLACE)
    for epsilon in (0.0, *EPSILONS):
        assert 0 < exact_delta(*pair, epsilon) <= claimed(epsilon)


def interleaved(shift, share, offset):
    """As `tilted`, but one kind of candidate is better by a public number of bins."""
    sides = share * binned(shift), (1 - share) * binned(-shift)
    bins = np.arange(len(sides[0]))
    order = np.argsort(np.concatenate([bins, bins + offset]), kind="stable")
    return np.concatenate(sides)[order]


def worst_epsilon(law, delta):
    """The largest exact epsilon of some neighbours, one shift apart."""
    found = [[selected(law, binned(shift)) for shift in (0.0, MU)]]
    for share in (0.1, 0.5, 0.9):
        for offset in (-85, -28, 28, 85):  # one and three standard deviations
            sides = (interleaved(s * MU / 2, share, offset) for s in (1, -1))
            found.append([selected(law, side) for side in sides])
    return max(
        scipy.optimize.brentq(
            lambda e, pair=pair: exact_delta(*pair, e) - delta, 0, 20, xtol=1e-4
        )
        for pair in found
    )


@laws
@pytest.mark.parametrize(("delta", "slack"), [(1e-2, 1.6), *slow((1e-5, 1.2))])
def test_the_claim_holds_for_the_worst_neighbours_and_little_more(
    mean, shape, delta, slack
):
    exact = worst_epsilon(chances(mean, shape, 400), delta)
    event = Repetitions(mean, shape).event(GAUSSIAN)
    claimed = profiles.epsilon(event, REPLACE, delta)
    assert exact < claimed < slack * exact
    # The control: what one repetition costs is refuted.
    assert profiles.gaussian_epsilon(MU, delta) < exact


@laws
def test_the_number_cut_at_the_steps_is_covered_by_the_failure(mean, shape):
    steps = 40
    law = chances(mean, shape, 1000)
    cut = law[: steps + 1].copy()
    cut[steps] += law[steps + 1 :].sum()
    pair = [selected(cut, binned(shift)) for shift in (0.0, MU)]
    made = Selection(
        "best",
        1,
        (dpb.privacy.Query("records", 10, 1.0),),
        dpb.privacy.Gaussian(2.0, precision="float"),
        Repetitions(mean, shape),
        steps,
    )
    assert made.failure == pytest.approx(law[steps + 1 :].sum(), rel=1e-6, abs=1e-13)
    ledger = dpb.privacy.Ledger((made,))
    for epsilon in EPSILONS:
        assert exact_delta(*pair, epsilon) <= ledger.delta(epsilon)


def test_selections_compose_with_each_other_and_with_gaussians():
    selection = Repetitions(10.0).event(GAUSSIAN)
    one, two = (
        profiles.epsilon(
            dp_accounting.SelfComposedDpEvent(selection, count), REPLACE, 1e-5
        )
        for count in (1, 2)
    )
    both = dp_accounting.ComposedDpEvent([selection, GAUSSIAN])
    more = profiles.epsilon(both, REPLACE, 1e-5)
    assert one < more < two < 2 * one
    sampled = dp_accounting.PoissonSampledDpEvent(0.1, GAUSSIAN)
    with pytest.raises(ValueError, match="PoissonSampledDpEvent"):
        profiles.epsilon(
            dp_accounting.ComposedDpEvent([selection, sampled]), REPLACE, 1e-5
        )


def test_no_noise_is_not_private():
    event = Repetitions(10.0).event(dp_accounting.GaussianDpEvent(0.0))
    assert profiles.epsilon(event, REPLACE, 1e-5) == math.inf
    assert profiles.delta(event, REPLACE, 1.0) == 1.0


@pytest.mark.parametrize("shape", [1.0, math.inf])
def test_a_plan_reaches_its_budget_and_says_what_it_rests_on(shape):
    problem = dpb.FiniteSum(
        lambda w, z: jnp.sum((w - z) ** 2), w_set=dpb.sets.Box(-1.0, 1.0)
    )
    solver = dpb.search.RepeatAndSelect(400, 1.0, mean=10.0, shape=shape)
    budget = dpb.PrivacyBudget(2.0, 1e-5)
    plan = dpb.calibrate(problem, solver, budget, sizes=100, w0=jnp.zeros(2))
    assert 1.99 < plan.report.epsilon <= 2.0
    assert plan.solver.ledger(problem, 100).delta(2.0) <= 1e-5
    assert plan.report.status is dpb.privacy.Status.ENFORCED
    assert (
        plan.report.accountant == "profile and Renyi divergences of private selection"
    )
    (note,) = plan.report.certificates
    assert "drawn once, never shown" in note
    assert "overflow" not in note
    with pytest.raises(ValueError, match="no noise for delta = 0"):
        dpb.calibrate(problem, solver, dpb.PrivacyBudget(2.0, 0.0), sizes=100)


def test_too_few_steps_are_refused_with_a_number_that_serves():
    with pytest.raises(ValueError, match=r"give num_steps=(\d+) with") as caught:
        dpb.search.RepeatAndSelect(10, 1.0, mean=10.0)
    enough = int(str(caught.value).split("num_steps=")[2].split()[0])
    made = [Repetitions(10.0).beyond(n)[-1] for n in (enough - 1, enough)]
    assert made[1] < 1e-9 <= made[0]


@pytest.mark.parametrize(
    "fields",
    [{"mean": 1.0}, {"mean": math.nan}, {"mean": 5.0, "shape": -0.5}, {"mean": 1e999}],
)
def test_laws_that_are_none_are_refused(fields):
    with pytest.raises(ValueError, match=r"Repetitions: (mean|shape) must"):
        dpb.search.RepeatAndSelect(100, 1.0, **fields)


PROBLEM = dpb.FiniteSum(lambda w, z: (w[0] - z) ** 2, w_set=dpb.sets.Box(0.0, 1.0))
DATA, W0 = jnp.zeros(10), jnp.full(1, 0.5)


def exact(shape, mean=2.0):
    """Hardly any noise, so that the answer tells the smallest of K uniform numbers."""
    solver = dpb.search.RepeatAndSelect(24, 1.0, mean=mean, shape=shape)
    return solver.with_noise(1e-4).with_precision("float").with_sizes(10)


def answers(solver, runs=4000):
    def one(key):
        return dpb.solve(PROBLEM, solver, DATA, W0, key=key).value[0]

    keys = jax.random.split(jax.random.key(3), runs)
    return np.asarray(
        jax.jit(lambda keys: jax.lax.map(one, keys, batch_size=200))(keys)
    )


@pytest.fixture(scope="module")
def drawn():
    return {shape: answers(exact(shape)) for shape in (1.0, math.inf)}


@pytest.mark.parametrize("shape", [1.0, *slow(math.inf)])
def test_the_answer_is_the_best_of_a_number_with_the_stated_law(drawn, shape):
    def beyond(mean):
        law = chances(mean, shape, 400)
        return lambda v: float(np.sum(law[1:] * (1 - v) ** np.arange(1, len(law))))

    found, none = drawn[shape], chances(2.0, shape, 400)[0]
    assert np.mean(found == 0.5) == pytest.approx(none, abs=0.03)
    points = found[found != 0.5]

    def p_value(mean):
        law = beyond(mean)
        cdf = np.vectorize(lambda v: 1 - law(v) / law(0.0))
        return scipy.stats.kstest(points, cdf).pvalue

    assert p_value(2.0) > 1e-3
    assert p_value(2.5) < 1e-6  # the control: another mean is seen


class ShowsTheBestSoFar(dpb.search.RepeatAndSelect):
    def released(self, state):
        return state.best


def shown_before_the_end(kind):
    solver = kind(24, 1.0, mean=2.0).with_noise(0.1).with_sizes(10)
    run = jax.jit(dpb.solve, static_argnames="trajectory")
    path = run(
        PROBLEM, solver, DATA, W0, key=jax.random.key(0), trajectory=True
    ).trajectory
    return bool(jnp.any(path[:-1] != W0[None]))


def test_nothing_shows_before_the_last_step():
    assert not shown_before_the_end(dpb.search.RepeatAndSelect)
    assert shown_before_the_end(ShowsTheBestSoFar)  # the control


class TellsTheNumber(dpb.search.RepeatAndSelect):
    def adversary_view(self, state):
        return state.w, state.value, state.repeats


def shows_what_is_hidden(kind):
    solver = kind(24, 1.0, mean=2.0).with_noise(0.1).with_sizes(10)
    state = jax.tree.map(jnp.copy, solver.init(PROBLEM, W0))
    shown = {id(v) for v in jax.tree.leaves(solver.adversary_view(state))}
    hidden = {id(state.repeats), id(state.best), id(state.best_value), id(state.t)}
    return bool(shown & hidden)


def test_what_is_shown_does_not_hold_the_number():
    assert not shows_what_is_hidden(dpb.search.RepeatAndSelect)
    assert shows_what_is_hidden(TellsTheNumber)  # the control
