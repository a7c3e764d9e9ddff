"""Private solvers, one algorithm per module."""
