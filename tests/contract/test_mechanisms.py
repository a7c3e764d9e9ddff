"""Every mechanism keeps its contract; a new one needs an entry in `MECHANISMS`.

`Laplace` below is a mechanism from outside of the library, for values of one number.
"""

import dataclasses
import functools
import inspect
import math
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import dpbilevel as dpb
from dpbilevel import audit
from dpbilevel.draws.mechanisms import Exponential, RegularizedExponential
from dpbilevel.privacy.accounting import profiles
from dpbilevel.privacy.accounting.closed_forms import pure_event
from dpbilevel.privacy.correlated import Correlated
from dpbilevel.privacy.mechanisms import (
    ROUNDING_MARGIN,
    AbstractMechanism,
    AbstractNoise,
    Gaussian,
    check_release,
)
from dpbilevel.privacy.noise import standard_exponential
from dpbilevel.privacy.per_example.clipping import Bounded, Precision

REPLACE, REMOVE = dpb.Neighbours
DELTA = 1e-6


class Laplace(AbstractNoise):
    """Laplace noise of scale `scale` times the sensitivity, on one number."""

    scale: float | None = None
    neighbours: dpb.Neighbours = eqx.field(static=True, default=REPLACE)
    precision: Precision = eqx.field(static=True, default="float")

    @property
    def multiplier(self):
        if self.scale is None:
            raise ValueError("Laplace: no scale yet.")
        return math.sqrt(2) * self.scale

    def event(self, fraction=1.0):
        return pure_event(fraction * math.sqrt(2) / self.multiplier)

    def part(self, share):
        raise ValueError("Laplace: people must be disjoint.")

    def scaled(self, factor):
        return dataclasses.replace(self, scale=factor * self.scale)

    def release(self, bounded, *, key):
        check_release(self, bounded, key)
        up, down = standard_exponential((2,), jnp.float32, key=key)
        scale = self.scale * (1 + ROUNDING_MARGIN)
        noise = scale * bounded.sensitivity(self.neighbours) * (up - down)
        return jax.lax.stop_gradient(jax.tree.map(lambda v: v + noise, bounded.raw))


MECHANISMS = {
    Gaussian: Gaussian(2.0, precision="float"),
    Correlated: Correlated(2.0, precision="float"),
    Exponential: Exponential(0.5),
    RegularizedExponential: RegularizedExponential(2.0),
    Laplace: Laplace(2.0),
}
every = pytest.mark.parametrize("kind", MECHANISMS)
NOISES = [kind for kind in MECHANISMS if issubclass(kind, AbstractNoise)]
every_noise = pytest.mark.parametrize("kind", NOISES)
BOUNDED = Bounded(jnp.zeros(1), 0.5)


def kinds(kind=AbstractMechanism):
    """All mechanisms of the library that can be made."""
    for other in kind.__subclasses__():
        yield from kinds(other)
        if other.__module__.startswith("dpbilevel.") and not inspect.isabstract(other):
            yield other


def epsilon(event, neighbours=REPLACE):
    return profiles.epsilon(event, neighbours, DELTA)


def release(mechanism, *roles, people=dpb.People.DISJOINT, sampling=None, count=1):
    sampling = sampling or dpb.FullBatch()
    queries = [dpb.privacy.Query(r, 100, c, sampling) for r, c in roles]
    made = dpb.privacy.Release("value", count, tuple(queries), mechanism)
    return dpb.privacy.Ledger((made,), people)


def test_every_mechanism_is_tested_here():
    missing = set(kinds()) - set(MECHANISMS)
    assert not missing, f"add {missing} to MECHANISMS in {__file__}"


@every_noise
def test_the_event_covers_the_noise_and_a_quarter_of_it_does_not(kind):
    mechanism = MECHANISMS[kind]

    def run(data, *, key):
        return mechanism.release(Bounded(data, 0.5), key=key)

    def audited(fraction):
        claim = audit.event_claim(mechanism.event(fraction), REPLACE)
        pair = jnp.zeros(1), jnp.ones(1)  # as far apart as the sensitivity
        return audit.trade_off(run, *pair, claim, key=jax.random.key(0), runs=20_000)

    assert audited(1.0).passed
    assert not audited(0.25).passed


@every
def test_more_noise_and_a_smaller_share_cost_less(kind):
    mechanism = MECHANISMS[kind]
    whole = epsilon(mechanism.event())
    assert 0 < epsilon(mechanism.event(0.5)) < whole
    assert 0 < epsilon(mechanism.scaled(2.0).event()) < whole
    assert epsilon(mechanism.scaled(2.0).event()) == pytest.approx(
        epsilon(mechanism.event(0.5)), rel=1e-9
    )


