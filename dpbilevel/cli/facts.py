"""The public facts about a file of records, as they are typed for `dpbilevel init`."""

import csv
import dataclasses
import math
import re
from pathlib import Path

from .columns import Value
from .files import SEPARATORS, opened, read_csv, read_header
from .numbers import check_unit

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"\s*({_NUMBER})\s*\.\.\s*({_NUMBER})\s*([^\s\d.,].*?)?\s*")
# Of a public file: more different values are those of a number, or of no category.
_MOST_CATEGORIES, _FEW_NUMBERS = 30, 10


@dataclasses.dataclass(frozen=True)
class Range:
    """The plausible values of a numeric column; values beyond are cut to its ends.

    Args:
        low: The smallest value.
        high: The largest value.
        unit: Text that may stand before or after a number.
    """

    low: float
    high: float
    unit: str = ""

    def __post_init__(self):
        check_unit(self.unit)
        if not (self.low < self.high and math.isfinite(self.high - self.low)):
            raise ValueError(f"a range must be increasing and finite, got {self}")

    def __str__(self) -> str:
        """As it is typed."""
        return f"{self.low:g}..{self.high:g} {self.unit}".strip()


Values = tuple[Value, ...]
Content = Range | Values


def range_of(text: str) -> Range:
    """Return the range that the text `LOW..HIGH` or `LOW..HIGH UNIT` describes.

    Raises:
        ValueError: The text has another form.
    """
    found = _RANGE.fullmatch(text)
    if found is None:
        raise ValueError("give LOW..HIGH, such as 0..100 or 0..100 €")
    return Range(float(found[1]), float(found[2]), found[3] or "")


def values_of(text: str) -> Values:
    """Reads values separated by commas; quoted ones may hold commas.

    Raises:
        ValueError: There is none, or one is there twice.
    """
    cells = next(csv.reader([text], skipinitialspace=True), [])
    found = tuple(_value(cell.strip()) for cell in cells if cell.strip())
    if not found or len(set(found)) < len(found):
        raise ValueError("give different values, separated by commas")
    return found


def content_of(text: str) -> Content:
    """Reads what is in a column: `LOW..HIGH`, or at least two values.

    Raises:
        ValueError: It is neither.
    """
    if _RANGE.fullmatch(text):
        return range_of(text)
    if "," not in text:
        raise ValueError(
            "give LOW..HIGH for a number, such as 0..100, or the values of a category, "
            "separated by commas"
        )
    return values_of(text)


def shown(content: Content) -> str:
    """As it is typed."""
    if isinstance(content, Range):
        return str(content)
    return ", ".join(f'"{v}"' if "," in str(v) else str(v) for v in content)


@dataclasses.dataclass(frozen=True)
class Header:
    """The names of the columns of a file, which are public.

    Attributes:
        file: The file.
        separator: What is between them.
        names: The names.
    """

    file: Path
    separator: str
    names: tuple[str, ...]


def header_of(file: Path) -> Header:
    """Return the names in the first line of a file; read nothing else.

    Raises:
        ValueError: There is no such file, it is empty or no text in UTF-8, or its first
            row holds numbers or a name twice, and so is no header.
        OSError: It cannot be read.
    """
    if not file.is_file():
        raise ValueError(f"there is no file {file}; give the path of a CSV file.")
    if file.suffix == ".toml":
        raise ValueError(f"{file} is a config; give the CSV file of the records.")
    with opened(file) as lines:
        first = lines.readline()
    separator = max(SEPARATORS, key=first.count)  # commas where there is none
    names = tuple(read_header(file, separator))
    if any(isinstance(_value(name), int | float) or not name for name in names):
        raise ValueError(
            f"the first row of {file} has a number or nothing in the place of a name. "
            "It must be a header, with the name of every column; add one."
        )
    return Header(file, separator, names)


def count_rows(header: Header) -> int:
    """The number of rows below the header: public under replace-one only."""
    return read_csv(header.file, header.separator).rows


def proposed(header: Header) -> dict[str, Content]:
    """What is in each column of a public file, where that is clear.

    Privacy:
        NON-PRIVATE: reads all values. For files that are public.
    """
    table = read_csv(header.file, header.separator)
    found = ((name, _proposal({*table.columns[name]} - {""})) for name in header.names)
    return {name: content for name, content in found if content is not None}


def _proposal(cells: set[str]) -> Content | None:
    numbers = {number for number in map(_number, cells) if math.isfinite(number)}
    if len(numbers) > _FEW_NUMBERS and all(map(math.isfinite, map(_number, cells))):
        return Range(
            _rounded(min(numbers), math.floor), _rounded(max(numbers), math.ceil)
        )
    values = {_value(cell) for cell in cells}
    if 2 <= len(values) <= _MOST_CATEGORIES:
        return tuple(sorted(values, key=lambda v: (isinstance(v, str), v)))
    return None


def _rounded(number: float, direction) -> float:
    """To two digits, away from the values between."""
    if number == 0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(abs(number))) - 1)
    return float(f"{direction(number / unit) * unit:.6g}")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _value(text: str) -> Value:
    """A number where the text is the plain form of one, else the text."""
    for kind in (int, float):
        try:
            number = kind(text)
        except ValueError:
            continue
        if abs(number) < math.inf and f"{number}" == text:
            return number
    return text
