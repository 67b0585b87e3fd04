"""Heartbeat and failure detector: suspects and states that ranks derive from heartbeats."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.ranks import run_ranks
from torch._C._distributed_c10d import HashStore
from torch.distributed.distributed_c10d import PrefixStore

import offbeat
from offbeat.core.transport import failure_detector, heartbeat, rendezvous
from offbeat.core.transport.control import Control
from offbeat.core.transport.failure_detector import (
    ABORTED,
    FAILED,
    LEFT,
    REPORTED,
    RUNNING,
    WAITING,
    FailureDetector,
    RankStatus,
)
from offbeat.core.transport.heartbeat import Heartbeat

RANKS = 4
LONG_S = 60.0  # limit of waits that end before it


class Store:
    """Store in memory that can stop responding or break the connection."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.gone = False
        self.responds = threading.Event()
        self.responds.set()

    def _respond(self) -> None:
        self.responds.wait()
        if self.gone:
            raise RuntimeError("Broken pipe")

    def set(self, key: str, value: str | bytes) -> None:
        self._respond()
        self.values[key] = value.encode() if isinstance(value, str) else value

    def compare_set(self, key: str, expected: str, _: str) -> bytes:
        self._respond()
        return self.values.get(key, expected.encode())

    def check(self, keys: list[str]) -> bool:
        self._respond()
        return all(key in self.values for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self._respond()
        return [self.values[key] for key in keys]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Store, list[Heartbeat]]]:
    """Heartbeats of four ranks that have read each other; rank 3 is the observer."""
    monkeypatch.setattr(failure_detector, "INTERVAL_S", 0.02)
    for module in (heartbeat, failure_detector):
        monkeypatch.setattr(module, "STORE_TIMEOUT_S", 0.2)
    monkeypatch.setattr(failure_detector, "HEARTBEAT_TIMEOUT_S", 0.8)
    monkeypatch.setattr(failure_detector, "MAX_READS_PER_S", 1e9)
    store = Store()
    heartbeats = [Heartbeat(store, rank, RANKS) for rank in range(RANKS)]
    for one in heartbeats:
        one.start()
    until(
        lambda: (
            all(status.sequence >= 0 for status in heartbeats[0].detector.statuses)
            and all(one.detector.round > 2 for one in heartbeats)
        )
    )
    yield store, heartbeats
    store.gone = True
    store.responds.set()
    for one in heartbeats:
        one.stop()


