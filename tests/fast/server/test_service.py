"""Servers and clients over real sockets, in one process."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cases.server_jobs import SECRET, Job, job, pulled, until
from harness.ranks import run_ranks
from harness.threads import MemoryControl, World

from offbeat.core.buckets.flat import memory_of
from offbeat.frames import secret as secrets
from offbeat.frames.frames import HEADER_BYTES, pack
from offbeat.server.client import Client, ServerGoneError
from offbeat.server.protocol import Kind
from offbeat.server.serving import common_secret
from offbeat.server.session import SSPSession
from offbeat.server.snapshots import Snapshots
from offbeat.server.upstream import RefusedError


def test_pushes_are_averaged_per_clock_and_pulled() -> None:
    with job(20, 2, 2) as j:
        a, b = j.client(0), j.client(1)
        j.push(a, 1.0)
        assert bool((pulled(a) == 0).all())  # the other one has not come so far
        j.push(b, 3.0)
        assert bool((pulled(a, need=1) == -2).all())
        assert a.clocks()[1][0] == 1
        for client in (a, b):
            client.close()
        j.end()
        assert not any(thread.is_alive() for thread in j.threads)
        assert not j.errors


def test_a_pull_waits_and_says_for_whom() -> None:
    with job(5, 1, 2) as j:
        a, b = j.client(0, timeout_s=1.0), j.client(1)
        j.push(a, 1.0)
        a.pull(1)
        with pytest.raises(RuntimeError, match=r"waited 1 s for parameters: rank 1 \(clock 0"):
            a.await_arrival()
        a.expedite_pull()
        a.await_arrival()
        for client in (a, b):
            client.close()


def test_meeting_averages_the_numbers_of_all() -> None:
    with job(5, 2, 2) as j:
        a, b = j.client(0), j.client(1)
        found: list[torch.Tensor] = []
        other = threading.Thread(
            target=lambda: found.append(b.average(torch.tensor([3.0]).double()))
        )
        other.start()
        assert a.average(torch.tensor([1.0]).double()).tolist() == [2.0]
        other.join()
        assert found[0].tolist() == [2.0]
        for client in (a, b):
            client.close()


def test_an_answer_that_was_lost_is_given_again() -> None:
    """A worker that asks once more for a meeting that is over gets what came out of it, and the
    others do not meet it there; a new process begins its count anew."""
    with job(5, 1, 2) as j:
        a, b = j.client(0), j.client(1)
        threading.Thread(target=lambda: b.average(torch.tensor([3.0]).double())).start()
        assert a.average(torch.tensor([1.0]).double()).tolist() == [2.0]
        a._averages -= 1  # as after a connection that broke before the answer came
        assert a.average(torch.tensor([1.0]).double()).tolist() == [2.0]
        _abandon(a)
        again = j.client(0)
        other = threading.Thread(target=lambda: b.average(torch.tensor([5.0]).double()))
        other.start()
        assert again.average(torch.tensor([7.0]).double()).tolist() == [6.0]
        other.join()
        for client in (again, b):
            client.close()


def test_numbers_of_a_worker_that_has_left_are_not_averaged() -> None:
    with job(5, 1, 2) as j:
        a, b, numbers = j.client(0), j.client(1), torch.tensor([3.0]).double()
        body = memory_of(numbers)
        b._run_in_thread(lambda: b._send(b._ups[0], Kind.MEET, body, clock=1))
        until(lambda: 1 in j.services[0]._waiting_averages)
        b.close()
        until(lambda: list(j.services[0].store.clocks()) == [0])
        assert a.average(torch.tensor([1.0]).double()).tolist() == [1.0]
        a.close()


def frame(kind: Kind, shard: int, clock: int) -> Any:
    header = SimpleNamespace(kind=kind, shard=shard, clock=clock)
    return SimpleNamespace(header=header, body=None)


def test_pulled_parameters_are_as_old_as_their_oldest_shard() -> None:
    client, server = Client.__new__(Client), SimpleNamespace(failures=3)
    client._changed, client._request = threading.Condition(), None
    client._missing, client._low, client._arrived = {0, 1, 2}, float("inf"), None
    for shard, clock in enumerate((5, 3, 4)):
        assert client._arrived is None
        client._on_frame(server, frame(Kind.PARAMETERS, shard, clock))  # type: ignore[arg-type]
    assert (client._arrived, client._missing, server.failures) == (3, None, 0)


def test_only_the_acknowledgement_of_the_current_push_counts() -> None:
    """The acknowledgement of an earlier push may arrive late, after a connection has broken."""
    client, server = Client.__new__(Client), SimpleNamespace(failures=0, push_clock=2)
    client._changed, client._request = threading.Condition(), None
    client._pending = {0, 1}
    for clock, left in ((1, {0, 1}), (2, {1})):
        client._on_frame(server, frame(Kind.TAKEN, 0, clock))  # type: ignore[arg-type]
        assert client._pending == left


def test_optimizer_state_comes_back() -> None:
    with job(20, 2, 1) as j:
        for service in j.services:
            for shard in service.store.shards.values():
                shard.optimizer.param_groups[0]["momentum"] = 0.9
        j.optimizer.param_groups[0]["momentum"] = 0.9
        client = j.client(0)
        j.push(client, 2.0)
        values = [v for _, shard in client.state() for _, name, v in shard]
        assert torch.cat(values).tolist() == [2.0] * 20
        client.close()


def test_fingerprints_of_a_secret_differ_between_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(secrets.VARIABLE, "of the user")

    def fingerprints() -> list[str]:
        """Those of one job of two ranks, which agree on the secret."""
        seen = []

        def live(world: World, rank: int) -> bytes:
            control = MemoryControl(world, rank)
            gather = control.gather

            def watch(value: Any) -> list[Any]:
                seen.append(value)
                return gather(value)

            monkeypatch.setattr(control, "gather", watch)
            return common_secret(rank, 0, control)[1]  # type: ignore[arg-type]

        assert run_ranks(2, live, where="threads") == [b"of the user"] * 2
        return [value for value in seen if isinstance(value, str)]

    first, second = fingerprints(), fingerprints()
    assert len(first) == len(second) == 2
    assert len({*first}) == len({*second}) == 1  # the same on all ranks of a job
    assert not {*first} & {*second}


# ---- strangers, and frames that cannot be ---------------------------------------------------


def test_a_wrong_secret_is_refused() -> None:
    with job(5, 1, 1) as j:
        with pytest.raises(RefusedError, match="OFFBEAT_SECRET must be the same"):
            j.client(0, secret=b"guess")
        j.client(0).close()


def test_strangers_are_not_parsed_and_hold_nobody_up() -> None:
    with job(5, 1, 1) as j:
        silent = socket.create_connection(j.addresses[0])
        liar = socket.create_connection(j.addresses[0])
        assert len(liar.recv(100)) == secrets.NONCE_BYTES
        liar.sendall(pack(Kind.HELLO, 0) + bytes(100))
        assert drained(liar) == b""  # dropped without a word
        client = j.client(0)
        j.push(client, 1.0)
        assert bool((j.held() == -1).all())
        client.close()
        silent.close()
        liar.close()


def drained(sock: socket.socket) -> bytes:
    """What comes until the other end closes, which it may do with bytes of ours unread."""
    data = bytearray()  # linear in the size; the other end gives up on a slow reader
    with contextlib.suppress(ConnectionResetError):
        while more := sock.recv(1 << 16):
            data += more
    return bytes(data)


def _inside(j: Job, rank: int = 0) -> socket.socket:
    """A raw connection of somebody who knows the secret, started."""
    sock = socket.create_connection(j.addresses[0], timeout=5)
    nonce = sock.recv(secrets.NONCE_BYTES, socket.MSG_WAITALL)
    sock.sendall(secrets.answer(SECRET, nonce, secrets.nonce()))
    assert len(sock.recv(secrets.MAC_BYTES, socket.MSG_WAITALL)) == secrets.MAC_BYTES
    hello = pack(Kind.HELLO, rank, meta={"fresh": True, "layout": j.layout.digest})
    sock.sendall(hello + pack(Kind.START, rank))
    assert len(sock.recv(HEADER_BYTES, socket.MSG_WAITALL)) == HEADER_BYTES
    return sock


GOOD = {"settings": [{"lr": 1.0}]}
BODY = bytes(40)
BAD = {
    "version": bytearray(pack(Kind.PUSH, 0, meta=GOOD, body_bytes=40) + BODY),
    "size": pack(Kind.PUSH, 0, meta=GOOD, body_bytes=39) + BODY,
    "shard": pack(Kind.PUSH, 0, shard=7, meta=GOOD, body_bytes=40) + BODY,
    "rank": pack(Kind.PUSH, 1, meta=GOOD, body_bytes=40) + BODY,
    "kind": pack(Kind.WELCOME, 0),
    "settings": pack(Kind.PUSH, 0, meta={"settings": 3}, body_bytes=40) + BODY,
    "setting": pack(Kind.PUSH, 0, meta={"settings": [{"params": 1}]}, body_bytes=40) + BODY,
    "type": pack(Kind.PUSH, 0, meta={"settings": [{"lr": "1"}]}, body_bytes=40) + BODY,
    "number": pack(Kind.PUSH, 0, meta={"settings": [{"lr": float("nan")}]}, body_bytes=40) + BODY,
    "absent": pack(Kind.PUSH, 0, meta={**GOOD, "absent": "x"}, body_bytes=40) + BODY,
}
BAD["version"][4] = 9  # type: ignore[index]


@pytest.mark.parametrize("what", BAD)
def test_a_wrong_message_changes_nothing(what: str) -> None:
    with job(5, 1, 2) as j:
        sock = _inside(j)
        sock.sendall(BAD[what])
        drained(sock)  # words on why, then the end
        assert bool((j.held() == 0).all())
        assert j.services[0].store.clocks() == {0: 0, 1: 0}
        sock.close()


def test_the_reason_of_a_refusal_arrives_after_all_queued_frames() -> None:
    with job(2_000_000, 1, 2, shard_bytes=1 << 20) as j:  # more than sockets buffer
        sock = _inside(j)
        sock.sendall(pack(Kind.PULL, 0) + pack(Kind.WELCOME, 0))
        assert b"WELCOME is not expected now" in drained(sock)
        sock.close()


def test_random_messages_change_nothing_but_by_whole_pushes() -> None:
    """Somebody with the secret sends valid frames with random bytes changed."""
    choose = random.Random(4)
    with job(5, 1, 2, rule="push") as j:
        store, good = j.services[0].store, pack(Kind.PUSH, 0, meta=GOOD, body_bytes=40)
        for _ in range(60):
            clocks, before = store.clocks(), j.held().clone()
            data = bytearray(good)
            for _ in range(choose.randint(1, 3)):
                data[choose.randrange(len(data))] = choose.randrange(256)
            if data[5] in (Kind.BYE, Kind.PUSH):
                data[4] = 77
            sock = _inside(j)
            sock.sendall(bytes(data) + BODY)
            sock.shutdown(socket.SHUT_WR)
            drained(sock)
            sock.close()
            assert torch.equal(j.held(), before)
            assert store.clocks() == clocks


# ---- failures -------------------------------------------------------------------------------


def test_a_broken_connection_is_made_again_and_nothing_counts_twice() -> None:
    with job(40, 2, 1, rule="push") as j:
        client = j.client(0)
        for turn in range(20):
            j.push(client, 1.0, wait=False)
            if turn % 3 == 0:  # pull the plug, in the middle of whatever happens
                for up in client._ups:
                    sock = up.connection.sock if up.connection else None
                    if sock is not None:
                        sock.shutdown(socket.SHUT_RDWR)
        client.settle()
        assert bool((j.held() == -20).all())
        client.close()


def test_a_pull_is_repeated_as_a_whole_after_its_connection_has_broken() -> None:
    """The server sends all its shards again, also a shard that had arrived."""
    with job(40, 1, 2) as j:
        a, b, broken = j.client(0), j.client(1), threading.Event()
        j.push(a, 1.0)
        a.pull(1)

        def lose_connection() -> None:
            assert a._missing is not None
            a._missing.discard(0)
            assert a._ups[0].connection is not None
            a._ups[0].connection.sock.shutdown(socket.SHUT_RDWR)
            broken.set()

        a._run_in_thread(lose_connection)
        assert broken.wait(10.0)
        j.push(b, 3.0)
        a.await_arrival()
        assert a.arrived_clock() == 1
        assert bool((a.incoming[torch.float64] == -2).all())
        for client in (a, b):
            client.close()


@pytest.mark.filterwarnings("ignore:server")
def test_who_is_silent_counts_no_more_and_may_come_back() -> None:
    with job(5, 1, 2, silent_s=1.0) as j:
        a, b = (j.client(rank, beat_s=0.2) for rank in range(2))
        awake = threading.Event()
        b._run_in_thread(awake.wait)  # it hangs
        j.push(a, 1.0)
        assert bool((pulled(a, need=1) == -1).all())  # after the timeout, without the other
        assert list(j.services[0].store.clocks()) == [0]
        awake.set()
        j.push(b, 5.0)  # it wakes up: its gradient counts for the clock that is open now
        j.push(a, 7.0)
        assert bool((pulled(a, need=2) == -7).all())
        for client in (a, b):
            client.close()


def test_a_new_process_of_a_rank_goes_on_where_the_old_one_was() -> None:
    with job(5, 1, 1, rule="push") as j:
        first = j.client(0)
        for _ in range(3):
            j.push(first, 1.0)
        _abandon(first)
        second = j.client(0)
        assert second.clock == 3
        j.push(second, 1.0)
        assert bool((j.held() == -4).all())
        second.close()


def test_buffers_are_averaged_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.server.session.MOST_NUMBERS", 3)
    session, sizes = SSPSession.__new__(SSPSession), list[int]()

    def average(numbers: torch.Tensor) -> torch.Tensor:
        sizes.append(len(numbers))
        return 2 * numbers

    session._client = SimpleNamespace(average=average)  # type: ignore[assignment]
    buffers = [torch.arange(4.0), torch.tensor(7)]
    for held, expected in ((buffers, [3, 2]), ([], [0])):
        sizes.clear()
        session._buffers = lambda held=held: held  # type: ignore[method-assign]
        session._average_buffers()
        assert sizes == expected
    assert buffers[0].tolist() == [0.0, 2.0, 4.0, 6.0]
    assert buffers[1].item() == 14


def test_a_clock_that_another_server_has_given_is_accepted() -> None:
    """That server had removed the worker, and the others had not: they have lower clocks of it."""
    with job(5, 2, 1) as j:
        client = j.client(0)
        j.push(client, 1.0)
        client.settle()
        client.clock = 4
        j.push(client, 2.0)
        assert bool((pulled(client, need=5) == -3).all())
        client.close()


def test_the_second_answer_of_a_request_that_was_repeated_is_ignored() -> None:
    """It was queued while the connection broke, and repeated when it was back."""
    with job(5, 2, 1) as j:
        client = j.client(0)
        for clock in range(3):
            client.pull(0)
            client._run_in_thread(client._send_pulls)
            client.await_arrival()
            client.release_incoming()
            j.push(client, 1.0)
            assert client.average(torch.full((1,), float(clock), dtype=torch.float64)) == clock
            number = client._averages
            client._run_in_thread(
                lambda n=number: [
                    client._send(up, Kind.MEET, memory_of(torch.zeros(0)), clock=n)
                    for up in client._ups
                ]
            )
        assert bool((pulled(client, need=3) == -3).all())
        client.close()


def test_a_worker_whose_frame_takes_long_is_not_silent() -> None:
    with job(5, 1, 1, silent_s=1.0) as j:
        client, [service] = j.client(0, beat_s=60.0), j.services
        pulled(client)
        [peer] = list(service._peers)
        for _ in range(20):  # bytes of a frame arrive, and the frame is not complete
            peer.connection.received_s = time.monotonic()
            service._last_frame_s[0] = -1e9
            j.wake()
            time.sleep(0.02)
        assert list(service.store.clocks()) == [0]
        service._last_frame_s[0] = time.monotonic()
        client.close()


def _abandon(client: Client) -> None:
    """As if its process had been killed."""
    client._closing = True
    client._run_in_thread(lambda: None)
    client._thread.join(5)


@pytest.mark.filterwarnings("ignore:server")
def test_all_workers_gone_without_a_word() -> None:
    j = Job(5, 1, 1, silent_s=0.3)
    _abandon(j.client(0))
    j.end()
    assert "stopped responding (rank 0)" in str(j.errors[0])


def test_a_dead_server_is_an_error_that_names_it() -> None:
    with job(5, 2, 1) as j:
        client = j.client(0, retry_s=0.3, gone="begin again")
        pulled(client)  # both servers know it by now
        service = j.services[1]
        service.store.leave(0)  # its loop ends, and its sockets close
        j.wake()
        until(lambda: not j.threads[1].is_alive())
        until(lambda: client._error is not None)
        with pytest.raises(ServerGoneError, match=r"server 1 at .* cannot be reached.*begin again"):
            client.settle()


def test_a_server_that_closes_every_connection_is_an_error() -> None:
    with job(5, 1, 1) as j:
        client, [service] = j.client(0), j.services
        service._handlers[Kind.START] = lambda peer, _: service._drop(peer)
        assert client._ups[0].connection is not None
        client._ups[0].connection.sock.shutdown(socket.SHUT_RDWR)
        until(lambda: client._error is not None)
        with pytest.raises(ServerGoneError, match=r"server 0 at .* closes every connection"):
            client.settle()


@pytest.mark.long
def test_a_worker_that_reconnects_to_one_server_is_not_silent_for_another() -> None:
    with job(5, 2, 1, silent_s=1.5) as j:
        client = j.client(0, retry_s=3.0, beat_s=0.1)
        pulled(client)
        living, gone = j.services
        gone.store.leave(0)  # its loop ends, and its sockets close
        until(lambda: client._error is not None)
        assert isinstance(client._error, ServerGoneError)
        assert list(living.store.clocks()) == [0]
        assert not living._silent


def test_snapshots_are_whole_and_go_on(tmp_path: Path) -> None:
    with job(20, 2, 1, directory=tmp_path) as j:
        client = j.client(0)
        for _ in range(7):
            j.push(client, 1.0)
        client.close()
        j.end()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [f"server{i}-{clock}" for i in range(2) for clock in (4, 6)]
    with job(20, 2, 1, directory=tmp_path) as again:
        for service in again.services:
            assert service._snapshots is not None
            assert service._snapshots.clocks() == [4, 6]
            service._snapshots.restore(service.store, 6)
        assert bool((again.held() == -6).all())
        client = again.client(0)
        for _ in range(2):
            again.push(client, 1.0)
        client.close()
        again.end()
        assert [service._snapshots.clocks() for service in again.services] == [[6, 8]] * 2
    with job(20, 1, 1, directory=tmp_path) as other:
        snapshots = other.services[0]._snapshots
        assert snapshots is not None
        with pytest.raises(ValueError, match="must be of this model"):
            snapshots.restore(other.services[0].store, 6)


def test_a_snapshot_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its name is on the disk before an older snapshot is removed."""
    done: list[int | str] = []
    older = tmp_path / "server0-2"
    fsync, replace = os.fsync, Path.replace

    def synced(descriptor: int) -> None:
        fsync(descriptor)
        done.append(os.fstat(descriptor).st_ino)

    def replaced(path: Path, target: Path) -> Path:
        done.append(target.name)
        assert older.is_dir()
        return replace(path, target)

    snapshots = Snapshots(tmp_path, 0, 2)
    with job(5, 1, 1) as j, monkeypatch.context() as patch:
        for clock in (2, 4):
            snapshots.save(clock, j.services[0].store)
        patch.setattr(os, "fsync", synced)
        patch.setattr(Path, "replace", replaced)
        snapshots.save(6, j.services[0].store)
    assert not older.exists()
    named = done.index("server0-6")
    assert {path.stat().st_ino for path in (tmp_path / "server0-6").iterdir()} <= {*done[:named]}
    assert done[named + 1 :] == [tmp_path.stat().st_ino]


