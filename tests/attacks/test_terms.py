"""Every term of a sensitivity is needed: neighbours that only the whole bound covers.

Each bound here is compared with integers, with an adversary's rounding, or with its own
value where all but one of its terms vanish.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import dpbilevel as dpb
from dpbilevel.bilevel.certificates import certified, sensitivities
from dpbilevel.bilevel.certificates.bounds import Bounds, Metric
from dpbilevel.bilevel.certificates.fixed_count import Spectrum
from dpbilevel.draws.mechanisms import BoundedScore, Draw
from dpbilevel.draws.samplers import restricted
from dpbilevel.draws.samplers._lattice import frame_of
from dpbilevel.draws.samplers._walk_bounds import WalkBounds
from dpbilevel.draws.samplers.base import (
    AbstractPotential,
    AbstractSampler,
    Regularity,
    SamplerGuarantee,
)
from dpbilevel.draws.samplers.proximal import ProximalPlan
from dpbilevel.draws.scores.hyper import GradientNorm, HyperObjective, _steps
from dpbilevel.draws.scores.mean_loss import MeanLoss, public_part, spread_of
from dpbilevel.games import certified as resolvent
from dpbilevel.games.resolvents import Resolvent
from dpbilevel.privacy.accounting import profiles, pure, renyi
from dpbilevel.privacy.accounting.repetitions import Repetitions
from dpbilevel.privacy.mechanisms import ROUNDING_MARGIN
from dpbilevel.privacy.per_example.norms import scale_and_norm
from dpbilevel.privacy.queries import Query
from dpbilevel.privacy.records.rows import padded_rows
from dpbilevel.privacy.selection import Selection

SIDE = 256
SIZE = SIDE**2  # its root is a power of two


def exact_norm(counts):
    """The squared norm of integers, as an integer."""
    return sum(int(k) ** 2 for k in np.asarray(counts).ravel())


@pytest.mark.parametrize("part", [0.6, 0.8])
def test_rounding_every_coordinate_up_keeps_a_record_within_the_clip_norm(part, x64):
    # Cut to the clip norm itself, a coordinate is a part of a step beyond 2**15.
    clip_norm = SIDE * (2.0**15 + part)
    row = jnp.full((1, SIZE), 2.0**20)
    grid = dpb.privacy.clipped_mean(
        lambda z: z, row, clip_norm=clip_norm, precision="grid"
    ).raw
    steps = clip_norm * 2.0 ** -float(grid.exponent)
    assert exact_norm(grid.counts) <= steps**2
    # The control: without room for rounding the record is too long.
    cut = np.rint(np.full(SIZE, steps / SIDE))
    assert exact_norm(cut) > steps**2
    # No room is wasted but for the last few steps.
    assert exact_norm(grid.counts) > (steps - SIDE - 16) ** 2


@pytest.mark.parametrize("size", [1, 100, SIZE])
def test_the_norm_is_above_the_rounding_of_every_order_of_adding(size):
    units = 2.0**-24
    first = jnp.zeros(size, jnp.float32).at[0].set(1.0)
    # Added one by one to the first square, all the others are rounded away.
    squares = np.full(size, units, np.float32)
    squares[0] = 1.0
    assert np.cumsum(squares, dtype=np.float32)[-1] == 1.0
    lost = math.sqrt(1 + (size - 1) * units)
    # And a square, a root, a quotient and four products are rounded once each.
    assert float(scale_and_norm(first, jnp.asarray(1.0))[1]) >= lost * (1 + 7 * units)


def adversary(contribution, steps):
    """Two values as far apart as allowed, whose coordinates are rounded apart."""
    gap = math.floor(contribution * steps / SIDE)
    low, high = 0.5 - 2.0**-10, gap + 0.5 + 2.0**-10
    return [jnp.full(SIZE, v / steps) for v in (low, high)]


def moved(grids):
    """How far apart two values on a grid are, exactly but for the last root."""
    left, right = (np.asarray(grid.counts, object) for grid in grids)
    return math.sqrt(exact_norm(left - right)) * 2.0 ** float(grids[0].exponent)


def test_a_hypergradient_rounded_to_its_grid_moves_no_further_than_is_charged(
    monkeypatch, x64
):
    """Disjoint people see their own role's share of the noise."""
    example = dpb.linear_tuning(dpb.Logistic(), jnp.zeros(2, int), bounds=(0.0, 1.0))
    sizes, ones = dpb.Sizes(40, 40, "disjoint"), dpb.Levels(1.0, 1.0)
    # Powers of two, whose grid is the coarsest; the other role moves it by more.
    monkeypatch.setattr(sensitivities, "hypergradient_sensitivity", lambda *_: ones)
    monkeypatch.setattr(sensitivities, "role_ratios", lambda *_: ones)
    records = {"features": jnp.zeros((40, 2)), "label": jnp.ones(40)}

    def sealed(value):
        monkeypatch.setattr(certified, "hypergradient", lambda *_: value)
        query = certified.HypergradientQuery(example, sizes)
        start = jnp.zeros(1), jnp.zeros(2)
        return query.read(
            start, dpb.Levels(records, records), precision="grid", key=jax.random.key(0)
        )

    seals = [sealed(value) for value in adversary(1.0, 2.0**24)]
    far = moved([seal.raw for seal in seals])
    # Rounding set them apart by more than the values were.
    assert far > 1.0 + SIDE * 2.0**-25
    # Half of what both roles are charged together.
    assert far <= float(seals[0].sensitivity()) / 2


SHIFT = dpb.games.VariationalInequality(
    lambda w, record: record + 0 * w, None, w_set=dpb.sets.Ball(1.0), lipschitz=0.0
)


def test_a_resolvent_rounded_to_its_grid_moves_no_further_than_is_charged(
    monkeypatch, x64
):
    """A record less: the sensitivity is half of that under replace-one."""
    plan = Resolvent(SHIFT, 1.0, 1.0, "picard", 1, SIZE, 1, 1.0)
    # One record moves it by 1 and a little, and the grid is that of 2.
    contribution = plan.contribution(jnp.float64, "float")
    assert 1.0 <= contribution < 1.0 + 2.0**-20

    def sealed(value):
        monkeypatch.setattr(resolvent, "approximate_resolvent", lambda *_, **__: value)
        query = resolvent.ResolventQuery(plan, 1, dpb.FullBatch())
        options = {"precision": "grid", "key": jax.random.key(0)}
        return query.read(jnp.zeros(SIZE), jnp.zeros((1, SIZE)), **options)

    seals = [sealed(value) for value in adversary(1.0, 2.0**23)]
    far = moved([seal.raw for seal in seals])
    assert far > 1.0 + SIDE * 2.0**-24
    assert far <= float(seals[0].sensitivity(dpb.Neighbours.ADD_OR_REMOVE_ONE))


