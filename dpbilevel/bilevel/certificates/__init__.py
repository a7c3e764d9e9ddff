"""Certificates: constants of a problem, and the sensitivities that they prove."""
