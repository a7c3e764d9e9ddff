"""Every mechanism keeps its contract; a new one needs an entry in `MECHANISMS`.

`Laplace` below is a mechanism from outside of the library, for values of one number.
"""

import dataclasses
import inspect
import math

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
        noise = self.scale * bounded.sensitivity(self.neighbours) * (up - down)
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


@every_noise
def test_only_sealed_values_of_the_same_precision_are_opened(kind):
    mechanism = MECHANISMS[kind]
    with pytest.raises(TypeError, match="bounded must be an instance of Bounded"):
        mechanism.release(jnp.zeros(1), key=jax.random.key(0))
    other = dataclasses.replace(mechanism, precision="grid")
    with pytest.raises(ValueError, match="precision is 'grid', but that of the value"):
        other.release(BOUNDED, key=jax.random.key(0))
    with pytest.raises(TypeError, match="must be a typed key"):
        mechanism.release(BOUNDED, key=jnp.zeros(2, jnp.uint32))


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


def test_parts_of_gaussian_noise_are_together_the_whole():
    whole = MECHANISMS[Gaussian]
    parts = [whole.part(share) for share in (0.1, 0.6, 0.3)]
    together = profiles.dp_accounting.ComposedDpEvent(parts)
    assert epsilon(together) == pytest.approx(epsilon(whole.event()), rel=1e-9)


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
