"""Pace: delays that make a host compute as slowly as the machine that it emulates, and the smallest
pace at which this machine can emulate all hosts at once."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import psutil
import torch
from torch import Tensor, nn

from offbeat.core.measuring.processors import processors
from offbeat.core.observers import Observer
from offbeat.core.profile import Profile
from offbeat.core.sim.ranks import lognormal
from offbeat.core.transport.cluster import Cluster

if TYPE_CHECKING:
    from offbeat.core.plan.types import Point
    from offbeat.core.runtime.iteration import Iteration

LATE = 0.03  # a larger delay, as a share of an iteration's compute, counts as missed pace
BUSY = 0.45  # largest load of the processors: above it, messages and hosts wait for processors
LOOK_S = 0.5  # approximate seconds of the measurement of messages
MOST_MESSAGES = 8
SPEED, JITTER, SEED = "OFFBEAT_SPEED", "OFFBEAT_JITTER", "OFFBEAT_SEED"


@dataclass(frozen=True)
class Host:
    """Settings of this host from the launcher.

    Attributes:
        speed: speed of compute relative to the other hosts.
        jitter: relative standard deviation of compute.
    """

    speed: float = 1.0
    jitter: float = 0.0

    @classmethod
    def from_environment(cls) -> Host:
        """Return the settings in the environment of this process."""
        return cls(float(os.environ.get(SPEED, 1)), float(os.environ.get(JITTER, 0)))


class Pace(Observer):
    """Delay every piece of compute until its end in the profile.

    Each iteration has one schedule, which begins with the iteration. It advances by the profile's
    seconds of each piece of compute, and is moved forward if the host waits for a message. The host
    sleeps until the scheduled time. Therefore oversleeping does not accumulate, and a late host
    catches up.
    """

    every_bucket = True

    def __init__(self, profile: Profile, replica: int) -> None:
        self._profile = profile
        self._random = np.random.default_rng((int(os.environ.get(SEED, 0)), replica))
        self._jitter = profile.jitters[replica]
        scale = profile.rank_scale[replica] if profile.rank_scale else 1.0
        # Seconds from the start of forward to the end of each bucket's forward, the last bucket
        # first, and to the end of each bucket's backward.
        forward = (b.forward_s * scale for b in reversed(profile.buckets))
        backward = (b.backward_s * scale for b in profile.buckets)
        self._forward_s = [*accumulate(forward, initial=0.0)]
        self._backward_s = [*accumulate(backward, initial=self._forward_s[-1])]
        self._scale = scale
        self._iteration: int | None = None
        self._clock_s = self._late_s = self._computed_s = self._waited_s = 0.0
        # number of gradients so far, by bucket (`attach_backward_hooks`)
        self._seen = [0] * len(profile.buckets)
        self._is_first = True  # whether no iteration has ended
        self._late: list[float] = []  # largest delay of each iteration as a share of its compute
        self._begin_s = self._busy_s = self._kernel_s = 0.0

    # ---- events of the session ----------------------------------------------------------------

    def iteration_begins(self, iteration: Iteration) -> None:
        number, begin_s = iteration.number, iteration.marks.begin_s
        if number == self._iteration:
            return  # a further forward of the same iteration
        if self._iteration is None:
            self._begin_s, self._busy_s, self._kernel_s = begin_s, time.process_time(), kernel_s()
        self._close_iteration()
        # Ranks can have waited for each other since the end of the last step.
        self._iteration, self._clock_s = number, max(begin_s, self._waited_s)
        self._factor = self._jitter_factor()
        self._done_s = 0.0
        self._advance(self._profile.other_s)

    def reached(self, iteration: Iteration, point: Point, bucket: int = -1) -> None:
        if point == "forward":
            self._advance_to(self._forward_s[len(self._seen) - 1 - bucket])
        elif point == "grad":
            self._advance_to(self._backward_s[bucket + 1])

    def updated(self, iteration: Iteration, buckets: Sequence[int] | None) -> None:
        profile = self._profile
        seconds = profile.update_s
        if buckets is not None:  # `step_s` is the time of each call for a part of the model
            seconds = profile.step_s + sum(profile.bucket_update_s[b] for b in buckets)
        self._advance(seconds * self._scale * self._factor)

    def waited(self) -> None:
        self._waited_s = time.perf_counter()
        self._clock_s = max(self._clock_s, self._waited_s)

    # ---- the schedule -----------------------------------------------------------------------

    def _advance_to(self, done_s: float) -> None:
        """Advance the schedule until `done_s` of the forward and backward of this iteration."""
        if done_s > self._done_s:
            self._advance((done_s - self._done_s) * self._factor)
            self._done_s = done_s

    def _advance(self, seconds: float) -> None:
        """Advance the schedule by `seconds` of compute and sleep until then."""
        self._clock_s += seconds
        self._computed_s += seconds
        left_s = self._clock_s - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)
        else:
            self._late_s = max(self._late_s, -left_s)

    def _jitter_factor(self) -> float:
        """Return a lognormal factor with mean 1 and the profile's jitter."""
        if not self._jitter:
            return 1.0
        return float(lognormal(self._random.standard_normal(1), self._jitter)[0])

    def _close_iteration(self) -> None:
        if self._computed_s and not self._is_first:  # torch loads modules in the first iteration
            self._late.append(self._late_s / self._computed_s)
        self._is_first = self._is_first and not self._computed_s
        self._late_s = self._computed_s = 0.0

    # ---- the report -------------------------------------------------------------------------

    def record(self) -> dict[str, float]:
        """Return the pace and its statistics for the JSON record of a run.

        "iterations" and "missed" count iterations after the first one, and those later than `LATE`.
        "worst" and "mean" are delays as shares of compute. "busy" and "interrupts" are shares of
        the machine's processor time used by this process and by interrupts.
        """
        self._close_iteration()
        whole_s = max(time.perf_counter() - self._begin_s, 1e-9) * processors()
        return {
            "pace": self._profile.pace,
            "iterations": len(self._late),
            "missed": sum(late > LATE for late in self._late),
            "worst": max(self._late, default=0.0),
            "mean": sum(self._late) / max(1, len(self._late)),
            "busy": (time.process_time() - self._busy_s) / whole_s,
            "interrupts": (kernel_s() - self._kernel_s) / whole_s,
        }

    # ---- torch's own DDP --------------------------------------------------------------------

    def attach_backward_hooks(self, model: nn.Module) -> None:
        """Register hooks that report backward. They run before other hooks receive the
        gradients."""
        parameters = dict(model.named_parameters())
        for b, bucket in enumerate(self._profile.buckets):
            tensors = [parameters[name] for name in bucket.tensors if name in parameters]
            for p in tensors:
                p.register_post_accumulate_grad_hook(self._gradient_hook(b, len(tensors)))

    def _gradient_hook(self, bucket: int, size: int):
        def on_gradient(_: Tensor) -> None:
            self._seen[bucket] += 1
            if self._seen[bucket] % size == 0:
                self._advance_to(self._backward_s[bucket + 1])

        return on_gradient


