"""Strict reader of TOML tables as frozen dataclasses; it names every mistake."""

import contextlib
import dataclasses
import difflib
import enum
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from .._checks import did_you_mean

Built = TypeVar("Built")

_WORDS = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    str | float: "a string or a number",
}
_SECRETS = ("seed", "key", "rng", "prng", "random_state")


@dataclasses.dataclass(frozen=True)
class Location:
    """Place of a table in a file, for error messages."""

    file: str  # as the user gave it
    table: str = ""  # its dotted name; empty for the top level

    def child(self, name: str) -> "Location":
        """Return the `Location` of the table `name` inside this one."""
        return Location(self.file, f"{self.table}.{name}" if self.table else name)

    def error(self, message: str) -> ValueError:
        """Return a `ValueError` that names file and table before a message."""
        return ValueError(f"{self}: {message}")

    @contextlib.contextmanager
    def named_in_errors(self, *kinds: type[Exception]) -> Iterator[None]:
        """Enter a context that puts this place before messages of `ValueError`s."""
        try:
            yield
        except (ValueError, *kinds) as error:
            raise self.error(str(error)) from error

    def __str__(self) -> str:
        """Return the file, and the table in brackets."""
        return f"{self.file}: [{self.table}]" if self.table else self.file


@dataclasses.dataclass(frozen=True)
class Reader:
    """Builder of dataclasses from tables.

    The keys of a table are the fields that a text file can hold. A missing key takes
    the default of its field.

    Attributes:
        families: Classes that `type` may name, by name, for each abstract class.
        reserved: Names of fields that are never keys.
    """

    families: Mapping[type, Mapping[str, type]]
    reserved: frozenset[str] = frozenset()

    def build(
        self,
        kind: type[Built] | Mapping[str, type[Built]],
        table: Any,
        place: Location,
        beside: Sequence[str] = (),
    ) -> Built:
        """Return an instance of a dataclass, built from a table.

        Args:
            kind: The dataclass, or classes of which `type` in the table names one.
            table: The table.
            place: Place of the table.
            beside: Further keys of the table, which the caller has removed.

        Raises:
            ValueError: A key is unknown or missing, or a value has the wrong type or
                is refused by the class; the message names file and table.
        """
        check_table(table, place)
        if isinstance(kind, Mapping):
            table = dict(table)
            kind = kind[check_choice(table.pop("type", None), kind, place, "type")]
        assert dataclasses.is_dataclass(kind)
        hints, keys, required = typing.get_type_hints(kind), [], []
        for field in dataclasses.fields(kind):
            hint = _plain(hints[field.name])
            is_key = (  # of a text file
                hint in _WORDS
                or hint in self.families
                or typing.get_origin(hint) in (tuple, typing.Literal)
                or dataclasses.is_dataclass(hint)
                or (isinstance(hint, type) and issubclass(hint, enum.Enum))
            )
            if is_key and field.init and field.name not in self.reserved:
                keys.append(field.name)
                # Both are the same, dataclasses.MISSING, if there is neither.
                if field.default is field.default_factory:
                    required.append(field.name)
        known = [k for k in table if k in keys]
        values = collect_errors(
            *((self.convert, hints[k], table[k], place, k) for k in known),
            errors=errors_of_keys(table, place, [*keys, *beside], required),
        )
        with place.named_in_errors(TypeError):
            return kind(**dict(zip(known, values, strict=True)))

    def convert(self, hint: Any, value: Any, place: Location, key: str) -> Any:
        """Return the value of a key, converted to the type annotation, or refuse it."""
        hint = _plain(hint)
        origin, members = typing.get_origin(hint), typing.get_args(hint)
        if hint in self.families:
            if isinstance(value, str):  # short for a table with nothing but its type
                value = {"type": value}
            return self.build(self.families[hint], value, place.child(key))
        if origin is typing.Literal:
            return check_choice(value, members, place, key)
        if isinstance(hint, type) and issubclass(hint, enum.Enum):
            options = [member.value for member in hint]
            return hint(check_choice(value, options, place, key))
        if dataclasses.is_dataclass(hint):
            return self.build(typing.cast(type, hint), value, place.child(key))
        if origin is not tuple:
            kinds = members or (hint,)
            if float in kinds and type(value) is int:  # 1 is a number
                return float(value)
            if type(value) not in kinds:  # by its own type: true is an int in Python
                raise place.error(f"{key} must be {_WORDS[hint]}, got {_shown(value)}.")
            return value
        if not isinstance(value, list):
            raise place.error(f"{key} must be a list, got {_shown(value)}.")
        repeated = len(members) == 2 and members[1] is Ellipsis
        if not repeated and len(value) != len(members):
            sizes = f"{len(members)} values, got {len(value)}"
            raise place.error(f"{key} must be a list of {sizes}.")
        kinds = members[:1] * len(value) if repeated else members
        parts = (
            (self.convert, kind, item, place, f"{key} (entry {i})")
            for i, (kind, item) in enumerate(zip(kinds, value, strict=True), 1)
        )
        return tuple(collect_errors(*parts))


