"""Differentially private bilevel optimization in JAX."""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

# Fail here if it is missing, and not at a later name. It is not imported yet: that
# takes long, and the command line first has to watch for interrupts.
if importlib.util.find_spec("jax") is None:
    raise ModuleNotFoundError("dpbilevel needs jax: pip install jax", name="jax")

from ._version import __version__ as __version__

if TYPE_CHECKING:
    from ._public import *  # noqa: F403
    from .search.estimator import PrivateSearch as PrivateSearch
else:

    def __getattr__(name: str) -> Any:
        """Return a public name or module of the library, imported at its first use."""
        if name == "__all__":
            return _names()
        if name.startswith("_") or not name.isidentifier():
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        # Modules first: they import each other while the public names are incomplete.
        if importlib.util.find_spec(f"{__name__}.{name}"):
            return importlib.import_module(f".{name}", __name__)
        if name == "PrivateSearch":
            return _private_search()
        from . import _public

        value = vars(_public).get(name)
        if value is None:
            raise _unknown(name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        """Return the public names, imported or not."""
        return sorted(_names())


def _names() -> list[str]:
    """Return the list of names that `from dpbilevel import *` binds."""
    from . import _public

    return ["PrivateSearch", "__version__", *_public.NAMES]


def _private_search() -> type:
    """Return the class `PrivateSearch`; without scikit-learn its calls raise errors."""
    try:
        return importlib.import_module(".search.estimator", __name__).PrivateSearch
    except ImportError as error:  # reading a name may raise `AttributeError` only
        from ._extras import stand_in

        return stand_in("PrivateSearch", error)


def _unknown(name: str) -> AttributeError:
    """Return the `AttributeError` for an unknown name, naming a package that has it."""
    from . import _public

    message = f"module {__name__!r} has no attribute {name!r}"
    for package in (getattr(_public, public) for public in _public.NAMES):
        if name in getattr(package, "__all__", ()):
            message += f"; it is {package.__name__}.{name}"
            break
    return AttributeError(message, name=name, obj=importlib.import_module(__name__))
