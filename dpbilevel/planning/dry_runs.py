"""Dry runs: calibrated candidates on synthetic data."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Key, PyTree

from ..core.loop import solved
from ..core.plan import calibrated
from ..core.solution import Plan
from ..core.solver import AbstractSolver
from ..privacy.budget import Neighbours, PrivacyBudget
from .methods import Candidate
from .models import constant_loss, mean_loss
from .race import Losses
from .synthetic import AbstractPopulation, SyntheticData

# At the top, so that settings that differ in numbers share one compiled program.
_solve = jax.jit(lambda *run, key: solved(*run, key=key).value)


@dataclasses.dataclass(frozen=True)
class DryRuns:
    """Runs of one problem on synthetic data, from one initial point.

    A run has the same records and noise for all solvers. Other runs have others,
    because a method that needs luck needs it in all of them.

    Attributes:
        problem: The problem.
        w0: The initial point.
        populations: The populations that records are drawn from.
        seed: Seed of records and noise, which protect nothing.
        intercept: Index of the constant feature, or `None`.
        options: Arguments of `calibrate`.
    """

    problem: Any
    w0: PyTree
    populations: tuple[AbstractPopulation, ...]
    seed: int
    intercept: int | None
    options: dict[str, Any]
    _last: dict[int, list[SyntheticData]] = dataclasses.field(default_factory=dict)

    def plan(self, solver: AbstractSolver, budget: PrivacyBudget) -> Plan[Any]:
        """Calibrate a solver to a budget."""
        return calibrated(self.problem, solver, budget, **self.options)

    def losses(self, solver: AbstractSolver, number: int) -> list[float]:
        """Return the test losses of a calibrated solver in a run, by population."""
        found = []
        for place, drawn in enumerate(self._drawn(number), len(self.populations)):
            key = jax.random.fold_in(self._key(number), place)
            value = _solve(self.problem, solver, drawn.data, self.w0, key=key)
            loss = float(mean_loss(self.problem, value, drawn.test))
            found.append(loss if np.isfinite(loss) else np.inf)
        return found

    def losses_within(
        self, solvers: Sequence[AbstractSolver], budget: PrivacyBudget
    ) -> Losses:
        """Return the losses in the first run of solvers that are calibrated anew."""
        return [self.losses(self.plan(s, budget).solver, 0) for s in solvers]

    def constant_losses(self, number: int) -> list[float]:
        """Return the losses of the best constant answers in a run, by population."""
        return [
            constant_loss(self.problem, self.w0, drawn.test, self.intercept)
            for drawn in self._drawn(number)
        ]

    def feasible(
        self,
        methods: Sequence[Candidate],
        neighbours: Neighbours,
        budget: PrivacyBudget,
    ) -> tuple[list[tuple[Candidate, AbstractSolver]], list[Any], dict[str, str]]:
        """Return the settings that can be calibrated.

        Returns:
            Method and solver of each setting, the calibrated solvers, and by method why
            it was left out.

        Raises:
            ValueError: No setting can be calibrated.
        """
        entries, solvers, refused = [], [], {}
        for method in methods:
            for setting in method.solvers:
                try:
                    solver = setting.with_neighbours(neighbours)
                    plan = self.plan(solver, budget)
                except ValueError as error:
                    refused[method.name] = str(error)
                    continue
                assert plan.report.relation == neighbours.value
                entries.append((method, solver))
                solvers.append(plan.solver)
        if not solvers:
            reasons = "; ".join(f"{name}: {why}" for name, why in refused.items())
            raise ValueError(f"auto: no method reaches the budget. {reasons}")
        there = {method.name for method, _ in entries}
        return entries, solvers, {k: v for k, v in refused.items() if k not in there}

    def _drawn(self, number: int) -> list[SyntheticData]:
        """Return the synthetic data of a run; those of the last run are kept."""
        if number not in self._last:
            self._last.clear()
            keys = jax.random.split(self._key(number), len(self.populations))
            self._last[number] = [
                population.draw(self.problem, self.w0, self.options["sizes"], key)
                for population, key in zip(self.populations, keys, strict=True)
            ]
        return self._last[number]

    def _key(self, number: int) -> Key:
        return jax.random.fold_in(jax.random.key(self.seed), number)
