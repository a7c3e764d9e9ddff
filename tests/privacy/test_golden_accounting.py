import functools
import math

import dp_accounting
import numpy as np
import pytest
from scipy.stats import norm

import dpbilevel as dpb
from dpbilevel.privacy.accounting import profiles
from tests.privacy import reference_accounting as reference
from tests.privacy.golden import (
    ADD_OR_REMOVE,
    DISJOINT,
    OVERLAPPING,
    REPLACE,
    SHARED,
    Gaussian,
    Poisson,
    Row,
    agrees,
    delta,
    hockey_stick,
    inverse_gaussian,
    subset,
    tilted,
    times,
)

BOUND = math.inf  # the slack of a row whose reference is only a lower bound


def gaussian_rows():
    cases = [
        (REPLACE, 1.0, 1, 1.0),
        (ADD_OR_REMOVE, 1.0, 1, 1.0),
        (REPLACE, 4.0, 25, 0.5),
        (ADD_OR_REMOVE, 0.05, 3, 600.0),
        (REPLACE, 2000.0, 10, 1e-3),
        (ADD_OR_REMOVE, 1000.0, 1_000_000, 8.1655),
        (REPLACE, 0.3, 4, 50.0),
    ]
    for relation, multiplier, count, epsilon in cases:
        event = times(Gaussian(multiplier), count)
        yield (
            f"{count} gaussians of {multiplier} at {epsilon}, {relation.value}",
            Row(
                delta(event, relation, epsilon),
                functools.partial(
                    reference.gaussian, math.sqrt(count) / multiplier, epsilon
                ),
                functools.partial(
                    reference.gaussian,
                    count / multiplier if count > 1 else 2 / multiplier,
                    epsilon,
                ),
                1e-8,
            ),
        )
    for multiplier, target in [(1.0, 1e-15), (0.7, 0.3), (500.0, 1e-6), (0.1, 1e-5)]:
        event = Gaussian(multiplier)
        yield (
            f"epsilon of a gaussian of {multiplier} at {target}",
            Row(
                functools.partial(profiles.epsilon, event, REPLACE, target),
                functools.partial(inverse_gaussian, 1 / multiplier, target),
                functools.partial(inverse_gaussian, 2 / multiplier, target),
                1e-8,
            ),
        )


def calibration_rows():
    cases = [
        (REPLACE, 1, 1.0, 1e-5),
        (ADD_OR_REMOVE, 30, 1.0, 1e-5),
        (REPLACE, 7, 1e-3, 1e-15),
        (ADD_OR_REMOVE, 5, 50.0, 0.5),
        (REPLACE, 100, 50.0, 1e-12),
    ]
    for relation, steps, epsilon, target in cases:
        hand = functools.partial(calibrated_delta, relation, steps, epsilon, target)
        yield (
            f"calibrated to {epsilon}, {target} in {steps}, {relation.value}",
            Row(lambda target=target: target, hand, lambda f=hand: f(wrong=2), 1e-4),
        )
    for people in (DISJOINT, OVERLAPPING):
        hand = functools.partial(calibrated_penalty, people)
        yield (
            f"calibrated penalty, {people.value}",
            Row(lambda: 1e-5, hand, lambda f=hand: f(swapped=True), 1e-4),
        )


def calibrated_delta(relation, steps, epsilon, target, wrong=1):
    """By hand from the noise's standard deviation: clip norm 3, 400 records."""
    solver = dpb.NoisyGD(steps, 3.0, step_size=0.1, neighbours=relation)
    problem, budget = dpb.FiniteSum(lambda w, z: w * z), dpb.PrivacyBudget
    plan = dpb.calibrate(problem, solver, budget(epsilon, target), sizes=400)
    moved = {REPLACE: 2 * 3.0 / 400, ADD_OR_REMOVE: 3.0 / 400}[relation]
    std = plan.report.ledger[0].noise_std
    return reference.gaussian(wrong * math.sqrt(steps) * moved / std, epsilon)


