"""First iterations of a session without a profile: they run BSP and are measured."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from offbeat.core.files import write_or_warn
from offbeat.core.guards.script_usage import UsageRecorder, combine_usage
from offbeat.core.measuring.codec_speed import measure_codecs
from offbeat.core.measuring.idle_links import measure_pauses
from offbeat.core.measuring.links import measure_cluster, measure_inside, worthwhile_bytes
from offbeat.core.measuring.observe import ProfileObserver, observing_plan
from offbeat.core.observers import Observer
from offbeat.core.parts import part
from offbeat.core.profile import Profile
from offbeat.core.runtime.iteration import Iteration
from offbeat.core.runtime.joint_optimizer import JointOptimizer
from offbeat.core.runtime.plan_choice import PlanChoice
from offbeat.core.runtime.plan_runner import PlanRunner
from offbeat.core.runtime.session_guards import SessionGuards
from offbeat.core.runtime.training_job import TrainingJob


class FirstIterations(Observer):
    """Measurement of a profile in the first iterations, from which the plan is made.

    Args:
        job: objects of this rank.
        choice: strategy that will run.
        guards: guards of the session.
        runner: runs the plan.
        run_alone: runs exchanges of all ranks before there is a plan.

    Attributes:
        observer: observer of the iterations; None before and after them.
    """

    def __init__(
        self,
        job: TrainingJob,
        choice: PlanChoice,
        guards: SessionGuards,
        runner: PlanRunner,
        run_alone: Callable[[Callable[[], None]], None],
    ) -> None:
        self._job, self._choice, self._guards = job, choice, guards
        self._runner, self._engine, self._run_alone = runner, runner.engine, run_alone
        # Whether the model's layers are emulated by sleeping.
        self._is_emulated = bool(getattr(job.model, "emulated", False))
        self._load = part("LoadSampler")(
            os.getppid()
        )  # the launcher's other ranks are no other programs
        self.observer: ProfileObserver | None = None
        self._turns: Any = None  # of the ranks of this machine

    def begin(self) -> None:
        """Run BSP and measure it from the next iteration on."""
        job, engine, cluster = self._job, self._engine, self._job.cluster
        self._load.sample()
        watched = UsageRecorder()
        if isinstance(engine.optimizer, JointOptimizer):
            watched.record_own_step()
        engine.set_watched(watched)
        broadcasts = self._choice.broadcasts(self._choice.strategy)
        first = next(iter(cluster.specs))
        plan = observing_plan(len(engine.flat.buckets), first, broadcasts=broadcasts)
        cluster.open(plan.links)
        self._guards.guard_links()
        engine.adopt(plan)
        self._guards.note_plan(observes=True)
        # Ranks of a sharded replica wait for each other within forward.
        lock = None if self._is_emulated or engine.flat.is_sharded else job.request.turns
        self._turns = part("Turns")(lock) if lock else nullcontext()
        self.observer = ProfileObserver(engine, self._turns)
        engine.observers.add(self)
        if lock:
            engine.observers.add(self._turns)

    def ended(self, iteration: Iteration) -> None:
        number, engine = iteration.number + 1, self._engine
        is_last = number >= self._job.observation.iterations and not iteration.abandoned
        if is_last:
            engine.observers.remove(self)
            assert self.observer is not None
            act = partial(self._run_plan, self.observer, number)
            engine.change_at_end(partial(self._run_alone, act))

    def cancel(self) -> None:
        """Stop the measurement, if there is one, before another plan is adopted."""
        if self.observer is not None:
            self._finish(self.observer)

    def _finish(self, observer: ProfileObserver) -> None:
        observer.finish()
        for one in (self, self._turns):
            self._engine.observers.remove(one)
        self.observer = None

    def _run_plan(self, observer: ProfileObserver, observed: int) -> None:
        """Complete the profile, and run the plan that is made from it."""
        save_to, control = self._job.observation.save_to, self._job.cluster.control
        stops = self._job.request.stop_after_profile
        self._finish(observer)
        self._load.sample()
        strategy = self._choice.strategy
        if self._choice.shares_buffers and not self._choice.broadcasts(strategy):
            # Averages of parameters include buffers.
            self._guards.agree_on_buffers(only_alike=strategy.synchronous)
        profile = self._measure(observer)
        if save_to and control.rank == 0:
            again = ", and the next run measures again"
            write_or_warn(profile.save, save_to, "profile", again, needed=stops)
        if stops:
            raise SystemExit(0)
        self._runner.run_from(profile, observed, profile.usage)

    def _measure(self, observer: ProfileObserver) -> Profile:
        """Return the profile, the same on all ranks, after the storage was divided into buckets."""
        how, request, engine = self._job.observation, self._job.request, self._engine
        cluster, emulated = self._job.cluster, self._is_emulated
        control, least, needed = cluster.control, how.min_bucket_bytes, 1
        if least is None:
            least = worthwhile_bytes(cluster, engine.flat)
            replicas = cluster.topology.replicas
            needed = max(request.least_buckets, self._choice.strategy.least_buckets(replicas))
        specs = observer.layout(control, least, needed)
        engine.relayout(specs)
        flat = engine.flat
        self._guards.parameters.attach(flat.parameters)
        links, contention = measure_cluster(cluster, flat, emulated=emulated)
        links = (*links, *measure_inside(cluster, flat, emulated=emulated))
        profile = observer.profile(specs, flat, links, contention, cluster, how.model)
        assert engine.watched is not None
        profile = replace(profile, usage=combine_usage(engine.watched.usage, control))
        if request.pace is not None and not emulated:
            paced = part("paced_profile")(profile, request.pace, cluster)
            profile = Profile.from_dict(control.share_first(paced.to_dict()))
        # Before `measure_beside`, because ranks do not compute while they pause.
        profile = measure_pauses(cluster, flat, profile)
        if profile.pace:
            profile = part("measure_beside")(cluster, flat, profile)
        with part("ComputeLoad")(profile) if profile.pace else nullcontext():
            profile = measure_codecs(cluster, profile)
        self._load.sample()
        profile = replace(profile, foreign_share=self._foreign_share())
        # Every rank must plan from the same profile.
        return Profile.from_dict(control.share_first(profile.to_dict()))

    def _foreign_share(self) -> float:
        """Return the largest share of the processors of a host that other programs used, if they
        disturbed the measurement; otherwise 0. `offbeat profile` samples the load itself."""
        load = None if self._job.request.stop_after_profile else self._load.load()
        own = part("disturbing_share")(load and load.record())
        return max(share or 0.0 for share in self._job.cluster.control.gather(own))
