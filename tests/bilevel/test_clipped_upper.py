"""ImplicitBilevel with upper records clipped: what it computes and what it charges."""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpbilevel as dpb
from dpbilevel import audit
from dpbilevel.audit.recording import open_value
from dpbilevel.audit.worst_cases import BEYOND
from dpbilevel.bilevel.certificates import certified, sensitivities
from dpbilevel.bilevel.certificates.certified import Adapted
from tests.bilevel.test_constants import SIZES as SIX
from tests.bilevel.test_constants import exact_solution, tuning, worst_neighbours
from tests.bilevel.test_implicit import implicit, planned_implicit, value_at, wide
from tests.cases import Audited, Case
from tests.problems import EXACT, LEVELS

GROUPS = jnp.asarray([0, 0, 1, 1])
TUNING = dpb.linear_tuning(dpb.Logistic(), GROUPS, bounds=(-1.0, 1.0))
SIZES = TUNING.sizes_of(LEVELS)
X = np.asarray([0.3, -0.2])
SHORT = 0.02  # at which most records of LEVELS are clipped
CLIP = BEYOND / 2  # and those of the canaries
KEY = 0

CONTRACT = {
    "clipped_upper": Case(
        EXACT.problem,
        implicit(upper_clip_norm=2.0),
        EXACT.data,
        EXACT.w0,
        "disjoint",
        adaptive=True,  # noise follows the rounding of as many coordinates as there are
    ),
}
AUDITS = {
    f"ImplicitBilevel, clipped, {people}": Audited(
        planned_implicit(people, scale, upper_clip_norm=CLIP)
    )
    for people, scale in (("disjoint", 0.5), ("overlapping", 1.0), ("shared", 1.0))
}


def read(problem, x, data, clip_norm, precision="float", people="overlapping"):
    query = certified.HypergradientQuery(
        problem, problem.sizes_of(data, people), clip_norm
    )
    start = jnp.asarray(x), jnp.zeros(4, jnp.asarray(x).dtype)
    return jax.jit(lambda w, d: query.read(w, d, precision=precision, key=None))(
        start, data
    )


def exact_contributions(problem, x, data, size=3):
    """Those of all upper records, by Newton's method and a dense inverse."""
    lower, y = exact_solution(problem, x, data, size)

    def slope(x):
        return jax.grad(lambda y: dpb.debug.lower_objective(problem, x, y, data))(y)

    moves = -jnp.linalg.solve(jax.hessian(lower)(y), jax.jacobian(slope)(x))
    public = problem.upper_public or (lambda x, y: 0.0)

    @functools.partial(jax.vmap, in_axes=0)
    def one(record):
        def loss(x, y):
            return problem.upper(x, y, record) + public(x, y)

        direct, turned = jax.grad(loss, (0, 1))(x, y)
        return direct + turned @ moves

    return one(data.upper)


def clipped_at(norm, values):
    lengths = jnp.linalg.norm(values, axis=1, keepdims=True)
    return jnp.mean(values * jnp.minimum(1.0, norm / lengths), axis=0)


@pytest.mark.parametrize(
    ("precision", "public"),
    [("float", False), pytest.param("grid", True, marks=pytest.mark.slow)],
)
def test_the_value_is_the_mean_of_contributions_each_clipped(precision, public, x64):
    problem, data = TUNING, wide(LEVELS)
    if public:
        upper_public = lambda x, y: 0.01 * jnp.sum(jnp.sin(y)) * jnp.sum(x)  # noqa: E731
        problem = dataclasses.replace(problem, upper_public=upper_public)
        terms = dataclasses.replace(
            problem.constants,
            terms=(problem.upper, problem.lower, upper_public, problem.lower_public),
        )
        problem = dataclasses.replace(problem, constants=terms)
    exact = jax.jit(lambda x: exact_contributions(problem, x, data, 4))
    contributions = exact(jnp.asarray(X))
    assert 0.3 < jnp.mean(jnp.linalg.norm(contributions, axis=1) > SHORT) < 1
    (found,) = open_value(read(problem, X, data, SHORT, precision))
    wanted = clipped_at(SHORT, contributions)
    np.testing.assert_allclose(found, wanted, atol=2e-5)
    # The control: without clips it is somewhere else.
    assert jnp.linalg.norm(wanted - jnp.mean(contributions, axis=0)) > 2e-3


