"""Problem classes of saddle points and variational inequalities over records."""

import abc
from collections.abc import Callable
from typing import ClassVar as AbstractVar  # for type checkers

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from equinox import AbstractVar  # noqa: F811
from jaxtyping import Array, Float, PyTree
from typing_extensions import override

from .._checks import Checked, NonNegative, Positive
from ..core.problem import AbstractOneLevel
from ..onelevel.problem import check_scalar, check_set, check_start
from ..privacy.per_example.clipping import one_record
from ..sets import AbstractSet, Euclidean, Product

Scalar = Float[Array, ""]


class AbstractVariationalInequality(AbstractOneLevel, Checked):
    r"""Problem of $w^* \in W$ with $\langle F(w^*), w - w^* \rangle \ge 0$ for all $w$.

    $F(w) = \frac1n \sum_i F_i(w) + P(w)$ with one $F_i$ per record and a public $P$.

    Attributes:
        w_set: $W$.
        lipschitz: $L$, declared: a Lipschitz constant of every possible record's $F_i$
            on $W$, in $\ell_2$.
        bound: $M$, declared: at least $\|F_i(w)\|$ for every possible record on $W$.
        public_lipschitz: A Lipschitz constant of $P$; zero without a public term.
        public_bound: At least $\|P(w)\|$ on $W$; zero without a public term.
        largest_gap: At least the gap of every point of $W$, for every possible dataset;
            by default the diameter of $W$ times the sum of both bounds. Planners refuse
            a bound that is not below it.
    """

    w_set: AbstractVar[AbstractSet]
    public: AbstractVar[Callable | None]
    lipschitz: NonNegative | None = eqx.field(static=True, default=None, kw_only=True)
    bound: Positive | None = eqx.field(static=True, default=None, kw_only=True)
    public_lipschitz: NonNegative | None = eqx.field(
        static=True, default=None, kw_only=True
    )
    public_bound: NonNegative | None = eqx.field(
        static=True, default=None, kw_only=True
    )
    largest_gap: Positive | None = eqx.field(static=True, default=None, kw_only=True)

    @abc.abstractmethod
    def record_operator(self, w: PyTree, record: PyTree) -> PyTree:
        """Return one record's operator at `w`, a pytree like `w`."""

    @abc.abstractmethod
    def public_operator(self, w: PyTree) -> PyTree:
        """Return the public operator at `w`, no noise; zeros without a public term."""

    def saturated_operator(self, w: PyTree) -> Callable[[PyTree], PyTree]:
        """Return a function from record to operator at `w`, infinities made finite.

        An operator that overflows then counts in its direction, as a large one does. A
        clipped contribution is nonexpansive in the operator. The point is released, or
        a function of released values and of this batch that is sealed.
        """

        def saturated(value):
            largest = float(jnp.finfo(value.dtype).max)
            return jnp.clip(value, -largest, largest)

        def operator(record):
            return jax.tree.map(saturated, self.record_operator(w, record))

        return operator

    def constant(self, name: str) -> float:
        """Return the constant of this name as a float; raise if it is not declared.

        The public ones are zero without a public term.

        Raises:
            ValueError: It is not declared.
        """
        value = getattr(self, name)
        if value is None and name.startswith("public_") and self.public is None:
            return 0.0
        if value is None:
            raise ValueError(
                f"{type(self).__name__}: needs the constant {name}, which is not "
                f"declared. Give {name}=, valid on all of the set for every record."
            )
        return float(value)


class AbstractSaddleProblem(AbstractVariationalInequality):
    r"""Minimize in $x$ and maximize in $y$ a mean of payoffs over records.

    Attributes:
        fun: $f(x, y, z)$, the payoff of one record.
        x_set: $X$.
        y_set: $Y$.
    """

    fun: AbstractVar[Callable[[PyTree, PyTree, PyTree], Scalar]]
    x_set: AbstractVar[AbstractSet]
    y_set: AbstractVar[AbstractSet]

    @property
    def w_set(self) -> Product:
        r"""Product of both sets, $X \times Y$."""
        return Product((self.x_set, self.y_set))

    @override
    def record_operator(self, w, record) -> PyTree:
        return ascent(jax.grad(self.of_record(self.fun), (0, 1))(*w, record))

    @override
    def public_operator(self, w) -> PyTree:
        if self.public is None:
            return optax.tree.zeros_like(w)
        return ascent(jax.grad(self.public, (0, 1))(*w))

    def check(self, w0: PyTree, data: PyTree) -> None:
        """Refuse `w0` that is no pair, sets that do not fit, functions of no scalar."""
        if not isinstance(w0, tuple) or len(w0) != 2:
            raise ValueError(f"w0 must be a tuple (x, y), got {type(w0).__name__}.")
        self.sizes_of(data)
        check_start(w0)
        check_set("x_set", self.x_set, w0[0])
        check_set("y_set", self.y_set, w0[1])
        check_scalar("fun", self.of_record(self.fun), *w0, one_record(data))
        if self.public is not None:
            check_scalar("public", self.public, *w0, of="the public term")


