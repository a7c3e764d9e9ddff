"""Ctrl-C on the command line, at any time: code 130, whole files, the same bits."""

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from dpbilevel.cli import results
from dpbilevel.cli.config import read_config
from dpbilevel.cli.plans import prepare
from dpbilevel.cli.run import run
from dpbilevel.runs import checkpoint, guards, spending
from tests.cases import slow
from tests.cli.test_runner import GENERATED, bits

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")


@pytest.fixture(autouse=True, scope="module")
def _interruptible():
    """Jobs in the background ignore interrupts, and their processes inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


# The command line, which interrupts itself in a phase of its run, and keeps a copy of
# its first checkpoint for a run that is left alone.
DRIVER = """
import os, runpy, shutil, signal, sys, threading, time
phase, start = sys.argv[1:3]
del sys.argv[1:3]

def interrupt():
    os.kill(os.getpid(), signal.SIGINT)
    return time.sleep(0.5)

class Dying:
    def __del__(self):
        interrupt()

class Hook:
    def find_spec(self, name, *others):
        if name == "jaxlib" and phase == "importing":
            interrupt()
        if name == "dpbilevel.cli.main":
            patch()

def patch():
    import jax
    from dpbilevel.cli import plans, run as runner
    calibrate = plans.calibrate
    def planned(*arguments, **options):
        Dying()
        return calibrate(*arguments, **options)
    def without_end(*arguments, **options):
        threading.Timer(1.0, interrupt).start()
        @jax.jit
        def forever(x):
            return jax.lax.while_loop(lambda v: v > 0, jax.numpy.sqrt, x)
        return forever(1.0).block_until_ready()
    if phase == "planning":
        plans.calibrate = planned
    if phase == "running":
        runner.all_steps = without_end

replace, seen = os.replace, []
def replaced(source, target):
    seen.append(target.name)
    if phase == f"{target.name} {seen.count(target.name)}":
        interrupt()
    replace(source, target)
    if seen == ["checkpoint.SECRET"] and start:
        os.mkdir(start)
        shutil.copy(target, start)

os.replace = replaced
sys.meta_path.insert(0, Hook())
runpy.run_module("dpbilevel", run_name="__main__", alter_sys=True)
"""
START = ["checkpoint.SECRET", guards.LOCK]
LEFT = ["checkpoint.SECRET", guards.LOCK, "spending.jsonl"]
DONE = ["result.json", "solution.npz", "spending.jsonl"]


@pytest.fixture
def config(tmp_path):
    file = tmp_path / "a.toml"
    file.write_text(GENERATED)
    return file


def command_of(config, phase=""):
    out, start = config.parent / "out", config.parent / "start"
    driver = [sys.executable, "-c", DRIVER, phase, os.fspath(start)]
    return [*driver, "run", os.fspath(config), "--out", os.fspath(out)]


def names_in(folder):
    return sorted(p.name for p in folder.iterdir()) if folder.exists() else []


def check_told(code, text):
    assert code == 130, text
    assert text.count("dpbilevel: interrupted") == 1
    assert text.endswith("\n")
    assert "Traceback" not in text
    assert "ignored" not in text


def check_resumed(config, prepared):
    """The folder ends in the bits of a run that was left alone, and costs one run."""
    out, start = config.parent / "out", config.parent / "start"
    assert checkpoint.TEMPORARY not in names_in(out)
    if not (out / results.RESULT).exists():
        run(prepared, out, resume=(out / checkpoint.NAME).exists())
    if start.exists():
        run(prepared, start, resume=True)
        assert bits(start) == bits(out)
    assert {*names_in(out)} - {guards.LOCK} == {*DONE}
    (spent,) = spending.read(out).runs
    assert spent.finished


@pytest.mark.parametrize(
    ("phase", "left", "told"),
    [
        ("importing", [], ""),
        *slow(("planning", [], " before the first step; nothing was spent")),
        *slow(("checkpoint.SECRET 1", START, "; resume with: dpbilevel run ")),
        ("running", LEFT, "; resume with: dpbilevel run "),
        *slow(("checkpoint.SECRET 3", LEFT, "; resume with: dpbilevel run ")),
        *slow(("result.json 1", DONE, " holds a finished run")),
    ],
)
def test_interrupt_in_any_phase_leaves_a_folder_to_go_on_from(
    config, phase, left, told
):
    found = subprocess.run(
        command_of(config, phase), capture_output=True, text=True, timeout=300
    )
    check_told(found.returncode, found.stderr)
    assert told in found.stderr
    found = names_in(config.parent / "out")
    assert [v for v in found if left != DONE or v != guards.LOCK] == left
    if left:
        check_resumed(config, prepare(read_config(config)))


def of_module(script):
    """What becomes of a process that is watched."""
    head = "import os, signal, time\nfrom dpbilevel.runs import guards\n"
    found = subprocess.run(
        [sys.executable, "-c", head + script],
        capture_output=True,
        text=True,
        timeout=300,
    )
    return found.returncode, found.stdout, found.stderr


def test_signals_wait_for_a_block_that_is_whole_and_a_termination_has_its_own_code():
    script = (
        "guards.watch()\n"
        "with guards.uninterruptible():\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    time.sleep(0.5)\n"
        "    print('whole', flush=True)\n"
        "time.sleep(900)\n"
    )
    assert of_module(script) == (143, "whole\n", "\ndpbilevel: interrupted\n")


def test_ignored_signal_stays_ignored():
    script = (
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "guards.watch()\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "time.sleep(0.5)\n"
    )
    assert of_module(script) == (0, "", "")


def test_library_leaves_interrupts_to_python():
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt), guards.uninterruptible():
        signal.raise_signal(signal.SIGINT)


@contextlib.contextmanager
def load(processes):
    busy = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(processes)
    ]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


# Each of the fifty compiles.
ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}


@pytest.fixture(scope="module")
def whole_time(tmp_path_factory):
    file = tmp_path_factory.mktemp("whole") / "a.toml"
    file.write_text(GENERATED)
    before = time_of_children()
    subprocess.run(command_of(file), check=True, env=ENVIRONMENT)
    return time_of_children() - before


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="times of Linux")
@pytest.mark.parametrize("seed", range(50))
def test_interrupt_at_a_random_time_loses_no_bit(config, whole_time, seed):
    # Before that the interpreter itself starts.
    after = np.random.default_rng(seed).uniform(0.1, whole_time)
    with load(3 if seed % 2 else 0):
        process = subprocess.Popen(
            command_of(config),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
        )
        code, text = interrupted(process, after)
    left = names_in(config.parent / "out")
    print(f"{code} {left}")
    if {*left} - {guards.LOCK} != {*DONE} or code != 0:  # it may just have ended
        check_told(code, text)
    check_resumed(config, prepare(read_config(config)))


def interrupted(process, after):
    """Sends an interrupt after so many seconds of computing."""
    while process.poll() is None and time_of(process) < after:
        time.sleep(0.002)
    sent = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, text = process.communicate(timeout=60)
    took = time.monotonic() - sent
    print(f"after {after:.2f} s of computing, within {took:.2f} s:", end=" ")
    assert took < 10
    return process.returncode, text


def time_of_children():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def time_of(process):
    with open(f"/proc/{process.pid}/stat") as file:
        user, system = file.read().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
