"""Messages where a package is missing that only a part of the library needs."""

from typing import Any

_PACKAGES = {"sklearn": "scikit-learn"}  # where module and package have two names


def missing(what: str, *modules: str, extra: str = "cli") -> str:
    """The message of a part of the library whose optional modules are missing.

    `extra` is the group of pyproject.toml that has them.
    """
    packages = [_PACKAGES.get(module, module) for module in modules]
    return (
        f"{what} needs {' and '.join(packages)}: run pip install -e '.[{extra}]' in a "
        f"clone of dpbilevel, or pip install {' '.join(packages)}"
    )


def stand_in(name: str, error: ImportError) -> type:
    """A class whose calls raise what importing the class of that name raised."""

    def refuse(cls: type, *args: Any, **kwargs: Any) -> Any:
        raise ImportError(str(error)) from error

    members = {"__new__": refuse, "__doc__": str(error), "__module__": "dpbilevel"}
    return type(name, (), members)