@pytest.mark.slow
def test_a_long_clip_norm_leaves_the_hypergradient_as_it_is(x64):
    data = wide(LEVELS)
    plain, sealed = value_at(TUNING, jnp.asarray(X), data)
    long = read(TUNING, X, data, 1e3)
    np.testing.assert_allclose(open_value(long)[0], plain, atol=1e-12)
    assert float(long.sensitivity()) == pytest.approx(
        float(sealed.sensitivity()), rel=1e-6
    )


@pytest.mark.parametrize("clip_norm", [1e-3, 0.05, 10.0])
def test_an_upper_record_is_charged_its_clip_and_no_constant(clip_norm, x64):
    shares, plain = (
        sensitivities.hypergradient_sensitivity(
            certificate, SIZES, jnp.float64, jnp.asarray(X), (2, 4)
        )
        for certificate in (
            Adapted(TUNING.constants, clip_norm),
            TUNING.constants,
        )
    )
    largest = float(TUNING.constants.bounds(SIZES, jnp.asarray(X)).gradient)
    least = min(clip_norm, largest)
    assert float(shares.upper) == pytest.approx(2 * least / SIZES.upper, rel=1e-12)
    assert float(shares.lower) <= 2 * least
    assert float(shares.upper) < float(plain.upper)
    if clip_norm == 10.0:
        assert float(shares.lower) == pytest.approx(float(plain.lower), rel=1e-3)


@pytest.mark.parametrize(
    "people",
    ["disjoint"]
    + [pytest.param(v, marks=pytest.mark.slow) for v in ("overlapping", "shared")],
)
def test_every_person_sees_the_noise_that_the_ledger_claims(people, x64):
    data = dpb.Levels.shared(wide(LEVELS.lower)) if people == "shared" else wide(LEVELS)
    sizes, multiplier = TUNING.sizes_of(data, people), 3.0
    solver = implicit(num_steps=1, upper_clip_norm=0.1).with_noise(multiplier)
    release = solver.release(TUNING, sizes)
    for x in ([-1.0, -1.0], [-1.0, 1.0], [1.0, 1.0]):
        sealed = read(TUNING, x, data, 0.1, people=people)
        std = multiplier * float(sealed.sensitivity())
        own = sensitivities.hypergradient_sensitivity(
            Adapted(TUNING.constants, 0.1), sizes, jnp.float64, jnp.asarray(x)
        )
        seen = {
            "upper": std / float(own.upper),
            "lower": std / float(own.lower),
            "person": std / float(own.upper + own.lower),
        }
        events = solver.ledger(TUNING, sizes).events()
        for person, event in events.items():
            claims = [
                e.event.noise_multiplier for e in getattr(event, "events", [event])
            ]
            claimed = sum(c**-2 for c in claims) ** -0.5
            assert seen[person] >= claimed * (1 - 1e-6)
    assert {query.role for query in release.queries} == {"upper", "lower"}


@pytest.mark.slow
@pytest.mark.parametrize("role", ["upper", "lower"])
def test_no_neighbours_are_further_apart_than_charged(role, x64):
    problem, x, norm = tuning("logistic"), jnp.asarray([0.5, 0.3]), 0.03

    def value(problem, x, data):
        return clipped_at(norm, exact_contributions(problem, x, data))

    found = worst_neighbours(problem, x, role, rounds=8, count=200, hypergradient=value)
    here = Adapted(problem.constants, norm).bounds(SIX, x)
    charged = min(float(getattr(here, role)), 2 * norm)
    assert found <= charged * (1 + 1e-9)
    assert found > (0.95 if role == "upper" else 0.1) * charged


