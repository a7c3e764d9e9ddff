"""Tables of four libraries give the same bits, in estimators and in Python."""

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pytest

import dpbilevel as dpb
from dpbilevel.core.loop import arrays
from dpbilevel.sklearn import DPLogisticRegression, DPRidge
from tests.cases import slow

N = 60
RNG = np.random.default_rng(0)
NUMBERS = {
    "age": RNG.uniform(18, 90, N).tolist(),
    "visits": RNG.integers(0, 60, N).tolist(),
    "smokes": RNG.integers(0, 2, N).astype(bool).tolist(),
}
MISSING = {name: [*column[:i], None, *column[i + 1 :]] for i, (name, column) in
           enumerate(NUMBERS.items())}  # fmt: skip
LABEL = ["high" if age > 50 else "low" for age in NUMBERS["age"]]


def numpy_table(columns):
    listed = [[np.nan if v is None else v for v in c] for c in columns.values()]
    return np.asarray(listed, float).T


def pandas_frame(backend):
    def frame(columns):
        pandas = pytest.importorskip("pandas")
        made = pandas.DataFrame(columns)
        return made if backend is None else made.convert_dtypes(dtype_backend=backend)

    return frame


def pandas_series(backend):
    def series(values):
        return pandas_frame(backend)({"y": values})["y"]

    return series


def polars(kind):
    return lambda values: getattr(pytest.importorskip("polars"), kind)(values)


# By library: a table of columns, and one column.
LIBRARIES = {
    "pyarrow": (pa.table, lambda v: pa.chunked_array([pa.array(v)])),
    "batch": (pa.RecordBatch.from_pydict, pa.array),
    "polars": (polars("DataFrame"), polars("Series")),
    "pandas": (pandas_frame(None), pandas_series(None)),
    "nullable": (pandas_frame("numpy_nullable"), pandas_series("numpy_nullable")),
    "arrow backend": (pandas_frame("pyarrow"), pandas_series("pyarrow")),
}
MORE = [*slow("batch"), "polars", "pandas", *slow("nullable", "arrow backend")]
SOME = pytest.mark.parametrize("library", ["pyarrow", *MORE])
EVERY = pytest.mark.parametrize("library", LIBRARIES)


def classifier(X, y):
    bounds = [18, 0, 0], [100, 80, 1]
    model = DPLogisticRegression(classes=["low", "high"], bounds=bounds, max_iter=2)
    return model.fit(X, y, key=jax.random.key(0))


def regression(X, y):
    bounds = [18, 0, 0], [100, 80, 1]
    model = DPRidge(bounds=bounds, target_bounds=(0, 60), max_iter=2)
    return model.fit(X, y, key=jax.random.key(0))


@pytest.fixture(scope="module")
def expected():
    whole, missing = numpy_table(NUMBERS), numpy_table(MISSING)
    return classifier(whole, LABEL), classifier(missing, [None, *LABEL[1:]])


def assert_same(ours, others):
    np.testing.assert_array_equal(ours.coef_, others.coef_)
    np.testing.assert_array_equal(ours.intercept_, others.intercept_)


tiny = pytest.mark.filterwarnings("ignore::UserWarning")


@tiny
@SOME
@pytest.mark.reuses_keys
def test_estimators_release_the_same_bits(library, expected):
    table, column = LIBRARIES[library]
    numbers = table(NUMBERS)
    found = classifier(numbers, column(LABEL))
    assert_same(found, expected[0])
    of_missing = classifier(table(MISSING), column([None, *LABEL[1:]]))
    assert_same(of_missing, expected[1])
    if library != "batch":
        assert list(found.feature_names_in_) == list(NUMBERS)
        with pytest.raises(ValueError, match="feature names"):
            found.predict(table({n: NUMBERS[n] for n in reversed(NUMBERS)}))
    answers = expected[0].predict(numpy_table(NUMBERS))
    np.testing.assert_array_equal(found.predict(numbers), answers)


@tiny
@EVERY
@pytest.mark.slow
@pytest.mark.reuses_keys
def test_a_regression_releases_the_same_bits(library):
    table, column = LIBRARIES[library]
    targets = [None, *map(float, NUMBERS["visits"][1:])]
    same = regression(numpy_table(NUMBERS), np.asarray(targets, float))
    assert_same(regression(table(NUMBERS), column(targets)), same)


