"""Runs of the cases of all solvers that note every release; compiled once a solver."""

import jax
import numpy as np
import pytest

import dpbilevel as dpb
from dpbilevel.audit.recording import Tape
from dpbilevel.privacy.per_example.clipping import Basis
from tests.cases import first_of_each_class, found, of_people

CASES = dict(found("CONTRACT"))  # others have none on people
SHORT = set(first_of_each_class(CASES))
# One of each class on people, who have eight equal rows each: the worst ones. More rows
# round more, and proved sensitivities have no room for that in float32.
PROVED = {n for n in SHORT if CASES[n].solver.basis is not Basis.CLIPPED}
CASES |= {
    f"{name}_of_people": of_people(CASES[name], 3 if name in PROVED else 8)
    for name in sorted(SHORT)
}
KEY = 0
# Those that `make test` compiles, at least one of each family: one level, an adaptive
# one, a draw of it, two levels with a penalty, certified, a game, a search, a part of
# pipelines. Of every other class it has what tracing tells, the slow suite all.
RUN = {"noisy_gd_adam", "adaptive_step", "exponential", "one_level"}
RUN |= {"penalty_both_levels", "clipped_upper"}
RUN |= {"noisy_payoff", "random_search", "repeat_and_select"}


def at_once(is_short, names=CASES):
    """All of these cases, those of the short suite at once."""
    return pytest.mark.parametrize(
        "name",
        [
            pytest.param(name, marks=() if is_short(name) else pytest.mark.slow)
            for name in names
        ],
    )


def calibrated(name, scale=1.0):
    """Problem, solver with this noise, data and start of a case."""
    case = CASES[name]
    # Sums of floats compile sooner; one of each class sums on the grid.
    distinct = name.removesuffix("_of_people") in SHORT
    precision = "grid" if distinct else "float"
    solver = case.solver.with_noise(scale).with_precision(precision)
    solver = solver.with_sizes(case.sizes).with_counts(case.problem)
    return case.problem, solver, case.data, case.w0


def recorder(*mistakes):
    """A compiled `solve` whose tape has its releases, by mechanisms with mistakes.

    Args:
        *mistakes: Object, name of its method, and the broken method made from it.
    """
    tape = Tape()

    @jax.jit
    def compiled(problem, solver, data, w0, key):
        with pytest.MonkeyPatch.context() as patch:
            for owner, name, broken in mistakes:
                patch.setattr(owner, name, broken(getattr(owner, name)))
            with tape.patched():
                return dpb.solve(problem, solver, data, w0, key=key, trajectory=True)

    # One program for most tests: compiling takes the suite's time.
    def solve(problem, solver, data, w0, *, key, frozen=False):
        """With `frozen`, noisy releases show zeros, so that the states see no data."""
        tape.shown = zeros if frozen else lambda key, value: value
        return compiled(problem, solver, data, w0, key)

    solve.programs, solve.tape = compiled._cache_size, tape
    return solve


def zeros(key, value):
    del key
    return jax.tree.map(np.zeros_like, value)


def strength(mechanism):
    """The number that sets the noise: epsilon of a draw, else the multiplier."""
    return getattr(mechanism, getattr(mechanism, "parameter", "multiplier"))


solve = recorder()


def compiled_programs():
    """Return the number of programs that `solve` has compiled."""
    return solve.programs()


def run(name, key, scale=1.0):
    """The solution of a case."""
    problem, solver, data, w0 = calibrated(name, scale)
    return solve(problem, solver, data, w0, key=key)


def notes_of(name, *seeds, data=None, frozen=False, solve=solve):
    """What runs of a case with these keys note."""
    problem, solver, own, w0 = calibrated(name)
    data = own if data is None else data
    solve.tape.take()
    for seed in seeds:
        key = jax.random.key(seed)
        solve(problem, solver, data, w0, key=key, frozen=frozen)
    return solve.tape.take()


def ledger_of(name):
    problem, solver, _, _ = calibrated(name)
    return solver.ledger(problem, solver.sizes)
