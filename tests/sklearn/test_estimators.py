"""What the estimators learn, predict, refuse and keep."""

import pickle

import jax
import numpy as np
import pyarrow as pa
import pytest
from sklearn.base import clone
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer

import dpbilevel as dpb
from dpbilevel.sklearn import (
    DPLogisticRegression,
    DPMLPClassifier,
    DPRidge,
    DPSourceReweighting,
    FairClassifier,
)
from dpbilevel.sklearn import sources as sources_module
from tests.cases import slow

NAMES = np.asarray(["left", "right"])
BOX = {"bounds": ([-1, 2, -3], [1, 4, 5])}
LABELS = {"classes": ["left", "right"], **BOX}


def records(n=2000, seed=0):
    """Features in their bounds, and a number that is linear in them."""
    rng = np.random.default_rng(seed)
    X = rng.uniform(*BOX["bounds"], (n, 3))
    return X, 3 * X[:, 0] - (X[:, 1] - 3) + 0.25 * (X[:, 2] - 1)


def labelled(n=2000, seed=0):
    X, margin = records(n, seed)
    return X, NAMES[(margin > 0).astype(int)]


@pytest.mark.slow
def test_a_classifier_of_two_texts_learns_the_direction():
    X, y = labelled()
    model = DPLogisticRegression(**LABELS, epsilon=10.0).fit(X, y)
    assert model.score(*labelled(seed=1)) > 0.93
    direction = model.coef_[0] / np.linalg.norm(model.coef_)
    assert direction @ [3, -1, 0.25] / np.sqrt(9 + 1 + 1 / 16) > 0.95
    assert model.coef_.shape == (1, 3)
    assert model.intercept_.shape == (1,)
    assert model.n_iter_ == model.privacy_report_.ledger[-1].count


@pytest.mark.slow
def test_scores_chances_and_predictions_agree():
    X, margin = records()
    y = np.digitize(margin, [-1, 1]) * 10
    model = DPLogisticRegression(**BOX, classes=[20, 0, 10], epsilon=10.0).fit(X, y)
    np.testing.assert_array_equal(model.classes_, [0, 10, 20])
    scores = model.decision_function(X)
    np.testing.assert_allclose(scores, X @ model.coef_.T + model.intercept_)
    chances = model.predict_proba(X)
    np.testing.assert_allclose(np.exp(model.predict_log_proba(X)), chances)
    softmax = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(chances, softmax)
    np.testing.assert_array_equal(model.predict(X), 10 * np.argmax(scores, axis=1))
    assert model.score(X, y) > 0.7


@pytest.mark.slow
def test_without_a_constant_the_model_is_zero_at_zero():
    X, y = labelled()
    for model in (
        DPLogisticRegression(**LABELS, fit_intercept=False).fit(X, y),
        DPRidge(
            **BOX, target_bounds=(1, 9), fit_intercept=False, check_records=False
        ).fit(X, records()[1]),
    ):
        assert np.all(np.asarray(model.intercept_) == 0)


@pytest.mark.slow
def test_a_regression_finds_coefficients_and_constant():
    X, target = records(20_000)
    model = DPRidge(**BOX, target_bounds=(0, 10), epsilon=10.0).fit(X, 5 + target / 2)
    assert model.score(X, 5 + target / 2) > 0.95
    np.testing.assert_allclose(model.coef_, [1.5, -0.5, 0.125], atol=0.2)


