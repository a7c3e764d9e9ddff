"""NON-PRIVATE, differentiable answers to the parts of a bilevel problem.

Nothing here clips, adds noise or spends budget: what it returns follows the records
exactly. For experiments without a guarantee, as the reference that private solvers are
compared with, and inside solvers that add the noise themselves.
"""

from .hypergradients import (
    implicit_hypergradient,
    penalty_hypergradient,
    unrolled_hypergradient,
)
from .linear import (
    AbstractLinearSolver,
    Cholesky,
    ConjugateGradient,
    LinearSolution,
    Neumann,
    extrapolate,
)
from .lower import lower_solution, lower_solve
from .minimizers import (
    LBFGS,
    AbstractLowerSolver,
    AcceleratedGradient,
    LowerInfo,
    NewtonCG,
)

__all__ = [
    "LBFGS",
    "AbstractLinearSolver",
    "AbstractLowerSolver",
    "AcceleratedGradient",
    "Cholesky",
    "ConjugateGradient",
    "LinearSolution",
    "LowerInfo",
    "Neumann",
    "NewtonCG",
    "extrapolate",
    "implicit_hypergradient",
    "lower_solution",
    "lower_solve",
    "penalty_hypergradient",
    "unrolled_hypergradient",
]
