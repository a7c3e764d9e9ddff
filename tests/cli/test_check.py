"""No budget is spent on records of no use: the check of a run, and `check`."""

import dataclasses
import json
import tomllib
import warnings

import jax
import numpy as np
import pytest

from dpbilevel import search
from dpbilevel.cli import results
from dpbilevel.cli import run as runner
from dpbilevel.cli.config import parse_config, read_config
from dpbilevel.cli.loading import as_levels, indicators
from dpbilevel.cli.main import main
from dpbilevel.cli.plans import prepare
from dpbilevel.cli.run import run
from dpbilevel.cli.toml_tables import Location
from dpbilevel.core.usability import RecordsCheck
from dpbilevel.privacy.budget import PrivacyBudget
from dpbilevel.runs import checkpoint, spending
from tests.cases import slow
from tests.cli.test_cli import failure
from tests.cli.test_csv_files import SETTINGS, TRAINING
from tests.cli.test_evaluation import TEST
from tests.cli.test_runner import (
    CSV_DATA,
    GENERATED,
    Stop,
    bits,
    loaded,
    rows_of,
    write_csv,
)

# With so much budget that 400 records are told from none.
LARGE = (TRAINING + SETTINGS).replace("epsilon = 1.0", "epsilon = 9.0")
LARGE = LARGE.replace("training = 60", "training = 400")
MISSPELT = LARGE.replace('"yes"', '"Yes"')
NO_NUMBER = [(f"{row[0]} €", *row[1:]) for row in rows_of(400)]


@pytest.fixture
def fixed_key(monkeypatch):
    monkeypatch.setattr(runner, "root_key", lambda *_: jax.random.key(7))


@pytest.fixture
def folder(tmp_path, fixed_key):
    """Records, and their config in `a.toml`; noise that hides no mistake."""
    write_csv(tmp_path, rows_of(400))
    (tmp_path / "a.toml").write_text(LARGE)
    return tmp_path


def stopped(folder, capsys, text=LARGE, *options):
    (folder / "a.toml").write_text(text)
    path, out = str(folder / "a.toml"), str(folder / "out")
    return failure(capsys, "run", path, "--out", out, *options)


def check_small_part_alone(folder, count=1):
    recorded = spending.read(folder / "out").runs
    assert len(recorded) == count
    assert all(run.stopped and 0.1 < run.epsilon < 1.2 for run in recorded)
    assert sorted(p.name for p in (folder / "out").iterdir()) == ["spending.jsonl"]


def test_a_misspelt_class_stops_the_run_by_its_name(folder, capsys):
    said = stopped(folder, capsys, MISSPELT)
    assert "the run stopped before training" in said
    assert "'Yes' (" in said
    assert "Only the check of records is spent, epsilon = " in said
    check_small_part_alone(folder)
    assert main(["report", str(folder / "out")]) == 2
    (line,) = capsys.readouterr().out.splitlines()[1:]
    assert "stopped before training, too few usable records: " in line
    assert "'Yes' (" in line


def test_a_misspelt_class_of_a_third_of_the_records_stops(folder, capsys):
    rows = [(*row[:3], "no" if i % 3 else "yes") for i, row in enumerate(rows_of(400))]
    write_csv(folder, rows)
    said = stopped(folder, capsys, MISSPELT)
    assert "no record seems to have 'Yes'" in said
    assert "check_records = false in [privacy]" in said
    check_small_part_alone(folder)


WARNED = {
    "categories": ('["Ulm", "Rom"]', '["ulm", "rom"]', "'town' (at least "),
    "bounds": ("mean = [30]", "mean = [30000]", "'pay' (at least "),
    "clean": ("", "", ""),
}


