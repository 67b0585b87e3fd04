"""Links between the replicas of a rehearsal: collectives in memory, in the order of real links."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from offbeat.core.plan import Groups, Transfer, Verb
from offbeat.core.plan.semantics import is_finite
from offbeat.core.transport.collectives import (
    Collective,
    Collectives,
    Levels,
    shards,
    two_levels,
)
from offbeat.core.transport.device import Device
from offbeat.core.transport.link import Contents, Fate, Message, MessageLink
from offbeat.core.transport.topology import Topology
from offbeat.rehearsal.turns import Turns

EXCHANGE_S = 60.0  # longest wait within a collective; the threads of all its ranks run


@dataclass(slots=True, eq=False)
class MemoryMessage(Message):
    """Message whose wait passes the turn on.

    `given` is whether this rank has released the message or passed over it.
    """

    turns: Turns = field(kw_only=True)
    given: bool = False

    def wait(self, timeout_s: float) -> bool:
        t = self.transfer
        self.turns.wait_until(
            lambda: self.done,
            lambda: f"{t.payload} on link {t.link!r} in iteration {self.iteration}",
        )
        return True


class MemoryLink(MessageLink):
    """Link of one rank of a rehearsal.

    Args:
        name: name of the link or channel.
        rank: rank of the link.
        group: ranks of its collectives.
        act: its collectives.
        network: queues of all links.
        device: device of the marks.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        group: tuple[int, ...],
        act: Collectives,
        network: MemoryNetwork,
        device: Device,
    ) -> None:
        super().__init__(name, act, device)
        self.rank, self.group, self._network = rank, group, network

    def enqueue(
        self, transfer: Transfer, iteration: int, contents: Contents | None = None
    ) -> Message:
        order, self._next_order = self._next_order, self._next_order + 1
        turns = self._network.turns
        message = MemoryMessage(transfer, iteration, order, contents, turns=turns)
        self._network.queues[self.name, self.rank].append(message)
        return message

    def close(self, timeout_s: float = 2.0) -> bool:
        return True

    def _submit(self, message: Message) -> None:
        assert isinstance(message, MemoryMessage)
        message.given = True
        self._network.advance(self.name, self.rank)

    # ---- called by the network ---------------------------------------------------------------

    def send(self, message: Message) -> None:
        """Run one message with its codec and its guard, while all other ranks run theirs."""
        self._send(message)

    def count(self, message: Message) -> None:
        """Count the bytes of a message that the network has run without codec and guard."""
        verb, act = message.transfer.verb, self.collectives
        self._count(message, sum(act.sent_bytes(verb, x.nbytes) for x in message.tensors))

    def finish(self, message: Message, start: Any) -> None:
        """Let the waits for a message return."""
        message.start, message.end = start, self._device.mark()
        message.arrive(message.error)


