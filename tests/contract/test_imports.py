"""What `import dpbilevel` costs, and what reading its names may raise."""

import functools
import importlib.util
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest

import dpbilevel as dpb
from dpbilevel._version import TESTED_JAX
from dpbilevel.core import loop
from dpbilevel.privacy.per_example import mixing

ROOT = Path(__file__).parents[2]
PYPROJECT = ROOT / "pyproject.toml"
SLOW = {"dp_accounting", "scipy.stats", "sklearn", "matplotlib", "pandas", "tqdm"}
WITHOUT_SKLEARN = "import sys; sys.modules['sklearn'] = sys.modules['joblib'] = None\n"
READ_ALL = "[getattr(dpbilevel, name) for name in dir(dpbilevel) if name != {!r}]\n"


def squared(w, z):
    return (w - z) ** 2 / 2


def output(code):
    """What a new process prints that runs `code`."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# A process for several tests, because starting JAX takes the time. It prints a line
# after the import, one after a module, two after all names, one after the estimators.
FIRST_READS = f"""import dpbilevel, gc, sys
print(*sys.modules)
dpbilevel.fit
print(dpbilevel.privacy.accounting.profiles.__name__)
import jax
def program(x):
    {READ_ALL.format("PrivateSearch")}
    return x
jax.jit(program)(1.0)
print(*sys.modules)
gc.collect()
print(sum(isinstance(v, jax.core.Tracer) for v in gc.get_objects()))
import dpbilevel.sklearn
print(*sys.modules)"""


@functools.cache
def first_reads():
    imported, module, read, tracers, estimators = output(FIRST_READS).splitlines()
    loaded = [set(line.split()) for line in (imported, read, estimators)]
    return *loaded, module, int(tracers)


def test_import_loads_no_module_that_takes_long():
    modules, *_ = first_reads()
    assert not modules & (SLOW | {"optax", "equinox", "scipy.special"})


def test_reading_the_public_names_loads_no_module_that_only_some_calls_need():
    _, modules, *_ = first_reads()
    assert "dpbilevel.bilevel.penalty" in modules
    assert not modules & SLOW


def test_first_read_inside_a_program_keeps_no_tracer():
    *_, tracers = first_reads()
    assert tracers == 0


def test_estimators_are_not_imported_with_the_library():
    _, before, after, *_ = first_reads()
    assert "dpbilevel.sklearn" not in before
    assert "dpbilevel.sklearn.logistic" in after


def test_modules_are_readable_without_their_import():
    *_, module, _ = first_reads()
    assert module == "dpbilevel.privacy.accounting.profiles"


# The same without scikit-learn, whose import is said to fail.
WITHOUT = f"""{WITHOUT_SKLEARN}
import inspect, pydoc, dpbilevel
def refused(use):
    try:
        use()
    except ImportError as error:
        print(error)
refused(lambda: __import__("dpbilevel.sklearn"))
refused(lambda: __import__("dpbilevel.search.estimator"))
assert hasattr(dpbilevel, "PrivateSearch")
assert dpbilevel.search.Range(0.1, 1.0).high == 1.0
assert "PrivateSearch" in dict(inspect.getmembers(dpbilevel))
assert "PrivateSearch" in pydoc.render_doc(dpbilevel)
from dpbilevel import *
refused(lambda: PrivateSearch(None, space={{}}, budget=None))
print(PrivateSearch.__name__, NoisyGD.__name__)"""


@functools.cache
def without_scikit_learn():
    return output(WITHOUT).splitlines()


def test_names_are_readable_without_scikit_learn():
    *_, names = without_scikit_learn()
    assert names == "PrivateSearch NoisyGD"


def test_use_without_scikit_learn_says_what_to_install():
    estimators, module, search, _ = without_scikit_learn()
    assert [module, search] == 2 * [
        "dpbilevel.PrivateSearch needs scikit-learn: run pip install -e '.[cli]' in a "
        "clone of dpbilevel, or pip install scikit-learn"
    ]
    assert estimators == (
        "dpbilevel.sklearn needs scikit-learn: run pip install -e '.[sklearn]' in a "
        "clone of dpbilevel, or pip install scikit-learn"
    )


def test_unknown_name_is_an_attribute_error():
    assert not hasattr(dpb, "NoisyGradient")
    assert not hasattr(dpb, "no.name")
    assert not hasattr(dpb, "__wrapped__")


def test_a_name_of_a_package_is_found_there():
    for name, place in (("Ball", "sets"), ("RandomSearch", "search"), ("zoo", None)):
        with pytest.raises(AttributeError) as error:
            getattr(dpb, name)
        if place is not None:
            assert str(error.value).endswith(f"; it is dpbilevel.{place}.{name}")
    with pytest.raises(AttributeError, match=r"has no attribute 'NoisyGradient'$"):
        dpb.NoisyGradient  # noqa: B018


def test_no_public_name_is_hidden_by_a_module():
    for name in dir(dpb):
        value = getattr(dpb, name)
        if importlib.util.find_spec(f"dpbilevel.{name}") and name[0] != "_":
            assert value.__name__ == f"dpbilevel.{name}"


def test_no_hint_names_an_index_that_does_not_have_the_library():
    texts = [p.read_text() for p in (ROOT / "dpbilevel").rglob("*.py")]
    assert not [text for text in texts if "dpbilevel[cli]" in text]


def test_the_bounds_of_jax_are_those_of_the_newest_tested_release():
    major, minor = map(int, TESTED_JAX.split(".")[:2])
    bounds = re.findall(r'"(jax(?:lib)?)>=([\d.]+),<([\d.]+)"', PYPROJECT.read_text())
    cap = f"{major}.{minor + 2}"  # beyond the next minor version
    assert bounds == [("jax", "0.10.2", cap), ("jaxlib", "0.10.2", cap)]


def test_a_run_with_a_newer_jax_is_checked_and_warns_once(monkeypatch):
    major, minor, *rest = map(int, TESTED_JAX.split("."))
    problem, solver = dpb.FiniteSum(squared), dpb.NoisyGD(1, 1.0, 1.0)
    solver = dpb.calibrate(problem, solver, dpb.PrivacyBudget(1.0, 1e-6), sizes=4)
    checked = []
    monkeypatch.setattr(mixing, "check_rows", checked.append)

    def said(*version):
        monkeypatch.setattr(jax, "__version_info__", version)
        loop._warn.cache_clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for seed in range(2):
                key = jax.random.key(seed)
                dpb.solve(problem, solver.solver, np.ones(4), np.float32(0), key=key)
        return [str(w.message) for w in caught if "tested with JAX" in str(w.message)]

    assert not said(major, minor, *rest)
    assert not said(0, 10, 2)
    assert not checked
    for newer in ((major, minor, *rest, 1), (major, minor + 1, 0)):
        assert len(said(*newer)) == 1
    assert checked == ["solve"] * 4
    loop._warn.cache_clear()


def test_the_citation_names_the_version():
    lines = (ROOT / "CITATION.cff").read_text().splitlines()
    assert f"version: {dpb.__version__}" in lines
