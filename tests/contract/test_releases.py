"""Releases are what their ledger claims: in number, noise and sensitivity.

That nothing but releases reads records is tested in test_contract, that batches are
drawn as is accounted for in tests/attacks/test_keys.py and by the audits.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import dpbilevel as dpb
from dpbilevel.audit import Replay
from dpbilevel.privacy.accounting import profiles
from dpbilevel.privacy.mechanisms import Gaussian
from dpbilevel.privacy.queries import Query
from dpbilevel.privacy.records.people import PersonRows
from dpbilevel.privacy.releases import AbstractNoisyRelease
from dpbilevel.search.repeat_and_select import Selection
from tests.contract.recorded import (
    CASES,
    KEY,
    RUN,
    SHORT,
    at_once,
    ledger_of,
    notes_of,
    recorder,
    strength,
)

# The slow suite has the others.
solvers = at_once(lambda name: name in RUN)


@functools.cache
def unrolled(name):
    return notes_of(name, KEY), ledger_of(name), CASES[name].adaptive


def louder_than(release):
    """The mechanism of a release with 1.01 times the noise."""
    if isinstance(release, dpb.draws.Draw):
        mechanism = release.mechanism
        pure = isinstance(mechanism, dpb.draws.Exponential)
        field, factor = ("epsilon", 1 / 1.01) if pure else ("noise_multiplier", 1.01)
        value = factor * strength(mechanism)
        return dataclasses.replace(mechanism, **{field: value})
    return release.mechanism.scaled(1.01)


def claim(release):
    if isinstance(release, dpb.draws.Draw):
        factor = release.neighbours.contributions
        return float(strength(release.mechanism)), factor * release.contribution
    return release.noise_multiplier, release.noise_std


def parts(release):
    """What is made for a release, each as often as it is."""
    if not isinstance(release, Selection):
        return [release] * release.count
    # It counts once, whatever the number of runs it selects from. The trainings of a
    # case are alike.
    first, *_ = release.trainings or ((),)
    run = [release, *(r for part in first for r in parts(part))]
    return run * release.count * release.runs


def numbers(note):
    """The strength of a recorded release and its scale, as a claim has them."""
    return note.multiplier, note.noise_std if note.noiseless else note.sensitivity


def matches(notes, ledger, adaptive):
    claimed = sorted(claim(r) for release in ledger.releases for r in parts(release))
    made = sorted(map(numbers, notes))
    if len(made) != len(claimed):
        return False
    multipliers, stds = zip(*made, strict=True)
    claimed_multipliers, claimed_stds = zip(*claimed, strict=True)
    if adaptive:
        # The ledger lists the largest noise; what it accounts for is the ratio.
        return np.allclose(multipliers, claimed_multipliers, rtol=1e-5) and max(
            stds
        ) <= adaptive * max(claimed_stds)
    return np.allclose(sorted(stds), sorted(claimed_stds), rtol=1e-5) and np.allclose(
        multipliers, claimed_multipliers, rtol=1e-5
    )


@solvers
def test_releases_made_equal_the_ledger_in_number_and_scale(name):
    made, ledger, adaptive = unrolled(name)
    scales = sorted(map(numbers, made))
    text = (
        f"{len(made)} releases (strength, scale) {scales}, but the ledger is {ledger}"
    )
    assert matches(made, ledger, adaptive), text


@solvers
def test_a_ledger_that_forgets_a_release_is_caught(name):
    made, ledger, adaptive = unrolled(name)
    for index, release in enumerate(ledger.releases):
        fewer = list(ledger.releases)
        if release.count == 1:
            del fewer[index]
        else:
            fewer[index] = dataclasses.replace(release, count=release.count - 1)
        shorter = dataclasses.replace(ledger, releases=tuple(fewer))
        assert not matches(made, shorter, adaptive)


@solvers
def test_a_ledger_that_claims_too_much_noise_is_caught(name):
    made, ledger, adaptive = unrolled(name)
    for index, release in enumerate(ledger.releases):
        louder = list(ledger.releases)
        louder[index] = dataclasses.replace(release, mechanism=louder_than(release))
        boastful = dataclasses.replace(ledger, releases=tuple(louder))
        assert not matches(made, boastful, adaptive)


def noises_of(notes):
    """In units of the scale that each release is noted with; draws have none."""
    return [
        (np.concatenate(note.released) - np.concatenate(note.noiseless))
        / note.noise_std
        for note in notes
        if note.noiseless
    ]


def sound(noises):
    """Whether noise is as large as claimed, and none is used twice."""
    total, count = sum(np.sum(z**2) for z in noises), sum(map(len, noises))
    low, high = scipy.stats.chi2.ppf([1e-6, 1 - 1e-6], count)
    # Releases of other values are rounded to other steps; few are near by chance.
    same, near = (len({tuple(np.round(z, k)) for z in noises}) for k in (6, 2))
    return low < total < high and same == len(noises) and 2 * near > len(noises)


# Draws add no noise.
NOISY = [
    name
    for name, case in CASES.items()
    if case.package != "draws" and not isinstance(case.solver, dpb.search.RandomSearch)
]
noisy_solvers = at_once(lambda name: name in RUN, NOISY)
SEEDS = range(KEY, KEY + 20)
SLIPS = {
    "no noise": lambda noises: [0 * z for z in noises],
    "half of the noise": lambda noises: [z / 2 for z in noises],
    "a key used twice": lambda noises: [*noises[1:], noises[1]],
}


@noisy_solvers
def test_noise_is_fresh_and_as_large_as_the_ledger_claims(name):
    noises = noises_of(notes_of(name, *SEEDS))
    assert sound(noises)
    assert not [slip for slip, of in SLIPS.items() if sound(of(noises))]


def people_of(data):
    """The kinds of people whose records may change."""
    if not isinstance(data, dpb.Levels):
        return ("records",)
    return ("person",) if data.is_shared else ("upper", "lower", "person")


def with_a_record(data, person, row, factor):
    """The data with this row of a person's roles times `factor`."""

    def pushed(records):
        if isinstance(records, PersonRows):
            return PersonRows(pushed(records.rows), records.present)
        if isinstance(records, dict):
            return records | {"features": pushed(records["features"])}
        return jnp.asarray(records).at[row].multiply(factor)

    if not isinstance(data, dpb.Levels):
        return pushed(data)
    if data.is_shared:
        return dpb.Levels.shared(pushed(data.lower))
    roles = ("upper", "lower") if person == "person" else (person,)
    return dataclasses.replace(
        data, **{role: pushed(getattr(data, role)) for role in roles}
    )


