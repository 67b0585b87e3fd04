"""Finite guard: checks for NaN and infinity in messages, and names the ranks that sent them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from offbeat.core.plan import Payload, Transfer, Verb
from offbeat.core.plan.semantics import is_finite
from offbeat.core.transport.link import Message

OnNonfinite = Literal["raise", "ignore"]
POLICIES: tuple[str, ...] = get_args(OnNonfinite)

KINDS = {"grad": "gradient", "param": "parameters", "state": "optimizer state"}

Collectives = Mapping[Verb, Callable[[Tensor], None]]


def _raise(error: BaseException) -> None:
    raise error


class FiniteGuard:
    """Runs every collective of every link with a check, on the thread of the link.

    A rank with values that are not finite fills its message with NaN. So each rank detects a bad
    average by one element of the result, without a second message. Only in that case the ranks
    exchange which of them had bad values, on the same link. All ranks take the same branch, so the
    order of messages is the same.

    `reduce_scatter` and `all_gather` are the halves of one average. Values are checked in the first
    half, and the result in the second half.

    A replica whose ranks average their shards in messages of their own counts as bad as a whole:
    its ranks agree before each message, so that all shards take the same branch.

    A sum that passes from rank to rank is checked by its sender and its receiver. A rank never
    sends a bad sum that it has received, so the sender of a bad sum has caused it. In an exchange
    of two ranks both check the values of both.

    Results that a step uses are checked in the step, because a gradient scaler may skip it, and
    user code may replace the values.

    Args:
        policy: what is done about such values.
        rank: number of this rank.
        world_size: number of ranks.
        names: returns the names of a run of buckets.
        refuse: raises an error, after it has told the other ranks.
    """

    def __init__(
        self,
        policy: OnNonfinite,
        rank: int,
        world_size: int,
        names: Callable[[range], str],
        refuse: Callable[[BaseException], None] = _raise,
    ):
        self.active = policy != "ignore" and world_size > 1
        self._rank, self._world_size, self._names, self._refuse = rank, world_size, names, refuse
        self._messages: list[Message] = []  # with culprits, until their results are used
        # Whether this rank's values were bad, for each average between its two halves.
        self._own: dict[tuple[Payload, torch.dtype], bool] = {}

    def run(
        self,
        transfer: Transfer,
        tensor: Tensor,
        collectives: Collectives,
        is_any: Callable[[bool], bool] = bool,
    ) -> list[int]:
        """Run the collective of a transfer.

        Args:
            transfer: transfer of the message.
            tensor: tensor of the message.
            collectives: collectives of the link, by verb.
            is_any: whether a fact holds on any rank of this rank's replica, see `Collectives`.

        Returns:
            Ranks whose values were not finite, the same on every rank. The result of the collective
            is bad then.
        """
        verb, key = transfer.verb, (transfer.payload, tensor.dtype)
        act = collectives[verb]
        if verb == "broadcast":  # broadcasts send bytes
            act(tensor)
            return []
        if verb == "exchange":
            assert transfer.ranks is not None
            spoilt = [] if is_finite(tensor) else [self._rank]
            act(tensor)
            partners = [] if is_finite(tensor) else [*transfer.ranks]
            return sorted({*spoilt, *(rank for rank in partners if rank != self._rank)})
        if transfer.ranks is not None:
            act(tensor)
            is_sum = transfer.payload.buffer == "grad"
            return [transfer.ranks[0]] if is_sum and not is_finite(tensor) else []
        # All ranks of the replica call `is_any`, also those without elements.
        bad = verb != "all_gather" and is_any(not is_finite(tensor))
        if not tensor.numel():
            act(tensor)
            return []
        if verb == "all_gather":
            bad = self._own.pop(key, False)
        elif bad:
            tensor.data.fill_(math.nan)
        act(tensor)
        if verb == "reduce_scatter":
            self._own[key] = bad
            return []
        if is_finite(tensor[:1]):
            return []
        all_reduce = collectives["all_reduce"]
        return find_bad_ranks(bad, self._rank, self._world_size, all_reduce, tensor.device)

    def check_message(
        self, transfer: Transfer, iteration: int, culprits: Sequence[int], tensors: Sequence[Tensor]
    ) -> None:
        """Check the result of a message with culprits before it is used. Refuse it unless user code
        has replaced the bad values; always if it is one between two ranks."""
        payload = transfer.payload
        kind, where = KINDS.get(payload.buffer, payload.buffer), self._names(payload.buckets)
        what = f"the {kind} of bucket {where} in iteration {iteration}"
        if transfer.verb == "exchange":
            does, where = "exchanged", f"as {what}, with the partner of this round"
        elif transfer.ranks is not None:
            self._refuse(_passed_on(culprits, what))
            return
        elif all(map(is_finite, tensors)):
            return
        else:
            does, where = "sent", f"to {what}, so their average is not finite on any rank"
        self._refuse(_error(culprits, does, where))

    def require_finite_sum(self, run: range, iteration: int, tensors: Iterable[Tensor]) -> None:
        """Refuse a sum that passes from rank to rank if it is not finite after this rank has added
        its part. It was finite when it was received."""
        if self.active and not all(map(is_finite, tensors)):
            what = f"the gradient of bucket {self._names(run)} in iteration {iteration}"
            self._refuse(_passed_on([self._rank], what))

    # ---- messages with culprits, until their results are used -------------------------------

    def note(self, message: Message, *, later: bool) -> None:
        """Add a message with culprits. Check it immediately unless its result is used `later`."""
        self._messages.append(message)
        if not later:
            self.check()

    def check(self, *, unused: bool = False) -> None:
        """Check all messages whose results are used now; drop them if they are `unused`."""
        messages, self._messages = self._messages, []
        for m in () if unused else messages:
            self.check_message(m.transfer, m.iteration, m.culprits, m.tensors)


def require_finite_replicas(culprits: Sequence[int]) -> None:
    """Raise RuntimeError if there are ranks whose parameters are not finite, before all replicas
    are averaged as a whole."""
    if culprits:
        raise _error(culprits, "held", "as parameters, so no average of all replicas is finite")


def _passed_on(culprits: Sequence[int], what: str) -> RuntimeError:
    where = f"to {what}, which workers sum up one after the other"
    return _error(culprits, "sent", where, "lower the learning rate")


def _error(
    culprits: Sequence[int],
    does: str,
    where: str,
    remedy: str = "lower the learning rate or clip gradients",
) -> RuntimeError:
    names = ", ".join(map(str, culprits))
    who = f"rank{'s' if len(culprits) > 1 else ''} {names}"
    return RuntimeError(
        f"{who if culprits else 'the sum over ranks overflowed: no rank'} {does} values that are "
        f"not finite (NaN or infinity) {where}; {remedy}, and start from the last checkpoint"
    )


def find_bad_ranks(
    bad: bool, rank: int, ranks: int, all_reduce: Callable[[Tensor], None], where: torch.device
) -> list[int]:
    """Return the ranks for which `bad` is true. Every rank must call it."""
    flags = torch.zeros(ranks, dtype=torch.float32, device=where)
    flags[rank] = float(bad)
    all_reduce(flags)
    return [other for other, share in enumerate(flags.tolist()) if share > 0]


def require_policy(policy: object) -> None:
    """Raise ValueError unless `policy` is one of `POLICIES`."""
    if policy not in POLICIES:
        raise ValueError(f"on_nonfinite ({policy!r}) must be one of {', '.join(POLICIES)}")
