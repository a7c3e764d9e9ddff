"""The accuracy of a released model on a test file, and its predictions."""

import csv
import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpbilevel as dpb
from dpbilevel import audit
from dpbilevel.audit.claims import ledger_claims
from dpbilevel.cli import evaluation, results
from dpbilevel.cli.config import read_config
from dpbilevel.cli.main import main
from dpbilevel.cli.plans import PEOPLE, prepare
from dpbilevel.cli.run import run
from tests.cli.test_cli import failure
from tests.cli.test_csv_files import SETTINGS, TRAINING
from tests.cli.test_runner import Stop, rows_of, stop_at, write_csv

TEST = """
[data.test]
path = "test.csv"
accuracy = "{kind}"
records = {records}
"""


def config_of(folder, kind="counted", records=40, text=TRAINING + SETTINGS):
    path = folder / "a.toml"
    path.write_text(text + TEST.format(kind=kind, records=records))
    return path


@pytest.fixture
def folder(tmp_path):
    """Records of training and of the test."""
    other = tmp_path / "other"
    other.mkdir()
    write_csv(other, rows_of(100)[60:])
    (other / "people.csv").rename(tmp_path / "test.csv")
    write_csv(tmp_path, rows_of(60))
    return tmp_path


def expected_scores(folder, model):
    """Which records of the test file are answered right."""
    data = read_config(folder / "a.toml").data
    records = data.load(folder / "test.csv")
    return np.sign(records.features @ model) == records.label


@pytest.mark.parametrize("kind", ["public", "non_private"])
def test_an_exact_accuracy_is_that_of_the_model_and_says_whose_it_is(
    folder, capsys, kind
):
    path, out = config_of(folder, kind), folder / "out"
    assert main(["run", str(path), "--out", str(out)]) == 0
    assert main(["report", str(out)]) == 0
    found, said = results.load(out), capsys.readouterr().out
    right = expected_scores(folder, found.model)
    assert found.test.value == pytest.approx(right.mean())
    assert (found.test.left_out, found.test.records) == (0, 40)
    if kind == "public":
        assert "on 40 public records of test.csv" in said
        assert "the records of the test file test.csv are public" in said
    else:
        assert "NON-PRIVATE test accuracy" in said
        assert "NOT protected: the people of the test file test.csv" in said


def test_an_accuracy_says_how_far_noise_and_so_few_people_move_it():
    fields = {"value": 0.75, "file": "t.csv", "records": 304, "left_out": 4}
    public = evaluation.Evaluation("accuracy", kind="public", trivial=0.5, **fields)
    assert "accuracy: 0.75 +- 0.025 (one standard deviation: sample 0.025)" in str(
        public
    )
    fields |= {"left_out": None, "noise_std": 0.03, "kind": "counted"}
    counted = evaluation.Evaluation("accuracy", **fields)
    assert "0.75 +- 0.039 (one standard deviation: noise 0.03, sample 0.025)" in str(
        counted
    )
    error = evaluation.Evaluation("root mean squared error of wage", **fields)
    assert "0.75 +- 0.03 (one standard deviation: noise 0.03)" in str(error)
    exact = evaluation.Evaluation("root mean squared error of wage", **fields | {
        "noise_std": 0.0, "kind": "public",
    })  # fmt: skip
    assert "+-" not in str(exact)


def test_records_without_a_listed_label_are_counted_where_they_are_public(folder):
    text = (folder / "test.csv").read_text().replace("yes", "Yes", 3)
    (folder / "test.csv").write_text(text)
    found = run(prepare(read_config(config_of(folder, "public"))), folder / "out")
    assert found.test.left_out == 3
    assert "3 left out: a label that the config does not list" in str(found.test)


