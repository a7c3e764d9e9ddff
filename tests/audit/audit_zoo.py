"""Every solver of the package, calibrated, for audits on canary records."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

import dpbilevel as dpb
from dpbilevel import audit
from dpbilevel.audit.canaries import _LIPSCHITZ

SHORT, LONG = 50_000, 200_000
REPLACE, ADD_OR_REMOVE = dpb.Neighbours.REPLACE_ONE, dpb.Neighbours.ADD_OR_REMOVE_ONE
INNER = dpb.NoisyGD(2, 0.5, step_size=0.1)


@dataclasses.dataclass(frozen=True)
class Audited:
    solver: dpb.AbstractSolver
    x_in_records: bool | tuple[str, ...] = ("upper",)
    exact: bool = True  # the claim is that of one Gaussian
    precision: str = "grid"
    others: float | None = None
    tolerance: float = 2e-3  # of the claim, against that of one Gaussian
    double: bool = False


def noisy_gd(scale=1.0, **fields):
    defaults = {"num_steps": 4, "clip_norm": 0.7, "step_size": 0.1}
    return dpb.NoisyGD(**(defaults | fields)).with_noise(scale).with_sizes(10)


def sampled(sampling, neighbours=REPLACE, multiplier=0.5, num_steps=1):
    """With this noise multiplier at every step."""
    noise = dpb.privacy.Gaussian(multiplier / math.sqrt(num_steps), neighbours)
    solver = dpb.NoisyGD(num_steps, 0.7, step_size=0.1, sampling=sampling, noise=noise)
    return solver.with_sizes(10)


def penalty(people, scale=1.0, kind=dpb.PenaltyBilevel, **fields):
    upper = 20 if people == "shared" else 10
    defaults = {"num_steps": 2, "penalty": 4.0, "inner": INNER}
    defaults |= {"upper_clip_norm": 1.5, "step_size": 0.1}
    solver = kind(**(defaults | fields))
    return solver.with_noise(scale).with_sizes(dpb.Sizes(upper, 20, people))


def single_loop(people, scale=1.0, **fields):
    upper = 20 if people == "shared" else 10
    defaults = {"num_steps": 3, "step_size": 0.1, "lower_step_size": 0.1}
    defaults |= {"linear_step_size": 0.1, "upper_clip_norm": 1.5}
    solver = dpb.SingleLoopBilevel(**(defaults | fields))
    return solver.with_noise(scale).with_sizes(dpb.Sizes(upper, 20, people))


def f2sa(people, scale=1.0, **fields):
    upper = 20 if people == "shared" else 10
    defaults = {"num_steps": 3, "penalty": 4.0, "step_size": 0.1}
    defaults |= {"lower_step_size": 0.1, "upper_clip_norm": 1.5}
    solver = dpb.bilevel.F2SA(**(defaults | fields))
    return solver.with_noise(scale).with_sizes(dpb.Sizes(upper, 20, people))


def refitted(scale=1.0):
    search = penalty("overlapping", num_steps=1)
    return (
        dpb.Refitted(search, INNER, (0.7, 0.3))
        .with_noise(scale)
        .with_sizes(search.sizes)
    )


def implicit(people, scale=1.0, kind=dpb.ImplicitBilevel, **fields):
    upper = 20 if people == "shared" else 10
    defaults = {"num_steps": 3, "step_size": 0.1}
    solver = kind(**(defaults | fields))
    return solver.with_noise(scale).with_sizes(dpb.Sizes(upper, 20, people))


def warm_started(scale=1.0):
    first, then = implicit("overlapping"), implicit("overlapping", num_steps=2)
    solver = dpb.bilevel.WarmStarted(first, then, (0.4, 0.6))
    return solver.with_noise(scale).with_sizes(first.sizes)


def exponential(sizes, scale=1.0, kind=dpb.draws.ExponentialMechanism, **fields):
    """Two candidates at which one record makes all the difference there can be."""
    solver = kind(dpb.draws.Grid(jnp.asarray([-1.0, 1.0])), **fields)
    return solver.with_noise(scale).with_sizes(sizes)


def regularized(scale=1.0, kind=dpb.draws.RegularizedExponentialMechanism, **fields):
    """The set is so wide that the law is that of a Gaussian release."""
    sampler = dpb.draws.AlternatingSampler(dpb.draws.ConvexEnvelope(), 1e-9)
    defaults = {"convex": True, "regularizer": 1.0, "dimension": 1}
    solver = kind(sampler, **(defaults | fields)).with_noise(scale).with_sizes(10)
    return solver.with_counts(_LIPSCHITZ)


def extragradient(scale=1.0, kind=dpb.games.NoisyExtragradient, **fields):
    defaults = {"num_steps": 2, "clip_norm": 0.7, "step_size": 0.1}
    return kind(**(defaults | fields)).with_noise(scale).with_sizes(10)


def proximal(scale=1.0, kind=dpb.games.InexactProximalPoint, **fields):
    defaults = {"num_steps": 3, "clip_norm": 0.7, "strength": 1.0, "inner_steps": 2}
    defaults |= {"dimension": 1}
    return kind(**(defaults | fields)).with_noise(scale).with_sizes(10)


def extrapolated(kind=dpb.games.InexactProximalPoint):
    """A round of steps that leave less than a tenth of what a record moves."""
    fields = {"inner": "operator_extrapolation", "inner_steps": 24}
    return proximal(kind=kind, num_steps=1, **fields)


def once(kind=dpb.privacy.SinglePass, **fields):
    """Two steps on four disjoint batches, with the noise of one release."""
    return extragradient(0.5, sampling=kind(2), **fields)


def localized(scale=1.0):
    solver = dpb.onelevel.LocalizedGD((1e3, 5e2), 20, 1.0, 0.7)
    return solver.with_noise(scale).with_sizes(10)


def gradient_informative(scale=1.0, kind=dpb.search.GradientInformativeBO, **fields):
    defaults = {"num_steps": 2, "clip_norm": 0.7, "step_size": 0.1}
    defaults |= {"batch": 2, "keep": 2, "polish": 0}
    return kind(**(defaults | fields)).with_noise(scale).with_sizes(10)


def searching(kind, *args, scale=1.0, **fields):
    return kind(*args, **fields).with_noise(scale).with_sizes(10)


def random_search(kind=dpb.search.RandomSearch, **fields):
    return searching(kind, 16, 1.0, **fields)


def repeat_and_select(kind=dpb.search.RepeatAndSelect, num_steps=16, **fields):
    return searching(kind, num_steps, 1.0, **({"mean": 2.0} | fields))


def noisy_ucb(kind=dpb.search.NoisyUCB, **fields):
    return searching(kind, 3, 1.0, num_candidates=4, **fields)


SOLVERS = {
    "NoisyGD": Audited(noisy_gd()),
    "NoisyGD, precision float": Audited(noisy_gd(), precision="float"),
    "NoisyGD, add or remove": Audited(
        noisy_gd(noise=dpb.privacy.Gaussian(None, ADD_OR_REMOVE))
    ),
    "NoisyGD, Poisson": Audited(
        sampled(dpb.Poisson(0.2), ADD_OR_REMOVE, num_steps=2), exact=False
    ),
    "NoisyGD, Poisson, replace": Audited(sampled(dpb.Poisson(0.2)), exact=False),
    "NoisyGD, fixed size": Audited(sampled(dpb.FixedSize(2)), exact=False),
    "LocalizedGD": Audited(localized()),
    # Half the noise: each level alone leaks less than both.
    "PenaltyBilevel, disjoint": Audited(penalty("disjoint", 0.5)),
    "PenaltyBilevel, overlapping": Audited(penalty("overlapping")),
    "PenaltyBilevel, shared": Audited(penalty("shared"), True),
    "PenaltyBilevel, x in lower": Audited(penalty("overlapping"), ("lower",)),
    "PenaltyBilevel, free outer step": Audited(penalty("overlapping"), False),
    "SingleLoopBilevel, disjoint": Audited(single_loop("disjoint", 0.5)),
    # A person's two records fill different blocks here, and need not.
    "SingleLoopBilevel, overlapping": Audited(single_loop("overlapping"), exact=False),
    "SingleLoopBilevel, shared": Audited(single_loop("shared"), True),
    "SingleLoopBilevel, Poisson": Audited(
        single_loop("shared", 0.5, sampling=dpb.Poisson(0.2)), True, exact=False
    ),
    "F2SA, disjoint": Audited(f2sa("disjoint", 0.5)),
    "F2SA, shared": Audited(f2sa("shared"), True),
    "F2SA, Poisson": Audited(
        f2sa("shared", 0.5, sampling=dpb.Poisson(0.2)), True, exact=False
    ),
    "SingleLoopBilevel, free x": Audited(single_loop("disjoint", 0.5), False),
    "Refitted": Audited(refitted()),
    # Half the noise: each level alone leaks less than both.
    "ImplicitBilevel, disjoint": Audited(implicit("disjoint", 0.5)),
    "ImplicitBilevel, overlapping": Audited(implicit("overlapping")),
    "ImplicitBilevel, shared": Audited(implicit("shared")),
    "WarmStarted": Audited(warm_started()),
    "NoisyExtragradient": Audited(extragradient()),
    "NoisyExtragradient, single pass": Audited(once()),
    "InexactProximalPoint": Audited(proximal()),
    # What the inner steps leave is part of the claim.
    "InexactProximalPoint, extrapolation": Audited(extrapolated(), exact=False),
    "GradientInformativeBO": Audited(gradient_informative(), double=True),
    # Rounding of single precision is part of the claim.
    "RegularizedExponentialMechanism": Audited(regularized(), tolerance=2e-2),
    "ExponentialMechanism": Audited(
        exponential(10, clip_range=1.0), others=-1.0, exact=False
    ),
    "ExponentialMechanism, add or remove": Audited(
        exponential(
            10,
            clip_range=1.0,
            mechanism=dpb.draws.Exponential(neighbours=ADD_OR_REMOVE),
        ),
        others=-1.0,
        exact=False,
    ),
    "ExponentialMechanism, overlapping": Audited(
        exponential(dpb.Sizes(10, 20, "overlapping")), others=-0.1, exact=False
    ),
    "RandomSearch": Audited(random_search(), others=-1.0, exact=False),
    "RepeatAndSelect": Audited(repeat_and_select(), exact=False),
    "RepeatAndSelect, Poisson": Audited(repeat_and_select(shape=math.inf), exact=False),
    "NoisyUCB": Audited(noisy_ucb()),
}


@functools.cache
def outcomes(name, runs=SHORT):
    case = SOLVERS[name]
    with jax.enable_x64(case.double):
        return audit.audit_solver(
            case.solver.with_precision(case.precision),
            key=jax.random.key(7),
            runs=runs,
            x_in_records=case.x_in_records,
            others=case.others,
        )


def audited(solver, claim=None, *, runs=SHORT, x_in_records=("upper",), **options):
    """The audit of one solver's runs under another's claim, for the first person."""
    canary = next(iter(audit.canaries(solver, x_in_records=x_in_records).values()))
    return audit.trade_off(
        audit.SolverRun(canary.problem, canary.solver, canary.w0),
        canary.data,
        canary.neighbour,
        canary.claim if claim is None else claim,
        key=jax.random.key(8),
        runs=runs,
        **options,
    )


def claim_of(solver, x_in_records=("upper",)):
    canaries = audit.canaries(solver, x_in_records=x_in_records)
    return next(iter(canaries.values())).claim
