import copy
import os
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpbilevel import Levels
from dpbilevel.core.levels import check_disjoint
from dpbilevel.privacy.records import stores
from dpbilevel.privacy.records.disk import OnDisk, copies
from dpbilevel.privacy.records.rows import reader


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setattr(stores, "_BATCH", 130)


def write(path, columns, groups=171, **options):
    arrow = pytest.importorskip("pyarrow")
    tables = pytest.importorskip("pyarrow.parquet")
    tables.write_table(arrow.table(columns), path, row_group_size=groups, **options)
    return path


def test_changes_of_a_mapping_that_are_not_written_count(tmp_path):
    np.save(tmp_path / "records.npy", np.zeros(5))
    changed = np.load(tmp_path / "records.npy", mmap_mode="c")
    changed[:] = 3.0
    rows = np.empty(5)
    OnDisk.arrays(changed).store.reader(0)([rows])
    np.testing.assert_array_equal(rows, 3.0)


@pytest.mark.parametrize("groups", [1, 7, 130, 5000])
def test_row_groups_of_any_size_are_read_from_any_record_on(tmp_path, groups):
    columns = {"a": np.arange(400.0), "b": np.arange(400) % 3 == 0}
    paths = [
        write(tmp_path / f"{i}.parquet", columns | {"c": np.full(400, i)}, groups)
        for i in range(2)
    ]
    disk = OnDisk.parquet(paths, {"both": ["b", "a"], "one": "b"})
    for start in (0, 1, 399, 400, 555):
        rows = [np.empty((240, 2)), np.empty(240, bool)]
        disk.store.reader(start)(rows)
        numbers = np.arange(start, start + 240) % 400
        np.testing.assert_array_equal(rows[0][:, 1], numbers)
        for found_there in (rows[0][:, 0], rows[1]):
            np.testing.assert_array_equal(found_there, numbers % 3 == 0)


def test_columns_of_several_types_make_a_vector_of_their_common_type(tmp_path):
    kinds = np.int16, np.float32, np.bool_, np.float64, np.uint8
    columns = {k.__name__: np.arange(5).astype(k) for k in kinds}
    path = write(tmp_path / "mixed.parquet", columns)
    disk = OnDisk.parquet(path, {"v": list(columns), "w": ["int16", "uint8"]})
    assert disk.store.kinds == [((5,), np.dtype("float64")), ((2,), np.dtype("int16"))]
    shapes = {"v": ((5, 5), jnp.float32), "w": ((5, 2), jnp.int16)}
    assert {k: (v.shape, v.dtype) for k, v in disk.shapes.items()} == shapes
    chunk, _ = reader(disk, None, 5, 5)(jnp.asarray(0))
    np.testing.assert_array_equal(chunk["v"], np.stack([*columns.values()], axis=1))


def test_parquet_nulls_are_refused_before_anything_is_released(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    columns = {
        "number": arrow.array([1.0, None, 3.0, 4.0, 5.0]),
        "whole": arrow.array([1, 2, 3, 4, None]),
        "good": arrow.array([True, False, True, False, True]),
    }
    for options in ({}, {"write_statistics": False}):
        path = write(tmp_path / "nulls.parquet", columns, groups=2, **options)
        for bad in ("number", "whole"):
            with pytest.raises(ValueError, match=f"column '{bad}' of .* has nulls"):
                OnDisk.parquet(path, {"v": ["good", bad]})
        assert OnDisk.parquet(path, {"v": "good"}).rows == 5


def test_bad_parquet_files_are_refused(tmp_path):
    numbers = np.arange(4.0)
    good = write(tmp_path / "good.parquet", {"a": numbers, "b": numbers})
    other = write(tmp_path / "other.parquet", {"a": numbers.astype(int), "b": numbers})
    text = write(tmp_path / "text.parquet", {"a": ["red", "blue"], "b": [[1.0], [2.0]]})
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"PAR1 and nothing more")
    with pytest.raises(OSError, match=r"cannot read .*none\.parquet: No such file"):
        OnDisk.parquet(tmp_path / "none.parquet", {"v": "a"})
    with pytest.raises(OSError, match=r"broken\.parquet is damaged or no Parquet"):
        OnDisk.parquet(broken, {"v": "a"})
    with pytest.raises(ValueError, match="has no column 'c'; it has"):
        OnDisk.parquet(good, {"v": ["a", "c"]})
    for name, kind in {"a": "string", "b": "list"}.items():
        match = rf"column '{name}' .* is {kind}"
        with pytest.raises(ValueError, match=match):
            OnDisk.parquet(text, {"v": name})
    with pytest.raises(ValueError, match=r"other\.parquet has other types"):
        OnDisk.parquet([good, other], {"v": "a"})
    with pytest.raises(ValueError, match="at least one file"):
        OnDisk.parquet([], {"v": "a"})


def test_a_missing_pyarrow_is_named(monkeypatch):
    for module in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=r"'\.\[parquet\]'.*pip install pyarrow"):
        OnDisk.parquet("records.parquet", {"v": "a"})


