"""The report of a finished run as one page of HTML that needs nothing else."""

import html
import json
import math
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import Any

import numpy as np

from ..privacy.report import PrivacyReport, Status, rounded_up
from . import figure
from .attack import FALSE_ALARMS
from .results import Result
from .tasks import TASKS

_PEOPLE = {
    None: "Each person has one record.",
    "disjoint": "Each person has one record, among those of the training or of the "
    "validation, not among both.",
    "overlapping": "One person may have a record among those of the training and one "
    "among those of the validation: both together are protected.",
    "shared": "Each person has one record, which is used in both levels: all its uses "
    "together are protected.",
}
_CHANGE = {
    "replace_one": "had the record of any one person been replaced by any other record",
    "add_or_remove_one": "had the record of any one person been left out, or one more "
    "been added",
}
_CANDIDATES = {
    "replace_one": "which of two records a person gave",
    "add_or_remove_one": "whether a person's record was used",
}
_GROUNDS = {
    Status.ENFORCED: "Enforced: the influence of every record is bounded by clipping, "
    "and noise is added to what is left. This holds whatever the records are.",
    Status.CONDITIONAL: "Conditional: it rests on bounds that were declared or proved "
    "for the problem, listed below. Where one of them is wrong, it need not hold.",
    Status.HEURISTIC: "No guarantee is claimed: a random draw was cut short. No "
    "epsilon belongs to this run.",
}
_OF_LEVEL = {"lower": "of the training records", "upper": "of the validation records"}
_COLORS = {
    figure.INK: "var(--ink)",
    figure.SOFT: "var(--soft)",
    figure.RULE: "var(--rule)",
}
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
# Words of ledgers; names of releases are those of the solvers' documentation.
_TERMS = {
    "records": "the records",
    "upper": "the validation records",
    "lower": "the training records",
    "FullBatch": "every record is read, each time",
    "Poisson": "each record is read with the same chance, drawn anew each time",
    "FixedSize": "so many records are read, drawn anew each time",
    "RandomAllocation": "each record is read once a pass, in a batch drawn anew",
    "usable records": "how many records fit what the config declares",
    "usable records of the upper level": "the same of the validation records",
    "usable records of the lower level": "the same of the training records",
    "gradient": "a step of the model",
    "model": "a model: the released one, or a first one that scores the sources",
    "models": "a model for each source, and one for all of them",
    "moments": "in which directions predictions of these models differ",
    "mixture": "how much each of these models counts",
    "score": "how well a model fits each source",
    "screen": "how much each group of features matters",
    "fit": "a model of the sources, or of the groups of features, that are kept",
    "remoments": "the same, with the model of the kept sources",
    "remixture": "how much each model counts in the released one",
    "lower solution": "the model of the training records at the current weights",
    "penalized solution": "the same, which fits the validation records as well",
    "outer gradient": "a step of the weights, or of the penalties",
    "hypergradient": "a step of the weights, or of the penalties",
    "refit": "the released model, at the weights or penalties that were found",
    "gradient and losses": "a step of the model, and the losses of the groups",
    "operator": "a step of both players",
    "resolvent": "a step of both players",
    "test accuracy": "how many test records the released model labels correctly",
}


def page(result: Result, spent: str, title: str) -> str:
    """The page: guarantee, figures, ledger, settings and assumptions.

    Args:
        result: What the run published.
        spent: What all runs of the folder have spent, as text.
        title: What to call the run.

    Privacy:
        A function of released and public values: free. It loads nothing from the
        network, so that no server learns who reads it.
    """
    parts = [
        _head(result, title),
        _section("The guarantee in plain words", _guarantee(result)),
        _section("What was released", _released(result)),
        _section("Where the budget went", _ledger(result.report), _spent(spent)),
        _section("How it was computed", _computed(result)),
        _section("What was assumed", _assumed(result)),
    ]
    style = resources.files("dpbilevel.cli").joinpath("page.css").read_text("utf-8")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{_text(title)}</title>\n<style>\n{style}</style>\n</head>\n"
        f"<body>\n<main>\n{''.join(parts)}</main>\n</body>\n</html>\n"
    )