def is_clipped(name):
    return CASES[name].solver.basis is dpb.privacy.Basis.CLIPPED


def clips_gradients(name):
    return is_clipped(name) and CASES[name].package != "search"


def moved(name, person, row, factors, **options):
    """Each release of two records: a pair under one key."""
    notes = (
        notes_of(
            name,
            KEY,
            data=with_a_record(CASES[name].data, person, row, factor),
            frozen=True,
            **options,
        )
        for factor in factors
    )
    first, second = (
        sorted((note for note in made if note.noiseless), key=lambda note: note.key)
        for made in notes
    )
    assert [note.key for note in first] == [note.key for note in second]
    made = [[*map(numbers, found)] for found in (first, second)]
    np.testing.assert_allclose(*made, rtol=1e-6)
    return Replay(tuple(zip(first, second, strict=True)))


def excess(name, **options):
    """How far any person moves the releases, over what the ledger charges for it."""
    # Far outside of every clip, or as far as the declared constants allow.
    far = 1e3 if is_clipped(name) else 1.0
    events = ledger_of(name).events()
    found = []
    for person in people_of(CASES[name].data):
        for row, factors in ((0, (far, -far)), (-1, (far, 0.0))):
            changes = moved(name, person, row, factors, **options)
            # No release moves by more than the sensitivity that its noise follows.
            found.append(changes.largest)
            mu = profiles.gaussian_mu(events[person]) if person in events else None
            if mu:
                found.append(changes.mu / mu)
    return max(found)


@noisy_solvers
def test_no_person_moves_the_releases_by_more_than_the_ledger_charges(name):
    # Over a half, so that a record clipped at twice the length is noticed.
    low = 0.5 if clips_gradients(name) else 0.0
    assert low < excess(name) <= 1 + 1e-4


def noise_times(factor):
    def mistake(release):
        def scaled(self, bounded, *, key):
            return release(self.scaled(factor), bounded, key=key)

        return scaled

    return mistake


def with_one_key(release):
    def reusing(self, bounded, *, key):
        del key
        return release(self, bounded, key=jax.random.key(0))

    return reusing


def twice(of):
    """One more release than the ledger has."""

    def averaged(self, funs, data, *, key, **options):
        pair = [of(self, funs, data, key=k, **options) for k in jax.random.split(key)]
        return jax.tree.map(lambda a, b: (a + b) / 2, *pair)

    return averaged


def of_doubled_clips(read):
    """Records of twice the length under the seal of the single one."""

    def longer(self, *args, **options):
        wide = dataclasses.replace(self, clip_norm=2 * self.clip_norm)
        value = read(wide, *args, **options)
        return dataclasses.replace(value, contribution=value.contribution / 2)

    return longer


MISTAKES = {
    "no noise": (Gaussian, "release", noise_times(0.0)),
    "half of the noise": (Gaussian, "release", noise_times(0.5)),
    "one key for all": (Gaussian, "release", with_one_key),
    "a release that the ledger forgets": (AbstractNoisyRelease, "apply", twice),
    "twice the clip norm": (Query, "read", of_doubled_clips),
}
EVERYWHERE = [
    pytest.param(name, mistake, marks=() if name == "noisy_gd" else pytest.mark.slow)
    for name in NOISY
    if name in SHORT or name == "noisy_gd"
    for mistake in MISTAKES
    if MISTAKES[mistake][0] is not Query
    or (clips_gradients(name) and not CASES[name].bounds_itself)
]


@pytest.mark.parametrize(("name", "mistake"), EVERYWHERE)
def test_every_mistake_is_noticed_in_every_class_of_solvers(name, mistake):
    broken = recorder(MISTAKES[mistake])
    notes = notes_of(name, *SEEDS, solve=broken)
    problems = {
        "count": not matches(notes_of(name, KEY, solve=broken), *unrolled(name)[1:]),
        "noise": not sound(noises_of(notes)),
        "sensitivity": excess(name, solve=broken) > 1 + 1e-4,
    }
    expected = {Query: "sensitivity", AbstractNoisyRelease: "count"}
    assert problems[expected.get(MISTAKES[mistake][0], "noise")], problems
