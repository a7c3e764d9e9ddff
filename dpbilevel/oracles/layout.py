"""Memory layout of the matrices of linear maps that are applied many times."""

from collections.abc import Callable

import jax
import jax.extend.core
from jaxtyping import Array, PyTree

_ROWS_BY_ROWS = (((0,), (0,)), ((), ()))
_PLAIN = (((1,), (0,)), ((), ()))


def lay_out(linear: Callable[[PyTree], PyTree], example: PyTree) -> Callable:
    r"""Return the linear map with a transposed copy of a matrix if that is faster.

    A Hessian product reads the features $A$ twice: for $A V$ and for $A^T U$. On a CPU
    the second takes about twice as long as with $A^T$ in memory. The copy is made here,
    once, and not by each product of a loop.

    Args:
        linear: A linear map that closes over its matrices.
        example: An argument of the map.

    Returns:
        Another function with the same values and derivatives; `linear` itself if
        no product of matrices would gain, or on another backend.
    """
    if jax.default_backend() != "cpu":
        return linear
    closed, shape = jax.make_jaxpr(linear, return_shape=True)(example)
    constants = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    transposed = {
        v: constants[v].T
        for eqn in closed.jaxpr.eqns
        for v in eqn.invars
        if _contracts_rows(eqn)
        and not isinstance(v, jax.extend.core.Literal)
        and v in constants
    }
    if not transposed:
        return linear

    def apply(v):
        leaves = _evaluated(closed.jaxpr, constants, transposed, jax.tree.leaves(v))
        return jax.tree.unflatten(jax.tree.structure(shape), leaves)

    return apply


def _contracts_rows(eqn) -> bool:
    """Tell whether an equation is $A^T B$ of two matrices."""
    return (
        eqn.primitive is jax.lax.dot_general_p
        and eqn.params["dimension_numbers"] == _ROWS_BY_ROWS
        and all(v.aval.ndim == 2 for v in eqn.invars)
    )


def _evaluated(jaxpr, constants: dict, transposed: dict, values: list) -> list[Array]:
    known = constants | dict(zip(jaxpr.invars, values, strict=True))

    def read(v):
        return v.val if isinstance(v, jax.extend.core.Literal) else known[v]

    for eqn in jaxpr.eqns:
        params = eqn.primitive.get_bind_params(eqn.params)
        # Older releases of jax return the functions of an equation beside the rest.
        functions, params = params if isinstance(params, tuple) else ((), params)
        arguments = list(map(read, eqn.invars))
        is_swapped = False
        if _contracts_rows(eqn):
            left, right = eqn.invars
            is_swapped = left not in transposed and right in transposed
            if is_swapped:  # $B^T A = (A^T B)^T$
                left, arguments = right, arguments[::-1]
            if left in transposed:
                arguments[0] = transposed[left]
                params = params | {"dimension_numbers": _PLAIN}
        results = eqn.primitive.bind(*functions, *arguments, **params)
        results = results if eqn.primitive.multiple_results else [results]
        results = [v.T for v in results] if is_swapped else results
        known.update(zip(eqn.outvars, results, strict=True))
    return list(map(read, jaxpr.outvars))
