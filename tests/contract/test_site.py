"""The pages of the documentation site, as a browser shows them."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests import chromium

ROOT = Path(__file__).parents[2]
BUILT_WITH = "sphinx", "furo", "myst_nb", "sphinx_design", "sphinx_copybutton"
PAGES = "index", "getting_started", "choosing", "coming_from", "utility", "privacy"
MEASURES = """(() => {
  const page = document.documentElement;
  const pictures = [...document.querySelectorAll('img')];
  return {over: page.scrollWidth - page.clientWidth,
          broken: pictures.filter(i => !i.naturalWidth).map(i => i.src)};
})()"""

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
    assert seen.value == {"over": 0, "broken": []}


def test_a_page_that_does_not_fit_and_a_missing_picture_are_seen(tmp_path):
    file, head = tmp_path / "a.html", "<!DOCTYPE html><meta name='viewport'"
    wide = "<img src='none.png'><div style='width: 900px'>wide</div>"
    file.write_text(f"{head} content='width=device-width'><body>{wide}")
    options = {"width": 390, "scheme": "light", "expression": MEASURES}
    seen = chromium.shown(file, tmp_path / "p", **options).value
    assert seen["over"] > 0
    assert [Path(url).name for url in seen["broken"]] == ["none.png"]
