"""What a run survives: kills, full disks, foreign and damaged checkpoints."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from dpbilevel.cli import results
from dpbilevel.cli import run as runner
from dpbilevel.cli.config import read_config
from dpbilevel.cli.plans import prepare
from dpbilevel.cli.run import run
from dpbilevel.runs import checkpoint, spending
from tests.cli.test_runner import (
    CSV_DATA,
    GENERATED,
    Stop,
    bits,
    config_of,
    rows_of,
    stop_at,
)
from tests.cli.test_runner import write_csv as write_records

LONG = GENERATED.replace("num_steps = 4\npen", "num_steps = 20\npen")
# The command line with a known key, to compare a killed run with an unharmed one.
DRIVER = """
import sys
import jax
from dpbilevel.cli import main as cli, run as runner
runner.root_key = lambda *_: jax.random.key(11)
cli.main(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def prepared():
    return prepare(config_of("."))


@pytest.fixture
def interrupted(prepared, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(Stop):
        run(prepared, out, progress=stop_at(2))
    return out


def content(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}


def kill_after(count, command, out):
    """Starts a command and kills it once it has written so many checkpoints."""
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    seen, deadline = set(), time.monotonic() + 120
    while len(seen) < count:
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        if (out / checkpoint.NAME).exists():
            seen.add((out / checkpoint.NAME).stat().st_mtime_ns)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL


@pytest.mark.slow
def test_killed_run_ends_in_the_bits_of_one_that_was_left_alone(tmp_path, monkeypatch):
    file, killed, unharmed = tmp_path / "a.toml", tmp_path / "out", tmp_path / "free"
    file.write_text(LONG)
    command = [sys.executable, "-c", DRIVER, "run", str(file)]
    command += ["--out", str(killed)]
    rng = np.random.default_rng(5)
    kill_after(int(rng.integers(2, 8)), command, killed)
    prepared = prepare(read_config(file))
    done = checkpoint.read(killed).done
    assert 0 < done < 20
    monkeypatch.setattr(runner, "root_key", lambda *_: jax.random.key(11))
    run(prepared, killed, resume=True)
    run(prepared, unharmed)
    assert bits(killed) == bits(unharmed)
    (spent,) = spending.read(killed).runs
    assert spent.resumed == 1
    # The control: another key ends elsewhere.
    monkeypatch.setattr(runner, "root_key", lambda *_: jax.random.key(12))
    run(prepared, tmp_path / "other")
    assert bits(tmp_path / "other") != bits(unharmed)


def limited(size):
    """Lets no file grow beyond `size` bytes: a disk that fills up, by the kernel."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    return before


@pytest.mark.skipif(sys.platform == "win32", reason="limits of POSIX")
@pytest.mark.parametrize(
    "name", [pytest.param(checkpoint.NAME, marks=pytest.mark.slow), spending.NAME]
)
def test_write_cut_short_by_the_kernel_loses_nothing(prepared, tmp_path, name):
    out = tmp_path / "out"
    with pytest.raises(Stop):
        run(prepared, out, progress=stop_at(1))
    free = shutil.copytree(out, tmp_path / "free")
    run(prepared, free, resume=True)
    before = content(out)
    limits = limited(len(before[name]) + 5)
    try:
        with pytest.raises(OSError, match=r"cannot write .*use --resume"):
            run(prepared, out, resume=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert content(out)[checkpoint.NAME] == before[checkpoint.NAME]
    assert content(out)[spending.NAME].startswith(before[spending.NAME])
    assert not list(out.glob("*.tmp"))
    run(prepared, out, resume=True)
    assert bits(out) == bits(free)
    assert len(spending.read(out).runs) == 1


def test_disk_that_is_full_from_the_start_spends_nothing(prepared, tmp_path):
    limits = limited(10)
    try:
        with pytest.raises(OSError, match=r"cannot write .*checkpoint\.SECRET"):
            run(prepared, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (tmp_path / "out").exists()
    run(prepared, tmp_path / "out")
    assert len(spending.read(tmp_path / "out").runs) == 1


def refused(match, prepared, out, **options):
    before = content(out)
    with pytest.raises(ValueError, match=match):
        run(prepared, out, resume=True, **options)
    assert content(out) == before


def test_checkpoint_of_another_config_is_refused(tmp_path, interrupted):
    (tmp_path / "b.toml").write_text(LONG)
    other = prepare(read_config(tmp_path / "b.toml"))
    refused(r"solver\.num_steps was 4, is 20", other, interrupted)


def test_checkpoint_of_another_solver_is_refused(tmp_path, interrupted):
    refit = "[refit]\ntype = 'NoisyGD'\nnum_steps = 3\nstep_size = 1.0\nclip_norm = 1.0"
    (tmp_path / "b.toml").write_text(GENERATED + refit)
    other = prepare(read_config(tmp_path / "b.toml"))
    refused(r"config\.refit was absent", other, interrupted)


@pytest.mark.parametrize("part", ["jax", "dpbilevel", "backend", "partitionable"])
def test_checkpoint_of_other_software_is_refused(prepared, interrupted, part):
    saved = checkpoint.read(interrupted)
    saved.fingerprint["software"][part] = "0.0.1"
    checkpoint.write(interrupted, saved)
    refused(rf"software\.{part} was \"0\.0\.1\"", prepared, interrupted)


def test_checkpoint_of_another_version_of_the_format_is_refused(prepared, interrupted):
    file = interrupted / checkpoint.NAME
    file.write_bytes(file.read_bytes().replace(b"checkpoint 3", b"checkpoint 1", 1))
    refused(r"damaged or not a checkpoint of this version", prepared, interrupted)


@pytest.fixture
def on_file(tmp_path):
    write_records(tmp_path, rows_of(61))
    prepared = prepare(config_of(tmp_path, data=CSV_DATA))
    with pytest.raises(Stop):
        run(prepared, tmp_path / "out", progress=stop_at(1))
    return prepared, tmp_path


def test_one_changed_cell_stops_a_resume_without_a_word_about_it(on_file):
    prepared, folder = on_file
    rows = rows_of(61)
    for row in rows:
        row[0] = "777777"
    write_records(folder, rows)
    refused(r"the records are not those .*Give the same ones", prepared, folder / "out")
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        run(prepared, folder / "out", resume=True)
    assert "777777" not in str(caught.value)


@pytest.mark.slow
def test_fewer_records_than_planned_stop_a_resume_and_are_counted(on_file):
    prepared, folder = on_file
    write_records(folder, rows_of(30))
    refused(r"there are 30 records, but \[data\] asks for", prepared, folder / "out")
    write_records(folder, rows_of(61))
    run(prepared, folder / "out", resume=True)
    assert len(spending.read(folder / "out").runs) == 1


@pytest.mark.slow
def test_lost_file_of_records_stops_a_resume_and_can_come_back(on_file):
    prepared, folder = on_file
    (folder / "people.csv").rename(folder / "moved.csv")
    refused(r"no file of records at .*people\.csv", prepared, folder / "out")
    run(prepared, folder / "out", resume=True, data=folder / "moved.csv")
    assert len(spending.read(folder / "out").runs) == 1


def test_restart_is_the_way_out_of_a_damaged_checkpoint(prepared, interrupted):
    (interrupted / checkpoint.NAME).write_bytes(b"\x00" * 100)
    refused(r"start a new run, which is another release", prepared, interrupted)
    run(prepared, interrupted, restart=True)
    assert len(spending.read(interrupted).runs) == 2


@pytest.mark.parametrize("damage", ["missing", "cut", "other"])
def test_damaged_result_is_named_by_report(prepared, tmp_path, damage):
    run(prepared, tmp_path)
    page = tmp_path / "result.json"
    if damage == "missing":
        (tmp_path / "solution.npz").unlink()
    if damage == "cut":
        page.write_bytes(page.read_bytes()[:-200])
    if damage == "other":
        page.write_text(json.dumps([1]))
    with pytest.raises(ValueError, match="no result folder of this version"):
        results.load(tmp_path)
