"""Batch sampling: full batches, Poisson, fixed size, single pass, random allocation."""
