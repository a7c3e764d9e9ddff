"""Candidates by class of problem; every solver is one or is declared to be none."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dpbilevel as dpb
from dpbilevel import planning
from dpbilevel.applications import WarmStarted
from dpbilevel.cli.config import public_classes
from dpbilevel.planning.candidates import longest_gradient

SOURCES = dpb.source_weighting(dpb.logistic_loss, 5)
W0 = (jnp.zeros(5), jnp.zeros(6))
ONE = dpb.FiniteSum(dpb.logistic_loss)
TUNING = dpb.linear_tuning(dpb.Logistic(), [0, 0, 1], bounds=(-1.0, 1.0))
_FIRST_ORDER = "PenaltyBilevel stands for the methods of two levels with gradients only"
_GAME = "auto plans no games, and the settings of its solvers follow from the noise"
_LIPSCHITZ = "it needs a Lipschitz constant, which a FiniteSum may not declare"
_LOSSES = "it needs losses only, and search.minimize has its settings"
# Every public solver is built in planning/methods.py or named here with the reason.
NOT_CANDIDATES = {
    "AdaptiveClipGD": "the largest gradient is an argument of auto",
    "AdaptiveGD": "auto plans the step size",
    "AllocatedGD": "auto plans full batches",
    "CorrelatedGD": "NoisyGD stands for descent on one level",
    "F2SA": _FIRST_ORDER,
    "FiniteDifferenceBilevel": _FIRST_ORDER,
    "GradientInformativeBO": _LOSSES,
    "GroupDescent": _GAME,
    "InexactProximalPoint": _GAME,
    "LocalizedDraws": _LIPSCHITZ,
    "LocalizedGD": "NoisyGD stands for descent on one level",
    "NoisyExtragradient": _GAME,
    "NoisyPayoff": _GAME,
    "NoisyUCB": _LOSSES,
    "RandomSearch": _LOSSES,
    "RecursiveRegularization": _GAME,
    "RegularizedExponentialMechanism": _LIPSCHITZ,
    "RepeatAndSelect": _LOSSES,
    "SingleLoopBilevel": _FIRST_ORDER,
    "TunedTraining": "it selects among trainings, which its user lists",
}


def tried():
    """The classes of all solvers that candidates consist of."""
    mixing = dpb.applications.source_mixing(dpb.logistic_loss, 2)
    pairs = [
        (ONE, jnp.zeros(6)),
        (SOURCES, W0),
        (mixing, dpb.applications.mixing_start(jnp.zeros(6), 2)),
        (TUNING, (jnp.full(2, -1.0), jnp.zeros(3))),
    ]
    solvers = [
        solver
        for problem, w0 in pairs
        for method in planning.candidates(problem, w0, 1.0, None, -1)
        for solver in method.solvers
    ]
    kinds = set()
    for solver in solvers:
        parts = [solver]
        while parts:
            part = parts.pop()
            kinds.add(type(part))
            fields = (getattr(part, f.name) for f in dataclasses.fields(part))
            parts += [v for v in fields if isinstance(v, dpb.AbstractSolver)]
    return kinds


def undeclared():
    """Public solvers that are no candidates, without a reason, or with one in vain."""
    names = {kind.__name__ for kind in tried()}
    where = "in tests/planning/test_candidates.py"
    public = public_classes(dpb.AbstractSolver)
    return [
        f"{name}: register a candidate, or give the reason in NOT_CANDIDATES, {where}"
        for name in public
        if name not in names | NOT_CANDIDATES.keys()
    ] + [
        f"{name}: remove it from NOT_CANDIDATES {where}"
        for name in NOT_CANDIDATES
        if name in names or name not in public
    ]


def test_every_public_solver_is_a_candidate_or_has_a_reason():
    assert undeclared() == []


def test_a_new_solver_that_nobody_declared_is_seen(monkeypatch):
    class Planted(dpb.NoisyGD):
        __doc__ = dpb.NoisyGD.__doc__

    monkeypatch.setattr(dpb.onelevel, "Planted", Planted, raising=False)
    monkeypatch.setattr(dpb.onelevel, "__all__", [*dpb.onelevel.__all__, "Planted"])
    (text,) = (text for text in undeclared() if "Planted" in text)
    assert "Planted: register a candidate" in text
    assert "planning/test_candidates.py" in text


def test_candidates_for_networks_leave_out_mixtures_and_searches_of_weights():
    network = (jnp.zeros(5), {"w1": jnp.zeros((6, 3)), "w2": jnp.zeros(3)})
    kinds = [
        {type(s) for c in planning.candidates(SOURCES, w0, 1.0) for s in c.solvers}
        for w0 in (W0, network)
    ]
    assert kinds[0] - kinds[1] == {WarmStarted}


def test_the_lower_level_first_is_a_candidate_where_it_reads_no_x():
    mixing = dpb.applications.source_mixing(dpb.logistic_loss, 2)
    w0 = dpb.applications.mixing_start(jnp.zeros(6), 2)

    def reading(x, y):
        return jnp.sum(x) * jnp.sum(y**2)

    problems = [
        mixing,
        dataclasses.replace(mixing, lower_public=lambda _, y: jnp.sum(y**2)),
        dataclasses.replace(mixing, lower_public=reading),
        dataclasses.replace(mixing, x_in_records=True),
    ]
    offered = [
        "LowerFirst" in {c.name for c in planning.candidates(problem, w0, 1.0)}
        for problem in problems
    ]
    assert offered == [True, True, False, False]


def test_step_sizes_are_in_units_of_the_clip_norm():
    solvers = [
        planning.candidates(ONE, jnp.zeros(6), c)[0].solvers[0] for c in (1.0, 2.0)
    ]
    assert solvers[0].step_size == 4 * solvers[1].step_size


def test_softmax_gradients_are_longer_than_features_by_the_root_of_two():
    models = [jnp.zeros(6), jnp.zeros((6, 1)), {"w": jnp.zeros(6)}, jnp.zeros((6, 3))]
    longest = [longest_gradient(model) for model in models]
    np.testing.assert_allclose(longest, [1, 1, 1, 2**0.5])
    # All labels wrong for sure: the gradient of one record of norm 1.
    features, scores = jnp.eye(6)[0], jnp.array([50.0, 0.0, 0.0])
    loss = optax.losses.softmax_cross_entropy_with_integer_labels
    gradient = jax.grad(lambda y: loss(features @ y + scores, 1))(models[-1])
    np.testing.assert_allclose(jnp.linalg.norm(gradient), longest[-1], rtol=1e-6)


def test_a_matrix_of_two_columns_has_the_methods_of_a_vector_by_plain_steps():
    vector, two, three = (
        planning.candidates(SOURCES, (jnp.zeros(5), model), 2.0)
        for model in map(jnp.zeros, (6, (6, 2), (6, 3)))
    )
    names = [[c.name for c in found] for found in (vector, two, three)]
    assert names[0] == names[1]
    assert names[0] != names[2]  # the control
    # Accelerated steps are not taken back, and two columns may be two targets.
    assert "momentum" in str(vector)
    assert "momentum" not in str(two)


@pytest.mark.parametrize(
    "model", [jnp.zeros((6, 3)), {"in": jnp.zeros(2), "out": jnp.zeros(3)}]
)
def test_every_second_setting_for_sources_has_each_step_size(model):
    found = planning.candidates(SOURCES, (jnp.zeros(5), model), 2.0)
    (selected,) = (c for c in found if c.name == "SelectedSources")

    def sizes(solvers):  # of fits that read both levels and leave most of the budget
        both = (v for v in solvers if v.fit_reads == "both")
        return {v.fit.step_size for v in both if v.budget_split[0] == 0.03}

    assert sizes(selected.solvers[::2]) == sizes(selected.solvers)
    assert sizes(selected.solvers[1::2]) != sizes(selected.solvers)  # the control


def test_sources_of_a_network_are_scored_by_a_linear_model_of_its_records():
    layout = {
        "features": jax.ShapeDtypeStruct((3, 2), jnp.float32),
        "label": planning.Classes((-1.0, 0.5, 1.0)),
    }
    network = {"in": jnp.zeros((6, 8)), "out": jnp.zeros((8, 3))}
    w0 = jnp.zeros(5), network
    found = planning.candidates(SOURCES, w0, 2.0, layout)
    (selected,) = (c for c in found if c.name == "SelectedSources")
    scoring = selected.solvers[0].scoring
    assert scoring.start.shape == (7, 3)
    y = jax.random.normal(jax.random.key(0), (7, 3))
    rows = jnp.arange(6.0).reshape(3, 2)
    record = {"features": rows, "label": jnp.asarray(0.5), "source": 1}
    unit = np.append(np.ravel(rows) / np.linalg.norm(rows), 0.5)
    expected = -jax.nn.log_softmax(unit @ y)[1]
    np.testing.assert_allclose(scoring.loss(y, record), expected, rtol=1e-5)
    # Its gradients are not clipped at the norm of the network's.
    assert selected.solvers[0].model.clip_norm == 0.5  # half of its own largest one
    assert selected.solvers[0].fit.clip_norm == 2.0  # a network has no largest norm
    (alone,) = (
        c for c in planning.candidates(SOURCES, w0, 2.0) if c.name == "SelectedSources"
    )
    assert alone.solvers[0].scoring is None
    assert alone.solvers[0].model.clip_norm == 1.0


def test_problems_with_a_certificate_have_draws_and_implicit_steps_too():
    x = jnp.full(2, -1.0), jnp.zeros(3)
    plain = dpb.penalty_tuning(dpb.logistic_loss, np.asarray([0, 0, 1]))
    names = [{c.name for c in planning.candidates(p, x, 1.0)} for p in (TUNING, plain)]
    assert names[0] - names[1] == {
        "ImplicitBilevel, refitted",
        "ExponentialMechanism, refitted",
        "WarmStarted, refitted",
    }
    assert "ScaledGroups" in names[1]
