"""Observing: plain BSP iterations that measure ready order and times, then links, then agree."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from offbeat.core.buckets.flat import Flat
from offbeat.core.buckets.layout import BucketSpec, group_parameters
from offbeat.core.derive.broadcast import with_broadcast
from offbeat.core.measuring.forward_memory import ForwardMemory
from offbeat.core.measuring.jitter import are_alike, cluster_jitter, jitter_of
from offbeat.core.measuring.loss import LossTap
from offbeat.core.measuring.noise import NoiseMeter, Seen, noise_of
from offbeat.core.measuring.optimizer_calls import call_s
from offbeat.core.plan import Moment, Plan, local, transfer
from offbeat.core.profile import Bucket, Contention, GradientNoise, Link, Profile
from offbeat.core.transport.control import Control
from offbeat.core.transport.device import Device, Mark

if TYPE_CHECKING:
    from offbeat.core.runtime.compute import Compute
    from offbeat.core.runtime.engine import Engine
    from offbeat.core.runtime.iteration import Iteration, Timestamps

OTHER, UPDATE = "other", "update"


def observing_plan(buckets: int, link: str, *, broadcasts: bool = False) -> Plan:
    """All gradients in one message once all are there: right whatever order autograd takes.
    With `broadcasts` rank 0's buffers follow."""
    message = transfer(
        "grad",
        range(buckets),
        after=Moment("grad", buckets - 1),
        before=Moment("step"),
        phases=[0],
        link=link,
    )
    plan = Plan("observe", buckets, (message,), (local(buckets, Moment("step"), [0]),))
    return with_broadcast(plan, link, before=Moment("end")) if broadcasts else plan


@dataclass
class _Times:
    """Seconds of one iteration: backward per parameter, forward per module, update, other."""

    backward: dict[str, float] = field(default_factory=dict)
    forward: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    update: float = 0.0
    other: float = 0.0

    @property
    def compute(self) -> float:
        return sum(self.backward.values()) + sum(self.forward.values())


