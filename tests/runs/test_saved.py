"""Saved solutions come back bit for bit, and foreign files are refused."""

import dataclasses
import io
import json
from pathlib import Path
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpbilevel as dpb
from dpbilevel.cli.plans import prepare
from dpbilevel.cli.run import run
from dpbilevel.core import saved
from dpbilevel.core.solution import Solution
from dpbilevel.runs import checkpoint
from tests.cli.test_runner import config_of
from tests.problems import ONE_LEVEL, records
from tests.zoo.networks import mlp

PLAN = dpb.calibrate(
    ONE_LEVEL, dpb.NoisyGD(2, 1.0, 0.5), dpb.PrivacyBudget(1.0, 1e-5), sizes=30
)


class Pair(NamedTuple):
    w: object
    b: object


def trees():
    numbers = np.random.default_rng(0).normal(size=(2, 3))
    odd = np.array([np.nan, -0.0, np.inf, 5e-324])
    odd.view(np.uint64)[0] += 5  # the payload of a NaN
    return {
        "array": jnp.asarray(numbers, jnp.float32),
        "double": numbers,
        "odd": odd,
        "strided": numbers.T[::2],
        "integers": np.arange(3, dtype=np.int16),
        "half": jnp.asarray([1.5, -2.0], jnp.bfloat16),
        "scalar": np.float64(0.1),
        "truth": np.array([True, False]),
        "empty": np.zeros((0, 4), np.float32),
        "pair": (jnp.ones(2), None),
        "nested": {"b": [jnp.ones(1), (np.zeros(2), {})], "a": {3: np.ones(1)}},
        "plain": {"C": 0.1, "kernel": "rbf", "depth": 3, "on": True, "none": None},
    }


def same_bits(left, right):
    """Whether two pytrees have the same structure, and leaves the same bits."""
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        if type(a) in (bool, int, float, str):
            assert (type(b), b) == (type(a), a)
        else:
            a, b = np.asarray(a), np.asarray(b)
            assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


@pytest.mark.parametrize("name", trees())
def test_values_come_back_bit_for_bit(name, tmp_path):
    value = trees()[name]
    Solution(value, trajectory=value).save(tmp_path / "s")
    found = dpb.load(tmp_path / "s")
    same_bits(value, found.value)
    same_bits(value, found.trajectory)
    assert found.report is None


def test_a_run_comes_back_with_its_report(tmp_path, getkey):
    data = records(30, 4)
    found_by = dpb.solve(
        ONE_LEVEL, PLAN.solver, data, jnp.zeros(4), key=getkey(), trajectory=True
    )
    solution = dataclasses.replace(found_by, report=PLAN.report)
    solution.save(str(tmp_path / "s"))
    found = dpb.load(str(tmp_path / "s"))
    same_bits((found_by.value, found_by.trajectory), (found.value, found.trajectory))
    assert found.report == PLAN.report
    assert str(found.report) == str(PLAN.report)
    assert found.rejected_updates == int(found_by.rejected_updates)
    features = np.asarray(data["features"])
    expected = features @ np.asarray(found_by.value)
    np.testing.assert_array_equal(features @ found.value, expected)
    # Released values alone: no record is in the files.
    written = b"".join(file.read_bytes() for file in (tmp_path / "s").iterdir())
    assert np.asarray(found_by.value).tobytes() in written
    for record in features:
        assert record.tobytes() not in written


def network(seed):
    return mlp(2, 1, 3, 1, jax.nn.tanh, seed=seed)


@pytest.mark.parametrize(
    ("value", "like"),
    [
        ({(0, 1): jnp.ones(2)}, {(0, 1): jnp.zeros(2)}),
        (network(0), network(1)),
        (network(0), eqx.filter_eval_shape(network, 1)),
        (Pair(jnp.ones(2), 0.5), Pair(np.zeros(2, np.float32), 1.0)),
        ({"net": network(0), "c": jnp.ones(2)}, {"c": jnp.zeros(2), "net": network(1)}),
        ((network(0), None), (network(1), None)),
    ],
)
def test_objects_come_back_by_a_template(value, like, tmp_path):
    steps = jax.tree.map(lambda v: jnp.stack([v, v]) if eqx.is_array(v) else v, value)
    Solution(value, trajectory=steps).save(tmp_path / "s")
    found = dpb.load(tmp_path / "s", like=like)
    arrays, expected = (eqx.filter(v, eqx.is_array) for v in (found.value, value))
    same_bits(arrays, expected)
    same_bits(*(eqx.filter(v, eqx.is_array) for v in (found.trajectory, steps)))
    if isinstance(value, eqx.Module):
        assert found.value(jnp.ones(2)) == value(jnp.ones(2))
    elif isinstance(value, Pair):
        assert type(found.value) is Pair
        assert found.value.b == 0.5


