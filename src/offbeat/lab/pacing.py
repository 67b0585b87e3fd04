"""Pacing: how slowly hosts must compute so that this machine can be all of them at once."""

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

BUSY = 0.45  # of the processors at most: beyond, messages and hosts wait for one
LOOK_S = 0.5  # messages are watched for about so long
MOST_MESSAGES = 8


class Messages(NamedTuple):
    """What averaging the whole model once takes: seconds, and seconds of processors, in all
    processes and in the kernel."""

    seconds: float
    busy_s: float


def least_pace(
    compute_s: float, messages: Messages, hosts: int, processors: int, busy: float = BUSY
) -> float:
    """The smallest pace at which the processors are busy for at most that share of the time.

    `compute_s` is one host's compute per iteration at full speed. The busiest schedule computes
    all the time and sends as much as the link carries meanwhile, at most the whole model once an
    iteration.
    """
    link = messages.busy_s / (processors * messages.seconds) if messages.seconds else 0.0
    if link < busy:
        pace = hosts / (processors * (busy - link))
        if pace * compute_s <= messages.seconds:  # the link is the bottleneck
            return max(1.0, pace)
    return max(1.0, (hosts * compute_s + messages.busy_s) / (busy * processors * compute_s))


def affordable(profile: Profile, cluster: Cluster) -> float:
    """The least pace for this profile's model on this machine, rounded up to tenths. Every rank
    must call it."""
    messages = watch_messages(cluster, profile)
    pace = least_pace(compute_s(profile), messages, profile.world_size, processors())
    return math.ceil(pace * 10) / 10


def paced_profile(profile: Profile, pace: float | Literal["auto"], cluster: Cluster) -> Profile:
    """Return the profile of the hosts that this machine emulates. Every rank must call it."""
    hosts = [Host(**host) for host in cluster.control.gather(asdict(Host.here()))]
    if pace == "auto":
        pace = max(affordable(profile, cluster), *(host.speed for host in hosts))
    return profile.paced(pace, [host.speed for host in hosts], [host.jitter for host in hosts])


def watch_messages(cluster: Cluster, profile: Profile) -> Messages:
    """Average the whole model a few times on the default link, and look at the processors."""
    link = profile.default_link
    size = sum(bucket.size_bytes for bucket in profile.buckets)
    alone_s = link.latency_s + size / link.bytes_per_s
    count = min(MOST_MESSAGES, max(1, round(LOOK_S / alone_s)))
    collective = cluster.links[link.name].collectives.by_verb["all_reduce"]
    load = torch.zeros(max(1, size // 4), device=cluster.where, dtype=torch.float32)
    cluster.control.gather(None)  # begin together
    begin_s, own_s, kernel = time.perf_counter(), time.process_time(), kernel_s()
    for _ in range(count):
        collective(load)
    seconds = time.perf_counter() - begin_s
    own_s = time.process_time() - own_s
    everyone = cluster.control.gather((seconds, own_s, kernel_s() - kernel))
    busy_s = sum(own for _, own, _ in everyone) + everyone[0][2]
    return Messages(max(s for s, _, _ in everyone) / count, busy_s / count)
