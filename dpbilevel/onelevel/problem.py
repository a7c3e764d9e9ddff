"""One-level problems: a mean over records plus public terms."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar
from typing import ClassVar as AbstractVar  # for type checkers

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from equinox import AbstractVar  # noqa: F811
from jaxtyping import Array, Float, PyTree
from typing_extensions import override

from .. import _checks
from .._checks import NonNegative, Positive
from ..core.problem import AbstractOneLevel, is_randomized
from ..core.proximal import Proximal, check_proximal
from ..privacy.per_example.clipping import one_record
from ..privacy.queries import RECORDS, Query
from ..privacy.records.randomness import Keyed
from ..privacy.sampling.base import AbstractSampling
from ..sets import AbstractSet, Euclidean

Scalar = Float[Array, ""]

_MOST_NAMED = 12  # leaves in an error message


class AbstractFiniteSum(AbstractOneLevel):
    """Problem of one level: gradients of records, a public gradient, a set."""

    w_set: AbstractVar[AbstractSet]

    @abc.abstractmethod
    def record_gradients(self, w: PyTree) -> dict[str, Callable[[PyTree], PyTree]]:
        """Return a dict by role: the function from a record to its gradient at `w`."""

    @abc.abstractmethod
    def public_gradient(self, w: PyTree) -> PyTree:
        """Return the gradient of the public terms: no clipping, no noise, no budget."""

    def proximal_step(self) -> Callable[[Any, PyTree], PyTree] | None:
        """Return the function (step size, w) of a proximal step; `None` without one.

        Its arguments are a step size and a point. The public gradient leaves out the
        term that it belongs to.
        """
        return None

    @abc.abstractmethod
    def queries(
        self, clip_norm: float | Scalar, sampling: AbstractSampling, sizes
    ) -> tuple[tuple[Query, ...], bool]:
        """Return a tuple of gradient queries, and whether they share a batch."""


class FiniteSum(AbstractFiniteSum):
    r"""Minimize $\frac{1}{n} \sum_i \ell(w, z_i) + r(w)$ over a convex set.

    Args:
        loss: $\ell(w, z)$: one record's loss, a scalar; or `Randomized`, of a loss that
            takes a key as well. Static.
        public: $r(w)$: a scalar without data; costs no budget. A function or a term of
            `proximal`. Static.
        w_set: The feasible set.
        lipschitz: $G$, declared: a Lipschitz constant of every possible record's loss
            in $w$ on the set, in $\ell_2$. Exponential mechanisms and theorems read it.
            Static.
        smoothness: $\beta$, declared: that of the gradient. With rows of norm at most
            $R$ it is $R^2 / 4$ for a logistic, $R^2$ for a squared and $R^2 / 2$ for a
            softmax loss. Static.
        lipschitz_spread: $G^d \le G$, declared: half the largest Lipschitz constant of
            the difference of two possible records' losses; $G$ where it is omitted.
            Regularized draws read it. Static.
    """

    terms: ClassVar[tuple[str, ...]] = ("loss", "public")
    record_functions: ClassVar[tuple[str, ...]] = ("loss",)

    loss: Callable[[PyTree, PyTree], Scalar] = eqx.field(static=True)
    public: Callable[[PyTree], Scalar] | None = eqx.field(static=True, default=None)
    w_set: AbstractSet = Euclidean()
    lipschitz: Positive | None = eqx.field(static=True, default=None)
    smoothness: NonNegative | None = eqx.field(static=True, default=None)
    lipschitz_spread: Positive | None = eqx.field(static=True, default=None)

    def __check_init__(self):
        _checks.check_fields(self)
        if isinstance(self.public, Proximal):
            check_proximal("FiniteSum", self.public, self.w_set)
        if self.lipschitz_spread is None:
            return
        if self.lipschitz is None or self.lipschitz_spread > self.lipschitz:
            raise ValueError(
                "FiniteSum: lipschitz_spread must be at most a given lipschitz."
            )

    @override
    def with_functions(self, functions, unit):
        # The loss of a person without rows is 0, which may be far from all others.
        if unit is not None and self.lipschitz_spread not in (None, self.lipschitz):
            raise ValueError(
                "per_person: lipschitz_spread is that of rows. Leave it out, and "
                "declare that of people, whose loss may be 0, by dataclasses.replace."
            )
        return dataclasses.replace(self, unit=unit, **functions)

    def record_gradients(self, w: PyTree) -> dict[str, Callable[[PyTree], PyTree]]:
        r"""Return a dict by role of the function $z \mapsto \nabla_w \ell(w, z)$."""
        return {RECORDS: lambda record: jax.grad(self.loss)(w, record)}

    def public_gradient(self, w: PyTree) -> PyTree:
        r"""Return $\nabla r(w)$; zeros without a public term, or for a proximal one."""
        if self.public is None or isinstance(self.public, Proximal):
            return optax.tree.zeros_like(w)
        return jax.grad(self.public)(w)

    @override
    def proximal_step(self):
        return self.public.prox if isinstance(self.public, Proximal) else None

    @override
    def queries(self, clip_norm, sampling, sizes) -> tuple[tuple[Query, ...], bool]:
        randomized = is_randomized(self.loss)
        return (Query(RECORDS, sizes, clip_norm, sampling, randomized),), False

    def check(self, w0: PyTree, data: PyTree) -> None:
        """Raise an error if `w0`, data, set and loss do not fit each other."""
        self.sizes_of(data)
        check_start(w0)
        check_set("w_set", self.w_set, w0)
        loss = _with_zero_key(self.loss) if is_randomized(self.loss) else self.loss
        check_scalar("loss", loss, w0, one_record(data))
        if self.public is not None:
            check_scalar("public", self.public, w0, of="the public term")


def _with_zero_key(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Return a randomized loss as a function of variables and record: its key is 0."""

    def plain(*args):
        *variables, record = args
        key = jax.random.wrap_key_data(jnp.zeros(2, jnp.uint32), impl="threefry2x32")
        return fun(*variables, Keyed(record, key))

    return plain


