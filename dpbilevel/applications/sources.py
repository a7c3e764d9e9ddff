"""Weights of data sources: problems of two levels, and their initial points."""

from collections.abc import Callable, Mapping
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PyTree

from .. import _checks
from ..bilevel.problem import BilevelProblem
from ..sets import AbstractSet, Euclidean, Simplex

Scalar = Float[Array, ""]
ModelLoss = Callable[[PyTree, PyTree], Scalar]


def read_source(record: PyTree) -> Int[Array, ""]:
    """Return the source of a training record: its entry `"source"`.

    Args:
        record: A record.

    Raises:
        ValueError: It has no such entry.
    """
    if not isinstance(record, Mapping) or "source" not in record:
        raise ValueError(
            "source_weighting: a training record must be a dict with an entry "
            "'source'. Else give source=, a function that reads it."
        )
    return record["source"]


class SourceWeighting(BilevelProblem):
    """Problem of `source_weighting`, which also holds the model's loss and the sources.

    Attributes:
        loss: The model's loss on one record.
        num_sources: The number of sources.
        parametrization: `"logits"` or `"simplex"`.
        source: Reads a training record's source.
    """

    loss: ModelLoss = eqx.field(static=True, kw_only=True)
    num_sources: int = eqx.field(static=True, kw_only=True)
    parametrization: Literal["logits", "simplex"] = eqx.field(static=True, kw_only=True)
    source: Callable[[PyTree], Int[Array, ""]] = eqx.field(static=True, kw_only=True)

    def index(self, record: PyTree) -> tuple[Int[Array, ""], Bool[Array, ""]]:
        """Return the source of a record, 0 if unknown, and whether it is known."""
        return _known_source("source_weighting", self.source(record), self.num_sources)


def source_weighting(
    loss: ModelLoss,
    num_sources: int,
    *,
    ridge: float = 0.0,
    weight_penalty: float = 0.0,
    parametrization: Literal["logits", "simplex"] = "logits",
    source: Callable[[PyTree], Int[Array, ""]] = read_source,
) -> SourceWeighting:
    r"""Return the problem of weighting training sources by clean validation records.

    $$
    \min_x \frac{1}{n_f} \sum_i \ell(y^*(x), z_i) + \frac{\tau}{2} \Bigl(k \sum_s
    p_s(x)^2 - 1\Bigr), \qquad y^*(x) = \arg\min_y \frac{1}{n_g} \sum_i k\,
    p_{s_i}(x)\, \ell(y, z'_i) + \rho \|y\|^2,
    $$

    with $p(x) = \mathrm{softmax}(x)$ for logits or $p(x) = x$ on the simplex. Start at
    `source_weights(...)`'s uniform point: zeros, or `1 / k`.

    Args:
        loss: $\ell(y, z)$: the model's loss on one record.
        num_sources: $k$.
        ridge: $\rho \ge 0$; public. Positive if $\ell$ is not strongly convex.
        weight_penalty: $\tau \ge 0$; public. Its term is 0 at equal weights, and
            $(k - 1) \tau / 2$ if one source has all of the weight. `SelectedSources`
            and `MixedSources`, which choose sources by scores, ignore it.
        parametrization: `"logits"` or `"simplex"`.
        source: Reads a training record's source, an integer in $[0, k)$. A record of
            any other source has no influence.

    Returns:
        A problem over `Levels(upper=validation, lower=training)`. Only the losses of
        training records read $x$.

    Privacy:
        The source of a record is part of the record. $k$, $\rho$ and $\tau$ are public.
    """
    owner = "source_weighting"
    _checks.count(owner, num_sources=num_sources)
    _checks.non_negative(owner, ridge=ridge, weight_penalty=weight_penalty)
    _checks.one_of(owner, "parametrization", parametrization, ("logits", "simplex"))

    def upper(_, y, record):
        return loss(y, record)

    def lower(x, y, record):
        if jnp.shape(x) != (num_sources,):
            raise ValueError(
                f"{owner}: x must have shape ({num_sources},), got {jnp.shape(x)}."
            )
        index, known = _known_source(owner, source(record), num_sources)
        weight = source_weights(x, parametrization)[index]
        # A record of no known source has no influence, whoever solves the problem.
        return jnp.where(known, num_sources * weight, 0.0) * loss(y, record)

    def lower_public(_, y):
        return ridge * optax.tree.norm(y, squared=True)

    def upper_public(x, _):
        p = source_weights(x, parametrization)
        return weight_penalty / 2 * (num_sources * jnp.sum(p * p) - 1)

    x_set: AbstractSet = Simplex() if parametrization == "simplex" else Euclidean()
    return SourceWeighting(
        upper,
        lower,
        upper_public=upper_public if weight_penalty else None,
        lower_public=lower_public,
        x_set=x_set,
        x_in_records=("lower",),
        loss=loss,
        num_sources=num_sources,
        parametrization=parametrization,
        source=source,
    )


