"""Losses with randomness: a fresh key for each record and release."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpbilevel as dpb
from dpbilevel.onelevel import AdaptiveClipGD
from dpbilevel.onelevel.noisy_gd import AllocatedGD
from dpbilevel.privacy.per_example.clipping import unsealed
from dpbilevel.privacy.records import randomness
from dpbilevel.privacy.records.rows import Padded
from tests.cases import Case, slow

N = 6
NUMBERS = jnp.arange(N)
KEY = 0


def noise_of_a_row(w, number, key):
    """The gradient has in the row of a record what the record's key draws."""
    return w[number] @ jax.random.uniform(key, (3,), minval=0.1)


def coins_of_a_row(w, number, key):
    return w[number] @ jax.random.bernoulli(key, 0.5, (3,)).astype(float)


RANDOM = dpb.Randomized(noise_of_a_row)


def dropped(w, row, key):
    keep = jax.random.bernoulli(key, 0.5, w.shape)
    return dpb.logistic_loss(jnp.where(keep, w, 0), row)


ROWS = {
    "features": np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32),
    "label": np.ones(20, np.float32),
}
DROPPED = dpb.FiniteSum(dpb.Randomized(dropped))
CONTRACT = {
    "randomized": Case(
        DROPPED,
        dpb.NoisyGD(2, 1.0, 0.1, sampling=dpb.Poisson(0.5)),
        ROWS,
        jnp.zeros(3),
    )
}


def reader(loss=RANDOM, clip_norm=9.0, sampling=None):
    """A release's draws as a function of its key: a row for each record."""

    @jax.jit  # compiled sooner than all of its operations
    def read(key, records=NUMBERS):
        problem = dpb.FiniteSum(loss)
        scheme = sampling or dpb.FullBatch()
        ((query,), _) = problem.queries(clip_norm, scheme, N)
        fun = problem.record_gradients(jnp.zeros((N, 3)))["records"]
        bounded = query.read(fun, records, precision="float", key=key)
        return unsealed(bounded) * query.sampling.denominator(N)

    return read


def draws(**options):
    """What the keys of two releases draw."""
    read = reader(**options)
    return [np.asarray(read(jax.random.key(seed))) for seed in range(2)]


def are_fresh(*releases):
    """Whether no two records, and no two releases of a record, have the same draw."""
    rows = np.concatenate(releases)
    return len(np.unique(rows, axis=0)) == len(rows)


def test_each_record_has_a_key_of_its_own_in_each_release():
    assert are_fresh(*draws())


def test_keys_that_are_the_same_for_all_records_are_seen(monkeypatch):
    monkeypatch.setattr(jax.random, "fold_in", lambda key, number: key)
    assert not are_fresh(*draws())


def of_two_steps(solver=None, loss=RANDOM):
    """The draws of two steps without noise."""
    solver = solver or dpb.NoisyGD(2, 9.0, optax.sgd(1.0), precision="float")
    solver = solver.with_noise(0.0).with_sizes(N)
    problem = dpb.FiniteSum(loss)
    path = dpb.solve(
        problem,
        solver,
        NUMBERS,
        jnp.zeros((N, 3)),
        key=jax.random.key(KEY),
        trajectory=True,
    ).trajectory
    return -np.diff(np.concatenate([np.zeros((1, N, 3)), path]), axis=0) * N


def test_two_steps_of_a_run_have_other_keys_and_the_same_run_the_same():
    first, second = of_two_steps()
    assert are_fresh(first, second)
    np.testing.assert_array_equal(of_two_steps(), (first, second))


def test_keys_that_are_the_same_in_all_steps_are_seen(monkeypatch):
    def constant(key, *names):
        found = derive(key, *names)
        same = jax.random.wrap_key_data(jnp.zeros(2, jnp.uint32), impl="threefry2x32")
        return [
            same if name == "loss" else v for name, v in zip(names, found, strict=True)
        ]

    from dpbilevel.privacy import queries

    derive = queries.derive
    monkeypatch.setattr(queries, "derive", constant)
    another = dpb.Randomized(lambda *of: noise_of_a_row(*of))  # is not compiled yet
    assert not are_fresh(*of_two_steps(loss=another))


def moves_no_other(row, sampling):
    """Whether the draws of others are the same if a row is no record."""
    rows, present = jnp.arange(64) % N, jnp.arange(64) < N
    read = reader(sampling=sampling)
    more, less = (
        read(jax.random.key(KEY), Padded(rows, mask))
        for mask in (present, present.at[row].set(False))
    )
    others = np.arange(N) != row
    return (less[others] == more[others]).all() and (less[row] != more[row]).any()


@pytest.mark.parametrize("sampling", [dpb.Poisson(0.99), *slow(dpb.FullBatch())])
def test_a_record_less_changes_the_key_of_no_other(sampling, monkeypatch):
    assert moves_no_other(1, sampling)

    def by_place(fun, records, *, key):  # of the records that there are
        found, numbered = with_keys(fun, records, key=key)
        rows, present = numbered.records[0], numbered.present
        return found, Padded((rows, jnp.cumsum(present)), present)

    with_keys = randomness.with_keys
    monkeypatch.setattr("dpbilevel.privacy.queries.with_keys", by_place)
    assert not moves_no_other(1, sampling)


