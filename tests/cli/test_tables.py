"""Tables as people have them: several classes, dates, missing cells, Parquet, ids."""

import csv
import datetime
import json
import re
import sys
import tomllib

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import scipy.special

from dpbilevel.cli import results
from dpbilevel.cli.columns import Label
from dpbilevel.cli.config import parse_config, read_config
from dpbilevel.cli.data import CsvData
from dpbilevel.cli.evaluation import evaluate
from dpbilevel.cli.loading import load_test
from dpbilevel.cli.main import main
from dpbilevel.cli.plans import prepare
from dpbilevel.cli.tables import (
    Table,
    date_reader,
    declaration_for,
    read_csv,
    read_names,
    read_table,
)
from dpbilevel.cli.tasks.linear import softmax_loss
from dpbilevel.cli.toml_tables import Location
from tests.cases import slow
from tests.cli.config_changes import changed
from tests.cli.test_cli import failure

CONFIG = """
task = "training"
[privacy]
epsilon = 1.0
delta = 1e-3
neighbours = "replace_one"
[data]
source = "csv"
path = "flowers.csv"
training = 300
missing = ["NA"]
[data.label]
column = "kind"
classes = [["rose"], ["lily", "lilly"], ["tulip"]]
[[data.numeric]]
name = "size"
columns = ["size"]
mean = [0]
scale = [1]
[[data.numeric]]
name = "seen"
columns = ["seen"]
transform = "date"
date_format = "%d.%m.%Y"
origin = "2024-01-01"
mean = [183]
scale = [61]
[data.test]
path = "flowers.csv"
accuracy = "public"
[model]
loss = "softmax"
num_classes = 3
[solver]
type = "NoisyGD"
num_steps = 3
clip_norm = 1.0
step_size = 4.0
"""
KINDS = "rose", "lily", "tulip"


def rows_of(count):
    rng = np.random.default_rng(0)
    for i in range(count):
        kind = int(rng.integers(3))
        day = datetime.date(2024, 1, 1) + datetime.timedelta(int(rng.integers(366)))
        name = "lilly" if i % 50 == 7 else KINDS[kind]
        size = "NA" if i % 40 == 3 else f"{kind - 1 + 0.3 * rng.normal():.3f}"
        yield [f"f{i}", size, day.strftime("%d.%m.%Y"), name]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with open("flowers.csv", "w", newline="") as file:
        csv.writer(file).writerows([["plant", "size", "seen", "kind"], *rows_of(300)])
    (tmp_path / "a.toml").write_text(CONFIG)
    return tmp_path


def config_of(*changes):
    return parse_config(changed(CONFIG, changes), Location("a.toml"))


def test_every_spelling_of_a_class_is_that_class():
    label = Label("kind", classes=(("rose",), ("lily", "lilly"), ("tulip", 3.0)))
    cells = ["lilly", "tulip", "daisy", "rose", "3", ""]
    labels, _ = label.encode(Table("a", {"kind": cells}, 6))
    np.testing.assert_array_equal(labels, [1, 2, np.nan, 0, 2, np.nan])
    assert label.class_names == ("rose", "lily or lilly", "tulip or 3")


def test_a_softmax_of_an_unlisted_class_has_no_finite_gradient():
    rng = np.random.default_rng(0)
    w, row = rng.normal(size=(4, 3)), rng.normal(size=4)
    loss = softmax_loss(jnp.asarray(w), {"features": row, "label": jnp.asarray(2.0)})
    assert float(loss) == pytest.approx(
        -scipy.special.log_softmax(row @ w)[2], rel=1e-5
    )
    record = {"features": row, "label": jnp.asarray(jnp.nan)}
    assert np.isnan(jax.grad(softmax_loss)(jnp.asarray(w), record)).all()


