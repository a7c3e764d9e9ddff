"""The first release of a run: what it says, what it costs, that it stays within it."""

import dataclasses
import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpbilevel as dpb
from dpbilevel import audit
from dpbilevel.core import plan, usability
from dpbilevel.core.usability import Columns, RecordsCheck
from dpbilevel.privacy.accounting.closed_forms import gaussian_delta
from dpbilevel.privacy.ledger import Ledger
from dpbilevel.privacy.queries import Query

BUDGET = dpb.PrivacyBudget(1.0, 1e-6)
# With so much budget that audits see a tenth of the noise missing.
LARGE = dpb.PrivacyBudget(100.0, 1e-5)
COLUMNS = Columns(("label", "age", "pay"), ("no", "yes"))
ONE = {"records": COLUMNS}
PLACED = Columns((*COLUMNS.names, "source"), ("no", "yes"), "source", ("a", "b"))
TWO = {"upper": COLUMNS, "lower": PLACED}
MEAN = dpb.FiniteSum(lambda w, z: w * z)


def described(columns, unlisted=0.0, unread=0.0, cut=0.0, n=2000):
    """Indicators of records with these shares of bad labels, ages and pays."""
    bad = np.zeros((n, len(columns.names)), bool)
    outside = bad.copy()
    bad[: int(unlisted * n), 0] = True
    bad[n - int(unread * n) :, 1] = True
    outside[: int(cut * n), 2] = True
    label = np.where(bad[:, 0], -1, np.arange(n) % 4 == 0)
    return columns.indicators(bad, outside, label, np.arange(n) % 2)


def checked(check=None, seed=0, **shares):
    check = check or RecordsCheck.planned(ONE, BUDGET, 2000)
    rows = {"records": described(COLUMNS, **shares)}
    return check.release(rows, key=jax.random.key(seed))


def test_shares_are_released_with_a_few_per_cent_of_noise():
    level = checked(unlisted=0.3, unread=0.4).levels["records"]
    assert 0.02 < level.noise_std < 0.04
    near = {"abs": 8 * level.noise_std}  # four deviations of all but the first
    assert level.usable == pytest.approx(0.3, **near)
    assert level.columns == pytest.approx({"label": 0.3, "age": 0.4, "pay": 0}, **near)
    assert level.classes == pytest.approx({"no": 0.525, "yes": 0.175}, **near)
    assert level.constant_accuracy == pytest.approx(0.75, **near)


def test_a_misspelt_class_or_a_currency_stops_and_is_named():
    for shares, name in (({"unlisted": 1.0}, "label"), ({"unread": 1.0}, "age")):
        found = checked(**shares)
        assert found.stops
        assert found.levels["records"].wrong == (name,)
        (remark,) = found.remarks
        assert repr(name) in remark
        assert "'no' (" in remark


def test_a_class_that_no_record_has_stops_and_a_rare_one_does_not():
    check, every = RecordsCheck.planned(ONE, BUDGET, 2000), np.arange(2000)
    for label, column, stops in (
        (np.where(every % 2, 0, -1), 0, True),  # half of them, of a misspelt class
        (every % 20 == 1, 1, False),  # a twentieth; many have no age
    ):
        bad = np.zeros((2000, 3), bool)
        bad[:, column] = label < 0 if stops else every % 5 == 0
        rows = {"records": COLUMNS.indicators(bad, label=label)}
        found = [check.release(rows, key=jax.random.key(i)).stops for i in range(20)]
        assert found == [stops] * 20


def test_cut_columns_are_named_and_do_not_stop():
    found = checked(cut=0.95, unread=0.1)
    assert not found.stops
    assert found.levels["records"].wrong == ("pay",)
    assert "'pay'" in found.remarks[0]


def test_usable_records_do_not_stop_by_chance():
    size = 340  # where the noise is the largest that is released
    check = RecordsCheck.planned(ONE, BUDGET, size)
    assert check.releases[0].noise_std > 0.19
    rows = {"records": described(COLUMNS, n=size)}
    runs = [check.release(rows, key=jax.random.key(i)) for i in range(300)]
    assert not any(run.stops or run.remarks for run in runs)
    # As the same rule without the noise would do.
    assert any(run.levels["records"].usable < 0.5 for run in runs)