@EVERY
def test_records_of_tables_are_matrices_and_vectors(library):
    table, column = LIBRARIES[library]
    for columns in (NUMBERS, MISSING):
        found = arrays({"x": table(columns), "y": [column(columns["visits"])]})
        matrix = numpy_table(columns)
        np.testing.assert_array_equal(found["x"], matrix)
        np.testing.assert_array_equal(found["y"][0], matrix[:, 1])
        # The type is that without missing entries, too.
        assert found["x"].dtype == found["y"][0].dtype == np.float64


def test_other_leaves_stay_the_same_objects():
    data = {"a": np.ones(2, np.int8), "b": jnp.ones(2), "c": None, "d": 1.0}
    found = arrays(data)
    assert all(found[name] is data[name] for name in data)


PROBLEM = dpb.FiniteSum(dpb.squared_loss)
SOLVER, BUDGET = dpb.NoisyGD(2, 1.0, 0.1), dpb.PrivacyBudget(1.0, 1e-3)


def both(library):
    """Records with missing numbers, as tables of a library and as arrays."""
    table, column = LIBRARIES[library]
    plain = {"features": numpy_table(MISSING), "label": np.array(NUMBERS["visits"])}
    return {"features": table(MISSING), "label": column(NUMBERS["visits"])}, plain


PLAN = dpb.calibrate(PROBLEM, SOLVER, BUDGET, sizes=N)


@SOME
@pytest.mark.reuses_keys
def test_runs_begin_with_the_same_records(library, getkey):
    key, w0 = getkey(), jnp.zeros(3)
    ours, same = (
        dpb.start(PROBLEM, PLAN, data, w0, key=key).data for data in both(library)
    )
    for name in ("features", "label"):
        np.testing.assert_array_equal(ours[name], same[name])


@EVERY
@pytest.mark.slow
@pytest.mark.reuses_keys
def test_runs_release_the_same_bits(library, getkey):
    tables, plain = both(library)
    key, w0 = getkey(), jnp.zeros(3)
    found = dpb.fit(PROBLEM, SOLVER, tables, w0, budget=BUDGET, key=key).value
    same = dpb.fit(PROBLEM, SOLVER, plain, w0, budget=BUDGET, key=key).value
    solved = dpb.solve(PROBLEM, PLAN.solver, tables, w0, key=key).value
    advanced = dpb.advance(dpb.start(PROBLEM, PLAN, tables, w0, key=key)).value
    for other in (same, solved, advanced):
        np.testing.assert_array_equal(found, other)


def test_one_table_in_both_levels_is_not_disjoint():
    problem = dpb.BilevelProblem(lambda x, y, r: r[0] * x * y, lambda x, y, r: y * r[1])
    data = pa.table(NUMBERS)
    solver = dpb.bilevel.F2SA(2, 4.0, step_size=0.1, lower_step_size=0.1)
    with pytest.raises(ValueError, match="disjoint"):
        dpb.fit(
            problem,
            solver,
            dpb.Levels(data, data),
            (jnp.zeros(()), jnp.zeros(())),
            budget=BUDGET,
            people="disjoint",
            key=jax.random.key(0),
        )


@pytest.mark.parametrize(
    ("leaf", "said"),
    [
        (
            pa.table({"town": ["a secret"] * N}),
            r"columns \['town'\] of data\['x'\] hold",
        ),
        (pa.array(["a secret"] * N), r"^data\['x'\] has texts, by its type"),
        (pa.array([1] * N, pa.timestamp("s")), r"^data\['x'\]: timestamp\[s\] has no"),
        (
            pa.table({"day": pa.array([1] * N, pa.date32())}),
            r"^column 'day' of data\['x'\]: date32",
        ),
    ],
)
def test_a_column_of_no_numbers_is_named_and_not_shown(leaf, said):
    with pytest.raises(ValueError, match=said) as error:
        arrays({"x": leaf})
    assert "secret" not in str(error.value)


def test_a_lazy_frame_has_to_be_collected(getkey):
    lazy = pytest.importorskip("polars").DataFrame(NUMBERS).lazy()
    with pytest.raises(ValueError, match=r"lazy frames by \.collect\(\)"):
        dpb.fit(PROBLEM, SOLVER, {"x": lazy}, 0.0, budget=BUDGET, key=getkey())
