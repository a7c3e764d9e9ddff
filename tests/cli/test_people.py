"""The command line on people with several rows: `person` in [privacy]."""

import csv
import dataclasses
import json
import re
import tomllib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpbilevel as dpb
from dpbilevel.audit.recording import open_value
from dpbilevel.cli import data as of_data
from dpbilevel.cli import data as people
from dpbilevel.cli import results
from dpbilevel.cli.config import parse_config, read_config
from dpbilevel.cli.loading import as_levels, find_files, indicators, load
from dpbilevel.cli.main import main
from dpbilevel.cli.plans import prepare
from dpbilevel.cli.toml_tables import Location
from dpbilevel.privacy.mechanisms import Gaussian
from tests.cases import slow
from tests.cli.config_changes import changed
from tests.cli.test_cli import failure

CONFIG = """
task = "training"
[privacy]
person = "patient"
epsilon = 1.0
delta = 1e-3
neighbours = "replace_one"
check_records = false
[data]
source = "csv"
path = "visits.csv"
training = 40
[data.label]
column = "ill"
positive = ["yes"]
negative = ["no"]
[[data.numeric]]
name = "age"
columns = ["age"]
mean = [50]
scale = [15]
[[data.categorical]]
column = "town"
values = ["Ulm", "Rom"]
[model]
loss = "logistic"
[solver]
type = "NoisyGD"
num_steps = 2
clip_norm = 0.5
step_size = 4.0
"""
TWO = [
    ("privacy.people", "disjoint"),
    ("data.training", 28),
    ("data.validation", 12),
    ("solver", {"type": "OneLevel", "reads": "both"}),
    ("solver.model", {"num_steps": 2, "clip_norm": 0.5, "step_size": 4.0}),
]
TASKS = {
    "training": [],
    "source_weighting": [
        *TWO,
        ("task", "source_weighting"),
        ("model.num_sources", 2),
        ("data.sources", {"column": "clinic", "values": ["A", "B"]}),
    ],
    "penalty_tuning": [*TWO, ("task", "penalty_tuning")],
    "group_fair": [
        ("task", "group_fair"),
        ("model", {"shares": [0.5, 0.5], "radius": 5.0}),
        ("data.groups", {"column": "clinic", "values": ["A", "B"]}),
        ("solver", {"type": "GroupDescent", "num_steps": 2}),
    ],
}
NAMES = ["patient", "age", "town", "clinic", "ill"]
PEOPLE = 40


def visits(person, count, sign=None):
    """Rows of a person; hostile ones are all of one class and far from the mean."""
    rng = np.random.default_rng(person)
    for _ in range(count):
        age, ill = rng.integers(20, 80), rng.choice(["yes", "no"])
        if sign is not None:
            age, ill = (95, "yes") if sign > 0 else (95, "no")
        yield [
            f"p{person}",
            age,
            rng.choice(["Ulm", "Rom"]),
            rng.choice(["A", "B"]),
            ill,
        ]


def table(hostile=None):
    """Rows of 40 people in mixed order; the last person has 8 hostile rows or none."""
    rows = [r for p in range(PEOPLE - 1) for r in visits(p, 1 + p % 9)]
    rows = [rows[i] for i in np.random.default_rng(0).permutation(len(rows))]
    for i, row in enumerate([] if hostile is None else visits(PEOPLE - 1, 8, hostile)):
        rows.insert(20 * i, row)  # the others stay in their order
    return rows


def write(file, rows):
    with file.open("w", newline="") as opened:
        csv.writer(opened).writerows([NAMES, *rows])


def config_of(folder, *changes):
    return parse_config(changed(CONFIG, changes), Location(str(folder / "a.toml")))


def levels_of(config):
    return load(config, *find_files(config))


def releases_of(prepared, levels):
    """What a run releases before noise, over what is charged; releases show zeros."""
    notes, release = [], Gaussian.release

    def note(words, scale, value):
        raw = np.concatenate(open_value(value)) / scale
        notes.append((tuple(np.ravel(words).tolist()), raw))

    def noted(self, value, *, key):
        scale = value.sensitivity(self.neighbours)
        jax.debug.callback(note, jax.random.key_data(key), scale, value)
        return jax.tree.map(jnp.zeros_like, release(self, value, key=key))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Gaussian, "release", noted)
        run = prepared.problem, prepared.solver, levels, prepared.w0
        jax.jit(lambda key: dpb.solve(*run, key=key))(jax.random.key(0))
        jax.effects_barrier()
    return [raw for _, raw in sorted(notes, key=lambda pair: pair[0])]