# One-dimensional polynomials whose derivatives all push the same way: at x = y = 0 they
# attain what is proved from bounds on them.
DERIVATIVES = {
    "strong_convexity": 2.0,
    "solution_radius": 1.0,
    "upper_x": 0.3,
    "upper_y": 0.7,
    "upper_xx": 1.1,
    "upper_xy": 1.3,
    "upper_yy": 1.7,
    "lower_y": 0.9,
    "lower_xy": 1.9,
    "lower_yy": 2.0,
    "lower_xy_in_x": 0.4,
    "lower_yy_in_x": 0.6,
    "lower_xy_in_y": 0.6,
    "lower_yy_in_y": 0.8,
    "upper_x_spread": 0.2,
    "upper_y_spread": 0.5,
    "lower_y_spread": 0.35,
    "lower_xy_spread": 0.45,
    "lower_yy_spread": 0.55,
}
CONSTANTS = dpb.bilevel.SecondOrderConstants(**DERIVATIVES)


def upper(x, y):
    c = CONSTANTS
    return c.upper_x * x + c.upper_y * y + c.upper_xx * x**2 / 2 + c.upper_xy * x * y


def aligned_upper(x, y):
    return upper(x, y) + CONSTANTS.upper_yy * y**2 / 2


def aligned_lower(x, y):
    """With these signs y* grows with x, and ever faster."""
    c = CONSTANTS
    cubic = c.lower_xy_in_x * x**2 * y / 2 + c.lower_yy_in_x * x * y**2 / 2
    cubic += c.lower_yy_in_y * y**3 / 6
    return c.strong_convexity * y**2 / 2 - c.lower_xy * x * y - cubic


def hypergradient(x, y, upper=aligned_upper, lower=aligned_lower):
    """In one dimension."""
    cross = jax.grad(jax.grad(lower, 0), 1)(x, y)
    curvature = jax.grad(jax.grad(lower, 1), 1)(x, y)
    along = jax.grad(upper, 1)(x, y)
    return jax.grad(upper, 0)(x, y) - cross / curvature * along


def test_the_error_constant_and_the_smoothness_are_attained(x64):
    slope = -jax.grad(lambda x, y: jax.grad(aligned_lower, 1)(x, y), 0)(0.0, 0.0)
    moves = slope / CONSTANTS.strong_convexity
    in_x, in_y = jax.grad(hypergradient, (0, 1))(0.0, 0.0)
    assert float(in_y) == pytest.approx(CONSTANTS.error_constant, rel=1e-12)
    total = float(in_x + moves * in_y)
    assert total == pytest.approx(CONSTANTS.smoothness, rel=1e-12)
    assert float(hypergradient(0.0, 0.0)) == pytest.approx(CONSTANTS.upper_total)


@pytest.mark.parametrize("role", ["upper", "lower"])
def test_declared_sensitivities_are_attained_by_many_records(role, x64):
    n, c = 10**6, CONSTANTS
    bounds = c.bounds(dpb.Sizes(n, n))

    def at(share):
        """One record's part of the mean, in units of its spreads."""
        up = share if role == "upper" else 0.0
        low = share if role == "lower" else 0.0

        def moved_upper(x, y):
            return aligned_upper(x, y) + up * (
                c.upper_x_spread * x + c.upper_y_spread * y
            )

        def moved_lower(x, y):
            record = c.lower_y_spread * y + c.lower_xy_spread * x * y
            return aligned_lower(x, y) - low * (record + c.lower_yy_spread * y**2 / 2)

        y = 0.0
        for _ in range(5):
            slope = jax.grad(moved_lower, 1)
            y = y - slope(0.0, y) / jax.grad(slope, 1)(0.0, y)
        return hypergradient(0.0, y, moved_upper, moved_lower), y

    (right, far), (left, near) = at(1 / n), at(-1 / n)
    assert abs(float(right - left)) == pytest.approx(getattr(bounds, role), rel=1e-5)
    if role == "lower":
        shift = abs(float(far - near))
        assert shift == pytest.approx(bounds.solution_shift, rel=1e-5)


def test_parts_of_a_lower_gradient_reach_their_bound():
    """A record and a public term that cancel but for the strong convexity."""
    bounds = CONSTANTS.bounds(dpb.Sizes(10, 10))
    c = CONSTANTS
    far = 3 * c.solution_radius
    # At the edge of the ball a record has the slope L, beyond it the curvature b; what
    # is public is the whole less the record: curved by up to 2 b.
    record = c.lower_y + c.lower_yy * (far - c.solution_radius)
    public = c.lower_y + 2 * c.lower_yy * (far - c.solution_radius)
    assert bounds.lower_gradient == pytest.approx(record + public)
    assert bounds.parts == 1 + 2


LAX = Bounds(
    strong_convexity=2.0,
    smoothness=8.0 / 1.001,
    solution_radius=3.0,
    solution_shift=0.0,
    upper=0.11,
    lower=0.13,
    lower_error=0.17,
    linear_error=0.19,
    gradient=0.23,
    upper_gradient=0.29,
    lower_gradient=0.31,
    parts=3.0,
)


class Fixed:
    """A certificate of given bounds."""

    varies = False

    def __init__(self, **changed):
        self._bounds = dataclasses.replace(LAX, **changed)

    def bounds(self, sizes, x=None):
        return self._bounds


def solved(bounds, counts):
    """Both inexact solves at a condition number of 4."""
    angle = math.atanh(0.5)
    start = 2 * bounds.solution_radius
    alpha = start / math.cosh((counts.lower + 1) * angle)
    tau = 2 * (1 / 3) ** counts.linear * bounds.upper_gradient
    return bounds.lower_error * alpha + bounds.linear_error * tau


