"""The engine: a plan on a real model. Moments release transfers, moments wait for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from offbeat.plan import Plan, Transfer
from offbeat.runtime.agenda import agenda
from offbeat.runtime.arrivals import Arrivals
from offbeat.runtime.copies import Copies
from offbeat.runtime.flat import Flat
from offbeat.runtime.forward import ForwardHooks
from offbeat.runtime.guards.finite import FiniteGuard
from offbeat.runtime.landing import Landing
from offbeat.runtime.marks import Iteration, Marks, Planned
from offbeat.runtime.merging import Merging
from offbeat.runtime.noise import NoiseMeter
from offbeat.runtime.state import StateStore
from offbeat.runtime.stepper import BucketStepper
from offbeat.strategies.base import StatePolicy
from offbeat.transport.control import Control
from offbeat.transport.device import Device
from offbeat.transport.link import Flight, Link

EARLY_REMEDY = {
    "in_backward": "use average='before_update'",
    "on_arrival": "use a strategy that steps at once, such as WFBP()",
}


class Engine:
    """Runs a plan through hooks and `optimizer.step()`.

    `grad(b)` fires when the gradients of buckets 0..b are complete, so a message of several
    buckets is never sent half-ready, whatever order autograd takes; `forward(b)` likewise stands
    for all buckets from the input side down to b. What is due by `step` is waited for as soon as
    backward has ended, so that code between backward and `optimizer.step()` - clipping, unscaling -
    sees averaged gradients.
    """

    def __init__(
        self,
        model: nn.Module,
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
        self.meter: NoiseMeter | None = None
        self.finite: FiniteGuard | None = None
        self._suspects: list[Flight] = []  # messages whose values were not finite
        self._model = model
        self._device = device
        self._control = control
        self._landing = Landing(device, control, timeout_s)
        self._handles: list[RemovableHandle] = []
        self._forward_hooks: ForwardHooks | None = None
        self._merging: Merging | None = None
        self.attach(flat)

    # ---- set-up -----------------------------------------------------------------------------

    def attach(self, flat: Flat) -> None:
        """Use a (new) flat storage: hooks on its parameters, tables per bucket."""
        self.detach()
        self.flat = flat
        self.refresh_groups()
        self._parameters = [p for bucket in flat.buckets for p in bucket.parameters]
        self._bucket_of = [b for b, bucket in enumerate(flat.buckets) for _ in bucket.parameters]
        self._sizes = [len(bucket.parameters) for bucket in flat.buckets]
        self._copies = Copies(flat, merged=False)
        self._handles = [
            p.register_post_accumulate_grad_hook(self._hook(i))
            for i, p in enumerate(self._parameters)
        ]

    def detach(self) -> None:
        """Remove the hooks; the parameters stay views of the flat storage."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._release_plan()

    def adopt(self, plan: Plan, state_policy: StatePolicy) -> None:
        """Run this plan from the next iteration on, counted as its iteration 0."""
        self._release_plan()
        self.plan = plan
        self.plan_start = self.iteration
        self._early = any(t.after.point == "grad" for t in plan.transfers)  # sent in backward
        self._reset_state = state_policy == "reset"
        self._remedy = EARLY_REMEDY.get(plan.updates)
        if self._remedy is not None:
            self._stepper.require_independent(self._remedy)
        self._agendas = {phase: agenda(plan, phase) for phase in plan.phases}
        self._copies = Copies(self.flat, merged=plan.closes is not None)
        self._payloads: dict[Transfer, list[tuple[Tensor, ...]]] = {
            t: [self.flat.tensors(t.payload, copy) for copy in range(self._copies.count)]
            for t in plan.transfers
            if t.payload.kind != "state"
        }
        self._arrivals: Arrivals | None = None
        if plan.updates == "on_arrival":
            assert self._remedy is not None
            self._arrivals = Arrivals(self.flat, self._device, self._wait, self._remedy)
            self._forward_hooks = ForwardHooks(self._model, self.flat, self._arrive)
        if plan.closes is not None:
            self._merging = Merging(
                plan, self.optimizer, self.flat, self._copies, self.links, self._landing
            )
        self._now: Planned | None = None
        self._recent: deque[Planned] = deque()
        self._due: dict[int, list[tuple[Planned, list[int]]]] = {}

    def _release_plan(self) -> None:
        """Undo what the plan so far has attached elsewhere."""
        if self._forward_hooks is not None:
            self._forward_hooks.remove()
        if self._merging is not None:
            self._merging.close()
        self._forward_hooks = self._merging = None

    def refresh_groups(self) -> None:
        """The optimizer's groups or state were replaced (load_state_dict)."""
        self._stepper = BucketStepper(self.optimizer, self.flat)
        self.state = StateStore(self.optimizer, self.flat)

    # ---- one iteration ----------------------------------------------------------------------

    def begin(self) -> None:
        """The time from here on belongs to the next iteration."""
        buckets = len(self._sizes)
        self._marks = Marks(
            begin=self._device.mark(), ready=[None] * buckets, updated=[None] * buckets
        )

    def _book(self) -> Planned:
        """The iteration's first sign of life: give its messages their places on the links."""
        planned = self.iteration - self.plan_start
        tables = self._agendas[self.plan.phase(planned)]
        flights = [
            self.links[t.link].book(t, self.iteration, self._payload(t)) for t in tables.transfers
        ]
        self._now = now = Planned(self.iteration, self._marks, flights, planned, agenda=tables)
        for lag, indices in tables.due_step.items():
            self._due.setdefault(self.iteration + lag, []).append((now, indices))
        self._seen = bytearray(len(self._parameters))
        self._ready = bytearray(len(self._parameters))
        self._missing = list(self._sizes)
        self._next = 0  # buckets before this one have fired grad(b)
        self._unused: list[nn.Parameter] = []
        self._backward_awaited = False
        self._backward_over = False
        self._grad_version = -1
        self._release(now, tables.at_forward)
        return now

    def _payload(self, t: Transfer) -> tuple[Tensor, ...]:
        if t.payload.kind == "state":
            return ()  # made when it is released: the optimizer replaces its tensors
        copies = self._copies
        return self._payloads[t][copies.closed if t.payload.age else copies.opened]

    def forward_begins(self) -> AbstractContextManager[Any]:
        """The prepared model is called; its forward runs in what this returns."""
        if self._now is None and torch.is_grad_enabled():
            if self._merging is not None:
                self._merging.require_unchanged()
            self._book()
        hooks = self._forward_hooks
        if hooks is not None and hooks.at_start is not None:
            self._arrive(hooks.at_start)
        self._marks.forward = self._device.mark()
        return nullcontext() if hooks is None else hooks.watching()

    def forward_ends(self) -> None:
        if self._forward_hooks is not None and torch.is_grad_enabled():
            self._arrive(0)  # of modules that were not called this time
            self._forward_hooks.forward_ended()
        self._marks.forward_end = self._device.mark()

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        def gradient_ready(p: Tensor) -> None:
            now = self._now or self._book()
            self._arrive(0, in_backward=True)
            view = self._copies.views[index]
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
                self._advance(now)

        return gradient_ready

    def _adopt_gradient(self, p: Tensor, view: Tensor) -> None:
        """The user set `p.grad` to None (model.zero_grad()): take the new one into the bucket."""
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
        if self._merging is None:
            view.copy_(p.grad)
        else:
            view.add_(p.grad)  # to those of the generation's earlier iterations
        p.grad = view

    def _twice(self) -> None:
        self._landing.require_alive()
        raise RuntimeError(
            "backward ran twice without optimizer.step() in between, but gradients were already "
            "handed on; wrap all but the last backward in `with model.no_sync():`, skip no step, "
            "and use activation checkpointing with use_reentrant=False"
        )

    def _advance(self, now: Planned) -> None:
        """Fire grad(b), and with updates in backward updated(b), for every bucket that can."""
        while self._next < len(self._missing) and not self._missing[self._next]:
            b = self._next
            self._next += 1
            now.marks.ready[b] = self._device.mark()
            if self.meter is not None and self._early and self.plan.closing(now.planned):
                self.meter.own(self.flat.grads(range(b, b + 1), self._copies.opened))
            self._release(now, now.agenda.at_grad[b])
            if self.plan.updates == "in_backward":
                self._stepper.step(b, None, self._remedy if now.planned == 0 else None)
                now.marks.updated[b] = self._device.mark()
                self._release(now, now.agenda.at_updated[b])

    def _release(self, now: Planned, indices: Sequence[int]) -> None:
        for i in indices:
            flight = now.flights[i]
            payload = flight.transfer.payload
            if payload.kind == "state":
                tensors = self.state.tensors(payload.buckets)
                flight.tensors = tuple(t[payload.slice_of(t.numel())] for t in tensors)
            self.links[flight.transfer.link].release(flight)

    def _backward_ended(self) -> None:
        """Late releases, and the wait for what the update needs."""
        now = self._now
        assert now is not None
        self._backward_over = True
        self._unused = self._flush(now)
        now.marks.backward_end = self._device.mark()
        if self.meter is not None and self.plan.closing(now.planned):
            if not self._early:
                self.meter.own(self.flat.grads(range(len(self._sizes)), self._copies.opened))
            self.meter.complete()
        self._release(now, now.agenda.at_step)
        for iteration, indices in self._due.pop(self.iteration, ()):
            self._wait(iteration, indices)
        applied = self.plan.applied(now.planned)
        if self.meter is not None and applied:
            grads = self.flat.grads(range(len(self._sizes)), self._copies.closed)
            self.meter.averaged(grads, len(applied))
        now.marks.waited = self._device.mark()
        if self._merging is not None:
            self._copies.show(applied, self.plan.merge)
        self._grad_version = self.flat.grad_version()

    def step(self, skip_update: bool = False) -> None:
        """`optimizer.step()`: the update (unless a gradient scaler found it not finite), what is
        due by the end, and the next iteration."""
        self._landing.require_alive()
        now = self._now or self._book()
        self._arrive(0)
        if not self._backward_over:
            self._backward_ended()
        mark = self._device.mark
        now.marks.step = mark()
        if skip_update:
            self._suspects = []
        self._heed()
        if self._remedy is not None:
            self._gradients_untouched()
        if self._merging is not None:
            self._merging.step(now.planned)
        elif self.plan.updates == "at_step":
            if not skip_update:
                with self._without(self._unused):
                    self.optimizer.step()
            for released in now.agenda.at_updated:
                self._release(now, released)
        elif self._arrivals is not None:
            self._arrivals.expect(now, self._stepper)
            self.optimizer._opt_called = True  # type: ignore[attr-defined] # what schedulers ask
        now.marks.stepped = mark()
        self._wait(now, now.agenda.due_end)
        now.marks.end = mark()
        now.over = True
        self._now = None
        self._recent.append(now)
        self.iteration += 1
        self._control.publish(self.iteration)
        self._report()
        self.begin()

    def _report(self) -> None:
        """Hand on the iterations that are complete, in their order."""
        while self._recent and self._recent[0].complete:
            done = self._recent.popleft()
            if self.listener is not None:
                self.listener(done)  # may attach another storage and adopt another plan

    def report_rest(self) -> None:
        """At the end, hand on iterations whose messages nobody has waited for yet."""
        while self._recent and self.listener is not None:
            self.listener(self._recent.popleft())

    def _flush(self, now: Planned) -> list[nn.Parameter]:
        """Parameters without a gradient keep no bucket from being sent; they count as zero in
        averages. Returns those whose own step must be skipped, as plain PyTorch does."""
        if self._next == len(self._missing):
            return []
        unused: list[nn.Parameter] = []
        averaged = {
            b for t in now.agenda.transfers if t.payload.kind == "grad" for b in t.payload.buckets
        }
        for seen, p, view, b in zip(
            self._seen, self._parameters, self._copies.views, self._bucket_of, strict=True
        ):
            if not seen:
                p.grad = view
                if self._merging is None:
                    view.zero_()
                    if b not in averaged:
                        unused.append(p)
            self._missing[b] = 0
        with self._without(unused):
            self._advance(now)
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

    def _gradients_untouched(self) -> None:
        if self.flat.grad_version() != self._grad_version or not self.flat.grads_attached():
            raise ValueError(
                "gradients were changed between backward and optimizer.step() (clipping or "
                "unscaling?), but this strategy applies them bucket by bucket, at other times; "
                f"{self._remedy}"
            )

    def zero_grad(self) -> None:
        """Zero the gradients in place, each as soon as nothing needs it any more."""
        if self._merging is not None:
            return  # the generation is added to; what was applied is zeroed when it was
        if self._arrivals is not None and self._arrivals.pending:
            self._arrivals.zero_grad()
        else:
            self.flat.zero_grad()

    def _arrive(self, first: int, *, in_backward: bool = False) -> None:
        """Bring every bucket from the input side down to `first` up to date."""
        if self._arrivals is None or not self._arrivals.pending:
            return
        self._landing.require_alive()
        if self._arrivals.until(first, self._marks.arrivals, in_backward=in_backward):
            self._report()

    # ---- between iterations -----------------------------------------------------------------

    def flush(self) -> None:
        """Between iterations: every update that was asked for is done."""
        self._arrive(0)

    def settle(self) -> None:
        """Between iterations, before leaving: finish updates, and messages that others wait for."""
        if not self._landing.failed:
            self.flush()
            self._land_all()

    def discard(self) -> None:
        """Other weights are about to be loaded: forget what is merged, and begin the plan anew."""
        self.flush()
        if self._merging is not None:
            self._land_merged()
            self._merging.discard()
            self._begin_anew()

    def drain(self) -> None:
        """Between iterations: also apply gradients that are merged but not yet due, and begin the
        plan anew. Every rank must call it. RuntimeError in the middle of an iteration."""
        self.flush()
        if self._merging is not None:
            self._land_merged()
            self._merging.drain(self.iteration, self.iteration - self.plan_start)
            self._begin_anew()

    def _begin_anew(self) -> None:
        self.plan_start = self.iteration
        if self.meter is not None:
            self.meter.reset()

    def _land_merged(self) -> None:
        if self._now is not None:
            raise RuntimeError(
                "gradients are being merged; consolidate and load between iterations: after "
                "optimizer.step() and before the next forward"
            )
        self._land_all()

    def _land_all(self) -> None:
        """Wait for every message of earlier iterations."""
        for iterations in self._due.values():
            for iteration, indices in iterations:
                self._wait(iteration, indices)
        self._due.clear()
        self._report()

    def _suspect(self, flight: Flight) -> None:
        """Values were not finite. What a step will use is looked at there: a gradient scaler may
        skip it, and the user's code may mend it."""
        self._suspects.append(flight)
        if flight.transfer.payload.kind != "grad" or self.plan.updates != "at_step":
            self._heed()

    def _heed(self) -> None:
        suspects, self._suspects = self._suspects, []
        for flight in suspects:
            assert self.finite is not None
            try:
                self.finite.heed(flight.transfer, flight.iteration, flight.culprits, flight.tensors)
            except RuntimeError as error:
                self._landing.refuse(error)

    def _wait(self, iteration: Planned, indices: Sequence[int]) -> None:
        for i in indices:
            flight = iteration.flights[i]
            self._landing.wait(flight, self.flat)
            iteration.awaited += 1
            if flight.culprits:
                self._suspect(flight)
            if self._reset_state and flight.transfer.payload.kind == "param":
                self.state.reset(flight.transfer.payload.buckets)
