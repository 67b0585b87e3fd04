"""Ranks with data of unlike lengths end together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import torch
import torch.distributed as dist
from harness.ranks import run_ranks
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

import offbeat
from offbeat.data import DefDP
from offbeat.data.shortest import UNSIZED, _length


class Stream(IterableDataset[int]):
    """Batches without a length; `drawn` of them in all."""

    def __init__(self, count: int):
        self.count, self.drawn = count, 0

    def __iter__(self) -> Iterator[int]:
        for i in range(self.count):
            self.drawn += 1
            yield i


class Boasts(Stream):
    def __len__(self) -> int:
        return self.count + 2


def train_unlike() -> list[object]:
    """Batches seen by epoch, for loaders with and without a length, and whether replicas agree."""
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = offbeat.prepare(model, optimizer, offbeat.BSP(), observe=1, timeout_s=20)
    rank = dist.get_rank()
    seen: list[object] = []
    loaded = DataLoader(Stream(3), batch_size=None)  # its length raises
    some = Stream(4) if rank else [0, 1]
    for loader in (list(range(4 + rank)), Stream(5 - rank), loaded, some):
        joined = offbeat.join(loader, timeout_s=20)
        controls = set()
        for _ in range(2):
            batches = []
            for x in joined:
                optimizer.zero_grad()
                model(torch.full((1, 2), float(x))).sum().backward()
                optimizer.step()
                batches.append(x)
            seen.append(batches)
            controls.add(joined._control)
        assert len(controls) == 1  # epochs share it
    try:
        list(offbeat.join(Boasts(1), timeout_s=20))
    except RuntimeError as error:
        seen.append(str(error))
    model.consolidate()
    return seen


def test_all_end_with_the_shortest() -> None:
    first, second, third = run_ranks(3, train_unlike)
    assert first == second == third
    assert first[:4] == [[0, 1, 2, 3]] * 2 + [[0, 1, 2]] * 2
    assert first[4:6] == [[0, 1, 2]] * 2
    assert first[6:8] == [[0, 1]] * 2  # where some ranks have a length
    assert "must have as many batches as its length says (3), but ended after 1" in first[8]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is asked of the others, who always have another batch."""
    questions: list[Any] = []

    def all_reduce(has: torch.Tensor, **_: Any) -> Any:
        work = Mock()
        questions.append((int(has), work.wait))
        return work

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    return questions


def test_one_ahead(asked: list[Any]) -> None:
    """The others are asked for the next batch before this one is trained on, and waited for in
    words."""
    stream, control = Stream(2), MagicMock()
    batches = offbeat.join(stream)._iterate_unsized(control)
    assert next(batches) == 0
    assert stream.drawn == 2
    assert [has for has, _ in asked] == [1, 1]
    assert [*batches] == [1]
    assert [has for has, _ in asked] == [1, 1, 0]
    assert control.collective.call_count == 3


@pytest.mark.parametrize("drop_last", [True, False])
def test_an_epoch_that_resumes_has_the_batches_that_are_left(drop_last: bool) -> None:
    """The loader's own length is that of a whole epoch."""
    sampler, data = DefDP(32, rank=0, world_size=1), range(32)
    loader = DataLoader(data, batch_size=5, sampler=sampler, drop_last=drop_last)  # type: ignore[arg-type]
    whole = _length(loader)
    sampler.load_state_dict(sampler.state_dict(used=10))
    left = _length(loader)
    assert len(list(loader)) == left == 5 - drop_last
    assert _length(loader) == whole == 7 - drop_last
    other = DataLoader(data, batch_sampler=BatchSampler(sampler, 5, drop_last))  # type: ignore[arg-type]
    assert _length(other) == whole


@pytest.mark.parametrize("drop_last", [True, False])
def test_a_batch_sampler_of_an_epoch_that_resumes_has_the_batches_that_are_left(
    drop_last: bool,
) -> None:
    sampler = DefDP(32, rank=0, world_size=1)
    loader = DataLoader(range(32), batch_sampler=BatchSampler(sampler, 5, drop_last))  # type: ignore[arg-type]
    sampler.load_state_dict(sampler.state_dict(used=10))
    left = _length(loader)
    assert len(list(loader)) == left == 5 - drop_last
    assert _length(loader) == 7 - drop_last


def test_a_loader_of_batches_of_a_stream_has_no_length() -> None:
    """Its batch sampler has a `__len__` that raises, too."""
    assert _length(DataLoader(Stream(3), batch_size=2)) == UNSIZED


def test_a_job_with_servers_cannot_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    monkeypatch.setenv("OFFBEAT_SERVERS", "1")
    with pytest.raises(ValueError, match=r"servers \(1\) must be 0 with offbeat\.join"):
        next(iter(offbeat.join([1, 2])))


def test_alone() -> None:
    assert list(offbeat.join([1, 2])) == [1, 2]
    with pytest.raises(ValueError, match=r"timeout_s \(0\) must be"):
        offbeat.join([1], timeout_s=0)
