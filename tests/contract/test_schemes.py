"""Every sampling scheme keeps its contract; a new one needs an entry in `SCHEMES`.

Random allocation, which draws whole passes, is in tests/privacy/test_allocation.py.
"""

import dataclasses
import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpbilevel as dpb
from dpbilevel._extras import dp_accounting
from dpbilevel.cli.config import public_classes
from dpbilevel.privacy import SinglePass
from dpbilevel.privacy.sampling.base import AbstractSampling, FullBatch, Poisson
from dpbilevel.privacy.sampling.fixed_size import FixedSize
from tests.cases import found

ROOT = Path(__file__).parents[2]
REPLACE, REMOVE = dpb.Neighbours
N, DRAWS = 12, 11
SCHEMES = {
    FullBatch: FullBatch(),
    Poisson: Poisson(0.4),
    FixedSize: FixedSize(5),
    SinglePass: SinglePass(5),
}
PUBLIC = public_classes(AbstractSampling)
every = pytest.mark.parametrize("kind", SCHEMES, ids=lambda kind: kind.__name__)


def drawn(scheme, size):
    """Whether a record is in a batch, a row a batch, for batches 0, 1, ... of a run."""

    @jax.jit
    @jax.vmap
    def members(key, index):
        key = key if scheme.needs_key else None
        batch = scheme.draw(jnp.arange(size), size, key=key, index=index)
        kept = jnp.ones(len(batch.records), bool) if batch.mask is None else batch.mask
        return jnp.zeros(size, int).at[batch.records].add(kept.astype(int))

    keys = jax.random.split(jax.random.key(0), DRAWS)
    return np.asarray(members(keys, jnp.arange(DRAWS)))


batches = functools.cache(drawn)


def problems(scheme):
    """What the accounting of a scheme claims and its batches do not keep."""
    name = type(scheme).__name__
    held = batches(scheme, N)
    times = np.cumsum(held, axis=0).max(axis=1)
    charged = [scheme.charged(count, N) for count in range(1, DRAWS + 1)]
    if held.max() > 1:
        yield f"{name}.draw: a record is twice in a batch"
    if held.sum(1).max() > scheme.rows(N):
        yield f"{name}.rows: a batch holds more"
    if (times > charged).any():
        yield f"{name}.charged: a record is in more batches than are charged"
    if scheme.needs_key and charged != list(range(1, DRAWS + 1)):
        yield f"{name}.charged: count all batches, which are random"
    if scheme.needs_key and (held == held[0]).all():
        yield f"{name}.draw: batches of different keys are the same"
    if not scheme.needs_key and scheme.numbered == (held == held[0]).all():
        yield f"{name}.numbered: say whether batches differ"
    event = dp_accounting.GaussianDpEvent(1.0)
    if not scheme.needs_key and scheme.event(event, REPLACE, N) != event:
        yield f"{name}.event: no batch is secret, so none is amplified"
    try:
        scheme.event(event, REMOVE, N)
    except ValueError:
        return
    # The others must be drawn as before if the first record leaves.
    if not scheme.needs_key and (held[:, 1:] != batches(scheme, N - 1)).any():
        yield f"{name}.event: refuse add-or-remove-one, which moves other records"
    sizes = set(held.sum(1).tolist())
    if scheme.needs_key and len(sizes) == 1 and max(sizes) < N:
        yield f"{name}.event: refuse add-or-remove-one, the size of a batch is fixed"


def test_every_sampling_scheme_is_tested_here():
    missing = [name for name, kind in PUBLIC.items() if kind not in SCHEMES]
    assert not missing, f"add {missing} to SCHEMES of tests/contract/test_schemes.py"


@every
def test_batches_are_as_the_accounting_of_a_scheme_says(kind):
    found = [*problems(SCHEMES[kind])]
    assert not found, "\n".join(found)


class RoundsDown(SinglePass):
    def charged(self, count, size):
        return max(1, count // self.batches(size))


class ChargesHalf(Poisson):
    def charged(self, count, size):
        return -(-count // 2)


class TakesAnyRelation(SinglePass):
    def event(self, event, neighbours, size):
        return event


class SubsetForAnyRelation(FixedSize):
    def event(self, event, neighbours, size):
        return super().event(event, REPLACE, size)


class Unnumbered(SinglePass):
    numbered = False


class Amplifies(SinglePass):
    def event(self, event, neighbours, size):
        return dp_accounting.PoissonSampledDpEvent(self.size / size, event)


class FirstRecords(FixedSize):
    def draw(self, records, size, *, key, index=None):
        return self._batch(records, jnp.arange(self.size))


class Repeats(FixedSize):
    def draw(self, records, size, *, key, index=None):
        return self._batch(records, jax.random.randint(key, (self.size,), 0, size))


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (RoundsDown(5), "more batches than are charged"),
        (ChargesHalf(0.4), "count all batches"),
        (TakesAnyRelation(5), "refuse add-or-remove-one, which moves"),
        (SubsetForAnyRelation(5), "refuse add-or-remove-one, the size"),
        (Unnumbered(5), "say whether batches differ"),
        (Amplifies(5), "none is amplified"),
        (FirstRecords(5), "of different keys are the same"),
        (Repeats(5), "twice in a batch"),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, AbstractSampling) else "",
)
def test_a_scheme_that_its_accounting_does_not_fit_is_seen(broken, said):
    assert said in "\n".join(problems(broken))


def parts(value, kind):
    """The parts of a solver that are of a kind, at any depth."""
    if isinstance(value, kind):
        yield value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from parts(getattr(value, field.name, None), kind)


@every
def test_a_scheme_is_audited_and_on_the_page_of_methods(kind):
    page = (ROOT / "docs/methods.md").read_text()
    rows = page.split("\n## How batches are drawn\n")[1].split("\n## ")[0]
    name = kind.__name__
    assert re.search(rf"^\| `(\w+\.)*{name}\(", rows, re.MULTILINE), (
        f'docs/methods.md: add a row of {name} to "How batches are drawn"'
    )
    audited = {
        type(part)
        for case in found("AUDITS").values()
        for part in parts(case.solver, AbstractSampling)
    }
    assert kind in audited, f"give a test module an audit (AUDITS) with {name} batches"
