"""What a run costs, computed a second time: from noise, clip norms and batches alone.

Nothing of `dpbilevel.privacy.accounting`, of the events and charges of releases, or
of dp-accounting is used. Of a release this reads how much noise a run adds, to what
norm it clips and how batches are drawn, which the contract suite compares with what
runs do.
"""

import collections
import math

import numpy as np

import dpbilevel as dpb
from dpbilevel.privacy import CorrelatedRelease
from dpbilevel.privacy.releases import Release
from dpbilevel.privacy.sampling.base import FullBatch, Poisson
from dpbilevel.privacy.sampling.fixed_size import (
    FixedSize,
    RandomAllocation,
    SinglePass,
)
from dpbilevel.search.declared import Trainings
from dpbilevel.search.repeat_and_select import Selection
from tests.privacy import reference_accounting as reference

HERE = "tests/privacy/second_accountant.py"
ADD_OR_REMOVE = dpb.Neighbours.ADD_OR_REMOVE_ONE


def deltas(ledger, epsilons):
    """The delta at an epsilon for every kind of person."""
    parts = collections.defaultdict(list)
    for release in ledger.releases:
        for person, part in _parts(release, ledger.people):
            parts[person].append(part)
    # An output within `off` in total variation of a private one.
    off = sum(release.failure for release in ledger.releases)
    return {
        person: _delta(found, epsilons[person]) + (1 + math.exp(epsilons[person])) * off
        for person, found in parts.items()
    }


def mus(ledger):
    """The mu of every kind of person, or none if a release is not Gaussian."""
    squares = collections.Counter()
    for release in ledger.releases:
        for person, (kind, _, shift, count) in _parts(release, ledger.people):
            if kind != "gaussian":
                return {}
            squares[person] += count * shift**2
    return {person: math.sqrt(square) for person, square in squares.items()}


def _parts(release, people):
    match release:
        case CorrelatedRelease():
            return _of_correlated(release)
        case Release():
            return _of_gaussian(release, people)
        case Trainings():
            return _of_trainings(release, people)
        case Selection():
            return _of_selection(release, people)
        case dpb.draws.Draw():
            return _of_draw(release, people)
    raise TypeError(
        f"no law is known for {type(release).__name__}; add it to _parts of {HERE}"
    )


def _of_gaussian(release, people):
    """Person and (kind, rate, shift in standard deviations, times) of one release."""
    factor = 1 if release.neighbours is ADD_OR_REMOVE else 2
    shifts = {
        query.role: factor
        * float(query.clip_norm)
        / _records(query)
        / float(release.noise_std)
        for query in release.queries
    }
    total = sum(shifts.values())
    if release.joint:
        (query, _) = release.queries
        yield "person", _part(release, query, total)
        return
    for query in release.queries:
        shift = shifts[query.role]
        if query.role == "records" or people is dpb.People.DISJOINT:
            yield query.role, _part(release, query, shift)
        else:  # two releases whose variances add up to that of the noise
            yield "person", _part(release, query, math.sqrt(shift * total))


def _of_correlated(release):
    """As `_of_gaussian`, for all steps of a run, whose noise is mixed by a matrix.

    Undoing that matrix leaves independent noise, and moves what one person adds to the
    steps of every batch with its record.
    """
    (query,) = release.queries
    steps, batches = release.count, 1
    if isinstance(query.sampling, SinglePass):
        batches = query.size // query.sampling.size
    mixing = np.eye(steps)
    feedback = release.mechanism.feedback
    for lag, coefficient in enumerate(feedback, 1):
        mixing -= coefficient * np.eye(steps, k=-lag)
    unmixed = np.linalg.inv(mixing)
    moved = [unmixed[:, first::batches].sum(axis=1) for first in range(batches)]
    factor = 1 if release.neighbours is ADD_OR_REMOVE else 2
    size = factor * float(query.clip_norm) / _records(query)
    fresh = float(release.noise_std) / math.hypot(1, *feedback)
    shift = size * max(map(np.linalg.norm, moved)) / fresh
    yield query.role, ("gaussian", 1.0, shift, 1)


def _of_trainings(release, people):
    """As `_of_gaussian`, for trainings that are declared."""
    apart = people is dpb.People.DISJOINT
    for multiplier, rate, steps in release.mechanism.history:
        kind = "poisson, replace" if rate < 1 else "gaussian"
        part = kind, rate, 2 / multiplier, steps * release.count
        yield "training records" if apart else "records", part


