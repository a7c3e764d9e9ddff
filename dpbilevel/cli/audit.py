"""The command `dpbilevel audit`: a config's solver on canaries, and what it writes."""

import io
import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import scipy

from ..audit.canaries import Canary, canaries
from ..audit.claims import TradeOffCurve
from ..audit.tradeoff import TradeOff, audit_canaries
from ..privacy.noise import root_key
from ..runs import checkpoint
from ..runs.interrupts import uninterruptible
from .config import Config
from .prepared import Prepared, prepare

if TYPE_CHECKING:  # an extra
    from matplotlib.figure import Figure

JSON, PICTURE = "audit.json", "audit.png"


def audit_config(config: Config, runs: int) -> tuple[TradeOff, ...]:
    """Audits the calibrated solver of a config with `runs` runs per side.

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
    """The canaries of a planned run, by kind of person."""
    reads = getattr(prepared.problem, "x_in_records", True)  # a game has one level
    return canaries(prepared.solver, x_in_records=reads)


def check_folder(folder: Path) -> None:
    """Raises `ValueError` before any work, unless a folder is new or empty."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out {folder} is a file; give a new folder.")
    names = {file.name for file in folder.glob("*")}
    others = sorted(names - {JSON, PICTURE})
    if others:
        raise ValueError(
            f"--out {folder} is not empty (it holds {others[0]!r}); give a new folder."
        )
    if names:
        raise ValueError(
            f"--out {folder} holds an earlier audit; give a new folder, or move "
            f"{' and '.join(sorted(names))} away."
        )


def save(folder: Path, outcomes: tuple[TradeOff, ...], config: Config) -> None:
    """Writes `audit.png`, then `audit.json`, each whole or not at all, into a folder.

    Raises:
        OSError: The disk refuses.
    """
    picture = draw(outcomes)
    page = {
        "format": 1,
        "passed": all(outcome.passed for outcome in outcomes),
        "audits": [outcome.to_dict() for outcome in outcomes],
        "versions": checkpoint.versions(),
        "config": config.tables,
    }
    text = json.dumps(_plain(page), indent=2, allow_nan=False) + "\n"
    with uninterruptible():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / JSON).unlink(missing_ok=True)  # never a picture of another audit
        checkpoint.replace(folder / PICTURE, picture)
        checkpoint.replace(folder / JSON, text.encode())


def _plain(value):
    """Replaces infinities, which JSON has no number for, by strings."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    finite = not isinstance(value, float) or np.isfinite(value)
    return value if finite else str(value)


def draw(outcomes: tuple[TradeOff, ...]) -> bytes:
    """Draws what every claim allows and what was measured, one outcome a panel, as PNG.

    Scales are normal: Gaussian claims are straight lines.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    buffer = io.BytesIO()
    FigureCanvasAgg(whole_figure(outcomes)).print_png(buffer)
    return buffer.getvalue()


def whole_figure(outcomes: tuple[TradeOff, ...]) -> "Figure":
    """The figure of all outcomes, to be drawn in any format."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * len(outcomes), 5.0), layout="constrained")
    panels = np.ravel(figure.subplots(1, len(outcomes)))
    for axes, outcome in zip(panels, outcomes, strict=True):
        _draw_one(axes, outcome)
    return figure


_TICKS = (0.001, 0.01, 0.1, 0.5, 0.9, 0.99, 0.999)


def _draw_one(axes, outcome: TradeOff) -> None:
    scale = scipy.stats.norm.ppf
    rates = scipy.stats.norm.cdf(np.linspace(-3.6, 3.6, 400))
    allowed = np.clip(TradeOffCurve(outcome.claim)(rates), 1e-6, 1 - 1e-6)
    x, y = scale(rates), scale(allowed)
    axes.fill_between(x, y, 9, color="#D55E00", alpha=0.12, lw=0)
    axes.plot(x, y, color="#D55E00", label="claimed at most")
    axes.plot(x, x, "--", color="0.6", lw=1, label="guessing")
    for violated, color, label in (
        (False, "#0072B2", "measured, with confidence"),
        (True, "#000000", "violation"),
    ):
        cuts = [cut for cut in outcome.cuts if cut.violated is violated]
        if cuts:
            measured = scale([[c.false_positives, c.true_positives] for c in cuts]).T
            axes.plot(*measured, "s" if violated else "o", color=color, label=label)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(scale(_TICKS), [f"{t:g}" for t in _TICKS], fontsize=8)
    axes.set(xlim=(-3.5, 3.5), ylim=(-3.5, 3.5))
    axes.set_xlabel("false positive rate, at most")
    axes.set_ylabel("true positive rate, at least")
    axes.set_title(
        f"{outcome.name}: {outcome.verdict}\n{outcome.counted}\n"
        f"claimed μ {outcome.claimed_mu:.3f}, measured at least "
        f"{outcome.measured_mu:.3f}",
        fontsize=9,
        loc="left",
    )
    axes.legend(fontsize=8, frameon=False, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
