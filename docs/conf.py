"""The documentation site: `make docs`, then open build/docs/html/index.html."""

import datetime
import re
import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))  # the package, and docs itself

import dpbilevel  # noqa: E402
from docs import reference  # noqa: E402

project = "dpbilevel"
version = release = dpbilevel.__version__
copyright = f"{datetime.date.today().year}, the dpbilevel authors"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
    "sphinx-mathjax-offline",
    "sphinx_copybutton",
    "sphinx_design",
]

# Pages.
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 4
# Tables made by benchmarks have small headings under the title of their page, and
# notebooks that are not run do not say the language of their cells.
suppress_warnings = ["myst.header", "myst-nb.lexer"]

# Notebooks run at every build, once per content: results are kept in build/.
nb_execution_mode = "cache"
nb_execution_cache_path = str(DOCS.parent / "build" / "docs" / "cache")
nb_execution_timeout = 240
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_merge_streams = True

# Formulas by the MathJax of sphinx-mathjax-offline: no request to another host.
mathjax3_config = {"chtml": {"mtextInheritFont": True}}

# The draft of a paper is no page.
exclude_patterns = ["paper"]

# Reference.
templates_path = ["_templates"]
autosummary_generate = True
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_default_options = {"members": True}
autodoc_class_signature = "mixed"
maximum_signature_line_length = 68
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
napoleon_custom_sections = ["Privacy"]
add_module_names = False
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = f"dpbilevel {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_extra_path = ["llms.txt"]  # at the root of the site, as llmstxt.org asks
html_copy_source = False
html_show_sphinx = False
copybutton_exclude = ".linenos, .gp, .go"


# Files at the root of the repository that are pages of the site as well.
FILES = {"security": "SECURITY", "contributing": "CONTRIBUTING"}
FILES |= {"changelog": "CHANGELOG"}


def _root_files(app, docname: str, text: list[str]) -> None:
    """Fill the pages of these files, and point links at the pages."""
    if docname in FILES:
        file = DOCS.parent / f"{FILES[docname]}.md"
        text[0] = file.read_text().replace("](docs/", "](")
    for page, name in FILES.items():
        for link in (f"]({name}.md", f"](../{name}.md"):
            text[0] = text[0].replace(link, f"]({page}.md")
    # Pages of results are in the repository and not on the site: their paths are shown.
    result = r"\[([^]]*)\]\(\.\./(?:\.\./)?(benchmarks/results/\w+\.md)(?:#[\w-]+)?\)"
    text[0] = re.sub(result, r"\1 (`\2`)", text[0])


def setup(app):
    """Connect what docs/reference.py does with docstrings and names."""
    app.connect("source-read", _root_files)
    reference.write(DOCS / "api")
    reference.connect(app)
