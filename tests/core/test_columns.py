"""Entries of columns of data frames and Arrow tables do not depend on one another."""

import numpy as np
import pyarrow as pa
import pytest

from dpbilevel.core.columns import Column, kind_of, numbers
from dpbilevel.sklearn import DPLogisticRegression, DPSourceReweighting
from dpbilevel.sklearn.declared import declared, index_of

# No float64 tells these apart.
FIRST, SECOND = 2**60, 2**60 + 1
BOTH = [FIRST, SECOND] * 4
MISSING = [*BOTH[:3], None, *BOTH[4:]]


class NullableType:
    """As those of pandas: not NumPy's, with a value that stands for a missing one."""

    na_value = None

    def __init__(self, name, categories=None):
        self.name, self.categories = name, categories

    def __str__(self):
        return self.name


class Nullable:
    """A column of pandas: `asarray` makes floats where an entry is missing."""

    def __init__(self, values, name="Int64", categories=None):
        self.values, self.dtype = values, NullableType(name, categories)

    def __len__(self):
        return len(self.values)

    def __iter__(self):
        return iter(self.values)

    def __array__(self, dtype=None, copy=None):
        missing = None in self.values
        values = [np.nan if v is None else v for v in self.values]
        return np.asarray(values, float if missing else dtype)


class Listed:
    """A column of polars."""

    def __init__(self, values):
        self.values, self.dtype = values, "Int64"

    def __len__(self):
        return len(self.values)

    def __array__(self, dtype=None, copy=None):
        return Nullable(self.values).__array__(dtype)

    def to_list(self):
        return self.values


class OneColumn:
    """A data frame of pandas with one column."""

    def __init__(self, values):
        self.shape, self.iloc = (len(values), 1), self
        self.values = values

    def __getitem__(self, place):
        assert place == (slice(None), 0)
        return Nullable(self.values)


def chunked(values):
    return pa.chunked_array([pa.array(v, pa.int64()) for v in (values[:5], values[5:])])


def dictionary(values):
    return pa.array(values, pa.int64()).dictionary_encode()


def table_of(values):
    return pa.table({"label": pa.array(values, pa.int64())})


def arrow(values):
    return pa.array(values, pa.int64())


def categories(values):
    of = np.asarray([FIRST, SECOND])
    return Nullable(values, "category", type("Index", (), {"dtype": of.dtype})())


MAKE = [arrow, chunked, dictionary, table_of, Nullable, categories, Listed, OneColumn]
MAKE.append(list)


@pytest.mark.parametrize("make", MAKE)
def test_a_missing_entry_changes_no_other(make):
    values = declared("owner", "classes", [FIRST, SECOND], "")
    found = [
        index_of("owner", "classes", values, Column.of(make(v)))
        for v in (BOTH, MISSING)
    ]
    expected = np.asarray([0, 1] * 4)
    np.testing.assert_array_equal(found[0], expected)
    expected[3] = -1
    np.testing.assert_array_equal(found[1], expected)


@pytest.mark.parametrize("make", [arrow, chunked, Nullable, Listed])
def test_numpy_would_change_others(make):  # the control of the test above
    found = np.asarray(make(MISSING))
    assert found.dtype == float
    assert len(np.unique(found[np.isfinite(found)])) == 1


@pytest.mark.parametrize("other", ["a text", None, 1.5, True, 10**400])
def test_entries_of_a_list_stay_what_they_are(other):
    column = Column.of([FIRST, other])
    assert column.kind == "objects"
    assert type(column.entries[0]) is int
    assert column.entries[0] == FIRST


class Raises:
    def __float__(self):
        raise KeyError


@pytest.mark.parametrize("entry", ["a text", None, 10**400, [1, 2], 1j, Raises()])
def test_an_entry_that_is_no_number_raises_nothing(entry):
    np.testing.assert_array_equal(Column.of([1, entry]).numbers(), [1, np.nan])


