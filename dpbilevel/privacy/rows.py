"""Rows of the report: what was released, and how the noise compares with the signal."""

import dataclasses
import html
import math
from collections.abc import Mapping

# A clip norm below this part of the declared bound is shown in the report.
_SHORT = 0.5


@dataclasses.dataclass(frozen=True)
class RoleRow:
    """Part of a row of the report: which records of one role a release reads, and how.

    Attributes:
        records: Planned number of records.
        sampling: How a batch is drawn.
        sensitivity: Largest change of the value by one record; `None` if a declaration
            does not say.
    """

    records: int
    sampling: str
    sensitivity: float | None = None


@dataclasses.dataclass(frozen=True)
class LedgerRow:
    """Row of the report on one kind of release: what is read, mechanism and noise.

    Attributes:
        release: Name of the release.
        count: Number of releases.
        roles: What is read, by role.
        mechanism: Class of the mechanism.
        precision: Arithmetic of the mechanism.
        basis: What the sensitivities rest on.
        noise_multiplier: Standard deviation of the noise, in units of the sensitivity.
        noise_std: Standard deviation of the noise per coordinate.
        clip_norm: Clip norm; if nothing is clipped, the largest norm of the value.
        temperature: Difference of scores that a draw hardly sees.
        declared: Words of a declaration.
    """

    release: str
    count: int
    roles: dict[str, RoleRow]
    mechanism: str
    precision: str
    basis: str
    noise_multiplier: float | None = None
    noise_std: float | None = None
    clip_norm: float | None = None
    temperature: float | None = None
    declared: str | None = None

    def __str__(self) -> str:
        """Return the row as a line of text."""
        made = f"{self.count} x {self.release}"
        if self.declared is not None:
            ((role, part),) = self.roles.items()
            return f"{made}: declared, {self.declared} | {role}: n = {part.records}"
        roles = "; ".join(
            f"{role}: n = {part.records}, {part.sampling}, sensitivity "
            f"{part.sensitivity:.3g}"
            for role, part in self.roles.items()
        )
        if self.temperature is not None:
            noise = f", temperature {self.temperature:.3g}"
        else:
            multiplier = f"{self.noise_multiplier:.4g}"
            noise = f" noise std {self.noise_std:.3g} (multiplier {multiplier})"
        return f"{made}: {self.mechanism}{noise} | {roles}"


@dataclasses.dataclass(frozen=True)
class ForecastRow:
    """Row of the report: noise of one kind of release beside its signal, or long steps.

    Attributes:
        release: Name of the release, or of the steps.
        largest: Name of the bound that the noise is compared with.
        noise_std_over_clip_norm: Standard deviation of the noise over that bound.
        break_even_coordinates: Number of coordinates at which the expected norm of the
            noise reaches the bound.
        coordinates: Number of coordinates, if known.
        noise_norm_over_clip_norm: Expected norm of the noise over the bound, if known.
        clip_norm_over_bound: Clip norm over the declared bound, if one is declared.
        temperature: Difference of scores that a draw hardly sees.
        declared: Words of a declaration, which leaves the signal open.
        penalty: Number that a step multiplies noise with.
        multiplied_noise_over_signal: That noise over the largest signal.
        step_size: Size of steps that are too long.
        public_curvature: Curvature of the public terms.
        record_curvature: Declared smoothness of one record's loss.
        stable_product: Largest product of step size and smoothness that is stable.
        from_start: Whether steps are too long from the initial point on.
    """

    release: str
    largest: str = "clip norm"
    noise_std_over_clip_norm: float | None = None
    break_even_coordinates: float | None = None
    coordinates: int | None = None
    noise_norm_over_clip_norm: float | None = None
    clip_norm_over_bound: float | None = None
    temperature: float | None = None
    declared: str | None = None
    penalty: float | None = None
    multiplied_noise_over_signal: float | None = None
    step_size: float | None = None
    public_curvature: float | None = None
    record_curvature: float | None = None
    stable_product: float | None = None
    from_start: bool = False

    def __str__(self) -> str:
        """Return the row as a line of text."""
        if self.declared is not None:
            said = "the declaration does not say how large the signal is"
            return f"{self.release}: {said}"
        if self.multiplied_noise_over_signal is not None:
            return self.release + self._multiplied(self.multiplied_noise_over_signal)
        if self.step_size is not None:
            return self.release + self._steps(self.step_size)
        if self.temperature is not None:
            size = f"{self.temperature:.3g}"
            said = f"scores closer than {size} are nearly as likely as the best"
            return f"{self.release}: {said}"
        text = (
            f"{self.release}: noise std is {self.noise_std_over_clip_norm:.2g} of the "
            f"{self.largest} per coordinate; "
        )
        ratio, part = self.noise_norm_over_clip_norm, self.clip_norm_over_bound
        if ratio is None:
            most = f"{self.break_even_coordinates:.3g}"
            text += f"noise exceeds any possible signal beyond {most} coordinates"
        else:
            verdict = "good below 0.3"
            if ratio > 1:
                verdict = "every single release is mostly noise"
            text += (
                f"noise / largest possible signal = {ratio:.2g} ({self.coordinates} "
                f"coordinates; {verdict})"
            )
        if part is not None and part < _SHORT:
            text += (
                f"; clips at {part:.2g} of the declared bound, so the longest records "
                "count less than the problem says"
            )
        return text

    def _multiplied(self, ratio: float) -> str:
        text = (
            f": their noise, times the penalty of {self.penalty:.3g}, is about "
            f"{ratio:.2g} of the largest signal"
        )
        more = (
            f" (every hypergradient is mostly noise; with {ratio:.2g} times the "
            "epsilon or the records both would be equal)"
        )
        return text + more * (ratio > 1)

    def _steps(self, size: float) -> str:
        bound, most = self.record_curvature, self.stable_product
        if bound is not None and most is not None:
            return (
                f", of size {size:.3g}, may be too long for the records, whose "
                f"declared smoothness is {bound:.3g}: the product, {size * bound:.3g}, "
                f"is above {most:.2g}. Use a step size of at most {most / bound:.2g}"
            )
        curvature = self.public_curvature or math.inf
        where = "" if self.from_start else " at the ends of the set of x"
        shorter = f"a step size of at most {1 / curvature:.2g}, or "
        return (
            f", of size {size:.3g}, overshoot the public terms, whose curvature is "
            f"{curvature:.3g}{where}: such steps are shortened there, in all "
            f"coordinates. Use {shorter * math.isfinite(curvature)}smaller public terms"
        )


def html_table(title: str, rows: Mapping[str, object]) -> str:
    """Return an HTML table of names and values; every text in it is escaped."""
    body = "".join(
        f"<tr><th style='text-align:left'>{html.escape(str(name))}</th>"
        f"<td style='text-align:left'>{html.escape(str(value))}</td></tr>"
        for name, value in rows.items()
    )
    caption = f"<caption>{html.escape(title)}</caption>"
    return f"<table>{caption}<tbody>{body}</tbody></table>"
