"""The page of the command line says what the command line does."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from dpbilevel.cli.init import OFFERED
from dpbilevel.cli.main import _parser, main
from dpbilevel.cli.plans import read_for_run

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "command_line.md").read_text()
BLOCKS = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [
    shlex.split(line)
    for block in BLOCKS
    for line in block.replace("\\\n", "").splitlines()
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: "-".join(c[1:3]))
def test_every_command_of_the_page_is_one(command):
    assert command[0] == "dpbilevel"
    _parser().parse_args(command[1:])


def test_every_flag_of_init_is_on_the_page(capsys):
    with pytest.raises(SystemExit, match="0"):
        _parser().parse_args(["init", "--help"])
    flags = set(re.findall(r"--[a-z][a-z-]*", capsys.readouterr().out)) - {"--help"}
    listed = PAGE.split("| flag | meaning |")[1].split("\n\n")[0]
    assert flags == set(re.findall(r"--[a-z][a-z-]*", listed))


def test_every_task_of_init_is_on_the_page():
    row = re.search(r"^\| `--task` \|.*$", PAGE, re.MULTILINE)[0]
    missing = [name for name in OFFERED if f"`{name}`" not in row]
    assert not missing, f"docs/command_line.md: add {missing} to the row `--task`"


def test_every_message_of_the_page_is_one_of_the_code():
    texts = (path.read_text() for path in (ROOT / "dpbilevel" / "cli").glob("*.py"))
    code = re.sub(r'"\s*\n\s*f?"', "", "\n".join(texts))  # of literals in several lines
    listed = PAGE.split("| message | what to do |")[1].split("\n\n")[0]
    messages = re.findall(r"^\| `([^`]+)` \|", listed, re.MULTILINE)
    assert len(messages) == 16
    for message in messages:
        assert message in code, message


def test_the_page_leads_from_a_file_to_a_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    head = re.search(r"^id,age.*$", PAGE, re.MULTILINE)[0]
    rng = np.random.default_rng(0)
    for name, count in (("customers", 6000), ("test", 1000)):
        rows = [f"{i},{rng.integers(18, 99)},1,N,nurse,shop1,1" for i in range(count)]
        (tmp_path / f"{name}.csv").write_text("\n".join([head, *rows]) + "\n")
    (command,) = [c for c in COMMANDS if "--label" in c and "--run" not in c]
    assert main(command[1:]) == 0
    config, _ = read_for_run("task.toml")
    names = re.findall(r"^  ([a-z].*?)  +-?\d\.\d{4}$", PAGE, re.MULTILINE)
    assert config.data.features == tuple(names)
    assert (config.data.training, config.data.test.records) == (6000, 1000)
