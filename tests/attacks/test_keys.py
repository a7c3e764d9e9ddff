"""Keys: named domains, nothing used twice, all draws independent of each other."""

import ast
import collections
import dataclasses
import functools
import math
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.errors import KeyReuseError

import dpbilevel as dpb
from dpbilevel.applications import PenaltyTuning, SourceWeighting
from dpbilevel.bilevel import penalty
from dpbilevel.core import loop as base
from dpbilevel.games.problem import AbstractVariationalInequality
from dpbilevel.onelevel import noisy_gd
from dpbilevel.privacy import keys, releases
from dpbilevel.privacy.exact.normal import standard_normal
from dpbilevel.privacy.keys import derive, step_keys
from dpbilevel.privacy.mechanisms import Gaussian
from dpbilevel.privacy.per_example.clipping import Bounded
from dpbilevel.privacy.queries import Query
from tests.cases import found, slow
from tests.problems import DECLARED

SIZE = 2048
LIMIT = 4.9 / SIZE**0.5
RECORDS = jnp.arange(SIZE, dtype=jnp.float32)
ZERO = jnp.zeros(SIZE)
GOLDEN = [[4024214441, 3993731503], [4025742662, 3357108397]]
# No record moves anything, so that a released value is its noise.
ONE_LEVEL = dpb.FiniteSum(lambda w, z: 0.0 * (jnp.sum(w) + z))
TWO_LEVELS = dpb.BilevelProblem(
    upper=lambda x, y, z: 0.0 * (jnp.sum(x) + jnp.sum(y) + z),
    lower=lambda x, y, z: 0.0 * (jnp.sum(x) + jnp.sum(y) + z),
    lower_public=lambda x, y: 0.5 * jnp.sum(y * y),
    # Nothing moves, so any bounds hold; a wide spread leaves room for rounding.
    constants=dpb.bilevel.SecondOrderConstants(
        **(
            dict.fromkeys(DECLARED, 0.0)
            | {"strong_convexity": 1.0, "lower_yy": 1.0, "solution_radius": 1.0}
            | {"upper_x": 1.0, "upper_x_spread": 1e3, "per_record": True}
        )
    ),
)

# The same without x in the lower level.
APART = dataclasses.replace(
    TWO_LEVELS, lower=lambda x, y, z: TWO_LEVELS.lower(ZERO, y, z), x_in_records="upper"
)

# The same of one record of no known source, whose models have `SIZE` coordinates each.


def no_loss(y, z):
    return 0.0 * (jnp.sum(y) + z)


SOURCES = dpb.source_weighting(no_loss, SIZE, source=lambda z: -jnp.ones_like(z, int))
SCORING = dpb.applications.ScoringModel(no_loss, ZERO)

TUNING = dpb.penalty_tuning(no_loss, np.zeros(SIZE, int))

# So small a set that a released point is its noise.
INEQUALITY = dpb.games.VariationalInequality(
    lambda w, z: 0.0 * (w + z), w_set=dpb.sets.Ball(1e-3), lipschitz=0.0, bound=1.0
)

PAYOFF = dpb.games.BilinearGame(lambda z: jnp.zeros((1, SIZE)) * z)

# Two groups, nobody in the second one.
GROUPS = dpb.games.group_fair(
    lambda x, z: 0.0 * (jnp.sum(x) + z),
    (0.5, 0.5),
    radius=1.0,
    group=lambda z: jnp.zeros_like(z, int),
)

# Every solver that adds noise vectors, at once those that others are made of; the
# contract of all solvers compares one run of each with its ledger. A draw adds no
# noise, a noisy loss is one number, see test_baselines; for inferred gradients so many
# coordinates are too many, see test_gibo; correlated noise is meant to be, see
# test_correlated. Clipped hypergradients of so many need float64; they are released as
# those that are not clipped.
SOLVERS = {
    name: case
    for name, case in found("CONTRACT").items()
    if case.package not in ("draws", "search")
    and name != "clipped_upper"
    and not name.startswith("correlated")
}
AT_ONCE = ("noisy_gd_adam", "penalty_both_levels")
RUNS = [(name, True) for name in AT_ONCE]
RUNS += slow(*((name, True) for name in SOLVERS if name not in AT_ONCE))
# One for each scheme of sampling also under the generator that is not the default.
UNSPLIT = "noisy_gd_adam", "penalty_poisson", "refitted"
RUNS += slow(*((name, False) for name in UNSPLIT))


def words(key):
    return np.asarray(jax.random.key_data(key)).tolist()