@every
def test_the_relation_survives_and_an_uncalibrated_one_makes_nothing(kind):
    removed = dataclasses.replace(MECHANISMS[kind], neighbours=REMOVE)
    assert removed.scaled(2.0).neighbours is REMOVE
    with pytest.raises(ValueError, match=r"no scale yet|calibrated|no noise"):
        kind().event()
    with pytest.raises(TypeError, match="neighbours must be an instance of Neighbours"):
        dataclasses.replace(MECHANISMS[kind], neighbours="replace_one")


def noises(kind, seed=0):
    keys = jax.random.split(jax.random.key(seed), 4000)
    release = MECHANISMS[kind].release
    return np.ravel(jax.jit(jax.vmap(lambda key: release(BOUNDED, key=key)))(keys))


@every_noise
def test_noise_has_the_claimed_deviation_and_follows_the_key(kind):
    claimed = float(MECHANISMS[kind].multiplier) * float(BOUNDED.sensitivity(REPLACE))
    noise = noises(kind)
    assert np.std(noise) == pytest.approx(claimed, rel=0.1)
    assert len(np.unique(noise)) > 3990
    np.testing.assert_array_equal(noise, noises(kind))


LEAVES = Bounded({"a": jnp.zeros(2000), "b": jnp.zeros((2, 1000))}, 0.5)


@functools.cache
def noise_with_margin(kind):
    """One program: the noise of all coordinates, for a `ROUNDING_MARGIN`."""

    def noise(margin):
        with pytest.MonkeyPatch.context() as patch:
            for module in list(sys.modules.values()):
                if "ROUNDING_MARGIN" in getattr(module, "__dict__", {}):
                    patch.setattr(module, "ROUNDING_MARGIN", margin)
            bounded = BOUNDED if issubclass(kind, Laplace) else LEAVES
            released = MECHANISMS[kind].release(bounded, key=jax.random.key(0))
        return jnp.concatenate([jnp.ravel(v) for v in jax.tree.leaves(released)])

    return jax.jit(noise)


def check_coordinates(noise, claimed):
    different = len(np.unique(np.abs(noise)))
    assert different > 0.997 * len(noise), "draw noise for every coordinate"
    assert np.std(noise) == pytest.approx(claimed, rel=0.1), "not the noise claimed"


SAME_NOISE = {
    "one draw for all coordinates": lambda noise: np.full_like(noise, noise[0]),
    "one draw for all leaves": lambda noise: np.tile(noise[:2000], 2),
    "divided among coordinates": lambda noise: noise / math.sqrt(noise.size),
    "one leaf without": lambda noise: np.append(noise[:2000], np.zeros(2000)),
}


# Laplace is for one number.
@pytest.mark.parametrize("kind", [k for k in NOISES if k is not Laplace])
def test_every_coordinate_has_noise_of_its_own(kind):
    claimed = float(MECHANISMS[kind].multiplier) * float(BOUNDED.sensitivity(REPLACE))
    noise = np.asarray(noise_with_margin(kind)(ROUNDING_MARGIN))
    check_coordinates(noise, claimed)
    for wrong in SAME_NOISE.values():
        with pytest.raises(AssertionError):
            check_coordinates(wrong(noise), claimed)


def growth_with_margin(kind):
    """The factor by which noise grows if `ROUNDING_MARGIN` is one."""
    noise = noise_with_margin(kind)
    return noise(1.0)[0] / noise(ROUNDING_MARGIN)[0]


@every_noise
def test_noise_has_the_margin_for_roundings(kind):
    remedy = f"{kind.__name__}.release: multiply the noise by 1 + ROUNDING_MARGIN"
    growth = growth_with_margin(kind)
    assert growth == pytest.approx(2 / (1 + ROUNDING_MARGIN), rel=1e-5), remedy


def test_noise_without_the_margin_is_seen(monkeypatch):
    class Bare(Laplace):
        def release(self, bounded, *, key):
            return super().release(bounded, key=key) / (1 + ROUNDING_MARGIN)

    monkeypatch.setitem(MECHANISMS, Bare, Bare(2.0))
    assert growth_with_margin(Bare) == pytest.approx(1.0)


