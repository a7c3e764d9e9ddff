"""The tables of the pages that list every public solver: python -m docs.tables.

It writes them into the pages. A test fails where a page says something else and where a
solver is not described here.
"""

import re
from pathlib import Path

import dpbilevel as dpb
from dpbilevel.bilevel.problem import BilevelProblem
from dpbilevel.cli.config import public_classes
from dpbilevel.games.problem import AbstractVariationalInequality
from dpbilevel.onelevel.problem import AbstractFiniteSum

ROOT = Path(__file__).parents[1]

# Source, releases, what the guarantee rests on, answer.
ALGORITHMS = {
    "PenaltyBilevel": (
        "Kornowski, Algorithms 1 and 3; Section 7",
        "two inner runs a step, one outer gradient where records meet x",
        "clipping",
        "last pair, or the one before the smallest step",
    ),
    "SingleLoopBilevel": (
        "Dagréou et al., SOBA, clipped",
        "one joint release a step; x free where it meets no record",
        "clipping",
        "last pair or mean",
    ),
    "F2SA": (
        "Kwon, Kwon, Wright and Nowak, Algorithm 1 (F2SA), clipped",
        "one joint release a step; x free where it meets no record",
        "clipping",
        "last pair, or an output rule",
    ),
    "LocalizedGD": (
        "Kornowski, Algorithms 2 and 4 (DP-Loc-GD, DP-Loc-SGD)",
        "one gradient a step",
        "clipping",
        "mean of the last round",
    ),
    "NoisyGD": (
        "noisy gradient descent, DP-SGD",
        "one gradient a step",
        "clipping",
        "last or mean",
    ),
    "ImplicitBilevel": (
        "Lowy and Liu, Algorithm 1",
        "one hypergradient a step",
        "declared or proved constants",
        "a uniform iterate or the last, x only",
    ),
    "NoisyExtragradient": (
        "Boob and Guzmán, Algorithm 1 (NSEG)",
        "two operators a step",
        "clipping",
        "average of the midpoints",
    ),
    "InexactProximalPoint": (
        "Boob and Guzmán, Algorithm 2 (NISPP), changed",
        "one point a round",
        "clipping for one inner step, else declared constants",
        "projected average",
    ),
    "ExponentialMechanism": (
        "Lowy and Liu, equation (4) and C.3",
        "one draw, no delta",
        "a clipped range, or constants",
        "the drawn x",
    ),
    "RegularizedExponentialMechanism": (
        "Gopi, Lee and Liu; Lowy and Liu, B.8",
        "one draw",
        "constants and convexity",
        "the drawn x",
    ),
    "GradientInformativeBO": (
        "Sopa et al., Algorithm 1 (DP-GIBO): gradients inferred from losses",
        "one gradient a step",
        "clipping",
        "last iterate or tail mean",
    ),
    "RandomSearch": (
        "McSherry and Talwar: the exponential mechanism on random points",
        "one draw",
        "clipping",
        "the drawn point",
    ),
    "RepeatAndSelect": (
        "Papernot and Steinke; Liu and Talwar",
        "the best of a random number of points",
        "clipping",
        "that point",
    ),
    "NoisyUCB": (
        "Srinivas et al.: Bayesian optimization of noisy losses",
        "one mean loss a step",
        "clipping",
        "the best evaluated point",
    ),
    "WarmStarted": (
        "Lowy and Liu, Algorithm 2: one bilevel solver, then another from its answer",
        "both",
        "as its parts",
        "the second one's",
    ),
    "Refitted": (
        "any bilevel solver, then a private refit at its x",
        "both",
        "as its parts",
        "x of the search, refitted y",
    ),
}

# Where a config names the solvers of these problems.
PLACES = {
    BilevelProblem: "`[solver]`, for tasks of two levels",
    AbstractVariationalInequality: "`[solver]`, for games",
    AbstractFiniteSum: "`[solver.inner]` and `[refit]`",
}


def solvers() -> dict[str, type]:
    """The public solvers by name.

    Raises:
        ValueError: Some are not described in `ALGORITHMS`, or what is there is none.
    """
    found = public_classes(dpb.AbstractSolver)
    unlike = set(found) ^ set(ALGORITHMS)
    if unlike:
        raise ValueError(
            f"docs/tables.py: ALGORITHMS must describe the public solvers; {unlike} "
            "are in one of both only."
        )
    return {name: found[name] for name in ALGORITHMS}


def _table(*rows: tuple[str, ...]) -> str:
    head, *body = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, "|" + "---|" * len(rows[0]), *body])


def algorithms() -> str:
    """The README's table of algorithms."""

    def path(name: str, kind: type) -> str:
        package = kind.__module__.split(".")[1]
        return f"`{name}`" if hasattr(dpb, name) else f"`{package}.{name}`"

    rows = ((path(name, kind), *ALGORITHMS[name]) for name, kind in solvers().items())
    heads = "class", "source", "releases", "guarantee rests on", "answer"
    return _table(heads, *rows)


def config() -> str:
    """The config page's table of solvers."""
    rows = (
        (f"`{name}`", PLACES[kind.problem_type] if kind.in_config else "Python only")
        for name, kind in solvers().items()
    )
    return _table(("solver", "where in a config"), *rows)


PAGES = {"README.md": algorithms, "docs/config.md": config}


def written(page: str, table: str) -> str:
    """A page with this table instead of the one with the same heads.

    Args:
        page: The text of the page.
        table: The table.
    """
    heads = re.escape(table.split("\n")[0])
    return re.sub(rf"^{heads}\n(\|.*\n)+", lambda _: table + "\n", page, flags=re.M)


def main() -> None:
    """Writes every table into its page."""
    for name, table in PAGES.items():
        file = ROOT / name
        file.write_text(written(file.read_text(), table()))


if __name__ == "__main__":
    main()
