"""Command line, and the templates of the files that it writes."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # an extra
    from jinja2 import Environment


def environment(**options: Any) -> "Environment":
    """Return the jinja2 `Environment` of the templates; unknown names raise."""
    import jinja2

    return jinja2.Environment(
        loader=jinja2.PackageLoader("dpbilevel.cli"),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        **options,
    )
