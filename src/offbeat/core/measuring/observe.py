"""Observation: measurement of ready order and compute times in BSP iterations, for a profile."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean, median
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from offbeat.core.buckets.attached import GradientHook, UncopiedHook
from offbeat.core.buckets.flat import Flat
from offbeat.core.buckets.layout import BucketSpec, group_parameters
from offbeat.core.buckets.shards import reshard
from offbeat.core.derive.broadcast import with_broadcast
from offbeat.core.measuring.jitter import are_alike, cluster_jitter, jitter_of, scale_of_replicas
from offbeat.core.measuring.links import at_observed_rate
from offbeat.core.measuring.loss import LossTap
from offbeat.core.measuring.optimizer_calls import call_s
from offbeat.core.observers import Observer
from offbeat.core.parts import part
from offbeat.core.plan import Moment, Plan, local, transfer
from offbeat.core.profile import Bucket, Contention, Link, Profile
from offbeat.core.transport.cluster import Cluster
from offbeat.core.transport.control import Control
from offbeat.core.transport.device import Mark

if TYPE_CHECKING:
    from offbeat.core.runtime.engine import Engine
    from offbeat.core.runtime.iteration import Iteration, Timestamps


def observing_plan(buckets: int, link: str, *, broadcasts: bool = False) -> Plan:
    """Return a plan with one message of all gradients, sent when all of them are ready.

    The plan is valid for any order of gradients. With `broadcasts`, a broadcast of rank 0's module
    buffers follows.
    """
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


class ProfileObserver(Observer):
    """Measures iterations of an engine, also through hooks, which `finish` removes.

    Args:
        engine: engine of this rank.
        turns: context in which this rank computes while others do not.
    """

    def __init__(self, engine: Engine, turns: AbstractContextManager[object]) -> None:
        self._engine, self._turns = engine, turns
        self._model, self._device = model, device = engine.model, engine.device
        reshard(model)
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._ready: list[tuple[str, Mark]] = []
        # Of a backward that begins while the one before awaits its step: of the next iteration.
        self._early: list[tuple[str, Mark]] = []
        self._entered: list[tuple[str, Mark]] = []
        self._times: list[_Times] = []
        self.order: list[str] = []
        self._tap = LossTap(device.mark)
        self._losses: list[Tensor] = []
        self._partly = False  # whether the last iteration had a backward and no step
        self._messages: list[tuple[int, float]] = []  # iteration and seconds of its message
        self._metering = part("Metering")(engine)
        engine.observers.add(self)
        if not engine.flat.is_sharded:  # the meter needs whole gradients
            engine.observers.add(self._metering)
        self._handles: list[GradientHook | RemovableHandle] = [
            GradientHook(p, self._parameter_ready, lasting=engine.flat.is_sharded)
            for p in engine.flat.parameters
        ]
        for name, module in timed_modules(model):
            record = UncopiedHook(partial(self._record_entry, name))
            self._handles.append(module.register_forward_pre_hook(record))

    def _parameter_ready(self, p: Tensor) -> None:
        if p.requires_grad and not self._engine.hooks.accumulating:
            ready = self._early if self._engine.awaits_step else self._ready
            ready.append((self._names[id(p)], self._device.mark()))

    def _record_entry(self, name: str) -> None:
        if torch.is_grad_enabled():
            self._entered.append((name, self._device.mark()))

    def ended(self, iteration: Iteration) -> None:
        done, message = iteration, iteration.messages[0]
        if message.end is not None and message.was_sent:
            s = self._device.seconds(message.end) - self._device.seconds(message.start)
            self._messages.append((done.number, s))
        partly, self._partly = self._partly, done.abandoned
        again = partly and done.marks.forward is None  # second backward of the same forward
        if self._engine.gradients.is_any() and not (again or (done.skipped and not self._ready)):
            self._record_times(done.marks)
        self._ready, self._early, self._entered = self._early, [], []

    def _record_times(self, marks: Timestamps) -> None:
        seconds, times = self._device.seconds, _Times()
        first, end = self._forward_marks(marks)
        at = start = seconds(first)
        current, end_s = None, seconds(end)
        for name, mark in [*self._entered, (None, end)]:
            now = seconds(mark)
            # Earlier marks belong to an evaluation or a micro-batch, later ones to checkpointed
            # modules, which the backward runs again.
            if start <= now <= end_s:
                times.forward[current or name or ""] += now - at
                current, at = name, now
        # Gradients that were ready before this forward are of the backward of an earlier one.
        ready = [(name, mark) for name, mark in self._ready if seconds(mark) >= at]
        if self._ready and not ready and self._times:
            return
        self.order = [name for name, _ in ready] or self.order
        # Gradients from torch.autograd.grad are assigned together, when the step begins.
        for name, mark in ready or [(self._ready_order()[0], marks.backward_end)]:
            times.backward[name] = max(0.0, seconds(mark) - at)
            at = seconds(mark)
        times.update = seconds(marks.stepped) - seconds(marks.step)
        times.other = start - seconds(marks.begin) - marks.held_s
        times.other += seconds(marks.step) - seconds(marks.waited)
        self._times.append(times)
        loss = self._tap.take()
        if loss is not None:
            self._losses.append(loss)

    def _forward_marks(self, marks: Timestamps) -> tuple[Mark, Mark]:
        """Return marks of begin and end of the last forward.

        If the script has called only parts of the model, the forward begins with the first part
        called after the previous backward, and ends when backward begins.
        """
        began, ended, seconds = self._tap.began, self._tap.ended, self._device.seconds
        if marks.forward is not None:
            return marks.forward, marks.forward_end
        since = max(seconds(mark) for mark in (marks.begin, ended) if mark is not None)
        entered = (mark for _, mark in self._entered if seconds(mark) >= since)
        ready = self._ready[0][1] if self._ready else marks.backward_end
        return next(entered, marks.begin), ready if began is None else began

    def _ready_order(self) -> list[str]:
        """Return the trained parameters in ready order, those without a gradient last. Among them
        are those that the script has frozen since `prepare`.

        If no ready order was observed, return the reverse order of the model.

        Raises:
            ValueError: the script has removed or renamed a parameter.
        """
        reshard(self._model)
        ids = {id(p) for p in self._engine.flat.parameters}
        trained = [n for n, p in self._model.named_parameters() if id(p) in ids]
        removed = [name for i, name in self._names.items() if i in ids and name not in trained]
        if removed:
            raise ValueError(
                f"parameter {removed[0]!r} has left the model, or its name has changed (pruning?), "
                "in the first iterations, which are measured; change the model before "
                "offbeat.prepare, or give offbeat.prepare a profile"
            )
        known = set(self.order)
        return self.order + [n for n in trained if n not in known] if known else trained[::-1]

    def finish(self) -> None:
        """Remove every hook."""
        self._engine.observers.remove(self)
        self._engine.observers.remove(self._metering)
        self._tap.close()
        for handle in self._handles:
            handle.remove()

    def layout(self, control: Control, min_bytes: int, least_buckets: int = 1) -> list[BucketSpec]:
        """Return buckets in rank 0's ready order, the same on all ranks.

        Parameters without a gradient come last. `min_bytes` is halved until there are at least
        `least_buckets` buckets.

        Raises:
            RuntimeError: no measured iteration had a gradient.
        """
        if not self._times:
            raise RuntimeError(
                "no iteration that was measured had a gradient, so there is nothing to plan from; "
                "let optimizer.step() follow a backward through the model that offbeat.prepare "
                "returned, or give offbeat.prepare a profile"
            )
        buffers = self._engine.module_buffers.names
        order = control.share_first(self._ready_order())
        while True:
            specs = group_parameters(self._model, order, min_bytes, buffers)
            if len(specs) >= least_buckets or min_bytes <= 1:
                return specs
            min_bytes //= 2

    def profile(
        self,
        specs: Sequence[BucketSpec],
        flat: Flat,
        links: Sequence[Link],
        contention: Sequence[Contention],
        cluster: Cluster,
        model: str,
    ) -> Profile:
        """Return the profile: means over ranks of each rank's typical iteration.

        A replica of several ranks has the scale of its slowest rank, because its ranks wait for
        each other in every iteration, and their mean jitter.
        """
        control, topology = cluster.control, cluster.topology
        observed_s = least_message_s(control.gather(self._messages))
        links = [
            at_observed_rate(link, sum(flat.sizes_bytes), observed_s)
            if link.name == next(iter(cluster.specs)) and observed_s is not None
            else link
            for link in links
        ]
        jitter = jitter_of([times.compute + times.update for times in self._times[1:]])
        spread = jitter_of([times.compute for times in self._times[1:]])
        with self._turns:
            step_s = call_s(self._engine.optimizer, self._device)
        own = self._per_bucket(specs), jitter, spread, step_s
        seconds, jitters, spreads, steps_s = zip(*control.gather(own), strict=True)
        # [ranks, 2 * buckets + 2]: forward and backward per bucket, update, other; in seconds.
        everyone = np.array(seconds)
        jitter, rank_jitter = cluster_jitter(jitters)
        count, whole, mean = len(specs), flat.parameter_tensors(), everyone.mean(axis=0)
        elements = sum(x.numel() for x in whole)
        compute = everyone[:, : 2 * count].sum(axis=1)
        scale = compute / compute.mean()
        alike = are_alike(scale.tolist(), spreads, len(self._times) - 1)
        buckets = tuple(
            Bucket(
                name=spec.name,
                forward_s=float(mean[i]),
                backward_s=float(mean[count + i]),
                size_bytes=flat.sizes_bytes[i],
                buffer_bytes=flat.buffer_bytes[i],
                state_bytes=self._engine.state.bytes_of(i),
                tensors=spec.parameters + spec.buffers,
            )
            for i, spec in enumerate(specs)
        )
        return Profile(
            buckets=buckets,
            links=tuple(link for link in links if link.name in cluster.specs),
            world_size=topology.replicas,
            update_s=float(mean[-2]),
            other_s=float(mean[-1]),
            rank_scale=() if alike else scale_of_replicas(scale.tolist(), topology.nodes),
            step_s=fmean(steps_s),
            jitter=jitter,
            rank_jitter=rank_jitter
            and tuple(fmean(rank_jitter[rank] for rank in node) for node in topology.nodes),
            model=model,
            contention=tuple(contention),
            noise=None if flat.is_sharded else self._metering.noise(self._losses),
            broadcast_bytes=self._engine.module_buffers.size_bytes,
            topology=() if topology.is_flat else topology.sizes,
            inside=next((link for link in links if link.name not in cluster.specs), None),
            sharded=topology.sharded,
            element_bytes=sum(x.nbytes for x in whole) / elements if elements else 4.0,
            device=whole[0].device.type if whole else "cpu",
        )

    def _per_bucket(self, specs: Sequence[BucketSpec]) -> list[float]:
        """Return forward and backward seconds per bucket, then seconds of update and other.

        Forward and backward are means over iterations without the first one, which allocates
        memory, the fastest and the slowest. Update and other are medians.
        """
        times = self._times[1:] or self._times
        kept = sorted(times, key=lambda t: t.compute)
        kept = kept[1:-1] if len(kept) > 2 else kept
        home, modules = _bucket_indices(specs)
        forward, backward = [0.0] * len(specs), [0.0] * len(specs)
        for one in kept:
            for module, seconds in one.forward.items():
                forward[modules.get(module, len(specs) - 1)] += seconds / len(kept)
            for name, seconds in one.backward.items():
                backward[home[name]] += seconds / len(kept)
        update, other = median(t.update for t in times), median(t.other for t in times)
        return [max(0.0, s) for s in (*forward, *backward, update, other)]


def timed_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules whose forward is timed: those with trained parameters of their own.

    A module that torch.compile has returned takes the place of all modules in it, with the name of
    the first one, because hooks on them would break its graph.
    """
    prefix, compiled = None, None  # of the names in a compiled module; the module until it is used
    for name, module in model.named_modules():
        inside = prefix is not None and name.startswith(prefix)
        if not inside and hasattr(module, "_orig_mod"):
            prefix, compiled = f"{name}." if name else "", module
        elif any(p.requires_grad for p in module.parameters(recurse=False)):
            if not inside:
                yield name, module
            elif compiled is not None:
                yield name, compiled
                compiled = None


def least_message_s(messages: Sequence[Sequence[tuple[int, float]]]) -> float | None:
    """Return the least seconds of the observed messages without the first one; None if fewer than
    four remain.

    The rank that arrives last waits for no other, so the least time of all ranks counts, and that
    of all iterations, because the first messages of a connection take longer, until TCP has found
    the rate. At 25 Mbit/s, messages of 3.4 MB between two nodes of two ranks took 1384, 1223, 1170,
    1182, 1206 and 1183 ms.

    Args:
        messages: by rank, iteration and seconds of each message.
    """
    by_rank = [dict(one) for one in messages]
    common = sorted(set.intersection(*map(set, by_rank)))[1:]
    return min(seconds[t] for seconds in by_rank for t in common) if len(common) > 3 else None


def _bucket_indices(specs: Sequence[BucketSpec]) -> tuple[dict[str, int], dict[str, int]]:
    """Return the bucket index of every parameter, and of every module.

    The bucket of a module is that of its first ready parameter.
    """
    home = {name: i for i, spec in enumerate(specs) for name in spec.parameters}
    return home, {name.rpartition(".")[0]: i for name, i in reversed(home.items())}
