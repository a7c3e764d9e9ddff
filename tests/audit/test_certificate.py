"""The certificate: its numbers are limits, and its exports have what readers need."""

import dataclasses
import datetime
import functools
import json
import math
import pickle
import re
from collections.abc import Callable

import numpy as np
import pytest
from scipy.stats import norm

import dpbilevel as dpb
from dpbilevel.audit import certificate as certificate_module
from dpbilevel.audit.certificate import Certificate, belief_of
from dpbilevel.audit.claims import largest_powers
from dpbilevel.privacy.accounting.closed_forms import gaussian_delta, gaussian_epsilon
from dpbilevel.privacy.releases import Release
from dpbilevel.privacy.report import PrivacyReport, Status

PROBLEM = dpb.FiniteSum(lambda w, z: 0.5 * (w - z) ** 2)
BUDGET = dpb.PrivacyBudget(1.0, 1e-5)


def plan_of(**settings):
    solver = dpb.NoisyGD(4, 1.0, 0.5, **settings)
    return dpb.calibrate(PROBLEM, solver, BUDGET, sizes=500)


def detected(certificate):
    """The detection rates on the page, by the rate of false alarms, in percent."""
    found = re.findall(
        r"false alarms in ([\d.]+) % of all cases detects at most <strong>([\d.]+) %",
        certificate.html(),
    )
    return {float(alarms): float(power) for alarms, power in found}


def test_detection_rates_of_gaussian_releases_are_those_of_two_normals():
    plan = plan_of()
    mu = plan.report.mu
    assert gaussian_epsilon(mu, BUDGET.delta) == pytest.approx(1.0, abs=1e-3)
    for alarms, power in detected(dpb.certificate(plan)).items():
        exact = 100 * norm.cdf(norm.ppf(alarms / 100) + mu)
        assert exact <= power < exact + 0.1
    again = PrivacyReport.from_json(plan.report.to_json())
    assert detected(dpb.certificate(again)) == detected(dpb.certificate(plan))


SAMPLED = dpb.NoisyGD(4, 1.0, 0.5, sampling=dpb.Poisson(0.1))
RUN = {"data": np.zeros(500), "w0": np.zeros(())}


@functools.cache
def sampled():
    """A plan with Poisson batches, and the exact detection rates."""
    plan = dpb.calibrate(PROBLEM, SAMPLED, BUDGET, sizes=500, w0=np.zeros(()))
    return plan, largest_powers(plan.solver.ledger(PROBLEM, 500))


def rates(certificate):
    return {float(alarms): power for alarms, power in certificate._odds().items()}


@pytest.mark.slow
def test_detection_rates_of_a_fit_with_sampled_batches_are_those_of_its_plan():
    run = dpb.fit(PROBLEM, SAMPLED, **RUN, budget=BUDGET, key=dpb.root_key())
    assert dpb.certificate(run).powers == sampled()[1]


def test_the_mu_of_a_report_that_claims_more_than_it_is_not_used():
    report = dataclasses.replace(plan_of().report, source=None)
    assert dpb.certificate(report).powers is not None
    twice = dataclasses.replace(report, epsilon=2.0)
    assert dpb.certificate(twice).powers is None


def test_detection_rates_of_sampled_batches_are_exact_until_a_report_is_json(
    tmp_path,
):
    plan, powers = sampled()
    run = dpb.start(PROBLEM, plan, **RUN, key=dpb.root_key()).solution
    assert run.report.mu is None
    found = dpb.certificate(run)
    assert found.powers == powers
    assert "are exact" in found.html()
    run.save(tmp_path / "a")
    assert dpb.certificate(pickle.loads(pickle.dumps(run.report))).powers == powers
    own = json.loads(run.report.to_json()) | {"source": {"releases": []}}
    of_json = PrivacyReport.from_json(json.dumps(own))
    for report in dpb.load(tmp_path / "a").report, of_json:
        assert report == run.report
        bound = dpb.certificate(report)
        assert "a rough upper bound, by epsilon and delta alone" in bound.html()
        for alarms, power in rates(found).items():
            assert alarms < power < rates(bound)[alarms]
            assert rates(bound)[alarms] == pytest.approx(math.e * alarms, abs=2e-5)


@dataclasses.dataclass(frozen=True)
class HoldsAFunction(Release):
    fun: Callable = lambda: None


def test_a_report_is_pickled_without_a_ledger_that_may_hold_functions():
    report = plan_of().report
    (release,) = report.source.releases
    fields = {f.name: getattr(release, f.name) for f in dataclasses.fields(release)}
    ledger = dataclasses.replace(report.source, releases=(HoldsAFunction(**fields),))
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(ledger)
    holds = dataclasses.replace(report, source=ledger)
    assert pickle.loads(pickle.dumps(holds)).source is None
    assert pickle.loads(pickle.dumps(report)).source == report.source


