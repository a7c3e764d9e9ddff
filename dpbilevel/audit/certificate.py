"""Certificate of a run: what it promises, for a reviewer who is no programmer."""

import dataclasses
import datetime
import decimal
import json
import math
import re
import statistics
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from .._extras import check_installed
from ..privacy.accounting.closed_forms import gaussian_epsilon
from ..privacy.ledger import Ledger
from ..privacy.report import (
    CRYPTOGRAPHIC,
    IDEALISED,
    ROW,
    PrivacyReport,
    Status,
    rounded_up,
)
from .claims import FALSE_ALARMS, largest_powers

if TYPE_CHECKING:  # an extra
    from jinja2 import Environment

# Assumptions that the library answers for; its documentation has the proofs.
_OURS = {CRYPTOGRAPHIC, IDEALISED["grid"], IDEALISED["draw"]}
# Let S be the outcomes with log(P/Q) > e = epsilon + log(_SLACK). Then P(S) <=
# exp(epsilon) Q(S) + delta and Q(S) <= exp(-e) P(S), so P(S) <= _TIMES delta and
# Q(S) <= exp(-e) _TIMES delta. The bound of `belief_of` can fail only on S, or on S
# with P and Q exchanged.
_SLACK, _TIMES = 1.1, 11
_NORMAL = statistics.NormalDist()


@dataclasses.dataclass(frozen=True)
class Certificate:
    """A run's guarantee as a page, a registry entry and a worksheet.

    Attributes:
        report: The guarantee.
        title: Name of the run.
        powers: Largest detection rates by false alarms, by the exact trade-off curve;
            `None` if only epsilon and delta are known.
        values: Rows of released numbers: name, value, standard deviation, interval.
        spent: Text on what all runs of a folder have spent.
        total: Number of runs of the folder, and the sums of their epsilons and deltas,
            infinite if they are unknown; `None` without a folder.
        terms: Meanings of the names of releases.
        facts: Texts on the run that a report does not have, by name.
        date: Day on which the certificate is written.

    Privacy:
        Public: a function of the report and of released values.
    """

    report: PrivacyReport
    title: str
    powers: Mapping[str, float] | None = None
    values: tuple[tuple[str, ...], ...] = ()
    spent: str = ""
    total: tuple[int, float, float] | None = None
    terms: Mapping[str, str] = dataclasses.field(default_factory=dict)
    facts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    date: datetime.date = dataclasses.field(default_factory=datetime.date.today)

    @property
    def claims(self) -> bool:
        """Whether the report claims an epsilon: its status is not `HEURISTIC`."""
        return self.report.status is not Status.HEURISTIC

    def html(self) -> str:
        """Return one page of HTML for a reviewer; it loads nothing from the network."""
        return self.render("certificate.html")

    def registry(self) -> str:
        """Return a YAML entry for the public registry of deployments.

        The keys are those of the schema of opendp/deployments-registry-data. What only
        the curator knows is marked TODO.

        Raises:
            ValueError: The run claims no epsilon.
        """
        if not self.claims:
            raise ValueError(
                "registry: this run claims no epsilon, so there is nothing to "
                "register. Plan it with the certified number of steps."
            )
        return self.render("registry.yaml")

    def nist(self) -> str:
        """Return a worksheet in Markdown along the pyramid of NIST SP 800-226.

        The components are those of the initial public draft, December 2023.
        """
        return self.render("nist.md")

    def render(
        self, template: str, among: "Environment | None" = None, **more: Any
    ) -> str:
        """Return the text of the template `template`, filled in for this certificate.

        `among` is by default the certificates' environment; `more` are further values.
        """
        among = environment() if among is None else among
        found = {
            "claims": self.claims,
            "odds": self._odds() if self.claims else {},
            "belief_of": belief_of,
            "ours": _OURS,
        }
        return among.get_template(template).render(vars(self) | found | more)

    def _odds(self) -> dict[str, float]:
        """Return a dict by false alarm rate: a bound on any attack's detection rate."""
        e, d = self.report.epsilon, self.report.delta
        up, down = math.exp(min(e, 700)), math.exp(-e)
        bound = {a: min(up * a + d, 1 - down * (1 - a - d)) for a in FALSE_ALARMS}
        powers = self.powers or {}
        # A curve on a grid of epsilons may exceed the bound by its last digits.
        return {str(a): min(powers.get(str(a), 1.0), v) for a, v in bound.items()}


def certificate(
    run: Any,
    *,
    title: str = "A private run",
    values: Mapping[str, float | tuple[float, float]] | None = None,
) -> Certificate:
    """Return the `Certificate` of a run, for a reviewer.

    Args:
        run: A solution of `fit`, a `Plan`, a fitted estimator or a `PrivacyReport`.
        title: Name of the run, shown on top.
        values: Released numbers to show, by name: a number, or a pair of it and its
            standard deviation. By default the coefficients of a linear estimator.

    Raises:
        TypeError: `run` has no report, as the solution of `solve`.
        ValueError: jinja2 is missing.

    Privacy:
        Public: reads the report and released values, no records. The odds of an
        attacker are exact, by the ledger of the report. A report from JSON, as of
        `load`, has none: the odds are then a rough bound, unless batches are full and
        noise is Gaussian. Certify its plan instead: `calibrate` makes the same again.
    """
    check_installed("certificate", "jinja2")
    report = run
    for name in ("report", "privacy_report_"):
        report = getattr(report, name, report)
    if not isinstance(report, PrivacyReport):
        raise TypeError(
            f"certificate: {type(run).__name__} has no report. Give the solution of "
            "fit, a plan, a fitted estimator or a report; after solve give its plan."
        )
    pairs = _coefficients(run) if values is None else values
    shown = tuple(_shown(name, value) for name, value in pairs.items())
    return Certificate(report, title, _exact_powers(report), shown)


