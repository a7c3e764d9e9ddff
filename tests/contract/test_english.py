"""First words of docstrings and comments, by which a reader knows what comes back."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = "dpbilevel", "examples", "benchmarks", "docs"
# These words begin a riddle: the noun that they refer to stands somewhere else.
RIDDLES = "What|That|Those|Of|Where|With|Which|Nor|Who|Whose|By|As|None|One less"
RIDDLE = re.compile(rf"({RIDDLES})\b")


def docstrings(text):
    """Yield the line and the text of every docstring."""
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, kinds) and (found := ast.get_docstring(node)):
            yield getattr(node, "lineno", 1), found


def comments(text):
    """Yield the line and the text of every comment that stands on lines of its own."""
    last = -1
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not token.line[: token.start[1]].strip():
            if token.start[0] != last + 1:
                yield token.start[0], token.string.lstrip("# ")
            last = token.start[0]


def riddles(text):
    """Return the lines whose docstring or comment begins with such a word."""
    found = [*docstrings(text), *comments(text)]
    return [f"{line}: {words[:60]}" for line, words in found if RIDDLE.match(words)]


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_docstring_or_comment_begins_with_a_riddle(folder):
    files = sorted((ROOT / folder).rglob("*.py"))
    found = {f.relative_to(ROOT).as_posix(): riddles(f.read_text()) for f in files}
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "text",
    [
        '"""Of a whole run."""\n',
        'def f():\n    """None."""\n',
        "x = 1\n# Nor has a sum of them, times their number.\n",
    ],
)
def test_a_riddle_is_seen(text):
    assert len(riddles(text)) == 1


def test_second_lines_of_a_comment_may_begin_with_any_word():
    assert riddles("# The sum is exact\n# Where it is not, it is refused.\n") == []
