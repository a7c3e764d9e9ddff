"""Configs that differ from a text in a few keys."""

import copy
import tomllib


def changed(text, changes):
    """The tables of a text, after changes `(dotted key, value)`; `None` deletes."""
    tables = tomllib.loads(text)
    for path, value in changes:
        *parents, key = path.split(".")
        table = tables
        for parent in parents:
            table = table.setdefault(parent, {})
        if value is None:
            del table[key]
        else:
            table[key] = copy.deepcopy(value)
    return tables
