"""Runs of the command line with cryptographic keys, and with correlated noise."""

import json
import shutil
import tomllib

import jax
import numpy as np
import pytest

from dpbilevel.cli import run as runner
from dpbilevel.cli.config import parse_config
from dpbilevel.cli.plans import prepare
from dpbilevel.cli.run import run
from dpbilevel.cli.toml_tables import Location
from dpbilevel.privacy.keys import wrapped
from dpbilevel.privacy.report import CRYPTOGRAPHIC, GENERATOR
from dpbilevel.runs import checkpoint
from tests.cli.test_csv_files import SETTINGS, TRAINING
from tests.cli.test_runner import bits, rows_of, write_csv

SECURE = TRAINING.replace("[data]", 'randomness = "chacha20"\n[data]', 1)
CORRELATED = SETTINGS.replace("NoisyGD", "CorrelatedGD") + "feedback = [0.5, 0.125]\n"


def parsed(folder, text):
    tables = tomllib.loads(text)
    tables["privacy"]["check_records"] = False
    return parse_config(tables, Location(str(folder / "a.toml")))


def test_a_secure_run_with_correlated_noise_resumes_with_the_same_bits(
    tmp_path, monkeypatch
):
    write_csv(tmp_path, rows_of(60))
    asked = []

    def root_key(randomness):
        asked.append(randomness)
        return wrapped(np.arange(8, dtype=np.uint32), randomness)

    monkeypatch.setattr(runner, "root_key", root_key)
    prepared = prepare(parsed(tmp_path, SECURE + CORRELATED))
    out, copy = tmp_path / "out", tmp_path / "copy"

    def copied(done):
        if done == 2:
            shutil.copytree(out, copy)

    run(prepared, out, progress=copied)
    saved = checkpoint.read(copy)
    assert jax.random.key_data(saved.key).shape == (8,)
    run(prepared, copy, resume=True)
    assert bits(copy) == bits(out)
    assert set(asked) == {"chacha20"}
    assumptions = json.loads((out / "result.json").read_text())["report"]["assumptions"]
    assert CRYPTOGRAPHIC in assumptions
    assert GENERATOR not in assumptions


def test_the_default_generator_is_assumed_to_be_unpredictable(tmp_path):
    config = parsed(tmp_path, TRAINING + SETTINGS)
    assert config.privacy.randomness == "threefry4x32"
    assert GENERATOR in prepare(config).report.assumptions
    with pytest.raises(ValueError, match="randomness"):
        parsed(tmp_path, SECURE.replace("chacha20", "rbg") + SETTINGS)
