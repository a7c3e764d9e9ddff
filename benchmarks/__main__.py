"""Runs the named benchmarks, or all, each in a process of its own.

`python -m benchmarks --help` lists them, and `python -m benchmarks NAME --help` says
what one of them measures and what options it has.
"""

import ast
import os
import pathlib
import subprocess
import sys

NAMES = """
performance utility worst_runs redrawn utility_figure penalties meta_learning
tuned_training tuned_estimators estimators real_tables natural_sources hypergradient
data_cleaning implicit rates draws saddle games black_box dimensions
out_of_core panels intervals correlated_noise step_sizes
network_sources peer_accuracy banded_noise
""".split()
# Commands that are a function of another benchmark's module.
MODULES = {
    "saddle": "games",
    "implicit": "penalties",
    "data_cleaning": "hypergradient",
    "correlated_noise": "step_sizes",
    "banded_noise": "peer_accuracy",
    "tuned_training": "meta_learning",
}


def run(name, cores, options):
    pin = getattr(os, "sched_setaffinity", lambda pid, cores: None)
    module, function = MODULES.get(name, name), name if name in MODULES else "main"
    code = f"from benchmarks import {module} as b; b.{function}()"
    command = [sys.executable, "-c", code, *options]
    subprocess.run(command, preexec_fn=lambda: pin(0, cores), check=True)


def described(name):
    file = pathlib.Path(__file__).with_name(f"{MODULES.get(name, name)}.py")
    tree = ast.parse(file.read_text())
    named = [node for node in tree.body if getattr(node, "name", None) == name]
    return ast.get_docstring(named[0] if name in MODULES else tree)


def main():
    options = [text for text in sys.argv[1:] if text.startswith("--")]
    named = [text for text in sys.argv[1:] if text not in options]
    for name in named:
        if name not in NAMES:
            sys.exit(f"benchmarks: unknown name {name!r}; choose from {NAMES}.")
    if "--help" in options:
        for name in named or NAMES:
            text = described(name)
            print(f"{name}: {text if named else text.splitlines()[0]}")
        return
    for name in named or NAMES:
        cores = set(range(os.cpu_count() or 1))
        if name == "hypergradient":
            cores = {max(cores)}
        print(f"\n== {name}, {len(cores)} cores", flush=True)
        run(name, cores, options)


main()
