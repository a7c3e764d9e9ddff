"""Texts of single cells as numbers and dates, by public constants."""

import contextlib
import datetime
import re
from collections.abc import Callable

import numpy as np

_DAY = datetime.timedelta(days=1)
_DATE_FORMATS = "%d.%m.%Y", "%m/%d/%Y", "%d/%m/%Y", "%Y/%m/%d"


def check_unit(unit: str) -> None:
    """Check that a unit cannot be read as a part of a number.

    Raises:
        ValueError: The unit has digits before its end, or only signs of numbers.
    """
    if unit and not re.fullmatch(r"\D*[^\d\s+.,'’_-](\D*|\d)", unit):
        raise ValueError(
            f'unit must be a text without digits, such as "€" or "kg", or with one at '
            f'its end, such as "m2", got {unit!r}.'
        )


def reader(unit: str, decimal: str) -> Callable[[str], float]:
    """Return a function that reads a cell as a number, or as NaN if it is no number.

    Args:
        unit: The unit, or empty.
        decimal: The decimal sign. If it and the unit are empty, only numbers in the
            form that programs write are read.
    """
    if not unit and not decimal:
        return number
    point, comma = (",", ".") if decimal == "," else (".", ",")
    name = rf"(?:{re.escape(unit.strip())})?"
    before = "" if unit[-1:].isdigit() else name  # else it is a part of the number
    groups = rf"[0-9]{{1,3}}(?:(?P<gap>[{comma}\s'’])[0-9]{{3}})(?:(?P=gap)[0-9]{{3}})*"
    pattern = re.compile(
        rf"([+-]?)\s*{before}\s*([+-]?)(?P<whole>{groups}|[0-9]*)"
        rf"(?:[{point}](?P<part>[0-9]*))?\s*{name}"
    )

    def read(cell: str) -> float:
        found = pattern.fullmatch(cell)
        if found is None or (found[1] and found[2]):
            return np.nan
        whole = re.sub("[^0-9]", "", found["whole"])
        return number(f"{found[1]}{found[2]}{whole}.{found['part'] or ''}")

    return read


def number(cell: str) -> float:
    """Return the number that a cell holds in the form that programs write, or NaN."""
    try:
        return float(cell)
    except ValueError:
        return np.nan


def date_reader(origin: str, form: str) -> Callable[[str], float]:
    """Return a function that reads a cell as a date: days since `origin`, or NaN.

    Args:
        origin: The day 0, as `2000-01-31`.
        form: The format of the cells as of `strptime`; empty for ISO 8601.

    Raises:
        ValueError: The origin is no date, or the format cannot be read.
    """
    first = datetime.datetime.fromisoformat(origin)
    if form and "%y" not in form.lower():
        raise ValueError(f"date_format = {form!r} has no year, %Y.")

    def parsed(cell: str) -> datetime.datetime:
        if form:
            return datetime.datetime.strptime(cell, form)
        return datetime.datetime.fromisoformat(cell)

    def read(cell: str) -> float:
        try:
            return (parsed(cell).replace(tzinfo=None) - first) / _DAY
        except (ValueError, OverflowError):
            return np.nan

    if np.isnan(read(first.strftime(form) if form else origin)):
        raise ValueError(f"cannot read dates by date_format = {form!r}.")
    return read


def declaration_for(cell: str) -> str:
    """Return keys of a config by which a cell would be a number or a date, or "".

    Privacy:
        NON-PRIVATE: for the curator, who sees the cell.
    """
    for form in ("", *_DATE_FORMATS):
        if not np.isnan(date_reader("2000-01-01", form)(cell)):
            shown = f" and date_format = {form!r}" if form else ""
            return f'transform = "date"{shown}'
    found = re.fullmatch(r"[+-]?\s*(\D*?)\s*[+-]?([0-9][0-9.,'’\s]*)(\D*\d?)", cell)
    if found is None:
        return ""
    unit = found[1].strip(" +-") or found[3].strip()
    decimal = "," if re.search(r",\d{1,2}$|,\d{4,}$|\..*,", found[2].strip()) else ""
    keys = {"unit": unit, "decimal": decimal or ("" if unit else ".")}
    with contextlib.suppress(ValueError):
        check_unit(unit)
        if not np.isnan(reader(unit, keys["decimal"])(cell)):
            return " and ".join(f'{k} = "{v}"' for k, v in keys.items() if v)
    return ""