def calibrated_penalty(people, swapped=False):
    """By hand from standard deviations and what each kind of person moves."""
    problem = dpb.BilevelProblem(
        lambda x, y, z: x * y * z, lambda x, y, z: (y - x * z) ** 2
    )
    inner = dpb.NoisyGD(4, 1.0, step_size=0.1)
    solver = dpb.PenaltyBilevel(3, 5.0, inner, step_size=0.1)
    sizes = dpb.Sizes(500, 800, people)
    budget = dpb.PrivacyBudget(1.0, 1e-5)
    report = dpb.calibrate(problem, solver, budget, sizes=sizes).report
    apart = (people is DISJOINT) is not swapped
    squares = {"upper": 0.0, "lower": 0.0, "person": 0.0}
    for row in report.ledger:
        moved = {r: part.sensitivity for r, part in row.roles.items()}
        moved["person"] = sum(moved.values())
        for person, distance in moved.items():
            squares[person] += row.count * (distance / row.noise_std) ** 2
    kinds = ("upper", "lower") if apart else ("person",)
    return max(reference.gaussian(math.sqrt(squares[k]), 1.0) for k in kinds)


def ledger_delta(people, epsilon, sampling, count=6, **fields):
    """A release of noise multiplier 3 that reads both levels, C/n = 1/500 and 3/2000.

    One person in both moves it by S = 2 (1/500 + 3/2000), in units of which the shares
    are 4/7 and 3/7. Joint queries are of as many records, so the lower one is
    0.75/500 there.
    """
    lower = (500, 0.75) if fields.get("joint") else (2000, 3.0)
    queries = (
        dpb.privacy.Query("upper", 500, 1.0, sampling),
        dpb.privacy.Query("lower", *lower, sampling),
    )
    release = dpb.privacy.Release(
        "a", count, queries, dpb.privacy.Gaussian(3.0), **fields
    )
    return dpb.privacy.Ledger((release,), people).delta(epsilon)


def role_rows():
    full, sampled = dpb.FullBatch(), dpb.Poisson(0.25)
    mu, upper, lower = 1 / 3, 4 / 7 / 3, 3 / 7 / 3
    truths = {
        DISJOINT: math.sqrt(6) * upper,
        OVERLAPPING: math.sqrt(6) * mu,
        SHARED: math.sqrt(6) * mu,
    }
    for people, whole in truths.items():
        other = truths[DISJOINT if people is not DISJOINT else OVERLAPPING]
        yield (
            f"both levels in full, {people.value}",
            Row(
                functools.partial(ledger_delta, people, 0.5, full),
                functools.partial(reference.gaussian, whole, 0.5),
                functools.partial(reference.gaussian, other, 0.5),
                1e-8,
            ),
        )
    replaced, composed = reference.replaced_loss, reference.composed
    single = functools.partial(composed, [(replaced(0.25, upper), 6)], 0.1)
    roots = [(replaced(0.25, mu * math.sqrt(part)), 6) for part in (4 / 7, 3 / 7)]
    split = functools.partial(composed, roots, 0.1)
    straight = [(replaced(0.25, part), 6) for part in (upper, lower)]
    unsplit = functools.partial(composed, straight, 0.1)
    joint = functools.partial(composed, [(replaced(0.25, mu), 6)], 0.1)
    cases = [
        ("disjoint poisson", DISJOINT, {}, single, split),
        ("overlapping poisson, the noise split", OVERLAPPING, {}, split, unsplit),
        ("shared poisson, two batches", SHARED, {}, split, joint),
        ("shared poisson, one batch", SHARED, {"joint": True}, joint, split),
    ]
    for name, people, fields, truth, mistake in cases:
        claimed = functools.partial(ledger_delta, people, 0.1, sampled, **fields)
        yield name, Row(claimed, truth, mistake)


