"""Command line, a table of its flags, and the templates of the files that it writes."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # an extra
    from jinja2 import Environment


def environment() -> "Environment":
    """Return the jinja2 `Environment` of the templates; unknown names raise."""
    import jinja2

    from ..audit.certificate import environment

    return environment(jinja2.PackageLoader("dpbilevel.cli"))
