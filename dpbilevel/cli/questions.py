"""Questions of `dpbilevel init`: answered by flags, by the user, or by defaults."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

Answer = TypeVar("Answer")


@dataclasses.dataclass(frozen=True)
class Questions:
    """Asks what the flags do not say.

    Attributes:
        given: The text of each flag, by its name; `None` or missing where it was left
            out.
    """

    given: dict[str, Any]

    def has(self, flag: str) -> bool:
        """Whether a flag was given."""
        return self.given.get(flag) is not None

    def ask(
        self,
        flag: str,
        question: str,
        read: Callable[[str], Answer],
        default: str | None = None,
    ) -> Answer:
        """The answer to a question, asked until it can be read.

        Args:
            flag: The flag that answers it, without dashes.
            question: What to ask.
            read: Turns the text into an answer; `ValueError` says what is wrong.
            default: The answer of who types nothing, and of a closed input.

        Raises:
            ValueError: The text of the flag cannot be read, or there is no answer.
        """
        if self.has(flag):
            try:
                return read(str(self.given[flag]))
            except ValueError as error:
                raise ValueError(f"--{flag} {self.given[flag]}: {error}.") from error
        shown = f"{question} [{default}]: " if default else f"{question}: "
        while True:
            try:
                text = input(shown).strip()
            except EOFError as error:
                print()
                if default is None:
                    asked = question.split("\n")[-1]
                    raise ValueError(
                        f"there is no answer to '{asked}'; give --{flag} (all flags "
                        "and their forms: dpbilevel init --help)."
                    ) from error
                text = ""
            if not text and default is None:
                print("  an answer is needed")
                continue
            try:
                return read(text or default or "")
            except ValueError as error:
                print(f"  {error}")


def one_of(*options: str) -> Callable[[str], str]:
    """Reads one of these words, or the beginning of one.

    Args:
        options: The words.
    """

    def read(text: str) -> str:
        found = (
            [text] if text in options else [o for o in options if o.startswith(text)]
        )
        if len(found) != 1:
            raise ValueError(f"give one of {', '.join(options)}")
        return found[0]

    return read


def number(low: float, high: float = float("inf"), kind: type = float) -> Callable:
    """Reads a number above `low` and below `high`.

    Args:
        low: Exclusive.
        high: Exclusive.
        kind: `int` or `float`.
    """

    def read(text: str):
        what = "an integer" if kind is int else "a number"
        try:
            value = kind(text.replace("_", ""))
        except ValueError as error:
            raise ValueError(f"give {what}, got {text}") from error
        if not low < value < high:
            below = f" and below {high:g}" if high < float("inf") else ""
            raise ValueError(f"give {what} above {low:g}{below}, got {text}")
        return value

    return read