def check_start(w0: PyTree) -> None:
    """Raise `ValueError` unless all leaves of `w0` are finite float32 or float64.

    Raises:
        ValueError: A leaf is not a floating-point array of float32 or float64, or holds
            NaN or infinity.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(w0):
        dtype, where = getattr(leaf, "dtype", None), jax.tree_util.keystr(path)
        if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(
                f"w0{where} must be a floating-point array, got "
                f"{(type(leaf).__name__ if dtype is None else dtype)}. Split other "
                "leaves off by equinox.partition(w0, equinox.is_inexact_array)."
            )
        if jnp.finfo(dtype).bits < 32:
            raise ValueError(f"w0{where} is {dtype}: use float32 or float64.")
        if _checks.concrete(leaf) and not np.isfinite(np.asarray(leaf, float)).all():
            raise ValueError(f"w0{where} holds NaN or infinity.")


def check_set(name: str, feasible: AbstractSet, start: PyTree) -> None:
    """Raise `ValueError` if a set does not hold points of the shape of `start`.

    Raises:
        ValueError: Projecting the point fails or changes its shape.
    """
    start = jax.eval_shape(lambda w: w, start)  # as JAX will hold it
    shapes = jax.tree.map(lambda v: f"{v.dtype}{list(v.shape)}", start)
    try:
        point = jax.eval_shape(feasible.project, start)  # no value is computed
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{name}={feasible} does not fit a point of shape {shapes}: {error}"
        ) from error
    found = jax.tree.map(lambda v: f"{v.dtype}{list(v.shape)}", point)
    if found != shapes:
        raise ValueError(
            f"{name}={feasible} has shape {found}, but the initial point {shapes}."
        )


def check_scalar(
    name: str, fun: Callable, *arguments: PyTree, of: str = "one record"
) -> None:
    """Raise an error unless a function, traced on shapes, returns one float scalar.

    Raises:
        ValueError: The result is not a floating-point scalar.
    """
    try:
        value = jax.eval_shape(fun, *arguments)  # no value is computed
    except Exception as error:
        *variables, last = arguments
        record = {"record": last} if of == "one record" else {}
        variables = variables if record else arguments
        names = ("w0",) if len(variables) == 1 else ("x", "y")
        shapes = _in_words(dict(zip(names, variables, strict=False)) | record)
        missing = type(error) in (KeyError, IndexError, AttributeError)
        if type(error) is NameError and "axis name" in str(error):
            raise ValueError(
                f"{name} uses a named axis, as batch normalization does, for {shapes}. "
                "Use layer or group normalization."
            ) from error
        if missing or type(error) in (TypeError, ValueError):
            kind = ValueError if missing else type(error)
            what = f"{type(error).__name__}: {error}" if missing else str(error)
            hint = "Give an initial point and records that it reads."
            if record and type(error) not in (KeyError, AttributeError):
                hint = f"{hint[:-1]}: each call gets one record, without a batch axis."
            if "positional argument" in what:
                given = ", ".join((*names[: len(variables)], *record))
                key = "; a key comes last in dpb.Randomized only" if record else ""
                hint = f"Write it as a function of {given}{key}."
            what = what.removesuffix(".")
            raise kind(f"{name} fails for {shapes}: {what}. {hint}") from error
        error.add_note(
            f"This happened while tracing {name}, called with {shapes}. "
            f"{_hint_for(error)}"
        )
        raise
    leaves = jax.tree.leaves(value)
    if (
        len(leaves) != 1
        or leaves[0].shape != ()
        or not jnp.issubdtype(leaves[0].dtype, jnp.floating)
    ):
        got = [f"{v.dtype}{list(v.shape)}" for v in leaves]
        raise ValueError(
            f"{name} must return one floating-point scalar for {of}, got {got}."
        )


def _hint_for(error: Exception) -> str:
    """Return a sentence on what to do about an error of JAX in a loss."""
    if isinstance(error, jax.errors.TracerBoolConversionError):
        return "Use jnp.where in place of `if`."
    if "requires a key" in str(error):
        return "Wrap a loss with dropout in dpb.Randomized: it gets a key."
    return (
        "It gets one record: layers that mix them, such as batch normalization, fail."
    )


def _in_words(named: dict[str, PyTree]) -> str:
    """Return text: dtype and shape of each named leaf, of the first twelve."""
    words = [
        f"{name}{jax.tree_util.keystr(path)} {jnp.result_type(v)}{list(jnp.shape(v))}"
        for name, tree in named.items()
        for path, v in jax.tree_util.tree_leaves_with_path(tree)
    ]
    left_out = [f"{len(words) - _MOST_NAMED} more"] if len(words) > _MOST_NAMED else []
    return ", ".join(words[:_MOST_NAMED] + left_out)
