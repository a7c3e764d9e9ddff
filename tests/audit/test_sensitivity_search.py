import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpbilevel as dpb
from dpbilevel import audit
from tests.cases import fast_first

N, CLAIMED = 4, 0.25
RELATIONS = pytest.mark.parametrize("relation", fast_first(dpb.Neighbours))
RECORDS = {
    "v": np.random.default_rng(0).normal(size=(N, 3)).astype(np.float32),
    "group": np.arange(N, dtype=np.int32),
}


def plain(records, clip_norm=1.0, precision="float"):
    def value(record):
        group = record["group"].astype(jnp.float32)
        return {"a": record["v"], "b": group * record["v"][0]}

    return dpb.privacy.clipped_mean(
        value,
        records,
        clip_norm=clip_norm,
        denominator=float(N),
        precision=precision,
    )


def on_grid(records):
    return plain(records, precision="grid")


def one_percent_too_long(records):
    return dpb.privacy.Bounded(plain(records, 1.01).raw, CLAIMED)


def unclipped(records):
    return dpb.privacy.Bounded(jnp.sum(records["v"], axis=0) / N, CLAIMED)


def clipped_as_a_whole(records):
    mean = jnp.sum(jnp.nan_to_num(records["v"], posinf=0, neginf=0), axis=0) / N
    return dpb.privacy.Bounded(mean / jnp.maximum(1.0, jnp.linalg.norm(mean)), CLAIMED)


def search(query, relation, records=RECORDS):
    return audit.sensitivity_search(
        query, records, neighbours=relation, key=jax.random.key(1), tries=1000
    )


@RELATIONS
@pytest.mark.parametrize("query", [plain, on_grid])
def test_clipped_mean_keeps_and_attains_its_sensitivity(relation, query):
    found = search(query, relation)
    assert found.passed, str(found)
    assert found.ratio > 0.99
    assert "no violation found" in str(found)


@RELATIONS
@pytest.mark.parametrize("query", [unclipped, clipped_as_a_whole])
def test_broken_clips_are_found(query, relation):
    found = search(query, relation)
    assert not found.passed
    assert "VIOLATION" in str(found)


@RELATIONS
def test_a_clip_that_is_one_percent_too_long_is_found(relation):
    found = search(one_percent_too_long, relation)
    assert 1.005 < found.ratio < 1.02


def test_refinement_makes_the_witness_worse():
    def of_the_product(records):
        # Large only where both entries of one record are moderate.
        values = jnp.tanh(records["v"][:, 0]) / (1 + (records["v"][:, 1] - 2) ** 2)
        return dpb.privacy.Bounded(jnp.sum(jnp.nan_to_num(values)) / N, CLAIMED)

    ratios = [
        audit.sensitivity_search(
            of_the_product, RECORDS, key=jax.random.key(2), tries=50, rounds=rounds
        ).ratio
        for rounds in (0, 40)
    ]
    assert ratios[1] > ratios[0]


@RELATIONS
def test_witness_reproduces_the_ratio(relation):
    found = search(unclipped, relation)
    rows = [len(side["v"]) for side in (found.records, found.neighbour)]
    assert rows == [N, N if relation is dpb.Neighbours.REPLACE_ONE else N - 1]
    assert set(found.records["group"]) <= set(range(N))


def test_a_private_denominator_is_refused():
    def own_number(records):
        return dpb.privacy.clipped_mean(
            lambda z: z["v"], records, clip_norm=1.0, precision="float"
        )

    with pytest.raises(ValueError, match="give clipped_mean denominator="):
        search(own_number, dpb.Neighbours.ADD_OR_REMOVE_ONE)


def test_a_query_that_seals_nothing_is_refused():
    with pytest.raises(TypeError, match="must be an instance of Bounded"):
        search(lambda records: records["v"], dpb.Neighbours.REPLACE_ONE)


def test_one_row_is_refused():
    single = jax.tree.map(lambda v: v[:1], RECORDS)
    with pytest.raises(ValueError, match="at least two rows"):
        search(plain, dpb.Neighbours.REPLACE_ONE, single)
