"""Additional time of messages while emulated hosts compute.

Emulated hosts share the processors of one machine. A message wakes a thread on every rank several
times, and each thread waits for a processor on which another host computes. Predictions of
messages in training include this time.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from statistics import median
from typing import Self

import numpy as np
import torch

from offbeat.core.buckets.flat import Flat
from offbeat.core.measuring.links import SMALL_SIZES
from offbeat.core.measuring.timing import Budget, Probe, measure_messages
from offbeat.core.profile import Link, Profile
from offbeat.core.profile.records import Points
from offbeat.core.transport.cluster import Cluster
from offbeat.core.transport.collectives import Collective

BESIDE_S = 3.5  # seconds of messages, on all links together
LARGEST = 2 / 3  # largest share of these seconds for the largest size
SIZES = 3  # sizes to measure
ROUNDS = 3  # rounds of each size, each with and without compute
MESSAGES = 4  # messages in each half of a round
WORK = 1 << 16  # numbers in the sum that replaces a model's compute; one thread computes it

Extra = list[tuple[int, float]]  # (bytes, seconds), ascending


class ComputeLoad:
    """Computes in a thread as one emulated host does, as a context manager.

    The thread repeats the profile's forward, backward and update piece by piece. For each piece it
    computes at full speed and then sleeps for the rest of the piece's time.
    """

    def __init__(self, profile: Profile) -> None:
        backward = [bucket.backward_s for bucket in profile.buckets]
        forward = [bucket.forward_s for bucket in reversed(profile.buckets)]
        pieces = [*forward, *backward, profile.update_s, profile.other_s]
        self._pieces_s = [seconds for seconds in pieces if seconds > 0]
        self._share = 1 / max(1.0, profile.pace)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="offbeat-compute", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        due_s = time.perf_counter()
        work = torch.zeros(WORK, dtype=torch.float32, device="cpu")
        out = torch.empty_like(work)
        while self._pieces_s:
            for piece_s in self._pieces_s:
                begin_s = time.thread_time()
                while time.thread_time() - begin_s < piece_s * self._share:
                    torch.cumsum(work, 0, out=out)
                due_s = max(due_s + piece_s, time.perf_counter())
                if self._over.wait(due_s - time.perf_counter()):
                    return


def measure_beside(cluster: Cluster, flat: Flat, profile: Profile) -> Profile:
    """Return the profile of emulated hosts with the time that messages take beside compute.

    Every rank must call it with equal profiles.
    """
    like = flat.parameter_tensors()[0]
    if cluster.control.world_size == 1 or like.device.type != "cpu":
        return profile
    total = sum(flat.sizes_bytes)
    links, count = [], len(profile.all_links)
    for link in profile.all_links:
        probe = Probe(cluster.probe_group(link.name), like, cluster.device)
        mean = cluster.links[link.name].collectives.by_verb["all_reduce"]
        budget = Budget(BESIDE_S / count, float("inf"))
        extra = measure_extra(probe, mean, link, total, profile, budget)
        links.append(with_extra(link, extra))
    between, inside = links[: len(profile.links)], links[len(profile.links) :]
    return replace(profile, links=tuple(between), inside=next(iter(inside), None))


def measure_extra(
    probe: Probe, mean: Collective, link: Link, total: int, profile: Profile, budget: Budget
) -> Extra:
    """Return (size, additional seconds) of an all-reduce beside compute, for the sizes of
    `sizes_of`.

    Additional seconds are the median over rounds of the difference of medians over messages, at
    least 0.
    """
    extra: Extra = []
    for size in sizes_of(link, total, budget):
        differences_s = []
        for _ in range(ROUNDS):
            alone = measure_messages(probe, mean, [size] * (MESSAGES + 1), budget)[1:]
            with ComputeLoad(profile):
                beside = measure_messages(probe, mean, [size] * (MESSAGES + 1), budget)[1:]
            differences_s.append(median(beside) - median(alone))
        extra.append((size, max(0.0, median(differences_s))))
    return extra


def sizes_of(link: Link, total: int, budget: Budget) -> list[int]:
    """Return the sizes to measure, ascending.

    The largest is the largest of `SMALL_SIZES` that uses at most the share `LARGEST` of the
    budget. Each other size is at most a quarter of the next larger one.
    """
    sizes: list[int] = []
    left_s = budget.seconds
    for size in reversed([size for size in SMALL_SIZES if size <= total]):
        message_s = link.all_reduce_s(size)
        spent_s = 2 * ROUNDS * (MESSAGES + 1) * message_s
        fits = 4 * size <= sizes[-1] if sizes else spent_s <= LARGEST * budget.seconds
        if fits and len(sizes) < SIZES and spent_s <= left_s:
            sizes.append(size)
            left_s -= spent_s
    return sizes[::-1]


def with_extra(link: Link, extra: Extra) -> Link:
    """Return the link with the additional seconds added to its messages.

    Additional seconds are interpolated for small sizes, and are those of the largest measured size
    for all larger messages. Halves of an all-reduce get half of them.
    """
    if not extra:
        return link
    sizes, seconds = zip(*extra, strict=True)
    last_s = seconds[-1]

    def longer(points: Points, share: float) -> Points:
        return tuple((n, s + share * float(np.interp(n, sizes, seconds))) for n, s in points)

    return link.with_times(lambda s, rate, share: (s + share * last_s, rate), longer)
