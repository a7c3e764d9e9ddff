"""Records of files: what becomes of cells and rows, and to which level they go."""

import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpbilevel as dpb
from dpbilevel.cli.loading import as_levels
from dpbilevel.cli.plans import prepare
from dpbilevel.cli.run import run
from tests.cli.test_runner import (
    CSV_DATA,
    config_of,
    levels_of,
    loaded,
    rows_of,
    write_csv,
)


@pytest.mark.parametrize("cell", ["nan", "1e999", "a lot", "-5", "9" * 400, "\x00"])
def test_nan_cell_changes_nothing_but_its_record(tmp_path, cell):
    rows = rows_of(60)
    before = levels_of(tmp_path, rows)
    rows[7][0] = cell
    after = levels_of(tmp_path, rows)
    same = [
        np.array_equal(a, b)
        for name in ("upper", "lower")
        for a, b in zip(
            getattr(before, name)["features"],
            getattr(after, name)["features"],
            strict=True,
        )
    ]
    assert same.count(False) == 1


SOURCES = dpb.source_weighting(dpb.logistic_loss, 2)


@jax.jit  # one program compiles sooner than all of its operations
def gradient_at_zero(records):
    def gradient(record):
        return jax.grad(SOURCES.lower, 1)(jnp.zeros(2), jnp.zeros(4), record)

    return dpb.privacy.clipped_mean(
        gradient, records, clip_norm=1.0, denominator=40, precision="float"
    ).raw


@pytest.mark.parametrize(
    ("column", "cell"), [(0, "nan"), (0, "??"), (2, "C"), (3, "maybe"), (3, "")]
)
def test_unreadable_record_has_no_influence(tmp_path, column, cell):
    rows = rows_of(60)
    for row in rows[:30]:
        row[column] = cell
    levels = levels_of(tmp_path, rows, people="disjoint")
    keep = np.isfinite(levels.lower["features"].sum(1) + levels.lower["label"])
    assert 0 < keep.sum() < 40
    mean = gradient_at_zero(levels.lower)
    # Records that are left out have a gradient of zero, as rows of zeros do.
    kept = jax.tree.map(np.array, levels.lower)
    for leaf in kept.values():
        leaf[~keep] = 0
    np.testing.assert_allclose(mean, gradient_at_zero(kept), atol=1e-6)


def test_missing_cell_and_unknown_category_are_zeros(tmp_path):
    rows = rows_of(60)
    for row in rows:
        row[0], row[1] = "", "Bonn"
    levels = levels_of(tmp_path, rows)
    for part in (levels.upper, levels.lower):
        np.testing.assert_array_equal(part["features"][:, :3], 0.0)
        np.testing.assert_array_equal(part["features"][:, 3], 1.0)


def test_a_short_row_is_an_unusable_record(tmp_path):
    rows = rows_of(60)
    rows[3] = rows[3][:1]
    levels = levels_of(tmp_path, rows)
    parts = (levels.upper["label"], levels.lower["label"])
    assert np.isnan(np.concatenate(parts)).sum() == 1


def test_rows_have_unit_length(tmp_path):
    levels = levels_of(tmp_path, rows_of(60))
    norms = np.linalg.norm(levels.lower["features"], axis=1)
    np.testing.assert_allclose(norms, 1.0, rtol=1e-6)
    assert levels.lower["features"].dtype == np.float32


def test_levels_are_disjoint_and_as_large_as_planned(tmp_path):
    levels = levels_of(tmp_path, rows_of(80))
    rows = np.concatenate([levels.upper["features"], levels.lower["features"]])
    assert (len(levels.upper["label"]), len(levels.lower["label"])) == (20, 40)
    assert len(np.unique(rows[:, 0] / rows[:, 3])) == 60


def test_removed_record_moves_no_other_under_add_or_remove(tmp_path):
    rows = rows_of(60)
    relation = {"neighbours": "add_or_remove_one"}
    before = levels_of(tmp_path, rows, **relation)
    after = levels_of(tmp_path, rows[1:], **relation)
    lost = 0
    for name in ("upper", "lower"):
        kept = {row.tobytes() for row in getattr(after, name)["features"]}
        all_rows = {row.tobytes() for row in getattr(before, name)["features"]}
        assert kept <= all_rows
        lost += len(all_rows) - len(kept)
    assert lost == 1


