import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
SCRIPTS = sorted(p for p in (ROOT / "examples").glob("*.py") if p.stem != "demo")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.stem)
def test_example_runs_and_holds_its_own_assertions(script):
    done = subprocess.run(
        [sys.executable, str(script), "--smoke"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_readme_code_runs_and_learns_the_clean_source(capsys):
    readme = (ROOT / "README.md").read_text()
    names = {}
    readme = readme.replace("runs=20_000", "runs=2_000")
    for code in re.findall(r"```python\n(.*?)```", readme, re.DOTALL):
        exec(compile(code, "README.md", "exec"), names)
    weights = names["dpb"].source_weights(names["solution"].x)
    assert float(weights[0]) > 0.8
    assert names["result"].report.epsilon <= 2.0
    assert "ENFORCED: epsilon = 2" in capsys.readouterr().out
