"""The API reference: one page for each public name, found and not listed.

`write` makes the pages of the packages from their `__all__`; autosummary makes a page
for each name. Docstrings are written as the pages are, with `code` and $formulas$;
`as_rst` turns them into what autodoc reads. `Linked` turns every public name that a
page or a docstring mentions as `code` into a link to its page.
"""

import inspect
import re
import sys
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.transforms.post_transforms import SphinxPostTransform

import dpbilevel

# They are read as attributes alone, and autodoc imports what it documents.
sys.modules["dpbilevel.outputs"] = dpbilevel.outputs
sys.modules["dpbilevel.proximal"] = dpbilevel.proximal

PACKAGES = {
    "bilevel": "Problems of two levels",
    "applications": "Sources, penalties, recalibration",
    "onelevel": "Problems of one level",
    "games": "Games",
    "search": "Search by losses alone",
    "draws": "One draw instead of many steps",
    "planning": "Plans without settings",
    "privacy": "Building blocks of guarantees",
    "sklearn": "Estimators in scikit-learn's conventions",
    "audit": "Audits",
    "oracles": "Derivatives without privacy",
    "sets": "Constraint sets",
    "outputs": "Output rules",
    "proximal": "Public terms with a proximal operator",
}
# Modules of a package that have a page of their own.
MODULES = {
    "audit.debug": "NON-PRIVATE views of a run",
}
# Functions that have the names of parameters or methods, which stand alone as `code`
# more often.
OF_PARAMETERS = "delta", "epsilon", "noise_multiplier", "fit", "start"
MADE = ".. This page is made by docs/reference.py.\n"


def public() -> dict[str, tuple[str, ...]]:
    """Return the public names of every module, by the module's path."""
    top = [n for n in dpbilevel.__all__ if not inspect.ismodule(getattr(dpbilevel, n))]
    names = {"": tuple(sorted(n for n in top if n != "__version__"))}
    for path in (*PACKAGES, *MODULES):
        module = _module(path)
        names[path] = tuple(
            name for name in _names(module) if not inspect.ismodule(vars(module)[name])
        )
    return names


def _module(path: str):
    found = dpbilevel
    for part in path.split("."):
        found = getattr(found, part) if part else found
    return found


def _names(module) -> list[str]:
    """Return `__all__` of a module, or the names that it defines."""
    if hasattr(module, "__all__"):
        return sorted(module.__all__)
    kinds = (inspect.isclass, inspect.isfunction)
    return sorted(
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and any(kind(value) for kind in kinds)
        and value.__module__ == module.__name__
    )


def homes() -> dict[str, str]:
    """Return the documented full name for each way to write a public name."""
    names = public()
    found, short = {}, {}
    for path, offered in names.items():
        module = f"dpbilevel.{path}" if path else "dpbilevel"
        for name in offered:
            full = f"dpbilevel.{name}" if name in names[""] else f"{module}.{name}"
            written = f"{path}.{name}" if path else name
            alone = () if name in OF_PARAMETERS else ("",)
            for prefix in (*alone, "dpb.", "dpbilevel."):
                found[prefix + written] = full
            if alone:
                short.setdefault(name, set()).add(full)
    # A name alone, where only one module has it.
    one = {name: min(full) for name, full in short.items() if len(full) == 1}
    return one | found


def _title(text: str) -> str:
    return f"{text}\n{'=' * len(text)}\n"


def _summary(names: list[str], toctree: bool) -> str:
    made = "   :toctree: generated\n" if toctree else ""
    entries = "\n".join(f"   ~{name}" for name in names)
    return f".. autosummary::\n{made}   :nosignatures:\n\n{entries}\n"


