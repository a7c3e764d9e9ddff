"""Prints what was measured on every solver: python -m tests.audit.table [NAME]."""

import argparse

import jax

from dpbilevel import audit
from tests.audit.mutants import MUTANTS as OF_STEPS
from tests.audit.mutants import survivors
from tests.audit.mutants_of_all import MUTANTS as OF_ALL
from tests.audit.mutants_search import MUTANTS as OF_SEARCHES
from tests.audit.runs import LONG, outcomes
from tests.cases import found

MUTANTS = OF_STEPS | OF_SEARCHES | OF_ALL
MECHANISMS = ("exponential mechanism", "Metropolis sampler")


def rejected(of):
    """How many mutants of this mechanism an audit rejects."""
    group = {name: mutant for name, mutant in MUTANTS.items() if mutant.of == of}
    return f"{len(group) - len(survivors(group))} of {len(group)}" if group else ""


def label(name, person):
    return name if person in ("records", "person") else f"{name}: {person}"


def labels():
    """The name of every row, without a run."""
    for name, case in found("AUDITS").items():
        with jax.enable_x64(case.double):
            pairs = audit.canaries(case.solver, x_in_records=case.x_in_records)
        yield from (label(name, person) for person in pairs)
    yield from MECHANISMS


def rows(runs, start):
    for name in found("AUDITS"):
        if name.startswith(start):
            for outcome in outcomes(name, runs):
                person = outcome.name.split(", ")[1]
                yield label(name, person), outcome, rejected(name)
    for name in MECHANISMS:
        if name.startswith(start):
            mutants = MUTANTS.values()
            sound = next(mutant.sound for mutant in mutants if mutant.of == name)
            yield name, sound(), rejected(name)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", nargs="?", default="", help="how the rows begin")
    parser.add_argument("--runs", type=int, default=LONG, help="runs a side")
    given = parser.parse_args()
    print("| mechanism | claimed mu | measured mu, at least | runs a side | mutants |")
    print("|---|---|---|---|---|")
    for label, outcome, mutants in rows(given.runs, given.name):
        print(
            f"| {label} | {outcome.claimed_mu:.3f} | {outcome.measured_mu:.3f} "
            f"| {outcome.runs} | {mutants} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
