"""Gradients: what `p.grad` shows, whether it has been applied, and who has none."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.core.buckets.flat import Flat


class Gradients:
    """The gradients of a model in its flat storage.

    Backward adds to the newest copy. A bucket whose gradients have been applied is stale: what
    comes next replaces them, unless the user keeps adding on purpose. With several copies
    (`late`) they are added up over iterations, and applied from an older copy.
    """

    sent = True  # or measured, or changed: they have a place that others know

    def __init__(self, flat: Flat, world_size: int):
        self.flat, self._world_size = flat, world_size
        self.parameters = [p for bucket in flat.buckets for p in bucket.parameters]
        self.bucket_of = [b for b, bucket in enumerate(flat.buckets) for _ in bucket.parameters]
        self.starts = [self.bucket_of.index(b) for b in range(len(flat.buckets))]
        self._stale = bytearray(len(flat.buckets))
        self._awaited = bytearray(len(flat.buckets))  # will be applied later
        self._zero_then = bytearray(len(flat.buckets))
        self._hidden: set[int] = set()  # parameters whose gradient we do not show
        self.begin_plan()

    def begin_plan(self) -> None:
        """A plan begins: as many copies as the storage has by now, none of them used."""
        copies = self.flat.copies("grad")
        self.late = copies > 1
        self._views = [self.flat.views(copy) for copy in range(copies)]
        self._added = [[0] * len(self.flat.buckets) for _ in range(copies)]
        # By copy and bucket: places of parameters that this rank did not use at some time.
        self._absentees: list[dict[int, set[int]]] = [defaultdict(set) for _ in range(copies)]
        self.open()

    def open(self) -> None:
        """Gradients go to the newest copy from now on."""
        newest = self.flat.copy_index("grad")
        self.views, self._added_now = self._views[newest], self._added[newest]
        for p, view in zip(self.parameters, self.views, strict=True):
            p.grad = view

    def drop_views(self) -> None:
        """The storage is about to be left: hold none of its tensors but what parameters show."""
        self._views, self.views = [], []

    def drop_unused(self) -> None:
        """Gradients to which nothing was added since they were zeroed are None in a plain loop."""
        for b, count in enumerate(self._added_now):
            for p in () if count else self.flat.buckets[b].parameters:
                if p.grad is not None and not p.grad.any():
                    p.grad = None

    # ---- checkpoints ------------------------------------------------------------------------

    def flags(self) -> dict[str, Any]:
        """What is known of the gradients between two iterations, the newest copy first."""
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
        """The inverse of `flags`, of a storage whose newest copy is its first."""
        assert self.flat.copy_index("grad") == 0
        for mine, name in (
            (self._stale, "stale"),
            (self._awaited, "awaited"),
            (self._zero_then, "zero_then"),
        ):
            mine[:] = flags[name]
        self._hidden = set(flags["hidden"])
        self._added = [list(counts) for counts in flags["added"]]
        self._absentees = [
            defaultdict(set, {b: set(places) for b, places in found.items()})
            for found in flags["absentees"]
        ]
        self.open()

    # ---- backward ---------------------------------------------------------------------------

    def take(self, index: int, p: nn.Parameter) -> None:
        """A gradient that autograd has put elsewhere, as `p.grad` was None: into the bucket."""
        gradient, view = p.grad, self.views[index]
        assert gradient is not None
        if gradient.is_sparse:
            raise ValueError(
                "a gradient is sparse; flat buckets need dense ones: use Embedding(sparse=False)"
            )
        if gradient.requires_grad:
            raise ValueError(
                "backward(create_graph=True) leaves gradients that are no plain numbers; take the "
                "inner derivative with torch.autograd.grad(..., create_graph=True)"
            )
        if self.late and not self._stale[self.bucket_of[index]]:
            view.add_(gradient)  # to those of earlier iterations
        else:
            view.copy_(gradient)  # what was there was taken away
        p.grad = view
        self._hidden.discard(index)

    def take_manual_gradients(self, seen: bytearray) -> None:
        """A step without a backward pass: gradients that the script has put there itself count."""
        for index, (p, view) in enumerate(zip(self.parameters, self.views, strict=True)):
            if seen[index] or p.grad is None:
                continue
            if p.grad is not view:
                self.take(index, p)
            elif self.late or not view.any():
                continue
            seen[index] = 1

    def on_iteration_begin(self) -> None:
        """What was applied in backward is told by version counters."""

    def on_backward_end(self, seen: bytearray) -> None:
        """Note who had no gradient in this iteration; it counts as zero in averages."""
        copy = self.flat.copy_index("grad")
        if not all(seen):
            for index, was_seen in enumerate(seen):
                if not was_seen:
                    self._note_absent(index, copy)

    def _note_absent(self, index: int, copy: int) -> None:
        b = self.bucket_of[index]
        p, view = self.parameters[index], self.views[index]
        place, absent = index - self.starts[b], self.flat.absence_counts(b, copy)
        if p.grad is not view:
            if self._stale[b] or not self.late:  # what was applied, or taken away, is forgotten
                view.zero_()
            if self._stale[b]:
                absent[place] = self._added[copy][b]
            p.grad = view
            self._hidden.discard(index)
        absent[place] += 1
        self._absentees[copy][b].add(place)

    def undo_backward_end(self, seen: bytearray) -> None:
        """Another backward adds to the gradients of the same iteration: take back what the last
        one noted."""
        copy = self.flat.copy_index("grad")
        for b in range(len(self._added_now)):
            self._added_now[b] -= 1
        for index, was_seen in enumerate(seen):
            if not was_seen:
                b = self.bucket_of[index]
                place, absent = index - self.starts[b], self.flat.absence_counts(b, copy)
                absent[place] -= 1
                if absent[place] <= 0:
                    self._absentees[copy][b].discard(place)
                if not self._absentees[copy][b]:
                    del self._absentees[copy][b]

    def mark_fresh(self, b: int) -> None:
        """Bucket b holds this iteration's gradients."""
        self._stale[b] = 0
        self._added_now[b] += 1

    # ---- the update -------------------------------------------------------------------------

    def added_iterations(self, b: int, copy: int) -> int:
        """Iterations whose gradients are added up in a bucket of a copy."""
        return self._added[copy][b]

    def conceal(self) -> None:
        """Show code between backward and step no gradient at all."""
        for p in self.parameters:
            p.grad = None

    def show_zero(self) -> None:
        """Show a zero on the smallest parameter, where nothing is applied: torch's
        `clip_grad_value_` fails on a model without any gradient. Nobody uses it."""
        smallest = min(self.parameters, key=Tensor.numel)
        smallest.grad = torch.zeros_like(smallest)

    def is_shown(self, copy: int) -> bool:
        """Whether backward itself has left every gradient of a copy where it is shown."""
        return not self.late and not self._absentees[copy]

    def show(self, run: range, copy: int) -> None:
        """Show one copy of the gradients of some buckets, but none on parameters that no rank has
        used, as in torch's own DDP: weight decay and momentum leave them alone. What other ranks
        have used keeps their average."""
        views = self._views[copy]
        for index in self._of(run):
            self.parameters[index].grad = views[index]
        self._hidden.difference_update(self._of(run))
        for b in [b for b in self._absentees[copy] if b in run]:
            absent = self.flat.absence_counts(b, copy).tolist()
            # A mean over ranks: whoever had a gradient makes it less by one K-th.
            nobody = self.added_iterations(b, copy) - 0.5 / self._world_size
            for place in self._absentees[copy][b]:
                if absent[place] > nobody:
                    index = self.starts[b] + place
                    self.parameters[index].grad = None
                    self._hidden.add(index)

    def apply_later(self, runs: Iterable[range]) -> None:
        """The update of these buckets was asked for, and will be done later."""
        for run in runs:
            self._awaited[run.start : run.stop] = b"\x01" * len(run)

    def mark_applied(self, run: range, copy: int) -> None:
        """Buckets have been applied: zero them if that was asked for meanwhile."""
        for b in run:
            self._stale[b], self._awaited[b] = 1, 0
            if self._zero_then[b]:
                self._zero_then[b] = 0
                self._zero(copy, range(b, b + 1))
        if self.late:
            self._zero(copy, run)

    # ---- between iterations -----------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients in place, each as soon as nothing needs it any more."""
        if self.late:
            return  # added to; what was applied has been zeroed
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
        """Forget every gradient."""
        for copy in range(self.flat.copies("grad")):
            self._zero(copy, range(len(self._stale)))

    def _zero(self, copy: int, run: range) -> None:
        self.flat.zero_grads(copy, run)
        for b in run:
            self._added[copy][b] = 0
            self._absentees[copy].pop(b, None)
        if not self.late:
            for index in self._of(run):
                if self.parameters[index].grad is not self.views[index]:
                    self.parameters[index].grad = self.views[index]

    def _of(self, run: range) -> range:
        stop = self.starts[run.stop] if run.stop < len(self.starts) else len(self.parameters)
        return range(self.starts[run.start], stop)

    def is_intact(self) -> bool:
        """Whether the user has put no gradient in the place of another one, nor taken one away."""
        return all(
            p.grad is view or (p.grad is None and index in self._hidden)
            for index, (p, view) in enumerate(zip(self.parameters, self.views, strict=True))
        )

    def mark_applied_in_backward(self, run: range) -> None:
        """These were applied in backward; their version counter tells who changes them now."""

    def removed_gradients(self, run: range) -> list[Tensor]:
        """Views of gradients that the user has taken away (`p.grad = None`) in some buckets."""
        return [self.views[i] for i in self._of(run) if self.parameters[i].grad is None]

    def gradient_tensors(self, run: range, copy: int) -> Iterator[Tensor]:
        """Every bucket's gradients alone, flat."""
        return (self.flat.gradients(b, copy) for b in run)
