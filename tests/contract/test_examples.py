"""The examples, and the code of the pages that a newcomer reads first."""

import dataclasses
import os
import pathlib
import re
import runpy
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpbilevel as dpb
from dpbilevel import planning

ROOT = pathlib.Path(__file__).parents[2]
SCRIPTS = sorted(p for p in (ROOT / "examples").glob("*.py") if p.stem != "demo")


scripts = pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.stem)
# Configs of the same games are run by test_games_config, tasks and searches by others.
SHORT = {"leak", "private_draw", "sharded"}
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


# Read in this order: each continues the programs of the one before.
PAGES = ("README.md", "docs/getting_started.md", "docs/tour.md")


@pytest.fixture
def names(monkeypatch, tmp_path):
    """What the code of the first pages knows; it plans from little."""
    monkeypatch.chdir(tmp_path)  # where the figure goes
    # Records are drawn on these pages, and few of their draws are hard to tell apart.
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
    text = (ROOT / page).read_text().replace("runs=20_000", "runs=1_000")
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(code, page, "exec"), names)


def test_code_of_the_first_page_runs_and_leaves_the_wrong_sources(names):
    run_code(PAGES[0], names)
    assert float(jnp.sum(names["weights"][1:3])) < 0.1


@pytest.mark.slow
def test_code_of_the_first_pages_runs_and_is_better_than_one_level(
    names, capsys, tmp_path
):
    for page in PAGES:
        run_code(page, names)
    two_levels, one_level, oracle = names["found"].values()
    assert two_levels > one_level + 0.1
    assert oracle > one_level + 0.1
    assert (tmp_path / "accuracy.svg").is_file()
    assert names["result"].report.epsilon <= 1.0
    margins = names["rows"] @ np.asarray(names["released"].value)
    correct = (margins > 0) == names["outcome"]
    assert np.mean(correct) > 0.75
    assert "ENFORCED: epsilon = 1" in capsys.readouterr().out


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
    """A network and images, as `docs/coming_from.md` names them."""
    keys = jax.random.split(jax.random.key(0), 3)
    digits = jax.random.randint(keys[0], (400,), 0, 3)
    images = jax.nn.one_hot(digits, 12) + 0.1 * jax.random.normal(keys[1], (400, 12))
    params = {
        "in": jax.random.normal(keys[2], (12, 8)) / 4,
        "out": jnp.zeros((8, 3)),
    }

    def apply(params, image):
        return jnp.tanh(image @ params["in"]) @ params["out"]

    return {"images": images, "digits": digits, "params": params, "apply": apply}


def _two_levels():
    """Ridge regression and its penalty, as the page's section on JAXopt names them."""
    keys = jax.random.split(jax.random.key(1), 2)

    def g(x, y, record):
        error = record["a"] @ y - record["b"]
        return 0.5 * error**2 + 0.5 * jnp.exp(x) * jnp.sum(y * y)

    def f(x, y, record):
        return 0.5 * (record["a"] @ y - record["b"]) ** 2

    def records(key):
        a = jax.random.normal(key, (50, 3)) / 2
        return {"a": a, "b": jnp.sum(a, axis=1)}

    data = dpb.Levels(records(keys[0]), records(keys[1]))

    def mean(loss, level):
        return lambda x, y: jnp.mean(jax.vmap(lambda r: loss(x, y, r))(level))

    def lower_mean(y, x):
        return mean(g, data.lower)(x, y)

    solver = dpb.PenaltyBilevel(2, 2.0, dpb.NoisyGD(2, 1.0, 0.5), step_size=0.1)
    return {
        "f": f,
        "g": g,
        "x": jnp.asarray(-1.0),
        "y0": jnp.zeros(3),
        "data": data,
        "lower_mean": lower_mean,
        "upper_mean": mean(f, data.upper),
        "solver": solver,
        "budget": dpb.PrivacyBudget(8.0, 1e-5),
    }


def _people():
    """Rows, labels and validation records, as the sections on searches name them."""
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
    }


@pytest.mark.slow
def test_code_for_users_of_other_libraries_runs_and_agrees_with_theirs():
    jaxopt, optuna = map(pytest.importorskip, ("jaxopt", "optuna"))
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV
    from sklearn.svm import SVC

    names = {"dpb": dpb, "jax": jax, "jnp": jnp, "np": np, "optax": optax}
    names |= {"jaxopt": jaxopt, "optuna": optuna, "GridSearchCV": GridSearchCV}
    names |= {"LogisticRegression": LogisticRegression, "SVC": SVC}
    text = (ROOT / "docs/coming_from.md").read_text()
    gradients, ran = [], 0
    # The same names stand for other things in other sections.
    for section in re.split(r"^## ", text, flags=re.M):
        made = {"Opacus": _digits, "jax_privacy": _digits, "JAXopt": _two_levels}
        names |= made.get(section.split("\n")[0], _people)()
        for code in re.findall(r"```python\n(.*?)```", section, re.DOTALL):
            code = textwrap.dedent(code)
            if not code.startswith(("# Opacus", "# jax_privacy")):
                exec(compile(code, "docs/coming_from.md", "exec"), names)
                ran += 1
            if "gradient = " in code or "gradient, _" in code:
                gradients.append(names["gradient"])
            if "dp_sgd" in code:
                network = names["result"]
    assert ran == 13
    assert names["plan"].report.relation == "add_or_remove_one"
    np.testing.assert_allclose(*gradients, rtol=1e-3)
    for params in (network.value, names["trained"]):
        scores = jax.vmap(names["apply"], (None, 0))(params, names["images"])
        assert jnp.mean(jnp.argmax(scores, 1) == names["digits"]) > 0.9
    assert names["search"].score(names["X_people"], names["y_people"]) > 0.8
    assert len(names["study"].trials) == 15
