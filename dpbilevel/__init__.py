"""Differentially private bilevel optimization in JAX."""

from typing import TYPE_CHECKING, Any

from . import audit as audit
from . import debug as debug
from . import oracles as oracles
from ._version import __version__ as __version__
from .clipping import Basis as Basis
from .clipping import Bounded as Bounded
from .clipping import clipped_mean as clipped_mean
from .noise import root_key as root_key
from .oracles.gaps import saddle_gap as saddle_gap
from .oracles.gaps import variational_gap as variational_gap
from .oracles.hypergradients import implicit_hypergradient as implicit_hypergradient
from .oracles.hypergradients import penalty_hypergradient as penalty_hypergradient
from .oracles.hypergradients import unrolled_hypergradient as unrolled_hypergradient
from .oracles.linear import Cholesky as Cholesky
from .oracles.linear import ConjugateGradient as ConjugateGradient
from .oracles.linear import Neumann as Neumann
from .oracles.lower import lower_solution as lower_solution
from .oracles.lower import lower_solve as lower_solve
from .oracles.minimizers import LBFGS as LBFGS
from .oracles.minimizers import AcceleratedGradient as AcceleratedGradient
from .oracles.newton import NewtonCG as NewtonCG
from .planning import Recommendation as Recommendation
from .planning import recommend as recommend
from .privacy.budget import Neighbours as Neighbours
from .privacy.budget import People as People
from .privacy.budget import PrivacyBudget as PrivacyBudget
from .privacy.calibration import Plan as Plan
from .privacy.calibration import calibrate as calibrate
from .privacy.draws import Draw as Draw
from .privacy.draws import Exponential as Exponential
from .privacy.draws import RegularizedExponential as RegularizedExponential
from .privacy.ledger import Ledger as Ledger
from .privacy.ledger import Query as Query
from .privacy.ledger import Release as Release
from .privacy.mechanisms import Gaussian as Gaussian
from .privacy.report import PrivacyReport as PrivacyReport
from .privacy.report import Status as Status
from .problems import saddle_zoo as saddle_zoo
from .problems import zoo as zoo
from .problems.applications import penalty_tuning as penalty_tuning
from .problems.applications import source_weighting as source_weighting
from .problems.applications import source_weights as source_weights
from .problems.bilevel import BilevelProblem as BilevelProblem
from .problems.bilevel import Levels as Levels
from .problems.bilevel import Sizes as Sizes
from .problems.black_box import BlackBox as BlackBox
from .problems.constants import AbstractCertificate as AbstractCertificate
from .problems.constants import Constants as Constants
from .problems.constants import SecondOrderConstants as SecondOrderConstants
from .problems.finite_sum import FiniteSum as FiniteSum
from .problems.games import group_fair as group_fair
from .problems.games import group_robust as group_robust
from .problems.games import group_start as group_start
from .problems.games import group_weights as group_weights
from .problems.linear_models import Logistic as Logistic
from .problems.linear_models import PseudoHuber as PseudoHuber
from .problems.linear_risk import linear_risk as linear_risk
from .problems.linear_tuning import linear_tuning as linear_tuning
from .problems.matrix_games import matrix_game as matrix_game
from .problems.models import absolute_loss as absolute_loss
from .problems.models import hinge_loss as hinge_loss
from .problems.models import logistic_loss as logistic_loss
from .problems.models import squared_loss as squared_loss
from .problems.saddle import SaddleProblem as SaddleProblem
from .problems.saddle import VariationalInequality as VariationalInequality
from .samplers.alternating import AlternatingSampler as AlternatingSampler
from .samplers.base import AbstractSampler as AbstractSampler
from .samplers.envelope import ConvexEnvelope as ConvexEnvelope
from .samplers.grid import Grid as Grid
from .samplers.grid_walk import GridWalk as GridWalk
from .samplers.rejection import StochasticRejection as StochasticRejection
from .sampling import FixedSize as FixedSize
from .sampling import FullBatch as FullBatch
from .sampling import Poisson as Poisson
from .searching import search as search
from .sets import AbstractSet as AbstractSet
from .sets import Ball as Ball
from .sets import Box as Box
from .sets import Euclidean as Euclidean
from .sets import NonNegative as NonNegative
from .sets import Product as Product
from .sets import Simplex as Simplex
from .single_pass import SinglePass as SinglePass
from .solvers.asking import AbstractAskingSolver as AbstractAskingSolver
from .solvers.base import AbstractSolver as AbstractSolver
from .solvers.base import fit as fit
from .solvers.base import solve as solve
from .solvers.exponential import ExponentialMechanism as ExponentialMechanism
from .solvers.extragradient import NoisyExtragradient as NoisyExtragradient
from .solvers.gibo import GradientInformativeBO as GradientInformativeBO
from .solvers.implicit import ImplicitBilevel as ImplicitBilevel
from .solvers.kernels import RBF as RBF
from .solvers.kernels import AbstractKernel as AbstractKernel
from .solvers.kernels import Matern52 as Matern52
from .solvers.kernels import Quadratic as Quadratic
from .solvers.localized import LocalizedGD as LocalizedGD
from .solvers.noisy_gd import NoisyGD as NoisyGD
from .solvers.noisy_ucb import NoisyUCB as NoisyUCB
from .solvers.penalty import PenaltyBilevel as PenaltyBilevel
from .solvers.proximal_point import InexactProximalPoint as InexactProximalPoint
from .solvers.random_search import RandomSearch as RandomSearch
from .solvers.refitted import Refitted as Refitted
from .solvers.regularized import (
    RegularizedExponentialMechanism as RegularizedExponentialMechanism,
)
from .solvers.repeat_and_select import RepeatAndSelect as RepeatAndSelect
from .solvers.single_loop import SingleLoopBilevel as SingleLoopBilevel
from .solvers.solution import PrivateResult as PrivateResult
from .solvers.solution import Solution as Solution
from .solvers.warm_start import WarmStarted as WarmStarted

if TYPE_CHECKING:
    from .private_search import PrivateSearch as PrivateSearch
    from .private_search import Range as Range


def __getattr__(name: str) -> Any:
    """What needs scikit-learn is imported when it is asked for."""
    if name in ("PrivateSearch", "Range"):
        from . import private_search

        return getattr(private_search, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names, those that are imported when asked for among them."""
    return [*globals(), "PrivateSearch", "Range"]
