"""Intervals of coefficients: closed forms, coverage, and one release, charged."""

import dataclasses
import types

import jax
import numpy as np
import pytest

import dpbilevel as dpb
from dpbilevel.core import usability
from dpbilevel.privacy.budget import Neighbours
from dpbilevel.privacy.records.people import PersonUnit
from dpbilevel.sklearn import DPLogisticRegression, DPRidge, intervals
from dpbilevel.sklearn.beforehand import PublicSize, Rows
from dpbilevel.sklearn.intervals import Moments, matrix_of, of_short_rows, squares_of
from tests.cases import fast_first, slow
from tests.sklearn.test_guarantee import releases_of

WIDTH, N = 3, 4000
RICH = dpb.PrivacyBudget(1e4, 1e-5)
QUANTILE = 1.959964
LOGISTIC, HUBER = 0.25, 1.0
curvatures = pytest.mark.parametrize("curvature", [LOGISTIC, *slow(HUBER)])


def planned(curvature, size=N, budget=RICH, unit=None):
    public = PublicSize(Neighbours.REPLACE_ONE, size, unit)
    return Moments(budget, public, WIDTH, WIDTH, curvature, True)


def rows_of(size=N, scale=0.6, seed=0):
    rng = np.random.default_rng(seed)
    features = (scale * rng.normal(size=(size, WIDTH))).astype(np.float32)
    label = np.sign(features[:, 0] + rng.normal(size=size)).astype(np.float32)
    return of_short_rows({"features": features, "label": label})


def of_record(curvature, point, row):
    """The gradient of a record's weighted loss and its second derivative, by JAX."""
    base = intervals.huber_loss if curvature == HUBER else dpb.logistic_loss

    def loss(w):
        return row["weight"] * base(w, row)

    return np.asarray(jax.grad(loss)(point)), np.asarray(jax.hessian(loss)(point))


def test_the_triangle_of_a_square_has_its_length_and_gives_it_back():
    rows = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    found = squares_of(rows)
    np.testing.assert_allclose(
        np.linalg.norm(found, axis=1), np.square(rows).sum(1), rtol=1e-5
    )
    np.testing.assert_allclose(matrix_of(found[0], 4), np.outer(rows[0], rows[0]), 1e-5)


@curvatures
def test_the_moments_of_a_record_are_its_derivatives(curvature):
    point, rows = np.asarray([0.5, -1.0, 0.2], np.float32), rows_of(6, 1.0)
    gradients, curves = planned(curvature)._of_rows(point, rows)
    for i in range(6):
        row = {k: v[i] for k, v in rows.items()}
        gradient, curve = of_record(curvature, point, row)
        np.testing.assert_allclose(gradients[i], gradient, atol=1e-6)
        np.testing.assert_allclose(matrix_of(curves[i], WIDTH), curve, atol=1e-6)


@curvatures
def test_no_row_is_longer_than_the_declared_norm(curvature):
    """So nothing is clipped, however long features and residuals are."""
    rows = rows_of(300, 3.0)
    rows["label"][:100] *= 1e6 if curvature == HUBER else 1
    for scale in (0.0, 1.0, 1e3):
        gradients, curves = planned(curvature)._of_rows(np.full(WIDTH, scale), rows)
        squares = intervals._SQUARES * curvature * squares_of(gradients)
        norms = np.linalg.norm(np.concatenate([curves, squares], axis=1), axis=1)
        assert np.linalg.norm(gradients, axis=1).max() <= 1 + 1e-5
        assert norms.max() <= planned(curvature).terms.clip_norm * (1 + 1e-5)


