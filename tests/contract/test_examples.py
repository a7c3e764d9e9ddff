"""The examples, and the code of the pages that a newcomer reads first."""

import dataclasses
import os
import pathlib
import re
import runpy
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpbilevel as dpb
from dpbilevel import planning

ROOT = pathlib.Path(__file__).parents[2]
SCRIPTS = sorted(p for p in (ROOT / "examples").glob("*.py") if p.stem != "demo")


scripts = pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.stem)
# Configs of the same games are run by test_games_config, tasks and searches by others.
LONG = {"group_fair", "group_robust", "matrix_game", "equinox_network"}
LONG |= {"private_search", "penalty_tuning", "optax_pipeline", "data_cleaning"}
LONG |= {"meta_learning", "tuned_training", "optuna_study"}
short_scripts = pytest.mark.parametrize(
    "script",
    [
        pytest.param(p, marks=pytest.mark.slow if p.stem in LONG else (), id=p.stem)
        for p in SCRIPTS
    ],
)


@pytest.fixture
def as_by_users():
    """JAX as it is imported, whatever an example sets."""
    usual = {
        "jax_numpy_dtype_promotion": "standard",
        "jax_numpy_rank_promotion": "allow",
    }
    names = (*usual, "jax_enable_x64")
    before = {name: getattr(jax.config, name) for name in names}
    for name, value in usual.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@short_scripts
def test_example_runs_and_holds_its_own_assertions(script, as_by_users, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(script), "--smoke"])
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))  # for sharded.py
    runpy.run_path(str(script), run_name="__main__")


@pytest.mark.slow
@scripts
def test_example_runs_as_a_process_of_its_own(script):
    done = subprocess.run(
        [sys.executable, str(script), "--smoke"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


# Read in this order: each continues the programs of the one before.
PAGES = ("README.md", "docs/getting_started.md", "docs/tour.md")


def test_code_of_the_first_pages_runs_and_is_better_than_one_level(
    capsys, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)  # where the figure goes
    names = {}
    # Fewer runs of the audit, fewer steps of the search, two methods to plan from and
    # one law of records.
    short = dpb.search.GradientInformativeBO(2, 1.0, step_size=0.2, max_batch=8)
    monkeypatch.setattr("dpbilevel.search.default_solver._descent", lambda *_: short)
    every = planning.dry_runs.candidates

    def few(*arguments):
        kept = ("both levels' records", "MixedSources")
        offered = [c for c in every(*arguments) if c.name in kept]
        return [dataclasses.replace(c, solvers=c.solvers[:1]) for c in offered]

    monkeypatch.setattr(planning.dry_runs, "candidates", few)
    laws = planning.dry_runs.default_twins
    monkeypatch.setattr(planning.dry_runs, "default_twins", lambda *a: laws(*a)[:1])
    for page in PAGES:
        text = (ROOT / page).read_text().replace("runs=20_000", "runs=1_000")
        for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
            exec(compile(code, page, "exec"), names)
    weights = names["dpb"].source_weights(names["solution"].x)
    assert float(jnp.sum(weights[2:])) < 0.1
    two_levels, one_level, oracle = names["found"].values()
    assert two_levels > one_level + 0.1
    assert oracle > one_level + 0.1
    assert (tmp_path / "accuracy.svg").is_file()
    assert names["result"].report.epsilon <= 1.0
    margins = names["rows"] @ np.asarray(names["released"].value)
    correct = (margins > 0) == names["outcome"]
    assert np.mean(correct) > 0.75
    assert "ENFORCED: epsilon = 1" in capsys.readouterr().out
