"""The engine: a plan on a real model. Moments release transfers, moments wait for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from offbeat.plan import Moment, Payload, Plan, Transfer
from offbeat.runtime.flat import Flat
from offbeat.runtime.state import StateStore, delegates
from offbeat.strategies.base import StatePolicy
from offbeat.transport.control import Control
from offbeat.transport.device import Device, Mark
from offbeat.transport.link import Flight, Link, deadline

Booking = list[Flight]


@dataclass(slots=True)
class Marks:
    """When things happened in one iteration, as device marks; None or empty: not marked."""

    begin: Mark = None
    forward: Mark = None
    forward_end: Mark = None
    ready: list[Mark] = field(default_factory=list)
    updated: list[Mark] = field(default_factory=list)
    backward_end: Mark = None
    waited: Mark = None
    step: Mark = None
    stepped: Mark = None
    end: Mark = None


@dataclass(slots=True)
class Iteration:
    """What one iteration did: its number, its marks and its flights."""

    number: int
    marks: Marks
    flights: list[Flight]


@dataclass(slots=True)
class _Agenda:
    """One phase of a plan as tables: the transfers in issue order and, by their index, what each
    moment releases and waits for."""

    transfers: tuple[Transfer, ...]
    at_grad: list[list[int]]
    at_updated: list[list[int]]
    at_step: list[int] = field(default_factory=list)
    due_step: list[int] = field(default_factory=list)
    due_end: list[int] = field(default_factory=list)


class Engine:
    """Runs a plan through gradient hooks and `optimizer.step()`.

    `grad(b)` fires when the gradients of buckets 0..b are complete, so a message of several
    buckets is never sent half-ready, whatever order autograd takes. What is due by `step` is
    waited for as soon as backward has ended, so that code between backward and
    `optimizer.step()` - clipping, unscaling - sees averaged gradients.
    """

    def __init__(
        self,
        flat: Flat,
        optimizer: torch.optim.Optimizer,
        links: dict[str, Link],
        device: Device,
        control: Control,
        timeout_s: float,
    ):
        self.optimizer = optimizer
        self.links = links
        self.iteration = 0
        self.accumulating = False
        self.listener: Callable[[Iteration], None] | None = None
        self.on_parameter: Callable[[nn.Parameter], None] | None = None
        self._device = device
        self._control = control
        self._timeout_s = timeout_s
        self._failure: BaseException | None = None
        self._handles: list[RemovableHandle] = []
        self.attach(flat)

    # ---- set-up -----------------------------------------------------------------------------

    def attach(self, flat: Flat) -> None:
        """Use a (new) flat storage: hooks on its parameters, tables per bucket."""
        self.detach()
        self.flat = flat
        self.state = StateStore(self.optimizer, flat)
        self._bucket_of: list[int] = []
        self._views: list[Tensor] = []
        for b, bucket in enumerate(flat.buckets):
            for p, view in zip(bucket.parameters, bucket.grad_views, strict=True):
                hook = self._hook(len(self._views))
                self._handles.append(p.register_post_accumulate_grad_hook(hook))
                self._bucket_of.append(b)
                self._views.append(view)
        self._sizes = [len(bucket.parameters) for bucket in flat.buckets]
        self._members = self._members_by_group()

    def detach(self) -> None:
        """Remove the hooks; the parameters stay views of the flat storage."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def adopt(self, plan: Plan, state_policy: StatePolicy) -> None:
        """Run this plan from the next `begin` on, counted as its iteration 0."""
        self.plan = plan
        self.plan_start = self.iteration
        self._reset_state = state_policy == "reset"
        self._in_backward = plan.updates == "in_backward"
        if self._in_backward and delegates(self.optimizer):
            raise ValueError(
                f"{type(self.optimizer).__name__} hands its step to another optimizer, so it "
                "cannot step bucket by bucket; use average='before_update'"
            )
        self._agendas = {phase: _agenda(plan, phase) for phase in plan.phases}
        self._payloads: dict[Transfer, tuple[Tensor, ...]] = {
            t: self._tensors(t) for t in plan.transfers if t.payload.kind != "state"
        }

    def _tensors(self, t: Transfer) -> tuple[Tensor, ...]:
        run = t.payload.buckets
        whole = self.flat.grads(run) if t.payload.kind == "grad" else self.flat.params(run)
        return _slices(whole, t.payload)

    def _members_by_group(self) -> list[list[tuple[dict[str, Any], list[nn.Parameter]]]]:
        """Per bucket: (param group, its parameters in this bucket)."""
        group_of = {id(p): g for g in self.optimizer.param_groups for p in g["params"]}
        members = []
        for bucket in self.flat.buckets:
            mine: dict[int, tuple[dict[str, Any], list[nn.Parameter]]] = {}
            for p in bucket.parameters:
                group = group_of.get(id(p))
                if group is not None:  # in no group: averaged, never updated
                    mine.setdefault(id(group), (group, []))[1].append(p)
            members.append(list(mine.values()))
        return members

    def refresh_groups(self) -> None:
        """The optimizer's groups or state were replaced (load_state_dict)."""
        self._members = self._members_by_group()
        self.state = StateStore(self.optimizer, self.flat)

    # ---- one iteration ----------------------------------------------------------------------

    def begin(self) -> None:
        """Begin an iteration: book its transfers. `step` does so for the next one."""
        number = self.iteration - self.plan_start
        self._agenda = self._agendas[self.plan.phase(number)]
        self._flights: Booking = [
            self.links[t.link].book(t, self.iteration, self._payloads.get(t, ()))
            for t in self._agenda.transfers
        ]
        buckets = len(self._sizes)
        self._seen = bytearray(len(self._views))
        self._ready = bytearray(len(self._views))
        self._missing = list(self._sizes)
        self._next = 0  # buckets before this one have fired grad(b)
        self._unused: list[nn.Parameter] = []
        self._backward_awaited = False
        self._backward_over = False
        self._grad_version = -1
        self.marks = Marks(
            begin=self._device.mark(), ready=[None] * buckets, updated=[None] * buckets
        )

    def forward_begins(self) -> None:
        self.marks.forward = self._device.mark()

    def forward_ends(self) -> None:
        self.marks.forward_end = self._device.mark()

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        def gradient_ready(p: Tensor) -> None:
            view = self._views[index]
            if p.grad is not view:
                self._adopt_gradient(p, view)
            self._seen[index] = 1
            if self.accumulating:
                return
            if self._ready[index] or self._backward_over:
                self._twice()
            if not self._backward_awaited:
                self._backward_awaited = True
                # Runs when this backward pass has ended, before backward() returns; what torch's
                # own DDP and FSDP use for the same purpose.
                Variable._execution_engine.queue_callback(self._backward_ended)  # type: ignore[attr-defined]
            self._ready[index] = 1
            if self.on_parameter is not None:
                self.on_parameter(p)  # type: ignore[arg-type]
            bucket = self._bucket_of[index]
            self._missing[bucket] -= 1
            if bucket == self._next and not self._missing[bucket]:
                self._advance()

        return gradient_ready

    def _adopt_gradient(self, p: Tensor, view: Tensor) -> None:
        """The user set `p.grad` to None (model.zero_grad()): copy the new one into the bucket."""
        assert p.grad is not None
        if p.grad.is_sparse:
            raise ValueError(
                "a gradient is sparse; flat buckets need dense ones: use Embedding(sparse=False)"
            )
        if p.grad.requires_grad:
            raise ValueError(
                "backward(create_graph=True) leaves gradients that are no plain numbers; take the "
                "inner derivative with torch.autograd.grad(..., create_graph=True)"
            )
        view.copy_(p.grad)
        p.grad = view

    def _twice(self) -> None:
        self._require_alive()
        raise RuntimeError(
            "backward ran twice without optimizer.step() in between, but gradients were already "
            "handed on; wrap all but the last backward in `with model.no_sync():`, skip no step, "
            "and use activation checkpointing with use_reentrant=False"
        )

    def _advance(self) -> None:
        """Fire grad(b), and with updates in backward updated(b), for every bucket that can."""
        while self._next < len(self._missing) and not self._missing[self._next]:
            b = self._next
            self._next += 1
            self.marks.ready[b] = self._device.mark()
            self._release(self._agenda.at_grad[b])
            if self._in_backward:
                self._update_bucket(b)
                self.marks.updated[b] = self._device.mark()
                self._release(self._agenda.at_updated[b])

    def _release(self, indices: Sequence[int]) -> None:
        for i in indices:
            flight = self._flights[i]
            if flight.transfer.payload.kind == "state":
                payload = flight.transfer.payload
                flight.tensors = _slices(self.state.tensors(payload.buckets), payload)
            self.links[flight.transfer.link].release(flight)

    def _backward_ended(self) -> None:
        """Late releases, and the wait for what the update needs."""
        self._backward_over = True
        self._unused = self._flush()
        self.marks.backward_end = self._device.mark()
        self._release(self._agenda.at_step)
        self._wait(self._agenda.due_step)
        self.marks.waited = self._device.mark()
        self._grad_version = self.flat.grad_version()

    def step(self, skip_update: bool = False) -> None:
        """`optimizer.step()`: the update (unless a gradient scaler found it not finite), what is
        due by the end, and the next iteration."""
        self._require_alive()
        if not self._backward_over:
            self._backward_ended()
        marks, mark = self.marks, self._device.mark
        marks.step = mark()
        if self._in_backward:
            self._gradients_untouched()
        else:
            if not skip_update:
                with self._without(self._unused):
                    self.optimizer.step()
            for released in self._agenda.at_updated:
                self._release(released)
        marks.stepped = mark()
        self._wait(self._agenda.due_end)
        marks.end = mark()
        done = Iteration(self.iteration, marks, self._flights)
        self.iteration += 1
        self._control.publish(self.iteration)
        if self.listener is not None:
            self.listener(done)  # may attach another storage and adopt another plan
        self.begin()

    def _require_alive(self) -> None:
        if self._failure is not None:
            raise RuntimeError("this worker has failed; start it again") from self._failure

    def _flush(self) -> list[nn.Parameter]:
        """Parameters without a gradient keep no bucket from being sent; they count as zero in
        averages. Returns those whose own step must be skipped, as plain PyTorch does."""
        if self._next == len(self._missing):
            return []
        unused: list[nn.Parameter] = []
        index = 0
        averaged = {
            b for t in self._agenda.transfers if t.payload.kind == "grad" for b in t.payload.buckets
        }
        for b, bucket in enumerate(self.flat.buckets):
            for p, view in zip(bucket.parameters, bucket.grad_views, strict=True):
                if not self._seen[index]:
                    view.zero_()
                    p.grad = view
                    if b not in averaged:
                        unused.append(p)
                index += 1
            self._missing[b] = 0
        with self._without(unused):
            self._advance()
        return unused

    @contextmanager
    def _without(self, unused: Sequence[nn.Parameter]):
        """No gradient on these parameters, so that the optimizer leaves them alone."""
        kept = [p.grad for p in unused]
        for p in unused:
            p.grad = None
        yield
        for p, grad in zip(unused, kept, strict=True):
            p.grad = grad

    def _update_bucket(self, b: int) -> None:
        """The user's optimizer, restricted to one bucket's parameters."""
        members = self._members[b]
        if not members:
            return
        groups = self.optimizer.param_groups
        whole = [group["params"] for group, _ in members]
        before = _scalars(members) if self.iteration == self.plan_start else None
        for group, mine in members:
            group["params"] = mine
        # Assigned to the instance: load_state_dict and schedulers keep the same group objects.
        self.optimizer.param_groups = [group for group, _ in members]
        try:
            self.optimizer.step()
        finally:
            for (group, _), params in zip(members, whole, strict=True):
                group["params"] = params
            self.optimizer.param_groups = groups
        if before is not None and _scalars(members) != before:
            raise ValueError(
                f"{type(self.optimizer).__name__} changes its param groups in step(), so it does "
                "not treat parameters independently and cannot step bucket by bucket; use "
                "average='before_update'"
            )

    def _gradients_untouched(self) -> None:
        if self.flat.grad_version() != self._grad_version or not self.flat.grads_attached():
            raise ValueError(
                "gradients were changed between backward and optimizer.step() (clipping or "
                "unscaling?), but this strategy has already applied them in backward; use "
                "average='before_update'"
            )

    # ---- waiting ----------------------------------------------------------------------------

    def _wait(self, indices: Sequence[int]) -> None:
        left = deadline(self._timeout_s + 5)  # the group's own timeout speaks first
        for i in indices:
            flight = self._flights[i]
            if not flight.wait(left()):
                self._fail(flight, f"did not land within {self._timeout_s + 5:.0f} s")
            if flight.error is not None:
                self._fail(flight, f"failed: {flight.error}")
            self._device.follow(flight.end)
            if self._reset_state and flight.transfer.payload.kind == "param":
                self.state.reset(flight.transfer.payload.buckets)

    def _fail(self, flight: Flight, what: str) -> None:
        run = flight.transfer.payload.buckets
        names = [self.flat.buckets[b].name for b in (run.start, run.stop - 1)]
        between = names[0] if len(run) == 1 else f"{names[0]}..{names[1]}"
        waited = ""
        if flight.released is not None:
            now, released = self._device.mark(), flight.released
            seconds = self._device.seconds(now) - self._device.seconds(released)
            waited = f" {seconds:.1f} s after its release"
        error = RuntimeError(
            f"rank {self._control.rank}: {flight.transfer.payload.kind} of bucket {between} on "
            f"link {flight.transfer.link!r} in iteration {flight.iteration} {what}{waited}. "
            f"{self._control.behind()} Restart the missing ranks, or raise timeout_s "
            f"({self._timeout_s:g} s) if they are only slow."
        )
        self._failure = error
        raise error from flight.error


