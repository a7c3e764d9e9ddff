"""A private fit by an installed wheel that has no extras; run by `make try-wheel`."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

import dpbilevel as dpb

assert Path(dpb.__file__).is_relative_to(sys.prefix), dpb.__file__
for extra in ("sklearn", "matplotlib", "jinja2", "tqdm", "pyarrow", "pytest"):
    assert importlib.util.find_spec(extra) is None, extra

features, noise = (jax.random.normal(jax.random.key(i), (2000, 4)) for i in (0, 1))
features /= jnp.linalg.norm(features, axis=1, keepdims=True)
label = jnp.where(features[:, 0] + 0.1 * noise[:, 0] > 0, 1.0, -1.0)
records = {"features": features, "label": label}
budget = dpb.PrivacyBudget(epsilon=3.0, delta=1e-5)
problem = dpb.FiniteSum(dpb.logistic_loss)
solver = dpb.NoisyGD(30, clip_norm=1.0, step_size=4.0)
plan = dpb.calibrate(problem, solver, budget, sizes=2000, w0=jnp.zeros(4))
key = dpb.root_key()
found = jax.jit(dpb.solve)(problem, plan.solver, records, jnp.zeros(4), key=key)
accuracy = float(jnp.mean(jnp.sign(features @ found.value) == label))
assert accuracy > 0.8, accuracy
try:
    said = str(dpb.PrivateSearch(None, {}, budget))
except ImportError as error:
    said = str(error)
assert "pip install scikit-learn" in said, said
command = Path(sys.executable).parent / "dpbilevel"
version = subprocess.run([command, "--version"], capture_output=True, text=True)
assert dpb.__version__ in version.stdout, version
print(f"dpbilevel {dpb.__version__}, JAX {jax.__version__}: accuracy {accuracy:.3f}")