def of_other_people():
    """A report of people with records in both levels, and a ledger of disjoint ones."""
    problem = dpb.source_weighting(dpb.logistic_loss, num_sources=4)
    solver = dpb.PenaltyBilevel(5, 10.0, dpb.NoisyGD(4, 1.0, 0.5), step_size=0.1)
    sizes = dpb.Sizes(1000, 1000, "overlapping")
    plan = dpb.calibrate(problem, solver, BUDGET, sizes=sizes)
    disjoint = plan.solver.ledger(problem, dpb.Sizes(1000, 1000, "disjoint"))
    rows = [release.row() for release in disjoint.releases]
    assert rows == [*plan.report.ledger]
    return plan.report, disjoint


def changed_reports():
    """Reports with the ledger of a run that costs less, and the true rates."""
    plan = plan_of()
    report = dataclasses.replace(plan.report, mu=None)  # as of sampled batches
    ledger = report.source
    louder = plan.solver.with_noise(9.0).ledger(PROBLEM, 500)
    yield dataclasses.replace(report, source=louder), largest_powers(ledger)
    two, twice = {"records": 2.0}, largest_powers(ledger.repeat(2))
    yield dataclasses.replace(report, epsilon=2.0, epsilon_by_person=two), twice
    yield dataclasses.replace(report, epsilon=2.0), twice
    report, disjoint = of_other_people()
    own = largest_powers(report.source)
    report = dataclasses.replace(report, mu=None, source=disjoint)
    yield report, own
    # People who are said to be the same, but who are not charged the same.
    yield dataclasses.replace(report, people="disjoint"), own


def promises_too_much(reports):
    """Whether a certificate is below the true rates, by report."""
    return [
        any(dpb.certificate(report)._odds()[a] < 0.999 * power for a, power in of)
        for report, of in ((report, powers.items()) for report, powers in reports)
    ]


def test_a_ledger_of_another_run_or_of_other_people_is_not_used(monkeypatch):
    reports = [*changed_reports()]
    assert promises_too_much(reports) == [False] * len(reports)
    monkeypatch.setattr(certificate_module, "_is_of", lambda *_: True)  # the control
    assert promises_too_much(reports) == [True] * len(reports)


@pytest.mark.parametrize("mu", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 4.0])
def test_a_belief_passes_the_stated_one_no_more_often_than_stated(mu, epsilon):
    delta = float(gaussian_delta(mu, epsilon))
    limit = epsilon + math.log(1.1)
    loss = norm(mu**2 / 2, mu)  # of a true answer; the other one gains its negative
    exceptions = loss.sf(limit) + loss.cdf(-limit)
    assert exceptions <= 11 * delta * (1 + math.exp(-limit))
    # The control: delta alone does not bound how often epsilon is passed.
    assert norm.sf(epsilon, mu**2 / 2, mu) > delta


def test_a_page_of_a_report_says_belief_and_its_exceptions():
    page = dpb.certificate(plan_of(), title="Trial <1>").html()
    assert "Trial &lt;1&gt;" in page
    assert "<dd>1 in 100,000 (1e-05)</dd>" in page
    assert "one answer has at most <strong>75 %</strong>" in page
    assert "exceptional outcome is at most 1 in 6,812" in page


def test_coefficients_of_an_estimator_are_shown_with_their_intervals():
    class Fitted:
        privacy_report_ = plan_of().report
        coef_ = np.array([[0.5, -1.0]])
        feature_names_in_ = np.array(["age", "dose"], object)
        coef_std_ = np.array([[0.1, 0.2]])

    page = dpb.certificate(Fitted()).html()
    assert "<td>age</td><td>0.5000</td><td>0.1000</td><td>0.3040 to 0.6960</td>" in page
    page = dpb.certificate(Fitted(), values={"mean": 2.0}).html()
    assert "<td>mean</td><td>2.0000</td><td></td>" in page


def test_a_run_without_a_report_is_refused_with_the_remedy():
    with pytest.raises(TypeError, match="after solve give its plan"):
        dpb.certificate(dpb.Solution(np.zeros(2)))


def test_a_run_that_claims_nothing_has_no_numbers_and_no_entry():
    report = dataclasses.replace(plan_of().report, status=Status.HEURISTIC)
    found = dpb.certificate(report)
    assert detected(found) == {}
    unclaimed = dataclasses.replace(report, epsilon=math.inf, mu=None)
    assert dpb.certificate(unclaimed).powers is None
    assert "No guarantee is claimed" in found.html()
    assert "No guarantee is claimed" in found.nist()
    with pytest.raises(ValueError, match="claims no epsilon"):
        found.registry()


