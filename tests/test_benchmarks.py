"""The tables of benchmarks/results/performance.md, on a few records."""

import dataclasses
import inspect
import tomllib

import jax
import pytest

import dpbilevel as dpb
from benchmarks import (
    pages,
    performance,
    private_peers,
    rates,
    redrawn,
)

TINY = {
    "seconds": 0.0,
    "gradients": ["mlp 8 4 3"],
    "memory": ["logistic 64 4"],
    "bilevel": [64, 4],
    "saddle": [64, 4],
    "epoch": [64, 2, [4, 3]],
}
COLUMNS = {
    "Clipped gradients": {
        "slower than",
        "task",
        "plain, ms",
        "grid",
        "float",
        "add or remove",
        "vmap, then clip",
        "optax",
        "jax_privacy",
        "grid, M records/s",
        "grid, compile s",
        "plain, % of hardware",
        "grid, % of hardware",
    },
    "Beside PyTorch": {"slower than", "ratio", "ghost ratio"},
    "Memory": {"task", "parameters", "plain, MiB", "grid", "float"},
    "Solvers": {"solver", "measured in", "ratio", "compile s"},
}


def traced(candidates, *arguments, reference, **settings):
    """Times of 1 for all, of functions that return what the reference does."""
    shapes = {name: jax.eval_shape(run, *arguments) for name, run in candidates.items()}
    if reference == performance.gradients.PLAIN:
        for name in candidates:
            assert shapes[name] == shapes[reference]
    return dict.fromkeys(candidates, (1.0, 1.0, 1.0))


# What optax itself calls.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:optax.*deprecated:DeprecationWarning")
@pytest.mark.reuses_keys
def test_every_table_has_its_columns_and_rows(monkeypatch):
    monkeypatch.setattr(performance.gradients, "ratios", traced)
    monkeypatch.setattr(pages, "ratios", traced)
    times = {"plain": (1.0, 1.0), "per-sample": (2.0, 2.0), "ghost": (3.0, 3.0)}
    monkeypatch.setattr(private_peers, "torch_times", lambda *_: [times])
    monkeypatch.setattr(performance.gradients, "hardware", lambda: (1e9, 1e9))
    tables = list(performance.tables(TINY))
    assert [table.title for table in tables] == list(COLUMNS)
    for table in tables:
        assert bool(table.rows) == bool(COLUMNS[table.title])
        for row in table.rows:
            assert COLUMNS[table.title] <= set(row)
            cells = " | ".join(map(performance.cell, row.values()))
            assert f"| {cells} |" in str(table)


def test_rows_that_somebody_else_wins_stand_first():
    ours, theirs = 2.0, {"optax": 3.0, "jax_privacy": 1.5, "vmap, then clip": None}
    assert performance.gradients.ahead(theirs, ours) == "jax_privacy"
    rows = [{"slower than": ""}, {"slower than": "optax"}]
    assert performance.gradients.losses_first(rows) == rows[::-1]


def test_the_page_keeps_what_stands_outside_its_marks():
    page = performance.PAGE.read_text()
    found = pages.written(page, ["new", "parts"])
    before, _, rest = page.partition(pages.BEGIN)
    assert found.startswith(before)
    assert found.endswith(rest.partition(pages.END)[2])
    assert f"{pages.BEGIN}\n\nnew\n\nparts\n\n{pages.END}" in found
    with pytest.raises(ValueError, match="needs the lines"):
        pages.written(before, ["new"])


def test_slopes_leave_out_where_a_method_makes_no_progress():
    sizes, results = (1, 10, 100, 1_000), (0.9, 0.8, 0.1, 0.01)
    assert rates.slope(sizes, results) == pytest.approx(-1.0)
    assert rates.slope(sizes, results, start=1e9) > -0.9
    assert rates.slope(sizes[:3], results[:3]) is None


@pytest.mark.slow
def test_the_constants_of_the_lower_bound_instance_are_not_refuted(x64):
    example = rates.instance(rates.Setting(8, 1.0, 3, 2), 0.5)
    problem = rates.certified(example.problem)
    w0, key = example.w0, jax.random.key(0)

    def search(problem):
        return dpb.debug.refute_constants(problem, w0, example.data, key=key, tries=20)

    assert search(problem).passed
    smaller = dataclasses.replace(problem.constants, upper_y=0.9, upper_y_spread=0.9)
    found = search(dataclasses.replace(problem, constants=smaller))
    assert "upper_y" in found.violated


def test_shares_of_a_gap_are_shown_only_where_the_oracle_is_better():
    # Two settings of each method, of which the second is better in the mean.
    kept = {
        "all records": [[2.0, 1.0], [2.0, 1.1], [0.9, 1.2]],
        "`MixedSources`": [[2.0, 0.7], [2.0, 0.8], [2.0, 0.9]],
        "`auto`": [[0.75], [0.85], [0.95]],
        "oracle": [[0.5], [0.6], [0.7]],
    }
    cells, behind = redrawn.row("a task", 1.0, kept)
    text = " | ".join(cells)
    assert "1.1000 (all records)" in text
    assert "0.8000 (`MixedSources`: 0.60)" in text
    assert "0.0500 ± 0.0000 (0.10 ± 0.00)" in text
    assert behind == pytest.approx(0.1)
    kept["oracle"] = [[1.2], [1.0], [1.1]]
    cells, behind = redrawn.row("a task", 1.0, kept)
    text = " | ".join(cells)
    assert "0.8000 (`MixedSources`)" in text
    assert cells[-1] == "0.0500 ± 0.0000"
    assert behind == 0


def test_experiments_name_their_tasks_arguments_and_go_on_from_saved_runs(
    monkeypatch, tmp_path
):
    pytest.importorskip("sklearn")
    from benchmarks import black_box

    for config in sorted(black_box.CONFIGS.glob("*.toml")):
        experiment = tomllib.loads(config.read_text())
        stated = experiment.get("stated", {}).get("task", {})
        task = {**experiment["task"], **stated}
        build = black_box.TASKS[task.pop("name")]
        inspect.signature(build).bind(**task, seed=0)

    made = []

    def replication(settings, seed):
        made.append(seed)
        return seed + settings["mu"], 7

    monkeypatch.setattr(black_box, "replication", replication)
    file, settings = tmp_path / "saved.json", {"mu": 0.5, "replications": 2}
    first = black_box.replications(settings, file)
    more = black_box.replications(settings | {"replications": 3}, file)
    assert made == [0, 1, 2]
    assert [list(row) for row in first] == [list(row) for row in more[:2]]
    black_box.replications(settings | {"mu": 1.0}, file)
    assert made == [0, 1, 2, 0, 1]
