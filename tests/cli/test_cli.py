import contextlib
import dataclasses
import importlib.util
import io
import shutil

import pytest

import dpbilevel as dpb
from dpbilevel.cli.main import main
from dpbilevel.runs import checkpoint
from tests.cli.test_runner import CSV_DATA, GENERATED, rows_of, write_csv


def csv_config():
    head, rest = GENERATED.replace("check_records = false\n", "").split("[data]")
    model = rest[rest.index("[model]") :]
    nested = CSV_DATA.replace("[[", "[[data.").replace("[label", "[data.label")
    return f"{head}[data]{nested.replace('[sources', '[data.sources')}\n{model}"


@pytest.fixture
def config(tmp_path):
    file = tmp_path / "a.toml"
    file.write_text(GENERATED)
    return str(file)


@dataclasses.dataclass
class Finished:
    config: str
    out: str
    stdout: str
    stderr: str


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    (folder / "a.toml").write_text(GENERATED)
    config, out = str(folder / "a.toml"), str(folder / "out")
    stdout, stderr = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        assert main(["run", config, "--out", out]) == 0
    return Finished(config, out, stdout.getvalue(), stderr.getvalue())


@pytest.fixture
def config_of_csv(tmp_path):
    file = tmp_path / "csv.toml"
    file.write_text(csv_config())
    return str(file)


def failure(capsys, *arguments):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    last = captured.err.splitlines()[-1]
    assert last.startswith("dpbilevel: error: ")
    assert "Traceback" not in captured.err
    return last


def test_calibrate_needs_no_records(config_of_csv, capsys):
    assert main(["calibrate", config_of_csv]) == 0
    assert "ENFORCED: epsilon = 1 at delta = 1e-05" in capsys.readouterr().out


def test_report_tells_the_values_and_the_guarantee_that_the_run_printed(
    finished, capsys
):
    assert main(["report", finished.out]) == 0
    told = capsys.readouterr().out
    assert told.startswith("released weight of each source:\n  source 0  0.")
    guarantee = "\n".join(finished.stdout.splitlines()[:10])
    assert guarantee.startswith("ENFORCED: epsilon = 1")
    assert f"\n\n{guarantee}\n" in told
    assert "the weight of a source without records says nothing" in told


def test_progress_goes_to_stderr(finished):
    assert "4/4" in finished.stderr
    assert "4/4" not in finished.stdout


def test_printed_text_does_not_depend_on_the_records(config_of_csv, tmp_path, capsys):
    pages = []
    rows = rows_of(60)
    for cell in ("3.0", "nan"):
        rows[-1][0] = cell
        write_csv(tmp_path, rows)
        assert main(["run", config_of_csv, "--out", str(tmp_path / "out")]) == 0
        pages.append(capsys.readouterr().out)
        shutil.rmtree(tmp_path / "out")
    assert pages[0] == pages[1]


@pytest.mark.slow
def test_data_flag_replaces_the_file_of_the_config(config_of_csv, tmp_path):
    (tmp_path / "other").mkdir()
    write_csv(tmp_path / "other", rows_of(60))
    command = ["run", config_of_csv, "--out", str(tmp_path / "out")]
    assert main([*command, "--data", str(tmp_path / "other" / "people.csv")]) == 0


def test_second_run_into_a_folder_is_refused(finished, capsys):
    text = failure(capsys, "run", finished.config, "--out", finished.out)
    assert "For a second release, give a new folder, or --restart" in text


def test_resume_of_nothing_is_refused(config, tmp_path, capsys):
    out = str(tmp_path / "out")
    text = failure(capsys, "run", config, "--out", out, "--resume")
    assert "nothing to resume" in text


def test_mistake_in_a_config_is_one_line(config, tmp_path, capsys):
    bad = tmp_path / "bad.toml"
    bad.write_text(GENERATED.replace("epsilon", "epsilom"))
    text = failure(capsys, "calibrate", str(bad))
    assert (
        "bad.toml: [privacy]: unknown key 'epsilom' (did you mean 'epsilon'?)" in text
    )


