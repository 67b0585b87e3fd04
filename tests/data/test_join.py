"""Ranks with data of unlike lengths end together."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from worlds import run_world

import offbeat


class Stream:
    """Batches without a length."""

    def __init__(self, count: int):
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))


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
    for loader in (list(range(4 + rank)), Stream(5 - rank), Stream(3)):
        joined = offbeat.join(loader, timeout_s=20)
        for _ in range(2):
            batches = []
            for x in joined:
                optimizer.zero_grad()
                model(torch.full((1, 2), float(x))).sum().backward()
                optimizer.step()
                batches.append(x)
            seen.append(batches)
    try:
        list(offbeat.join(Boasts(1), timeout_s=20))
    except RuntimeError as error:
        seen.append(str(error))
    model.consolidate()
    return seen


def test_all_end_with_the_shortest() -> None:
    first, second, third = run_world(train_unlike, 3)
    assert first == second == third
    assert first[:4] == [[0, 1, 2, 3]] * 2 + [[0, 1, 2]] * 2
    assert first[4:6] == [[0, 1, 2]] * 2
    assert "must have as many batches as its length says (3), but ended after 1" in first[6]


def test_alone() -> None:
    assert list(offbeat.join([1, 2])) == [1, 2]
    with pytest.raises(ValueError, match=r"timeout_s \(0\) must be"):
        offbeat.join([1], timeout_s=0)