def moved(folder, config, files):
    """How far each release moves between two files, over what is charged for it."""
    found, prepared = [], prepare(config)
    for rows in files:
        write(folder / "visits.csv", rows)
        levels = as_levels(levels_of(config), config.privacy.unit)
        found.append(releases_of(prepared, jax.tree.map(jnp.asarray, levels)))
    return [np.linalg.norm(a - b) for a, b in zip(*found, strict=True)]


ADD = ("privacy.neighbours", "add_or_remove_one")
FILES = {"replace_one": (1, -1), "add_or_remove_one": (1, None)}
FLOAT = ("privacy.precision", "float")  # which compiles sooner
FAST = [("training", "add_or_remove_one")]


@pytest.mark.parametrize(
    ("task", "relation"),
    [
        pytest.param(t, r, marks=() if (t, r) in FAST else pytest.mark.slow)
        for t in TASKS
        for r in FILES
    ],
)
def test_a_person_with_eight_hostile_rows_moves_releases_as_charged(
    tmp_path, task, relation
):
    relations = [("privacy.neighbours", relation)]
    relations += [FLOAT] if (task, relation) in FAST else []
    if task == "group_fair":
        relations.append(("solver.clip_norm", 0.5))
    config = config_of(tmp_path, *TASKS[task], *relations)
    excess = moved(tmp_path, config, [table(sign) for sign in FILES[relation]])
    assert 0.3 < max(excess) <= 1 + 1e-4


def test_rows_that_are_taken_for_records_are_noticed(tmp_path, monkeypatch):
    def each_row(table, column):
        return np.asarray([f"row {i}" for i in range(table.rows)])

    monkeypatch.setattr(people, "ids_of", each_row)
    config = config_of(tmp_path, ADD, FLOAT, ("data.training", 250))
    excess = moved(tmp_path, config, [table(1), table(None)])
    assert max(excess) > 4


def check_of(folder, config, rows):
    write(folder / "visits.csv", rows)
    records = levels_of(config)
    declared = dict(config.records_check.columns)
    return {r: (declared[r], indicators(declared[r], records[r])) for r in declared}


@pytest.mark.parametrize("task", ["training", "source_weighting"])
def test_the_check_of_records_is_a_mean_over_people(tmp_path, task):
    on = ("privacy.check_records", True)
    config = config_of(tmp_path, *TASKS[task], on)
    first, second = (check_of(tmp_path, config, table(sign)) for sign in (1, -1))
    differ = 0
    for role, (columns, rows) in first.items():
        assert len(rows) == (
            40 if task == "training" else {"upper": 12, "lower": 28}[role]
        )
        assert np.linalg.norm(rows, axis=1).max() <= columns.clip_norm * (1 + 1e-6)
        differ += np.sum(np.any(rows != second[role][1], axis=1))
    assert differ == 1


def ids_of(config):
    return {role: set(level.ids) for role, level in levels_of(config).items()}


@pytest.mark.parametrize("relation", FILES)
def test_the_levels_of_people_are_functions_of_ids_alone(tmp_path, relation):
    config = config_of(
        tmp_path, *TASKS["penalty_tuning"], ("privacy.neighbours", relation)
    )
    write(tmp_path / "visits.csv", table(1))
    first = ids_of(config)
    assert not first["upper"] & first["lower"]
    assert first["upper"] | first["lower"] == {f"p{i}" for i in range(PEOPLE)}
    rows = table(1)[::-1]
    rows = [r for r in rows if r[0] != "p3"] + [*visits(3, 8, 1)]
    write(tmp_path / "visits.csv", rows)
    assert ids_of(config) == first
    if relation == "add_or_remove_one":
        write(tmp_path / "visits.csv", [r for r in rows if r[0] != "p3"])
        assert ids_of(config) == {role: ids - {"p3"} for role, ids in first.items()}


