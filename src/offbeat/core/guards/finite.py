"""Finite guard: checks for NaN and infinity in messages, and names the ranks that sent them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from offbeat.core.plan import Payload, Transfer, Verb
from offbeat.core.transport.link import Message

OnNonfinite = Literal["raise", "ignore"]
POLICIES: tuple[str, ...] = get_args(OnNonfinite)

KINDS = {"grad": "gradient", "param": "parameters", "state": "optimizer state"}

Collectives = Mapping[Verb, Callable[[Tensor], None]]


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
    """

    def __init__(
        self,
        policy: OnNonfinite,
        rank: int,
        world_size: int,
        names: Callable[[range], str],
    ):
        self._policy, self._rank, self._world_size, self._names = policy, rank, world_size, names
        # Whether this rank's values were bad, for each average between its two halves.
        self._own: dict[tuple[Payload, torch.dtype], bool] = {}

    @property
    def active(self) -> bool:
        return self._policy != "ignore" and self._world_size > 1

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
            return self._exchange(transfer, tensor, act)
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
        return [] if is_finite(tensor[:1]) else self._culprits(bad, tensor, collectives)

    def _exchange(
        self, transfer: Transfer, tensor: Tensor, act: Callable[[Tensor], None]
    ) -> list[int]:
        """Exchange a tensor with a partner; return which of both had values that are not finite."""
        assert transfer.ranks is not None
        spoilt = [] if is_finite(tensor) else [self._rank]
        act(tensor)
        if not is_finite(tensor):
            spoilt += [rank for rank in transfer.ranks if rank != self._rank]
        return sorted(spoilt)

    def _culprits(self, bad: bool, like: Tensor, collectives: Collectives) -> list[int]:
        """Return the ranks with `bad` values, by one small all-reduce on the same link."""
        place = self._rank, self._world_size
        return find_bad_ranks(bad, *place, collectives["all_reduce"], like.device)

    def check_message(
        self, transfer: Transfer, iteration: int, culprits: Sequence[int], tensors: Sequence[Tensor]
    ) -> None:
        """Check the result of a message with culprits before it is used.

        Raises:
            RuntimeError: user code has not replaced the bad values; or the message is one between
                two ranks.
        """
        payload = transfer.payload
        kind, where = KINDS.get(payload.buffer, payload.buffer), self._names(payload.buckets)
        what = f"{kind} of bucket {where} in iteration {iteration}"
        who = _name_ranks(culprits)
        if transfer.verb == "exchange":
            raise RuntimeError(
                f"{who} exchanged values that are not finite (NaN or infinity) as {what}, with the "
                "partner of this round; lower the learning rate or clip gradients, and start from "
                "the last checkpoint"
            )
        if transfer.ranks is not None:
            raise self._spoilt_sum(culprits, payload.buckets, iteration)
        if all(is_finite(t) for t in tensors if t.numel()):
            return
        raise RuntimeError(
            f"{who} sent values that are not finite (NaN or infinity) to the {what}, so their "
            "average is not finite on any rank; lower the learning rate or clip gradients, and "
            "start from the last checkpoint"
        )

    def check_replicas(self, culprits: Sequence[int]) -> None:
        """Raise RuntimeError if there are ranks whose parameters are not finite, before all
        replicas are averaged as a whole."""
        if culprits:
            raise RuntimeError(
                f"parameters of {_name_ranks(culprits)} are not finite (NaN or infinity), so an "
                "average of all replicas would not be finite on any rank; lower the learning rate "
                "or clip gradients, and start from the last checkpoint"
            )

    def require_finite_sum(self, run: range, iteration: int, tensors: Iterable[Tensor]) -> None:
        """Check a sum that passes from rank to rank, after this rank has added its part.

        Raises:
            RuntimeError: the sum is not finite. It was finite when it was received.
        """
        if self.active and not all_finite(tensors):
            raise self._spoilt_sum([self._rank], run, iteration)

    def _spoilt_sum(self, culprits: Sequence[int], run: range, iteration: int) -> RuntimeError:
        return RuntimeError(
            f"{_name_ranks(culprits)} sent values that are not finite (NaN or infinity) to the "
            f"gradient of bucket {self._names(run)} in iteration {iteration}, which workers sum up "
            "one after the other; lower the learning rate, and start from the last checkpoint"
        )


def find_bad_ranks(
    bad: bool, rank: int, ranks: int, all_reduce: Callable[[Tensor], None], where: torch.device
) -> list[int]:
    """Return the ranks for which `bad` is true. Every rank must call it."""
    flags = torch.zeros(ranks, dtype=torch.float32, device=where)
    flags[rank] = float(bad)
    all_reduce(flags)
    return [other for other, share in enumerate(flags.tolist()) if share > 0]


def is_finite(tensor: Tensor) -> bool:
    """Whether all elements are finite.

    Computes one sum. Elements are tested one by one only if the sum is not finite.
    """
    if math.isfinite(_sum(tensor).item()):
        return True
    return bool(torch.isfinite(tensor).all())


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether all elements of all tensors are finite."""
    several = list(tensors)
    sums = [_sum(t).double() for t in several]
    if not sums or bool(torch.stack(sums).isfinite().all()):  # one wait for the device
        return True
    return all(is_finite(t) for t in several)


def _sum(tensor: Tensor) -> Tensor:
    return tensor.sum(dtype=tensor.dtype if tensor.dtype.itemsize > 2 else torch.float32)


def require_policy(policy: object) -> None:
    """Raise ValueError unless `policy` is one of `POLICIES`."""
    if policy not in POLICIES:
        raise ValueError(f"on_nonfinite ({policy!r}) must be one of {', '.join(POLICIES)}")


def _name_ranks(ranks: Sequence[int]) -> str:
    if not ranks:
        return "the sum over ranks overflowed: no rank"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


class NonfiniteMessages:
    """Messages with values that were not finite, until their results are used.

    Results that a step uses are checked in the step, because a gradient scaler may skip it, and
    user code may replace the values.
    """

    def __init__(self, guard: FiniteGuard, refuse: Callable[[BaseException], None]):
        self._guard, self._refuse = guard, refuse
        self._messages: list[Message] = []

    def note(self, message: Message, *, later: bool) -> None:
        """Add a message with culprits. Check it immediately unless its result is used `later`."""
        self._messages.append(message)
        if not later:
            self.check()

    def require_finite_sum(self, run: range, iteration: int, tensors: Iterable[Tensor]) -> None:
        """Check a sum that passes from rank to rank. An error is passed to `refuse`."""
        try:
            self._guard.require_finite_sum(run, iteration, tensors)
        except RuntimeError as error:
            self._refuse(error)

    def check(self, *, unused: bool = False) -> None:
        """Check all messages whose results are used now; drop them if they are `unused`."""
        messages, self._messages = self._messages, []
        for m in () if unused else messages:
            try:
                self._guard.check_message(m.transfer, m.iteration, m.culprits, m.tensors)
            except RuntimeError as error:
                self._refuse(error)
