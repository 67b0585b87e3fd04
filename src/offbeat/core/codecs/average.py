"""Averages of encoded messages: encode, exchange and decode one message on its link's thread.

Errors, anchors and parameters in the storage stay unchanged until the codes of all ranks have
arrived. If a rank dies during the exchange, all other ranks still hold the values from before the
message.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from offbeat.core.codecs import Codec, PowerSGD, RandomK
from offbeat.core.codecs.codec import Memory, shards
from offbeat.core.codecs.pieces import CUT, PIECE, elements_per_pass
from offbeat.core.codecs.powersgd import matrix_shape
from offbeat.core.codecs.rows import Rows, read_heads, write_heads
from offbeat.core.codecs.tensor_codecs import code
from offbeat.core.plan.semantics import is_finite, shard_slice
from offbeat.core.transport.collectives import Collectives

LARGEST = 1e38  # larger magnitudes than this, divided by the number of ranks, might overflow
# Numbers per rank in the head of an all-reduce: 1 if the rank's values are not finite, then its
# 63-bit origin in 3 numbers of 21 bits.
HEAD = 4


@dataclass
class Part:
    """Elements of one message that share a dtype and a device.

    Attributes:
        numbers: elements to encode, plus the errors of earlier messages. After the exchange: the
            encoding error, or the mean if there is `keep`.
        plain: elements that are sent without encoding. After the exchange: their mean.
        memory: state that the codec keeps between messages of one transfer.
        mean: after the exchange, the mean of the decoded numbers. A tensor that is set before the
            exchange is overwritten.
        keep: stores the encoding error after the codes of all ranks have arrived. The mean then
            has the memory of `numbers`.
    """

    numbers: Tensor
    plain: Tensor
    memory: Memory
    mean: Tensor | None = None
    keep: Callable[[Tensor], None] | None = None

    @property
    def size(self) -> int:
        """Return the number of elements to encode."""
        return self.numbers.numel()

    def are_within(self, most: float) -> bool:
        """Return whether the magnitudes of all numbers are at most `most`; false with NaN."""
        return are_within(self.numbers, most)

    def clear(self) -> None:
        """Send zeros in place of the numbers."""
        self.numbers.zero_()

    def load(self, cut: slice) -> Tensor:
        """Return some of the numbers, to be encoded once. They may be overwritten."""
        return self.numbers[cut]

    def zeros(self, *, keeps: bool) -> Tensor:
        """Return a zeroed tensor for the mean, after the codes of all ranks have arrived.

        Args:
            keeps: whether the encoding error is stored.
        """
        if self.mean is None and self.keep is not None:
            if keeps:
                self.keep(self.numbers)
            self.mean = self.numbers
        self.mean = torch.zeros_like(self.numbers) if self.mean is None else self.mean.zero_()
        return self.mean

    def store_means(
        self, cuts: Sequence[slice], add: Callable[[int, Tensor], None], *, keeps: bool
    ) -> None:
        """Store the mean, after the codes of all ranks have arrived.

        Args:
            cuts: parts that are decoded one after the other.
            add: adds the mean of the i-th part to a tensor of zeros.
            keeps: whether the encoding error is stored.
        """
        mean = self.zeros(keeps=keeps)
        for i, cut in enumerate(cuts):
            add(i, mean[cut])


@dataclass(frozen=True)
class Settings:
    """Settings of one average.

    Attributes:
        codec: codec of the message.
        via: exchange of the codes, `gather`, `scatter` or `reduce`.
        iteration: planned iteration; it seeds `RandomK`.
        keeps: whether encoding errors are kept for the next message (error feedback).
        origin: fingerprint of the parameters to which encoded changes are relative; equal on all
            ranks.
    """

    codec: Codec
    via: str
    iteration: int
    keeps: bool
    origin: int = 0


@dataclass
class Outcome:
    """Result of the exchange of one part.

    Attributes:
        bad: ranks with values that are not finite; all ranks if only the mean is not finite.
        bytes: size of the all-reduce that puts the same number of bytes on the link.
    """

    bad: Sequence[int]
    bytes: int


class OriginError(RuntimeError):
    """Error if ranks encode changes against different parameters."""

    def __init__(self, odd: int, rank: int) -> None:
        super().__init__(
            f"rank {odd} counts the changes of its parameters from other values than rank {rank}: "
            "weights were loaded on some ranks only; load the same weights on every rank"
        )


def average(part: Part, how: Settings, act: Collectives) -> Outcome:
    """Average one part over all ranks of a group and store the results in `part`."""
    bad = act.is_any(not (part.are_within(LARGEST / act.size) and is_finite(part.plain)))
    if bad:
        part.clear()
        part.plain = torch.zeros_like(part.plain)
    by_way: dict[str, Callable[[Part, Settings, Collectives, bool], Outcome]] = {
        "gather": _average_by_gather,
        "scatter": _average_by_scatter,
        "reduce": _average_by_reduce,
    }
    memory = dict(part.memory)
    outcome = by_way[how.via](part, how, act, bad)
    if not outcome.bad and part.mean is not None and not is_finite(part.mean):
        # The values overflow the codec or the sum, on all ranks. Discard the codec's new state.
        part.memory.clear()
        part.memory.update(memory)
        return replace(outcome, bad=range(act.size))
    if outcome.bad:
        part.plain = torch.full_like(part.plain, math.nan)
        if part.mean is not None:
            part.mean.fill_(math.nan)
    return outcome


def send(
    part: Part, how: Settings, act: Collectives, ranks: tuple[int, int], *, gives: bool
) -> Outcome:
    """Send an encoded part from rank `ranks[0]` to rank `ranks[1]`; both ranks call this function.

    Args:
        part: on the sender the elements; on the receiver a part of the same size.
        how: settings; `via` is not used.
        act: collectives of the two ranks' group.
        ranks: sender and receiver.
        gives: whether this rank is the sender.
    """
    size, dtype = part.numbers.numel(), part.numbers.dtype
    rows = Rows(how.codec.bytes_of(size, dtype.itemsize), part.plain.nbytes)
    row = rows.make(1, part.numbers.device)
    if gives:
        bad = not (part.are_within(LARGEST) and is_finite(part.plain))
        write_heads(row[0], bad, how.origin)
        code(how.codec).encode(part.numbers, rows.codes(row[0]))
        rows.plain_numbers(row[0], part.plain.dtype).copy_(part.plain)
    act.send(row[0], *ranks)
    bad_ranks, [origin] = read_heads(row)
    if origin != how.origin:
        raise OriginError(ranks[1], ranks[0])
    mean = part.zeros(keeps=gives and not bad_ranks)
    if bad_ranks:
        mean.fill_(math.nan)
    else:
        code(how.codec).add(rows.codes(row[0]), mean)
    part.plain = rows.plain_numbers(row[0], part.plain.dtype).clone()
    return Outcome([ranks[0]] if bad_ranks else [], row.nbytes)


def _average_by_gather(part: Part, how: Settings, act: Collectives, bad: bool) -> Outcome:
    """Send all codes to all ranks. Every rank sums in rank order, so all ranks get equal bits.

    Numbers are encoded and decoded by parts if the codec allows it, with the same bits and bytes.
    """
    codes, like, cuts = code(how.codec), part.numbers, _cuts(part, how.codec)
    sizes = [how.codec.bytes_of(cut.stop - cut.start, like.dtype.itemsize) for cut in cuts]
    rows = Rows(sum(sizes), part.plain.nbytes)
    table = rows.make(act.size, like.device)
    coded = rows.codes(table).split(sizes, dim=1)
    write_heads(table[act.rank], bad, how.origin)
    rows.plain_numbers(table[act.rank], part.plain.dtype).copy_(part.plain)
    for cut, own in zip(cuts, coded, strict=True):
        codes.encode(part.load(cut), own[act.rank])
    act.by_verb["all_gather"](table.view(-1))
    bad_ranks = _check_heads(table, act)

    def add(i: int, mean: Tensor) -> None:
        codes.add_all(coded[i], mean)
        mean.div_(act.size)
        if bad_ranks:
            mean.fill_(math.nan)  # before it is stored

    part.store_means(cuts, add, keeps=not bad_ranks)
    part.plain = _plain_mean(table, rows, part.plain)
    return Outcome(bad_ranks, table.nbytes // 2)


def _cuts(part: Part, codec: Codec) -> list[slice]:
    """Return the parts of the numbers that are encoded one after the other."""
    if not codec.piecewise or part.size <= PIECE:
        return [slice(0, part.size)]
    count = -(-part.size // max(CUT, elements_per_pass(part.numbers)))
    return [cut for cut in shards(part.size, count, PIECE) if cut.start < cut.stop]


def _average_by_scatter(part: Part, how: Settings, act: Collectives, bad: bool) -> Outcome:
    """Send each shard's codes to its owner, which averages, encodes again and sends to all."""
    x, codes, size = part.numbers, code(how.codec), act.size
    cuts = shards(x.numel(), size, how.codec.grain)
    code_bytes = [how.codec.bytes_of(c.stop - c.start, x.dtype.itemsize) for c in cuts]
    rows = Rows(code_bytes[0])
    table = rows.make(size, x.device)
    write_heads(table, bad, how.origin)
    for first, shards_of_x in _shard_tables(x, cuts):
        given = table[first : first + len(shards_of_x)]
        codes.encode(shards_of_x, rows.codes(given, code_bytes[first]))
    act.exchange(table.view(-1))
    bad_ranks, sent = _check_heads(table, act), table.nbytes
    own_cut, count = cuts[act.rank], code_bytes[act.rank]
    shard = x.new_zeros(own_cut.stop - own_cut.start)
    codes.add_all(rows.codes(table, count), shard)
    shard.div_(size)
    if how.keeps and "mean" in part.memory:
        shard += part.memory["mean"]
    full = Rows(rows.code_bytes, part.plain.nbytes)
    second = full.make(size, x.device)  # overwrites `table`, which has the same memory
    codes.encode(shard, full.codes(second[act.rank], count))
    full.plain_numbers(second[act.rank], part.plain.dtype).copy_(part.plain)
    act.by_verb["all_gather"](second.view(-1))
    mean = part.zeros(keeps=not bad_ranks)
    for first, shards_of_mean in _shard_tables(mean, cuts):
        taken = second[first : first + len(shards_of_mean)]
        codes.add(full.codes(taken, code_bytes[first]), shards_of_mean)
    if how.keeps and not bad_ranks:
        part.memory["mean"] = shard
    part.plain = _plain_mean(second, full, part.plain)
    return Outcome(bad_ranks, (sent + second.nbytes) // 2)


def _shard_tables(x: Tensor, cuts: Sequence[slice]) -> Iterator[tuple[int, Tensor]]:
    """Yield one table per shard length, with the rank of its first shard."""
    lengths = [cut.stop - cut.start for cut in cuts]
    for length in sorted({*lengths} - {0}, reverse=True):
        first, count = lengths.index(length), lengths.count(length)
        start = cuts[first].start
        yield first, x[start : start + count * length].view(count, length)


def _average_by_reduce(part: Part, how: Settings, act: Collectives, bad: bool) -> Outcome:
    """All-reduce the codes of a linear codec, together with flags and unencoded elements."""
    x, codec = part.numbers, how.codec
    flags = x.new_zeros(act.size, HEAD)
    flags[act.rank] = x.new_tensor([bad, *(how.origin >> 21 * k & 0x1FFFFF for k in range(3))])
    tail = part.plain.to(x.dtype)
    sent = 0

    def reduce_together(values: Tensor, *more: Tensor) -> list[Tensor]:
        nonlocal sent
        whole = torch.cat([values.reshape(-1), *(m.view(-1) for m in more)])
        act.by_verb["all_reduce"](whole)
        sent += whole.nbytes
        return list(whole.split([values.numel(), *(m.numel() for m in more)]))

    if isinstance(codec, RandomK):
        places = torch.from_numpy(codec.places(x.numel(), how.iteration)).to(x.device)
        values, flags, tail = reduce_together(x[places], flags, tail)
        x[places] = 0
    else:
        assert isinstance(codec, PowerSGD)
        places = slice(None)
        if codec.is_dense(x.numel()):
            values, flags, tail = reduce_together(x, flags, tail)
            x.zero_()
        else:
            shape = matrix_shape(x.numel())
            whole = torch.nn.functional.pad(x, (0, math.prod(shape) - x.numel())).view(shape)
            q = part.memory.get("q")
            q = x.new_tensor(codec.initial_q(x.numel())) if q is None else q
            p, flags, tail = reduce_together(whole @ q, flags, tail)
            p = torch.linalg.qr(p.view(shape[0], -1)).Q
            own = whole.T @ p
            (q,) = reduce_together(own)
            q = q.view_as(own)
            if not bool(flags.view(-1, HEAD)[:, 0].any()):
                part.memory["q"] = q
            x.copy_(whole.addmm_(p, own.T, alpha=-1).view(-1)[: x.numel()])
            values = (p @ q.T).view(-1)[: x.numel()]
    heads = flags.view(-1, HEAD)
    bad_ones = [rank for rank, share in enumerate(heads[:, 0].tolist()) if share > 0]
    _require_same([tuple(origin) for origin in heads[:, 1:].tolist()], act)
    part.zeros(keeps=not bad_ones)[places] = values
    part.plain = tail.to(part.plain.dtype)
    return Outcome(bad_ones, sent)


def are_within(x: Tensor, most: float) -> bool:
    """Return whether the magnitudes of all elements are at most `most`; false with NaN."""
    if not x.numel():
        return True
    low, high = torch.aminmax(x)
    return bool((low >= -most) & (high <= most))


def _check_heads(table: Tensor, act: Collectives) -> list[int]:
    """Return the ranks with values that are not finite; raise OriginError if origins differ."""
    bad, origins = read_heads(table)
    _require_same(origins, act)
    return bad


def _require_same(origins: Sequence[Any], act: Collectives) -> None:
    """Raise OriginError unless all origins are equal. All-reduced origins are compared too."""
    odd = next((rank for rank, origin in enumerate(origins) if origin != origins[0]), None)
    if odd is not None:
        ranks = act.members or range(len(origins))
        raise OriginError(ranks[odd], ranks[0])


def _plain_mean(table: Tensor, rows: Rows, like: Tensor) -> Tensor:
    """Return the mean of the unencoded elements, summed in rank order."""
    total = torch.zeros_like(like)
    for row in table if like.numel() else ():
        total += rows.plain_numbers(row, like.dtype)
    return total.div_(len(table))


def equivalent_bytes(
    codec: Codec, via: str, size: int, itemsize: int, plain_bytes: int, ranks: int
) -> int:
    """Return the size of the all-reduce that puts as many bytes on the link as an encoded message.

    Args:
        codec: codec of the message.
        via: exchange of the codes, `gather`, `scatter` or `reduce`.
        size: number of encoded elements.
        itemsize: bytes of one element.
        plain_bytes: bytes of the unencoded elements.
        ranks: number of ranks in the group.
    """
    if via == "gather":
        return ranks * Rows(codec.bytes_of(size, itemsize), plain_bytes).bytes // 2
    if via == "scatter":
        first = shard_slice(size, ranks, 0, codec.grain)
        most = codec.bytes_of(first.stop - first.start, itemsize)
        return ranks * (Rows(most).bytes + Rows(most, plain_bytes).bytes) // 2
    return codec.bytes_of(size, itemsize) + plain_bytes + HEAD * ranks * itemsize
