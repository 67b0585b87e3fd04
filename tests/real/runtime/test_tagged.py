"""Control messages as messages between two ranks, beside the collectives of a script."""

from __future__ import annotations

import threading
from collections import defaultdict
from itertools import product
from math import ceil, log2
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.ranks import run_ranks

from offbeat.core.transport import control as control_module
from offbeat.core.transport.control import Control
from offbeat.core.transport.tagged import TAG, all_gather_sized, broadcast

TIMES = 40


class Wire:
    """Messages between threads, in order for each pair of ranks."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        pairs = product(range(ranks), repeat=2)
        self._queues: dict[tuple[int, int], Queue[torch.Tensor]] = {pair: Queue() for pair in pairs}
        self.sent: dict[int, list[int]] = defaultdict(list)  # bytes, by sender

    def group(self, rank: int) -> Any:
        def send(tensors: list[torch.Tensor], target: int, tag: int) -> Any:
            assert tag == TAG
            self.sent[rank].append(tensors[0].nbytes)
            self._queues[rank, target].put(tensors[0].clone())
            return SimpleNamespace(wait=lambda: None)

        def recv(tensors: list[torch.Tensor], source: int, tag: int) -> Any:
            assert tag == TAG
            arrived = self._queues[source, rank]
            return SimpleNamespace(wait=lambda: tensors[0].copy_(arrived.get(timeout=20)))

        sizes = {"rank": lambda: rank, "size": lambda: self.ranks}
        return SimpleNamespace(send=send, recv=recv, **sizes)

    def run(self, act: Any) -> list[Any]:
        """Return the results of `act(rank, group)` in one thread per rank."""
        results: dict[int, Any] = {}

        def life(rank: int) -> None:
            results[rank] = act(rank, self.group(rank))

        threads = [threading.Thread(target=life, args=(rank,)) for rank in range(self.ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [results[rank] for rank in range(self.ranks)]


@pytest.mark.parametrize("ranks", range(1, 10))
def test_every_rank_has_the_rows_of_all(ranks: int) -> None:
    wire = Wire(ranks)
    expected = [bytes([rank]) * 24 for rank in range(ranks)]
    tables = wire.run(lambda rank, group: all_gather_sized(expected[rank], [24] * ranks, group))
    assert tables == [expected] * ranks
    for rank in range(1, ranks):
        assert len(wire.sent[rank]) == ceil(log2(ranks))
        assert sum(wire.sent[rank]) == 24 * (ranks - 1)


@pytest.mark.parametrize("ranks", range(1, 10))
def test_a_broadcast_reaches_every_rank_from_any(ranks: int) -> None:
    for source in range(ranks):
        wire = Wire(ranks)

        def act(rank: int, group: Any, source: int = source) -> list[int]:
            tensor = torch.arange(4) if rank == source else torch.zeros(4, dtype=torch.int64)
            broadcast(tensor, source, group)
            return tensor.tolist()

        assert wire.run(act) == [[0, 1, 2, 3]] * ranks
        assert sum(map(len, wire.sent.values())) == ranks - 1


@pytest.mark.parametrize(
    ("owns", "backend", "group"),
    [(True, "gloo", "default"), (True, "nccl", "own"), (False, "gloo", "own")],
)
def test_control_uses_the_default_group_only_if_offbeat_has_created_it(
    monkeypatch: pytest.MonkeyPatch, owns: bool, backend: str, group: str
) -> None:
    """The group of a script may have another timeout and another interface."""
    groups = SimpleNamespace(group=SimpleNamespace(WORLD="default"), get_backend=lambda: backend)
    monkeypatch.setattr(control_module, "dist", groups)
    made: Any = SimpleNamespace(_owns_default=owns, create_group=lambda: "own")
    assert Control._open_group(made) == group


# ---- in worlds ------------------------------------------------------------------------------


def talk_beside_a_thread() -> tuple[list[float], list[list[int]], list[float], bool, bool]:
    """Return the results of collectives in a thread of the script, and of control messages of the
    same group, size and type at the same time."""
    dist.init_process_group("gloo")
    control = Control(20.0, owns_default=True)
    assert control.group is dist.group.WORLD
    rank, sums = dist.get_rank(), list[float]()

    def use_default_group() -> None:
        for i in range(TIMES):
            values = torch.full((3,), float(rank + i), dtype=torch.float64)
            dist.all_reduce(values)
            sums.append(values[0].item())

    thread = threading.Thread(target=use_default_group)
    thread.start()
    rows = [control.gather([rank, i]) for i in range(TIMES)]
    thread.join()
    same = control.is_same([7, 1 << 62]), control.is_same([7, rank])
    found = sums, rows[-1], *same
    control.close()
    return found


def test_collectives_of_the_script_do_not_mix_with_control_messages() -> None:
    for sums, last, same, other in run_ranks(3, talk_beside_a_thread):
        assert sums == [3.0 + 3 * i for i in range(TIMES)]
        assert last == [[rank, TIMES - 1] for rank in range(3)]
        assert same
        assert not other
