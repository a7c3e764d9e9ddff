"""Report of a finished run as one page of HTML; needs jinja2 and matplotlib."""

import json
import math
import re
from collections.abc import Iterable
from typing import Any

import numpy as np
from markupsafe import Markup, escape

from ..privacy.report import Status, rounded_up
from . import environment, figure
from .plans import FALSE_ALARMS
from .results import Result

_COLORS = {
    figure.INK: "var(--ink)",
    figure.SOFT: "var(--soft)",
    figure.RULE: "var(--rule)",
}
# Words of every ledger; a task explains the releases of its solvers (`Task.terms`).
TERMS = {
    "records": "the records",
    "upper": "the validation records",
    "lower": "the training records",
    "FullBatch": "every record is read, each time",
    "Poisson": "each record is read with the same chance, drawn anew each time",
    "FixedSize": "so many records are read, drawn anew each time",
    "SinglePass": "each record is read once at most, in one of the batches",
    "RandomAllocation": "each record is read once a pass, in a batch drawn anew",
    "usable records": "how many records fit what the config declares",
    "usable records of the upper level": "the same of the validation records",
    "usable records of the lower level": "the same of the training records",
    "test accuracy": "how many test records the released model labels correctly",
}


def page(result: Result, spent: str, title: str) -> str:
    """Return HTML text: guarantee, figures, ledger, settings and assumptions.

    Args:
        result: Result of the run.
        spent: What all runs of the folder have spent, as text.
        title: Name of the run.

    Privacy:
        A function of released and public values: free. The page loads nothing from the
        network, so that no server learns who reads it.
    """
    report, config, task = result.report, result.config.tables, result.task
    coefficients = []
    if not task.shows_model:
        coefficients = _rows(result.features, np.ravel(result.model))
    has_guarantee = report.status is not Status.HEURISTIC
    templates = environment(autoescape=True)
    templates.filters |= {
        "percent": _percent,
        "rounded_up": lambda value: rounded_up(value, 4),
        "sentence": lambda text: f"{text[:1].upper()}{text[1:]}.",
    }
    return templates.get_template("page.html").render(
        result=result,
        title=title,
        spent=spent,
        facts=_facts(result),
        has_guarantee=has_guarantee,
        odds=rounded_up(math.exp(report.epsilon), 3) if has_guarantee else "",
        false_alarms=FALSE_ALARMS,
        drawings={k: _recolored(k, v) for k, v in figure.drawings(result).items()},
        values=_rows(result.names, result.shown),
        coefficients=coefficients,
        ledger=[*_ledger(result)],
        terms=_terms(result),
        settings=_lines({k: config[k] for k in ("solver", "refit") if k in config}),
        config=_lines(config),
    )


def _facts(result: Result) -> dict[str, str]:
    """Return the facts at the head of the page as texts, by name."""
    report, test = result.report, result.test
    facts = {"guarantee": report.status.value.capitalize()}
    if report.status is not Status.HEURISTIC:
        facts["epsilon"] = rounded_up(report.epsilon, 4)
        facts["delta"] = rounded_up(report.delta, 4)
    if test is not None and test.value is not None:
        facts[f"test {test.metric}"] = f"{test.value:.4g}"
        if test.trivial is not None:
            facts["constant answer"] = f"{test.trivial:.2g}"
    return facts


def _rows(names: tuple[str, ...], values: np.ndarray) -> list[tuple[str, str]]:
    return [(name, f"{v:.4f}") for name, v in zip(names, values, strict=True)]


def _recolored(title: str, drawing: str) -> Markup:
    """Return a drawing in the colors of the page, with a name for screen readers."""
    for color, variable in _COLORS.items():
        drawing = drawing.replace(color, variable)
    label = f'<svg role="img" aria-label="{escape(title)}"'
    return Markup(drawing.replace("<svg", label, 1))  # matplotlib escapes its texts


def _ledger(result: Result) -> Iterable[tuple[str, ...]]:
    """Yield one row of text for each release and role."""
    for row in result.report.ledger:
        noise = row.noise_std
        for role, part in row.roles.items():
            yield (
                row.release,
                f"{row.count}",
                f"{role}: {part.records}",
                part.sampling,
                f"{part.sensitivity:.3g}",
                "a draw" if noise is None else f"{noise:.3g}",
            )


def _terms(result: Result) -> list[tuple[str, str]]:
    """Return pairs of a word in the ledger and its meaning."""
    words, meanings = [], TERMS | {**result.task.terms}
    for row in result.report.ledger:
        words += [word_of(row.release), *row.roles]
        words += [word_of(part.sampling) for part in row.roles.values()]
    return [(w, meanings[w]) for w in dict.fromkeys(words) if w in meanings]


def word_of(name: str) -> str:
    """Return the first word of a name such as `refit: gradient` or `Poisson(0.1)`."""
    return re.split(r": | ?\(", name)[0]


def _lines(table: dict[str, Any]) -> str:
    """Return a config in TOML, one key a line."""
    return "\n".join(f"{key} = {value}" for key, value in _flat(table, ""))


def _flat(value: Any, key: str) -> Iterable[tuple[str, str]]:
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _flat(part, f"{key}.{name}" if key else name)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for number, part in enumerate(value, 1):
            yield from _flat(part, f"{key} {number}")
    else:
        yield key, json.dumps(value, ensure_ascii=False)


def _percent(fraction: float) -> str:
    """Return a fraction as text in percent, rounded up."""
    return f"{math.ceil(round(1000 * fraction, 6)) / 10:g} %"