def test_snapshots_without_a_common_clock_are_kept_apart(tmp_path: Path) -> None:
    """The next snapshot of a job that begins from the start is none of theirs."""
    with job(5, 1, 1, directory=tmp_path) as j:
        client, [service] = j.client(0), j.services
        for clock in (300, 400):
            (tmp_path / f"server0-{clock}").mkdir()
        assert service._snapshots is not None
        with pytest.warns(RuntimeWarning, match=r"\(clock 300, 400\) have no clock that all"):
            service._snapshots.set_aside()
        for _ in range(4):
            j.push(client, 1.0)
        until(lambda: service._snapshots is not None and 4 in service._snapshots.clocks())
        assert service._snapshots.clocks() == [2, 4]
        assert len([*tmp_path.glob("*.unused")]) == 2
        client.close()


def test_a_resumed_server_removes_the_snapshots_of_lost_clocks(tmp_path: Path) -> None:
    """Otherwise a later job could resume one server from this job and another from the lost one."""
    with job(20, 1, 1, directory=tmp_path) as j:
        client = j.client(0)
        for _ in range(6):
            j.push(client, 1.0)
        client.close()
        j.end()
        snapshots = j.services[0]._snapshots
        assert snapshots is not None
        assert snapshots.clocks() == [4, 6]
        snapshots.restore(j.services[0].store, 4)  # another server has no snapshot of clock 6
        assert snapshots.clocks() == [4]


