"""Renyi divergences, for what has no privacy loss distribution: private selection."""

import math

import numpy as np

from .._lazy import dp_accounting

# Dense enough that finer ones change no third digit; see tests.
_ORDERS = 1 + np.geomspace(0.05, 2.0**17, 120)


def selects(parts: "list[tuple[dp_accounting.DpEvent, int]]") -> bool:
    """Whether a part of a composition selects among repetitions.

    Args:
        parts: Events, each with how often it happens.
    """
    return any(_is_selection(part) for part, _ in parts)


class Divergences:
    r"""The Renyi divergences of a composition, at many orders.

    Args:
        parts: Gaussian releases and selections among such, each with how often it
            happens; multipliers are relative to the sensitivity under the relation.

    Raises:
        ValueError: Another event is among them.

    References:
        Papernot and Steinke, "Hyperparameter tuning with Renyi differential privacy",
        ICLR 2022, Theorems 2 and 6, as dp-accounting computes them.
    """

    def __init__(self, parts: "list[tuple[dp_accounting.DpEvent, int]]"):
        # Nothing is doubled: multipliers know their relation already.
        self._accountant = dp_accounting.rdp.RdpAccountant(
            _ORDERS, dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
        )
        for part, count in parts:
            base = part.event if _is_selection(part) else part
            if not isinstance(base, dp_accounting.GaussianDpEvent):
                raise ValueError(
                    f"accounting: {type(base).__name__} is not accounted for together "
                    "with private selection; use FullBatch and Gaussian noise."
                )
            if base.noise_multiplier > 0:
                self._accountant.compose(part, count)
            else:
                self._accountant.compose(dp_accounting.NonPrivateDpEvent())

    def delta(self, epsilon: float) -> float:
        r"""$\delta$ at $\varepsilon$.

        Args:
            epsilon: $\varepsilon \ge 0$.
        """
        return float(self._accountant.get_delta(max(epsilon, 0.0)))

    def epsilon(self, delta: float) -> float:
        r"""$\varepsilon$ at $\delta$.

        Args:
            delta: $\delta$; at 0 infinite.
        """
        return float(self._accountant.get_epsilon(delta)) if delta > 0 else math.inf


def _is_selection(part: "dp_accounting.DpEvent") -> bool:
    return isinstance(part, dp_accounting.dp_event.RepeatAndSelectDpEvent)
