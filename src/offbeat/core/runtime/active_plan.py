"""Active plan of a worker: program, buffers, messages and recent iterations of one plan."""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING

from offbeat.core.derive import effects
from offbeat.core.derive.lean import GroupedUpdates, group_updates
from offbeat.core.guards.replicas import sends_only_gradients
from offbeat.core.plan import BUFFERS, Apply, Plan, Vote, is_vote_channel
from offbeat.core.plan.program import Program, Step
from offbeat.core.plan.types import BUILT_IN
from offbeat.core.runtime.accumulation import Accumulation
from offbeat.core.runtime.compute import ComputeObserver
from offbeat.core.runtime.context import StorageContext
from offbeat.core.runtime.forward import ForwardHooks
from offbeat.core.runtime.iteration import Iteration, Timestamps
from offbeat.core.runtime.messages import Messages
from offbeat.core.runtime.updates import AT_ONCE, Updates
from offbeat.core.runtime.votes import Votes

if TYPE_CHECKING:
    from offbeat.core.runtime.engine import Engine


class ActivePlan:
    """Run-time objects of one plan on one engine."""

    def __init__(self, plan: Plan, engine: Engine) -> None:
        self.plan, self.flat, self.gradients = plan, engine.flat, engine.gradients
        rank, world_size = engine.control.rank, engine.control.world_size
        self.program = Program(plan, rank)
        rules = (*plan.transfers, *plan.applies)
        self._remembered = max([self.program.lag, *(rule.ago for rule in rules)])
        self.iterations: dict[int, Iteration] = {}  # by number in the plan
        self.reloaded = False  # whether weights were loaded since the buffers were computed
        self.flat.adopt(plan.all_buffers)
        self.gradients.begin_plan()
        self.updates = Updates(plan, engine.optimizer, self.gradients, self.flat)
        self.context = StorageContext(rank, self.flat, self.gradients, engine.state, self.updates)
        self.messages = Messages(
            self.program,
            self.flat,
            engine.state,
            engine.links,
            engine.waiting,
            self.context.memory,
            engine.module_buffers,
        )
        self.broadcasts = any(t.verb == "broadcast" for t in plan.transfers)
        channel = next((one for name, one in engine.links.items() if is_vote_channel(name)), None)
        self.votes = Votes(channel, engine.waiting, self.flat, rank, world_size)
        self.windows = Accumulation(
            plan,
            engine.optimizer,
            self.flat,
            self.gradients,
            self.updates,
            engine.links,
            engine.waiting,
        )
        # True if all updates run at the end, after the vote at the step, and no rule at the step.
        updates = {a.at.point for a in plan.applies if effects.is_update(a)}
        self.updates_at_end = updates == {"end"} and all(a.at.point != "step" for a in plan.applies)
        self._lean = not engine.gradients.sent
        self._leaner: dict[tuple[int, ...], GroupedUpdates] = {}
        self._suspects = self.updates.suspects = engine.suspects
        self.updates.stepping = engine.stepping
        self.forward_hooks: ForwardHooks | None = None
        if self._needs_forward_hooks():
            self.forward_hooks = ForwardHooks(
                engine.model, self.flat, engine.complete_bucket, engine.before_read
            )

    def _needs_forward_hooks(self) -> bool:
        """Return whether the forward of a single bucket has a moment of its own in the plan."""
        moments = [t.before for t in self.plan.transfers] + [t.after for t in self.plan.transfers]
        own = any(m.point == "forward" and m.bucket is not None for m in moments)
        return own or any(a.at.point == "forward" for a in self.plan.applies)

    def close(self) -> None:
        """Remove the forward hooks and restore the schedulers."""
        if self.forward_hooks is not None:
            self.forward_hooks.remove()
        self.windows.close()

    def release_views(self) -> None:
        """Drop all references to tensors of the storage, before the engine replaces the storage."""
        self.messages.release_views()
        for iteration in self.iterations.values():
            for message in iteration.messages:
                message.tensors = ()

    # ---- iterations and their messages ------------------------------------------------------

    def start_iteration(self, planned: int, number: int, marks: Timestamps) -> Iteration:
        """Return a new iteration whose messages are enqueued on the links.

        Args:
            planned: number of the iteration in the plan.
            number: number of the iteration in the run.
            marks: timestamps of the iteration.
        """
        if self.reloaded:
            self._restart_buffers()
        messages, program = self.messages.enqueue(planned, number), self.program
        now = Iteration(number, marks, messages, planned, *self._steps(planned))
        now.outstanding.update(program.awaited_transfers(planned))
        self.iterations[planned] = now
        self.iterations.pop(planned - self.program.lag - 1, None)
        self.votes.forget(planned - self._remembered)
        return now

    def _steps(self, planned: int) -> GroupedUpdates:
        """Return the steps of an iteration.

        If gradients stay in autograd's tensors, only buckets that are sent in backward are updated
        there. All other buckets are updated at the step, in one call. A paced compute keeps the
        plan's own steps, because an emulated host must follow the plan's order.
        """
        steps = self.program.steps(planned)
        if not self._lean or type(self.updates.compute) is not ComputeObserver:
            return GroupedUpdates(steps)
        key = self.program.key(planned)
        if key not in self._leaner:
            self._leaner[key] = group_updates(
                steps, self.program.transfers(planned), self.plan.buckets
            )
        return self._leaner[key]

    def _restart_buffers(self) -> None:
        """Restart buffers that were computed from the weights before a load: anchors, velocities,
        residuals."""
        self.reloaded = False
        for buffer in self.plan.buffers:
            if buffer.name not in BUILT_IN and buffer.kind != "state" and self.plan.source is None:
                self.flat.restart(buffer)

    def release(self, now: Iteration, index: int) -> None:
        """Send a message, unless the outcome of its vote excludes it."""
        message = now.messages[index]
        if self.votes.allows(message.transfer, now.planned):
            self.messages.release(message, now.planned)
        else:
            now.spared_bytes += self.messages.size(message.transfer)
            self.messages.pass_over(message)
            now.outstanding.discard(index)

    def wait_for_message(self, planned: int, index: int) -> None:
        """Wait for a message of an iteration, if that has not been done."""
        iteration = self.iterations[planned]
        if index in iteration.outstanding:
            iteration.outstanding.discard(index)
            message = iteration.messages[index]
            self.messages.complete(message)
            if message.culprits and self._suspects is not None:
                gradients = message.transfer.payload.buffer == "grad"
                at_step = self.updates.remedy is None
                self._suspects.note(message, later=gradients and at_step)

    def wait_for_vote(self, vote: Vote, planned: int) -> None:
        """Wait for the outcome of a vote of an iteration."""
        iteration = self.iterations[planned]
        if vote.name in iteration.undecided:
            iteration.undecided.discard(vote.name)
            iteration.voted[vote.name] = self.votes.decide(vote, planned)

    def first_updates(self, step: Step, planned: int) -> list[Apply]:
        """Return the optimizer updates at the beginning of a step, before any other rule changes
        their gradients."""
        updates = takewhile(effects.is_update, (a for _, a in step.apply))
        return [apply for apply in updates if self.votes.allows(apply, planned)]

    def complete_messages(self, iteration: Iteration) -> None:
        """Wait for all released messages of an iteration."""
        for index in sorted(iteration.outstanding):
            if iteration.messages[index].released is not None:
                self.wait_for_message(iteration.planned, index)

    @property
    def averages_gradients(self) -> bool:
        """Whether the plan averages only gradients, in the iteration that computes them."""
        return sends_only_gradients(self.plan) and not self.windows.late

    @property
    def has_delayed_averages(self) -> bool:
        """Whether the plan averages snapshots of parameters while training continues."""
        return bool(effects.landings(self.plan))

    @property
    def has_transfers_at_forward(self) -> bool:
        """Whether parameters are in flight or change between the end of an iteration and the next
        forward."""
        return self.has_delayed_averages or any(
            t.in_place and t.payload.buffer == "param" and t.before.point == "forward"
            for t in self.plan.transfers
        )

    def discard_delayed_averages(self) -> None:
        """Restart the buffers of averages that have not been applied."""
        for name in effects.landing_buffers(self.plan):
            self.flat.restart(self.plan.all_buffers[name])

    def complete_all_messages(self) -> None:
        """Wait for all messages of finished iterations."""
        for iteration in list(self.iterations.values()):
            if iteration.over:
                self.complete_messages(iteration)

    def require_unsent(self, iteration: Iteration) -> None:
        """Raise RuntimeError if the iteration has sent a message to all ranks."""
        if any(m.released is not None and m.transfer.ranks is None for m in iteration.messages):
            raise RuntimeError(
                "an iteration is under way; consolidate and load between iterations: after "
                "optimizer.step() and before the next forward"
            )

    def pass_unsent_messages(self, iteration: Iteration) -> None:
        """Remove the unsent messages of a dropped iteration from their links, so that later
        messages can go."""
        for message in iteration.messages:
            if message.released is None and not message.passed:
                self.messages.pass_over(message)

    def allows_another_backward(self, iteration: Iteration) -> bool:
        """Return whether another backward before the step may add to this iteration.

        Returns True if the backward so far has sent nothing, applied nothing and cast no votes.
        """
        size = self.plan.buckets
        steps = self.program.steps(iteration.planned)
        done = [s for s in steps if size <= s.position < 2 * size]
        awaited = iteration.step_at("step", self.plan)
        quiet = not (done or awaited.wait or awaited.decide or self.updates_at_end)
        return quiet and not self.windows.late and self.plan.source is None

    def require_skippable(self, iteration: Iteration, *, adding: bool) -> None:
        """Raise RuntimeError if an iteration cannot end without its update.

        Args:
            iteration: iteration to end.
            adding: another backward is about to add to the gradients of the iteration, after a
                forward with the current parameters.
        """
        flying = any(
            iteration.messages[i].transfer.payload.buffer == "grad" for i in iteration.outstanding
        )
        late = adding and (
            flying or self._changes_parameters_at_end() or self._has_averaged_parameters(iteration)
        )
        if late or self.updates.early or self.windows.late:
            # Where another backward adds gradients, the variant of the remedy raises as well.
            can_drop = not adding and self.plan.source is None
            remedy = (can_drop and self.updates.remedy) or AT_ONCE
            raise RuntimeError(
                "backward ran without optimizer.step() after it, but its gradients were already "
                "sent or applied; call step() after every backward, wrap each backward that only "
                f"accumulates in `with model.no_sync():`, or {remedy}"
            )

    def _has_averaged_parameters(self, iteration: Iteration) -> bool:
        """Return whether the iteration has already released messages of parameters."""
        return any(
            m.released is not None and m.transfer.target not in ("grad", BUFFERS)
            for m in iteration.messages
        )

    def _changes_parameters_at_end(self) -> bool:
        """Return whether the end of an iteration changes parameters by more than its update."""
        late = ("step", "end")
        moved = any(t.target != "grad" and t.after.point in late for t in self.plan.transfers)
        return moved or any(
            self._changes_parameters(a) and a.at.point in late for a in self.plan.applies
        )

    @staticmethod
    def _changes_parameters(apply: Apply) -> bool:
        """Return whether a rule changes more than an update and its optimizer state do."""
        own = effects.is_update(apply) or effects.is_window_end(apply)
        return not own and not effects.writes_only(apply, ("state",))
