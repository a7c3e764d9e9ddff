"""The report: the guarantee, its grounds, and the noise."""

import dataclasses
import decimal
import enum
import importlib.metadata
import json
import math
from collections.abc import Hashable
from typing import Any, Self

from .._version import __version__
from .accounting import profiles
from .budget import Neighbours, PrivacyBudget
from .chacha20 import CHACHA20
from .ledger import Ledger
from .per_example.clipping import Basis
from .records.people import PersonUnit
from .records.rows import padded_rows
from .releases import Release
from .rows import ForecastRow, LedgerRow, RoleRow, html_table


class Status(enum.Enum):
    """Status of a guarantee: how much of it this library enforces, best first."""

    ENFORCED = "ENFORCED"  # by clipping, whatever the functions are
    CONDITIONAL = "CONDITIONAL"  # rests on declared constants or convexity
    HEURISTIC = "HEURISTIC"  # a sampler cut short: no epsilon is claimed


_INFINITE = {math.inf: "inf", -math.inf: "-inf"}  # numbers that JSON has not
GENERATOR = (
    "nobody can predict the noise; it comes from JAX's random number generator, which "
    "is fast, and not built to resist code breakers as a cryptographic one is"
)
CRYPTOGRAPHIC = "no one tells the key stream of ChaCha20 (RFC 8439) from random bits"
IDEALISED = {
    "grid": "the noise is a rounded Gaussian, for each released number up to 2^-54 of "
    "epsilon and (1 + exp(epsilon)) 2^-81 of delta",
    "draw": "draws are made in floating point and stand for draws from the exact "
    "density",
    "declared": "training by another program is what is declared: its clipping, its "
    "batches and its noise",
    "float": "precision float, for research: floating-point noise and sums stand for "
    "real ones",
}
ROW = "one row"
ONE_ID = (
    "all rows of a person have one id, spelt alike; neighbouring data have the same "
    "ids{}; and what a row says was computed from no row of another person"
)
_ADDED = {Neighbours.ADD_OR_REMOVE_ONE: " but for a person who is added or removed"}
TRUSTED = (
    "what the program was given as public holds no private data but released values: "
    "the constants in losses, public terms, sets, counts, clip norms, the initial point"
)


