"""Scores of points, sealed with the sensitivity that a draw by them needs."""
