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

import dpbilevel as dpb
from dpbilevel.bilevel.certificates import certified, sensitivities
from dpbilevel.bilevel.certificates.fixed_count import Bounds
from dpbilevel.games import proximal_point
from dpbilevel.games.resolvents import Resolvent
from dpbilevel.privacy.per_example.norms import scale_and_norm
from tests.attacks.terms import CONSTANTS, exact_norm, moved, upper
from tests.cases import slow

SIDE = 256


SIZE = SIDE**2  # its root is a power of two


@pytest.mark.parametrize("part", [0.6, *slow(0.8)])
def test_rounding_every_coordinate_up_keeps_a_record_within_the_clip_norm(part, x64):
    # Cut to the clip norm itself, a coordinate is a part of a step beyond 2**15.
    clip_norm = SIDE * (2.0**15 + part)
    row = jnp.full((1, SIZE), 2.0**20)

    @jax.jit
    def mean(row):
        return dpb.privacy.clipped_mean(
            lambda z: z, row, clip_norm=clip_norm, precision="grid"
        ).raw

    grid = mean(row)
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
        monkeypatch.setattr(certified.LowerLevel, "hypergradient", lambda _: value)
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
    plan = Resolvent(SHIFT, 1.0, 1.0, 1, SIZE, 1, 1.0)
    # One record moves it by 1 and a little, and the grid is that of 2.
    contribution = plan.contribution(jnp.float64, "float")
    assert 1.0 <= contribution < 1.0 + 2.0**-20

    def sealed(value):
        monkeypatch.setattr(
            proximal_point, "approximate_resolvent", lambda *_, **__: value
        )
        query = proximal_point.ResolventQuery(plan, 1, dpb.FullBatch())
        options = {"precision": "grid", "key": jax.random.key(0)}
        return query.read(jnp.zeros(SIZE), jnp.zeros((1, SIZE)), **options)

    seals = [sealed(value) for value in adversary(1.0, 2.0**23)]
    far = moved([seal.raw for seal in seals])
    assert far > 1.0 + SIDE * 2.0**-24
    assert far <= float(seals[0].sensitivity(dpb.Neighbours.ADD_OR_REMOVE_ONE))


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


@pytest.mark.parametrize("role", ["upper", *slow("lower")])
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
PLAN = Resolvent(INEQUALITY, 2.0, 6.0, 3, 4, 20, 10.0)


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
