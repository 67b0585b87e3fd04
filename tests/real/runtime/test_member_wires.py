"""Encoded averages while members of the job leave, fail and join, against equations in float64."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from cases.member_jobs import (
    Outcome,
    Scenario,
    epochs_of,
    largest_difference,
    membership_service,
    train_member,
)
from harness.ranks import free_port, watch_ranks
from oracle.coded_averages import CodedAverages, MixedWires, ScatteredWires
from oracle.quadratic import Net, Quadratic, interpreted, ran
from oracle.random_plans import random_plan, ranks_of

from offbeat import LocalSGD, PartialSync
from offbeat.core.buckets.flat import Flat
from offbeat.core.buckets.layout import BucketSpec
from offbeat.core.codecs.average import OriginError
from offbeat.core.observers import Observer
from offbeat.core.plan.program import Program
from offbeat.core.runtime.active_plan import ActivePlan
from offbeat.core.runtime.coding import Coding
from offbeat.core.runtime.waiting import Waiting
from offbeat.core.transport.collectives import Collectives
from offbeat.core.transport.device import CPU
from offbeat.core.transport.link import LinkThread, Message
from offbeat.core.verify.check import check as check_plan
from offbeat.membership import Epoch
from offbeat.plan import VERBS, Plan, Wire
from offbeat.profile import Bucket, Link, Profile

NEAR = 1e-11
WIRES = (
    Wire("int8", (("via", "gather"),)),
    Wire("powersgd", (("rank", 1),)),
    Wire("sign", (("via", "gather"),)),
    Wire("topk", (("fraction", 0.2), ("via", "scatter"))),
    Wire("bf16", (("via", "scatter"),)),
    Wire("topk2", (("fraction", 0.2),)),
    Wire("int4", (("via", "gather"),)),
    Wire("randomk", (("fraction", 0.3),)),
)


def check(scenario: Scenario) -> tuple[list[Outcome | None], list[Epoch]]:
    """Run a scenario. Compare its weights with the equations, and the anchors of all members in
    each iteration."""
    with membership_service() as address:
        ended = watch_ranks(
            scenario.processes, train_member, address, scenario, timeout_s=110,
            doomed=[*scenario.kills],
        )  # fmt: skip
        epochs = epochs_of(address)
    for one in ended:
        assert one.rank in (*scenario.kills, *scenario.orphans) or not one.kind, one.error
    outcomes: list[Outcome | None] = [one.result for one in ended]
    equations = CodedAverages(scenario)
    equations.run(epochs, numbers_of(scenario, outcomes, epochs))
    assert largest_difference(outcomes, equations.found) < NEAR
    for t in range(scenario.iterations):
        digests = {o.anchors[t] for o in outcomes if o is not None and t in o.anchors}
        assert len(digests) == 1, f"anchors differ before iteration {t}"
    return outcomes, epochs


def numbers_of(
    scenario: Scenario, outcomes: list[Outcome | None], epochs: list[Epoch]
) -> dict[str, int]:
    """Return the numbers of the members by their names in the job."""
    names = {one.name: who // scenario.ranks for who, one in enumerate(outcomes) if one is not None}
    return names | {name: who for who, name in enumerate(epochs[0].members)}


def test_messages_with_codecs_land_or_are_skipped() -> None:
    """Process 2 fails to receive a message of each of the first four codecs, which lands: after
    each change the plan begins anew. Process 1 dies in a message, which is skipped. Then a process
    joins, and the first one leaves."""
    scenario = Scenario(
        MixedWires(period=8, wire="int8", wires=WIRES), 54,
        loses={2: [(8, 0), (9, 1), (9, 2), (9, 3)]}, kills={1: 25}, kill_in_message=True,
        joins={3: 29}, join_after=5, leaves={0: 40}, at_forward=True,
    )  # fmt: skip
    outcomes, epochs = check(scenario)
    assert [len(e.members) for e in epochs] == [3, 3, 3, 3, 3, 2, 3, 2]
    landed = [e.details["landed"]["net"]["missing"] for e in epochs[1:5]]
    assert all(epochs[0].members[2] in missing for missing in landed)
    assert outcomes[2] is not None
    assert len({*outcomes[2].anchors.values()}) > 30


def test_delayed_averages_land_are_skipped_or_dropped() -> None:
    """Processes 2 and 1 fail to receive a message each, and the first process dies in one.
    `consolidate` and changes drop averages under way."""
    strategy = ScatteredWires(
        period=3, due="delayed", delay=2, gain=0.5, wire="int4", solver="optimal"
    )
    scenario = Scenario(
        strategy, 40, loses={2: [(4, 0)], 1: [(9, 1)]}, unions=(16,), kills={0: 20},
        kill_in_message=True, joins={3: 25}, join_after=3, leaves={1: 33}, at_forward=True,
    )  # fmt: skip
    _, epochs = check(scenario)
    assert [len(e.members) for e in epochs] == [3, 3, 3, 2, 3, 2]


def test_a_single_member_trains_without_codecs_until_another_one_joins() -> None:
    scenario = Scenario(
        LocalSGD(period=2, wire="sign"), 24, first=2, kills={0: 5}, kill_in_message=True,
        joins={2: 11}, join_after=1, at_forward=True,
    )  # fmt: skip
    _, epochs = check(scenario)
    assert [len(e.members) for e in epochs] == [2, 1, 2]


def test_ranks_of_nodes_encode_their_shards() -> None:
    """Rank 3 fails to receive a message. Then a node joins, rank 3 is killed, and a node leaves."""
    ports = tuple(free_port() for _ in range(3))
    scenario = Scenario(
        LocalSGD(period=2, wire="int4"), 34, first=2, ranks=2, ports=ports, loses={3: [(5, 0)]},
        joins={4: 11, 5: 11}, join_after=1, kills={3: 19}, kill_in_message=True, orphans=(2,),
        leaves={0: 26}, at_forward=True,
    )  # fmt: skip
    _, epochs = check(scenario)
    assert [len(e.members) for e in epochs] == [2, 2, 3, 2, 1]
    assert f"{epochs[0].members[1]}/1" in epochs[1].details["landed"]["net"]["missing"]


# ---- within one process ---------------------------------------------------------------------


def plans_with_wires() -> Iterator[tuple[int, Plan]]:
    """Random plans that run while members change, of which some messages are encoded."""
    seed = 0
    while True:
        plan = random_plan(Random(seed), broken=0.1)
        wires = [t for t in plan.transfers if t.wire is not None]
        is_supported = wires and all(t.ranks is None for t in plan.transfers)
        is_supported = is_supported and all(t.wire and t.wire.anchor for t in wires)
        if is_supported and not check_plan(plan):
            yield seed, plan
        seed += 1


def test_errors_that_are_stored_with_results_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The link keeps its last result, and later messages do not write to its memory."""
    kept: dict[int, list[torch.Tensor]] = {}
    keep = LinkThread._keep

    def compare_and_keep(link: LinkThread, message: Message) -> None:
        if link._last is not None:
            assert all(map(torch.equal, link._last.tensors, kept[id(link)]))
        keep(link, message)
        kept[id(link)] = [tensor.clone() for tensor in message.tensors]

    monkeypatch.setattr(LinkThread, "_keep", compare_and_keep)
    for seed, plan in islice(plans_with_wires(), 10):
        iterations = plan.prologue + 3 * plan.period + Program(plan).lag
        task = Quadratic((70,) * plan.buckets, max(ranks_of(plan), 2), iterations, seed)
        expected = np.array(interpreted(plan, task, seed=seed))
        found = np.array(ran(plan, task, has_members=True))
        assert np.abs(found - expected).max() < 1e-12, f"seed {seed}\n{plan}"


