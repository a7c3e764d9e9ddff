"""PrivateSearch: a scikit-learn estimator, a space and a budget."""

import pickle

import jax
import numpy as np
import pytest
import scipy.sparse
from sklearn.base import BaseEstimator, RegressorMixin, clone
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import brier_score_loss
from sklearn.neighbors import KNeighborsRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

import dpbilevel as dpb
from dpbilevel.search import ask_tell
from tests.search.test_search import programs

BUDGET = dpb.PrivacyBudget(2.0, 1e-5)
RNG = np.random.default_rng(0)
# Half of the inputs are noise, and there are few training rows: a penalty helps.
INPUTS = RNG.normal(size=(1_060, 50))
TARGETS = INPUTS @ np.repeat([0.1, 0.0], 25) + RNG.normal(size=1_060)
TRAINING = INPUTS[:60], TARGETS[:60]
PRIVATE = INPUTS[60:], TARGETS[60:]
SPACE = {"alpha": dpb.search.Range(1e-4, 1e3, log=True)}
FEW = dpb.search.GradientInformativeBO(
    4,
    1.0,
    step_size=0.4,
    batch=2,
    keep=8,
    polish=0,
    evaluation_noise=0.02,
    portfolio=None,
)


def searched(estimator=None, space=SPACE, key=0, **options):
    training = options.pop("public", TRAINING)
    private = options.pop("validation", PRIVATE)
    fitting = {k: options.pop(k) for k in ("folder",) if k in options}
    search = dpb.PrivateSearch(
        Ridge() if estimator is None else estimator,
        space,
        options.pop("budget", BUDGET),
        **({"solver": FEW} | options),
    )
    return search.fit(*training, validation=private, key=jax.random.key(key), **fitting)


def squares(estimator, X, y):
    return (estimator.predict(X) - y) ** 2


TRAINED = dpb.search.DeclaredTraining.gdp(0.1, 60)


@pytest.fixture(scope="module")
def found():
    return searched()


def error_of(alpha):
    fitted = Ridge(alpha=alpha).fit(*TRAINING)
    return np.mean((fitted.predict(PRIVATE[0]) - PRIVATE[1]) ** 2)


@pytest.mark.slow
def test_the_released_penalty_is_better_than_the_start(found):
    alpha = found.best_params_["alpha"]
    start = found.parameters(np.zeros(1))["alpha"]
    assert start == pytest.approx(10**-0.5)
    assert error_of(alpha) < 0.9 * error_of(start)
    assert found.best_estimator_.alpha == alpha
    assert found.predict(PRIVATE[0]).shape == (1_000,)


def test_the_report_is_about_validation_records(found):
    assert found.report_.status is dpb.privacy.Status.ENFORCED
    assert found.report_.epsilon <= BUDGET.epsilon
    text = str(found.report_)
    assert "every record changes its own loss only" in text
    assert "training data and other inputs of the losses are not protected" in text
    assert found.trajectory_.shape == (4, 1)


def test_private_trainings_are_counted_at_most_once_an_evaluation():
    # 4 steps of 2 points and the last fit.
    trained = []

    class Counting(Ridge):
        def fit(self, X, y):
            trained.append(len(y))
            return super().fit(X, y)

    report = searched(Counting(), training=TRAINED, losses=squares).report_
    (row,) = (row for row in report.ledger if row.declared is not None)
    assert row.count == 9
    assert trained == 9 * [60]
    assert report.status is dpb.privacy.Status.CONDITIONAL
    assert "are not protected" not in str(report)


def test_trainings_without_a_public_bound_are_refused():
    unbounded = dpb.search.GradientInformativeBO(4, 1.0, step_size=0.4)
    with pytest.raises(ValueError, match="give batch= or max_batch="):
        searched(solver=unbounded, losses=squares, training=TRAINED)


def test_protected_training_records_decide_about_no_refusal(tmp_path):
    def picky(estimator, X, y):
        if len(y) < 1_000:
            raise RuntimeError("training rows are judged")
        return squares(estimator, X, y)

    searched(training=TRAINED, losses=picky)
    with pytest.raises(ValueError, match=r"fails on training rows: training rows are"):
        searched(losses=picky)  # the control
    with pytest.raises(ValueError, match=r"leave out folder="):
        searched(training=TRAINED, losses=squares, folder=tmp_path / "a")
    other = dpb.search.DeclaredTraining.gdp(0.1, 50)
    with pytest.raises(ValueError, match="num_records=50 rows, got 60"):
        searched(training=other, losses=squares)
    assert not (tmp_path / "a").exists()