@pytest.mark.parametrize("people", ["disjoint", "overlapping", "shared", None])
def test_everybody_is_charged_a_hundredth_of_the_squared_budget(people):
    total = 1 / plan.least_multiplier(dpb.FullBatch(), 1, 1, BUDGET)
    size = 4000 if people == "shared" else 2000
    sizes = 2000 if people is None else dpb.Sizes(size, 4000, people)
    columns = ONE if people is None else TWO
    columns = {"upper": COLUMNS} if people == "shared" else columns
    check = RecordsCheck.planned(columns, BUDGET, sizes)
    ledger = Ledger(check.releases, people or "overlapping")
    for event in ledger.events().values():
        mu = dpb.privacy.accounting.profiles.gaussian_mu(event)
        assert mu**2 == pytest.approx(0.01 * total**2)


def too_small():
    return RecordsCheck.planned(TWO, BUDGET, dpb.Sizes(100, 4000))


def test_levels_that_are_too_small_and_pure_budgets_are_not_checked():
    (release,) = too_small().releases
    assert release.queries[0].role == "lower"
    assert "upper records" in too_small().assumptions[0]
    pure = RecordsCheck.planned(ONE, dpb.PrivacyBudget(1.0, 0.0), 2000)
    assert pure.releases == ()
    assert "the records are as declared" in pure.assumptions[0]
    assert math.isnan(checked(pure).usable)


def mu_of_run(check, sizes=2000):
    """The mu of the run and of the check, by formulas of this test."""
    solver = dpb.NoisyGD(5, 1.0, 0.1)
    planned = dpb.calibrate(MEAN, solver, BUDGET, sizes=sizes, before=check.releases)
    noise = planned.solver.ledger(MEAN, sizes).releases[0].noise_multiplier
    own = [r.noise_multiplier**-2 for r in check.releases]
    return math.sqrt(5 / noise**2 + sum(own)), planned.report


def test_run_and_check_together_stay_within_the_budget(monkeypatch):
    check = RecordsCheck.planned(ONE, BUDGET, 2000)
    mu, report = mu_of_run(check)
    assert gaussian_delta(mu, BUDGET.epsilon) == pytest.approx(BUDGET.delta, rel=1e-6)
    assert report.epsilon <= BUDGET.epsilon
    assert [row.release for row in report.ledger] == ["usable records", "gradient"]
    # A plan that forgets the check exceeds the budget.
    source = inspect.getsource(plan.calibrated)
    forgets = source.replace("(*before, *own.releases)", "own.releases")
    assert forgets != source
    broken = dict(vars(plan))
    exec(forgets, broken)
    monkeypatch.setattr(plan, "calibrated", broken["calibrated"])
    mu, _ = mu_of_run(check)
    assert gaussian_delta(mu, BUDGET.epsilon) > 1.02 * BUDGET.delta


def test_what_is_released_before_is_a_tuple_within_the_budget():
    solver = dpb.NoisyGD(5, 1.0, 0.1)
    with pytest.raises(TypeError, match="before"):
        dpb.calibrate(MEAN, solver, BUDGET, sizes=2000, before=[])  # pyright: ignore
    large = RecordsCheck.planned(ONE, LARGE, 2000).releases
    with pytest.raises(ValueError, match="give less in before="):
        dpb.calibrate(MEAN, solver, BUDGET, sizes=2000, before=large)


def test_a_run_of_sampled_batches_is_planned_beside_the_check():
    check = RecordsCheck.planned(ONE, BUDGET, 2000)
    solver = dpb.NoisyGD(3, 1.0, 0.1, sampling=dpb.FixedSize(200))
    planned = dpb.calibrate(MEAN, solver, BUDGET, sizes=2000, before=check.releases)
    both = Ledger(check.releases) + planned.solver.ledger(MEAN, 2000)
    assert 0.98 * BUDGET.delta < both.delta(BUDGET.epsilon) <= BUDGET.delta


def moved():
    """The longest change of the mean by one record, in units of what is charged."""
    (release,) = RecordsCheck.planned({"records": PLACED}, LARGE, 8).releases
    bad = (np.arange(48)[:, None] >> np.arange(4)) % 2 > 0
    label, place = np.resize([-1, 0, 1], 48), np.resize([0, -1, 1, 0], 48)
    rows = PLACED.indicators(bad, label=label, place=place)

    @jax.jit
    @jax.vmap
    def mean(row):
        kept = jnp.concatenate([row[None], jnp.asarray(rows[:7])])
        (query,) = release.queries
        sealed = query.read(lambda row: row, kept, precision="float", key=None)
        return sealed.raw

    means = np.asarray(mean(rows), float)
    changes = np.linalg.norm(means[:, None] - means[None], axis=-1)
    return changes.max() / (2 * release.contribution)