SIZES = (70, 300, 7)


def profile() -> Profile:
    buckets = tuple(Bucket(f"b{i}", 0.01, 0.02, 8 * n) for i, n in enumerate(SIZES))
    return Profile(buckets, (Link("net", 1e-3, 1e5),), 2)


def flat_of(plan: Plan, value: float = 0.0) -> Flat:
    """Storage of a model, whose anchors begin with the parameters."""
    net = Net(np.full(sum(SIZES), value), SIZES)
    flat = Flat(net, [BucketSpec(f"b{b}", (f"layers.{b}.w",)) for b in range(len(SIZES))])
    flat.create_gradients()
    flat.adopt(plan.all_buffers)
    return flat


def alone() -> Collectives:
    """Collectives of a group of one rank."""
    return Collectives(dict.fromkeys(VERBS, lambda _: None), lambda *_: None)  # type: ignore[arg-type]


@pytest.mark.parametrize("wire", ["int4", "topk:0.1", "powersgd:2", "randomk:0.1"])
@pytest.mark.parametrize("outcome", ["own", "foreign", "skipped"])
def test_an_error_is_stored_if_its_message_lands(wire: str, outcome: str) -> None:
    """The error is zero if another rank has sent the result; other buckets keep theirs."""
    plan = PartialSync(period=3, wire=wire).plan(profile())
    one = next(t for t in plan.transfers if 1 in t.payload.buckets)
    found = list[torch.Tensor]()
    for defers in (False, True):
        flat = flat_of(plan)
        coding = Coding(plan, flat, {}, defers_errors=defers)
        coding.restart_if_outdated()
        for x in (*flat.contents("param")[0], *flat.contents("residual")[0]):
            x.data.copy_(torch.linspace(-1, 2, len(x), dtype=x.dtype))
        [before] = [x.clone() for x in flat.contents("residual")[0]]
        coded = coding.encode_message(one, flat.copy_index("param"), 0)
        coded(message := Message(one, 4, 0), alone())
        assert bool(message.errors) is defers
        [residual] = flat.contents("residual")[0]
        assert residual.equal(before) is defers
        if defers and outcome != "skipped":
            message.is_foreign = outcome == "foreign"
            coding.store_result(message, flat.copy_index("param"))
        found.append(residual.clone())
    own = torch.cat([torch.full((n,), b in one.payload.buckets) for b, n in enumerate(SIZES)])
    stored, deferred = found
    right = {"own": stored, "foreign": torch.where(own, 0.0, before), "skipped": before}[outcome]
    assert deferred.equal(right)
    assert not stored.equal(before)