@pytest.mark.parametrize("how", ["torn", "flipped", "empty"])
def test_a_damaged_snapshot_is_named_and_left_out(tmp_path: Path, how: str) -> None:
    with job(20, 1, 1, directory=tmp_path) as j:
        client = j.client(0)
        for _ in range(6):
            j.push(client, 1.0)
        client.close()
        j.end()
    newest = tmp_path / "server0-6"
    file = max(newest.iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    place = data.index(b"\0\0\0\0\0\0\x18\xc0")  # -6.0, a parameter
    data[place + 6] ^= 1
    file.write_bytes({"torn": data[:-100], "flipped": data, "empty": b""}[how])
    snapshots = Snapshots(tmp_path, 0, 2)
    with pytest.warns(RuntimeWarning, match=f"{newest} is damaged") as caught:
        assert snapshots.readable_clocks() == [4]
    assert len(caught) == 1


def test_a_snapshot_holds_all_pushes_of_its_clock(tmp_path: Path) -> None:
    """Those of the slower worker exactly, and of the faster one also those ahead of the clock."""
    with job(2, 1, 2, rule="push", lr=2.0, directory=tmp_path) as j:
        fast, slow = j.client(0), j.client(1)
        for _ in range(4):
            j.push(fast, torch.tensor([-1.0, 0.0], dtype=torch.float64))
        assert list(tmp_path.iterdir()) == []
        for _ in range(2):
            j.push(slow, torch.tensor([0.0, -1.0], dtype=torch.float64))
        fast.close()
        slow.close()
        j.end()
    with job(2, 1, 2, rule="push", directory=tmp_path) as again:
        (service,) = again.services
        assert service._snapshots is not None
        service._snapshots.restore(service.store, 2)
        assert again.held().tolist() == [4.0, 2.0]


def test_training_goes_on_if_a_snapshot_cannot_be_written(tmp_path: Path) -> None:
    """The warning names the snapshot, and the one before stays whole."""
    with job(20, 1, 1, directory=tmp_path) as j, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        client = j.client(0)
        for _ in range(2):
            j.push(client, 1.0)
        (tmp_path / "server0-4.part").write_bytes(b"")  # no directory
        for _ in range(4):
            j.push(client, 1.0)
        assert bool((j.held() == -6).all())
        client.close()
        j.end()
        assert not j.errors
    assert [str(tmp_path / "server0-4") in str(warning.message) for warning in caught] == [True]
    assert sorted(path.name for path in tmp_path.glob("server0-?")) == ["server0-2", "server0-6"]


def test_an_answer_holds_the_parameters_of_its_moment() -> None:
    """A push that the server applies while an answer waits to be sent does not change it."""
    with job(5, 1, 2, rule="push", lr=2.0) as j:
        (shard,) = j.services[0].store.shards.values()
        head, body = j.services[0]._parameters(shard, 0)
        before = bytes(body)
        client = j.client(0)
        j.push(client, 1.0)
        assert bool((j.held() == -1).all())
        assert bytes(body) == before
        assert len(head) == HEADER_BYTES
        client.close()


def test_strangers_are_forgotten_after_a_while() -> None:
    with job(5, 1, 1) as j:
        sock = socket.create_connection(j.addresses[0])
        until(lambda: len(j.services[0]._peers) == 1)
        (peer,) = j.services[0]._peers
        assert len(sock.recv(100)) == secrets.NONCE_BYTES
        peer.connection.sent_s -= 100
        assert sock.recv(100) == b""
        sock.close()


def test_no_acknowledged_update_is_lost() -> None:
    """Workers are killed at random moments and begin anew; each counts in elements of its own,
    which lie in two shards on two servers."""
    workers, lives, size = 3, 8, 10
    with job(workers * size, 2, workers, rule="push", lr=float(workers), shard_bytes=40) as j:
        acknowledged = [0] * workers

        def live(rank: int) -> None:
            choose = random.Random(rank)
            mine = torch.zeros(workers, size, dtype=torch.float64)
            mine[rank] = -1.0
            for _ in range(lives):
                client = j.client(rank)
                for _ in range(choose.randint(0, 6)):
                    j.push(client, mine.flatten())
                    acknowledged[rank] += 1
                j.push(client, mine.flatten(), wait=False)  # nobody hears of this one
                _abandon(client)

        threads = [threading.Thread(target=live, args=(rank,)) for rank in range(workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        held = j.held().view(workers, size)
        for rank, count in enumerate(acknowledged):
            assert count > lives
            assert bool((held[rank] >= count).all())
            assert bool((held[rank] <= count + lives).all())
            assert bool((held[rank] == held[rank].round()).all())
