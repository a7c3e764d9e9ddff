import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpbilevel as dpb
from dpbilevel.cli.config import parse_config, read_config
from dpbilevel.cli.tables import Table
from dpbilevel.cli.toml_tables import Location
from tests.cli.config_changes import changed

ADD_OR_REMOVE = dpb.Neighbours.ADD_OR_REMOVE_ONE
CONFIGS = Path(__file__).parents[2] / "configs"

TEXT = """
task = "source_weighting"
[privacy]
epsilon = 1
delta = 1e-5
people = "disjoint"
neighbours = "replace_one"
[data]
path = "people.csv"
training = 400
validation = 100
[data.label]
column = "rich"
positive = ["yes"]
negative = ["no"]
[[data.numeric]]
name = "all"
columns = ["age", "pay", "days"]
mean = [0, 0, 0]
scale = [1, 1, 1]
[data.sources]
column = "clinic"
values = ["A", "B"]
[model]
loss = "logistic"
num_sources = 2
ridge = 0.01
[solver]
type = "PenaltyBilevel"
num_steps = 4
penalty = 10
step_size = 1.0
[solver.inner]
type = "NoisyGD"
num_steps = 2
step_size = 1.0
clip_norm = 1.0
"""


def parsed(*changes):
    return parse_config(changed(TEXT, changes), Location("a.toml"))


def refusal(*changes):
    with pytest.raises(ValueError, match=r"^a\.toml") as error:
        parsed(*changes)
    return str(error.value)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda p: p.stem)
def test_shipped_config_parses_and_says_all_of_its_guarantee(path):
    config = read_config(path)
    assert config.privacy.budget == dpb.PrivacyBudget(1.0, 1e-5)
    two_levels = dpb.Sizes(6_000, 20_000, "disjoint")
    assert config.sizes == (two_levels if config.task.two_levels else 20_000)


def test_census_config_has_the_109_features_of_the_task():
    blocks = read_config(CONFIGS / "census.toml").data.blocks
    assert sum(size for _, size in blocks) == 109


def test_solver_table_is_the_solver():
    solver = parsed().solver
    inner = dpb.NoisyGD(num_steps=2, step_size=1.0, clip_norm=1.0)
    assert solver == dpb.PenaltyBilevel(4, 10.0, inner, step_size=1.0)


def test_sampling_table_is_the_sampling():
    solver = parsed(("solver.sampling", {"type": "Poisson", "rate": 0.5})).solver
    assert solver.sampling == dpb.Poisson(0.5)


def test_localized_inner_solver_needs_no_code_of_its_own():
    inner = {
        "type": "LocalizedGD",
        "radii": [2.0, 1],
        "steps_per_round": 3,
        "strong_convexity": 0.1,
        "clip_norm": 1.0,
    }
    assert parsed(("solver.inner", inner)).solver.inner.radii == (2.0, 1.0)


def test_refit_table_wraps_the_solver():
    refit = {"type": "NoisyGD", "num_steps": 3, "step_size": 1.0, "clip_norm": 1.0}
    solver = parsed(("refit", refit | {"budget_split": [0.7, 0.3]})).solver
    assert isinstance(solver, dpb.Refitted)
    assert (solver.budget_split, solver.refit.num_steps) == ((0.7, 0.3), 3)


def test_refit_of_both_levels():
    refit = {"type": "NoisyGD", "num_steps": 3, "step_size": 1.0, "clip_norm": 1.0}
    assert parsed(("refit", refit)).solver.refit_reads == "lower"
    solver = parsed(("refit", refit | {"refit_reads": "both"})).solver
    assert (solver.refit_reads, solver.budget_split) == ("both", (0.8, 0.2))
    with pytest.raises(ValueError, match=r"\[refit\].*refit_reads must be one of"):
        parsed(("refit", refit | {"refit_reads": "upper"}))
    with pytest.raises(ValueError, match=r"unknown key 'refit_read'.*refit_reads"):
        parsed(("refit", refit | {"refit_read": "both"}))


FITTED = {"num_steps": 3, "step_size": 1.0, "clip_norm": 1.0}
FEW = {"type": "Recalibration", "intercept": -1}


