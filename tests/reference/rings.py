"""Ring all-reduces that share one connection, step by step."""

from collections.abc import Sequence
from heapq import heappop, heappush


def ends_s(rings: Sequence[tuple[float, float]], steps: int) -> list[float]:
    """Ends of rings that begin at 0. All ranks are alike, so one of them stands for all.

    A step sends a chunk, for which the connection carries nothing else, first come, first served;
    then its latency passes. `rings`: latency and seconds of the chunk, of one step.
    """
    events, ends, free_s = [(0.0, ring, 0) for ring in range(len(rings))], [0.0] * len(rings), 0.0
    while events:
        now_s, ring, step = heappop(events)
        if step == steps:
            ends[ring] = now_s
            continue
        latency_s, chunk_s = rings[ring]
        free_s = max(free_s, now_s) + chunk_s
        heappush(events, (free_s + latency_s, ring, step + 1))
    return ends
