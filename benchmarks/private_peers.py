"""Clipped gradients of other libraries, as candidates of the benchmarks.

`pip install jax-privacy` adds the column of jax_privacy, `pip install opacus torch` the
table of PyTorch. Run as a module this file is the process that times PyTorch, so that
its threads do not wait beside those of JAX: it takes `[[layers, n], ...]` and seconds
in JSON, and prints what `pages.interleaved` measured of each, in JSON.
"""

import importlib.util
import itertools
import json
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import optax

from .pages import interleaved


def gradients(loss, p, records):
    return jax.vmap(lambda record: jax.grad(loss)(p, record))(records)


def vmap_then_clip(loss):
    def run(p, records, key):
        values = gradients(loss, p, records)
        norms = jax.vmap(optax.tree.norm)(values)
        weights = jnp.minimum(1, 1 / norms) / len(norms)
        return jax.tree.map(lambda v: jnp.tensordot(weights, v, 1), values)

    return run


def by_optax(loss):
    def run(p, records, key):
        rule = optax.contrib.differentially_private_aggregate(1.0, 1.0, key)
        return rule.update(gradients(loss, p, records), rule.init(p))[0]

    return run


def by_jax_privacy(loss, microbatch):
    from jax_privacy.clipping import clipped_grad

    settings = {"l2_clip_norm": 1.0, "batch_argnums": 1, "keep_batch_dim": False}
    clipped = clipped_grad(loss, microbatch_size=microbatch, **settings)

    def run(p, records, key):
        values, structure = jax.tree.flatten(clipped(p, records))
        pairs = zip(values, jax.random.split(key, len(values)), strict=True)
        noisy = [v + jax.random.normal(k, v.shape, v.dtype) for v, k in pairs]
        return structure.unflatten(noisy)

    return run


def has_jax_privacy():
    return importlib.util.find_spec("jax_privacy") is not None


def torch_times(shapes, seconds):
    """Return the results of `torch_rows` for every shape; None without Opacus."""
    if importlib.util.find_spec("opacus") is None:
        return None
    command = [sys.executable, "-m", "benchmarks.private_peers"]
    command.append(json.dumps([shapes, seconds]))
    found = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return json.loads(found.stdout)


def torch_network(torch, layers, n, device):
    from torch import nn

    if layers == "cnn":
        convolutions = nn.Conv2d(1, 16, 3, 2, 1), nn.Conv2d(16, 32, 3, 2, 1)
        parts = [part for layer in convolutions for part in (layer, nn.ReLU())]
        parts += [nn.Flatten(), nn.Linear(7 * 7 * 32, 10)]
    elif layers == "classic":
        parts = [nn.Conv2d(1, 16, 8, 2, 3), nn.ReLU(), nn.MaxPool2d(2, 1)]
        parts += [nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.MaxPool2d(2, 1), nn.Flatten()]
        parts += [nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10)]
    else:
        dense = [nn.Linear(*pair) for pair in itertools.pairwise(layers)]
        parts = [part for layer in dense for part in (layer, nn.ReLU())][:-1]
    shape = (1, 28, 28) if isinstance(layers, str) else layers[:1]
    model, inputs = nn.Sequential(*parts), torch.randn(n, *shape)
    target = torch.randint(0, 10, (n,))
    return model.to(device), inputs.to(device), target.to(device)


def torch_rows(layers, n, seconds):
    import torch
    from opacus import GradSampleModule
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")  # as JAX does where it has TF32

    def step(optimizer, model, criterion):
        def run():
            optimizer.zero_grad()
            criterion(model(inputs), target).backward()
            if isinstance(optimizer, DPOptimizer):  # which clips and adds the noise
                optimizer.step()
            if device == "cuda":
                torch.cuda.synchronize()

        return run

    def optimized(model, kind=None):
        rule = torch.optim.SGD(model.parameters(), 0.0)
        settings = {"noise_multiplier": 1.0, "max_grad_norm": 1.0}
        return kind(rule, expected_batch_size=n, **settings) if kind else rule

    model, inputs, target = torch_network(torch, layers, n, device)
    criterion = torch.nn.CrossEntropyLoss()
    runs = {"plain": step(optimized(model), model, criterion)}
    size = sum(p.numel() for p in model.parameters())
    if 4 * n * size < 4e9:
        model = torch_network(torch, layers, n, device)[0]
        model = GradSampleModule(model, loss_reduction="mean")
        rule = optimized(model, DPOptimizer)
        runs["per-sample"] = step(rule, model, criterion)
    model = torch_network(torch, layers, n, device)[0]
    model = GradSampleModuleFastGradientClipping(
        model, max_grad_norm=1.0, use_ghost_clipping=True, loss_reduction="mean"
    )
    rule = optimized(model, DPOptimizerFastGradientClipping)
    ghost = DPLossFastGradientClipping(model, rule, criterion, loss_reduction="mean")
    runs["ghost"] = step(rule, model, ghost)
    return interleaved(runs, "plain", seconds=seconds)


def main():
    shapes, seconds = json.loads(sys.argv[1])
    found = [torch_rows(layers, n, seconds) for layers, n in shapes]
    print(json.dumps(found, default=float))


if __name__ == "__main__":
    main()
