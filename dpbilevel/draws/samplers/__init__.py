"""Samplers of the densities that exponential mechanisms draw from."""
