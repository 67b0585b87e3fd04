"""Additional time of messages after a pause of a distant link.

TCP returns to a small window when a connection was idle for longer than its retransmission timeout,
which is at least .2 s. A message after such a pause waits for further round trips until the window
is large enough.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

from offbeat.core.buckets.flat import Flat
from offbeat.core.measuring.timing import Probe
from offbeat.core.profile import Link, Profile
from offbeat.core.profile.records import ring_steps
from offbeat.core.transport.cluster import Cluster
from offbeat.core.transport.collectives import Collective

LEAST_PAUSE_S = 0.2  # least retransmission timeout of TCP; shorter pauses keep the window
MOST_PAUSE_S = 2.0
MOST_MESSAGE_S = 2.0  # approximate bound of the largest message's time
MESSAGES = 2  # messages of each size
LEAST_TRIPS = 0.5  # smaller additional times, in round trips, are noise


def measure_pauses(cluster: Cluster, flat: Flat, profile: Profile) -> Profile:
    """Return the profile with the additional time of messages after a pause of the link.

    Distant links are measured if the forward, in which the link pauses in most plans, is long
    enough. That takes at most `2 * MESSAGES` times the sum of `MOST_PAUSE_S` and a message. Every
    rank must call it while its links are idle.
    """
    control = cluster.control
    if control.world_size == 1:
        return profile
    pause_s = min(profile.forward_s, MOST_PAUSE_S)
    distant = [link.name for link in profile.links if profile.is_distant(link.name)]
    # Ranks must measure the same links, so use the decision of rank 0.
    pause_s, distant = control.share_first((pause_s, distant))
    if pause_s < LEAST_PAUSE_S:
        return profile
    like = flat.parameter_tensors()[0]

    def pause() -> None:
        time.sleep(pause_s)
        control.gather(None)  # on other connections; all ranks begin at the same time

    links = []
    for link in profile.links:
        if link.name in distant:
            probe = Probe(cluster.probe_group(link.name), like, cluster.device)
            mean = cluster.links[link.name].collectives.by_verb["all_reduce"]
            extra = measure_additional(probe, mean, link, sizes_of(link, flat), pause)
            trip_s = link.latency_s / ring_steps(profile.world_size)
            link = with_additional(link, extra, pause_s, trip_s)
        links.append(link)
    return replace(profile, links=tuple(links))


def sizes_of(link: Link, flat: Flat) -> list[int]:
    """Return the bytes of the smallest bucket and of all buckets, but of at most `MOST_MESSAGE_S`
    seconds."""
    most = max(1, int(MOST_MESSAGE_S * link.bytes_per_s))
    return sorted({min(size, most) for size in (min(flat.sizes_bytes), sum(flat.sizes_bytes))})


def measure_additional(
    probe: Probe, mean: Collective, link: Link, sizes: Sequence[int], pause: Callable[[], None]
) -> list[tuple[int, float]]:
    """Return (bytes, additional seconds) of all-reduces after a pause, for each size.

    Additional seconds are the median over messages and ranks beyond the seconds of the link.

    Args:
        probe: sends and times messages on the link.
        mean: all-reduce of the link.
        link: measured times of messages without a pause.
        sizes: bytes of the messages, ascending.
        pause: pauses all ranks.
    """
    extra = []
    for size in sizes:
        seconds = []
        for _ in range(MESSAGES):
            pause()
            seconds.append(probe.send(mean, size))
        everyone = [s for of_rank in probe.agree(seconds) for s in of_rank]
        known_s = link.all_reduce_s(size)
        extra.append((size, median(everyone) - known_s))
    return extra


def with_additional(
    link: Link, extra: Sequence[tuple[int, float]], pause_s: float, trip_s: float
) -> Link:
    """Return the link with the additional seconds after a pause of `pause_s`.

    Less than `LEAST_TRIPS` round trips of `trip_s` count as 0. If all are 0, the link is unchanged.
    """
    counted = tuple((size, s if s >= LEAST_TRIPS * trip_s else 0.0) for size, s in extra)
    if not any(s for _, s in counted):
        return link
    return replace(link, pause_s=pause_s, after_pause=counted)