def test_a_counted_accuracy_is_in_the_ledger_and_within_the_budget(folder):
    prepared = prepare(read_config(config_of(folder)))
    report = prepared.report
    row = report.ledger[-1]
    assert row.release == "test accuracy"
    assert row.roles["records"].sensitivity == pytest.approx(1 / 40)
    assert report.epsilon <= 1.0
    assert report.epsilon_by_person[PEOPLE] == pytest.approx(1.0, rel=1e-6)
    assert any("has one in another file" in text for text in report.assumptions)
    assert any("Compare the spellings" in text for text in report.assumptions)
    found = run(prepared, folder / "out")
    right = expected_scores(folder, found.model).mean()
    assert abs(found.test.value - right) < 6 * row.noise_std
    assert found.test.value != right
    assert (found.test.left_out, found.test.trivial) == (None, None)


def test_a_run_stopped_before_its_result_is_written_releases_the_same(
    folder, monkeypatch
):
    prepared, seen = prepare(read_config(config_of(folder))), []

    def stop(out, result):
        seen.append(result.test)
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(results, "save", stop)
        with pytest.raises(Stop):
            run(prepared, folder / "out")
    assert run(prepared, folder / "out", resume=True).test == seen[0]
    assert run(prepared, folder / "b").test != seen[0]  # another key


def test_a_changed_test_file_is_refused_on_resume(folder):
    prepared = prepare(read_config(config_of(folder)))
    with pytest.raises(Stop):
        run(prepared, folder / "out", progress=stop_at(2))
    text = (folder / "test.csv").read_text()
    (folder / "test.csv").write_text(text.replace("yes", "no"))
    with pytest.raises(ValueError, match="records are not those the run began with"):
        run(prepared, folder / "out", resume=True)


def outcome(config, noise=1.0):
    """An audit of the noisy score: of two files that differ in one record."""
    features = jnp.ones((40, 4)) / 2
    label = jnp.ones(40)
    data = {"features": features, "label": label}
    neighbour = {"features": features, "label": label.at[0].set(-1.0)}
    claim = ledger_claims(evaluation.ledger_of(config))["records"]

    def noisy(records, *, key):
        score = evaluation.noisy_score(config, jnp.ones(4), records, key=key)
        exact = jnp.mean(records["label"] > 0)
        return exact + noise * (score - exact)

    return audit.trade_off(
        noisy, data, neighbour, claim, key=jax.random.key(3), runs=20_000
    )


def test_the_noisy_score_leaks_no_more_than_its_ledger_says(folder):
    config = read_config(config_of(folder))
    assert outcome(config).passed
    assert not outcome(config, noise=0.5).passed


def test_a_label_that_is_not_listed_is_no_more_than_a_wrong_one(folder):
    config = read_config(config_of(folder))
    records = {"features": jnp.ones((40, 4)) / 2, "label": jnp.ones(40)}
    unknown = {**records, "label": records["label"].at[0].set(jnp.nan)}
    scores = [
        evaluation.noisy_score(config, jnp.ones(4), tree, key=jax.random.key(5))
        for tree in (records, unknown)
    ]
    assert float(scores[0] - scores[1]) == pytest.approx(0.5 / 40, abs=1e-5)


REGRESSION = (
    TRAINING.replace('columns = ["pay"]', 'columns = ["age"]')
    .replace('column = "rich"', 'column = "pay"')
    .replace('positive = ["yes"]\nnegative = ["no"]', "mean = 30\nscale = 20")
    .replace('"logistic"', '"squared"')
)