class SaddleProblem(AbstractSaddleProblem):
    r"""Problem $\min_{x \in X} \max_{y \in Y} \frac1n \sum_i f(x, y; z_i) + r(x, y)$.

    As a variational inequality in $w = (x, y)$ on $X \times Y$, with

    $$F_i(x, y) = \bigl(\nabla_x f(x, y; z_i),\ -\nabla_y f(x, y; z_i)\bigr).$$

    Both variables are released under one budget. It is the bilevel problem whose lower
    level maximizes the upper level's objective; for other lower levels the operator
    means something else, so use `BilevelProblem` there.

    Args:
        fun: $f(x, y, z)$: one record's payoff, a scalar; convex in $x$ and concave in
            $y$. Static.
        public: $r(x, y)$: a scalar without data, convex in $x$ and concave in $y$;
            costs no budget. Static.
        x_set: $X$, closed and convex.
        y_set: $Y$, closed and convex.
        lipschitz: $L$, declared: a Lipschitz constant of every possible record's
            operator on $X \times Y$, in $\ell_2$. If the gradients in $x$ and in
            $y$ are $L_x$- and $L_y$-Lipschitz, $\sqrt{L_x^2 + L_y^2}$ is one. Static.
        bound: $M$, declared: at least $(\|\nabla_x f\|^2 + \|\nabla_y f\|^2)^{1/2}$
            there, for every possible record. Static.
        public_lipschitz: A Lipschitz constant of the public operator. Static.
        public_bound: A bound on its norm. Static.
        largest_gap: At least the gap of every point, for every dataset. Static.

    Privacy:
        `fun` sees one record at a time and is clipped; convexity and concavity matter
        to utility alone. The public term must hold no private data, not even a
        statistic of it.

    References:
        Boob and Guzman, "Optimal algorithms for differentially private stochastic
        monotone variational inequalities and saddle-point problems", 2024, Section 2.
    """

    fun: Callable[[PyTree, PyTree, PyTree], Scalar] = eqx.field(static=True)
    public: Callable[..., Scalar] | None = eqx.field(static=True, default=None)
    x_set: AbstractSet = Euclidean()
    y_set: AbstractSet = Euclidean()


class VariationalInequality(AbstractVariationalInequality):
    r"""Variational inequality of one operator per record and a public one.

    Args:
        operator: $F_i(w)$ as `operator(w, record)`, a pytree like `w`; monotone if
            theorems are to hold. Static.
        public: $P(w)$, a pytree like `w` without data; costs no budget. Static.
        w_set: $W$, closed and convex.
        lipschitz: $L$, declared: a Lipschitz constant of every possible record's
            operator on $W$, in $\ell_2$. Static.
        bound: $M$, declared: at least the norm of every possible record's operator on
            $W$. Static.
        public_lipschitz: A Lipschitz constant of the public operator. Static.
        public_bound: A bound on its norm. Static.
        largest_gap: At least the gap of every point, for every dataset. Static.

    Privacy:
        As for `SaddleProblem`.
    """

    operator: Callable[[PyTree, PyTree], PyTree] = eqx.field(static=True)
    public: Callable[[PyTree], PyTree] | None = eqx.field(static=True, default=None)
    w_set: AbstractSet = Euclidean()

    @override
    def record_operator(self, w: PyTree, record: PyTree) -> PyTree:
        return self.of_record(self.operator)(w, record)

    @override
    def public_operator(self, w: PyTree) -> PyTree:
        return optax.tree.zeros_like(w) if self.public is None else self.public(w)

    def check(self, w0: PyTree, data: PyTree) -> None:
        """Refuse operators whose values are not like `w0`, and shapes that differ."""
        self.sizes_of(data)
        check_start(w0)
        check_set("w_set", self.w_set, w0)
        operator = self.of_record(self.operator)
        _check_like("operator", w0, operator, w0, one_record(data))
        if self.public is not None:
            _check_like("public", w0, self.public, w0)


def ascent(gradients: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
    """Return a pair of gradients with the second negated, as $y$ ascends."""
    return gradients[0], optax.tree.scale(-1, gradients[1])


def _check_like(name: str, like: PyTree, fun: Callable, *arguments: PyTree) -> None:
    """Check that a function's value has the structure and shapes of `like`."""
    value = jax.eval_shape(fun, *arguments)
    given, expected = (
        jax.tree.map(lambda v: f"{jnp.result_type(v)}{list(jnp.shape(v))}", tree)
        for tree in (value, like)
    )
    if given != expected:
        raise ValueError(
            f"{name} must return a pytree like w0: {expected}, not {given}"
        )