def wide(name):
    """The solver of the case on a problem with `SIZE` coordinates and records."""
    solver, people = SOLVERS[name].solver, SOLVERS[name].people
    if name == "proximal_point":
        solver = dataclasses.replace(
            solver, dimension=SIZE, sampling=dpb.privacy.SinglePass(3)
        )
    if name == "noisy_payoff":
        start = jnp.ones(1), jnp.full(SIZE, 1 / SIZE)
        return PAYOFF, solver.with_noise(1.0).with_sizes(SIZE), RECORDS, start
    if solver.problem_type is AbstractVariationalInequality:
        return INEQUALITY, solver.with_noise(1.0).with_sizes(SIZE), RECORDS, ZERO
    if name == "group_descent":
        start = dpb.games.group_start(GROUPS, ZERO, GROUPS.shares)
        return GROUPS, solver.with_noise(1.0).with_sizes(SIZE), RECORDS, start
    if people is None:
        return ONE_LEVEL, solver.with_noise(1.0).with_sizes(SIZE), RECORDS, ZERO
    if solver.problem_type is SourceWeighting:
        if getattr(solver, "scoring", None) is not None:
            solver = dataclasses.replace(solver, scoring=SCORING)
        sizes, records = dpb.Sizes(1, 1, people), dpb.Levels(ZERO[:1], ZERO[:1] + 0)
        return SOURCES, solver.with_noise(1.0).with_sizes(sizes), records, (ZERO, ZERO)
    shared = people == "shared"
    if solver.problem_type is PenaltyTuning:
        sizes = dpb.Sizes(SIZE, SIZE, people)
        data = dpb.Levels(RECORDS, RECORDS + 0)
        x0 = jnp.full(1, -4.0)
        return TUNING, solver.with_noise(1.0).with_sizes(sizes), data, (x0, ZERO)
    data = dpb.Levels.shared(RECORDS) if shared else dpb.Levels(RECORDS, RECORDS + 0)
    sizes = dpb.Sizes(SIZE, SIZE, people)
    problem = APART if isinstance(solver, dpb.bilevel.LowerFirst) else TWO_LEVELS
    last = getattr(solver, "then", solver)
    few = isinstance(last, dpb.applications.Recalibration)
    # A constant for each of so many scores that their curvature is recorded.
    y0 = jnp.zeros((1, math.isqrt(SIZE))) if few else ZERO
    return problem, solver.with_noise(1.0).with_sizes(sizes), data, (ZERO, y0)


def draws(problem, solver, data, w0):
    """Every noise vector (its first coordinates) and batch of one run, standardized."""
    noises, batches = [], []
    release, samplings = Gaussian.release, (dpb.Poisson, dpb.FixedSize)

    def recorded_release(self, bounded, *, key):
        released = release(self, bounded, key=key)
        for block in jax.tree.leaves(released):
            if block.size >= SIZE:  # not that of a clip norm, or of groups
                jax.debug.callback(lambda v: noises.append(np.ravel(v)[:SIZE]), block)
        return released

    def recorded(draw):
        def recorded_draw(self, records, size, *, key, index=None):
            batch = draw(self, records, size, key=key, index=index)
            mask = jnp.ones(()) if batch.mask is None else batch.mask.astype("f4")
            chosen = ZERO.at[batch.records.astype(jnp.int32)].add(mask)
            jax.debug.callback(lambda v: batches.append(np.ravel(v)), chosen)
            return batch

        return recorded_draw

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Gaussian, "release", recorded_release)
        for kind in samplings:
            patch.setattr(kind, "draw", recorded(kind.draw))
        # Not jax.jit(dpb.solve), which may be compiled already, without the records.
        run = jax.jit(lambda key: dpb.solve(problem, solver, data, w0, key=key).value)
        run(jax.random.key(0))
        jax.effects_barrier()
    return [[(v - v.mean()) / v.std() for v in kind] for kind in (noises, batches)]


def worst_correlation(streams):
    table = np.abs(np.stack(streams) @ np.stack(streams).T) / SIZE
    return float(np.max(table - np.diag(np.diag(table))))


def worst_of(name):
    noises, batches = draws(*wide(name))
    return worst_correlation(noises + batches)


@pytest.mark.parametrize(("name", "partitionable"), RUNS)
def test_all_noise_and_all_batches_of_a_run_are_uncorrelated(name, partitionable):
    problem, solver, data, w0 = wide(name)
    with jax.threefry_partitionable(partitionable):
        noises, batches = draws(problem, solver, data, w0)
    made = solver.ledger(problem, solver.sizes).releases
    joint = any("directions" in release.name for release in made)
    blocks = (3 if problem.x_in_records else 2) if joint else 1
    numbers = solver.dimensions(w0)
    recorded = [release for release in made if numbers.get(release.name, SIZE) >= SIZE]
    assert len(noises) == blocks * sum(release.count for release in recorded)
    assert worst_correlation(noises + batches) < LIMIT