def test_a_long_text_does_not_lengthen_others():
    texts = ["a", "b", 1_000_000 * "c"] * 50
    column = Column.of(pa.array(texts))
    assert column.kind == "texts"
    assert column.entries.nbytes < 10_000


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize(
    ("make", "values", "kind"),
    [
        (pa.array, [True, False], "numbers"),
        (pa.array, ["no", "yes"], "texts"),
        (lambda v: pa.array(v).dictionary_encode(), ["no", "yes"], "texts"),
        (lambda v: Nullable(v, "boolean"), [True, False], "numbers"),
        (lambda v: Nullable(v, "string"), ["no", "yes"], "texts"),
    ],
)
def test_the_kind_of_a_column_is_that_of_its_type(make, values, kind, missing):
    assert Column.of(make([*values, *[None] * missing])).kind == kind


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Int64", "numbers"),
        ("UInt8", "numbers"),
        ("double[pyarrow]", "numbers"),
        ("Decimal(precision=10, scale=2)", "numbers"),
        ("Sparse[int64, 0]", "numbers"),
        ("large_string", "texts"),
        ("Enum(categories=['a'])", "texts"),
        ("Categorical", "texts"),
        ("Object", "objects"),
        (np.dtype("<U3"), "texts"),
        (np.dtype(bool), "numbers"),
        (np.dtype(object), "objects"),
    ],
)
def test_types_are_known_by_name(name, kind):
    assert kind_of(name) == kind


@pytest.mark.parametrize(
    "name",
    [
        *"datetime64[us] Date timestamp[s] period[D] duration[ns] List(Int64)".split(),
        "interval[int64, right]",
        "struct<a: int64>",
        np.dtype("m8[s]"),
    ],
)
def test_types_of_no_numbers_or_texts_are_refused(name):
    with pytest.raises(ValueError, match="has no numbers or texts"):
        kind_of(name)


def test_columns_of_dates_are_refused_whatever_they_hold():
    X = pa.table({"day": pa.array([1, None], pa.timestamp("s")), "dose": [1.0, 2.0]})
    with pytest.raises(ValueError, match=r"timestamp\[s\] has no numbers"):
        numbers(X)


@pytest.mark.parametrize("small", [pa.int8(), pa.int16()])
def test_a_missing_number_rounds_no_other_anew(small):
    def table(first):
        return pa.table(
            {
                "a": pa.array([0.1, 0.2, 0.3], pa.float32()),
                "b": pa.array([first, 2, 3], small),
            }
        )

    some, every = (numbers(table(first)) for first in (None, 1))
    assert some.dtype == every.dtype == np.float64
    np.testing.assert_array_equal(some[1:], every[1:])


def test_large_numbers_become_infinite_without_a_warning(recwarn):
    wide = np.asarray([[1.0], [10.0]], np.longdouble) ** 400
    assert np.isinf(numbers(wide)[1, 0]) or np.finfo(np.longdouble).maxexp == 1024
    assert not recwarn.list


@pytest.mark.slow
@pytest.mark.parametrize("make", [arrow, Nullable, Listed])
def test_one_missing_label_leaves_the_model(make):
    X = np.random.default_rng(0).uniform(-1, 1, (600, 2))
    y = [SECOND if x > 0 else FIRST for x in X[:, 0]]
    model = DPLogisticRegression(
        50.0, 1e-3, classes=[FIRST, SECOND], bounds=(-1, 1), max_iter=20
    )
    scores = [model.fit(X, make(v)).score(X, y) for v in (y, [None, *y[1:]])]
    assert min(scores) > 0.9


def test_clean_records_among_the_training_records_are_not_disjoint():
    X = np.random.default_rng(0).uniform(-1, 1, (40, 3))
    y, sources = ["a", "b"] * 20, ["u", "v"] * 20
    model = DPSourceReweighting(classes=["a", "b"], sources=["u", "v"], bounds=(-1, 1))
    with pytest.raises(ValueError, match=r"clean and X are the same array or parts"):
        model.fit(X, y, sources, (X[:10], y[:10]), people="disjoint")
