"""Nine tenths of the claimed noise, in every audited solver that adds noise."""

import functools

import jax

import dpbilevel as dpb
from tests.audit.runs import audited, claim_of
from tests.cases import Mutant, found


class Quieter(dpb.privacy.Gaussian):
    def release(self, bounded, *, key):
        sound = dpb.privacy.Gaussian(**vars(self)).scaled(0.9)
        return sound.release(bounded, key=key)


def quieter(solver):
    """A copy whose mechanisms add less noise than its ledger claims."""
    return jax.tree.map(
        lambda leaf: Quieter(**vars(leaf)) if is_gaussian(leaf) else leaf,
        solver,
        is_leaf=is_gaussian,
    )


def is_gaussian(leaf):
    return type(leaf) is dpb.privacy.Gaussian


def audit_of(name, broken):
    """The audit of the first person under the claim of the sound solver."""
    case = found("AUDITS")[name]
    with jax.enable_x64(case.double):
        solver = case.solver.with_precision(case.precision)
        claim = claim_of(solver, case.x_in_records)
        solver = quieter(solver) if broken else solver
        return audited(solver, claim, x_in_records=case.x_in_records)


MUTANTS = {
    f"{name}, noise x 0.9": Mutant(
        name,
        functools.partial(audit_of, name, broken=True),
        functools.partial(audit_of, name, broken=False),
    )
    for name, case in found("AUDITS").items()
    if case.exact and ".draws." not in type(case.solver).__module__
}
