"""The page of a report: what it says, and how a browser shows it."""

import dataclasses
import html
import math
import re
import tomllib
from html.parser import HTMLParser

import pytest

import dpbilevel as dpb
from dpbilevel.applications import SelectedSources
from dpbilevel.audit.certificate import environment, word_of
from dpbilevel.audit.claims import largest_powers
from dpbilevel.cli import page, results, tasks
from dpbilevel.cli.config import parse_config, public_classes, read_config
from dpbilevel.cli.evaluation import Evaluation
from dpbilevel.cli.main import main
from dpbilevel.cli.plans import prepare
from dpbilevel.cli.toml_tables import Location
from dpbilevel.privacy import Status
from dpbilevel.privacy.sampling.base import AbstractSampling
from dpbilevel.runs import spending
from tests import cases, chromium
from tests.cases import slow
from tests.cli.test_cli import failure
from tests.cli.test_csv_files import SETTINGS, TRAINING
from tests.cli.test_figure import LONG, ONE_WORD, result_of
from tests.cli.test_runner import rows_of, write_csv

TASKS = ["training", "source_weighting", "group_fair"]


TERMS = environment().get_template("terms.jinja").module.TERMS


def page_of(result, spent="spending: 1 run"):
    return certificate_of(result, spent).html()


def certificate_of(result, spent="spending: 1 run"):
    return page.certificate_of(result, spent, "Run in <out>", (1, 1.0, 1e-5))


class Tags(HTMLParser):
    """The elements that are open, where every one must be closed in order."""

    EMPTY = ("meta", "link")

    def __init__(self):
        super().__init__()
        self.open, self.text = [], []

    def handle_starttag(self, tag, attrs):
        assert not {"src", "srcset", "action"} & {name for name, _ in attrs}
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not {"style", "svg"} & {*self.open}:
            self.text.append(data)


def text_of(page):
    parser = Tags()
    parser.feed(page)
    assert parser.open == []
    return " ".join(" ".join(parser.text).split())


@pytest.mark.parametrize("task", TASKS)
def test_a_page_is_well_formed_and_needs_nothing_else(task):
    text = page_of(result_of(task, "<script>alert(1)</script>{}", 3))
    text_of(text)
    assert "<script" not in text
    assert not re.findall(r'(?:href|src)="(?!#|data:)', text.replace("xlink:", ""))
    assert "url(http" not in text
    assert "#222222" not in text  # colors that a dark screen would hide


def test_the_config_on_a_page_is_toml_that_plans_the_same_guarantee():
    result = result_of("source_weighting")
    (shown,) = re.findall("The config</summary><pre>(.*?)</pre>", page_of(result), re.S)
    tables = tomllib.loads(html.unescape(shown))
    assert prepare(parse_config(tables, Location("a.toml"))).report == result.report


def test_an_absolute_path_of_a_config_is_a_name_on_the_page():
    tables = {"path": "/home/a/b.csv", "validation_path": "c/d.csv"}
    assert page._lines(tables) == 'path = "b.csv"\nvalidation_path = "c/d.csv"'


def test_a_page_says_the_guarantee_the_ledger_and_the_assumptions():
    result = result_of("source_weighting")
    said = text_of(page_of(result))
    report = result.report
    for assumption in report.assumptions:
        assert " ".join(assumption.split())[1:] in said  # a sentence has a capital
    assert "replaced by any other record" in said
    assert "among those of the training or of the validation, not among both" in said
    assert "one answer has at most 75 %" in said
    assert "false alarms in 1 % of all cases detects at most 2 %" in said
    assert "false alarms in 5 % of all cases detects at most 8.5 %" in said
    for row in report.ledger:
        assert row.release in said
        assert f"{row.noise_std:.3g}" in said
    assert 'solver.type = "F2SA"' in said
    assert "spending: 1 run" in said
    assert "Run in <out>" in said
    for name in (*result.names, *result.config.data.coefficients):
        assert name in said


def test_an_exact_accuracy_on_records_is_named_wherever_all_is_said_to_be_covered():
    result = result_of("training")
    exact = Evaluation("accuracy", 0.75, "t.csv", "non_private", 40)
    public = dataclasses.replace(exact, kind="public")
    cut = "the exact accuracy on t.csv, which is NON-PRIVATE"
    asked = "Are releases without differential privacy made from the same records?"
    for test, count in (None, 0), (public, 0), (exact, 3):
        certificate = certificate_of(dataclasses.replace(result, test=test))
        said, sheet = text_of(certificate.html()), certificate.nist()
        assert said.count(cut) == count
        assert ("All of it is covered" in said) == (count == 0)
        assert ("NON-PRIVATE test accuracy 0.75" in said) == (count > 0)
        answer = f"Yes: {cut}. TODO: others." if count else "TODO"
        assert f"{asked} | {answer} |" in sheet
        for text in sheet, certificate.registry():
            assert (f"the releases of its ledger and {cut}" in text) == (count > 0)