def poisson_rows():
    singles = [(0.01, 0.7, 0.1), (0.3, 2.0, 0.5), (1e-6, 0.5, 1e-4), (0.9, 1.0, 2.0)]
    for rate, multiplier, epsilon in singles:
        mu, event = 1 / multiplier, Poisson(rate, Gaussian(multiplier))
        replaced = functools.partial(reference.replaced, rate, mu, epsilon)
        removed = functools.partial(reference.removed, rate, mu, epsilon)
        name = f"poisson {rate} of {multiplier} at {epsilon}"
        yield f"{name}, replace", Row(delta(event, REPLACE, epsilon), replaced, removed)
        yield (
            f"{name}, add or remove",
            Row(delta(event, ADD_OR_REMOVE, epsilon), removed, replaced),
        )
    composed = [
        (0.3, 0.7, 10, 2.0),
        (0.05, 1.0, 100, 1.0),
        (0.01, 2.0, 1000, 0.3),
        (0.1, 3.0, 10_000, 10.0),
    ]
    for rate, multiplier, count, epsilon in composed:
        truths = {
            REPLACE: [reference.replaced_loss(rate, 1 / multiplier)],
            ADD_OR_REMOVE: [
                reference.removed_loss(rate, 1 / multiplier),
                reference.added_loss(rate, 1 / multiplier),
            ],
        }
        worst = {
            k: functools.partial(largest, v, count, epsilon) for k, v in truths.items()
        }
        event = times(Poisson(rate, Gaussian(multiplier)), count)
        for relation, other in ((REPLACE, ADD_OR_REMOVE), (ADD_OR_REMOVE, REPLACE)):
            yield (
                f"{count} poisson {rate} of {multiplier}, {relation.value}",
                Row(delta(event, relation, epsilon), worst[relation], worst[other]),
            )
    for relation in (REPLACE, ADD_OR_REMOVE):
        event = times(Poisson(1 - 1e-9, Gaussian(1.5)), 3)
        yield (
            f"nearly full batches, {relation.value}",
            Row(
                delta(event, relation, 1.0),
                functools.partial(reference.gaussian, math.sqrt(3) / 1.5, 1.0),
                functools.partial(reference.gaussian, 2 * math.sqrt(3) / 1.5, 1.0),
                1e-6,
            ),
        )


def largest(losses, count, epsilon):
    return max(reference.composed([(loss, count)], epsilon) for loss in losses)


def overflow_rows():
    for rate, capacity, count, epsilon in [
        (0.25, 64, 5, 0.5),
        (0.25, 70, 40, 2.0),
        (0.0625, 22, 3, 0.0625),
    ]:
        sampling = dpb.Poisson(rate, capacity=capacity)  # rates are realised exactly
        query = dpb.privacy.Query("records", 191, 1.0, sampling)
        release = dpb.privacy.Release("a", count, (query,), dpb.privacy.Gaussian(1.5))
        claimed = functools.partial(dpb.privacy.Ledger((release,)).delta, epsilon)

        def truth(factor=None, args=(rate, capacity, count, epsilon)):
            rate, capacity, count, epsilon = args
            factor = 1 + math.exp(epsilon) if factor is None else factor
            loss = reference.replaced_loss(rate, 1 / 1.5)
            failure = count * reference.overflow(192, rate, capacity)  # of all rows
            return reference.composed([(loss, count)], epsilon) + factor * failure

        yield (
            f"{count} draws of at most {capacity}",
            Row(claimed, truth, functools.partial(truth, 1.0)),
        )


