"""A run between its steps: callbacks, checkpoints, locks and what it has spent."""
