"""Evaluations in processes: the same bits, resumable, silent."""

import functools
import os
import time
import warnings
from pathlib import Path

import jax
import joblib
import numpy as np
import pytest
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.linear_model import Ridge
from threadpoolctl import threadpool_info

import dpbilevel as dpb
from dpbilevel.search.row_losses import evaluations

RNG = np.random.default_rng(0)
INPUTS = RNG.normal(size=(700, 60))
TARGETS = INPUTS[:, 0] + RNG.normal(size=700)
TRAINING, PRIVATE = (INPUTS[:300], TARGETS[:300]), (INPUTS[300:], TARGETS[300:])
SPACE = {"alpha": dpb.search.Range(1e-3, 1e3, log=True)}


def searched(estimator=None, n_jobs=None, key=0, **fitting):
    search = dpb.PrivateSearch(
        Ridge() if estimator is None else estimator,
        SPACE,
        dpb.PrivacyBudget(1.0, 0.0),
        solver=dpb.search.RandomSearch(7, 2.0),
        n_jobs=n_jobs,
    )
    options = {"validation": PRIVATE, "key": jax.random.key(key)} | fitting
    return search.fit(*TRAINING, **options)


@pytest.mark.slow
def test_losses_and_answer_are_the_same_bits_for_any_number_of_processes():
    rows = dpb.PrivateSearch(Ridge(), SPACE, None)._rows(*TRAINING)
    losses = rows.black_box(*PRIVATE)
    points = RNG.uniform(-1, 1, (7, 1))
    one, two = (list(evaluations(losses, n)(points)) for n in (1, 2))
    np.testing.assert_array_equal(one, two)
    alone = list(evaluations(losses, None)(points))
    np.testing.assert_allclose(alone, one, rtol=1e-9)
    answers = {float(searched(n_jobs=n).best_params_["alpha"]) for n in (1, 2, -1)}
    assert len(answers) == 1


def where_temporary_files_are(point, rows):
    file = Path(getattr(rows, "filename", "/"))
    own = [v for v in file.parents if v.stat().st_mode & 0o077 == 0]
    return isinstance(rows, np.memmap), file.stat().st_mode & 0o077, own


def test_large_records_reach_processes_by_files_of_their_owner_alone():
    rows = np.zeros((400, 600))
    losses = functools.partial(where_temporary_files_are, rows=rows)
    (found,) = evaluations(losses, 2)(np.zeros((1, 1)))
    in_file, others, folders = found
    assert in_file
    assert not others
    assert folders
    assert not any(folder.exists() for folder in folders)  # any more


@pytest.mark.slow
def test_large_records_in_files_have_the_losses_of_those_in_memory():
    search = dpb.PrivateSearch(Ridge(), SPACE, None)
    large = np.concatenate([PRIVATE[0]] * 10)
    losses = search._rows(*TRAINING).black_box(large, np.tile(PRIVATE[1], 10))
    one, two = (list(evaluations(losses, n)(np.zeros((2, 1)))) for n in (1, 2))
    np.testing.assert_array_equal(one, two)


def whereabouts(point):
    time.sleep(0.2)  # or the first process might do all
    threads = [pool["num_threads"] for pool in threadpool_info()]
    return os.getpid(), max(threads, default=1)


def test_points_of_a_step_are_evaluated_by_several_processes_of_one_thread_each():
    found = list(evaluations(whereabouts, 2)(np.zeros((6, 1))))
    assert len({process for process, _ in found} - {os.getpid()}) == 2
    assert {threads for _, threads in found} == {1}
    (here,) = {v[0] for v in evaluations(whereabouts, 1)(np.zeros((2, 1)))}
    assert here == os.getpid()


class Talking(RegressorMixin, BaseEstimator):
    """Says something about every validation row, and fails at some."""

    def __init__(self, alpha=1.0):
        self.alpha = alpha

    def fit(self, X, y):
        return self

    def predict(self, X):
        if len(X) == 400:
            print("a secret", flush=True)
            warnings.warn("a secret", stacklevel=1)
        if np.abs(X).max() > 1e5:
            raise ValueError("a secret")
        return X[:, 0] / self.alpha


@pytest.mark.parametrize("backend", [None, "threading"])
def test_processes_say_nothing_about_rows_and_raise_nothing(backend, capfd):
    """Nor where the caller's own loops are to run in threads, whose words are shown."""
    hostile = PRIVATE[0].copy()
    hostile[3] = 1e6
    for n_jobs in (1, 2):
        with joblib.parallel_config(backend or "loky"):
            result = searched(Talking(), n_jobs, validation=(hostile, PRIVATE[1]))
        assert np.isfinite(result.best_params_["alpha"])
    assert "secret" not in "".join(capfd.readouterr())


class Stopping(Ridge):
    """Stops the whole program where a file says so."""

    def __init__(self, alpha=1.0, file=None):
        super().__init__(alpha=alpha)
        self.file = file

    def predict(self, X):
        if len(X) == 400 and os.path.exists(self.file):
            with open(self.file, "a") as out:
                out.write("x")
            if os.path.getsize(self.file) > 4:
                raise KeyboardInterrupt
        return super().predict(X)


def test_a_search_goes_on_with_another_number_of_processes(tmp_path):
    file = str(tmp_path / "calls")
    estimator, folder = Stopping(file=file), tmp_path / "run"
    open(file, "w").close()
    with pytest.raises(KeyboardInterrupt):
        searched(estimator, 1, folder=folder)
    os.remove(file)
    kept = len(list(folder.glob("evaluation-*")))
    assert 0 < kept < 7
    result = searched(estimator, 2, key=1, folder=folder)
    whole = searched(estimator, 1, folder=tmp_path / "whole")
    assert result.best_params_ == whole.best_params_


@pytest.mark.parametrize("n_jobs", [0, -2, 1.5, True, "all"])
def test_a_wrong_number_of_processes_is_refused(n_jobs):
    with pytest.raises(ValueError, match="n_jobs must be positive"):
        searched(n_jobs=n_jobs)