class MemoryNetwork:
    """Queues of all links of all ranks.

    A message runs when it is the first one of its link on all its ranks, and all of them have
    released it. The last of these ranks runs it.

    Attributes:
        ranks: number of ranks.
        turns: turns of the ranks.
        topology: nodes of the ranks.
        queues: messages that have not run, by link and rank, in the order of the link.
    """

    def __init__(self, topology: Topology, turns: Turns) -> None:
        self.topology, self.turns, self.ranks = topology, turns, topology.ranks
        self.queues: dict[tuple[str, int], deque[MemoryMessage]] = defaultdict(deque)
        self._links: dict[tuple[str, int], MemoryLink] = {}
        self._meetings: dict[tuple[str, tuple[int, ...]], _Meeting] = {}
        self._pool: ThreadPoolExecutor | None = None

    def open(
        self, name: str, rank: int, parts: Groups, device: Device, nodes: Topology | None = None
    ) -> MemoryLink:
        """Return a link of one rank.

        Args:
            name: name of the link or channel.
            rank: the rank.
            parts: groups of its collectives; () for one group of all ranks.
            device: device of the marks.
            nodes: nodes that send each message once; None: every rank sends its own messages.
        """
        group = next((part for part in parts if rank in part), tuple(range(self.ranks)))
        if nodes is None:
            act = self.collectives(name, rank, group)
        else:
            act = self._two_levels(name, rank, nodes)
        self._links[name, rank] = link = MemoryLink(name, rank, group, act, self, device)
        self.queues[name, rank].clear()
        return link

    def close(self) -> None:
        """Stop the threads of the network."""
        if self._pool is not None:
            self._pool.shutdown()

    def advance(self, name: str, rank: int) -> None:
        """Run all messages of a link that can run after a rank has released one."""
        pending = deque([rank])
        while pending:
            ranks = self._ready_ranks(name, pending.popleft())
            if ranks:
                messages = [self.queues[name, one].popleft() for one in ranks]
                self._run([self._links[name, one] for one in ranks], messages)
                pending.extend(ranks)

    def _ready_ranks(self, name: str, rank: int) -> tuple[int, ...]:
        """Return the ranks of the first message of a rank if all have released it; otherwise ()."""
        queue = self.queues[name, rank]
        if not queue:
            return ()
        t, iteration = queue[0].transfer, queue[0].iteration
        ranks = t.ranks if t.ranks is not None else self._links[name, rank].group
        for one in ranks:
            other = self.queues[name, one]
            if not (other and other[0].given and other[0].iteration == iteration):
                return ()
            if other[0].transfer.id != t.id:
                return ()
        return ranks

    # ---- one message ------------------------------------------------------------------------

    def _run(self, links: Sequence[MemoryLink], messages: Sequence[MemoryMessage]) -> None:
        start = links[0]._device.mark()
        if messages[0].fate is not Fate.SKIPPED and not self._run_directly(links, messages):
            self._run_together(links, messages)
        for link, message in zip(links, messages, strict=True):
            link.finish(message, start)

    def _run_directly(self, links: Sequence[MemoryLink], messages: Sequence[MemoryMessage]) -> bool:
        """Run a message without a codec. Return False if it has a codec, or if a guard needs to
        find the ranks with values that are not finite."""
        t = messages[0].transfer
        if messages[0].coded is not None:
            return False
        columns = zip(*(message.tensors for message in messages), strict=True)
        given = [[tensor.data for tensor in column] for column in columns]
        results = [combine(t.verb, column) for column in given]
        guarded = links[0].guard is not None and t.verb != "broadcast"
        if guarded and not all(map(is_finite, results)):
            return False
        of_link = [results] * len(links)
        if t.verb == "exchange":
            of_link = [[column[1 - place].clone() for column in given] for place in range(2)]
        for link, message, own in zip(links, messages, of_link, strict=True):
            for tensor, result in zip(message.tensors, own, strict=True):
                tensor.data.copy_(result)
            link.count(message)
        return True

    def _run_together(self, links: Sequence[MemoryLink], messages: Sequence[MemoryMessage]) -> None:
        """Run a message as each rank's own link does, all ranks at the same time."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.ranks, "offbeat-rehearsal")
        pairs = zip(links, messages, strict=True)
        works = [self._pool.submit(self._send, link, message) for link, message in pairs]
        for work in works:
            work.result()

    def _send(self, link: MemoryLink, message: MemoryMessage) -> None:
        try:
            link.send(message)
        except BaseException as error:
            message.error = error
            for (name, _), meeting in self._meetings.items():
                if name.startswith(link.name):
                    meeting.abort()

    # ---- collectives of one rank ------------------------------------------------------------

    def _two_levels(self, name: str, rank: int, nodes: Topology) -> Collectives:
        """Return the collectives of a rank whose node sends each message once."""
        owners, weight = len(nodes.columns), nodes.weight_of(nodes.replica_of(rank))
        inside = self.collectives(f"{name} inside", rank, nodes.node_of(rank), owners)
        column = nodes.column_of(rank) or nodes.outside
        between = self.collectives(f"{name} between", rank, column)
        return two_levels(Levels(inside, between, owners, weight, rank, self.ranks))

    def collectives(
        self, name: str, rank: int, group: tuple[int, ...], owners: int | None = None
    ) -> Collectives:
        """Return the collectives of a rank for messages that all ranks run at the same time.

        The first `owners` ranks own a shard each; None: all of them.
        """
        meeting = self._meetings.setdefault((name, group), _Meeting(len(group)))
        index = group.index(rank)

        def act(tensor: Tensor, verb: Verb) -> None:
            given = meeting.exchange(index, tensor.data.clone())
            tensor.data.copy_(combine(verb, given, owners))

        def exchange(tensor: Tensor) -> None:
            given = meeting.exchange(index, tensor.data.clone())
            tensor.data.copy_(torch.cat([shards(x, len(group))[index] for x in given]))

        def send(tensor: Tensor, source: int, target: int) -> None:
            pair = self._meetings.setdefault((name, (source, target)), _Meeting(2))
            given = pair.exchange(int(rank == target), tensor.data.clone())
            if rank == target:
                tensor.data.copy_(given[0])

        def swap(tensor: Tensor, one: int, other: int) -> None:
            pair = self._meetings.setdefault((name, (one, other)), _Meeting(2))
            own = int(rank == other)
            given = pair.exchange(own, tensor.data.clone())
            tensor.data.copy_(given[1 - own])

        verbs: tuple[Verb, ...] = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
        by_verb: dict[Verb, Collective] = {verb: partial(act, verb=verb) for verb in verbs}
        return Collectives(by_verb, send, exchange, index, len(group), group, swap=swap)


class _Meeting:
    """Exchange of tensors between threads that run at the same time."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size)
        self._given: list[Any] = [None] * size

    def exchange(self, index: int, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all threads."""
        self._given[index] = tensor
        self._barrier.wait(EXCHANGE_S)
        given = list(self._given)
        self._barrier.wait(EXCHANGE_S)
        return given

    def abort(self) -> None:
        """End all waits with an error."""
        self._barrier.abort()


def combine(verb: Verb, given: Sequence[Tensor], owners: int | None = None) -> Tensor:
    """Return the result of a collective on all ranks.

    Args:
        verb: collective; "send" is from the first to the second rank. Of an exchange the result is
            the mean, which is finite if both tensors are.
        given: tensors of all ranks of the group.
        owners: number of ranks that own a shard; None: all of them.
    """
    if verb in ("broadcast", "send"):
        return given[0]
    if verb == "all_gather":
        count = len(given) if owners is None else owners
        return torch.cat([shards(x, count)[k] for k, x in enumerate(given[:count])])
    total = given[0].clone()
    for tensor in given[1:]:
        total += tensor
    return total.div_(len(given))
