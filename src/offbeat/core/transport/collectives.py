"""Collectives: in-place operations of one process group on flat contiguous tensors, by verb.

A tensor of n elements consists of K shards of ceil(n / K) elements. The last ones are shorter or
empty. Rank r owns shard r.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.core.plan import VERBS, Verb
from offbeat.core.plan.semantics import shard_slice
from offbeat.core.transport.pinned import pinned_memory

Collective = Callable[[Tensor], None]

AT_ONCE_BYTES = 8 << 10  # shards of at most this size are sent to all ranks at the same time
AT_ONCE_RANKS = 64  # largest number of ranks to which an all-gather sends at the same time
ASKED_BYTES = 64 << 10  # shards of at least this size are sent after a request of the receiver
PIECE_BYTES = 16 << 10  # a message is split between connections into pieces of at least this size


def payload_bytes(verb: Verb, size: int) -> int:
    """Return the bytes for which a message of `size` bytes counts.

    Each half of an all-reduce counts half.
    """
    return size // 2 if verb in ("reduce_scatter", "all_gather") else size


def _no_send(tensor: Tensor, source: int, target: int) -> None:  # noqa: ARG001
    raise AssertionError("this group has no messages between two ranks")


@dataclass(frozen=True)
class Collectives:
    """In-place operations of one process group.

    Attributes:
        by_verb: collectives by verb.
        send: `send(tensor, source, target)` between two ranks of the group. Both ranks call it.
        exchange: sends shard k to rank k of the group, and receives rank k's shard as shard k.
            Shards must be of equal size.
        rank: rank of this process within the group.
        size: number of ranks in the group.
        members: ranks of the job, by their rank in the group; () where they are equal.
        sent_bytes: `sent_bytes(verb, size)` returns the bytes that the group itself sends for a
            message of `size` bytes.
        levels: parts of collectives that have two levels; None for those of one group.
        is_any: whether a fact about a message holds on any rank of this rank's replica, whose ranks
            average their shards in messages of their own. They all call it for each message.
        swap: `swap(tensor, one, other)` between two ranks of the group, in both directions at the
            same time. Both ranks call it.
    """

    by_verb: Mapping[Verb, Collective]
    send: Callable[[Tensor, int, int], None]
    exchange: Collective = lambda _: None
    rank: int = 0
    size: int = 1
    members: Sequence[int] = ()
    sent_bytes: Callable[[Verb, int], int] = payload_bytes
    levels: Levels | None = None
    is_any: Callable[[bool], bool] = bool
    swap: Callable[[Tensor, int, int], None] = _no_send


@dataclass(frozen=True)
class Levels:
    """Parts of collectives with two levels, see `two_levels`.

    Attributes:
        inside: collectives of the ranks of this node.
        column: collectives of the ranks that own the same shard in all nodes.
        owners: number of shards of a tensor; the first ranks of a node own one each.
        weight: factor on the shards of this node in an average.
        rank: rank of this process in the job.
        ranks: number of ranks of the job.
    """

    inside: Collectives
    column: Collectives
    owners: int
    weight: float
    rank: int
    ranks: int

    def own_slice(self, size: int) -> slice:
        """Return the shard of this rank of `size` elements; an empty one if it owns none."""
        return shard_slice(size, self.owners, self.inside.rank)

    def own_shard(self, tensor: Tensor) -> Tensor:
        """Return a view of the shard of this rank."""
        return tensor[self.own_slice(tensor.numel())]

    def reduce(self, tensor: Tensor) -> Tensor:
        """Return the own shard of the average over the node, times the node's weight."""
        self.inside.by_verb["reduce_scatter"](tensor)
        own = self.own_shard(tensor.data)
        return own if self.weight == 1 else own.mul_(self.weight)


# torch 2.13 renames both functions and warns about the old names.
_reduce_scatter: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)
_all_gather: Callable[..., Any] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)