def test_the_mean_over_augmentations_is_clipped_once():
    coins = dpb.Randomized(coins_of_a_row, augmentations=4)
    long, _ = draws(loss=coins)
    assert set(np.unique(long)) <= {0, 0.25, 0.5, 0.75, 1}
    assert len(np.unique(long)) > 2  # a mean, and of different keys
    short, _ = draws(loss=coins, clip_norm=0.5)
    norms = np.linalg.norm(long, axis=1, keepdims=True)
    want = long * np.minimum(1, 0.5 / np.maximum(norms, 1e-9))
    np.testing.assert_allclose(short, want, rtol=1e-3)


def test_the_rows_of_a_person_have_keys_of_their_own():
    def loss(w, row, key):
        return w[row] * jax.random.uniform(key)

    problem = dpb.FiniteSum(dpb.Randomized(loss)).per_person(3)
    ((query,), _) = problem.queries(9.0, dpb.FullBatch(), N)
    assert query.randomized
    person = jax.tree.map(
        lambda v: v[0], dpb.by_person(np.arange(3), ["a"] * 3, most_rows=3)
    )
    keyed = randomness.Keyed(person, jax.random.key(0))
    gradient = problem.record_gradients(jnp.zeros(3))["records"](keyed)
    assert len(np.unique(gradient)) == 3


class Net(eqx.Module):
    """A network with dropout."""

    inner: eqx.nn.Linear
    outer: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __init__(self, key):
        first, last = jax.random.split(key)
        self.inner = eqx.nn.Linear(3, 16, key=first)
        self.outer = eqx.nn.Linear(16, 2, key=last)
        self.dropout = eqx.nn.Dropout(0.5)

    def __call__(self, row, key=None):
        hidden = jax.nn.relu(self.inner(row))
        return self.outer(self.dropout(hidden, key=key))


def cross_entropy(net, row, key):
    scores = net(row["x"], key)
    return optax.losses.softmax_cross_entropy_with_integer_labels(scores, row["y"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("solver", "augmentations"),
    [
        (dpb.NoisyGD(60, 1.0, optax.adam(0.05), sampling=dpb.Poisson(0.5)), 1),
        (dpb.NoisyGD(60, 1.0, optax.adam(0.05)), 4),
        (AllocatedGD(30, 2, 1.0, optax.adam(0.05)), 1),
        (AdaptiveClipGD(60, 1.0, optax.adam(0.05)), 1),
    ],
)
def test_a_network_with_dropout_is_trained(solver, augmentations):
    x = np.random.default_rng(0).normal(size=(400, 3)).astype(np.float32)
    rows = {"x": x, "y": (np.abs(x[:, 0]) > 0.7).astype(np.int32)}
    problem = dpb.FiniteSum(dpb.Randomized(cross_entropy, augmentations))
    found = dpb.fit(
        problem,
        solver,
        rows,
        Net(jax.random.key(1)),
        budget=dpb.PrivacyBudget(8.0, 1e-4),
        key=jax.random.key(2),
    )
    net = eqx.nn.inference_mode(found.value)
    assert np.mean(np.argmax(jax.vmap(net)(x), 1) == rows["y"]) > 0.8


def test_methods_that_give_no_key_refuse_such_a_loss(tmp_path):
    def loss(x, y, row, key):
        return y

    with pytest.raises(ValueError, match="losses of two levels take no key"):
        dpb.BilevelProblem(dpb.Randomized(loss), loss)
    with pytest.raises(TypeError, match="this method gives losses no key"):
        DROPPED.loss(jnp.zeros(3), ROWS)
    np.save(tmp_path / "rows.npy", ROWS["features"])
    stored = dpb.OnDisk.arrays(np.load(tmp_path / "rows.npy", mmap_mode="r"))
    with pytest.raises(ValueError, match=r"Randomized: .* in memory, got OnDisk"):
        reader()(jax.random.key(KEY), stored)
    with pytest.raises(ValueError, match="augmentations"):
        dpb.Randomized(dropped, 0)


@pytest.mark.parametrize("generator", ["chacha20", "threefry4x32"])
def test_keys_of_losses_are_as_cryptographic_as_that_of_the_run(generator):
    fun, _ = randomness.with_keys(
        lambda keyed: keyed.key, jnp.zeros(4), key=dpb.root_key(generator)
    )
    found = jax.random.key_impl(fun((jnp.zeros(()), jnp.int32(1))))
    expected = {"chacha20": "chacha20", "threefry4x32": "threefry2x32"}[generator]
    assert str(found) == expected


@pytest.mark.parametrize("loss", [dropped, dpb.Randomized(dpb.logistic_loss)])
def test_a_loss_with_a_key_too_many_or_too_few_hears_of_randomized(loss):
    budget = dpb.PrivacyBudget(1.0, 1e-3)
    options = {"budget": budget, "key": jax.random.key(0)}
    with pytest.raises(TypeError, match=r"a key comes last in dpb\.Randomized only"):
        dpb.fit(
            dpb.FiniteSum(loss), dpb.NoisyGD(2, 1.0, 0.1), ROWS, jnp.zeros(3), **options
        )
