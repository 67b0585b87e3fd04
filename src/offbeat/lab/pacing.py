"""Pacing: the slowdown of compute at which one machine can emulate all hosts at once."""

from __future__ import annotations

import math
import time
from dataclasses import asdict
from typing import Literal, NamedTuple

import torch

from offbeat.core.measuring.processors import kernel_s, processors
from offbeat.core.profile import Profile
from offbeat.core.profile.device_speed import compute_s
from offbeat.core.transport.cluster import Cluster
from offbeat.lab.pace import Host

BUSY = 0.45  # largest load of the processors: above it, messages and hosts wait for processors
LOOK_S = 0.5  # approximate seconds of the measurement of messages
MOST_MESSAGES = 8


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
    pace = least_pace(compute_s(profile), messages, profile.world_size, processors())
    return math.ceil(pace * 10) / 10


def paced_profile(profile: Profile, pace: float | Literal["auto"], cluster: Cluster) -> Profile:
    """Return the profile of the hosts that this machine emulates. Every rank must call this
    function."""
    hosts = [Host(**host) for host in cluster.control.gather(asdict(Host.from_environment()))]
    if pace == "auto":
        pace = max(affordable_pace(profile, cluster), *(host.speed for host in hosts))
    return profile.with_pace(pace, [host.speed for host in hosts], [host.jitter for host in hosts])


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