def collectives(
    group: dist.ProcessGroup,
    backend: str,
    device: torch.device,
    timeout_s: float,
    connections: int = 1,
    owners: int | None = None,
) -> Collectives:
    """Return the collectives of a process group.

    Halves of an all-reduce cut a tensor into `owners` shards, by default one for each rank. The
    first ranks own them.

    `all_reduce` averages. After `reduce_scatter` the shard of rank r holds the average on rank r,
    and all other elements are undefined. `all_gather` copies every rank's shard to all ranks.
    `broadcast` copies from the group's first rank. In a group of one rank they do nothing. Version
    counters of tensors stay unchanged. All floating-point dtypes are supported.

    gloo sends each operation over one connection, and the next operation over the next connection.
    So a large message uses several connections if its pieces are sent at the same time.
    """
    if group.size() == 1:
        silent = dict.fromkeys(VERBS, _do_nothing)
        members = dist.get_process_group_ranks(group)
        return Collectives(silent, _no_send, members=members, sent_bytes=lambda *_: 0)  # type: ignore[arg-type]
    halves: Ring | Native = Native(group, owners)
    if backend == "gloo":
        halves = Ring(group, timeout_s, connections, owners)
    by_verb: dict[Verb, Collective] = {
        "all_reduce": averaging(group, connections),
        "reduce_scatter": halves.reduce_scatter,
        "all_gather": halves.all_gather,
        "broadcast": broadcasting(group, connections),
    }
    direct, exchange = sending(group, timeout_s, connections), halves.exchange
    swap = swapping(group, timeout_s, connections if backend == "gloo" else 0)
    rank, size, members = group.rank(), group.size(), dist.get_process_group_ranks(group)
    if backend != "gloo" or device.type != "cuda":
        return Collectives(by_verb, direct, exchange, rank, size, members, swap=swap)
    buffers = Scratch(pinned=True)

    def send(tensor: Tensor, source: int, target: int) -> None:
        gives = dist.get_rank() == source
        act = via_host(
            lambda host: direct(host, source, target), buffers, reads=gives, writes=not gives
        )
        act(tensor)

    def swap_by_host(tensor: Tensor, one: int, other: int) -> None:
        via_host(lambda host: swap(host, one, other), buffers)(tensor)

    by_verb = {verb: via_host(operation, buffers) for verb, operation in by_verb.items()}
    exchange = via_host(exchange, buffers)
    return Collectives(by_verb, send, exchange, rank, size, members, swap=swap_by_host)


def two_levels(levels: Levels) -> Collectives:  # noqa: C901
    """Return the collectives of all ranks that cross the links between nodes once per node.

    An all-reduce has three legs: a reduce-scatter inside every node, an all-reduce of the own shard
    in the column, and an all-gather inside. So the ranks of a node together send the tensor once
    between nodes. Its result is the average over all ranks, whatever the number of ranks per node,
    and has equal bits on all ranks of a node, because only one rank of a node adds up each shard.

    `rank`, `size`, `members` and `exchange` are those of the column.
    """
    inside, column = levels.inside, levels.column

    def all_reduce(tensor: Tensor) -> None:
        own = levels.reduce(tensor)
        if own.numel():
            column.by_verb["all_reduce"](own)
        inside.by_verb["all_gather"](tensor)

    def reduce_scatter(tensor: Tensor) -> None:
        own = levels.reduce(tensor)
        if own.numel():
            column.by_verb["reduce_scatter"](own)

    def all_gather(tensor: Tensor) -> None:
        own = levels.own_shard(tensor.data)
        if own.numel():
            column.by_verb["all_gather"](own)
        inside.by_verb["all_gather"](tensor)

    def broadcast(tensor: Tensor) -> None:
        if inside.rank == 0:
            column.by_verb["broadcast"](tensor)
        inside.by_verb["broadcast"](tensor)

    def count_bytes(verb: Verb, size: int) -> int:
        if verb == "broadcast":
            return column.sent_bytes(verb, size) if inside.rank == 0 else 0
        own = levels.own_slice(size)
        return column.sent_bytes(verb, own.stop - own.start)

    by_verb: dict[Verb, Collective] = {
        "all_reduce": all_reduce,
        "reduce_scatter": reduce_scatter,
        "all_gather": all_gather,
        "broadcast": broadcast,
    }
    exchange, rank, size, members = column.exchange, column.rank, column.size, column.members
    return Collectives(by_verb, _no_send, exchange, rank, size, members, count_bytes, levels)