# --- the smallest pace ---------------------------------------------------------------------------


class MessageCost(NamedTuple):
    """Cost of one average of the whole model.

    Attributes:
        seconds: duration.
        busy_s: processor seconds, in all processes and in the kernel.
    """

    seconds: float
    busy_s: float


def least_pace(
    compute_s: float, messages: MessageCost, hosts: int, processors: int, busy: float = BUSY
) -> float:
    """Return the smallest pace at which the load of the processors is at most `busy`.

    The busiest schedule computes all the time. Meanwhile it sends as much as the link carries, at
    most the whole model once per iteration.

    Args:
        compute_s: compute seconds of one host per iteration at full speed.
        messages: cost of one average of the whole model.
        hosts: number of emulated hosts.
        processors: number of processors of this machine.
        busy: largest share of processor time.
    """
    link = messages.busy_s / (processors * messages.seconds) if messages.seconds else 0.0
    if link < busy:
        pace = hosts / (processors * (busy - link))
        if pace * compute_s <= messages.seconds:  # the link is the bottleneck
            return max(1.0, pace)
    return max(1.0, (hosts * compute_s + messages.busy_s) / (busy * processors * compute_s))


def affordable_pace(profile: Profile, cluster: Cluster) -> float:
    """Return the smallest pace for this model on this machine, rounded up to tenths. Every rank
    must call this function."""
    messages = measure_messages(cluster, profile)
    pace = least_pace(profile.compute_s, messages, profile.ranks, processors())
    return math.ceil(pace * 10) / 10


def paced_profile(profile: Profile, pace: float | Literal["auto"], cluster: Cluster) -> Profile:
    """Return the profile of the hosts that this machine emulates. Every rank must call this
    function."""
    hosts = [Host(**host) for host in cluster.control.gather(asdict(Host.from_environment()))]
    if pace == "auto":
        pace = max(affordable_pace(profile, cluster), *(host.speed for host in hosts))
    first = [hosts[node[0]] for node in cluster.topology.nodes]  # the host of each replica
    return profile.with_pace(pace, [host.speed for host in first], [host.jitter for host in first])


def measure_messages(cluster: Cluster, profile: Profile) -> MessageCost:
    """Return the cost of averaging the whole model on the default link, as a mean over a few
    averages."""
    link = profile.default_link
    size = sum(bucket.size_bytes for bucket in profile.buckets)
    alone_s = link.latency_s + size / link.bytes_per_s
    count = min(MOST_MESSAGES, max(1, round(LOOK_S / alone_s)))
    collective = cluster.links[link.name].collectives.by_verb["all_reduce"]
    load = torch.zeros(max(1, size // 4), device=cluster.where, dtype=torch.float32)
    cluster.control.gather(None)  # all ranks begin at the same time
    begin_s, own_s, kernel = time.perf_counter(), time.process_time(), kernel_s()
    for _ in range(count):
        collective(load)
    seconds = time.perf_counter() - begin_s
    own_s = time.process_time() - own_s
    everyone = cluster.control.gather((seconds, own_s, kernel_s() - kernel))
    busy_s = sum(own for _, own, _ in everyone) + everyone[0][2]
    return MessageCost(max(s for s, _, _ in everyone) / count, busy_s / count)


def kernel_s() -> float:
    """Return the seconds that all processors have spent on interrupts, such as those of packets."""
    times = psutil.cpu_times()
    return times.irq + times.softirq
