"""Gradients of a model: from the tensors of autograd to the flat storage and to the optimizer."""

from __future__ import annotations

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
    """The gradients of a model while one plan runs.

    At the begin of each backward pass `p.grad` is None, so that autograd assigns a tensor of its
    own. If the plan sends, measures or changes gradients, `gather` copies complete buckets to the
    newest copy of the flat storage, each by one call, and `p.grad` becomes a view of it. FSDP2
    fills the input of its reduce-scatter in the same way. Otherwise nothing is copied, and the
    storage of gradients is freed.

    A pass adds to what `p.grad` has held before, as in a loop without offbeat: `begin_pass` takes
    the views away, and `gather` adds to them. With several copies (`late`) gradients are added up
    over iterations and applied from an older copy.

    Args:
        flat: storage, which has adopted the buffers of the plan.
        world_size: number of ranks.
        gathers: whether gradients move to the storage.

    Attributes:
        gathers: see above.
        late: whether gradients are added up over iterations.
        parameters: all parameters, bucket by bucket.
        starts: index of the first parameter of each bucket.
    """

    def __init__(self, flat: Flat, world_size: int, *, gathers: bool):
        self.flat, self.gathers, self._world_size = flat, gathers, world_size
        self.parameters, self.starts = flat.parameters, flat.starts
        copies, buckets = range(flat.copies("grad") if gathers else 0), len(flat.buckets)
        self.late = len(copies) > 1
        self._views = [flat.views(copy) for copy in copies]
        self._counts = [[flat.absence_counts(b, copy) for b in range(buckets)] for copy in copies]
        addresses = [[*map(_address, views)] for views in self._views if not flat.is_sharded]
        self._places, self._turn = addresses, 0  # by copy; the next view to check
        # By copy and bucket: iterations that are added up, and parameters that had no gradient on
        # this rank in some of them.
        self._added = [[0] * buckets for _ in copies]
        self._absent: list[list[set[int]]] = [[set() for _ in range(buckets)] for _ in copies]
        self._awaited = bytearray(buckets)  # buckets with a delayed update
        self._hidden: set[int] = set()  # parameters whose `p.grad` is None on purpose
        self._kept: set[int] = set()  # parameters to whose view this pass adds
        self._used: list[tuple[nn.Parameter, Tensor | None, int]] = []  # applied in backward
        self.begin()

    def close(self) -> None:
        """Leave the storage to the script, before another plan runs. It stays in `p.grad` until the
        script clears its gradients; one that never does adds to them."""
        self._views, self._counts = [], []
        self.flat.free("grad")

    @property
    def _newest(self) -> int:
        return self.flat.copy_index("grad")

    # ---- checkpoints ------------------------------------------------------------------------

    def flags(self) -> dict[str, Any]:
        """Return the state between two iterations for a checkpoint, the newest copy first."""
        ages = [self.flat.copy_index("grad", age) for age in range(len(self._views))]
        return {
            "added": [list(self._added[copy]) for copy in ages],
            "absent": [[sorted(own) for own in self._absent[copy]] for copy in ages],
        }

    def restore(self, flags: Mapping[str, Any]) -> None:
        """Restore the result of `flags`. The newest copy of the storage must be copy 0."""
        assert self._newest == 0
        self._added = [list(counts) for counts in flags["added"]]
        self._absent = [[set(own) for own in by_bucket] for by_bucket in flags["absent"]]

    # ---- backward ---------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin an iteration."""
        self._gathered = 0  # buckets before this one are in the storage
        self._used = []  # forget the gradients that were applied in an earlier backward

    def begin_pass(self) -> None:
        """Before the first gradient of a backward pass: set `p.grad` to None, if it is a view."""
        if self.gathers and not self.late:
            self._gathered = 0
            for index, (p, view) in enumerate(
                zip(self.parameters, self._views[self._newest], strict=True)
            ):
                if p.grad is view:
                    p.grad = None
                    self._kept.add(index)

    def cancel_pass(self) -> None:
        """Show what `begin_pass` has hidden, after a pass without gradients or with an error."""
        for index in self._kept:
            if self.parameters[index].grad is None:
                self.parameters[index].grad = self._views[self._newest][index]
        self._kept.clear()

    def gather(self, stop: int, *, empty: bool = False) -> None:
        """Move the complete gradients of all buckets before `stop` to the storage.

        Args:
            stop: number of buckets.
            empty: this iteration has no gradients on this rank: use zero for them.

        Raises:
            ValueError: a gradient is sparse or part of a graph.
        """
        if self.gathers and self._gathered < stop:
            copy = self._newest
            with torch.no_grad():
                for b in range(self._gathered, stop):
                    self._gather_bucket(b, copy, empty=empty)
            self._gathered = stop

    def _gather_bucket(self, b: int, copy: int, *, empty: bool) -> None:
        indices, views = self.flat.indices(range(b, b + 1)), self._views[copy]
        adds_up = self.late and self._added[copy][b] > 0
        new, added, absent = list[int](), list[int](), list[int]()
        for index in indices:
            gradient = None if empty else self.parameters[index].grad
            if gradient is None:
                if empty or index not in self._kept:
                    absent.append(index)
            elif gradient is not views[index]:
                (added if adds_up or index in self._kept else new).append(index)
        self._move(new, views, torch._foreach_copy_)
        self._move(added, views, torch._foreach_add_)
        for index in absent if not adds_up else ():
            local_of(views[index]).zero_()
        for known in (self._kept, self._hidden):
            if known:
                known.difference_update(indices)
        self._hidden.update(absent)
        for index in indices:
            self.parameters[index].grad = None if self.late else views[index]
        for index in absent:
            self.parameters[index].grad = None
        self._note_absent(b, copy, absent, adds_up=adds_up)

    def _note_absent(self, b: int, copy: int, absent: Sequence[int], *, adds_up: bool) -> None:
        """Count the parameters of a bucket without a gradient. Averages use zero for them."""
        known, counts = self._absent[copy][b], self._counts[copy][b]
        if not adds_up:
            counts.zero_()  # they are those of the last message, of all ranks
            known.clear()
        for index in absent:
            counts[index - self.starts[b]] += 1
        known.update(absent)
        self._added[copy][b] = self._added[copy][b] + 1 if adds_up else 1

    def _move(self, indices: Sequence[int], views: Sequence[Tensor], act: Any) -> None:
        if not indices:
            return
        given, places = [self.parameters[i].grad for i in indices], [views[i] for i in indices]
        for gradient in given:
            assert gradient is not None
            if gradient.is_sparse:
                raise ValueError(
                    "a gradient is sparse; flat buckets need dense ones: use "
                    "Embedding(sparse=False)"
                )
            if gradient.requires_grad:
                raise ValueError(
                    "backward(create_graph=True) leaves gradients that are no plain numbers; take "
                    "the inner derivative with torch.autograd.grad(..., create_graph=True)"
                )
        if self.flat.is_sharded:
            given, places = [*map(local_of, given)], [*map(local_of, places)]  # type: ignore[arg-type]
        act(places, given)

    def hold(self) -> int:
        """Handle the end of a pass that only accumulates.

        Returns:
            A number that changes with each write to a gradient by other code.
        """
        if not self.late:
            self.gather(len(self.starts))
        return self.version()

    def version(self) -> int:
        """Return a number that changes with each write to a gradient by other code."""
        own = (p.grad._version for p in self.parameters if self.late and p.grad is not None)
        return self.flat.grad_version() + sum(own)

    def reopen(self) -> None:
        """Let `gather` take all gradients again, because the script may have assigned others."""
        if not self.late:
            self._gathered = 0

    def require_place(self) -> None:
        """Require that the views still point into the storage. Each call checks some views in
        turn, so gradients that are all moved are found in the next backward.

        Raises:
            ValueError: the script has moved a gradient to other memory, by `p.grad.data = ...`.
        """
        if not self._places:
            return
        copy, part = self._newest, slice(self._turn, self._turn + LOOKS)
        self._turn = 0 if part.stop >= len(self.parameters) else part.stop
        found, known = [*map(_address, self._views[copy][part])], self._places[copy][part]
        if found != known:
            index = part.start + next(i for i, at in enumerate(found) if at != known[i])
            raise ValueError(MOVED.format(index=index, shape=[*self.parameters[index].shape]))

    def is_any(self) -> bool:
        """Return whether the newest gathered gradients are those of a backward on this rank."""
        return sum(map(len, self._absent[self._newest])) < len(self.parameters)

    # ---- the update -------------------------------------------------------------------------

    def added_iterations(self, b: int, copy: int) -> int:
        """Return the number of iterations whose gradients are added up in a bucket of a copy."""
        return self._added[copy][b] if self.gathers else 1

    def show_zero(self) -> None:
        """Assign a zero gradient to the smallest parameter, in a step that applies nothing.

        torch's `clip_grad_value_` fails on a model without gradients. The zero is not applied.
        """
        smallest = min(self.parameters, key=Tensor.numel)
        smallest.grad = torch.zeros_like(smallest)

    def is_shown(self, copy: int) -> bool:
        """Whether after backward `p.grad` is every gradient of a copy, so `show` is not needed."""
        return not self.late and not (self.gathers and any(self._absent[copy]))

    def show(self, run: range, copy: int) -> None:
        """Assign one copy of the gradients of a run of buckets to `p.grad`.

        A parameter that no rank has used gets None, as in torch's DDP, so that weight decay and
        momentum do not change it. A parameter that other ranks have used gets their average.
        """
        if not self.gathers:
            return
        views, indices = self._views[copy], self.flat.indices(run)
        for index in indices:
            self.parameters[index].grad = views[index]
        self._hidden.difference_update(indices)
        found = [b for b in run if self._absent[copy][b]]
        for b, absent in self._absence_counts(found, copy).items():
            # Counts are averages over ranks. One gradient on one rank lowers a count by 1 / K.
            limit = self._added[copy][b] - 0.5 / self._world_size
            for index in self._absent[copy][b]:
                if absent[index - self.starts[b]] > limit:
                    self.parameters[index].grad = None
                    self._hidden.add(index)

    def _absence_counts(self, buckets: Sequence[int], copy: int) -> dict[int, list[float]]:
        """Return the absence counts of some buckets. The host waits once for the device."""
        if not buckets:
            return {}
        counts = [self._counts[copy][b] for b in buckets]
        values = iter((torch.cat(counts) if len(counts) > 1 else counts[0]).tolist())
        return {b: [*islice(values, len(own))] for b, own in zip(buckets, counts, strict=True)}

    def missing(self, run: range) -> list[nn.Parameter]:
        """Return the parameters of a run of buckets whose `p.grad` is None."""
        return [p for i in self.flat.indices(run) if (p := self.parameters[i]).grad is None]

    def apply_later(self, runs: Iterable[range]) -> None:
        """Mark buckets whose update is delayed until after `optimizer.step()`."""
        for run in runs:
            self._awaited[run.start : run.stop] = b"\x01" * len(run)

    def mark_applied(self, run: range, copy: int, *, in_backward: bool) -> None:
        """Mark gradients as applied.

        Changes of those that were applied `in_backward` have no effect, so they are recorded for
        `is_intact`.
        """
        for b in run:
            self._awaited[b] = 0
            if self.late:
                self._added[copy][b] = 0
        for index in self.flat.indices(run) if in_backward and not self.gathers else ():
            p = self.parameters[index]
            self._used.append((p, p.grad, -1 if p.grad is None else p.grad._version))

    # ---- between iterations -----------------------------------------------------------------

    def hide(self) -> None:
        """Set every `p.grad` to None."""
        for p in self.parameters:
            p.grad = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set gradients to None, or zero them in place. Gradients that are summed over iterations,
        or whose update is delayed, stay in the storage until they are applied."""
        self._used = []
        self._kept.clear()
        for p, b in zip(self.parameters, self.flat.bucket_of, strict=True):
            if set_to_none or self.late or self._awaited[b]:
                p.grad = None
            elif p.grad is not None:
                local_of(p.grad).data.zero_()

    def zero(self) -> None:
        """Remove every gradient in all copies."""
        for copy, added in enumerate(self._added):
            added[:] = [0] * len(added)
            self.flat.zero_grads(copy)
            for known in self._absent[copy]:
                known.clear()
        self._kept.clear()
        self.hide()

    def is_intact(self) -> bool:
        """Whether user code has neither replaced nor removed a gradient since backward, or one that
        was applied in backward."""
        if self.late:
            return True
        if self.gathers:
            pairs = enumerate(zip(self.parameters, self._views[self._newest], strict=True))
            return all(
                p.grad is view or (p.grad is None and index in self._hidden)
                for index, (p, view) in pairs
            )
        return all(
            p.grad is grad and (grad is None or grad._version == version)
            for p, grad, version in self._used
        )

    def gradient_tensors(self, run: range, copy: int) -> Iterator[Tensor]:
        """Return the flat gradients of each bucket, without absence counts; outside of the storage
        one tensor per parameter."""
        if self.gathers:
            return (self.flat.gradients(b, copy) for b in run)
        grads = (self.parameters[i].grad for i in self.flat.indices(run))
        return (local_of(grad) for grad in grads if grad is not None)