def source_mixing(
    loss: ModelLoss,
    num_sources: int,
    *,
    shared: float = 0.5,
    source: Callable[[PyTree], Int[Array, ""]] = read_source,
) -> BilevelProblem:
    r"""Return the problem of mixing one model per source and one of all records.

    $$
    \min_{x \in \mathbb R^{k+1}} \frac{1}{n_f} \sum_i \ell\Bigl(\sum_{s=0}^{k} x_s
    y_s, z_i\Bigr), \qquad (y_0, \dots, y_k) = \arg\min \frac{1}{n_g} \sum_i
    \ell(y_{s_i}, z'_i) + a\, \ell(y_k, z'_i).
    $$

    The lower level does not read $x$, so `LowerFirst` solves it once. Validation losses
    have gradients in the $k + 1$ coefficients of the mixture only, so that few
    validation records are enough under noise. Start at `mixing_start`; the released
    model is `mixed_model(x, y)`.

    It is for models that are linear in their parameters, such as `logistic_loss`: their
    mixture of parameters is a mixture of predictions. A model of one source is noisier
    than one of several sources. If sources are good or bad, as with flipped labels, one
    private model of the good sources is better than a mixture.

    Args:
        loss: $\ell(y, z)$: the model's loss on one record.
        num_sources: $k$.
        shared: $a > 0$, the weight of the common model. A record's gradients with
            respect to its two models are clipped together. Losses with gradients of at
            most $G$ are not clipped at a clip norm of $G \sqrt{1 + a^2}$.
        source: Reads a training record's source, as in `source_weighting`.

    Returns:
        A problem over `Levels(upper=validation, lower=training)`. Every leaf of $y$ has
        a leading axis of $k + 1$.

    Raises:
        ValueError: A number is out of range, or `x` or `y` has another shape.
        TypeError: A source is not an integer.

    Privacy:
        The source of a record is part of the record. $k$ and $a$ are public.

    References:
        Wolpert, "Stacked generalization", 1992; Breiman, "Stacked regressions", 1996,
        here of models that are fitted on one source each.
    """
    owner = "source_mixing"
    _checks.count(owner, num_sources=num_sources)
    _checks.positive(owner, shared=shared)

    def upper(x, y, record):
        if jnp.shape(x) != (num_sources + 1,):
            raise ValueError(
                f"{owner}: x must have shape ({num_sources + 1},), got {jnp.shape(x)}. "
                "Start at mixing_start(model, num_sources)."
            )
        _check_models(y, num_sources)
        return loss(mixed_model(x, y), record)

    def lower(_, y, record):
        _check_models(y, num_sources)
        index, known = _known_source(owner, source(record), num_sources)
        # Losses of all models at once: one matrix product, and factored gradients.
        losses = jax.vmap(loss, (0, None))(y, record)
        return jnp.where(known, losses[index] + shared * losses[-1], 0.0)

    return BilevelProblem(upper, lower, x_in_records=("upper",))


def mixing_start(model: PyTree, num_sources: int) -> tuple[Float[Array, " k"], PyTree]:
    """Return `source_mixing`'s initial (x, y): weight 1 on the last of equal models.

    Args:
        model: The parameters that every model starts from, public.
        num_sources: $k$.

    Raises:
        ValueError: `num_sources` is below 1.
    """
    _checks.count("mixing_start", num_sources=num_sources)
    x = jnp.zeros(num_sources + 1).at[-1].set(1.0)
    return x, jax.tree.map(lambda v: jnp.stack([jnp.asarray(v)] * len(x)), model)


def mixed_model(x: Float[Array, " k"], y: PyTree) -> PyTree:
    """Return the sum of the models `y`, weighted by `x`, as in `source_mixing`.

    Args:
        x: The coefficients.
        y: The models, along the leading axes of the leaves.

    Privacy:
        Post-processing of released values: free.
    """
    return jax.tree.map(lambda v: jnp.tensordot(x, v, 1), y)


def _check_models(y: PyTree, num_sources: int) -> None:
    for leaf in jax.tree.leaves(y):
        if jnp.shape(leaf)[:1] != (num_sources + 1,):
            raise ValueError(
                f"source_mixing: leaves of y need a leading axis of {num_sources + 1}, "
                f"got {jnp.shape(leaf)}. Start at mixing_start(model, num_sources)."
            )


def _known_source(
    owner: str, source: object, num_sources: int
) -> tuple[Int[Array, ""], Bool[Array, ""]]:
    """Return the index of a source, 0 if it is unknown, and whether it is known."""
    index = jnp.asarray(source)
    if not jnp.issubdtype(index.dtype, jnp.integer):
        raise TypeError(f"{owner}: sources must be integers, got {index.dtype}.")
    known = (index >= 0) & (index < num_sources)
    return jnp.where(known, index, 0), known


def source_weights(
    x: Float[Array, " k"], parametrization: Literal["logits", "simplex"] = "logits"
) -> Float[Array, " k"]:
    """Return the sources' weights, of sum 1: softmax of `x`, or `x` on the simplex.

    Args:
        x: The upper variable of `source_weighting`.
        parametrization: The one of the problem.
    """
    return jax.nn.softmax(x) if parametrization == "logits" else x