def same_key_each_step(key, count):
    return key, jnp.stack([key] * count)


def same_key_for_both(key, *domains):
    return [key] * len(domains)


def one_key_for_all_lanes(solver, problem, data, w, *, key):
    bounded = Bounded(jnp.zeros((2, SIZE)), 1.0)
    noise = dataclasses.replace(solver.release_noise, precision="float")
    release = functools.partial(noise.release, key=key)
    lanes = Bounded(bounded.raw, jnp.ones(2))
    return jax.vmap(release)(lanes)[0]


@pytest.mark.reuses_keys
@pytest.mark.parametrize(
    ("place", "mutant"),
    [
        (base, same_key_each_step),
        (noisy_gd.AbstractGradientSolver, one_key_for_all_lanes),
    ],
)
def test_a_solver_that_uses_a_key_twice_is_caught(monkeypatch, place, mutant):
    replaced = {
        same_key_each_step: "step_keys",
        one_key_for_all_lanes: "noisy_gradient",
    }
    monkeypatch.setattr(place, replaced[mutant], mutant)
    assert worst_of("noisy_gd_poisson") > LIMIT


def test_one_key_for_a_batch_and_its_noise_is_caught(monkeypatch):
    monkeypatch.setattr(releases, "derive", same_key_for_both)
    with jax.debug_key_reuse(True), pytest.raises(KeyReuseError):
        draws(*wide("noisy_gd_poisson"))


@pytest.mark.parametrize("name", ["penalty_poisson", "refitted"])
def test_key_reuse_checks_see_a_key_derived_from_twice(name, monkeypatch):
    def twice(key, *domains):
        return [derive(key, name)[0] for name in domains]

    monkeypatch.setattr(penalty, "derive", twice)
    with jax.debug_key_reuse(True), pytest.raises(KeyReuseError):
        draws(*wide(name))


def total(keys):
    words = (jax.random.key_data(v) for v in jax.tree.leaves(keys))
    return sum(jnp.sum(v.astype(jnp.float32)) for v in words)


def test_a_key_is_neither_drawn_from_nor_derived_from_twice():
    def derived_then_drawn(key):
        return derive(key, "noise"), jax.random.bits(key)

    def derived_twice(key):
        return derive(key, "noise"), derive(key, "sampling")

    def stepped_twice(key):
        return step_keys(key, 2), step_keys(key, 2)

    with jax.debug_key_reuse(True):
        for misuse in (derived_then_drawn, derived_twice, stepped_twice):
            with pytest.raises(KeyReuseError):
                jax.jit(misuse)(jax.random.key(0))
        # Where nothing reads a key, JAX may remove its use before it is checked.
        rematerialized = jax.checkpoint(lambda x, key: x**2 * total(derived_twice(key)))
        with pytest.raises(KeyReuseError):
            jax.jit(jax.grad(rematerialized))(1.0, jax.random.key(0))
        derive(jax.random.key(0), "noise", "sampling")


# Those that compile soonest; the others follow in the slow suite.
QUICK = "threefry2x32", "philox4x32"


@pytest.mark.reuses_keys
@pytest.mark.parametrize(
    "impl",
    [
        g if g in QUICK else pytest.param(g, marks=pytest.mark.slow)
        for g in keys.GENERATORS
    ],
)
def test_derived_keys_are_typed_and_differ_by_domain_and_from_splits(impl):
    names = keys.NAMES
    key = jax.random.key(1, impl=impl)
    derived = derive(key, *names)
    assert jax.random.key_impl(derived[0]) == impl
    others = [key, *jax.random.split(key, 100), *derive(derived[0], *names)]
    seen = [words(k) for k in (*derived, *others)]
    assert len({tuple(w) for w in seen}) == len(seen)


def test_a_domain_gives_the_same_key_alone_and_with_others():
    key = jax.random.key(2)
    alone = derive(jax.random.key(2), "noise")[0]
    assert words(derive(key, "sampling", "noise")[1]) == words(alone)


@pytest.mark.parametrize("partitionable", [False, True])
def test_derived_keys_do_not_change_between_versions(partitionable):
    with jax.threefry_partitionable(partitionable):
        derived = derive(jax.random.key(3), "next", "noise")
        key, _ = step_keys(jax.random.key(3), 1)
    assert words(derived) == GOLDEN
    assert words(key) == GOLDEN[0]


