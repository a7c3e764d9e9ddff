import pytest

from dpbilevel.cli import plans
from dpbilevel.cli.config import read_config
from dpbilevel.cli.main import main
from dpbilevel.cli.plans import prepare
from tests.audit.runs import audited, claim_of
from tests.cli.test_cli import config, config_of_csv, failure  # noqa: F401
from tests.cli.test_runner import GENERATED
from tests.onelevel.test_inner_solvers import planned_noisy_gd


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("audit")
    text = GENERATED.replace("training = 300", "training = 40")
    (place / "a.toml").write_text(text.replace("validation = 100", "validation = 20"))
    return place


def test_audited_solver_claims_what_the_plan_does(folder):
    prepared = prepare(read_config(folder / "a.toml"))
    budget = prepared.config.privacy.budget
    claims = plans.canaries_of(prepared)
    deltas = [canary.claim(budget.epsilon) for canary in claims.values()]
    assert max(deltas) == pytest.approx(budget.delta, rel=1e-3)


@pytest.mark.slow
def test_audit_reads_no_records(config_of_csv, capsys):  # noqa: F811
    assert main(["audit", config_of_csv, "--runs", "1000"]) == 0
    assert (
        "no violation found at 800 of 1000 runs a side (200 for the pilot)"
        in capsys.readouterr().out
    )


def test_violation_ends_with_status_one(config, capsys, monkeypatch):  # noqa: F811
    leaks = audited(planned_noisy_gd(0.5), claim_of(planned_noisy_gd()), runs=5000)
    monkeypatch.setattr(plans, "audit_canaries", lambda *_, **__: (leaks,))
    assert main(["audit", config]) == 1
    assert "VIOLATION" in capsys.readouterr().out


def test_too_few_runs_are_refused(folder, capsys):
    text = failure(capsys, "audit", str(folder / "a.toml"), "--runs", "10")
    assert "runs must be at least 1000" in text
