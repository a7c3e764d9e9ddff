"""Evaluation of jaxprs, equation by equation, by a function that computes each."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

Compute = Callable[[Any, list[Any]], Sequence[Any]]  # (equation, operands)


def evaluated(jaxpr: Any, args: Sequence[Any], compute: Compute) -> list[Any]:
    """Return a list of a jaxpr's results at `args`, constants first, by `compute`.

    The results of an equation are those of `compute`.
    """
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], args, strict=True))

    def read(v):
        return v.val if isinstance(v, core.Literal) else values[v]

    for eqn in jaxpr.eqns:
        results = compute(eqn, [read(v) for v in eqn.invars])
        values |= dict(zip(eqn.outvars, results, strict=True))
    return [read(v) for v in jaxpr.outvars]


def bound(eqn: Any, operands: Sequence[Any], params: dict[str, Any]) -> Sequence[Any]:
    """Apply an equation's primitive with these parameters; return a list of results."""
    results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(params))
    return results if eqn.primitive.multiple_results else [results]


def retraced(value: Any, compute: Compute) -> Any:
    """Return an equation's parameter with each jaxpr in it traced anew by `compute`."""
    if isinstance(value, tuple):
        items = [retraced(v, compute) for v in value]
        if all(a is b for a, b in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if hasattr(value, "consts"):  # a closed jaxpr
        inner, consts = value.jaxpr, value.consts
        return traced(lambda *v: evaluated(inner, [*consts, *v], compute), inner.invars)
    if isinstance(value, core.Jaxpr):
        return traced(lambda *v: evaluated(value, v, compute), value.invars).jaxpr
    return value


def traced(fun: Callable, variables: Sequence[Any]) -> Any:
    """Return the closed jaxpr of a function of arrays typed like these variables."""
    avals = [v.aval for v in variables]
    return jax.make_jaxpr(fun)(*(jax.ShapeDtypeStruct(v.shape, v.dtype) for v in avals))


def constants(jaxpr: Any) -> list[Any]:
    """Return a list of the arrays that a jaxpr, or one inside of it, closes over."""
    found = [*getattr(jaxpr, "consts", ())]
    for eqn in jaxpr.eqns:
        found += [v.val for v in eqn.invars if isinstance(v, core.Literal)]
        for inner in inner_jaxprs(eqn, closed=True):
            found += constants(inner)
    return found


def inner_jaxprs(eqn: Any, *, closed: bool = False) -> list[Any]:
    """Return a list of the jaxprs in an equation's parameters, open unless `closed`."""
    params = [*eqn.params.values()]
    values = jax.tree.leaves(params, is_leaf=lambda v: hasattr(v, "eqns"))
    found = [v for v in values if hasattr(v, "eqns")]
    return found if closed else [getattr(v, "jaxpr", v) for v in found]
