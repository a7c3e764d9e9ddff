"""Records that are spread over devices: same bits, no record moves, no margin shrinks.

Devices are virtual ones of a CPU. Their number is fixed when JAX starts, so that every
number of them is a process of its own.
"""

import json
import math
import os
import random
import re
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from dpbilevel.privacy.per_example.clipping import clipped_mean
from dpbilevel.privacy.per_example.summation import GridSum
from tests.cases import fast_first, slow

from .spread import POISSON, D, N, collectives

ROOT = Path(__file__).parents[2]
COUNTS = (1, 2, 4, 8)
READS = ["gradient", "loop", "network", "network, any place"]
READS += ["network, Poisson", "network, fixed"]
SHORT = ["gradient", "network"]
FEWER = ["fewer", "fewer inside jit", "fewer without jit"]
RUNS = ["full", "poisson", "padded", "dropout", "dropout, Poisson", "fixed"]
RUNS += ["penalty", "single", "f2sa"]


def started(count, *arguments):
    flags = f"--xla_force_host_platform_device_count={count}"
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    settings = {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.privacy.spread", *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def answer(process):
    out, error = process.communicate(timeout=1800)
    assert process.returncode == 0, error[-3000:]
    return json.loads(out.splitlines()[-1])


@pytest.fixture(scope="module")
def eight(request):
    """What the program finds on eight devices, of what the chosen tests ask for."""
    own = [v for v in request.session.items if v.path == request.path]
    if any(item.get_closest_marker("slow") for item in own):
        return answer(started(8, *SHORT, "poisson", "inside jit", *FEWER, "all"))
    return answer(started(8, "gradient", "inside jit", "fewer"))


meshes = pytest.mark.parametrize("mesh", ["Explicit", "Auto"])


@meshes
@pytest.mark.parametrize("case", ["gradient", *slow("network", "poisson")])
def test_bits_are_those_of_records_on_one_device(eight, case, mesh):
    assert eight["bits"][mesh][case] == eight["bits"]["none"][case]


@meshes
def test_bits_are_the_same_where_records_are_arguments_of_a_program(eight, mesh):
    assert eight["bits"][mesh]["inside jit"] == eight["bits"]["none"]["gradient"]


@meshes
@pytest.mark.parametrize("case", fast_first(FEWER))
def test_bits_are_the_same_where_devices_do_not_divide_blocks(eight, case, mesh):
    assert eight["bits"][mesh][case] == eight["bits"]["none"]["fewer"]


def test_the_bits_of_different_cases_differ(eight):
    bits = {k: v for k, v in eight["bits"]["none"].items() if "jit" not in k}
    assert len({*bits.values()}) == len(bits) > 1


@pytest.mark.parametrize(
    "case", ["gradient", *slow("network", "inside jit", "fewer", "ragged")]
)
def test_a_clipped_mean_moves_sums_alone(eight, case):
    largest, sums = eight["moved"][case]
    assert 0 < largest <= sums


@pytest.mark.parametrize("case", ["batch", *slow("batch inside jit")])
def test_a_batch_moves_no_more_than_its_rows(eight, case):
    largest, _ = eight["moved"][case]
    assert 0 < largest <= POISSON.rows(N) * D < eight["moved"]["control"][0]


def test_a_slice_along_the_spread_axis_is_noticed(eight):
    largest, _ = eight["moved"]["control"]
    assert largest == 4096 * 16  # every record


def test_every_device_holds_its_share_of_the_records(eight):
    assert eight["held"] == [4096 // 8] * 8


def test_under_add_or_remove_one_every_device_has_whole_blocks_of_rows(eight):
    spread, programs = eight["plans"]
    assert spread == 3 * 64
    assert programs == [128]  # whatever the number of records


def test_a_record_in_another_row_of_whole_blocks_moves_no_sum(eight):
    assert eight["shifts"]["192"] == 0
    # The control: the last rows of 43 on each device are rounded otherwise.
    assert eight["shifts"]["129"] > 0


def test_batches_have_the_same_rows_in_the_same_order_and_masked_padding(eight):
    assert all(eight["batches"])


@pytest.mark.slow
def test_floating_point_sums_differ_by_their_rounding_alone(eight):
    assert max(eight["floats"]) < 1e-4  # of the clip norm


def test_one_record_moves_a_spread_sum_by_the_sensitivity_at_most(eight):
    gaps = eight["gaps"]
    assert 0.99 < gaps["library"] <= 1
    # Copies where the padding counts, and where parts are clipped, not records.
    assert gaps["padding"] > 1.01
    assert gaps["parts"] > 1.01


def test_noise_is_added_once_and_not_averaged_over_devices(eight):
    stds = eight["stds"]  # of 4096 numbers: off by 1.1 % in one of three cases
    assert abs(stds["library"] - 1) < 0.06
    assert abs(stds["averaged"] - 1) > 0.06


def held_groups(n, own, rows, size):
    """How many groups hold a row that may be a record, one by one."""
    groups = set()
    for part in range(math.ceil(n / own)):
        for chunk in range(math.ceil(own / rows)):
            start = min(chunk * rows, own - rows)
            for row in range(chunk * rows, min((chunk + 1) * rows, own)):
                if part * own + row < n:
                    groups.add((part, chunk, (row - start) // size))
    return len(groups)


def test_the_margin_counts_the_groups_of_all_devices():
    draw, fewer = random.Random(0), 0
    for _ in range(300):
        own, size = draw.randint(1, 60), draw.randint(1, 9)
        rows = draw.randint(1, own)
        n = draw.randint(1, 5 * own)
        rule = GridSum(None, jnp.float32(1), jnp.float32(1), n, rows, False, own)
        assert rule.groups(size) >= held_groups(n, own, rows, size)
        # A copy that counts those of one device.
        first = min(n, own)
        one = GridSum(None, jnp.float32(1), jnp.float32(1), first, rows, False, own)
        fewer += one.groups(size) < held_groups(n, own, rows, size)
    assert fewer > 100


def test_the_margin_does_not_depend_on_devices_where_micro_batches_fit():
    for size in (1, 16, 64):
        counts = {
            GridSum(None, jnp.float32(1), jnp.float32(1), 896, 128, False, own).groups(
                size
            )
            for own in (896, 448, 256, 128)
        }
        assert len(counts) == 1


def test_rows_in_blocks_are_read_in_whole_blocks_by_any_number_of_devices(monkeypatch):
    def rows(n, devices):
        """Rows of the micro-batches of a program, on each device."""
        monkeypatch.setattr(jax, "device_count", lambda: devices)
        read = jax.make_jaxpr(
            lambda v: clipped_mean(lambda z: z, v, clip_norm=1.0, precision="float").raw
        )
        text = str(read(jnp.zeros(n)))
        return int(re.search(r"slice_sizes=\((?:\d+, )?(\d+)", text)[1])

    cuts = (1, 64), (3, 1), (3, 16), (3, 64), (63, 8)
    found = [rows(64 * blocks, devices) for blocks, devices in cuts]
    assert all(n % 64 == 0 or 64 % n == 0 for n in found)
    # The control: parts of rows in no blocks are read at once.
    assert rows(63 * 64 - 8, 16) == 503


def test_collectives_are_found_in_compiled_text():
    text = "%a = (s64[16,2]{1,0}, f32[3]{0}) all-reduce(%b), channel_id=1"
    assert collectives(text) == [32, 3]
    assert not collectives(re.sub("all-reduce", "add", text))


@pytest.mark.slow
def test_released_bits_depend_on_no_number_of_devices_or_processes():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    cases = [*READS, *RUNS, "inside jit", *FEWER]
    pair = [started(2, port, number, *cases) for number in range(2)]
    two, other = map(answer, pair)
    assert two["bits"] == other["bits"]
    assert two["keys"] == 1  # root_key gives both the same
    for found in (two, other):
        assert "different keys" in found["error"]
    alone = [answer(started(count, *cases, "parameters")) for count in COUNTS]
    one = alone[0]["bits"]["none"]
    assert one["inside jit"] == one["gradient"]
    assert one["fewer inside jit"] == one["fewer"] == one["fewer without jit"]
    for found in (*alone, two):
        for mesh in ("Explicit", "Auto"):
            assert found["bits"][mesh] == one
    for found in alone:
        assert found["parameters"] == one["full"]  # spread parameters too
