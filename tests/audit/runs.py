"""Audits of calibrated solvers on canary records."""

import functools
from unittest import mock

import jax

from dpbilevel import audit
from dpbilevel.audit import tradeoff
from tests.cases import found

SHORT, LONG = 50_000, 200_000


@functools.cache
def outcomes(name, runs=SHORT):
    """The audits of one entry of `AUDITS`, one for each kind of person."""
    case = found("AUDITS")[name]
    with jax.enable_x64(case.double):
        return audit.audit_solver(
            case.solver.with_precision(case.precision),
            key=jax.random.key(7),
            runs=runs,
            x_in_records=case.x_in_records,
            others=case.others,
        )


def audited(
    solver, claim=None, *, runs=SHORT, x_in_records=("upper",), person=None, **options
):
    """The audit of one solver's runs under another's claim, by default of the first."""
    canaries = audit.canaries(solver, x_in_records=x_in_records)
    canary = canaries[person or next(iter(canaries))]
    return audit.trade_off(
        audit.SolverRun(canary.problem, canary.solver, canary.w0),
        canary.data,
        canary.neighbour,
        canary.claim if claim is None else claim,
        key=jax.random.key(8),
        runs=runs,
        **options,
    )


def audited_once(solver, *claims, **options):
    """The audits under several claims of the same runs, which are made once."""
    seen, observe = [], tradeoff.observe

    def once(*arguments, **numbers):
        if not seen:
            seen.append(observe(*arguments, **numbers))
        return seen[0]

    with mock.patch.object(tradeoff, "observe", once):
        return [audited(solver, claim, **options) for claim in claims]


def claim_of(solver, x_in_records=("upper",)):
    """What the ledger of this solver claims for the first person."""
    canaries = audit.canaries(solver, x_in_records=x_in_records)
    return next(iter(canaries.values())).claim
