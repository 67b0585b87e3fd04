"""Session that runs a strategy's plan on flat buckets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from offbeat.core.buckets.flat import Flat
from offbeat.core.buckets.layout import BucketSpec, specs_of_profile
from offbeat.core.derive import effects
from offbeat.core.guards.comparison import ReplicaGuard
from offbeat.core.guards.replicas import (
    average_replicas,
    repair,
    require_equal,
    take,
)
from offbeat.core.guards.same_inputs import ITERATIONS, InputSamples, read_same_batches
from offbeat.core.guards.script_usage import scaler_remedy
from offbeat.core.observers import Observers
from offbeat.core.parts import part
from offbeat.core.plan import Plan
from offbeat.core.profile import Profile
from offbeat.core.runtime.engine import NO_CONTEXT, Engine
from offbeat.core.runtime.hooks import tensors_of
from offbeat.core.runtime.job_profile import FirstIterations
from offbeat.core.runtime.planner import Planner
from offbeat.core.runtime.recording import Decisions
from offbeat.core.runtime.session import Position, Session
from offbeat.core.runtime.session_guards import SessionGuards
from offbeat.core.runtime.training_job import TrainingJob
from offbeat.core.strategy.interface import Planned
from offbeat.core.transport.failure_detector import IN_SCRIPT


class FlatSession(Session):
    """Session that runs a strategy's plan on flat buckets, after a measurement with BSP if
    needed.

    Args:
        strategy: requested strategy.
        job: objects of this rank.
        flat: storage of the model.

    Attributes:
        engine: executor of the plan.
        planner: the strategy that runs, its profile and its plan.
    """

    def __init__(self, strategy: Planned, job: TrainingJob, flat: Flat) -> None:
        self._job, self._model, self._recorder = job, job.model, job.recorder
        self._cluster = cluster = job.cluster
        self._earlier_iterations = 0  # iterations of processes before this one
        self._united = -1  # the engine's iteration of the last `consolidate`
        self._loaded = 0  # the engine's iteration of the last load
        alone = cluster.control.world_size == 1 or cluster.control.has_members
        compares_inputs = job.watch.compare_every and not alone
        self._inputs = InputSamples() if compares_inputs else None
        self._names_differences = not strategy.synchronous and cluster.control.world_size > 1
        self._unsampled: int | None = None  # its parameters arrive in the next forward
        self.engine = Engine(
            job.model,
            flat,
            job.optimizer,
            cluster.links,
            cluster.device,
            cluster.control,
            cluster.timeout_s,
            cluster.replica,
            sends_buffers=cluster.is_first,
            on_failure=cluster.abort,
        )
        decisions = Decisions(job.recorder, self.engine)
        self._guards = guards = SessionGuards(job, self.engine, strategy, decisions)
        self.planner = Planner(strategy, job, self.engine, guards, decisions)
        self._first: FirstIterations | None = None

    def begin(self) -> None:
        """Run the strategy's plan from the next iteration on, or measure a profile before."""
        if self._job.profile is not None:
            self.planner.begin(self._job.profile)
        else:
            self._first = FirstIterations(self._job, self.engine, self.planner, self._guards)
        self._job.open_connections()

    @property
    def plan(self) -> Plan:
        """Plan of the strategy."""
        return self.planner.plan

    @property
    def profile(self) -> Profile:
        """Profile from which the plan was made. AttributeError while it is measured."""
        return self.planner.profile

    @property
    def observers(self) -> Observers:  # type: ignore[override]
        return self.engine.observers

    @property
    def scaler_remedy(self) -> str | None:
        return scaler_remedy(self.engine.plan)

    # ---- overridden where members change ----------------------------------------------------

    def run_jointly(self, exchange: Callable[[], None]) -> None:
        """Run an exchange of all ranks at the end of an iteration."""
        exchange()

    def _begin_iteration(self) -> None:
        """Act before the first forward of an iteration."""
        self._guards.begin_iteration()

    def _consolidate(self, repairing: bool) -> None:
        with self._cluster.control.joint_call("consolidate"):
            self.engine.drain()
            self._unify(repairing)

    # ---- what the user calls ----------------------------------------------------------------

    def forward(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        engine = self.engine
        if self._cluster.closed and not (torch.is_grad_enabled() and self._model.training):
            return call(*args, **kwargs)
        if torch.is_grad_enabled():
            self._guards.before_forward()
            trains = engine.trains
            if trains and engine.cursor.now is None:
                self._begin_iteration()
            if trains and self._inputs is not None and not torch.compiler.is_compiling():
                self._inputs.note(engine.iteration, tensors_of((args, kwargs)))
            if trains and self._guards.has_loaded and not self._cluster.closed:
                self._guards.require_all_loaded()
        elif not self._model.training:
            self.note_reading("evaluation")
        context = engine.forward_begins()
        if context is NO_CONTEXT:
            output = call(*args, **kwargs)
        else:
            with context:
                output = call(*args, **kwargs)
        engine.forward_ends(output)
        self._guards.after_forward()
        if self._unsampled is not None and self._recorder:
            self._recorder.on_step_end(self._unsampled)
            self._unsampled = None
        return output

    def note_reading(self, what: str) -> None:
        if self._names_differences and self._replicas_differ:
            self._names_differences = False
            self.planner.decisions.print(
                f"{what} of replicas that differ since their last average; call "
                "model.consolidate() on all ranks before evaluations and saving"
            )

    @property
    def _replicas_differ(self) -> bool:
        """Whether replicas may differ: the last iteration has not averaged all parameters."""
        engine, done = self.engine, self.engine.iteration
        if not done or done == self._united or engine.cursor.now is not None:
            return False
        averaged = {
            b
            for t in engine.run.program.transfers(engine.cursor.planned - 1)
            if t.payload.buffer == "param" and (t.ranks, t.when, t.before.lag) == (None, None, 0)
            for b in t.payload.buckets
        }
        return not engine.traits.sends_only_gradients and len(averaged) < engine.plan.buckets

    def before_call(self) -> None:
        self.engine.before_call()

    def note_forward(self, output: object) -> None:
        self.engine.note_forward(output)

    def drive(
        self, call: Callable[..., Any], closure: Any = None, /, *args: Any, **kwargs: Any
    ) -> Any:
        self.flush()
        begin_update, stepping = self.engine.begin_update, self._guards.stepping
        if closure is not None:

            def evaluate() -> Any:
                loss = closure()
                begin_update()
                return loss

            args = (torch.enable_grad()(evaluate), *args)
        with stepping.script_steps(begin_update, inner=closure is None):
            result = call(*args, **kwargs)
        stepped = stepping.has_script_step or closure is not None
        if stepped and not self._guards.shares_optimizer:  # messages are in the flat tensors
            self.engine.flat.restore_parameters()
        return result, stepped

    @property
    def awaits_step(self) -> bool:
        return self.engine.awaits_step

    def step(self, skip_update: bool) -> None:
        engine, guards, recorder = self.engine, self._guards, self._recorder
        if recorder:
            recorder.on_step_begin(engine.iteration)
        if guards.replicas is not None and guards.replicas.count_step():
            # Other ranks wait for this rank's messages before they compare.
            engine.complete(skip_update)
            self.run_jointly(guards.replicas.compare)
        engine.step(skip_update)
        if self._first is not None and self._first.observed:
            self.run_jointly(partial(self._begin_plan, self._first))
        guards.note_step()
        if self._inputs is not None and engine.iteration >= ITERATIONS:
            self.run_jointly(self._compare_inputs)
        if engine.traits.moves_at_forward:
            self._unsampled = engine.iteration - 1
        elif recorder:
            recorder.on_step_end(engine.iteration - 1)
        change = self.planner.on_step_end()
        if change is not None:
            self.run_jointly(change)

    def _begin_plan(self, first: FirstIterations) -> None:
        """Run the strategy's plan after the measurement of its profile."""
        self._first = None
        profile = first.measure()
        self.planner.begin(profile, first.observed, profile.usage)
        self.engine.begin()

    def _compare_inputs(self) -> None:
        """Notice once if all ranks have read the same batches so far."""
        assert self._inputs is not None
        everyone = self._cluster.control.gather(self._inputs.digests())
        self._inputs = None
        if read_same_batches(everyone):
            self.planner.decisions.print(
                f"all ranks have read the same batches in {ITERATIONS} iterations, so they repeat "
                "each other's work; give the loader a DistributedSampler, or other seeds per rank"
            )

    def on_scaler_step(self, *, steps: bool) -> None:
        self.engine.note_scaler_step(steps=steps)

    def skip_step(self) -> None:
        skipping = self.engine.require_skippable()
        self.step(skip_update=skipping)
        if skipping and isinstance(self._guards.replicas, ReplicaGuard):
            self._guards.replicas.skipped += 1

    def zero_grad(self, set_to_none: bool) -> None:
        self.engine.zero_grad(set_to_none)

    def flush(self) -> None:
        self.engine.flush()

    def traffic(self) -> dict[str, int]:
        return self._cluster.bytes_sent()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        hooks = self.engine.hooks
        before, hooks.accumulating = hooks.accumulating, True
        try:
            yield
        finally:
            hooks.accumulating = before

    def optimizer_reloaded(self) -> None:
        self.engine.refresh_groups()

    def consolidate(self, repairing: bool) -> None:
        self._cluster.require_open()
        self._cluster.control.set_activity("in consolidate")
        self._guards.forget_weights()
        self._consolidate(repairing)
        self._cluster.control.set_activity(IN_SCRIPT)
        self._united = self.engine.iteration

    def _unify(self, repairing: bool, *, staged: bool = False) -> None:
        """Make all replicas equal.

        Args:
            repairing: whether to average parameters that the plan keeps equal, and their state.
            staged: whether replicas stay as they are if a rank fails meanwhile.
        """
        model, cluster, plan = self._model, self._cluster, self.engine.plan
        traits = self.engine.traits
        if plan.source is not None:
            take(plan.source, model, cluster)
        elif repairing and traits.sends_only_gradients:
            repair(model, self.engine.optimizer, cluster, staged=staged)
        else:
            if traits.sends_only_gradients:
                require_equal(model, self.planner.strategy, cluster)
            else:
                self._guards.require_finite_replicas()
            average_replicas(model, cluster, staged=staged)

    # ---- checkpoints ------------------------------------------------------------------------

    @property
    def iteration(self) -> int:
        return self._earlier_iterations + self.engine.iteration

    @property
    def observing(self) -> bool:
        return self._first is not None

    def capture_position(self) -> Position:
        self._cluster.require_open()
        if self.observing:
            raise RuntimeError(
                f"there is no plan yet in iteration {self.iteration}, as the first iterations are "
                "measured; save later, or give offbeat.prepare a profile"
            )
        state = self.planner.capture()
        united = self._united == self.engine.iteration
        alike = united or self.engine.traits.averages_gradients
        return Position(self.iteration, alike, state)

    def resume(self, iteration: int, state: Mapping[str, Any] | None) -> None:
        self._cluster.require_open()
        self._united, self._loaded = -1, self.engine.iteration
        self._guards.restart()
        if state is not None:
            self.engine.pause()
            if self._first is not None:
                self._first.close()
                self._first = None
            self.planner.resume(state)
        else:
            self.engine.discard()
        self._earlier_iterations = iteration - self.engine.iteration

    # ---- end --------------------------------------------------------------------------------

    def close(self) -> None:
        if self._cluster.closed:
            return
        if not self._cluster.control.has_failed:  # otherwise others send nothing any more
            self.engine.leave()
            if self._have_replicas_diverged():
                self._print_difference()
        self.engine.machine.close()
        self.engine.observers.deliver(rest=True)
        if self._recorder:
            pace = self.planner.pace
            self._recorder.pace = pace.record() if pace else None
            self._recorder.write(self.traffic())
        self.detach()
        self._cluster.close(self.engine.machine.failure)

    def _have_replicas_diverged(self) -> bool:
        """Return whether replicas certainly differ after the last iteration."""
        engine, replicas = self.engine, self._cluster.topology.replicas
        run, last = engine.run, engine.cursor.planned - 1
        is_known = engine.machine.failure is None and last >= 0 and not run.reloaded
        if not is_known or replicas == 1 or engine.iteration in (self._united, self._loaded):
            return False
        return bool(effects.differing_buckets(run.plan, last, replicas, run.votes.outcomes))

    def cancel(self) -> None:
        """End the session after a failure of `begin`, before it has trained."""
        self.detach()

    def detach(self) -> None:
        """Remove every hook on the model, the optimizer and torch."""
        self.planner.stop_watching()
        self.engine.detach()
        self._guards.close()


def build_flat(model: nn.Module, profile: Profile | None, alignment_bytes: int = 1) -> Flat:
    """Return flat storage with the profile's buckets, or one bucket per parameter in reverse
    order."""
    if profile is not None:
        specs = specs_of_profile(model, profile)
    else:
        names = [name for name, p in model.named_parameters() if p.requires_grad]
        specs = [BucketSpec(name, (name,)) for name in reversed(names)]
    return Flat(model, specs, alignment_bytes=alignment_bytes)


def open_plan_session(strategy: Planned, job: TrainingJob) -> FlatSession:
    """Return the session that runs the strategy's plan. It measures a profile if none is known."""
    flat = build_flat(job.model, job.profile, job.cluster.alignment_bytes)
    session_type = FlatSession if job.member is None else part("MemberSession")
    session = session_type(strategy, job, flat)
    try:
        session.begin()
        session.engine.begin()
    except BaseException:
        session.cancel()
        raise
    return session
