"""The finite guard: a NaN or an infinity of one rank is named before it spreads in silence."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from offbeat.core.plan import Payload, Transfer, Verb
from offbeat.core.transport.link import Message

OnNonfinite = Literal["raise", "skip", "ignore"]
POLICIES: tuple[str, ...] = get_args(OnNonfinite)

KINDS = {"grad": "gradient", "param": "parameters", "state": "optimizer state"}

Collectives = Mapping[Verb, Callable[[Tensor], None]]


class FiniteGuard:
    """Goes round every collective of every link, on the link's thread, off the critical path.

    `raise`: a rank whose own values are not all finite fills its message with NaN. Then one
    element tells every rank that the average is spoilt, in the same message and without another
    one. Only then the ranks tell each other whose fault it is, on the same link: all of them take
    the same branch, so order is kept.

    `skip`: before every message the ranks vote whose values are finite, one small message more.
    The others are left out, and take over the average of the rest.

    `reduce_scatter` and `all_gather` are one average: the first half brings the own values, the
    second shows the result.

    A sum that is handed from worker to worker is looked at on both sides: whoever sent it has made
    it not finite, as nobody hands on what already was. It is refused under both policies.
    """

    def __init__(
        self, policy: OnNonfinite, rank: int, world_size: int, names: Callable[[range], str]
    ):
        self._policy, self._rank, self._world_size, self._names = policy, rank, world_size, names
        # Of first halves whose second is still to come: whether the own values were bad.
        self._own: dict[tuple[Payload, torch.dtype], bool] = {}

    @property
    def active(self) -> bool:
        return self._policy != "ignore" and self._world_size > 1

    @property
    def leaves_out(self) -> bool:
        """Whether ranks with values that are not finite do not count."""
        return self._policy == "skip"

    def run(self, transfer: Transfer, tensor: Tensor, collectives: Collectives) -> list[int]:
        """Do the transfer's collective; ranks whose values were not finite, the same on every
        rank, if the result is to be refused (`raise`) or was mended (`skip`)."""
        verb, key = transfer.verb, (transfer.payload, tensor.dtype)
        act = collectives[verb]
        if not tensor.numel() or verb == "broadcast":  # of bytes
            act(tensor)
            return []
        if transfer.ranks is not None:
            act(tensor)
            handed = transfer.payload.buffer == "grad"
            return [transfer.ranks[0]] if handed and not finite(tensor) else []
        if self._policy == "skip":
            return self._vote(verb, tensor, collectives)
        if verb == "all_gather":
            bad = self._own.pop(key, False)
        else:
            bad = not finite(tensor)
            if bad:
                tensor.data.fill_(math.nan)
        act(tensor)
        if verb == "reduce_scatter":
            self._own[key] = bad
            return []
        return [] if finite(tensor[:1]) else self._culprits(bad, tensor, collectives)

    def _vote(self, verb: Verb, tensor: Tensor, collectives: Collectives) -> list[int]:
        if verb == "all_gather":
            collectives[verb](tensor)
            return []
        bad = not finite(tensor)
        culprits = self._culprits(bad, tensor, collectives)
        if bad and len(culprits) < self._world_size:
            tensor.data.zero_()
        collectives[verb](tensor)
        if 0 < len(culprits) < self._world_size:
            # Of reduce_scatter only the own shard counts; the rest may hold anything.
            tensor.data.mul_(self._world_size / (self._world_size - len(culprits)))
        return culprits

    def _culprits(self, bad: bool, like: Tensor, collectives: Collectives) -> list[int]:
        """Ranks that say so; one small message on the same link."""
        said = torch.zeros(self._world_size, dtype=torch.float32, device=like.device)
        said[self._rank] = float(bad)
        collectives["all_reduce"](said)
        return [rank for rank, share in enumerate(said.tolist()) if share > 0]

    def check_message(
        self, transfer: Transfer, iteration: int, culprits: Sequence[int], tensors: Sequence[Tensor]
    ) -> None:
        """Before what a message brought is used. RuntimeError under `raise` unless the user has
        mended it meanwhile, and where no rank had finite values; else a warning on rank 0."""
        payload = transfer.payload
        kind, where = KINDS.get(payload.buffer, payload.buffer), self._names(payload.buckets)
        what = f"{kind} of bucket {where} in iteration {iteration}"
        who = _who(culprits)
        if transfer.ranks is not None:
            raise self._spoilt_sum(culprits, payload.buckets, iteration)
        if self._policy == "skip" and len(culprits) < self._world_size:
            if self._rank == 0:
                warnings.warn(f"{who} left out of the {what}: not finite", stacklevel=2)
            return
        if all(finite(t) for t in tensors if t.numel()):
            return
        raise RuntimeError(
            f"{who} brought values that are not finite (NaN or infinity) to the {what}, so their "
            "average is not finite on any rank; lower the learning rate or clip gradients, and "
            "start from the last checkpoint, or leave such ranks out of the average with "
            "prepare(on_nonfinite='skip')"
        )

    def require_finite_sum(self, run: range, iteration: int, tensors: Iterable[Tensor]) -> None:
        """Before this rank steps with a sum that others have handed it, which was finite.
        RuntimeError if with its own part it is not."""
        if self.active and not all_finite(tensors):
            raise self._spoilt_sum([self._rank], run, iteration)

    def _spoilt_sum(self, culprits: Sequence[int], run: range, iteration: int) -> RuntimeError:
        return RuntimeError(
            f"{_who(culprits)} brought values that are not finite (NaN or infinity) to the "
            f"gradient of bucket {self._names(run)} in iteration {iteration}, which workers sum up "
            "one after the other; lower the learning rate, and start from the last checkpoint"
        )


def finite(tensor: Tensor) -> bool:
    """Whether all elements are; one sum, and a second look where that has overflowed."""
    if math.isfinite(_sum(tensor).item()):
        return True
    return bool(torch.isfinite(tensor).all())


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether all elements of all tensors are."""
    several = list(tensors)
    sums = [_sum(t).double().cpu() for t in several]
    if not sums or bool(torch.stack(sums).isfinite().all()):
        return True
    return all(finite(t) for t in several)


