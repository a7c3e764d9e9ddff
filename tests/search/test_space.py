"""Categories and conditions: what a space makes of points, and what is refused."""

import math

import jax
import numpy as np
import pytest
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.linear_model import Lasso, Ridge
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVR

import dpbilevel as dpb
from dpbilevel.search import Categorical, Range
from dpbilevel.search.row_losses import clip_range_of
from dpbilevel.search.space import Space

BUDGET = dpb.PrivacyBudget(20.0, 0.0)
RNG = np.random.default_rng(0)
INPUTS = RNG.normal(size=(560, 3))
TARGETS = np.sin(2 * INPUTS[:, 0]) + 0.1 * RNG.normal(size=560)
TRAINING, PRIVATE = (INPUTS[:60], TARGETS[:60]), (INPUTS[60:], TARGETS[60:])
KERNELS = {
    "C": Range(0.1, 10.0, log=True),
    "kernel": Categorical(["linear", "poly", "rbf"]),
    "gamma": Range(0.01, 1.0, log=True, when={"kernel": ["poly", "rbf"]}),
    "degree": Range(2, 4, integer=True, when={"kernel": "poly"}),
}


def searched(estimator, space, key=0, **options):
    private = options.pop("validation", PRIVATE)
    search = dpb.PrivateSearch(
        estimator, space, options.pop("budget", BUDGET), **options
    )
    return search.fit(*TRAINING, validation=private, key=jax.random.key(key))


def test_every_choice_has_an_equal_part_of_the_line():
    kind = Categorical(["a", "b", None, 3])
    found = [kind.value(np.asarray([v])) for v in np.linspace(-1, 1, 4_001)]
    counts = [sum(v is c or v == c for v in found) for c in kind.choices]
    np.testing.assert_allclose(counts, 1_000, atol=1)
    for choice in kind.choices:
        assert kind.value(kind.position(choice)) == choice
        assert choice in kind
    assert True not in Categorical([1, 2])
    assert 1 not in Categorical([True, False])
    with pytest.raises(ValueError, match="'c' is not among"):
        kind.position("c")


def test_a_parameter_whose_condition_does_not_hold_is_not_set():
    space = Space(KERNELS)
    names = {"linear": set(), "poly": {"gamma", "degree"}, "rbf": {"gamma"}}
    for kernel, others in names.items():
        found = space.parameters(space.position({"kernel": kernel}))
        assert found["kernel"] == kernel
        assert found.keys() == {"C", "kernel"} | others
    search = dpb.PrivateSearch(SVR(degree=7), KERNELS, BUDGET)
    assert search._make(space.position({"kernel": "rbf"})).degree == 7
    assert search._make(space.position({"kernel": "poly"})).degree == 3


def test_conditions_hold_only_where_those_of_their_categories_do():
    space = Space(
        {
            "c": Range(0.0, 1.0, when={"b": "y"}),
            "b": Categorical(["x", "y"], when={"a": ("u", "v")}),
            "a": Categorical(["t", "u", "v"]),
        }
    )
    assert space.names.index("a") < space.names.index("b") < space.names.index("c")
    for a, b in [(a, b) for a in "tuv" for b in "xy"]:
        found = space.parameters(space.position({"a": a, "b": b}))
        assert ("b" in found) == (a in "uv")
        assert ("c" in found) == (a in "uv" and b == "y")
    assert "c" in space.parameters(space.within("c"))


def test_middles_have_every_choice_and_points_of_a_branch_share_theirs():
    space = Space(KERNELS)
    found = [space.parameters(point) for point in space.middles()]
    assert sorted(v["kernel"] for v in found) == ["linear", "poly", "rbf"]
    for point in RNG.uniform(-1, 1, (50, 4)):
        middle = space.middle(point)
        assert any(np.array_equal(middle, other) for other in space.middles())
        kernel = space.parameters(point)["kernel"]
        assert space.parameters(middle)["kernel"] == kernel
        assert space.parameters(middle)["C"] == pytest.approx(1.0)
    assert [v.tolist() for v in Space({"a": Range(0.0, 1.0)}).middles()] == [[0.0]]


@pytest.mark.slow
def test_the_right_kernel_is_found_and_what_it_does_not_have_is_not_released():
    result = searched(SVR(), KERNELS)
    assert result.best_params_["kernel"] == "rbf"
    assert result.best_params_.keys() == {"C", "kernel", "gamma"}
    assert "70 public candidates" in str(result.report_)
    assert result.report_.epsilon <= BUDGET.epsilon
    assert result.predict(PRIVATE[0]).shape == (500,)


