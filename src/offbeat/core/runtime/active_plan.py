"""Active plan of a worker: program, buffers, messages and recent iterations of one plan."""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING

from torch import nn

from offbeat.core.buckets.attached import NamedParameters
from offbeat.core.buckets.flat import Flat
from offbeat.core.derive import effects
from offbeat.core.derive.drained import drained_plan
from offbeat.core.derive.lean import keeps_gradients, leaves_gradients
from offbeat.core.derive.traits import PlanTraits
from offbeat.core.guards.gradients_read import WEIGHTS, ReadHook
from offbeat.core.plan import (
    BUFFERS,
    Apply,
    Plan,
)
from offbeat.core.plan.cursor import Cursor
from offbeat.core.plan.program import Program, Step
from offbeat.core.plan.types import BUILT_IN, moment_of
from offbeat.core.runtime.accumulation import Accumulation
from offbeat.core.runtime.actions import StorageContext, TensorActions, Votes
from offbeat.core.runtime.coding import Coding
from offbeat.core.runtime.contents import Storage
from offbeat.core.runtime.forward import ForwardHooks
from offbeat.core.runtime.hooks import Hooks
from offbeat.core.runtime.iteration import Iteration, Timestamps
from offbeat.core.runtime.updates import AT_ONCE, Updates

if TYPE_CHECKING:
    from offbeat.core.runtime.engine import Engine


def needs_gradients(plan: Plan, flat: Flat, model: nn.Module) -> bool:
    """Return whether gradients move to the flat storage.

    Sparse gradients do, where they are refused: most optimizers do not support them.
    """
    if flat.is_sharded:  # votes read the gradients of shards in FSDP's tensors
        return not leaves_gradients(plan)
    sparse = any(getattr(module, "sparse", False) for module in model.modules())
    return not keeps_gradients(plan) or sparse