def _head(result: Result, title: str) -> str:
    report = result.report
    facts = {"guarantee": report.status.value.capitalize()}
    if report.status is not Status.HEURISTIC:
        facts |= {"epsilon": rounded_up(report.epsilon, 4)}
        facts |= {"delta": rounded_up(report.delta, 4)}
    if result.test is not None and result.test.value is not None:
        name = f"test {result.test.metric}"
        facts[name] = f"{result.test.value:.4g}"
        if result.test.trivial is not None:
            facts["constant answer"] = f"{result.test.trivial:.2g}"
    shown = "".join(
        f"<div><dt>{_text(k)}</dt><dd>{_text(v)}</dd></div>" for k, v in facts.items()
    )
    task = result.task.replace("_", " ")
    return (
        f"<header>\n<p>dpbilevel: {_text(task)}</p>\n<h1>{_text(title)}</h1>\n"
        f'<dl class="facts">{shown}</dl>\n</header>\n'
    )


def _guarantee(result: Result) -> str:
    report = result.report
    change = _CHANGE[report.relation]
    paragraphs = [
        f"<p>{_text(_PEOPLE[report.people])} The guarantee compares what was released "
        f"with what could have been released {change}: the two must be hard to tell "
        "apart. A person with several records is protected less, about in proportion "
        "to their number. So is every person if more is released from the same "
        "records: the numbers are those of this one run.</p>"
    ]
    if report.status is Status.HEURISTIC:
        return "".join([*paragraphs, f"<p>{_GROUNDS[report.status]}</p>"])
    odds = rounded_up(math.exp(report.epsilon), 3)
    points = [
        "<b>Odds.</b> Whoever sees all that was released, and knows all other "
        "records, can thereby change the odds of anything about one person's record by "
        f"a factor of at most {odds} (e to the power of epsilon, "
        f"{rounded_up(report.epsilon, 4)}), except with a probability of about delta, "
        f"{rounded_up(report.delta, 4)}.",
        f"<b>Attacks.</b> Somebody who knows all other records tries to tell "
        f"{_CANDIDATES[report.relation]}. Whatever the method: with false alarms in "
        f"{_percent(FALSE_ALARMS)} of the cases it detects at most "
        f"<strong>{_percent(result.power)}</strong>. "
        f"Guessing detects {_percent(FALSE_ALARMS)}.",
        "<b>What is not protected.</b> Facts that hold for many people may be learned "
        "and used about any person, whether or not they are in the records.",
    ]
    kinds = report.epsilon_by_person
    if len(kinds) > 1:
        listed = "; ".join(
            f"{_OF_LEVEL.get(k, k)}: {rounded_up(v, 4)}" for k, v in kinds.items()
        )
        points.append(f"<b>By kind of person</b>, epsilon is: {_text(listed)}.")
    paragraphs.append(_list(points))
    paragraphs.append(f"<p>{_GROUNDS[report.status]}</p>")
    return "".join(paragraphs)


def _released(result: Result) -> str:
    task = TASKS[result.task]
    parts = [
        f"<p>The {_text(result.label)} of each {_text(task.of)}, and every value on "
        "the way there. All of it is covered by the guarantee: it may be published and "
        "used in any way.</p>"
    ]
    parts += [f'<p class="warning">{_text(remark)}</p>' for remark in result.warnings]
    if not result.has_moved and not result.shows_model:
        parts.append(f"<p>Each {_text(result.label)} is where it started.</p>")
    elif not result.ends_there:
        parts.append(
            "<p>The answer is not the last point of the path in the figure: in most "
            "cases it is an average of the points of the path.</p>"
        )
    parts += [] if result.test is None else [_tested(result)]
    parts += [
        f"<p>{_text(line[:1].upper() + line[1:])}.</p>" for line in result.checked
    ]
    parts.append('<div class="figures">')
    for title, drawing in figure.drawings(result).items():
        drawing = _recolored(drawing, title)
        caption = f"<figcaption>{_text(title)}</figcaption>"
        parts.append(f"<figure>{caption}\n{drawing}</figure>\n")
    parts.append("</div>")
    if task.remark:
        remark = task.remark.strip(" ()")
        parts.append(f"<p>Each {_text(result.label)} is {_text(remark)}.</p>")
    values = zip(result.names, result.shown.tolist(), strict=True)
    rows = [(name, f"{value:.4f}") for name, value in values]
    parts.append(
        _folded(f"Every {result.label}", _table((task.of, result.label), rows))
    )
    if result.model is not None and not result.shows_model and result.features:
        model = zip(result.features, np.ravel(result.model).tolist(), strict=True)
        rows = [(name, f"{value:.4f}") for name, value in model]
        table = _table(("feature", "coefficient"), rows)
        parts.append(_folded("Every coefficient of the released model", table))
    return "".join(parts)