def until(true: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 10
    while not true():
        assert time.monotonic() < end_s
        time.sleep(0.01)


@contextmanager
def returns_early() -> Iterator[None]:
    """Fail if the body takes longer than half of `LONG_S`: it waited for its limit."""
    start_s = time.monotonic()
    yield
    assert time.monotonic() - start_s < LONG_S / 2


def read_status(one: Heartbeat, rank: int) -> RankStatus:
    """Status of a rank in the table, which only a failure report reads while all ranks run."""
    one._table = None
    one._exchange_heartbeats()
    return one.detector.statuses[rank]


def stop_thread(one: Heartbeat) -> None:
    one._stopped.set()


def test_update_ignores_a_known_sequence_number() -> None:
    """A new iteration changes `changed_s`; a known sequence number changes nothing."""
    status = RankStatus(sequence=0)
    found = []
    for now_s, sequence, iteration in [(1.0, 1, 5), (2.0, 2, 6), (3.0, 3, 6), (4.0, 3, 6)]:
        status.update(now_s, sequence, [iteration, RUNNING, "in forward", []])
        found.append((status.iteration, status.received_s, status.changed_s))
    assert found == [(5, 1.0, 1.0), (6, 2.0, 2.0), (6, 3.0, 2.0), (6, 3.0, 2.0)]


def test_a_state_that_is_published_within_a_wait_outlasts_it() -> None:
    one = Heartbeat(Store(), 0, 2)
    with one.waiting("waiting for a message"):
        assert one.state == WAITING
    assert (one.state, one.activity) == (RUNNING, heartbeat.IN_SCRIPT)
    with one.waiting("waiting for a message"):
        one.publish(ABORTED, "gave up")
    assert (one.state, one.activity) == (ABORTED, "gave up")


def test_waiting_ranks_are_not_suspects(ranks: tuple[Store, list[Heartbeat]]) -> None:
    _, heartbeats = ranks
    for one in heartbeats:
        one.state = WAITING
    time.sleep(1.0)
    assert read_status(heartbeats[3], 0).state == WAITING
    assert heartbeats[3].detector.suspects(waited_s=0.5) == []
    assert not heartbeats[3].detector.needs_abort


def test_silent_rank_is_suspect(ranks: tuple[Store, list[Heartbeat]]) -> None:
    _, heartbeats = ranks
    heartbeats[1].iteration, heartbeats[1].activity = 7, "in forward"
    until(lambda: read_status(heartbeats[3], 1).iteration == 7)
    stop_thread(heartbeats[1])
    heartbeats[3].wait_for_failed_peers()
    assert heartbeats[3].detector.suspects(waited_s=0.0) == [1]
    assert (
        heartbeats[3].detector.describe_suspect(1).endswith("last heard: iteration 7, in forward")
    )


def test_hanging_rank_is_suspect_and_waiting_ranks_are_not(
    ranks: tuple[Store, list[Heartbeat]],
) -> None:
    _, heartbeats = ranks
    heartbeats[0].state = heartbeats[1].state = heartbeats[3].state = WAITING
    time.sleep(1.0)
    assert read_status(heartbeats[3], 0).state == WAITING
    assert heartbeats[3].detector.suspects(waited_s=0.6) == [2]
    assert "keeps the others waiting: in its script" in heartbeats[3].detector.describe_suspect(2)
    assert (
        heartbeats[3].detector.suspects(waited_s=60.0) == []
    )  # unchanged for less than half of waited_s


def test_failed_rank_is_suspect(ranks: tuple[Store, list[Heartbeat]]) -> None:
    _, heartbeats = ranks
    heartbeats[0].publish(FAILED, "failed with KeyError: 'x'")
    heartbeats[0].stop()  # its last heartbeat stays in the store
    until(lambda: heartbeats[3].detector.needs_abort)
    assert heartbeats[3].detector.suspects(waited_s=0.0) == [0]
    assert heartbeats[3].detector.describe_suspect(0) == "failed with KeyError: 'x'"


def test_aborted_rank_is_not_suspect(ranks: tuple[Store, list[Heartbeat]]) -> None:
    _, heartbeats = ranks
    heartbeats[0].publish(ABORTED, "gave up in backward")
    stop_thread(heartbeats[2])
    heartbeats[3].wait_for_failed_peers()
    assert heartbeats[3].detector.needs_abort
    assert not heartbeats[0].detector.needs_abort  # a rank ignores its own state
    assert heartbeats[3].detector.suspects(waited_s=0.0) == [2]


def fail_alone() -> None:
    raise RuntimeError("DataLoader timed out: Connection to gloo closed")


def fail_in_own_wait() -> None:
    control = Control.__new__(Control)
    control._heartbeat = None
    with control.waiting("waiting"):
        raise RuntimeError("x")


def fail_in_torch_wait() -> None:
    raise dist.DistNetworkError("x")


def fail_in_torch_function() -> None:
    # A plain RuntimeError of a collective has its innermost frame in this module of torch.
    scope = {"__name__": "torch.distributed.distributed_c10d"}
    exec("def collective(): raise RuntimeError('x')", scope)
    scope["collective"]()


def fail_as_a_consequence() -> None:
    try:
        fail_in_own_wait()
    except RuntimeError as error:
        raise KeyError("x") from error


@pytest.mark.parametrize(
    ("fail", "published"),
    [
        (fail_alone, {FAILED}),
        (fail_in_own_wait, {ABORTED, REPORTED}),
        (fail_in_torch_wait, {ABORTED, REPORTED}),
        (fail_in_torch_function, {ABORTED, REPORTED}),
        (fail_as_a_consequence, {ABORTED, REPORTED}),
    ],
)
def test_error_of_a_wait_publishes_aborted(
    ranks: tuple[Store, list[Heartbeat]],
    monkeypatch: pytest.MonkeyPatch,
    fail: Callable[[], None],
    published: set[str],
) -> None:
    """A process that ends with another exception publishes that it has failed."""
    own, found = uncaught(ranks[1][0], monkeypatch, fail)
    assert found == published
    observer = ranks[1][3].detector
    until(lambda: observer.needs_abort)
    assert (0 in observer.suspects(waited_s=0.0)) == (FAILED in published)
    assert own.state in published


def uncaught(
    own: Heartbeat, monkeypatch: pytest.MonkeyPatch, fail: Callable[[], None]
) -> tuple[Heartbeat, set[str]]:
    """Call the exception hook of a process with the heartbeat `own`; return published states."""
    publish, found = own.publish, set[str]()
    monkeypatch.setattr(
        own, "publish", lambda state, *rest: (found.add(state), publish(state, *rest))
    )
    monkeypatch.setattr(heartbeat, "_heartbeats", [(None, own)])
    monkeypatch.setattr(heartbeat, "_previous_excepthook", lambda *_: None)
    try:
        fail()
    except Exception as error:
        monkeypatch.setattr(sys, "last_value", error, raising=False)
        heartbeat._on_uncaught_exception(type(error), error, error.__traceback__)
    return own, found


def test_wait_of_torch_publishes_aborted(
    ranks: tuple[Store, list[Heartbeat]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error in the C++ code of torch leaves the state that was set before the wait."""
    control = Control.__new__(Control)
    control._heartbeat = ranks[1][0]
    control.set_wait_in_torch(None)
    assert ranks[1][0].state == RUNNING
    control.set_wait_in_torch("in backward, waiting for DDP's gradients")
    assert uncaught(ranks[1][0], monkeypatch, fail_alone)[1] == {ABORTED, REPORTED}


@pytest.mark.parametrize("interrupted", ["before", "while"])
def test_signal_handler_that_raises_in_the_exception_hook(
    ranks: tuple[Store, list[Heartbeat]], monkeypatch: pytest.MonkeyPatch, interrupted: str
) -> None:
    """The exception that ends the process is published at its exit."""
    own = ranks[1][0]
    exchange, signals = own._exchange_heartbeats, [SystemExit(143)]

    def publish(*status: Any) -> None:
        if interrupted == "while":
            own.state, own.activity = status[:2]
        raise signals.pop()

    with monkeypatch.context() as context:
        context.setattr(own, "_exchange_heartbeats", lambda: None)
        context.setattr(own, "publish", publish)
        uncaught(own, context, fail_alone)
    assert not signals
    monkeypatch.setattr(heartbeat, "_heartbeats", [(None, own)])
    monkeypatch.setattr(own, "_exchange_heartbeats", exchange)
    monkeypatch.setattr(sys, "last_value", RuntimeError("DataLoader timed out"), raising=False)
    monkeypatch.setattr(own, "keep_store_open", lambda *_: None)
    heartbeat._on_process_exit()
    until(lambda: ranks[1][3].detector.statuses[0].state == FAILED)
    assert "DataLoader timed out" in ranks[1][3].detector.statuses[0].activity


def test_fork_publishes_nothing(
    ranks: tuple[Store, list[Heartbeat]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fork of the process of a rank inherits the heartbeat object and the exit hooks."""
    own, hooks = ranks[1][0], list[Callable[[], None]]()
    monkeypatch.setattr(heartbeat.atexit, "register", hooks.append)
    calls = list[int]()
    heartbeat.run_at_process_exit(lambda: calls.append(1))
    stop_thread(own)
    process_id = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: process_id + 1)
    assert uncaught(own, monkeypatch, fail_alone)[1] == set()
    own.publish(FAILED, "in the fork")
    heartbeat._on_process_exit()
    hooks[0]()
    assert calls == []
    monkeypatch.setattr(os, "getpid", lambda: process_id)
    hooks[0]()
    assert calls == [1]
    time.sleep(0.1)
    assert ranks[1][3].detector.statuses[0].state == RUNNING


def test_rank_that_left_is_suspect(ranks: tuple[Store, list[Heartbeat]]) -> None:
    _, heartbeats = ranks
    heartbeats[1].iteration = 5
    heartbeats[1].stop()
    until(lambda: heartbeats[3].detector.statuses[1].state == LEFT)
    time.sleep(1.0)
    assert heartbeats[3].detector.suspects(waited_s=0.1) == [1]
    assert heartbeats[3].detector.describe_suspect(1) == "has left after iteration 5"
    heartbeats[2].stop("failed with ValueError: x")  # precedes a rank that left
    until(lambda: heartbeats[3].detector.needs_abort)
    assert heartbeats[3].detector.suspects(waited_s=0.1) == [2]
    assert heartbeats[3].detector.describe_suspect(2) == "failed with ValueError: x"


def test_suspects_of_other_ranks_count(ranks: tuple[Store, list[Heartbeat]]) -> None:
    """Rank 0 reports a suspect before its store is lost."""
    store, heartbeats = ranks
    stop_thread(heartbeats[2])
    heartbeats[0].publish(REPORTED, "gave up", suspects=[2])
    until(lambda: heartbeats[3].detector.statuses[0].state == REPORTED)
    assert heartbeats[3].detector.needs_abort
    heartbeats[2].publish(RUNNING, "in its script")  # it was stopped for some time
    assert heartbeats[2].detector.suspects(waited_s=60.0) == []
    store.gone = True
    until(lambda: heartbeats[3].detector.store_lost_s is not None)
    assert heartbeats[3].detector.suspects(waited_s=0.0) == [2]


def test_rank_0_is_suspect_if_the_store_is_lost(ranks: tuple[Store, list[Heartbeat]]) -> None:
    store, heartbeats = ranks
    store.gone = True
    until(lambda: heartbeats[3].detector.store_lost_s is not None)
    time.sleep(1.0)  # all heartbeats time out, but only rank 0 is suspect
    assert heartbeats[3].detector.suspects(waited_s=0.0) == [0]
    # The network between the two ranks may be cut, so rank 3 does not know that rank 0 has died.
    assert "died" not in heartbeats[3].detector.describe_suspect(0)
    assert heartbeats[0].detector.suspects(waited_s=0.0) == []  # a rank never suspects itself


def test_end_of_rank_0_explains_the_loss_of_its_store(
    ranks: tuple[Store, list[Heartbeat]],
) -> None:
    store, heartbeats = ranks
    detector = heartbeats[3].detector
    heartbeats[0].stop()
    until(lambda: detector.statuses[0].state == LEFT)
    store.gone = True
    until(lambda: detector.store_lost_s is not None)
    assert not detector.has_unexplained_store_loss
    assert detector.suspects(waited_s=0.0) == [0]
    assert detector.describe_suspect(0) == "has left after iteration -1"


def test_wait_for_failed_peers_finds_a_peer_that_has_just_died(
    ranks: tuple[Store, list[Heartbeat]],
) -> None:
    """The wait ends without failed peers, too, and keeps the suspects that were published."""
    _, heartbeats = ranks
    heartbeats[0].publish(ABORTED, "gave up")
    with returns_early():
        heartbeats[0].wait_for_failed_peers()
    assert heartbeats[0].detector.failed_peers() == []
    stop_thread(heartbeats[2])
    heartbeats[0].wait_for_failed_peers()
    assert heartbeats[0].detector.failed_peers() == [2]
    heartbeats[0].publish(ABORTED, "gave up", suspects=[1])
    heartbeats[0].wait_for_failed_peers()
    until(lambda: heartbeats[3].detector.statuses[0].suspects == (1,))


def test_a_known_failure_ends_the_wait_for_failed_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Heartbeat(Store(), 0, 3)
    one.detector.statuses[1].state = FAILED
    monkeypatch.setattr(one, "_publish", lambda: True)
    without_sleep = SimpleNamespace(monotonic=time.monotonic)
    monkeypatch.setattr(heartbeat, "time", without_sleep)
    one.wait_for_failed_peers()


def test_error_in_an_activity_is_not_a_lost_store(
    ranks: tuple[Store, list[Heartbeat]],
) -> None:
    _, heartbeats = ranks

    def describe() -> str:
        raise RuntimeError("dictionary changed size during iteration")

    heartbeats[1].activity = describe
    heartbeats[1].iteration = 7
    until(lambda: read_status(heartbeats[3], 1).iteration == 7)
    assert heartbeats[1].detector.store_lost_s is None
    assert "dictionary changed size" in heartbeats[3].detector.statuses[1].activity
    heartbeats[1].activity = "in forward"
    until(lambda: read_status(heartbeats[3], 1).activity == "in forward")


def test_live_rank_that_others_suspect_has_not_died(
    ranks: tuple[Store, list[Heartbeat]],
) -> None:
    _, heartbeats = ranks
    heartbeats[2].publish(WAITING, "waits")
    heartbeats[0].publish(REPORTED, "gave up", suspects=[2])
    detector = heartbeats[3].detector
    until(lambda: detector.suspects(waited_s=0.0) == [2])
    # A busy machine delays heartbeats by more than the intervals of this test.
    until(lambda: "is a suspect of rank 0" in detector.describe_suspect(2))
    stop_thread(heartbeats[2])
    until(lambda: "died" in detector.describe_suspect(2))


@pytest.mark.parametrize("world_size", [2, 128, 512, 600, 4096])
def test_timeout_exceeds_two_intervals(world_size: int) -> None:
    """A heartbeat is published once per interval and read up to one interval later."""
    detector = FailureDetector(0, world_size)
    assert detector.timeout_s > 2 * detector.interval_s
    for status in detector.statuses:
        status.received_s -= 2 * detector.interval_s
    assert detector.failed_peers() == []


def test_start_of_store_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss starts with the failed request; a store that has responded is not lost."""
    monkeypatch.setattr(failure_detector, "STORE_TIMEOUT_S", -1)
    answers, lost = Heartbeat(Store(), 0, 1), Heartbeat(Store(), 0, 1)
    answers._exchange_heartbeats()
    assert answers.detector.store_lost_s is None
    request_s = []

    def fails(*_: str) -> None:
        request_s.append(time.monotonic())
        raise RuntimeError("Connection reset by peer")

    lost._store.set = fails
    lost._exchange_heartbeats()
    assert lost.detector.store_lost_s is not None
    assert lost.detector.store_lost_s <= request_s[0]


def test_store_that_stops_responding(ranks: tuple[Store, list[Heartbeat]]) -> None:
    store, heartbeats = ranks
    store.responds.clear()
    time.sleep(1.0)
    with returns_early():
        heartbeats[3].publish(ABORTED, "gave up")
    assert heartbeats[3].detector.suspects(waited_s=0.0) == [0]


def test_rank_0_keeps_its_store_open(
    ranks: tuple[Store, list[Heartbeat]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the other ranks have reported, left or died."""
    _, heartbeats = ranks
    stop_thread(heartbeats[1])
    heartbeats[2].publish(LEFT, "has left")
    heartbeats[3].publish(ABORTED, "gave up")  # and still reads the store
    report = threading.Timer(0.5, heartbeats[3].publish, (REPORTED, "gave up"))
    report.start()
    with returns_early():
        heartbeats[0].keep_store_open(LONG_S)
    assert heartbeats[0].detector.statuses[3].state == REPORTED
    assert heartbeats[0].detector.failed_peers() == [1]
    heartbeats[2].publish(RUNNING, "hangs")
    with returns_early():
        heartbeats[0].keep_store_open(LONG_S, excluded=[2])
    heartbeats[2].publish(LEFT, "has left")
    heartbeats[3].state = RUNNING
    with returns_early():
        heartbeats[1].keep_store_open(LONG_S)  # rank 1 hosts no store
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        heartbeats[0].keep_store_open(LONG_S)


def test_heartbeats_of_other_process_groups_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of one process group are independent of each other: a model may be closed alone."""
    monkeypatch.setattr(heartbeat, "_heartbeats", [])
    monkeypatch.setattr(heartbeat, "_install_exit_hooks", lambda: None)
    store, other = HashStore(), HashStore()
    first, second = (heartbeat.open_heartbeat(store, name, 0, 1) for name in "12")
    first.stop()
    assert (first.state, second.state) == (LEFT, RUNNING)
    third = heartbeat.open_heartbeat(other, "1", 0, 1)
    assert second.state == LEFT
    assert second._stopped.is_set()
    assert third.state == RUNNING
    third.stop()


# ---- restarts -------------------------------------------------------------------------------


def meet(store: HashStore, attempt: str, ranks: int = 3) -> list[str]:
    """What every rank leaves and finds in its part of the store."""
    found: list[str] = []

    def come(rank: int) -> None:
        part = rendezvous.create_prefix(store, rank, ranks, timeout_s=10)
        assert not part.check([f"said/{rank}"])  # nobody was here before
        part.set(f"said/{rank}", attempt)
        until(lambda: part.check([f"said/{r}" for r in range(ranks)]))
        found.extend(part.get(f"said/{r}").decode() for r in range(ranks))

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return found


def test_every_attempt_has_a_part_of_the_store_of_its_own() -> None:
    store = HashStore()
    assert meet(store, "first") == ["first"] * 9
    store.set("offbeat/here/1", "of one that has died since")
    assert meet(store, "second") == ["second"] * 9


def test_a_rank_meets_rank_0_after_an_earlier_process_of_its_number() -> None:
    """Rank 0 may have answered a process that has died, before its successor connects."""
    store = HashStore()
    store.set("offbeat/here/1", "dead")
    with ThreadPoolExecutor() as pool:
        meets = [pool.submit(rendezvous.create_prefix, store, 0, 2, 10.0)]
        until(lambda: store.check(["offbeat/welcome/dead"]))
        meets.append(pool.submit(rendezvous.create_prefix, store, 1, 2, 10.0))
        first, second = (one.result() for one in meets)
    first.set("key", "value")
    assert second.get("key") == b"value"


def test_the_last_moment_is_not_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous.secrets, "token_hex", lambda _: "drawn")
    store = HashStore()
    store.set("offbeat/in/drawn/1", "")
    rendezvous.create_prefix(store, 0, 2, timeout_s=-1)


def test_a_rank_that_has_stopped_waiting_is_not_missing() -> None:
    store = HashStore()

    def meet_control(rank: int, timeout_s: float) -> None:
        control = SimpleNamespace(
            rank=rank, world_size=3, timeout_s=timeout_s, store=lambda _: PrefixStore("wait", store)
        )
        Control.meet(control, "wait")  # type: ignore[arg-type]

    for rank, words in ((0, "rank 1, 2 did not within"), (1, "rank 2 did not within")):
        with pytest.raises(RuntimeError, match=words):
            meet_control(rank, 0.05)
    with pytest.raises(RuntimeError, match="rank 0, 1 stopped waiting earlier"):
        meet_control(2, 0.05)
    with ThreadPoolExecutor() as pool:  # the same wait can be repeated
        list(pool.map(meet_control, range(3), [LONG_S] * 3))


def test_a_rank_that_comes_as_the_wait_ends_is_not_missing() -> None:
    class Late(PrefixStore):
        def wait(self, _keys: list[str], _: object) -> None:
            self.set("1", "")
            raise RuntimeError("wait timeout")

    store = Late("wait", HashStore())
    control = SimpleNamespace(rank=0, world_size=2, timeout_s=0.05, store=lambda _: store)
    Control.meet(control, "wait")  # type: ignore[arg-type]
    assert store.check(["0", "1"])


def train_after_another_job() -> list[float]:
    """Rank 1 connects to the store of a job that ends; rank 0 then hosts a store on its port."""
    rank = int(os.environ["RANK"])
    if rank == 0:
        other = dist.TCPStore(
            "127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=True, wait_for_workers=False
        )
        until(lambda: other.check(["offbeat/here/1"]))  # rank 1 has written to it
        time.sleep(0.1)  # and reads
        del other
        gc.collect()
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = offbeat.prepare(model, optimizer, "bsp", observe=1, timeout_s=20)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.full((1, 2), rank + 1.0)).sum().backward()
        optimizer.step()
    model.close()
    return [w for p in model.parameters() for w in p.flatten().tolist()]


def test_rank_connects_again_if_the_store_of_another_job_goes() -> None:
    first, second = run_ranks(2, train_after_another_job)
    assert first == second


@pytest.mark.parametrize(("rank", "words"), [(0, "rank 1, 2 have not"), (1, "rank 0 has not")])
def test_who_does_not_come_is_named(rank: int, words: str) -> None:
    with pytest.raises(TimeoutError, match=words):
        rendezvous.create_prefix(HashStore(), rank, 3, timeout_s=0.2)
