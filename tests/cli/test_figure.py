"""Texts of figures neither touch each other nor leave the figure."""

import dataclasses
import itertools
import re
import tomllib

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.text import Text

from dpbilevel.cli import page
from dpbilevel.cli.config import parse_config
from dpbilevel.cli.plans import prepare
from dpbilevel.cli.results import Result
from dpbilevel.cli.toml_tables import Location
from tests.cli.test_csv_files import SETTINGS, TRAINING
from tests.cli.test_runner import CSV_DATA, GENERATED

LONG = "University hospital of the northern district, outpatients of ward {}"
ONE_WORD = "hospital_of_the_northern_district_without_any_space_{}"
GROUPS = """
task = "group_fair"
[privacy]
epsilon = 1.0
delta = 1e-5
neighbours = "replace_one"
[data]
source = "csv"
training = 40
[[data.numeric]]
name = "pay"
columns = ["pay"]
mean = [3.0]
scale = [1.0]
[data.label]
column = "rich"
positive = ["yes"]
negative = ["no"]
[data.groups]
column = "town"
[model]
radius = 5.0
[solver]
type = "GroupDescent"
num_steps = 3
"""


def tables_of(task, name, count):
    """A config whose sources, groups or categories have these names."""
    values = [name.format(i) for i in range(count)]
    if task == "source_weighting":
        tables = tomllib.loads(GENERATED)
        tables["data"] = tomllib.loads(CSV_DATA)
        tables["data"]["sources"]["values"] = values
        tables["data"]["categorical"][0]["values"] = values
        tables["model"]["num_sources"] = count
        return tables
    if task == "group_fair":
        tables = tomllib.loads(GROUPS)
        tables["data"]["groups"]["values"] = values
        tables["model"]["shares"] = [1 / count] * count
        return tables
    tables = tomllib.loads(TRAINING + SETTINGS)
    tables["data"]["categorical"][0]["values"] = values
    return tables


def result_of(task, name="{}", count=4):
    """A result as a run of such a config could write it."""
    config = parse_config(tables_of(task, name, count), Location("a.toml"))
    rng = np.random.default_rng(0)
    names = config.model.names(config.data)
    trajectory = np.abs(rng.normal(size=(5, len(names))))
    shown = trajectory[-1]
    model = rng.normal(size=len(config.data.features))
    if config.task.shows_model:
        shown = model
    return Result(
        shown=shown,
        x=shown if config.task.two_levels else model,
        y=model if config.task.two_levels else None,
        trajectory=trajectory,
        report=prepare(config).report,
        versions={},
        config=config,
        power={"0.01": 0.0197, "0.05": 0.0842},
    )


def boxes(drawn):
    """The boxes of all texts and legends that are seen, in pixels."""
    canvas = FigureCanvasAgg(drawn)
    canvas.draw()
    hidden = set()
    for axes in drawn.findobj(lambda a: hasattr(a, "xaxis")):
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            for tick in axis.get_major_ticks():
                if not low <= tick.get_loc() <= high:
                    hidden |= {tick.label1, tick.label2}
    in_legend = {t for legend in drawn.findobj(Legend) for t in legend.findobj(Text)}
    texts = [
        artist
        for artist in drawn.findobj(Text)
        if artist.get_visible() and artist.get_text().strip()
    ]
    shown = [t for t in texts if t not in hidden and t not in in_legend]
    shown += drawn.findobj(Legend)
    renderer = canvas.get_renderer()
    return {str(a): a.get_window_extent(renderer) for a in shown}


def touching(drawn):
    """The pairs of texts whose boxes have a point in common, and those that leave."""
    found = boxes(drawn)
    pairs = itertools.combinations(found.items(), 2)
    touch = [(a, b) for (a, box), (b, other) in pairs if box.overlaps(other)]
    width, height = drawn.bbox.size
    out = [
        name
        for name, box in found.items()
        if box.x0 < 0 or box.y0 < 0 or box.x1 > width or box.y1 > height
    ]
    return touch + out


SLOW = pytest.mark.slow
NAMES = [
    pytest.param(LONG, 16, id="long"),
    pytest.param(ONE_WORD, 2, id="word", marks=SLOW),
    pytest.param("{}", 16, id="short", marks=SLOW),
]


@pytest.mark.parametrize(("name", "count"), NAMES)
@pytest.mark.parametrize("task", ["source_weighting", "group_fair", "training"])
def test_no_text_of_a_figure_touches_another(task, name, count):
    for drawn in page.figures(result_of(task, name, count)).values():
        assert touching(drawn) == []


def test_texts_that_touch_are_seen():
    *_, drawn = page.figures(result_of("training", LONG, 2)).values()
    axes = drawn.findobj(lambda a: hasattr(a, "xaxis"))[-1]
    axes.set_yticks([0, 0.05], ["one", "another"])
    assert len(touching(drawn)) == 1
    out = Figure()
    out.text(0.99, 0.5, "a text that is too long")
    assert len(touching(out)) == 1


def test_more_answers_than_can_be_named_are_counted():
    drawn = page.figures(result_of("group_fair", LONG, 40))["the released answer"]
    assert touching(drawn) == []
    texts = [text.get_text() for text in drawn.findobj(Text)]
    assert "each group (40)" in texts


def test_long_names_stay_apart_where_they_are_broken():
    labels = [page._wrapped(name) for name in ("a b", LONG, ONE_WORD, "$x$")]
    assert labels[0] == "a b"
    assert [len(text.split("\n")) for text in labels] == [1, 2, 2, 1]
    assert all(len(line) <= 24 for text in labels for line in text.split("\n"))
    assert labels[3] == r"\$x\$"


def test_drawings_of_a_page_are_the_panels_in_colors_that_can_change():
    drawn = page.drawings(result_of("source_weighting", "<b>{}", 3))
    assert [*drawn] == [
        "weight at every step",
        "the released answer",
        "coefficients of the released model",
    ]
    allowed = {page.INK, page.RULE, "#737373"}
    for text in drawn.values():
        assert text.startswith("<svg")
        assert text.rstrip().endswith("</svg>")
        assert "<b>" not in text
        colors = set(re.findall(r"#[0-9a-f]{6}\b", text))
        assert colors <= allowed | {color.lower() for color in page._COLORS}


def test_drawings_are_the_same_every_time():
    result = result_of("training", "{}", 2)
    assert page.drawings(result) == page.drawings(result)


def test_a_result_that_did_not_move_has_the_model_alone():
    result = result_of("source_weighting", "{}", 2)
    still = np.full_like(result.trajectory, 0.5)
    result = dataclasses.replace(result, trajectory=still, shown=still[0])
    assert [*page.drawings(result)] == ["coefficients of the released model"]