@pytest.mark.parametrize("task", TASKS)
def test_every_word_of_the_ledger_is_explained(task):
    result = result_of(task)
    meanings = TERMS | {**tasks.TASKS[task].terms}
    said = text_of(page_of(result))
    for row in result.report.ledger:
        for role, part in row.roles.items():
            for name in (row.release, role, part.sampling):
                word = word_of(name)
                assert f"{word} {meanings[word]}" in said
    assert tasks.TASKS["penalty_tuning"].terms["screen"] not in said  # in no ledger


def names_of(kind):
    """The names of the releases of a solver, in all of its cases."""
    for case in cases.found("CONTRACT").values():
        if type(case.solver) is kind:
            solver = case.solver.with_sizes(case.sizes).with_noise(1.0)
            ledger = solver.ledger(case.problem, case.sizes)
            yield from (release.name for release in ledger.releases)


@pytest.mark.parametrize("name", tasks.TASKS)
def test_every_release_of_a_solver_is_explained_by_the_task(name):
    """A word that is missing here belongs in `Task.terms`, in the task's own file."""
    task = tasks.TASKS[name]
    kinds = [
        kind
        for kind in public_classes(dpb.AbstractSolver).values()
        if kind.in_config and issubclass(task.problem_type, kind.problem_type)
    ]
    words = {word_of(word) for kind in kinds for word in names_of(kind)}
    words |= {word for kind in kinds for word in getattr(kind, "stages", ())}
    assert words
    missing = words - task.terms.keys()
    assert not missing, f"add {missing} to terms of the Task {name} in its own file"


def test_every_sampling_of_a_config_is_explained():
    missing = public_classes(AbstractSampling).keys() - TERMS.keys()
    where = "TERMS of dpbilevel/audit/templates/terms.jinja"
    assert not missing, f"add {missing} to {where}"


def test_a_run_that_diverged_or_did_not_move_is_shown_as_such():
    result = result_of("source_weighting")
    still = dataclasses.replace(result, shown=result.trajectory[0], rejected_updates=3)
    said = text_of(page_of(still))
    assert "Each weight is where it started" in said
    assert "the run diverged: 3 updates were left out" in said


def test_an_answer_that_is_no_point_of_the_way_is_said_to_be_none():
    result = result_of("group_fair")
    said = "The answer is not the last point of the path"
    assert said not in text_of(page_of(result))
    mean = dataclasses.replace(result, shown=result.trajectory.mean(0))
    means = "in the figure. It is the average over the last steps."
    assert f"{said} {means}" in text_of(page_of(mean))


@pytest.mark.parametrize("task", ["training", *slow("source_weighting")])
def test_an_answer_of_any_solver_has_a_page(task):
    result = result_of(task)
    pipeline = SelectedSources(dpb.NoisyGD(1, 1.0, 1.0), dpb.NoisyGD(1, 1.0, 1.0))
    config = dataclasses.replace(result.config, solver=pipeline)
    for changed in result, dataclasses.replace(result, config=config):
        other = dataclasses.replace(changed, shown=result.trajectory.mean(0))
        assert "The answer is not the last point of the path" in text_of(page_of(other))


@pytest.mark.parametrize("delta", [0.0, 2e-5])
def test_a_page_of_several_runs_names_exceptions_if_there_are_any(delta):
    found = certificate_of(result_of("training"))
    text = text_of(dataclasses.replace(found, total=(2, 2.0, delta)).html())
    assert "they cost epsilon 2" in text
    assert ("delta 1 in 50,000 together" in text) is (delta > 0)
    assert not re.search(r"at most 0\b|delta 0 together", text)


def test_the_total_is_of_all_runs_of_a_folder_also_for_one_that_was_moved(tmp_path):
    report = result_of("training").report
    for number in (1, 2):
        spending.begin(tmp_path, number, report, {})
    (tmp_path / "run-1").mkdir()
    expected = 2, pytest.approx(2 * report.epsilon), 2 * report.delta
    for folder in tmp_path, tmp_path / "run-1":
        assert results.total(folder, report) == expected
    unknown = math.inf, 1.0
    # Rows of a person may cost more than one row, and what is declared may not hold.
    for change in {"unit": "one person"}, {"status": Status.CONDITIONAL}:
        other = dataclasses.replace(report, **change)
        assert results.total(tmp_path, other)[1:] == unknown
    (tmp_path / spending.NAME).write_text("damaged")  # no total that may be too small
    assert results.total(tmp_path, report)[1:] == unknown


def test_the_power_of_a_run_is_below_that_of_its_budget(tmp_path):
    (tmp_path / "a.toml").write_text(TRAINING + SETTINGS)
    prepared = prepare(read_config(tmp_path / "a.toml"))
    ledger = prepared.solver.ledger(prepared.problem, prepared.config.sizes)
    powers, four = largest_powers(ledger), largest_powers(ledger, ledger.repeat(4))
    for alarms, power in powers.items():
        assert float(alarms) < power < math.e * float(alarms) + 1e-5
        assert power < four[alarms]


