"""State of the optimizer that a process receives before it joins, while the members train."""

from __future__ import annotations

import math
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch
from cases.member_checks import compare, run
from cases.member_jobs import Outcome, Scenario, by_plan, every
from harness.ranks import free_port
from torch import Tensor
from torch.utils._pytree import tree_flatten

from offbeat import DiLoCo, LocalSGD, Strategy
from offbeat.elastic import feed as member_feed
from offbeat.elastic.feed import Pace, StateCopy, StateReceiver, StateSender
from offbeat.elastic.session import MemberSession
from offbeat.membership import Epoch, JoinRequest, LocalMembership

# ---- jobs -------------------------------------------------------------------------------------


def sizes(epochs: Sequence[Epoch]) -> list[tuple[int, int]]:
    return [(len(epoch.members), epoch.first_iteration) for epoch in epochs]


def require_equal_bits(outcomes: Sequence[Outcome | None], t: int) -> None:
    """Require equal weights of all processes after an iteration."""
    first, *others = (one.weights[t] for one in outcomes if one is not None)
    for weights in others:
        assert all(first[name].equal(weights[name]) for name in first)


@pytest.mark.parametrize("strategy", [LocalSGD(period=3), DiLoCo(period=3)], ids=lambda s: s.name)
def test_members_train_while_a_joining_process_receives_the_state(strategy: Strategy) -> None:
    """Process 0 copies its state before iteration 3 or 6, and sends its tensors after iteration
    8."""
    scenario = Scenario(
        strategy, 18, first=2, joins={2: 4}, states={10: "state"}, inject={0: "hold state"}
    )
    outcomes, epochs = run(scenario)
    average_at = every(3) if isinstance(strategy, LocalSGD) else by_plan(scenario)
    compare(scenario, average_at, outcomes, epochs)
    assert sizes(epochs) == [(2, 0), (3, 12)]
    source, joined = outcomes[0], outcomes[2]
    assert source is not None
    assert joined is not None
    ((name, origin),) = epochs[1].details["states"].items()
    assert (name, origin["member"]) == (joined.name, source.name)
    assert origin["iteration"] in (3, 6)
    before = source.weights[11]
    assert min(joined.weights) == 12
    assert all(joined.start[name].equal(before[name]) for name in before)
    if isinstance(strategy, LocalSGD):
        require_equal_bits(outcomes, 14)


def test_a_lost_connection_is_replaced() -> None:
    """The process receives the state that process 0 has at the next boundary, which is not the
    first one."""
    scenario = Scenario(
        LocalSGD(period=3), 15, first=2, joins={2: 4}, states={7: "lost", 10: "state"},
        inject={2: "lose state"},
    )  # fmt: skip
    outcomes, epochs = run(scenario)
    compare(scenario, every(3), outcomes, epochs)
    assert [len(epoch.members) for epoch in epochs] == [2, 3]
    (origin,) = epochs[1].details["states"].values()
    assert origin["iteration"] in (6, 9)
    assert origin["iteration"] < epochs[1].first_iteration


def test_another_member_sends_the_state_after_the_death_of_the_sender() -> None:
    scenario = Scenario(
        LocalSGD(period=3), 18, joins={3: 4}, states={13: "state"}, kills={0: 7},
        inject={0: "keep state"},
    )  # fmt: skip
    outcomes, epochs = run(scenario)
    compare(scenario, every(3), outcomes, epochs)
    assert [len(epoch.members) for epoch in epochs] == [3, 2, 3]
    (origin,) = epochs[2].details["states"].values()
    assert origin["member"] == epochs[1].members[0]
    assert origin["iteration"] == epochs[1].first_iteration + 3


def test_members_train_on_after_the_death_of_a_process_that_receives_the_state() -> None:
    scenario = Scenario(
        LocalSGD(period=3), 12, first=2, joins={2: 4}, states={12: "state"},
        inject={2: "end in receiving"},
    )  # fmt: skip
    outcomes, epochs = run(scenario)
    compare(scenario, every(3), outcomes, epochs)
    assert sizes(epochs) == [(2, 0)]


def test_all_ranks_of_a_node_receive_the_state() -> None:
    ports = tuple(free_port() for _ in range(3))
    scenario = Scenario(
        LocalSGD(period=3), 15, first=2, ranks=2, ports=ports, joins={4: 4, 5: 4},
        states={10: "state"},
    )  # fmt: skip
    outcomes, epochs = run(scenario)
    compare(scenario, every(3), outcomes, epochs)
    (origin,) = epochs[1].details["states"].values()
    assert origin["iteration"] in (3, 6)
    assert epochs[1].first_iteration > origin["iteration"]


