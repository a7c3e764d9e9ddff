"""Test accuracy of the classic CNN beside Opacus and jax_privacy, at equal noise.

All start at the same weights and take 160 Poisson batches of 500 of 8 000 images at
clip norm 1, with the same multiplier of Gaussian noise. The step size is the best of
three by the first key. Needs `pip install opacus torch jax-privacy`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from jax_privacy.clipping import clipped_grad
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from torch import nn

import dpbilevel as dpb

from . import pages
from .step_sizes import DELTA, TRAIN, accuracy, images, solve

STEPS, BATCH, ROOM, KEYS, STEP_SIZES = 160, 500, 640, 5, (0.25, 0.5, 1.0)
SHAPES = (8, 8, 1, 16), (4, 4, 16, 32), (512, 32), (32, 10)


def start(seed):
    rng = np.random.default_rng(seed)
    pairs = [(shape, np.prod(shape[:-1]) ** -0.5) for shape in SHAPES]
    shapes = [(s, bound) for shape, bound in pairs for s in (shape, shape[-1:])]
    return [rng.uniform(-b, b, s).astype(np.float32) for s, b in shapes]


def scores(weights, image):
    *convolved, first, shift, last, bias = weights
    names, windows = ("NHWC", "HWIO", "NHWC"), ((1, 2, 2, 1), (1, 1, 1, 1), "VALID")
    value = image[None, :, :, None]
    for kernel, moved, pad in ((*convolved[:2], 3), (*convolved[2:], 0)):
        sizes = (2, 2), [(pad, pad)] * 2
        value = jax.lax.conv_general_dilated(
            value, kernel, *sizes, dimension_numbers=names
        )
        value = jax.nn.relu(value + moved)
        value = jax.lax.reduce_window(value, -jnp.inf, jax.lax.max, *windows)
    return jax.nn.relu(value.ravel() @ first + shift) @ last + bias


def loss(weights, record):
    return -jax.nn.log_softmax(scores(weights, record[0]))[record[1]]


PROBLEM = dpb.FiniteSum(loss)


def ours(solver, size, seed):
    solver, key = dataclasses.replace(solver, step_size=size), jax.random.key(seed)
    return solve(PROBLEM, solver, images()[0], start(seed), key=key).value


def batches(seed):
    rng = np.random.default_rng([seed, 1])
    for _ in range(STEPS):
        rows = np.flatnonzero(rng.random(TRAIN) < BATCH / TRAIN)[:ROOM]
        yield [v[rows] for v in images()[0]]


@functools.partial(jax.jit, static_argnames="deviation")
def step(w, records, padding, size, key, deviation):
    settings = {"batch_argnums": 1, "keep_batch_dim": False, "microbatch_size": 64}
    clipped = clipped_grad(loss, l2_clip_norm=1.0, normalize_by=BATCH, **settings)
    gradient = clipped(w, records, is_padding_example=padding)
    noise = optax.tree.random_like(key, w, jax.random.normal)
    noisy = optax.tree.add_scale(gradient, deviation, noise)
    return optax.tree.add_scale(w, -size, noisy)


def by_jax_privacy(solver, size, seed):
    w, deviation = start(seed), float(solver.noise_multiplier) / BATCH
    for t, (image, label) in enumerate(batches(seed)):
        more = ROOM - len(label)
        records = np.pad(image, [(0, more), (0, 0), (0, 0)]), np.pad(label, (0, more))
        key = jax.random.fold_in(jax.random.key(seed), t)
        w = step(w, records, np.arange(ROOM) >= len(label), size, key, deviation)
    return w


def by_opacus(solver, size, seed):
    torch.manual_seed(seed)
    parts = [nn.Conv2d(1, 16, 8, 2, 3), nn.ReLU(), nn.MaxPool2d(2, 1)]
    parts += [nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.MaxPool2d(2, 1), nn.Flatten()]
    model = nn.Sequential(*parts, nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10))
    weights = start(
        seed
    )  # 512 features are by place and then channel; PyTorch reverses
    first = weights[4].reshape(4, 4, 32, 32).transpose(3, 2, 0, 1).reshape(32, 512)
    with torch.no_grad():
        for place, parameter in enumerate(model.parameters()):
            value = weights[place]
            value = value.transpose(3, 2, 0, 1) if value.ndim == 4 else value.T
            parameter.copy_(torch.tensor(first if place == 4 else value.copy()))
    private = GradSampleModule(model, loss_reduction="mean")
    rule = torch.optim.SGD(private.parameters(), size)
    settings = {"max_grad_norm": 1.0, "expected_batch_size": BATCH}
    settings["noise_multiplier"] = float(solver.noise_multiplier)
    rule = DPOptimizer(rule, **settings)
    for image, label in batches(seed):
        rule.zero_grad()
        found = private(torch.tensor(image[:, None]))
        nn.functional.cross_entropy(found, torch.tensor(label).long()).backward()
        rule.step()
    found = [v.detach().numpy() for v in model.parameters()]
    found[4] = found[4].reshape(32, 32, 4, 4).transpose(2, 3, 1, 0).reshape(512, 32)
    found[:3:2] = [v.transpose(2, 3, 1, 0) for v in found[:3:2]]
    found[6] = found[6].T
    return found


def main():
    head = ["epsilon", "library", "step size", "accuracy [least, most]"]
    sampling, relation = dpb.Poisson(BATCH / TRAIN), dpb.Neighbours.ADD_OR_REMOVE_ONE
    plain = dpb.NoisyGD(STEPS, 1.0, 0.5, sampling=sampling, neighbours=relation)
    libraries = {"dpbilevel": ours, "Opacus": by_opacus, "jax_privacy": by_jax_privacy}
    for epsilon in pages.budgets("1,3"):
        budget, rows = dpb.PrivacyBudget(epsilon, DELTA), []
        solver = dpb.calibrate(PROBLEM, plain, budget, sizes=TRAIN).solver
        for name, run in libraries.items():

            @functools.cache
            def found(size, seed, run=run, solver=solver):
                return float(accuracy(scores, run(solver, size, seed)))

            size = max(STEP_SIZES, key=lambda size: found(size, 0))
            values = [found(size, seed) for seed in range(KEYS)]
            cells = f"{epsilon:g}", name, f"{size:g}", pages.spread(values, ends=(0, 1))
            print(cells, flush=True)
            rows.append(cells)
        print(pages.table(head, rows), flush=True)
