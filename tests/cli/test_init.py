"""dpbilevel init: a config from public facts, without a look at the records."""

import re
import tomllib

import numpy as np
import pytest

from dpbilevel.cli import init
from dpbilevel.cli.init import OFFERED, Range
from dpbilevel.cli.main import main
from dpbilevel.cli.plans import prepare, read_for_run
from dpbilevel.cli.tables import Table
from dpbilevel.cli.tasks import TASKS
from tests.cli.test_cli import failure

HEADER = "age,dose,ward,site,sick"
ROWS = [
    f"{20 + i},{i / 7:.2f},{'ABC'[i % 3]},{['north,no', 'south,yes'][i % 2]}"
    for i in range(40)
]
OF_NUMBERS = ()  # tasks that refuse classes
NUMBER = ["--label", "dose", "--label-range", "0..6"]
TRAINING = ["--label", "sick", "--positive", "yes", "--negative", "no"]
FEATURES = ["--column", "age=0..100", "--column", "ward=A,B,C", "--records", "40"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """People and clean records."""
    (tmp_path / "people.csv").write_text("\n".join([HEADER, *ROWS]) + "\n")
    (tmp_path / "clean.csv").write_text("\n".join([HEADER, *ROWS[:9]]) + "\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def flags_of(task, clean=("clean.csv", "--validation", "count"), people="overlapping"):
    """Flags that declare the records for a task; name one of numbers in OF_NUMBERS."""
    label = NUMBER if task in OF_NUMBERS else TRAINING
    flags, task = ["--task", task, *label, *FEATURES[:4]], TASKS[task]
    if task.places == "sources":
        flags += ["--sources", "site=north,south", "--clean", *clean]
    if task.places == "groups":
        flags += ["--groups", "site=north,south", "--shares", "0.3, 0.7"]
    return flags + ["--people", people] * task.two_levels


def config_of(folder, *flags):
    assert main(["init", "people.csv", *flags]) == 0, f"dpbilevel init {[*flags]}"
    config, planned = read_for_run(str(folder / "task.toml"))
    return config, planned, (folder / "task.toml").read_text()


def test_flags_alone_write_a_config(folder):
    config, planned, text = config_of(folder, *TRAINING, *FEATURES)
    assert not planned
    assert config.task.name == "training"
    assert config.data.features == (
        "age", "ward = A", "ward = B", "ward = C", "constant"
    )  # fmt: skip
    assert (config.data.training, config.data.path) == (40, "people.csv")
    assert (config.privacy.epsilon, config.privacy.delta) == (1.0, 1e-3)
    assert "Give what is known without the records" in text


def test_one_command_writes_a_config_and_runs_it(folder, capsys, one_candidate):
    argv = ["init", "people.csv", *TRAINING, *FEATURES, "--run", "runs/a"]
    argv += ["--epsilon", "0.01"]  # at which no plan is better than a constant
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert "result: runs/a" in out
    assert (out + err).count("may be worse than the best constant answer") == 1
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


@pytest.mark.parametrize("task", OFFERED)
def test_a_template_names_what_is_missing_and_holds_once_it_is_filled_in(
    folder, task, capsys
):
    """A task whose label is a number is named in OF_NUMBERS."""
    label = NUMBER if task in OF_NUMBERS else []
    assert main(["init", "people.csv", "--task", task, *label]) == 0
    said = capsys.readouterr().out
    flags = [] if label else ["label", "label-range, or --positive and --negative"]
    flags += ["column", "records"]
    flags += ["people", "validation"] if TASKS[task].two_levels else []
    flags += {"sources": ["sources", "clean"], "groups": ["groups"]}.get(
        TASKS[task].places, []
    )
    assert all(f"--{flag}" in said for flag in flags)
    text = (folder / "task.toml").read_text()
    keys = re.findall(r"^# (\w+) = .*# REQUIRED: ", text, re.MULTILINE)
    refused = failure(capsys, "calibrate", "task.toml")
    assert "required facts are missing: " in refused
    assert all(f"{key} in line " in refused for key in keys)
    # What is filled in here stands in the template as an example.
    text = re.sub(r"^# features .*\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"^# (.*# REQUIRED: )", r"\1", text, flags=re.MULTILINE)
    text = text.replace('    # {name = "age"', '    {name = "age"')
    (folder / "task.toml").write_text(text)
    config, _ = read_for_run(str(folder / "task.toml"))
    assert config.task.name == task
    assert config.data.features == ("age", "constant")


def test_a_run_needs_all_facts_and_names_those_that_are_missing(folder, capsys):
    argv = ["init", "people.csv", "--label", "sick", "--run", "runs/a"]
    said = failure(capsys, *argv)
    assert "--positive and --negative, or --classes, --column, --records" in said
    assert not (folder / "task.toml").exists()


def test_a_template_explains_every_key(folder):
    for task in OFFERED:
        (folder / "task.toml").unlink(missing_ok=True)
        assert main(["init", "people.csv", "--task", task]) == 0
        lines = (folder / "task.toml").read_text().splitlines()
        keys = [s for s in lines if re.match(r"(# )?[a-z_]+ = [^\[]", s)]
        assert len(keys) > 8
        assert [s for s in keys if "  # " not in s] == []


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
    assert "--records count publishes the size" in said
    monkeypatch.setattr(init, "read_table", None)  # which nothing else calls
    config_of(folder, *flags, "--records", "40")


@pytest.mark.parametrize("task", OFFERED)
def test_every_task_gets_a_config_of_its_own(folder, task, capsys):
    config, planned, _ = config_of(folder, *flags_of(task), "--records", "40")
    assert config.task.name == task
    # What has its solver, as games have, is not planned by dry runs.
    assert ("dpbilevel auto task.toml" in capsys.readouterr().out) != planned
    if task == "source_weighting":
        sizes = config.data.training, config.data.validation
        assert (*sizes, config.data.validation_path) == (40, 9, "clean.csv")
    elif task == "penalty_tuning":
        assert (config.data.training, config.data.validation) == (32, 8)
    elif TASKS[task].places == "groups":
        assert planned
        assert prepare(config).report.epsilon <= 1.0
        assert config.model.shares == (0.3, 0.7)


def with_comments(folder, text):
    """The config with every key that the template of `[model]` has in a comment."""
    before, model = text.split("\n[model]\n")
    model = re.sub(r"^# (\w+ = )", r"\1", model, flags=re.MULTILINE)
    (folder / "offered.toml").write_text(f"{before}\n[model]\n{model}")
    return read_for_run(str(folder / "offered.toml"))[0]


@pytest.mark.parametrize("task", OFFERED)
def test_every_key_that_a_template_offers_is_one_of_the_model(folder, task):
    text = config_of(folder, *flags_of(task), "--records", "40")[2]
    assert with_comments(folder, text).task.name == task
    wrong = text.replace("\n[model]\n", "\n[model]\n# unheard = 1\n")
    with pytest.raises(ValueError, match="unheard"):
        with_comments(folder, wrong)


@pytest.mark.slow
@pytest.mark.parametrize("task", OFFERED)
def test_what_is_written_is_calibrated_as_it_is(folder, task, capsys):
    config_of(folder, *flags_of(task, ["-"], "disjoint"), "--records", "4000")
    assert main(["calibrate", "task.toml"]) == 0
    assert "ENFORCED" in capsys.readouterr().out


def test_a_numeric_label_makes_a_model_of_numbers(folder):
    config, _, _ = config_of(folder, *NUMBER, *FEATURES)
    assert config.model.loss == "squared"
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
    data = config.data
    assert [data.numeric[0].name, data.categorical[0].column] == names[:2]


def test_paths_are_relative_to_the_config(folder):
    (folder / "configs").mkdir()
    flags = [*TRAINING, *FEATURES, "--out", "configs/a.toml"]
    assert main(["init", "people.csv", *flags]) == 0
    config, _ = read_for_run("configs/a.toml")
    assert config.data.path == "../people.csv"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--label", "sik"],
            "of people.csv (did you mean 'sick'?); give one of age, dose",
        ),
        ([*TRAINING, "--column", "age"], "--column age has no '='; give NAME=VALUE"),
        ([*TRAINING, "--column", "age=A"], "cannot read 'A'; give LOW..HIGH"),
        ([*TRAINING, "--column", "age=1.1.2000..2.1.2000"], "31 %d.%m.%Y."),
        ([*TRAINING, "--column", "age=9..1"], "the range 9..1 must be increasing"),
        ([*TRAINING, "--column", "sick=A,B"], "the column 'sick' is named twice"),
        (
            [*TRAINING, *FEATURES, "--delta", "0.1"],
            "delta = 0.1 is not below one over the number of records",
        ),
        ([*TRAINING, *FEATURES, "--delta", "2"], "delta must be below 1"),
        ([*TRAINING, *FEATURES, "--epsilon", "0"], "epsilon must be positive"),
        ([*TRAINING, *FEATURES, "--records", "many"], "--records many is not an integ"),
        ([*TRAINING, *FEATURES, "--test", "no.csv"], "no file of --test at no.csv"),
        ([*TRAINING, "--most-rows", "3"], "--most-rows needs --person; give that"),
        ([*TRAINING, "--sources", "site=a,b"], "--sources needs --task source_weigh"),
        ([*TRAINING, "--people", "disjoint"], "--people needs a --task of two levels"),
        (
            [*TRAINING, *FEATURES, "--column", "age=1..3"],
            "the column 'age' is named twice; give it one role",
        ),
        (
            [
                *TRAINING,
                *FEATURES,
                "--task",
                "penalty_tuning",
                "--records",
                "1",
                "--people",
                "disjoint",
            ],
            "training must be at least 1",
        ),
        ([*FEATURES, "--label", "dose", "--label-range", "1,2"], "is not LOW..HIGH"),
        (
            ["--task", "source_weighting", "--sources", "site=north"],
            "--sources site=north is one source; give two or more",
        ),
        (
            ["--task", "group_fair", "--label-range", "0..1"],
            "--task group_fair has classes; leave out --label-range",
        ),
        (
            [*TRAINING, *FEATURES, "--positive", "yes,no"],
            "positive and negative",
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
    "flags",
    [["--task", "classify"], ["--people", "shared"], ["--epsilon", "much"]],
)
def test_words_that_no_flag_has_are_refused_with_those_that_it_has(
    folder, capsys, flags
):
    with pytest.raises(SystemExit, match="2"):
        main(["init", "people.csv", *flags])
    assert f"argument {flags[0]}: invalid" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "is empty; it needs a header"),
        ("1,2,3\n", "is a number or empty"),
        ("a,,b\n", "is a number or empty"),
        (f"a,{'9' * 400}\n", "is a number or empty"),
        ("a,a\n", "names a column twice"),
        (None, "no file of records at people.csv"),
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
    def stop(flags):
        raise KeyboardInterrupt

    monkeypatch.setattr(init, "draft", stop)
    assert main(["init", "people.csv"]) == 130
    assert "nothing was written" in capsys.readouterr().err
    assert not (folder / "task.toml").exists()


def test_names_of_columns_stay_inside_of_comments(folder):
    (folder / "people.csv").write_text('"a # epsilon = 9","b","c"\n')
    assert main(["init", "people.csv", "--label", "c"]) == 0
    tables = tomllib.loads((folder / "task.toml").read_text())
    assert tables["privacy"]["epsilon"] == 1
    assert [*tables] == ["task", "privacy", "data", "model"]


def test_ranges_and_values_are_read_as_they_are_typed():
    assert init.content_of("-1.5..2e3") == Range(-1.5, 2000.0)
    assert init.content_of('A, "B, C", 3') == ("A", "B, C", 3)
    assert init.content_of(" .5 .. 1. €") == Range(0.5, 1.0, "€")
    with pytest.raises(ValueError, match="different values"):
        init.values_of("A, A")


@pytest.mark.parametrize(("records", "delta"), [(1, 1e-1), (900, 1e-4), (1000, 1e-4)])
def test_delta_is_at_most_a_tenth_over_the_number_of_records(records, delta):
    assert float(init._delta(records)) == delta