def subset_rows():
    for rate, multiplier, epsilon in [(0.01, 0.7, 0.1), (0.3, 2.0, 0.5), (0.9, 1, 2.0)]:
        yield (
            f"a subset of {rate}, multiplier {multiplier}",
            Row(
                delta(subset(rate, multiplier), REPLACE, epsilon),
                functools.partial(reference.removed, rate, 1 / multiplier, epsilon),
                functools.partial(reference.replaced, rate, 1 / multiplier, epsilon),
            ),
        )
    for rate, multiplier, count, epsilon in [
        (0.05, 1.0, 100, 1.0),
        (0.01, 2.0, 1000, 0.3),
        (0.5, 5.0, 30, 1.0),
    ]:
        parts = [(reference.subset_loss(rate, 1 / multiplier), count)]
        wrong = [(reference.removed_loss(rate, 1 / multiplier), count)]
        yield (
            f"{count} subsets of {rate}",
            Row(
                delta(times(subset(rate, multiplier), count), REPLACE, epsilon),
                functools.partial(reference.composed, parts, epsilon),
                functools.partial(reference.composed, wrong, epsilon),
            ),
        )


def mixed_rows():
    full, sampled, fixed = Gaussian(9.0), Poisson(0.1, Gaussian(1.5)), subset(0.1, 1.5)
    events = {
        "all three": [times(full, 10), times(sampled, 20), times(fixed, 20)],
        "full and poisson": [times(sampled, 20), times(full, 10)],
    }
    losses = {
        REPLACE: [reference.replaced_loss(0.1, 1 / 1.5)],
        ADD_OR_REMOVE: [
            reference.removed_loss(0.1, 1 / 1.5),
            reference.added_loss(0.1, 1 / 1.5),
        ],
    }
    whole, part = reference.gaussian_loss(1 / 9), reference.subset_loss(0.1, 1 / 1.5)

    def truth(relation, gaussians, subsets):
        rest = [(whole, gaussians), (part, subsets)]
        return max(
            reference.composed([(loss, 20), *rest], 1.0) for loss in losses[relation]
        )

    for name, relation, subsets in [
        ("all three", REPLACE, 20),
        ("full and poisson", REPLACE, 0),
        ("full and poisson", ADD_OR_REMOVE, 0),
    ]:
        event = dp_accounting.ComposedDpEvent(events[name])
        yield (
            f"{name}, {relation.value}",
            Row(
                delta(event, relation, 1.0),
                functools.partial(truth, relation, 10, subsets),
                functools.partial(truth, relation, 0, subsets),
            ),
        )


def exponential_rows():
    for slope, convexity, count, epsilon in [(1.0, 4.0, 1, 0.5), (0.3, 0.25, 9, 1.0)]:
        mu = slope * math.sqrt(count / convexity)
        yield (
            f"{count} regularised exponential mechanisms, {slope}, {convexity}",
            Row(
                delta(
                    times(Gaussian(math.sqrt(convexity) / slope), count),
                    REPLACE,
                    epsilon,
                ),
                functools.partial(reference.gaussian, mu, epsilon),
                functools.partial(
                    reference.gaussian, mu / math.sqrt(convexity), epsilon
                ),
                1e-8,
            ),
        )
    # Attained when F is the quadratic itself; a kink or a quartic loses less.
    potentials = {
        "quadratic": (lambda x: 2 * x**2, 1e-4),
        "kink": (lambda x: 2 * x**2 + 3 * np.abs(x), BOUND),
        "quartic": (lambda x: 2 * x**2 + 0.2 * x**4, BOUND),
    }
    for name, (potential, slack) in potentials.items():
        pair = tilted(potential, 1.5)
        yield (
            f"exponential mechanism with a {name}",
            Row(
                delta(Gaussian(math.sqrt(4.0) / 1.5), REPLACE, 0.4),
                functools.partial(hockey_stick, pair, 0.4),
                functools.partial(hockey_stick, tilted(potential, 3 * 1.5), 0.4),
                slack,
            ),
        )


