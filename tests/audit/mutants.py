"""Deliberately broken mechanisms, each with the sound one that it was made from."""

from tests.audit import (
    mutants_applications,
    mutants_bilevel,
    mutants_correlated,
    mutants_draws,
    mutants_games,
    mutants_gibo,
    mutants_onelevel,
)
from tests.cases import Mutant


def survivors(mutants):
    """The names of the mutants that no audit rejects."""
    return [name for name, mutant in mutants.items() if mutant.broken().passed]


FAMILIES = (
    mutants_onelevel,
    mutants_correlated,
    mutants_bilevel,
    mutants_applications,
    mutants_games,
    mutants_draws,
)
MUTANTS = {name: mutant for part in FAMILIES for name, mutant in part.MUTANTS.items()}
MUTANTS |= {name: Mutant(*parts) for name, parts in mutants_gibo.MUTANTS.items()}
