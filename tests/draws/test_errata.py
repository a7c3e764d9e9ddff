"""Counter-examples of docs/errata.md to printed statements about draws."""

import numpy as np


def test_the_variance_of_a_vector_exceeds_its_scalar_poincare_bound_by_the_dimension():
    # Lowy and Liu, B.7, Term A: x has the density of a 4-strongly convex energy.
    dimension, convexity = 100, 4.0
    rng = np.random.default_rng(0)
    x = rng.normal(scale=convexity**-0.5, size=(20_000, dimension))
    variances = x.var(axis=0)  # of v(x) = x, of Lipschitz constant 1
    assert abs(variances.sum() - 25) < 0.25
    assert variances.sum() > 90 / convexity  # the printed bound is 1 / convexity
    assert abs(variances.mean() - 1 / convexity) < 0.01  # one entry keeps to it


def mean_score(score, temperature):
    """Mean of an even score under exp(-score / temperature) on [-1, 1]."""
    x = np.concatenate([[0], np.geomspace(1e-9, 1, 200_001)])
    values = score(x)
    weights = np.exp(-values / temperature)
    return np.trapezoid(weights * values, x) / np.trapezoid(weights, x)


def test_a_gradient_norm_as_score_misses_the_excess_of_convex_scores():
    # Lowy and Liu, (31): the score is the gradient norm of a Huber loss of width r.
    temperature, width = 0.1, 1e-5
    found = mean_score(lambda x: np.minimum(1, x / width), temperature)
    assert abs(found - 0.98) < 0.01
    assert mean_score(lambda x: x, temperature) < temperature  # convex: d temperatures
