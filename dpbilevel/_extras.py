"""What is said where a package is missing that only a part of the library needs."""

from typing import Any

_PACKAGES = {"sklearn": "scikit-learn"}  # where module and package have two names


def missing(what: str, *modules: str) -> str:
    """The message of a part of the library whose optional packages are missing.

    Args:
        what: The part.
        *modules: The modules that cannot be imported.
    """
    packages = [_PACKAGES.get(module, module) for module in modules]
    return (
        f"{what} needs {' and '.join(packages)}: run pip install -e '.[cli]' in a "
        f"clone of dpbilevel, or pip install {' '.join(packages)}"
    )


def stand_in(name: str, error: ImportError) -> type:
    """A class whose calls raise `error`, for a name that must be readable without it.

    Args:
        name: The name of the class that cannot be imported.
        error: What importing it raised.
    """

    def refuse(cls: type, *args: Any, **kwargs: Any) -> Any:
        raise ImportError(str(error)) from error

    members = {"__new__": refuse, "__doc__": str(error), "__module__": "dpbilevel"}
    return type(name, (), members)
