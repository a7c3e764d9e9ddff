"""Low-rank adapters (LoRA): a few numbers to train in place of a network's weights."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from .. import _checks
from ..privacy.keys import PRNGKey


class LowRankLinear(eqx.Module):
    """Linear layer plus a trainable low-rank adapter (LoRA): $W x + b + s B (A x)$.

    `low_rank` puts it in place of linear layers; `adapters` selects $A$ and $B$ as what
    is trained. $B$ is zero at the start, so that the layer computes what `linear` does.

    Args:
        linear: The layer, with its weight $W$ of shape (out, in) and its bias.
        rank: Number of rows of $A$ and of columns of $B$.
        scale: The factor $s$. Static.
        key: A typed key for $A$, normal with variance 1 / in.

    Attributes:
        linear: The layer.
        down: $A$, of shape (rank, in).
        up: $B$, of shape (out, rank).
        scale: $s$.

    References:
        Hu et al., "LoRA: low-rank adaptation of large language models", ICLR 2022.
    """

    linear: eqx.nn.Linear
    down: Float[Array, "rank inputs"]
    up: Float[Array, "outputs rank"]
    scale: float = eqx.field(static=True)

    def __init__(
        self, linear: eqx.nn.Linear, rank: int, *, scale: float = 1.0, key: PRNGKey
    ):
        _checks.instance("LowRankLinear", eqx.nn.Linear, linear=linear)
        _checks.count("LowRankLinear", rank=rank)
        outputs, inputs = linear.weight.shape
        dtype = linear.weight.dtype
        self.linear = linear
        self.down = jax.random.normal(key, (rank, inputs), dtype) / inputs**0.5
        self.up = jnp.zeros((outputs, rank), dtype)
        self.scale = scale

    def __call__(
        self, x: Float[Array, " inputs"], *, key: PRNGKey | None = None
    ) -> Float[Array, " outputs"]:
        """Return the output for one input; `key` is not used."""
        # Not (B A) x: gradients of a product of weights would have no factored form.
        return self.linear(x) + self.scale * (self.up @ (self.down @ x))

    @property
    def delta(self) -> Float[Array, "outputs inputs"]:
        """Change of the weight by the adapter, of shape (out, in)."""
        return self.scale * (self.up @ self.down)

    def merged(self) -> eqx.nn.Linear:
        """Return a plain linear layer whose weight includes the adapter."""
        weight = self.linear.weight + self.delta
        return eqx.tree_at(lambda layer: layer.weight, self.linear, weight)


def low_rank(
    model: PyTree,
    rank: int,
    *,
    where: Callable[[Any], Sequence[eqx.nn.Linear]] | None = None,
    scale: float = 1.0,
    key: PRNGKey,
) -> Any:
    """Return a copy of a model with a `LowRankLinear` for every chosen linear layer.

    Args:
        model: The model, such as an Equinox module.
        rank: As in `LowRankLinear`.
        where: Maps the model to the layers to replace, as in `equinox.tree_at`; by
            default all layers of the class `equinox.nn.Linear`.
        scale: As in `LowRankLinear`.
        key: A typed key, from which every layer gets its own.

    Raises:
        ValueError: There is no such layer.

    Privacy:
        Reads no records.

    Example:
        >>> import equinox as eqx, jax, dpbilevel as dpb
        >>> model = eqx.nn.MLP(4, 2, 8, 1, key=jax.random.key(0))
        >>> model = dpb.applications.low_rank(model, 2, key=jax.random.key(1))
        >>> trainable = dpb.applications.adapters(model)
        >>> sum(v.size for v in jax.tree.leaves(eqx.filter(model, trainable)))
        44
    """
    where = where or _linear_layers
    layers = where(model)
    if not layers:
        raise ValueError("low_rank: the model has no equinox.nn.Linear; give where=.")
    keys = jax.random.split(key, len(layers))
    pairs = zip(layers, keys, strict=True)
    adapted = [LowRankLinear(v, rank, scale=scale, key=own) for v, own in pairs]
    return eqx.tree_at(where, model, adapted)


def adapters(model: PyTree) -> Any:
    """Return a pytree that is `True` at adapters of a model, for `trainable=`.

    Args:
        model: A model of `low_rank`.
    """

    def marked(node):
        false = jax.tree.map(lambda _: False, node)
        if not _is_adapted(node):
            return false
        return eqx.tree_at(lambda layer: (layer.down, layer.up), false, (True, True))

    return jax.tree.map(marked, model, is_leaf=_is_adapted)


def merged(model: PyTree) -> Any:
    """Return a model whose adapters are merged into plain linear layers.

    Args:
        model: A model of `low_rank`.
    """
    return jax.tree.map(
        lambda node: node.merged() if _is_adapted(node) else node,
        model,
        is_leaf=_is_adapted,
    )


def _linear_layers(model: PyTree) -> list[eqx.nn.Linear]:
    nodes = jax.tree.leaves(model, is_leaf=lambda v: isinstance(v, eqx.nn.Linear))
    return [node for node in nodes if isinstance(node, eqx.nn.Linear)]


def _is_adapted(node: Any) -> bool:
    return isinstance(node, LowRankLinear)
