"""No record changes what is computed from another, whatever a loss is made of."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

import dpbilevel as dpb
from dpbilevel.privacy import clipped_mean
from dpbilevel.privacy.jaxprs import bound, inner_jaxprs
from dpbilevel.privacy.per_example import mixing, structure
from dpbilevel.privacy.per_example.mixing import FUNCTIONS, mixed_rows
from dpbilevel.privacy.per_example.rowwise import ROWWISE
from dpbilevel.privacy.per_example.structure import rowwise
from tests.cases import slow

from .mixing_canaries import ENTRIES

pytestmark = pytest.mark.reuses_keys  # the same noise on both sides shows what moves

ROOT = Path(__file__).parents[2]
# Primitives that some supported releases of JAX do not use.
LATER = {"call_hi_primitive", "closed_call", "eval_jaxpr", "log2", "one_minus_square"}
RECORD = jax.ShapeDtypeStruct((mixing.WIDTH,), jnp.float32)
GROUPED = {name: FUNCTIONS[name] for name in ["grouped convolutions"]}
GROUPED |= {"loop": ENTRIES["scan"], "kernels": ENTRIES["conv_general_dilated"]}


def names(jaxpr):
    found = {eqn.primitive.name for eqn in jaxpr.eqns}
    return found.union(*(names(v) for eqn in jaxpr.eqns for v in inner_jaxprs(eqn)))


def test_every_primitive_that_is_accepted_has_a_canary():
    assert ROWWISE - set(ENTRIES) <= LATER
    for name, fun in ENTRIES.items():
        assert name in names(jax.make_jaxpr(fun)(RECORD).jaxpr), name


def groups(fun):
    """The numbers of groups of all convolutions in the program of 64 records."""

    def counts(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "conv_general_dilated":
                yield eqn.params["feature_group_count"]
                yield eqn.params["batch_group_count"]
            for inner in inner_jaxprs(eqn):
                yield from counts(inner)

    rows = jax.ShapeDtypeStruct((64, mixing.WIDTH), jnp.float32)
    return list(counts(jax.make_jaxpr(jax.vmap(rowwise("fit", fun)))(rows).jaxpr))


@pytest.mark.parametrize("name", GROUPED)
def test_no_group_of_a_convolution_is_a_record(name):
    assert max(groups(GROUPED[name])) <= 2


def in_scan(fun):
    def run(rows):
        parts = rows.reshape(4, 16, -1)
        found = jax.lax.scan(lambda _, part: (None, fun(part)), None, parts)[1]
        return jax.tree.map(lambda v: v.reshape(64, *v.shape[2:]), found)

    return jax.jit(run)


def in_vmap(fun):
    def run(rows):
        found = jax.vmap(fun)(rows.reshape(4, 16, -1))
        return jax.tree.map(lambda v: v.reshape(64, *v.shape[2:]), found)

    return jax.jit(run)


def eager(fun):
    def run(rows):
        with jax.disable_jit():
            return fun(rows)

    return run


def spread(fun):
    """The rows on all devices; compiled by the partitioner of the compiler."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("rows",))
    placed = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))
    return jax.jit(fun, in_shardings=placed, out_shardings=placed)


# jaxlib 0.12 raises an internal error where it compiles `mulhi` for several devices.
PARTITIONED = {name: fun for name, fun in ENTRIES.items() if name != "mulhi"}
PROGRAMS = {"alone": jax.jit, "scan": in_scan, "vmap": in_vmap, "eager": eager}


@pytest.mark.parametrize("program", ["scan", "vmap", *slow("alone", "eager")])
def test_convolutions_keep_records_apart(program):
    assert mixed_rows(GROUPED, PROGRAMS[program]) == ()


def test_the_short_form_for_a_device_passes():
    mixing.check_rows("fit")
    assert mixed_rows(FUNCTIONS, in_vmap) == ()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("program", PROGRAMS)
def test_every_primitive_keeps_records_apart(program):
    assert mixed_rows(ENTRIES, PROGRAMS[program]) == ()


