"""What released shares stop and warn of: misspelt values, and nothing by chance."""

import dataclasses
import itertools
from statistics import NormalDist

import jax
import numpy as np
import pytest

import dpbilevel as dpb
from dpbilevel.core import usability
from dpbilevel.core.shares import LevelUsability, Usability
from dpbilevel.core.usability import Columns, RecordsCheck

N, NOISE = 4000, 0.02
COLUMNS = Columns(("y", "age", "site"), ("no", "yes"), "site", ("N", "S", "W"))


def released(label, place, missing=0.0, seed=0):
    """What the check says of records with these classes and sites, -1 if unlisted."""
    bad = np.stack([label < 0, np.arange(N) < missing * N, place < 0], axis=1)
    rows = {"records": COLUMNS.indicators(bad, label=label, place=place)}
    check = RecordsCheck.planned({"records": COLUMNS}, dpb.PrivacyBudget(2.0, 1e-6), N)
    return check.release(rows, key=jax.random.key(seed)).levels["records"]


def split(shares, seed):
    """Values 0, 1, 2 and so on with these shares; the rest is not listed."""
    edges = np.cumsum(shares)
    found = np.searchsorted(edges, np.random.default_rng(seed).random(N))
    return np.where(found < len(shares), found, -1)


FAIR, EVEN = split([0.5, 0.5], 0), split([1 / 3, 1 / 3, 1 / 3], 1)


@pytest.mark.parametrize(
    ("label", "place", "name"),
    [
        (split([0.8, 0.0], 0), EVEN, "yes"),
        (FAIR, split([0.4, 0.0, 0.4], 1), "S"),
        (FAIR, split([0.4, 0.4], 1), "W"),
    ],
)
def test_a_misspelt_value_of_a_fifth_of_the_records_stops(label, place, name):
    for seed in range(5):
        level = released(label, place, seed=seed)
        assert level.usable == pytest.approx(0.8, abs=5 * level.noise_std)
        assert level.dropped == (name,)
        assert level.stops
        (remark,) = Usability({"records": level}).remarks
        assert f"no record seems to have {name!r};" in remark


@pytest.mark.parametrize(
    ("label", "place", "missing"),
    [
        (FAIR, EVEN, 0.0),
        (split([0.8, 0.2], 0), split([0.6, 0.2, 0.2], 1), 0.05),
        (FAIR, EVEN, 0.3),  # no value is lost by it
    ],
)
def test_records_with_all_declared_values_neither_stop_nor_warn_of_one(
    label, place, missing
):
    for seed in range(10):
        level = released(label, place, missing, seed)
        assert not level.stops
        assert not level.dropped
        assert not level.rare
        if missing < 0.1:
            assert not Usability({"records": level}).remarks


def test_a_truly_rare_class_is_told_of_and_does_not_stop():
    rare = split([0.998, 0.002], 0)
    for missing in (0.0, 0.2):  # records are lost by another column
        level = released(rare, EVEN, missing)
        assert not level.stops
        assert level.rare == ("yes",)
        (remark,) = Usability({"records": level}).remarks
        assert "of 'yes' is too small to tell from noise: it may be rare" in remark


def test_the_message_on_a_rare_value_agrees_with_the_shares_that_it_prints():
    level = LevelUsability(1.0, 0.04, {"y": 0.0}, {"0": 0.948, "1": 0.146})
    (remark,) = Usability({"records": level}).remarks
    assert "share of '1' is too small to tell from noise" in remark
    assert "(noise 8 %): '0' (94.8 %), '1' (14.6 %)" in remark
    assert "no records" not in remark


@pytest.mark.parametrize(("usable", "said"), [(0.03, True), (0.2, False)])
def test_records_of_which_none_can_be_used_are_told_of_in_the_strongest_words(
    usable, said
):
    level = LevelUsability(usable, 0.02, {"y": 1 - usable}, {"0": usable, "1": 0.0})
    (remark,) = Usability({"records": level}).remarks
    words = "No or next to no record can be used, so that a model of the records is"
    assert remark.startswith(words) is said
    assert f"bout {100 * usable:g} % of the records can be used as declared" in remark