def write(folder: Path) -> None:
    """Write the pages of the packages.

    Args:
        folder: Where; the page of a name goes into `generated` below it.
    """
    folder.mkdir(exist_ok=True)
    names = public()
    pages = {
        path: (f"dpb.{path}: {title[0].lower() + title[1:]}", f"dpbilevel.{path}")
        for path, title in (PACKAGES | MODULES).items()
    }
    for path, (title, full) in pages.items():
        doc = as_rst(inspect.getdoc(_module(path)) or "")
        own = [f"{full}.{n}" for n in names[path] if n not in names[""]]
        top = [f"dpbilevel.{n}" for n in names[path] if n in names[""]]
        parts = [MADE, _title(title), doc, ""]
        parts += [_summary(own, toctree=True)] if own else []
        if top:
            parts += ["Also in this package, and at the top level:\n"]
            parts += [_summary(top, toctree=False)]
        _put(folder / f"{path}.rst", "\n".join(parts))
    listed = "\n".join(f"   {path}" for path in pages)
    index = [
        MADE,
        _title("API reference"),
        "Everything public, from the docstrings. ``import dpbilevel as dpb`` gives the",
        "names of this page; the packages below it hold the rest.\n",
        _summary([f"dpbilevel.{n}" for n in names[""]], toctree=True),
        f"Packages\n--------\n\n.. toctree::\n   :maxdepth: 1\n\n{listed}\n",
    ]
    _put(folder / "index.rst", "\n".join(index))


def _put(file: Path, text: str) -> None:
    """Write a page that changed: Sphinx reads those alone."""
    if not file.exists() or file.read_text() != text:
        file.write_text(text)


def as_rst(text: str) -> str:
    r"""Return a docstring as reStructuredText: code and formulas."""
    kept: list[str] = []  # what no rule below may change, in the order of its places

    def keep(new: str) -> str:
        kept.append(new)
        return f"\1{len(kept) - 1}\2"

    def code(match: re.Match) -> str:
        return keep(f"``{' '.join(match[1].split())}``")

    def display(match: re.Match) -> str:
        indent, formula = match[1], match[2]
        lines = [line.strip() for line in formula.strip().split("\n")]
        body = "\n".join(f"{indent}   {line}" for line in lines if line)
        return f"\n{indent}.. math::\n\n{keep(body)}\n\n{indent}"

    def inline(match: re.Match) -> str:
        return keep(f":math:`{' '.join(match[1].split())}`")

    text = re.sub(r"``?([^`]+?)``?", code, text)
    text = re.sub(r"^( *)\$\$(.+?)\$\$", display, text, flags=re.S | re.M)
    text = re.sub(r"\$([^$]+?)\$", inline, text)
    text = re.sub(r"([*|\\])", r"\\\1", text)
    text = re.sub(r"(?<=\w)_(?!\w)", r"\\_", text)
    # Code and formulas are apart from the letters beside them.
    text = re.sub("(?<=[\\w\2])\1", "\\\\ \1", text)
    text = re.sub("\2(?=\\w)", "\2\\\\ ", text)
    while "\1" in text:  # code inside formulas
        text = re.sub("\1(\\d+)\2", lambda match: kept[int(match[1])], text)
    return text


def _docstring(app, what, name, obj, options, lines: list[str]) -> None:
    lines[:] = as_rst("\n".join(lines)).split("\n")


class Linked(SphinxPostTransform):
    """Public names that stand as code become links to their pages."""

    default_priority = 5  # before references are resolved
    names = homes()

    def run(self, **kwargs) -> None:
        """Wrap the literals of one page."""
        for literal in list(self.document.findall(nodes.literal)):
            full = self.names.get(literal.astext().removesuffix("()"))
            linked = (nodes.reference, nodes.title, addnodes.pending_xref)
            inside = isinstance(literal.parent, linked)
            if full is None or inside or full == self.own_page():
                continue
            link = addnodes.pending_xref(
                "",
                refdomain="py",
                reftype="obj",
                reftarget=full,
                refdoc=self.env.current_document.docname,
                refwarn=True,
            )
            literal.replace_self(link)
            link += literal

    def own_page(self) -> str:
        """Return the name that this page documents, if any."""
        return self.env.current_document.docname.removeprefix("api/generated/")


def connect(app) -> None:
    """Has autodoc and the pages use the above."""
    app.connect("autodoc-process-docstring", _docstring, priority=100)
    app.add_post_transform(Linked)
