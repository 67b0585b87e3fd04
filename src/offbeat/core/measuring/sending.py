"""Sending: the processor time that messages take from the compute of the rank that sends them.

It is read off the process's own clock, which does not count what else runs on the machine. Where
processors would be idle, a link's thread has one of them to itself and takes nothing.
"""

from __future__ import annotations

import socket
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median

import torch
from torch import Tensor

from offbeat.core.measuring.processors import processors
from offbeat.core.measuring.timing import Budget
from offbeat.core.measuring.volley import land, release
from offbeat.core.profile import Link
from offbeat.core.transport.cluster import Cluster

VOLLEYS, COUNT = 3, 3  # of each size, and messages in each
SMALL_BYTES = 4096
LARGE = 1 / 20  # of the model: a bucket
BOOT = Path("/proc/sys/kernel/random/boot_id")  # one for all containers and namespaces

Place = tuple[str, int, int]  # machine, its processors, threads that compute in one rank


def measure_sending(
    cluster: Cluster, links: Sequence[Link], like: Tensor, total: int, budget: Budget
) -> tuple[Link, ...]:
    """The links with what their messages take from compute; as they are on a device that computes
    beside the processor, and where the budget is too small to see it.

    Every rank must call it with equal links. `total` is the model's size in bytes.
    """
    taken = crowding(cluster.control.gather(_place()))
    if like.device.type != "cpu" or not taken:
        return tuple(links)
    found = []
    for link in links:
        part = budget.share(1 / len(links))
        small, large = min(SMALL_BYTES, total), int(LARGE * total)
        while large > small and not _payable(link, (small, large), part):
            large //= 2
        if large > small:
            busy_s = [_processor_s(cluster, link, like, size, part) for size in (small, large)]
            per_message_s, per_byte_s = split((small, busy_s[0]), (large, busy_s[1]))
            link = replace(
                link,
                cpu_s_per_message=taken * per_message_s,
                cpu_s_per_byte=taken * per_byte_s,
            )
        found.append(link)
    return tuple(found)


def crowding(places: Sequence[Place]) -> float:
    """How much of a link's thread competes with compute, mean over ranks: nothing where all
    threads of the ranks on a machine, one for each link included, have processors of their own."""
    machines: dict[str, list[Place]] = defaultdict(list)
    for place in places:
        machines[place[0]].append(place)
    competing = 0.0
    for ranks in machines.values():
        needed = sum(threads + 1 for _, _, threads in ranks)
        processors = max(processors for _, processors, _ in ranks)
        competing += min(max(needed - processors, 0), len(ranks))
    return competing / len(places)


def split(small: tuple[int, float], large: tuple[int, float]) -> tuple[float, float]:
    """Seconds per message and per byte, from those of messages of two sizes; never below 0."""
    (few, few_s), (many, many_s) = small, large
    per_byte_s = max(0.0, many_s - few_s) / (many - few)
    return max(0.0, few_s - few * per_byte_s), per_byte_s


def _place() -> Place:
    machine = BOOT.read_text() if BOOT.exists() else socket.gethostname()
    return machine, processors(), torch.get_num_threads()


def _payable(link: Link, sizes: Sequence[int], budget: Budget) -> bool:
    """Whether messages of these sizes can be paid, and beginning each volley together, which is as
    much as two small messages."""
    seconds = [link.seconds(link.latency_s, size / link.bytes_per_s, size) for size in sizes]
    spent_s = VOLLEYS * (COUNT * sum(seconds) + 2 * len(sizes) * seconds[0])
    return budget.times(spent_s, VOLLEYS * COUNT * sum(sizes)) > 0


def _processor_s(cluster: Cluster, link: Link, like: Tensor, size: int, budget: Budget) -> float:
    """Processor time of one message in all threads of a rank that has nothing else to do, mean
    over ranks."""
    load = like.new_ones(max(1, size // like.element_size()))
    busy_s = []
    start_s = time.perf_counter()
    for _ in range(VOLLEYS):
        cluster.control.gather(None)  # begin together
        begin_s = time.process_time()
        land(cluster, release(cluster, {link.name: load}, COUNT))
        busy_s.append((time.process_time() - begin_s) / COUNT)
    everyone = cluster.control.gather((median(busy_s), time.perf_counter() - start_s))
    budget.pay(max(spent_s for _, spent_s in everyone), VOLLEYS * COUNT * load.nbytes)
    return fmean(seconds for seconds, _ in everyone)
