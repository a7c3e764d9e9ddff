"""dpbilevel init: a config from public facts, without a look at the records."""

import builtins
import tomllib

import numpy as np
import pytest

from dpbilevel.cli import facts, init
from dpbilevel.cli.auto import read_for_run
from dpbilevel.cli.columns import Table
from dpbilevel.cli.draft import TASKS
from dpbilevel.cli.facts import Range
from dpbilevel.cli.main import main
from dpbilevel.cli.prepared import prepare
from tests.cli.test_cli import failure

HEADER = "age,dose,ward,site,sick"
ROWS = [
    f"{20 + i},{i / 7:.2f},{'ABC'[i % 3]},{['north,no', 'south,yes'][i % 2]}"
    for i in range(40)
]
TRAINING = ["--label", "sick", "--positive", "yes", "--negative", "no"]
TWO_LEVELS = "source_weighting", "penalty_tuning"
FEATURES = ["--column", "age=0..100", "--column", "ward=A,B,C", "--records", "40"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """People and clean records; nobody answers questions."""
    (tmp_path / "people.csv").write_text("\n".join([HEADER, *ROWS]) + "\n")
    (tmp_path / "clean.csv").write_text("\n".join([HEADER, *ROWS[:9]]) + "\n")
    monkeypatch.chdir(tmp_path)

    def closed(question):
        raise EOFError

    monkeypatch.setattr(builtins, "input", closed)
    return tmp_path


def answer(monkeypatch, *answers):
    """Types these answers; returns the questions that were asked."""
    left, asked = list(answers), []

    def typed(question):
        asked.append(question)
        if not left:
            raise EOFError
        return left.pop(0)

    monkeypatch.setattr(builtins, "input", typed)
    return asked


def config_of(folder, *flags):
    assert main(["init", "people.csv", *flags]) == 0
    config, planned = read_for_run(str(folder / "task.toml"))
    return config, planned, (folder / "task.toml").read_text()


def test_flags_alone_write_a_config(folder):
    config, planned, text = config_of(folder, *TRAINING, *FEATURES)
    assert not planned
    assert config.task_name == "training"
    assert config.data.features == (
        "age", "ward = A", "ward = B", "ward = C", "constant"
    )  # fmt: skip
    assert (config.data.training, config.data.path) == (40, "people.csv")
    assert (config.privacy.epsilon, config.privacy.delta) == (1.0, 1e-3)
    assert "typed for dpbilevel init, which read no value of a record" in text


@pytest.mark.filterwarnings("default:auto. The plan")
def test_one_command_writes_a_config_and_runs_it(folder, capsys):
    argv = ["init", "people.csv", *TRAINING, *FEATURES, "--run", "runs/a"]
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert "result: runs/a" in out
    assert "may be worse than the best constant answer" in err
    assert (folder / "runs/a/result.json").exists()
    said = failure(capsys, *argv, "--out", "b.toml")
    assert "runs/a exists; give --run the name of a new folder" in said
    assert not (folder / "b.toml").exists()


def test_bounds_are_the_ends_of_what_a_model_sees(folder):
    config, _, _ = config_of(folder, *TRAINING, *FEATURES)
    table = Table("a", {"age": ["0", "50", "100", "120", "25"]}, 5)
    (block,) = config.data.numeric
    seen = block.encode(table)[0][:, 0]
    np.testing.assert_allclose(seen, [-1, 0, 1, 1, -0.5], atol=1e-5)


def test_typed_answers_are_checked_and_asked_again(folder, monkeypatch, capsys):
    asked = answer(
        monkeypatch, "", "sik", "sick", "", "yes", "yes", "no", "100..0", "A",
        "0..100", "-", "A, B, C", "", "", "many", "40", "0", "2", "", "-",
    )  # fmt: skip
    config, _, _ = config_of(folder)
    said = capsys.readouterr().out
    assert "give one of age, dose, ward, site, sick" in said
    assert "an answer is needed" in said
    assert "no value can be in both classes" in said
    assert "a range must be increasing" in said
    assert "the values of a category, separated by commas" in said
    assert "give an integer, got many" in said
    assert "give a number above 0" in said
    assert config.privacy.epsilon == 2.0
    assert len(asked) == 20
    assert [c.column for c in config.data.categorical] == ["ward"]


def test_nothing_of_a_record_changes_what_is_said_or_written(folder, capsys):
    seen = []
    for rows in (ROWS, ["nothing", "but,text,,"]):
        (folder / "people.csv").write_text("\n".join([HEADER, *rows]))
        (folder / "task.toml").unlink(missing_ok=True)
        _, _, text = config_of(folder, *TRAINING, *FEATURES)
        seen.append((text, capsys.readouterr().out))
    assert seen[0] == seen[1]


def test_rows_are_counted_only_where_that_is_asked_for(folder, monkeypatch, capsys):
    flags = [*TRAINING, *FEATURES[:4]]
    config, _, _ = config_of(folder, *flags, "--records", "count")
    assert config.data.training == 40
    (folder / "task.toml").unlink()
    relation = ["--neighbours", "add_or_remove_one", "--records", "count"]
    said = failure(capsys, "init", "people.csv", *flags, *relation)
    assert "--records count: give an integer" in said
    monkeypatch.setattr(facts, "read_csv", None)  # which nothing else calls
    config_of(folder, *flags, "--records", "40")


def test_a_public_file_proposes_what_is_in_it_and_the_config_says_so(folder):
    config, _, text = config_of(
        folder, "--public", "--label", "sick", "--records", "count"
    )
    assert "read from the file, which was declared public" in text
    label = config.data.label
    assert (label.positive, label.negative) == (("yes",), ("no",))
    assert [b.name for b in config.data.numeric] == ["age", "dose"]
    values = {c.column: c.values for c in config.data.categorical}
    assert values == {"ward": ("A", "B", "C"), "site": ("north", "south")}
    assert "# From 20 to 59" in text


@pytest.mark.parametrize("task", TASKS)
def test_every_task_gets_a_config_of_its_own(folder, task, capsys):
    flags = ["--task", task, *TRAINING, *FEATURES]
    if task == "source_weighting":
        flags += ["--sources", "site=north,south", "--clean", "people.csv"]
        same = failure(capsys, "init", "people.csv", *flags, "--people", "disjoint")
        assert "people.csv holds the training records" in same
        flags[-1] = "clean.csv"
        said = failure(
            capsys, "init", "people.csv", *flags[:-2], "--people", "disjoint"
        )
        assert "give --clean" in said  # no random part of records that are judged
        flags += ["--validation", "count"]
    if task in TWO_LEVELS:
        assert "give --people" in failure(capsys, "init", "people.csv", *flags)
        flags += ["--people", "overlapping"]
    if task.startswith("group"):
        flags += ["--groups", "site=north,south", "--shares", "0.3, 0.7"]
    config, planned, _ = config_of(folder, *flags)
    assert config.task_name == task
    # What has its solver, as games have, is not planned by dry runs.
    assert ("dpbilevel auto task.toml" in capsys.readouterr().out) != planned
    if task == "source_weighting":
        sizes = config.data.training, config.data.validation
        assert (*sizes, config.data.validation_path) == (40, 9, "clean.csv")
    elif task == "penalty_tuning":
        assert (config.data.training, config.data.validation) == (32, 8)
    elif task.startswith("group"):
        assert planned
        assert prepare(config).report.epsilon <= 1.0
        assert config.task.shares == (0.3, 0.7)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["training", "source_weighting", "penalty_tuning"])
