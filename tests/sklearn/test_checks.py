"""The checks of scikit-learn, but for those that a private estimator must fail."""

import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

from tests.sklearn.declared import FAIR, LOGISTIC, NETWORK, RIDGE, SOURCES

RAISES = "an error or warning that depends on a record would tell of it"
NOISE = "two fits of the same records differ, by their noise"
EMPTY = "where the number of records is private, so is that there are none"
FAILED = {
    "check_dtype_object": RAISES,
    "check_estimators_nan_inf": RAISES,
    "check_fit_idempotent": NOISE,
    "check_supervised_y_2d": NOISE,
}
OF_CLASSIFIERS = {
    "check_classifiers_regression_target": RAISES,
    "check_classifier_data_not_an_array": NOISE,
}
OF_REGRESSORS = {
    "check_supervised_y_no_nan": RAISES,
    "check_regressor_data_not_an_array": NOISE,
    "check_regressors_int": NOISE,
    "check_estimators_empty_data_messages": EMPTY,
}


def failed(estimator):
    """The checks that are expected to fail, each with the reason."""
    return FAILED | (OF_REGRESSORS if estimator is RIDGE else OF_CLASSIFIERS)


@pytest.mark.slow
@parametrize_with_checks(
    [LOGISTIC, RIDGE, NETWORK, FAIR, SOURCES], expected_failed_checks=failed
)
def test_an_estimator_passes_the_check(estimator, check):
    check(estimator)
