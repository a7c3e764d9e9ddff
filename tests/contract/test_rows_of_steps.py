"""Steps refuse rows that do not fit the plan, and ledgers of steps count them."""

import collections

import jax
import jax.numpy as jnp
import pytest

import dpbilevel as dpb
from dpbilevel.core.loop import planned_rows, scan_steps
from dpbilevel.privacy.mechanisms import Gaussian
from tests.contract.recorded import CASES, KEY, SHORT, at_once, calibrated

solvers = at_once(lambda name: name in SHORT)


def traced(solver, problem, data, w0):
    """A step on shapes alone."""
    key = jax.random.key(KEY)

    def step(data):
        return solver.step(problem, data, solver.init(problem, w0), key=key)

    return jax.eval_shape(step, data)


def under_add_or_remove(name):
    problem, solver, data, w0 = calibrated(name)
    try:
        other = solver.with_neighbours(dpb.Neighbours.ADD_OR_REMOVE_ONE)
        other.ledger(problem, other.sizes).events()
    except ValueError as error:
        pytest.skip(str(error))
    return other, problem, data, w0


@solvers
def test_under_add_or_remove_one_a_step_refuses_rows_that_are_not_padded(name):
    solver, problem, data, w0 = under_add_or_remove(name)
    refused = "is not padded to .* rows|proved under replace-one only"
    with pytest.raises(ValueError, match=refused):
        traced(solver, problem, data, w0)


# The second part of `warm_started` is proved under replace-one only.
@at_once(lambda name: name == "noisy_gd", [n for n in CASES if n != "warm_started"])
def test_padded_rows_are_taken(name):  # the control of the test above
    solver, problem, data, w0 = under_add_or_remove(name)
    traced(solver, problem, planned_rows(solver, data), w0)


def test_rows_padded_for_another_plan_are_refused():
    solver, problem, data, w0 = under_add_or_remove("noisy_gd")
    larger = planned_rows(solver.with_sizes(5 * 64 * jax.device_count()), data)
    with pytest.raises(ValueError, match="is not padded to 64 rows"):
        traced(solver, problem, larger, w0)


@solvers
def test_under_replace_one_a_step_refuses_more_rows_than_planned(name):
    problem, solver, data, w0 = calibrated(name)
    longer = jax.tree.map(lambda v: jnp.concatenate([v, v[:1]]), data)
    with pytest.raises(ValueError, match="the plan is for"):
        traced(solver, problem, longer, w0)


@at_once(lambda name: name == "noisy_gd")
def test_a_ledger_of_steps_counts_what_these_steps_release(name):
    problem, solver, data, w0 = calibrated(name)
    whole, first = solver.ledger(problem, solver.sizes), None
    if solver.num_steps > 1:
        first = solver.ledger_of_steps(problem, solver.sizes, 1)
    if first is None or first == whole:
        pytest.skip("counts the whole run from the first step on")
    made = collections.Counter()

    released = Gaussian.release

    def counted(self, bounded, *, key):
        jax.debug.callback(lambda: made.update([1]))
        return released(self, bounded, key=key)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Gaussian, "release", counted)
        keys = jax.random.split(jax.random.key(KEY), 1)
        state = solver.init(problem, w0)
        jax.block_until_ready(
            jax.jit(scan_steps)(problem, solver, data, state, keys)[0]
        )
        jax.effects_barrier()
    assert made[1] == sum(release.count for release in first.releases)
