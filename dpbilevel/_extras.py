"""Packages that only a part of the library needs, or that take long to import."""

import importlib
import importlib.util
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import dp_accounting as dp_accounting
else:

    class _DpAccounting:
        """dp-accounting, imported when it is first used.

        With the parts of SciPy that it imports it takes longer to import than JAX.
        """

        def __getattr__(self, name: str) -> Any:
            return getattr(importlib.import_module("dp_accounting"), name)

    dp_accounting = _DpAccounting()


def public_names(names: dict[str, Any]) -> list[str]:
    """Return a sorted list of the public names in a package's `globals()`.

    The modules themselves are left out, but `debug`.
    """
    modules = {n for n, v in names.items() if isinstance(v, types.ModuleType)}
    hidden = modules - {"debug"} | {"missing", "public_names"}
    return sorted(n for n in names if not n.startswith("_") and n not in hidden)


_PACKAGES = {"sklearn": "scikit-learn"}  # modules whose package has another name


def missing(what: str, *modules: str, extra: str = "cli") -> str:
    """Return an error message that says how to install missing optional modules.

    `extra` is the group of pyproject.toml that has them.
    """
    packages = [_PACKAGES.get(module, module) for module in modules]
    return (
        f"{what} needs {' and '.join(packages)}: run pip install -e '.[{extra}]' in a "
        f"clone of dpbilevel, or pip install {' '.join(packages)}"
    )


def check_installed(what: str, *modules: str, extra: str = "cli") -> None:
    """Raise `ValueError` if an optional module that `what` needs is missing."""
    absent = [name for name in modules if importlib.util.find_spec(name) is None]
    if absent:
        raise ValueError(missing(what, *absent, extra=extra))


def stand_in(name: str, error: ImportError) -> type:
    """Make a class whose calls raise `ImportError` with the text of a failed import."""

    def refuse(cls: type, *args: Any, **kwargs: Any) -> Any:
        raise ImportError(str(error)) from error

    members = {"__new__": refuse, "__doc__": str(error), "__module__": "dpbilevel"}
    return type(name, (), members)
