"""What estimators release; one record moves nothing but its own contribution."""

import math
import warnings

import jax
import numpy as np
import pytest
import scipy.stats

import dpbilevel as dpb
from dpbilevel.core import columns, usability
from dpbilevel.core.usability import RecordsCheck
from dpbilevel.privacy.keys import derive
from dpbilevel.sklearn import (
    DPLogisticRegression,
    DPMLPClassifier,
    DPRidge,
    DPSourceReweighting,
    FairClassifier,
    base,
    declared,
    logistic,
    ridge,
)
from tests.cases import slow

# A few records, one step: hardly more than noise, which fits say from public numbers.
pytestmark = pytest.mark.filterwarnings("ignore:.*noise of all steps together")

N = 64
BOX = {"bounds": (-1, 1)}
LABELS = {"classes": [0, 1], **BOX}
STEP = {"max_iter": 1}
SHORT = STEP | {"clip_norm": 0.2}  # than the gradients of strange records


def table(seed=0):
    rng = np.random.default_rng(seed)
    X = rng.uniform(-1, 1, (N, 3))
    return X, (X[:, 0] > 0).astype(float)


def fits():
    """A function of (X, y, key) for each estimator, one step long."""
    half = np.arange(N) % 2
    one = dpb.bilevel.OneLevel(dpb.NoisyGD(1, 1.0, 1.0), reads="both")
    clean = table(seed=1)
    return {
        "logistic": lambda X, y, key: DPLogisticRegression(**LABELS, **SHORT).fit(
            X, y, key=key
        ),
        "ridge": lambda X, y, key: DPRidge(**BOX, **SHORT, target_bounds=(0, 1)).fit(
            X, y, key=key
        ),
        "network": lambda X, y, key: DPMLPClassifier(
            **LABELS, **STEP, hidden_layer_sizes=3
        ).fit(X, y, key=key),
        "fair": lambda X, y, key: FairClassifier(
            **LABELS, **STEP, shares={0: 0.5, 1: 0.5}
        ).fit(X, y, groups=half, key=key),
        "sources": lambda X, y, key: DPSourceReweighting(
            **LABELS, sources=[0, 1], solver=one
        ).fit(X, y, sources=half, clean=clean, key=key),
    }


# A network and groups in the slow suite, which take longest to compile.
estimators = pytest.mark.parametrize(
    "name", ["logistic", "ridge", *slow("sources", "network", "fair")]
)


@pytest.fixture
def runs(monkeypatch):
    """What passes from estimators into the library, run by run."""
    seen = []
    run = base.compiled_run

    def spy(problem, solver, records, w0, *, key):
        solution = run(problem, solver, records, w0, key=key)
        seen.append((solver, jax.tree.map(np.asarray, (records, w0)), solution.value))
        return solution

    monkeypatch.setattr(base, "compiled_run", spy)
    return seen


def replaced(X, y, row, label):
    X, y = X.astype(object), y.astype(object)
    X[0], y[0] = row, label
    return X, y


# Rows and labels of one person: out of bounds, not numbers, not declared.
STRANGE = {
    "far": ([1e300, -1e300, 5.0], 1.0),
    "infinite": ([np.inf, 0.0, 0.0], 1.0),
    "missing": ([np.nan, 0.0, 0.0], 0.0),
    "none": ([None, 0.0, 0.0], 0.0),
    "text": (["secret", 0.0, 0.0], 0.0),
    "object": ([{}, 0.0, 0.0], 0.0),
    "other label": ([0.1, 0.2, 0.3], 7.0),
    "text as label": ([0.1, 0.2, 0.3], "secret"),
    "list as label": ([0.1, 0.2, 0.3], None),
    "missing label": ([0.1, 0.2, 0.3], np.nan),
}


def others(records):
    """All rows but the first of every leaf."""
    return [leaf[1:] for leaf in jax.tree.leaves(records)]


def same_but_for_one_row(name, runs, getkey):
    """Whether strange records of one person leave all other records as they were."""
    X, y = table()
    fit = fits()[name]
    fit(X, y, getkey())
    for row, label in STRANGE.values():
        fit(*replaced(X, y, row, label), getkey())
    solvers, given, _ = zip(*runs, strict=True)
    (first, *rest), starts = [r for r, _ in given], [w for _, w in given]
    if name != "network":  # whose start is drawn from the key
        flat = [jax.flatten_util.ravel_pytree(w)[0] for w in starts]
        assert all(np.array_equal(flat[0], w) for w in flat)
    assert all(solver == solvers[0] for solver in solvers)
    return all(
        all(map(np.array_equal, others(first), others(records))) for records in rest
    )