def _of_selection(release, people):
    """As `_of_gaussian`: each kind of person sees the best of runs of one Gaussian."""
    runs = collections.defaultdict(float)
    for training in release.trainings or ((),):
        squares = collections.Counter()
        for part in (*training, release):
            for person, (_, _, shift, count) in _of_gaussian(part, people):
                squares[person] += count * shift**2
        for person, square in squares.items():
            runs[person] = max(runs[person], math.sqrt(square))
    for person, mu in runs.items():
        yield person, ("selection", release.repetitions, mu, release.count)


def _part(release, query, shift):
    count, sampling, size = release.count, query.sampling, query.size
    match sampling:
        case FullBatch():
            return "gaussian", 1.0, shift, count
        case SinglePass():
            return "gaussian", 1.0, shift, math.ceil(count / (size // sampling.size))
        case Poisson() if release.neighbours is ADD_OR_REMOVE:
            return "poisson, add or remove", float(sampling.rate), shift, count
        case Poisson():
            return "poisson, replace", float(sampling.rate), shift, count
        case FixedSize():
            return "subset", sampling.size / size, shift, count
        case RandomAllocation(batches=2) if release.neighbours is ADD_OR_REMOVE:
            return "allocation, add or remove", 0.5, shift, math.ceil(count / 2)
        case RandomAllocation(batches=2):
            return "allocation, replace", 0.5, shift, math.ceil(count / 2)
    raise TypeError(
        f"no law is known for batches of {sampling}; add it to _part of {HERE}"
    )


def _records(query):
    """The number that the sum over a batch is divided by."""
    match query.sampling:
        case FullBatch():
            return query.size
        case Poisson():
            return float(query.sampling.rate) * query.size
        case RandomAllocation():
            return query.size / query.sampling.batches
        case FixedSize() | SinglePass():
            return query.sampling.size
    name = f"batches of {query.sampling}"
    raise TypeError(f"no law is known for {name}; add their size to _records of {HERE}")


def _of_draw(release, people):
    """As `_of_gaussian`, for one draw from a density."""
    pure = isinstance(release.mechanism, dpb.draws.Exponential)
    total = sum(float(q.clip_norm) / q.size for q in release.queries)
    shares = {"person": 1.0}
    if people is dpb.People.DISJOINT or release.queries[0].role == "records":
        shares = {q.role: float(q.clip_norm) / q.size / total for q in release.queries}
    for person, share in shares.items():
        if pure:
            most = share * float(release.mechanism.epsilon)
            most += 2 * release.guarantee.log_ratio
            yield person, ("pure", 1.0, most, release.count)
        else:
            shift = share / float(release.mechanism.noise_multiplier)
            yield person, ("gaussian", 1.0, shift, release.count)


def _delta(parts, epsilon):
    """Of a composition, in the worse of both directions of the relation."""
    gaussian = math.hypot(
        *(m * math.sqrt(c) for kind, _, m, c in parts if kind == "gaussian")
    )
    others = [part for part in parts if part[0] != "gaussian"]
    if not others:
        return reference.gaussian(gaussian, epsilon)
    if others[0][0] == "selection":
        ((_, repetitions, mu, once),) = parts
        assert once == 1
        return reference.best_of(repetitions.mean, repetitions.shape, mu, epsilon)
    return max(_composed(gaussian, others, epsilon, way) for way in (0, 1))


def _allocated(kind, factor=1.0):
    return lambda _, m: reference.allocated_losses(factor * m)[kind]


LOSSES = {
    "poisson, replace": (reference.replaced_loss,) * 2,
    "poisson, add or remove": (reference.removed_loss, reference.added_loss),
    "subset": (reference.subset_loss,) * 2,
    "allocation, replace": (_allocated("replaced", 0.5),) * 2,
    "allocation, add or remove": (_allocated("removed"), _allocated("added")),
    "pure": (lambda _, epsilon: reference.pure_loss(epsilon),) * 2,
}


def _composed(gaussian, others, epsilon, way):
    parts = [(reference.gaussian_loss(gaussian), 1)] if gaussian else []
    parts += [(LOSSES[kind][way](rate, m), count) for kind, rate, m, count in others]
    if len(parts) == 1 and others[0][0] == "pure" and others[0][3] == 1:
        return reference.pure(others[0][2], epsilon)
    # The loss of a subset jumps, so that its transform falls slowly.
    accuracy = 1e-3 if any(kind == "subset" for kind, *_ in others) else 1e-6
    return reference.composed(parts, epsilon, accuracy)
