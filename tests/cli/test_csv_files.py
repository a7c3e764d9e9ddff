"""Files of records: what is said of them before anything is planned or spent."""

import csv
import gzip
import os
import subprocess
import sys

import numpy as np
import pytest

from dpbilevel.cli import init, plans, results
from dpbilevel.cli.main import main
from dpbilevel.cli.tables import MALFORMED, read_csv
from tests.cli.test_cli import failure
from tests.cli.test_runner import rows_of, write_csv

TRAINING = """
task = "training"
[privacy]
epsilon = 1.0
delta = 1e-5
neighbours = "replace_one"
[data]
source = "csv"
path = "people.csv"
training = 60
[data.label]
column = "rich"
positive = ["yes"]
negative = ["no"]
[[data.numeric]]
name = "pay"
columns = ["pay"]
mean = [30]
scale = [30]
[[data.categorical]]
column = "town"
values = ["Ulm", "Rom"]
[model]
loss = "logistic"
"""
SETTINGS = """
[solver]
type = "NoisyGD"
num_steps = 3
clip_norm = 1.0
step_size = 4.0
"""


@pytest.fixture
def file(tmp_path):
    """A config of training with settings."""
    path = tmp_path / "a.toml"
    path.write_text(TRAINING + SETTINGS)
    return path


@pytest.fixture
def unplanned(tmp_path, monkeypatch):
    """A config without settings, which must not be planned."""

    def plan(*arguments):
        raise AssertionError("planned before the files were looked at")

    monkeypatch.setattr(plans, "plan", plan)
    path = tmp_path / "a.toml"
    path.write_text(TRAINING)
    return path


def said_of(content, unplanned, capsys):
    (unplanned.parent / "people.csv").write_bytes(content)
    out = unplanned.parent / "out"
    said = failure(capsys, "run", str(unplanned), "--out", str(out))
    assert not out.exists()
    return said


HEADER = b"pay,town,clinic,rich\n"


def zipped(content):
    """The same bytes at any time, so that processes agree on the names of tests."""
    return gzip.compress(content, mtime=0)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty; it needs a header"),
        (b"pay,city,rich\n" + b"1,Ulm,no\n" * 60, "has no column 'town'"),
        (HEADER + b"1,Ulm,A,no\n" * 59, "there are 59 records"),
        (HEADER + b"1,Ulm,A,no\n\n" * 59, "there are 59 records"),
        (b"pay,pay,town,rich\n", "names a column twice"),
        (b"pay;town;rich\n1;Ulm;no\n", '= ";" in [data], or save it with commas'),
        (b"pay\ttown\trich\n", r'set separator = "\t"'),
        (
            "pay,town,rich\n".encode("utf-16"),
            "is in UTF-16; save it as CSV in UTF-8",
        ),
        (b"PAR1\x15\x04", "is no whole Parquet file; copy it again"),
        (b"PK\x03\x04\x14", "is a spreadsheet (xlsx, ods) or a zip archive"),
        (b"\xfd7zXZ\x00", "is compressed by xz; save it as"),
        (zipped(HEADER + b"1,Ulm,A,no\n" * 59), "there are 59 records"),
        (zipped(HEADER * 9)[:-9], "is compressed by gzip, and damaged"),
        (zipped(b"PK\x03\x04"), "is a spreadsheet"),
        (b'pay,"town\n,clinic",rich\n', "a quote does not end in its first row"),
    ],
)
def test_a_file_that_does_not_fit_is_refused_before_the_dry_runs(
    content, said, unplanned, capsys
):
    assert said in said_of(content, unplanned, capsys)


def test_quoted_separators_and_marks_of_the_encoding_are_no_mistakes(tmp_path):
    file = tmp_path / "a.csv"
    file.write_bytes(b'\xef\xbb\xbfpay,"town, of"\r\n1," Ulm, ""Old"""\r\n')
    table = read_csv(file)
    assert table.columns == {"pay": ["1"], "town, of": ['Ulm, "Old"']}


