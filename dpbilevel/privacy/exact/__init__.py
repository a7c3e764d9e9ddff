"""Exact arithmetic: 61-bit integers, sums on a grid, normal integers, products."""