@pytest.mark.parametrize("name", ["lower_error", "linear_error"])
def test_either_inexact_solve_is_part_of_a_hypergradients_error(name):
    zero = {"lower_error", "linear_error"} - {name}
    alone = dataclasses.replace(LAX, **dict.fromkeys(zero, 0.0))
    counts = sensitivities.StepCounts(3, 4)
    found = sensitivities.solve_error(alone, counts)
    assert found == pytest.approx(solved(alone, counts), rel=1e-9)


@pytest.mark.parametrize("large", ["upper", "lower"])
@pytest.mark.parametrize("name", ["lower_gradient", "smoothness", "last", "linear"])
def test_every_rounding_of_a_hypergradient_is_part_of_its_error(name, large):
    n, unit = 10_000, 2.0**-24
    sizes = dpb.Sizes(**({"upper": 1, "lower": 1} | {large: n}))
    # Blocks of 4096 rows, their sums, and 32 units for a record.
    mean = unit * (32 + 4096 + 3)
    mu, kappa = LAX.strong_convexity, 4.0
    expected = {
        "lower_gradient": LAX.lower_error * 2 * mean * LAX.lower_gradient / mu,
        "smoothness": LAX.lower_error * 2 * 100 * unit * LAX.smoothness * 3.0 / mu,
        "last": 2 * 3 * mean * LAX.gradient,
        "linear": LAX.linear_error
        * (4 * math.sqrt(kappa) * (2 * kappa + 1) * 3 * mean * LAX.upper_gradient),
    }
    fields = {"last": "gradient", "linear": "upper_gradient"}
    others = {"lower_gradient", "gradient", "upper_gradient"} - {fields.get(name, name)}
    zero = dict.fromkeys(others, 0.0)
    if name != "smoothness":
        zero["solution_radius"] = 0.0
    alone = dataclasses.replace(LAX, **zero)
    found = sensitivities.rounding_error(alone, sizes, jnp.float32)
    assert found == pytest.approx(expected[name], rel=1e-6)
    whole = sensitivities.rounding_error(LAX, sizes, jnp.float32)
    assert whole == pytest.approx(sum(expected.values()), rel=1e-6)


def test_twice_all_errors_are_part_of_both_sensitivities_up_to_the_diameter():
    sizes = dpb.Sizes(50, 70)
    certificate = Fixed(gradient=1e3, lower_gradient=1.0)
    bounds = certificate.bounds(sizes)
    counts = sensitivities.step_counts(certificate, sizes)
    error = solved(bounds, counts)
    allowed = 0.01 / 8 * (bounds.upper + bounds.lower)
    assert 0 < error <= 2 * allowed
    rounding = sensitivities.rounding_error(bounds, sizes, jnp.float32)
    assert rounding > 1e-3 * bounds.upper
    shares = sensitivities.hypergradient_sensitivity(certificate, sizes, jnp.float32)
    assert shares.upper - bounds.upper == pytest.approx(2 * (error + rounding))
    assert shares.lower - bounds.lower == pytest.approx(2 * (error + rounding))
    listed = sensitivities.role_ratios(certificate, sizes)
    assert listed.upper - bounds.upper == pytest.approx(2 * error)
    assert listed.lower - bounds.lower == pytest.approx(2 * error)
    # The values lie in a ball.
    small = sensitivities.hypergradient_sensitivity(
        Fixed(gradient=0.05), sizes, jnp.float32
    )
    assert small == dpb.Levels(0.1, 0.1)


def test_disjoint_roles_are_listed_with_what_the_needier_one_needs():
    sizes = dpb.Sizes(50, 70, "disjoint")
    certificate = Fixed(upper=1.0, lower=1e-6, gradient=1e3)
    shares = sensitivities.hypergradient_sensitivity(certificate, sizes, jnp.float32)
    listed = sensitivities.ledger_sensitivity(certificate, sizes, jnp.float32)
    assert listed.upper >= shares.upper
    assert listed.lower >= shares.lower
    # A role that moves nothing is listed with a thousandth of the other, or more.
    ratios = sensitivities.role_ratios(
        Fixed(upper=1.0, lower=0.0, lower_error=0.0), sizes
    )
    assert ratios.lower >= 1e-3 * ratios.upper


def test_rounding_is_refused_at_the_share_that_it_adds_to_both_roles():
    sizes = dpb.Sizes(50, 70)
    rounding = sensitivities.rounding_error(LAX, sizes, jnp.float32)
    # Twice for each of two roles is at most a twentieth of their sum.
    for factor, refused in ((1.01, False), (0.99, True)):
        half = factor * 4 * rounding / 0.05 / 2
        certificate = Fixed(upper=half, lower=half)
        if refused:
            with pytest.raises(ValueError, match="Enable 64-bit"):
                sensitivities.check_dtype(certificate, sizes, jnp.float32)
        else:
            sensitivities.check_dtype(certificate, sizes, jnp.float32)


INEQUALITY = dpb.games.VariationalInequality(
    lambda w, record: record * w,
    lambda w: 0.5 * w,
    w_set=dpb.sets.Ball(1.5),
    lipschitz=1.0,
    bound=3.0,
    public_lipschitz=0.5,
    public_bound=0.7,
)
# Batches of at most 20 rows over 10: sums may be twice as large as means.
PLAN = Resolvent(INEQUALITY, 2.0, 6.0, "picard", 3, 4, 20, 10.0)
UNIT = 2.0**-24


def projection_units(dimension):
    return 32 + dimension**1.5


@pytest.mark.parametrize("steps", [1, 3])
def test_every_rounding_of_a_step_is_part_of_a_resolvent(steps):
    plan = dataclasses.replace(PLAN, steps=steps)
    records, public = 2.0 * 2, 0.7
    largest = records + public
    # Records, public operator, their mean and sum: each rounds on its own.
    mean = 2 if steps == 1 else 2 * 32 + 4 + 32 + 64 + 8
    rounded = mean * records + 3 * largest + (0 if steps == 1 else 32 * public)
    projected = projection_units(4) * (2 * 1.5 + largest / 6)
    omega = UNIT * (rounded / 6 + projected)
    assert plan.step_rounding(jnp.float32) == pytest.approx(omega, rel=1e-6)
    ratio = (1.0 * 2 + 0.5) / 6 if steps > 1 else 0.0
    total = (2.0 / 6 / 10 + 2 * omega) * (1 + ratio + ratio**2)
    assert plan.contribution(jnp.float32, "float") == pytest.approx(total, rel=1e-9)