@pytest.mark.parametrize(
    "like",
    [
        None,
        jnp.ones(2),
        mlp(2, 1, 4, 1),
        mlp(2, 1, 3, 2),
        (network(0),),
    ],
    ids=["none", "array", "shapes", "structure", "tuple"],
)
def test_a_template_that_differs_is_refused(like, tmp_path):
    Solution(network(0)).save(tmp_path / "s")
    what = "needs like=, a" if like is None else "does not fit like=: give a"
    with pytest.raises(ValueError, match=f"{what} value of the saved structure"):
        dpb.load(tmp_path / "s", like=like)


def test_a_template_may_be_given_where_none_is_needed(tmp_path):
    value = {"w": jnp.ones(2), "b": (jnp.zeros(1), None)}
    Solution(value).save(tmp_path / "s")
    same_bits(dpb.load(tmp_path / "s", like=value).value, value)
    for other in ({"w": jnp.ones(2)}, value | {"w": jnp.ones(3)}, [1, 2]):
        with pytest.raises(ValueError, match="does not fit like="):
            dpb.load(tmp_path / "s", like=other)


def test_a_solution_is_replaced_on_request_and_nothing_else_ever(tmp_path):
    folder = tmp_path / "a" / "s"
    Solution(jnp.zeros(2)).save(folder)
    with pytest.raises(ValueError, match=r"is not empty.*overwrite=True"):
        Solution(jnp.ones(2)).save(folder)
    assert dpb.load(folder).value.tolist() == [0, 0]
    Solution(jnp.ones(2)).save(folder, overwrite=True)
    assert dpb.load(folder).value.tolist() == [1, 1]
    assert [file.name for file in folder.parent.iterdir()] == ["s"]
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="and nothing else"):
        Solution(jnp.ones(2)).save(folder, overwrite=True)
    with pytest.raises(NotADirectoryError, match=r"notes\.txt"):
        Solution(jnp.ones(2)).save(folder / "notes.txt")
    empty = tmp_path / "empty"
    empty.mkdir()
    Solution(jnp.ones(2)).save(empty)
    assert dpb.load(empty).value.tolist() == [1, 1]


def test_a_full_disk_leaves_the_earlier_solution(tmp_path, monkeypatch):
    Solution(jnp.zeros(2)).save(tmp_path / "s")

    def full(file, text, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        Solution(jnp.ones(2)).save(tmp_path / "s", overwrite=True)
    assert dpb.load(tmp_path / "s").value.tolist() == [0, 0]
    assert [file.name for file in tmp_path.iterdir()] == ["s"]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (jax.random.key(0), "value is a key"),
        (np.array(["a"]), "no real number"),
        (np.array([None]), "no real number"),
        (jnp.ones(1, complex), "no real number"),
        ({"k": [jax.random.key(0)]}, r"value\['k'\]\[0\] is a key"),
    ],
)
def test_a_value_that_must_not_be_kept_is_refused(value, said, tmp_path):
    with pytest.raises(ValueError, match=f"^save: .*{said}"):
        Solution(value).save(tmp_path / "s")
    assert not list(tmp_path.iterdir())


def test_saving_inside_a_program_is_refused(tmp_path):
    def program(w):
        Solution(w).save(tmp_path / "s")

    with pytest.raises(ValueError, match=r"outside of jax.jit"):
        jax.jit(program)(jnp.ones(2))


@pytest.fixture
def folder(tmp_path):
    Solution({"w": jnp.ones(3)}, report=PLAN.report).save(tmp_path / "s")
    return tmp_path / "s"


