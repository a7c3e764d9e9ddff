"""The figure of the front page: `python -m docs.front` runs its example and draws it."""

import pathlib
import re

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt

import dpbilevel as dpb

ROOT = pathlib.Path(__file__).parents[1]


def main():
    """Run the example of README.md, and draw accuracies at the same budget."""
    names = {}
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    exec(compile(code, "README.md", "exec"), names)
    made, plan, budget = (names[name] for name in ("made", "plan", "budget"))
    lower = made.data.lower
    (good,) = jnp.nonzero(names["weights"][lower["source"]] > 0.1)

    def accuracy(model):
        margins = made.test["features"] @ model * made.test["label"]
        return float(jnp.mean(margins > 0))

    def one_level(records):
        step = dpb.NoisyGD(100, 0.7, 8.0, output=dpb.outputs.TailMean())
        loss = dpb.FiniteSum(dpb.logistic_loss)
        fitted = dpb.fit(
            loss, step, records, jnp.zeros(20), budget=budget, key=dpb.root_key()
        )
        return accuracy(fitted.value)

    found = {
        f"dpb.auto: {plan.trials[0].method}": accuracy(names["solution"].y),
        "DP gradient descent, clean records": one_level(made.data.upper),
        "DP gradient descent, all sites": one_level(lower),
        "the same, right sites known": one_level(
            jax.tree.map(lambda v: v[good], lower)
        ),
    }
    figure, axes = plt.subplots(figsize=(6.4, 2.4), layout="constrained")
    bars = axes.barh(list(found), list(found.values()), color=["C0", *["silver"] * 3])
    axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.invert_yaxis()
    axes.set_xlim(0.4, 1.0)
    axes.set_xlabel("accuracy of the released model on new records, epsilon = 1")
    with plt.rc_context({"svg.hashsalt": "front"}):
        figure.savefig(ROOT / "docs/accuracy.svg", metadata={"Date": None})
    print(found)


if __name__ == "__main__":
    main()
