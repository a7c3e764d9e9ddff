"""Scores made into potentials: times a rate, and regularized."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PyTree
from typing_extensions import override

from ..._checks import Number
from .base import AbstractPotential, AbstractSumPotential


def scaled_potential(
    score: AbstractPotential, rate: Number, regularizer: Number, center: PyTree = None
) -> AbstractPotential:
    r"""Return $U(x) = k (\Phi(x) + \frac{\mu}{2} \|x - c\|^2)$, with $\mu \ge 0$.

    The center $c$ is zero where it is omitted.

    A sum of terms where the score is one, without a quadratic part of its own.
    """
    if isinstance(score, AbstractSumPotential):
        return _ScaledSum(score, rate, rate * regularizer, center, score.num_terms)
    return _ScaledScore(score, rate, rate * regularizer, center)


class _Scaled(AbstractPotential):
    score: AbstractPotential
    rate: Number
    quadratic: Number
    center: PyTree

    def __call__(self, x: PyTree) -> Float[Array, ""]:
        return self._times_rate(self.score(x)) + self._square(x)

    @override
    def value_and_gradient(self, x: PyTree) -> tuple[Float[Array, ""], PyTree]:
        value, gradient = self.score.value_and_gradient(x)

        def whole(g, v):
            return self._times_rate(g) + _like(self.quadratic, v) * v

        total = self._times_rate(value) + self._square(x)
        return total, jax.tree.map(whole, gradient, self._offset(x))

    def _offset(self, x: PyTree) -> PyTree:
        return x if self.center is None else optax.tree.sub(x, self.center)

    def _square(self, x: PyTree) -> Array:
        square = optax.tree.norm(self._offset(x), squared=True)
        return _like(self.quadratic, square) / 2 * square

    def _times_rate(self, value: Array) -> Array:
        return _like(self.rate, value) * value


class _ScaledScore(_Scaled):
    @override
    def many(self, xs: PyTree) -> Float[Array, " m"]:
        values = self.score.many(xs)
        squares = jax.vmap(self._square)(xs)
        return self._times_rate(values) + squares.astype(values.dtype)


class _ScaledSum(_Scaled, AbstractSumPotential):
    score: AbstractSumPotential
    num_terms: int = eqx.field(static=True)

    @override
    def term(self, index: Int[Array, ""], x: PyTree) -> Float[Array, ""]:
        return self._times_rate(self.score.term(index, x))

    @override
    def middle(self, y: PyTree, step_size: Number) -> PyTree:
        if self.center is None:
            return super().middle(y, step_size)
        offset = super().middle(self._offset(y), step_size)
        return optax.tree.add(self.center, offset)


def _like(number: Number, value: Array) -> Array:
    return jnp.asarray(number, jnp.asarray(value).dtype)