def test_every_error_of_operator_extrapolation_is_part_of_a_resolvent():
    plan = dataclasses.replace(PLAN, inner="operator_extrapolation", steps=5)
    lipschitz, records, public, width = 2 * 1.0 + 0.5, 2 * 3.0, 0.7, 3.0
    largest, smoothness = records + public, lipschitz + 6
    theta = 1 / (1 + 6 / smoothness)
    solved = math.sqrt(2) * theta**2.5 * min(width, largest / 6)
    assert float(plan.solve_error()) == pytest.approx(solved, rel=1e-6)
    mean = 2 * 32 + 4 + 32 + 64 + 8
    operator = UNIT * (mean * records + 32 * public + 3 * largest)
    operator = 4 * operator + 20 * UNIT * 6 * width
    step = 1 / (2 * smoothness)
    length = 3 * step * (largest + 6 * width)
    point = UNIT * projection_units(4) * (2 * 1.5 + length)
    rounded = (4 * step * operator + 8 * point) / (1 - math.sqrt(theta))
    assert float(plan.solve_rounding(jnp.float32)) == pytest.approx(rounded, rel=1e-6)
    total = 3.0 / 6 / 10 + 2 * (solved + rounded)
    found = plan.contribution(jnp.float32, "float")
    assert float(found) == pytest.approx(total, rel=1e-6)


def test_errors_of_a_mean_loss_are_part_of_its_share():
    n, reach, unit = 7, 3.0, 2.0**-24
    for public in (False, True):
        # Mean, multiple, sum with a public term of eight ranges, and the draw.
        own = 4 * unit * (9 if public else 1) * reach
        share, error = spread_of(reach, n, jnp.float32, public)
        assert share >= reach / n * (1 + 2.0**-20) + 4 * own - 1e-12
        assert error == pytest.approx(own + 2.0**-24 * reach)
    problem = dpb.FiniteSum(
        lambda w, record: record * w[0], w_set=dpb.sets.Ball(0.5), lipschitz=2.0
    )
    known = MeanLoss(problem, "slope", n).regularity(jnp.float32, 1)
    # Two losses within the range, and n terms in any order.
    assert known.rounding == pytest.approx((2 * 32 + n) * unit * 2.0)


def test_a_public_term_is_no_longer_than_rounding_is_counted_for():
    half = jnp.asarray(0.5)
    for value in (1e6, -1e6, jnp.inf):
        found = public_part(lambda x, v=value: v * x, jnp.ones(()), jnp.zeros(()), half)
        assert abs(float(found)) <= 8 * 0.5


BOX = dpb.sets.Box(jnp.zeros(1), jnp.full(1, 2.0))


def two_levels(public=False, **fields):
    constants = dataclasses.replace(CONSTANTS, per_record=True, **fields)
    return dpb.BilevelProblem(
        lambda x, y, z: z * y[0],
        lambda x, y, z: (y[0] - x[0]) ** 2 + z,
        upper_public=(lambda x, y: 0.0 * y[0]) if public else None,
        x_set=dpb.sets.Ball(1.0),
        constants=constants,
    )


def parts_of(score):
    """The errors of a hyper-objective by their cause: solves, values."""
    bounds, sizes = score._bounds(), score.sizes
    rounding = sensitivities.solution_rounding(bounds, sizes, jnp.float64)
    return bounds, rounding


@pytest.mark.parametrize("public", [False, True])
@pytest.mark.parametrize("clip_range", [None, 0.9])
def test_errors_of_a_hyper_objective_are_part_of_both_shares(public, clip_range, x64):
    c, sizes = CONSTANTS, dpb.Sizes(30, 50)
    score = HyperObjective(two_levels(public), "spread", sizes, clip_range)
    bounds, rounding = parts_of(score)
    # Beside a public term records cancel less: three times as steep.
    slope = 3 * c.upper_y if public else c.upper_y
    reach = 2 * c.upper_y * c.solution_radius + c.upper_x * 2.0
    losses = reach if clip_range is None else clip_range
    # A solution is off by one percent of a record's shift over four, and by rounding.
    target = max(rounding, 0.01 / 4 * bounds.solution_shift)
    largest = 2 * (losses if clip_range is None else losses / 2)
    largest += 2 * reach if public else 0.0
    error = slope * (target + rounding) + 32 * 2.0**-52 * largest
    known, shares = score.regularity(jnp.float64, 1), score.contributions(jnp.float64)
    assert known.error == pytest.approx(error, rel=1e-9, abs=0)
    values = 32 * 2.0**-52 * largest
    found = known.error - slope * (target + rounding)
    assert found == pytest.approx(values, rel=1e-2, abs=0)
    upper, lower = 2 * losses / 30, 2 * slope * bounds.solution_shift
    if clip_range is None:
        upper, lower = min(upper, 2 * bounds.upper), min(lower, 2 * bounds.lower)
    assert score.spreads() == pytest.approx((upper, lower))
    assert 2 * shares["upper"] == pytest.approx(upper + 4 * error)
    assert 2 * shares["lower"] == pytest.approx(lower + 4 * error)
    steep = 3 if public and clip_range is not None else 1
    assert known.lipschitz == pytest.approx(steep * c.upper_total)


def test_slopes_of_a_hyper_objective_know_every_error_of_their_gradient(x64):
    sizes = dpb.Sizes(300, 500)
    score = HyperObjective(two_levels(), "slope", sizes)
    bounds, rounding = parts_of(score)
    steps = sensitivities.step_counts(CONSTANTS, sizes)
    solves = sensitivities.solve_error(bounds, steps)
    rounds = sensitivities.rounding_error(bounds, sizes, jnp.float64)
    known = score.regularity(jnp.float64, 1)
    assert known.gradient_error - solves == pytest.approx(rounds, rel=1e-3)
    assert known.gradient_error - rounds == pytest.approx(solves)
    # Solved to its rounding, and rounded.
    least = CONSTANTS.upper_y * 2 * rounding
    assert known.error >= least
    largest = 2 * score._change()
    values = 32 * 2.0**-52 * largest
    assert known.error - least == pytest.approx(values, rel=1e-3, abs=0)


