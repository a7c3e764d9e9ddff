import tomllib
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import dpbilevel as dpb
from dpbilevel.cli import results
from dpbilevel.cli.config import parse_config
from dpbilevel.cli.loading import as_levels
from dpbilevel.cli.plans import prepare
from dpbilevel.cli.run import run
from dpbilevel.cli.toml_tables import Location
from tests.cli.config_changes import changed
from tests.cli.test_runner import loaded

TEXT = """
task = "group_fair"
[privacy]
epsilon = 2.0
delta = 1e-5
neighbours = "replace_one"
[data]
path = "people.csv"
training = 4000
[data.label]
column = "rich"
positive = ["yes"]
negative = ["no"]
[[data.numeric]]
name = "all"
columns = ["age", "pay", "days"]
mean = [0, 0, 0]
scale = [1, 1, 1]
[data.groups]
column = "sex"
values = ["w", "m"]
[model]
shares = [0.8, 0.2]
radius = 8.0
scale = 3.0
[solver]
type = "NoisyExtragradient"
num_steps = 40
step_size = 4.0
clip_norm = 1.5
"""
PEOPLE = {
    "source": "csv",
    "path": "people.csv",
    "training": 5,
    "label": {"column": "rich", "positive": ["yes"], "negative": ["no"]},
    "categorical": [{"column": "town", "values": ["Ulm", "Rom"]}],
    "groups": {"column": "sex", "values": ["w", "m"]},
}


def parsed(*changes, folder="."):
    return parse_config(changed(TEXT, changes), Location(str(Path(folder) / "a.toml")))


def test_tables_are_the_game_and_its_solver():
    config = parsed(("model.ridge", 0.01))
    assert config.sizes == 4000
    assert config.solver == dpb.games.NoisyExtragradient(40, 1.5, 4.0)
    assert config.problem.y_set == dpb.sets.Simplex(3.0)
    assert config.problem.x_set == dpb.sets.Ball(8.0)
    assert config.problem.public is not None
    assert parsed().problem.public is None
    proximal = {
        "type": "InexactProximalPoint",
        "num_steps": 5,
        "strength": 4.0,
        "inner_steps": 1,
        "clip_norm": 1.0,
        "sampling": {"type": "SinglePass", "size": 50},
    }
    assert parsed(("solver", proximal)).solver == dpb.games.InexactProximalPoint(
        5, 1.0, 4.0, 1, sampling=dpb.privacy.SinglePass(50)
    )


@pytest.mark.slow
def test_run_releases_model_and_weights_and_favours_the_small_group(tmp_path):
    rng = np.random.default_rng(0)
    features, small = rng.standard_normal((4000, 3)), rng.random(4000) < 0.2
    label = 8 * features[:, 0] * np.where(small, -1, 1) + rng.logistic(size=4000) > 0
    rows = zip(features.tolist(), small.tolist(), label.tolist(), strict=True)
    lines = [f"{a},{b},{c},{'wm'[g]},{('no', 'yes')[y]}" for (a, b, c), g, y in rows]
    text = "\n".join(["age,pay,days,sex,rich", *lines])
    (tmp_path / "people.csv").write_text(text)
    prepared = prepare(parsed(folder=tmp_path))
    out = tmp_path / "out"
    written = run(prepared, out)
    result = results.load(out)
    assert result.report.epsilon <= 2.0
    assert result.report.people is None
    assert result.x.shape == (4,)
    assert result.trajectory.shape == (41, 2)
    np.testing.assert_allclose(result.trajectory[0], [0.8, 0.2], rtol=1e-6)
    np.testing.assert_allclose(result.shown, result.y / 3.0, rtol=1e-6)
    np.testing.assert_allclose(result.shown.sum(), 1.0, atol=1e-5)
    assert result.shown[1] > 0.3
    page = str(written)
    assert "released weight of each group:" in page
    assert "released model: 4 coefficients" in page


def test_groups_of_a_table_are_positions_and_unknown_ones_have_none(tmp_path):
    rows = ["Ulm,w,yes", "Rom,m,no", "Rom,x,no", "Ulm,,yes", "Ulm,m,yes"]
    (tmp_path / "people.csv").write_text("\n".join(["town,sex,rich", *rows]))
    config = parsed(("data", PEOPLE), folder=tmp_path)
    data = as_levels(loaded(config))
    found = sorted(zip(data["group"].tolist(), data["label"].tolist(), strict=True))
    assert found == [(-1, -1.0), (-1, 1.0), (0, 1.0), (1, -1.0), (1, 1.0)]
    config = parsed(("data", PEOPLE | {"training": 6}), folder=tmp_path)
    with pytest.raises(ValueError, match="asks for training = 6"):
        as_levels(loaded(config))


def test_private_count_takes_every_record(tmp_path):
    (tmp_path / "people.csv").write_text("town,sex,rich\n" + "Ulm,w,yes\n" * 7)
    relation = ("privacy.neighbours", "add_or_remove_one")
    config = parsed(("data", PEOPLE), relation, folder=tmp_path)
    data = as_levels(loaded(config))
    assert len(data["label"]) == 7


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ([("privacy.people", "disjoint")], "people is for tasks of two levels"),
        ([("solver.type", "PenaltyBilevel")], '"NoisyExtragradient"'),
        ([("data.groups", None)], "[data.groups]: missing table"),
        ([("data.groups.values", ["w"])], "1 groups, but [model]"),
        ([("data.groups.column", None)], "missing key 'column'"),
        (
            [("data.sources", {"column": "site", "values": [1, 2]})],
            "has no sources; remove it",
        ),
        ([("data.training", 0)], "training must be at least 1"),
        ([("data.validation", 9)], "validation is for tasks of two levels"),
        ([("model.strength", 0.1)], "unknown key 'strength'"),
        ([("task", "group_robust")], "missing key 'strength'"),
        ([("model.shares", [0.8, 0.3])], "shares must be positive numbers of sum"),
        ([("refit", {"type": "NoisyGD"})], "tasks of two levels only"),
    ],
)
def test_bad_config_of_a_game_is_refused_with_the_remedy(changes, said):
    with pytest.raises(ValueError, match=r"^a\.toml") as error:
        parsed(*changes)
    assert said in str(error.value)


def test_two_levels_need_people_and_have_no_groups():
    tables = tomllib.loads(
        (Path(__file__).parents[2] / "configs/census.toml").read_text()
    )
    people = tables["privacy"].pop("people")
    with pytest.raises(ValueError, match="missing key 'people'"):
        parse_config(tables, Location("a.toml"))
    tables["privacy"]["people"] = people
    tables["data"]["groups"] = {"column": "sex", "values": ["Female"]}
    with pytest.raises(ValueError, match="has no groups; remove it"):
        parse_config(tables, Location("a.toml"))


def test_strength_of_a_robust_game_is_its_public_penalty():
    config = parsed(("task", "group_robust"), ("model.strength", 0.5))
    x, y = jnp.zeros(4), jnp.asarray([0.0, 3.0])
    away = np.array([0.0, 1.0]) - [0.8, 0.2]
    expected = -0.25 * np.sum(away**2 / np.array([0.8, 0.2]))
    np.testing.assert_allclose(config.problem.public(x, y), expected, rtol=1e-5)