class Keyed(dpb.FullBatch):
    """Shows the key that it is given."""

    keys: list = eqx.field(static=True)

    def draw(self, records, size, *, key, index=None):
        self.keys.append(key)
        return super().draw(records, size, key=key, index=index)


@pytest.mark.parametrize("other", [dpb.FullBatch(), *slow(dpb.Poisson(0.5))])
def test_batches_that_need_no_key_get_none(other):
    keyed = Keyed([])
    queries = Query("upper", 8, 1.0, keyed), Query("lower", 8, 1.0, other)
    release = releases.Release(
        "sum", 1, queries, dpb.privacy.Gaussian(1.0, precision="float")
    )
    value = {"upper": lambda z: z, "lower": lambda z: z}
    data = dpb.Levels(jnp.ones((8, 2)), jnp.ones((8, 2)))
    apply = jax.jit(lambda data, key: release.apply(value, data, key=key))
    assert apply(data, jax.random.key(0)).shape == (2,)
    assert keyed.keys == [None]


@pytest.mark.parametrize(
    ("domains", "said"),
    [
        (("nosie",), "'nosie' is not in NAMES of dpbilevel/privacy/keys.py"),
        (("noise", "noise"), "give different names, got"),
        (("noise", ""), "'' is not in NAMES"),
    ],
)
def test_a_domain_that_is_unknown_or_named_twice_is_refused(domains, said):
    with pytest.raises(ValueError, match=f"derive: {said}"):
        derive(jax.random.key(0), *domains)


LIBRARY = Path(dpb.__file__).parent


def faults(names):
    """The names that are listed twice, or whose numbers are equal or counters."""
    numbers = [keys.number_of(name) for name in names]
    counted = collections.Counter(numbers)
    pairs = zip(names, numbers, strict=True)
    return [name for name, n in pairs if counted[n] > 1 or n < 2**31]


def strings(tree):
    """The constants of a program."""
    return {v.value for v in ast.walk(tree) if isinstance(v, ast.Constant)}


def derived(text):
    """The names that a module derives keys for, where it writes them out."""
    calls = (v for v in ast.walk(ast.parse(text)) if isinstance(v, ast.Call))
    named = (v for v in calls if getattr(v.func, "id", None) == "derive")
    return {
        name.value
        for call in named
        for name in call.args[1:]
        if isinstance(name, ast.Constant)
    }


def test_every_name_is_listed_once_and_has_a_number_of_its_own():
    assert faults(keys.NAMES) == []


def test_a_planted_duplicate_and_a_planted_collision_are_seen(monkeypatch):
    assert faults([*keys.NAMES, "noise"]) == ["noise", "noise"]
    numbers = {name: keys.number_of(name) for name in keys.NAMES}
    numbers["planted"], numbers["counter"] = numbers["upper"], 3
    monkeypatch.setattr(keys, "number_of", numbers.get)
    assert faults([*numbers]) == ["upper", "planted", "counter"]


def test_the_listed_names_are_those_that_keys_are_derived_for():
    texts = {
        path: path.read_text()
        for path in LIBRARY.rglob("*.py")
        if path != Path(keys.__file__)
    }
    written = set().union(*map(derived, texts.values()))
    assert {"noise", "proposal", "usability"} <= written <= set(keys.NAMES)
    used = set().union(*(strings(ast.parse(text)) for text in texts.values()))
    assert set(keys.NAMES) - {"next", "step"} <= used
    assert derived('derive(key, "planted", "noise")') == {"planted", "noise"}


def test_steps_in_chunks_have_the_keys_of_steps_in_one_piece():
    last, whole = step_keys(jax.random.key(4), 7)
    key, first = step_keys(jax.random.key(4), 3)
    key, rest = step_keys(key, 4)
    assert words(key) == words(last)
    assert words(first) + words(rest) == words(whole)
    chain = [jax.random.key(4)]
    for _ in range(7):
        chain.append(step_keys(chain[-1], 1)[0])
    seen = [tuple(w) for w in (*words(whole), *map(words, chain))]
    assert len(set(seen)) == 15


def test_values_drawn_from_derived_keys_are_all_distinct():
    keys = derive(jax.random.key(5), "upper", "lower", "noise", "sampling")
    draw = jax.jit(lambda key: standard_normal(jnp.zeros(50_000), key=key))
    values = list(map(draw, keys))
    assert len(np.unique(np.stack(values))) > 0.97 * 200_000  # float32 ties only