@pytest.mark.slow
@pytest.mark.parametrize(("old", "new", "name"), WARNED.values(), ids=[*WARNED])
def test_unlisted_categories_and_wrong_bounds_are_warned_of_before_training(
    folder, capfd, monkeypatch, old, new, name
):
    path = folder / "a.toml"
    path.write_text(LARGE.replace(old, new))
    steps = runner._steps

    def silent(*arguments):
        said.append(capfd.readouterr().err)
        return steps(*arguments)

    said = []
    monkeypatch.setattr(runner, "_steps", silent)
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert main(["run", str(path), "--out", str(folder / "out")]) == 0
    (err,), out = said, capfd.readouterr().out
    assert ("dpbilevel: warning: Many records have wrong cells" in err) == bool(name)
    if name:
        assert "values lie outside the declared range" in err
        assert f"dpbilevel check {path} shows" in err
        assert name in err
    assert ("WARNING" in out) == bool(name)


def test_a_column_of_another_unit_stops_the_run_until_it_is_declared(folder, capsys):
    write_csv(folder, NO_NUMBER)
    assert "wrong in many records: 'pay' (" in stopped(folder, capsys)
    check_small_part_alone(folder)
    assert "--restart" in stopped(folder, capsys)  # it is a second release
    stopped(folder, capsys, LARGE, "--restart")
    check_small_part_alone(folder, 2)
    text = LARGE.replace('name = "pay"', 'name = "pay"\nunit = "€"')
    (folder / "a.toml").write_text(text)
    argv = ["run", str(folder / "a.toml"), "--out", str(folder / "out"), "--restart"]
    assert main(argv) == 0
    costs = [run.epsilon for run in spending.read(folder / "out").runs]
    assert costs[2] == pytest.approx(9.0)
    assert search.spent(folder).epsilon == pytest.approx(sum(costs))


def test_a_run_that_is_not_to_be_checked_trains_all_the_same(folder):
    text = MISSPELT.replace("[privacy]", "[privacy]\ncheck_records = false")
    (folder / "a.toml").write_text(text)
    prepared = prepare(read_config(folder / "a.toml"))
    assert not prepared.records_check.releases
    assert run(prepared, folder / "out").usability is None


def test_the_check_counts_within_the_budget_and_first_in_the_ledger(folder):
    prepared = prepare(read_config(folder / "a.toml"))
    assert prepared.report.ledger[0].release == "usable records"
    assert prepared.report.epsilon <= 9.0
    assert prepared.ledger.delta(9.0) == pytest.approx(1e-5, rel=1e-6)
    alone = prepared.records_check_report
    assert alone.ledger == prepared.report.ledger[:1]
    assert alone.epsilon < 1.2


# The functions before and after which a run is killed: each makes one step durable.
MOMENTS = [
    (spending, "begin"),
    (RecordsCheck, "release"),
    (spending, "charge"),
    (runner, "_steps"),
]


def test_a_run_killed_at_any_moment_checks_its_records_once(folder, fixed_key):
    prepared = prepare(read_config(folder / "a.toml"))
    free = run(prepared, folder / "free")
    assert free.usability.usable == pytest.approx(1.0, abs=0.15)

    def killed(where, name, after, out):
        real = getattr(where, name)

        def stop(*arguments, **options):
            if after:
                real(*arguments, **options)
            raise Stop

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(where, name, stop)
            with pytest.raises(Stop):
                run(prepared, out, resume=out.exists())

    out = folder / "out"
    for where, name in MOMENTS:
        for after in (False, True):
            killed(where, name, after, out)
            (recorded,) = spending.read(out).runs or (None,)
            if recorded is not None:
                assert (recorded.epsilon > 8) == ((where, name, after) in (
                    (spending, "charge", True), (runner, "_steps", False),
                    (runner, "_steps", True),
                ))  # fmt: skip
    found = run(prepared, out, resume=True)
    assert found.usability == free.usability
    assert bits(out) == bits(folder / "free")
    assert spending.read(out).runs[0].epsilon == prepared.report.epsilon
    assert results.load(out).usability == free.usability