def test_what_is_written_is_calibrated_as_it_is(folder, task, capsys):
    flags = ["--task", task, *TRAINING, *FEATURES[:4], "--records", "4000"]
    if task == "source_weighting":
        flags += ["--sources", "site=north,south", "--clean", "-"]
    if task in TWO_LEVELS:
        flags += ["--people", "disjoint"]
    config_of(folder, *flags)
    assert main(["calibrate", "task.toml"]) == 0
    assert "ENFORCED" in capsys.readouterr().out


def test_a_numeric_label_makes_a_model_of_numbers(folder):
    config, _, _ = config_of(
        folder, "--label", "dose", "--label-range", "0..6", *FEATURES
    )
    assert config.task.loss == "squared"
    values, _ = config.data.label.encode(Table("a", {"dose": ["0", "3", "9"]}, 3))
    np.testing.assert_allclose(values, [-1, 0, 1], atol=1e-5)


def test_a_test_file_is_declared_with_what_protects_it(folder):
    flags = ["--test", "clean.csv", "--test-accuracy", "counted"]
    config, _, _ = config_of(
        folder, *TRAINING, *FEATURES, *flags, "--test-records", "count"
    )
    assert (config.data.test.accuracy, config.data.test.records) == ("counted", 9)


def test_semicolons_quotes_and_odd_names_come_through(folder):
    names = ["age; years", 'the "ward"', "sick"]
    quoted = ['"age; years"', '"the ""ward"""', "sick"]
    (folder / "people.csv").write_text(";".join(quoted) + "\n")
    config, _, text = config_of(
        folder, "--label", "sick", "--positive", '"yes, very",1', "--negative", "0,no",
        "--column", "age; years=0..9", "--column", 'the "ward"=1,02', "--records", "9",
    )  # fmt: skip
    assert config.data.separator == ";"
    assert config.data.label.positive == ("yes, very", 1)
    assert tomllib.loads(text)["data"]["categorical"][0]["values"] == [1, "02"]
    assert [config.data.numeric[0].name, config.data.categorical[0].name] == names[:2]


