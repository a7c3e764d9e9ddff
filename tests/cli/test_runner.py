import errno
import functools
import json
import shutil
import tempfile
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sklearn.datasets

import dpbilevel as dpb
from dpbilevel.cli import results
from dpbilevel.cli import run as runner
from dpbilevel.cli.config import parse_config
from dpbilevel.cli.loading import as_levels, find_files, load
from dpbilevel.cli.page import figures
from dpbilevel.cli.plans import prepare
from dpbilevel.cli.run import run
from dpbilevel.cli.toml_tables import Location
from dpbilevel.runs import checkpoint
from tests.cases import slow

FOLDER = tempfile.TemporaryDirectory()  # as long as the process
RECORDS = Path(FOLDER.name) / "records.csv"


def write_generated():
    """Records of a logistic model; most labels of the second source are wrong."""
    rng = np.random.default_rng(0)
    features = rng.standard_normal((400, 3))
    label = features.sum(1) + rng.logistic(size=400) > 0
    source = rng.integers(0, 2, 400)
    label ^= (rng.random(400) < 0.9) & (source == 1)
    rows = zip(features.tolist(), source, label.astype(int), strict=True)
    lines = [f"{','.join(map(str, row))},source {s},{b}" for row, s, b in rows]
    RECORDS.write_text("\n".join(["all 0,all 1,all 2,source,label", *lines]))


write_generated()
GENERATED = f"""
task = "source_weighting"
[privacy]
check_records = false
epsilon = 1.0
delta = 1e-5
people = "disjoint"
neighbours = "replace_one"
[data]
path = "{RECORDS}"
training = 300
validation = 100
[data.label]
column = "label"
positive = [1]
negative = [0]
[[data.numeric]]
name = "all"
columns = ["all 0", "all 1", "all 2"]
mean = [0, 0, 0]
scale = [1, 1, 1]
[data.sources]
column = "source"
values = ["source 0", "source 1"]
[model]
loss = "logistic"
num_sources = 2
ridge = 0.01
[solver]
type = "F2SA"
num_steps = 4
penalty = 10.0
step_size = 1.0
lower_step_size = 1.0
"""

# Tables of a solver that takes longer to compile.
FIT = {"type": "NoisyGD", "num_steps": 3, "step_size": 1.0, "clip_norm": 1.0}
REFITTED = {
    "solver": {
        "type": "PenaltyBilevel",
        "num_steps": 39,
        "penalty": 10.0,
        "step_size": 1.0,
        "inner": FIT,
    },
    "refit": FIT,
}

CSV_DATA = """
source = "csv"
path = "people.csv"
training = 40
validation = 20
[[numeric]]
name = "pay"
columns = ["pay"]
transform = "log1p"
mean = [3.0]
scale = [1.0]
[[categorical]]
column = "town"
values = ["Ulm", "Rom"]
[label]
column = "rich"
positive = ["yes"]
negative = ["no"]
[sources]
column = "clinic"
values = ["A", "B"]
"""


def config_of(folder, *, data=None, **privacy):
    tables = tomllib.loads(GENERATED)
    if data is not None:
        tables["data"] = tomllib.loads(data)
        del tables["privacy"]["check_records"]
    tables["privacy"] |= privacy
    return parse_config(tables, Location(str(Path(folder) / "a.toml")))


def rows_of(count):
    rng = np.random.default_rng(0)
    return [
        [f"{p:.2f}", town, clinic, rich]
        for p, town, clinic, rich in zip(
            rng.exponential(30.0, count),
            rng.choice(["Ulm", "Rom"], count),
            rng.choice(["A", "B"], count),
            rng.choice(["yes", "no"], count),
            strict=True,
        )
    ]


def write_csv(folder, rows, header="pay,town,clinic,rich"):
    text = "\n".join([header, *(",".join(row) for row in rows)])
    (folder / "people.csv").write_text(text + "\n")


def loaded(config):
    """The records of a config by role, from files in its folder."""
    return load(config, *find_files(config))


def levels_of(folder, rows, **privacy):
    write_csv(folder, rows)
    config = config_of(folder, data=CSV_DATA, **privacy)
    return as_levels(loaded(config))


def bits(folder):
    with np.load(folder / "solution.npz") as arrays:
        return {name: arrays[name].tobytes() for name in arrays.files}


class Stop(Exception):
    pass


def stop_at(step):
    def progress(done):
        if done == step:
            raise Stop

    return progress


@pytest.fixture(scope="module")
def prepared():
    return prepare(config_of("."))


