"""The unit of privacy is a person: eight rows move what one record may move."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpbilevel as dpb
from dpbilevel.bilevel.certificates.certified import certificate_of
from dpbilevel.bilevel.certificates.sensitivities import solution_rounding
from dpbilevel.core.process_spending import ProcessRun, ProcessSpending
from dpbilevel.privacy.exact.grid import Grid
from dpbilevel.privacy.queries import Query
from dpbilevel.privacy.records.people import (
    PersonRows,
    PersonUnit,
    combined,
    numbered,
)
from tests.cases import fast_first
from tests.contract import recorded
from tests.contract.recorded import CASES, KEY
from tests.contract.test_releases import NOISY, clips_gradients, excess

OF_PEOPLE = [name for name in CASES if name.endswith("_of_people")]
CLIPPED = [
    name
    for name in OF_PEOPLE
    if name in NOISY and clips_gradients(name) and not CASES[name].bounds_itself
]
LOG = "noisy_gd_adam_of_people"


def rows_clipped(read):
    """Each row is clipped, under the seal of a clipped person."""

    def broken(self, fun, records, **options):
        def of_place(place):
            rows = jax.tree.map(
                lambda v: jnp.repeat(v[:, place, None], v.shape[1], 1), records.rows
            )
            return read(self, fun, PersonRows(rows, records.present), **options)

        values = [of_place(place) for place in range(records.present.shape[1])]
        add = Grid.__add__ if values[0].precision == "grid" else optax.tree.add
        total = functools.reduce(add, (v.raw for v in values))
        return dataclasses.replace(values[0], raw=total)

    return broken


@pytest.mark.reuses_keys  # of batches, in the broken copy
@pytest.mark.parametrize("name", fast_first(sorted(CLIPPED, key=LOG.__ne__)))
def test_rows_clipped_one_by_one_are_noticed(name):
    broken = recorded.recorder((Query, "read", rows_clipped))
    assert excess(name) <= 1 + 1e-4 < 4 < excess(name, solve=broken)


FAST = ("noisy_gd_adam",)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=() if n in FAST else pytest.mark.slow)
        for n in sorted(recorded.SHORT - {"gradient_informative"})
    ],
)
def test_people_with_equal_rows_have_the_answer_of_one_row_each(name):
    # Sums over more rows round more. A proved sensitivity counts that, so that its
    # noise is larger for people.
    scale = 1e-4 if name == "clipped_upper" else 1.0
    answers = [
        recorded.run(case, jax.random.key(KEY), scale).value
        for case in (name, f"{name}_of_people")
    ]
    chex.assert_trees_all_close(*answers, rtol=1e-4, atol=1e-4)


def loss(w, record):
    return 0.5 * jnp.sum((w - record) ** 2)


def means(rows, ids, **unit):
    """The mean gradient of people at zero, far below the clip norm."""
    data = dpb.by_person(rows, ids, most_rows=3)
    problem = dpb.FiniteSum(loss).per_person(3, **unit)
    solver = dpb.NoisyGD(1, 100.0, 1.0).with_noise(0.0).with_precision("float")
    start = jnp.zeros(rows.shape[1])
    return dpb.solve(problem, solver, data, start, key=jax.random.key(KEY)).value


ROWS = np.arange(10, dtype=np.float32).reshape(5, 2)
IDS = np.array([7, 7, 3, 7, 7])


def test_a_person_is_the_mean_or_the_sum_of_the_first_rows():
    first, other = ROWS[[0, 1, 3]].mean(0), ROWS[2]
    np.testing.assert_allclose(means(ROWS, IDS), (first + other) / 2, rtol=1e-6)
    sums = (ROWS[[0, 1, 3]].sum(0) + ROWS[2]) / 3
    np.testing.assert_allclose(means(ROWS, IDS, combine="sum"), sums / 2, rtol=1e-6)


def test_a_row_that_is_not_finite_does_not_count_and_a_person_without_rows_is_zero():
    rows = ROWS.copy()
    rows[1], rows[2] = np.nan, np.inf
    first = ROWS[[0, 3, 4]].mean(0)
    np.testing.assert_allclose(means(rows, IDS), first / 2, rtol=1e-6)


@pytest.mark.parametrize(
    "ids",
    [
        ["b", "b", "a", "b", "b"],
        np.array([2.0, 2.0, 1.0, 2.0, 2.0]),
        np.array([2, 2, "1", 2.0, "2 "], dtype=object),
        np.array(["2020-02-01"] * 2 + ["2020-01-01"] + ["2020-02-01"] * 2, "M8[D]"),
    ],
    ids=["words", "floats", "mixed", "dates"],
)
def test_ids_of_any_kind_group_rows_alike(ids):
    want = dpb.by_person(ROWS, IDS, most_rows=3)
    chex.assert_trees_all_equal(dpb.by_person(ROWS, ids, most_rows=3), want)


@pytest.mark.parametrize("last", [5, float("nan"), "x", None, (1, 2), b"y"])
def test_no_id_changes_how_others_are_read(last):
    known = [v for k in range(10**17, 10**17 + 50) for v in (k, str(k))]
    numbers, _ = numbered([*known, last])
    assert len(set(numbers[:100].tolist())) == 50
    np.testing.assert_array_equal(numbers[:100:2], numbers[1:100:2])


@pytest.mark.parametrize("rows", [0, 3])
def test_nobody_at_all_is_no_error(rows):
    people = dpb.by_person(np.zeros((rows, 2)), [None] * rows, most_rows=2)
    assert combined(np.asarray, people, PersonUnit(2)).shape == (0, 2)


@pytest.mark.parametrize("missing", [None, np.nan, "", "  "])
def test_rows_without_an_id_are_left_out(missing):
    ids = np.array(["a", missing, "b", missing, "a"], dtype=object)
    data = dpb.by_person(ROWS, ids, most_rows=2)
    np.testing.assert_array_equal(data.present, [[True, True], [True, False]])
    np.testing.assert_array_equal(data.rows[0], ROWS[[0, 4]])


def test_the_report_says_who_is_protected():
    plan = dpb.calibrate(
        dpb.FiniteSum(loss).per_person(4),
        dpb.NoisyGD(1, 1.0, 1.0),
        dpb.PrivacyBudget(1.0, 1e-6),
        sizes=100,
    )
    assert plan.report.unit == "one person (at most 4 rows each)"
    assert "protects: one person (at most 4 rows each)" in str(plan.report)
    restored = dpb.privacy.PrivacyReport.from_json(plan.report.to_json())
    assert restored == plan.report


PEOPLE = dpb.FiniteSum(loss).per_person(3)


@pytest.mark.parametrize(
    ("problem", "data", "match"),
    [
        (dpb.FiniteSum(loss), dpb.by_person(ROWS, IDS), "give problem.per_person"),
        (PEOPLE, ROWS, r"must come from by_person\(records, ids, most_rows=3\)"),
        (PEOPLE, dpb.by_person(ROWS, IDS, most_rows=2), "the same number"),
    ],
)
def test_data_of_another_unit_are_refused(problem, data, match):
    solver = dpb.NoisyGD(1, 1.0, 1.0)
    budget = dpb.PrivacyBudget(1.0, 1e-2)
    options = {"budget": budget, "key": jax.random.key(KEY)}
    with pytest.raises((TypeError, ValueError), match=match):
        dpb.fit(problem, solver, data, jnp.zeros(2), **options)
    with pytest.raises((TypeError, ValueError), match=match):
        dpb.solve(
            problem, solver.with_noise(1.0), data, jnp.zeros(2), key=options["key"]
        )


def test_a_spread_declared_for_rows_is_refused_for_people():
    problem = dpb.FiniteSum(loss, lipschitz=1.0, lipschitz_spread=0.1)
    with pytest.raises(ValueError, match="lipschitz_spread is that of rows"):
        problem.per_person()


def test_a_certificate_of_other_losses_does_not_become_one_of_people():
    box = dpb.linear_tuning(dpb.Logistic(), [0, 0], bounds=(-2.0, 0.0))
    assert isinstance(box.per_person(2).constants, type(box.constants))
    other = dataclasses.replace(box, lower=lambda x, y, z: 1e6 * box.lower(x, y, z))
    with pytest.raises(ValueError, match="was exchanged"):
        other.per_person(2)


def test_sums_over_the_rows_of_people_are_taken_to_round_as_often():
    sizes = dpb.Sizes(64, 64)
    of_rows = dpb.linear_tuning(dpb.Logistic(), [0, 0], bounds=(-2.0, 0.0))
    bounds = [
        certificate_of(p).bounds(sizes) for p in (of_rows, of_rows.per_person(64))
    ]
    rounding = [solution_rounding(b, sizes, jnp.float32) for b in bounds]
    assert rounding[1] > 10 * rounding[0]


def test_runs_on_rows_and_on_people_have_no_common_total():
    runs = [
        ProcessRun("fit", 1.0, 1e-6, "replace_one", "", "100 records", unit)
        for unit in ("rows", "people")
    ]
    assert ProcessSpending(tuple(runs)).epsilon == np.inf
    assert ProcessSpending((runs[0], runs[0])).epsilon == 2.0


def test_constants_declared_for_rows_are_refused_for_people():
    problem = CASES["clipped_upper"].problem
    with pytest.raises(ValueError, match="is declared for rows"):
        problem.per_person()


def test_a_number_of_ids_other_than_that_of_rows_is_refused():
    with pytest.raises(ValueError, match="got 4 ids for 5 rows"):
        dpb.by_person(ROWS, IDS[:4])


SORTED = np.array([1, 1, 2, 2, 2])


def test_people_on_disk_release_the_bits_of_those_in_memory():
    solver = dpb.NoisyGD(2, 1.0, 1.0).with_noise(1.0).with_sizes(2)
    rows = {"z": ROWS, "other": ROWS[:, 0]}
    problem = dpb.FiniteSum(lambda w, record: loss(w, record["z"])).per_person(2)

    def released(data):
        key = jax.random.key(KEY)
        return dpb.solve(problem, solver, data, jnp.zeros(2), key=key).value

    disk = dpb.OnDisk.arrays(rows).by_person(SORTED, most_rows=2)
    memory = dpb.by_person(rows, SORTED, most_rows=2)
    chex.assert_trees_all_equal(released(disk), released(memory))


def test_people_on_disk_leave_out_rows_without_an_id_and_need_an_order():
    disk = dpb.OnDisk.arrays(ROWS)
    ids = np.array([np.nan, 1, np.nan, 1, 2])
    people = disk.by_person(ids, most_rows=3)
    leaves = [np.empty((2, *shape), kind) for shape, kind in people.store.kinds]
    people.store.reader(0)(leaves)
    want = dpb.by_person(ROWS, ids, most_rows=3)
    chex.assert_trees_all_equal(leaves, jax.tree.leaves(want))
    with pytest.raises(ValueError, match="Sort the file by person"):
        disk.by_person(IDS)
    with pytest.raises(ValueError, match="got 2 ids for 5 rows"):
        disk.by_person(IDS[:2])