@pytest.mark.slow
@pytest.mark.reuses_keys
def test_units_of_the_features_do_not_matter(getkey):
    X, target = records()
    key, factor = getkey(), np.asarray([100.0, 0.01, 7.0])
    bounds = [np.asarray(v, float) for v in BOX["bounds"]]
    fits = [
        DPRidge(bounds=(bounds[0] * units, bounds[1] * units), target_bounds=(-6, 6))
        .fit(X * units, target, key=key)
        .predict(X * units)
        for units in (np.ones(3), factor)
    ]
    np.testing.assert_allclose(*fits, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_a_ridge_shortens_the_model():
    X, y = labelled()
    lengths = [
        np.linalg.norm(DPLogisticRegression(**LABELS, ridge=ridge).fit(X, y).coef_)
        for ridge in (0.0, 0.1)
    ]
    assert lengths[1] < lengths[0] / 2


@pytest.mark.slow
def test_a_large_ridge_leaves_the_constant():
    X, _ = records()
    y = NAMES[(np.arange(len(X)) % 4 == 0).astype(int)]
    model = DPLogisticRegression(**LABELS, ridge=10.0)
    chance = model.fit(X, y, key=jax.random.key(0)).predict_proba(X)[:, 1]
    assert np.abs(model.coef_).max() < 0.1
    assert chance.mean() == pytest.approx(0.25, abs=0.06)


@pytest.mark.parametrize("declared", [{"bounds": (-1, 1)}, *slow({"data_norm": 1.0})])
def test_rows_to_predict_are_cut_as_those_of_the_fit(declared):
    X = np.random.default_rng(0).uniform(-0.5, 0.5, (2000, 3))
    y = NAMES[(X[:, 0] > 0).astype(int)]
    model = DPLogisticRegression(
        classes=NAMES, max_iter=5, check_records=False, **declared
    )
    model.fit(X, y, key=jax.random.key(0))
    far = np.array([[5.0, 0.0, 0.0], [50.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    assert np.ptp(model.decision_function(far)) < 1e-9
    model.set_params(bounds=(-9, 9), data_norm=None)  # what the fit had stays
    assert np.ptp(model.decision_function(far)) < 1e-9


@pytest.mark.slow
def test_bounds_that_may_be_pairs_of_two_features_are_refused():
    X, y = records()
    X, y = X[:, :2], (y > 0).astype(int)
    for bounds in ([(-1, 1), (2, 4)], ((-1, 1), (2, 4)), [[-1, 1], [2, 4]]):
        model = DPLogisticRegression(classes=[0, 1], bounds=bounds, max_iter=1)
        with pytest.raises(ValueError, match=r"pairs as \(\[-1, 2\], \[1, 4\]\)"):
            model.fit(X, y)
    model.set_params(bounds=([-1, 2], [1, 4])).fit(X, y, key=jax.random.key(0))


@pytest.mark.slow
def test_a_rare_class_gets_a_longer_unit_and_its_share():
    rng = np.random.default_rng(0)
    X = rng.uniform(-1, 1, (8000, 4))
    y = (rng.random(8000) < 0.03 * np.exp(X[:, 0])).astype(int)
    model = DPLogisticRegression(classes=[0, 1], bounds=(-1, 1))
    model.fit(X, y, key=jax.random.key(0))
    unit = model.row_length_ * 3**0.5
    assert model._unit > 1.2 * unit
    assert model.predict_proba(X)[:, 1].mean() > 0.75 * y.mean()
    model.fit(X, (X[:, 0] > 0.4).astype(int), key=jax.random.key(0))
    assert model._unit == pytest.approx(model.row_length_ * 3**0.5)


@pytest.mark.slow
def test_a_network_learns_what_no_linear_model_does():
    X, _ = records(3000)
    y = NAMES[(np.abs(X[:, 0]) > 0.5).astype(int)]
    model = DPMLPClassifier(**LABELS, hidden_layer_sizes=16, epsilon=20.0).fit(X, y)
    assert model.score(X, y) > 0.9
    assert [w.shape for w in model.coefs_] == [(3, 16), (16, 2)]
    np.testing.assert_allclose(model.predict_proba(X).sum(axis=1), 1)


@pytest.mark.slow
def test_batches_are_those_that_are_charged():
    X, y = labelled(3000)
    few = {"batch_size": 300, "hidden_layer_sizes": 2, "max_iter": 50}
    model = DPMLPClassifier(**LABELS, **few).fit(X, y)
    row = model.privacy_report_.ledger[-1]
    assert row.count == 50
    assert "Poisson(rate=0.1" in row.roles["records"].sampling


@pytest.mark.slow
def test_a_fair_model_serves_the_small_group_better():
    X, y = labelled(6000)
    small = np.arange(6000) % 8 == 0
    y = np.where(small, NAMES[(X[:, 2] > 1).astype(int)], y)
    groups = np.where(small, "small", "large")
    shares = {"small": 1 / 8, "large": 7 / 8}
    fair = FairClassifier(**LABELS, shares=shares, epsilon=10.0)
    fair.fit(X, y, groups=groups)
    plain = DPLogisticRegression(**LABELS, epsilon=10.0).fit(X, y)
    assert fair.score(X[small], y[small]) > plain.score(X[small], y[small]) + 0.05
    np.testing.assert_array_equal(fair.groups_, ["large", "small"])
    assert fair.group_weights_[1] > 0.25
    assert fair.group_weights_.sum() == pytest.approx(1)


def sources(n=1200):
    X, y = labelled(n)
    names = np.asarray(["a", "b", "c"])[np.arange(n) % 3]
    other = NAMES[(y == "left").astype(int)]
    return X, np.where(names == "b", other, y), names


SOLVER = dpb.applications.SelectedSources(
    dpb.NoisyGD(10, 1.0, 2.0), dpb.NoisyGD(30, 1.0, 8.0)
)


@pytest.mark.slow
def test_a_wrong_source_loses_its_weight():
    X, y, names = sources()
    model = DPSourceReweighting(
        **LABELS, sources=["c", "b", "a"], solver=SOLVER, epsilon=5.0
    )
    model.fit(X, y, sources=names, clean=labelled(300, seed=1), people="disjoint")
    np.testing.assert_array_equal(model.sources_, ["a", "b", "c"])
    np.testing.assert_allclose(model.source_weights_, [0.5, 0, 0.5], atol=1e-6)
    assert model.score(*labelled(seed=2)) > 0.85
    assert model.two_levels_ is None
    assert "people disjoint" in str(model.privacy_report_)


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:auto. The plan.*may be worse than the best constant"
)
def test_sources_are_planned_by_dry_runs_and_the_plan_is_kept():
    X, y, names = sources(3000)
    model = DPSourceReweighting(**LABELS, sources=["a", "b", "c"], epsilon=5.0)
    fit = {"sources": names, "clean": labelled(100, seed=1), "people": "disjoint"}
    plan = model.fit(X, y, **fit).plan_
    assert model.two_levels_ is plan.two_levels
    np.testing.assert_allclose(model.source_weights_.sum(), 1, rtol=1e-5)
    assert clone(model).fit(X, y, **fit).plan_ is plan


@pytest.mark.slow
def test_dry_runs_are_shown_where_verbose_and_kept_for_fits_that_are_not(
    monkeypatch,
):
    made = []

    def auto(problem, budget, *, sizes, w0, progress, **options):
        made.append((budget.epsilon, progress))
        return dpb.calibrate(problem, SOLVER, budget, sizes=sizes, w0=w0)

    monkeypatch.setattr(sources_module, "auto", auto)
    monkeypatch.setattr(sources_module, "_PLANS", {})
    X, y, names = sources(200)
    fit = {"sources": names, "clean": labelled(50, seed=1)}
    # No release of the records but the plan's may depend on the budget here.
    model = DPSourceReweighting(
        **LABELS, sources=["a", "b", "c"], epsilon=7.0, check_records=False
    )
    model.set_params(verbose=True).fit(X, y, **fit)
    model.set_params(verbose=False).fit(X, y, **fit)
    assert made == [(7.0, True)]
    model.set_params(epsilon=8.0).fit(X, y, **fit)
    assert made == [(7.0, True), (8.0, False)]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="verbose=True needs tqdm: run pip install"):
        model.set_params(epsilon=9.0, verbose=True).fit(X, y, **fit)


def fitted(name):
    """A short fit of the estimator of this name, and its features."""
    X, y = labelled(200)
    few, half = {"max_iter": 2}, np.arange(200) % 2
    if name == "logistic":
        return DPLogisticRegression(**LABELS, **few).fit(X, y), X
    if name == "ridge":
        model = DPRidge(**BOX, target_bounds=(-6, 6), **few)
        return model.fit(X, records(200)[1]), X
    if name == "network":
        return DPMLPClassifier(**LABELS, **few).fit(X, y), X
    if name == "fair":
        model = FairClassifier(**LABELS, shares={0: 0.5, 1: 0.5}, **few)
        return model.fit(X, y, groups=half), X
    one = dpb.bilevel.OneLevel(dpb.NoisyGD(2, 1.0, 1.0))
    model = DPSourceReweighting(**LABELS, sources=[0, 1], solver=one)
    return model.fit(X, y, sources=half, clean=(X, y)), X


@pytest.mark.filterwarnings("ignore:.*noise of all steps together")  # tiny
@pytest.mark.parametrize(
    "name", ["logistic", *slow("ridge", "network", "fair", "sources")]
)
def test_estimators_are_cloned_pickled_and_shown(name):
    model, X = fitted(name)
    kept = pickle.dumps(model)
    for row in np.asarray(X):  # no record is kept, in either precision
        assert row.tobytes() not in kept
        assert row.astype(np.float32).tobytes() not in kept
    copy = pickle.loads(kept)
    np.testing.assert_array_equal(copy.predict(X), model.predict(X))
    assert copy.privacy_report_ == model.privacy_report_
    assert "ENFORCED: epsilon = 1 at delta = 1e-05" in str(model.privacy_report_)
    fresh = clone(model)
    assert repr(fresh) == repr(clone(fresh))
    assert fresh.get_params().keys() == model.get_params().keys()
    assert not hasattr(fresh, "privacy_report_")
    assert type(model).__name__ in model._repr_html_()
    for seeded in (type(model), fresh.set_params):
        with pytest.raises(TypeError, match=r"random_state is refused.*a key="):
            seeded(random_state=0)
    first, *_ = model.privacy_report_.assumptions
    assert "earlier steps of a pipeline, are public" in first
    for refused in ("sample_weight", "random_state", "sample_weights"):
        with pytest.raises(TypeError, match=f"fit: {refused} is refused"):
            model.fit(X, X[:, 0], **{refused: 0})
    with pytest.raises(TypeError, match="must be a typed key"):
        model.set_params(epsilon=2.0).fit(X, X[:, 0], key=0, **needed(model, X))


def needed(model, X):
    """The arguments of `fit` that this estimator cannot do without."""
    if isinstance(model, FairClassifier):
        return {"groups": X[:, 0]}
    if isinstance(model, DPSourceReweighting):
        return {"sources": X[:, 0], "clean": (X, X[:, 0])}
    return {}


@pytest.mark.parametrize(
    ("model", "declare"),
    [
        (DPLogisticRegression(**BOX), "declare a public classes="),
        (DPLogisticRegression(classes=NAMES), "declare bounds="),
        (DPLogisticRegression(**LABELS, data_norm=1.0), "and not both"),
        (DPLogisticRegression(**BOX, classes=["left"]), "at least two"),
        (DPLogisticRegression(**BOX, classes=["left", 1]), "all texts or all numbers"),
        (DPLogisticRegression(**BOX, classes=[0, 1]), "classes holds numbers"),
        (DPLogisticRegression(classes=NAMES, bounds=(1, 1)), "below the upper one"),
        (DPLogisticRegression(classes=NAMES, bounds=(0, [1, 2])), "3 numbers"),
        (DPLogisticRegression(classes=NAMES, bounds=3), "must be a pair"),
        (DPLogisticRegression(**LABELS, size=5), "size= is for"),
        (DPLogisticRegression(**LABELS, neighbours="add_or_remove_one"), "give size="),
        (DPLogisticRegression(**LABELS, epsilon=0.0), "epsilon must be positive"),
        (DPRidge(**BOX), "declare target_bounds="),
        (FairClassifier(**LABELS), "give groups="),
        (DPSourceReweighting(**LABELS), "give sources="),
    ],
)
def test_what_is_not_declared_is_asked_for(model, declare):
    X, y = labelled(20)
    with pytest.raises(ValueError, match=declare):
        model.fit(X, y)


def test_groups_without_shares_are_asked_for():
    X, y = labelled(20)
    with pytest.raises(ValueError, match="declare shares="):
        FairClassifier(**LABELS).fit(X, y, groups=y)
    with pytest.raises(ValueError, match="declare a public sources="):
        DPSourceReweighting(**LABELS).fit(X, y, sources=y, clean=(X, y))


class Typed:
    """A table or column whose types have names, as in data frames."""

    def __init__(self, values, types, columns=()):
        self.values, self.columns = np.asarray(values, object), columns
        if columns:
            self.dtypes = types
        else:
            self.dtype = types

    def __len__(self):
        return len(self.values)

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.values, dtype)


@pytest.mark.parametrize("kind", ["str", "string[pyarrow]", "category", "Categorical"])
def test_columns_of_texts_by_type_are_refused_by_name(kind):
    X, y = labelled(20)
    frame = Typed(X.astype(str), ["float64", kind, "int64"], ["age", "ward", "dose"])
    with pytest.raises(ValueError, match=r"columns \['ward'\] of X hold texts"):
        DPLogisticRegression(**LABELS).fit(frame, y)


def test_arrays_of_texts_are_no_features_and_no_targets():
    X, y = labelled(20)
    with pytest.raises(ValueError, match=r"X has texts, by its type.*code"):
        DPLogisticRegression(**LABELS).fit(X.astype(str), y)
    with pytest.raises(ValueError, match="y has texts, by its type"):
        DPRidge(**BOX, target_bounds=(-1, 1)).fit(X, X[:, 0].astype(str))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*noise of all steps together")  # tiny
def test_labels_that_are_texts_by_type_are_no_numbers():
    X, y = labelled(20)
    with pytest.raises(ValueError, match="holds numbers, the records texts"):
        DPLogisticRegression(**BOX, classes=[0, 1]).fit(X, pa.array(y))
    DPLogisticRegression(**LABELS, max_iter=2).fit(X, pa.array(y))


def test_messages_name_the_argument_that_does_not_fit():
    X, y = labelled(20)
    model = DPSourceReweighting(**LABELS, sources=NAMES)
    for arguments, message in [
        ({"sources": "ward"}, r"sources is a text; .* table\['ward'\]"),
        ({"sources": y[1:]}, "sources has 19 values for 20 records"),
        ({"clean": (X, y[1:])}, r"clean\[1\] has 19 values for 20 records"),
        ({"clean": (X[:, 1:], y)}, "clean must have the columns"),
    ]:
        with pytest.raises(ValueError, match=message):
            model.fit(X, y, **({"sources": y, "clean": (X, y)} | arguments))
    with pytest.raises(ValueError, match="number 1 has 9 and 8"):
        DPRidge(bounds=([0, 9, 0], [1, 8, 1]), target_bounds=(0, 1)).fit(X, X[:, 0])


def test_names_of_columns_are_kept():
    X, y = labelled(200)
    table = pa.table({name: column for name, column in zip("abc", X.T, strict=True)})
    pytest.importorskip("pandas")
    frame = table.to_pandas()
    model = DPLogisticRegression(**LABELS, max_iter=2).fit(frame, y)
    np.testing.assert_array_equal(model.feature_names_in_, ["a", "b", "c"])
    with pytest.raises(ValueError, match="feature names"):
        model.predict(frame[["c", "b", "a"]])


@pytest.mark.slow
def test_a_norm_may_be_declared_instead_of_bounds():
    X, y = labelled()
    rows = X - [0, 3, 1]
    model = DPLogisticRegression(classes=NAMES, data_norm=4.0, epsilon=10.0)
    assert model.fit(rows, y).score(rows, y) > 0.9


@pytest.mark.slow
def test_pipelines_and_cross_validation_fit_it():
    X, y = labelled(600)
    model = DPLogisticRegression(classes=NAMES, bounds=(-1, 1), epsilon=20.0)
    middle, half = np.asarray([0, 3, 1]), np.asarray([1, 1, 4])
    scale = FunctionTransformer(lambda X: (X - middle) / half)  # public constants
    assert cross_val_score(make_pipeline(scale, model), X, y, cv=3).min() > 0.8