@pytest.mark.slow
def test_whole_estimators_are_choices_and_are_not_fitted_in_place():
    models = [Ridge(), SVR()]
    space = {
        "model": Categorical(models),
        "model__alpha": Range(0.1, 10.0, log=True, when={"model": models[0]}),
        "model__C": Range(0.1, 10.0, log=True, when={"model": models[1]}),
    }
    pipeline = Pipeline([("scaler", StandardScaler()), ("model", Lasso())])
    result = searched(pipeline, space)
    assert isinstance(result.best_params_["model"], SVR)
    assert result.best_params_.keys() == {"model", "model__C"}
    assert not any(hasattr(model, "n_features_in_") for model in models)
    assert isinstance(result.best_estimator_["model"], SVR)


def test_every_branch_has_its_own_numbers_that_are_refused():
    inputs = PRIVATE[0].copy()
    inputs[5, 1] = np.nan
    models = [Ridge(), HistGradientBoostingRegressor(max_iter=2)]
    space = {"model": Categorical(models), "scaler": Categorical(["passthrough", None])}
    search = dpb.PrivateSearch(
        Pipeline([("scaler", StandardScaler()), ("model", Lasso())]), space, BUDGET
    )
    rows = search._rows(*TRAINING)
    for middle in Space(space).middles():
        rows.check_row_independence(middle)
    losses = rows.black_box(inputs, PRIVATE[1])
    for number, model in enumerate(models):
        for scaler in space["scaler"].choices:  # two branches were not tried before
            point = Space(space).position({"model": model, "scaler": scaler})
            found = losses(point)
            assert np.isfinite(np.delete(found, 5)).all()
            assert np.isnan(found[5]) == (number == 0)


class Beside(RegressorMixin, BaseEstimator):
    """With one of its kinds, predicts every row by the rows beside it."""

    def __init__(self, kind="own"):
        self.kind = kind

    def fit(self, X, y):
        return self

    def predict(self, X):
        return X[:, 0] - (X[:, 0].mean() if self.kind == "beside" else 0.0)


def test_losses_that_depend_on_other_rows_with_one_choice_alone_are_refused():
    with pytest.raises(ValueError, match="one validation record would change"):
        searched(Beside(), {"kind": Categorical(["own", "beside"])})
    searched(Beside(), {"kind": Categorical(["own", "alone"])})  # the control


def test_an_unknown_choice_fails_before_a_private_row_is_read():
    class Untouched:
        def __len__(self):
            return 500

    with pytest.raises(ValueError, match=r"fails on training rows.*when="):
        searched(
            SVR(),
            {"kernel": Categorical(["rbf", "rbg"])},
            validation=(Untouched(), Untouched()),
        )


@pytest.mark.parametrize(
    ("space", "error", "words"),
    [
        (
            {"gamma": Range(0.1, 1.0, when={"kernel": "rbf"})},
            ValueError,
            "depends on 'kernel', no Categorical",
        ),
        (
            KERNELS | {"tol": Range(0.1, 1.0, when={"C": 1.0})},
            ValueError,
            "depends on 'C', no Categorical",
        ),
        (
            KERNELS | {"tol": Range(0.1, 1.0, when={"kernel": ["rbf", "rbg"]})},
            ValueError,
            r"must be choices of 'kernel'.*got \['rbf', 'rbg'\]",
        ),
        (
            KERNELS | {"tol": Range(0.1, 1.0, when={"kernel": []})},
            ValueError,
            "must be choices",
        ),
        (
            {
                "kernel": Categorical(["rbf", "poly"], when={"shrinking": True}),
                "shrinking": Categorical([True, False], when={"kernel": "rbf"}),
            },
            ValueError,
            r"\['kernel', 'shrinking'\] is circular",
        ),
        (
            {
                "kernel": Categorical(["rbf", "poly"]),
                "shrinking": Categorical([True, False], when={"kernel": "rbf"}),
                "tol": Range(0.1, 1.0, when={"shrinking": True, "kernel": "poly"}),
            },
            ValueError,
            "condition of 'tol' never holds",
        ),
        (
            {"kernl": Categorical(["rbf", "poly"])},
            ValueError,
            "Invalid parameter 'kernl' for estimator SVR",
        ),
        (
            KERNELS | {"gama": Range(0.1, 1.0, when={"kernel": "rbf"})},
            ValueError,
            "Invalid parameter 'gama' for estimator SVR",
        ),
        ({"kernel": ["rbf", "poly"]}, TypeError, "or Categorical, got"),
    ],
)
def test_wrong_spaces_are_named(space, error, words):
    with pytest.raises(error, match=words):
        searched(SVR(), space)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: Categorical("rbf"), TypeError, "choices must be a list"),
        (lambda: Categorical(["rbf"]), ValueError, "needs two choices"),
        (lambda: Categorical(["rbf", "rbf"]), ValueError, "'rbf' is given twice"),
        (
            lambda: Categorical([np.ones(2), np.ones(2)]),
            TypeError,
            "cannot be compared",
        ),
        (lambda: Range(0.0, 1.0, when="rbf"), TypeError, "when must be a dictionary"),
        (lambda: Categorical(["a", "b"], when={}), TypeError, "must be a dictionary"),
    ],
)
def test_wrong_entries_are_named(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_descent_is_refused_with_categories():
    solver = dpb.search.GradientInformativeBO(3, 1.0, step_size=0.1)
    budget = dpb.PrivacyBudget(1.0, 1e-6)
    with pytest.raises(ValueError, match=r"takes no category; change solver"):
        searched(SVR(), KERNELS, solver=solver, budget=budget)


@pytest.mark.slow
def test_categories_with_a_pipeline_are_searched_by_the_best_of_some_runs():
    space = {"svr__kernel": Categorical(["linear", "rbf"])}
    solver = dpb.search.RepeatAndSelect(40, 2.0, mean=2.0)
    budget = dpb.PrivacyBudget(8.0, 1e-6)
    estimator = make_pipeline(StandardScaler(), SVR())
    result = searched(estimator, space, solver=solver, budget=budget)
    assert result.best_params_["svr__kernel"] in ("linear", "rbf")


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        (np.repeat([0.0, 1.0], [999, 1]), 1.0),  # few errors: one counts in full
        (np.repeat([0.0, 1.0], [60, 40]), 1.0),
        (np.repeat([0.0, 0.5, 1.0], [98, 1, 1]), 1.0),
        (np.repeat([1e-3, 1.0], [995, 5]), 1.0),  # the few have most of the loss
        (np.linspace(0.0, 1.0, 1_001), 0.99),
        (np.concatenate([np.linspace(0.0, 1.0, 1_001), [np.nan, np.inf]]), 0.99),
        (np.zeros(50), 0.0),
        (np.full(50, np.nan), 0.0),
        (np.zeros(0), 0.0),
    ],
)
def test_the_unit_of_losses_is_what_most_are_below_and_half_of_the_mean(
    losses, expected
):
    assert clip_range_of(RNG.permutation(losses)) == pytest.approx(expected, abs=2e-3)


