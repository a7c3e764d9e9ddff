"""Calibrated noise over the noise of the paper's constants (Kornowski, Theorem 4).

The paper gives every query of T outer steps a share (epsilon / sqrt(18 T), delta / (3
(T + 1))) and the Gaussian mechanism's classical noise; its composition then spends
more than epsilon. Calibration spends exactly epsilon. Both for three queries a step of
equal share, at T = 20 and delta = n ** -1.1.
"""

import math
import time

import dpbilevel as dpb

STEPS = 20


def paper_multiplier(epsilon, delta):
    epsilon_0 = epsilon / math.sqrt(18 * STEPS)
    return math.sqrt(2 * math.log(1.25 * 3 * (STEPS + 1) / delta)) / epsilon_0


def ours(epsilon, delta, n):
    problem = dpb.source_weighting(dpb.logistic_loss, 2)
    problem = dpb.BilevelProblem(problem.lower, problem.lower)
    inner = dpb.NoisyGD(1, 1.0, step_size=1.0)
    solver = dpb.PenaltyBilevel(
        STEPS, 10.0, inner, step_size=1.0, budget_split=(1.0, 1.0, 1.0)
    )
    sizes = dpb.Sizes(n, n, "overlapping")
    plan = dpb.calibrate(
        problem, solver, dpb.PrivacyBudget(epsilon, delta), sizes=sizes
    )
    return plan.solver.ledger(problem, sizes).releases[-1]


def main():
    print("multiplier and std of the outer gradient (clip norms 1), ours / paper's")
    header = "".join(f"{f'eps {e:g}':>24s}" for e in (0.1, 1.0, 10.0))
    print(f"{'n':>10s}{header}")
    start = time.perf_counter()
    for n in (10**3, 10**4, 10**5, 10**6):
        cells = ""
        for epsilon in (0.1, 1.0, 10.0):
            delta = n**-1.1
            release, paper = ours(epsilon, delta, n), paper_multiplier(epsilon, delta)
            ratio = release.noise_multiplier / paper
            cells += f"{release.noise_std:12.3g} ({ratio:8.3f})"
        print(f"{n:10d}{cells}")
    print(f"12 calibrations took {time.perf_counter() - start:.2f} s")