@dataclasses.dataclass(frozen=True, repr=False)
class PrivacyReport:
    r"""A guarantee in words and numbers, public in all its parts.

    Attributes:
        status: `ENFORCED`, `CONDITIONAL` or `HEURISTIC`, the worst of the parts.
        epsilon: $\varepsilon$ at `delta`, from the accountant.
        delta: $\delta$.
        relation: The neighbouring relation.
        unit: What is protected: `"one row"`, or one person with at most so many rows.
        people: Who may have records in which level; `None` for one level.
        epsilon_by_person: $\varepsilon$ per kind of person.
        ledger: One row per kind of release.
        forecast: One row per kind of release, on its noise and its signal. Then the
            solver's own rows: on noise that a step multiplies, and on steps that are
            too long.
        assumptions: What the guarantee assumes.
        certificates: Bounds proved for this run, such as the chance that a batch
            overflows.
        accountant: How epsilon was computed.
        versions: The packages that computed and will run it.
        prng: The generator family of the keys. Never the key.
        mu: $\mu$ of Gaussian differential privacy, of the worst-off person, if that is
            exact for all releases together; otherwise `None`.
        source: The ledger that the report describes, for certificates. JSON does not
            have it.
    """

    status: Status
    epsilon: float
    delta: float
    relation: str
    people: str | None
    epsilon_by_person: dict[str, float]
    ledger: tuple[LedgerRow, ...]
    forecast: tuple[ForecastRow, ...]
    assumptions: tuple[str, ...]
    certificates: tuple[str, ...]
    accountant: str
    versions: dict[str, str]
    unit: str = ROW
    prng: str = "JAX counter-based generator, keys from the caller"
    mu: float | None = None
    source: Ledger | None = dataclasses.field(default=None, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        """Return a dict of fields; `source` only if no release can hold functions."""
        releases = () if self.source is None else self.source.releases
        is_plain = all(type(release) is Release for release in releases)
        return vars(self) | {"source": self.source if is_plain else None}

    def to_json(self) -> str:
        """Return the report, but for `source`, as JSON text that `from_json` reads."""
        plain = dataclasses.replace(self, source=None)

        def known(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            return {name: value for name, value in pairs if value is not None}

        fields = dataclasses.asdict(plain, dict_factory=known)
        fields["status"] = self.status.value
        return json.dumps(_replaced(fields, _INFINITE), indent=2)

    @classmethod
    def from_json(cls, text: str) -> "PrivacyReport":
        """Make a `PrivacyReport` from the text that `to_json` returned.

        Raises:
            ValueError: The text is not a report.
        """
        try:
            numbers = {text: number for number, text in _INFINITE.items()}
            fields = {"people": None} | _replaced(json.loads(text), numbers)
            fields |= {"status": Status(fields["status"]), "source": None}
            for row in fields["ledger"]:
                row["roles"] = {k: RoleRow(**v) for k, v in row["roles"].items()}
            kinds = {"ledger": LedgerRow, "forecast": ForecastRow}
            for name, kind in kinds.items():
                fields[name] = tuple(kind(**row) for row in fields[name])
            for name in ("assumptions", "certificates"):
                fields[name] = tuple(fields[name])
            return cls(**fields)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            message = f"PrivacyReport: not the JSON of a report: {error}."
            raise ValueError(message) from error

    def with_generator(self, generator: Hashable) -> Self:
        """Return a copy that names ChaCha20 if `generator` is that, else the report.

        A plan does not know the keys of its runs and assumes JAX's generators. The
        generator is given by its name, or as `jax.random.key_impl` of a key.
        """
        if str(generator) != str(CHACHA20):
            return self
        assumed = (CRYPTOGRAPHIC if v == GENERATOR else v for v in self.assumptions)
        prng = "ChaCha20, keys of 256 bits"
        return dataclasses.replace(self, assumptions=tuple(assumed), prng=prng)

    @property
    def claim(self) -> str:
        """The guarantee in one line: status, epsilon, delta, relation and people."""
        people = f", people {self.people}" if self.people else ""
        if self.status is Status.HEURISTIC:
            claim = "no epsilon is claimed"
        else:
            epsilon, delta = rounded_up(self.epsilon), rounded_up(self.delta)
            claim = f"epsilon = {epsilon} at delta = {delta}"
        return f"{self.status.value}: {claim} ({self.relation}{people})"

    def __repr__(self) -> str:
        """Return the guarantee in one line; `print` shows the whole report."""
        return f"PrivacyReport({self.claim})"

    def rows(self) -> dict[str, object]:
        """Return a dict of the rows that a notebook shows of the report, by name."""
        return {
            "guarantee": self.claim,
            "protects": self.unit,
            "releases": sum(row.count for row in self.ledger),
            "noise against signal": "; ".join(map(str, self.forecast)),
            "accountant": self.accountant,
            "assumptions": "; ".join(self.assumptions),
        }

    def _repr_html_(self) -> str:
        return html_table("PrivacyReport", self.rows())

    def __str__(self) -> str:
        """Return the report as a page of text."""
        lines = [self.claim, f"protects: {self.unit}"]
        if len(self.epsilon_by_person) > 1:
            lines += [
                f"  {person}: epsilon = {rounded_up(value)}"
                for person, value in self.epsilon_by_person.items()
            ]
        lines += ["releases:"]
        lines += [f"  {row}" for row in self.ledger] or ["  none"]
        lines += ["noise against signal:"]
        lines += [f"  {row}" for row in self.forecast] or ["  no noise"]
        lines += ["assumptions:"] + [f"  - {text}" for text in self.assumptions]
        if self.certificates:
            lines += ["certificates:"] + [f"  - {text}" for text in self.certificates]
        versions = ", ".join(f"{k} {v}" for k, v in self.versions.items())
        lines += [f"accountant: {self.accountant}", f"versions: {versions}"]
        return "\n".join(lines)


def describe(
    ledger: Ledger,
    budget: PrivacyBudget,
    *,
    levels: bool,
    unit: PersonUnit | None = None,
    dimensions: dict[str, int] | None = None,
    forecast: tuple[ForecastRow, ...] = (),
) -> PrivacyReport:
    """Return the `PrivacyReport` of a calibrated ledger.

    It names `people` if the problem has two levels. A `unit` of `None` is one row, and
    `dimensions` are coordinates by name of release. `forecast` has the solver's rows.
    """
    by_person = ledger.epsilons(budget.delta)
    if ledger.delta(budget.epsilon) <= budget.delta:
        # Solving for epsilon may end slightly above one that is known to hold.
        by_person = {p: min(v, budget.epsilon) for p, v in by_person.items()}
    releases, dimensions = ledger.releases, dimensions or {}
    certificates = [note for release in releases for note in release.notes]
    overflow = sum(release.overflow for release in releases)
    if overflow:
        cost = profiles.total_variation_delta(budget.epsilon, overflow)
        part = f": {rounded_up(cost / budget.delta, 3)} of it" if budget.delta else ""
        certificates.append(
            "a batch overflows or is drawn wrongly with probability at most "
            f"{rounded_up(overflow, 3)}, counted in delta{part}"
        )
    accountant, mu = _accountant(ledger, budget)
    packages = "dp-accounting", "jax", "optax", "equinox"
    return PrivacyReport(
        status=_STATUS[ledger.basis],
        epsilon=max(by_person.values(), default=0.0),
        delta=budget.delta,
        relation=ledger.neighbours.value,
        people=ledger.people.value if levels else None,
        unit=ROW if unit is None else str(unit),
        epsilon_by_person=by_person,
        ledger=tuple(release.row() for release in releases),
        forecast=tuple(r.forecast(dimensions.get(r.name)) for r in releases) + forecast,
        assumptions=_assumptions(ledger, budget, unit),
        certificates=tuple(certificates),
        accountant=accountant,
        versions={"dpbilevel": __version__}
        | {name: importlib.metadata.version(name) for name in packages},
        mu=mu,
        source=ledger,
    )


def _accountant(ledger: Ledger, budget: PrivacyBudget) -> tuple[str, float | None]:
    """Return how epsilon is computed, and the worst person's mu, `None` if inexact."""
    events = ledger.events().values()
    mus = [mu for mu in map(profiles.gaussian_mu, events) if mu is not None]
    if len(mus) == len(events):
        mu = None if ledger.failure else max(mus, default=0.0)
        return "exact Gaussian composition", mu
    exact = all(map(profiles.is_exact, events))
    pure = all(map(profiles.pure_epsilons, events))
    if exact and not pure:
        return "exact composition of a draw and Gaussian releases", None
    if exact or (budget.delta == 0 and pure):
        return "exact composition of draws without delta", None
    if any(map(profiles.uses_renyi, events)):
        return "profile and Renyi divergences of private selection", None
    return "privacy loss distributions, composed by weighed Fourier transforms", None


def _assumptions(
    ledger: Ledger, budget: PrivacyBudget, unit: PersonUnit | None
) -> tuple[str, ...]:
    releases, bounded, one_id = ledger.releases, (), ()
    if ledger.neighbours is Neighbours.ADD_OR_REMOVE_ONE:
        sizes = {role: n for r in releases for role, n in r.sizes.items()}
        rows = ", ".join(f"{role}: {padded_rows(n)}" for role, n in sizes.items())
        bounded = (
            f"there are no more records than the rows they are padded to ({rows}); not "
            "protected: that a larger dataset is refused",
        )
    if unit is not None:
        one_id = (ONE_ID.format(_ADDED.get(ledger.neighbours, "")),)
    queries = (query for release in releases for query in release.reads)
    precisions = {release.mechanism.precision for release in releases}
    return (
        *ledger.assumptions,
        *dict.fromkeys(text for q in queries for text in q.sampling.assumptions),
        *bounded,
        *large_delta(ledger, budget),
        *one_id,
        TRUSTED,
        *(IDEALISED[name] for name in sorted(precisions)),
        GENERATOR,
    )


def large_delta(ledger: Ledger, budget: PrivacyBudget) -> tuple[str, ...]:
    """Return a tuple with a remark if delta is not below 1 / records, else empty."""
    sizes = [n for release in ledger.releases for n in release.sizes.values()]
    if not sizes or budget.delta < 1 / max(sizes):
        return ()
    return (
        f"delta = {budget.delta:.3g} is not below one over the number of records: it "
        "allows publishing some record whole with that chance; take a smaller delta",
    )


_STATUS = {
    Basis.CLIPPED: Status.ENFORCED,
    Basis.CONSTANTS: Status.CONDITIONAL,
    Basis.UNPROVED: Status.HEURISTIC,
}


def rounded_up(value: float, digits: int = 6) -> str:
    """Return the value as text in few digits, rounded up: no claim is too small."""
    context = decimal.Context(prec=digits, rounding=decimal.ROUND_CEILING)
    return f"{float(context.create_decimal(repr(float(value)))):.{digits}g}"


def _replaced(value: Any, table: dict[Any, Any]) -> Any:
    """Return nested dicts and lists with leaves that are keys of `table` replaced."""
    if isinstance(value, dict):
        return {k: _replaced(v, table) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_replaced(v, table) for v in value]
    return table.get(value, value)
