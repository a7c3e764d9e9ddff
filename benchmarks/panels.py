"""People with several rows: one clip a person, beside rows and group privacy.

`python -m benchmarks panels` prints the table of results/panels.md, `--task=union` the
panels whose names begin so, and `--costs=yes` what a step costs. Real panels need the
environment $TABLES of `benchmarks.table_tasks`. NON-PRIVATE evaluation.
"""

import os
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import scipy
from sklearn.linear_model import LogisticRegression

import dpbilevel as dpb
from dpbilevel.privacy.accounting.closed_forms import gaussian_delta
from dpbilevel.privacy.records.people import PerPerson, PersonUnit
from dpbilevel.sklearn import DPLogisticRegression

from . import gradients, pages, utility
from .real_tables import LABELS
from .table_tasks import DELTA, declared, gaussian_mu, load

KEYS, FEW = 10, 1  # FEW for a million rows
EPSILONS = 1.0, 3.0


def generated(people, rows, seed=0):
    rng = np.random.default_rng(seed)
    ids = np.repeat(np.arange(people), rows)
    own = rng.normal(size=people)[ids]
    X = rng.normal(size=(len(ids), 10))
    score = 1.5 * X[:, 0] - X[:, 1] + 0.5 * X[:, 2] + own
    return X, (score + rng.logistic(size=len(ids)) > 0).astype(int), ids


def smaller(epsilon, most):
    """Return the epsilon of rows at which `most` rows together have this epsilon."""
    # A group of k rows moves a Gaussian release k times as far.
    mu = gaussian_mu(epsilon) / most

    def excess(other):
        return gaussian_delta(mu, other) - DELTA

    return scipy.optimize.brentq(excess, 1e-4, epsilon)


def methods(table, bounds, epsilon, most, key):
    X, y, ids = table
    _, first = np.unique(ids, return_index=True)
    facts = {"classes": [0, 1], "bounds": bounds, "most_rows": most}

    def private(epsilon, rows, **options):
        model = DPLogisticRegression(epsilon, DELTA, **facts)
        return model.fit(X[rows], y[rows], key=jax.random.key(key), **options)

    every = slice(None)
    return {
        "people": private(epsilon, every, groups=ids),
        "rows, group privacy": private(smaller(epsilon, most), every),
        "the first row of each person": private(epsilon, first),
        "rows alone protected": private(epsilon, every),
        "not private": LogisticRegression(C=1e4, max_iter=1000).fit(X, y),
    }


def log_loss(model, X, y):
    return float(LABELS.measures["log loss"](y, model.decision_function(X)))


def losses(table, bounds, epsilon, most):
    found = {}
    X, y, ids = table
    people = np.unique(ids)
    for key in range(KEYS if len(ids) < 200_000 else FEW):
        chosen = np.random.default_rng(key).permutation(people)[: len(people) * 7 // 10]
        fitted = np.isin(ids, chosen)
        models = methods([v[fitted] for v in table], bounds, epsilon, most, key)
        for name, model in models.items():
            found.setdefault(name, []).append(log_loss(model, X[~fitted], y[~fitted]))
        constant = utility.constant_answer({"label": y[fitted]})
        found.setdefault("constant answer, not private", []).append(constant)
    return found


def network_loss(w, record):
    hidden = jnp.tanh(record["features"] @ w[0])
    return dpb.logistic_loss(w[1], (hidden, record["label"]))


def step_costs():
    lines = []
    weights = jnp.zeros(20), (jnp.full((60, 64), 0.1), jnp.full(64, 0.1))
    losses = dpb.logistic_loss, network_loss
    names = "logistic regression, 20 features", "network, 60 features, 64 hidden units"
    for name, loss, w in zip(names, losses, weights, strict=True):
        for people, most in ((6000, 8), (100_000, 16)):
            width, count = jax.tree.leaves(w)[0].shape[0], people * most
            rows = {
                "features": np.random.default_rng(0).normal(size=(count, width)),
                "label": np.sign(np.arange(count) % 2 - 0.5),
            }
            rows = jax.tree.map(np.float32, rows)
            ids = np.arange(count) // most
            grouped = jax.tree.map(
                jnp.asarray, dpb.by_person(rows, ids, most_rows=most)
            )
            of_people = PerPerson(loss, PersonUnit(most))
            ours, theirs = gradients.released(of_people, "grid"), gradients.plain(loss)
            runs = {
                "plain": lambda w, rows, _, key, run=theirs: run(w, rows, key),
                "people": lambda w, _, grouped, key, run=ours: run(w, grouped, key),
            }
            given = w, rows, grouped, jax.random.key(0)
            found = pages.ratios(runs, *given, reference="plain", repeats=15)
            plain, people = (pages.memory(run, *given) for run in runs.values())
            ratio = f"{found['people'][1]:.2f}", f"{people / plain:.2f}"
            lines.append([name, f"{people} x {most}", *ratio])
    return pages.table(["loss", "people x rows", "time", "memory"], lines)


def main():
    if "costs" in pages.options():
        return print(step_costs())
    warnings.simplefilter("ignore")
    tables, found = {}, {n: table for n, table in declared().items() if table.person}
    for name, panel in load(found).items() if os.environ.get("TABLES") else ():
        tables[name] = (panel.numbers, panel.y, panel.ids), tuple(panel.bounds.T)
    for people, rows in ((6000, 8), (100_000, 16)):
        tables[f"generated, {people} x {rows}"] = generated(people, rows), (-4, 4)
    head, lines = ["panel", "people, most rows", "epsilon"], []
    for name in pages.chosen(tables):
        table, bounds = tables[name]
        _, counts = np.unique(table[2], return_counts=True)
        most = min(int(counts.max()), 16)
        for epsilon in EPSILONS:
            found = losses(table, bounds, epsilon, most)
            row = [name, f"{len(counts)}, {most}", f"{epsilon:g}"]
            lines.append([*row, *(f"{np.median(v):.4f}" for v in found.values())])
            print(*lines[-1], flush=True)
    print(pages.table([*head, *found], lines))