def with_page(folder, change):
    file = folder / saved.PAGE
    page = json.loads(file.read_text())
    change(page)
    file.write_text(json.dumps(page))


PICKLED = io.BytesIO()
np.save(PICKLED, np.array([{}], object))
DAMAGE = {
    "no arrays": lambda f: (f / saved.ARRAYS).unlink(),
    "cut arrays": lambda f: (f / saved.ARRAYS).write_bytes(
        (f / saved.ARRAYS).read_bytes()[:-1]
    ),
    "other arrays": lambda f: (f / saved.ARRAYS).write_bytes(b"\x80\x04K\x01."),
    "no JSON": lambda f: (f / saved.PAGE).write_text("{"),
    "no text": lambda f: (f / saved.PAGE).write_bytes(b"\xff\xfe\x00"),
    "a list": lambda f: (f / saved.PAGE).write_text("[1]"),
    "deep": lambda f: (f / saved.PAGE).write_text(100_000 * "["),
    "version": lambda f: with_page(f, lambda p: p.update(format=2)),
    "no value": lambda f: with_page(f, lambda p: p["parts"].pop("value")),
    "bad node": lambda f: with_page(f, lambda p: p["parts"].update(value={"eval": 1})),
    "bad list": lambda f: with_page(f, lambda p: p["parts"].update(value={"list": 1})),
    "bad name": lambda f: with_page(
        f, lambda p: p["parts"].update(value={"array": "no", "dtype": "float32"})
    ),
    "bad type": lambda f: with_page(
        f, lambda p: p["parts"].update(value={"array": "value['w']", "dtype": "O"})
    ),
    "bad report": lambda f: with_page(f, lambda p: p.update(report={"epsilon": 0})),
    "bad count": lambda f: with_page(f, lambda p: p.update(rejected_updates="many")),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_and_foreign_folders_are_refused(folder, damage):
    DAMAGE[damage](folder)
    with pytest.raises(ValueError, match=r"^load: .*(damaged|needs like=)"):
        dpb.load(folder)


def test_a_folder_without_a_solution_is_refused(tmp_path):
    for place in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ValueError, match=r"^load: .* holds no solution \(sol"):
            dpb.load(place)


def command_folder(folder, y, people):
    """The two files of a finished run that `load` reads."""
    folder.mkdir()
    arrays = {"x": np.arange(2.0), "trajectory": np.zeros((1, 2))}
    arrays |= {} if y is None else {"y": y}
    (folder / checkpoint.ARRAYS).write_bytes(checkpoint.npz(arrays))
    report = json.loads(PLAN.report.to_json())
    report |= {} if people is None else {"people": people}
    page = {"rejected_updates": 1, "report": report}
    (folder / checkpoint.RESULT).write_text(json.dumps(page))


@pytest.mark.parametrize(
    ("y", "people", "parts"),
    [(None, None, 1), (np.ones(3), None, 2), (None, "disjoint", 2)],
)
def test_a_run_of_the_command_line_has_one_part_or_two(tmp_path, y, people, parts):
    command_folder(tmp_path / "r", y, people)
    found = dpb.load(tmp_path / "r")
    assert found.report.people == people
    assert found.rejected_updates == 1
    x = found.value if parts == 1 else found.x
    np.testing.assert_array_equal(x, [0.0, 1.0])
    if parts == 2:
        np.testing.assert_array_equal(found.y, y)


@pytest.mark.parametrize("content", [PICKLED.getvalue(), b"", b"PK\x03\x04nothing"])
def test_arrays_of_a_run_that_are_pickles_or_nothing_are_refused(tmp_path, content):
    command_folder(tmp_path / "r", None, None)
    (tmp_path / "r" / checkpoint.ARRAYS).write_bytes(content)
    with pytest.raises(
        ValueError, match=r"^load: .*no solution of this version, or dam"
    ):
        dpb.load(tmp_path / "r")


@pytest.mark.slow
def test_the_folder_of_dpbilevel_run_is_loaded(tmp_path):
    result = run(prepare(config_of(".")), tmp_path / "out")
    found = dpb.load(tmp_path / "out")
    same_bits((result.x, result.y), found.value)
    assert str(found.report) == str(result.report)
