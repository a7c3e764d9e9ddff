"""Hostile records: refused by type and shape; by value in silence, no influence."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpbilevel as dpb
from dpbilevel.cli.plans import prepare
from dpbilevel.cli.run import run
from tests.cases import slow
from tests.cli.test_runner import CSV_DATA, config_of, rows_of, write_csv

N, SECRET = 20, 76543.25
Y0 = jnp.zeros(3)
ONE_LEVEL = dpb.FiniteSum(dpb.logistic_loss)
WEIGHTING = dpb.source_weighting(dpb.logistic_loss, 2, ridge=0.1)
TUNING = dpb.penalty_tuning(dpb.logistic_loss, jnp.zeros(3, jnp.int32))
GD = dpb.NoisyGD(2, 1.0, step_size=0.5)
PENALTY = dpb.PenaltyBilevel(2, penalty=5.0, inner=GD, step_size=1.0)
BUDGET = dpb.PrivacyBudget(1.0, 1e-3)


def records(first=None):
    rng = np.random.default_rng(0)
    features = rng.normal(size=(N, 3)).astype(np.float32)
    label = np.ones(N, np.float32)
    source = np.arange(N, dtype=np.int32) % 2
    if first is not None:
        features = features.astype(first.dtype)
        features[0] = first
    return {"features": features, "label": label, "source": source}


def gradient(record):
    return jax.grad(dpb.logistic_loss)(Y0, record)


def mean_of(data):
    return dpb.privacy.clipped_mean(
        gradient, data, clip_norm=1.0, precision="float"
    ).raw


compiled_mean = jax.jit(mean_of)


def by_mean(data):
    """As one program, which compiles sooner than its operations."""
    kinds = {getattr(leaf, "dtype", None) for leaf in jax.tree.leaves(data)}
    if kinds <= {np.dtype("f4"), np.dtype("i4")}:
        return compiled_mean(data)
    # As constants, which no argument of a program converts before `clipped_mean` does.
    return jax.jit(lambda: mean_of(data))()


def by_solve(data):
    solver = GD.with_noise(1.0).with_sizes(N)
    return dpb.solve(ONE_LEVEL, solver, data, Y0, key=jax.random.key(0)).value


def by_fit(problem, solver, w0, data):
    levels = problem is not ONE_LEVEL
    data = dpb.Levels(data, data) if levels else data
    key = jax.random.key(0)
    return dpb.fit(problem, solver, data, w0, budget=BUDGET, key=key).value


ENTRIES = {
    "clipped_mean": by_mean,
    "solve": by_solve,
    "fit": functools.partial(by_fit, ONE_LEVEL, GD, Y0),
    "source_weighting": functools.partial(
        by_fit, WEIGHTING, PENALTY, (jnp.zeros(2), Y0)
    ),
    "penalty_tuning": functools.partial(by_fit, TUNING, PENALTY, (jnp.zeros(1), Y0)),
}
entries = pytest.mark.parametrize(
    "entry",
    ["clipped_mean", "solve", *slow("fit", "source_weighting", "penalty_tuning")],
)


@functools.cache
def without_first(entry):
    """The answer where the first record's gradients are zero."""
    return ENTRIES[entry](records(np.zeros(3, np.float32)))


HOSTILE = {
    "nan": np.full(3, np.nan, np.float32),
    "one nan": np.asarray([0.0, np.nan, 0.0], np.float32),
    "inf": np.full(3, np.inf, np.float32),
    "-inf": np.full(3, -np.inf, np.float32),
    "both": np.asarray([np.inf, -np.inf, 0.0], np.float32),
    "1e300": np.full(3, 1e300, np.float64),
}


# Each through the short ways in; through fit those that its own steps might notice.
CASES = [("clipped_mean", name) for name in HOSTILE]
CASES += [("solve", "nan"), *slow(*(("solve", v) for v in HOSTILE if v != "nan"))]
CASES += slow(("source_weighting", "one nan"), ("fit", "1e300"))
CASES += slow(("penalty_tuning", "1e300"))


@pytest.mark.parametrize(("entry", "name"), CASES)
def test_record_that_is_not_finite_has_no_influence(entry, name):
    expected, found = without_first(entry), ENTRIES[entry](records(HOSTILE[name]))
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_array_equal(a, b)


@entries
def test_readable_record_has_influence(entry):  # the control of the test above
    first = np.full(3, 5.0, np.float32)
    leaves = map(
        jax.tree.leaves, (without_first(entry), ENTRIES[entry](records(first)))
    )
    assert any(np.any(a != b) for a, b in zip(*leaves, strict=True))


@pytest.mark.parametrize("value", [1e-42, 1e-45, -1e-38, 0.0])
def test_denormal_record_is_a_record_like_another(value):
    mean = by_mean(records(np.full(3, value, np.float32)))
    np.testing.assert_allclose(mean, without_first("clipped_mean"), atol=1e-7)


def test_source_that_does_not_exist_has_no_influence():
    def by_x_and_y(record):
        return jax.grad(WEIGHTING.lower, (0, 1))(jnp.zeros(2), Y0, record)

    @jax.jit
    def mean(data):
        return dpb.privacy.clipped_mean(
            by_x_and_y, data, clip_norm=1.0, denominator=N, precision="float"
        ).raw

    data = records(np.full(3, 5.0, np.float32))
    without = mean(jax.tree.map(lambda v: v[1:], data))
    data["source"][0] = 2
    expected = mean(data)
    for x, y in zip(expected, without, strict=True):
        # A record's own gradient may be rounded differently by another program.
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-7)
    for source in (-1, 2**31 - 1, -(2**31)):
        data["source"][0] = source
        jax.tree.map(np.testing.assert_array_equal, mean(data), expected)
    data["source"][0] = 1  # the control
    assert np.any(mean(data)[1] != expected[1])


