"""One entry of a record changes how no other record is read, whatever holds them."""

import collections
import datetime
import decimal
import fractions

import jax
import numpy as np
import pytest
from sklearn.linear_model import Ridge

from dpbilevel.core.columns import Column, numbers
from dpbilevel.search.defaults import default_losses
from dpbilevel.search.row_losses import RowLosses
from dpbilevel.search.run import check_losses
from dpbilevel.sklearn import DPLogisticRegression, DPRidge
from dpbilevel.sklearn.declared import index_of

N = 6


class Raises:
    """An object that stands for nothing, and says so in every way."""

    def _raise(self, *_):
        raise RuntimeError("a secret")

    __float__ = __len__ = __iter__ = __array__ = __eq__ = __hash__ = _raise
    shape = property(_raise)


ENTRIES = {
    "list": [1, 0],
    "empty": [],
    "nested": [[1]],
    "tuple": (1.0, 0.0, 3.0),
    "array": np.ones(2),
    "table": np.ones((2, 2)),
    "none": None,
    "nan": float("nan"),
    "text": "a text",
    "long": "9" * 400,
    "huge": 10**400,
    "complex": 1 + 2j,
    "bytes": b"\xff",
    "raises": Raises(),
    "masked": np.ma.masked,
    "decimal": decimal.Decimal("sNaN"),
    "fraction": fractions.Fraction(1, 3),
    "bool": True,
    "date": datetime.date(2020, 1, 1),
    "dict": {1: 2},
    "set": {1},
    "type": int,
}
PLACES = (0, 3, N - 1)


def objects(values):
    found = np.empty(len(values), object)
    for place, value in enumerate(values):
        found[place] = value
    return found


class Sized:
    """A sequence of the least that Python asks for."""

    def __init__(self, values):
        self._values = values

    def __len__(self):
        return len(self._values)

    def __getitem__(self, place):
        return self._values[place]


class Wrapped(Sized):
    """An array-like of objects."""

    def __array__(self, dtype=None, copy=None):
        return objects(self._values)


SEQUENCES = [list, tuple, collections.deque, collections.UserList, Sized]
CONTAINERS = {make.__name__: make for make in (*SEQUENCES, objects, Wrapped)}
REFUSED = {
    "set": set,
    "dict": dict.fromkeys,
    "view": lambda values: dict.fromkeys(values).keys(),
    "generator": iter,
    "class": lambda _: list,
}


def labels(values):
    return index_of("owner", "classes", np.asarray([0, 1]), Column.of(values))


def told(values):
    return check_losses("owner", values, N)


def judged(values):
    """Losses that a function of Python returns."""
    rows = np.arange(float(N))[:, None]
    losses = RowLosses(lambda _: Ridge(), rows, rows[:, 0], lambda *_: values)
    return losses._losses_of(None, rows, rows[:, 0])


def squared(values):
    """Default losses of a regressor of one target."""
    found, _ = default_losses(Ridge(), np.arange(N))
    model = Ridge().fit(np.arange(float(N))[:, None], np.arange(N))
    return found(model, np.arange(float(N))[:, None], values)


def column_of(estimator):
    def read(values):
        return estimator._column(values, np.zeros((N, 1))).numbers()

    return read


READ = {
    "column": lambda values: Column.of(values).numbers(),
    "labels": labels,
    "target": column_of(DPRidge()),
    "told": told,
    "judged": judged,
    "squared": squared,
}


@pytest.mark.parametrize(
    ("container", "wrapped"),
    # Wrapped: each in a list of its own, as of a table of one column.
    [("list", True), ("tuple", True), *((name, False) for name in CONTAINERS)],
)
@pytest.mark.parametrize("reader", READ)
def test_an_entry_changes_no_other(reader, container, wrapped, recwarn):
    make, read = CONTAINERS[container], READ[reader]
    values = [1.0, 0, 1, 1.0, 0.0, 1]
    if wrapped:
        values = [[value] for value in values]
    sound = read(make(values))
    for name, entry in ENTRIES.items():
        for place in PLACES:
            changed = list(values)
            changed[place] = entry
            found = read(make(changed))
            others = np.arange(N) != place
            np.testing.assert_array_equal(found[others], sound[others], name)
    assert np.isfinite(sound).all()
    assert not recwarn.list


@pytest.mark.parametrize("container", SEQUENCES)
@pytest.mark.parametrize("inner", [list, tuple, np.asarray])
def test_a_row_or_a_cell_of_a_table_changes_no_other_row(container, inner, recwarn):
    table = np.arange(2.0 * N).reshape(N, 2)
    rows = [inner(row) for row in table]
    np.testing.assert_array_equal(numbers(container(rows)), table)
    for name, entry in ENTRIES.items():
        for place in PLACES:
            others = np.arange(N) != place
            whole = list(rows)
            whole[place] = entry
            cell = [list(row) for row in rows]
            cell[place][1] = entry
            for changed in (whole, cell):
                found = numbers(container(changed))
                assert found.shape == table.shape
                np.testing.assert_array_equal(found[others], table[others], name)
    assert not recwarn.list


@pytest.mark.parametrize("container", REFUSED)
def test_what_has_no_order_is_refused_by_its_type(container):
    make = REFUSED[container]
    for values in (range(N), ["a secret"] * N, [(1.0,) * place for place in range(N)]):
        for read in (READ["column"], READ["target"], numbers):
            with pytest.raises(
                ValueError, match=r"give a list or an array|2D array, got"
            ) as error:
                read(make(values))
            assert "secret" not in str(error.value)
        with pytest.raises(TypeError, match="must be 6 real numbers"):
            told(make(values))


@pytest.mark.parametrize("container", SEQUENCES)
def test_one_short_record_leaves_the_width_of_a_fit(container):
    rows = [[1.0], *([0.5, 0.2],) * (N - 1)]
    model = DPRidge(bounds=(-1, 1), target_bounds=(-1, 1))
    assert np.isnan(model._read(container(rows), 1)[0]).all()
    assert model.n_features_in_ == 2


@pytest.mark.parametrize("place", PLACES)
def test_a_masked_entry_is_no_number(place):
    values = np.ma.array(np.arange(1.0, N + 1), mask=np.arange(N) == place)
    expected = np.where(np.arange(N) == place, np.nan, np.arange(1.0, N + 1))
    np.testing.assert_array_equal(Column.of(values).numbers(), expected)
    np.testing.assert_array_equal(numbers(values[:, None])[:, 0], expected)


def test_the_number_of_columns_is_that_of_most_rows():
    model = DPLogisticRegression(classes=[0, 1], bounds=(-1, 1))
    for ragged in ([[0.5]], [[1, 2, 3]], ["text"], [None]):
        found = model._read(ragged + [[0.1, 0.2]] * 3, 1)
        assert found.shape == (4, 2)
        assert model.n_features_in_ == 2
        assert np.isnan(found[0]).all()
    with pytest.raises(ValueError, match="Expected 2D array, got 1D array"):
        model._read([1.0, 2.0, [3.0, 4.0]], 1)


@pytest.mark.slow
def test_one_ragged_label_leaves_the_model():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(300, 2))
    y = [[int(v)] for v in X[:, 0] > 0]
    options = {"classes": [0, 1], "bounds": (-3, 3), "max_iter": 5}
    found = [
        DPLogisticRegression(5.0, 1e-3, **options)
        .fit(X, labels, key=jax.random.key(1))
        .coef_[0]
        for labels in (y, [*y[:3], [1, 0], *y[4:]])
    ]
    np.testing.assert_allclose(found[0], found[1], atol=0.2)
    assert found[0][0] > 0.5