def test_paths_are_relative_to_the_config(folder):
    (folder / "configs").mkdir()
    flags = [*TRAINING, *FEATURES, "--out", "configs/a.toml"]
    assert main(["init", "people.csv", *flags]) == 0
    config, _ = read_for_run("configs/a.toml")
    assert config.data.path == "../people.csv"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "there is no answer to 'column of the label'; give --label"),
        (["--label", "sik"], "--label sik: 'sik' is no column; give one of age, dose"),
        (["--task", "classify"], "--task classify: give one of training"),
        (TRAINING, "no column was given as a feature"),
        ([*TRAINING, "--column", "age"], "--column age: give LOW..HIGH"),
        (
            [*TRAINING, "--column", "sick=A,B"],
            "--column sick=A,B: 'sick' has a role already; give one of age, dose",
        ),
        (
            [*TRAINING, *FEATURES, "--delta", "0.1"],
            "--delta 0.1: give less than one over the number of records, 0.025",
        ),
        ([*TRAINING, *FEATURES, "--delta", "2"], "above 0 and below 1"),
        ([*TRAINING, *FEATURES, "--test", "no.csv"], "there is no file no.csv"),
        (
            [*TRAINING, *FEATURES, "--test", "people.csv"],
            "people.csv holds the training records; give a file of others",
        ),
        (
            [*TRAINING, *FEATURES, "--column", "age=1..3"],
            "--column age=1..3: 'age' has a role already",
        ),
        (
            [*TRAINING, "--task", "source_weighting", "--sources", "site=north"],
            "--sources site=north: give two sources at least",
        ),
        (
            [*TRAINING, *FEATURES, "--task", "penalty_tuning", "--records", "1"],
            "--records 1: give an integer above 1",
        ),
        ([*TRAINING, *FEATURES, "--out", "no/a.toml"], "there is no folder no"),
        ([*TRAINING, *FEATURES, "--out", "people.csv"], "people.csv exists"),
    ],
)
def test_what_cannot_be_used_is_said_and_nothing_is_written(
    folder, capsys, flags, said
):
    assert said in failure(capsys, "init", "people.csv", *flags)
    assert not (folder / "task.toml").exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "is empty; it needs a header"),
        ("1,2,3\n", "has a number or nothing in the place of a name"),
        ("a,,b\n", "has a number or nothing in the place of a name"),
        (f"a,{'9' * 400}\n", "has a number or nothing in the place of a name"),
        ("a,a\n", "names a column twice"),
        (None, "there is no file people.csv"),
    ],
)
def test_a_file_without_a_header_is_refused(folder, capsys, content, said):
    (folder / "people.csv").unlink()
    if content is not None:
        (folder / "people.csv").write_text(content)
    assert said in failure(capsys, "init", "people.csv")


def test_a_config_in_the_place_of_records_is_refused(folder, capsys):
    (folder / "a.toml").write_text("[data]\n")
    said = failure(capsys, "init", "a.toml")
    assert "a.toml is a config; give the CSV file of the records" in said


def test_an_interrupt_writes_nothing(folder, monkeypatch, capsys):
    def stop(question):
        raise KeyboardInterrupt

    monkeypatch.setattr(builtins, "input", stop)
    assert main(["init", "people.csv"]) == 130
    assert "nothing was written" in capsys.readouterr().err
    assert not (folder / "task.toml").exists()


def test_ranges_and_values_are_read_as_they_are_shown():
    for text in ("0..100", "-1.5..2e3", 'A, "B, C", 3'):
        content = facts.content_of(text)
        assert facts.content_of(facts.shown(content)) == content
    assert facts.range_of(" .5 .. 1. ") == Range(0.5, 1.0)
    with pytest.raises(ValueError, match="different values"):
        facts.values_of("A, A")


@pytest.mark.parametrize(("records", "delta"), [(1, 1e-1), (900, 1e-4), (1000, 1e-4)])
def test_delta_is_at_most_a_tenth_over_the_number_of_records(records, delta):
    assert float(init._delta(records)) == delta