# ---- connections ------------------------------------------------------------------------------


def state_of(seed: int) -> dict[Any, Any]:
    random = torch.Generator().manual_seed(seed)
    return {
        0: {
            "step": torch.tensor(3.0),
            "average": torch.randn(70, 50, generator=random).t(),
            "gaps": torch.randn(30, 8, generator=random)[:, ::2],
            "half": torch.randn(33, generator=random).bfloat16(),
        },
        1: {"step": 4, "empty": torch.empty(0), "none": None, "history": [torch.ones(2), 0.5]},
    }


def require_equal(found: Any, right: Any) -> None:
    one, other = (tree_flatten(state) for state in (found, right))
    assert one[1] == other[1]
    for a, b in zip(one[0], other[0], strict=True):
        assert a.equal(b) and a.dtype == b.dtype if isinstance(b, Tensor) else a == b


@contextmanager
def sender_of(copy: StateCopy, pace: Pace | None = None) -> Iterator[StateSender]:
    sender = StateSender(copy, "127.0.0.1", pace or Pace(), 10.0)
    try:
        yield sender
    finally:
        sender.close()


def test_a_process_receives_an_equal_state_and_its_origin() -> None:
    state, progress = state_of(1), list[int]()
    copy = StateCopy.of(state, 7, "first")
    state[0]["average"].zero_()  # training continues
    receiver = StateReceiver(10.0)
    with sender_of(copy) as sender:
        assert receiver.receive(sender.place, lambda: progress.append(1))
    assert receiver.copy is not None
    require_equal(receiver.copy.state, state_of(1))
    assert receiver.facts() == {"state": {"member": "first", "iteration": 7}, "lost": ""}
    assert progress


def test_only_the_process_with_the_token_receives_the_state() -> None:
    copy = StateCopy.of(state_of(1), 7, "first")
    stranger, receiver = StateReceiver(10.0), StateReceiver(10.0)
    with sender_of(copy) as sender:
        host, port, token = sender.place
        assert not stranger.receive([host, port, "0" * len(token)])
        with socket.create_connection((host, port)) as silent:
            silent.sendall(b"x" * 100)
        assert receiver.receive(sender.place)
    assert stranger.copy is None
    assert stranger.facts() == {"state": None, "lost": "0" * len(token)}


def test_a_copy_is_released_when_it_has_been_sent() -> None:
    copy = StateCopy.of(state_of(1), 7, "first")
    tensor, receiver = ref(copy.state[0]["average"]), StateReceiver(10.0)
    sender = StateSender(copy, "127.0.0.1", Pace(), 10.0)
    del copy
    assert receiver.receive(sender.place)
    receiver.copy = None
    sender.thread.join(10.0)
    assert sender.copy is None
    assert tensor() is None


def test_a_sender_that_closes_ends_the_wait_of_the_process() -> None:
    class Stopping(Pace):
        def reserve(self, size: int) -> float:
            sender.close()
            return math.inf

    receiver = StateReceiver(10.0)
    with sender_of(StateCopy.of(state_of(1), 7, "first"), Stopping()) as sender:
        assert not receiver.receive(sender.place)
        assert receiver.facts() == {"state": None, "lost": sender.token}
        assert not receiver.receive(sender.place)  # nothing listens
    assert receiver.losses == 2


def test_connections_that_share_a_pace_share_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(monotonic=lambda: clock.now, now=100.0)
    monkeypatch.setattr(member_feed, "time", clock)
    pace = Pace(1000.0)
    assert pace.piece_bytes == 500
    assert [pace.reserve(500) for _ in range(3)] == [0.0, 0.5, 1.0]
    clock.now = 101.0
    assert pace.reserve(100) == 0.5
    clock.now = 110.0  # a pause grants no burst
    assert [pace.reserve(100), pace.reserve(100)] == [0.0, pytest.approx(0.1)]
    assert Pace().reserve(1 << 30) == 0.0
    assert Pace().piece_bytes == member_feed.PIECE_BYTES


# ---- requests ---------------------------------------------------------------------------------


class Job:
    """First rank of a job, as its senders of states see it."""

    def __init__(self) -> None:
        self.membership, self.address, self.iteration = LocalMembership(), "127.0.0.1", 6
        self.epoch = self.membership.propose(Epoch(0, ("first", "second")))
        self.sends_state_ahead, self.network_bytes_per_s = True, 1e9
        self.copies = 0
        member: Any = self
        self.senders = member_feed.StateSenders(member, member, 10.0)

    def copy_state(self) -> StateCopy:
        self.copies += 1
        return StateCopy.of(state_of(self.copies), self.iteration, "first")

    def select(self, *requests: JoinRequest) -> tuple[list[str], dict[str, Any]]:
        ready, states = self.senders.select(requests)
        return [request.member for request in ready], states

    def receive(self, name: str, receiver: StateReceiver) -> bool:
        keys = self.membership.rendezvous(self.epoch.number)
        place = receiver.find_sender(self.epoch, keys, name)
        return place is not None and receiver.receive(place)


