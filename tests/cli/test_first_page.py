"""The first page leads from a messy file to a model, a report and predictions."""

import csv
import re
import shlex
from pathlib import Path

import pytest

from dpbilevel.cli.main import main

PAGE = (Path(__file__).parents[2] / "docs" / "getting_started.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.slow
def test_the_commands_of_the_page_run_in_their_order(
    tmp_path, monkeypatch, capsys, one_candidate
):
    monkeypatch.chdir(tmp_path)
    exec(compile(blocks("python")[0], "docs/getting_started.md", "exec"), {})
    (missing,) = blocks("toml")
    said = {}
    for line in "".join(blocks("sh")).replace("\\\n", "").splitlines():
        program, *arguments = shlex.split(line)
        if program != "dpbilevel":
            continue
        assert main(arguments) == 0, line
        said[arguments[0]] = capsys.readouterr().out
        if arguments[0] == "check":
            config = Path("task.toml").read_text()
            Path("task.toml").write_text(
                config.replace("[data]\n", "[data]\n" + missing)
            )
    assert "give missing = ['n/a'] in [data]" in said["check"]
    assert "can be read with unit" not in said["check"]
    assert "protects: one person (at most 3 rows each)" in said["run"]
    assert "without an answer" not in said["predict"]
    assert Path("report.html").is_file()
    with Path("predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["readmitted"] for row in rows} == {"yes", "no"}