@pytest.mark.parametrize("are_united", [True, False])
def test_codecs_begin_anew_when_members_change(are_united: bool) -> None:
    """Anchors begin anew if the parameters are equal on all ranks, and errors continue."""
    plan = LocalSGD(period=2, wire="int4").plan(profile())
    flat, [t] = flat_of(plan, 1.0), plan.transfers
    memory: dict[str, Any] = {"of a rule": 1, "wire of an earlier plan": {}}
    coding = Coding(plan, flat, memory, defers_errors=True)
    coding.restart_if_outdated()
    origin = coding.encode_message(t, 0, 0).settings.origin
    flat.contents("residual")[0][0].fill_(5.0)
    flat.contents("param")[0][0].data.fill_(3.0)
    coding.begin_epoch(are_united=are_united)
    assert memory == {"of a rule": 1}
    assert flat.contents("anchor")[0][0].unique().tolist() == [3.0 if are_united else 1.0]
    assert flat.contents("residual")[0][0].unique().tolist() == [5.0]
    assert (coding.encode_message(t, 0, 0).settings.origin != origin) is are_united


@pytest.mark.parametrize("has_loaded", [True, False])
def test_buffers_begin_with_weights_that_were_loaded_before_members_change(
    has_loaded: bool,
) -> None:
    run: Any = SimpleNamespace(reloaded=has_loaded, _restart_buffers=Mock(), actions=Mock())
    ActivePlan.begin_epoch(run, are_united=False)
    assert run._restart_buffers.called is has_loaded
    run.actions.storage.coding.begin_epoch.assert_called_once_with(are_united=False)


def test_ranks_compare_their_anchors_when_members_have_changed() -> None:
    plan = LocalSGD(period=2, wire="int4").plan(profile())
    coding = Coding(plan, flat := flat_of(plan), {}, defers_errors=True)
    origin = coding.encode_message(plan.transfers[0], 0, 0).settings.origin
    flat.contents("anchor")[0][0].add_(1.0)
    coding.begin_epoch(are_united=False)
    assert coding.encode_message(plan.transfers[0], 0, 0).settings.origin != origin


def test_members_do_not_meet_because_of_anchors_that_differ() -> None:
    """A later epoch would have them, too."""
    plan = LocalSGD(period=2, wire="int4").plan(profile())
    message = Message(plan.transfers[0], 4, 0)
    message.arrive(OriginError(1, 0))
    control: Any = SimpleNamespace(rank=0, report_failure=lambda **_: "All ranks are alive.")
    waits = Waiting(CPU(), control, 1.0, Observer(), lambda _: None)
    waits.recover = Mock()
    with pytest.raises(RuntimeError, match="rank 1 counts the changes of its parameters"):
        waits.wait(message, flat_of(plan))
    waits.recover.assert_not_called()
