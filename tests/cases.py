"""Cases of solvers; they stand beside the tests of each algorithm and are found here.

A test module of an algorithm has `CONTRACT`, small runs for the contract suite (the
first of each class is in its short form), and `AUDITS`, calibrated solvers for the
audits on canary records.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import dpbilevel as dpb
from dpbilevel.bilevel.certificates.constants import terms_of
from dpbilevel.privacy.records.people import PersonRows

ROOT = Path(__file__).parents[1]


@dataclasses.dataclass(frozen=True)
class Case:
    """One run of a solver that is not calibrated yet."""

    problem: Any
    solver: dpb.AbstractSolver
    data: Any
    w0: Any
    people: str | None = None
    fitted: bool = False  # by the short suite too, which plans and solves
    double: bool = False  # computes in float64 or not at all
    few_answers: bool = False  # draws one of a few candidates
    keeps_x: bool = False  # as it is given
    bounds_itself: bool = False  # its values are short before a query clips them
    # Noise follows a sensitivity at released values: at most this times that listed.
    adaptive: float = False

    @property
    def sizes(self):
        people = () if self.people is None else (self.people,)
        return self.problem.sizes_of(self.data, *people)

    @property
    def package(self):
        return type(self.solver).__module__.split(".")[1]


@dataclasses.dataclass(frozen=True)
class Audited:
    """A calibrated solver, and on which canary records it is audited."""

    solver: dpb.AbstractSolver
    x_in_records: bool | tuple[str, ...] = ("upper",)
    exact: bool = True  # the claim is that of one Gaussian
    precision: str = "grid"
    others: float | None = None
    tolerance: float = 2e-3  # of the claim, against that of one Gaussian
    double: bool = False


@dataclasses.dataclass(frozen=True)
class Mutant:
    """An audit of a broken mechanism and the same audit of the sound one."""

    of: str
    broken: Callable[[], Any]
    sound: Callable[[], Any]


def of_people(case, most):
    """The case on people, each with so many copies of a record as rows."""

    def repeated(records):
        rows = jax.tree.map(lambda v: np.stack([np.asarray(v)] * most, 1), records)
        people = len(jax.tree.leaves(rows)[0])
        return PersonRows(rows, np.ones((people, most), bool))

    data = case.data
    if isinstance(data, dpb.Levels):
        upper = repeated(data.upper)
        lower = upper if data.is_shared else repeated(data.lower)
        data = dpb.Levels(upper, lower, data.is_shared)
    else:
        data = repeated(data)
    # What is declared of records holds for means of copies.
    names = "constants", "lipschitz_spread"
    declared = {k: v for k in names if (v := getattr(case.problem, k, None))}
    bare = dataclasses.replace(case.problem, **dict.fromkeys(declared))
    problem = bare.per_person(most)
    if getattr(declared.get("constants"), "terms", None):
        constants = declared["constants"]
        declared["constants"] = dataclasses.replace(constants, terms=terms_of(problem))
    problem = dataclasses.replace(problem, **declared)
    return dataclasses.replace(case, problem=problem, data=data, fitted=False)


def slow(*values):
    """Parameters of the slow suite, after one of the fast: `["a", *slow("b", "c")]`."""
    values = [v if isinstance(v, tuple | list) else (v,) for v in values]
    return [pytest.param(*v, marks=pytest.mark.slow) for v in values]


def fast_first(values):
    """These parameters, all but the first in the slow suite."""
    first, *others = values
    return [first, *slow(*others)]


def planned(solver, people=None, scale=1.0):
    """The solver with this noise, for the numbers of canary records."""
    upper = 20 if people == "shared" else 10
    sizes = 10 if people is None else dpb.Sizes(upper, 20, people)
    return solver.with_noise(scale).with_sizes(sizes)


@functools.cache
def _joined(mechanism, kind):
    """The subclass of `Gaussian`, made one of another mechanism."""
    if issubclass(mechanism, kind):
        return mechanism
    return type(mechanism.__name__, (mechanism, kind), {})


@functools.cache
def _kind_with(kind, mechanism):
    class Broken(kind):
        @property
        def release_noise(self):
            noise = super().release_noise
            return _joined(mechanism, type(noise))(**vars(noise))

    Broken.__name__ = kind.__name__
    return Broken


def with_mechanism(solver, mechanism):
    """A copy of a solver that releases by this subclass of `Gaussian`."""
    values = {f.name: getattr(solver, f.name) for f in dataclasses.fields(solver)}
    return _kind_with(type(solver), mechanism)(**values)


@functools.cache
def found(name):
    """All entries of the dictionaries of this name, over the test modules."""
    entries = {}
    for file in sorted(ROOT.glob("tests/*/test_*.py")):
        if f"\n{name} = " not in file.read_text():
            continue
        path = file.relative_to(ROOT).with_suffix("").parts
        more = getattr(importlib.import_module(".".join(path)), name)
        twice = entries.keys() & more.keys()
        if twice:
            raise ValueError(f"{file}: {name} has {twice}, as another module has.")
        entries |= more
    return entries


def first_of_each_class(cases):
    """The names of those that stand for their class in the short suite."""
    return {type(case.solver): name for name, case in reversed(cases.items())}.values()