def test_the_largest_loss_of_a_model_is_part_of_the_error_of_its_values(x64):
    problem = dpb.linear_tuning(
        dpb.Logistic(), jnp.zeros(2, int), bounds=(0.0, 1.0), row_norm=1e-3
    )
    score = HyperObjective(problem, "spread", dpb.Sizes(30, 30))
    _, rounding = parts_of(score)
    target = score._target(jnp.float64)
    error = score.regularity(jnp.float64, 1).error
    values = error - score._slope() * (target + rounding)
    # Losses of rows near zero are all about log 2.
    assert values >= 32 * 2.0**-52 * math.log(2) * (1 - 1e-3)


def test_the_metric_of_a_lower_level_is_charged_where_it_is_flattest():
    spectrum = Spectrum(1.0, 4.0)
    metric = Metric(jnp.full(1, 1e-4), 1e-4, spectrum, 3.0)
    in_metric = spectrum.accelerated_steps(3.0, 1e-3 * 1e-2)
    assert _steps(metric, 1e-3) >= in_metric


def test_errors_of_a_gradient_norm_are_part_of_both_shares():
    sizes = dpb.Sizes(300, 500)
    with jax.enable_x64(True):
        score = GradientNorm(two_levels(), "spread", sizes)
        known, found = (
            score.regularity(jnp.float64, 1),
            score.contributions(jnp.float64),
        )
        shares = sensitivities.hypergradient_sensitivity(CONSTANTS, sizes, jnp.float64)
        bounds = CONSTANTS.bounds(sizes)
        steps = sensitivities.step_counts(CONSTANTS, sizes)
    solves = sensitivities.solve_error(bounds, steps)
    rounds = sensitivities.rounding_error(bounds, sizes, jnp.float64)
    projected = 8 * 2.0**-52 * (1.0 + CONSTANTS.upper_total)
    more = known.error - (solves + rounds)
    assert more == pytest.approx(projected, rel=0.1, abs=0)
    for role in ("upper", "lower"):
        more = found[role] - getattr(shares, role)
        assert more == pytest.approx(projected, rel=0.1, abs=0)
    assert known.lipschitz == pytest.approx(CONSTANTS.smoothness + 2)


def draw_release(mechanism, people_roles=("records",), **fields):
    queries = tuple(Query(role, 10, 1.0) for role in people_roles)
    fields = {"guarantee": SamplerGuarantee(1, 1.0)} | fields
    return Draw("x", fields.pop("count", 1), queries, mechanism, 1.0, **fields)


def test_both_laws_of_a_draw_may_be_off_by_the_log_ratio():
    event = dpb.draws.Exponential(0.5).event(0.25, log_ratio=0.1)
    assert pure.epsilon_of(event) == pytest.approx(0.25 * 0.5 + 2 * 0.1)


def test_people_in_both_levels_are_charged_the_whole_draw_and_others_their_share():
    roles = ("upper", "lower")
    part = draw_release(dpb.draws.RegularizedExponential(2.0), roles)
    for people, multiplier in (("OVERLAPPING", 2.0), ("DISJOINT", 4.0)):
        charged = dict(part.charges(dpb.People[people]))
        for event in charged.values():
            assert profiles.gaussian_mu(event) == pytest.approx(1 / multiplier)
    part = draw_release(dpb.draws.Exponential(0.5), roles)
    for people, epsilon in (("OVERLAPPING", 0.5), ("DISJOINT", 0.25)):
        for _, event in part.charges(dpb.People[people]):
            assert profiles.pure_epsilons(event) == pytest.approx([epsilon])


def alternating_draw():
    """A regularized draw on a line, at multiplier 2."""
    return dpb.draws.RegularizedExponentialMechanism(
        dpb.draws.AlternatingSampler(dpb.draws.ConvexEnvelope(), 1e-6),
        convex=True,
        regularizer=0.3,
        dimension=1,
        mechanism=dpb.draws.RegularizedExponential(2.0),
    )


def test_draws_of_two_levels_are_planned_for_both_shares_and_their_errors(x64):
    sizes, problem = dpb.Sizes(300, 500), two_levels()
    grid = dpb.draws.Grid(jnp.zeros((2, 1)))
    solver = dpb.draws.ExponentialMechanism(grid, mechanism=dpb.draws.Exponential(1.0))
    plan = solver.plan(problem, sizes)
    assert plan.rate <= 1 / (2 * sum(plan.contributions.values()))
    solver = alternating_draw()
    plan = solver.plan(problem, sizes)
    (release,) = solver.ledger(problem, sizes).releases
    expected = math.tanh(plan.rate * plan.regularity.error)
    assert release.inexact == pytest.approx(expected, rel=1e-6, abs=0)
    assert expected > 0


def test_every_distance_of_every_draw_is_counted():
    mechanism = dpb.draws.Exponential(0.5)
    guarantee = SamplerGuarantee(1, 1.0, distance=1e-3)
    part = draw_release(mechanism, guarantee=guarantee, inexact=1e-4, count=3)
    assert part.failure == pytest.approx(3 * 1.1e-3)
    ((_, event),) = part.charges(dpb.People.OVERLAPPING)
    assert profiles.pure_epsilons(event) == pytest.approx([0.5] * 3)


def test_the_coin_of_a_pure_release_costs_no_less_than_it_was_made_from():
    for total in np.geomspace(1e-3, 30, 500):
        assert pure.epsilon_of(pure.event(total)) >= total


def test_a_rate_has_room_for_rounding():
    """What draws and what is planned, for both mechanisms."""
    margin = 1 + ROUNDING_MARGIN
    assert ROUNDING_MARGIN >= 2.0**-11
    problem = dpb.FiniteSum(
        lambda w, record: record * w[0], w_set=BOX, lipschitz=1.0, smoothness=0.0
    )
    grid = dpb.draws.Grid(jnp.zeros((2, 1)))
    solver = dpb.draws.ExponentialMechanism(grid, mechanism=dpb.draws.Exponential(1.0))
    share = MeanLoss(problem, "spread", 50).contributions(jnp.float32)["records"]
    rate = solver.plan(problem, 50).rate
    assert rate <= 1.0 / (2 * share * margin) * (1 + 1e-9)
    search = dpb.search.RandomSearch(2, 1.0, mechanism=dpb.draws.Exponential(1.0))
    (release,) = search.ledger(problem, 50).releases
    share, _ = spread_of(1.0, 50, jnp.float32, False)
    assert release.rate <= 1.0 / (2 * share * margin) * (1 + 1e-9)
    assert release.queries[0].contribution == pytest.approx(share)
    slope = MeanLoss(problem, "slope", 50)
    solver = alternating_draw()
    rate = solver.plan(problem, 50).rate
    sensitivity = 2 * slope.contributions(jnp.float32)["records"]
    assert rate <= 0.3 / (2.0 * sensitivity * margin) ** 2 * (1 + 1e-6)
    # A computed law is within tanh of the error of its logarithm.
    (release,) = solver.ledger(problem, 50).releases
    assert release.inexact == pytest.approx(
        math.tanh(rate * slope.regularity(jnp.float32, 1).rounding)
    )