@pytest.mark.slow
def test_a_numeric_label_is_tested_by_its_error_in_its_own_unit(tmp_path):
    rng = np.random.default_rng(0)
    for name in ("people", "test"):
        rows = [f"{a:.1f},{a + 5:.1f},Ulm" for a in rng.uniform(0, 60, 60)]
        lines = ["age,pay,town", *rows]
        (tmp_path / f"{name}.csv").write_text("\n".join(lines) + "\nx,9,Ulm\n")
    config = read_config(config_of(tmp_path, "public", 0, REGRESSION + SETTINGS))
    found = run(prepare(config), tmp_path / "out")
    records = config.data.load(tmp_path / "test.csv")
    given = 30 + 60 * records.label[:60]
    answers = 30 + 60 * np.clip(records.features[:60] @ found.model, -1, 1)
    rms = np.sqrt(np.mean((given - answers) ** 2))
    assert found.test.metric == "root mean squared error of pay"
    assert found.test.value == pytest.approx(rms, rel=1e-4)
    around = np.sqrt(np.mean((given - 30) ** 2))
    assert found.test.trivial == pytest.approx(around, rel=1e-4)
    assert found.test.left_out == 1


def test_a_file_of_nothing_to_test_on_says_so(folder):
    text = (folder / "test.csv").read_text().replace("yes", "1").replace("no", "0")
    (folder / "test.csv").write_text(text)
    found = run(prepare(read_config(config_of(folder, "non_private"))), folder / "out")
    assert "no record to test on" in str(found.test)
    assert results.load(folder / "out").test == found.test


def test_a_misspelt_class_is_found_in_public_records_before_anything_is_spent(folder):
    text = (folder / "test.csv").read_text().replace("yes", "Yes")
    (folder / "test.csv").write_text(text)
    prepared = prepare(read_config(config_of(folder, "public")))
    with pytest.raises(
        ValueError, match=r"no record of .*test.csv has the class 'yes'"
    ):
        run(prepared, folder / "out")
    assert not list((folder / "out").glob("*.json*"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("records = 40", "records = 0"), "records must be at least 1"),
        (
            ("records = 40", "records = 41"),
            "[data] asks for test.records = 41",
        ),
        (("test.csv", "people.csv"), "holds training or validation"),
        (("test.csv", "no.csv"), "no file of test records at"),
        (
            ("replace_one", "add_or_remove_one"),
            '"counted" needs neighbours = "replace_one"',
        ),
        (('"counted"', '"exact"'), '"public", "counted", "non_private"'),
    ],
)
def test_a_test_file_that_does_not_fit_is_refused(folder, capsys, change, said):
    path = config_of(folder)
    path.write_text(path.read_text().replace(*change))
    assert said in failure(capsys, "run", str(path), "--out", str(folder / "out"))
    assert not (folder / "out").exists()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    write_csv(folder, rows_of(60))
    (folder / "a.toml").write_text(TRAINING + SETTINGS)
    run(prepare(read_config(folder / "a.toml")), folder / "out")
    return folder / "out"


def predicted(finished, tmp_path, text):
    (tmp_path / "new.csv").write_text(text)
    out = tmp_path / "p.csv"
    command = ["predict", str(finished), str(tmp_path / "new.csv"), "--out", str(out)]
    assert main(command) == 0
    with out.open() as file:
        return list(csv.DictReader(file))


def test_predictions_are_those_of_the_released_coefficients(finished, tmp_path):
    # In another order, without label, with a column that is not used.
    rows = predicted(finished, tmp_path, "id,town,pay\n7,Rom,45\n8,Bonn,\n9,Ulm,x\n")
    model = results.load(finished).model
    made = np.array([[0.5 / 3, 0, 1, 1], [0, 0, 0, 1]])
    made /= np.linalg.norm(made, axis=1, keepdims=True)
    chance = 1 / (1 + np.exp(-(made @ model)))
    assert [row["row"] for row in rows] == ["1", "2", "3"]
    given = [float(row["probability of yes"]) for row in rows[:2]]
    np.testing.assert_allclose(given, chance, rtol=1e-5)
    wanted = ["yes" if p >= 0.5 else "no" for p in chance]
    assert [row["rich"] for row in rows] == [*wanted, ""]
    assert rows[2]["probability of yes"] == ""


def test_a_warning_has_the_form_of_an_error(tmp_path, capsys):
    (tmp_path / "a.toml").write_text((TRAINING + SETTINGS).replace("1e-5", "0.5"))
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert main(["calibrate", str(tmp_path / "a.toml")]) == 0
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("dpbilevel: warning: calibrate: delta = 0.5 is not below")