def test_the_command_writes_a_page_into_a_new_file(tmp_path, capsys):
    write_csv(tmp_path, rows_of(60))
    (tmp_path / "a.toml").write_text(TRAINING + SETTINGS)
    out, file = str(tmp_path / "out"), str(tmp_path / "a.html")
    others = ["--registry", str(tmp_path / "a.yaml"), "--nist", str(tmp_path / "a.md")]
    assert main(["run", str(tmp_path / "a.toml"), "--out", out]) == 0
    dpb.search.limit_spending(tmp_path, dpb.PrivacyBudget(3.0, 1e-3))
    assert main(["report", out, "--html", file, *others]) == 0
    assert capsys.readouterr().out.count(f"certificate for a reviewer: {file}") == 1
    assert "exists" in failure(capsys, "report", out, "--html", file)
    left = 3 - results.load(tmp_path / "out").report.epsilon
    assert f"left: epsilon = {left:.6g}" in (tmp_path / "a.html").read_text()
    assert "TODO" in (tmp_path / "a.yaml").read_text()
    sheet = (tmp_path / "a.md").read_text()
    assert "TODO: list all releases of these records outside this folder" in sheet
    for kind in "html", "yaml", "md":  # the name of a folder, and not where it is
        text = (tmp_path / f"a.{kind}").read_text()
        assert f"limit of {tmp_path.name}: " in text
        assert str(tmp_path) not in text
    assert 0.05 < results.load(tmp_path / "out").power["0.05"] < 0.2


def test_a_folder_of_another_version_says_what_to_do(tmp_path, capsys):
    (tmp_path / results.RESULT).write_text('{"format": 1}')
    said = failure(capsys, "report", str(tmp_path), "--html", str(tmp_path / "a.html"))
    assert "its format is 1, not 2. Report it with the version that wrote it" in said
    assert not (tmp_path / "a.html").exists()


# The page is as wide as the window, no text is small or without contrast, and nothing
# wider than the window can be reached only by scrolling the page.
MEASURES = """(() => {
  const page = document.documentElement, wide = [], small = [];
  const inner = element => element.closest('.wide, pre, svg');
  for (const element of document.body.querySelectorAll('*')) {
    const box = element.getBoundingClientRect();
    if (!inner(element) && box.right > page.clientWidth + 0.5)
      wide.push(element.outerHTML);
    const size = parseFloat(getComputedStyle(element).fontSize);
    if (size < 12) small.push(element.tagName);
  }
  const style = getComputedStyle(document.body);
  const bars = document.querySelectorAll('figure svg').length;
  const widths = [...document.querySelectorAll('figure svg')].map(
    s => s.getBoundingClientRect().width);
  return {scroll: page.scrollWidth, client: page.clientWidth, window: innerWidth,
          wide, small, bars, widths,
          color: style.color, background: style.backgroundColor};
})()"""


def luminance(color):
    parts = [int(v) / 255 for v in re.findall(r"\d+", color)[:3]]
    parts = [v / 12.92 if v <= 0.04 else ((v + 0.055) / 1.055) ** 2.4 for v in parts]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


@pytest.mark.slow
@pytest.mark.skipif(chromium.PROGRAM is None, reason="no chromium is installed")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("task", TASKS)
def test_a_browser_shows_the_page(task, width, scheme, tmp_path):
    file = tmp_path / "a.html"
    file.write_text(page_of(result_of(task, ONE_WORD, 16), f"spending: {LONG}" * 3))
    seen = chromium.shown(
        file, tmp_path / "p", width=width, scheme=scheme, expression=MEASURES
    )
    others = [url for url in seen.requests if not url.startswith("data:")]
    assert others == [file.resolve().as_uri()]
    assert seen.errors == []
    found = seen.value
    assert found["window"] == width
    assert found["scroll"] == found["client"]
    assert found["wide"] == []
    assert found["small"] == []
    assert found["bars"] >= 2
    assert min(found["widths"]) >= min(300, width - 60)
    light, dark = sorted(map(luminance, (found["color"], found["background"])))[::-1]
    assert (light + 0.05) / (dark + 0.05) > 7
    assert (luminance(found["background"]) < 0.1) == (scheme == "dark")


@pytest.mark.slow
@pytest.mark.skipif(chromium.PROGRAM is None, reason="no chromium is installed")
def test_a_browser_reports_requests_errors_and_what_is_too_wide(tmp_path):
    file = tmp_path / "a.html"
    file.write_text(
        '<!DOCTYPE html><meta name="viewport" content="width=device-width">'
        '<title>a</title><body><img src="https://example.invalid/a.png">'
        '<div style="width: 900px; font-size: 8px">wide</div><script>no()</script>'
    )
    seen = chromium.shown(
        file, tmp_path / "p", width=390, scheme="light", expression=MEASURES
    )
    assert "https://example.invalid/a.png" in seen.requests
    assert any("no is not defined" in text for text in seen.errors)
    assert seen.value["wide"]
    assert seen.value["small"]
