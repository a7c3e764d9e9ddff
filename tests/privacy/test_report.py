import dataclasses
import json
import math

import pytest

import dpbilevel as dpb
from dpbilevel.privacy.report import describe

BUDGET = dpb.PrivacyBudget(1.0, 1e-5)


def query(role="records", size=1000, clip_norm=2.0, sampling=None):
    return dpb.privacy.Query(role, size, clip_norm, sampling or dpb.FullBatch())


def release(*queries, multiplier=4.0, **fields):
    mechanism = dpb.privacy.Gaussian(multiplier)
    return dpb.privacy.Release(
        "gradient", 3, queries or (query(),), mechanism, **fields
    )


def report(*releases, levels=False, people=dpb.People.OVERLAPPING, **fields):
    ledger = dpb.privacy.Ledger(releases, people, ("declared",))
    return describe(ledger, BUDGET, levels=levels, **fields)


REPORTS = {
    "one_level": report(release(), dimensions={"gradient": 100}),
    "two_levels": report(
        release(query("upper"), query("lower")),
        levels=True,
        people=dpb.People.DISJOINT,
    ),
    "poisson": report(release(query(sampling=dpb.Poisson(0.1, capacity=160)))),
    "no_noise": report(release(multiplier=0.0)),
    "no_release": report(),
}
every_report = pytest.mark.parametrize("name", REPORTS)


@every_report
def test_json_restores_the_report_exactly(name):
    text = REPORTS[name].to_json()
    assert dpb.privacy.PrivacyReport.from_json(text) == REPORTS[name]
    # Plain JSON: no Infinity, which other parsers refuse.
    json.loads(text, parse_constant=lambda constant: pytest.fail(constant))


@every_report
def test_the_first_line_is_the_status_and_the_claim(name):
    first = str(REPORTS[name]).splitlines()[0]
    assert first.startswith("ENFORCED: epsilon = ")
    assert "at delta = 1e-05" in first
    assert "replace_one" in first


def test_the_text_holds_what_a_reader_must_know():
    text = str(REPORTS["two_levels"])
    for words in (
        "people disjoint",
        "upper: epsilon = ",
        "lower: n = 1000, FullBatch()",
        "sensitivity 0.004",
        "multiplier 4",
        "assumptions:\n  - declared",
        "exact Gaussian composition",
        "jax ",
    ):
        assert words in text
    assert "a batch overflows or is drawn wrongly" in str(REPORTS["poisson"])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.0, "1"),
        (0.1, "0.1"),
        (1.23456001, "1.23457"),
        (0.9999991, "1"),
        (1e-05, "1e-05"),
        (4.0000001e-13, "4.00001e-13"),
        (math.inf, "inf"),
        (0.0, "0"),
    ],
)
def test_printed_bounds_are_rounded_up(value, text):
    fields = {"epsilon": value, "delta": value, "epsilon_by_person": {}}
    printed = str(dataclasses.replace(REPORTS["one_level"], **fields))
    assert f"epsilon = {text} at delta = {text} " in printed
    assert float(text) >= value


def test_the_printed_chance_of_overflow_is_not_below_the_counted_one():
    (text,) = REPORTS["poisson"].certificates
    counted = release(query(sampling=dpb.Poisson(0.1, capacity=160))).failure
    printed = float(text.split("at most ")[1].split(",")[0])
    assert counted <= printed <= 1.01 * counted


def test_infinite_losses_are_printed_and_restored():
    assert REPORTS["no_noise"].epsilon == math.inf
    assert "epsilon = inf" in str(REPORTS["no_noise"])
    assert REPORTS["no_noise"].forecast[0].break_even_coordinates == math.inf


def test_the_ledger_row_holds_sensitivity_and_noise():
    (row,) = REPORTS["one_level"].ledger
    assert row.roles["records"].sensitivity == pytest.approx(2 * 2 / 1000)
    assert row.noise_std == pytest.approx(4 * 2 * 2 / 1000)
    assert row.count == 3


def test_the_forecast_compares_noise_with_the_clip_norm():
    (row,) = REPORTS["one_level"].forecast
    ratio = 4 * 2 * 2 / 1000 / 2
    assert row.noise_std_over_clip_norm == pytest.approx(ratio)
    assert row.break_even_coordinates == pytest.approx(1 / ratio**2)
    assert row.noise_norm_over_clip_norm == pytest.approx(10 * ratio)
    assert "mostly noise" not in str(REPORTS["one_level"])
    hopeless = report(release(multiplier=400.0), dimensions={"gradient": 100})
    assert "mostly noise" in str(hopeless)


@pytest.mark.parametrize(
    ("basis", "status"),
    [
        ("CLIPPED", dpb.privacy.Status.ENFORCED),
        ("CONSTANTS", dpb.privacy.Status.CONDITIONAL),
    ],
)
def test_the_status_is_the_worst_of_the_parts(basis, status):
    parts = release(), release(basis=dpb.privacy.Basis[basis])
    assert report(*parts).status is status
    assert str(report(*parts)).startswith(status.value)


def test_a_heuristic_report_claims_no_epsilon():
    text = REPORTS["one_level"].to_json().replace("ENFORCED", "HEURISTIC")
    first = str(dpb.privacy.PrivacyReport.from_json(text)).splitlines()[0]
    assert first.startswith("HEURISTIC: no epsilon is claimed")
    assert "epsilon = " not in first


def test_no_key_and_no_seed_is_written():
    fields = json.loads(REPORTS["one_level"].to_json())
    assert not {"key", "seed"} & set(fields)
    assert "keys from the caller" in fields["prng"]


@pytest.mark.parametrize("text", ["{}", "[]", '{"status": "ENFORCED"}', '{"a": 1}'])
def test_json_of_something_else_is_refused(text):
    with pytest.raises(ValueError, match="not the JSON of a report"):
        dpb.privacy.PrivacyReport.from_json(text)


@pytest.mark.parametrize("people", ["disjoint", "overlapping"])
def test_people_matter_with_two_levels_only(people):
    parts = release(query("upper"), query("lower"))
    two = report(parts, levels=True, people=dpb.People(people))
    assert two.people == people
    assert REPORTS["one_level"].people is None
    assert two.epsilon == max(two.epsilon_by_person.values())
