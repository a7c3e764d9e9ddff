"""Numbers in cells, with declared units, thousands and decimal signs."""

import re
from collections.abc import Callable

import numpy as np


def check_unit(unit: str) -> None:
    """Check that a unit cannot be read as a part of a number.

    Raises:
        ValueError: The unit has digits, or only signs that numbers have.
    """
    if unit and not re.fullmatch(r"\D*[^\d\s+.,'’_-]\D*", unit):
        raise ValueError(
            f'unit must be a text without digits, such as "€", "%" or "kg", got '
            f"{unit!r}. Signs, points, commas and spaces alone are parts of numbers."
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
    groups = rf"[0-9]{{1,3}}(?:(?P<gap>[{comma}\s'’])[0-9]{{3}})(?:(?P=gap)[0-9]{{3}})*"
    pattern = re.compile(
        rf"([+-]?)\s*{name}\s*([+-]?)(?P<whole>{groups}|[0-9]*)"
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
    """Return a cell as a number in the form that programs write, or NaN."""
    try:
        return float(cell)
    except ValueError:
        return np.nan
