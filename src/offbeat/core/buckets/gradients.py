"""Gradients in flat storage: contents of `p.grad`, state of each bucket, unused parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.core.buckets.flat import Flat
from offbeat.core.buckets.shards import local_of

LOOKS = 64  # gradients whose memory is checked after each backward
MOVED = (
    "a gradient was moved to other memory by `p.grad.data = ...` (parameter {index} of those that "
    "are trained, shape {shape}), so messages would not contain the next one; write in place "
    "(p.grad.copy_(...)), or assign p.grad"
)
_address = methodcaller("data_ptr")


class Gradients:
    """The gradients of a model in its flat storage.

    Backward adds to the newest copy. A bucket is stale after its gradients have been applied: the
    next gradients replace the stale ones. With several copies (`late`), gradients are added up
    over iterations and applied from an older copy.
    """

    sent = True  # gradients are in the flat tensors, for messages, measurements and changes

    def __init__(self, flat: Flat, world_size: int):
        self.flat, self.world_size = flat, world_size
        self.parameters, self.bucket_of, self.starts = flat.parameters, flat.bucket_of, flat.starts
        self._stale = bytearray(len(flat.buckets))
        self._awaited = bytearray(len(flat.buckets))  # buckets with a delayed update
        self._zero_then = bytearray(len(flat.buckets))  # buckets to zero after a delayed update
        self._hidden: set[int] = set()  # parameters whose `p.grad` is None on purpose
        self.begin_plan()

    def begin_plan(self) -> None:
        """Begin a plan: use all copies of the storage, with no gradients added to any of them."""
        copies = self.flat.copies("grad")
        self.late = copies > 1
        self._views = [self.flat.views(copy) for copy in range(copies)]
        addresses = [[*map(_address, views)] for views in self._views if not self.flat.is_sharded]
        self._places, self._turn = addresses, 0  # by copy; the next view to check
        self._added = [[0] * len(self.flat.buckets) for _ in range(copies)]
        # By copy and bucket: parameters that had no gradient on this rank in some iteration.
        self._absentees: list[dict[int, set[int]]] = [defaultdict(set) for _ in range(copies)]
        self.open()
        if self.late:  # the newest copy has the gradients that the plan before has applied
            self.zero()

    def open(self) -> None:
        """Assign the views of the newest copy to `p.grad`, so that backward adds to it."""
        newest = self.flat.copy_index("grad")
        self.views, self._added_now = self._views[newest], self._added[newest]
        for p, view in zip(self.parameters, self.views, strict=True):
            p.grad = view

    def drop_views(self) -> None:
        """Drop references to the storage, except those in `p.grad`, before it is replaced."""
        self._views, self.views = [], []

    def drop_unused(self) -> None:
        """Set gradients that received nothing since the last `zero_grad` to None, as a loop
        without offbeat does."""
        for b, count in enumerate(self._added_now):
            for p in () if count else self.flat.buckets[b].parameters:
                if p.grad is not None and not local_of(p.grad).any():
                    p.grad = None

    # ---- checkpoints ------------------------------------------------------------------------

    def flags(self) -> dict[str, Any]:
        """Return the state between two iterations for a checkpoint, the newest copy first."""
        ages = [self.flat.copy_index("grad", age) for age in range(self.flat.copies("grad"))]
        return {
            "stale": bytes(self._stale),
            "awaited": bytes(self._awaited),
            "zero_then": bytes(self._zero_then),
            "hidden": sorted(self._hidden),
            "added": [list(self._added[copy]) for copy in ages],
            "absentees": [
                {b: sorted(places) for b, places in self._absentees[copy].items()} for copy in ages
            ],
        }

    def restore(self, flags: Mapping[str, Any]) -> None:
        """Restore the result of `flags`. The newest copy of the storage must be copy 0."""
        assert self.flat.copy_index("grad") == 0
        for flag, name in (
            (self._stale, "stale"),
            (self._awaited, "awaited"),
            (self._zero_then, "zero_then"),
        ):
            flag[:] = flags[name]
        self._hidden = set(flags["hidden"])
        self._added = [list(counts) for counts in flags["added"]]
        self._absentees = [
            defaultdict(set, {b: set(places) for b, places in by_bucket.items()})
            for by_bucket in flags["absentees"]
        ]
        self.open()

    # ---- backward ---------------------------------------------------------------------------

    def take(self, index: int, p: nn.Parameter) -> None:
        """Copy a gradient that autograd has allocated, because `p.grad` was None, into the bucket.

        Raises:
            ValueError: the gradient is sparse, is part of a graph, or was dropped meanwhile.
        """
        gradient, view = p.grad, self.views[index]
        if gradient is None:
            raise ValueError(
                "a hook has dropped a gradient within backward, before it was averaged; let the "
                "optimizer step, and clear gradients, after backward"
            )
        if gradient.is_sparse:
            raise ValueError(
                "a gradient is sparse; flat buckets need dense ones: use Embedding(sparse=False)"
            )
        if gradient.requires_grad:
            raise ValueError(
                "backward(create_graph=True) leaves gradients that are no plain numbers; take the "
                "inner derivative with torch.autograd.grad(..., create_graph=True)"
            )
        own, given = local_of(view), local_of(gradient)
        if self.late and not self._stale[self.bucket_of[index]]:
            own.add_(given)  # the view holds gradients of earlier iterations
        else:
            own.copy_(given)  # the view holds a gradient that was set to None or applied
        p.grad = view
        self._hidden.discard(index)

    def take_manual_gradients(self, seen: bytearray) -> None:
        """Use gradients that the script has assigned or written, in a step without a backward."""
        for index, (p, view) in enumerate(zip(self.parameters, self.views, strict=True)):
            if seen[index] or p.grad is None:
                continue
            if p.grad is not view:
                self.take(index, p)
            elif self.late or not self.flat.shards.is_any(view):
                continue
            seen[index] = 1

    def on_iteration_begin(self) -> None:
        """Do nothing: version counters detect changes of gradients applied in backward."""

    def on_backward_end(self, seen: bytearray) -> None:
        """Record parameters without a gradient in this iteration. Averages use zero for them.

        Raises:
            ValueError: the script has moved a gradient to other memory, by `p.grad.data = ...`.
        """
        copy = self.flat.copy_index("grad")
        self._require_place(copy)
        if not all(seen):
            for index, was_seen in enumerate(seen):
                if not was_seen:
                    self._note_absent(index, copy)

    def _require_place(self, copy: int) -> None:
        """Require that the views still point into the storage. Each call checks some views in
        turn, so gradients that are all moved are found in the next backward."""
        part = slice(self._turn, self._turn + LOOKS)
        self._turn = 0 if part.stop >= len(self.views) else part.stop
        if not self._places:
            return
        found, known = [*map(_address, self.views[part])], self._places[copy][part]
        if found != known:
            index = part.start + next(i for i, at in enumerate(found) if at != known[i])
            raise ValueError(MOVED.format(index=index, shape=[*self.parameters[index].shape]))

    def _note_absent(self, index: int, copy: int) -> None:
        b = self.bucket_of[index]
        p, view = self.parameters[index], self.views[index]
        place, absent = index - self.starts[b], self.flat.absence_counts(b, copy)
        if p.grad is not view:
            if self._stale[b] or not self.late:  # the view holds an applied or removed gradient
                local_of(view).zero_()
            if self._stale[b]:
                absent[place] = self._added[copy][b]
            p.grad = view
            self._hidden.discard(index)
        absent[place] += 1
        self._absentees[copy][b].add(place)

    def undo_backward_end(self, seen: bytearray) -> None:
        """Undo `on_backward_end` when another backward adds to gradients of the same iteration."""
        copy = self.flat.copy_index("grad")
        for b in range(len(self._added_now)):
            self._added_now[b] -= 1
        unseen = [index for index, was_seen in enumerate(seen) if not was_seen]
        for index in unseen:
            b = self.bucket_of[index]
            self.flat.absence_counts(b, copy)[index - self.starts[b]] -= 1
        changed = list(dict.fromkeys(self.bucket_of[index] for index in unseen))
        for b, absent in self._absence_counts(changed, copy).items():
            places = {place for place in self._absentees[copy].pop(b, ()) if absent[place] > 0}
            if places:
                self._absentees[copy][b] = places

    def mark_fresh(self, b: int) -> None:
        """Record that bucket `b` holds this iteration's gradients."""
        self._stale[b] = 0
        self._added_now[b] += 1

    # ---- the update -------------------------------------------------------------------------

    def added_iterations(self, b: int, copy: int) -> int:
        """Return the number of iterations whose gradients are added up in a bucket of a copy."""
        return self._added[copy][b]

    def conceal(self) -> None:
        """Set every `p.grad` to None for user code between backward and step."""
        for p in self.parameters:
            p.grad = None

    def show_zero(self) -> None:
        """Assign a zero gradient to the smallest parameter, in a step that applies nothing.

        torch's `clip_grad_value_` fails on a model without gradients. The zero is not applied.
        """
        smallest = min(self.parameters, key=Tensor.numel)
        smallest.grad = torch.zeros_like(smallest)

    def is_shown(self, copy: int) -> bool:
        """Whether after backward `p.grad` is every gradient of a copy, so `show` is not needed."""
        return not self.late and not self._absentees[copy]

    def show(self, run: range, copy: int) -> None:
        """Assign one copy of the gradients of a run of buckets to `p.grad`.

        A parameter that no rank has used gets None, as in torch's DDP, so that weight decay and
        momentum do not change it. A parameter that other ranks have used gets their average.
        """
        views = self._views[copy]
        for index in self.flat.indices(run):
            self.parameters[index].grad = views[index]
        self._hidden.difference_update(self.flat.indices(run))
        found = [b for b in self._absentees[copy] if b in run]
        for b, absent in self._absence_counts(found, copy).items():
            # Counts are averages over ranks. One gradient on one rank lowers a count by 1 / K.
            limit = self.added_iterations(b, copy) - 0.5 / self.world_size
            for place in self._absentees[copy][b]:
                if absent[place] > limit:
                    index = self.starts[b] + place
                    self.parameters[index].grad = None
                    self._hidden.add(index)

    def _absence_counts(self, buckets: Sequence[int], copy: int) -> dict[int, list[float]]:
        """Return the absence counts of some buckets. The host waits once for the device."""
        if not buckets:
            return {}
        counts = [self.flat.absence_counts(b, copy) for b in buckets]
        values = iter((torch.cat(counts) if len(counts) > 1 else counts[0]).tolist())
        return {b: [*islice(values, len(own))] for b, own in zip(buckets, counts, strict=True)}

    def apply_later(self, runs: Iterable[range]) -> None:
        """Mark buckets whose update is delayed until after `optimizer.step()`."""
        for run in runs:
            self._awaited[run.start : run.stop] = b"\x01" * len(run)

    def mark_applied(self, run: range, copy: int) -> None:
        """Mark buckets as stale. Zero those for which `zero_grad` was called before the update."""
        for b in run:
            self._stale[b], self._awaited[b] = 1, 0
            if self._zero_then[b]:
                self._zero_then[b] = 0
                self._zero(copy, range(b, b + 1))
        if self.late:
            self._zero(copy, run)

    # ---- between iterations -----------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients in place. Buckets with a delayed update are zeroed after it."""
        if self.late:
            return  # gradients are summed over iterations; `mark_applied` zeroes applied ones
        copy = self.flat.copy_index("grad")
        if not any(self._awaited):
            self._zero(copy, range(len(self._stale)))
            return
        for b, awaited in enumerate(self._awaited):
            if awaited:
                self._zero_then[b] = 1
            else:
                self._zero(copy, range(b, b + 1))

    def zero(self) -> None:
        """Zero every gradient in all copies."""
        for copy in range(self.flat.copies("grad")):
            self._zero(copy, range(len(self._stale)))

    def _zero(self, copy: int, run: range) -> None:
        self.flat.zero_grads(copy, run)
        for b in run:
            self._added[copy][b] = 0
            self._absentees[copy].pop(b, None)
        if not self.late:
            for index in self.flat.indices(run):
                if self.parameters[index].grad is not self.views[index]:
                    self.parameters[index].grad = self.views[index]

    def is_intact(self) -> bool:
        """Whether user code has neither replaced nor removed a gradient."""
        return all(
            p.grad is view or (p.grad is None and index in self._hidden)
            for index, (p, view) in enumerate(zip(self.parameters, self.views, strict=True))
        )

    def mark_applied_in_backward(self, run: range) -> None:
        """Do nothing: version counters detect changes of gradients applied in backward."""

    def removed_gradients(self, run: range) -> list[Tensor]:
        """Return the views of gradients in `run` that user code has removed (`p.grad = None`)."""
        return [self.views[i] for i in self.flat.indices(run) if self.parameters[i].grad is None]

    def gradient_tensors(self, run: range, copy: int) -> Iterator[Tensor]:
        """Return the flat gradients of each bucket, without absence counts."""
        return (self.flat.gradients(b, copy) for b in run)