class Taken(AbstractSampler):
    """Returns the potential that it is given, at the start."""

    def with_counts(self, regularity, feasible):
        return self

    def guarantee(self, regularity, feasible):
        return SamplerGuarantee(1, 1.0)

    def draw(self, potential, feasible, start, *, key):
        return potential(start)


class Constant(AbstractPotential):
    def __call__(self, x):
        return jnp.ones(())


@pytest.mark.parametrize("relation", list(dpb.Neighbours))
def test_what_a_draw_opens_has_the_planned_temperature(relation):
    """The potential of a score of one is the rate: no more than sensitivity allows."""
    options = {"key": jax.random.key(0)}
    most = relation.contributions * 0.25 * (1 + ROUNDING_MARGIN)
    score = BoundedScore(Constant(), 0.25, "spread", dpb.privacy.Basis.CONSTANTS)
    mechanism = dpb.draws.Exponential(0.5, relation)
    rate = mechanism.draw(score, Taken(), BOX, jnp.zeros(1), **options)
    assert float(rate) <= 0.5 / most * (1 + 1e-6)
    score = BoundedScore(Constant(), 0.25, "slope", dpb.privacy.Basis.CONSTANTS)
    mechanism = dpb.draws.RegularizedExponential(2.0, relation)
    rate = mechanism.draw(
        score, Taken(), BOX, jnp.zeros(1), regularizer=0.2, convexity=0.1, **options
    )
    assert float(rate) <= (0.2 + 0.1) / (2.0 * most) ** 2 * (1 + 1e-6)


def test_scores_that_vary_less_than_their_losses_round_are_refused():
    """Logistic losses of short rows are all about log 2, in steps of 2**-24."""
    problem = dpb.linear_tuning(
        dpb.Logistic(), jnp.zeros(1, int), bounds=(0.0, 1.0), row_norm=0.005
    )
    score = HyperObjective(problem, "spread", dpb.Sizes(100, 100))
    with pytest.raises(ValueError, match="errors of computed scores"):
        score.contributions(jnp.float32)
    with jax.enable_x64(True):
        assert score.contributions(jnp.float64)["lower"] < 2.0**-23


def test_proved_bounds_of_a_linear_model_have_every_term_of_the_proof():
    model, row_norm, low, high = dpb.onelevel.PseudoHuber(0.5), 1.3, -0.4, 0.7
    problem = dpb.linear_tuning(
        model, jnp.zeros(2, int), bounds=(low, high), row_norm=row_norm
    )
    sizes = dpb.Sizes(300, 200)
    found = problem.constants.bounds(sizes)
    mu, top, n_f, n_g = math.exp(low), math.exp(high), 300, 200
    # The width bounds the slope, and at margins that are not bounded nothing is less.
    p1, p2 = 0.5 * row_norm, model.curvature * row_norm**2
    p3, s = model.third * row_norm**3, model.concordance * row_norm
    r, energy = p1 / mu, p1 / math.sqrt(mu)
    d = 2 * p1 / (n_g * mu)
    t = min(p3 * d / mu, s * d * math.exp(s * d))
    turned = (p2 * d + (t + p2 / (n_g * mu)) * p1) / math.sqrt(mu)
    moved = 2 * p1 / (n_g * math.sqrt(mu))
    far = math.sqrt(top) * r
    expected = {
        "solution_shift": d,
        "smoothness": p2 + top,
        "solution_radius": r,
        "upper": energy * 2 * p1 / (n_f * math.sqrt(mu)),
        "lower": moved * p1 / math.sqrt(mu) + energy * turned,
        # Of s^ and of v^, each times the other.
        "lower_error": math.sqrt(top) * p1 / math.sqrt(mu)
        + far * (p2 + p1 * p3 / mu) / math.sqrt(mu),
        "linear_error": far / math.sqrt(mu),
        "gradient": energy * p1 / math.sqrt(mu),
        "upper_gradient": p1,
        "lower_gradient": p1 + 2 * p2 * r + 3 * top * r,
    }
    for name, value in expected.items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-12), name
    metric = problem.constants.metric(problem, sizes, None, None)
    assert metric.spectrum.largest == pytest.approx(1 + p2 / mu)
    assert metric.radius == pytest.approx(energy)


WALKED = Regularity(2, 1.5, 0.0, error=0.03)


def walked(convex=True, slack=0.7):
    """A lattice about a disc: no numbers but those of the proof."""
    known = WALKED if convex else dataclasses.replace(WALKED, strong_convexity=None)
    frame = frame_of("GridWalk", dpb.sets.Ball(0.5), 2)
    return WalkBounds(known, frame, (9, 7), penalty=4.5, slack=slack)


