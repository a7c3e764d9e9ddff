"""NON-PRIVATE, differentiable answers to the parts of a bilevel problem.

Nothing here clips, adds noise or spends budget: what it returns follows the records
exactly. For experiments without a guarantee, as the reference that private solvers are
compared with, and inside solvers that add the noise themselves.
"""

from .._extras import public_names
from .hypergradients import implicit_hypergradient as implicit_hypergradient
from .hypergradients import penalty_hypergradient as penalty_hypergradient
from .hypergradients import unrolled_hypergradient as unrolled_hypergradient
from .linear import AbstractLinearSolver as AbstractLinearSolver
from .linear import Cholesky as Cholesky
from .linear import ConjugateGradient as ConjugateGradient
from .linear import LinearSolution as LinearSolution
from .linear import Neumann as Neumann
from .linear import extrapolate as extrapolate
from .lower import lower_solution as lower_solution
from .lower import lower_solve as lower_solve
from .minimizers import LBFGS as LBFGS
from .minimizers import AbstractLowerSolver as AbstractLowerSolver
from .minimizers import AcceleratedGradient as AcceleratedGradient
from .minimizers import LowerInfo as LowerInfo
from .minimizers import NewtonCG as NewtonCG

__all__ = public_names(globals())
