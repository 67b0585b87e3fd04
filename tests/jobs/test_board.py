"""Board: intervals and samples of two ranks in one store, which may be lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import HashStore
from torch.distributed.distributed_c10d import PrefixStore

from offbeat.core.measuring.replica_sample import SampledElements
from offbeat.jobs import board
from offbeat.jobs.board import THREAD_NAME, Board
from offbeat.jobs.interval import Interval

RANKS = 2


class Control:
    """What a board needs to know of its job."""

    world_size, met = RANKS, 1

    def __init__(self, rank: int):
        self.rank = rank


def interval(rank: int, first: int) -> Interval:
    return Interval(rank, first, 1, float(first), 1.0, 1.0, 1.0, {0: 1}, 1.0, 0.0, 0.0)


def until(true: Callable[[], Any]) -> None:
    end_s = time.monotonic() + 30
    while not true():
        assert time.monotonic() < end_s
        time.sleep(0.005)


def is_running() -> bool:
    return any(thread.name == THREAD_NAME for thread in threading.enumerate())


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[HashStore]:
    """The default store of the job. No thread is left in the end."""
    store = HashStore()
    monkeypatch.setattr(board.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(board, "ROUND_S", 0.01)
    yield store
    until(lambda: not is_running())


def test_rank_0_has_the_newest_interval_of_every_rank(store: HashStore) -> None:
    """At once, and the last ones of a job in a last round."""
    rounds: list[dict[int, int]] = []

    def note(newest: Any, _: float | None) -> None:
        rounds.append({rank: one.first for rank, one in newest.items()})

    first = Board(Control(0), note)  # type: ignore[arg-type]
    other = Board(Control(1), None)  # type: ignore[arg-type]
    other.post(interval(1, 5))
    until(lambda: rounds and rounds[-1] == {1: 5})
    first.post(interval(0, 7))
    until(lambda: rounds[-1] == {0: 7, 1: 5})
    other.post(interval(1, 9))
    other.close()
    assert PrefixStore("offbeat/intervals/1", store).check(["1"])
    first.post(interval(0, 11))
    first.close()
    assert rounds[-1] == {0: 11, 1: 9}
    assert not is_running()


@pytest.mark.usefixtures("store")
def test_divergence_is_that_of_all_parameters() -> None:
    """The mean squared distance of a sample, times the parameters per sampled one."""
    replicas = [torch.randn(4096, dtype=torch.float64) for _ in range(RANKS)]
    elements = [SampledElements([replica]) for replica in replicas]
    found: list[float | None] = []
    first = Board(Control(0), lambda _, divergence: found.append(divergence))  # type: ignore[arg-type]
    other = Board(Control(1), None)  # type: ignore[arg-type]
    for each, sampled in zip((first, other), elements, strict=True):
        each.post_sample(3, sampled)
    until(lambda: found and found[-1] is not None)
    rows = np.stack([sampled.numbers().numpy() for sampled in elements])
    expected = 4096 / 256 * ((rows - rows.mean(0)) ** 2).sum(1).mean()
    assert found[-1] == pytest.approx(expected)
    first.close()
    other.close()


@pytest.mark.usefixtures("store")
def test_a_lost_store_ends_the_thread_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(*_: Any) -> None:
        raise RuntimeError("the store is gone")

    monkeypatch.setattr(board.PrefixStore, "set", lose)
    other = Board(Control(1), None)  # type: ignore[arg-type]
    other.post(interval(1, 0))
    until(lambda: not is_running())
    other.post(interval(1, 1))
    other.close()


def test_no_connection_to_the_store_ends_the_thread_in_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The members of a job may change again before a board has its connection."""

    class Lost:
        def clone(self) -> None:
            raise RuntimeError("the store is gone")

    monkeypatch.setattr(board.distributed_c10d, "_get_default_store", Lost)
    other = Board(Control(1), None)  # type: ignore[arg-type]
    other.post(interval(1, 0))
    until(lambda: not is_running())
    other.close()