@pytest.fixture
def interrupted(prepared, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(Stop):
        run(prepared, out, progress=stop_at(2))
    return out


def test_resumed_run_gives_the_same_bits(prepared, tmp_path):
    out, copy = tmp_path / "out", tmp_path / "copy"

    def copy_after_two(done):
        if done == 2:
            shutil.copytree(out, copy)

    run(prepared, out, progress=copy_after_two)
    run(prepared, copy, resume=True)
    assert bits(copy) == bits(out)
    assert (copy / "result.json").read_bytes() == (out / "result.json").read_bytes()


def test_run_interrupted_at_every_step_gives_the_same_bits(prepared, tmp_path):
    out, copy = tmp_path / "out", tmp_path / "copy"
    with pytest.raises(Stop):
        run(prepared, out, progress=stop_at(0))
    shutil.copytree(out, copy)
    run(prepared, out, resume=True)
    for step in range(1, 4):
        with pytest.raises(Stop):
            run(prepared, copy, resume=True, progress=stop_at(step))
    run(prepared, copy, resume=True)
    assert bits(copy) == bits(out)


def test_every_run_draws_fresh_noise(prepared, tmp_path):
    first = run(prepared, tmp_path / "a")
    second = run(prepared, tmp_path / "b")
    assert not np.array_equal(first.x, second.x)


def test_chunks_of_one_length_compile_once(prepared, tmp_path, monkeypatch):
    traces = []

    def counted(*arguments, **options):
        traces.append(1)
        # What it computes does not matter, and takes long to compile.
        steps = functools.partial(dpb.core.loop.scan_steps, **options)
        made = jax.eval_shape(steps, *arguments)
        return jax.tree.map(lambda v: jnp.zeros(v.shape, v.dtype), made)

    monkeypatch.setattr(
        runner, "all_steps", jax.jit(counted, static_argnames="trajectory")
    )
    tables = tomllib.loads(GENERATED)
    tables |= REFITTED  # 39 steps and a refit: 20 chunks of two steps
    place = Location(str(tmp_path / "a.toml"))
    run(prepare(parse_config(tables, place)), tmp_path / "a")
    assert len(traces) == 1


def test_result_folder_holds_released_and_public_things_only(prepared, tmp_path):
    result = run(prepared, tmp_path / "out")
    names = sorted(p.name for p in (tmp_path / "out").iterdir())
    assert names == ["result.json", "solution.npz", "spending.jsonl"]
    loaded = results.load(tmp_path / "out")
    assert loaded.report == prepared.report
    assert loaded.names == ("source 0", "source 1")
    np.testing.assert_array_equal(loaded.x, result.x)
    assert loaded.trajectory.shape == (5, 2)
    np.testing.assert_allclose(loaded.trajectory.sum(1), 1.0, rtol=1e-6)


def test_checkpoint_is_for_its_owner_and_says_that_it_is_secret(interrupted):
    file = interrupted / checkpoint.NAME
    assert file.stat().st_mode & 0o777 == 0o600
    assert b"SECRET: it holds the key" in file.read_bytes()[:100]
    assert repr(checkpoint.read(interrupted)) == "Checkpoint(done=2)"


def damaged(content):
    return content[:-30] + bytes([content[-30] ^ 1]) + content[-29:]


@pytest.mark.parametrize(
    "damage", [damaged, lambda c: c[:-100], lambda c: b"", lambda c: b"PK other"]
)
def test_damaged_checkpoint_is_refused(prepared, interrupted, damage):
    file = interrupted / checkpoint.NAME
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(
        ValueError, match=r"damaged or not a checkpoint.*start a new run"
    ):
        run(prepared, interrupted, resume=True)


def test_changed_config_is_refused_by_the_name_of_its_key(interrupted):
    changed = prepare(config_of(".", epsilon=2.0))
    with pytest.raises(ValueError, match=r"privacy\.epsilon was 1\.0, is 2\.0"):
        run(changed, interrupted, resume=True)


def test_changed_records_are_refused(tmp_path):
    write_csv(tmp_path, rows_of(60))
    tables = config_of(tmp_path, data=CSV_DATA)
    with pytest.raises(Stop):
        run(prepare(tables), tmp_path / "out", progress=stop_at(1))
    write_csv(tmp_path, rows_of(61))
    with pytest.raises(ValueError, match="records are not those the run began with"):
        run(prepare(tables), tmp_path / "out", resume=True)


def test_finished_folder_is_refused_and_cleared_of_secrets(prepared, tmp_path):
    out = tmp_path / "out"
    run(prepared, out)
    (out / checkpoint.NAME).write_bytes(b"left by a crash")
    for resume in (False, True):
        with pytest.raises(ValueError, match="second release"):
            run(prepared, out, resume=resume)
    assert not (out / checkpoint.NAME).exists()


def test_interrupted_folder_asks_for_resume(prepared, interrupted):
    with pytest.raises(ValueError, match="Continue it with --resume"):
        run(prepared, interrupted)
    with pytest.raises(ValueError, match="was interrupted; finish it with"):
        results.load(interrupted)


def test_folder_with_other_files_is_refused(prepared, tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(ValueError, match=r"not empty \(it holds 'thesis\.tex'\)"):
        run(prepared, tmp_path)


def test_resume_without_a_checkpoint_is_refused(prepared, tmp_path):
    with pytest.raises(ValueError, match="nothing to resume"):
        run(prepared, tmp_path / "out", resume=True)


def test_folder_that_cannot_be_made_is_refused_before_any_step(prepared, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="cannot lock the folder"):
        run(prepared, tmp_path / "file" / "out", progress=stop_at(0))


def failing_replace(monkeypatch, name, after):
    real, calls = checkpoint.os.replace, []

    def replace(source, target):
        calls.append(target)
        if target.name == name and len(calls) > after:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(source, target)

    monkeypatch.setattr(checkpoint.os, "replace", replace)


@pytest.mark.parametrize(
    ("name", "after"),
    [(checkpoint.NAME, 2), *slow(("result.json", 0))],
)
def test_full_disk_leaves_a_run_that_goes_on(prepared, tmp_path, name, after):
    out, free = tmp_path / "out", tmp_path / "free"
    with pytest.raises(Stop):
        run(prepared, out, progress=stop_at(0))
    shutil.copytree(out, free)
    run(prepared, free, resume=True)
    with pytest.MonkeyPatch.context() as patch:
        failing_replace(patch, name, after)
        with pytest.raises(OSError, match=r"No space left.*use --resume"):
            run(prepared, out, resume=True)
    assert not (out / "result.json").exists()
    assert not list(out.glob("*.tmp"))
    run(prepared, out, resume=True)
    assert bits(out) == bits(free)


@pytest.mark.slow
def test_a_solver_with_an_inner_one_and_a_refit_runs_and_resumes(tmp_path):
    tables = tomllib.loads(GENERATED) | REFITTED
    prepared = prepare(parse_config(tables, Location(str(tmp_path / "a.toml"))))
    test_resumed_run_gives_the_same_bits(prepared, tmp_path)


@pytest.mark.slow
def test_penalties_of_example_data_run_to_the_end(tmp_path):
    tables = tomllib.loads(GENERATED) | {"task": "penalty_tuning"}
    tables["model"] = {"loss": "logistic", "bounds": [-6.0, 0.0]}
    tables["data"] = {
        "source": "csv",
        "path": "cells.csv",
        "training": 400,
        "validation": 169,
        "label": {"column": "target", "positive": ["1"], "negative": ["0"]},
        "numeric": [
            {"name": n, "columns": [f"{n} area"], "mean": [600], "scale": [300]}
            for n in ("mean", "worst")
        ],
    }
    bunch = sklearn.datasets.load_breast_cancer()
    rows = np.column_stack([bunch.data, bunch.target]).tolist()
    lines = [[*bunch.feature_names, "target"], *([*v[:-1], int(v[-1])] for v in rows)]
    text = "\n".join(",".join(map(str, line)) for line in lines)
    (tmp_path / "cells.csv").write_text(text)
    prepared = prepare(parse_config(tables, Location(str(tmp_path / "a.toml"))))
    result = run(prepared, tmp_path / "out")
    assert result.names == ("mean", "worst", "constant")
    assert result.shown.shape == (3,)
    assert np.all((result.shown >= -6) & (result.shown <= 0))


@pytest.mark.slow
def test_a_result_names_sources_and_features(tmp_path):
    write_csv(tmp_path, rows_of(60))
    result = run(prepare(config_of(tmp_path, data=CSV_DATA)), tmp_path / "out")
    assert result.names == ("A", "B")
    features = result.config.data.coefficients
    assert features == ("pay", "town = Ulm", "town = Rom", "constant")
    page = json.loads((tmp_path / "out" / "result.json").read_text())
    assert tuple(page["features"]) == features
    assert len(page["y"]) == len(features)


@pytest.mark.slow
def test_names_with_signs_of_formulas_are_drawn_as_they_are(tmp_path):
    data = CSV_DATA.replace("pay", "$_{$").replace('"A", "B"', '"$^{$", "B"')
    write_csv(tmp_path, rows_of(60), header="$_{$,town,clinic,rich")
    result = run(prepare(config_of(tmp_path, data=data)), tmp_path / "out")
    assert result.names == ("$^{$", "B")
    assert len(figures(result)) == 3


def test_result_is_json_with_the_config_as_given(prepared, tmp_path):
    run(prepared, tmp_path / "out")
    page = json.loads((tmp_path / "out" / "result.json").read_text())
    assert page["config"] == tomllib.loads(GENERATED)
    assert page["report"]["epsilon"] <= 1.0
    assert page["released"].keys() == {"source 0", "source 1"}
