"""AdaptiveClipGD: where its clip norm goes, and what its coordinate costs."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpbilevel as dpb
from dpbilevel.bilevel import OneLevel
from dpbilevel.bilevel.levels import penalized_level
from dpbilevel.onelevel import AdaptiveClipGD
from dpbilevel.onelevel.noisy_gd import NoisyGD
from dpbilevel.privacy.releases import Release
from tests.cases import Audited, Case, planned, slow
from tests.problems import LEVELS, LOWER, ONE_LEVEL, WEIGHTING, X0, Y0

N = 200
KEY = 0
LENGTHS = jnp.asarray(np.random.default_rng(0).lognormal(size=N), jnp.float32)
SLOPES = dpb.FiniteSum(lambda w, z: z * w[0])  # a record is its gradient


def adaptive(num_steps=4, clip_norm=0.7, step_size=0.1, **fields):
    return AdaptiveClipGD(num_steps, clip_norm, step_size, **fields)


CONTRACT = {
    "adaptive_clip_both": Case(
        WEIGHTING,
        OneLevel(adaptive(clip_norm=1.0), reads="both"),
        LEVELS,
        (X0, Y0),
        "disjoint",
        keeps_x=True,
        adaptive=2.0,
    ),
    "adaptive_clip": Case(ONE_LEVEL, adaptive(clip_norm=1.0), LOWER, Y0, adaptive=2.0),
}


def planned_adaptive(kind=AdaptiveClipGD, **fields):
    settings = {"weight": 1.0, "rate": 0.01} | fields
    return planned(kind(4, 0.7, 0.1, **settings))


AUDITS = {
    "AdaptiveClipGD": Audited(planned_adaptive()),
    "AdaptiveClipGD, add or remove": Audited(
        planned_adaptive(neighbours=dpb.Neighbours.ADD_OR_REMOVE_ONE)
    ),
}


def norms(solver, scale=0.0, records=LENGTHS):
    """The clip norms of a run."""
    solver = solver.with_noise(scale).with_sizes(N)
    state = solver.init(SLOPES, jnp.zeros(1))
    step = jax.jit(type(solver).step)
    found = []
    for key in jax.random.split(jax.random.key(KEY), solver.num_steps):
        state = step(solver, SLOPES, records, state, key=key)
        found.append(float(state.clip_norm))
    return found


def share_kept(norm, weight):
    longest = norm * math.sqrt(1 + weight**2)
    whole = np.sqrt(np.asarray(LENGTHS) ** 2 + (weight * norm) ** 2)
    return float(np.mean(np.minimum(1.0, longest / whole)))


@pytest.mark.parametrize("start", [0.05, *slow(30.0)])
def test_the_norm_goes_to_where_gradients_keep_the_share_that_is_asked(start):
    end = norms(adaptive(80, start, kept=0.6))[-1]
    assert share_kept(end, 0.3) == pytest.approx(0.6, abs=0.01)
    # The control: another share has another norm.
    assert abs(share_kept(2 * end, 0.3) - 0.6) > 0.1


def test_a_step_is_that_of_the_formula():
    (norm,) = norms(adaptive(1, 0.5, rate=0.3, weight=0.4, kept=0.8))
    missing = (0.8 - share_kept(0.5, 0.4)) / 0.2
    assert abs(missing) > 0.1
    expected = 0.5 * math.exp(0.3 * max(-1, min(1, missing)))
    assert norm == pytest.approx(expected, rel=1e-5)


def test_the_norm_stays_within_a_range_of_its_start_whatever_is_released():
    for scale, records in ((0.0, 0 * LENGTHS), (1e4, LENGTHS)):
        found = norms(adaptive(30, 1.0, rate=9.0), scale, records)
        assert np.isfinite(found).all()
        assert 1e-3 * 0.999 <= min(found)
        assert max(found) <= 1e3 * 1.001
    # The control: it is reached.
    assert min(norms(adaptive(30, 1.0, rate=9.0), 0.0, 0 * LENGTHS)) < 2e-3


def test_its_noise_is_that_of_a_clip_norm_longer_by_the_coordinate():
    ledger = adaptive(weight=0.75).with_noise(1.0).ledger(ONE_LEVEL, 50)
    (release,) = ledger.releases
    assert release.contribution == pytest.approx(0.7 * 1.25 / 50)
    plain = NoisyGD(4, 0.7, 0.1).with_noise(1.0).ledger(ONE_LEVEL, 50)
    assert ledger.delta(1.0) == plain.delta(1.0)


def test_records_that_are_not_finite_count_for_nothing_in_the_norm():
    broken = LENGTHS.at[:3].set(jnp.asarray([jnp.nan, jnp.inf, -jnp.inf]))
    fields = {"clip_norm": 2.0, "kept": 0.7}
    (norm,) = norms(adaptive(1, **fields), records=broken)
    (whole,) = norms(adaptive(1, **fields))
    assert whole < norm <= whole * math.exp(0.2 * 3 / N / 0.3) * 1.0001


@pytest.mark.slow
def test_gradients_of_layers_stay_factored():
    """One more coordinate forms no gradient of a record."""
    layer = jnp.zeros((64, 128))
    problem = dpb.FiniteSum(lambda w, z: jnp.sum(jnp.tanh(z @ w)))
    records = jnp.asarray(np.random.default_rng(1).normal(size=(256, 64)), jnp.float32)
    largest = {}
    for kind in (NoisyGD, AdaptiveClipGD):
        solver = kind(1, 1.0, 0.1).with_noise(1.0).with_sizes(256)
        step = jax.jit(type(solver).step)
        state = solver.init(problem, layer)
        lowered = step.lower(solver, problem, records, state, key=jax.random.key(0))
        largest[kind] = lowered.compile().memory_analysis().temp_size_in_bytes
    formed = 256 * 64 * 128 * 4
    assert largest[AdaptiveClipGD] < 1.1 * largest[NoisyGD] + 2**16 < formed


@pytest.mark.parametrize("field", ["kept", "rate", "weight"])
def test_a_bad_field_is_named_in_the_error(field):
    with pytest.raises(ValueError, match=f"AdaptiveClipGD: {field} must be"):
        adaptive(**{field: 0.0})


@pytest.mark.slow
@pytest.mark.parametrize("scale", [0.0, *slow(100.0)])
def test_levels_keep_their_shares_of_the_sensitivity_where_the_norm_moves(
    monkeypatch, scale
):
    problem = dpb.BilevelProblem(
        lambda x, y, z: scale * z * y[0], lambda x, y, z: scale * z * y[0]
    )
    level = penalized_level(problem, None, penalty=5.0, upper_clip_norm=2.0)
    sizes = dpb.Sizes(N, N, "disjoint")
    solver = (
        adaptive(6, rate=1.0).with_noise(1e-3).with_precision("float").with_sizes(sizes)
    )
    data = dpb.Levels(LENGTHS, LENGTHS)

    def share(release):
        upper, lower = (q.contribution for q in release.queries)
        return float(upper / (upper + lower))

    made, of = [], Release.apply

    def recorded(release, *arguments, **keywords):
        made.append(release)
        return of(release, *arguments, **keywords)

    monkeypatch.setattr(Release, "apply", recorded)
    state = solver.init(level, jnp.zeros(1))
    for key in jax.random.split(jax.random.key(KEY), solver.num_steps):
        state = solver.step(level, data, state, key=key)
    (planned_release,) = solver.ledger(level, sizes).releases
    assert abs(math.log(float(state.clip_norm) / 0.7)) > 1  # it moved
    assert len(made) == solver.num_steps
    for release in made:
        assert share(release) == pytest.approx(share(planned_release), rel=1e-5)
    # The control: a level's own clip norm does not follow that of the solver.
    upper, lower = level.queries(float(state.clip_norm), dpb.FullBatch(), sizes)[0]
    alone = upper.contribution / (upper.contribution + lower.contribution)
    assert alone != pytest.approx(share(planned_release), rel=0.1)
