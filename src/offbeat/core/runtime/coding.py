"""Coding of transfers with a wire format: encoding of storage contents and decoding of results."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from offbeat.core.buckets.checksum import checksum
from offbeat.core.buckets.flat import Flat
from offbeat.core.codecs import MEMORY_PREFIX, Codec, codec, memory_of, way
from offbeat.core.codecs.average import (
    Part,
    Settings,
    are_within,
    average,
    equivalent_bytes,
    send,
)
from offbeat.core.codecs.pieces import CUT, elements_per_pass
from offbeat.core.codecs.rows import Rows
from offbeat.core.codecs.spares import Spares
from offbeat.core.codecs.tensor_codecs import code
from offbeat.core.guards.finite import find_bad_ranks
from offbeat.core.plan import Plan, Transfer, Wire
from offbeat.core.plan.semantics import is_finite
from offbeat.core.strategy.plan_memory import kept_in_storage
from offbeat.core.transport.collectives import Collectives, Levels
from offbeat.core.transport.link import Message


@dataclass
class StoredPart(Part):
    """Part that is encoded from the storage, and whose mean is written there, cut by cut.

    The storage changes after the codes of all ranks have arrived. Errors are then computed again,
    so that they need no memory before.

    Attributes:
        codec: codec of the message.
        payload: views of the values.
        anchors: views of what is subtracted before encoding; empty without an anchor.
        errors: views of the stored errors; empty without error feedback.
        targets: views that receive the result.
        behind: views that receive the mean of the unencoded elements.
    """

    codec: Codec = field(kw_only=True)
    payload: Sequence[Tensor] = ()
    anchors: Sequence[Tensor] = ()
    errors: Sequence[Tensor] = ()
    targets: Sequence[Tensor] = ()
    behind: Sequence[Tensor] = ()
    _is_clear: bool = False

    @property
    def size(self) -> int:
        return sum(x.numel() for x in self.payload)

    def are_within(self, most: float) -> bool:
        starts = range(0, self.size, len(self.numbers) or 1)
        cuts = (slice(at, min(at + len(self.numbers), self.size)) for at in starts)
        return all(are_within(self.load(cut), most) for cut in cuts)

    def clear(self) -> None:
        self._is_clear = True

    def load(self, cut: slice) -> Tensor:
        x = self.numbers[: cut.stop - cut.start]
        if self._is_clear:
            return x.zero_()
        _for_each_piece(x, self.payload, Tensor.copy_, cut)
        _for_each_piece(x, self.anchors, Tensor.sub_, cut)
        _for_each_piece(x, self.errors, Tensor.add_, cut)
        return x

    def store_means(
        self, cuts: Sequence[slice], add: Callable[[int, Tensor], None], *, keeps: bool
    ) -> None:
        for i, cut in enumerate(cuts):
            x = self.load(cut)
            if keeps and self.errors:
                size = self.codec.bytes_of(x.numel(), x.itemsize)
                code(self.codec).encode(x, x.new_empty(size, dtype=torch.uint8))
                _for_each_piece(x, self.errors, _store, cut)
            add(i, x.zero_())
            if self.anchors:
                _for_each_piece(x, self.anchors, lambda mean, anchor: anchor.add_(mean), cut)
                _for_each_piece(x, self.anchors, Tensor.copy_, cut)
            _for_each_piece(x, self.targets, _store, cut)

    def store_plain(self) -> None:
        """Store the mean of the unencoded elements."""
        _for_each_piece(self.plain, self.behind, _store)


Views = list[tuple[list[Tensor], list[Tensor]]]
ORIGIN = "origin of changes"  # key of the origin's fingerprint in the rules' memory


class Coding:
    """Wire formats of one plan on one rank.

    Values are copied when a message is released, as differences to its anchor if it has one. The
    link's thread adds the error feedback, then encodes, sends and decodes the sum. The result is
    stored in its buffer and in the anchor when it is due.

    The anchor of a send holds the receiver's values. The link's thread subtracts it from the values
    before encoding and adds the decoded message to it.

    Where members of the job may change, they agree after a failure that a message counts as
    skipped, and some of them may have received it. So its error is stored with its result.

    Args:
        plan: the plan.
        flat: storage of the model.
        memory: values that rules and codecs keep.
        defers_errors: whether errors are stored with the results; otherwise when messages arrive.

    Attributes:
        drops_results: whether averages that are completed will not be applied. If errors are
            deferred, these and anchors stay then as if the messages were skipped.
    """

    drops_results = False

    def __init__(
        self, plan: Plan, flat: Flat, memory: dict[str, Any], *, defers_errors: bool = False
    ) -> None:
        self._flat, self._memory, self._defers_errors = flat, memory, defers_errors
        self._stored = frozenset[int]() if defers_errors else kept_in_storage(plan)
        wires = [t.wire for t in plan.transfers if t.wire is not None]
        self._anchors = sorted({wire.anchor for wire in wires if wire.anchor is not None})
        self._errors = sorted({wire.error for wire in wires if wire.error is not None})
        self._tracked = any(t.sends_delta for t in plan.transfers)
        self._stale = self._united = False
        self._spares = Spares()

    def mark_stale(self) -> None:
        """Mark anchors, errors and codec memory as outdated, because other weights are about to be
        loaded."""
        self._stale = True

    def mark_united(self) -> None:
        """Mark anchors as outdated, because all ranks, including receivers, are about to have the
        same parameters."""
        self._united = self._tracked

    def mark_restored(self) -> None:
        """Mark all buffers as valid after they were loaded from a checkpoint."""
        self._stale = self._united = False

    def begin_epoch(self, *, are_united: bool) -> None:
        """Restart what depends on the members of the job, which have changed: the memory of codecs,
        and anchors if all ranks have the same parameters. Otherwise anchors are equal on all ranks,
        and continue. Errors continue.

        Args:
            are_united: whether all ranks have the same parameters.
        """
        self.forget_memory()
        self._united = self._united or are_united
        self.restart_if_outdated()

    def forget_memory(self) -> None:
        """Restart the memory of codecs, and compare the anchors of all ranks in the next
        message."""
        for name in [name for name in self._memory if name.startswith(MEMORY_PREFIX)]:
            del self._memory[name]
        self._memory.pop(ORIGIN, None)

    @property
    def is_outdated(self) -> bool:
        """Whether anchors hold weights that were replaced."""
        return self._stale or self._united

    def restart_if_outdated(self) -> None:
        """At the start of an iteration, restart outdated anchors from the current parameters, and
        zero outdated errors."""
        if not self.is_outdated:
            return
        stale = self._stale
        self.mark_restored()
        if stale:
            self.forget_memory()
        self._memory.pop(ORIGIN, None)
        (params,) = self._flat.contents("param")
        for name in self._anchors:
            self._flat.fill(name, [params])
        for name in self._errors if stale else ():
            for tensor in self._flat.contents(name)[0]:
                tensor.data.zero_()

    def encode_message(self, t: Transfer, copy: int, planned: int) -> CodedMessage:
        """Return a message of the current contents of the storage.

        Args:
            t: transfer with a wire format.
            copy: copy of its buffer.
            planned: number of the iteration in the plan.
        """
        assert t.wire is not None
        parts = []
        anchors = None if t.wire.anchor is None else self._views(t, t.wire.anchor)
        memory = self._memory.setdefault(memory_of(t), {})
        for i, (numbers, behind) in enumerate(
            self._flat.split_payload(t.payload, copy, t.payload.buffer)
        ):
            whole = self._take_spare(numbers)
            if anchors is None or t.sends_delta:
                _for_each_piece(whole, numbers, Tensor.copy_)
            else:
                _subtract_pieces(whole, numbers, anchors[i][0])
            plain = torch.cat(behind) if behind else numbers[0].new_empty(0)
            parts.append(Part(whole, plain, memory.setdefault(str(i), {})))
        errors = self._views(t, t.wire.error) if t.wire.error is not None else None
        there = anchors if t.sends_delta else None
        how = replace(_settings(t.wire), iteration=planned, origin=self._origin())
        return CodedMessage(
            t, parts, errors, how, there, spares=self._spares, defers_errors=self._defers_errors
        )

    def stays_in_storage(self, t: Transfer) -> bool:
        """Return whether a message may be encoded from the storage, not from a copy: its codes are
        decoded by parts, and nothing else uses the parameters until it is due."""
        return id(t) in self._stored

    def encode_in_storage(self, t: Transfer, copy: int, planned: int) -> CodedMessage:
        """Return a message that stores its result itself, see `stays_in_storage`.

        Args:
            t: transfer with a wire format.
            copy: copy of its buffer.
            planned: number of the iteration in the plan.
        """
        assert t.wire is not None
        how = replace(_settings(t.wire), iteration=planned, origin=self._origin())
        given = self._flat.split_payload(t.payload, copy, t.payload.buffer)
        targets = self._flat.split_payload(t.payload, copy, t.target)
        none: Views = [([], [])] * len(given)
        anchors = none if t.wire.anchor is None else self._views(t, t.wire.anchor)
        errors = none if t.wire.error is None else self._views(t, t.wire.error)
        memory = self._memory.setdefault(memory_of(t), {})
        parts: list[Part] = []
        for i, (numbers, behind) in enumerate(given):
            part = StoredPart(
                numbers[0].new_empty(0, dtype=_wide_dtype(numbers[0])),
                torch.cat(behind) if behind else numbers[0].new_empty(0),
                memory.setdefault(str(i), {}),
                codec=how.codec,
                payload=numbers,
                anchors=anchors[i][0],
                errors=errors[i][0],
                targets=targets[i][0],
                behind=targets[i][1],
            )
            parts.append(part)
        return CodedMessage(t, parts, None, how, spares=self._spares)

    def receiving_message(self, t: Transfer, copy: int) -> CodedMessage:
        """Return a message without contents that receives another rank's message."""
        assert t.wire is not None
        views = self._flat.split_payload(t.payload, copy, t.target)
        parts = [
            Part(self._take_spare(numbers), torch.cat([numbers[0][:0], *behind]), {})
            for numbers, behind in views
        ]
        how = replace(_settings(t.wire), origin=self._origin())
        return CodedMessage(t, parts, None, how, gives=False, spares=self._spares)

    def _take_spare(self, numbers: Sequence[Tensor]) -> Tensor:
        """Return a tensor for all the given values together; float32 for 16-bit values, which
        codecs do not support."""
        size = sum(x.numel() for x in numbers)
        return self._spares.take(size, _wide_dtype(numbers[0]), numbers[0].device)

    @property
    def drops(self) -> bool:
        """Whether arrived messages leave anchors, errors and buffers as they are."""
        return self.drops_results and self._defers_errors

    def store_result(self, message: Message, copy: int) -> None:
        """Store an arrived result in a copy of its target, and in the anchor if the transfer has
        one; then the encoding errors."""
        t = message.transfer
        assert t.wire is not None
        targets = self._flat.split_payload(t.payload, copy, t.target)
        anchors = None if t.wire.anchor is None else self._views(t, t.wire.anchor)
        for i, (numbers, behind) in enumerate(targets):
            mean, plain = message.tensors[2 * i : 2 * i + 2]
            if t.sends_delta:
                _for_each_piece(mean, numbers, lambda x, target: target.add_(x))
            elif anchors is None:
                _for_each_piece(mean, numbers, _store)
            else:
                _for_each_piece(mean, anchors[i][0], lambda x, anchor: anchor.add_(x))
                for target, anchor in zip(numbers, anchors[i][0], strict=True):
                    target.copy_(anchor)
            _for_each_piece(plain, behind, _store)
        self._store_errors(message, t.wire)
        # A guard still reads tensors with culprits. Links keep results, where members may change.
        if not (message.culprits or self._defers_errors):
            for mean in message.tensors[::2]:
                self._spares.give(mean)

    def _store_errors(self, message: Message, wire: Wire) -> None:
        """Store the errors of a message that are not stored yet: none if its values were not
        finite. If another rank has sent the result, because this rank has not received the message,
        the error is unknown and becomes zero."""
        if wire.error is None or not (message.errors or message.is_foreign):
            return
        views = self._views(message.transfer, wire.error)
        if message.is_foreign:
            for stored in (x for pieces, _ in views for x in pieces):
                stored.zero_()
        else:
            for error, (pieces, _) in zip(message.errors, views, strict=True):
                _for_each_piece(error, pieces, _store)
                self._spares.give(error)
        message.errors = ()

    def bytes_of(self, t: Transfer, ranks: int) -> int:
        """Return the bytes of a message between `ranks` ranks."""
        assert t.wire is not None
        used, via, total = codec(t.wire.name, dict(t.wire.args)), _settings(t.wire).via, 0
        copy = self._flat.copy_index(t.payload.buffer)
        for numbers, behind in self._flat.split_payload(t.payload, copy, t.payload.buffer):
            size, itemsize = sum(x.numel() for x in numbers), max(numbers[0].itemsize, 4)
            plain = sum(x.nbytes for x in behind)
            if t.verb == "send":
                total += Rows(used.bytes_of(size, itemsize), plain).bytes
            else:
                total += equivalent_bytes(used, via, size, itemsize, plain, ranks)
        return total

    def _views(self, t: Transfer, buffer: str) -> Views:
        return self._flat.split_payload(t.payload, self._flat.copy_index(buffer), buffer)

    def _origin(self) -> int:
        """Return a fingerprint of the first anchors; it excludes running statistics, which may
        differ between ranks."""
        if ORIGIN not in self._memory:
            run = range(len(self._flat.buckets))
            tensors = (x for name in self._anchors for x in self._flat.parameters_of(name, run))
            self._memory[ORIGIN] = checksum(*tensors) >> 1
        return self._memory[ORIGIN]


