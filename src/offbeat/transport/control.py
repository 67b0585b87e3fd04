"""Control: small messages beside the links - agreement between ranks, and who is behind."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore, Store

from offbeat.transport import packed
from offbeat.transport.pulse import GAVE_UP, TOLD, WAITS, Pulse, Words, pulse_of, text_of

_met = 0  # how often this process has met all others
SHOWN = 16  # ranks in a report
STAYS_S = 2.0  # whose store it is waits so long for the others to give up, too
NOBODY = (
    "No rank is missing: all of them live and wait. The network between them may have failed, or "
    "they wait for different things, as when one has less data (see offbeat.join), or when not "
    "every rank calls consolidate, save or load."
)
STORE_IS_SILENT = "The store of rank 0 does not answer: it has failed itself, or its host is gone."


class Control:
    """A group of its own for agreement, so that bulk traffic never holds it up, and a store
    where every rank leaves its progress."""

    def __init__(self, timeout_s: float):
        self.timeout_s = timeout_s
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        try:
            self._count()
            self.group = new_group("gloo", timeout_s)
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.rank} waited {timeout_s:g} s for all {self.world_size} ranks to call "
                f"offbeat.prepare: {error}. See the logs of the others: one may have failed, or "
                "have ended, as a server does when all workers have closed their model"
            ) from error
        self.met = _met  # how often all ranks have met, this time included
        self._pulse: Pulse | None = None
        if self.world_size > 1:
            store = distributed_c10d._get_default_store()
            self._pulse = pulse_of(store, self.rank, self.world_size)
            self._pulse.enter(self.met)
        self.hosts: list[str] = self.gather(socket.gethostname())

    def _count(self) -> None:
        """Meet once more before torch makes a group: it counts them, and who has begun one more
        than the others never finds them again."""
        global _met
        self.meet(f"prepare/{_met}")
        _met += 1

    def meet(self, what: str) -> None:
        """Wait for all ranks in the store, where a wait in vain leaves nothing behind. RuntimeError
        with the ranks that did not come; `what` must be new."""
        if self.world_size == 1:
            return
        store, ranks = self.store(what), [str(rank) for rank in range(self.world_size)]
        store.set(str(self.rank), "")
        try:
            store.wait(ranks, timedelta(seconds=self.timeout_s))
        except RuntimeError as error:
            missing = [rank for rank in ranks if not store.check([rank])]
            store.delete_key(str(self.rank))
            raise RuntimeError(
                f"rank {', '.join(missing)} did not within {self.timeout_s:g} s"
            ) from error

    def close(self, failure: BaseException | None = None) -> None:
        """This rank leaves the others, as it should, or after a failure that is its own."""
        if self._pulse is not None:
            words = None if failure is None else f"failed with {type(failure).__name__}: {failure}"
            self._pulse.exit(words)

    def gather(self, value: Any) -> list[Any]:
        """Everyone's value, by rank: what JSON can hold, and tuples. RuntimeError naming who is
        missing on timeout, ValueError on every rank for what cannot be said."""
        with self.together("exchanging values"):
            return packed.gather(value, self.group)

    def same(self, numbers: Sequence[int]) -> bool:
        """Whether every rank has these numbers (of at most 62 bits): one small collective."""
        mine = torch.tensor([*numbers, *(-n for n in numbers)], dtype=torch.int64)
        largest = mine.clone()
        with self.together("comparing values"):
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group)
        # Equal on every rank or on none: largest and smallest coincide, or they do not.
        return all(int(a) == -int(b) for a, b in zip(*largest.chunk(2), strict=True))

    def agree(self, what: str, value: Any, remedy: str) -> None:
        """ValueError on every rank, naming the ranks that differ, unless all values are equal."""
        values = self.gather(value)
        if all(v == values[0] for v in values):
            return
        odd = next(rank for rank, v in enumerate(values) if v != values[0])
        same = [rank for rank, v in enumerate(values) if v == values[odd]]
        raise ValueError(
            f"{what} must be the same on all ranks: rank 0 has {values[0]}, "
            f"rank {', '.join(map(str, same))} {'has' if len(same) == 1 else 'have'} "
            f"{values[odd]}; {remedy}"
        )

    def store(self, name: str) -> Store:
        """A part of the job's store, in which ranks leave things for each other."""
        return PrefixStore(f"offbeat/{name}", distributed_c10d._get_default_store())

    # ---- who it was ---------------------------------------------------------------------------

    def publish(self, iteration: int) -> None:
        """Let the others know this rank's progress, soon."""
        if self._pulse is not None:
            self._pulse.iteration = iteration

    def doing(self, words: str) -> None:
        """Let the others know what this rank does now, soon: "in forward"."""
        if self._pulse is not None:
            self._pulse.words = words

    @contextmanager
    def waiting(self, words: Words) -> Iterator[None]:
        """What is done within waits for other ranks."""
        pulse = self._pulse
        if pulse is None:
            yield
            return
        state, doing = pulse.state, pulse.words
        pulse.state = WAITS
        pulse.words = lambda: f"{text_of(doing)}, {text_of(words)}"
        try:
            yield
        finally:
            if pulse.state == WAITS:
                pulse.state, pulse.words = state, doing

    @contextmanager
    def together(self, words: str) -> Iterator[None]:
        """A collective of all ranks. What the backend raises says who it was, too."""
        begun_s = time.monotonic()
        with self.waiting(words):
            try:
                yield
            except RuntimeError as error:
                why = self.behind(waited_s=time.monotonic() - begun_s)
                raise RuntimeError(f"ranks could not agree, {words}: {error}. {why}") from error

    @property
    def over(self) -> bool:
        """Whether another rank has failed, or has given up: nobody need wait any longer."""
        return self._pulse is not None and self._pulse.over

    def behind(self, waiting_in: int | None = None, waited_s: float = 0.0) -> str:
        """Words on who it was that this rank has waited for in vain, so long; and on what every
        rank did last. A rank that gave up `waiting_in` an iteration says so first. Takes up to 3 s:
        who has died just now is not silent yet."""
        pulse = self._pulse
        if pulse is None:
            return ""
        if waiting_in is not None:
            pulse.iteration = waiting_in
        gave_up = f"gave up {pulse.text}"
        pulse.say(GAVE_UP, gave_up)
        pulse.wait()
        culprits = pulse.culprits(waited_s)
        words = [f"Rank {self._at(rank)} {pulse.why(rank)}." for rank in culprits]
        if pulse.lost_s is not None:
            words.append(STORE_IS_SILENT)
        elif not words:
            words.append(NOBODY)
        words.append(self._last_heard(pulse))
        pulse.say(TOLD, gave_up, culprits)
        pulse.stay(STAYS_S)
        return " ".join(words)

    def _at(self, rank: int) -> str:
        return f"{rank} ({self.hosts[rank] if hasattr(self, 'hosts') else '?'})"

    def _last_heard(self, pulse: Pulse) -> str:
        """Of ranks that say the same, only the first few."""
        now_s, shown = time.monotonic(), []
        for rank, heard in enumerate(pulse.heard[:SHOWN]):
            age_s = now_s - heard.beat_s
            shown.append(f"rank {self._at(rank)}: {heard}, {age_s:.0f} s ago")
        if self.world_size > SHOWN:
            shown.append(f"and {self.world_size - SHOWN} more")
        return "Last heard of: " + "; ".join(shown) + "."


def new_group(
    backend: str, timeout_s: float, parts: Sequence[Sequence[int]] = ()
) -> dist.ProcessGroup:
    """A process group over all ranks, or over this rank's part of them."""
    mine, timeout = None, timedelta(seconds=timeout_s)
    for part in parts or [range(dist.get_world_size())]:  # every rank must make every group
        group = dist.new_group(list(part), backend=backend, timeout=timeout)
        mine = group if dist.get_rank() in part else mine
    assert isinstance(mine, dist.ProcessGroup)
    return mine
