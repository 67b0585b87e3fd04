"""Measurement of the processor time that messages take from compute of the same rank.

The processor time is read from the clock of the process, which excludes other processes of the
machine. On a machine with idle processors, the thread of a link takes no time from compute.
"""

from __future__ import annotations

import socket
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from operator import or_
from pathlib import Path
from statistics import fmean, median

import torch
from torch import Tensor

from offbeat.core.measuring import effort
from offbeat.core.measuring.processors import processor_bits
from offbeat.core.measuring.timing import Budget
from offbeat.core.measuring.volley import send_volley
from offbeat.core.plan import INSIDE
from offbeat.core.profile import Link
from offbeat.core.transport.cluster import Cluster

SMALL_BYTES = 4096
LARGE = 1 / 20  # the large message as a share of the model, about a bucket
BOOT = Path("/proc/sys/kernel/random/boot_id")  # the same in all containers of a machine

# Of one rank: machine, bits of the processors that it may use, number of its compute threads.
Place = tuple[str, int, int]


def measure_sending(
    cluster: Cluster, links: Sequence[Link], like: Tensor, total: int, budget: Budget
) -> tuple[Link, ...]:
    """Return the links with the processor time that their messages take from compute.

    On the link inside nodes of one machine each, a message waits for nothing but processors. So all
    its seconds on idle ranks count as processor time, if these exceed the time of the threads.

    A link stays unchanged if the model is on a GPU, or if the budget is too small. Every rank must
    call it with equal links. `total` is the model's size in bytes.
    """
    places = cluster.control.gather(_place())
    taken = crowding(places)
    if like.device.type != "cpu" or not taken:
        return tuple(links)
    measured = []
    for link in links:
        part = budget.share(1 / len(links))
        small, large = min(SMALL_BYTES, total), int(LARGE * total)
        while large > small and not _is_payable(link, (small, large), part):
            large //= 2
        if large > small:
            busy_s = [_processor_s(cluster, link, like, size, part) for size in (small, large)]
            per_message_s, per_byte_s = fit_message_costs((small, busy_s[0]), (large, busy_s[1]))
            link = replace(
                link,
                cpu_s_per_message=taken * per_message_s,
                cpu_s_per_byte=taken * per_byte_s,
            )
        if link.name == INSIDE and are_single_machines(cluster.topology.nodes, places):
            link = busy_throughout(link, taken)
        measured.append(link)
    return tuple(measured)


def crowding(places: Sequence[Place]) -> float:
    """Return the share of a link thread's time that competes with compute, as a mean over ranks.

    It is 0 if a machine has a processor for each compute thread and one link thread of each of its
    ranks.
    """
    machines: dict[str, list[Place]] = defaultdict(list)
    for place in places:
        machines[place[0]].append(place)
    competing = 0.0
    for ranks in machines.values():
        needed = sum(threads + 1 for _, _, threads in ranks)
        usable = reduce(or_, (bits for _, bits, _ in ranks)).bit_count()
        competing += min(max(needed - usable, 0), len(ranks))
    return competing / len(places)


def are_single_machines(nodes: Sequence[Sequence[int]], places: Sequence[Place]) -> bool:
    """Return whether all ranks of each node are on one machine."""
    return all(len({places[rank][0] for rank in node}) == 1 for node in nodes)


def busy_throughout(link: Link, taken: float) -> Link:
    """Return the link with at least a share of its messages' seconds as their processor time.

    Args:
        link: measured link.
        taken: share of a message's processor time that competes with compute.
    """
    least_s = max([link.latency_s, *(seconds for _, seconds in link.small[:1])])
    return replace(
        link,
        cpu_s_per_message=max(link.cpu_s_per_message, taken * least_s),
        cpu_s_per_byte=max(link.cpu_s_per_byte, taken / link.bytes_per_s),
    )


def fit_message_costs(small: tuple[int, float], large: tuple[int, float]) -> tuple[float, float]:
    """Return (seconds per message, seconds per byte), from (bytes, seconds) of two messages.

    Both are at least 0.
    """
    (few, few_s), (many, many_s) = small, large
    per_byte_s = max(0.0, many_s - few_s) / (many - few)
    return max(0.0, few_s - few * per_byte_s), per_byte_s


def _place() -> Place:
    machine = BOOT.read_text() if BOOT.exists() else socket.gethostname()
    return machine, processor_bits(), torch.get_num_threads()


def _is_payable(link: Link, sizes: Sequence[int], budget: Budget) -> bool:
    """Whether the budget allows the volleys of these sizes.

    Each volley begins with a barrier, which costs as much as two small messages.
    """
    seconds = [link.all_reduce_s(size) for size in sizes]
    volleys, count = effort.current().volleys, effort.current().volley
    spent_s = volleys * (count * sum(seconds) + 2 * len(sizes) * seconds[0])
    return budget.times(spent_s, volleys * count * sum(sizes)) > 0


def _processor_s(cluster: Cluster, link: Link, like: Tensor, size: int, budget: Budget) -> float:
    """Return the processor seconds of one message in all threads of an idle rank, as a mean over
    ranks."""
    load = like.new_ones(max(1, size // like.element_size()))
    volleys, count = effort.current().volleys, effort.current().volley
    busy_s = []
    start_s = time.perf_counter()
    for _ in range(volleys):
        cluster.control.gather(None)  # all ranks begin at the same time
        begin_s = time.process_time()
        send_volley(cluster, {link.name: load}, count)
        busy_s.append((time.process_time() - begin_s) / count)
    everyone = cluster.control.gather((median(busy_s), time.perf_counter() - start_s))
    budget.pay(max(spent_s for _, spent_s in everyone), volleys * count * load.nbytes)
    return fmean(seconds for seconds, _ in everyone)
