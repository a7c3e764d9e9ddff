"""Numbers with units, as a config declares them."""

import math
import tomllib

import numpy as np
import pytest

from dpbilevel.cli.columns import Label, Numeric, check_unit, reader
from dpbilevel.cli.main import main
from dpbilevel.cli.tables import Table
from tests.cli.test_csv_files import TRAINING


@pytest.mark.parametrize(
    ("unit", "decimal", "cell", "value"),
    [
        ("€", "", "€21,070.96", 21070.96),
        ("€", "", "21\u202f070.96 €", 21070.96),
        ("€", "", "1'234", 1234.0),
        ("€", "", "-€5", -5.0),
        ("€", "", "€-5", -5.0),
        ("€", "", "7", 7.0),
        ("€", "", ".5", 0.5),
        ("€", ",", "1.234,50 €", 1234.5),
        ("%", "", "12.5 %", 12.5),
        ("Fr.", "", "Fr. 1'234.50", 1234.5),
        ("", ".", "21,070.96", 21070.96),
        ("", "", "1e3", 1000.0),
    ],
)
def test_a_declared_number_is_read(unit, decimal, cell, value):
    assert reader(unit, decimal)(cell) == value


@pytest.mark.parametrize(
    ("unit", "decimal", "cells"),
    [
        ("", "", ["€21,070.96", "21,070.96", "12 %", "1,5"]),
        ("€", "", ["$5", "5 €€", "1,23", "12,34", "--5", "-€-5", "€", "", "1,234 567"]),
        ("€", ",", ["1.5", "1,234.50", "1,2,3"]),
    ],
)
def test_everything_else_stays_unreadable(unit, decimal, cells):
    assert all(map(math.isnan, map(reader(unit, decimal), cells)))


@pytest.mark.parametrize("unit", ["1", "-", ".", " ", "2k", "'", "_"])
def test_a_unit_that_could_be_a_part_of_a_number_is_refused(unit):
    with pytest.raises(ValueError, match="unit must be a text without digits"):
        check_unit(unit)
    with pytest.raises(ValueError, match="unit must be"):
        Numeric("a", ("a",), (0.0,), (1.0,), unit=unit)


def test_a_unit_is_not_for_classes():
    with pytest.raises(ValueError, match="unit and decimal are for a numeric label"):
        Label("a", ("yes",), ("no",), unit="€")


def test_cells_are_read_one_by_one():
    block = Numeric("pay", ("pay",), (50.0,), (50.0,), unit="€")
    cells = ["€10", "20 €", "", "30"]
    before, _ = block.encode(Table("a", {"pay": cells}, 4))
    for cell in ("text", "nan", "9" * 400, "€" * 99, "\0"):
        found, _ = block.encode(Table("a", {"pay": [*cells[:1], cell, *cells[2:]]}, 4))
        np.testing.assert_array_equal(found[[0, 2, 3]], before[[0, 2, 3]])


def test_a_typed_unit_is_written_into_the_config(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda question: "")  # Enter
    (tmp_path / "a.csv").write_text("pay,rich\n" + "€5,yes\n" * 20)
    out = tmp_path / "task.toml"
    argv = ["init", str(tmp_path / "a.csv"), "--out", str(out), "--label", "rich"]
    argv += ["--positive", "yes", "--negative", "no", "--records", "20"]
    assert main([*argv, "--column", "pay=0..1000 €"]) == 0
    (block,) = tomllib.loads(out.read_text())["data"]["numeric"]
    assert block["unit"] == "€"
    out.unlink()
    assert main([*argv, "--column", "pay=0..1000 k2k"]) == 2
    assert "must be a text without digits" in capsys.readouterr().err


def test_a_config_without_units_reads_as_before():
    (block,) = tomllib.loads(TRAINING)["data"]["numeric"]
    columns = {name: tuple(block[name]) for name in ("columns", "mean", "scale")}
    cells = ["1", "1.5e1", " ", "€1", "1,000"]
    found, _ = Numeric("pay", **columns).encode(Table("a", {"pay": cells}, 5))
    assert np.isnan(found[:, 0]).tolist() == [False, False, True, True, True]
