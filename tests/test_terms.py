"""Every term of a sensitivity is needed: neighbours that only the whole bound covers.

Each bound here is compared with integers, with an adversary's rounding, or with its own
value where all but one of its terms vanish.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpbilevel as dpb
from dpbilevel import certified, resolvent
from dpbilevel.clipping import _norm
from dpbilevel.problems import sensitivities
from dpbilevel.problems.resolvents import Resolvent
from dpbilevel.sampling import Batch

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
    grid = dpb.clipped_mean(lambda z: z, row, clip_norm=clip_norm, precision="grid").raw
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
    assert float(_norm(first)) >= lost * (1 + 7 * units)


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
    monkeypatch.setattr(sensitivities, "at", lambda *_: ones)
    monkeypatch.setattr(sensitivities, "ratios", lambda *_: ones)
    records = {"features": jnp.zeros((40, 2)), "label": jnp.ones(40)}

    def sealed(value):
        monkeypatch.setattr(certified, "hypergradient", lambda *_: value)
        return certified.certified_hypergradient(
            example,
            dpb.Levels(records, records),
            jnp.zeros(1),
            jnp.zeros(2),
            sizes,
            precision="grid",
        )

    seals = [sealed(value) for value in adversary(1.0, 2.0**24)]
    far = moved([seal.raw for seal in seals])
    # Rounding set them apart by more than the values were.
    assert far > 1.0 + SIDE * 2.0**-25
    # Half of what both roles are charged together.
    assert far <= float(seals[0].sensitivity()) / 2


SHIFT = dpb.VariationalInequality(
    lambda w, record: record + 0 * w, None, w_set=dpb.Ball(1.0), lipschitz=0.0
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
        batch = Batch(jnp.zeros((1, SIZE)), None, 1.0)
        return resolvent.certified_resolvent(
            plan, batch, jnp.zeros(SIZE), precision="grid"
        )

    seals = [sealed(value) for value in adversary(1.0, 2.0**23)]
    far = moved([seal.raw for seal in seals])
    assert far > 1.0 + SIDE * 2.0**-24
    assert far <= float(seals[0].sensitivity(dpb.Neighbours.ADD_OR_REMOVE_ONE))
