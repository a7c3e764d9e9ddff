"""Runs the named benchmarks, or all."""

import importlib
import sys

NAMES = ("clipping", "calibration", "census")

for name in sys.argv[1:] or NAMES:
    if name not in NAMES:
        sys.exit(f"benchmarks: unknown name {name!r}; choose from {', '.join(NAMES)}.")
    print(f"\n== {name}")
    importlib.import_module(f"benchmarks.{name}").main()
