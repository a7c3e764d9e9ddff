"""What runs cost together: over folders, processes and restarts; and its limit."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

import dpbilevel as dpb
from dpbilevel.cli.plans import prepare
from dpbilevel.cli.run import run
from dpbilevel.runs import checkpoint, spending
from tests.cli.test_runner import Stop, config_of, stop_at
from tests.search import test_search as looped
from tests.search.test_ask_tell import finished, made

ROOT = Path(__file__).parents[2]
NAME = "random_search"


def started(folder, epsilon=0.5, delta=1e-6, name=NAME, **options):
    """A search that is started, asked for a point, and given up."""
    budget = dpb.PrivacyBudget(epsilon, delta)
    with made(name, folder=folder, budget=budget, **options) as search:
        search.ask()
    return search


def cost(folder):
    found = dpb.search.spent(folder)
    return found.epsilon, found.delta


def test_runs_count_in_full_from_their_start_and_once(tmp_path):
    assert cost(tmp_path) == (0.0, 0.0)
    started(tmp_path / "a")
    assert cost(tmp_path) == pytest.approx((0.5, 1e-6), rel=1e-9)
    started(tmp_path / "a", key=1)  # goes on
    started(tmp_path / "b" / "c", 0.25, 1e-7)
    with made(NAME, folder=tmp_path / "d") as search:
        finished(search)
    expected = 0.5 + 0.25 + looped.BUDGET.epsilon, 1.1e-6 + looped.BUDGET.delta
    assert cost(tmp_path) == pytest.approx(expected, rel=1e-9)
    assert cost(tmp_path / "b") == pytest.approx((0.25, 1e-7), rel=1e-9)
    text = str(dpb.search.spent(tmp_path))
    assert "3 runs, together epsilon = 2.75 at delta" in text
    assert f"{tmp_path / 'b' / 'c'}: run 1, " in text


def test_runs_of_the_command_line_and_their_restarts_count(tmp_path):
    prepared = prepare(config_of("."))
    run(prepared, tmp_path / "a")
    run(prepared, tmp_path / "a", restart=True)  # the first result moves to run-1
    with pytest.raises(Stop):
        run(prepared, tmp_path / "b", progress=stop_at(1))
    assert cost(tmp_path) == pytest.approx((3 * prepared.report.epsilon, 3e-5))
    started(tmp_path / "c")  # people are another promise: there is no total
    assert cost(tmp_path) == (math.inf, 1.0)
    assert "no total is stated" in str(dpb.search.spent(tmp_path))


PROCESS = """
import sys
from tests.runs.test_limits import started
started(sys.argv[1])
"""


@pytest.mark.slow
def test_runs_of_other_processes_count(tmp_path):
    for name in "ab":
        subprocess.run(
            [sys.executable, "-c", PROCESS, str(tmp_path / name)],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            check=True,
        )
    assert cost(tmp_path) == pytest.approx((1.0, 2e-6), rel=1e-9)


@pytest.mark.parametrize("lost", ["removed", "damaged", "first line", "all lines"])
def test_a_lost_record_makes_the_total_infinite(lost, tmp_path):
    looped.search(NAME, folder=tmp_path / "a")
    file = tmp_path / "a" / spending.NAME
    if lost == "removed":
        file.unlink()
    elif lost == "all lines":
        file.write_bytes(b"")
    elif lost == "damaged":
        file.write_bytes(file.read_bytes() + b'{"event": "sta')
    else:
        file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[1:]))
    assert cost(tmp_path) == (math.inf, 1.0)
    assert str(tmp_path / "a") in str(dpb.search.spent(tmp_path))


def test_an_interrupted_search_without_its_record_makes_the_total_infinite(tmp_path):
    with made("noisy_ucb", folder=tmp_path / "a") as search:
        finished(search, 1)
    (tmp_path / "a" / spending.NAME).unlink()
    assert cost(tmp_path)[0] == math.inf
    started(tmp_path / "b")
    (tmp_path / "b" / spending.NAME).unlink()
    assert cost(tmp_path / "b")[0] == 0.0  # nothing was released
    (tmp_path / "b" / checkpoint.NAME).write_bytes(b"torn\n")
    assert cost(tmp_path / "b")[0] == math.inf


def test_a_folder_that_is_named_as_a_moved_run_is_known_only_with_a_result(tmp_path):
    started(tmp_path)
    (tmp_path / "run-7").mkdir()
    (tmp_path / "run-7" / checkpoint.RESULT).write_text("{}")
    assert cost(tmp_path)[0] == pytest.approx(0.5)
    (tmp_path / "run-7" / checkpoint.SEARCH).write_text("{}")
    assert cost(tmp_path)[0] == math.inf


def test_a_line_of_another_event_changes_no_cost(tmp_path):
    started(tmp_path)
    file = tmp_path / spending.NAME
    line = {"event": "x", "run": 1, "epsilon": 0.0}
    file.write_text(file.read_text() + json.dumps(line) + "\n")
    assert cost(tmp_path)[0] == math.inf


def test_runs_behind_links_count_once_and_are_limited(tmp_path):
    started(tmp_path / "elsewhere")
    (tmp_path / "runs").mkdir()
    for name in ("a", "b"):
        (tmp_path / "runs" / name).symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "up").symlink_to(tmp_path / "runs")
    assert cost(tmp_path / "runs") == pytest.approx((0.5, 1e-6), rel=1e-9)
    dpb.search.limit_spending(tmp_path / "runs", dpb.PrivacyBudget(0.6, 1e-5))
    with pytest.raises(ValueError, match="refused by the limit"):
        started(tmp_path / "runs" / "a" / "new", 0.2)
    dpb.search.limit_spending(tmp_path / "runs", dpb.PrivacyBudget(9.0, 1e-5))
    dpb.search.limit_spending(tmp_path / "elsewhere", dpb.PrivacyBudget(0.5, 1e-5))
    with pytest.raises(ValueError, match="refused by the limit"):
        started(tmp_path / "runs" / "a" / "deep", 0.1)


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match="there is no folder"):
        dpb.search.spent(tmp_path / "a")


def test_a_run_above_the_limit_does_not_start_and_leaves_nothing(tmp_path):
    dpb.search.limit_spending(tmp_path, dpb.PrivacyBudget(1.0, 1e-5))
    started(tmp_path / "a")
    with pytest.raises(ValueError, match=r"epsilon = 0.75 .*refused by the limit of"):
        started(tmp_path / "deep" / "b", 0.75)
    with pytest.raises(ValueError, match=r"cost epsilon = 0.6 at delta = 2.1e-05"):
        started(tmp_path / "b", 0.1, 2e-5)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", spending.LIMIT]
    started(tmp_path / "a", key=1)  # what is counted already goes on
    started(tmp_path / "b")  # up to the limit
    with pytest.raises(ValueError, match="Give a smaller budget or a larger limit"):
        started(tmp_path / "c", 1e-3, 0.0)
    dpb.search.limit_spending(tmp_path, dpb.PrivacyBudget(1.1, 1e-5))
    started(tmp_path / "c", 0.1)
    assert cost(tmp_path)[0] == pytest.approx(1.1, rel=1e-9)


def test_sums_that_round_are_not_refused(tmp_path):
    dpb.search.limit_spending(tmp_path, dpb.PrivacyBudget(0.3, 0.0))
    for name in "abc":
        started(tmp_path / name, 0.1, 0.0)
    with pytest.raises(ValueError, match="refused by the limit"):
        started(tmp_path / "d", 1e-6, 0.0)


def test_the_command_line_keeps_to_a_limit(tmp_path):
    prepared = prepare(config_of("."))
    dpb.search.limit_spending(tmp_path, dpb.PrivacyBudget(1.5, 1e-3))
    run(prepared, tmp_path / "a")
    before = (tmp_path / "a" / spending.NAME).read_bytes()
    with pytest.raises(ValueError, match="refused by the limit"):
        run(prepared, tmp_path / "a", restart=True)
    assert (tmp_path / "a" / spending.NAME).read_bytes() == before


def test_where_the_total_is_unknown_nothing_starts(tmp_path):
    looped.search(NAME, folder=tmp_path / "a")
    (tmp_path / "a" / spending.NAME).unlink()
    dpb.search.limit_spending(tmp_path, dpb.PrivacyBudget(1e3, 1e-2))
    with pytest.raises(ValueError, match=r"would cost epsilon = inf .*search.spent"):
        started(tmp_path / "b")


@pytest.mark.parametrize("text", ["", "[]", '{"epsilon": 1.0}', '{"epsilon": "a"}'])
def test_a_damaged_limit_refuses_every_run(text, tmp_path):
    (tmp_path / spending.LIMIT).write_text(text)
    with pytest.raises(ValueError, match="Declare the limit again"):
        started(tmp_path / "a")


def test_a_run_that_starts_while_another_is_checked_sees_it(tmp_path, monkeypatch):
    dpb.search.limit_spending(tmp_path, dpb.PrivacyBudget(0.9, 1e-5))
    check = spending._check_limits

    def interleaved(*arguments, **options):
        check(*arguments, **options)
        with monkeypatch.context() as patch:
            patch.setattr(spending, "_check_limits", check)
            with pytest.raises(ValueError, match="refused by the limit"):
                started(tmp_path / "b")

    monkeypatch.setattr(spending, "_check_limits", interleaved)
    started(tmp_path / "a")
    assert cost(tmp_path) == pytest.approx((0.5, 1e-6), rel=1e-9)


@pytest.mark.parametrize("how", [PermissionError, KeyboardInterrupt, "killed"])
def test_a_run_that_stopped_before_it_was_checked_is_checked_when_it_goes_on(
    how, tmp_path, monkeypatch
):
    file = tmp_path / "b" / spending.NAME
    error, recorded = KeyboardInterrupt if how == "killed" else how, []

    def stops(*arguments, **options):
        recorded.append(file.read_bytes())
        raise error

    dpb.search.limit_spending(tmp_path, dpb.PrivacyBudget(0.9, 1e-5))
    started(tmp_path / "a")
    with monkeypatch.context() as patch:
        patch.setattr(spending, "_check_limits", stops)
        with pytest.raises(error):
            started(tmp_path / "b")
    assert not file.exists()
    if how == "killed":  # then nothing was undone
        file.write_bytes(*recorded)
    for _ in range(2):
        with pytest.raises(ValueError, match="refused by the limit"):
            started(tmp_path / "b")
    dpb.search.limit_spending(tmp_path, dpb.PrivacyBudget(1.0, 1e-5))
    started(tmp_path / "b")


def test_a_run_from_elsewhere_goes_on_within_the_limit_alone(tmp_path):
    with made(NAME, folder=tmp_path / "c") as search:
        finished(search, 1)
    dpb.search.limit_spending(tmp_path / "a", dpb.PrivacyBudget(1.5, 1e-3))
    (tmp_path / "c").rename(tmp_path / "a" / "c")
    before = sorted(p.name for p in (tmp_path / "a" / "c").iterdir())
    with pytest.raises(ValueError, match=r"epsilon = 2 at"):
        made(NAME, folder=tmp_path / "a" / "c")
    assert sorted(p.name for p in (tmp_path / "a" / "c").iterdir()) == before
    dpb.search.limit_spending(tmp_path / "a", dpb.PrivacyBudget(2.0, 1e-3))
    with made(NAME, folder=tmp_path / "a" / "c") as search:
        finished(search)
    assert search.result is not None


def test_a_limit_needs_a_budget(tmp_path):
    with pytest.raises(TypeError, match="budget must be an instance of PrivacyBudget"):
        dpb.search.limit_spending(tmp_path, 1.0)
