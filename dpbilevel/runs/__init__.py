"""The parts of a run from the command line: tables, records, checkpoints, results."""