def test_missing_file_of_records_is_one_line(config_of_csv, tmp_path, capsys):
    text = failure(capsys, "run", config_of_csv, "--out", str(tmp_path / "out"))
    assert "csv.toml: [data]: no file of records at" in text
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["chekc", "a.toml"], "check"),
        (["run", "a.toml", "--out", "b", "--dataa", "c"], "--data"),
        (["init", "a.csv", "--task", "trainig"], "training"),
    ],
)
def test_a_misspelt_command_option_or_value_is_named_with_the_meant_one(
    arguments, meant, capsys
):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert capsys.readouterr().err.endswith(f"(did you mean {meant!r}?)\n")


def test_a_misspelt_path_is_named_with_the_meant_one(config_of_csv, tmp_path, capsys):
    (tmp_path / "poeple.csv").write_text("")
    text = failure(capsys, "calibrate", config_of_csv.replace(".toml", ".tml"))
    assert "No such file or directory (did you mean 'csv.toml'?)" in text
    text = failure(capsys, "run", config_of_csv, "--out", str(tmp_path / "out"))
    assert "poeple.csv" not in text  # a file of records may be named after a person
    (tmp_path / "runs").mkdir()
    text = failure(capsys, "report", str(tmp_path / "runns"))
    assert "there is no such folder (did you mean 'runs'?)" in text


def test_unusable_folder_is_one_line(config, tmp_path, capsys):
    out = str(tmp_path / "a.toml" / "out")
    assert "cannot lock the folder" in failure(capsys, "run", config, "--out", out)


def test_report_of_no_run_is_one_line(tmp_path, capsys):
    text = failure(capsys, "report", str(tmp_path / "no"))
    assert text.endswith("holds no finished run: there is no such folder.")
    assert "has no result.json" in failure(capsys, "report", str(tmp_path))


def test_report_of_something_else_names_its_kind(config, tmp_path, capsys):
    assert "it is a file" in failure(capsys, "report", config)
    (tmp_path / checkpoint.SEARCH).write_text("{}")
    assert "the folder of a search" in failure(capsys, "report", str(tmp_path))


def test_report_of_an_interrupted_restart_tells_of_the_finished_run(
    finished, tmp_path, capsys
):
    out = tmp_path / "out"
    shutil.copytree(finished.out, out / "run-1")
    (out / checkpoint.NAME).write_bytes(b"")
    text = failure(capsys, "report", str(out))
    assert (
        f"--resume; an earlier one finished, see dpbilevel report {out}/run-1" in text
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--resume", "--restart"], "give --resume"),
        (["--resume"], "nothing to resume"),
        (["--data", "no.csv"], "[data]: no file of records at no.csv"),
        (["--out", "."], "is not empty"),
        (["--out", "csv.toml"], "is a file"),
    ],
)
def test_mistake_in_an_option_is_told_before_any_plan(
    config_of_csv, tmp_path, capsys, monkeypatch, options, message
):
    monkeypatch.chdir(tmp_path)
    assert main(["run", config_of_csv, "--out", "out", *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert not (tmp_path / "out").exists()


def test_negative_ridge_is_told_with_file_and_table(config, tmp_path, capsys):
    bad = tmp_path / "bad.toml"
    bad.write_text(GENERATED.replace("ridge = 0.01", "ridge = -1"))
    text = failure(capsys, "calibrate", str(bad))
    assert "bad.toml: [model]: source_weighting: ridge must be non-negative" in text


def test_missing_extra_says_what_to_install(config, tmp_path, capsys, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "tqdm" else find(name)
    )
    text = failure(capsys, "run", config, "--out", str(tmp_path / "out"))
    assert "needs tqdm: run pip install -e '.[cli]' in a clone" in text


def test_version_is_printed(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out.strip() == dpb.__version__