def _slices(tensors: tuple[Tensor, ...], payload: Payload) -> tuple[Tensor, ...]:
    """The payload's part of flat tensors."""
    if payload.parts == 1:
        return tensors
    k, n = payload.part, payload.parts
    return tuple(t[t.numel() * k // n : t.numel() * (k + 1) // n] for t in tensors)


def _agenda(plan: Plan, phase: int) -> _Agenda:
    transfers = tuple(t for t in plan.transfers if phase in t.phases)
    size = plan.buckets
    agenda = _Agenda(transfers, [[] for _ in range(size)], [[] for _ in range(size)])
    for i, t in enumerate(transfers):
        _released(agenda, t.after, size).append(i)
        due = {Moment("step"): agenda.due_step, Moment("end"): agenda.due_end}.get(t.before)
        if due is None:
            raise ValueError(f"deadline {t.before} of {t.id} must be `step` or `end`")
        due.append(i)
    return agenda


def _released(agenda: _Agenda, after: Moment, size: int) -> list[int]:
    last = size - 1 if after.bucket is None else after.bucket
    if after.point == "grad":
        return agenda.at_grad[last]
    if after.point == "updated":
        return agenda.at_updated[last]
    if after.point == "step":
        return agenda.at_step
    raise ValueError(f"release {after} must be grad, updated or step")


def _scalars(members: Sequence[tuple[dict[str, Any], list[nn.Parameter]]]) -> list[dict[str, Any]]:
    """Param-group settings without the parameters, to see whether a step changes them."""
    return [{k: v for k, v in group.items() if k != "params"} for group, _ in members]
