"""SelSync: when it synchronizes, what it equals, what it refuses."""

import math
from itertools import pairwise

import numpy as np
import pytest

from offbeat.core.rules import VOTES
from offbeat.core.rules.changed import weighted_mean
from offbeat.plan import Moment, Vote
from offbeat.profile import Bucket, Link, Profile
from offbeat.sim import predict, predict_plan
from offbeat.strategies import BSP, DreamDDP, LocalSGD, SelSync
from offbeat.testing.conformance import interpret_plan
from offbeat.testing.replicas import Task, momentum, rmsprop

PROFILE = Profile(
    tuple(Bucket(f"b{b}", 0.01, 0.02, 1000 * (b + 1)) for b in range(4)),
    (Link("net", 1e-3, 1e5),),
    world_size=3,
)
TASK = Task([3, 1, 4, 2])
INF = float("inf")


def weights(strategy, optimizer=momentum, iterations=12):
    return np.array(interpret_plan(strategy.plan(PROFILE), TASK, 3, iterations, optimizer))


# ---- identities -----------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", [momentum, rmsprop])
def test_without_a_threshold_gradients_are_those_of_bsp_bit_for_bit(optimizer):
    selective = weights(SelSync(delta=0, aggregate="gradients"), optimizer)
    assert np.array_equal(selective, weights(BSP(), optimizer))


@pytest.mark.parametrize("more", [{}, {"vote_lag": 1}, {"scope": "layer"}], ids=str)
def test_without_a_threshold_parameters_are_those_of_bsp_if_the_optimizer_is_linear(more):
    apart = abs(weights(SelSync(delta=0, **more)) - weights(BSP())).max()
    assert apart < 1e-12
    nonlinear = abs(weights(SelSync(delta=0, **more), rmsprop) - weights(BSP(), rmsprop)).max()
    assert nonlinear > 1e-4


@pytest.mark.parametrize("more", [{}, {"aggregate": "gradients"}, {"scope": "layer"}], ids=str)
def test_with_an_infinite_threshold_all_train_alone_after_the_first_iterations(more):
    found = weights(SelSync(delta=INF, **more))
    first = 2 if more.get("scope") else 1  # what the vote of the iteration before decides
    alone, momentum_ = found[first].copy(), np.zeros_like(found[0])
    for i in range(12):
        used = found[i] if i < first else alone
        gradients = np.array([TASK.gradient(r, i, range(4), w) for r, w in enumerate(used)])
        if i < first and more.get("aggregate"):
            gradients[:] = gradients.mean(axis=0)
        momentum_ = 0.9 * momentum_ + gradients
        if i >= first:
            np.testing.assert_allclose(found[i], alone, rtol=0, atol=1e-12)
            alone = alone - 0.1 * momentum_


def test_forced_layers_without_votes_are_dreamddps():
    """After the first two iterations, in which all layers are averaged."""
    forced = SelSync(delta=INF, scope="layer", max_period=3).plan(PROFILE).fact("forced")
    plans = [DreamDDP(3, one, fill=False, split=False).plan(PROFILE) for one in ("dfs", "balanced")]
    theirs = min(plans, key=lambda plan: round(predict_plan(plan, PROFILE).iteration_s, 9))
    assert forced == theirs.fact("sets")


def test_a_model_is_averaged_in_every_period_as_in_local_sgd():
    plan = SelSync(delta=INF, max_period=4).plan(PROFILE)
    unconditional = [t for t in plan.transfers if t.when is None]
    assert unconditional == list(LocalSGD(period=4).plan(PROFILE).transfers)


# ---- the vote -------------------------------------------------------------------------------


class Worker:
    """The context of a vote: the norm of the moment."""

    rank = 0

    def __init__(self):
        self.kept, self.shown, self.norm = {}, {}, 0.0

    def squared_norm(self, buffer, buckets):
        return self.norm

    def recall(self, name):
        return self.kept.get(name)

    def keep(self, name, value):
        self.kept[name] = value

    def show(self, name, numbers):
        self.shown = numbers


def says(norms, **args):
    """What a worker says to each of some norms, and the changes that it has seen."""
    worker, found, seen = Worker(), [], []
    vote = Vote("sync", "changed", Moment("grad", 0), Moment("step"), [0], args)
    for worker.norm in norms:
        found.append(VOTES["changed"](worker, vote, range(1)))
        seen.append(worker.shown["change"])
    return found, seen


def test_the_first_iteration_and_large_changes_synchronize():
    assert says([1.0, 1.2, 1.8, 0.9, 0.9], threshold=0.5) == (
        [True, False, True, True, False],
        pytest.approx([math.nan, 0.2, 0.5, 0.5, 0.0], nan_ok=True),
    )