def test_the_cost_is_on_record_before_a_record_is_read(folder, monkeypatch):
    prepared, seen = prepare(read_config(folder / "a.toml")), []

    def recorded(*arguments, **options):
        seen.append(spending.read(folder / "out").runs[-1].epsilon)
        raise Stop

    monkeypatch.setattr(runner, "all_steps", recorded)
    with pytest.raises(Stop):
        run(prepared, folder / "out")
    with monkeypatch.context() as patch:
        patch.setattr(RecordsCheck, "release", recorded)
        with pytest.raises(Stop):
            run(prepared, folder / "out", restart=True)
    assert seen == [prepared.report.epsilon, prepared.records_check_report.epsilon]


def test_a_checkpoint_after_the_check_does_not_hold_the_key_of_its_noise(
    folder, fixed_key, monkeypatch
):
    used = []
    real = RecordsCheck.release

    def release(self, rows, *, key, owner):
        used.append(jax.random.key_data(key))
        return real(self, rows, key=key, owner=owner)

    monkeypatch.setattr(RecordsCheck, "release", release)
    monkeypatch.setattr(runner, "all_steps", None)
    with pytest.raises(TypeError):
        run(prepare(read_config(folder / "a.toml")), folder / "out")
    saved = checkpoint.read(folder / "out")
    root = jax.random.key(7)
    later = [jax.random.key_data(k).tolist() for k in (saved.key, root)]
    assert used[0].tolist() not in later
    assert later[0] != later[1]
    assert checkpoint.has_released(folder / "out")


def test_a_limit_refuses_a_run_before_its_check_if_the_whole_is_too_much(folder):
    search.limit_spending(folder / "out", PrivacyBudget(5.0, 1e-4))
    prepared = prepare(read_config(folder / "a.toml"))
    with pytest.raises(ValueError, match="is refused by the limit"):
        run(prepared, folder / "out")
    assert not (folder / "out" / "spending.jsonl").exists()


@pytest.mark.slow
def test_an_accuracy_is_beside_that_of_the_most_frequent_class(folder, capsys):
    (folder / "people.csv").rename(folder / "all.csv")
    rows = [(*row[:3], "no" if i % 4 else "yes") for i, row in enumerate(rows_of(440))]
    write_csv(folder, rows[400:])
    (folder / "people.csv").rename(folder / "test.csv")
    write_csv(folder, rows[:400])
    text = LARGE + TEST.format(kind="counted", records=40)
    (folder / "a.toml").write_text(text)
    out = str(folder / "out")
    assert main(["run", str(folder / "a.toml"), "--out", out]) == 0
    capsys.readouterr()
    assert main(["report", out]) == 0
    said = capsys.readouterr().out.splitlines()
    line = next(v for v in said if v.startswith("test accuracy:"))
    shown = float(line.split("of the best constant answer: about ")[1].split(")")[0])
    assert shown == pytest.approx(0.75, abs=0.15)
    page = folder / "a.html"
    assert main(["report", out, "--html", str(page)]) == 0
    assert "<dt>constant answer</dt>" in page.read_text()
    assert "Usable records: " in page.read_text()


def many(people, relation, size):
    """A config of two levels of the people of `rows_of`, with many records."""
    tables = tomllib.loads(GENERATED)
    del tables["privacy"]["check_records"]
    tables["data"] = tomllib.loads(CSV_DATA) | {"training": size, "validation": size}
    tables["privacy"] |= {"epsilon": 9.0, "people": people, "neighbours": relation}
    return tables


