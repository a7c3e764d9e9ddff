import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import dpbilevel as dpb
from dpbilevel.privacy import accounting
from dpbilevel.solvers.base import advance

RUNS, ALPHA = 50_000, 1e-4
REPLACE, ADD_OR_REMOVE = dpb.Neighbours.REPLACE_ONE, dpb.Neighbours.ADD_OR_REMOVE_ONE
RECORDS, LOWER_RECORDS = 10, 20


def rate_bounds(hits):
    """Clopper-Pearson bounds on a rate, one from below and one from above."""
    below = scipy.stats.beta.ppf(ALPHA / 2, hits, RUNS - hits + 1)
    above = scipy.stats.beta.ppf(1 - ALPHA / 2, hits + 1, RUNS - hits)
    return below, above


def mu_lower_bound(statistics):
    """A bound on mu from the share of runs on either side above zero."""
    found, false = (int(np.sum(s > 0)) for s in statistics)
    normal = scipy.stats.norm
    return normal.ppf(rate_bounds(found)[0]) - normal.ppf(rate_bounds(false)[1])


def two_sides(run, *, seed):
    """The statistic of many runs with the person's record at +1 and at -1."""

    @jax.jit
    def side(sign, key):
        return jax.vmap(lambda k: run(sign, k))(jax.random.split(key, RUNS))

    keys = jax.random.split(jax.random.key(seed))
    signs = jnp.asarray([1.0, -1.0])
    return [np.asarray(side(*both)) for both in zip(signs, keys, strict=True)]


def one_person(sign, size):
    # Far beyond the clip norm; everyone else contributes nothing.
    return jnp.zeros(size).at[0].set(100.0 * sign)


LINEAR = dpb.FiniteSum(lambda w, z: w * z)


def noisy_gd(scale, neighbours=REPLACE):
    solver = dpb.NoisyGD(4, 0.7, step_size=0.1, noise=dpb.Gaussian(None, neighbours))
    return solver.with_noise(scale).planned(RECORDS)


@functools.cache
def gradient_sums(scale, neighbours=REPLACE):
    solver = noisy_gd(scale, neighbours)

    def run(sign, key):
        data = one_person(sign, RECORDS)
        # The sum of all released gradients: the exact likelihood ratio.
        return -dpb.solve(LINEAR, solver, data, jnp.zeros(()), key=key).value

    return two_sides(run, seed=1)


def claimed_mu(problem, solver, sizes):
    events = solver.ledger(problem, sizes).events().values()
    return max(accounting.gaussian_mu(event) for event in events)


def test_noisy_gradient_descent_leaks_what_its_ledger_claims():
    claim = claimed_mu(LINEAR, noisy_gd(1.0), RECORDS)
    assert claim == pytest.approx(1.0)
    bound = mu_lower_bound(gradient_sums(1.0))
    assert 0.9 * claim <= bound <= claim


@pytest.mark.parametrize("factor", [0.9, 0.707])
def test_the_audit_rejects_too_little_noise(factor):
    assert mu_lower_bound(gradient_sums(factor)) > 1.0


def test_the_audit_rejects_an_add_or_remove_multiplier_on_replaced_records():
    solver = noisy_gd(1.0, ADD_OR_REMOVE)
    claim = claimed_mu(LINEAR, solver, RECORDS)
    assert claim == pytest.approx(1.0)
    assert mu_lower_bound(gradient_sums(1.0, ADD_OR_REMOVE)) > claim


BILEVEL = dpb.BilevelProblem(
    upper=lambda x, y, z: z * (x + y),
    lower=lambda x, y, z: z * y,
    x_in_records=("upper",),
)


def penalty(scale, people="overlapping"):
    sizes = dpb.Sizes(RECORDS, LOWER_RECORDS, people)
    inner = dpb.NoisyGD(2, 0.5, step_size=0.1)
    solver = dpb.PenaltyBilevel(
        2, 4.0, inner, upper_clip_norm=1.5, step_size=0.1, answer="last"
    )
    return solver.with_noise(scale).planned(sizes)


