"""Pace: delays that make a host compute as slowly as the machine that it emulates."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from torch import Tensor, nn

from offbeat.core.measuring.processors import kernel_s, processors
from offbeat.core.plan import Apply
from offbeat.core.profile import Profile
from offbeat.core.runtime.compute import ComputeObserver
from offbeat.core.sim.costs import apply_s
from offbeat.core.sim.ranks import lognormal

LATE = 0.03  # a larger delay, as a share of an iteration's compute, counts as missed pace
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


class Pace(ComputeObserver):
    """Delay every piece of compute until its end in the profile.

    Each iteration has one schedule, which begins with the iteration. It advances by the profile's
    seconds of each piece of compute, and is moved forward if the host waits for a message. The host
    sleeps until the scheduled time. Therefore oversleeping does not accumulate, and a late host
    catches up.
    """

    def __init__(self, profile: Profile, rank: int) -> None:
        self._profile = profile
        self._random = np.random.default_rng((int(os.environ.get(SEED, 0)), rank))
        self._jitter = profile.jitters[rank]
        scale = profile.rank_scale[rank] if profile.rank_scale else 1.0
        buckets = len(profile.buckets)
        # Seconds from the start of forward to the end of each bucket's forward. The last bucket is
        # first.
        forward = accumulate(b.forward_s * scale for b in reversed(profile.buckets))
        self._forward_s = [*forward][::-1]
        self._backward_s = [*accumulate(b.backward_s * scale for b in profile.buckets)]
        self._bucket_update_s = np.array(profile.bucket_update_s)
        # by id of the apply; storing the apply keeps its id unique
        self._update_s: dict[int, tuple[Apply, float]] = {}
        self._scale, self._buckets = scale, buckets
        self._iteration: int | None = None
        self._clock_s = self._late_s = self._computed_s = 0.0
        # number of gradients so far, by bucket (`attach_backward_hooks`)
        self._seen = [0] * buckets
        self._late: list[float] = []  # largest delay of each iteration as a share of its compute
        self._begin_s = self._busy_s = self._kernel_s = 0.0

    # ---- callbacks of the engine --------------------------------------------------------------

    def on_iteration_begin(self, iteration: int, begin_s: float) -> float:
        if iteration == self._iteration:
            return 0.0  # a further forward of the same iteration
        if self._iteration is None:
            self._begin_s, self._busy_s, self._kernel_s = begin_s, time.process_time(), kernel_s()
        self._close_iteration()
        self._iteration, self._clock_s = iteration, begin_s
        self._factor = self._jitter_factor()
        self._forward_done_s = self._backward_done_s = 0.0
        self._advance(self._profile.other_s)
        return 0.0

    def forward(self, bucket: int) -> None:
        done_s = self._forward_s[bucket + 1] if bucket + 1 < self._buckets else 0.0
        if done_s > self._forward_done_s:
            self._advance((done_s - self._forward_done_s) * self._factor)
            self._forward_done_s = done_s

    def backward(self, bucket: int) -> None:
        done_s = self._backward_s[bucket]
        if done_s > self._backward_done_s:
            self._advance((done_s - self._backward_done_s) * self._factor)
            self._backward_done_s = done_s

    def on_update(self, apply: Apply) -> None:
        if id(apply) not in self._update_s:
            each_s = apply_s(self._profile, apply, self._bucket_update_s)
            seconds = 0.0 if each_s is None else float(each_s.sum()) * self._scale
            self._update_s[id(apply)] = apply, seconds
        self._advance(self._update_s[id(apply)][1] * self._factor)

    def on_model_update(self) -> None:
        """Delay the end of an optimizer step of the whole model."""
        self._advance(self._profile.update_s * self._scale * self._factor)

    def on_wait_end(self) -> None:
        self._clock_s = max(self._clock_s, time.perf_counter())

    # ---- the schedule -----------------------------------------------------------------------

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
        if self._computed_s:
            self._late.append(self._late_s / self._computed_s)
        self._late_s = self._computed_s = 0.0

    # ---- the report -------------------------------------------------------------------------

    def record(self) -> dict[str, float]:
        """Return the pace and its statistics for the JSON record of a run.

        "iterations" and "missed" count iterations, and those later than `LATE`. "worst" and "mean"
        are delays as shares of compute. "busy" and "interrupts" are shares of the machine's
        processor time used by this process and by interrupts.
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
                self.backward(bucket)

        return on_gradient