def pieces(tensor: Tensor, connections: int) -> Sequence[Tensor]:
    """Return one view for each connection, or fewer if they would be below `PIECE_BYTES`."""
    count = min(connections, tensor.nbytes // PIECE_BYTES)
    return tensor.chunk(count) if count > 1 else (tensor,)  # a scalar cannot be divided


def run_in_pieces(operation: Callable[..., Any], tensor: Tensor, connections: int) -> None:
    """Run an operation of torch.distributed on all pieces of a tensor at the same time."""
    parts = pieces(tensor, connections)
    if len(parts) == 1:
        operation(tensor)
        return
    for work in [operation(part, async_op=True) for part in parts]:
        work.wait()


def start_pieces(
    act: Callable[..., Any], tensor: Tensor, other: int, connections: int
) -> list[Any]:
    """Start `send` or `recv` of a process group for all pieces of a tensor. Return the works."""
    return [act([part], other, tag) for tag, part in enumerate(pieces(tensor, connections))]


def sending(
    group: dist.ProcessGroup, timeout_s: float, connections: int = 1
) -> Callable[[Tensor, int, int], None]:
    """Return a function that sends a tensor from one rank of the job to another.

    Both ranks call the function.
    """
    timeout = timedelta(seconds=timeout_s)

    def send(tensor: Tensor, source: int, target: int) -> None:
        rank = dist.get_rank()
        other = dist.get_group_rank(group, target if rank == source else source)
        act = group.send if rank == source else group.recv
        for work in start_pieces(act, tensor.data, other, connections):
            work.wait(timeout)

    return send


def swapping(
    group: dist.ProcessGroup, timeout_s: float, connections: int
) -> Callable[[Tensor, int, int], None]:
    """Return a function with which two ranks of the job exchange tensors. Both ranks call it.

    Args:
        group: group of both ranks.
        timeout_s: timeout in seconds.
        connections: TCP connections of gloo between both ranks; 0 for NCCL.
    """
    timeout = timedelta(seconds=timeout_s)

    def swap(tensor: Tensor, one: int, other: int) -> None:
        peer, given = other if dist.get_rank() == one else one, tensor.data.clone()
        if not connections:  # NCCL runs both directions of a batch at the same time
            moves = [(dist.isend, given), (dist.irecv, tensor.data)]
            batch = [dist.P2POp(act, x, peer, group) for act, x in moves]
            for work in dist.batch_isend_irecv(batch):
                work.wait()
            return
        place = dist.get_group_rank(group, peer)
        works = start_pieces(group.recv, tensor.data, place, connections)
        for work in works + start_pieces(group.send, given, place, connections):
            work.wait(timeout)

    return swap


def averaging(group: dist.ProcessGroup, connections: int = 1) -> Collective:
    """Return an all-reduce that averages."""

    def average(tensor: Tensor) -> None:
        reduce = partial(dist.all_reduce, op=dist.ReduceOp.AVG, group=group)
        run_in_pieces(reduce, tensor.data, connections)

    return average


def agreement_within(group: dist.ProcessGroup) -> Callable[[bool], bool]:
    """Return a function of a fact of each rank of a group: whether it holds on any of them."""

    def is_any(fact: bool) -> bool:
        found = torch.tensor([fact], dtype=torch.int32, device="cpu")
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
        return bool(found)

    return is_any


def broadcasting(group: dist.ProcessGroup, connections: int = 1) -> Collective:
    """Return a broadcast from the group's first rank."""
    source = dist.get_global_rank(group, 0)

    def broadcast(tensor: Tensor) -> None:
        copy = partial(dist.broadcast, src=source, group=group)
        run_in_pieces(copy, tensor.data, connections)

    return broadcast


def _do_nothing(tensor: Tensor) -> None:
    pass


class Scratch:
    """Scratch memory for one message: a flat buffer per dtype and device, grown on demand."""

    def __init__(self, pinned: bool = False):
        self._pinned = pinned
        self._buffers: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def reserve(self, tensor: Tensor, size: int) -> Tensor:
        """Return `size` uninitialized elements of the tensor's dtype and device.

        Pinned memory is on the host.
        """
        key = (tensor.dtype, tensor.device)
        if key not in self._buffers or self._buffers[key].numel() < size:
            if self._pinned:
                torch.cuda.current_stream(tensor.device).synchronize()  # end of earlier copies
                self._buffers.pop(key, None)
                self._buffers[key] = pinned_memory(size, tensor.dtype)
            else:
                self._buffers[key] = torch.empty(size, dtype=tensor.dtype, device=tensor.device)
        return self._buffers[key][:size]


def shards(tensor: Tensor, count: int, ranks: int | None = None) -> list[Tensor]:
    """Return views of the shards, in the order of their ranks; empty for ranks beyond `count`."""
    return [tensor[shard_slice(tensor.numel(), count, k)] for k in range(ranks or count)]


class Ring:
    """Halves of an all-reduce as a ring of K - 1 steps, for gloo. In each step each rank sends one
    shard.

    All-gather and exchange send small shards to all ranks at the same time instead. They send large
    shards only after a request of the receiver.

    Reason for the ring: torch's reduce_scatter on gloo sends the bytes of a whole all-reduce, and
    in all_to_all all ranks send to the same rank at a time. Measured for 1 MB between 4 hosts at
    100 Mbit/s: 136 ms with the all-reduce and with torch's reduce_scatter (1.6 bytes on the wire
    per byte), 83 to 105 ms with all_to_all (0.8), 70 ms with this ring (0.8).

    Reason for the limit of small shards: messages of several senders delay each other. Measured
    with 8 hosts at 100 Mbit/s: shards of up to 4 KiB take 8 to 12 ms in a ring and 4 ms at the same
    time; shards of 16 KiB take 9 and 11 ms.

    Reason for requests: large shards of several senders delay each other if ranks are not in step,
    as in an exchange, and in an all-gather after it. Measured with 4 hosts at 25 Mbit/s and shards
    of .1 to .4 MB: exchange and all-gather use .94 to .98 of the link's rate with requests, and
    .85 to .96 without.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        timeout_s: float,
        connections: int = 1,
        owners: int | None = None,
    ):
        self._group, self._rank, self._size = group, group.rank(), group.size()
        self._owners = owners or self._size
        self._timeout, self._connections = timedelta(seconds=timeout_s), connections
        self._scratch = Scratch()
        self._word = torch.zeros(2, dtype=torch.uint8, device="cpu")

    def reduce_scatter(self, tensor: Tensor) -> None:
        """Pass each shard around the ring. Each rank adds its values; the owner gets the sum."""
        parts = self._parts(tensor)
        received = self._scratch.reserve(parts[0], parts[0].numel())
        for step in range(1, self._size):
            given = parts[(self._rank - step) % self._size]
            taken = parts[(self._rank - step - 1) % self._size]
            self._shift(given, received[: taken.numel()])
            taken += received[: taken.numel()]
        parts[self._rank] /= self._size

    def all_gather(self, tensor: Tensor) -> None:
        """Pass each shard around the ring once, or send small shards to few ranks directly."""
        parts = self._parts(tensor)
        if parts[0].nbytes <= AT_ONCE_BYTES and self._size <= AT_ONCE_RANKS:
            self._send_to_all([parts[self._rank]] * self._size, parts)
            return
        for step in range(self._size - 1):
            self._shift(
                parts[(self._rank - step) % self._size],
                parts[(self._rank - step - 1) % self._size],
                asked=step == 0 and parts[0].nbytes >= ASKED_BYTES,
            )

    def _parts(self, tensor: Tensor) -> list[Tensor]:
        """Return the shard of every rank; empty for ranks that own none."""
        return shards(tensor.data, self._owners, self._size)

    def _wait(self, works: Iterable[Any]) -> None:
        for work in works:
            work.wait(self._timeout)

    def exchange(self, tensor: Tensor) -> None:
        """Send each shard directly to its rank: in step s to the s-th next rank."""
        parts = shards(tensor.data, self._size)
        own = shards(self._scratch.reserve(tensor, tensor.numel()).copy_(tensor.data), self._size)
        if parts[0].nbytes <= AT_ONCE_BYTES:
            self._send_to_all(own, parts)
            return
        for step in range(1, self._size):
            to, source = (self._rank + step) % self._size, (self._rank - step) % self._size
            asked = parts[0].nbytes >= ASKED_BYTES
            self._shift(own[to], parts[source], step, asked=asked)

    def _send_to_all(self, given: Sequence[Tensor], taken: Sequence[Tensor]) -> None:
        """Send one tensor to each other rank and receive one from each, all at the same time."""
        works: list[Any] = []
        for step in range(1, self._size):
            to, source = (self._rank + step) % self._size, (self._rank - step) % self._size
            works += self._start_shift(given[to], taken[source], step)
        self._wait(works)

    def _shift(self, given: Tensor, taken: Tensor, step: int = 1, *, asked: bool = False) -> None:
        """Send `given` to the rank `step` further on, and receive `taken` from the rank `step`
        before.

        If `asked`, send after a request of the receiver, which receives in the same call.
        """
        if asked:
            received, sent = self._word[:1], self._word[1:]
            self._wait(self._start_shift(sent[: taken.numel()], received[: given.numel()], -step))
        self._wait(self._start_shift(given, taken, step))

    def _start_shift(self, given: Tensor, taken: Tensor, step: int) -> list[Any]:
        """Start sending and receiving as in `_shift`. Empty shards are not sent."""
        to, source = (self._rank + step) % self._size, (self._rank - step) % self._size
        both = (self._group.recv, taken, source), (self._group.send, given, to)
        return [
            work
            for act, tensor, other in both
            if tensor.numel()
            for work in start_pieces(act, tensor, other, self._connections)
        ]


class Native:
    """The backend's halves of an all-reduce, for NCCL. Uneven shards use a padded copy."""

    def __init__(self, group: dist.ProcessGroup, owners: int | None = None):
        self._group, self._rank, self._size = group, group.rank(), group.size()
        self._owners = owners or self._size
        self._scratch = Scratch()

    def reduce_scatter(self, tensor: Tensor) -> None:
        tensor = tensor.data
        whole, own, kept = self._pad_tensor(tensor)
        if whole is not tensor:
            whole[: tensor.numel()] = tensor
        _reduce_scatter(own, whole, op=dist.ReduceOp.AVG, group=self._group)
        if whole is not tensor:
            kept.copy_(own[: kept.numel()])

    def all_gather(self, tensor: Tensor) -> None:
        tensor = tensor.data
        whole, own, kept = self._pad_tensor(tensor)
        if whole is not tensor:
            own[: kept.numel()] = kept
        _all_gather(whole, own, group=self._group)
        if whole is not tensor:
            tensor.copy_(whole[: tensor.numel()])

    def exchange(self, tensor: Tensor) -> None:
        """Exchange shards of equal size between all ranks."""
        given = tensor.data.clone()
        dist.all_to_all_single(tensor.data, given, group=self._group)

    def _pad_tensor(self, tensor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tensor if every rank owns an equal shard, else scratch memory of padded size;
        its shard of this rank; and the tensor's shard of this rank, empty if it owns none."""
        size = -(-tensor.numel() // self._owners) * self._size
        whole = tensor if size == tensor.numel() else self._scratch.reserve(tensor, size)
        own = shard_slice(whole.numel(), self._size, self._rank)
        return whole, whole[own], tensor[shard_slice(tensor.numel(), self._owners, self._rank)]


def is_on_host(tensor: Tensor) -> bool:
    """Return whether gloo can read and write a tensor without a copy."""
    return not tensor.is_cuda


def via_host(
    operation: Collective, buffers: Scratch, *, reads: bool = True, writes: bool = True
) -> Collective:
    """Return a collective for GPU tensors that runs `operation` on a pinned copy on the host.

    Both copies use the current stream, which belongs to the link. It is synchronized before the
    host uses the buffer, so the host cannot overwrite the buffer before an earlier copy back has
    ended. Tensors on the host need no copy.

    Args:
        operation: collective on the host.
        buffers: pinned memory.
        reads: whether the operation uses the values of the tensor.
        writes: whether it changes them. A copy back of equal values would be a write that no code
            waits for.
    """

    def through_host(tensor: Tensor) -> None:
        tensor = tensor.data
        if is_on_host(tensor):
            operation(tensor)
            return
        host = buffers.reserve(tensor, tensor.numel()).view(tensor.shape)
        if reads:
            host.copy_(tensor, non_blocking=True)
        torch.cuda.current_stream(tensor.device).synchronize()
        operation(host)
        if writes:
            tensor.copy_(host, non_blocking=True)

    return through_host
