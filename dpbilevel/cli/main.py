"""Command line: `dpbilevel init | auto | calibrate | run | report | ...`."""

import argparse
import dataclasses
import inspect
import os
import re
import shlex
import signal
import sys
import tomllib
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from .. import __version__
from .._checks import did_you_mean
from .._extras import check_installed
from ..audit.device import device_arithmetic
from ..runs import checkpoint, guards, spending
from ..runs.guards import step_bar
from . import check, init, plans, predictions, results, run
from .config import Config
from .tasks import TASKS


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, and return its exit status.

    Args:
        argv: The arguments, by default those of the process.

    Returns:
        0, or 1 if an audit found a violation or the device failed its test, 2 after a
        mistake of the user, 130 after a `KeyboardInterrupt`, 141 if the reader of the
        output has closed it. In a process of its own an interrupt ends that process
        (`dpbilevel.runs.guards`).

    Privacy:
        The output is public or released, except for the lines of `check`, which are
        marked NON-PRIVATE. `init` shows the first row of a file, a header.
    """
    arguments, unknown = _parser().parse_known_args(argv)
    if unknown:
        arguments.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    guards.message = lambda: _interrupted(arguments)
    try:
        # Records and starts of a run are float32, and so is what a plan assumes.
        with jax.enable_x64(False), warnings.catch_warnings():
            warnings.showwarning = _warn
            # The reason of a plan begins with this warning, and is printed.
            warnings.filterwarnings("ignore", "auto: The plan")
            code = arguments.command(arguments) or 0
            sys.stdout.flush()
            return code
    except BrokenPipeError:  # the reader of the output has closed it, as head does
        if arguments.command is _run:
            said = f"{_interrupted(arguments)} (the output was closed)"
            print(said, file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (ValueError, OSError) as error:
        print(f"dpbilevel: error: {_sentence(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\n{_interrupted(arguments)}", file=sys.stderr)
        return 130


class _Parser(argparse.ArgumentParser):
    """Parser whose errors name the command, option or value that was meant."""

    def error(self, message: str):
        """Print the usage and the message, and exit with status 2."""
        wrong = "".join(re.findall(r"(?:choice: '|arguments: )([\w-]+)", message))
        known = {*re.findall(r"[\w-]+", f"{message} {self.format_usage()}")} - {wrong}
        super().error(message + did_you_mean(wrong, sorted(known)))


PAGES = {
    "html": "a certificate for a reviewer",
    "registry": "a registry entry in YAML",
    "nist": "a worksheet by NIST SP 800-226 in Markdown",
}
_FLAGS = Path(__file__).with_name("templates") / "flags.toml"
_KINDS = {"N": int, "E": float, "D": float, "NUMBERS": init.numbers}
_KINDS |= dict.fromkeys(("FILE", "DIR", "DATA.csv"), Path)


def _parser() -> argparse.ArgumentParser:
    what = "Differentially private models. Begin with: dpbilevel init DATA.csv"
    parser = _Parser(prog="dpbilevel", description=what)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    flags = tomllib.loads(_FLAGS.read_text(encoding="utf-8"))
    tasks = " ".join(["training by default.", *map(": ".join, init.OFFERED.items())])
    flags["init"]["--task"] |= {"choices": [*init.OFFERED], "help": tasks}
    for name, page in PAGES.items():
        flags["report"][f"--{name}"] = {"metavar": "FILE", "help": f"new file: {page}"}
    actions = _init, _calibrate, _auto, _check, _run, _audit, _report, _predict, _device
    for action in actions:
        text, name = inspect.getdoc(action) or "", action.__name__[1:]
        first = text.partition("\n")[0].rstrip(".")
        words = f"{first[:1].lower()}{first[1:]}"
        command = commands.add_parser(name, help=words, description=text)
        command.set_defaults(command=action, parser=command)
        for flag, options in flags.get(name, {}).items():
            kind = _KINDS.get(options.get("metavar"))
            options |= {} if kind is None else {"type": kind}
            command.add_argument(flag, **options)
    return parser


def _init(arguments: argparse.Namespace) -> int:
    """Write a commented config for a CSV file.

    The config is made from the header of the file and the flags; no record is read. It
    names what is missing, for you to fill in.
    """
    check_installed("this command", "jinja2")
    out, results = arguments.out, arguments.run
    predictions.check_new(out)
    if results is not None and results.exists():
        raise ValueError(f"{results} exists; give --run the name of a new folder.")
    text, missing = init.draft(arguments)
    if missing and results is not None:
        raise ValueError(f"--run needs all facts; give {', '.join(missing)}.")
    with guards.uninterruptible():
        out.write_text(text, encoding="utf-8")
    print(f"config: {out} (read it, and correct mistakes)")
    for remark in init.remarks(arguments):
        print(f"  {remark}")
    if results is not None:
        return main(["run", str(out), "--out", str(results)])
    if missing:
        print("  fill in the lines marked REQUIRED, or delete the file and give the")
        print(f"  flags {', '.join(missing)}")
    print(f"  cells that do not fit, for you: dpbilevel check {out}")
    print(f"  its guarantee, before any data: dpbilevel calibrate {out}")
    if not TASKS[arguments.task].is_game:  # their settings follow from theorems
        planned = out.with_stem("planned")
        print(f"  its settings, by dry runs:      dpbilevel auto {out} --out {planned}")
    print(f"  one run within the budget:      dpbilevel run {out} --out runs/a")
    return 0


def _calibrate(arguments: argparse.Namespace) -> None:
    """Print the guarantee of a run of a config; reads no data."""
    print(plans.prepare(_planned(arguments.config)).report)


def _planned(path: str) -> Config:
    """Return a file's config; choose its settings by dry runs if it has none."""
    config, is_planned = plans.read_for_run(path)
    return config if is_planned else _completed(config)


