"""The command `dpbilevel audit`: runs of a config's solver on canaries."""

import math
from pathlib import Path

from ..audit.canaries import Canary, canaries
from ..audit.tradeoff import TradeOff, audit_canaries
from ..privacy.noise import root_key
from ..runs import checkpoint
from .config import Config
from .plans import Prepared, prepare

JSON = "audit.json"


def audit_config(config: Config, runs: int) -> tuple[TradeOff, ...]:
    """Return a tuple of `TradeOff`s, one per kind of person, for a config's solver.

    Returns:
        One outcome per kind of person.

    Raises:
        ValueError: The config cannot be planned, or too few runs.

    Privacy:
        Touches no data: neither the config's records nor released values.
    """
    found = canaries_of(prepare(config))
    return audit_canaries(found, key=root_key(), runs=runs)  # new noise each time


def canaries_of(prepared: Prepared) -> dict[str, Canary]:
    """Return the canaries of a planned run, by kind of person."""
    reads = getattr(prepared.problem, "x_in_records", True)  # a game has one level
    return canaries(prepared.solver, x_in_records=reads)


def save(folder: Path, outcomes: tuple[TradeOff, ...], config: Config) -> None:
    """Write `audit.json` into a folder, atomically.

    Raises:
        OSError: The disk refuses.
    """
    page = {
        "format": 1,
        "passed": all(outcome.passed for outcome in outcomes),
        "audits": [outcome.to_dict() for outcome in outcomes],
        "versions": checkpoint.versions(),
        "config": config.tables,
    }
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint.replace_json(folder / JSON, _plain(page))


def _plain(value):
    """Return a value with infinities, which JSON cannot hold, as strings."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    finite = not isinstance(value, float) or math.isfinite(value)
    return value if finite else str(value)