# Lines of one record that a reader of the whole file could mix with others.
HOSTILE = [
    b'"', b'1,"Ulm', b'1,Ulm"', b'"1"x,Ulm', b'1,a"b,"c', b'1,"a""', b'1,"a"""',
    b'1,"a"b"', b"'1,Ulm", b"1", b"1,2,3", b"," * 99, b";", b"1;Ulm", b"1\tUlm", b" ",
    b"\0", b"1,\0Ulm\0", b"\xff\xfe", b"\xef\xbb\xbf1,Ulm", b"1,\xf0\x9f", b"1,\xe4",
    b"\x1a", b"\\", b'1,\\"', b"#", b"-1,9,9", b"0,Ulm,", b"1,\x0bUlm", b"1,\x0c",
    b"1,\xc2\x85", b"1,\xe2\x80\xa8", b"nan,null", b"x" * 200_000,
    b'1,"' + b'""' * 200_000, b"1," + b"9" * 200_000,
]  # fmt: skip


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("separator", [",", ";"])
def test_a_line_changes_neither_other_rows_nor_their_number(
    tmp_path, separator, packed
):
    file = tmp_path / "a.csv"
    other = [b"1,Ulm", b'"2","Ulm, Old"', b'3,"a ""b"""', b'"4', b"5", b'6,7"', b"8,R"]

    def read(line, place, end):
        lines = [b"pay,town", *other[:place], line, *other[place:]]
        content = end.join(v.replace(b",", separator.encode()) for v in lines)
        file.write_bytes(zipped(content) if packed else content)
        table = read_csv(file, separator)
        rows = list(zip(*table.columns.values(), strict=True))
        assert len(rows) == table.rows == len(other) + 1
        return rows[:place] + rows[place + 1 :]

    for place in (0, 3, len(other)):
        for end in (b"\n", b"\r\n", b"\r"):
            plain = read(b"0,Ulm", place, end)
            assert all(read(line, place, end) == plain for line in HOSTILE)


def test_cells_are_those_of_the_other_reader_of_lines(tmp_path):
    file = tmp_path / "a.csv"
    rng = np.random.default_rng(0)
    signs = np.asarray(['"', '"', ",", "a", " ", "\0", "\\", "é", "'", "1"], object)
    lines = ["".join(rng.choice(signs, rng.integers(1, 9))) for _ in range(20_000)]
    file.write_text("a,b\n" + "\n".join(lines))
    found = list(zip(*read_csv(file).columns.values(), strict=True))
    assert len(found) == len(lines)
    for line, cells in zip(lines, found, strict=True):
        try:
            read = next(csv.reader([line], strict=True))
        except csv.Error:
            read = []
        if len(read) == 2 and MALFORMED not in cells:
            assert cells == (read[0].strip(), read[1].strip())
        else:  # spaces after a quote are no mistake here
            assert MALFORMED in cells or '" ' in line


def test_a_file_compressed_by_gzip_gives_the_same_bits(file, tmp_path):
    write_csv(tmp_path, rows_of(60))
    data = plans.read_for_run(str(file))[0].data
    plain = tmp_path / "people.csv"
    packed = tmp_path / "people.csv.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    for a, b in zip(
        data.load(packed).as_bytes(), data.load(plain).as_bytes(), strict=True
    ):
        assert a == b
    assert init.header_of(packed) == init.header_of(plain)._replace(file=packed)


def test_a_damaged_file_is_refused_in_the_same_words_whatever_it_holds(tmp_path):
    said = set()
    for rows in (b"1,Ulm\n" * 900, b"2,Rom\n" * 900):
        content = bytearray(gzip.compress(b"pay,town\n" + rows))
        content[-6] ^= 1  # its sum of the content
        (tmp_path / "a.csv.gz").write_bytes(content)
        with pytest.raises(ValueError, match="damaged or cut off") as error:
            read_csv(tmp_path / "a.csv.gz")
        said.add(str(error.value))
    assert len(said) == 1


