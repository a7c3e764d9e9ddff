"""Measurements, as ratios within one process: `python -m benchmarks [NAME ...]`."""