@pytest.mark.parametrize("listed", ["B", *slow("b")])
def test_a_misspelt_source_stops_and_a_listed_one_does_not(tmp_path, listed):
    rows = [
        (*row[:2], "A" if i % 4 else "B", row[3]) for i, row in enumerate(rows_of(1200))
    ]
    write_csv(tmp_path, rows)
    tables = many("disjoint", "replace_one", 600)
    tables["data"]["sources"]["values"] = ["A", listed]
    config = parse_config(tables, Location(str(tmp_path / "a.toml")))
    records = loaded(config)
    columns = dict(config.records_check.columns)
    described = {role: indicators(columns[role], records[role]) for role in records}
    found = config.records_check.release(described, key=jax.random.key(0))
    assert found.levels["lower"].dropped == (() if listed == "B" else ("b",))
    assert found.stops == (listed == "b")
    assert not found.levels["upper"].places


@pytest.mark.slow
@pytest.mark.parametrize(
    ("people", "relation", "roles"),
    [
        ("disjoint", "replace_one", ["upper", "lower"]),
        *slow(
            ("overlapping", "add_or_remove_one", ["upper", "lower"]),
            ("shared", "replace_one", ["upper"]),
        ),
    ],
)
def test_both_levels_are_checked_and_the_one_with_the_sources_for_them(
    tmp_path, people, relation, roles
):
    rows = [
        (*row[:2], "C" if i % 5 else "A", row[3]) for i, row in enumerate(rows_of(600))
    ]
    write_csv(tmp_path, rows)
    size = 300 if people == "disjoint" else 600
    config = parse_config(
        many(people, relation, size), Location(str(tmp_path / "a.toml"))
    )
    columns = dict(config.records_check.columns)
    assert list(columns) == roles
    assert "clinic" in columns[roles[-1]].names
    assert ("clinic" in columns["upper"].names) == (people == "shared")
    records = loaded(config)
    described = {role: indicators(columns[role], records[role]) for role in roles}
    found = config.records_check.release(described, key=jax.random.key(0))
    assert found.stops
    level = found.levels[roles[-1]]
    assert level.wrong == ("clinic",)
    if relation == "replace_one":
        assert level.usable == pytest.approx(0.2, abs=5 * level.noise_std)
    assert set(as_levels(records).lower) == {"features", "label", "source"}


def test_a_cell_changes_the_indicators_of_its_own_record_alone(folder):
    config = read_config(folder / "a.toml")
    columns = config.records_check.columns[0][1]

    def described(cell):
        rows = [list(row) for row in rows_of(400)]
        rows[3][0], rows[3][3] = cell, "maybe"
        write_csv(folder, rows)
        return indicators(columns, config.data.load(folder / "people.csv"))

    first, *others = map(described, ("1", "", "x", "nan", "1e999", "9" * 400))
    for other in others:
        np.testing.assert_array_equal(np.delete(first, 3, 0), np.delete(other, 3, 0))


def test_the_command_for_the_curator_counts_and_marks_every_line(folder, capsys):
    rows = [list(row) for row in rows_of(400)]
    rows[0][0], rows[1][0], rows[2][0], rows[4][3] = "", "12 €", "9e9", "Yes"
    write_csv(folder, [*rows, [*rows[-1], "more"]])
    before = sorted(folder.iterdir())
    path = str(folder / "a.toml")
    assert main(["check", path, "--ids", "town"]) == 0
    said = capsys.readouterr().out
    assert all(line.startswith("NON-PRIVATE: ") for line in said.splitlines())
    yes = sum(row[3] == "yes" for row in rows)
    for text in (
        "people.csv: 401 rows",
        "rows with more or fewer cells than the header, or with an open quote: 1 (",
        "pay: 400 cells, 1 empty",
        "2 unreadable, so that the record has no influence; correct the cells, or "
        "declare unit or decimal (rows 2, 401; the first cell is '12 €')",
        "cut to the bounds; correct mean and scale if values beyond are plausible",
        f"rich: 'no' {399 - yes}, 'yes' {yes}",
        "2 not listed, the record has no influence: 'Yes' 1, '<malformed row>' 1 (rows",
        "town: 2 people, by their number of rows: 1 with ",
    ):
        assert text in said
    assert sorted(folder.iterdir()) == before
    (folder / "a.toml").write_text(MISSPELT)
    assert main(["check", path]) == 0
    assert "no row has 'Yes'" not in capsys.readouterr().out  # row 5 has it
    assert "has no column 'who'" in failure(capsys, "check", path, "--ids", "who")


