"""Number of functions and files of the library that one run enters."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TRACED = """
import inspect, json, sys, threading
import dpbilevel as dpb
{imports}
root, seen = dpb.__path__[0], set()
def entered(frame, event, arg):
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(root):
        # Neither bodies of modules and classes, nor lambdas and inner functions.
        if code.co_flags & inspect.CO_OPTIMIZED and "<" not in code.co_qualname:
            seen.add((code.co_filename, code.co_qualname))
threading.setprofile(entered)
sys.setprofile(entered)
{call}
sys.setprofile(None)
print(json.dumps(sorted(seen)))
"""
RUN = {
    "imports": "from dpbilevel.cli.main import main",
    "call": 'assert main(["run", "a.toml", "--out", "out"]) == 0',
}
FIT = {
    "imports": "import jax.numpy as jnp\n[getattr(dpb, name) for name in dpb.__all__]",
    "call": """dpb.fit(
    dpb.FiniteSum(dpb.logistic_loss),
    dpb.NoisyGD(3, clip_norm=1.0, step_size=4.0),
    {"features": jnp.ones((60, 4)), "label": jnp.ones(60)},
    jnp.zeros(4),
    budget=dpb.PrivacyBudget(1.0, 1e-5),
    key=dpb.root_key(),
)""",
}
CONFIG = """
task = "training"
[privacy]
epsilon = 1.0
delta = 1e-5
neighbours = "replace_one"
[data]
source = "csv"
path = "people.csv"
training = 60
numeric = [{name = "pay", columns = ["pay"], mean = [30], scale = [30]}]
[data.label]
column = "rich"
positive = ["yes"]
negative = ["no"]
[model]
loss = "logistic"
[solver]
type = "NoisyGD"
num_steps = 3
clip_norm = 1.0
step_size = 4.0
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("traced", "functions", "files"),
    [pytest.param(RUN, 380, 55, id="run"), pytest.param(FIT, 260, 39, id="fit")],
)
def test_a_run_enters_few_functions_in_few_files(traced, functions, files, tmp_path):
    (tmp_path / "a.toml").write_text(CONFIG)
    rows = [f"{10 * i % 97},{['yes', 'no'][i % 2]}" for i in range(60)]
    (tmp_path / "people.csv").write_text("\n".join(["pay,rich", *rows]))
    # A process of its own, in which nothing is cached.
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})" + TRACED.format(**traced)
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert len(seen) <= functions
    assert len({file for file, _ in seen}) <= files
