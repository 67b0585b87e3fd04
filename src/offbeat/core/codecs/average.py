"""Averages of codes: one message encoded, sent round, and decoded, on the thread of its link.

What a message has taken from the storage stays as it was until every rank's codes are here. So a
rank that dies in between takes nothing along: those that are left have their errors, anchors and
parameters of before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from offbeat.core.codecs import Codec, PowerSGD, RandomK
from offbeat.core.codecs.codec import shards
from offbeat.core.codecs.powersgd import matrix
from offbeat.core.codecs.rows import Rows, read_heads, write_head
from offbeat.core.codecs.tensor_codecs import code
from offbeat.core.transport.collectives import Collectives

Memory = MutableMapping[str, Any]

HEAD = 4  # of each rank, in an all-reduce: whether its values were bad, 63 bits of its origin


@dataclass
class Part:
    """What a message carries of one dtype and device.

    `numbers` are those to be encoded, errors of earlier messages included; `plain` travels as it
    is. Afterwards `mean` is what arrives of the numbers, in the memory that it was before, and
    `numbers` what was lost.
    """

    numbers: Tensor
    plain: Tensor
    memory: Memory
    mean: Tensor | None = None

    def zeros(self) -> Tensor:
        """Room for the mean."""
        return torch.zeros_like(self.numbers) if self.mean is None else self.mean.zero_()


@dataclass(frozen=True)
class Settings:
    """How a message is averaged. `keeps`: errors are kept; `leaves_out`: a rank whose values are
    not finite does not count, else the mean becomes NaN. `origin` must be that of all ranks."""

    codec: Codec
    via: str
    iteration: int
    keeps: bool
    leaves_out: bool = False
    origin: int = 0


@dataclass
class Outcome:
    """Of one part: who had values that are not finite (all ranks, if only the mean is not), and the
    bytes of an all-reduce that would have put as many on the link."""

    bad: Sequence[int]
    bytes: int


class OriginError(RuntimeError):
    """The ranks count changes from different parameters."""

    def __init__(self, odd: int, rank: int) -> None:
        super().__init__(
            f"rank {odd} counts the changes of its parameters from others than rank {rank}: "
            "weights were loaded on some ranks only; load the same weights on every rank"
        )


def average(part: Part, how: Settings, act: Collectives) -> Outcome:
    """Average one part over all ranks of a group."""
    bad = not (_finite(part.numbers) and _finite(part.plain))
    if bad:
        part.numbers.zero_()
        part.plain = torch.zeros_like(part.plain)
    by_way: dict[str, Callable[[Part, Settings, Collectives, bool], Outcome]] = {
        "gather": _gathered,
        "scatter": _scattered,
        "reduce": _reduced,
    }
    memory = dict(part.memory)
    outcome = by_way[how.via](part, how, act, bad)
    assert part.mean is not None
    if not outcome.bad and not _finite(part.mean):
        # Too large to be encoded or added up. All ranks see it; what is lost of it is not kept.
        part.memory.clear()
        part.memory.update(memory)
        return replace(outcome, bad=range(act.size))
    factor = _of_the_rest(outcome.bad, how, act.size)
    if factor != 1:
        part.plain = part.plain * factor
        if how.via != "scatter" or math.isnan(factor):
            part.mean *= factor
    return outcome


def send(
    part: Part, how: Settings, act: Collectives, ranks: tuple[int, int], *, gives: bool
) -> Outcome:
    """From one rank to another, who has a part of the same size; `gives`: this rank is the one."""
    size, dtype = part.numbers.numel(), part.numbers.dtype
    rows = Rows(how.codec.bytes_of(size, dtype.itemsize), part.plain.nbytes)
    row = rows.make(1, part.numbers.device)
    if gives:
        write_head(row[0], not (_finite(part.numbers) and _finite(part.plain)), how.origin)
        code(how.codec).encode(part.numbers, rows.codes(row[0]))
        rows.plain(row[0], part.plain.dtype).copy_(part.plain)
    act.send(row[0], *ranks)
    found, [origin] = read_heads(row)
    if origin != how.origin:
        raise OriginError(ranks[1], ranks[0])
    part.mean = part.zeros()
    if found:
        part.mean.fill_(math.nan)
    else:
        code(how.codec).add(rows.codes(row[0]), part.mean)
    bad = bool(found) or not _finite(part.mean)  # also what was too large to be encoded
    part.plain = rows.plain(row[0], part.plain.dtype).clone()
    return Outcome([ranks[0]] if bad else [], row.nbytes)


def _of_the_rest(bad: Sequence[int], how: Settings, size: int) -> float:
    """What makes the mean over all ranks that over the ranks with finite values, or NaN of it."""
    if not bad:
        return 1.0
    return size / (size - len(bad)) if how.leaves_out and len(bad) < size else math.nan


def _gathered(part: Part, how: Settings, act: Collectives, bad: bool) -> Outcome:
    """All codes to all ranks; the sum goes in the order of the ranks, so it is the same on all."""
    x, codes = part.numbers, code(how.codec)
    rows = Rows(how.codec.bytes_of(x.numel(), x.dtype.itemsize), part.plain.nbytes)
    table = rows.make(act.size, x.device)
    own = table[act.rank]
    write_head(own, bad, how.origin)
    codes.encode(x, rows.codes(own))
    rows.plain(own, part.plain.dtype).copy_(part.plain)
    act.by_verb["all_gather"](table.view(-1))
    found = _heard(table)
    mean = part.zeros()
    codes.add_all(rows.codes(table), mean)
    part.mean = mean.div_(act.size)
    part.plain = _mean_of(table, rows, part.plain)
    return Outcome(found, table.nbytes // 2)


def _scattered(part: Part, how: Settings, act: Collectives, bad: bool) -> Outcome:
    """Every shard's codes to its owner, who sends the mean round, encoded once more."""
    x, codes, size = part.numbers, code(how.codec), act.size
    cuts = shards(x.numel(), size, how.codec.grain)
    code_bytes = [how.codec.bytes_of(c.stop - c.start, x.dtype.itemsize) for c in cuts]
    rows = Rows(code_bytes[0])
    table = rows.make(size, x.device)
    write_head(table, bad, how.origin)
    for first, shards_of_x in _tables(x, cuts):
        given = table[first : first + len(shards_of_x)]
        codes.encode(shards_of_x, rows.codes(given, code_bytes[first]))
    act.exchange(table.view(-1))
    found, sent = _heard(table), table.nbytes
    mine, count = cuts[act.rank], code_bytes[act.rank]
    shard = x.new_zeros(mine.stop - mine.start)
    codes.add_all(rows.codes(table, count), shard)
    shard.div_(size)
    if not math.isnan(factor := _of_the_rest(found, how, size)):
        shard *= factor
    if how.keeps and "mean" in part.memory:
        shard += part.memory["mean"]
    full = Rows(rows.code_bytes, part.plain.nbytes)
    second = full.make(size, x.device)  # where the table was
    codes.encode(shard, full.codes(second[act.rank], count))
    full.plain(second[act.rank], part.plain.dtype).copy_(part.plain)
    act.by_verb["all_gather"](second.view(-1))
    mean = part.zeros()
    for first, shards_of_mean in _tables(mean, cuts):
        taken = second[first : first + len(shards_of_mean)]
        codes.add(full.codes(taken, code_bytes[first]), shards_of_mean)
    if how.keeps and not found:
        part.memory["mean"] = shard
    part.mean = mean
    part.plain = _mean_of(second, full, part.plain)
    return Outcome(found, (sent + second.nbytes) // 2)


def _tables(x: Tensor, cuts: Sequence[slice]) -> Iterator[tuple[int, Tensor]]:
    """Shards as tables of those of one length, each with the rank of its first one."""
    lengths = [cut.stop - cut.start for cut in cuts]
    for length in sorted({*lengths} - {0}, reverse=True):
        first, count = lengths.index(length), lengths.count(length)
        start = cuts[first].start
        yield first, x[start : start + count * length].view(count, length)


def _reduced(part: Part, how: Settings, act: Collectives, bad: bool) -> Outcome:
    """Linear codes are averaged as they are. Flags and what is not encoded go with them."""
    x, codec = part.numbers, how.codec
    flags = x.new_zeros(act.size, HEAD)
    flags[act.rank] = x.new_tensor([bad, *(how.origin >> 21 * k & 0x1FFFFF for k in range(3))])
    tail = part.plain.to(x.dtype)
    sent = 0

    def averaged(values: Tensor, *more: Tensor) -> list[Tensor]:
        nonlocal sent
        whole = torch.cat([values.reshape(-1), *(m.view(-1) for m in more)])
        act.by_verb["all_reduce"](whole)
        sent += whole.nbytes
        return list(whole.split([values.numel(), *(m.numel() for m in more)]))

    if isinstance(codec, RandomK):
        places = torch.from_numpy(codec.places(x.numel(), how.iteration)).to(x.device)
        values, flags, tail = averaged(x[places], flags, tail)
        x[places] = 0
        mean = part.zeros()
        mean[places] = values
    else:
        assert isinstance(codec, PowerSGD)
        if codec.dense(x.numel()):
            mean, flags, tail = averaged(x, flags, tail)
            x.zero_()
        else:
            shape = matrix(x.numel())
            whole = torch.nn.functional.pad(x, (0, math.prod(shape) - x.numel())).view(shape)
            q = part.memory.get("q")
            q = x.new_tensor(codec.start(x.numel())) if q is None else q
            p, flags, tail = averaged(whole @ q, flags, tail)
            p = torch.linalg.qr(p.view(shape[0], -1)).Q
            own = whole.T @ p
            (q,) = averaged(own)
            q = q.view_as(own)
            if not bool(flags.view(-1, HEAD)[:, 0].any()):
                part.memory["q"] = q
            whole = torch.addmm(whole, p, own.T, alpha=-1)
            part.numbers = whole.view(-1)[: x.numel()]
            mean = (p @ q.T).view(-1)[: x.numel()]
    part.mean, part.plain = mean, tail.to(part.plain.dtype)
    told = flags.view(-1, HEAD)
    bad_ones = [rank for rank, share in enumerate(told[:, 0].tolist()) if share > 0]
    _require_same([tuple(origin) for origin in told[:, 1:].tolist()])
    return Outcome(bad_ones, sent)


def _finite(x: Tensor) -> bool:
    """Whether all elements are; one sum, and a second look where that has overflowed."""
    return not x.numel() or math.isfinite(x.sum().item()) or bool(torch.isfinite(x).all())


def _heard(table: Tensor) -> list[int]:
    """Ranks whose values were not finite; RuntimeError if anchors are not the same."""
    bad, origins = read_heads(table)
    _require_same(origins)
    return bad


def _require_same(origins: Sequence[Any]) -> None:
    """OriginError unless the ranks' origins are the same, or what became of them in an average."""
    odd = next((rank for rank, origin in enumerate(origins) if origin != origins[0]), None)
    if odd is not None:
        raise OriginError(odd, 0)


def _mean_of(table: Tensor, rows: Rows, like: Tensor) -> Tensor:
    """The mean of what is not encoded, summed up in the order of the ranks."""
    total = torch.zeros_like(like)
    for row in table if like.numel() else ():
        total += rows.plain(row, like.dtype)
    return total.div_(len(table))


def handed_over(
    codec: Codec, via: str, size: int, itemsize: int, plain_bytes: int, ranks: int
) -> int:
    """Bytes of an all-reduce that puts as many on the link as a message of so many elements."""
    if via == "gather":
        return ranks * Rows(codec.bytes_of(size, itemsize), plain_bytes).bytes // 2
    if via == "scatter":
        first = shards(size, ranks, codec.grain)[0]
        most = codec.bytes_of(first.stop - first.start, itemsize)
        return ranks * (Rows(most).bytes + Rows(most, plain_bytes).bytes) // 2
    return codec.bytes_of(size, itemsize) + plain_bytes + HEAD * ranks * itemsize