def on_devices(which):
    flags = "--xla_force_host_platform_device_count=4"
    code = (
        "import json; from tests.attacks import test_mixing as t; "
        f"print(json.dumps(t.mixed_rows(t.{which}, t.spread)))"
    )
    settings = {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | settings, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("which", ["GROUPED", "PARTITIONED"])
def test_records_on_several_devices_are_kept_apart(which):
    assert on_devices(which) == []


@pytest.mark.slow
def test_batched_as_jax_does_convolutions_mix_records(monkeypatch):
    # The control: the batching rules of JAX make groups of records.
    monkeypatch.setattr(structure, "computed", lambda e, v: bound(e, v, e.params))
    assert {"grouped convolutions", "kernels"} <= set(mixed_rows(GROUPED))
    assert all(max(groups(fun)) >= 64 for fun in GROUPED.values())
    mixing._mixed.cache_clear()
    with pytest.raises(ValueError, match=r"^fit: .*grouped convolutions"):
        mixing.check_rows("fit")
    mixing._mixed.cache_clear()


KERNEL = jnp.asarray(np.random.default_rng(0).normal(size=(2, 2, 4)) * 0.1, jnp.float32)


def network(kernel, z):
    layout = ("NHC", "HIO", "NHC")
    found = jax.lax.conv_general_dilated(
        z[None], kernel, (1,), "VALID", None, None, layout, feature_group_count=2
    )
    return jnp.mean((found - 1.0) ** 2)


def clipped(fun):
    def read(z):
        return clipped_mean(fun, z, clip_norm=1.0, precision="grid").raw.values()

    return read


def stepped(z):
    options = {"noise_multiplier": 1e-6, "precision": "grid"}
    solver = dpb.NoisyGD(1, 1.0, step_size=1.0, **options).with_sizes(64)
    problem = dpb.FiniteSum(network)
    state = solver.init(problem, KERNEL)
    return solver.released(solver.step(problem, z, state, key=jax.random.key(0)))


def solved(z):
    options = {"noise_multiplier": 1e-6, "precision": "grid"}
    solver = dpb.NoisyGD(1, 1.0, step_size=1.0, **options).with_sizes(64)
    with jax.disable_jit():
        key = jax.random.key(0)
        return dpb.solve(dpb.FiniteSum(network), solver, z, KERNEL, key=key).value


def hessian_product(z):
    slope = jax.grad(network)
    return jax.jvp(lambda k: slope(k, z), (KERNEL,), (jnp.ones_like(KERNEL),))[1]


READS = {
    "gradient": jax.jit(clipped(lambda z: jax.grad(network)(KERNEL, z))),
    "Hessian times a vector": jax.jit(clipped(hessian_product)),
    "a step": jax.jit(stepped),
    "a run without jit": solved,
}


@pytest.mark.parametrize(
    "read",
    [
        pytest.param(name, marks=pytest.mark.slow if "run" in name else ())
        for name in READS
    ],
)
def test_one_record_moves_its_own_share_only(read):
    rows = np.random.default_rng(0).normal(size=(64, 8, 4)).astype(np.float32) + 1
    expected = np.asarray(READS[read](rows))
    for bad in (np.nan, np.inf, 3e38):
        changed = rows.copy()
        changed[3] = bad
        moved = np.linalg.norm(expected - np.asarray(READS[read](changed)))
        assert 64 * moved < 1.001


def ragged(v):
    sizes = jnp.asarray([3, 5], jnp.int32)
    return jax.lax.ragged_dot(v.reshape(8, 4), jnp.ones((2, 4, 3)), sizes)


@jax.custom_batching.custom_vmap
def averaged(v):
    return v


@averaged.def_vmap
def _(size, batched, v):
    return v - jnp.mean(v, 0), True


def foreign(name):
    """A primitive of one's own whose batching rule subtracts the mean of all rows."""
    own = Primitive(name)
    own.def_impl(lambda v: v)
    own.def_abstract_eval(lambda v: v)
    mlir.register_lowering(own, mlir.lower_fun(lambda v: v, multiple_results=False))
    batching.primitive_batchers[own] = lambda v, d: (v[0] - jnp.mean(v[0], d[0]), d[0])
    return own.bind


def called_back(v):
    return jax.pure_callback(np.sort, v, v, vmap_method="broadcast_all")


def shared_bits(v):
    key = jax.random.key(v[0].astype(int), impl="rbg")
    return jax.random.normal(key, (3,))


REFUSED = {
    "ragged_dot_general": ragged,
    "custom_vmap_call": averaged,
    "averaged": foreign("averaged"),
    "mul": foreign("mul"),
    "tile": foreign("tile"),
    "pure_callback": called_back,
    "random_seed": shared_bits,
    "psum": lambda v: jax.lax.psum(v, "parts"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_primitives_that_may_mix_records_are_refused_by_name(name):
    def nested(v):
        return jax.lax.cond(
            v[0] > 0, lambda v: jax.jit(REFUSED[name])(v), lambda v: 0 * fun(v), v
        )

    fun = REFUSED[name]

    def means(read):
        def mean(rows):
            return clipped_mean(read, rows, clip_norm=1.0, precision="float").raw

        return jax.vmap(mean, axis_name="parts")(jnp.ones((2, 64, 32)))

    for read in (fun, nested):
        with pytest.raises(ValueError, match=f"^clipped_mean: .*'{name}'"):
            means(read)


@pytest.mark.slow
def test_what_reads_no_record_may_use_any_primitive():
    center = foreign("centered")

    def fun(v):
        noise = jax.random.normal(jax.random.key(0, impl="rbg"), (32,))
        return v - center(noise) - averaged(jnp.ones(32))

    clipped_mean(fun, jnp.ones((64, 32)), clip_norm=1.0, precision="float")
