"""Refusal of seeds: a person who knows the seed can subtract the noise."""

from typing import Any, Self

_WHY = {
    "sample_weight": "weights would let one record count for more than the noise "
    "covers. Do not repeat records either.",
    "random_state": "a person who guesses a seed can subtract the noise. Give fit a "
    "key=, such as dpbilevel.root_key(), or nothing: then every fit draws a new key "
    "from the operating system.",
}


def refuse(owner: str, given: dict[str, Any]) -> None:
    """Refuse arguments that other estimators have, with advice.

    Raises:
        TypeError: There is such an argument; the first one is named.
    """
    for name in given:
        reason = _WHY.get(name, "there is no such argument.")
        raise TypeError(f"{owner}: {name} is refused: {reason}")


class Seedless:
    """A mixin of estimators that answers to `random_state` with advice."""

    def __new__(cls, *args: Any, **parameters: Any) -> Self:
        """Make an estimator; refuse `random_state`.

        Raises:
            TypeError: `random_state` is given.
        """
        refuse(cls.__name__, _seeds(parameters))
        return super().__new__(cls)

    def set_params(self, **parameters: Any) -> Self:
        """Set parameters and return the estimator, as scikit-learn does.

        Args:
            **parameters: Their values by name.

        Raises:
            TypeError: `random_state` is given.
            ValueError: There is no such parameter.
        """
        refuse(type(self).__name__, _seeds(parameters))
        parent: Any = super()
        return parent.set_params(**parameters)


def _seeds(parameters: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in parameters.items() if k == "random_state"}