@pytest.mark.parametrize("convex", [True, False])
def test_every_term_of_a_grid_walks_proof_counts(convex):
    found = walked(convex)
    reach, radius, n = found.frame.reach, float(found.frame.radius), 2
    inward = float(found.frame.inverse_inradius)
    assert (reach, radius, inward) == pytest.approx((math.sqrt(2), 0.5, 2.0))
    error = (2 * reach - 1) * 0.03
    assert found.error == pytest.approx(error)
    rise = 1.5 * 0.5
    slope = 1.5 + (4.5 + (0 if convex else 2 * rise)) * inward
    assert found.lipschitz == pytest.approx(slope)
    change = slope * math.hypot(1 / 9, 1 / 7)
    assert found.change == pytest.approx(change)
    assert found.needed_slack == pytest.approx(change / 2 + 2 * error)
    oscillation = (1 + reach) * rise + 4.5 * (reach - 1) + 2 * error
    assert found.oscillation == pytest.approx(oscillation)
    compared = math.exp(-oscillation) * (1 - math.cos(math.pi / 9)) / (2 * n)
    spread = change * (1 / 2 + 1 / math.sqrt(12)) + 2 * error
    conductance = math.exp(-spread) / (2 * n * 9)
    gap = max(compared, conductance**2 / 2) if convex else compared
    assert found.gap == pytest.approx(gap)
    rarity = oscillation + math.log(9 * 7)
    assert found.rarity == pytest.approx(rarity)
    assert found.mixing(10**6) == pytest.approx(math.exp(rarity - gap * 10**6))
    decay = 4.5 - rise - n + 1
    shells = min(reach**n / n, 1 / decay)
    odds = (n + rise) * shells * math.exp(2 * error)
    success = math.exp(-0.7 - change / math.sqrt(12) - 2 * error) / (1 + odds)
    last = math.exp(2 * 0.7) * (1 + reach ** (2 * n) * math.exp(2 * error))
    tries = 1 + math.ceil((math.log(last) + 5) / success)
    left = (1 - 0.9 * success) ** (tries - 1) * last
    assert 1e-6 < left < 1
    assert found.exhausted(0.1, tries) == pytest.approx(left, rel=1e-9)


def test_the_conductance_of_a_fine_lattice_is_the_one_of_the_proof():
    """There the comparison with a constant potential is the weaker one."""
    steep = Regularity(1, 60.0, 0.0, error=0.01)
    frame = frame_of("GridWalk", dpb.sets.Box(jnp.zeros(1), jnp.ones(1)), 1)
    found = WalkBounds(steep, frame, (90,), penalty=0.0, slack=0.0)
    spread = 60.0 / 90 * (1 / 2 + 1 / math.sqrt(12)) + 2 * 0.01
    assert found.gap == pytest.approx((math.exp(-spread) / (2 * 90)) ** 2 / 2)


def test_a_grid_walk_is_charged_for_cells_and_for_tries():
    known, feasible = Regularity(1, 4.0, 0.0), dpb.sets.Box(-jnp.ones(1), jnp.ones(1))
    plan = dpb.draws.GridWalk(tabulate=False).with_counts(known, feasible)
    bounds = plan._bounds(known, feasible)
    mixing = bounds.mixing(plan.num_steps)
    exhausted = bounds.exhausted(mixing, plan.num_tries)
    ratio = math.log((1 + mixing) / (1 - mixing)) - math.log(1 - exhausted)
    assert plan.guarantee(known, feasible).log_ratio == pytest.approx(ratio, rel=1e-9)
    low = dataclasses.replace(plan, slack=0.9 * bounds.needed_slack)
    low = dataclasses.replace(low, num_tries=10 * plan.num_tries)
    assert not low.guarantee(known, feasible).proved


def test_every_distance_of_an_alternating_sampler_counts():
    known = Regularity(3, 2.0, 1.2, smoothness=5.0, error=0.02, rounding=0.01)
    feasible, eta, steps = dpb.sets.Ball(1.0), 0.05, 60
    oracle = dpb.draws.ConvexEnvelope(gradient_steps=2, draw_tries=5)
    chance = oracle.acceptance(ProximalPlan(known, feasible, eta))
    tries = math.ceil(1.2 * steps / chance)
    plan = ProximalPlan(known, feasible, eta, steps, tries, failure=1e-4)
    oracle = oracle.with_counts(plan)
    sampler = dpb.draws.AlternatingSampler(oracle, 0.5, steps, eta, tries)
    found = sampler.guarantee(known, feasible)
    width, alpha = 2.0, 1.2 * math.exp(-2 * 0.03)
    mixing = width / (2 * math.sqrt(eta)) * (1 + alpha * eta) ** -(steps - 1)
    late = scipy.stats.binom.cdf(steps - 1, tries, chance)
    draws = oracle.draw_failure(dataclasses.replace(plan, failure=0.5 / 8))
    assert min(mixing, late, draws) > 1e-4
    assert found.distance == pytest.approx(mixing + late + draws) != 1


class Proposing(dpb.draws.ConvexEnvelope):
    """With a bias, and proposals of which the proof knows all."""

    def bias(self, plan):
        return 1e-3


def test_the_bias_of_every_step_counts():
    known, feasible = Regularity(1, 2.0, 1.0, smoothness=2.0), dpb.sets.Box(-1.0, 1.0)
    plan = dpb.draws.AlternatingSampler(dpb.draws.ConvexEnvelope(), 0.2).with_counts(
        known, feasible
    )
    fields = {"curvature": plan.oracle.curvature, "slack": plan.oracle.slack}
    oracle = Proposing(plan.oracle.gradient_steps, plan.oracle.draw_tries, **fields)
    biased = dataclasses.replace(plan, oracle=oracle)
    more = biased.guarantee(known, feasible).distance
    less = plan.guarantee(known, feasible).distance
    assert more - less == pytest.approx(1e-3 * plan.num_steps)


@pytest.mark.parametrize("draws", [1, 2])
def test_draws_fail_where_a_point_is_far_or_where_all_tries_are_rejected(draws):
    known = Regularity(3, 2.0, 1.2, num_terms=4, term_lipschitz=1.0, quadratic=0.5)
    feasible = dpb.sets.Ball(1.0, jnp.full(3, 2.0))
    oracle = {1: dpb.draws.ConvexEnvelope(), 2: dpb.draws.StochasticRejection()}[draws]
    oracle = dataclasses.replace(oracle, draw_tries=3)
    eta, steps, tries, share = 0.5, 10, 30, 1e-2
    found = oracle.draw_failure(ProximalPlan(known, feasible, eta, steps, tries, share))
    far = share / (2 * steps)
    reach = restricted.reach(feasible, 3, math.sqrt(eta), far)
    curvature = {1: 1.2, 2: 0.5}[draws]
    weight = 1 / (1 + curvature * eta)
    # Towards the slope, or towards zero, which is off the ball.
    away = math.sqrt(12) - 1
    shift = {1: weight * eta * 2.0, 2: (1 - weight) * away}[draws]
    deviation = math.sqrt(eta * weight)
    chance = restricted.acceptance(feasible, 3, deviation, weight * reach + shift)
    rejected = (1 - chance) ** 3
    assert rejected > 0
    assert found == pytest.approx(share / 2 + draws * tries * rejected)