class Observer:
    """Watches an engine for some iterations through hooks that it removes afterwards."""

    def __init__(self, model: nn.Module, engine: Engine, device: Device, turns: Compute):
        self._model, self._engine, self._device, self._turns = model, engine, device, turns
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._ready: list[tuple[str, Mark]] = []
        self._entered: list[tuple[str, Mark]] = []
        self._times: list[_Times] = []
        self.order: list[str] = []
        self.memory = ForwardMemory(model)  # of the first iteration only: hooks take time
        self._tap = LossTap(device.mark)
        self._losses: list[Tensor] = []
        self._partly = False  # backward ran already, and no step followed
        self._meter = NoiseMeter(dist.get_world_size())
        engine.set_noise_meter(self._meter)
        engine.hooks.on_parameter = self._parameter_ready
        self._handles = [
            module.register_forward_pre_hook(self._enter(name))
            for name, module in model.named_modules()
            if any(p.requires_grad for p in module.parameters(recurse=False))
        ]

    def _parameter_ready(self, p: nn.Parameter) -> None:
        self._ready.append((self._names[id(p)], self._device.mark()))

    def _enter(self, name: str):
        def entered(_module: nn.Module, _inputs: object) -> None:
            if not torch.is_grad_enabled():
                return
            self.memory.place = name
            self._entered.append((name, self._device.mark()))

        return entered

    def iteration(self, done: Iteration) -> None:
        """Take in one finished iteration."""
        if self.memory.is_complete:
            self.memory.close()
        partly, self._partly = self._partly, done.abandoned
        again = partly and done.marks.forward is None  # another backward of the same forward
        if any(self._engine.hooks.seen) and not (again or (done.skipped and not self._ready)):
            self._time(done.marks)
        self._ready, self._entered = [], []

    def _time(self, marks: Timestamps) -> None:
        seconds, times = self._device.seconds, _Times()
        first, end = self._forward_of(marks)
        self.order = [name for name, _ in self._ready] or self.order
        at = start = seconds(first)
        current = None
        for name, mark in [*self._entered, (None, end)]:
            now = seconds(mark)
            if now >= start:  # earlier ones belong to an evaluation or a micro-batch
                times.forward[current or name or ""] += now - at
                current, at = name, now
        # Gradients of torch.autograd.grad reach the parameters together, when the step begins.
        for name, mark in self._ready or [(self._ordered()[0], marks.backward_end)]:
            times.backward[name] = seconds(mark) - at
            at = seconds(mark)
        times.update = seconds(marks.stepped) - seconds(marks.step)
        times.other = start - seconds(marks.begin) + seconds(marks.step) - seconds(marks.waited)
        self._times.append(times)
        loss = self._tap.take()
        if loss is not None:
            self._losses.append(loss)

    def _forward_of(self, marks: Timestamps) -> tuple[Mark, Mark]:
        """When the last forward began and ended. If the script called only parts of the model, it
        begins with the first one of these after the backward before, and ends as backward begins.
        """
        began, ended, seconds = self._tap.began, self._tap.ended, self._device.seconds
        if marks.forward is not None:
            return marks.forward, marks.forward_end
        since = max(seconds(mark) for mark in (marks.begin, ended) if mark is not None)
        entered = (mark for _, mark in self._entered if seconds(mark) >= since)
        ready = self._ready[0][1] if self._ready else marks.backward_end
        return next(entered, marks.begin), ready if began is None else began

    def _ordered(self) -> list[str]:
        """The trained parameters as their gradients were ready; against the order of the model if
        that was never seen."""
        silent = [n for n, p in self._model.named_parameters() if p.requires_grad]
        known = set(self.order)
        return self.order + [n for n in silent if n not in known] if known else silent[::-1]

    def finish(self) -> None:
        """Remove every hook."""
        self.memory.close()
        self._engine.set_noise_meter(None)
        self._engine.hooks.on_parameter = None
        self._tap.close()
        for handle in self._handles:
            handle.remove()

    def layout(self, control: Control, min_bytes: int, least_buckets: int = 1) -> list[BucketSpec]:
        """Buckets in rank 0's ready order, parameters without a gradient last; same everywhere.

        Buckets are smaller than `min_bytes` where there would be fewer than `least_buckets`.
        """
        if not self._times:
            raise RuntimeError(
                "no iteration that was measured had a gradient, so there is nothing to plan from; "
                "let optimizer.step() follow a backward through the model that offbeat.prepare "
                "returned, or give offbeat.prepare a profile"
            )
        buffers = self._engine.module_buffers.names
        order = control.gather(self._ordered())[0]
        specs = group_parameters(self._model, order, min_bytes, buffers)
        while len(specs) < least_buckets and min_bytes > 1:
            min_bytes //= 2
            specs = group_parameters(self._model, order, min_bytes, buffers)
        return specs

    def profile(
        self,
        specs: Sequence[BucketSpec],
        flat: Flat,
        links: Sequence[Link],
        contention: Sequence[Contention],
        control: Control,
        model: str,
    ) -> Profile:
        """The agreed profile: means over ranks of this rank's typical iteration."""
        mine = self._per_bucket(specs)
        everyone = np.array(control.gather(mine))  # rank x (forward per bucket, backward.., 2)
        mean = everyone.mean(axis=0)
        jitter = jitter_of([times.compute + times.update for times in self._times[1:]])
        self._turns.on_step_begin()
        step_s = call_s(self._engine.optimizer, self._device)
        self._turns.on_step_end()
        jitters, steps_s = zip(*control.gather((jitter, step_s)), strict=True)
        jitter, rank_jitter = cluster_jitter(jitters)
        kept = self._kept(specs, control)
        count = len(specs)
        compute = everyone[:, : 2 * count].sum(axis=1)
        scale = compute / compute.mean()
        spreads = control.gather(jitter_of([times.compute for times in self._times[1:]]))
        alike = are_alike(scale.tolist(), spreads, len(self._times) - 1)
        buckets = tuple(
            Bucket(
                name=spec.name,
                forward_s=float(mean[i]),
                backward_s=float(mean[count + i]),
                size_bytes=flat.buckets[i].grad.nbytes,
                buffer_bytes=flat.buckets[i].param.nbytes - flat.buckets[i].grad.nbytes,
                state_bytes=self._engine.state.bytes_of(i),
                tensors=spec.parameters + spec.buffers,
                activation_bytes=kept[i],
            )
            for i, spec in enumerate(specs)
        )
        return Profile(
            buckets=buckets,
            links=tuple(links),
            world_size=control.world_size,
            update_s=float(mean[-2]),
            other_s=float(mean[-1]),
            rank_scale=() if alike else tuple(float(s) for s in scale),
            step_s=fmean(steps_s),
            jitter=jitter,
            rank_jitter=rank_jitter,
            model=model,
            contention=tuple(contention),
            noise=self._noise(control),
            broadcast_bytes=self._engine.module_buffers.size_bytes,
        )

    def _noise(self, control: Control) -> GradientNoise | None:
        """Loss and gradient noise while observing; None in a world of one, or with ranks that
        called backward on no scalar."""
        losses = [float(loss) for loss in self._losses]
        seen = Seen.of(losses, self._meter.take(), self._engine.optimizer)
        return noise_of([Seen(**theirs) for theirs in control.gather(asdict(seen))])

    def _kept(self, specs: Sequence[BucketSpec], control: Control) -> list[int]:
        """Bytes that each bucket's forward keeps for backward, the mean over ranks that know."""
        mine, modules = None, _homes(specs)[1]
        if self.memory.kept_bytes is not None:
            mine = [0] * len(specs)
            for module, size_bytes in self.memory.kept_bytes.items():
                mine[modules.get(module, len(specs) - 1)] += size_bytes
        known = [kept for kept in control.gather(mine) if kept is not None]
        return [round(fmean(sizes)) for sizes in zip(*known, strict=True)] or [0] * len(specs)

    def _per_bucket(self, specs: Sequence[BucketSpec]) -> list[float]:
        """Forward and backward seconds per bucket of the middle iterations: the first (allocations)
        and then the fastest and slowest are left out. Update and other: medians."""
        times = self._times[1:] or self._times
        kept = sorted(times, key=lambda t: t.compute)
        kept = kept[1:-1] if len(kept) > 2 else kept
        home, modules = _homes(specs)
        forward, backward = [0.0] * len(specs), [0.0] * len(specs)
        for one in kept:
            for module, seconds in one.forward.items():
                forward[modules.get(module, len(specs) - 1)] += seconds / len(kept)
            for name, seconds in one.backward.items():
                backward[home[name]] += seconds / len(kept)
        update, other = median(t.update for t in times), median(t.other for t in times)
        return [max(0.0, s) for s in (*forward, *backward, update, other)]


def _homes(specs: Sequence[BucketSpec]) -> tuple[dict[str, int], dict[str, int]]:
    """The bucket of every parameter, and of every module: that of its first parameter to be
    ready."""
    home = {name: i for i, spec in enumerate(specs) for name in spec.parameters}
    return home, {name.rpartition(".")[0]: i for name, i in reversed(home.items())}