def _completed(config: Config) -> Config:
    """Return a config with settings that dry runs choose, and print them."""
    check_installed("this command", "tqdm")
    print("Dry runs on synthetic records choose method and settings.")
    found = plans.plan(config)
    print(found.reason, found.to_toml(), sep="\n", flush=True)
    return plans.completed(config, tomllib.loads(found.to_toml()))


def _auto(arguments: argparse.Namespace) -> None:
    """Choose method and settings for a config by dry runs; reads no data.

    Runs every method with several settings on synthetic records, as many as the config
    declares, and says which is best. The config needs no table [solver].
    """
    check_installed("this command", "tqdm")
    out = arguments.out
    folder = Path(arguments.config).parent.resolve()
    if out is not None and out.parent.resolve() != folder:
        raise ValueError(f"write {out} into the folder of {arguments.config}.")
    if out is not None:
        predictions.check_new(out)
    config, text = plans.read_unplanned(arguments.config)
    found = plans.plan(config)
    print(found)
    if out is None:
        print("\n" + found.to_toml(), end="")
        return
    out.write_text(plans.written(text, found), encoding="utf-8")
    print(f"\nconfig: {out} (run it with: dpbilevel run {out} --out DIR)")


def _check(arguments: argparse.Namespace) -> None:
    """Show cells and values that do not fit a config; NON-PRIVATE.

    For the curator of the records alone: do not share the output.
    """
    config, _ = plans.read_for_run(arguments.config)
    files = arguments.data, arguments.validation
    for line in check.check(config, *files, arguments.ids):
        print(line)


def _run(arguments: argparse.Namespace) -> None:
    """Train on the records of a config, once, within its budget.

    Prints the guarantee first. If the config has no table [solver], dry runs choose
    the settings, as dpbilevel auto does.
    """
    config, is_planned = plans.read_for_run(arguments.config)
    check_installed("this command", "matplotlib", "tqdm")
    names = (field.name for field in dataclasses.fields(run.Options))
    options = {name: getattr(arguments, name) for name in names}
    run.refuse(config, arguments.out, **options)
    if not is_planned and arguments.resume:
        # The settings of the run to be resumed.
        before = checkpoint.read(arguments.out).fingerprint.get("config", {})
        config = plans.completed(config, before)
    elif not is_planned:
        config = _completed(config)
    prepared = plans.prepare(config)
    print(prepared.report, flush=True)  # before anything is spent
    with step_bar(prepared.solver.num_steps, "run") as progress:
        result = run.run(prepared, arguments.out, **options, progress=progress)
    for remark in result.warnings:
        print(f"WARNING: {remark}")
    out = shlex.quote(str(arguments.out))
    print(f"result: {arguments.out} (see it with: dpbilevel report {out})")
    spent = spending.read(arguments.out)
    if len(spent.runs) > 1:  # what they cost together
        print(spent)