def test_private_trainings_draw_noise_of_their_own_and_print_nothing(capsys):
    class Loud(Ridge):
        def fit(self, X, y):
            print("loss of training", np.mean(y))
            return super().fit(X, y)

    searched(Loud(), training=TRAINED, losses=squares)
    assert capsys.readouterr().out == ""
    searched(Loud(), losses=squares)  # the control
    assert "loss of training" in capsys.readouterr().out
    with pytest.raises(ValueError, match="random_state repeats noise"):
        searched(Ridge(random_state=0), training=TRAINED, losses=squares)


def test_protected_training_records_tell_no_units():
    for options in ({"losses": squares, "solver": None}, {}):
        with pytest.raises(ValueError, match="protects its records"):
            searched(training=TRAINED, **options)


@pytest.mark.slow
def test_one_parameter_is_searched_at_random_in_units_of_the_losses_of_training_rows():
    result = searched(solver=None)
    assert error_of(result.best_params_["alpha"]) < 0.9 * error_of(10**-0.5)
    assert "without delta" in result.report_.accountant
    assert "40 public candidates" in str(result.report_)
    # In other units nothing changes, and nothing is compiled again.
    before = programs()
    again = searched(solver=None, losses=lambda e, X, y: 1e3 * squares(e, X, y))
    np.testing.assert_allclose(again.trajectory_, result.trajectory_, rtol=1e-6)
    assert programs() == before


def test_starts_outside_of_the_space_are_refused_before_any_record_is_read():
    with pytest.raises(ValueError, match="no 'beta'"):
        searched(starts=[{"beta": 1.0}])
    with pytest.raises(ValueError, match="is not in"):
        searched(starts=[{"alpha": 1e9}])


def test_nothing_of_the_validation_records_is_left_in_the_search(found):
    content = pickle.dumps(found)
    for row in (PRIVATE[0][0], PRIVATE[1][:10]):
        assert np.ascontiguousarray(row).tobytes() not in content
    # The control: what is released is there.
    assert np.ascontiguousarray(found.trajectory_).tobytes() in content


def test_a_search_is_cloned_and_configured_as_an_estimator():
    search = dpb.PrivateSearch(Ridge(), SPACE, BUDGET)
    again = clone(search.set_params(estimator__alpha=3.0))
    assert again.get_params()["estimator__alpha"] == 3.0
    assert not hasattr(again, "best_params_")


def test_a_seed_is_answered_with_the_key():
    search = dpb.PrivateSearch(Ridge(), {"alpha": dpb.search.Range(0.1, 1.0)}, BUDGET)
    for seeded in (
        lambda: dpb.PrivateSearch(Ridge(), {}, BUDGET, random_state=0),
        lambda: search.set_params(random_state=0),
        lambda: search.fit(0, 0, validation=(0, 0), random_state=0),
    ):
        with pytest.raises(TypeError, match=r"random_state is refused.*a key="):
            seeded()
    assert search.set_params(n_jobs=2).n_jobs == 2
    assert search.set_params(estimator__random_state=1).estimator.random_state == 1


def test_parameters_of_a_pipeline_and_vectors_are_set_coordinate_by_coordinate():
    space = {
        "ridge__alpha": dpb.search.Range(1.0, 100.0, log=True),
        "ridge__tol": dpb.search.Range(0.0, 1.0),
        "weights": dpb.search.Range(-1.0, 3.0, size=2),
    }
    search = dpb.PrivateSearch(None, space, BUDGET)
    found = search.parameters(np.asarray([0.0, -1.0, 1.0, 0.5]))
    assert found["ridge__alpha"] == pytest.approx(10.0)
    assert found["ridge__tol"] == 0.0
    np.testing.assert_allclose(found["weights"], [3.0, 2.0])
    # Rounding leads out of no range.
    assert search.parameters(np.ones(4))["ridge__alpha"] == 100.0


@pytest.mark.slow
def test_a_number_of_neighbours_is_searched():
    result = searched(
        KNeighborsRegressor(),
        {"n_neighbors": dpb.search.Range(1, 40, log=True, integer=True)},
        solver=dpb.search.RandomSearch(12, 4.0),
        budget=dpb.PrivacyBudget(5.0, 0),
    )
    assert 5 < result.best_params_["n_neighbors"] <= 40


def test_rows_that_cannot_be_read_count_for_nothing_and_raise_nothing():
    broken = PRIVATE[0].copy(), PRIVATE[1].copy()
    broken[0][0, 0], broken[1][1] = np.nan, np.inf
    other = PRIVATE[0].copy(), PRIVATE[1].copy()
    other[0][0], other[1][1] = 1e9, 1e200
    points = [searched(validation=rows).trajectory_ for rows in (broken, other)]
    bound = 0.4 * 2 * 2 * FEW.clip_norm / 1_000  # one step, two records
    assert np.abs(points[0][0] - points[1][0]).max() <= bound * (1 + 1e-6)