class ActivePlan:
    """Run-time objects of one plan on one engine.

    Args:
        plan: plan to run.
        engine: engine of this rank.
        planned: number of the next iteration in the plan.
        former: plan of the same strategy that ran before; buffers of equal names and values that
            rules have kept continue. None: they begin anew.
    """

    def __init__(
        self, plan: Plan, engine: Engine, planned: int = 0, former: ActivePlan | None = None
    ) -> None:
        self.plan, self.flat, self.gradients = plan, engine.flat, engine.gradients
        self.traits = traits = PlanTraits(plan)
        self._engine = engine
        self.program = Program(plan, engine.replica)
        rules = (*plan.transfers, *plan.applies)
        self._remembered = max([self.program.lag, *(rule.ago for rule in rules)])
        self.reloaded = False  # whether weights were loaded since the buffers were computed
        self.updates = Updates(
            traits,
            engine.optimizer,
            self.gradients,
            self.flat,
            engine.observers,
            engine.stepping,
            engine.suspects,
        )
        self.context = StorageContext(
            engine.replica, self.flat, self.gradients, engine.state, self.updates
        )
        if former is not None:
            self.context.memory.update(former.context.memory)
        self.windows = Accumulation(plan, engine.optimizer, self.flat, self.gradients)
        self.actions = self._create_actions(self.program, note_later=traits.remedy is None)
        self.votes = self.actions.votes
        self.cursor: Cursor[Iteration] = Cursor(
            self.program, self.actions, planned, engine.step_observers
        )
        self.forward_hooks: ForwardHooks | None = None
        if traits.splits_forward:
            self.forward_hooks = ForwardHooks(
                engine.model, self.flat, engine.complete_bucket, engine.before_read
            )

        self.looks, self.weight_looks = self._create_looks(), self._watch_weights()

    def _create_looks(self) -> ReadHook:
        """Return the hooks that run when code reads gradients before the step."""
        engine, parameters = self._engine, self.gradients.parameters
        if engine.watched is not None:
            return ReadHook(parameters, engine.watched.record_read)
        if self.traits.on_arrival or self.plan.source is not None:
            return ReadHook(parameters, self.updates.refuse_read)
        # Otherwise the gradients that code can read are final, unless a node still averages them.
        inside = parameters if self.traits.averages_inside else []
        return ReadHook(inside, engine.complete_held_passes)

    def _watch_weights(self) -> ReadHook:
        """Return the hooks that complete updates after the step when code reads weights."""
        late, act = self.traits.on_arrival, self._engine.complete_updates
        modules = self._engine.model.modules() if late else ()
        self._named = [NamedParameters(module, act) for module in modules]
        return ReadHook(self.flat.parameters if late else [], act, WEIGHTS)

    def _create_actions(self, program: Program, *, note_later: bool) -> TensorActions:
        """Return the actions of a program on the storage and the links of this rank.

        Args:
            program: program of this rank.
            note_later: whether the step checks averaged gradients.
        """
        engine, flat, waiting = self._engine, self.flat, self._engine.waiting
        place = engine.control.rank, engine.control.world_size
        votes = Votes(engine.links, waiting, flat, *place)
        memory, defers = self.context.memory, engine.has_members
        staged = engine.has_members or flat.is_sharded
        coding = Coding(program.plan, flat, memory, defers_errors=defers)
        storage = Storage(flat, engine.state, engine.module_buffers, coding, staged)
        suspects, context = engine.suspects, self.context
        return TensorActions(
            program, storage, engine.links, waiting, votes, context, suspects, note_later=note_later
        )

    def close(self) -> None:
        """Remove all hooks and restore the schedulers."""
        for hooks in (self.forward_hooks, *self._named):
            if hooks is not None:
                hooks.remove()
        self.windows.close()
        self.looks.close()
        self.weight_looks.close()

    def release_views(self) -> None:
        """Drop all references to tensors of the storage, before the engine replaces the storage."""
        self.actions.release_views()
        for iteration in self.cursor.iterations.values():
            for message in iteration.messages:
                message.tensors, message.contents = (), None

    # ---- iterations and their messages ------------------------------------------------------

    def begin_iteration(self, number: int, marks: Timestamps) -> Iteration:
        """Begin an iteration, with its messages enqueued on the links.

        Args:
            number: number of the iteration in the run.
            marks: timestamps of the iteration.
        """
        if self.reloaded:
            self._restart_buffers()

        def create(planned: int) -> Iteration:
            messages, steps = self.actions.enqueue(planned, number), self.program.steps(planned)
            return Iteration(number, marks, messages, planned=planned, steps=steps)

        now = self.cursor.begin(create)
        self.votes.forget(now.planned - self._remembered)
        return now

    def drain(self, number: int) -> None:
        """Average and apply all accumulated gradients; the plan restarts.

        Args:
            number: number of the next iteration in the run.
        """
        if self._engine.suspects is not None:
            self._engine.suspects.check()  # averages that the next step would have checked
        plan = drained_plan(self.plan, self.cursor.planned, tuple(self._engine.links))
        if plan is not None:
            program = Program(plan, self.program.rank)
            actions = self._create_actions(program, note_later=False)  # there is no step
            observers = self._engine.step_observers
            cursor: Cursor[Iteration] = Cursor(program, actions, observers=observers)

            def create(planned: int) -> Iteration:
                messages = actions.enqueue(planned, number)
                steps = program.steps(planned)
                return Iteration(number, Timestamps(), messages, planned=planned, steps=steps)

            cursor.begin(create)
            cursor.walk(program.end)
        self.windows.restart()

    def _restart_buffers(self) -> None:
        """Restart buffers that were computed from the weights before a load: anchors, velocities,
        residuals."""
        self.reloaded = False
        for buffer in self.plan.buffers if self.plan.source is None else ():
            if buffer.name not in BUILT_IN and moment_of(buffer.name) is None:
                self.flat.restart(buffer)

    def first_updates(self, step: Step, planned: int) -> list[Apply]:
        """Return the optimizer updates at the beginning of a step, before any other rule changes
        their gradients."""
        updates = takewhile(effects.is_update, (a for _, a in step.apply))
        return [apply for apply in updates if self.votes.allows(apply, planned)]

    def begin_epoch(self, *, are_united: bool) -> None:
        """Restart buffers and memory that depend on the members of the job, which have changed.

        Args:
            are_united: whether all ranks have the same parameters.
        """
        if self.reloaded:
            self._restart_buffers()
        self.actions.storage.coding.begin_epoch(are_united=are_united)

    def discard_delayed_averages(self) -> None:
        """Restart the buffers of averages that have not been applied."""
        if self._engine.has_members:  # as if their messages had been skipped
            self.actions.storage.coding.forget_memory()
        for name in effects.delayed_buffers(self.plan):
            self.flat.restart(self.plan.all_buffers[name])

    def require_own_steps(self) -> None:
        """Raise ValueError if the plan updates at other moments than the step, so that the script's
        own optimizer cannot step by itself."""
        if self.traits.remedy is not None or not self.traits.allows_own_steps:
            raise ValueError(
                f"{type(self._engine.optimizer).__name__} steps by itself, in a method other than "
                "step() or after a closure that runs backward several times, or is one of several, "
                "but this strategy updates at other moments than the step; "
                f"{self.traits.remedy or AT_ONCE}"
            )

    def require_skippable_step(self) -> None:
        """Raise ValueError if the update cannot be left out after backward."""
        if self.traits.late or self.traits.early:
            remedy = (self.plan.source is None and self.traits.remedy) or AT_ONCE
            raise ValueError(
                "skip_step() after backward is too late: this strategy has already sent or applied "
                f"the gradients in backward; call skip_step() in place of backward, or {remedy}"
            )

    def require_unsent(self, iteration: Iteration, *, is_broken: bool) -> None:
        """Raise RuntimeError if the iteration has sent a message to all ranks.

        Args:
            iteration: iteration to drop.
            is_broken: whether its backward has ended with an exception.
        """
        if is_broken and not self.allows_another_backward(iteration):
            raise RuntimeError(
                "a backward pass ended with an exception that was caught, but some of its "
                "gradients were already sent or applied; start again from the last checkpoint. To "
                "leave out a batch, decide before backward(), and call model.skip_step() on all "
                "ranks"
            )
        if any(m.released is not None and m.transfer.ranks is None for m in iteration.messages):
            raise RuntimeError(
                "an iteration is under way; consolidate and load between iterations: after "
                "optimizer.step() and before the next forward"
            )

    def allows_another_backward(self, iteration: Iteration) -> bool:
        """Return whether another backward before the step may add to this iteration.

        Returns True if the backward so far has sent nothing, applied nothing and cast no votes.
        """
        step = self.program.step
        busy = self.traits.updates_at_end or any(
            self.plan.buckets <= s.position < step or (s.position == step and (s.wait or s.decide))
            for s in self.program.steps(iteration.planned)
        )
        return not busy and not self.traits.late and self.plan.source is None

    def require_held_gradients(self, hooks: Hooks) -> None:
        """Raise ValueError if gradients were changed after backward passes that only accumulate and
        the plan applies other gradients, or sums or averages over several ranks."""
        traits = self.traits
        handed = traits.late or traits.averages_inside or self.plan.source is not None
        if handed and hooks.added_passes and hooks.version != self.gradients.version():
            raise ValueError(
                "gradients were changed between backward and optimizer.step() (clipping?), but "
                f"the gradients of {hooks.added_passes} backward passes are sent in the step, "
                "because the number of passes was unknown or smaller than before; wrap all passes "
                f"but the last in `with model.no_sync():`, or {traits.remedy or 'use WFBP()'}"
            )

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
            flying or self.traits.moves_at_end or self._has_averaged_parameters(iteration)
        )
        if late or self.traits.early or self.traits.late:
            # Where another backward adds gradients, the variant of the remedy raises as well.
            can_drop = not adding and self.plan.source is None
            remedy = (can_drop and self.traits.remedy) or AT_ONCE
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
