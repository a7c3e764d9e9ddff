"""Runs the named benchmarks, or all, each in a process of its own."""

import os
import subprocess
import sys

NAMES = (
    "performance",
    "precision",
    "calibration",
    "clip_norms",
    "passes",
    "utility",
    "worst_runs",
    "utility_figure",
    "penalties",
    "meta_learning",
    "tuned_training",
    "tuned_estimators",
    "estimators",
    "census",
    "single_loop",
    "hypergradient",
    "data_cleaning",
    "implicit",
    "rates",
    "rates_in_y",
    "selection",
    "draws",
    "saddle",
    "games",
    "breast_cancer",
    "black_box",
    "dimensions",
    "starts",
    "out_of_core",
)


def run(name, cores, options):
    """Runs one benchmark on these cores, where the system can pin a process."""
    pin = getattr(os, "sched_setaffinity", lambda pid, cores: None)
    command = [sys.executable, "-c", f"import benchmarks.{name} as b; b.main()"]
    command += options
    subprocess.run(command, preexec_fn=lambda: pin(0, cores), check=True)


def main():
    options = [text for text in sys.argv[1:] if text.startswith("--")]
    for name in [text for text in sys.argv[1:] if text not in options] or NAMES:
        if name not in NAMES:
            sys.exit(f"benchmarks: unknown name {name!r}; choose from {NAMES}.")
        cores = set(range(os.cpu_count() or 1))
        if name == "hypergradient":
            cores = {max(cores)}
        print(f"\n== {name}, {len(cores)} cores", flush=True)
        run(name, cores, options)


main()