@pytest.mark.parametrize("people", [False, True])
def test_the_released_moments_are_those_of_records_or_people(people, getkey):
    point, rows, count = np.asarray([0.5, -1.0, 0.2]), rows_of(), N
    gradients, curves = planned(LOGISTIC)._of_rows(point.astype(np.float32), rows)
    unit = PersonUnit(4) if people else None
    if people:
        count = N // 4
        gradients = gradients.reshape(count, 4, WIDTH).mean(1)
        rows = Rows(np.arange(N) // 4, unit).records(rows)
    moments = planned(LOGISTIC, count, unit=unit)
    second, squared = moments.released(point, rows, key=getkey(), owner="fit")
    exact = matrix_of(curves.mean(0), WIDTH)
    np.testing.assert_allclose(second, exact, atol=1e-4)
    np.testing.assert_allclose(squared, gradients.T @ gradients / count, atol=1e-3)


def test_records_that_do_not_count_are_silent_and_move_nothing(getkey):
    point, rows, key = np.asarray([0.5, -1.0, 0.2]), rows_of(), getkey()
    rows["features"][:3] = np.nan
    found = []
    for value in (np.nan, np.inf, 3e38):
        changed = {k: v.copy() for k, v in rows.items()}
        changed["label"][:3] = value
        moments = planned(HUBER)
        assert moments.release is not None  # planned before errors are raised
        with np.errstate(all="raise"):
            given = {"key": jax.random.clone(key), "owner": "fit"}
            made = moments.released(point, of_short_rows(changed), **given)
        found.append(np.stack(made))
    assert all(np.array_equal(one, found[0]) for one in found)


class Drawn:
    """Estimates from drawn noise of known size, without records or a descent."""

    second = np.asarray([[0.02, 0.006, 0], [0.006, 0.02, 0], [0, 0, 0.03]])
    squared = 0.9 * second
    true = np.asarray([0.3, -0.2, 0.0])
    point = np.asarray([0.5, -0.1, -0.2])  # a descent that has not converged
    of_step, steps, size = 0.04, 100, 2000

    def __init__(self, patch, budget):
        self.moments = planned(LOGISTIC, self.size, budget)
        self.rng = np.random.default_rng(0)
        patch.setattr(Moments, "released", self.released)

    def released(self, *args, **given):
        assert self.moments.release is not None
        noise = self.moments.release.noise_std
        of_squares = noise / (intervals._SQUARES * LOGISTIC)
        pairs = (self.second, noise), (self.squared, of_squares)
        draw = self.rng.normal
        count = WIDTH * (WIDTH + 1) // 2
        return [m + s * matrix_of(draw(size=count), WIDTH) for m, s in pairs]

    def estimate(self):
        noise = self.squared / self.size
        noise = noise + self.of_step**2 / self.steps * np.eye(WIDTH)
        gradient = self.second @ (self.point - self.true)
        gradient = self.rng.multivariate_normal(gradient, noise)
        release = types.SimpleNamespace(noise_std=self.of_step)
        ledger = types.SimpleNamespace(releases=(release,))
        solver = types.SimpleNamespace(
            averaged=self.steps, sizes=self.size, ledger=lambda *args: ledger
        )
        answer = self.point, gradient
        return self.moments.estimate(None, solver, answer, None, key=0, owner="fit")


quiet = pytest.mark.filterwarnings(
    "ignore:.*(noise hides|most rows|most targets|too small to tell)"
)


@quiet
@pytest.mark.parametrize("epsilon", [1.0, *slow(3.0)])
def test_intervals_contain_the_truth_in_95_of_100_draws(epsilon, monkeypatch):
    drawn = Drawn(monkeypatch, dpb.PrivacyBudget(epsilon, 1e-5))
    found, covariances = zip(*(drawn.estimate() for _ in range(1500)), strict=True)
    error = np.abs(np.asarray(found) - Drawn.true)
    deviation = np.sqrt(np.diagonal(np.asarray(covariances), axis1=1, axis2=2))
    inside = (error < QUANTILE * deviation).mean(0)
    assert inside.min() > 0.93
    assert inside.max() < 0.99
    # The control: the deviations of a fit without privacy.
    inverse = np.linalg.inv(Drawn.second)
    alone = np.sqrt(np.diag(inverse @ Drawn.squared @ inverse / Drawn.size))
    assert (error < QUANTILE * alone).mean() < 0.85


def test_squares_that_are_no_multiple_are_kept_where_noise_is_small():
    second, squared = np.diag([1.0, 1.0, 1.0]), np.diag([1.0, 2.0, 3.0])
    few = intervals.shrunk(squared, second, 1e-3, 1e-3)
    np.testing.assert_allclose(few, squared, atol=1e-2)
    many = intervals.shrunk(squared, second, 1.0, 1.0)
    np.testing.assert_allclose(many, 2 * second, atol=1e-6)
    assert np.linalg.eigvalsh(intervals.shrunk(-squared, second, 1.0, 1.0))[0] >= 0


def table(size, kind, seed=0):
    rng = np.random.default_rng(seed)
    X = np.clip(rng.normal(size=(size, 2)), -4, 4)
    scores = X @ [1.0, 0.0] + 0.3
    if kind is DPRidge:
        return X, scores + rng.normal(size=size)
    return X, (rng.random(size) < 1 / (1 + np.exp(-scores))).astype(int)


def model_of(kind, epsilon, **more):
    facts = {"classes": [0, 1]} if kind is not DPRidge else {"target_bounds": (-9, 9)}
    return kind(epsilon, bounds=(-4, 4), intervals=True, **facts, **more)


@pytest.mark.slow
def test_without_noise_a_short_descent_gives_least_squares_and_its_sandwich():
    X, y = table(N, DPRidge)
    model = model_of(DPRidge, 1e4, ridge=0.01, max_iter=40)
    model.fit(X, y, key=jax.random.key(0))
    rows = np.concatenate([X, np.ones((N, 1))], axis=1)
    length = np.sum((X / model._units_.scale / model._unit) ** 2, axis=1)
    weight = 1 / np.maximum(0.85 * length + 0.15, 1)
    inverse = np.linalg.inv((rows * weight[:, None]).T @ rows)
    exact = inverse @ rows.T @ (weight * y)
    slopes = (weight * (y - rows @ exact))[:, None] * rows
    deviations = np.sqrt(np.diag(inverse @ slopes.T @ slopes @ inverse))
    found = np.append(model.coef_, model.intercept_)
    own = np.append(model.coef_std_, model.intercept_std_)
    np.testing.assert_allclose(found, exact, atol=0.3 * deviations.min())
    np.testing.assert_allclose(own, deviations, rtol=0.05)
    ends = model.conf_int(0.5)
    np.testing.assert_allclose(ends.mean(-1), model.coef_)
    np.testing.assert_allclose(
        np.diff(ends)[:, 0] / 2, 0.67449 * model.coef_std_, rtol=1e-4
    )
    # The control: the descent without the correction.
    plain = dataclasses.replace(model, intervals=False).fit(X, y, key=jax.random.key(0))
    assert np.abs(plain.coef_ - exact[:-1]).max() > 3 * deviations.max()
    with pytest.raises(ValueError, match="fit with intervals=True"):
        plain.conf_int()


@quiet
@pytest.mark.slow
@pytest.mark.parametrize("kind", [DPLogisticRegression, DPRidge])
def test_a_small_fit_covers_and_would_not_without_the_noise_part(kind, monkeypatch):
    errors, deviations, alone = [], [], []
    for seed in range(100):
        X, y = table(1000, kind, seed)
        model = model_of(kind, 1.0).fit(X, y, key=jax.random.key(seed))
        errors.append(np.abs(model.coef_.ravel() - [1.0, 0.0]))
        deviations.append(model.coef_std_.ravel())
        rows = np.concatenate([X, np.ones((1000, 1))], axis=1)
        chances = 1 / (1 + np.exp(-rows @ [1.0, 0.0, 0.3]))
        curve = chances * (1 - chances) if kind is not DPRidge else np.ones(1000)
        inverse = np.linalg.inv((rows * curve[:, None]).T @ rows)
        alone.append(np.sqrt(np.diag(inverse)[:2]))
    errors = np.asarray(errors)
    assert (errors < QUANTILE * np.asarray(deviations)).mean() > 0.92
    assert (errors < QUANTILE * np.asarray(alone)).mean() < 0.88  # the control


class OneRow(DPLogisticRegression):
    """Intervals of people, each of one row."""

    def fit(self, X, y, groups=None, **given):
        return super().fit(X, y, np.arange(len(X)), **given)


KINDS = {
    "logistic": lambda: model_of(DPLogisticRegression, 1.0, max_iter=60),
    "ridge": lambda: model_of(DPRidge, 1.0, max_iter=60),
    "people": lambda: model_of(OneRow, 1.0, max_iter=60),
}


@quiet
@pytest.mark.parametrize("name", fast_first(KINDS))
def test_the_release_is_charged_once_and_has_its_own_key(name, monkeypatch):
    made, charged, keys = releases_of(KINDS[name](), pytest.MonkeyPatch())
    # It is made last and listed before the steps.
    np.testing.assert_allclose(
        np.sort(np.asarray(made, float), axis=0),
        np.sort(np.asarray(charged, float), axis=0),
    )
    assert len(set(keys)) == len(keys)
    with monkeypatch.context() as patch:  # a broken copy: it is not charged
        patch.setattr(Moments, "releases", ())
        made, charged, _ = releases_of(KINDS[name](), pytest.MonkeyPatch())
    assert len(made) == len(charged) + 1
    with monkeypatch.context() as patch:  # a broken copy: it shares the key of the run
        patch.setattr(
            Moments, "with_keys", lambda self, v: (v, jax.random.clone(v.key))
        )
        _, _, keys = releases_of(KINDS[name](), pytest.MonkeyPatch())
        assert len(set(keys)) < len(keys)


def noise_of_moments(share, patch):
    """Return both noises of the moments over the planned ones, scaled by a share."""
    released = usability._released

    def scaled(query, mechanism, rows, *, key):
        return released(query, mechanism.scaled(share), rows, key=key)

    patch.setattr(usability, "_released", scaled)
    moments = planned(LOGISTIC, 400, dpb.PrivacyBudget(30.0, 1e-5))
    rows, point = rows_of(400), np.zeros(WIDTH)
    draws = [
        moments.released(point, rows, key=key, owner="fit")
        for key in jax.random.split(jax.random.key(0), 150)
    ]
    triangle = np.triu_indices(WIDTH)
    weights = np.where(np.eye(WIDTH), 1, 2**0.5)[triangle]
    scales = 1.0, intervals._SQUARES * LOGISTIC
    (release,) = moments.releases
    return [
        scale
        * np.std([weights * v[triangle] for v in values], axis=0).mean()
        / release.noise_std
        for scale, values in zip(scales, zip(*draws, strict=True), strict=True)
    ]


def test_the_noise_of_the_moments_is_that_of_the_ledger(monkeypatch):
    with monkeypatch.context() as patch:
        assert noise_of_moments(1.0, patch) == pytest.approx([1, 1], abs=0.08)
    with monkeypatch.context() as patch:
        assert max(noise_of_moments(0.5, patch)) < 0.6  # a broken copy


@pytest.mark.parametrize(
    ("model", "size", "text"),
    [
        (model_of(DPLogisticRegression, 1.0), 200, "intervals=True needs [0-9]+ rec"),
        (model_of(DPLogisticRegression, 1.0, delta=0.0), 2000, "a delta above 0"),
        (model_of(DPLogisticRegression, 1.0, clip_norm=1.0), 2000, "clip_norm='auto'"),
        (model_of(DPLogisticRegression, 1.0, bins=3), 2000, "bins=None"),
        (
            DPLogisticRegression(classes=[0, 1, 2], bounds=(-4, 4), intervals=True),
            2000,
            "for two classes",
        ),
    ],
)
def test_what_admits_no_intervals_is_refused(model, size, text):
    with pytest.raises(ValueError, match=text):
        model.fit(*table(size, DPLogisticRegression), key=jax.random.key(0))


def test_the_number_of_records_in_the_refusal_is_enough():
    poor = planned(LOGISTIC, 100, dpb.PrivacyBudget(1.0, 1e-5))
    with pytest.raises(ValueError, match="needs") as error:
        poor.check("fit")
    least = int(str(error.value).split("needs ")[1].split()[0])
    public = dataclasses.replace(poor.public, size=least)
    dataclasses.replace(poor, public=public).check("fit")
    public = dataclasses.replace(poor.public, size=least - 2)
    with pytest.raises(ValueError, match="needs"):
        dataclasses.replace(poor, public=public).check("fit")
