"""No program of the library waits for itself.

On CPUs jaxlib 0.10 hands a batch of factorizations to the pool of threads that it runs
in and waits for them. As many such calls at once as there are threads wait for ever.
"""

import itertools
import math

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

import dpbilevel as dpb
from dpbilevel.audit import debug
from tests.cases import found, slow
from tests.zoo import two_levels as zoo

WAITING = {"cholesky", "eigh", "geqrf", "householder_product", "lu", "svd"}
WAITING |= {"schur", "triangular_solve", "tridiagonal_solve"}
LOOPS = {"cond", "scan", "while"}
KEY = 0


def at_once(jaxpr):
    """Names of pairs of batched factorizations that do not wait for each other."""
    calls = []  # (name, the calls that must have ended before)
    _follow(jaxpr.jaxpr, [frozenset()] * len(jaxpr.jaxpr.invars), calls)
    pairs = itertools.combinations(enumerate(calls), 2)
    return [
        (first, second)
        for (i, (first, _)), (_, (second, done)) in pairs
        if i not in done
    ]


def _follow(jaxpr: Jaxpr, known, calls):
    """Appends the calls of a program; returns what its results wait for."""
    after = dict(zip(jaxpr.invars, known, strict=True))

    def waited(values):
        none = frozenset()
        return [none if isinstance(v, Literal) else after.get(v, none) for v in values]

    for eqn in jaxpr.eqns:
        inputs = waited(eqn.invars)
        done = frozenset().union(*inputs)
        inner = [
            getattr(v, "jaxpr", v)
            for v in itertools.chain.from_iterable(
                value if isinstance(value, tuple) else (value,)
                for value in eqn.params.values()
            )
            if isinstance(v, (ClosedJaxpr, Jaxpr))
        ]
        if eqn.primitive.name in WAITING and _batched(eqn):
            calls.append((eqn.primitive.name, done))
            done |= {len(calls) - 1}
        first = len(calls)
        inlined = eqn.primitive.name not in LOOPS and len(inner) == 1
        if inlined and len(inner[0].invars) == len(inputs):
            outputs = _follow(inner[0], inputs, calls)
        else:
            for body in inner:
                _follow(body, [done] * len(body.invars), calls)
            outputs = [done | set(range(first, len(calls)))] * len(eqn.outvars)
        after.update(zip(eqn.outvars, outputs, strict=True))
    return waited(jaxpr.outvars)


def _batched(eqn):
    return any(math.prod(v.aval.shape[:-2]) > 1 for v in eqn.invars)


def test_two_solves_that_do_not_need_each_other_are_seen():
    def apart(matrix, right):
        return jnp.linalg.cholesky(matrix), jnp.linalg.cholesky(2 * matrix) @ right

    def one_by_one(matrix, right):
        root = jnp.linalg.cholesky(matrix)
        return jax.lax.linalg.triangular_solve(root, right, left_side=True)

    many = jnp.stack([jnp.eye(3)] * 5)
    assert at_once(jax.make_jaxpr(jax.vmap(apart))(many, many))
    assert not at_once(jax.make_jaxpr(apart)(many[0], many[0]))
    assert not at_once(jax.make_jaxpr(jax.vmap(one_by_one))(many, many))


@pytest.mark.parametrize("name", ["noisy_ucb", *slow("gradient_informative")])
def test_many_runs_of_a_solver_never_wait_for_each_other(name):
    case = found("CONTRACT")[name]
    problem, data, w0 = case.problem, case.data, case.w0
    with jax.enable_x64(case.double):
        solver = case.solver.with_noise(1.0).with_sizes(case.sizes)
        solver = solver.with_counts(problem)

        def run(key):
            return dpb.solve(problem, solver, data, w0, key=key).value

        keys = jax.random.split(jax.random.key(KEY), 3)
        jaxpr = jax.make_jaxpr(jax.vmap(run))(keys)
    assert "cholesky" in str(jaxpr)
    assert not at_once(jaxpr)


@pytest.mark.slow
def test_the_search_for_violated_constants_never_waits_for_itself():
    rows = jnp.ones((2, 4, 3))
    problem = zoo.quadratic_bilevel(rows[0], rows[1], radius=1.0).problem
    points = (rows[0], rows[0]), (rows[1], rows[1])
    jaxpr = jax.make_jaxpr(lambda *at: debug._measure(problem, at))(*points, *points)
    assert "svd" in str(jaxpr)
    assert not at_once(jaxpr)