@pytest.fixture
def job() -> Iterator[Job]:
    found = Job()
    yield found
    found.senders.close()


def request(name: str, receiver: StateReceiver) -> JoinRequest:
    return JoinRequest(name, details=receiver.facts())


def test_processes_join_when_they_have_the_state(job: Job) -> None:
    """Two processes receive one copy."""
    a, b = StateReceiver(10.0), StateReceiver(10.0)
    assert job.select(request("a", a), request("b", b)) == ([], {})
    assert job.copies == 1
    assert job.receive("a", a)
    assert job.select(request("a", a), request("b", b)) == (
        ["a"], {"a": {"member": "first", "iteration": 6}}
    )  # fmt: skip
    assert job.receive("b", b)
    assert job.select(request("b", b))[0] == ["b"]
    assert job.copies == 1


def test_processes_that_need_no_state_join_at_once(job: Job) -> None:
    fresh = JoinRequest("fresh", details={"state": {}, "lost": ""})
    assert job.select(fresh) == (["fresh"], {"fresh": {}})
    job.sends_state_ahead = False
    assert job.select(request("a", StateReceiver(10.0))) == (["a"], {})
    assert job.copies == 0


def test_a_state_is_sent_again_only_after_a_loss(job: Job) -> None:
    a = StateReceiver(10.0)
    job.select(request("a", a))
    keys = job.membership.rendezvous(0)
    place = a.find_sender(job.epoch, keys, "a")
    job.select(request("a", a))
    assert a.find_sender(job.epoch, keys, "a") == place
    assert place is not None
    a.lost = place[2]
    assert a.find_sender(job.epoch, keys, "a") is None
    job.select(request("a", a))
    assert job.copies == 2
    assert job.receive("a", a)


def test_the_sender_of_an_earlier_epoch_is_replaced_unless_it_sends(job: Job) -> None:
    a = StateReceiver(10.0)
    job.select(request("a", a))
    job.epoch = job.membership.propose(Epoch(1, ("first",)))
    assert not job.receive("a", a)  # the key is in the earlier epoch
    job.select(request("a", a))
    assert job.receive("a", a)


def test_a_withdrawn_request_ends_the_connection(job: Job) -> None:
    job.select(request("a", StateReceiver(10.0)))
    (_, sender), = job.senders._senders.values()  # fmt: skip
    assert job.select() == ([], {})
    sender.thread.join(10.0)
    assert sender.copy is None
    assert not job.senders._senders


def test_the_state_of_an_earlier_run_is_dropped(job: Job) -> None:
    a = StateReceiver(10.0)
    job.select(request("a", a))
    assert job.receive("a", a)
    keys = job.membership.rendezvous(0)
    a.find_sender(Epoch(1, ("second", "third")), keys, "a")
    a.find_sender(Epoch(2, ("third",)), keys, "a")
    assert a.copy is not None
    a.find_sender(Epoch(3, ("fourth",)), keys, "a")
    assert a.copy is None


@pytest.mark.parametrize(
    ("size", "rate", "synchronous", "buffer", "is_ahead"),
    [
        (4 << 20, 2e6, False, "param", True),
        (4 << 20, 8e6, False, "param", False),  # takes less than a second
        (1 << 19, 1e3, False, "param", False),  # is small
        (4 << 20, 2e6, True, "param", False),  # must be equal on all ranks
        (4 << 20, 2e6, False, "state", False),  # is averaged
    ],
)
def test_only_large_states_that_may_differ_are_sent_ahead(
    size: int, rate: float, synchronous: bool, buffer: str, is_ahead: bool
) -> None:
    payload = SimpleNamespace(buffer=buffer, moment=None)
    session: Any = SimpleNamespace(
        plan=SimpleNamespace(transfers=[SimpleNamespace(payload=payload)]),
        planner=SimpleNamespace(strategy=SimpleNamespace(synchronous=synchronous)),
        network_bytes_per_s=rate,
        _optimizer_state={0: {"momentum": torch.empty(size, dtype=torch.uint8)}},
    )
    assert MemberSession.sends_state_ahead.fget(session) == is_ahead  # type: ignore[attr-defined]