def test_the_report_names_unlisted_labels_and_the_places_of_the_task(folder):
    config = tomllib.loads(GENERATED)
    for tables, text in (
        (tomllib.loads(LARGE), "Records with an unlisted label are ignored"),
        (config, "Records with an unlisted label or source are ignored"),
    ):
        prepared = prepare(parse_config(tables, Location(str(folder / "a.toml"))))
        assert text in str(prepared.report)


def test_a_file_of_too_few_rows_is_named(folder, capsys):
    path = folder / "a.toml"
    path.write_text(LARGE.replace("training = 400", "training = 401"))
    main(["check", str(path)])
    assert "people.csv: 400 rows, but [data] asks for 401" in capsys.readouterr().out
    path.write_text(LARGE)
    main(["check", str(path)])
    assert "asks for" not in capsys.readouterr().out


@pytest.mark.parametrize("sign", ["\x0b", "\x1c", "\x85", "\u2028", "\x1b[31m"])
def test_no_name_or_cell_begins_a_line_of_its_own(folder, capsys, sign):
    rows = (folder / "people.csv").read_text()
    (folder / "people.csv").write_text(rows.replace("pay", f"a{sign}b", 1))
    assert main(["check", str(folder / "a.toml")]) == 2
    said = capsys.readouterr().out
    assert "NON-PRIVATE:   no column 'pay'" in said
    assert sign not in said


def test_names_close_to_a_misspelt_column_are_for_the_curator_alone(folder, capsys):
    path = folder / "a.toml"
    path.write_text(LARGE.replace('columns = ["pay"]', 'columns = ["payy"]'))
    assert main(["check", str(path)]) == 2
    said = capsys.readouterr()
    assert "NON-PRIVATE:   no column 'payy' (did you mean 'pay'?)" in said.out
    # Without a header the close name would be a cell of a record.
    for text in (
        said.err,
        failure(capsys, "run", str(path), "--out", str(folder / "b")),
    ):
        assert "has no column 'payy'" in text
        assert "'pay'" not in text


def test_no_run_makes_the_check_of_the_curator(folder, monkeypatch):
    from dpbilevel.cli import check

    monkeypatch.setattr(check, "check", None)
    monkeypatch.setattr(check, "_lines", None)
    assert main(["run", str(folder / "a.toml"), "--out", str(folder / "out")]) == 0


def test_a_damaged_line_of_the_record_is_counted(folder):
    out = folder / "out"
    out.mkdir()
    prepared = prepare(read_config(folder / "a.toml"))
    first = prepared.records_check_report
    spending.begin(out, 1, prepared.report, {}, first=first)
    spending.charge(out, 1, prepared.report)
    spending.charge(out, 1, prepared.report)  # once
    started, charged = (out / spending.NAME).read_text().splitlines()
    assert json.loads(charged)["epsilon"] == prepared.report.epsilon
    (out / spending.NAME).write_text(f"{started}\n{charged[:-9]}\n")
    assert not spending.read(out).is_complete
    negative = json.dumps(json.loads(charged) | {"epsilon": -1.0})
    (out / spending.NAME).write_text(f"{started}\n{negative}\n")
    found = spending.read(out)
    assert not found.is_complete
    assert found.runs[0].epsilon == first.epsilon


def test_the_report_of_few_records_says_that_they_are_not_checked(tmp_path):
    (tmp_path / "a.toml").write_text(TRAINING + SETTINGS)
    report = prepare(read_config(tmp_path / "a.toml")).report
    assert any(
        "whether they can be used is not checked" in v for v in report.assumptions
    )
    assert dataclasses.asdict(report)["ledger"][0]["release"] == "gradient"