def test_a_row_that_the_estimator_refuses_counts_for_nothing_and_raises_nothing():
    """Text that no training record has, and one missing entry: NaN in their rows."""
    inputs = np.where(INPUTS[:, :1] > 0, "above", "below").astype(object)
    private = inputs[60:].copy()
    private[[3, 500], 0] = "a secret", None
    owner = dpb.PrivateSearch(make_pipeline(OneHotEncoder(), Ridge()), {}, BUDGET)
    rows = owner._rows(inputs[:60], TARGETS[:60])
    losses = rows.black_box(private, TARGETS[60:])(np.zeros(0))
    assert set(np.flatnonzero(np.isnan(losses))) == {3, 500}
    whole = rows.black_box(inputs[60:], TARGETS[60:])
    others = np.isfinite(losses)
    np.testing.assert_allclose(losses[others], whole(np.zeros(0))[others])


def test_parameters_that_cannot_be_fitted_lose_every_row():
    class Fragile(Ridge):
        def fit(self, X, y):
            if self.alpha < 1e-2:
                raise RuntimeError("diverged")
            return super().fit(X, y)

    owner = dpb.PrivateSearch(Fragile(), SPACE, BUDGET)
    box = owner._rows(*TRAINING).black_box(*PRIVATE)
    assert np.isnan(box(-np.ones(1))).all()
    assert np.isfinite(box(np.ones(1))).all()


def test_sparse_inputs_are_searched_as_dense_ones_are(found):
    as_sparse = searched(
        public=(scipy.sparse.coo_array(TRAINING[0]), TRAINING[1]),
        validation=(scipy.sparse.coo_array(PRIVATE[0]), PRIVATE[1]),
    )
    assert np.abs(as_sparse.trajectory_ - found.trajectory_).max() < 0.05


def test_data_frames_are_read_by_position_and_must_have_the_same_columns():
    class Frame:
        """What `PrivateSearch` knows of a data frame."""

        def __init__(self, columns):
            self.columns, self.shape = columns, (2, len(columns))

    kinds = Frame(["a", "b"]), Frame(["a", "c"])
    with pytest.raises(ValueError, match="must have the columns of the training X"):
        searched(public=(kinds[0], [0, 1]), validation=(kinds[1], [0, 1]))


def test_a_column_of_labels_is_refused_by_the_default_losses():
    labels = (TARGETS > 0)[:, None]
    with pytest.raises(ValueError, match="ravel it"):
        searched(
            LogisticRegression(),
            {"C": dpb.search.Range(0.1, 1.0)},
            public=(TRAINING[0], labels[:60]),
            validation=(PRIVATE[0], labels[60:]),
        )


def test_nothing_is_predicted_before_fit():
    search = dpb.PrivateSearch(LogisticRegression(), SPACE, BUDGET)
    for name in ("predict", "predict_proba", "decision_function"):
        with pytest.raises(NotFittedError, match="not fitted yet"):
            getattr(search, name)(INPUTS)


class Relative(RegressorMixin, BaseEstimator):
    """Predicts every row by the rows beside it."""

    def __init__(self, alpha=1.0):
        self.alpha = alpha

    def fit(self, X, y):
        return self

    def predict(self, X):
        return self.alpha * (X[:, 0] - X[:, 0].mean())


def test_losses_that_depend_on_other_rows_are_refused_before_any_private_one_is_read():
    class Untouched:
        def __len__(self):
            return 1_000

    with pytest.raises(ValueError, match="one validation record would change"):
        searched(Relative(), validation=(Untouched(), Untouched()))


def test_the_loss_of_a_classifier_is_half_the_brier_score():
    labels = np.where(TARGETS > 0, "yes", "no")
    model = LogisticRegression().fit(INPUTS[:60], labels[:60])
    search = dpb.PrivateSearch(LogisticRegression(), SPACE, BUDGET)
    losses = search._rows(INPUTS[:60], labels[:60]).losses
    found = losses(model, PRIVATE[0], labels[60:])
    chances = model.predict_proba(PRIVATE[0])[:, 1]
    assert found.mean() == pytest.approx(
        brier_score_loss(labels[60:] == "yes", chances)
    )
    unknown = losses(model, PRIVATE[0], np.full(1_000, "perhaps"))
    np.testing.assert_array_less(found, unknown)
    assert unknown.max() <= 1


def test_classifiers_are_searched_and_an_unknown_class_is_a_label_like_any():
    labels = np.where(TARGETS > 0, "yes", "no")
    private = labels[60:].copy()
    private[0] = "perhaps"
    result = searched(
        make_pipeline(StandardScaler(), LogisticRegression()),
        {"logisticregression__C": dpb.search.Range(1e-3, 1e2, log=True)},
        public=(INPUTS[:60], labels[:60]),
        validation=(PRIVATE[0], private),
    )
    assert result.best_params_["logisticregression__C"] < 10**-0.5
    assert set(result.predict(PRIVATE[0])) <= {"yes", "no"}
    assert list(result.classes_) == ["no", "yes"]
    chances, side = (
        getattr(result, name)(PRIVATE[0])
        for name in ("predict_proba", "decision_function")
    )
    np.testing.assert_array_equal(chances[:, 1] > 0.5, side > 0)


