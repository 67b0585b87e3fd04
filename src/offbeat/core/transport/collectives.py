"""Collectives: in-place operations of one process group on flat contiguous tensors, by verb.

A tensor of n elements is cut into K shards of ceil(n / K), the last ones shorter or empty; rank r
owns shard r.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.core.plan import VERBS, Verb

Collective = Callable[[Tensor], None]

AT_ONCE_BYTES = 8 << 10  # shards up to this go to all ranks at once
ASKED_BYTES = 64 << 10  # shards from this on go to who has asked for them


def payload_bytes(verb: Verb, size: int) -> int:
    """Bytes that a message of `size` bytes counts: half of them for each half of an all-reduce."""
    return size // 2 if verb in ("reduce_scatter", "all_gather") else size


@dataclass(frozen=True)
class Collectives:
    """In-place operations of one group by verb, and `send(tensor, source, target)` between two
    of its ranks, which both call.

    `exchange`, of even shards: shard k goes to rank k of the group; afterwards shard k is what
    rank k has sent.
    `rank` is the own one within the group, `size` the group's. `sent_bytes(verb, size)` are the
    bytes of a message of `size` bytes that this group itself sends.
    """

    by_verb: Mapping[Verb, Collective]
    send: Callable[[Tensor, int, int], None]
    exchange: Collective = lambda _: None
    rank: int = 0
    size: int = 1
    sent_bytes: Callable[[Verb, int], int] = payload_bytes


# torch 2.13 renames them and warns about the old names.
_reduce_scatter: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)
_all_gather: Callable[..., Any] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)


def collectives(
    group: dist.ProcessGroup, backend: str, device: torch.device, timeout_s: float
) -> Collectives:
    """all_reduce to the mean; reduce_scatter (afterwards rank r's shard holds the mean, the rest
    anything); all_gather (every rank's shard on all); broadcast. Alone they do nothing.

    Autograd sees none of it: a tensor's version counter stays. Every floating-point dtype works.
    """
    if group.size() == 1:
        silent = dict.fromkeys(VERBS, _nothing)
        return Collectives(silent, _no_send, sent_bytes=lambda *_: 0)  # type: ignore[arg-type]
    halves = Ring(group, timeout_s) if backend == "gloo" else Native(group)
    by_verb: dict[Verb, Collective] = {
        "all_reduce": averaging(group),
        "reduce_scatter": halves.reduce_scatter,
        "all_gather": halves.all_gather,
        "broadcast": broadcasting(group),
    }
    direct, exchange = sending(group, timeout_s), halves.exchange
    rank, size = group.rank(), group.size()
    if backend != "gloo" or device.type != "cuda":
        return Collectives(by_verb, direct, exchange, rank, size)
    buffers = Scratch(pinned=True)

    def send(tensor: Tensor, source: int, target: int) -> None:
        staged(lambda host: direct(host, source, target), buffers)(tensor)

    by_verb = {verb: staged(operation, buffers) for verb, operation in by_verb.items()}
    return Collectives(by_verb, send, staged(exchange, buffers), rank, size)


def sending(group: dist.ProcessGroup, timeout_s: float) -> Callable[[Tensor, int, int], None]:
    """One tensor from one rank of the job to another; both call it."""
    timeout = timedelta(seconds=timeout_s)

    def send(tensor: Tensor, source: int, target: int) -> None:
        mine = dist.get_rank()
        other = dist.get_group_rank(group, target if mine == source else source)
        act = group.send if mine == source else group.recv
        act([tensor.data], other, 0).wait(timeout)

    return send


def _no_send(tensor: Tensor, source: int, target: int) -> None:  # noqa: ARG001
    raise AssertionError("a rank alone has nobody to send to")


def averaging(group: dist.ProcessGroup) -> Collective:
    """All-reduce to the mean."""

    def average(tensor: Tensor) -> None:
        dist.all_reduce(tensor.data, op=dist.ReduceOp.AVG, group=group)

    return average


def broadcasting(group: dist.ProcessGroup) -> Collective:
    """Broadcast from the group's first rank."""
    source = dist.get_global_rank(group, 0)

    def broadcast(tensor: Tensor) -> None:
        dist.broadcast(tensor.data, source, group=group)

    return broadcast


def _nothing(tensor: Tensor) -> None:
    pass


class Scratch:
    """Memory for one message at a time: a flat buffer per dtype and device, grown on demand."""

    def __init__(self, pinned: bool = False):
        self._pinned = pinned
        self._buffers: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def like(self, tensor: Tensor, size: int) -> Tensor:
        """`size` elements of a tensor's kind, of any value; pinned ones are the host's."""
        device = torch.device("cpu") if self._pinned else tensor.device
        key = (tensor.dtype, device)
        if key not in self._buffers or self._buffers[key].numel() < size:
            self._buffers[key] = torch.empty(
                size, dtype=tensor.dtype, device=device, pin_memory=self._pinned
            )
        return self._buffers[key][:size]


def shards(tensor: Tensor, count: int) -> list[Tensor]:
    """Views of the shards, in the order of their ranks."""
    size = tensor.numel()
    each = -(-size // count)
    return [tensor[min(size, k * each) : min(size, (k + 1) * each)] for k in range(count)]


class Ring:
    """The two halves as a ring of sends, K - 1 steps of one shard each; small shards that need no
    sums go to all ranks at once.

    On gloo torch's reduce_scatter puts a whole all-reduce on the wire, and all_to_all has all
    ranks send to one at a time: 1 MB between 4 hosts at 100 Mbit/s took 136 ms with the all-reduce
    and torch's reduce_scatter (1.6 bytes on the wire per byte), 83 to 105 ms with all_to_all (0.8)
    and 70 ms with this ring (0.8). With 8 hosts there, shards of up to 4 KiB took 8 to 12 ms in a
    ring and 4 ms at once; of 16 KiB 9 and 11 ms, as messages of several senders get into each
    other's way. Large shards do so, too, where ranks are not in step: in an exchange, and where an
    all-gather follows one. So they are sent when the receiver has all that was sent before: of
    what the link can carry an exchange and an all-gather with 4 hosts at 25 Mbit/s then had .94 to
    .98, and .85 to .96 without, in shards of .1 to .4 MB.
    """

    def __init__(self, group: dist.ProcessGroup, timeout_s: float):
        self._group, self._rank, self._size = group, group.rank(), group.size()
        self._timeout = timedelta(seconds=timeout_s)
        self._scratch = Scratch()
        self._word = torch.zeros(2, dtype=torch.uint8, device="cpu")

    def reduce_scatter(self, tensor: Tensor) -> None:
        """Every shard collects what it lacks on its way round, and ends at its owner."""
        parts = shards(tensor.data, self._size)
        landing = self._scratch.like(parts[0], parts[0].numel())
        for step in range(1, self._size):
            given = parts[(self._rank - step) % self._size]
            taken = parts[(self._rank - step - 1) % self._size]
            self._pass_on(given, landing[: taken.numel()])
            taken += landing[: taken.numel()]
        parts[self._rank] /= self._size

    def all_gather(self, tensor: Tensor) -> None:
        """Every shard goes round once."""
        parts = shards(tensor.data, self._size)
        if parts[0].nbytes <= AT_ONCE_BYTES:
            self._spread([parts[self._rank]] * self._size, parts)
            return
        for step in range(self._size - 1):
            self._pass_on(
                parts[(self._rank - step) % self._size],
                parts[(self._rank - step - 1) % self._size],
                asked=step == 0 and parts[0].nbytes >= ASKED_BYTES,
            )

    def exchange(self, tensor: Tensor) -> None:
        """Every shard goes straight to its rank: in step s to the s-th from here on."""
        parts = shards(tensor.data, self._size)
        own = shards(self._scratch.like(tensor, tensor.numel()).copy_(tensor.data), self._size)
        if parts[0].nbytes <= AT_ONCE_BYTES:
            self._spread(own, parts)
            return
        for step in range(1, self._size):
            to, source = (self._rank + step) % self._size, (self._rank - step) % self._size
            asked = parts[0].nbytes >= ASKED_BYTES
            self._pass_on(own[to], parts[source], step, asked=asked)

    def _spread(self, given: Sequence[Tensor], taken: Sequence[Tensor]) -> None:
        """Send one tensor to each other rank, and take one of each, all at once."""
        works: list[Any] = []
        for step in range(1, self._size):
            to, source = (self._rank + step) % self._size, (self._rank - step) % self._size
            works += self._passing(given[to], taken[source], step)
        for work in works:
            work.wait(self._timeout)

    def _pass_on(self, given: Tensor, taken: Tensor, step: int = 1, *, asked: bool = False) -> None:
        """Send to the next rank, or one further on, what the one as far before sends us; when that
        is `asked`, once the receiver waits for it."""
        if asked:
            heard, said = self._word[:1], self._word[1:]
            back = self._passing(said[: taken.numel()], heard[: given.numel()], -step)
            for work in back:
                work.wait(self._timeout)
        for work in self._passing(given, taken, step):
            work.wait(self._timeout)

    def _passing(self, given: Tensor, taken: Tensor, step: int) -> list[Any]:
        """The same begun; empty shards stay where they are."""
        works: list[Any] = []
        if taken.numel():
            works.append(self._group.recv([taken], (self._rank - step) % self._size, 0))
        if given.numel():
            works.append(self._group.send([given], (self._rank + step) % self._size, 0))
        return works


class Native:
    """The backend's own halves (NCCL); uneven shards go through a padded copy."""

    def __init__(self, group: dist.ProcessGroup):
        self._group, self._rank, self._size = group, group.rank(), group.size()
        self._scratch = Scratch()

    def reduce_scatter(self, tensor: Tensor) -> None:
        tensor = tensor.data
        whole = self._padded(tensor)
        if whole is not tensor:
            whole[: tensor.numel()] = tensor
        own = shards(whole, self._size)[self._rank]
        _reduce_scatter(own, whole, op=dist.ReduceOp.AVG, group=self._group)
        if whole is not tensor:
            kept = shards(tensor, self._size)[self._rank]
            kept.copy_(own[: kept.numel()])

    def all_gather(self, tensor: Tensor) -> None:
        tensor = tensor.data
        whole = self._padded(tensor)
        own = shards(whole, self._size)[self._rank]
        if whole is not tensor:
            kept = shards(tensor, self._size)[self._rank]
            own[: kept.numel()] = kept
        _all_gather(whole, own, group=self._group)
        if whole is not tensor:
            tensor.copy_(whole[: tensor.numel()])

    def exchange(self, tensor: Tensor) -> None:
        """Shards must be even."""
        given = tensor.data.clone()
        dist.all_to_all_single(tensor.data, given, group=self._group)

    def _padded(self, tensor: Tensor) -> Tensor:
        """The tensor itself if its shards are even, else scratch memory that has room for them."""
        size = -(-tensor.numel() // self._size) * self._size
        return tensor if size == tensor.numel() else self._scratch.like(tensor, size)


def staged(operation: Collective, buffers: Scratch) -> Collective:
    """A collective of host memory for tensors of a GPU: to a pinned buffer, there, and back.

    Both copies go to the current stream, a link's own. So the next message, which waits for that
    stream before it touches the buffer on the host, cannot overtake this one's way back.
    """

    def through_host(tensor: Tensor) -> None:
        tensor = tensor.data
        host = buffers.like(tensor, tensor.numel())
        host.copy_(tensor, non_blocking=True)
        torch.cuda.current_stream(tensor.device).synchronize()
        operation(host)
        tensor.copy_(host, non_blocking=True)

    return through_host