@pytest.mark.parametrize("odd", [0.0, INF, math.nan])
def test_a_norm_that_is_none_synchronizes_and_leaves_no_trace(odd):
    found, seen = says([1.0, odd, 1.1], threshold=0.5)
    assert found == [True, True, False]
    assert seen[2] == pytest.approx(0.1)


def test_norms_or_changes_are_smoothed_over_a_window():
    norms, weight = [1.0, 2.0, 4.0, 1.0, 3.0], 0.25
    by_norm = says(norms, threshold=1.0, smooth="norm", window=3, weight=weight)[1]
    smooth = [
        np.average(norms[max(0, i - 2) : i + 1], weights=[0.5625, 0.75, 1.0][-min(3, i + 1) :])
        for i in range(5)
    ]
    assert by_norm[1:] == pytest.approx([abs(b - a) / a for a, b in pairwise(smooth)])
    by_change = says(norms, threshold=1.0, smooth="change", window=2, weight=weight)[1]
    changes = [1.0, 1.0, 0.75, 2.0]
    assert by_change[1:] == pytest.approx(
        [1.0, 1.0, (0.75 * 1 + 0.75) / 1.75, (0.75 * 0.75 + 2) / 1.75]
    )
    assert says(norms, threshold=1.0)[1][1:] == pytest.approx(changes)


def test_the_newest_alone_counts_with_weight_one():
    assert weighted_mean([5.0, 7.0, 3.0], 1.0) == 3.0
    assert weighted_mean([5.0, 7.0, 3.0], 0.0) == 5.0


def test_the_weight_is_a_hundredth_per_worker_and_at_most_one():
    for workers, weight in ((1, 0.01), (16, 0.16), (250, 1.0)):
        profile = Profile(PROFILE.buckets, PROFILE.links, workers)
        assert SelSync().plan(profile).votes[0].arg("weight") == weight


# ---- predictions ----------------------------------------------------------------------------


def test_what_votes_spare_is_predicted():
    def predicted(strategy, **more):
        return predict(strategy, PROFILE, **more)

    always, never = predicted(SelSync()), predicted(SelSync(), votes={"sync": 0.0})
    assert always.bytes_per_iteration["net"] == 10_000
    assert never.bytes_per_iteration["net"] == 0
    assert always.iteration_s == pytest.approx(never.iteration_s + 0.1 + 1e-3)
    outcomes = [True, True, False, False, False]
    replayed = predicted(SelSync(), votes={"sync": outcomes})
    assert replayed.bytes_per_iteration["net"] == pytest.approx(10_000 * 2 / 5)
    share = 2 / 5
    mixed = share * always.iteration_s + (1 - share) * never.iteration_s
    assert replayed.iteration_s == pytest.approx(mixed)


def test_a_late_vote_costs_nothing():
    slow = Profile(PROFILE.buckets, (Link("net", 0.02, 1e5),), 3)
    at_once, late = (
        predict(SelSync(vote_lag=lag), slow, votes={"sync": 0.0}).iteration_s for lag in (0, 1)
    )
    assert late == pytest.approx(slow.forward_s + slow.backward_s)
    assert at_once == pytest.approx(late + 0.02)


def test_layers_are_averaged_under_backward():
    """All of the first layer's message and most of the others' are hidden."""
    quick = Profile(PROFILE.buckets, (Link("net", 1e-4, 1e6),), 3)
    by_layer = predict(SelSync(scope="layer"), quick)
    at_once = predict(SelSync(), quick)
    assert by_layer.exposed_s < 0.5 * at_once.exposed_s


# ---- refusals -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"delta": -0.1}, r"delta \(-0.1\) must be a number of at least 0"),
        ({"delta": math.nan}, r"delta \(nan\) must be a number of at least 0"),
        ({"window": 0}, r"window \(0\) must be an integer of at least 1"),
        ({"vote_lag": 2}, r"vote_lag \(2\) must be one of 0, 1"),
        ({"max_period": 0}, r"max_period \(0\) must be an integer of at least 1"),
        ({"aggregate": "gradients", "vote_lag": 1}, r"vote_lag \(1\) must be 0 with aggregate"),
        ({"aggregate": "gradients", "scope": "layer"}, r"scope \('layer'\) must be 'model' with"),
        ({"aggregate": "gradients", "state": "reset"}, r"state \('reset'\) must be 'local' with"),
        ({"smooth": "norms"}, r"smooth \('norms'\) must be one of norm, change; did you mean"),
    ],
)
def test_refuses(settings, words):
    with pytest.raises(ValueError, match=words):
        SelSync(**settings)