class Rarely(BaseEstimator):
    """Errs in few rows: those whose first input is large."""

    _estimator_type = "classifier"

    def __init__(self, limit=0.0):
        self.limit = limit

    def fit(self, X, y):
        return self

    def predict(self, X):
        return X[:, 0] > 10 + self.limit


@pytest.mark.parametrize("errors", [0, 1, 30])
def test_the_unit_of_losses_of_zero_or_one_is_one(errors):
    inputs = np.zeros((400, 1))
    inputs[1 : 2 * errors : 2] = 20.0
    space = {"limit": Range(-1.0, 1.0)}

    def zero_one(fitted, X, y):
        return (fitted.predict(X) != y).astype(float)

    search = dpb.PrivateSearch(Rarely(), space, BUDGET, losses=zero_one)
    rows = search._rows(inputs, np.zeros(400, bool))
    if errors:
        assert rows.loss_scale([np.zeros(1)]) == 1.0
    else:
        with pytest.warns(UserWarning, match="training rows give no scale of losses"):
            assert rows.loss_scale([np.zeros(1)]) == 1.0


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        (Range(0.1, 10, log=True), 0.7),
        (Range(-1, 5), 4.5),
        (Range(1, 100, log=True, integer=True), 7),
        (Range(0, 2, size=2), np.asarray([0.5, 2.0])),
    ],
)
def test_a_position_is_that_of_its_value(entry, value):
    found = entry.position(value)
    assert found.shape == (entry.coordinates,)
    assert np.abs(found).max() <= 1
    np.testing.assert_allclose(entry.value(found), value)
    for other in (1e3, math.nan, None, "auto", True, [0.5, 1.0, 1.5]):
        assert other not in entry
    with pytest.raises(ValueError, match=r"1000.0 is not in"):
        entry.position(1000.0)


def test_whole_numbers_have_equal_shares_of_their_range():
    depth = Range(2.0, 5.0, integer=True)
    found = [depth.value(np.asarray([v])) for v in np.linspace(-1, 1, 4_001)]
    assert {type(v) for v in found} == {int}
    assert list(np.unique(found)) == [2, 3, 4, 5]
    np.testing.assert_allclose(np.bincount(found)[2:], 1_000, atol=2)
    layers = Range(1, 100, log=True, integer=True, size=3)
    np.testing.assert_array_equal(layers.value(np.asarray([-1, 0, 1])), [1, 7, 100])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1.0, 1.0), "finite and increasing"),
        ((0.0, math.inf), "finite and increasing"),
        ((None, 1.0), "finite and increasing"),
        ((0.0, 1.0, True), "needs low above 0"),
        ((0.0, 1.0, False, 0), "size must be an integer"),
        ((0.5, 3.0, False, None, True), "needs whole ends"),
    ],
)
def test_bad_ranges_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Range(*arguments)