def _report(arguments: argparse.Namespace) -> None:
    """Print released values, guarantee and spent budget of a result folder."""
    files = {name: file for name in PAGES if (file := getattr(arguments, name))}
    for name, file in files.items():
        predictions.check_new(file, f"--{name}")
        check_installed("this command", "jinja2", "matplotlib")
    # A certificate shows no paths of this computer.
    shown: Any = (lambda place: place.name) if files else str
    spent = results.spent(arguments.folder, shown)
    try:
        result = results.load(arguments.folder)
        if not files:
            print(result)
            return
        from .page import certificate_of  # needs an extra

        title = f"Run in {arguments.folder.resolve().name}"
        total = results.total(arguments.folder, result.report)
        found = certificate_of(result, spent, title, total)
        texts = {name: getattr(found, name)() for name in files}
        for name, file in files.items():
            predictions.check_new(file, f"--{name}")  # two options name one file
            file.write_text(texts[name], encoding="utf-8")
            print(f"{PAGES[name].removeprefix('a ')}: {file}")
    finally:  # what was spent counts where no result came of it, too
        if spent and not files:
            print(spent)


def _predict(arguments: argparse.Namespace) -> None:
    """Predict the label of new people by a released model; costs no budget.

    Reads a file with the columns of the training records; the label may be missing.
    The predictions are as private as that file.
    """
    predictions.check_new(arguments.out)
    answers, said = predictions.predict(arguments.folder, arguments.data, arguments.id)
    predictions.write(arguments.out, answers)
    print(f"predictions: {arguments.out} ({said})")


def _audit(arguments: argparse.Namespace) -> int:
    """Try to refute the guarantee of a config on made-up records.

    Runs the solver of a config many times on two neighbouring data sets, made for the
    worst case, and compares what leaks with the guarantee. Reads no data.
    """
    config = _planned(arguments.config)
    print(f"{arguments.config}: {arguments.runs} runs a side ...", flush=True)
    outcomes = plans.audit_config(config, arguments.runs)
    print(*outcomes, sep="\n")
    return 0 if all(outcome.passed for outcome in outcomes) else 1


def _device(arguments: argparse.Namespace) -> int:
    """Test whether this device computes as exactly as the guarantees assume.

    Computes matrix products on the default device, from numbers made to show reduced
    precision, and compares them with exact ones. Reads no data.
    """
    found = device_arithmetic()
    print(found)
    return 0 if found.passed else 1


def _interrupted(arguments: argparse.Namespace) -> str:
    """Return the message after an interrupt, which says how to go on."""
    said = "dpbilevel: interrupted"
    if arguments.command is _init:
        return f"{said}; nothing was written"
    if arguments.command is not _run:
        return said
    out = arguments.out
    if (out / checkpoint.NAME).exists():
        command = ["dpbilevel", "run", arguments.config, "--out", str(out), "--resume"]
        for flag in ("data", "validation"):
            path = getattr(arguments, flag)
            command += [] if path is None else [f"--{flag}", str(path)]
        return f"{said}; resume with: {shlex.join(command)}"
    if (out / results.RESULT).exists():
        return f"{said}; {out} holds a finished run"
    return f"{said} before the first step; nothing was spent"


def _warn(message: Warning | str, *_: object, **__: object) -> None:
    """Print a warning as an error is printed, without the line of the program."""
    print(f"dpbilevel: warning: {message}", file=sys.stderr)


def _sentence(error: Exception) -> str:
    """Return the message of an error; of the operating system with the file."""
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror}"
    return str(error)
