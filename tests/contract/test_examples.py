"""The examples, and the code of the pages that a newcomer reads first."""

import dataclasses
import os
import pathlib
import re
import runpy
import subprocess
import sys
import textwrap

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.svm import SVC

import dpbilevel as dpb
from docs import accuracy
from dpbilevel import planning

ROOT = pathlib.Path(__file__).parents[2]
SCRIPTS = sorted(p for p in (ROOT / "examples").glob("*.py") if p.stem != "demo")


scripts = pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.stem)
# Configs of the same games are run by test_games_config, tasks and searches by others.
SHORT = {"sharded"}
short_scripts = pytest.mark.parametrize(
    "script",
    [
        pytest.param(p, marks=() if p.stem in SHORT else pytest.mark.slow, id=p.stem)
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


@pytest.fixture
def names(monkeypatch):
    """What the code of the first page knows; it plans from little."""
    # Records are drawn on this page, and few of their draws are hard to tell apart.
    keys = iter(jax.random.split(jax.random.key(1), 100))
    monkeypatch.setattr(dpb, "root_key", lambda: next(keys))
    # Fewer runs of the audit, fewer steps of the search, two methods to plan from, one
    # population and two dry runs.
    short = dpb.search.GradientInformativeBO(2, 1.0, step_size=0.2, max_batch=8)
    monkeypatch.setattr("dpbilevel.search.defaults._descent", lambda *_: short)
    every = planning.auto_plan.candidates

    def few(*arguments):
        kept = ("both levels' records", "SelectedSources, recalibrated")
        offered = [c for c in every(*arguments) if c.name in kept]
        return [dataclasses.replace(c, solvers=c.solvers[:1]) for c in offered]

    monkeypatch.setattr(planning.auto_plan, "candidates", few)
    defaults = planning.auto_plan.populations
    monkeypatch.setattr(planning.auto_plan, "populations", lambda *a: defaults(*a)[:1])
    monkeypatch.setattr(planning.auto_plan, "rounds_of", lambda *_, **__: (1, 1))
    return {}


def run_code(page, names):
    """Run the blocks of a page, one after the other; return their number."""
    codes = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    for code in codes:
        exec(compile(code, page, "exec"), names)
    return len(codes)


def run_first_page(names):
    run_code("README.md", names)
    assert float(jnp.sum(names["weights"][1:3])) < 0.1


def test_code_of_the_first_page_runs_and_leaves_the_wrong_sources(names, monkeypatch):
    """Its plan is made without dry runs, which the slow suite has."""
    descents = dpb.NoisyGD(10, 1.0, 2.0), dpb.NoisyGD(30, 1.0, 8.0)

    def planned(problem, budget, *, sizes, w0):
        solver = dpb.applications.SelectedSources(*descents)
        return dpb.calibrate(problem, solver, budget, sizes=sizes, w0=w0)

    monkeypatch.setattr(dpb, "auto", planned)
    run_first_page(names)


@pytest.mark.slow
def test_code_of_the_first_page_is_better_than_one_level(names, tmp_path):
    run_first_page(names)
    found = accuracy.compared(names)
    planned, checked, all_sites, oracle = found.values()
    assert planned > max(checked, all_sites) + 0.1
    assert oracle > max(checked, all_sites) + 0.1
    accuracy.draw(found, tmp_path / "accuracy.svg")
    assert (tmp_path / "accuracy.svg").is_file()


@pytest.mark.slow
def test_code_for_tables_arrays_and_networks_runs(
    as_by_users, monkeypatch, tmp_path, capsys
):
    monkeypatch.chdir(tmp_path)
    names = {}
    assert run_code("docs/getting_started.md", names) == 7
    assert "protects: one person (at most 3 rows each)" in capsys.readouterr().out
    margins = names["rows"] @ np.asarray(names["released"].value)
    assert np.mean((margins > 0) == names["outcome"]) > 0.75
    assert np.mean(names["found"] == names["outcome"]) > 0.75


@pytest.mark.slow
def test_code_for_two_levels_of_ones_own_runs(as_by_users, monkeypatch, capsys):
    monkeypatch.setattr(planning.auto_plan, "rounds_of", lambda *_, **__: (1, 1))
    names = {}
    assert run_code("docs/own_problem.md", names) == 6
    assert "ENFORCED: epsilon = 2" in capsys.readouterr().out
    recent = names["data"].upper
    margins = recent["features"] @ names["model"]
    assert jnp.mean(jnp.sign(margins) == recent["label"]) > 0.55  # the noise varies
    assert names["released"].report.epsilon <= 2


@pytest.mark.slow
def test_losses_and_records_of_ones_own_are_planned_as_the_page_says(capsys):
    text = (ROOT / "docs/auto.md").read_text()
    codes = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (code,) = (code for code in codes if "class Skewed" in code)
    names = {}
    exec(compile(code, "docs/auto.md", "exec"), names)
    assert "One level is as good here" in capsys.readouterr().out
    mean = jax.vmap(names["upper"], (None, None, 0))
    test = names["Skewed"]().draw(
        names["problem"], names["w0"], names["sizes"], jax.random.key(0)
    )
    losses = [
        jnp.mean(mean(*w, test.test)) for w in (names["w0"], (names["x"], names["y"]))
    ]
    assert losses[1] < losses[0]


@pytest.mark.slow
def test_code_of_the_page_on_networks_trains_resumes_and_merges(
    tmp_path, monkeypatch, as_by_users, capsys
):
    monkeypatch.chdir(tmp_path)
    text, names = (ROOT / "docs/networks.md").read_text(), {}
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(code, "docs/networks.md", "exec"), names)
    assert "step 20: epsilon 3.00" in capsys.readouterr().out
    assert (tmp_path / "runs/adapters/solution").is_dir()
    rows, labels = names["records"].values()
    scores = jax.vmap(names["model"])(rows)
    assert jnp.mean(jnp.argmax(scores, 1) == labels) > 0.8


def _digits():
    """A network and images, as `docs/coming_from/opacus.md` names them."""
    keys = jax.random.split(jax.random.key(0), 3)
    digits = jax.random.randint(keys[0], (400,), 0, 3)
    images = jax.nn.one_hot(digits, 12) + 0.1 * jax.random.normal(keys[1], (400, 12))
    network = eqx.nn.MLP(12, 3, width_size=8, depth=1, key=keys[2])
    return {"images": images, "digits": digits, "network": network}


def _people():
    """Rows, labels and validation records, as the pages on searches name them."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(300, 4)).clip(-3, 3)
    label = np.where(rows[:, 0] + 0.3 * rng.normal(size=300) > 0, "yes", "no")
    return {
        "X": rows[:200],
        "y": label[:200],
        "X_people": rows[200:],
        "y_people": label[200:],
        "lower": np.full(4, -3.0),
        "upper": np.full(4, 3.0),
        "target": rows[:200] @ np.ones(4) / 3 + 5,
    }


def run_for_users_of(library, names):
    """Run the code of a page but that of libraries that are not installed."""
    page = f"docs/coming_from/{library}.md"
    text = (ROOT / page).read_text()
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        if code.startswith(("# Opacus", "# jax_privacy", "# diffprivlib")):
            continue
        exec(compile(textwrap.dedent(code), page, "exec"), names)
    return names


def accuracy_on_digits(network, names):
    found = jnp.argmax(jax.vmap(network)(names["images"]), 1)
    return jnp.mean(found == names["digits"])


@pytest.mark.slow
def test_code_for_users_of_opacus_and_jax_privacy_trains(as_by_users):
    names = run_for_users_of("opacus", _digits())
    assert names["result"].report.relation == "add_or_remove_one"
    assert accuracy_on_digits(names["result"].value, names) > 0.9
    arrays, rest = eqx.partition(names["network"], eqx.is_array)
    loss = names["loss"]
    names["params"] = arrays
    names["loss"] = lambda params, record: loss(eqx.combine(params, rest), record)
    run_for_users_of("jax_privacy", names)
    assert accuracy_on_digits(eqx.combine(names["trained"], rest), names) > 0.9


@pytest.mark.slow
def test_code_for_users_of_jaxopt_agrees_with_it(as_by_users):
    names = run_for_users_of("jaxopt", {"jaxopt": pytest.importorskip("jaxopt")})
    np.testing.assert_allclose(names["gradient"], names["exact"], rtol=1e-3)
    assert names["result"].report.epsilon <= 2


@pytest.mark.slow
@pytest.mark.parametrize("library", ["scikit_learn", "optuna", "diffprivlib"])
def test_code_for_users_of_estimators_and_searches_runs(library, as_by_users):
    optuna = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    names = run_for_users_of(library, {"optuna": optuna, "SVC": SVC} | _people())
    if library == "optuna":
        assert len(names["study"].trials) == 15
        report = names["search"].result.report
    else:
        report = names["model"].privacy_report_
    assert "ENFORCED" in str(report)
    if library == "scikit_learn":
        assert names["search"].score(names["X_people"], names["y_people"]) > 0.8