def test_shares_of_groups_are_released_with_the_noise_that_is_stated():
    level = released(FAIR, split([0.5, 0.3, 0.2], 1))
    assert level.places == pytest.approx(
        {"N": 0.5, "S": 0.3, "W": 0.2}, abs=3 * 4 * level.noise_std
    )
    made = [released(FAIR, EVEN, seed=seed) for seed in range(200)]
    for shares, of in (("classes", 2), ("places", 3), ("columns", 2)):
        values = np.asarray([[*getattr(m, shares).values()] for m in made])
        noise = values.std(axis=0).mean() / level.noise_std
        assert noise == pytest.approx(of, rel=0.1)
    # Without groups the noise of the usable share would not be much less.
    few = dataclasses.replace(COLUMNS, places=())
    assert 1 < COLUMNS.clip_norm / few.clip_norm < 1.07


def level_of(usable, label, **shares):
    """Released shares as they are, of a level in which no place is seen."""
    columns = {"y": label, "site": 0.0}
    return LevelUsability(usable, NOISE, columns, shares, {"N": 0.0, "S": 1.0}, "site")


def test_usable_records_stop_by_chance_less_than_once_in_ten_thousand_runs():
    # With the class unseen and its column wrong, which noise alone does not do either.
    edge = 4 * NOISE
    assert level_of(1 - 1.01 * edge, 1.01 * edge, no=1.0, yes=0.0).dropped == ("yes",)
    assert not level_of(1 - 0.99 * edge, 1.01 * edge, no=1.0, yes=0.0).dropped
    assert not level_of(1 - 1.01 * edge, 0.99 * edge, no=1.0, yes=0.0).dropped
    assert not level_of(0.6, 1.01 * edge, no=0.7, yes=0.09).dropped
    by_chance = NormalDist().cdf(-edge / NOISE)
    assert 2 * by_chance < 1e-4  # two levels
    # Even shares of few values are taken for none of them as rarely.
    values = [3 * 2 * NOISE * of for of in (2, 3)]
    assert [NormalDist(v, v / 6).cdf(v / 3) for v in values] == pytest.approx(
        [by_chance] * 2
    )


def test_a_column_that_is_wrong_in_some_records_is_told_of_beyond_the_noise():
    told = []
    for share in (0.0, 0.25, 0.27, 1.0):
        level = LevelUsability(1.0, NOISE, {"age": 0.0, "ward": share}, {})
        remarks = Usability({"records": level}).remarks
        told.append(bool(remarks))
        assert all(f"'ward' (at least {100 * share:g} %)" in text for text in remarks)
        assert not level.stops
    assert told == [False, False, True, True]


def longest(columns):
    """The largest norm of a row of any record."""
    wrong = np.asarray([*itertools.product([False, True], repeat=len(columns.names))])
    label = np.arange(-1, max(len(columns.classes), 1))
    place = np.arange(-1, max(len(columns.places), 1))
    picked = [*itertools.product(range(len(wrong)), label, place)]
    cells, labels, places = map(np.asarray, zip(*picked, strict=True))
    rows = columns.indicators(wrong[cells], label=labels, place=places)
    return float(np.linalg.norm(rows.astype(float), axis=1).max()), rows.shape[1]


@pytest.mark.parametrize("classes", [0, 1, 2, 5])
@pytest.mark.parametrize("places", [0, 1, 2, 64, 65])
def test_the_longest_row_is_as_long_as_is_charged(classes, places, monkeypatch):
    columns = Columns(
        ("y", "age", "site"),
        tuple(map(str, range(classes))),
        "site",
        tuple(map(str, range(places))),
    )
    norm, width = longest(columns)
    assert norm == pytest.approx(columns.clip_norm, rel=1e-6)
    # Several hundred groups make no row longer and no matrix wider.
    assert width == 4 + classes + (places if places < 65 else 0)
    if places in (1, 2, 64):  # a charge that forgets the groups is too small
        monkeypatch.setattr(usability, "_PLACES", 0.0)
        assert norm > 1.01 * columns.clip_norm