def test_an_id_in_both_files_of_disjoint_people_is_refused_by_one_text(tmp_path):
    config = config_of(
        tmp_path, *TASKS["penalty_tuning"], ("data.validation_path", "other.csv")
    )
    write(tmp_path / "visits.csv", [r for p in range(28) for r in visits(p, 2)])
    said = []
    for first in (16, 27):
        others = [r for p in range(first, first + 12) for r in visits(p, 2)]
        write(tmp_path / "other.csv", others)
        with pytest.raises(ValueError, match="an id is in two files") as error:
            levels_of(config)
        said.append(str(error.value))
    assert said[0] == said[1]
    write(tmp_path / "other.csv", [r for p in range(28, 40) for r in visits(p, 2)])
    assert levels_of(config)
    assert any("no id is in two files" in v for v in prepare(config).report.assumptions)


def test_rows_without_an_id_are_left_out_and_ids_are_read_alike(tmp_path):
    rows = [["7", 1], ["", 2], ["7.0", 3], ["NA", 4], ["nan", 5], ["8", 6]]
    cells = dict(zip(("id", "age"), zip(*rows, strict=True), strict=True))
    found = people.ids_of(of_data.Table("a", cells, 6), "id")
    assert found.tolist() == ["7", "", "7", "", "", "8"]


def test_a_long_id_takes_no_more_memory_than_a_short_one():
    cells = {"id": ["a" * 100_000, "b", "a" * 100_000]}
    found = people.ids_of(of_data.Table("a", cells, 3), "id")
    assert found[0] == found[2] != found[1]
    assert found.dtype.itemsize <= 4 * 64


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ([("privacy.person", "age")], "'age' is a label, feature, source or group"),
        ([("privacy.person", None), ("privacy.most_rows", 3)], "need person"),
        ([("privacy.most_rows", 0)], "most_rows must be"),
        ([("privacy.combine", "max")], 'combine must be one of "mean", "sum"'),
    ],
)
def test_what_ids_do_not_admit_is_refused(tmp_path, changes, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        config_of(tmp_path, *changes)


def test_too_few_people_and_a_missing_column_are_refused(tmp_path):
    write(tmp_path / "visits.csv", table(1))
    with pytest.raises(ValueError, match="there are 40 people, but"):
        levels_of(config_of(tmp_path, ("data.training", 41)))
    with pytest.raises(ValueError, match="no column 'person'"):
        levels_of(config_of(tmp_path, ("privacy.person", "person")))


TEST = '[data.test]\npath = "test.csv"\naccuracy = "counted"\nrecords = 12\n'


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "visits.csv", table(1))
    write(tmp_path / "test.csv", [r for p in range(50, 62) for r in visits(p, 3)])
    text = CONFIG.replace("check_records = false", "").replace(
        "[model]", TEST + "[model]"
    )
    (tmp_path / "a.toml").write_text(text)
    return tmp_path


@slow
def test_a_run_says_whom_it_protects_and_ids_are_beside_the_predictions(folder, capsys):
    assert main(["run", "a.toml", "--out", "out"]) == 0
    said = capsys.readouterr().out
    assert "protects: one person (at most 8 rows each)" in said
    assert main(["report", "out", "--html", "a.html"]) == 0
    page = (folder / "a.html").read_text()
    assert "What is protected is one person (at most 8 rows each)" in page
    assert "12 people of test.csv" in str(results.load(folder / "out").test)
    assert main(["predict", "out", "visits.csv", "--out", "p.csv"]) == 0
    lines = list(csv.reader((folder / "p.csv").open()))
    assert lines[0][:3] == ["row", "patient", "ill"]
    assert [line[1] for line in lines[1:]] == [row[0] for row in table(1)]


def test_a_counted_test_file_shares_no_id_with_the_others(folder, capsys):
    write(folder / "test.csv", [r for p in range(39, 51) for r in visits(p, 3)])
    said = failure(capsys, "run", "a.toml", "--out", "out")
    assert "an id is in two files whose people must differ" in said
    assert not (folder / "out").exists()