def belief_of(epsilon: float, delta: float) -> tuple[float, float]:
    """Return a bound on a belief that began at 1/2, and the chance that it is exceeded.

    Epsilon and delta are those of all releases together.
    """
    odds = math.exp(-epsilon) / (_SLACK if delta else 1)
    return 1 / (1 + odds), min(1.0, _TIMES * delta * (1 + odds))


def _exact_powers(report: PrivacyReport) -> dict[str, float] | None:
    """Return a dict of exact detection rates by false alarm rate; `None` if unknown.

    A report keeps mu and ledger when `dataclasses.replace` changes its other fields,
    so both are compared with its epsilons.
    """
    mu = report.mu
    if mu is not None and _covers(gaussian_epsilon(mu, report.delta), report.epsilon):
        return {str(a): _NORMAL.cdf(_NORMAL.inv_cdf(a) + mu) for a in FALSE_ALARMS}
    if report.source is None or not _is_of(report.source, report):
        return None
    return largest_powers(report.source)


def _covers(found: float, claimed: float) -> bool:
    """Return whether an epsilon is no smaller than a claimed one, up to rounding.

    A plan may know a smaller epsilon, by its budget.
    """
    return found >= claimed * (1 - 1e-6) and math.isfinite(claimed)


def _is_of(ledger: Ledger, report: PrivacyReport) -> bool:
    """Return whether a ledger has a report's releases and no smaller epsilons."""
    rows = tuple(release.row() for release in ledger.releases)
    said = rows, ledger.neighbours.value, report.people and ledger.people.value
    if said != (report.ledger, report.relation, report.people):
        return False
    found, claimed = ledger.epsilons(report.delta), report.epsilon_by_person
    return (
        found.keys() == claimed.keys()
        and all(_covers(found[person], value) for person, value in claimed.items())
        and _covers(max(found.values(), default=0.0), report.epsilon)
    )


def _coefficients(estimator: Any) -> dict[str, Any]:
    """Return a dict of a linear estimator's coefficients by name; empty for others."""
    found = np.ravel(getattr(estimator, "coef_", ()))
    names = getattr(estimator, "feature_names_in_", ())
    if len(names) != len(found):
        names = [f"coefficient {i}" for i in range(1, len(found) + 1)]
    stds = getattr(estimator, "coef_std_", None)
    pairs = found if stds is None else zip(found, np.ravel(stds), strict=True)
    return dict(zip(map(str, names), pairs, strict=True))


def _shown(name: str, value: Any) -> tuple[str, ...]:
    """Return four texts on a released number: name, value, deviation, 95 % interval."""
    if not isinstance(value, tuple):
        return name, f"{value:.4f}", "", ""
    middle, std = value
    low, high = (middle + side * _NORMAL.inv_cdf(0.975) * std for side in (-1, 1))
    return name, f"{middle:.4f}", f"{std:.4f}", f"{low:.4f} to {high:.4f}"


def word_of(name: str) -> str:
    """Return the first word of a name such as `refit: gradient` or `Poisson(0.1)`."""
    return re.split(r": | ?\(", name)[0]


def environment(*loaders: Any) -> "Environment":
    """Return the jinja2 `Environment` of certificates and of further loaders.

    Unknown names raise.
    """
    import jinja2

    own = jinja2.PackageLoader("dpbilevel.audit")
    found = jinja2.Environment(
        loader=jinja2.ChoiceLoader([own, *loaders]),
        undefined=jinja2.StrictUndefined,
        autoescape=jinja2.select_autoescape(["html"], default_for_string=False),
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.globals |= {"ROW": ROW, "IDEALISED": IDEALISED}
    found.filters |= {
        "percent": _percent,
        "rounded_up": lambda value: rounded_up(value, 4),
        "number": lambda value: format(decimal.Decimal(rounded_up(value)), "f"),
        "cell": _cell,
        "sentence": lambda text: f"{text[:1].upper()}{text[1:].rstrip('.')}.",
        "quoted": _quoted,
        "word": word_of,
    }
    return found


def _cell(text: str) -> str:
    """Return text on one line, as a cell of a table in Markdown."""
    escaped = re.sub(r"[\\`\[|]", r"\\\g<0>", " ".join(text.split()))
    return escaped.replace("<", "&lt;")


def _percent(fraction: float) -> str:
    """Return a fraction as text in percent, rounded up."""
    return f"{math.ceil(round(1000 * fraction, 6)) / 10:g} %"


def _quoted(text: str) -> str:
    """Return text on one line in quotes, as YAML and JSON read it."""
    line = "".join(c if c.isprintable() else " " for c in " ".join(text.split()))
    return json.dumps(line, ensure_ascii=False)