@pytest.mark.parametrize("smoothness", [5.0, math.inf])
def test_every_error_lowers_the_acceptance_of_an_envelope(smoothness):
    known = Regularity(
        3, 2.0, 1.2, smoothness, error=0.02, gradient_error=0.03, rounding=0.01
    )
    feasible, eta, width = dpb.sets.Ball(1.0), 0.05, 2.0
    epsilon = 0.03 + 0.01 / width
    slack = 2 * (0.02 + 0.01) + epsilon * width
    steps = 0 if math.isinf(smoothness) else 2
    oracle = dpb.draws.ConvexEnvelope(gradient_steps=steps)
    rho = 2.0 + epsilon
    for _ in range(steps):
        rho = smoothness * eta * rho + 2 * epsilon
    p = 1.2 + 1 / eta
    e = min(width, (rho + math.sqrt(rho**2 + 4 * p * 3)) / (2 * p))
    loss = min((smoothness - 1.2) / 2 * e**2, 2 * 2.0 * e)
    plan = ProximalPlan(known, feasible, eta, num_steps=9, tries=20, failure=0.1)
    found = oracle.acceptance(plan)
    assert -math.log(found) == pytest.approx(loss + 2 * slack)
    assert oracle.with_counts(plan).slack == pytest.approx(slack)
    weight = 1 / (1 + 1.2 * eta)
    shift = oracle.gaussian(plan)[2]
    assert shift == pytest.approx(weight * eta * (2.0 + epsilon))


def test_cut_stages_are_part_of_the_bias_of_a_stochastic_try():
    known = Regularity(1, 1.0, num_terms=1, term_lipschitz=1.0)
    plan = ProximalPlan(known, dpb.sets.Ball(1.0), 1 / 64)
    whole = dpb.draws.StochasticRejection().bias(plan)
    cut = dpb.draws.StochasticRejection(stages=3).bias(plan)
    missing = sum(0.5**a / math.factorial(a) for a in range(4, 40))
    assert missing <= cut - whole <= 1.1 * missing


def test_errors_grow_with_the_rate_of_a_potential():
    known = Regularity(
        2, 1.0, 0.5, 3.0, error=0.1, gradient_error=0.2, rounding=0.3
    ).of_potential(10.0, 0.7, 1.5)
    assert (known.error, known.gradient_error, known.rounding) == (1.0, 2.0, 3.0)
    assert known.lipschitz == pytest.approx(10 * 1.0 + 7 * 1.5)
    assert (known.smoothness, known.strong_convexity) == (30 + 7, 5 + 7)


def test_rows_that_only_pad_the_records_fit_a_poisson_batch():
    """Their bits are drawn as well, and must not push records out."""
    for rate, size in ((0.3, 65), (0.9, 127)):
        sampling, rows = dpb.Poisson(rate), padded_rows(size)
        assert rows > size
        capacity = sampling.rows(size)
        chance = scipy.stats.binom.sf(capacity, rows, sampling.realised_rate)
        assert chance <= sampling.failure(dpb.Neighbours.REPLACE_ONE, size) <= 1e-12
        batch = sampling.draw(jnp.ones(size), size, key=jax.random.key(0))
        assert len(batch.mask) == capacity
    # One record more always fits.
    assert padded_rows(64) > 64


def test_a_pass_that_has_begun_is_charged():
    sampling = dpb.privacy.SinglePass(10)
    charged = [sampling.charged(count, 100) for count in (1, 10, 11, 20, 21)]
    assert charged == [1, 1, 2, 2, 3]


def test_a_grid_release_rounds_by_less_than_its_share_of_the_margin():
    """Neighbours move apart by the noise's grid: half a step in each coordinate."""
    size = 4096
    row = jnp.full((1, size), 0.3 / math.sqrt(size), jnp.float32)
    bounded = dpb.privacy.clipped_mean(
        lambda z: z, row, clip_norm=1.0, precision="grid"
    )
    released = dpb.privacy.Gaussian(0.0, precision="grid").release(
        bounded, key=jax.random.key(0)
    )
    steps = np.asarray(released, np.float64)
    exact = np.asarray(bounded.raw.values(), np.float64)
    assert np.linalg.norm(steps - exact) <= 2.0**-13
    # Twice that, of a sensitivity of one contribution, is within the margin.
    assert 2 * 2.0**-13 + 8 * 2.0**-24 <= ROUNDING_MARGIN


def test_every_selection_is_charged_and_may_run_out_of_runs():
    queries = (Query("records", 10, 1.0),)
    one, three = (
        Selection("s", count, queries, dpb.privacy.Gaussian(2.0), Repetitions(3.0), 4)
        for count in (1, 3)
    )
    assert one.failure > 0
    assert three.failure == pytest.approx(3 * one.failure)
    charged = [
        renyi.Divergences(profiles._flatten(event)).epsilon(1e-5)
        for part in (one, three)
        for _, event in part.charges(dpb.People.OVERLAPPING)
    ]
    assert charged[1] > 1.5 * charged[0]


def test_every_batch_of_every_release_may_overflow():
    sampling = dpb.Poisson(0.1, capacity=20)
    chance = sampling.failure(dpb.Neighbours.REPLACE_ONE, 100)
    queries = tuple(Query(role, 100, 1.0, sampling) for role in ("upper", "lower"))
    apart, joint = (
        dpb.privacy.Release("a", 3, queries, dpb.privacy.Gaussian(2.0), joint=joint)
        for joint in (False, True)
    )
    assert apart.failure == pytest.approx(2 * 3 * chance)
    assert joint.failure == pytest.approx(3 * chance)
    assert dpb.privacy.Ledger((apart, joint)).failure == pytest.approx(9 * chance)


def test_runs_on_numbered_batches_are_charged_one_by_one():
    queries = (Query("records", 100, 1.0, dpb.privacy.SinglePass(10)),)
    part = dpb.privacy.Release("a", 5, queries, dpb.privacy.Gaussian(2.0))
    charged = [
        profiles.gaussian_mu(event)
        for run in part.repeated(2)
        for _, event in run.charges(dpb.People.OVERLAPPING)
    ]
    assert math.hypot(*charged) == pytest.approx(math.sqrt(2) / 2)