@pytest.mark.parametrize(
    "solver",
    [
        FEW,
        FEW | {"fit": FITTED},
        {"type": "WarmStarted", "first": FEW, "then": {"type": "Recalibration"}},
        {
            "type": "WarmStarted",
            "first": {"type": "OneLevel", "model": FITTED, "reads": "lower"},
            "then": FEW,
        },
    ],
)
@pytest.mark.parametrize("relation", list(dpb.Neighbours))
def test_relation_reaches_parts_that_a_config_leaves_out(solver, relation):
    found = parsed(("solver", solver), ("privacy.neighbours", relation.value)).solver
    parts = jax.tree.leaves(found, is_leaf=lambda v: isinstance(v, dpb.NoisyGD))
    relations = {p.neighbours for p in parts if isinstance(p, dpb.NoisyGD)}
    assert relations == {relation}


def test_a_solver_of_another_relation_than_its_config_is_refused(
    monkeypatch,
):
    solver = {"solver": FEW, "privacy.neighbours": "add_or_remove_one"}
    assert parsed(*solver.items()).solver.neighbours is ADD_OR_REMOVE
    # The control: without it the defaults' own relation would stand.
    monkeypatch.setattr(dpb.AbstractSolver, "with_neighbours", lambda self, _: self)
    with pytest.raises(ValueError, match=r"\[solver\]: refers to replace_one"):
        parsed(*solver.items())


def test_penalty_of_weights_reaches_the_problem():
    problem = parsed(("model.weight_penalty", 0.5)).problem
    assert problem.upper_public(jnp.asarray([9.0, 0.0]), None) == pytest.approx(
        0.25, rel=1e-2
    )
    assert parsed().problem.upper_public is None
    with pytest.raises(ValueError, match="weight_penalty must be non-negative"):
        parsed(("model.weight_penalty", -0.5))


def test_relation_reaches_every_mechanism():
    refit = {"type": "NoisyGD", "num_steps": 3, "step_size": 1.0, "clip_norm": 1.0}
    solver = parsed(
        ("privacy.neighbours", "add_or_remove_one"), ("refit", refit)
    ).solver
    relation = dpb.Neighbours.ADD_OR_REMOVE_ONE
    assert solver.refit.neighbours is relation
    assert solver.search.neighbours is relation
    assert solver.search.inner.neighbours is relation


def test_unknown_key_names_the_close_match():
    text = refusal(("solver.inner.step_sise", 1.0))
    assert "[solver.inner]" in text
    assert "'step_sise' (did you mean 'step_size'?)" in text
    keys = "sampling, output, num_steps, clip_norm, step_size, momentum"
    assert f"Allowed keys: {keys}." in text


def test_missing_key_names_its_table():
    assert "[privacy]: missing key 'delta'" in refusal(("privacy.delta", None))


def test_all_mistakes_of_the_public_facts_are_named_at_once():
    text = refusal(
        ("privacy.delta", None),
        ("privacy.epsilon", "one"),
        ("model.ridgee", 1.0),
        ("model.loss", None),
        ("data.training", "many"),
    )
    said = (
        "[privacy]: missing key 'delta'",
        '[privacy]: epsilon must be a number, got the string "one"',
        "[model]: unknown key 'ridgee' (did you mean 'ridge'?)",
        "[model]: missing key 'loss'",
        "[data]: training must be an integer",
    )
    lines = text.splitlines()
    assert len(lines) == len(said)
    for line, expected in zip(lines, said, strict=True):
        assert expected in line


def test_wrong_type_says_what_was_wanted():
    text = refusal(("solver.step_size", "fast"))
    assert '[solver]: step_size must be a number, got the string "fast"' in text


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("task", "source_weigting", "did you mean 'source_weighting'"),
        ("solver.type", "NoisyGD", 'type must be one of "PenaltyBilevel"'),
        ("solver.inner.type", "PenaltyBilevel", "LocalizedGD"),
        ("solver.inner", 3, "[solver.inner]: must be a table, got 3"),
        ("solver.num_steps", 4.0, "num_steps must be an integer, got 4.0"),
        ("solver.num_steps", True, "num_steps must be an integer, got true"),
        ("solver.num_steps", 0, "[solver]: PenaltyBilevel: num_steps"),
        ("solver.output", "Lost", "did you mean 'Last'"),
        (
            "solver.budget_split",
            [1.0],
            "budget_split must be a list of 3 values, got 1",
        ),
        ("privacy.epsilon", 0, "[privacy]: PrivacyBudget: epsilon must be positive"),
        ("privacy.epsilon", -1.0, "epsilon must be positive"),
        ("privacy.delta", 0, "delta = 0 asks for pure privacy"),
        ("privacy.delta", 1, "delta must be below 1"),
        ("privacy.people", "some", '"disjoint", "overlapping", "shared"'),
        ("privacy.people", "shared", "training must equal validation"),
        ("data.training", 0, "[data]: training must be at least 1"),
        ("data.sources.values", ["A"], "1 sources, but [model] is for 2"),
        ("model.num_sources", 10**12, "[model] is for 1000000000000"),
        ("data.sources.values", [], "a list of different values, got none"),
        ("data.numeric", [], "list columns in [[data.numeric]]"),
        ("data.source", "cvs", "did you mean 'csv'"),
    ],
)
def test_bad_value_is_refused_with_the_remedy(path, value, said):
    assert said in refusal((path, value))


