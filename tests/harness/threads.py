"""A job in one process: ranks are threads, and links are memory.

For tests of the runtime itself, on real modules and hooks, without sockets. Messages take the
time of a copy, so whatever order the threads run in must give the same numbers.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from offbeat.core.transport.collectives import Collectives, shards
from offbeat.core.transport.device import CPU
from offbeat.core.transport.link import LinkThread
from offbeat.core.transport.packed import pack, unpack
from offbeat.plan import VERBS, Groups, groups_of

TIMEOUT_S = 20.0


class Meeting:
    """Where the ranks of one group meet for one operation after the other."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        self._condition = threading.Condition()
        self._given: dict[int, dict[int, Any]] = defaultdict(dict)
        self._result: dict[int, Any] = {}
        self._turn = dict.fromkeys(self.ranks, 0)

    def meet(self, rank: int, value: Any, combine: Callable[[dict[int, Any]], Any]) -> Any:
        """What `combine` makes of all values, by rank; TimeoutError if somebody is missing."""
        with self._condition:
            turn = self._turn[rank]
            self._turn[rank] += 1
            self._given[turn][rank] = value
            if len(self._given[turn]) == len(self.ranks):
                self._result[turn] = combine(self._given.pop(turn))
                self._condition.notify_all()
            if not self._condition.wait_for(lambda: turn in self._result, TIMEOUT_S):
                missing = set(self.ranks) - set(self._given[turn])
                raise TimeoutError(f"rank {rank} waited for the ranks {sorted(missing)}")
            return self._result[turn]


class World:
    """The meetings of one job of so many ranks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._lock = threading.Lock()
        self._meetings: dict[Any, Meeting] = {}

    def meeting(self, name: Any, ranks: Iterable[int]) -> Meeting:
        """The same object for every rank that asks for it."""
        with self._lock:
            return self._meetings.setdefault((name, tuple(ranks)), Meeting(tuple(ranks)))


class MemoryControl:
    """Agreement between the threads; as `transport.control.Control`."""

    def __init__(self, world: World, rank: int) -> None:
        self.rank, self.world_size, self.timeout_s = rank, world.size, TIMEOUT_S
        self.hosts = [f"host{r}" for r in range(world.size)]
        self._meeting = world.meeting("control", range(world.size))

    def gather(self, value: Any) -> list[Any]:
        given = self._meeting.meet(
            self.rank, pack(value), lambda given: [given[r] for r in range(self.world_size)]
        )
        return [unpack(data, rank) for rank, data in enumerate(given)]

    def share_first(self, value: Any) -> Any:
        return self.gather(value)[0]

    def agree(self, what: str, value: Any, remedy: str) -> None:
        assert len({str(v) for v in self.gather(value)}) == 1, what

    def set_iteration(self, iteration: int) -> None:
        pass

    def set_activity(self, activity: str) -> None:
        pass

    def waiting(self, words: object) -> AbstractContextManager[None]:
        return nullcontext()

    has_members = False
    needs_abort = False

    def report_failure(self, waiting_in: int | None = None, waited_s: float = 0.0) -> str:
        return ""


def memory_links(
    world: World,
    rank: int,
    names: Iterable[str],
    groups: Mapping[str, Groups] | None = None,
) -> dict[str, LinkThread]:
    """One rank's links; every rank must make the same ones."""
    return {
        name: LinkThread(
            name, _collectives(world, rank, name, groups_of(name, groups or {})), CPU()
        )
        for name in names
    }


def _collectives(world: World, rank: int, name: str, groups: Groups) -> Collectives:
    everyone = tuple(range(world.size))
    mine = next((group for group in groups if rank in group), everyone)
    meeting = world.meeting(name, mine)

    def combined(verb: str) -> Callable[[Tensor], None]:
        def act(tensor: Tensor) -> None:
            tensor.data.copy_(meeting.meet(rank, tensor.clone(), _COMBINE[verb]))

        return act

    def send(tensor: Tensor, source: int, target: int) -> None:
        pair = world.meeting((name, source, target), (source, target))
        result = pair.meet(rank, tensor.clone(), lambda given: given[source])
        if rank == target:
            tensor.copy_(result)

    def exchange(tensor: Tensor) -> None:
        given = meeting.meet(rank, tensor.clone(), dict)
        own = mine.index(rank)
        tensor.copy_(torch.cat([shards(given[r], len(mine))[own] for r in mine]))

    def swap(tensor: Tensor, one: int, other: int) -> None:
        pair = world.meeting((name, one, other), (one, other))
        given = pair.meet(rank, tensor.clone(), dict)
        tensor.copy_(given[other if rank == one else one])

    by_verb = {verb: combined(verb) for verb in VERBS if verb not in ("send", "exchange")}
    return Collectives(by_verb, send, exchange, mine.index(rank), len(mine), swap=swap)  # type: ignore[arg-type]


def _mean(given: dict[int, Tensor]) -> Tensor:
    return torch.stack([given[r] for r in sorted(given)]).sum(0) / len(given)


def _scattered(given: dict[int, Tensor]) -> Tensor:
    """Ranks must not use more than their own shard, so all may see the whole mean."""
    return _mean(given)


def _gathered(given: dict[int, Tensor]) -> Tensor:
    ranks = sorted(given)
    parts = [shards(given[r], len(ranks))[k] for k, r in enumerate(ranks)]
    return torch.cat(parts)


_COMBINE = {
    "all_reduce": _mean,
    "reduce_scatter": _scattered,
    "all_gather": _gathered,
    "broadcast": lambda given: given[min(given)],
}


def run_threads(size: int, life: Callable[..., Any], *args: Any) -> list[Any]:
    """Results of `life(world, rank, *args)` on every rank, each in a thread; the first error is
    raised."""
    world, results, errors = World(size), [None] * size, []

    def one(rank: int) -> None:
        try:
            results[rank] = life(world, rank, *args)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * TIMEOUT_S)
    if errors:
        raise errors[0]
    assert all(not thread.is_alive() for thread in threads), "a rank hangs"
    return results
