"""Presence of the ranks of a job, and waits that end when a rank is gone."""

from __future__ import annotations

import errno
import socket
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from offbeat.core.transport import control
from offbeat.core.transport.gloo_devices import share_devices
from offbeat.core.transport.rendezvous import run_checked, run_limited
from offbeat.elastic import members
from offbeat.elastic import presence as presence_module
from offbeat.elastic.members import JobMember, Members
from offbeat.elastic.node import MemberNode
from offbeat.elastic.presence import PROBES, Presence, find_gone, is_gone, probe
from offbeat.frames.secret import ANSWER_BYTES, NONCE_BYTES
from offbeat.membership import Epoch, LocalMembership

HOST = "127.0.0.1"


def test_a_process_is_present_until_it_ends() -> None:
    presence = Presence(HOST)
    place = presence.place
    assert probe(place) == "alive"
    assert probe([*place[:2], "of another process"]) == "ended"  # which has got its port
    assert not is_gone(place, epoch=0)
    presence.close()
    assert probe(place) == "ended"
    assert is_gone(place)


def test_a_stranger_learns_nothing_and_delays_nobody_for_long() -> None:
    presence = Presence(HOST)
    presence.given_up = 7
    with socket.create_connection(presence.place[:2]) as silent:
        with socket.create_connection(presence.place[:2]) as stranger:
            stranger.sendall(bytes(ANSWER_BYTES))
            assert probe(presence.place) == "alive"
            assert len(stranger.recv(100, socket.MSG_WAITALL)) == NONCE_BYTES
        assert len(silent.recv(100, socket.MSG_WAITALL)) == NONCE_BYTES
    presence.close()


def test_a_process_answers_again_after_it_has_had_too_many_open_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accept, failures = socket.socket.accept, list[int]()

    def accept_later(listener: socket.socket) -> Any:
        if not failures:
            failures.append(1)
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", accept_later)
    presence = Presence(HOST)
    assert probe(presence.place) == "alive"
    assert failures
    presence.close()
    assert probe(presence.place) == "ended"


def test_a_rank_that_has_given_up_an_epoch_takes_part_in_the_next() -> None:
    presences = {name: Presence(HOST) for name in ("a", "b", "c")}
    places = {name: one.place for name, one in presences.items()}
    presences["b"].given_up = 3
    presences["c"].close()
    assert find_gone(places, 2) == find_gone(places, 3) == ["b", "c"]
    assert find_gone(places, 4) == find_gone(places) == ["c"]
    assert find_gone({}) == []
    for presence in presences.values():
        presence.close()


def test_the_probes_of_a_large_job_grow_with_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank probes a few others at a time, and all of them in turn."""
    member = JobMember(Members(LocalMembership()), {}, None, 1.0, MemberNode())  # type: ignore[arg-type]
    others, calls = [f"other{n}" for n in range(100)], list[list[str]]()
    names = (*others[:40], member.name, *others[40:])
    member.epoch = Epoch(0, names, details={"addresses": {name: [[HOST, 1, ""]] for name in names}})
    gone = set[str]()

    def find(places: dict[str, object], _: int) -> list[str]:
        calls.append([*places])
        return [name for name in places if name in gone]

    def look() -> None:
        for _ in range(7):
            member.require_present()

    monkeypatch.setattr(members, "find_gone", find)
    look()
    assert {len(probed) for probed in calls} == {PROBES}
    assert {name for probed in calls for name in probed} == {*others}
    assert calls[0] == others[40 : 40 + PROBES]
    gone.add("other3")
    with pytest.raises(RuntimeError, match=r"member other3\) has failed, or has given up epoch 0"):
        look()
    member.close()


def test_a_lack_of_this_host_states_nothing_about_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(*_: object) -> None:
        raise OSError(failure, "an error of this test")

    monkeypatch.setattr(socket, "create_connection", connect)
    failure = errno.EMFILE
    assert probe((HOST, 1, "token")) == "silent"
    failure = errno.EHOSTUNREACH
    assert probe((HOST, 1, "token")) == "unreachable"


@pytest.mark.parametrize("size", [1, 2, 64])
@pytest.mark.parametrize(("sent", "given_up"), [(b"12\n", True), (b"1", True), (b"4\n", False)])
def test_an_answer_in_parts_is_read_whole(
    monkeypatch: pytest.MonkeyPatch, sent: bytes, given_up: bool, size: int
) -> None:
    """A process that ends before its answer is whole counts as one that has ended."""
    own, other = socket.socketpair()

    class Parts:
        """Connection that delivers a few bytes at a time."""

        settimeout = own.settimeout

        def recv(self, _: int) -> bytes:
            return own.recv(size)

        def __enter__(self) -> Parts:
            return self

        def __exit__(self, *_: object) -> None:
            own.close()

    other.sendall(sent)
    other.close()
    monkeypatch.setattr(socket, "create_connection", lambda *_: Parts())
    monkeypatch.setattr(presence_module, "prove_token", lambda *_, **__: None)
    assert is_gone((HOST, 1, "token"), epoch=12) is given_up


def refuse() -> None:
    raise RuntimeError("a rank of this test is gone")


def test_a_process_group_is_given_up_when_a_rank_is_gone() -> None:
    """Its second rank does not exist. Its creation ends in the thread after its timeout."""
    timeout = timedelta(seconds=1)
    with share_devices(None, refuse), pytest.raises(RuntimeError, match="of this test is gone"):
        dist.init_process_group(
            "gloo", store=dist.HashStore(), rank=0, world_size=2, timeout=timeout
        )
    assert not dist.is_initialized()


@pytest.mark.usefixtures("own_group")
def test_a_process_group_is_created_while_ranks_are_checked() -> None:
    with share_devices(None, refuse):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.get_backend() == "gloo"


def test_a_comparison_of_ranks_ends_when_one_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection to that rank remains open, so the comparison itself does not end."""
    ends = threading.Event()
    monkeypatch.setattr(control.packed, "gather", lambda *_: ends.wait(10))
    own: Any = object.__new__(control.Control)
    own.timeout_s, own.group, own._heartbeat, own._protocol = 60.0, None, None, "of this test"
    own._require_members = refuse
    with pytest.raises(RuntimeError, match="of this test is gone"):
        own.is_same([1])
    ends.set()


def test_a_request_without_a_check_runs_in_this_thread() -> None:
    assert run_checked(threading.current_thread, 1.0, None) is threading.current_thread()
    assert run_checked(threading.current_thread, 1.0, refuse) is not threading.current_thread()


def test_a_request_ends_at_its_limit() -> None:
    looks = list[int]()
    with pytest.raises(TimeoutError, match=r"has not answered in 0\.5 s"):
        run_limited(threading.Event().wait, 0.5, lambda: looks.append(1))
    assert looks
