"""Forms of records and labels that the ready-made losses take."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpbilevel as dpb
from tests.cases import slow

LOSSES = [dpb.logistic_loss, dpb.squared_loss, dpb.hinge_loss, dpb.absolute_loss]
OF_CLASSES = [dpb.logistic_loss, dpb.hinge_loss]
ROWS = np.asarray([[0.6, 0.8], [-0.8, 0.6], [0.0, -1.0]], np.float32)
TRUE = np.asarray([True, False, False])
SIGNS = np.where(TRUE, 1.0, -1.0).astype(np.float32)
W = jnp.asarray([0.3, -0.4])
DTYPES = [bool, np.int32, np.uint8, np.float32]

tuning = dpb.linear_tuning(dpb.Logistic(), [0, 1], bounds=(-1.0, 1.0))
game = dpb.games.group_fair(dpb.Logistic(), [0.5, 0.5], radius=2.0)
# Gradients of one record in the coefficients.
PROVED = {
    "hinge": lambda z: jax.grad(dpb.onelevel.linear_risk("hinge", radius=2.0).loss)(
        W, z
    ),
    "logistic": lambda z: jax.grad(
        dpb.onelevel.linear_risk("logistic", radius=2.0).loss
    )(W, z),
    "tuning": lambda z: jax.grad(tuning.lower, 1)(jnp.zeros(2), W, z),
    "game": lambda z: game.record_operator((W, jnp.ones(2)), z | {"group": 1})[0],
}


def gradients(loss, records):
    return jax.vmap(jax.grad(loss), (None, 0))(W, records)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_pair_is_a_record(loss):
    named = gradients(loss, {"features": ROWS, "label": SIGNS})
    assert np.abs(named).max() > 0.1
    np.testing.assert_array_equal(gradients(loss, (ROWS, SIGNS)), named)
    np.testing.assert_array_equal(gradients(loss, [ROWS, SIGNS]), named)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loss", OF_CLASSES)
def test_labels_0_and_1_are_the_classes_of_labels_of_two_signs(loss, dtype):
    signs = gradients(loss, (ROWS, SIGNS))
    np.testing.assert_array_equal(gradients(loss, (ROWS, TRUE.astype(dtype))), signs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("problem", PROVED)
def test_proved_problems_take_labels_0_and_1_too(problem, dtype):
    values = [
        jax.vmap(PROVED[problem])({"features": ROWS, "label": label})
        for label in (SIGNS, TRUE.astype(dtype))
    ]
    assert np.abs(values[0]).max() > 0.1
    np.testing.assert_array_equal(*values)


@pytest.mark.parametrize("label", [np.nan, np.inf])
@pytest.mark.parametrize("problem", PROVED)
def test_label_that_is_not_finite_has_no_influence_on_a_proved_problem(problem, label):
    record = {"features": jnp.asarray(ROWS[0]), "label": jnp.float32(label)}
    np.testing.assert_array_equal(PROVED[problem](record), 0.0)


@pytest.mark.parametrize("label", [np.nan, *slow(np.inf)])
@pytest.mark.parametrize("loss", LOSSES)
def test_label_that_is_not_finite_has_no_influence_on_a_clipped_mean(loss, label):
    labels = jnp.asarray([label, 1.0, -1.0])

    @jax.jit
    def mean(records):
        return dpb.privacy.clipped_mean(
            lambda z: jax.grad(loss)(W, z),
            records,
            clip_norm=1.0,
            denominator=3.0,
            precision="float",
        ).raw

    with_it, others = mean((ROWS, labels)), mean((ROWS[1:], labels[1:]))
    np.testing.assert_allclose(with_it, others, rtol=1e-6)


def test_derivatives_in_a_label_stay():
    slope = jax.grad(lambda b: dpb.logistic_loss(W, (ROWS[0], b)))(jnp.float32(0.7))
    assert abs(float(slope)) > 0.01


@pytest.mark.parametrize(
    ("records", "kind", "said"),
    [
        (ROWS, TypeError, r"got array of shape \(2,\)"),
        (
            (ROWS, SIGNS, SIGNS),
            TypeError,
            r"\{\"features\": X, .* or \(X, y\), .* got \(",
        ),
        ({"X": ROWS, "y": SIGNS}, TypeError, "got {'X': array of shape"),
        (((ROWS, SIGNS), (ROWS, SIGNS)), TypeError, r"got \(\(array"),
        ((SIGNS, ROWS), ValueError, r"got shapes \(\) and \(2,\)"),
        ((ROWS, SIGNS[:, None]), ValueError, r"got shapes \(2,\) and \(1,\)"),
        ((ROWS.tolist(), SIGNS.tolist()), ValueError, "lists by numpy.asarray"),
        ((ROWS, SIGNS.astype(object)), ValueError, "texts to numbers"),
    ],
)
def test_other_records_are_refused_with_the_form_they_need(records, kind, said):
    solver = dpb.NoisyGD(num_steps=1, clip_norm=1.0, step_size=1.0)
    problem = dpb.FiniteSum(dpb.logistic_loss)
    with pytest.raises(kind, match=said):
        dpb.fit(
            problem,
            solver,
            records,
            W,
            budget=dpb.PrivacyBudget(1.0, 1e-5),
            key=jax.random.key(0),
        )


class Frame:
    """As data frames are: with columns and without a dtype."""

    shape = (3, 2)


class Nullable:
    """As columns of data frames may be: of a dtype that NumPy does not know."""

    shape, dtype = (3,), type("Int64Dtype", (), {})()


@pytest.mark.parametrize("records", [Frame(), (Frame(), SIGNS), (ROWS, Nullable())])
def test_objects_without_numbers_are_refused_with_the_remedy(records):
    with pytest.raises(ValueError, match="must be a numeric array"):
        dpb.FiniteSum(dpb.logistic_loss).check(W, records)


def test_pairs_go_through_a_bilevel_problem():
    problem = dpb.penalty_tuning(dpb.logistic_loss, jnp.asarray([0, 1]))
    solutions = [
        dpb.oracles.lower_solution(
            problem, jnp.zeros(2), dpb.Levels(records, records), y0=jnp.zeros(2)
        )
        for records in ((ROWS, TRUE), {"features": ROWS, "label": SIGNS})
    ]
    np.testing.assert_array_equal(*solutions)


def test_source_weighting_says_that_pairs_have_no_source():
    problem = dpb.source_weighting(dpb.logistic_loss, 2)
    with pytest.raises(ValueError, match=r"an entry 'source'.*source="):
        problem.lower(jnp.zeros(2), W, (ROWS[0], SIGNS[0]))