@pytest.mark.slow
def test_the_counted_accuracy_is_that_of_the_mean_over_people(folder):
    from dpbilevel.cli.evaluation import evaluate
    from dpbilevel.cli.loading import load_test

    config = read_config(folder / "a.toml")
    test = load_test(config)
    model = np.asarray([0.3117, 0.1293, -0.1071, 0.2239])  # no row at the edge
    public = dataclasses.replace(config.data.test, accuracy="non_private")
    data = dataclasses.replace(config.data, test=public)
    exact = evaluate(
        dataclasses.replace(config, data=data), model, test, key=jax.random.key(0)
    )
    right = (test.features @ model >= 0) == (test.label > 0)
    by_person = [right[test.ids == own].mean() for own in np.unique(test.ids)]
    assert exact.records == 12
    assert exact.value == pytest.approx(np.mean(by_person), rel=1e-6)
    shares = [np.mean(test.label[test.ids == own] > 0) for own in np.unique(test.ids)]
    assert exact.trivial == pytest.approx(max(np.mean(shares), 1 - np.mean(shares)))
    loud = dataclasses.replace(config.privacy, epsilon=1e4, precision="float")
    noisy = evaluate(
        dataclasses.replace(config, privacy=loud), model, test, key=jax.random.key(0)
    )
    assert noisy.value == pytest.approx(exact.value, abs=1e-2)


def test_the_curator_sees_how_many_rows_people_have(folder, capsys):
    assert main(["check", "a.toml"]) == 0
    said = capsys.readouterr().out
    assert "patient: 40 people, by their number of rows: 5 with 1, 5 with 2" in said
    assert "4 people have more than 8 rows; their first 8 count" in said
    rows = (folder / "a.toml").read_text().replace('person = "patient"', "")
    (folder / "a.toml").write_text(rows)
    header = (folder / "visits.csv").read_text().replace("patient,", "patient_id,")
    (folder / "visits.csv").write_text(header)
    assert main(["check", "a.toml"]) == 0
    assert "set person = 'patient_id' in [privacy]" in capsys.readouterr().out


def test_the_draft_of_a_config_asks_for_people_first(folder, capsys):
    flags = ["--label", "ill", "--positive", "yes", "--negative", "no"]
    flags += ["--column", "age=18..99", "--records", "count"]
    out = ["--out", "new.toml"]
    assert main(["init", "visits.csv", *flags, *out, "--person", "patient"]) == 0
    config = tomllib.loads((folder / "new.toml").read_text())
    assert list(config["privacy"])[:2] == ["person", "most_rows"]
    assert "most_rows = 8: correct it if people have" in capsys.readouterr().out
    assert config["privacy"]["most_rows"] == 8
    assert config["data"]["training"] == PEOPLE
    (folder / "new.toml").unlink()
    assert main(["init", "visits.csv", *flags, *out]) == 0
    assert "'patient' may be the id of a person" in capsys.readouterr().out
    lines = (folder / "new.toml").read_text().splitlines()
    assert lines[lines.index("[privacy]") + 3].startswith('# person = "')


@slow
def test_a_plan_by_dry_runs_is_one_for_people(folder, capsys, one_candidate):
    text = (folder / "a.toml").read_text()
    (folder / "b.toml").write_text(text[: text.index("[solver]")])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the plan of one candidate is poor
        assert main(["auto", "b.toml"]) == 0
    assert "protects: one person (at most 8 rows each)" in capsys.readouterr().out


def test_the_spending_record_counts_the_run_as_before(folder):
    config = read_config(folder / "a.toml")
    plain = dataclasses.replace(
        config, privacy=dataclasses.replace(config.privacy, person="")
    )
    costs = [prepare(c).report.epsilon for c in (config, plain)]
    assert costs[0] == costs[1]
    report = json.loads(prepare(config).report.to_json())
    assert report["unit"] == "one person (at most 8 rows each)"
    assert isinstance(prepare(config).problem, dpb.FiniteSum)


@pytest.mark.parametrize(
    "seen", ["e\u0301", "\u00e9 ", "\ufeff\u00e9", "\u200b \u00e9"]
)
def test_there_are_as_many_people_in_a_file_as_in_its_records(seen):
    class File:
        def column(self, name):
            return ["\u00e9", seen, "b", "\u200b", ""]

    ids = people.ids_of(File(), "patient")
    assert ids.tolist() == ["\u00e9", "\u00e9", "b", "", ""]
    kept = ids[ids != ""]
    assert (
        len(np.unique(kept)) == len(dpb.by_person(np.zeros((3, 1)), kept).present) == 2
    )
