"""Budgets, mechanisms, the ledger, calibration and reports."""
