"""Epochs, requests, reports and rendezvous: in memory, and through a service."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from cases.memberships import admit, begin, hosted, run_threads

from offbeat.membership import (
    DeathReport,
    Epoch,
    EpochReplacedError,
    JoinRequest,
    LeaveRequest,
    LocalMembership,
    Membership,
    MembershipWatch,
    RequestRefusedError,
    new_member_name,
)
from offbeat.membership import registry as limits
from offbeat.membership.ledger import RENEWAL_S, Ledger
from offbeat.membership.protocol import MOST_WAIT_S

THREADS = 8


@pytest.fixture(params=["memory", "service"])
def membership(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Membership]:
    if request.param == "memory":
        yield LocalMembership()
        return
    with hosted(tmp_path / "journal") as host:
        yield host.client()


def test_an_epoch_is_read_as_it_was_written(membership: Membership) -> None:
    assert membership.state().epoch is None
    assert membership.epoch(0) is None
    epoch = Epoch(0, ("a", "b"), 7, "plan", "profile", 12, {"scales": [1, 2.5], "note": "ü"})
    assert membership.propose(epoch) == epoch
    assert membership.epoch(0) == epoch
    assert membership.state().epoch == epoch
    assert membership.epoch(1) is None


def test_the_first_proposal_of_a_number_counts(membership: Membership) -> None:
    first = begin(membership, "a", "b")
    assert membership.propose(Epoch(0, ("b",))) == first
    assert admit(membership, 1, "b").members == ("b",)
    assert membership.propose(Epoch(0, ("b",))) == first
    with pytest.raises(RequestRefusedError, match=r"number \(3\) .* must be 2"):
        membership.propose(Epoch(3, ("b",)))


def test_threads_that_propose_at_once_get_one_epoch(membership: Membership) -> None:
    """Every proposal differs; each number has one winner, and all read it."""
    names = [f"m{n}" for n in range(THREADS)]
    begin(membership, *names)
    found: list[dict[int, Epoch]] = [{} for _ in range(THREADS)]

    def propose(number: int) -> None:
        for epoch in range(1, 16):
            own = Epoch(epoch, tuple(names), first_iteration=epoch, details={"from": number})
            found[number][epoch] = membership.propose(own)

    run_threads(propose, THREADS)
    assert all(one == found[0] for one in found)
    assert found[0] == {n: membership.epoch(n) for n in range(1, 16)}
    assert all(found[0][n].number == n for n in found[0])


def test_an_epoch_fulfils_requests_and_reports(membership: Membership) -> None:
    begin(membership, "a", "b", "c")
    join = JoinRequest("d", 4, {"host": "h"})
    membership.request_join(join)
    membership.request_join(JoinRequest("e"))
    leave, dead = LeaveRequest("b", "maintenance"), DeathReport("c", "a", "no heartbeat")
    membership.request_leave(leave)
    membership.report_death(dead)
    membership.report_death(DeathReport("c", "b", "second report"))
    state = membership.state()
    assert (state.joining, state.leaving, state.dead) == (
        (join, JoinRequest("e")),
        (leave,),
        (dead,),
    )
    membership.propose(Epoch(1, ("a", "b", "d")))
    state = membership.state()
    assert (state.joining, state.leaving, state.dead) == ((JoinRequest("e"),), (leave,), ())
    membership.withdraw("e")
    membership.withdraw("b")
    assert membership.state().joining == membership.state().leaving == ()


def test_repeated_requests_change_nothing(membership: Membership) -> None:
    begin(membership, "a", "b")
    membership.request_join(JoinRequest("c"))
    membership.request_leave(LeaveRequest("b"))
    membership.report_death(DeathReport("a", "b"))
    version = membership.state().version
    membership.request_join(JoinRequest("c"))
    membership.request_leave(LeaveRequest("b"))
    membership.report_death(DeathReport("a", "b"))
    membership.request_join(JoinRequest("a"))  # a member already
    membership.request_leave(LeaveRequest("x"))  # no member
    membership.report_death(DeathReport("x", "a"))
    membership.withdraw("x")
    assert membership.state().version == version


def test_members_and_counts_continue(membership: Membership) -> None:
    begin(membership, "a", "b")
    with pytest.raises(RequestRefusedError, match=r"member \(x\) must be in epoch 0 or have req"):
        membership.propose(Epoch(1, ("a", "x")))
    first = Epoch(1, ("a",), first_iteration=10, samples=80)
    membership.propose(first)
    for name in ("first_iteration", "samples"):
        less = replace(first, number=2, **{name: getattr(first, name) - 1})
        with pytest.raises(RequestRefusedError, match=f"{name} .* must be at least"):
            membership.propose(less)
    assert membership.propose(replace(first, number=2)).number == 2  # none has trained in epoch 1
    again = admit(membership, 3, "y", "z")  # a new run of the job has no member of the last one
    assert (again.first_iteration, again.samples) == (0, 0)


def test_old_epochs_are_not_kept(membership: Membership) -> None:
    begin(membership, "a")
    for number in range(1, limits.KEPT_EPOCHS + 2):
        membership.propose(Epoch(number, ("a",)))
    assert membership.epoch(2) == Epoch(2, ("a",))
    with pytest.raises(RequestRefusedError, match=r"epoch \(1\) must be one of the newest 16"):
        membership.epoch(1)
    with pytest.raises(EpochReplacedError, match=r"epoch \(15\) has been replaced by epoch 17"):
        membership.rendezvous(15).set("k", b"v")


def test_a_wait_ends_with_the_change(membership: Membership) -> None:
    state = begin(membership, "a") and membership.state()
    assert membership.wait_for_change(state.version, 0.02) == state
    assert membership.wait_for_change(-1, 30) == state
    timer = threading.Timer(0.05, membership.request_join, [JoinRequest("b")])
    timer.start()
    found = membership.wait_for_change(state.version, 60)
    assert found.joining == (JoinRequest("b"),)
    assert found.version == state.version + 1
    timer.join()


def test_a_watch_follows(membership: Membership) -> None:
    watch = MembershipWatch(membership)
    begin(membership, "a")
    expected = membership.state()
    end = time.monotonic() + 30
    while watch.version < expected.version and time.monotonic() < end:
        time.sleep(0.002)
    assert (watch.state, watch.version, watch.error) == (expected, expected.version, None)
    watch.close()
    membership.request_join(JoinRequest("b"))  # ends the last request
    watch._thread.join(30)
    assert not watch._thread.is_alive()


# ---- rendezvous -----------------------------------------------------------------------------


def test_keys_behave_as_those_of_torch(membership: Membership) -> None:
    """Against a store of torch, with the same random calls."""
    begin(membership, "a")
    keys, store, draw = membership.rendezvous(0), dist.HashStore(), random.Random(3)
    for _ in range(300):
        key, value = f"k{draw.randrange(4)}", f"v{draw.randrange(3)}"
        number = f"n{draw.randrange(2)}"
        action = draw.randrange(6)
        if action == 0:
            keys.set(key, value.encode())
            store.set(key, value)
        elif action == 1:
            amount = draw.randrange(-3, 9)
            assert keys.add(number, amount) == store.add(number, amount)
        elif action == 2:
            expected = draw.choice(["", "v0", "v1"])
            own = keys.compare_set(key, expected.encode(), value.encode())
            assert own == store.compare_set(key, expected, value)
        elif action == 3:
            assert keys.delete(key) == store.delete_key(key)
        elif action == 4:
            asked = draw.sample(["k0", "k1", "k2", "k3", "n0", "n1"], 2)
            assert keys.check(asked) == store.check(asked)
        elif keys.check([key]):
            assert keys.get(key, 0) == store.get(key)
        assert keys.count() == store.num_keys()


def test_threads_count_and_compare(membership: Membership) -> None:
    begin(membership, "a")
    keys, won = membership.rendezvous(0), list[int]()

    def act(number: int) -> None:
        for n in range(10):
            keys.add("sum", 1)
            if keys.compare_set(f"lock{n}", b"", str(number).encode()) == str(number).encode():
                won.append(n)

    run_threads(act, THREADS)
    assert keys.add("sum", 0) == 10 * THREADS
    assert sorted(won) == list(range(10))


def test_a_key_is_awaited(membership: Membership) -> None:
    begin(membership, "a")
    keys = membership.rendezvous(0)
    keys.set("a", b"1")
    with pytest.raises(TimeoutError, match=r"key b, c of epoch 0 was not set within 0\.01 s"):
        keys.wait(["a", "b", "c"], 0.01)
    timer = threading.Timer(0.05, keys.set, ["b", b"\x00\xff"])
    timer.start()
    assert keys.get("b", 60) == b"\x00\xff"
    keys.wait(["a", "b"], 0)
    keys.wait([], 0)
    assert keys.check([])
    timer.join()


def test_the_next_epoch_ends_waits_for_keys(membership: Membership) -> None:
    """Survivors of a rendezvous continue at once. Keys that are set can still be read."""
    begin(membership, "a", "b")
    keys = membership.rendezvous(0)
    keys.set("here", b"1")
    timer = threading.Timer(0.05, membership.propose, [Epoch(1, ("b",))])
    timer.start()
    began_s = time.monotonic()
    with pytest.raises(EpochReplacedError) as caught:
        keys.wait(["here", "never"], 60)
    assert time.monotonic() - began_s < MOST_WAIT_S - 1  # not at the end of a request
    assert (caught.value.number, caught.value.epoch) == (0, Epoch(1, ("b",)))
    assert keys.get("here", 0) == b"1"
    assert not keys.check(["never"])
    with pytest.raises(RequestRefusedError, match=r"epoch \(2\) must be written before"):
        membership.rendezvous(2).set("k", b"")
    assert membership.rendezvous(1).count() == 0
    timer.join()


# ---- limits ---------------------------------------------------------------------------------


def test_sizes_are_limited(membership: Membership, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(membership, "a")
    keys = membership.rendezvous(0)
    keys.set("k", bytes(limits.MOST_VALUE_BYTES))
    assert keys.get("k", 0) == bytes(limits.MOST_VALUE_BYTES)
    with pytest.raises(RequestRefusedError, match=r"value \(262145 bytes\) must have at most"):
        keys.set("k", bytes(limits.MOST_VALUE_BYTES + 1))
    with pytest.raises(RequestRefusedError, match="at most 512 characters"):
        keys.set("k" * 513, b"")
    with pytest.raises(RequestRefusedError, match="list of 1 to 1024"):
        keys.check(["k"] * 1025)
    monkeypatch.setattr(limits, "MOST_SPACE_BYTES", limits.MOST_VALUE_BYTES + 1000)
    keys.set("l", bytes(500))
    with pytest.raises(RequestRefusedError, match=r"epoch 0 \(\d+ bytes\) must have at most"):
        keys.set("m", bytes(500))
    assert keys.delete("l")  # makes room
    keys.set("l", bytes(500))
    keys.set("k", b"")  # a shorter value makes room, too
    keys.set("m", bytes(500))
    assert keys.delete("m")
    keys.add("n", (1 << 62) - 1)
    keys.add("n", 1 << 62)
    with pytest.raises(RequestRefusedError, match="64 bits"):
        keys.add("n", 1)
    with pytest.raises(RequestRefusedError, match=r"value of key \(l\) must be a whole number"):
        keys.add("l", 1)


def test_requests_are_limited(membership: Membership) -> None:
    begin(membership, "a")
    details = {"text": "x" * 60_000}
    for n in range(10):
        membership.request_join(JoinRequest(f"m{n}", details=details))
    with pytest.raises(RequestRefusedError, match="must have at most 655360 bytes"):
        membership.request_join(JoinRequest("m10", details=details))
    assert len(membership.state().joining) == 10


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"number": -1}, r"number \(-1\) must be a whole number from 0"),
        ({"number": True}, "number"),
        ({"number": 1.0}, "number"),
        ({"members": ()}, "members must be a list of at least one name"),
        ({"members": "ab"}, "members"),
        ({"members": ("a", "a")}, "members must be different"),
        ({"members": ("a b",)}, r"member \('a b'\) must have 1 to 64 letters"),
        ({"members": ("x" * 65,)}, "member"),
        ({"members": (3,)}, "member"),
        ({"samples": -3}, r"samples \(-3\)"),
        ({"first_iteration": 1 << 63}, "first_iteration"),
        ({"plan_digest": "a b"}, "plan_digest must be a digest"),
        ({"profile_digest": None}, "profile_digest"),
        ({"details": {"x": float("nan")}}, "details must be an object that JSON supports"),
        ({"details": {1: 2}}, "details must be an object whose keys are texts"),
        ({"details": []}, "details"),
        ({"details": {"x": "y" * 70_000}}, r"details \(70009 bytes of JSON\)"),
    ],
)
def test_an_epoch_has_valid_values(values: dict[str, object], message: str) -> None:
    with pytest.raises(RequestRefusedError, match=message):
        Epoch(**{"number": 0, "members": ("a",), **values})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"ranks": 0}, r"ranks \(0\) must be at least 1"),
    ],
)
def test_a_join_request_has_valid_values(values: dict[str, object], message: str) -> None:
    with pytest.raises(RequestRefusedError, match=message):
        JoinRequest("a", **values)  # pyright: ignore[reportArgumentType]


def test_reasons_are_shortened_and_names_unique() -> None:
    assert len(LeaveRequest("a", "x" * 1000).reason) == 200
    with pytest.raises(RequestRefusedError, match="reason must be a text"):
        DeathReport("a", "b", 3)  # pyright: ignore[reportArgumentType]
    names = {new_member_name() for _ in range(100)}
    assert len(names) == 100
    assert all(LeaveRequest(name).member == name for name in names)


# ---- renewal --------------------------------------------------------------------------------


def test_join_requests_of_ended_processes_are_withdrawn() -> None:
    now = [0.0]
    ledger = Ledger(clock=lambda: now[0])

    def joining() -> list[str]:
        ledger.withdraw_expired()
        return [request.member for request in ledger.registry.state.joining]

    for name in ("a", "b"):
        ledger.execute({"op": "join", "request": JoinRequest(name).to_dict()})
    for _ in range(4):
        now[0] += RENEWAL_S / 2
        ledger.execute({"op": "state", "version": 9, "member": "b"})
        assert "b" in joining()
    assert joining() == ["b"]
    now[0] += RENEWAL_S
    assert joining() == ["b"]
    now[0] += 0.01
    assert joining() == []
    assert ledger.registry.state.version == 4


def test_a_wait_renews_the_join_request() -> None:
    local, now = LocalMembership(), [0.0]
    local._ledger = Ledger(clock=lambda: now[0])
    local.request_join(JoinRequest("a"))
    for _ in range(3):
        now[0] += RENEWAL_S
        assert local.wait_for_change(1, 0, "a").joining == (JoinRequest("a"),)
    now[0] += RENEWAL_S + 0.01
    assert local.state().joining == ()
