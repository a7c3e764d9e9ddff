"""The figure of README.md: python -m docs.accuracy writes docs/accuracy.svg.

It runs the example of README.md and compares the released model with those of one level
at the same budget. Each fit spends the budget again, which is harmless because the
records are generated.
"""

import re
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt

import dpbilevel as dpb

ROOT = Path(__file__).parents[1]


def example() -> dict:
    """Run the example of README.md and return its names."""
    names = {}
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    exec(compile(code, "README.md", "exec"), names)
    return names


def compared(names: dict) -> dict[str, float]:
    """Return accuracies on other records: `auto`, one level, then the right sites."""
    made, budget, plan = (names[name] for name in ("made", "budget", "plan"))
    lower, loss = made.data.lower, dpb.FiniteSum(dpb.logistic_loss)
    (good,) = jnp.nonzero((lower["source"] == 0) | (lower["source"] == 3))

    def accuracy(model):
        return float(jnp.mean(made.test["features"] @ model * made.test["label"] > 0))

    def one_level(records):
        descent = dpb.NoisyGD(100, 0.7, 8.0, output=dpb.outputs.TailMean())
        run = loss, descent, records, names["start"][1]
        return accuracy(dpb.fit(*run, budget=budget, key=dpb.root_key()).value)

    return {
        f"dpb.auto: {plan.trials[0].method}": accuracy(names["solution"].y),
        "DP gradient descent, checked records": one_level(made.data.upper),
        "DP gradient descent, all sites": one_level(lower),
        "the same, right sites known": one_level(
            jax.tree.map(lambda rows: rows[good], lower)
        ),
    }


def draw(found: dict[str, float], file: Path) -> None:
    """Write the figure."""
    figure, axes = plt.subplots(figsize=(4.6, 2.8), layout="constrained")
    colors = ["C0", *["silver"] * (len(found) - 1)]
    names = [textwrap.fill(name, 20) for name in found]  # it is read on telephones
    bars = axes.barh(names, list(found.values()), color=colors)
    axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.invert_yaxis()
    axes.set_xlim(0.4, 1.0)
    axes.set_xlabel("accuracy on other records, epsilon = 1")
    with plt.rc_context({"svg.hashsalt": "front page"}):
        figure.savefig(file, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    draw(compared(example()), ROOT / "docs/accuracy.svg")