# Keys of the schema of the registry that an entry fills in.
KEYS = {
    "basic": "name data_curators intended_use data_product_type data_product_region "
    "description publication_date",
    "dp_variant": "variant_name data_domain unprotected_quantities",
    "privacy_loss": "privacy_unit privacy_unit_details privacy_parameters "
    "privacy_parameters_details",
    "deployment_model": "model_name actors release_type release_type_details "
    "data_source_type access_type",
    "accounting": "post_processing composition",
    "implementation": "preprocessing_and_hyperparameter_tuning mechanisms "
    "justification",
    "administrative": "sources registry_authors",
}


def test_a_registry_entry_has_the_keys_of_the_schema_and_marks_what_is_unknown():
    yaml = pytest.importorskip("yaml")
    title = 'Trial: "A" # \u2028 and 50 % more'
    entry = yaml.safe_load(dpb.certificate(plan_of(), title=title).registry())
    deployment = entry["deployment"]
    assert {name: " ".join(part) for name, part in deployment.items()} == KEYS
    assert deployment["basic"]["name"] == 'Trial: "A" # and 50 % more'
    parameters = deployment["privacy_loss"]["privacy_parameters"]
    assert parameters == {"epsilon": pytest.approx(1.0, abs=1e-3), "delta": 1e-5}
    assert parameters["epsilon"] >= plan_of().report.epsilon
    assert deployment["dp_variant"]["variant_name"] == "Approximate DP"
    for known_to_the_curator in ("intended_use", "publication_date"):
        assert deployment["basic"][known_to_the_curator].startswith("TODO")


def test_a_worksheet_has_every_component_of_the_pyramid_in_rows_of_three_cells():
    text = dpb.certificate(plan_of(), title="A | <b>").nist()
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert {len(re.split(r"(?<!\\)\|", row)) for row in rows} == {5}
    components = {row.split("|")[1].strip() for row in rows[1:]}
    assert components >= {
        "Epsilon",
        "Unit of privacy",
        "Algorithms and correctness",
        "Utility",
        "Bias",
        "Side channels",
        "Security",
        "Access control",
        "Query model",
        "Threat model",
        "Data collection exposure",
    }
    assert "<b>" not in text


def test_a_cell_of_a_worksheet_has_no_markdown_of_its_own():
    text = dpb.certificate(plan_of(), title=r"a \| `b` [c](http://d)").nist()
    assert text.splitlines()[0].endswith(r"a \\\| \`b\` \[c](http://d)")


def test_the_unit_and_the_relation_are_said_in_words():
    report = plan_of().report
    other = {
        "unit": "one person (at most 3 rows each)",
        "relation": "add_or_remove_one",
    }
    assert "if each person has one record" in Certificate(report, "A").html()
    page = Certificate(dataclasses.replace(report, **other), "A").html()
    assert "Protected is one person (at most 3 rows each)" in page
    assert "rows of any one person been left out" in page
    assert "whether a person&#39;s rows were used" in page
    assert "The word add_or_remove_one says which two sets of records are" in page
    assert "one has the rows of one person more, and the number of people" in page
    assert "The other usual comparison is replace_one: they differ in" in page


def test_a_page_has_its_date_and_what_all_runs_of_a_folder_cost_together():
    report, day = plan_of().report, datetime.date(2026, 2, 1)
    found = Certificate(report, "A", total=(2, 2.0, 2e-5), date=day)
    page = found.html()
    assert "<h1>Privacy certificate of 1 February 2026</h1>" in page
    assert "Written on 1 February 2026" in found.nist()
    card = "<dt>all runs of this folder</dt><dd>epsilon 2, delta 1 in 50,000</dd>"
    assert card in page
    belief, exceptions = belief_of(2.0, 2e-5)
    assert belief == pytest.approx(1 / (1 + math.exp(-2) / 1.1))
    said = f"at most 89.1 %, but for a chance of at most 1 in {1 / exceptions:,.0f}"
    assert said in page
    assert "the unchanged program was run as often as listed" in page
    lost = dataclasses.replace(found, total=(0, math.inf, 1.0)).html()
    assert "<dt>all runs of this folder</dt><dd>unknown</dd>" in lost
    for total in None, (1, 1.0, 1e-5):
        alone = dataclasses.replace(found, total=total).html()
        assert "all runs of this folder" not in alone
        assert "the unchanged program was run once" in alone