@dataclass
class CodedMessage:
    """One message with a wire format, called by the link's thread to send it.

    Attributes:
        transfer: transfer of the message.
        parts: values to encode, by device and dtype.
        errors: views of the error buffer; None without error feedback.
        settings: codec and its settings.
        there: for a send, views of the anchor with the receiver's values; otherwise None.
        gives: whether this rank is the sender.
        spares: pool of spare tensors.
        defers_errors: whether errors are returned, to be stored later; otherwise they are stored
            when the message has arrived.
    """

    transfer: Transfer
    parts: list[Part]
    errors: Views | None
    settings: Settings
    there: Views | None = None
    gives: bool = True
    spares: Spares = field(default_factory=Spares)
    defers_errors: bool = False

    @property
    def shapes(self) -> list[Tensor]:
        """Tensors with the shapes of the arriving tensors."""
        return [x for part in self.parts for x in (part.numbers, part.plain)]

    def __call__(self, message: Message, act: Collectives) -> int:
        """Send the message, and set its result: the arrived tensors, the ranks whose values were
        not finite, and the errors that are to be stored later.

        Errors are stored only after the whole message has arrived.

        Args:
            message: the message.
            act: collectives of its link.

        Returns:
            The bytes sent.
        """
        if act.levels is not None:
            sent = self._send_shards(message, act, act.levels)
        else:
            sent = self._send_whole(message, act)
        # The thread of the link keeps its last message, and must not keep storage that is replaced.
        self.parts, self.errors, self.there = [], None, None
        return sent

    def _send_whole(self, message: Message, act: Collectives) -> int:  # noqa: C901
        how, sent, bad = self.settings, 0, list[int]()
        for i, part in enumerate(self.parts):
            if isinstance(part, StoredPart):
                x, most = part.numbers, max(CUT, elements_per_pass(part.numbers))
                part.numbers = self.spares.take(min(part.size, most), x.dtype, x.device)
            x = part.numbers
            if self.defers_errors and self.errors is not None:
                part.mean = self.spares.take(x.numel(), x.dtype, x.device)
            else:
                part.keep = partial(self._keep_error, i)
            if self.errors is not None:
                _for_each_piece(x, self.errors[i][0], Tensor.add_)
            if self.there is not None:
                _for_each_piece(x, self.there[i][0], Tensor.sub_)
            ranks = self.transfer.ranks
            outcome = (
                average(part, how, act)
                if ranks is None
                else send(part, how, act, ranks, gives=self.gives)
            )
            sent += outcome.bytes
            bad += outcome.bad
        is_bad = bool(bad)
        if self.transfer.ranks is None and act.members:
            bad = [act.members[rank] for rank in bad]
        arrived, deferred = list[Tensor](), list[Tensor]()
        for i, part in enumerate(self.parts):
            if isinstance(part, StoredPart):
                part.store_plain()
                self.spares.give(part.numbers)
                arrived += [*part.targets, part.plain]
                continue
            assert part.mean is not None
            if part.keep is None:
                (self.spares.give if is_bad else deferred.append)(part.numbers)
            if self.there is not None and not is_bad:
                _for_each_piece(part.mean, self.there[i][0], lambda x, there: there.add_(x))
            arrived += [part.mean, part.plain]
        t = self.transfer
        if t.ranks is not None and t.payload.buffer != "grad":
            bad = []  # an earlier check reports non-finite parameters, as without a codec
        message.tensors, message.culprits, message.errors = arrived, sorted(set(bad)), deferred
        return sent

    def _keep_error(self, i: int, error: Tensor) -> None:
        """Store the encoding error of the i-th part."""
        if self.errors is not None:
            _for_each_piece(error, self.errors[i][0], _store)

    def _send_shards(  # noqa: C901
        self, message: Message, act: Collectives, levels: Levels
    ) -> int:
        """Average over nodes of several ranks: each rank encodes its shard of its node's average.

        A rank with values that are not finite fills them with NaN, so that all shards of its node
        are bad.
        """
        how, sent = self.settings, 0
        own_bad = not all(is_finite(x) for part in self.parts for x in (part.numbers, part.plain))
        taken, arrived, kept = [], list[Tensor](), list[tuple[Tensor, slice, int]]()
        for i, part in enumerate(self.parts):
            numbers, plain = part.numbers, part.plain
            mean = self.spares.take(numbers.numel(), numbers.dtype, numbers.device)
            for values in (numbers, plain) if own_bad else ():
                values.fill_(math.nan)
            own = Part(levels.reduce(numbers), levels.reduce(plain), part.memory)
            own.mean, tail = levels.own_shard(mean), levels.own_shard(plain)
            shard = levels.own_slice(numbers.numel())
            if self.errors is not None:
                _for_each_piece(own.numbers, self.errors[i][0], Tensor.add_, shard)
            if own.numbers.numel() or own.plain.numel():
                outcome = average(own, how, levels.column)
                sent += outcome.bytes
                levels.own_shard(mean).copy_(own.mean)
                tail.copy_(own.plain)
                kept.append((own.numbers, shard, i))
            for values in (mean, plain):
                levels.inside.by_verb["all_gather"](values)
            arrived += [mean, plain]
            taken.append(numbers)
        bad, lost = list[int](), not all(map(is_finite, arrived))
        if lost:  # finite values may overflow in the codec or in the sum
            where, add = taken[0].device, act.by_verb["all_reduce"]
            bad = find_bad_ranks(own_bad, levels.rank, levels.ranks, add, where)
            bad = bad or [*range(levels.ranks)]
        deferred: list[Tensor] = []
        if self.errors is not None and not lost:
            if self.defers_errors:
                deferred = [torch.zeros_like(whole) for whole in taken]
            for numbers, shard, i in kept:
                if self.defers_errors:
                    deferred[i][shard] = numbers
                else:
                    _for_each_piece(numbers, self.errors[i][0], _store, shard)
        for x in taken:
            self.spares.give(x)
        message.tensors, message.culprits, message.errors = arrived, bad, deferred
        return sent


