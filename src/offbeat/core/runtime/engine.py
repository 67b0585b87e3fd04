"""Engine of a rank: runs the program of a plan, driven by autograd and the user's loop.

The first half hears of events and passes them to the table of states (`machine.py`). The second
half has the actions of that table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch._C import _current_graph_task_id as current_graph_task_id

from offbeat.core.buckets.flat import Flat
from offbeat.core.buckets.gradients import Gradients
from offbeat.core.buckets.layout import BucketSpec
from offbeat.core.buckets.memory import give_back
from offbeat.core.buckets.module_buffers import ModuleBuffers
from offbeat.core.buckets.optimizer_state import StateStore
from offbeat.core.derive import effects
from offbeat.core.guards.finite import FiniteGuard
from offbeat.core.guards.foreign_step import ForeignStepGuard
from offbeat.core.guards.script_usage import UsageRecorder
from offbeat.core.guards.step_hooks import has_hooks
from offbeat.core.observers import Observers
from offbeat.core.plan import Plan
from offbeat.core.plan.cursor import StepObserver
from offbeat.core.runtime.active_plan import ActivePlan, needs_gradients
from offbeat.core.runtime.hooks import Hooks
from offbeat.core.runtime.iteration import Iteration, Timestamps
from offbeat.core.runtime.machine import Event, Machine, State
from offbeat.core.runtime.transforms import outside_transforms
from offbeat.core.runtime.waiting import Waiting
from offbeat.core.transport.control import Control
from offbeat.core.transport.device import Device, Mark
from offbeat.core.transport.failure_detector import IN_SCRIPT
from offbeat.core.transport.link import MessageLink

NO_CONTEXT: AbstractContextManager[Any] = nullcontext()


class Engine:
    """Executor of a plan, driven by hooks on the model and by `optimizer.step()`.

    The engine waits for transfers with deadline `step` at the end of backward, so that code between
    backward and `optimizer.step()`, such as clipping and unscaling, sees averaged gradients.
    Between two iterations, reading the model completes the transfers and updates that the next
    forward would otherwise complete (`flush`).

    Args:
        on_failure: called once, at the first failure.
    """

    def __init__(
        self,
        model: nn.Module,
        flat: Flat,
        optimizer: torch.optim.Optimizer,
        links: dict[str, MessageLink],
        device: Device,
        control: Control,
        timeout_s: float,
        replica: int | None = None,
        *,
        sends_buffers: bool | None = None,
        on_failure: Callable[[], None] = lambda: None,
    ):
        self.model, self.optimizer, self.links = model, optimizer, links
        self.control, self.device = control, device
        self.has_members = control.has_members  # whether the members of the job may change
        self.replica = control.rank if replica is None else replica  # its number in the plan
        self.observers = Observers()
        self.machine, self._sets_to_none = Machine(self), True
        self._on_failure = on_failure
        self.waiting = Waiting(device, control, timeout_s, self.observers, self._fail)
        control.on_wait_end = self.observers.waited
        self.iteration = 0
        self.suspects: FiniteGuard | None = None
        self.stepping: ForeignStepGuard | None = None
        self.watched: UsageRecorder | None = None
        self.step_observers: list[StepObserver] = []  # of all plans
        self._thread = get_ident()  # thread of the training loop
        self._scaled = False  # whether a gradient scaler lets the next optimizer step
        self.repeats = False  # whether gradients were averaged more than once before a step
        self.passes_without_step = 0  # backward passes since the last step, except in no_sync()
        self._repeated = False  # whether all ranks have run several backward passes before a step
        # Whether this iteration has, and whether any backward had, a forward in evaluation mode.
        self._evaluated = self._trains_in_eval = False
        self._attached, self._adopted = ExitStack(), ExitStack()  # undo `attach` and `adopt`
        is_source = control.rank == 0 if sends_buffers is None else sends_buffers
        self.module_buffers = ModuleBuffers(model, is_source, flat.parameter_tensors()[0].device)
        for p in flat.parameters:  # an optimizer may hold on to a gradient that nothing fills
            p.grad = None if p.grad is None else p.grad.clone()
        self.attach(flat)

    # ---- set-up -----------------------------------------------------------------------------

    def attach(self, flat: Flat) -> None:
        """Use a flat storage: register hooks on its parameters and create the tables per bucket."""
        self.detach()
        self.flat = flat
        self.state = StateStore(self.optimizer, flat)
        self.gradients = Gradients(flat, self.control.world_size, gathers=False)  # until a plan
        self.hooks = Hooks(flat, self, lasting=False)
        self._attached.callback(lambda: self.hooks.remove())  # `hooks` may be replaced later

    def relayout(self, specs: Sequence[BucketSpec], alignment_bytes: int | None = None) -> None:
        """Rebuild the flat storage with other buckets. The caller must adopt a plan next.

        Release all references to the old storage before the new one is built, so that at most one
        kind of tensor (parameters, gradients) exists twice at a time.

        Args:
            specs: the buckets.
            alignment_bytes: alignment of the new storage; None: that of the old one.
        """
        before = self.flat
        self.detach()
        self.run.release_views()
        self.gradients.close()
        give_back()  # return the memory of the last iteration's activations
        self.attach(Flat(self.model, specs, before, alignment_bytes))
        give_back()

    def detach(self) -> None:
        """Remove all hooks. The parameters stay in the flat storage."""
        self._attached.close()
        self._adopted.close()

    def adopt(self, plan: Plan, planned: int = 0, *, continues: bool = False) -> None:
        """Run a plan from the next iteration on.

        Args:
            plan: plan to run.
            planned: number of the next iteration in the plan. The next iteration must not depend on
                earlier iterations of the plan.
            continues: whether the plan replaces another one of the same strategy, whose buffers and
                memory of rules it takes over.
        """
        former = self.run if continues else None
        self._adopted.close()
        self._place_gradients(plan, continues=continues)
        self.run = ActivePlan(plan, self, planned, former)
        self._adopted.callback(self.run.close)
        self.plan, self.traits, self.cursor = plan, self.run.traits, self.run.cursor

    def _place_gradients(self, plan: Plan, *, continues: bool) -> None:
        """Allocate the buffers of a plan, and decide where its gradients are."""
        lasting = self.watched is None  # otherwise version counters show what the script changes
        gathers = not lasting or needs_gradients(plan, self.flat, self.model)
        self.gradients.close()
        if gathers:
            self.flat.create_gradients()
        self.flat.adopt(plan.all_buffers, continues=continues)
        self.gradients = Gradients(self.flat, self.control.world_size, gathers=gathers)
        before = self.hooks
        if lasting and not before.lasting:
            before.remove()
            self.hooks = Hooks(self.flat, self, lasting=True)
            self.hooks.accumulating, self.hooks.held = before.accumulating, before.held

    def set_watched(self, watched: UsageRecorder | None) -> None:
        """Set the observer of the script's actions between backward and step. It takes effect with
        the next adopted plan."""
        self.watched = watched

    def complete_updates(self) -> None:
        """Complete all updates before user code reads weights through the bare module or through
        stored references."""
        if get_ident() == self._thread:  # reads by other threads do not complete updates
            self.flush()

    def refresh_groups(self) -> None:
        """Refresh all caches after the optimizer's groups or state were replaced
        (`load_state_dict`)."""
        self.state.forget()
        self.run.updates.refresh()

    # ---- iterations -------------------------------------------------------------------------

    def begin(self) -> None:
        """Start the time of the next iteration."""
        self.control.set_activity(IN_SCRIPT)
        ready = [None] * len(self.flat.buckets)
        self._marks = Timestamps(begin=self.device.mark(), ready=ready)

    def _fail(self, failure: BaseException) -> None:
        is_first = self.machine.failure is None
        self.machine.fail(failure)
        if is_first:
            self._on_failure()

    @property
    def _now(self) -> Iteration:
        now = self.cursor.now
        assert now is not None
        return now

    @property
    def is_broken(self) -> bool:
        """Whether a backward pass has begun and was ended by an exception."""
        return self.hooks.is_broken

    @property
    def awaits_step(self) -> bool:
        """Whether a backward has ended and the step that ends its iteration is still to come."""
        return self.machine.state in (State.READY, State.STEPPED)

    # ---- events of forward and backward -----------------------------------------------------

    @outside_transforms
    def forward_begins(self) -> AbstractContextManager[Any]:
        """Prepare the forward of the prepared model; return the context in which the forward must
        run."""
        self.machine.require_alive()
        if not self.trains:
            self.flush()
            self._evaluated = torch.is_grad_enabled()
            return NO_CONTEXT
        now, hooks = self._begin_forward(), self.run.forward_hooks
        if hooks is None:
            self.cursor.walk(0)
        elif hooks.at_start is not None:
            self.complete_bucket(hooks.at_start)
        elif self.traits.broadcasts:
            self.cursor.walk(0)  # the model may read a buffer before its first module runs
        self._mark_forward(now, self.device.mark())
        return NO_CONTEXT if hooks is None else hooks.record_reads()

    @property
    def trains(self) -> bool:
        """Whether a backward is expected after a forward that begins now.

        In evaluation mode, a backward is expected if an earlier forward in evaluation mode had one.
        """
        return torch.is_grad_enabled() and (self.model.training or self._trains_in_eval)

    def _begin_forward(self) -> Iteration:
        recomputes = self.machine.state is State.BACKWARD and current_graph_task_id() >= 0
        if not recomputes:
            self.machine.fire(Event.FORWARD)
        self.control.set_activity("in forward")
        self.observers.iteration_begins(self._now)
        return self._now

    @outside_transforms
    def forward_ends(self, output: object = None) -> None:
        """Complete the forward part of the program after the prepared model has returned
        `output`."""
        if not torch.is_grad_enabled():
            return
        self.hooks.watch(output)
        if self.cursor.now is None:
            return
        self.complete_bucket(0)  # also for modules that this forward has not called
        if self.run.forward_hooks is not None:
            self.run.forward_hooks.on_forward_end()
        self._forward_end(self.cursor.now)

    def _forward_end(self, now: Iteration) -> None:
        self.control.set_activity(IN_SCRIPT)
        self.observers.reached(now, "forward")
        now.marks.forward_end = self.device.mark()

    @staticmethod
    def _mark_forward(now: Iteration, mark: Mark) -> None:
        now.marks.forward = mark
        if now.marks.first_forward is None:
            now.marks.first_forward = mark

    def before_call(self) -> None:
        """Complete all updates of weights before a method of the model reads the weights."""
        self.machine.fire(Event.CALL)
        self._called = self.device.mark()

    @outside_transforms
    def note_forward(self, output: object) -> None:
        """Handle the end of a forward that was not announced: the last called method has returned
        tensors with a graph."""
        self.hooks.watch(output)
        if self.trains:
            now = self._begin_forward()
            self.cursor.walk(self.plan.buckets - 1)
            self._mark_forward(now, self._called)
            self._forward_end(now)

    @outside_transforms
    def complete_bucket(self, b: int) -> None:
        """Pass the program up to the forward of bucket `b`, so that buckets `b` and higher (nearer
        the input) are ready for use."""
        if self.cursor.now is not None:
            self.observers.reached(self.cursor.now, "forward", b)
        self.before_read(b)

    @outside_transforms
    def before_read(self, b: int) -> None:
        """Complete bucket `b` before a module attribute that is one of its parameters is read."""
        if self.cursor.now is None:
            self.flush()
        else:
            self.cursor.walk(self.plan.buckets - 1 - b)

    def on_output_gradient(self) -> None:
        """Check and prepare a backward that has just begun.

        Raise if a second backward uses a forward whose parameters the first backward has already
        updated: autograd's own error would not name the cause. If gradients are averaged on
        arrival, complete their averages before this backward adds to them.
        """
        traits = self.traits
        if not self.awaits_step or self.hooks.accumulating:
            return
        if traits.early:
            self.run.require_skippable(self._now, adding=True)
        elif traits.on_arrival and traits.averages_gradients and self._is_ready:
            self.machine.fire(Event.REPEAT)

    @property
    def _is_ready(self) -> bool:
        return self.machine.state is State.READY

    def on_backward_begin(self) -> None:
        """Pass the rest of the forward part of the program at the first gradient of a backward
        pass."""
        self.run.looks.close()
        if self.machine.state is State.IDLE:
            self._trains_in_eval |= self._evaluated
        adds = self._is_ready and self.run.allows_another_backward(self._now)
        self.machine.fire(Event.MORE if adds else Event.GRADIENT)

    def on_bucket_ready(self, b: int) -> None:
        """Pass the program up to bucket `b` after the gradients of buckets 0..b are complete."""
        now = self._now
        self.gradients.gather(b + 1, empty=now.skipped)
        self.observers.reached(now, "grad", b)
        now.marks.ready[b] = self.device.mark()
        self.cursor.walk(self.plan.buckets + b)

    def on_backward_end(self) -> None:
        """Release the remaining messages and wait for the messages that the update needs."""
        self.passes_without_step += 1
        if self.watched is not None:
            self.watched.record_backward()
        self.machine.fire(Event.COMPLETE)

    def on_held_backward_end(self) -> None:
        """Note the end of a backward pass that only accumulates."""
        self.machine.fire(Event.HOLD)

    def complete_held_passes(self) -> None:
        """Average gradients inside nodes before code between backward and step reads them, although
        the number of backward passes is unknown or has been larger before."""
        if get_ident() == self._thread and current_graph_task_id() < 0:
            self.machine.fire(Event.NEED)

    # ---- events of the step and of pauses ---------------------------------------------------

    def complete(self, skip_update: bool) -> None:
        """Pass the rest of the program up to the step, also on a rank without backward, because
        other ranks wait for its messages."""
        if skip_update:
            self.machine.fire(Event.SKIP)
        self.machine.fire(Event.NEED)

    def step(self, skip_update: bool = False) -> None:
        """Run the update and everything due by the end of the iteration, then begin the next
        iteration.

        Args:
            skip_update: leave out the update, for instance because a gradient scaler has found
                non-finite gradients.
        """
        if skip_update:
            self.machine.fire(Event.SKIP)
        self.machine.fire(Event.STEP)

    def begin_update(self) -> None:
        """Complete the averages that the script's own optimizer is about to apply.

        Raise ValueError if the plan updates at other moments than the step.
        """
        self.run.require_own_steps()
        self.machine.fire(Event.OWN_STEP)

    def note_scaler_step(self, *, steps: bool) -> None:
        """Note whether a gradient scaler lets an optimizer step."""
        self._scaled = steps
        if self.watched is not None:
            self.watched.record_scaler()

    def require_skippable(self) -> bool:
        """Return whether the update of this iteration can be left out, or raise.

        Return False if gradients are applied in later iterations: the gradients of this iteration
        then count as zero. Raise ValueError if the backward of this iteration has ended and its
        gradients were already sent or applied.
        """
        if self.awaits_step:
            self.run.require_skippable_step()
        return not self.traits.late

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients in place, each after its last use. Gradients that are never sent
        become None if `set_to_none`."""
        self.run.looks.close()
        self._sets_to_none = set_to_none
        self.machine.fire(Event.ZERO)

    def flush(self) -> None:
        """Between iterations, complete the transfers and updates that the next forward would
        otherwise complete."""
        self.machine.fire(Event.READ)

    def pause(self) -> None:
        """Between iterations, wait for all messages. Raise RuntimeError within an iteration that
        cannot be dropped."""
        self.machine.fire(Event.PAUSE)

    def leave(self) -> None:
        """Before this rank leaves the job, complete its updates and the messages that other ranks
        wait for. Drop an iteration that will not end."""
        self.machine.fire(Event.LEAVE)

    def discard(self) -> bool:
        """Prepare for a load of other weights.

        Discard accumulated gradients and averages in flight, restart the plan if it has such state,
        and restart its buffers from the loaded weights.

        Returns:
            Whether all ranks must load the weights: True if the plan restarts, or if ranks update
                parameters from a common average.
        """
        self.flush()
        run = self.run
        run.reloaded = True
        run.actions.storage.coding.mark_stale()
        if (
            run.traits.late
            or run.traits.has_delayed_averages
            or run.plan.source is not None
            or effects.has_late_messages(run.plan)
        ):
            self.pause()
            run.gradients.zero()
            run.windows.restart()
            run.discard_delayed_averages()
            self.cursor.restart()
            return True
        return bool(effects.common_buffers(run.plan))

    def drain(self) -> None:
        """Between iterations, apply all accumulated gradients, discard averages that are not yet
        applied, and restart the plan. Every rank must call this method.

        Averages in flight would make replicas differ again.
        """
        self.pause()
        run = self.run
        if run.traits.late:
            run.drain(self.iteration)
            self.cursor.restart()
        elif run.traits.has_delayed_averages:
            run.discard_delayed_averages()
            self.cursor.restart()
        elif run.plan.source is not None:  # `consolidate` copies the source's weights
            self.cursor.restart()
            run.actions.storage.coding.mark_united()

    # ---- actions of the table of states -----------------------------------------------------

    def require_unchanged(self) -> None:
        """Raise ValueError if accumulated gradients were changed between two iterations."""
        self.run.windows.require_unchanged()

    def begin_iteration(self) -> None:
        """Begin an iteration, with its messages enqueued on the links."""
        self.run.weight_looks.close()
        now = self.run.begin_iteration(self.iteration, self._marks)
        self.gradients.begin()
        self.hooks.begin()
        self.hooks.expect(self._expected_buckets(now))

    def _expected_buckets(self, now: Iteration) -> Sequence[int]:
        """Return the buckets whose ready gradients trigger a step of the program; all buckets if
        they move to the storage, or if an observer needs them."""
        size = self.plan.buckets
        if self.observers.every_bucket or self.gradients.gathers:
            return range(size)
        return [s.position - size for s in now.steps if size <= s.position < 2 * size]

    def pass_forward(self) -> None:
        """Pass the forward part of the program."""
        self.cursor.walk(self.plan.buckets - 1)

    def enter_backward(self) -> None:
        """Pass the rest of the forward part of the program before the first gradient."""
        self.control.set_activity("in backward")
        self.run.updates.in_backward = True
        self.pass_forward()
        self.run.updates.in_backward = False

    def reopen(self) -> None:
        """Let another backward pass add to gradients of which none was sent."""
        self.gradients.reopen()
        self.hooks.reopen()

    def hold(self) -> None:
        """Watch for code that reads gradients, such as clipping, if they are not averaged yet."""
        if self.traits.averages_inside and not self.hooks.accumulating:
            self.run.looks.open()

    def complete_backward(self) -> None:
        """Complete backward: release the remaining messages, and wait for what the update needs."""
        now, program = self._now, self.run.program
        self.hooks.finish()
        self.gradients.require_place()
        now.marks.backward_end = self.device.mark()
        # Where all updates run at the end, the rules of the step run before, too.
        update = self.cursor.wait(program.end if self.traits.updates_at_end else program.step)
        self.observers.reached(now, "step")
        self.run.updates.show_gradients(self.run.first_updates(update, now.planned))
        if self.watched is not None or self.traits.early:
            # Compute the checksum in the first iteration only: its times are not used.
            first = self.watched is not None and not now.planned
            self.run.updates.note_backward_end(contents=first)
        now.marks.waited = self.device.mark()
        self.control.set_activity(IN_SCRIPT)
        self.run.looks.open()

    def conclude(self) -> None:
        """Complete an iteration without a backward pass that ends it, with the gradients of passes
        that only accumulate, and those that the script has assigned."""
        self.pass_forward()
        self.run.looks.close()
        self.run.require_held_gradients(self.hooks)
        self.gradients.reopen()
        self.complete_backward()

    def receive(self) -> None:
        """Complete the messages of this iteration that were sent."""
        self.cursor.receive_released(self._now)

    def leave_out(self) -> None:
        """Leave out the update of this iteration."""
        self._now.skipped = True

    def abandon(self) -> None:
        """Leave out the update of a backward that was not followed by a step, as torch's own DDP
        does, because the script drops the gradients."""
        self.receive()
        self._abandon(adding=False)

    def abandon_adding(self) -> None:
        """Leave out the update of a backward, because another backward is adding to its gradients.
        The sum is averaged with those."""
        is_first = not self._repeated and self._is_ready
        if is_first and self.traits.averages_gradients:
            self._require_another_backward()
        self._abandon(adding=True)

    def end_stepped(self) -> None:
        """End an iteration whose update the script's own optimizer has made."""
        self.receive()
        self.leave_out()

    def _abandon(self, *, adding: bool) -> None:
        now = self._now
        self.run.require_skippable(now, adding=adding)
        now.skipped, now.abandoned = True, self._is_ready

    def average_again(self) -> None:
        """Average the gradients of this iteration without an update. The next iteration averages
        the sum of the result and the gradients of the next backward."""
        self._require_another_backward()
        self.repeats = True
        self._now.skipped = self._now.abandoned = True

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

    def update(self) -> None:
        """Run the update and everything due by the end of the iteration."""
        now, mark, updates = self._now, self.device.mark, self.run.updates
        if not now.abandoned:
            self.passes_without_step = 0
        self._scaled = False
        self.run.looks.close()
        if self.watched is not None and not now.abandoned:
            altered = updates.alteration() is not None
            changed = updates.has_changed_gradients()
            hooked = has_hooks(self.optimizer)
            self.watched.record_step(
                changed=changed, skipped=now.skipped, altered=altered, hooked=hooked
            )
        now.marks.step = mark()
        if self.suspects is not None:
            self.suspects.check(unused=now.skipped)
        updates.request_updates(now, abandoned=now.abandoned)
        self.cursor.walk(self.run.program.step)
        now.marks.stepped = mark()
        self.observers.reached(now, "end")
        self.cursor.walk(self.run.program.end)
        if self.traits.updates_at_end:
            now.marks.stepped = mark()
        now.marks.end = mark()
        self.run.windows.on_iteration_end(now.planned)
        self.cursor.end()
        self.observers.add_ended(now)
        self.iteration += 1
        self._evaluated, self._thread = False, get_ident()
        self.control.set_iteration(self.iteration)
        self.observers.deliver()
        self.begin()
        self.run.weight_looks.open()

    def allow_own_step(self) -> None:
        """Check the averages that the script's own optimizer is about to apply."""
        self.run.looks.close()
        # A scaler has checked all gradients of the optimizer that it lets step.
        if self.suspects is not None and not self._scaled:
            self.suspects.check()
        self._scaled = False
        if self.watched is not None:
            self.watched.record_own_step()

    def drop(self) -> None:
        """Drop an iteration of which nothing was sent, such as one whose backward has ended with an
        exception that the script has caught."""
        now = self._now
        self.run.require_unsent(now, is_broken=self.machine.state is State.BACKWARD)
        self.forget()

    def forget(self) -> None:
        """Drop an iteration that will not end."""
        self.gradients.cancel_pass()
        self.cursor.drop()
        self.begin()

    def clear(self) -> None:
        """Zero the gradients, or set them to None."""
        if self.cursor.now is not None and self.hooks.held:
            self.hooks.begin()
        if self.watched is not None:
            self.watched.record_dropped_gradients()
        self.gradients.zero_grad(self._sets_to_none)

    def flush_updates(self) -> None:
        """Complete what the next forward would complete for earlier iterations."""
        if self.cursor.now is None and self.cursor.planned:
            self.run.weight_looks.close()
            self.cursor.flush()
            self.observers.deliver()

    def settle(self) -> None:
        """Complete all messages of earlier iterations. Averages that a later forward than the next
        one awaits will not be applied."""
        self.run.weight_looks.close()
        self.cursor.flush()
        coding = self.run.actions.storage.coding
        coding.drops_results = True
        try:
            self.cursor.receive_all()
        finally:
            coding.drops_results = False
        self.observers.deliver()
