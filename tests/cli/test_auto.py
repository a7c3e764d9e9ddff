"""dpbilevel auto: settings for a config, and the file with them."""

import re
from pathlib import Path

import numpy as np
import optax
import pytest

import dpbilevel as dpb
from dpbilevel import planning
from dpbilevel.applications import MixedSources, SelectedSources
from dpbilevel.cli import plans, results
from dpbilevel.cli.config import read_config
from dpbilevel.cli.main import main
from dpbilevel.planning import auto_plan
from dpbilevel.planning.candidates import toml_of
from dpbilevel.runs import spending
from tests.cli.test_cli import failure
from tests.cli.test_runner import GENERATED

# Few steps of few candidates, which plans say.
pytestmark = pytest.mark.filterwarnings("default:auto. The plan")

SITES = """
task = "source_weighting"

[privacy]
epsilon = 1.0
delta = 1e-5
people = "disjoint"
neighbours = "replace_one"

[data]
source = "csv"
path = "people.csv"
validation_path = "clean.csv"
training = 8000
validation = 300

[data.label]
column = "sick"
positive = ["yes"]
negative = ["no"]

[data.sources]
column = "site"
values = ["north", "east", "south", "west"]

[[data.numeric]]
name = "patient"
columns = ["age", "dose"]
mean = [50, 10]
scale = [20, 5]

[[data.categorical]]
column = "ward"
values = ["A", "B", "C"]

[model]
loss = "logistic"
num_sources = 4
ridge = 1e-4
"""

FIT = dpb.NoisyGD(5, 1.0, 4.0, output=dpb.outputs.TailMean())


def shown(solver):
    """All settings, without mechanisms, which `[privacy]` says."""
    return re.sub(r"run_noise=Gaussian\(\)|[\s,]", "", str(solver))


@pytest.fixture
def file(tmp_path):
    """A config without settings."""
    text, end = GENERATED, len(GENERATED)
    starts = [text.find(f"[{name}") for name in ("solver", "refit")]
    end = min(place for place in starts if place >= 0)
    path = tmp_path / "a.toml"
    path.write_text("# why\n" + text[:end])
    return path


@pytest.fixture
def few(monkeypatch):
    """One candidate with one setting, one population of records."""

    def candidates(problem, w0, clip_norm, records=None, intercept=None):
        return (planning.Candidate("selected", (SelectedSources(FIT, FIT),), 2),)

    monkeypatch.setattr(auto_plan, "candidates", candidates)
    defaults = auto_plan.populations
    monkeypatch.setattr(auto_plan, "populations", lambda *a: defaults(*a)[:1])


@pytest.mark.slow
def test_a_config_without_settings_gets_some_that_run(file, few, capsys, tmp_path):
    out = tmp_path / "b.toml"
    assert main(["auto", str(file), "--out", str(out)]) == 0
    assert "test loss on synthetic data" in capsys.readouterr().out
    assert out.read_text().startswith("# why\n")
    solver = read_config(out).solver
    assert isinstance(solver, SelectedSources)
    assert shown(solver) == shown(SelectedSources(FIT, FIT))
    assert main(["run", str(out), "--out", str(tmp_path / "run")]) == 0
    assert "ENFORCED" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_without_settings_takes_those_of_auto(file, few, capsys, tmp_path):
    out = tmp_path / "run"
    assert main(["run", str(file), "--out", str(out)]) == 0
    assert 'type = "SelectedSources"' in capsys.readouterr().out
    planned = results.load(out).config.tables
    assert planned["solver"]["type"] == "SelectedSources"
    assert main(["run", str(file), "--out", str(out), "--restart"]) == 0
    assert results.load(out).config.tables == planned


@pytest.mark.slow
def test_a_run_without_settings_is_resumed_with_those_that_it_had(
    file, few, monkeypatch, capsys, tmp_path
):
    def stop(*_, **__):
        raise KeyboardInterrupt

    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(spending, "begin", stop)  # after the first checkpoint
        assert main(["run", str(file), "--out", str(out)]) == 130
    assert "--resume" in capsys.readouterr().err
    monkeypatch.setattr(plans, "plan", stop)  # which is not called again
    assert main(["run", str(file), "--out", str(out), "--resume"]) == 0
    assert results.load(out).config.tables["solver"]["type"] == "SelectedSources"


@pytest.mark.slow
def test_a_config_of_two_files_runs_without_settings(few, tmp_path):
    (tmp_path / "task.toml").write_text(SITES)
    rng = np.random.default_rng(0)

    def cells(n):
        columns = (rng.normal(50, 20, n), rng.normal(10, 5, n))
        wards, labels = rng.choice([*"ABC"], n), rng.choice(["yes", "no"], n)
        rows = zip(*columns, wards, labels, strict=True)
        return [f"{age:.0f},{dose:.0f},{ward},{sick}" for age, dose, ward, sick in rows]

    sites = rng.choice(["north", "east", "south", "west"], 8000)
    people = [f"{row},{site}" for row, site in zip(cells(8000), sites, strict=True)]
    for name, rows, more in (("people", people, ",site"), ("clean", cells(300), "")):
        text = "\n".join([f"age,dose,ward,sick{more}", *rows])
        (tmp_path / f"{name}.csv").write_text(text)
    out = tmp_path / "out"
    assert main(["run", str(tmp_path / "task.toml"), "--out", str(out)]) == 0
    found = results.load(out)
    assert found.names == ("north", "east", "south", "west")
    assert found.config.data.coefficients[:3] == ("age", "dose", "ward = A")