def test_rows_that_the_model_knows_less_of_are_counted(finished, tmp_path, capsys):
    predicted(finished, tmp_path, "town,pay\nRom,45\nOslo,\nOslo,1\nRom,x\nRom\n")
    assert (
        "(5 rows; 1 without an answer: more or fewer cells than the header has names; "
        "1 without an answer: text in the place of a number; 1 without a number in "
        "'pay', taken as the middle of the declared range; 2 with a value of 'town' "
        "that the config does not list)"
    ) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("metric", "value", "poor"),
    [
        ("accuracy", 0.5, True),
        ("accuracy", 0.7, False),
        ("root mean squared error of pay", 0.7, True),
        ("root mean squared error of pay", 0.5, False),
        ("accuracy", None, False),
    ],
)
def test_a_model_no_better_than_a_constant_is_said_to_be(metric, value, poor):
    fields = {"file": "test.csv", "kind": "public", "records": 40, "trivial": 0.6}
    found = str(evaluation.Evaluation(metric=metric, value=value, **fields))
    assert ("no better than that answer: the cells" in found) == poor


def test_classes_that_are_numbers_are_predicted_as_they_are_written(finished, tmp_path):
    page = json.loads((finished / "result.json").read_text())
    label = {"column": "rich", "positive": [1], "negative": [0]}
    page["config"]["data"]["label"] = label
    other = tmp_path / "out"
    other.mkdir()
    (other / "solution.npz").write_bytes((finished / "solution.npz").read_bytes())
    (other / "result.json").write_text(json.dumps(page))
    (row,) = predicted(other, tmp_path, "pay,town\n1,Ulm\n")
    assert row["rich"] in ("0", "1")
    assert "probability of 1" in row


def test_predictions_of_a_numeric_label_are_in_its_unit(finished, tmp_path):
    found = results.load(finished)
    label = {"column": "rich", "mean": 2.0, "scale": 0.5, "transform": "log1p"}
    tables = found.config.tables
    config = {**tables, "data": {**tables["data"], "label": label}}
    config["model"] = {"loss": "squared"}
    page = json.loads((finished / "result.json").read_text()) | {"config": config}
    other = tmp_path / "out"
    other.mkdir()
    (other / "solution.npz").write_bytes((finished / "solution.npz").read_bytes())
    (other / "result.json").write_text(json.dumps(page))
    (row,) = predicted(other, tmp_path, "pay,town\n,\n")
    value = np.expm1(2.0 + 1.5 * np.clip(found.model[-1], -1, 1))
    assert float(row["rich"]) == pytest.approx(value, rel=1e-5)
    assert row.keys() == {"row", "rich"}


def test_a_file_without_a_feature_or_that_exists_is_refused(finished, tmp_path, capsys):
    (tmp_path / "new.csv").write_text("pay\n1\n")
    command = ["predict", str(finished), str(tmp_path / "new.csv"), "--out"]
    out = str(tmp_path / "p.csv")
    assert "lacks columns that the predictions need: ['town']" in failure(
        capsys, *command, out
    )
    (tmp_path / "new.csv").write_text("pay,town\n")
    said = failure(capsys, *command, out, "--id", "nr")
    assert "lacks columns that the predictions need: ['nr']" in said
    assert main([*command, out]) == 0  # of a file without rows
    exists = str(tmp_path / "new.csv")
    assert "new.csv exists" in failure(capsys, *command, exists)
    nowhere = str(tmp_path / "no" / "p.csv")
    assert "there is no folder" in failure(capsys, *command, nowhere)


def test_the_report_of_a_counted_accuracy_comes_back_from_json(folder):
    report = prepare(read_config(config_of(folder))).report
    assert dpb.privacy.PrivacyReport.from_json(report.to_json()) == report
