"""Runs the named benchmarks, or all, each in a process of its own."""

import os
import subprocess
import sys

NAMES = (
    "clipping",
    "precision",
    "calibration",
    "census",
    "single_loop",
    "hypergradient",
    "implicit",
    "rates",
    "selection",
    "draws",
    "saddle",
    "fairness",
    "breast_cancer",
    "black_box",
    "dimensions",
)


def run(name, cores):
    """Runs one benchmark on these cores, where the system can pin a process."""
    pin = getattr(os, "sched_setaffinity", lambda pid, cores: None)
    command = [sys.executable, "-c", f"import benchmarks.{name} as b; b.main()"]
    subprocess.run(command, preexec_fn=lambda: pin(0, cores), check=True)


def main():
    for name in sys.argv[1:] or NAMES:
        if name not in NAMES:
            sys.exit(f"benchmarks: unknown name {name!r}; choose from {NAMES}.")
        cores = set(range(os.cpu_count() or 1))
        if name == "hypergradient":
            cores = {max(cores)}
        if name == "clipping":
            print(f"\n== {name}, one core", flush=True)
            run(name, {0})
        print(f"\n== {name}, {len(cores)} cores", flush=True)
        run(name, cores)


main()
