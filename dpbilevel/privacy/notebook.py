"""Small tables that notebooks show in place of a page of text."""

import html
from collections.abc import Mapping


def table(title: str, rows: Mapping[str, object]) -> str:
    """Return an HTML table of two columns; every text in it is escaped.

    Args:
        title: The caption.
        rows: The name and the value of each row.
    """
    body = "".join(
        f"<tr><th style='text-align:left'>{html.escape(str(name))}</th>"
        f"<td style='text-align:left'>{html.escape(str(value))}</td></tr>"
        for name, value in rows.items()
    )
    caption = f"<caption>{html.escape(title)}</caption>"
    return f"<table>{caption}<tbody>{body}</tbody></table>"
