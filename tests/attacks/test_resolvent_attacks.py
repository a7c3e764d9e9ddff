"""What was tried against the seal of resolvents and against disjoint batches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpbilevel as dpb
from dpbilevel.games.proximal_point import ResolventQuery
from dpbilevel.games.resolvents import Resolvent

BUDGET = dpb.PrivacyBudget(1.0, 1e-6)
N = 1000


def shift(w, record):
    return record + 0 * w


def inequality(public=None, **fields):
    fields = {"w_set": dpb.sets.Ball(1.0), "lipschitz": 0.0, "bound": 1.0} | fields
    return dpb.games.VariationalInequality(shift, public, **fields)


def planned(problem, **fields):
    fields = {"clip_norm": 1.0, "strength": 2.0, "inner_steps": 1} | fields
    return dpb.calibrate(
        problem, dpb.games.InexactProximalPoint(1, **fields), BUDGET, sizes=N
    )


def read(resolvent, records, centre, size=N):
    query = ResolventQuery(resolvent, size, dpb.FullBatch())
    return query.read(centre, records, precision="float", key=jax.random.key(0))


def sealed(plan, problem, records, centre):
    return read(plan.solver.resolvent(problem, N), records, centre)


@pytest.mark.slow
def test_a_public_term_beyond_its_declared_bound_does_not_spoil_rounding():
    """Along (1, ..., 1) a simplex projects it away, but not what it rounded."""
    problem = inequality(
        lambda w: jnp.full_like(w, 2.0**23), w_set=dpb.sets.Simplex(), public_bound=1.0
    )
    plan = planned(problem, dimension=2)
    records = jnp.zeros((N, 2)).at[:, 0].set(0.5002)
    neighbour = records.at[0, 0].set(-0.8)
    seals = [sealed(plan, problem, r, jnp.full(2, 0.5)) for r in (records, neighbour)]
    moved = float(jnp.linalg.norm(seals[0].raw - seals[1].raw))
    assert moved <= float(seals[0].sensitivity(dpb.Neighbours.REPLACE_ONE))
    # The control: in these units it rounds by more than that.
    coarse = [r.mean(0)[0] + jnp.float32(2.0**23) for r in (records, neighbour)]
    assert abs(float(coarse[0] - coarse[1])) != pytest.approx(1.3 / N, rel=0.5)


class Jumping(dpb.sets.Ball):
    """A set whose projection is not nonexpansive."""

    def project(self, w):
        return jnp.sign(w) * self.radius


@pytest.mark.parametrize(
    "w_set", [Jumping(1.0), dpb.sets.Product((Jumping(1.0), dpb.sets.Simplex()))]
)
def test_only_the_librarys_own_projections_are_trusted(w_set):
    with pytest.raises(ValueError, match="bounded Ball, Box or Simplex"):
        planned(inequality(w_set=w_set))


def test_a_batch_of_other_numbers_than_the_seal_is_refused():
    problem = inequality()
    resolvent = Resolvent(problem, 1.0, 1.0, 1, 1, N, float(N))
    for rows, denominator in ((1, 1), (N + 1, N)):
        with pytest.raises(ValueError, match="planned for at most 1000 rows"):
            read(resolvent, jnp.zeros((rows, 1)), jnp.zeros(1), denominator)


def test_extreme_units_keep_a_sensitivity_or_are_refused():
    problem = inequality(bound=5e29)
    resolvent = Resolvent(problem, 5e29, 1e36, 1, 1, N, float(N))
    contribution = jax.jit(
        lambda strength: Resolvent(
            problem, jnp.float32(5e29), strength, 1, 1, N, float(N)
        ).contribution(jnp.float32, "float")
    )(jnp.float32(1e36))
    exact = resolvent.contribution(jnp.float32, "float")
    np.testing.assert_allclose(contribution, exact, rtol=1e-5)
    assert exact >= 5e29 / 1e36 / N
    with pytest.raises(ValueError, match="Change the units"):
        planned(inequality(w_set=dpb.sets.Ball(1e19)))


def test_records_that_overflow_in_the_dtype_of_the_start_contribute_nothing(x64):
    problem = inequality()
    plan = Resolvent(problem, 1.0, 2.0, 3, 1, N, float(N))
    centre = jnp.full(1, 0.25, jnp.float32)
    found = read(plan, jnp.zeros((N, 1)).at[0].set(1e300), centre).raw
    np.testing.assert_array_equal(found, centre)


def test_a_plan_in_64_bits_is_not_run_in_32(x64):
    problem = inequality()
    plan = planned(problem, dimension=1)
    with pytest.raises(ValueError, match="planned for float64"):
        dpb.solve(
            problem,
            plan.solver,
            jnp.zeros((N, 1), jnp.float32),
            jnp.zeros(1, jnp.float32),
            key=jax.random.key(0),
        )


@pytest.mark.parametrize(
    ("convex", "w"),
    [
        (dpb.sets.Box(jnp.zeros(1), jnp.ones(1)), jnp.zeros(50)),
        (
            dpb.sets.Box(jnp.zeros(3), jnp.ones(3)),
            {"a": jnp.zeros(3), "b": jnp.zeros(3)},
        ),
        (dpb.sets.Ball(1.0, center=jnp.full(1, 3.0)), jnp.zeros(50)),
        (dpb.sets.Ball(1.0, center=3.0), jnp.zeros(50)),
    ],
)
def test_sets_do_not_stretch_over_more_entries_than_they_measure(convex, w):
    for method in (convex.project, convex.contains):
        with pytest.raises(ValueError, match="shaped like the points"):
            method(w)


def test_that_places_depend_on_no_value_is_listed_for_single_passes():
    solver = dpb.games.NoisyExtragradient(
        50, 1.0, 0.1, sampling=dpb.privacy.SinglePass(10)
    )
    report = dpb.calibrate(inequality(), solver, BUDGET, sizes=N).report
    assert sum("sorted by a private column" in text for text in report.assumptions) == 1
    full = dpb.games.NoisyExtragradient(50, 1.0, 0.1)
    report = dpb.calibrate(inequality(), full, BUDGET, sizes=N).report
    assert not any("sorted" in text for text in report.assumptions)
