"""Differentially private bilevel optimization in JAX."""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

# Where it is missing, fail here and not at a later name; but do not import it yet: it
# takes long, and the command line first has to watch for interrupts.
if importlib.util.find_spec("jax") is None:
    raise ModuleNotFoundError("dpbilevel needs jax: pip install jax", name="jax")

from ._version import __version__ as __version__

if TYPE_CHECKING:
    from ._public import *  # noqa: F403
    from .search.estimator import PrivateSearch as PrivateSearch
else:

    def __getattr__(name: str) -> Any:
        """A public name or a module of the library, imported when it is first read."""
        if name == "__all__":
            return _names()
        if name.startswith("_") or not name.isidentifier():
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        # Modules first: they read each other while the public names are not complete.
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
        """The public names, imported or not."""
        return sorted(_names())


def _names() -> list[str]:
    """What `import *` binds."""
    from . import _public

    return ["PrivateSearch", "__version__", *_public.__all__]


def _private_search() -> type:
    """The class, or where scikit-learn is missing one whose calls say so."""
    try:
        return importlib.import_module(".search.estimator", __name__).PrivateSearch
    except ImportError as error:  # reading a name raises `AttributeError` alone
        from ._extras import stand_in

        return stand_in("PrivateSearch", error)


def _unknown(name: str) -> AttributeError:
    """The error for a name that only a package of the library has, if any."""
    from . import _public

    message = f"module {__name__!r} has no attribute {name!r}"
    for package in (getattr(_public, public) for public in _public.__all__):
        if name in getattr(package, "__all__", ()):
            message += f"; it is {package.__name__}.{name}"
            break
    return AttributeError(message, name=name, obj=importlib.import_module(__name__))
