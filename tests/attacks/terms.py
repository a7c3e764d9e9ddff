"""Problems and norms that tests of single terms of a sensitivity need."""

import math

import numpy as np

import dpbilevel as dpb


def exact_norm(counts):
    """The squared norm of integers, as an integer."""
    return sum(int(k) ** 2 for k in np.asarray(counts).ravel())


def moved(grids):
    """How far apart two values on a grid are, exactly but for the last root."""
    left, right = (np.asarray(grid.counts, object) for grid in grids)
    return math.sqrt(exact_norm(left - right)) * 2.0 ** float(grids[0].exponent)


# One-dimensional polynomials whose derivatives all push the same way: at x = y = 0 they
# attain what is proved from bounds on them.
DERIVATIVES = {
    "strong_convexity": 2.0,
    "solution_radius": 1.0,
    "upper_x": 0.3,
    "upper_y": 0.7,
    "upper_xx": 1.1,
    "upper_xy": 1.3,
    "upper_yy": 1.7,
    "lower_y": 0.9,
    "lower_xy": 1.9,
    "lower_yy": 2.0,
    "lower_xy_in_x": 0.4,
    "lower_yy_in_x": 0.6,
    "lower_xy_in_y": 0.6,
    "lower_yy_in_y": 0.8,
    "upper_x_spread": 0.2,
    "upper_y_spread": 0.5,
    "lower_y_spread": 0.35,
    "lower_xy_spread": 0.45,
    "lower_yy_spread": 0.55,
}


CONSTANTS = dpb.bilevel.SecondOrderConstants(**DERIVATIVES)


def upper(x, y):
    c = CONSTANTS
    return c.upper_x * x + c.upper_y * y + c.upper_xx * x**2 / 2 + c.upper_xy * x * y
