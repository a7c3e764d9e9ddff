"""Tables of methods by the median over keys, worst first, with quartiles."""

import numpy as np


def table(title, found, unit, *, higher_is_better):
    """Return a table of a page.

    Args:
        title: What stands above it.
        found: For each method, one number a key.
        unit: What is measured.
        higher_is_better: Whether the worst row has the smallest median.
    """
    lines = [f"#### {title}", "", f"| method | {unit} [quartiles] |", "|---|---|"]
    rows = sorted(found.items(), key=lambda row: np.median(row[1]))
    for method, values in rows if higher_is_better else rows[::-1]:
        low, middle, high = np.quantile(values, (0.25, 0.5, 0.75))
        lines.append(f"| {method} | {middle:.4f} [{low:.4f}, {high:.4f}] |")
    return "\n".join(lines)


def best_of(settings, *, higher_is_better):
    """Return the setting of the best median, in hindsight.

    Args:
        settings: For each setting, one number a key.
        higher_is_better: Whether the best median is the largest.
    """
    return (max if higher_is_better else min)(settings, key=np.median)