def test_a_malformed_record_is_unusable_and_stays_a_record(file, tmp_path):
    write_csv(tmp_path, rows_of(60))
    data = plans.read_for_run(str(file))[0].data
    path = tmp_path / "people.csv"
    plain, lines = data.load(path), path.read_text().splitlines()
    for line in ('"', "1,Ulm", "1,Ulm,A,yes,1", "x" * 2**25):
        path.write_text("\n".join([*lines[:7], line, *lines[8:]]))
        found = data.load(path)
        assert np.isnan(found.features[6]).all()
        assert np.isnan(found.label[6])
        rest = np.delete(np.arange(60), 6)
        assert [*found.take(rest).as_bytes()] == [*plain.take(rest).as_bytes()]
        np.testing.assert_array_equal(found.marks[rest], plain.marks[rest])


@pytest.mark.slow
def test_a_delta_that_allows_to_publish_a_record_is_refused(file, tmp_path, capsys):
    write_csv(tmp_path, rows_of(60))
    text = file.read_text().replace("1e-5", "0.02")
    file.write_text(text)
    out = str(tmp_path / "out")
    said = failure(capsys, "run", str(file), "--out", out)
    assert "delta = 0.02 is not below one over the number of records, 0.017" in said
    assert not os.path.exists(out)
    file.write_text(text.replace("delta", "allow_large_delta = true\ndelta"))
    assert main(["run", str(file), "--out", out]) == 0
    assert "delta = 0.02 is not below one over" in capsys.readouterr().out


def test_another_separator_gives_the_same_bits(file, tmp_path):
    rows = rows_of(60)
    write_csv(tmp_path, rows)
    before = plans.read_for_run(str(file))[0].data
    text = (tmp_path / "people.csv").read_text()
    records = before.load(tmp_path / "people.csv")
    (tmp_path / "people.csv").write_text(text.replace(",", ";"))
    file.write_text(
        file.read_text().replace("training =", 'separator = ";"\ntraining =')
    )
    again = plans.read_for_run(str(file))[0].data.load(tmp_path / "people.csv")
    np.testing.assert_array_equal(again.features, records.features)
    np.testing.assert_array_equal(again.label, records.label)


def test_a_model_is_trained_on_one_level_and_named(file, tmp_path, capsys):
    write_csv(tmp_path, rows_of(60))
    out = tmp_path / "out"
    assert main(["run", str(file), "--out", str(out)]) == 0
    found = results.load(out)
    assert found.names == ("pay", "town = Ulm", "town = Rom", "constant")
    np.testing.assert_array_equal(found.shown, found.model)
    assert found.trajectory.shape == (4, 4)
    capsys.readouterr()
    assert main(["report", str(out)]) == 0
    said = capsys.readouterr().out
    assert f"  town = Ulm  {found.model[1]:.4f}" in said
    with np.load(out / "solution.npz") as arrays:
        assert tuple(arrays["features"]) == found.config.data.coefficients


@pytest.mark.slow
@pytest.mark.filterwarnings("default:auto. The plan")
def test_training_without_settings_is_planned_by_every_command(
    tmp_path, capsys, one_candidate
):
    file = tmp_path / "a.toml"
    file.write_text(TRAINING.replace("training = 60", "training = 300"))
    assert main(["calibrate", str(file)]) == 0
    assert "NoisyGD" in capsys.readouterr().out


@pytest.mark.slow
def test_nobody_who_reads_the_output_to_its_end_is_no_error(file, tmp_path):
    write_csv(tmp_path, rows_of(60))
    out = str(tmp_path / "out")
    assert main(["run", str(file), "--out", out]) == 0
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "dpbilevel", "report", out],
        stdout=writing,
        stderr=subprocess.PIPE,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")
