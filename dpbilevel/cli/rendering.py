"""Templates of the files that the command line writes; needs jinja2."""

from typing import Any

import jinja2


def environment(**options: Any) -> jinja2.Environment:
    """Return the templates of the command line; an unknown name in one is an error."""
    return jinja2.Environment(
        loader=jinja2.PackageLoader("dpbilevel.cli"),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        **options,
    )