def _tested(result: Result) -> str:
    assert result.test is not None
    kind = ' class="warning"' if result.test.kind == "non_private" else ""
    text = str(result.test)
    return f"<p{kind}>{_text(text[:1].upper() + text[1:])}.</p>"


def _recolored(drawing: str, title: str) -> str:
    """A drawing in the colors of the page, with a name for those who do not see it."""
    for color, variable in _COLORS.items():
        drawing = drawing.replace(color, variable)
    label = f' role="img" aria-label="{_text(title)}"'
    return drawing.replace("<svg", f"<svg{label}", 1)


def _ledger(report: PrivacyReport) -> str:
    rows = []
    for row in report.ledger:
        for role, part in row.roles.items():
            noise = row.noise_std
            rows.append(
                (
                    row.release,
                    f"{row.count}",
                    f"{role}: {part.records}",
                    part.sampling,
                    f"{part.sensitivity:.3g}",
                    f"{noise:.3g}" if noise is not None else "a draw",
                )
            )
    heads = ("release", "times", "of records", "sampling", "sensitivity", "noise")
    return (
        "<p>All that was computed from records, and how much noise each of it got. "
        "The sensitivity is the most that one record can change, and the noise the "
        "standard deviation of what was added.</p>"
        f"{_table(heads, rows)}{_folded('What these words mean', _terms(report))}"
        f"<p>Composed by: {_text(report.accountant)}.</p>"
    )


def _terms(report: PrivacyReport) -> str:
    """The meaning of the roles, releases and sampling schemes in the ledger."""
    used = []
    for row in report.ledger:
        used += [row.release.split(": ")[0], *row.roles]
        used += [part.sampling.split("(")[0] for part in row.roles.values()]
    found = [(term, _TERMS[term]) for term in dict.fromkeys(used) if term in _TERMS]
    return _table(("word", "meaning"), found)


def _spent(spent: str) -> str:
    return f"<h3>All runs in this folder</h3><pre>{_text(spent)}</pre>" if spent else ""


def _computed(result: Result) -> str:
    config = result.config
    settings = {k: config[k] for k in ("solver", "refit") if k in config}
    versions = ", ".join(f"{k} {v}" for k, v in result.versions.items())
    return (
        f"<p>The settings of the method:</p><pre>{_text(_lines(settings))}</pre>"
        f"<p>Random bits: {_text(result.report.prng)}. Software: {_text(versions)}.</p>"
        + _folded("The whole config", f"<pre>{_text(_lines(config))}</pre>")
    )


def _assumed(result: Result) -> str:
    report = result.report
    parts = [
        "<p>Public by declaration, and not protected: all that the config says, such "
        "as columns, classes, bounds, names of sources and numbers of records; and how "
        "long the run took.</p>",
        _list(map(_text, report.assumptions)),
    ]
    if report.certificates:
        proved = _list(map(_text, report.certificates))
        parts.append(f"<p>Proved for this run:</p>{proved}")
    return "".join(parts)


def _lines(table: dict[str, Any]) -> str:
    """A config in TOML, one key a line."""
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


def _percent(share: float) -> str:
    """Rounded up, as a bound must be."""
    return f"{math.ceil(round(1000 * share, 6)) / 10:g} %"


def _section(title: str, *parts: str) -> str:
    return f"<section>\n<h2>{_text(title)}</h2>\n{''.join(parts)}\n</section>\n"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{_text(cell)}</th>' for cell in heads)
    body = "".join(
        f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="wide" tabindex="0">{table}</div>\n'


def _folded(title: str, inside: str) -> str:
    return f"<details><summary>{_text(title)}</summary>{inside}</details>\n"


def _list(items: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{item}</li>' for item in items)}</ul>\n"


def _text(text: str) -> str:
    return html.escape(text)
