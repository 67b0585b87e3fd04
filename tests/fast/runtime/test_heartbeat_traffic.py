"""Traffic of the heartbeat at the store, and what ranks learn from rank 0."""

from __future__ import annotations

import gc
import socket
import threading
from contextlib import closing

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from offbeat.core.runtime.prepare import TIMEOUT_S
from offbeat.core.transport import heartbeat
from offbeat.core.transport.failure_detector import (
    ABORTED,
    FAILED,
    LEFT,
    MAX_EXCHANGES_PER_S,
    RECEIVED_BYTES,
    RUNNING,
    WAITING,
    interval_s,
)
from offbeat.core.transport.heartbeat import Heartbeat

PREFIX = f"default_pg/offbeat/{'0' * 16}/offbeat/heartbeat/1"  # of a job that `prepare` connects
ACTIVITY = "in backward, waiting for grad of bucket layers.10.fc2 on link 'net' in iteration 812"
SENT_BYTES = 110  # most bytes of an exchange that the host of the store sends
SEGMENT_BYTES = 66  # headers of a TCP segment: Ethernet, IP, TCP with timestamps


class CountedStore:
    """A client of a store in memory that counts the bytes and segments of TCPStore's protocol."""

    def __init__(self, values: dict[str, bytes]) -> None:
        self.values = values
        self.requests = self.responses = 0  # bytes
        self.segments = [0, 0]  # of requests, of responses

    def _count(self, request: int, response: int) -> None:
        self.requests += request
        self.responses += response
        self.segments[0] += 1
        self.segments[1] += response > 0

    def _size(self, key: str) -> int:
        return 8 + len(f"/{PREFIX}/{key}")

    def set(self, key: str, value: str | bytes) -> None:
        self.values[key] = value.encode() if isinstance(value, str) else value
        self._count(1 + self._size(key) + 8 + len(self.values[key]), 0)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        value = self.values.get(key, expected.encode())
        self._count(1 + self._size(key) + 16 + len(expected) + len(desired), 8 + len(value))
        return value

    def check(self, keys: list[str]) -> bool:
        self._count(9 + sum(map(self._size, keys)), 1)
        return all(key in self.values for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values = [self.values[key] for key in keys]
        request = 9 + sum(map(self._size, keys))
        self._count(request, 1)  # TCPStore waits for the keys first
        self._count(request, sum(8 + len(value) for value in values))
        return values


def make_ranks(world_size: int) -> tuple[list[CountedStore], list[Heartbeat]]:
    """Heartbeats without threads."""
    values: dict[str, bytes] = {}
    stores = [CountedStore(values) for _ in range(world_size)]
    ranks = [Heartbeat(store, rank, world_size) for rank, store in enumerate(stores)]
    return stores, ranks


def exchange(ranks: list[Heartbeat]) -> None:
    for one in ranks:
        one._exchange_heartbeats()


class Clock:
    """Monotonic time of the heartbeats, and the times of their next exchanges."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.next_s: dict[Heartbeat, float] = {}

    def run(self, ranks: list[Heartbeat], seconds: float) -> None:
        """Let ranks exchange as their threads do, at different times within an interval."""
        end_s = self.now_s + seconds
        step_s = min(ranks[0].detector.interval_s / 4, seconds)
        while self.now_s < end_s:
            for one in ranks:
                first_s = self.now_s + step_s * (one.detector.rank % 4)
                if self.now_s >= self.next_s.setdefault(one, first_s):
                    one._exchange_heartbeats()
                    detector = one.detector
                    pause_s = detector.interval_s if detector.rank else detector.poll_s
                    self.next_s[one] = self.now_s + pause_s
            self.now_s += step_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: clock.now_s)
    return clock


@pytest.mark.long
@pytest.mark.parametrize("world_size", [2, 8, 32, 64, 128, 256])
def test_traffic_is_bounded(world_size: int, clock: Clock) -> None:
    """The host of the store, that of rank 0, sends and receives at most the stated rates."""
    stores, ranks = make_ranks(world_size)
    pause_s = ranks[0].detector.interval_s
    clock.run(ranks, 3 * pause_s)
    for store in stores:
        store.requests = store.responses = 0
        store.segments = [0, 0]
    sent_bits = received_bits = 0.0
    start_s, states = clock.now_s, (RUNNING, WAITING)
    for i in range(4):  # every activity changes between two exchanges
        for rank, one in enumerate(ranks):
            one.iteration, one.state = 800 + i, states[(i + rank) % 2]
            one.activity = ACTIVITY
        clock.run(ranks, pause_s)
    for store in stores[1:]:
        acknowledged = store.segments[1]  # a response acknowledges the requests before it
        received_bits += 8 * (store.requests + SEGMENT_BYTES * (store.segments[0] + acknowledged))
        sent_bits += 8 * (store.responses + SEGMENT_BYTES * store.segments[1])
    seconds = clock.now_s - start_s
    assert sent_bits / seconds <= 8 * SENT_BYTES * (world_size - 1) / pause_s
    assert sent_bits / seconds <= 115_000
    most = 8 * RECEIVED_BYTES * (world_size - 1) / pause_s
    assert 0.75 * most <= received_bits / seconds <= most
    assert received_bits / seconds <= 490_000
    assert all(not one.detector.failed_peers() for one in ranks)


def test_counted_bytes_are_those_of_tcp_store() -> None:
    """The same exchanges over a socket that counts."""
    counted = [0, 0]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        forward = threading.Thread(target=_forward, args=(server, store.port, counted))
        forward.start()
        client = dist.TCPStore("127.0.0.1", server.getsockname()[1], wait_for_workers=False)
        ranks = [
            Heartbeat(PrefixStore(PREFIX, one), rank, 2) for rank, one in enumerate((store, client))
        ]
        counters, copies = make_ranks(2)
        for one in 3 * (ranks, copies):  # until the table keeps its version
            exchange(one)
        assert client.check(["key"]) is False  # its response follows all of the bytes before
        before, expected = [*counted], (counters[1].requests, counters[1].responses)
        for _ in range(3):
            for one in (ranks, copies):
                exchange(one)
        assert client.check(["key"]) is False
        check = (9 + 8 + len("/key"), 1)
        found = [now - then - own for now, then, own in zip(counted, before, check, strict=True)]
        assert found == [counters[1].requests - expected[0], counters[1].responses - expected[1]]
        del client, ranks
        gc.collect()
        forward.join(10)


def _forward(server: socket.socket, port: int, counted: list[int]) -> None:
    """Connect the only client with the port, and count the bytes in both directions."""

    def copy(source: socket.socket, target: socket.socket, direction: int) -> None:
        while data := source.recv(1 << 16):
            counted[direction] += len(data)
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)

    inner, _ = server.accept()
    with inner, socket.create_connection(("127.0.0.1", port)) as outer:
        responses = threading.Thread(target=copy, args=(outer, inner, 1))
        responses.start()
        copy(inner, outer, 0)
        responses.join()


# ---- summaries of rank 0 ---------------------------------------------------------------------


def test_only_rank_0_reads_all_heartbeats(clock: Clock) -> None:
    stores, ranks = make_ranks(4)
    clock.run(ranks, 5.0)
    reads = [store.responses for store in stores]
    clock.run(ranks, 0.5)
    assert all(
        after - before < 30
        for before, after in zip(reads[1:], [s.responses for s in stores[1:]], strict=True)
    )


@pytest.mark.parametrize("end", ["is killed", LEFT])
def test_after_rank_0_nobody_reads_heartbeats(end: str, clock: Clock) -> None:
    """The store outlives rank 0, as with torchrun. Rank 0 is the suspect, and no rank that ends
    after it."""
    _, ranks = make_ranks(4)
    clock.run(ranks, 2.0)
    if end == LEFT:
        ranks[0].stop()
    clock.run(ranks[1:], 2.75)
    clock.run(ranks[2:], 4.0)
    for one in ranks[2:]:
        assert one.detector.failed_peers() == ([0] if end == "is killed" else [])
        assert one.detector.suspects(0.0) == [0]


def test_rank_0_returns_after_a_pause(clock: Clock) -> None:
    _, ranks = make_ranks(3)
    clock.run(ranks, 2.0)
    clock.run(ranks[1:], 4.0)
    assert [one.detector.failed_peers() for one in ranks[1:]] == [[0], [0]]
    clock.run(ranks, 2.0)
    assert [one.detector.failed_peers() for one in ranks] == [[], [], []]


def test_pause_of_rank_0_makes_no_other_rank_silent(clock: Clock) -> None:
    _, ranks = make_ranks(3)
    clock.run(ranks, 2.0)
    for _ in range(16):
        clock.run(ranks[1:], 0.125)
        assert [one.detector.failed_peers() for one in ranks[1:]] == [[], []]
    clock.run(ranks[1:], 0.875)
    assert [one.detector.failed_peers() for one in ranks[1:]] == [[0], [0]]


def test_time_until_a_killed_rank_is_silent(clock: Clock) -> None:
    """After the timeout, for all ranks, with its last status."""
    _, ranks = make_ranks(8)
    clock.run(ranks, 2.0)
    ranks[5].iteration, ranks[5].activity = 7, "in forward"
    clock.run(ranks, 0.5)
    left = [one for one in ranks if one is not ranks[5]]
    start_s = clock.now_s
    found: dict[int, float] = {}
    while clock.now_s < start_s + 4:
        clock.run(left, 0.125)
        for one in left:
            if one.detector.failed_peers():
                found.setdefault(one.detector.rank, clock.now_s - start_s)
    assert found.keys() == {one.detector.rank for one in left}
    assert min(found.values()) >= ranks[0].detector.timeout_s - ranks[0].detector.interval_s
    assert max(found.values()) <= 3.0
    for one in left:
        assert one.detector.failed_peers() == [5]
        assert "last heard: iteration 7, in forward" in one.detector.describe_suspect(5)


def test_late_rank_that_returns_is_not_silent(clock: Clock) -> None:
    _, ranks = make_ranks(3)
    clock.run(ranks, 2.0)
    clock.run(ranks[:2], 2.0)
    assert ranks[1].detector.statuses[2].is_late
    for _ in range(30):
        clock.run(ranks, 0.125)
        assert [one.detector.failed_peers() for one in ranks] == [[], [], []]
    assert not ranks[1].detector.statuses[2].is_late


def test_reason_of_a_failed_rank_arrives_within_one_interval(clock: Clock) -> None:
    """And one read of rank 0."""
    _, ranks = make_ranks(4)
    clock.run(ranks, 2.0)
    ranks[2].publish(FAILED, "failed with KeyError: 'x'")
    ranks[1].publish(ABORTED, "gave up")
    left = [ranks[0], ranks[3]]
    clock.run(left, 0.625 + 0.125)
    for one in left:
        assert one.detector.needs_abort
        assert one.detector.describe_suspect(2) == "failed with KeyError: 'x'"


def test_a_rank_that_has_just_died_is_found_by_a_report(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, ranks = make_ranks(3)
    clock.run(ranks, 2.0)
    exchange([ranks[0], ranks[2]])  # the last heartbeat of rank 2
    monkeypatch.setattr(heartbeat.time, "sleep", lambda seconds: clock.run(ranks[:1], seconds))
    ranks[1].wait_for_failed_peers()
    assert ranks[1].detector.failed_peers() == [2]


def test_table_is_read_for_a_new_version_only(clock: Clock) -> None:
    stores, ranks = make_ranks(3)
    clock.run(ranks, 3.0)
    tables: list[str] = []
    read = stores[2].compare_set
    stores[2].compare_set = lambda key, *rest: (tables.append(key), read(key, *rest))[1]  # type: ignore[method-assign]
    ranks[1].state, ranks[1].activity, ranks[1].iteration = WAITING, ACTIVITY, 9
    clock.run(ranks, 3.0)
    assert {*tables} == {heartbeat.DIGEST}
    ranks[1].publish(ABORTED, "gave up")
    clock.run(ranks, 3.0)
    assert tables.count(heartbeat.TABLE) == 1


def test_a_request_that_is_overdue_is_a_lost_store(clock: Clock) -> None:
    """It may never return. The store is lost from the start of the request."""
    detector, start_s = heartbeat.FailureDetector(1, 3), clock.now_s
    with detector.track_store_request():
        clock.now_s += heartbeat.STORE_TIMEOUT_S
        assert detector.store_lost_s is None
        clock.now_s += 0.1
        assert detector.store_lost_s == start_s
        assert detector.store_readers() == []
    assert detector.store_lost_s is None


def test_interval_grows_with_the_number_of_ranks() -> None:
    assert interval_s(64) == 0.5
    assert interval_s(512) == 512 / MAX_EXCHANGES_PER_S == 4.0
    assert interval_s(1024) == interval_s(100_000) == 8.0


def test_failures_of_large_jobs_are_detected_before_waits_end() -> None:
    """The detector needs a heartbeat of each rank, and rank 0 reads it half an interval later."""
    for ranks in (64, 1024, 8192, 100_000):
        detector = heartbeat.FailureDetector(0, ranks)
        assert detector.poll_s <= 4.0
        assert detector.timeout_s + detector.interval_s + detector.poll_s < TIMEOUT_S