@pytest.mark.parametrize(
    ("form", "cell", "days"),
    [
        ("", "2024-01-31", 30),
        ("", "2024-01-01T12:00:00+02:00", 0.5),
        ("%d.%m.%Y", "31.12.2023", -1),
        ("%d.%m.%Y", "2024-01-01", np.nan),
        ("", "31.12.2023", np.nan),
        ("", "", np.nan),
        ("", "9999-99-99", np.nan),
    ],
)
def test_a_date_is_read_as_days(form, cell, days):
    assert date_reader("2024-01-01", form)(cell) == pytest.approx(days, nan_ok=True)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ([("model.loss", "logistic")], "describes 3 classes; give loss ="),
        ([("model.loss", "logistic"), ("model.num_classes", 0)], "num_classes = 3 in"),
        ([("model.num_classes", 4)], 'describes 3 classes; give loss = "softmax" and'),
        ([("data.label.classes", [["a"]])], "classes, a list of values for each"),
        ([("data.label.classes", [["a"], ["a"]])], "classes must be lists of distinct"),
        ([("data.label.transform", "date")], "a label is no date"),
        (
            [
                ("task", "group_fair"),
                ("model", {"shares": [0.5, 0.5], "radius": 1.0}),
                ("data.groups", {"column": "plant", "values": ["a", "b"]}),
                ("solver", {"type": "GroupDescent"}),
            ],
            "the task has two classes: give positive and negative",
        ),
        (
            [
                ("data.label", {"column": "kind", "mean": 0, "scale": 1}),
                ("model", {"loss": "logistic"}),
            ],
            'describes a number; give loss = "squared"',
        ),
    ],
)
def test_what_does_not_fit_several_classes_is_refused_with_a_remedy(changes, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        config_of(*changes)


def test_dates_with_an_origin_or_a_format_that_is_none_are_refused():
    for key, value in {"origin": "1.1.2024", "date_format": "%d.%m"}.items():
        tables = tomllib.loads(CONFIG)
        tables["data"]["numeric"][1][key] = value
        with pytest.raises(ValueError, match=r"\[data.numeric \(entry 2\)\]"):
            parse_config(tables, Location("a.toml"))


LEVELS = [
    ("privacy.people", "disjoint"),
    ("data.training", 200),
    ("data.validation", 100),
    ("data.test", None),
    ("solver", {"type": "OneLevel", "model": tomllib.loads(CONFIG)["solver"]}),
    ("solver.model.type", None),
]
SOURCES = {"column": "plant", "values": [f"f{i}" for i in range(2)]}


@pytest.mark.parametrize(
    "changes",
    [
        [("task", "penalty_tuning")],
        [
            ("task", "source_weighting"),
            ("model.num_sources", 2),
            ("data.sources", SOURCES),
        ],
    ],
    ids=["penalty_tuning", "source_weighting"],
)
def test_tasks_of_two_levels_take_several_classes(changes):
    prepared = prepare(config_of(*LEVELS, *changes))
    assert np.shape(prepared.w0[1]) == (3, 3)
    record = {"features": jnp.ones(3), "label": jnp.asarray(1.0), "source": 1}
    grads = [
        jax.grad(getattr(prepared.problem, role), 1)(*prepared.w0, record)
        for role in ("upper", "lower")
    ]
    expected = (1 / 3 - np.eye(3)[1]) * np.ones((3, 1))
    np.testing.assert_allclose(grads[0], expected, atol=1e-6)
    np.testing.assert_allclose(grads[1], expected, atol=1e-6)


def test_the_accuracy_of_several_classes_is_that_of_the_largest_score(folder):
    config = read_config("a.toml")
    data = config.data
    assert isinstance(data, CsvData)
    test = load_test(config)
    model = np.random.default_rng(1).normal(size=(3, 3))
    found = evaluate(config, model, test, key=jax.random.key(0))
    used = np.isfinite(test.features.sum(1) + test.label)
    scores = (test.features @ model.astype(np.float32)).argmax(1)
    right = (scores == test.label)[used]
    assert found.value == pytest.approx(right.mean())
    shares = np.bincount(test.label[used].astype(int)) / used.sum()
    assert found.trivial == pytest.approx(shares.max())


@slow
def test_a_run_on_several_classes_is_reported_and_predicts_beside_ids(folder, capsys):
    (folder / "a.toml").write_text(CONFIG.replace("epsilon = 1.0", "epsilon = 20.0"))
    (folder / "test.csv").write_text((folder / "flowers.csv").read_text() + "\n")
    text = (
        (folder / "a.toml")
        .read_text()
        .replace('path = "flowers.csv"\naccuracy', 'path = "test.csv"\naccuracy')
    )
    lines = (folder / "test.csv").read_text().splitlines()
    (folder / "test.csv").write_text("\n".join(lines[:-1]))  # another file
    (folder / "a.toml").write_text(text)
    assert main(["run", "a.toml", "--out", "out"]) == 0
    result = results.load(folder / "out")
    assert result.names[:3] == ("size [rose]", "size [lily or lilly]", "size [tulip]")
    assert result.test.value > 0.8
    assert main(["report", "out", "--html", "a.html"]) == 0
    assert (
        main(["predict", "out", "flowers.csv", "--out", "p.csv", "--id", "plant"]) == 0
    )
    with open("p.csv") as file:
        found = list(csv.DictReader(file))
    assert [row["plant"] for row in found] == [f"f{i}" for i in range(300)]
    chances = [[float(row[f"probability of {k}"]) for k in KINDS] for row in found]
    np.testing.assert_allclose(np.sum(chances, 1), 1, atol=1e-4)
    best = [KINDS[i] for i in np.argmax(chances, 1)]
    assert [row["kind"] for row in found] == best
    page = json.loads((folder / "out" / "result.json").read_text())
    assert len(page["released"]) == 9


def test_a_parquet_file_is_the_table_of_the_same_text(tmp_path):
    columns = {
        "id": [1.0, None, 3.0],
        "pay": [0.1, float("nan"), 1e9],
        "born": [datetime.date(2000, 1, 2), None, datetime.date(1970, 1, 1)],
        "ill": [True, False, None],
        "town": pa.array(["Ulm", " Rom", "Ulm"]).dictionary_encode(),
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    text = "id,pay,born,ill,town\n1.0,0.1,2000-01-02,True,Ulm\n,,,False,Rom\n"
    (tmp_path / "a.csv").write_text(text + "3.0,1e9,1970-01-01,,Ulm\n")
    found, want = read_table(tmp_path / "a.parquet"), read_csv(tmp_path / "a.csv")
    assert found.rows == want.rows == 3
    assert read_names(tmp_path / "a.parquet", ",") == list(want.columns)
    for name in ("born", "ill", "town"):
        assert found.column(name) == want.column(name)
    for name in ("id", "pay"):
        pairs = zip(found.column(name), want.column(name), strict=True)
        assert all(a == b == "" or float(a) == float(b) for a, b in pairs)


def test_a_cell_that_is_no_text_does_not_raise(tmp_path):
    cells = pa.array([b"ok", b"\xff\xfe"]).view(pa.string())
    pq.write_table(pa.table({"a": cells}), tmp_path / "a.parquet")
    assert read_table(tmp_path / "a.parquet").column("a") == ["ok", "\ufffd\ufffd"]


def test_a_parquet_file_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    pq.write_table(pa.table({"a": ["x"]}), tmp_path / "a.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for read in (read_table, lambda file: read_names(file, ",")):
        with pytest.raises(ValueError, match="a Parquet file, needs pyarrow"):
            read(tmp_path / "a.parquet")


def test_a_parquet_file_of_lists_or_a_damaged_one_is_refused(tmp_path):
    pq.write_table(pa.table({"a": [[1], [2]]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="the column 'a' holds list"):
        read_table(tmp_path / "a.parquet")
    content = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(content[:-20])
    with pytest.raises(ValueError, match="is no whole Parquet file"):
        read_table(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    ("cell", "keys"),
    [
        ("1.234,50 €", 'unit = "€" and decimal = ","'),
        ("0,00 €", 'unit = "€" and decimal = ","'),
        ("$5,000", 'unit = "$"'),
        ("12 m2", 'unit = "m2"'),
        ("21,070.96", 'decimal = "."'),
        ("2024-01-31", 'transform = "date"'),
        ("31.01.2024", "transform = \"date\" and date_format = '%d.%m.%Y'"),
        ("NA", ""),
        ("a1b2", ""),
    ],
)
def test_the_curator_sees_how_a_cell_can_be_read(cell, keys):
    assert declaration_for(cell) == keys


def test_the_draft_of_a_config_declares_dates_classes_and_commas(folder, capsys):
    flags = ["--label", "kind", "--classes", "rose,lily,tulip", "--records", "300"]
    flags += ["--column", "seen=2024-01-01..2024-12-31 %d.%m.%Y"]
    flags += ["--column", "size=0,5..9,5 cm"]
    assert main(["init", "flowers.csv", *flags, "--out", "b.toml"]) == 0
    tables = tomllib.loads((folder / "b.toml").read_text())
    assert "are read as 2000-01-31" not in capsys.readouterr().out
    seen, size = tables["data"]["numeric"]
    assert (seen["transform"], seen["origin"]) == ("date", "2024-01-01")
    assert (size["unit"], size["decimal"], size["mean"]) == ("cm", ",", [5])
    assert tables["data"]["label"]["classes"] == [["rose"], ["lily"], ["tulip"]]
    assert tables["model"] == {"loss": "softmax", "num_classes": 3}
    iso = [*flags[:6], "--column", "seen=2024-01-01..2024-12-31", "--out", "d.toml"]
    assert main(["init", "flowers.csv", *iso]) == 0
    assert "cells of 'seen' are read as 2000-01-31" in capsys.readouterr().out
    flags += ["--task", "group_fair", "--groups", "plant=f1,f2"]
    said = failure(capsys, "init", "flowers.csv", *flags, "--out", "c.toml")
    assert "--task group_fair has two classes; give --positive and --negative" in said
