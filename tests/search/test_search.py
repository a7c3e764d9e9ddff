"""The host loop: what `solve` does, with losses from Python, and safe to interrupt."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpbilevel as dpb
from dpbilevel.cli import results
from dpbilevel.privacy import noise
from dpbilevel.runs import checkpoint, spending
from dpbilevel.search import rounds as searching
from tests.attacks.test_secrets import children, holds, root_key

RECORDS = 0.2 + 0.3 * np.random.default_rng(0).normal(size=(30, 2))
BOX = dpb.sets.Box(-1.0, 1.0)
FINITE_SUM = dpb.FiniteSum(lambda w, z: jnp.sum((w - z) ** 2), w_set=BOX)
START = np.zeros(2)
BUDGET = dpb.PrivacyBudget(2.0, 1e-3)
SOLVERS = {
    "random_search": dpb.search.RandomSearch(12, 2.0),
    "repeat_and_select": dpb.search.RepeatAndSelect(12, 2.0, mean=2.0),
    "noisy_ucb": dpb.search.NoisyUCB(4, 2.0, num_candidates=20),
    "gradient_informative": dpb.search.GradientInformativeBO(
        3,
        1.0,
        step_size=0.3,
        batch=3,
        keep=8,
        polish=2,
        portfolio=dpb.search.Portfolio(5),
    ),
}
EVALUATIONS = {"random_search": 12, "repeat_and_select": 12, "noisy_ucb": 4}
EVALUATIONS["gradient_informative"] = 5 + 2 * 3
NAME = "noisy_ucb"
FINISHED = ["search.json", "spending.jsonl"]
solvers = pytest.mark.parametrize("name", SOLVERS)


class Counted:
    """The losses of the records, counting calls, failing at one of them."""

    def __init__(self, fails_at=None):
        self.points, self.fails_at = [], fails_at

    def __call__(self, point):
        if len(self.points) == self.fails_at:
            raise RuntimeError("the cluster went away")
        self.points.append(point)
        return np.sum((point - RECORDS) ** 2, axis=1)


def black_box(losses=None):
    return dpb.search.BlackBox(Counted() if losses is None else losses, 30, BOX, "r")


def search(name="noisy_ucb", losses=None, key=0, **options):
    options = {"budget": BUDGET} | options
    return dpb.search.minimize(
        black_box(losses), SOLVERS[name], START, key=jax.random.key(key), **options
    )


def programs():
    """How many programs of steps were compiled in this process."""
    parts = searching._ask, searching._tell, searching._short_ask, searching._short_tell
    return [part._cache_size() for part in parts]


def same(left, right):
    return np.array_equal(left.value, right.value) and np.array_equal(
        left.trajectory, right.trajectory
    )


@pytest.fixture(scope="module")
def whole():
    return {name: search(name, trajectory=True) for name in SOLVERS}


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """The same with folders, in which the noise depends on the losses too."""

    class Kept(dict):
        def __missing__(self, name):
            folder = tmp_path_factory.mktemp(name)
            self[name] = search(name, trajectory=True, folder=folder)
            return self[name]

    return Kept()


@solvers
def test_search_is_solve_with_the_same_losses_and_key(name, whole):
    with jax.enable_x64(True):
        plan = dpb.calibrate(FINITE_SUM, SOLVERS[name], BUDGET, sizes=30)
        solution = jax.jit(dpb.solve, static_argnames="trajectory")(
            FINITE_SUM,
            plan.solver,
            jnp.asarray(RECORDS),
            jnp.asarray(START),
            key=jax.random.key(0),
            trajectory=True,
        )
        assert plan.report.epsilon == whole[name].report.epsilon
    np.testing.assert_allclose(whole[name].value, solution.value, rtol=1e-12)
    np.testing.assert_allclose(whole[name].trajectory, solution.trajectory, rtol=1e-12)
    assert whole[name].value.dtype == np.float64
    assert not np.array_equal(search(name, key=1).value, whole[name].value)


@solvers
def test_the_number_of_evaluations_is_fixed(name):
    for key in range(3):
        losses = Counted()
        search(name, losses, key)
        assert len(losses.points) == EVALUATIONS[name]


def test_nothing_is_compiled_twice():
    search("noisy_ucb")
    before = programs()
    louder = dpb.PrivacyBudget(1.0, 1e-3)
    search("noisy_ucb", lambda point: np.ones(30), key=5, budget=louder)
    assert before == programs()


@solvers
def test_programs_that_are_optimized_less_release_the_same(name, whole, monkeypatch):
    before = searching._ask._cache_size()
    monkeypatch.setattr(searching, "_SHORT", 0)
    found = search(name, trajectory=True)
    assert searching._ask._cache_size() == before + 1  # the control
    np.testing.assert_allclose(found.trajectory, whole[name].trajectory, rtol=1e-9)


def test_the_black_box_sees_its_own_point_in_float64_under_the_callers_setting():
    seen = []

    def losses(point):
        seen.append((point.copy(), jax.config.jax_enable_x64))
        point[:] = 7.0
        return np.ones(30)

    answer = search(losses=losses)
    assert {(p.dtype, p.shape, wide) for p, wide in seen} == {
        (np.dtype("f8"), (2,), False)
    }
    assert any(np.array_equal(answer.value, point) for point, _ in seen)


@pytest.mark.slow
def test_in_a_program_of_two_processes_the_first_one_keeps_the_folder(tmp_path, kept):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    root, folders = Path(__file__).parents[2], [tmp_path / "kept", tmp_path / "other"]
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    pair = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.search.pair", port, str(number), folder],
            cwd=root,
            env=os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number, folder in enumerate(folders)
    ]
    found = []
    for process in pair:
        out, error = process.communicate(timeout=300)
        assert process.returncode == 0, error[-3000:]
        found.append(json.loads(out.splitlines()[-1]))
    for page in found:
        assert "went away" in page["interrupted"]
        assert page["evaluations"] == EVALUATIONS[NAME] - 2
        assert page["value"] == kept[NAME].value.tolist()
        assert "run.solver.class was" in page["refused"]
    assert [page["files"] for page in found] == [FINISHED, []]


@pytest.mark.parametrize(
    ("name", "fails_at"),
    [
        pytest.param("random_search", 7, marks=pytest.mark.slow),
        ("repeat_and_select", 5),
        ("noisy_ucb", 0),
    ],
)
def test_a_crash_in_a_step_loses_no_evaluation_and_no_bit(
    name, fails_at, kept, tmp_path
):
    with pytest.raises(RuntimeError, match="the cluster went away"):
        search(name, Counted(fails_at), folder=tmp_path / "run", trajectory=True)
    losses = Counted()
    # The key of the interrupted run is used, not this one.
    result = search(name, losses, 9, folder=tmp_path / "run", trajectory=True)
    assert same(result, kept[name])
    assert len(losses.points) == EVALUATIONS[name] - fails_at
    (run,) = spending.read(tmp_path / "run").runs
    assert (run.resumed, run.finished, run.epsilon) == (1, True, result.report.epsilon)


def test_a_crash_at_the_last_moment_loses_nothing(kept, tmp_path, monkeypatch):
    def refuses(*args):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(spending, "finish", refuses)
        with pytest.raises(OSError, match="disk full"):
            search(folder=tmp_path)
    losses = Counted()
    with pytest.warns(UserWarning, match="holds a finished run"):
        again = search(losses=losses, folder=tmp_path, trajectory=True)
    assert same(again, kept[NAME])
    assert not losses.points
    assert [p.name for p in sorted(tmp_path.iterdir())] == FINISHED


def test_a_finished_folder_answers_without_an_evaluation(kept, tmp_path):
    first, losses = search(folder=tmp_path / "a" / "b"), Counted()
    with pytest.warns(UserWarning, match="holds a finished run, whose result"):
        again = search(
            losses=losses, key=3, folder=str(tmp_path / "a" / "b"), trajectory=True
        )
    assert same(again, kept[NAME])
    assert again.report == first.report
    assert not losses.points
    assert len(spending.read(tmp_path / "a" / "b").runs) == 1
    with pytest.raises(ValueError, match=r"folder of a search; read .*search.json"):
        results.load(tmp_path / "a" / "b")


def test_secrets_are_the_owners_alone_and_gone_at_the_end(tmp_path):
    seen, found = [], []

    def losses(point):
        files = [p for p in tmp_path.iterdir() if "SECRET" in p.name]
        modes = {p.stat().st_mode & 0o777 for p in files}
        content = (tmp_path / checkpoint.NAME).read_bytes()
        seen.append((len(files), modes, content))
        found.append(np.sum((point - RECORDS) ** 2, axis=1))
        return found[-1]

    searched(problem=black_box(losses), key=root_key(), folder=tmp_path)
    used, key = [], root_key()
    for row in found:
        before, told = key, row[None].tobytes()
        following, (step,) = noise.step_keys(before, 1)
        below = children(step)
        keys = [before, step, *below, *(k for b in below for k in children(b))]
        bound = noise.follows(below[[*noise._DOMAINS].index("tell")], told)
        keys += [following, bound, *children(bound)]
        used.append([np.asarray(jax.random.key_data(k)) for k in keys])
        key = noise.follows(following, told)
    for done, (_, _, content) in enumerate(seen):
        earlier = [words for step in used[:done] for words in step]
        assert not [words for words in earlier if holds(content, words)]
        assert holds(content, used[done][0])  # the control
    assert {number for number, *_ in seen} == {1}  # what a step read is forgotten
    assert all(modes == {0o600} for _, modes, _ in seen)
    assert b"losses of single records" in seen[0][2].splitlines()[0]
    assert sorted(p.name for p in tmp_path.iterdir()) == FINISHED
    text = (tmp_path / "search.json").read_text() + str(spending.read(tmp_path))
    assert not [v for row in found for v in row if repr(float(v))[:10] in text]
    assert not [w for step in used for w in step if holds(text.encode(), w)]


def test_evaluations_of_a_step_in_progress_are_the_owners_alone(tmp_path):
    with pytest.raises(RuntimeError):
        search("random_search", Counted(3), folder=tmp_path)
    kept = sorted(tmp_path.glob("evaluation-*"))
    assert [p.name for p in kept] == [f"evaluation-0-{j}.SECRET" for j in range(3)]
    assert {p.stat().st_mode & 0o777 for p in kept} == {0o600}
    kept[1].write_bytes(b"torn")
    with pytest.raises(ValueError, match=r"is damaged; delete it, and its point is"):
        search("random_search", folder=tmp_path)
    kept[1].unlink()
    losses = Counted()
    search("random_search", losses, folder=tmp_path)
    assert len(losses.points) == 10


def test_a_black_box_that_changes_its_point_spoils_nothing_that_is_kept(tmp_path):
    losses = Counted(3)

    def changing(point):
        found = losses(point.copy())
        point[:] = 7.0
        return found

    with pytest.raises(RuntimeError):
        search("random_search", changing, folder=tmp_path)
    losses.fails_at = None
    search("random_search", changing, folder=tmp_path)
    assert len(losses.points) == 12


def test_losses_kept_at_another_point_are_not_used(tmp_path):
    with pytest.raises(RuntimeError):
        search("random_search", Counted(1), folder=tmp_path)
    file = tmp_path / "evaluation-0-0.SECRET"
    with file.open("wb") as out:
        np.savez(out, point=np.zeros(2), losses=np.zeros(30))
    with pytest.raises(ValueError, match="holds the losses at another point"):
        search("random_search", folder=tmp_path)


@pytest.mark.parametrize("fails_at", [1, None])
def test_another_run_is_not_mixed_into_a_folder(tmp_path, fails_at):
    try:
        search(losses=Counted(fails_at), folder=tmp_path)
    except RuntimeError:
        pass
    other = dpb.PrivacyBudget(1.0, 1e-3)
    with pytest.raises(ValueError, match=r"resume .*budget.epsilon was 2.0, is 1"):
        search(folder=tmp_path, budget=other)
    with pytest.raises(ValueError, match=r"solver.class was \"NoisyUCB\", is"):
        search("random_search", folder=tmp_path)


def test_a_folder_of_something_else_or_without_its_checkpoint_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"is not empty \(it holds 'notes.txt'\)"):
        search(folder=tmp_path)
    with pytest.raises(RuntimeError):
        search(losses=Counted(1), folder=tmp_path / "run")
    file = tmp_path / "run" / checkpoint.NAME
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match="is damaged or not of a search"):
        search(folder=tmp_path / "run")
    file.unlink()
    with pytest.raises(ValueError, match="has no run to go on with"):
        search(folder=tmp_path / "run")


def test_two_searches_at_once_in_a_folder_are_refused(tmp_path):
    def losses(point):
        with pytest.raises(ValueError, match="in use by another run"):
            search(folder=tmp_path)
        return np.ones(30)

    search("random_search", losses, folder=tmp_path)


def test_a_folder_needs_a_budget(tmp_path):
    with pytest.raises(ValueError, match="folder= keeps the report"):
        search(folder=tmp_path, budget=None)
    with pytest.raises(ValueError, match=r"calibrate\(problem, solver, budget"):
        search(budget=None)


def test_a_folder_needs_what_tells_the_records(tmp_path):
    unknown = dpb.search.BlackBox(Counted(), 30, BOX)
    with pytest.raises(ValueError, match=r"would be a second release.*records="):
        searched(problem=unknown, folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_plan_made_before_gives_the_same_run(whole):
    plan = dpb.calibrate(black_box(), SOLVERS[NAME], BUDGET, sizes=30)
    solution = dpb.search.minimize(
        black_box(), plan.solver, START, key=jax.random.key(0)
    )
    assert isinstance(solution, dpb.Solution)
    assert solution.trajectory is None
    np.testing.assert_allclose(solution.value, whole[NAME].value, rtol=1e-12)
    wider = dpb.search.BlackBox(lambda point: np.ones(31), 31, BOX)
    with pytest.raises(ValueError, match="the plan is for 30"):
        dpb.search.minimize(wider, plan.solver, START, key=jax.random.key(0))


SECRET = 0.123456789


@pytest.mark.parametrize(
    ("returned", "error", "words"),
    [
        (np.full(29, SECRET), ValueError, r"shape \(30,\), got shape \(29,\)"),
        (np.full((30, 1), SECRET), ValueError, r"got shape \(30, 1\)"),
        (SECRET, ValueError, r"got shape \(\)"),
        (np.full(30, SECRET, complex), TypeError, "complex128"),
        (np.full(30, SECRET).astype(str), TypeError, "real numbers"),
        ([[SECRET], [SECRET, 2.0]], ValueError, r"got shape \(2,\)"),
        (None, TypeError, "got NoneType"),
    ],
)
def test_losses_that_do_not_fit_are_refused_without_their_values(
    returned, error, words
):
    with pytest.raises(error, match=words) as caught:
        search(losses=lambda point: returned)
    assert str(SECRET)[2:6] not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


@pytest.mark.parametrize(
    "convert", [jnp.asarray, np.float32, list, lambda v: v.astype(np.int64)]
)
def test_any_vector_of_real_numbers_will_do(convert):
    search(losses=lambda point: convert(np.ones(30)))


@solvers
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_model_that_fails_counts_as_the_worst_there_is(name, bad):
    def losses(point):
        # The least loss is away from where models fail: a slope that tells the sides.
        return np.full(30, bad if point[0] < 0 else 0.5 - 0.4 * point[0])

    # One that repeats a random number of times may see nothing but failures: a third of
    # its runs are on that side, and two thirds were if failures counted as the best.
    keys = range(8) if name == "repeat_and_select" else [0]
    budget = dpb.PrivacyBudget(200.0, 1e-3)
    found = [search(name, losses, key, budget=budget).value[0] > 0 for key in keys]
    assert np.mean(found) > 0.5


def test_losses_of_single_records_may_be_nan():
    def losses(point):
        found = np.sum((point - RECORDS) ** 2, axis=1)
        found[3] = np.nan
        return found

    assert np.isfinite(search(losses=losses).value).all()


class Private(dpb.search.NoisyUCB):
    def ask(self, problem, state, *, key):
        problem.losses(np.zeros(2))
        return dpb.search.NoisyUCB.ask(self, problem, state, key=key)


def searched(solver=None, problem=None, w0=START, **options):
    solver = SOLVERS[NAME] if solver is None else solver
    problem = black_box() if problem is None else problem
    options = {"key": jax.random.key(0), "budget": BUDGET} | options
    return dpb.search.minimize(problem, solver, w0, **options)


ADD_OR_REMOVE = dpb.Neighbours.ADD_OR_REMOVE_ONE


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (
            {"solver": dpb.NoisyGD(3, 1.0, step_size=0.1)},
            TypeError,
            r"losses, .*got NoisyGD",
        ),
        ({"solver": dpb.search.NoisyUCB}, TypeError, r"losses, .*got NoisyUCB"),
        ({"w0": [0.0, 0.0]}, ValueError, r"got \[\(\), \(\)\] in a list"),
        ({"problem": FINITE_SUM}, TypeError, "instance of BlackBox"),
        ({"key": 0}, TypeError, "typed key"),
        ({"w0": np.zeros((2, 1))}, ValueError, "w0 must be one vector"),
        ({"w0": (START[0], START[1:])}, ValueError, r"(d,).*got \(\(\), "),
        ({"w0": np.zeros(2, int)}, ValueError, "floating-point array"),
        ({"w0": np.full(2, np.nan)}, ValueError, "NaN or infinity"),
        (
            {"problem": dpb.search.BlackBox(Counted(), 30, dpb.sets.Ball(1.0))},
            ValueError,
            "a box with finite ends",
        ),
        (
            {"problem": dpb.search.BlackBox(Counted(), 30, dpb.sets.Box(0.0, jnp.inf))},
            ValueError,
            "a box with finite ends",
        ),
        (
            {"solver": dpb.search.NoisyUCB(4, 2.0, neighbours=ADD_OR_REMOVE)},
            ValueError,
            "add-or-remove-one keeps private",
        ),
        ({"solver": Private(4, 2.0)}, TypeError, "must not call losses"),
    ],
)
def test_what_cannot_be_searched_is_refused(change, error, words):
    with pytest.raises(error, match=words):
        searched(**change)


def test_solve_and_fit_send_black_boxes_to_search():
    plan = dpb.calibrate(black_box(), SOLVERS[NAME], BUDGET, sizes=30)
    with pytest.raises(TypeError, match=r"run it by dpbilevel.search.minimize"):
        dpb.solve(black_box(), plan.solver, None, START, key=jax.random.key(0))
    with pytest.raises(TypeError, match=r"run it by dpbilevel.search.minimize"):
        dpb.fit(
            black_box(),
            SOLVERS[NAME],
            None,
            START,
            budget=BUDGET,
            key=jax.random.key(0),
        )


def test_progress_tells_steps_and_evaluations_and_no_loss(capsys):
    search("random_search", lambda point: np.full(30, SECRET), progress=True)
    shown = capsys.readouterr().err
    assert "1/1" in shown
    assert "evaluations=12" in shown
    assert "0.12" not in shown


def test_the_report_says_what_a_black_box_must_keep_to(whole):
    texts = whole[NAME].report.assumptions
    assert any("every record changes its own loss only" in text for text in texts)
    assert any("training data and other inputs" in text for text in texts)


def test_the_result_file_holds_released_and_public_values(kept, tmp_path):
    result = search(folder=tmp_path)
    page = json.loads((tmp_path / "search.json").read_text())
    names = {"format", "value", "trajectory", "rejected_updates", "noisy_losses"}
    assert set(page) == names | {"run"}
    assert page["value"] == result.value.tolist()
    assert page["run"]["report"]["epsilon"] == result.report.epsilon
    assert page["trajectory"] == kept[NAME].trajectory.tolist()


def test_the_examples_of_the_pages_run_in_their_order(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    docs = Path(__file__).parents[2] / "docs"
    # As the first block has them, so that nothing more is compiled.
    names = {"np": np, "dpb": dpb}
    for page in ("private_search.md", "black_box.md"):
        for part in (docs / page).read_text().split("```python\n")[1:]:
            code = part.split("```")[0]
            code = re.sub(r"num_steps=2\d,", "num_steps=2,", code)
            if "PrivateSearch" not in code:  # docs/tour.md runs the same one
                exec(compile(code, page, "exec"), names)
    assert "ENFORCED: epsilon = 1 at delta = 1e-06" in capsys.readouterr().out


def test_a_solver_without_noise_is_refused_before_the_first_evaluation():
    for solver in SOLVERS.values():
        counted = Counted()
        with pytest.raises(ValueError, match="give budget=PrivacyBudget"):
            dpb.search.minimize(
                black_box(counted), solver, START, key=jax.random.key(0)
            )
        assert not counted.points


def test_a_search_inside_a_program_is_refused():
    with pytest.raises(TypeError, match="cannot be used inside"):
        jax.jit(
            lambda w: (
                dpb.search.minimize(
                    black_box(), SOLVERS[NAME], w, budget=BUDGET, key=jax.random.key(0)
                ).value
            )
        )(jnp.zeros(2))


@pytest.mark.filterwarnings("ignore:A JAX array is being set as static")
def test_records_in_the_wrong_place_are_not_shown():
    for arguments in ((RECORDS, 30), (lambda point: point, RECORDS)):
        with pytest.raises((TypeError, ValueError)) as error:
            dpb.search.BlackBox(*arguments)
        assert "0." not in str(error.value)


def test_lazily_imported_names_are_listed():
    assert {"PrivateSearch", "search"} <= set(dir(dpb))


def test_a_loss_of_nan_stops_no_run_that_is_debugged():
    def losses(point):
        return np.where(np.arange(30) == 3, np.nan, np.ones(30))

    with jax.debug_nans(True):
        found = search("noisy_ucb", losses).value
    np.testing.assert_array_equal(found, search("noisy_ucb", losses).value)


def test_other_records_are_refused_and_their_hash_stays_in_the_checkpoint(tmp_path):
    def run(records, losses=None):
        problem = dpb.search.BlackBox(losses or Counted(), 30, BOX, records)
        return searched(problem=problem, folder=tmp_path)

    with pytest.raises(RuntimeError):
        run("a1b2c3", Counted(2))
    with pytest.raises(ValueError, match="are not those the run began with") as caught:
        run("d4e5f6")
    assert not [h for h in ("a1b2c3", "d4e5f6") if h in str(caught.value)]
    assert b"a1b2c3" in (tmp_path / checkpoint.NAME).read_bytes()
    run("a1b2c3")
    kept = [p for p in tmp_path.iterdir() if b"a1b2c3" in p.read_bytes()]
    assert not kept
    assert "a1b2c3" not in repr(dpb.search.BlackBox(Counted(), 30, BOX, "a1b2c3"))
