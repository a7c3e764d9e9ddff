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


def library(rows, mask, clip_norm, dtype, microbatch="auto"):
    return dpb.clipped_mean(
        with_tree,
        rows.astype(dtype),
        clip_norm=clip_norm,
        mask=mask,
        microbatch=microbatch,
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
    claimed = dpb.Bounded(None, clip_norm / N).sensitivity(relation)
    gap = distance(*values)
    # Not `gap > claimed`: a gap that is no number is a violation.
    return not gap <= claimed * (1 + 1e-6)


compiled = {
    microbatch: jax.jit(
        lambda rows, mask, clip_norm, dtype, microbatch=microbatch: library(
            rows, mask, clip_norm, dtype, microbatch
        ),
        static_argnames="dtype",
    )
    for microbatch in ("auto", 3)
}


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
    value = dpb.clipped_mean(lambda z: z, records, clip_norm=tiny).raw
    assert np.linalg.norm(np.asarray(value, np.float64)) <= float(np.float32(tiny))


def test_no_value_is_released_where_its_noise_underflows(getkey):
    records = jnp.full((1000, 1), 1e-37, jnp.float32)
    bounded = dpb.clipped_mean(lambda z: z, records, clip_norm=1e-37)
    noise_std = bounded.sensitivity()
    assert np.float32(noise_std) < np.finfo(np.float32).tiny
    np.testing.assert_array_equal(dpb.Gaussian(1.0).release(bounded, key=getkey()), 0)
