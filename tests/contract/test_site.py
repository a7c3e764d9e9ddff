"""The pages of the documentation site, as a browser shows them."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import matplotlib.pyplot as plt
import pytest

from tests import chromium

ROOT = Path(__file__).parents[2]
BUILT_WITH = "sphinx", "furo", "myst_nb", "sphinx_design", "sphinx_copybutton"
PAGES = "index", "getting_started", "choosing", "results", "privacy", "errors"
PAGES += "tutorials/sources", "estimators", "coming_from/opacus", "command_line"
PAGES += ("api/generated/dpbilevel.fit",)  # one of the reference
MEASURES = """(() => {
  const page = document.documentElement;
  const pictures = [...document.querySelectorAll('img')];
  return {over: page.scrollWidth - page.clientWidth,
          broken: pictures.filter(i => !i.naturalWidth).map(i => i.src),
          shown: pictures.map(i => [i.src, i.getBoundingClientRect().width])};
})()"""
LEAST = 9.5  # pixels of text in figures
# Of text, and of letters that matplotlib draws as paths, in hundredths.
SIZES = re.compile(r"font(?:-size)?: ?([\d.]+)px|\bscale\(([\d.]+) -[\d.]+\)")


def smallest(figure, width):
    """The pixels of the smallest text of an SVG that is shown this wide."""
    sizes = [float(px or 100 * float(of)) for px, of in SIZES.findall(figure)]
    box = re.search(r'viewBox="0 0 ([\d.]+) ', figure)
    return min(sizes) * width / float(box[1])


def small(shown):
    """Figures with text that is too small, of pictures and their widths."""
    files = [(Path(unquote(urlsplit(url).path)), width) for url, width in shown]
    figures = [(f, smallest(f.read_text(), w)) for f, w in files if f.suffix == ".svg"]
    return {file.name: size for file, size in figures if size < LEAST}


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium.PROGRAM is None, reason="no chromium is installed"),
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, BUILT_WITH)),
        reason='needs pip install -e ".[docs]"',
    ),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site without the results of notebooks."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "--quiet", "-D", "nb_execution_mode=off"]
    subprocess.run([*command, ROOT / "docs", folder], cwd=ROOT, check=True)
    return folder


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("page", PAGES)
def test_a_page_fits_and_loads_nothing_from_other_hosts(
    page, width, scheme, site, tmp_path
):
    seen = chromium.shown(
        site / f"{page}.html",
        tmp_path / "p",
        width=width,
        scheme=scheme,
        expression=MEASURES,
    )
    assert [
        url for url in seen.requests if not url.startswith(("file:", "data:"))
    ] == []
    assert seen.errors == []
    shown = seen.value.pop("shown")
    assert seen.value == {"over": 0, "broken": []}
    assert small(shown) == {}


def test_a_page_that_does_not_fit_and_a_missing_picture_are_seen(tmp_path):
    file, head = tmp_path / "a.html", "<!DOCTYPE html><meta name='viewport'"
    wide = "<img src='none.png'><div style='width: 900px'>wide</div>"
    file.write_text(f"{head} content='width=device-width'><body>{wide}")
    options = {"width": 390, "scheme": "light", "expression": MEASURES}
    seen = chromium.shown(file, tmp_path / "p", **options).value
    assert seen["over"] > 0
    assert [Path(url).name for url in seen["broken"]] == ["none.png"]


@pytest.mark.parametrize("fonttype", ["path", "none"])
def test_small_text_of_a_figure_is_seen(fonttype, tmp_path):
    file = tmp_path / "a.svg"
    with plt.rc_context({"svg.fonttype": fonttype}):
        figure = plt.figure(figsize=(5, 2))
        figure.text(0, 0, "8 points", fontsize=8)
        figure.savefig(file)
        plt.close(figure)
    assert small([(file.as_uri(), 360)]) == {"a.svg": pytest.approx(8)}
    assert small([(file.as_uri(), 450)]) == {}
