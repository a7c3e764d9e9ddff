"""Scores made into potentials: scaled, and regularized."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PyTree

from ..._fields import Number
from .base import AbstractPotential, AbstractSumPotential


def scaled(
    score: AbstractPotential, rate: Number, regularizer: Number
) -> AbstractPotential:
    r"""$U(x) = k (\Phi(x) + \frac{\mu}{2} \|x\|^2)$.

    Args:
        score: $\Phi$; as a sum of terms without a quadratic part of its own.
        rate: $k$.
        regularizer: $\mu \ge 0$.

    Returns:
        A potential that is a sum of terms where the score is one.
    """
    if isinstance(score, AbstractSumPotential):
        return _ScaledSum(score, rate, rate * regularizer, score.num_terms)
    return _Scaled(score, rate, rate * regularizer)


class _Scaled(AbstractPotential):
    score: AbstractPotential
    rate: Number
    quadratic: Number

    def __call__(self, x: PyTree) -> Float[Array, ""]:
        value = self.score(x)
        return _like(self.rate, value) * value + _square(self.quadratic, x)

    def many(self, xs: PyTree) -> Float[Array, " m"]:
        values = self.score.many(xs)
        squares = jax.vmap(lambda x: _square(self.quadratic, x))(xs)
        return _like(self.rate, values) * values + squares.astype(values.dtype)

    def value_and_gradient(self, x: PyTree) -> tuple[Float[Array, ""], PyTree]:
        value, gradient = self.score.value_and_gradient(x)
        gradient = jax.tree.map(
            lambda g, v: _like(self.rate, g) * g + _like(self.quadratic, v) * v,
            gradient,
            x,
        )
        value = _like(self.rate, value) * value
        return value + _square(self.quadratic, x), gradient


class _ScaledSum(AbstractSumPotential):
    score: AbstractSumPotential
    rate: Number
    quadratic: Number
    num_terms: int = eqx.field(static=True)

    def __call__(self, x: PyTree) -> Float[Array, ""]:
        value = self.score(x)
        return _like(self.rate, value) * value + _square(self.quadratic, x)

    def term(self, index: Int[Array, ""], x: PyTree) -> Float[Array, ""]:
        value = self.score.term(index, x)
        return _like(self.rate, value) * value


def _square(coefficient: Number, x: PyTree) -> Float[Array, ""]:
    square = optax.tree.norm(x, squared=True)
    return _like(coefficient, square) / 2 * square


def _like(number: Number, value: Array) -> Array:
    return jnp.asarray(number, jnp.asarray(value).dtype)
