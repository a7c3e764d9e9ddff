"""Certified queries: what is read is what the ledger lists."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import dpbilevel as dpb
from dpbilevel.privacy.queries import AbstractCertifiedQuery
from dpbilevel.privacy.releases import CertifiedRelease
from tests.bilevel.test_implicit import implicit
from tests.cases import slow
from tests.games.saddle_zoo import N, example, point
from tests.problems import EXACT, LEVELS

TUNING = dpb.linear_tuning(dpb.Logistic(), jnp.asarray([0, 0, 1, 1]), bounds=(0.0, 1.0))


def hypergradient(problem, data, point, people, precision):
    sizes = problem.sizes_of(data, people)
    solver = implicit().with_noise(1.0).with_precision(precision)
    return solver.release(problem, sizes), data, point


def resolvent(precision):
    made = example("strong")
    solver = dpb.games.InexactProximalPoint(2, 2.0, 20.0, 3, dimension=5)
    solver = solver.with_noise(1.0).with_precision(precision)
    return solver.release(made.problem, N), made.data, point("strong")


CASES = {
    "declared": lambda p: hypergradient(
        EXACT.problem, EXACT.data, EXACT.w0, "overlapping", p
    ),
    "disjoint": lambda p: hypergradient(
        EXACT.problem, EXACT.data, EXACT.w0, "disjoint", p
    ),
    "at x": lambda p: hypergradient(
        TUNING, LEVELS, (jnp.asarray([0.2, 0.5]), jnp.zeros(4)), "disjoint", p
    ),
    "resolvent": resolvent,
}


@pytest.mark.parametrize(
    "precision", [pytest.param("float", marks=pytest.mark.slow), "grid"]
)
@pytest.mark.parametrize("name", ["resolvent", "disjoint", *slow("declared", "at x")])
def test_no_read_is_sealed_with_more_than_its_release_lists(name, precision):
    release, data, start = CASES[name](precision)
    read = jax.jit(lambda start, data, key: release.read(start, data, key=key))
    sealed = read(start, data, jax.random.key(0))
    # Rounding to the grid and of the listed number itself, within the noise's margin.
    assert float(sealed.contribution) <= release.contribution * (1 + 2.0**-20)
    assert sealed.basis is release.basis


def test_what_a_certified_release_costs_cannot_be_given():
    (release, _, _) = CASES["resolvent"]("float")
    (query,) = release.queries
    half = dataclasses.replace(query, clip_norm=query.clip_norm / 2)
    with pytest.raises((TypeError, ValueError), match="queries"):
        dataclasses.replace(release, queries=(half,))
    again = dataclasses.replace(release, count=7)
    assert again.queries == release.queries


@dataclasses.dataclass(frozen=True)
class Overstated(AbstractCertifiedQuery):
    """Says that clipping enforces what rests on constants."""

    query: AbstractCertifiedQuery

    def costs(self, precision):
        return self.query.costs(precision)._replace(basis=dpb.privacy.Basis.CLIPPED)

    def read(self, point, data, **options):
        return self.query.read(point, data, **options)


def test_a_read_that_rests_on_less_than_is_charged_is_refused():
    release, data, start = CASES["declared"]("float")
    wrong = CertifiedRelease("x", 1, release.mechanism, query=Overstated(release.query))

    def apply(made):
        return jax.eval_shape(made.apply, start, data, key=jax.random.key(0))

    with pytest.raises(ValueError, match="charged as"):
        apply(wrong)
    apply(release)


def test_more_records_than_planned_are_refused():
    sizes = dpb.Sizes(20, 20, "overlapping")
    release = implicit().with_noise(1.0).release(EXACT.problem, sizes)
    with pytest.raises(ValueError, match="40 lower records exceed"):
        release.read(EXACT.w0, EXACT.data, key=jax.random.key(0))