@pytest.mark.parametrize("count", [pytest.param(50, marks=pytest.mark.slow), 70])
def test_private_number_of_records_neither_raises_nor_shows(tmp_path, count, capsys):
    write_csv(tmp_path, rows_of(count))
    prepared = prepare(
        config_of(tmp_path, data=CSV_DATA, neighbours="add_or_remove_one")
    )
    run(prepared, tmp_path / "out")
    page = (tmp_path / "out" / "result.json").read_text()
    assert f" {count}" not in page
    assert capsys.readouterr() == ("", "")


def test_shared_people_have_the_same_records_in_both_levels(tmp_path):
    write_csv(tmp_path, rows_of(40))
    data = CSV_DATA.replace("validation = 20", "validation = 40")
    config = config_of(tmp_path, data=data, people="shared")
    levels = as_levels(loaded(config))
    assert levels.is_shared
    assert len(levels.upper["label"]) == 40


def test_too_few_rows_are_counted(tmp_path):
    write_csv(tmp_path, rows_of(59))
    prepared = prepare(config_of(tmp_path, data=CSV_DATA))
    with pytest.raises(ValueError, match=r"59 records, but \[data\] asks for training"):
        run(prepared, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_missing_column_is_named_and_what_is_there_is_not(tmp_path):
    write_csv(tmp_path, rows_of(60), header="pay,city,clinic,rich")
    prepared = prepare(config_of(tmp_path, data=CSV_DATA))
    with pytest.raises(ValueError, match=r"no column 'town'\. Correct \[data\]"):
        run(prepared, tmp_path / "out")


def test_missing_file_says_how_to_name_another(tmp_path):
    prepared = prepare(config_of(tmp_path, data=CSV_DATA))
    with pytest.raises(ValueError, match=r"people\.csv.*--data PATH"):
        run(prepared, tmp_path / "out")


TWO_FILES = CSV_DATA.replace(
    'path = "people.csv"', 'path = "people.csv"\nvalidation_path = "clean.csv"'
)


def write_clean(folder, rows):
    """The file of validation records, without a column of sources."""
    without = [(pay, town, rich) for pay, town, _, rich in rows]
    text = "\n".join(["pay,town,rich", *map(",".join, without)])
    (folder / "clean.csv").write_text(text + "\n")


@pytest.mark.parametrize("neighbours", ["replace_one", "add_or_remove_one"])
def test_records_of_each_level_are_those_of_its_file(tmp_path, neighbours):
    rows = rows_of(60)
    write_csv(tmp_path, [[*row[:3], "yes"] for row in rows[:40]])
    write_clean(tmp_path, [[*row[:3], "no"] for row in rows[40:]])
    config = config_of(tmp_path, data=TWO_FILES, neighbours=neighbours)
    levels = as_levels(loaded(config))
    assert levels.lower["label"].tolist() == [1] * 40
    assert levels.upper["label"].tolist() == [-1] * 20
    assert "source" in levels.lower
    assert "source" not in levels.upper
    assert np.isfinite(levels.upper["features"]).all()


def check_refused(tmp_path, said):
    prepared = prepare(config_of(tmp_path, data=TWO_FILES))
    with pytest.raises(ValueError, match=said):
        run(prepared, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_second_file_that_is_the_first_is_refused_under_any_name(tmp_path):
    write_csv(tmp_path, rows_of(60))
    clean = tmp_path / "clean.csv"
    for same in (clean.hardlink_to, functools.partial(shutil.copyfile, dst=clean)):
        same(tmp_path / "people.csv")
        check_refused(tmp_path, 'set people = "shared"')
        clean.unlink()


def test_too_few_rows_of_a_second_file_are_counted(tmp_path):
    write_csv(tmp_path, rows_of(40))
    write_clean(tmp_path, rows_of(19))
    check_refused(tmp_path, "there are 19 records, but .* asks for validation = 20")


def test_a_missing_second_file_says_how_to_name_another(tmp_path):
    write_csv(tmp_path, rows_of(40))
    check_refused(tmp_path, "--validation PATH")


def test_a_second_file_is_refused_where_levels_share_their_records(tmp_path):
    write_csv(tmp_path, rows_of(40))
    write_clean(tmp_path, rows_of(40))
    data = TWO_FILES.replace("validation = 20", "validation = 40")
    prepared = prepare(config_of(tmp_path, data=data, people="shared"))
    with pytest.raises(ValueError, match="a validation file needs"):
        run(prepared, tmp_path / "out")
