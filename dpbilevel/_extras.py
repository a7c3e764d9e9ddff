"""Messages about missing packages that only a part of the library needs."""

from typing import Any

_PACKAGES = {"sklearn": "scikit-learn"}  # modules whose package has another name


def missing(what: str, *modules: str, extra: str = "cli") -> str:
    """Return the message of a part of the library that lacks optional modules.

    `extra` is the group of pyproject.toml that has them.
    """
    packages = [_PACKAGES.get(module, module) for module in modules]
    return (
        f"{what} needs {' and '.join(packages)}: run pip install -e '.[{extra}]' in a "
        f"clone of dpbilevel, or pip install {' '.join(packages)}"
    )


def stand_in(name: str, error: ImportError) -> type:
    """Return a class whose calls raise the error of a failed import of that class."""

    def refuse(cls: type, *args: Any, **kwargs: Any) -> Any:
        raise ImportError(str(error)) from error

    members = {"__new__": refuse, "__doc__": str(error), "__module__": "dpbilevel"}
    return type(name, (), members)