@every_noise
def test_a_release_begins_with_check_release(kind):
    mechanism, key = MECHANISMS[kind], jax.random.key(0)
    other = dataclasses.replace(mechanism, precision="grid")
    raw = jnp.zeros(2, jnp.uint32)
    remedy = f"begin {kind.__name__}.release with check_release (privacy/mechanisms.py)"
    for made, value, used, error, said in (
        (mechanism, jnp.zeros(1), key, TypeError, "bounded must be an instance"),
        (other, BOUNDED, key, ValueError, "precision is 'grid', but that of the value"),
        (mechanism, BOUNDED, raw, TypeError, "must be a typed key"),
    ):
        try:
            found = made.release(value, key=used)
        except Exception as e:
            found = e
        assert type(found) is error, remedy
        assert said in str(found), remedy


@every_noise
def test_a_released_value_is_a_constant_to_derivatives(kind):
    def released(value):
        bounded = Bounded(value, 0.5)
        return MECHANISMS[kind].release(bounded, key=jax.random.key(0)).sum()

    assert jax.jit(jax.grad(released))(jnp.ones(1)) == 0


@every_noise
def test_a_release_adds_this_noise_and_the_ledger_charges_its_event(kind):
    mechanism = MECHANISMS[kind]
    ledger = release(mechanism, ("records", 1.0), count=3)
    (made,) = ledger.releases
    assert made.noise_std == pytest.approx(float(mechanism.multiplier) * 2 / 100)
    apply = jax.jit(lambda data, key: made.apply({"records": jnp.sign}, data, key=key))
    value = apply(jnp.ones(100), jax.random.key(0))
    assert value != 1
    assert abs(value - 1) < 20 * made.noise_std
    assert ledger.epsilons(DELTA)["records"] == pytest.approx(
        epsilon(profiles.dp_accounting.SelfComposedDpEvent(mechanism.event(), 3))
    )


@every_noise
def test_disjoint_people_are_charged_their_share(kind):
    mechanism = MECHANISMS[kind]
    charged = release(mechanism, ("upper", 1.0), ("lower", 3.0)).epsilons(DELTA)
    for role, share in (("upper", 0.25), ("lower", 0.75)):
        assert charged[role] == pytest.approx(epsilon(mechanism.event(share)))


def check_parts(mechanism):
    whole = epsilon(mechanism.event())
    try:
        parts = [mechanism.part(share) for share in (0.1, 0.6, 0.3)]
    except ValueError as refusal:
        if "disjoint" not in str(refusal):
            raise
        return
    together = epsilon(profiles.dp_accounting.ComposedDpEvent(parts))
    assert together >= (1 - 1e-9) * whole, "parts reveal less than the whole"
    assert together <= 1.5 * whole


@every_noise
def test_parts_are_together_at_least_the_whole(kind):
    check_parts(MECHANISMS[kind])


@pytest.mark.parametrize("power", [1.0, 1.5])
def test_parts_that_are_charged_too_little_are_seen(power):
    class Cheap(Gaussian):
        def part(self, share):
            return self.event(share**power)

    with pytest.raises(AssertionError, match="less than the whole"):
        check_parts(Cheap(2.0, precision="float"))


def test_what_no_proof_covers_is_refused():
    roles = ("upper", 1.0), ("lower", 1.0)
    shared = release(Laplace(2.0), *roles, people=dpb.People.OVERLAPPING)
    with pytest.raises(ValueError, match="people must be disjoint"):
        shared.epsilons(DELTA)
    for sampling in (dpb.Poisson(0.5), dpb.FixedSize(5)):
        sampled = release(Laplace(2.0), ("records", 1.0), sampling=sampling)
        for account in (sampled.epsilons, sampled.delta):
            with pytest.raises(ValueError, match="not accounted for"):
                account(1e-6)


def test_a_release_takes_noise_alone():
    with pytest.raises(TypeError, match="must be an instance of AbstractNoise"):
        release(Exponential(1.0), ("records", 1.0))


def test_a_mechanism_from_outside_composes_with_gaussian_noise():
    gaussian = release(Gaussian(8.0), ("records", 1.0), count=2)
    both = gaussian + release(Laplace(4.0), ("records", 1.0))
    alone = [part.epsilon(DELTA) for part in (gaussian, both)]
    assert alone[0] < alone[1] < alone[0] + 0.25 + 1e-6


@pytest.mark.parametrize(("kind", "law"), [(Gaussian, "norm"), (Laplace, "laplace")])
def test_noise_has_the_law_that_its_event_is_about(kind, law):
    scale = {"norm": 1.0, "laplace": 2**0.5}[law] / float(MECHANISMS[kind].multiplier)
    sample = scale * noises(kind, 1)
    assert scipy.stats.kstest(sample, law).pvalue > 1e-4
    other = {"norm": "laplace", "laplace": "norm"}[law]
    assert scipy.stats.kstest(sample, other).pvalue < 1e-4