def _sum(tensor: Tensor) -> Tensor:
    return tensor.sum(dtype=tensor.dtype if tensor.dtype.itemsize > 2 else torch.float32)


def require_policy(policy: object) -> None:
    """ValueError unless it is one."""
    if policy not in POLICIES:
        raise ValueError(f"on_nonfinite ({policy!r}) must be one of {', '.join(POLICIES)}")


def _who(ranks: Sequence[int]) -> str:
    if not ranks:
        return "the sum over ranks overflowed: no rank"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


class NonfiniteMessages:
    """Messages whose values were not finite, until what they brought is used.

    What a step will use is looked at there: a gradient scaler may skip it, and the user's code
    may mend it.
    """

    def __init__(self, guard: FiniteGuard, refuse: Callable[[BaseException], None]):
        self._guard, self._refuse = guard, refuse
        self._messages: list[Message] = []

    def note(self, message: Message, *, later: bool) -> None:
        """A message has culprits; what it brought is used at once, or `later`."""
        self._messages.append(message)
        if not later:
            self.check()

    def require_finite_sum(self, run: range, iteration: int, tensors: Iterable[Tensor]) -> None:
        """A sum that was handed from worker to worker is used now."""
        try:
            self._guard.require_finite_sum(run, iteration, tensors)
        except RuntimeError as error:
            self._refuse(error)

    def check(self, *, unused: bool = False) -> None:
        """What has arrived is used now, or will not be used at all."""
        messages, self._messages = self._messages, []
        for m in () if unused else messages:
            try:
                self._guard.check_message(m.transfer, m.iteration, m.culprits, m.tensors)
            except RuntimeError as error:
                self._refuse(error)
