"""Runs between their steps: callbacks, checkpoints, locks and spending records."""
