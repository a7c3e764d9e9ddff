"""Test accuracy of the classic CNN beside Opacus and jax_privacy, at equal noise.

All start at the same weights and take 160 Poisson batches of 500 of 8 000 images at
clip norm 1, with the same multiplier of Gaussian noise. The step size is the best of
three by the first key. Needs `pip install opacus torch jax-privacy`.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from jax_privacy import noise_addition
from jax_privacy.batch_selection import CyclicPoissonSampling
from jax_privacy.clipping import clipped_grad
from jax_privacy.matrix_factorization import toeplitz
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer

import dpbilevel as dpb

from . import pages, step_sizes
from .private_peers import torch_network
from .step_sizes import TRAIN, accuracy, images, solve
from .workloads import CLASSIC, classic_loss, classic_scores

STEPS, BATCH, ROOM, KEYS, STEP_SIZES = 160, 500, 640, 5, (0.25, 0.5, 1.0)
BANDS = 4, 8


def start(seed):
    rng = np.random.default_rng(seed)
    pairs = [(shape, np.prod(shape[:-1]) ** -0.5) for shape in CLASSIC]
    shapes = [(s, bound) for shape, bound in pairs for s in (shape, shape[-1:])]
    return [rng.uniform(-b, b, s).astype(np.float32) for s, b in shapes]


PROBLEM = dpb.FiniteSum(classic_loss)


def ours(solver, size, seed):
    solver, key = dataclasses.replace(solver, step_size=size), jax.random.key(seed)
    return solve(PROBLEM, solver, images()[0], start(seed), key=key).value


def batches(seed):
    rng = np.random.default_rng([seed, 1])
    for _ in range(STEPS):
        rows = np.flatnonzero(rng.random(TRAIN) < BATCH / TRAIN)[:ROOM]
        yield [v[rows] for v in images()[0]]


@functools.partial(jax.jit, static_argnames="loss")
def clipped_sum(loss, w, records, padding):
    settings = {"batch_argnums": 1, "keep_batch_dim": False, "microbatch_size": 64}
    clipped = clipped_grad(loss, l2_clip_norm=1.0, **settings)
    return clipped(w, records, is_padding_example=padding)


def descent(loss, w, batches, size, privatizer):
    state, update = privatizer.init(w), jax.jit(privatizer.update)
    for image, label in batches:
        more = ROOM - len(label)
        records = np.pad(image, [(0, more), *[(0, 0)] * (image.ndim - 1)])
        records = records, np.pad(label, (0, more))
        total = clipped_sum(loss, w, records, np.arange(ROOM) >= len(label))
        noisy, state = update(total, state)
        w = optax.tree.add_scale(w, -size / BATCH, noisy)
    return w


def by_jax_privacy(solver, size, seed):
    noise = {"stddev": float(solver.noise_multiplier), "prng_key": seed}
    privatizer = noise_addition.gaussian_privatizer(**noise)
    return descent(classic_loss, start(seed), batches(seed), size, privatizer)


def by_opacus(solver, size, seed):
    torch.manual_seed(seed)
    model, *_ = torch_network(torch, "classic", 1, "cpu")
    weights = start(seed)  # 512 features by place, then channel; PyTorch reverses both
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
        torch.nn.functional.cross_entropy(found, torch.tensor(label).long()).backward()
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
        solver, rows = step_sizes.calibrated(PROBLEM, plain, epsilon), []
        for name, run in libraries.items():

            @functools.cache
            def found(size, seed, run=run, solver=solver):
                weights = run(solver, size, seed)
                return float(accuracy(classic_scores, weights, images()[1]))

            size = max(STEP_SIZES, key=lambda size: found(size, 0))
            values = [found(size, seed) for seed in range(KEYS)]
            cells = f"{epsilon:g}", name, f"{size:g}", pages.spread(values, ends=(0, 1))
            print(cells, flush=True)
            rows.append(cells)
        print(pages.table(head, rows), flush=True)


def trained_by_bands(epsilon, bands):
    sampling = dpb.Poisson(bands * BATCH / TRAIN)
    plain = dpb.NoisyGD(STEPS // bands, 1.0, 1.0, sampling=sampling)
    solver = step_sizes.calibrated(step_sizes.SMALL_PROBLEM, plain, epsilon)
    coefficients = toeplitz.optimize_banded_toeplitz(STEPS, bands)
    coefficients /= jnp.linalg.norm(coefficients)
    matrix = toeplitz.inverse_as_streaming_matrix(coefficients, STEPS)
    noise = {"stddev": 2 * float(solver.noise_multiplier)}  # replaced: two clip norms
    selected = CyclicPoissonSampling(sampling.rate, STEPS, ROOM, bands)
    training, start = images(shuffled_rows=True)[0], step_sizes.start("small", 1)

    def train(size, seed):
        groups = selected.batch_iterator(TRAIN, np.random.default_rng(seed))
        drawn = ([v[rows] for v in training] for rows in groups)
        privatizer = noise_addition.matrix_factorization_privatizer(
            matrix, prng_key=seed, **noise
        )
        return descent(step_sizes.small_loss, start, drawn, size, privatizer)

    return train


def banded_noise():
    """Test accuracy of correlated noise of jax_privacy on the task `correlated_noise`.

    A record has a group, one of as many as there are bands, and may be in the batches
    of its group alone. It takes part in the steps of a run with Poisson batches of a
    group, whose multiplier is that of the replace-one relation.
    """
    for epsilon, bands in itertools.product(pages.budgets("1,3,8"), BANDS):
        best = step_sizes.best_accuracies(trained_by_bands(epsilon, bands))
        print(epsilon, bands, best, flush=True)