@estimators
def test_no_record_raises_warns_or_moves_another(name, runs, getkey):
    assert same_but_for_one_row(name, runs, getkey)


@pytest.mark.parametrize("name", ["logistic", *slow("ridge")])
def test_units_from_the_records_are_found_out(name, runs, getkey, monkeypatch):
    rows = declared.Frame.rows

    def leaky(frame, X):  # as a scaler that is fitted to the records
        finite = X[np.isfinite(X).all(axis=1)]
        return rows(frame, X / np.abs(finite).max(axis=0))

    monkeypatch.setattr(declared.Frame, "rows", leaky)
    assert not same_but_for_one_row(name, runs, getkey)


@pytest.mark.parametrize(
    "X", [[0.7654], np.full((3, 2), 0.7654j), [[[0.7654]]], 0.7654]
)
def test_no_message_has_a_value_of_a_record(X):
    with pytest.raises((ValueError, TypeError)) as error:
        DPLogisticRegression(**LABELS).fit(X, [0, 0.7654, 1])
    assert "7654" not in str(error.value)
    with pytest.raises(ValueError, match="holds numbers") as error:
        DPLogisticRegression(**LABELS).fit(np.zeros((2, 1)), np.asarray(["b", "long"]))
    assert "long" not in str(error.value)
    assert "4" not in str(error.value)  # the length of the longest label


class Warns:
    """An entry that becomes a number with a warning, as some arrays do."""

    def __float__(self):
        warnings.warn("of a record", stacklevel=1)
        return 2.0


