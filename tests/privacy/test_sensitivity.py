import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dpbilevel as dpb

N, DIM = 4, 3
SCALES = [0.0, 1e-45, 1e-39, 1e-30, 1e-19, 1e-3, 1.0, 1e10, 1e19, 1e30, 3e38]
SPECIAL = [np.nan, np.inf, -np.inf]
CLIP_NORMS = [1e-30, 1e-20, 1e-19, 1e-6, 1.0, 1e10]
RELATIONS = list(dpb.Neighbours)

entries = st.one_of(
    st.sampled_from(SPECIAL),
    st.builds(
        lambda scale, value: float(np.float32(scale * value)),
        st.sampled_from(SCALES),
        st.floats(-1, 1),
    ),
)
record = st.lists(entries, min_size=DIM, max_size=DIM)
datasets = st.lists(record, min_size=N, max_size=N)


def with_tree(row):
    return {"a": row[:1], "b": row[1:].reshape(2, 1)}


@functools.partial(jax.jit, static_argnames=("dtype", "microbatch"))
def library(rows, mask, clip_norm, dtype, microbatch="auto"):
    return dpb.privacy.clipped_mean(
        with_tree,
        rows.astype(dtype),
        clip_norm=clip_norm,
        mask=mask,
        microbatch=microbatch,
        precision="float",
    ).raw


def no_clip(rows, mask, clip_norm, dtype):
    kept = jnp.where(mask[:, None], jnp.nan_to_num(rows.astype(dtype)), 0)
    return with_tree(jnp.mean(kept, axis=0))


def doubled_norm(rows, mask, clip_norm, dtype):
    return library(rows, mask, 2 * clip_norm, dtype)


def clip_of_the_mean(rows, mask, clip_norm, dtype):
    mean = jnp.sum(jnp.where(mask[:, None], jnp.nan_to_num(rows), 0), axis=0) / N
    return with_tree(mean * jnp.minimum(1, clip_norm / jnp.linalg.norm(mean)))


def divided_by_the_rows_present(rows, mask, clip_norm, dtype):
    mean = library(rows, mask, clip_norm, dtype)
    present = N / jnp.sum(mask.astype(jnp.float32))
    return jax.tree.map(lambda v: v * present, mean)


def neighbour(rows, mask, other, relation):
    """The last record replaced by `other`, or removed."""
    if relation is dpb.Neighbours.REPLACE_ONE:
        return np.vstack([rows[:-1], other]), mask
    return rows, mask & (np.arange(N) < N - 1)


def distance(left, right):
    flat = [
        np.concatenate([np.ravel(v).astype(np.float64) for v in jax.tree.leaves(tree)])
        for tree in (left, right)
    ]
    return np.linalg.norm(flat[0] - flat[1])


def exceeds(query, rows, other, clip_norm, relation, dtype=jnp.float32):
    """Whether two neighbours' means are further apart than the sensitivity."""
    rows = np.asarray(rows, np.float32)
    mask = np.ones(N, bool)
    moved = neighbour(rows, mask, np.asarray([other], np.float32), relation)
    values = [
        query(jnp.asarray(r), jnp.asarray(m), clip_norm, dtype)
        for r, m in ((rows, mask), moved)
    ]
    claimed = dpb.privacy.Bounded(None, clip_norm / N).sensitivity(relation)
    gap = distance(*values)
    # Not `gap > claimed`: a gap that is no number is a violation.
    return not gap <= claimed * (1 + 1e-6)


compiled = {size: functools.partial(library, microbatch=size) for size in ("auto", 3)}


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("microbatch", compiled)
@settings(max_examples=150)
@given(rows=datasets, other=record, clip_norm=st.sampled_from(CLIP_NORMS))
def test_no_record_moves_the_mean_by_more_than_the_sensitivity(
    relation, microbatch, rows, other, clip_norm
):
    assert not exceeds(compiled[microbatch], rows, other, clip_norm, relation)


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@given(rows=datasets, other=record)
def test_no_record_moves_a_half_precision_mean_by_more(relation, dtype, rows, other):
    assert not exceeds(compiled["auto"], rows, other, 1.0, relation, dtype)


def opposite(scale):
    rows = np.zeros((N, DIM))
    rows[-1, 0] = scale
    return rows, [-scale, 0.0, 0.0]


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("scale", [1.0, 1e10])
def test_the_sensitivity_is_attained(relation, scale):
    rows, other = opposite(scale)
    assert not exceeds(library, rows, other, 1.0, relation)

    def slightly_longer(rows, mask, clip_norm, dtype):
        return library(rows, mask, 1.001 * clip_norm, dtype)

    assert exceeds(slightly_longer, rows, other, 0.9, relation)


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("broken", [no_clip, doubled_norm])
def test_the_search_catches_a_broken_clip(relation, broken):
    assert exceeds(broken, *opposite(1e3), 1.0, relation)


@pytest.mark.parametrize("relation", RELATIONS)
def test_the_search_catches_a_clip_of_the_whole_batch(relation):
    assert exceeds(clip_of_the_mean, *opposite(1e3), 1.0, relation)


def test_the_search_catches_a_private_denominator():
    rows = np.zeros((N, DIM))
    rows[:, 0] = [9.0, 9.0, 9.0, -9.0]
    removal = dpb.Neighbours.ADD_OR_REMOVE_ONE
    assert exceeds(divided_by_the_rows_present, rows, rows[0], 1.0, removal)
    assert not exceeds(library, rows, rows[0], 1.0, removal)