def test_what_the_estimator_does_not_tell_the_search_has_not(found):
    unfitted = dpb.PrivateSearch(LogisticRegression(), SPACE, BUDGET)
    assert hasattr(unfitted, "predict_proba")
    assert not hasattr(unfitted, "classes_")
    for name in ("predict_proba", "decision_function", "classes_"):
        assert not hasattr(found, name)


def test_other_searches_serve_as_well():
    result = searched(
        solver=dpb.search.RandomSearch(30, 3.0), budget=dpb.PrivacyBudget(5.0, 0)
    )
    assert result.report_.delta == 0
    assert error_of(result.best_params_["alpha"]) < error_of(1e-4)


def test_a_folder_ends_with_released_values_only(tmp_path):
    result = searched(folder=tmp_path / "a")
    assert not list((tmp_path / "a").glob("*.SECRET*"))
    with pytest.warns(UserWarning, match="holds a finished run"):
        again = searched(folder=tmp_path / "a")
    assert again.best_params_ == result.best_params_
    with pytest.raises(ValueError, match=r"evaluates was \"Ridge in .*10.0"):
        searched(space={"alpha": dpb.search.Range(1.0, 10.0)}, folder=tmp_path / "a")


@pytest.mark.parametrize(
    "change",
    [
        {"estimator": Ridge(fit_intercept=False)},
        {"space": {"alpha": dpb.search.Range(1.0, 2.0)}},
        {"losses": squares},
        {"public": (TRAINING[0], 2 * TRAINING[1])},
        {"validation": (PRIVATE[0][::-1], PRIVATE[1])},
    ],
)
def test_a_search_does_not_go_on_with_something_else(change, tmp_path, monkeypatch):
    stopped = {"folder": tmp_path, "solver": dpb.search.RandomSearch(3, 4.0)}
    stopped["budget"] = dpb.PrivacyBudget(2.0, 0)

    def stops(*args, **options):
        raise RuntimeError("the cluster went away")

    with monkeypatch.context() as patch:
        patch.setattr(ask_tell, "_short_tell", stops)
        with pytest.raises(RuntimeError):
            searched(**stopped)
    with pytest.raises(ValueError, match=r"also the estimator|evaluates was"):
        searched(**(stopped | change))
    searched(**stopped)


def test_a_middle_that_cannot_be_fitted_is_told_with_its_parameters():
    space = {"n_neighbors": dpb.search.Range(1, 2_000, integer=True)}
    with pytest.raises(
        ValueError, match=r"KNeighborsRegressor\(n_neighbors=1000\) fails"
    ):
        searched(KNeighborsRegressor(), space)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"space": {}}, ValueError, "names no parameter"),
        (
            {"space": {"alfa": dpb.search.Range(0, 1)}},
            ValueError,
            "Invalid parameter 'alfa' for estimator Ridge",
        ),
        ({"space": {"alpha": [0, 1]}}, TypeError, r"Give .*Range\(0.1, 10"),
        ({"estimator": Ridge}, TypeError, "must be an instance such as"),
        ({"losses": "accuracy"}, TypeError, "losses must be a function"),
        ({"validation": PRIVATE[0]}, TypeError, "validation must be"),
        ({"validation": (*PRIVATE, None, None)}, TypeError, "tuple of 4"),
        ({"validation": (INPUTS[60:, 1:], TARGETS[60:])}, ValueError, r"got \(49,\)"),
        (
            {"validation": (INPUTS[60:], TARGETS[60:, None])},
            ValueError,
            "y of validation must have the columns",
        ),
        ({"budget": 1.0}, TypeError, "budget must be"),
        ({"solver": dpb.NoisyGD(1, 1.0, step_size=1.0)}, TypeError, "NoisyGD"),
        ({"losses": lambda e, X, y: 0.0}, ValueError, "one number for each"),
        (
            {"estimator": StandardScaler(), "space": {"copy": dpb.search.Range(0, 1)}},
            ValueError,
            "has no default loss",
        ),
        (
            {"validation": (PRIVATE[0], PRIVATE[1][1:])},
            ValueError,
            "validation X, y have",
        ),
    ],
)
def test_bad_arguments_are_named(options, error, message):
    with pytest.raises(error, match=message):
        searched(**options)


def test_an_untyped_key_is_refused():
    with pytest.raises(TypeError, match="key"):
        dpb.PrivateSearch(Ridge(), SPACE, BUDGET).fit(
            *TRAINING, validation=PRIVATE, key=0
        )
