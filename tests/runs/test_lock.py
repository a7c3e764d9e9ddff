"""Two runs in one folder: the second is refused, whatever became of the first."""

import errno
import fcntl
import os
import signal
import subprocess
import sys

import pytest

from dpbilevel.cli import results
from dpbilevel.cli.main import main
from dpbilevel.cli.plans import prepare
from dpbilevel.cli.run import run
from dpbilevel.runs import checkpoint, guards, spending
from tests.cli.test_runner import GENERATED, Stop, config_of, stop_at

HOLDER = """
import sys, time
from pathlib import Path
from dpbilevel.runs import guards
with guards.held(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def prepared():
    return prepare(config_of("."))


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "out")],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_folder_in_use_by_another_process_is_refused(
    holder, prepared, tmp_path, capsys
):
    out = tmp_path / "out"
    for flags in ({}, {"resume": True}, {"restart": True}):
        with pytest.raises(ValueError, match=rf"in use.*process {holder.pid}\)"):
            run(prepared, out, **flags)
    assert names_in(out) == [guards.LOCK]
    (tmp_path / "a.toml").write_text(GENERATED)
    assert main(["run", str(tmp_path / "a.toml"), "--out", str(out)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Wait until that run ends, or give a new folder" in captured.err


def test_killed_process_keeps_nobody_out(holder, prepared, tmp_path):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    out = tmp_path / "out"
    assert names_in(out) == [guards.LOCK]
    run(prepared, out)
    assert names_in(out) == sorted([results.ARRAYS, results.RESULT, spending.NAME])


@pytest.mark.parametrize("flag", ["resume", "restart"])
def test_live_run_is_neither_resumed_nor_replaced(prepared, tmp_path, flag):
    refused = []

    def intrude(done):
        with pytest.raises(ValueError, match=f"process {os.getpid()}"):
            run(prepared, tmp_path, **{flag: True})
        with pytest.raises(ValueError, match="the run in it is in progress"):
            results.load(tmp_path)
        refused.append(done)

    result = run(prepared, tmp_path, progress=intrude)
    assert refused == [0, 1, 2, 3, 4]
    assert results.load(tmp_path).x.tolist() == result.x.tolist()
    assert [r.finished for r in spending.read(tmp_path).runs] == [True]


def test_stopped_run_leaves_no_lock(prepared, tmp_path):
    with pytest.raises(Stop):
        run(prepared, tmp_path, progress=stop_at(1))
    assert guards.LOCK not in names_in(tmp_path)
    assert not guards.in_use(tmp_path)


def test_refused_run_leaves_no_folder(prepared, tmp_path):
    with pytest.raises(ValueError, match="nothing to resume"):
        run(prepared, tmp_path / "a" / "b", resume=True)
    assert names_in(tmp_path) == []


def test_a_lock_file_that_its_holder_removed_is_not_locked(tmp_path, monkeypatch):
    file, real = tmp_path / guards.LOCK, fcntl.flock

    def late(descriptor, operation):  # the last holder goes between open and lock
        file.unlink(missing_ok=True)
        real(descriptor, operation)

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", late)
        with pytest.raises(ValueError, match="in use by another run"):
            with guards.held(tmp_path):
                pass
    with guards.held(tmp_path) as check:
        check()


def test_a_replaced_lock_file_is_left_to_its_new_holder(tmp_path):
    with guards.held(tmp_path) as check:
        (tmp_path / guards.LOCK).unlink()
        with guards.held(tmp_path) as check_second:
            with pytest.raises(ValueError, match="was deleted or replaced"):
                check()
            check_second()
    assert not guards.in_use(tmp_path)


@pytest.mark.filterwarnings("ignore:.*fork:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_neither_holds_nor_ends_the_lock(tmp_path):
    with guards.held(tmp_path) as check:
        process = os.fork()
        if process == 0:
            try:
                check()
            except ValueError:
                os._exit(1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 1
        check()
        assert guards.in_use(tmp_path)


def test_run_whose_lock_file_is_deleted_stops_before_its_next_checkpoint(
    prepared, tmp_path
):
    def intrude(done):
        if done == 2:
            (tmp_path / guards.LOCK).unlink()

    with pytest.raises(ValueError, match="was deleted or replaced while this run"):
        run(prepared, tmp_path, progress=intrude)
    assert checkpoint.read(tmp_path).done == 2
    result = run(prepared, tmp_path, resume=True)
    assert results.load(tmp_path).x.tolist() == result.x.tolist()


def test_result_is_not_written_after_the_lock_file_is_deleted(prepared, tmp_path):
    def intrude(done):
        if done == 4:
            (tmp_path / guards.LOCK).unlink()

    with pytest.raises(ValueError, match="another run may be in progress"):
        run(prepared, tmp_path, progress=intrude)
    assert not (tmp_path / results.RESULT).exists()


def test_a_disk_without_file_locks_is_refused(prepared, tmp_path, monkeypatch):
    def no_locks(*arguments):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(OSError, match="No locks available"):
        run(prepared, tmp_path / "out")
    assert not (tmp_path / "out" / spending.NAME).exists()


def test_the_command_line_is_refused_in_programs_of_several_processes(
    prepared, tmp_path, monkeypatch
):
    monkeypatch.setattr("jax.process_count", lambda: 2)
    with pytest.raises(ValueError, match="needs one process"):
        run(prepared, tmp_path / "out")
    assert not (tmp_path / "out").exists()
