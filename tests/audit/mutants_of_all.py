"""Nine tenths of the claimed noise, in every audited solver that adds noise."""

import dataclasses
import functools

import equinox as eqx
import jax

import dpbilevel as dpb
from dpbilevel.core.solver import AbstractGaussianSolver
from tests.audit.runs import audited, claim_of
from tests.cases import Mutant, found, with_mechanism


class Quieter(dpb.privacy.Gaussian):
    def release(self, bounded, *, key):
        return dpb.privacy.Gaussian.release(self.scaled(0.9), bounded, key=key)


def quieter(part):
    """A copy of a solver whose mechanisms add less noise than its ledger claims."""
    if type(part) is tuple:
        return tuple(map(quieter, part))
    if not isinstance(part, eqx.Module):
        return part
    if type(part) is dpb.privacy.Gaussian:
        return Quieter(**vars(part))
    values = {f.name: getattr(part, f.name) for f in dataclasses.fields(part)}
    changed = {name: quieter(value) for name, value in values.items()}
    if any(changed[name] is not value for name, value in values.items()):
        part = dataclasses.replace(part, **changed)
    if isinstance(part, AbstractGaussianSolver):
        return with_mechanism(part, Quieter)
    return part


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