def test_no_record_moves_the_mean_by_more_than_is_charged(monkeypatch):
    assert 0.7 < moved() <= 1
    # Rows that are longer than they should be are clipped, whatever they hold.
    norm = PLACED.clip_norm
    monkeypatch.setattr(usability, "_BLOCK", 3.0)
    monkeypatch.setattr(Columns, "clip_norm", norm)
    assert moved() <= 1
    unclipped(monkeypatch)
    assert moved() > 1


def unclipped(monkeypatch):
    """Let blocks be long, and forget to clip them where they are read."""
    read = Query.read

    def forgetful(self, *args, **options):
        loose = dataclasses.replace(self, clip_norm=50.0)
        sealed = read(loose, *args, **options)
        return dataclasses.replace(sealed, contribution=self.contribution)

    monkeypatch.setattr(usability, "_BLOCK", 3.0)
    monkeypatch.setattr(Query, "read", forgetful)


def rows_of(check, hostile=False):
    """Indicators of a few records; those of a hostile person differ the most."""

    def rows(columns, size):
        found = described(columns, n=size)
        if hostile:
            wrong = np.arange(len(columns.names))[None] == 1
            one = np.zeros(1, int)
            found[:1] = columns.indicators(wrong, label=one, place=one + 1)
        return jnp.asarray(found)

    sizes = {q.role: q.size for r in check.releases for q in r.queries}
    columns = dict(check.columns)
    return {role: rows(columns[role], size) for role, size in sizes.items()}


def in_both_levels():
    return RecordsCheck.planned(TWO, LARGE, dpb.Sizes(16, 16))


def with_noise(check, factor):
    releases = tuple(
        dataclasses.replace(r, mechanism=r.mechanism.scaled(factor))
        for r in check.releases
    )
    return dataclasses.replace(check, releases=releases)


@jax.jit
def means_of(factor, keys):
    """What checks of both levels release with so much noise, for each key."""
    check = with_noise(in_both_levels(), factor)
    return jax.vmap(lambda key: check.means(rows_of(check), key))(keys)


def deviation(factor, runs=600):
    """The standard deviation of what is released, over that of the ledger."""
    made = means_of(factor, jax.random.split(jax.random.key(5), runs))
    stds = {q.role: r.noise_std for r in in_both_levels().releases for q in r.queries}
    found = [np.std(np.asarray(v), axis=0) / stds[k] for k, v in made.items()]
    return np.concatenate(found).mean()


def test_noise_is_what_the_ledger_says():
    assert deviation(1.0) == pytest.approx(1, abs=0.05)
    assert deviation(0.9) < 0.95


def audited(check, claim):
    """The audit of a check on neighbours that differ in a person of both levels."""
    data, neighbour = rows_of(check), rows_of(check, hostile=True)
    options = {"key": jax.random.key(3), "runs": 50_000}
    run = lambda rows, key: check.means(rows, key)  # noqa: E731
    return audit.trade_off(run, data, neighbour, claim, **options)


def claim_of(releases):
    """What the ledger claims for a person with a record in each level."""
    return next(iter(audit.ledger_claims(Ledger(releases)).values()))


@pytest.mark.slow
def test_audits_pass_the_check_and_reject_broken_copies(monkeypatch):
    check = in_both_levels()
    sound = claim_of(check.releases)
    assert audited(check, sound).passed
    assert not audited(with_noise(check, 0.7), sound).passed
    assert not audited(check, claim_of(check.releases[:1])).passed  # one level alone
    unclipped(monkeypatch)
    jax.clear_caches()
    assert not audited(check, sound).passed
    jax.clear_caches()


def test_levels_are_released_with_noise_of_their_own(monkeypatch):
    def key_of(query, mechanism, rows, *, key):
        keys.append(jax.random.key_data(key).tolist())

    keys = []
    monkeypatch.setattr(usability, "_released", key_of)
    sizes = dpb.Sizes(upper=2000, lower=2000, people="disjoint")
    rows = {role: described(columns) for role, columns in TWO.items()}
    check = RecordsCheck.planned(TWO, BUDGET, sizes)
    check.means(rows, jax.random.key(0))
    assert len(keys) == 2
    assert keys[0] != keys[1]


def test_rows_of_a_private_number_of_records_are_public(monkeypatch):
    def rows_of(query, mechanism, rows, *, key):
        seen.add(len(rows.present))

    seen = set()
    monkeypatch.setattr(usability, "_released", rows_of)
    added = dpb.Neighbours.ADD_OR_REMOVE_ONE
    check = RecordsCheck.planned(ONE, BUDGET, 2000, neighbours=added)
    for n in (1, 1999, 2001):
        check.means({"records": described(COLUMNS, n=n)}, jax.random.key(0))
    assert seen == {2048}
