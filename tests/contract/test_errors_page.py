"""The page on errors has messages of the library, which point at its headings."""

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
HEADINGS = re.findall(r"^#{2,3} (.+)$", (ROOT / "docs/errors.md").read_text(), re.M)
FILES = sorted((ROOT / "dpbilevel").rglob("*.py"))


def texts(file):
    """Return the literals of a file, with braces in place of values of f-strings."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        if isinstance(node, ast.JoinedStr):
            parts = (getattr(part, "value", "{}") for part in node.values)
            yield "".join(part if isinstance(part, str) else "{}" for part in parts)


def anchor(heading):
    """Return the anchor that MyST gives a heading."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


@functools.cache
def literals():
    """Return all of them, in lines; not before a test asks."""
    return "\n".join(text for file in FILES for text in texts(file))


def test_headings_that_begin_small_are_words_of_messages():
    messages = [heading for heading in HEADINGS if heading[0].islower()]
    assert len(messages) > 20
    unknown = [
        words
        for heading in messages
        for words in heading.split(", ")
        if words not in literals()
    ]
    assert not unknown


def test_messages_point_at_headings_of_the_page():
    named = set(re.findall(r"docs/errors\.md#([\w-]+)", literals()))
    assert len(named) > 5
    assert named <= {anchor(heading) for heading in HEADINGS}