def test_an_entry_that_warns_where_it_becomes_a_number_is_silent():
    entries = np.empty((2, 1), object)
    entries[:, 0] = [1.0, Warns()]
    with pytest.warns(UserWarning, match="of a record"):  # the control
        float(entries[1, 0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = columns.numbers(entries)
    np.testing.assert_array_equal(found, [[1.0], [2.0]])


def test_a_text_in_a_list_leaves_numbers_and_labels_of_others(runs, getkey):
    X, y = table()
    X, y = (X > 0).tolist(), y.astype(int).tolist()
    fit = fits()["logistic"]
    fit(X, y, getkey())
    for row, label in ((["text", True, None], 1), (X[0], "text"), (X[0], [])):
        fit([row, *X[1:]], [label, *y[1:]], getkey())
    (first, *rest) = (records for _, (records, _), _ in runs)
    for records in rest:
        assert all(map(np.array_equal, others(first), others(records)))
        assert np.isnan(records["features"][0]).all()


def contributions_of(fit, key, runs, n=N):
    """The models of one step on data sets that differ in the first record."""
    X, y = (v[:n] for v in table())
    for row in ([1e6, 1e6, 1e6], [1e6, -1e6, 1e6]):
        for label in (0.0, 1.0):
            fit(*replaced(X, y, row, label), jax.random.clone(key))
    return [jax.flatten_util.ravel_pytree(value)[0] for *_, value in runs]


@pytest.mark.reuses_keys
@pytest.mark.parametrize("name", ["logistic", "ridge"])
def test_one_record_moves_a_step_by_the_sensitivity_at_most(name, runs, getkey):
    models = contributions_of(fits()[name], getkey(), runs)
    solver = runs[0][0]
    most = solver.step_size * 2 * solver.clip_norm / N
    moves = [np.linalg.norm(m - models[0]) for m in models]
    assert max(moves) <= most * (1 + 1e-4)
    assert max(moves) > 0.98 * most  # as by two opposite gradients


@pytest.mark.reuses_keys
def test_a_gradient_whose_constant_is_not_clipped_moves_more(runs, getkey, monkeypatch):
    """A mutant: the constant's part of the gradient is taken out of the clip."""
    gradients = dpb.FiniteSum.record_gradients

    def unclipped(problem, w):
        (of_record,) = gradients(problem, w).values()

        def shrunk(record):
            return of_record(record).at[-1].multiply(0.01)

        return {"records": shrunk}

    answer = dpb.NoisyGD.answer

    def restored(solver, problem, state):
        return answer(solver, problem, state).at[-1].multiply(100.0)

    monkeypatch.setattr(dpb.FiniteSum, "record_gradients", unclipped)
    monkeypatch.setattr(dpb.NoisyGD, "answer", restored)
    n = N - 1  # of which there is no compiled program, with or without the mutant
    models = contributions_of(fits()["logistic"], getkey(), runs, n)
    solver = runs[0][0]
    most = solver.step_size * 2 * solver.clip_norm / n
    assert max(np.linalg.norm(m - models[0]) for m in models) > 1.01 * most


@pytest.mark.reuses_keys
@pytest.mark.parametrize("name", ["logistic", *slow("ridge", "network", "fair")])
def test_records_that_count_for_nothing_are_all_alike(name, runs, getkey):
    X, y = table()
    key = getkey()
    for kind in ("missing", "text", "infinite", "missing label"):
        fits()[name](*replaced(X, y, *STRANGE[kind]), jax.random.clone(key))
    first, *rest = (jax.tree.leaves(value) for *_, value in runs)
    for other in rest:
        assert all(map(np.array_equal, first, other))


@pytest.mark.parametrize(
    "name", ["logistic", *slow("ridge", "sources", "network", "fair")]
)
def test_two_fits_never_share_noise(name, runs):
    X, y = table()
    for _ in range(2):
        estimator = fits()[name](X, y, None)
        kept = jax.tree.leaves(list(vars(estimator).values()))
        assert not any(is_key(leaf) for leaf in kept)
    first, second = (jax.flatten_util.ravel_pytree(value)[0] for *_, value in runs)
    assert (first != second).sum() >= 4  # but for weights that nothing moves


def test_the_check_and_the_run_have_keys_of_their_own(monkeypatch):
    def spied(call):
        def spy(*args, key, **options):
            keys.append(tuple(jax.random.key_data(key).tolist()))
            return call(*args, key=key, **options)

        return spy

    keys = []
    monkeypatch.setattr(RecordsCheck, "release", spied(RecordsCheck.release))
    monkeypatch.setattr(base, "compiled_run", spied(base.compiled_run))
    given = jax.random.key(1)
    model = DPLogisticRegression(**LABELS, **SHORT, epsilon=100.0)
    model.fit(*table(), key=given)
    assert len(keys) == 2
    assert len({*keys, tuple(jax.random.key_data(given).tolist())}) == 3


MANY = {"bounds": (0, 1), "max_iter": 60}
KINDS = {
    "target": lambda **more: DPRidge(**MANY, target_bounds=(-50, 50), **more),
    "target, no constant": lambda **more: DPRidge(
        **MANY, target_bounds=(-50, 50), fit_intercept=False, **more
    ),
    "rare class": lambda **more: DPLogisticRegression(**MANY, classes=[0, 1], **more),
}
NAMED = pytest.mark.filterwarnings("ignore:.*(most targets|too small to tell)")
PRIVATE_SIZE = {"neighbours": "add_or_remove_one", "size": 1480}


def releases_of(model, monkeypatch):
    """Clip norms and noises of all releases, what is charged, and the keys of a fit."""
    made, keys, released, run = [], [], usability._released, base.compiled_run

    def spy(query, mechanism, rows, *, key):
        made.append((query.clip_norm, float(mechanism.noise_multiplier)))
        keys.append(key)
        return released(query, mechanism, rows, key=key)

    def spied(problem, solver, records, w0, *, key):
        for release in solver.ledger(problem, solver.sizes).releases:
            row = release.row()
            made.extend([(row.clip_norm, row.noise_multiplier)] * row.count)
        keys.append(key)
        return run(problem, solver, records, w0, key=key)

    monkeypatch.setattr(usability, "_released", spy)
    monkeypatch.setattr(base, "compiled_run", spied)
    rng, given = np.random.default_rng(0), jax.random.key(3)
    X = rng.uniform(0, 1, (1500, 3))
    y = X @ [3, -2, 1] + 0.3 * rng.normal(size=1500)
    if isinstance(model, DPLogisticRegression):
        y = (rng.random(1500) < 0.03).astype(int)
    model.fit(X, y, key=given)
    monkeypatch.undo()
    rows = model.privacy_report_.ledger
    charged = [(r.clip_norm, r.noise_multiplier) for r in rows for _ in range(r.count)]
    return (
        made,
        charged,
        [tuple(jax.random.key_data(k).tolist()) for k in (given, *keys)],
    )


@NAMED
@pytest.mark.parametrize("relation", [{}, *slow(PRIVATE_SIZE)])
@pytest.mark.parametrize("name", ["target", "rare class", *slow("target, no constant")])
def test_every_release_of_a_fit_is_charged_and_has_its_own_key(
    name, relation, monkeypatch
):
    made, charged, keys = releases_of(KINDS[name](**relation), monkeypatch)
    np.testing.assert_allclose(made, charged)
    assert len(made) - 60 == {"target": 20, "rare class": 3}.get(name, 8)
    assert len(set(keys)) == len(keys)


@NAMED
@pytest.mark.parametrize(
    ("name", "module", "uncharged"),
    [("target", ridge, "Spread"), ("rare class", logistic, "Effects")],
)
def test_a_release_that_is_not_charged_is_seen(name, module, uncharged, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(getattr(module, uncharged), "releases", ())
        made, charged, _ = releases_of(KINDS[name](), pytest.MonkeyPatch())
    assert len(made) > len(charged)


@NAMED
def test_a_key_that_two_reads_share_is_seen(monkeypatch):
    def shared(key, *names):
        return (
            (jax.random.clone(key), key) if "prepare" in names else derive(key, *names)
        )

    with monkeypatch.context() as patch:
        patch.setattr(base, "derive", shared)
        _, _, keys = releases_of(KINDS["rare class"](), pytest.MonkeyPatch())
    assert len(set(keys)) < len(keys)


def test_a_fit_counts_from_its_first_release_on(monkeypatch):
    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(ridge.Spread, "center_and_unit", interrupted)
    before = sum(run.times for run in dpb.spent().runs)
    with pytest.raises(KeyboardInterrupt):
        releases_of(KINDS["target"](), pytest.MonkeyPatch())
    assert sum(run.times for run in dpb.spent().runs) == before + 1


def is_key(leaf):
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


@pytest.mark.parametrize("epsilon", [0.5, *slow(1.0)])
def test_the_claim_is_that_of_as_many_gaussian_releases(epsilon):
    X, y = table()
    model = DPLogisticRegression(
        **LABELS, epsilon=epsilon, max_iter=7, clip_norm=0.5
    ).fit(X, y)
    (row,) = model.privacy_report_.ledger
    assert row.count == 7
    assert row.roles["records"].records == N
    mu = math.sqrt(7) / row.noise_multiplier
    normal = scipy.stats.norm.cdf
    delta = normal(mu / 2 - epsilon / mu) - math.exp(epsilon) * normal(
        -mu / 2 - epsilon / mu
    )
    assert delta == pytest.approx(1e-5, rel=1e-3)
    assert delta <= 1e-5
    solver = dpb.NoisyGD(7, model.clip_norm, 1.0)
    problem = dpb.FiniteSum(dpb.logistic_loss)
    budget = dpb.PrivacyBudget(epsilon, 1e-5)
    plan = dpb.calibrate(problem, solver, budget, sizes=N)
    assert plan.report.ledger == model.privacy_report_.ledger
    assert plan.report.epsilon == model.privacy_report_.epsilon
    assert "the declared classes, bounds and the like" in str(model.privacy_report_)


@pytest.mark.parametrize("kind", [DPLogisticRegression, *slow(DPRidge)])
def test_the_solver_that_runs_is_the_one_that_is_charged(kind, runs):
    more = {"target_bounds": (0, 1)} if kind is DPRidge else {"classes": [0, 1]}
    model = kind(**BOX, **more).fit(*table())
    (solver, _, _) = runs[0]
    ledger = solver.ledger(dpb.FiniteSum(dpb.squared_loss), N)
    assert [r.row() for r in ledger.releases] == [*model.privacy_report_.ledger]
    assert solver.num_steps == model.n_iter_


def test_a_private_number_of_records_shows_in_no_shape(runs):
    X, y = table()
    model = DPLogisticRegression(
        **LABELS, **STEP, neighbours="add_or_remove_one", size=50
    )
    for rows in (N, N - 1, 0):
        model.fit(X[:rows], y[:rows])
    shapes = [jax.tree.map(np.shape, records) for _, (records, _), _ in runs]
    assert shapes[0] == shapes[1] == shapes[2]
    assert model.privacy_report_.relation == "add_or_remove_one"
    with pytest.raises(ValueError, match="more records than the 64 rows"):
        model.fit(*(np.concatenate([v, v]) for v in (X, y)))


def test_a_plan_is_kept_for_the_sizes_alone():
    X, y = table()
    first = DPLogisticRegression(**LABELS, **STEP).fit(X, y)
    again = DPLogisticRegression(**LABELS, **STEP).fit(-X, 1 - y)
    other = DPLogisticRegression(**LABELS, **STEP).fit(X[1:], y[1:])
    assert again.privacy_report_ == first.privacy_report_
    assert other.privacy_report_.ledger != first.privacy_report_.ledger
