import contextlib
import json
import re

import pytest

from dpbilevel.cli import results
from dpbilevel.cli.main import main
from dpbilevel.cli.plans import prepare
from dpbilevel.cli.run import run
from dpbilevel.runs import checkpoint, spending
from tests.cli.test_cli import failure
from tests.cli.test_runner import GENERATED, Stop, config_of, stop_at


@pytest.fixture(scope="module")
def prepared():
    return prepare(config_of("."))


def stopped(*arguments):
    raise Stop


def lines_of(folder):
    return (folder / spending.NAME).read_text().splitlines()


def events_of(folder):
    return [json.loads(line)["event"] for line in lines_of(folder)]


def total_of(folder):
    return str(spending.read(folder)).splitlines()[0]


def test_one_run_spends_its_plan_once(prepared, tmp_path):
    run(prepared, tmp_path)
    assert events_of(tmp_path) == ["started", "finished"]
    (spent,) = spending.read(tmp_path).runs
    assert (spent.epsilon, spent.delta) == (prepared.report.epsilon, 1e-5)
    assert (spent.relation, spent.people) == (prepared.report.relation, "disjoint")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", spent.started)
    assert re.fullmatch("[0-9a-f]{64}", spent.config)
    assert spent.finished
    assert "spending: 1 run, epsilon = 1 at delta = 1e-05" in total_of(tmp_path)


def test_run_is_counted_before_its_first_step(prepared, tmp_path, monkeypatch):
    def step(*arguments, **options):
        assert events_of(tmp_path) == ["started"]
        raise Stop

    monkeypatch.setattr("dpbilevel.cli.run.all_steps", step)
    with pytest.raises(Stop):
        run(prepared, tmp_path)
    assert not spending.read(tmp_path).runs[0].finished


def test_resumed_run_is_the_same_release(prepared, tmp_path):
    for resume, step in ((False, 1), (True, 2)):
        with pytest.raises(Stop):
            run(prepared, tmp_path, resume=resume, progress=stop_at(step))
    run(prepared, tmp_path, resume=True)
    assert events_of(tmp_path) == ["started", "resumed", "resumed", "finished"]
    assert "1 run, epsilon = 1 at" in total_of(tmp_path)
    assert "finished, resumes: 2" in str(spending.read(tmp_path))


def test_restarted_run_is_another_release_and_nothing_is_lost(prepared, tmp_path):
    first = run(prepared, tmp_path)
    before = lines_of(tmp_path)
    second = run(prepared, tmp_path, restart=True)
    assert lines_of(tmp_path)[:2] == before
    assert "2 runs, together epsilon = 2 at delta = 2e-05" in total_of(tmp_path)
    assert results.load(tmp_path / "run-1").x.tolist() == first.x.tolist()
    assert results.load(tmp_path).x.tolist() == second.x.tolist() != first.x.tolist()


def test_interrupted_run_counts_although_another_replaces_it(prepared, tmp_path):
    with pytest.raises(Stop):
        run(prepared, tmp_path, progress=stop_at(1))
    run(prepared, tmp_path, restart=True)
    assert events_of(tmp_path) == ["started", "started", "finished"]
    assert "2 runs, together epsilon = 2" in total_of(tmp_path)
    assert not (tmp_path / checkpoint.NAME).exists()


def test_restart_that_stops_before_it_counts_is_counted_on_resume(
    prepared, tmp_path, monkeypatch
):
    def stop(*arguments, **options):
        raise Stop

    with pytest.raises(Stop):
        run(prepared, tmp_path, progress=stop_at(1))
    with monkeypatch.context() as patch:
        # A new key is in the folder, its run not yet recorded.
        patch.setattr("dpbilevel.runs.spending.begin", stop)
        with pytest.raises(Stop):
            run(prepared, tmp_path, restart=True)
    assert events_of(tmp_path) == ["started"]
    run(prepared, tmp_path, resume=True)
    assert events_of(tmp_path) == ["started", "started", "finished"]


@pytest.mark.parametrize("kept", ["finished", "interrupted", "record"])
def test_folder_of_an_earlier_run_is_refused_without_the_flag(prepared, tmp_path, kept):
    with pytest.raises(Stop):
        run(prepared, tmp_path, progress=stop_at(1))
    if kept == "finished":
        run(prepared, tmp_path, resume=True)
    if kept == "record":
        (tmp_path / checkpoint.NAME).unlink()
    before = lines_of(tmp_path)
    with pytest.raises(ValueError, match=r"--restart to add it to this folder's"):
        run(prepared, tmp_path)
    assert lines_of(tmp_path) == before


def test_failed_restart_leaves_the_earlier_result(tmp_path):
    prepared = prepare(config_of(tmp_path))
    run(prepared, tmp_path / "out")
    before = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    with pytest.raises(ValueError, match="no file of records"):
        run(prepared, tmp_path / "out", restart=True, data=tmp_path / "none.csv")
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == before


@pytest.mark.parametrize("content", [None, b"", b"no JSON\n", b'{"run": 1}\n[]\n'])
@pytest.mark.parametrize("stop", [1, None])
def test_run_without_a_record_of_it_is_not_added_to(prepared, tmp_path, content, stop):
    with contextlib.suppress(Stop):
        run(prepared, tmp_path, progress=stop_at(stop))
    (tmp_path / spending.NAME).unlink()
    if content is not None:
        (tmp_path / spending.NAME).write_bytes(content)
    with pytest.raises(
        ValueError, match=r"no spending record that.* give a new folder"
    ):
        run(prepared, tmp_path, restart=True)
    with pytest.raises(ValueError, match=r"give a new folder") as refusal:
        run(prepared, tmp_path)
    assert "or --restart" not in str(refusal.value)
    assert "what earlier runs cost is unknown" in results.spent(tmp_path)