@pytest.mark.slow
def test_calibrate_tells_the_guarantee_of_the_settings_that_a_run_takes(
    file, few, capsys
):
    assert main(["calibrate", str(file)]) == 0
    said = capsys.readouterr().out
    assert 'type = "SelectedSources"' in said
    assert "ENFORCED: epsilon = " in said


def test_the_reader_of_configs_says_what_writes_the_settings(file):
    with pytest.raises(ValueError, match=r"missing table \[solver\]\..*dpbilevel auto"):
        read_config(file)


@pytest.mark.slow
def test_settings_of_a_config_are_replaced(few, tmp_path, capsys):
    path = tmp_path / "a.toml"
    path.write_text(GENERATED)
    out = tmp_path / "b.toml"
    assert main(["auto", str(path), "--out", str(out)]) == 0
    assert out.read_text().count("[solver]") == 1
    assert isinstance(read_config(out).solver, SelectedSources)


@pytest.mark.parametrize(
    "solver",
    [
        MixedSources(FIT, FIT, FIT, FIT, shared=0.25),
        dpb.bilevel.OneLevel(FIT, reads="both"),
        dpb.Refitted(dpb.PenaltyBilevel(3, 10.0, FIT, step_size=2.0), FIT, (0.5, 0.5)),
        dpb.Refitted(
            dpb.PenaltyBilevel(3, 10.0, FIT, step_size=2.0), FIT, refit_reads="both"
        ),
        dpb.bilevel.F2SA(4, penalty=5.0, step_size=1.0, lower_step_size=0.5),
        dpb.bilevel.OneLevel(
            dpb.NoisyGD(
                2,
                1.0,
                1 / 3,
                sampling=dpb.FixedSize(16),
                output=dpb.outputs.TailMean(0.3),
            )
        ),
    ],
    ids=lambda solver: type(solver).__name__,
)
def test_a_solver_comes_back_from_what_is_written(solver, file):
    text = file.read_text() + "\n" + toml_of(solver)
    file.write_text(text)
    assert shown(read_config(file).solver) == shown(solver)


@pytest.mark.parametrize(
    ("solver", "what"),
    [
        (dpb.bilevel.LowerFirst(FIT, FIT), "LowerFirst"),
        (dpb.bilevel.OneLevel(dpb.NoisyGD(2, 1.0, optax.sgd(0.1))), "an optax rule"),
        (
            SelectedSources(
                FIT,
                FIT,
                scoring=dpb.applications.ScoringModel(dpb.logistic_loss, {"w": 0.0}),
            ),
            "a function",
        ),
    ],
)
def test_what_a_config_cannot_hold_is_not_written(solver, what):
    with pytest.raises(ValueError, match=f"cannot hold {what}.* for Python alone"):
        toml_of(solver)


def test_a_file_that_exists_is_refused(file, capsys):
    assert "exists" in failure(capsys, "auto", str(file), "--out", str(file))


def test_another_folder_is_refused(file, tmp_path, capsys):
    out = str(tmp_path / "other" / "b.toml")
    assert "into the folder of" in failure(capsys, "auto", str(file), "--out", out)


def test_a_game_is_refused_with_where_to_look(tmp_path, capsys):
    path = tmp_path / "a.toml"
    path.write_text('task = "group_fair"\n')
    said = failure(capsys, "auto", str(path))
    assert "missing [solver]" in said
    assert "docs/games.md" in said
    path.write_text('task = "group_fair"\n[solver]\ntype = "GroupDescent"\n')
    said = failure(capsys, "auto", str(path))
    assert 'task = "group_fair"; run the config as it is' in said


@pytest.mark.slow
def test_a_config_under_add_or_remove_one_is_planned_under_it(file, few, tmp_path):
    file.write_text(file.read_text().replace("replace_one", "add_or_remove_one"))
    out = tmp_path / "b.toml"
    assert main(["auto", str(file), "--out", str(out)]) == 0
    config = read_config(out)
    assert config.privacy.neighbours is dpb.Neighbours.ADD_OR_REMOVE_ONE
    for part in (config.solver, config.solver.model, config.solver.score):
        assert part.neighbours is dpb.Neighbours.ADD_OR_REMOVE_ONE
    assert main(["run", str(out), "--out", str(tmp_path / "run")]) == 0


@pytest.mark.slow
def test_penalties_are_planned_from_the_lower_end(tmp_path, monkeypatch):
    def scaled(problem, w0, clip_norm, records, intercept):
        assert (w0[0] == -8.0).all()
        solver = dpb.applications.ScaledGroups(FIT)
        return (planning.Candidate("scaled", (solver,), 2),)

    monkeypatch.setattr(auto_plan, "candidates", scaled)
    given = (Path(__file__).parents[2] / "configs/penalty_tuning.toml").read_text()
    path, out = tmp_path / "a.toml", tmp_path / "b.toml"
    path.write_text(given.replace("20_000", "2000").replace("6_000", "500"))
    assert main(["auto", str(path), "--out", str(out)]) == 0
    config = read_config(out)
    assert (config.model.start(config.data.blocks)[0] == -8.0).all()
    assert isinstance(config.solver, dpb.applications.ScaledGroups)
    middle = path.read_text().replace("[model]", '[model]\nstart_at = "middle"')
    path.write_text(middle)
    assert plans.read_unplanned(str(path))[0].model.start_at == "middle"


def test_a_file_that_is_missing_is_one_line(tmp_path, capsys):
    assert "cannot be read" in failure(capsys, "auto", str(tmp_path / "no.toml"))
