"""Decisions of the handler of SIGTERM, without signals: exact iterations, and who ends when."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore
from torch.distributed.distributed_c10d import PrefixStore

from offbeat.jobs import stopping
from offbeat.jobs.stopping import StopRequest

pytestmark = pytest.mark.timeout(60)


def until(true: Callable[[], Any]) -> None:
    end_s = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end_s
        time.sleep(0.005)


class Rank:
    """A rank with a request, whose signal is never passed on."""

    def __init__(self, rank: int, ranks: int, store: HashStore):
        self.ends: list[str] = []
        self.passed: list[int] = []
        self.saves: list[int] = []
        self.stores = 0
        detector = SimpleNamespace(
            rank=rank,
            statuses=[SimpleNamespace(state="running")] * ranks,
            failed_peers=list,
            store_lost_s=None,
        )
        control: Any = SimpleNamespace(
            rank=rank,
            world_size=ranks,
            met=1,
            detector=detector,
            waiting=lambda _: nullcontext(),
            store=lambda name: self.open_store(PrefixStore(name, store)),
        )
        self.request = StopRequest(control, lambda how, text: self.ends.append(f"{how}: {text}"))
        self.request._pass_on = lambda: self.passed.append(rank)  # type: ignore[method-assign]

    def open_store(self, store: PrefixStore) -> PrefixStore:
        self.stores += 1
        return store

    def attach(self, iteration: int, **session: Any) -> None:
        facts = {"alone": False, "elsewhere": None, "observing": False, **session}
        made: Any = SimpleNamespace(iteration=iteration, **facts)
        self.request.attach(made, self.save)

    def save(self) -> Any:
        self.saves.append(1)
        return SimpleNamespace(wait=lambda: "kept/5")

    def signal(self) -> None:
        """Let the thread read what Python writes at a signal."""
        self.request._wake(signal.SIGTERM)

    def await_request(self) -> None:
        until(lambda: self.request._requester is not None)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Function that creates the ranks of a job."""
    monkeypatch.setattr(StopRequest, "_install", lambda _: None)
    monkeypatch.setattr(StopRequest, "_uninstall", lambda _: None)
    monkeypatch.setattr(StopRequest, "_is_installed", True)
    monkeypatch.setattr(stopping, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(stopping, "WATCH_EVERY_S", 0.01)
    monkeypatch.setattr(stopping, "STORE_LINGER_S", 0.0)
    monkeypatch.setattr(stopping, "END_S", 0.05)
    made: list[Rank] = []

    def create(count: int) -> list[Rank]:
        store = HashStore()
        made.extend(Rank(rank, count, store) for rank in range(count))
        return made

    yield create
    for one in made:
        one.request.close()
    until(lambda: not any(t.name == stopping.THREAD_NAME for t in threading.enumerate()))
    for one in made:
        one.request._signals.close()
        one.request._wakeup.close()


def test_a_rank_ends_the_iteration_in_progress_and_no_other(ranks: Any) -> None:
    (rank,) = ranks(1)
    rank.attach(4)
    rank.request.on_iteration_end(4)
    rank.signal()
    rank.await_request()
    assert rank.ends == []
    rank.request.on_iteration_end(5)
    assert rank.ends == [
        "signal: Rank 0 received SIGTERM. Stopped after 5 iterations; the checkpoint is kept/5"
    ]
    assert (rank.passed, rank.saves) == ([0], [1])


def test_a_rank_that_measures_the_profile_saves_no_checkpoint(ranks: Any) -> None:
    (rank,) = ranks(1)
    rank.attach(2, observing=True)
    rank.signal()
    rank.await_request()
    rank.request.on_iteration_end(3)
    assert rank.saves == []
    assert rank.ends[0].endswith("the measurement of the profile has not ended")


def test_no_rank_leaves_before_all_have_saved(ranks: Any) -> None:
    """The last iteration is the largest one in progress, and both save after it."""
    first, second = ranks(2)
    first.attach(4)
    second.attach(7)
    first.signal()
    first.await_request()
    second.await_request()
    first.request.on_iteration_end(5)  # waits for the agreement, and goes on
    assert (first.ends, first.request._last) == ([], 8)
    thread = threading.Thread(target=first.request.on_iteration_end, args=(8,))
    thread.start()
    until(first.request._saved.is_set)
    assert not first.request._all_saved.wait(0.1)
    assert first.passed == []
    second.request.on_iteration_end(8)
    thread.join(20)
    for rank in (first, second):
        assert rank.passed == [rank.request._control.rank]
        assert rank.ends[0].startswith(
            "signal: Rank 0 received SIGTERM. Stopped after 8 iterations"
        )


@pytest.mark.parametrize("session", [{"alone": True}, {"elsewhere": "servers keep it"}])
def test_ranks_that_do_not_wait_for_each_other_stop_alone(ranks: Any, session: Any) -> None:
    first, second = ranks(2)
    first.attach(4, **session)
    second.attach(4, **session)
    first.signal()
    first.await_request()
    first.request.on_iteration_end(5)
    assert (first.passed, second.passed, first.stores) == ([0], [], 0)
    assert second.request._requester is None


def test_a_second_signal_counts_after_some_seconds(
    ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launchers send one to the process, and one to its group, at the same time."""
    (rank,) = ranks(1)
    rank.attach(4)
    rank.signal()
    rank.await_request()
    rank.request._read_signals(bytes([signal.SIGTERM]))
    assert rank.request._reason_to_end_now() is None
    monkeypatch.setattr(stopping, "SECOND_S", 0.0)
    rank.signal()
    until(lambda: rank.ends)
    assert rank.ends[0].endswith("Ended after 4 iterations: a second SIGTERM has arrived")


def test_a_closed_model_ends_what_was_requested(ranks: Any) -> None:
    (rank,) = ranks(1)
    rank.attach(4)
    rank.signal()
    rank.await_request()
    rank.request.close()
    assert rank.ends == ["signal: Rank 0 received SIGTERM. the model was closed"]
    assert rank.passed == [0]
    rank.request._handle()  # by a handler of the script that calls the previous one
    assert rank.passed == [0, 0]


def test_a_fork_ends_nothing(ranks: Any, tmp_path: Path) -> None:
    (rank,) = ranks(1)
    rank.attach(4)
    rank.signal()
    rank.await_request()
    child = os.fork()
    if not child:
        rank.request.close()
        (tmp_path / "ends").write_text("".join(rank.ends))
        os._exit(len(rank.passed))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (tmp_path / "ends").read_text() == ""
    rank.request.on_iteration_end(5)
    assert len(rank.ends) == 1
