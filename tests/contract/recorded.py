"""Runs of the cases of all solvers that note every release; compiled once a solver."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpbilevel as dpb
from dpbilevel.audit.sensitivity import open_value
from dpbilevel.privacy.mechanisms import Gaussian
from dpbilevel.privacy.per_example.clipping import Basis, Bounded
from tests.cases import first_of_each_class, found, of_people

CASES = found("CONTRACT")
SHORT = set(first_of_each_class(CASES))
# One of each class on people, who have eight equal rows each: the worst ones. More rows
# round more, and proved sensitivities have no room for that in float32.
PROVED = {n for n in SHORT if CASES[n].solver.basis is not Basis.CLIPPED}
CASES |= {
    f"{name}_of_people": of_people(CASES[name], 3 if name in PROVED else 8)
    for name in sorted(SHORT)
}
KEY = 0
NOTES = []  # of releases: the mechanism's strength and scale, the key, value and answer


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
    """A compiled `solve` that notes releases, on mechanisms with these mistakes.

    Args:
        *mistakes: Object, name of its method, and the broken method made from it.
    """

    @jax.jit
    def compiled(problem, solver, data, w0, key, frozen):
        with pytest.MonkeyPatch.context() as patch:
            for owner, name, broken in mistakes:
                patch.setattr(owner, name, broken(getattr(owner, name)))
            release = noted(Gaussian.release, std, frozen)
            patch.setattr(Gaussian, "release", release)
            for kind in (dpb.draws.Exponential, dpb.draws.RegularizedExponential):
                patch.setattr(kind, "draw", noted(kind.draw, sensitivity, frozen))
            return dpb.solve(problem, solver, data, w0, key=key, trajectory=True)

    # One program for most tests: compiling takes the suite's time.
    def solve(problem, solver, data, w0, *, key, frozen=False):
        """With `frozen`, noisy releases show zeros, so that the states see no data."""
        return compiled(problem, solver, data, w0, key, frozen)

    solve.programs = compiled._cache_size
    return solve


def noted(method, scale, frozen):
    """A release or a draw that says how strong it is, of what scale, and its noise."""

    def made(self, value, *args, **kwargs):
        released = method(self, value, *args, **kwargs)
        numbers = jnp.asarray(strength(self)), jnp.asarray(scale(self, value))
        if not isinstance(value, Bounded):
            jax.debug.callback(note, *numbers, None, None)
            return jax.tree.map(lambda v: jnp.where(frozen, 0 * v, v), released)
        words = jax.random.key_data(kwargs["key"])
        jax.debug.callback(note, *numbers, words, (value, released))
        return jax.tree.map(lambda v: jnp.where(frozen, 0 * v, v), released)

    return made


def note(strength, scale, words, noisy):
    raw = released = None
    if noisy is not None:
        raw = np.concatenate(open_value(noisy[0]))
        released = np.concatenate([np.ravel(v) for v in jax.tree.leaves(noisy[1])])
        words = tuple(np.ravel(words).tolist())
    NOTES.append((float(strength), float(scale), words, raw, released))


def strength(mechanism):
    """The number that sets the noise: epsilon of a draw, else the multiplier."""
    if isinstance(mechanism, dpb.draws.Exponential):
        return mechanism.epsilon
    return mechanism.noise_multiplier


def std(mechanism, bounded):
    return mechanism.deviation * sensitivity(mechanism, bounded)


def sensitivity(mechanism, value):
    return value.sensitivity(mechanism.neighbours)


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
    jax.effects_barrier()
    NOTES.clear()
    for seed in seeds:
        key = jax.random.key(seed)
        solve(problem, solver, data, w0, key=key, frozen=frozen)
    jax.effects_barrier()
    return list(NOTES)


def ledger_of(name):
    problem, solver, _, _ = calibrated(name)
    return solver.ledger(problem, solver.sizes)