def test_a_file_under_two_names_is_one_file(tmp_path):
    numbers = {"a": np.arange(4.0)}
    path, other = (write(tmp_path / f"{k}.parquet", numbers) for k in ("one", "two"))
    linked, pointing = tmp_path / "linked.parquet", tmp_path / "pointing.parquet"
    linked.hardlink_to(path)
    pointing.symlink_to(path)
    for second in (path, linked, pointing):
        with pytest.raises(ValueError, match="a file is given twice"):
            OnDisk.parquet([path, second], {"x": "a"})
        levels = [OnDisk.parquet(v, {"x": "a"}) for v in (path, second)]
        with pytest.raises(ValueError, match="both levels read one file"):
            check_disjoint(Levels(*levels))
    levels = [OnDisk.parquet(v, {"x": "a"}) for v in (path, other)]
    with pytest.raises(ValueError, match="have the same bytes"):
        OnDisk.parquet([path, other], {"x": "a"})
    with pytest.raises(ValueError, match=r"both levels read the same bytes \("):
        check_disjoint(Levels(*levels))


def test_files_of_one_size_that_differ_somewhere_are_no_copies(tmp_path):
    files = [tmp_path / name for name in "abcdef"]
    for number, file in enumerate(files):
        content = bytearray(300_000)
        content[[0, 150_000, 299_999, 0, 0, 150_001][number]] = 1
        file.write_bytes(content[: -1 if number == 4 else None])
    assert list(map(sorted, copies(files))) == [[files[0], files[3]]]
    pipes = [tmp_path / "left", tmp_path / "right"]
    for pipe in pipes:
        os.mkfifo(pipe)  # which a reader would wait for
    assert copies([]) == copies(files[:3]) == copies(pipes) == []


def test_empty_parquet_files_are_equal_and_no_copies(tmp_path):
    numbers = np.arange(4.0)
    paths = [
        write(tmp_path / f"{i}.parquet", {"a": v})
        for i, v in enumerate([numbers, numbers[:0], numbers[:0]])
    ]
    assert OnDisk.parquet(paths, {"x": "a"}).rows == 4
    check_disjoint(Levels(*(OnDisk.parquet(v, {"x": "a"}) for v in paths[1:])))


@pytest.mark.parametrize("kind", ["npy", "parquet"])
def test_a_file_that_is_rewritten_with_its_times_restored_has_changed(kind, tmp_path):
    path, numbers = tmp_path / f"records.{kind}", np.arange(4.0)
    if kind == "npy":
        np.save(path, numbers)
        disk = OnDisk.arrays(np.load(path, mmap_mode="r"))
    else:
        disk = OnDisk.parquet(write(path, {"a": numbers}), {"x": "a"})
    disk.store.check()
    before, content = path.stat(), bytearray(path.read_bytes())
    content[-1] ^= 1
    time.sleep(0.02)  # file systems tell time in ticks
    with path.open("r+b") as file:
        file.write(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    same = "st_ino", "st_size", "st_mtime_ns"
    assert [getattr(before, k) for k in same] == [getattr(after, k) for k in same]
    with pytest.raises(OSError, match="has changed"):
        disk.store.check()


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (["a"], "columns must be like"),
        ({"x": {"a": "a"}}, r"columns\['x'\] must be a name or a list"),
        ({"x": []}, r"columns\['x'\] must be"),
        ({"x": ["a", 3]}, r"columns\['x'\] must be"),
    ],
)
def test_columns_that_are_not_names_are_refused(tmp_path, columns, words):
    path = write(tmp_path / "good.parquet", {"a": np.arange(4.0)})
    with pytest.raises(TypeError, match=words):
        OnDisk.parquet(path, columns)


def test_what_cannot_be_called_shows_no_progress():
    with pytest.raises(TypeError, match="progress must be a function, got True"):
        OnDisk.arrays(np.zeros(3), progress=True)


@pytest.mark.parametrize("records", ["records.npy", [[1.0]], jnp.zeros(3)])
def test_what_is_no_numpy_array_is_refused_with_the_remedy(records):
    with pytest.raises(TypeError, match=r"must be a NumPy array, .*numpy\.load"):
        OnDisk.arrays(records)


def test_records_are_shown_by_shapes_and_files(tmp_path):
    path = write(tmp_path / "good.parquet", {"a": np.arange(4.0)})
    shown = repr(OnDisk.parquet(path, {"x": "a"}))
    assert "'x': ShapeDtypeStruct(shape=(4,)" in shown
    assert shown.endswith(f"in {path})")


@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        ((), {}),
        (("records.parquet",), {}),
        ((np.zeros(3), 3, "records.npy", None, print, 6), {}),
        ((), {"paths": "records.parquet"}),
        ((), {"records": np.zeros(3)}),
    ],
)
def test_the_constructor_names_what_to_call_instead(arguments, fields):
    with pytest.raises(TypeError, match=r"OnDisk\.parquet or OnDisk\.arrays"):
        OnDisk(*arguments, **fields)


def test_records_on_disk_can_be_copied_and_mapped():
    disk = OnDisk.arrays(np.arange(4.0))
    for other in (copy.copy(disk), jax.tree.map(lambda v: v, disk), disk.padded(4)):
        assert (other.rows, other.store, other.progress) == (4, disk.store, None)
    assert disk.padded(9).rows == 9
