"""Ring all-reduces that share one connection, step by step."""

from collections.abc import Sequence
from heapq import heappop, heappush


def ends_s(rings: Sequence[tuple[float, float]], steps: int) -> list[float]:
    """Ends of rings that begin at 0. All ranks are alike, so one of them stands for all.

    A step has two stages, first come, first served: the request for a chunk, which takes no time
    on the connection but waits behind chunks, and the chunk. Half of the latency follows each.
    `rings`: latency and seconds of the chunk, of one step.
    """
    events = [(0.0, ring, 0) for ring in range(len(rings))]
    ends, free_s = [0.0] * len(rings), 0.0
    while events:
        now_s, ring, stage = heappop(events)
        if stage == 2 * steps:
            ends[ring] = now_s
            continue
        latency_s, chunk_s = rings[ring]
        begin_s = max(free_s, now_s)
        if stage % 2:
            free_s = begin_s = begin_s + chunk_s
        heappush(events, (begin_s + latency_s / 2, ring, stage + 1))
    return ends