def total_variation_rows():
    """Randomized response, either answer's chance moved by the distance: attained."""
    for epsilon, distance in [(1e-3, 1e-6), (1.0, 1e-3), (4.0, 1e-4)]:
        keep = math.exp(epsilon) / (1 + math.exp(epsilon))
        p = np.array([keep + distance, 1 - keep - distance])
        q = np.array([1 - keep - distance, keep + distance])
        yield (
            f"a sampler {distance} off at {epsilon}",
            Row(
                functools.partial(profiles.total_variation_delta, epsilon, distance),
                functools.partial(hockey_stick, (p, q), epsilon),
                functools.partial(
                    lambda e, t: 2 * math.exp(e) * t, epsilon, 2 * distance
                ),
                1e-8,
            ),
        )
    for epsilon, distance in [(0.5, 1e-5), (3.0, 1e-9)]:
        event = Gaussian(1.0)
        exact = reference.gaussian(1.0, epsilon)
        yield (
            f"an approximate sampler of a gaussian law, {distance} at {epsilon}",
            Row(
                lambda e=epsilon, t=distance, event=event: (
                    profiles.total_variation_delta(
                        e, t, profiles.delta(event, REPLACE, e)
                    )
                ),
                lambda e=epsilon, t=distance, d=exact: d + t + math.exp(e) * t,
                lambda d=exact: d,
                1e-10,
            ),
        )


def extreme_rows():
    # The first two: a transform alone is below the truth here by rounding.
    many = times(subset(1.0, math.sqrt(1e5)), 100_000)
    for epsilon in (7.034, 6.7):
        yield (
            f"a hundred thousand releases at a tiny delta, {epsilon}",
            Row(
                delta(many, REPLACE, epsilon),
                functools.partial(reference.gaussian, 1.0, epsilon),
                functools.partial(reference.gaussian, 1.1, epsilon),
                BOUND,
            ),
        )
    # Was some release of a million above 6? Sampled once on average, moved by 5.
    rare = times(Poisson(1e-6, Gaussian(0.2)), 1_000_000)
    yield (
        "a million rare releases",
        Row(
            functools.partial(profiles.delta, rare, ADD_OR_REMOVE, 1.0),
            functools.partial(rarely_seen, 1e-6, 5.0),
            functools.partial(rarely_seen, 1e-5, 5.0),
            BOUND,
        ),
    )
    loud = times(Poisson(0.5, Gaussian(0.11)), 2)
    losses = [(reference.replaced_loss(0.5, 1 / 0.11), 2)]
    yield (
        "almost no noise",
        Row(
            functools.partial(profiles.delta, loud, REPLACE, 50.0),
            functools.partial(reference.composed, losses, 50.0, 1e-6),
            functools.partial(reference.gaussian, math.sqrt(2) / 0.11, 50.0),
        ),
    )


def rarely_seen(rate, mu):
    low, seen = norm.logcdf(6.0), rate * (norm.cdf(6.0 - mu) / norm.cdf(6.0) - 1)
    absent, present = 1e6 * low, 1e6 * (low + math.log1p(seen))
    return -math.expm1(present) + math.e * math.expm1(absent)


FAMILIES = {
    "gaussian": gaussian_rows,
    "calibration": calibration_rows,
    "roles": role_rows,
    "poisson": poisson_rows,
    "overflow": overflow_rows,
    "subset": subset_rows,
    "mixed": mixed_rows,
    "exponential": exponential_rows,
    "total variation": total_variation_rows,
    "extreme": extreme_rows,
}


ROWS = {
    f"{family}: {name}": row
    for family, rows in FAMILIES.items()
    for name, row in rows()
}


@pytest.mark.parametrize("name", ROWS)
def test_the_claim_is_the_truth_and_not_a_plausible_mistake(name):
    row = ROWS[name]
    claimed, truth = row.claimed(), row.truth()
    assert 0 < truth
    assert agrees(claimed, truth, row.slack), claimed / truth - 1
    assert not agrees(claimed, row.mistake(), row.slack)


def test_the_table_is_large():
    assert len(ROWS) >= 60
