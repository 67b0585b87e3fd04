"""The engine: walks a plan's program while autograd and the user's loop drive the compute."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from threading import get_ident
from typing import Any

import torch
from torch import nn

from offbeat.core.buckets.autograd_gradients import HandedOver
from offbeat.core.buckets.flat import Flat
from offbeat.core.buckets.gradients import Gradients
from offbeat.core.buckets.layout import BucketSpec
from offbeat.core.buckets.memory import give_back
from offbeat.core.buckets.module_buffers import ModuleBuffers
from offbeat.core.buckets.optimizer_state import StateStore
from offbeat.core.derive.lean import keeps_gradients
from offbeat.core.guards.finite import Suspects
from offbeat.core.guards.foreign_step import Stepping
from offbeat.core.guards.gradients_read import WEIGHTS, Looks
from offbeat.core.guards.script_usage import Watched
from offbeat.core.guards.step_hooks import has_hooks
from offbeat.core.measuring.noise import NoiseMeter
from offbeat.core.plan import Plan
from offbeat.core.runtime.active_plan import ActivePlan
from offbeat.core.runtime.attached import NamedParameters
from offbeat.core.runtime.compute import Compute
from offbeat.core.runtime.hooks import BackwardHooks
from offbeat.core.runtime.iteration import Iteration, Reports, Timestamps
from offbeat.core.runtime.metering import Metering
from offbeat.core.runtime.outputs import tensors_of
from offbeat.core.runtime.pauses import Pauses
from offbeat.core.runtime.sentinels import Sentinels
from offbeat.core.runtime.updates import AT_ONCE
from offbeat.core.runtime.waiting import Waiting
from offbeat.core.runtime.walker import Walker
from offbeat.core.transport.control import Control
from offbeat.core.transport.device import Device
from offbeat.core.transport.heartbeat import IN_SCRIPT
from offbeat.core.transport.link import Link


class Engine:
    """Runs a plan through hooks and `optimizer.step()`.

    What is due by `step` is waited for as soon as backward has ended, so that code between
    backward and `optimizer.step()` - clipping, unscaling - sees averaged gradients. What the next
    forward waits for is done before if somebody looks at the model (`Pauses.flush`).
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
        self.model, self.optimizer, self.links = model, optimizer, links
        self.control, self.device = control, device
        self.waiting = Waiting(device, control, timeout_s)
        self.compute, self.iteration = Compute(), 0
        self.suspects: Suspects | None = None
        self.stepping: Stepping | None = None
        self.watched: Watched | None = None
        self.reports, self.pauses = Reports(), Pauses(self)
        self._thread = get_ident()  # the one that trains
        self._stepped_by_script = False  # the script's own optimizer has stepped in this iteration
        self.repeats = False  # gradients were averaged more than once before a step
        self._repeated = False  # all ranks have run backward more than once before a step
        self._evaluated = self._trains_in_eval = False  # in evaluation mode, with gradients
        self._attached, self._adopted = ExitStack(), ExitStack()  # how to undo either
        self.module_buffers = ModuleBuffers(model, control.rank, flat.everything()[0].device)
        self.attach(flat)

    # ---- set-up -----------------------------------------------------------------------------

    def attach(self, flat: Flat) -> None:
        """Use a (new) flat storage: hooks on its parameters, tables per bucket."""
        self.detach()
        self.flat = flat
        self.gradients: Gradients | HandedOver = Gradients(flat, self.control.world_size)
        self.state = StateStore(self.optimizer, flat)
        self.hooks: BackwardHooks | Sentinels = BackwardHooks(self.gradients, self)
        self._attached.callback(lambda: self.hooks.remove())  # those that are there then

    def relayout(self, specs: Sequence[BucketSpec]) -> None:
        """Have other buckets; a plan must be adopted next. What keeps the tensors before alive is
        let go first, so that they exist twice one kind at a time."""
        before = self.flat
        self.detach()
        self.run.release_views()
        self.gradients.let_go()
        give_back()  # the activations of the last iteration
        self.attach(Flat(self.model, specs, before))
        give_back()

    def detach(self) -> None:
        """Remove the hooks; the parameters stay in the flat storage."""
        self._attached.close()
        self._adopted.close()

    def adopt(self, plan: Plan, planned: int = 0) -> None:
        """Run this plan from the next iteration on, counted as its iteration 0 or as another one,
        which must not depend on those before."""
        self._adopted.close()
        self._place_gradients(sent=self.watched is not None or not self._keeps_gradients(plan))
        self.run = ActivePlan(plan, self)
        self._adopted.callback(self.run.close)
        self.plan, self.start = plan, self.iteration - planned
        self.metering, self.walker = Metering(None, self.run), Walker(self.run, self.device)
        self.now: Iteration | None = None
        self.backward_over = False
        self._looks = self._create_looks()
        self._adopted.callback(self._looks.close)
        self._watch_weights()
        self.set_compute(self.compute)

    def _keeps_gradients(self, plan: Plan) -> bool:
        """Whether gradients may stay as autograd hands them over. Sparse ones would stay sparse,
        and be of no use to most optimizers."""
        sparse = any(getattr(module, "sparse", False) for module in self.model.modules())
        return keeps_gradients(plan) and not sparse

    def _place_gradients(self, *, sent: bool) -> None:
        """Have gradients in the flat storage, or where autograd puts them."""
        if sent == self.gradients.sent:
            return
        before = self.hooks
        before.remove()
        if sent:
            self.flat.take_gradients()
            self.gradients = Gradients(self.flat, self.control.world_size)
            self.hooks = BackwardHooks(self.gradients, self)
        else:
            self.gradients.drop_unused()
            self.gradients.let_go()
            self.flat.let_go("grad")
            self.gradients = HandedOver(self.flat)
            self.hooks = Sentinels(self.gradients, self)
        self.hooks.accumulating, self.hooks.held = before.accumulating, before.held

    def set_watched(self, watched: Watched | None) -> None:
        """Tell somebody what the script does between backward and step, from the next plan on."""
        self.watched = watched

    def _create_looks(self) -> Looks:
        """Who hears of gradients that are read before the step."""
        if self.watched is not None:
            return Looks(self.gradients.parameters, self.watched.read)
        if self.run.updates.on_arrival or self.plan.source is not None:
            return Looks(self.gradients.parameters, self.run.updates.refuse_read)
        return Looks([], self.run.updates.refuse_read)

    def _watch_weights(self) -> None:
        """Where updates come after the step: complete them before code of the script looks at the
        weights through the bare module or through references of its own."""
        late, act = self.run.updates.on_arrival, self._complete_updates
        self.weight_looks = Looks(self.flat.parameters if late else [], act, WEIGHTS)
        self._adopted.callback(self.weight_looks.close)
        for module in self.model.modules() if late else ():
            self._adopted.callback(NamedParameters(module, act).remove)

    def _complete_updates(self) -> None:
        if get_ident() == self._thread:  # other threads find the weights as they are
            self.pauses.flush()

    def refresh_groups(self) -> None:
        """The optimizer's groups or state were replaced (load_state_dict)."""
        self.state.forget()
        self.run.updates.refresh()

    def set_noise_meter(self, meter: NoiseMeter | None) -> None:
        """Show gradients to a meter from now on, or to none."""
        self.metering = Metering(meter, self.run)

    def set_compute(self, compute: Compute) -> None:
        """Tell somebody else of compute from now on."""
        self.compute = self.waiting.compute = self.run.updates.compute = compute

    @property
    def planned_iteration(self) -> int:
        """Number of the present iteration, or else of the next one, in the plan."""
        return self.iteration - self.start

    # ---- iterations -------------------------------------------------------------------------

    def begin(self) -> None:
        """The time from here on belongs to the next iteration."""
        self.control.set_activity(IN_SCRIPT)
        ready = [None] * len(self.flat.buckets)
        self._marks = Timestamps(begin=self.device.mark(), ready=ready)

    def ensure_iteration(self) -> Iteration:
        """The present iteration; with its first sign of life its messages get their places."""
        if self.now is None:
            self.waiting.require_alive()
            self.weight_looks.close()
            self.now = self.run.start_iteration(self.planned_iteration, self.iteration, self._marks)
            self.gradients.iteration_begins()
            self.hooks.begin()
            self.hooks.expect(self._expected_buckets(self.now))
            self.walker.begin(self.now)
            self.backward_over = False
        return self.now

    def _expected_buckets(self, now: Iteration) -> Sequence[int]:
        """Buckets at whose gradients something happens; all where somebody records when."""
        size = self.plan.buckets
        if self.reports.listener is not None or type(self.compute) is not Compute:
            return range(size)
        return [s.position - size for s in now.steps if size <= s.position < 2 * size]

    # ---- forward and backward ---------------------------------------------------------------

    def forward_begins(self) -> AbstractContextManager[Any]:
        """The prepared model is called; its forward runs in what this returns."""
        self.waiting.require_alive()
        if not self.trains:
            self.pauses.flush()
            self._evaluated = torch.is_grad_enabled()
            return nullcontext()
        now, hooks = self._begin_forward(), self.run.forward_hooks
        if hooks is None:
            self.walker.walk(0)
        elif hooks.at_start is not None:
            self.complete_bucket(hooks.at_start)
        elif self.run.broadcasts:
            self.walker.walk(0)  # the model itself may read a buffer before any of its modules runs
        now.marks.forward = self.device.mark()
        return nullcontext() if hooks is None else hooks.record_reads()

    @property
    def trains(self) -> bool:
        """Whether a forward that begins now is followed by a backward, as far as is known: one in
        evaluation mode is if that has happened before."""
        return torch.is_grad_enabled() and (self.model.training or self._trains_in_eval)

    def _begin_forward(self) -> Iteration:
        if self.now is None:
            self.run.windows.require_unchanged()
        elif self.hooks.is_broken:
            self._drop_broken_backward(self.now)
        else:
            self._between_forwards(self.now)
        now = self.ensure_iteration()
        self.control.set_activity("in forward")
        if held_s := self.compute.on_iteration_begin(now.number, now.marks.begin):
            now.marks.begin += held_s
        return now

    def _between_forwards(self, now: Iteration) -> None:
        """A forward follows a backward in the same iteration, or ends it if the script's own
        optimizer has stepped."""
        if self.backward_over and self._stepped_by_script:
            self._abandon(now, adding=False)
        elif self.backward_over:
            self.run.complete_messages(now)  # a second backward may follow before the step

    def forward_ends(self, output: object = None) -> None:
        """The prepared model's forward is over, and has returned this."""
        if not torch.is_grad_enabled():
            return
        self.hooks.watch(output)
        if self.now is None:
            return
        self.complete_bucket(0)  # of modules that were not called this time
        if self.run.forward_hooks is not None:
            self.run.forward_hooks.on_forward_end()
        self._forward_end(self.now, output)

    def _forward_end(self, now: Iteration, output: object) -> None:
        self.control.set_activity(IN_SCRIPT)
        self.compute.forward(-1)
        updates = self.run.updates
        if (updates.early or updates.on_arrival) and self.gradients.sent:
            for tensor in tensors_of(output):
                if tensor.requires_grad:
                    tensor.register_hook(lambda _: self.on_output_gradient())
        now.marks.forward_end = self.device.mark()

    def before_call(self) -> None:
        """Complete what changes weights, as a method of the model is about to read them."""
        if self.now is None:
            self.pauses.flush()
        else:
            self._between_forwards(self.now)
        self._called = self.device.mark()

    def note_forward(self, output: object) -> None:
        """The method called last has returned tensors of a graph: it was a forward."""
        self.hooks.watch(output)
        if self.trains:
            now = self._begin_forward()
            self.walker.walk(self.plan.buckets - 1)
            now.marks.forward = self._called
            self._forward_end(now, output)

    def complete_bucket(self, b: int) -> None:
        """Somebody is about to use the parameters of bucket b, or of one nearer the input."""
        if self.now is None:
            self.pauses.flush()
        else:
            self.compute.forward(b)
            self.walker.walk(self.plan.buckets - 1 - b)
            self.reports.deliver()

    def before_read(self, b: int) -> None:
        """Complete bucket b, as a module's attribute is read that is one of its parameters."""
        if self.now is None:
            self.pauses.flush()
        else:
            self.walker.walk(self.plan.buckets - 1 - b)

    def on_output_gradient(self) -> None:
        """A backward begins. Refuse a second one of a forward whose parameters the first one has
        updated, before autograd finds that out in words of its own. Complete the averages of
        gradients before another backward adds to them."""
        now, updates = self.ensure_iteration(), self.run.updates
        if not self.backward_over or self.hooks.accumulating:
            return
        if updates.early:
            self.run.require_skippable(now, adding=True)
        elif updates.on_arrival and self.run.averages_gradients and not self._stepped_by_script:
            self._average_again(now)

    def _average_again(self, now: Iteration) -> None:
        """Average the gradients of this iteration, without an update. The next iteration averages
        their sum with those of the next backward."""
        self._require_another_backward()
        self.repeats = True
        self.step(skip_update=True, abandoned=True)
        self.ensure_iteration()
        self.walker.walk(self.plan.buckets - 1)

    def _require_another_backward(self) -> None:
        """Raise unless all ranks run another backward before the step of this iteration."""
        control, self._repeated = self.control, True
        try:
            with control.waiting("running backward once more before a step"):
                control.meet(f"backward/{self.iteration}")
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {control.rank} runs backward once more before optimizer.step() in iteration "
                f"{self.iteration}; run it equally often on all ranks, or within model.no_sync(): "
                f"{error}. {control.report_failure()}"
            ) from error

    def on_backward_begin(self) -> None:
        """The first gradient of a backward pass is there."""
        self._looks.close()
        if self.now is None:
            self._trains_in_eval |= self._evaluated
        elif self.backward_over:
            if self.run.allows_another_backward(self.now) and not self._stepped_by_script:
                self._continue_accumulation()
            else:
                if self.run.averages_gradients and not (self._repeated or self._stepped_by_script):
                    self._require_another_backward()
                self._abandon(self.now, adding=True)
        self.ensure_iteration()
        self.control.set_activity("in backward")
        if self.watched is not None:
            self.watched.backward()
        self.run.updates.in_backward = True
        self.walker.walk(self.plan.buckets - 1)
        self.run.updates.in_backward = False
        self.reports.deliver()

    def on_bucket_ready(self, b: int) -> None:
        """The gradients of buckets 0..b are complete."""
        now = self.now
        assert now is not None
        self.compute.backward(b)
        now.marks.ready[b] = self.device.mark()
        if self.metering.by_bucket:
            self.metering.on_bucket_ready(b, now.planned)
        self.walker.walk(self.plan.buckets + b)

    def on_backward_end(self) -> None:
        """Late releases, and the wait for what the update needs."""
        now = self.now
        assert now is not None
        self.backward_over = True
        self.gradients.backward_ends(self.hooks.seen)
        self.hooks.finish()
        now.marks.backward_end = self.device.mark()
        self.compute.on_backward_end()
        self.metering.on_backward_end(now.planned)
        update = now.at("step", self.plan)
        self.walker.wait(update)
        if self.run.updates_at_end:  # what is due there, too, is seen before the step
            self.walker.act(update)
            update = now.at("end", self.plan)
            self.walker.wait(update)
        self.metering.on_averages_arrived(now.planned)
        self.run.updates.reveal(self.run.first_updates(update, now.planned))
        if self.watched is not None or self.run.updates.early:
            # One checksum: the times of the first iteration are not used.
            first = self.watched is not None and not self.planned_iteration
            self.run.updates.note_backward_end(contents=first)
        self.compute.on_step_begin()
        now.marks.waited = self.device.mark()
        self.control.set_activity(IN_SCRIPT)
        self._looks.open()

    def _continue_accumulation(self) -> None:
        """Another backward adds to an iteration of which nothing has left."""
        self.gradients.backward_again(self.hooks.seen)
        self.hooks.reset_pass()
        self.backward_over = False

    # ---- the step ---------------------------------------------------------------------------

    def end_backward(self, skip_update: bool) -> Iteration:
        """Pass what is left up to the step, if this rank had no backward: others wait for it."""
        self._require_whole_backward()
        now = self.ensure_iteration()
        now.skipped = skip_update
        self.walker.walk(self.plan.buckets - 1)
        if not self.backward_over:
            self._require_no_change()
            if not skip_update:
                self.gradients.set_by_hand(self.hooks.seen)
            self.on_backward_end()
        return now

    def _require_no_change(self) -> None:
        """ValueError if gradients were changed after backward passes that only add up, and this
        plan applies others, or sums of several ranks."""
        hooks, handed = self.hooks, self.run.windows.late or self.plan.source is not None
        if handed and hooks.added_passes and hooks.version != self.flat.grad_version():
            raise ValueError(
                "gradients were changed between backward and optimizer.step() (clipping?), but "
                f"messages of {hooks.added_passes} backward passes had still to be sent, as more "
                "or an unknown number was expected; wrap all passes but the last in `with "
                f"model.no_sync():`, or {self.run.updates.remedy or 'use WFBP()'}"
            )

    def step(self, skip_update: bool = False, *, abandoned: bool = False) -> None:
        """`optimizer.step()`: the update (unless a gradient scaler found it not finite), what is
        due by the end, and the next iteration."""
        now, mark = self.end_backward(skip_update), self.device.mark
        now.abandoned = abandoned = abandoned and not self._stepped_by_script
        self._stepped_by_script = False
        self._looks.close()
        if self.watched is not None and not abandoned:
            updates = self.run.updates
            altered = updates.alteration() is not None
            changed = updates.has_changed_gradients()
            hooked = has_hooks(self.optimizer)
            self.watched.stepped(
                changed=changed, skipped=skip_update, altered=altered, hooked=hooked
            )
        now.marks.step = mark()
        if self.suspects is not None:
            self.suspects.heed(unused=skip_update)
        self.run.updates.request_updates(now, abandoned=abandoned)
        self.run.updates.step_remaining(now)
        if not self.run.updates_at_end:
            self.walker.act(now.at("step", self.plan))
        now.marks.stepped = mark()
        self.compute.on_step_end()
        end = now.at("end", self.plan)
        self.walker.wait(end)
        self.walker.act(end)
        if self.run.updates_at_end:
            now.marks.stepped = mark()
        now.marks.end = mark()
        self.run.windows.on_iteration_end(now.planned)
        now.over, self.now, self.backward_over = True, None, False
        self.reports.add(now)
        self.iteration += 1
        self._evaluated = False
        self.control.set_iteration(self.iteration)
        self.reports.deliver()
        self.begin()
        self._thread = get_ident()
        self.weight_looks.open()

    def begin_update(self) -> None:
        """The script's own optimizer is about to step: complete the averages that it applies.
        ValueError if this plan updates at other moments than the step."""
        updates, late = self.run.updates, self.run.windows.late
        if updates.remedy is not None or late or self.run.updates_at_end or self.plan.source:
            raise ValueError(
                f"{type(self.optimizer).__name__} steps by itself, in a method other than step() "
                "or after a closure that runs backward several times, or is one of several, but "
                "this strategy updates at other moments than the step; "
                f"{updates.remedy or AT_ONCE}"
            )
        self.end_backward(skip_update=False)
        self._looks.close()
        if self.suspects is not None:
            self.suspects.heed()
        if self.watched is not None:
            self.watched.drove()
        self._stepped_by_script = True

    @property
    def awaits_step(self) -> bool:
        """Whether a backward is over, and the step that ends its iteration has not come."""
        return self.now is not None and self.backward_over

    def require_skippable(self) -> bool:
        """Before a step without an update: whether there is one to leave out. Gradients that are
        applied in later iterations count as zero instead. ValueError if backward is over and they
        were handed on."""
        late = self.run.windows.late
        if self.backward_over and (late or self.run.updates.early):
            remedy = self.run.updates.remedy or AT_ONCE
            raise ValueError(
                "skip_step() after backward comes too late: this strategy has handed on the "
                f"gradients in backward; call it in place of backward, or {remedy}"
            )
        return not late

    def _abandon(self, now: Iteration, *, adding: bool) -> None:
        """Backward ran, no step followed, and now the gradients are dropped or added to: as with
        torch's own DDP that is an iteration without an update."""
        self.waiting.require_alive()
        if not adding:
            self.run.complete_messages(now)
        self.run.require_skippable(now, adding=adding)
        self.step(skip_update=True, abandoned=True)

    def _require_whole_backward(self) -> None:
        """Raise if the last backward has ended with an exception that the script has caught: some
        parameters have their gradients and others have not."""
        if self.now is not None and not self.backward_over and self.hooks.is_broken:
            raise RuntimeError(
                "optimizer.step() follows a backward pass that ended with an exception, so only "
                "some parameters have gradients; call optimizer.zero_grad() and run forward and "
                "backward again, or start again from the last checkpoint"
            )

    def _drop_broken_backward(self, now: Iteration) -> None:
        """Backward has raised, and somebody has caught it: drop it if nothing has left."""
        if not self.run.allows_another_backward(now):
            raise RuntimeError(
                "a backward pass ended with an exception that was caught, but parts of its "
                "gradients were handed on already; start again from the last checkpoint. To leave "
                "out a batch, decide before backward(), and call model.skip_step() on all ranks"
            )
        self.pauses.pause()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients in place, each as soon as nothing needs it any more; those that are
        never sent are dropped, if that is wanted."""
        self._looks.close()
        self.abandon_unless_stepped()
        if self.now is not None and not self.backward_over and self.hooks.is_broken:
            self._drop_broken_backward(self.now)
        if self.now is not None:
            self.hooks.forget()
        if self.watched is not None:
            self.watched.dropped()
        self.gradients.zero_grad(set_to_none)

    def abandon_unless_stepped(self) -> None:
        """End an iteration that had a backward and no step."""
        if self.now is not None and self.backward_over:
            self._abandon(self.now, adding=False)