def searched(role, precision, clip_norm, charged_norm, tries=200, **changes):
    """The largest change that a search among records finds, over what is charged."""
    problem = dpb.linear_tuning(dpb.Logistic(), jnp.asarray([0, 0, 1]), bounds=(0, 1))
    rng = np.random.default_rng(2)
    rows = {
        "features": jnp.asarray(rng.normal(size=(4, 3)), jnp.float32),
        "label": jnp.asarray(np.sign(rng.normal(size=4)), jnp.float32),
    }
    sizes, x = dpb.Sizes(4, 4), jnp.asarray([0.2, 0.4])
    if changes:  # the constants are those of another loss
        changed = dataclasses.replace(problem, **changes)
        terms = dataclasses.replace(
            problem.constants,
            terms=(
                changed.upper,
                changed.lower,
                changed.upper_public,
                changed.lower_public,
            ),
        )
        problem = dataclasses.replace(changed, constants=terms)

    def query(records):
        levels = {"upper": rows, "lower": rows, role: records}
        sealed = certified.HypergradientQuery(problem, sizes, clip_norm).read(
            (x, jnp.zeros(3)), dpb.Levels(**levels), precision=precision, key=None
        )
        certificate = Adapted(problem.constants, charged_norm)
        claimed = sensitivities.hypergradient_sensitivity(
            certificate, sizes, jnp.float32, x, (2, 3)
        )
        half = getattr(claimed, role) / 2
        return eqx.tree_at(lambda b: b.contribution, sealed, half)

    return audit.sensitivity_search(
        query, rows, key=jax.random.key(KEY), tries=tries, rounds=4
    )


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float", "grid"])
@pytest.mark.parametrize("role", ["upper", "lower"])
def test_hostile_records_move_the_computed_value_no_further(role, precision):
    outcome = searched(role, precision, 0.02, 0.02)
    assert outcome.passed, str(outcome)
    assert outcome.ratio > 0.1


@pytest.mark.slow
def test_a_clip_at_twice_the_norm_that_is_charged_is_found():
    assert not searched("upper", "float", 0.04, 0.02).passed


def steep(x, y, record):
    """Constants of a logistic loss say nothing about it."""
    return 1e3 * jnp.sum(y * record["features"]) + 50 * jnp.sum(x) * record["label"]


def test_upper_records_keep_their_guarantee_where_declared_constants_are_wrong():
    outcome = searched("upper", "grid", 0.02, 0.02, 50, upper=steep)
    assert outcome.passed, str(outcome)
    assert outcome.ratio > 0.9


@pytest.mark.slow
def test_without_the_clip_they_do_not(monkeypatch):  # the control
    plain = certified.HypergradientQuery
    monkeypatch.setattr(certified, "HypergradientQuery", lambda *v: plain(*v[:2]))
    assert not searched("upper", "grid", None, 0.02, upper=steep).passed


def test_the_report_says_what_rests_on_clipping_and_what_on_constants(x64):
    plan = dpb.calibrate(
        EXACT.problem,
        implicit(upper_clip_norm=0.25),
        dpb.PrivacyBudget(1.0, 1e-6),
        sizes=dpb.Sizes(20, 40, "disjoint"),
    )
    assert plan.report.status is dpb.privacy.Status.CONDITIONAL
    (text,) = [t for t in plan.report.assumptions if "upper records rests" in t]
    assert "clipping: each one's contribution is clipped at 0.25" in text
    assert "that of lower records rests on the constants" in text
    (row,) = plan.report.ledger
    assert row.clip_norm == pytest.approx(0.25)


@pytest.mark.parametrize("norm", [0.0, -1.0, float("nan"), "1"])
def test_a_norm_that_is_none_is_refused(norm):
    with pytest.raises(ValueError, match=r"upper_clip_norm must be .*positive"):
        implicit(upper_clip_norm=norm)