def secrets(dtype):
    return np.full((N, 3), SECRET).astype(dtype)


MALFORMED = {
    "object": secrets(object),
    "strings": secrets(str),
    "bytes": secrets(bytes),
    "dates": secrets(int).astype("M8[s]"),
    "list": secrets(float).tolist(),
    "ragged list": [[SECRET] * 3] * (N - 1) + [[SECRET]],
    "number": SECRET,
    "text": str(SECRET),
    "one number": np.asarray(SECRET),
    "another length": secrets(np.float32)[1:],
    "complex": secrets(np.complex64),
    "another shape": secrets(np.float32)[:, :2],
    "missing": None,
}


@pytest.mark.parametrize("name", MALFORMED)
@entries
def test_malformed_records_are_refused_without_a_value_of_them(entry, name):
    data = records() | {"features": MALFORMED[name]}
    with pytest.raises((ValueError, TypeError)) as caught:
        ENTRIES[entry](data)
    assert "76543" not in "".join([str(caught.value), *_notes(caught.value)])


def _notes(error):
    return getattr(error, "__notes__", ())


@pytest.mark.parametrize("name", ["object", "strings", "list", "text"])
@entries
def test_wrong_types_are_named_by_leaf_and_kind(entry, name):
    data = records() | {"features": MALFORMED[name]}
    with pytest.raises(ValueError, match=r"\['features'\].* must be a numeric array"):
        ENTRIES[entry](data)


def test_error_about_text_does_not_tell_how_long_it_is():
    messages = set()
    for text in ("a", "a" * 99):
        with pytest.raises(ValueError, match="numeric array") as caught:
            by_mean({"name": np.asarray([text] * N)})
        messages.add(str(caught.value))
    assert len(messages) == 1


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64, bool, np.float16])
def test_other_numbers_are_records_too(dtype):
    data = {"features": np.ones((N, 3), dtype)}

    def value(record):
        return record["features"].astype(jnp.float32)

    @jax.jit  # of constants, which no argument of a program converts before
    def mean():
        options = {"clip_norm": 10.0, "precision": "float"}
        return dpb.privacy.clipped_mean(value, data, **options).raw

    np.testing.assert_allclose(mean(), 1.0, rtol=1e-5)


@entries
def test_no_records_are_refused_where_their_number_is_public(entry):
    empty = jax.tree.map(lambda v: v[:0], records())
    if entry == "clipped_mean":
        np.testing.assert_array_equal(by_mean(empty), np.zeros(3))
        return
    with pytest.raises(ValueError, match=r"at least 1, got 0|calibrate with sizes=0"):
        ENTRIES[entry](empty)


def test_conversion_to_float32_says_nothing_about_a_value(recwarn):
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        by_mean(records(HOSTILE["1e300"]))
        assert not recwarn.list
        # The control: plain JAX warns.
        jnp.asarray(np.asarray([1e300]))
    assert len(recwarn.list) == 1


CELLS = [
    *("nan", "-inf", "1e999", "1e38", "1e-320", "0x10", "1_0", "१२", "--", "=1+1"),
    *("9" * 5000, "\x00", "'", "﻿1", "1;2", "None", "SECRETCELL"),
]


def test_cells_neither_raise_nor_show_whatever_they_hold(tmp_path, capfd):
    rows = rows_of(60)
    relation = {"neighbours": "add_or_remove_one"}
    prepared = prepare(config_of(tmp_path, data=CSV_DATA, **relation))
    for cell in CELLS:  # each in every column of some row
        for column in range(4):
            rows[(7 * CELLS.index(cell) + column) % 60][column] = cell
    write_csv(tmp_path, rows)
    result = run(prepared, tmp_path / "out")
    assert np.isfinite(result.x).all()
    assert np.isfinite(result.y).all()
    assert capfd.readouterr() == ("", "")
    pages = b"".join(p.read_bytes() for p in (tmp_path / "out").iterdir())
    assert b"SECRETCELL" not in pages


@pytest.mark.slow
def test_private_number_of_rows_may_be_none(tmp_path):
    write_csv(tmp_path, [])
    relation = {"neighbours": "add_or_remove_one"}
    prepared = prepare(config_of(tmp_path, data=CSV_DATA, **relation))
    assert np.isfinite(run(prepared, tmp_path / "out").x).all()


@pytest.mark.parametrize("rows", [rows_of(60), [["a", "a", "a", "a"]] * 60])
def test_file_without_a_header_does_not_show_its_first_record(tmp_path, rows):
    rows = [["SECRETCELL", *row[1:]] for row in rows]
    text = "\n".join(",".join(row) for row in rows)
    (tmp_path / "people.csv").write_text(text)
    prepared = prepare(config_of(tmp_path, data=CSV_DATA))
    with pytest.raises(ValueError, match=r"header row|header, the") as caught:
        run(prepared, tmp_path / "out")
    assert "SECRETCELL" not in str(caught.value)
    assert rows[0][1] not in str(caught.value).split("'")
