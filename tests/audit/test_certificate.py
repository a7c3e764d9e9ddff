"""The certificate: its numbers are limits, and its exports have what readers need."""

import dataclasses
import math
import re

import numpy as np
import pytest
from scipy.stats import norm

import dpbilevel as dpb
from dpbilevel.audit.certificate import Certificate
from dpbilevel.privacy.accounting.closed_forms import gaussian_delta, gaussian_epsilon
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


def test_detection_rates_of_sampled_batches_are_exact_with_a_ledger_else_the_bound():
    plan = plan_of(sampling=dpb.Poisson(0.1))
    assert plan.report.mu is None
    ledger = plan.solver.ledger(PROBLEM, 500)
    bound, exact = dpb.certificate(plan), dpb.certificate(plan, ledger=ledger)
    assert "a rough upper bound, by epsilon and delta alone" in bound.html()
    (call,) = re.findall(r"certificate\(run, ledger=(plan.*?\))\)", bound.html())
    assert eval(call, {"plan": plan, "problem": PROBLEM}).releases == ledger.releases
    assert "are exact" in exact.html()
    for alarms, power in detected(exact).items():
        assert alarms < power < detected(bound)[alarms]
        assert detected(bound)[alarms] == pytest.approx(math.e * alarms, abs=0.11)


def test_a_ledger_that_is_not_that_of_the_report_is_refused():
    plan = plan_of()
    louder = plan.solver.with_noise(9.0).ledger(PROBLEM, 500)
    with pytest.raises(ValueError, match="not that of the report"):
        dpb.certificate(plan, ledger=louder)


def test_a_ledger_of_other_people_is_refused():
    problem = dpb.source_weighting(dpb.logistic_loss, num_sources=4)
    solver = dpb.PenaltyBilevel(5, 10.0, dpb.NoisyGD(4, 1.0, 0.5), step_size=0.1)
    sizes = dpb.Sizes(1000, 1000, "overlapping")
    plan = dpb.calibrate(problem, solver, BUDGET, sizes=sizes)
    ledger = plan.solver.ledger(problem, sizes)
    found = dpb.certificate(plan, ledger=ledger)
    assert detected(found) == detected(dpb.certificate(plan))
    disjoint = plan.solver.ledger(problem, dpb.Sizes(1000, 1000, "disjoint"))
    assert [r.row() for r in disjoint.releases] == [r.row() for r in ledger.releases]
    claimed = max(disjoint.epsilons(BUDGET.delta).values())
    assert claimed < 0.97 * plan.report.epsilon  # it would promise too much
    with pytest.raises(ValueError, match="releases, noise or people"):
        dpb.certificate(plan, ledger=disjoint)
    # People who are said to be the same, but who are not charged the same.
    report = dataclasses.replace(plan.report, people="disjoint")
    with pytest.raises(ValueError, match="releases, noise or people"):
        dpb.certificate(report, ledger=disjoint)


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