@pytest.mark.parametrize("tiny", [1e-45, 1e-38, 1e-30, 1e-19])
def test_tiny_values_do_not_slip_past_a_tiny_clip_norm(tiny):
    # Their squares underflow, so a plain norm would be zero.
    records = jnp.full((1, 1000), 10 * tiny, jnp.float32)
    value = dpb.privacy.clipped_mean(
        lambda z: z, records, clip_norm=tiny, precision="float"
    ).raw
    assert np.linalg.norm(np.asarray(value, np.float64)) <= float(np.float32(tiny))


@pytest.mark.reuses_keys  # only the values may differ
def test_no_value_is_released_where_its_noise_underflows(getkey):
    key = getkey()

    def released(sign, clip_norm):
        records = jnp.full((1000, 1), sign * clip_norm, jnp.float32)
        bounded = dpb.privacy.clipped_mean(
            lambda z: z, records, clip_norm=clip_norm, precision="float"
        )
        return dpb.privacy.Gaussian(0.1, precision="float").release(bounded, key=key)

    # Some backends keep noise of so little size, others make zero of it.
    np.testing.assert_array_equal(released(1, 1e-37), released(-1, 1e-37))
    # The control: the noise of a larger clip norm comes with the value.
    assert released(1, 1e-20) != released(-1, 1e-20)


def absorbed(first, n=20_000, big=8_192):
    """Data in which a plain float32 sum loses later records, or not, by the first."""
    values = np.full(n, 1.0, np.float32)
    values[0] = first
    values[big + 2 :] = -0.3 * big * 2.0**-23
    return jnp.asarray(values)


@pytest.mark.parametrize("rows", [1, 64, 1000, "auto"])
def test_no_arrangement_of_records_lets_one_decide_how_others_round(rows):
    def total(values):
        mean = dpb.privacy.clipped_mean(
            lambda v: v[None],
            values,
            clip_norm=1.0,
            denominator=1.0,
            microbatch=rows,
            precision="float",
        )
        return float(mean.raw[0])

    assert abs(total(absorbed(1.0)) - total(absorbed(-1.0))) <= 2 * (1 + 2**-11)


def test_a_plain_float32_sum_is_moved_by_more_than_its_sensitivity():
    def total(values):
        return float(jax.lax.scan(lambda s, v: (s + v, None), jnp.zeros(()), values)[0])

    assert abs(total(absorbed(1.0)) - total(absorbed(-1.0))) > 7


def test_sum_of_mean_and_mean_of_other_shape_is_refused():
    records = jnp.ones((4, 1))
    one = dpb.privacy.clipped_mean(
        lambda v: v, records, clip_norm=1.0, precision="float"
    )
    many = dpb.privacy.clipped_mean(
        lambda v: jnp.zeros(9) * v, records, clip_norm=1.0, precision="float"
    )
    with pytest.raises(ValueError, match="cannot add shapes"):
        _ = one + many


def test_own_number_of_rows_is_no_denominator_where_it_is_private():
    relation = dpb.Neighbours.ADD_OR_REMOVE_ONE
    own = dpb.privacy.clipped_mean(
        lambda v: v, jnp.ones(4), clip_norm=1.0, precision="float"
    )
    given = dpb.privacy.clipped_mean(
        lambda v: v, jnp.ones(4), clip_norm=1.0, denominator=4.0, precision="float"
    )
    with pytest.raises(ValueError, match="give clipped_mean denominator="):
        own.sensitivity(relation)
    assert given.sensitivity(relation) == 0.25
    assert own.sensitivity() == 0.5


@pytest.mark.parametrize("name", ["clip_norm", "denominator"])
def test_vectors_are_refused_where_a_number_bounds_the_sensitivity(name):
    arguments = {"clip_norm": 1.0, "denominator": 4.0} | {name: jnp.ones(2)}
    with pytest.raises(ValueError, match=f"{name} must be a single number"):
        dpb.privacy.clipped_mean(lambda v: v, jnp.ones((4, 2)), **arguments)


def test_a_vector_of_multipliers_is_refused():
    with pytest.raises(ValueError, match="noise_multiplier must be a single number"):
        dpb.privacy.Gaussian(jnp.asarray([1.0, 0.0]), precision="float")


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_a_clip_norm_beyond_float32_lets_nothing_through():
    values = jnp.asarray([1.0, jnp.nan])
    mean = dpb.privacy.clipped_mean(
        lambda v: v, values, clip_norm=1e39, denominator=1e39, precision="float"
    )
    assert float(mean.raw) == 0.0


@pytest.mark.parametrize("contribution", [2e-38, 1e-37, 1e-27, 1.0, 1e30, 1e38])
def test_a_float_mean_at_the_ends_of_the_range_moves_no_further_than_claimed(
    contribution,
):
    # Coordinates below the normal numbers are flushed, and sums above them are
    # infinite: one record decides about both where others come close.
    clip_norm = 1e-3 if contribution < 1 else 1e15
    d, tiny = 100, float(jnp.finfo(jnp.float32).tiny)
    close = min(tiny / contribution * d**0.5, 8.0) - 0.5
    others = np.full((10, d), close / 10 / d**0.5 * clip_norm, np.float32)
    last = np.full((1, d), clip_norm / d**0.5, np.float32)
    records = jnp.asarray(np.concatenate([others, last]))

    def mean(counts):
        return dpb.privacy.clipped_mean(
            lambda z: z,
            records,
            clip_norm=clip_norm,
            denominator=clip_norm / contribution,
            mask=jnp.arange(11) < counts,
            precision="float",
        )

    with_last, without = (np.float64(mean(counts).raw) for counts in (11, 10))
    moved = np.linalg.norm(with_last - without)
    assert moved <= contribution * (1 + 1e-6)
    # Nothing counts where the range of the floats is too near, all else does.
    assert np.any(with_last) == (contribution in (1e-27, 1.0, 1e30))