def test_resumed_run_whose_record_is_lost_is_recorded_again(prepared, tmp_path):
    with pytest.raises(Stop):
        run(prepared, tmp_path, progress=stop_at(1))
    (tmp_path / spending.NAME).unlink()
    run(prepared, tmp_path, resume=True)
    assert events_of(tmp_path) == ["started", "finished"]


def test_report_says_that_a_lost_record_leaves_the_cost_unknown(
    prepared, tmp_path, capsys
):
    run(prepared, tmp_path)
    (tmp_path / spending.NAME).unlink()
    assert main(["report", str(tmp_path)]) == 0
    text = "no spending record: what earlier runs cost is unknown"
    assert text in capsys.readouterr().out


def test_report_of_a_moved_result_points_to_the_record(prepared, tmp_path, capsys):
    run(prepared, tmp_path)
    run(prepared, tmp_path, restart=True)
    assert main(["report", str(tmp_path / "run-1")]) == 0
    told = capsys.readouterr().out
    assert f"in the record of its folder: dpbilevel report {tmp_path}" in told
    assert "unknown" not in told


def test_lost_first_line_renumbers_no_run_and_shows(prepared, tmp_path):
    with pytest.raises(Stop):
        run(prepared, tmp_path, progress=stop_at(1))
    run(prepared, tmp_path, restart=True)
    file = tmp_path / spending.NAME
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[1:]))
    text = str(spending.read(tmp_path))
    assert "at least: runs without a recorded start: 1\n  run 2, " in text
    assert text.endswith("finished")
    assert "not finished" not in text
    run(prepared, tmp_path, restart=True)
    assert (tmp_path / "run-2" / "result.json").exists()
    assert [r.number for r in spending.read(tmp_path).runs] == [2, 3]
    assert all(r.finished for r in spending.read(tmp_path).runs)


def test_lost_last_lines_overwrite_no_earlier_result(prepared, tmp_path):
    first = run(prepared, tmp_path)
    kept = (tmp_path / spending.NAME).read_bytes()
    second = run(prepared, tmp_path, restart=True)
    (tmp_path / spending.NAME).write_bytes(kept)
    run(prepared, tmp_path, restart=True)
    assert results.load(tmp_path / "run-1").x.tolist() == first.x.tolist()
    assert results.load(tmp_path / "run-2").x.tolist() == second.x.tolist()
    assert "runs without a recorded start: 1\n" in str(spending.read(tmp_path))


def test_finishing_a_run_leaves_the_others_unfinished(prepared, tmp_path):
    for number in (1, 2):
        spending.begin(tmp_path, number, prepared.report, prepared.config.tables)
    spending.finish(tmp_path, 1)
    assert [r.finished for r in spending.read(tmp_path).runs] == [True, False]


def test_resume_and_restart_exclude_each_other(prepared, tmp_path):
    with pytest.raises(ValueError, match=r"--resume .* or --restart"):
        run(prepared, tmp_path, resume=True, restart=True)


def test_kill_in_the_last_moment_is_made_up_for(prepared, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("dpbilevel.runs.spending.finish", stopped)
        with pytest.raises(Stop):
            run(prepared, tmp_path)
    assert (tmp_path / checkpoint.NAME).exists()
    with pytest.raises(ValueError, match="holds a finished run"):
        run(prepared, tmp_path, resume=True)
    assert events_of(tmp_path) == ["started", "finished"]
    assert not (tmp_path / checkpoint.NAME).exists()


def test_damaged_line_makes_the_total_a_lower_bound(prepared, tmp_path):
    run(prepared, tmp_path)
    file = tmp_path / spending.NAME
    file.write_bytes(file.read_bytes() + b'{"event": "started", "r')
    run(prepared, tmp_path, restart=True)
    text = str(spending.read(tmp_path))
    assert "2 runs, together epsilon = 2" in text
    assert "at least: damaged lines in spending.jsonl: 1" in text


def test_runs_that_promise_different_things_are_not_added_up():
    one = spending.Run("then", 1.0, 1e-5, "replace_one", "disjoint", "")
    other = spending.Run("later", 2.0, 1e-5, "add_or_remove_one", "disjoint", "")
    text = str(spending.RunLog((one, other, one)))
    assert "2 runs, together epsilon = 2 at delta = 2e-05 (replace_one" in text
    assert "1 run, epsilon = 2 at delta = 1e-05 (add_or_remove_one" in text
    assert "under different relations, people or units no total is stated" in text


def test_report_tells_the_total_and_run_tells_it_too(tmp_path, capsys):
    (tmp_path / "a.toml").write_text(GENERATED)
    config, out = str(tmp_path / "a.toml"), str(tmp_path / "out")
    assert main(["run", config, "--out", out]) == 0
    assert "spending:" not in capsys.readouterr().out
    text = failure(capsys, "run", config, "--out", out)
    assert "second release" in text
    assert main(["run", config, "--out", out, "--restart"]) == 0
    told = capsys.readouterr().out
    assert main(["report", out]) == 0
    reported = capsys.readouterr().out
    for text in (told, reported):
        assert "2 runs, together epsilon = 2 at delta = 2e-05 (replace_one" in text
        assert "by basic composition, if they read the same records" in text


def test_report_of_an_unfinished_run_tells_what_it_cost(prepared, tmp_path, capsys):
    with pytest.raises(Stop):
        run(prepared, tmp_path, progress=stop_at(1))
    assert main(["report", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert "1 run, epsilon = 1" in captured.out
    assert "not finished" in captured.out
    assert "finish it with dpbilevel run CONFIG" in captured.err