def _store(x: Tensor, stored: Tensor) -> None:
    stored.copy_(x)


def _wide_dtype(x: Tensor) -> torch.dtype:
    return torch.float32 if x.itemsize < 4 else x.dtype


def _settings(wire: Wire) -> Settings:
    args = dict(wire.args)
    used = codec(wire.name, args)
    return Settings(used, way(wire.name, args), 0, keeps=wire.error is not None)


def _subtract_pieces(flat: Tensor, over: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    """Write the differences of two lists of tensors to `flat`, end to end; in one pass if all
    dtypes are equal."""
    at = 0
    for one, other in zip(over, others, strict=True):
        to = flat[at : at + one.numel()]
        if one.dtype == other.dtype == flat.dtype:
            torch.sub(one.detach(), other.detach(), out=to)
        else:
            to.copy_(one).sub_(other)
        at += one.numel()


def _for_each_piece(
    flat: Tensor, over: Sequence[Tensor], act: Any, shard: slice | None = None
) -> None:
    """Call `act(piece, other)` for each tensor in `over` and the piece of `flat` at its place. With
    a shard, `flat` holds only these elements of the tensors end to end."""
    begin = 0
    first, last = (0, flat.numel()) if shard is None else (shard.start, shard.stop)
    for other in over:
        start, stop = max(begin, first), min(begin + other.numel(), last)
        if start < stop:
            act(flat[start - first : stop - first], other[start - begin : stop - begin])
        begin += other.numel()