CSV = {
    "source": "csv",
    "path": "a.csv",
    "training": 3,
    "validation": 2,
    "label": {"column": "ill", "positive": [1], "negative": [0, "no"]},
    "categorical": [{"column": "ward", "values": [2, "B"]}],
    "sources": {"column": "clinic", "values": [7, 8.5]},
}


def test_numbers_of_a_config_are_the_cells_that_read_as_them():
    data = parsed(("data", CSV)).data
    cells = {
        "ill": ["1", "1.0", "0", "no", "2"],
        "ward": ["2", "02", "B", "2.5", ""],
        "clinic": ["7", "8.5", "7.0", "85e-1", "x"],
    }
    records = data.encode(Table("a.csv", cells, 5))
    np.testing.assert_array_equal(records.label, [1, 1, -1, -1, np.nan])
    np.testing.assert_array_equal(records.features[:4, 0] > 0, [True, True, 0, 0])
    np.testing.assert_array_equal(records.features[:4, 1] > 0, [0, 0, True, 0])
    np.testing.assert_array_equal(records.source, [0, 1, 0, 1, -1])
    assert np.isnan(records.features[4]).all()  # of no known source


def test_texts_of_a_config_are_the_cells_of_the_same_text():
    label = {"column": "ill", "positive": ["1"], "negative": ["1.0"]}
    values = parsed(("data", CSV), ("data.label", label)).data.label.encode
    cells = {"ill": ["1", "1.0", "01"]}
    labels, _ = values(Table("a", cells, 3))
    np.testing.assert_array_equal(labels, [1, -1, np.nan])


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("data.label.positive", [True], "must be a string or a number, got true"),
        ("data.label.positive", [0], "positive and negative must be lists of distinct"),
        ("data.label.positive", ["0"], "must be lists of distinct, finite values"),
        ("data.label.positive", [float("nan")], "lists of distinct, finite values"),
        ("data.label.positive", ["no"], "must be lists of distinct, finite values"),
        (
            "data.sources.values",
            [1, 1.0],
            "values must be lists of distinct, finite values",
        ),
        ("data.sources.values", ["a", "a"], "must be lists of distinct, finite values"),
        ("data.categorical", [{"column": "ill", "values": [0]}], "'ill' is a feature"),
    ],
)
def test_a_cell_cannot_be_two_of_the_values(path, value, said):
    assert said in refusal(("data", CSV), (path, value))


@pytest.mark.parametrize("path", ["seed", "privacy.key", "solver.seed", "data.seed"])
def test_no_table_takes_a_key(path):
    assert "whoever knows the key can subtract the noise" in refusal((path, 1))


def test_entry_of_a_list_of_tables_is_named():
    text = refusal(("data.numeric", [{"name": "a", "clip": "big"}]))
    assert "[data.numeric (entry 1)]: clip must be a number" in text


def test_file_that_is_no_toml_is_named(tmp_path):
    file = tmp_path / "bad.toml"
    file.write_text("task = ")
    with pytest.raises(ValueError, match=r"bad\.toml: is not a TOML file"):
        read_config(file)


def test_a_config_may_begin_with_the_mark_that_editors_write(tmp_path):
    file = tmp_path / "a.toml"
    file.write_bytes(b"\xef\xbb\xbftask = ")
    with pytest.raises(ValueError, match="end of document"):  # not line 1
        read_config(file)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"no\.toml: cannot be read: No such file"):
        read_config(tmp_path / "no.toml")


@pytest.mark.parametrize("groups", ["single", "per_block", "per_feature"])
def test_every_penalty_has_a_name(groups):
    tables = tomllib.loads((CONFIGS / "penalty_tuning.toml").read_text())
    tables["model"]["groups"] = groups
    config = parse_config(tables, Location("a.toml"))
    start = config.model.start(config.data.blocks)
    assert len(config.model.names(config.data)) == len(config.model.shown(start))