def weights(solver):
    """Shift over variance of each release: the likelihood ratio's coefficients."""
    releases = solver.ledger(BILEVEL, solver.sizes).releases
    return [2 * r.contribution / r.noise_std**2 for r in releases]


@functools.cache
def all_release_sums(scale):
    solver = penalty(scale)
    lower, penalized, outer = weights(solver)

    def run(sign, key):
        data = dpb.Levels(one_person(sign, RECORDS), one_person(sign, LOWER_RECORDS))
        state = solver.init(BILEVEL, (jnp.zeros(()), jnp.zeros(())))
        keys = jax.random.split(key, solver.num_steps)
        state, _ = advance(BILEVEL, solver, data, state, keys)
        # All functions are linear: every variable is a sum of released gradients.
        return -(lower * state.y + penalized * state.z + outer * state.x)

    return two_sides(run, seed=2)


def test_all_releases_of_the_penalty_method_leak_what_its_ledger_claims():
    solver = penalty(1.0)
    claim = claimed_mu(BILEVEL, solver, solver.sizes)
    assert claim == pytest.approx(1.0)
    bound = mu_lower_bound(all_release_sums(1.0))
    assert 0.9 * claim <= bound <= claim


def test_the_audit_rejects_a_penalty_method_with_too_little_noise():
    assert mu_lower_bound(all_release_sums(0.9)) > 1.0


def test_the_audit_rejects_overlapping_people_accounted_as_disjoint():
    solver = penalty(1.0, "disjoint")
    claim = claimed_mu(BILEVEL, solver, solver.sizes)
    assert mu_lower_bound(all_release_sums(1.0)) > claim


# Sampling, relation, what everyone else contributes, pre-registered thresholds.
SAMPLED = {
    "poisson": (dpb.Poisson(0.2), ADD_OR_REMOVE, 0.0, (0.1, 0.25, 0.4)),
    "subset": (dpb.FixedSize(2), REPLACE, -1.0, (-0.8, -0.5, -0.2)),
}
MULTIPLIER = 0.5


@functools.cache
def sampled_sums(name):
    sampling, neighbours, others, _ = SAMPLED[name]
    noise = dpb.Gaussian(MULTIPLIER, neighbours)
    solver = dpb.NoisyGD(1, 1.0, step_size=1.0, sampling=sampling, noise=noise)
    solver = solver.planned(RECORDS)

    def run(sign, key):
        data = jnp.full(RECORDS, others).at[0].set(jnp.where(sign > 0, 1.0, others))
        return -dpb.solve(LINEAR, solver, data, jnp.zeros(()), key=key).value

    return two_sides(run, seed=3)


def leaks_more(name, sampling):
    """Whether some delta is certainly above the one that the sampling claims."""
    _, neighbours, _, thresholds = SAMPLED[name]
    event = sampling.event(MULTIPLIER, neighbours, RECORDS)
    profile = accounting.privacy_loss(event, neighbours, 1e-3)
    for threshold in thresholds:
        found, false = (int(np.sum(s > threshold)) for s in sampled_sums(name))
        for epsilon in (0.2, 0.5, 1.0):
            seen = rate_bounds(found)[0] - math.exp(epsilon) * rate_bounds(false)[1]
            if seen > profile.get_delta_for_epsilon(epsilon):
                return True
    return False


@pytest.mark.parametrize(
    ("name", "smaller"), [("poisson", dpb.Poisson(0.17)), ("subset", dpb.FixedSize(1))]
)
def test_sampled_batches_leak_no_more_than_their_event_claims(name, smaller):
    assert not leaks_more(name, SAMPLED[name][0])
    # The control: the event of a smaller batch is rejected.
    assert leaks_more(name, smaller)


def test_the_audit_rejects_subsets_accounted_as_poisson():
    # The others tell whether the batch had room for the person.
    assert leaks_more("subset", dpb.Poisson(0.2))