def check_table(value: object, place: Location) -> None:
    """Check that the value at a place is a table; raise `ValueError` otherwise."""
    if not isinstance(value, dict):
        raise place.error(f"must be a table, got {_shown(value)}.")


def errors_of_keys(
    table: Mapping[str, Any],
    place: Location,
    allowed: Sequence[str],
    required: Sequence[str],
) -> list[ValueError]:
    """Return a list: an error for each key not allowed, and one for missing keys."""
    listed, wrong, meant = f"Allowed keys: {', '.join(allowed)}.", [], []
    for key in [key for key in table if key not in allowed]:
        text = f"unknown key {key!r}{did_you_mean(key, allowed)}. {listed}"
        if key in _SECRETS:
            text = (
                f"unknown key {key!r}. Remove it: whoever knows the key can subtract "
                "the noise, so keys come from the operating system's entropy."
            )
        else:
            meant += difflib.get_close_matches(key, allowed, n=1)
        wrong.append(place.error(text))
    missing = [key for key in required if key not in table and key not in meant]
    if missing:
        keys = f"key{'s' if len(missing) > 1 else ''} {', '.join(map(repr, missing))}"
        wrong.append(place.error(f"missing {keys}. {listed}"))
    return wrong


def collect_errors(
    *calls: tuple[Any, ...], errors: Iterable[ValueError] = ()
) -> list[Any]:
    """Make every call and return a list of results; raise all errors together.

    A call is a function with its arguments, and `errors` were found before. The message
    has one line per error.
    """
    found, errors = [], [*errors]
    for function, *arguments in calls:
        try:
            found.append(function(*arguments))
        except ValueError as error:
            errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise ValueError("\n".join(map(str, errors))) from errors[0]
    return found


def check_choice(value: Any, options: Iterable[str], place: Location, key: str) -> Any:
    """Return the value of a key, checked to be among `options`; `None` is missing."""
    options = list(options)
    listed = ", ".join(f'"{option}"' for option in options)
    if value is None:
        raise place.error(f"missing key {key!r}. It must be one of {listed}.")
    if value not in options:
        hint = did_you_mean(value, options) if isinstance(value, str) else ""
        raise place.error(f"{key} must be one of {listed}, got {_shown(value)}{hint}.")
    return value


def _plain(hint: Any) -> Any:
    """Return one type of a union, preferably one that TOML has; others unchanged."""
    origin = typing.get_origin(hint)
    if hint in _WORDS or origin not in (typing.Union, types.UnionType):
        return hint
    members = [m for m in typing.get_args(hint) if m is not type(None)]
    return next((m for m in members if m in _WORDS), members[0])


def _shown(value: object) -> str:
    if isinstance(value, dict | list):
        return "a table" if isinstance(value, dict) else "a list"
    if isinstance(value, bool):
        return str(value).lower()
    return f'the string "{value}"' if isinstance(value, str) else str(value)
