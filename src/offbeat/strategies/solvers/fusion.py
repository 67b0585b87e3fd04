"""Bucket fusion for WFBP: groups of consecutive buckets that share a message.

A group is a range of buckets in backward order. Its message starts when its last bucket is ready
and the link is free, and takes `message_s(group)` seconds.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from offbeat.strategies.solvers import inputs as _check
from offbeat.strategies.solvers.inputs import Numbers

PATIENCE = 8  # further numbers of messages to try without a gain

Fusion = tuple[range, ...]  # groups that cover the buckets 0..L-1 in order
MessageSeconds = Callable[[range], float]


def fusion_finish(
    groups: Sequence[range], ready_s: Sequence[float], message_s: MessageSeconds
) -> float:
    """Return the end of the last message, in seconds from the start of backward.

    Args:
        groups: groups that cover all buckets in order.
        ready_s: seconds from the start of backward to each bucket's gradient, non-decreasing.
        message_s: function from a group to the seconds of its message.

    Returns:
        Seconds; 0 without buckets.

    Raises:
        ValueError: an argument is invalid.

    Source: MG-WFBP, the recursion of the communication start times.
    """
    ready = _check.ready(ready_s)
    _check_groups(groups, len(ready))
    end_s = 0.0
    for group in groups:
        end_s = max(float(ready[group[-1]]), end_s) + message_s(group)
    return end_s


def no_fusion(n: int) -> Fusion:
    """Return one group per bucket, for n buckets.

    Source: Poseidon (WFBP).
    """
    if n < 0:
        raise ValueError(f"n ({n}) must be at least 0; give the number of buckets")
    return tuple(range(i, i + 1) for i in range(n))


def cap_fusion(
    sizes_bytes: Sequence[int], cap_bytes: int, first_cap_bytes: int | None = None
) -> Fusion:
    """Close a group as soon as its size reaches the cap, as DistributedDataParallel does.

    Args:
        sizes_bytes: bytes of each bucket.
        cap_bytes: cap of each group; torch's default is 25 MiB.
        first_cap_bytes: cap of the first group; torch's default is 1 MiB. None for `cap_bytes`, as
            in torch if the user sets `bucket_cap_mb`.

    Raises:
        ValueError: an argument is invalid.

    Source: torch, compute_bucket_assignment_by_size.
    """
    sizes = _check.numbers("sizes_bytes", sizes_bytes)
    first_cap_bytes = cap_bytes if first_cap_bytes is None else first_cap_bytes
    for name, cap in (("cap_bytes", cap_bytes), ("first_cap_bytes", first_cap_bytes)):
        if cap < 1:
            raise ValueError(f"{name} ({cap}) must be at least 1; use 1 to fuse nothing")
    starts, filled_bytes, limit_bytes = [0], 0.0, first_cap_bytes
    for i, size in enumerate(sizes):
        filled_bytes += size
        if filled_bytes >= limit_bytes:
            starts.append(i + 1)
            filled_bytes, limit_bytes = 0.0, cap_bytes
    return _groups(starts, len(sizes))


def greedy_fusion(ready_s: Sequence[float], message_s: MessageSeconds) -> Fusion:
    """Merge a bucket into the current group if the wait for it is shorter than the time saved.

    The time saved is the difference between two messages and one message for both. O(L).

    Args:
        ready_s: seconds from the start of backward to each bucket's gradient, non-decreasing.
        message_s: function from a group to the seconds of its message.

    Raises:
        ValueError: `ready_s` is invalid.

    Source: MG-WFBP, Algorithm 1, in one pass, because a merge never moves an earlier message. In
    the paper's model the time saved is the latency of one message.
    """
    ready = _check.ready(ready_s).tolist()
    starts, free_s = [0], 0.0
    for i in range(1, len(ready)):
        start_s, own_s = max(ready[i - 1], free_s), message_s(range(starts[-1], i))
        both_s = own_s + message_s(range(i, i + 1))
        if ready[i] >= start_s + both_s - message_s(range(starts[-1], i + 1)):
            starts.append(i)
            free_s = start_s + own_s
    return _groups(starts, len(ready))


def optimal_fusion(
    ready_s: Sequence[float], messages_ending_s: Callable[[int, int], Numbers]
) -> Fusion:
    """Return the fusion whose last message ends first, exact for any message times, in O(L^2).

    Of equally good starts of a message the earliest is taken, which makes the fewest messages.

    Args:
        ready_s: seconds from the start of backward to each bucket's gradient, non-decreasing.
        messages_ending_s: function from (first, stop) to the seconds of the groups [first, stop),
            [first + 1, stop), ... as an array.

    Raises:
        ValueError: `ready_s` is invalid.

    Source: ours, f(e) = min over s <= e of max(f(s-1), ready_e) + message_s(s..e).
    """
    ready = _check.ready(ready_s)
    count = len(ready)
    end_s = np.zeros(count + 1)  # end_s[i]: earliest end of the messages of the first i buckets
    first = np.zeros(count, dtype=np.intp)
    for i in range(count):
        ends_s = np.maximum(end_s[: i + 1], ready[i]) + messages_ending_s(0, i + 1)
        first[i] = ends_s.argmin()
        end_s[i + 1] = ends_s[first[i]]
    starts, stop = [], count
    while stop > 0:
        stop = int(first[stop - 1])
        starts.append(stop)
    return _groups(starts[::-1] or [0], count)


def delaying_fusion(
    ready_s: Sequence[float],
    messages_ending_s: Callable[[int, int], Numbers],
    each_s: float,
    sending_s: Sequence[float],
) -> Fusion:
    """Return the fusion with the earliest end of backward and messages, if sending delays backward.

    Each number of messages is solved exactly in O(L^2). The search ends after `PATIENCE` further
    messages without a gain. Of equally good fusions the one with the fewest messages is taken.

    Args:
        ready_s: seconds from the start of backward to each bucket's gradient, non-decreasing,
            without messages.
        messages_ending_s: as for `optimal_fusion`.
        each_s: seconds by which each message delays the backward after its release.
        sending_s: further seconds of delay for each bucket.

    Raises:
        ValueError: `ready_s` or `sending_s` is invalid.

    Source: ours, f(m, e) = min over s <= e of max(f(m-1, s-1), ready_e + (m-1) each_s + sum of
    sending_s before s) + message_s(s..e) for m messages.
    """
    ready = _check.ready(ready_s)
    count = len(ready)
    before_s = np.concatenate([[0.0], np.cumsum(_check.numbers("sending_s", sending_s))])
    messages_s = [messages_ending_s(0, i + 1) for i in range(count)]
    end_s = np.full(count + 1, np.inf)  # end_s[i]: earliest end of the messages of i buckets
    end_s[0] = 0.0
    firsts: list[NDArray[np.intp]] = []
    best_s, chosen = np.inf, 0
    for earlier in range(count):
        backward_s = ready[-1] + (earlier + 1) * each_s + before_s[-1]
        if backward_s >= best_s or earlier >= chosen + PATIENCE:
            break
        next_s = np.full(count + 1, np.inf)
        first = np.zeros(count, dtype=np.intp)
        for i in range(count):
            ready_here_s = ready[i] + earlier * each_s + before_s[: i + 1]
            ends_s = np.maximum(end_s[: i + 1], ready_here_s) + messages_s[i]
            first[i] = ends_s.argmin()
            next_s[i + 1] = ends_s[first[i]]
        firsts.append(first)
        end_s = next_s
        if (seconds := max(end_s[-1], backward_s)) < best_s:
            best_s, chosen = seconds, earlier + 1
    starts, stop = [], count
    for first in reversed(firsts[:chosen]):
        stop = int(first[stop - 1])
        starts.append(stop)
    return _groups(starts[::-1] or [0], count)


def _groups(starts: Sequence[int], count: int) -> Fusion:
    """Return the groups that begin at `starts`. A start past the last bucket adds no group."""
    return tuple(
        range(start, stop)
        for start, stop in zip(starts, [*starts[1:], count], strict=True)
        if start < stop
    )


def _check_groups(groups: Sequence[range], count: int) -> None:
    expected = 0
    for g, group in enumerate(groups):
        if group.start != expected or group.step != 1 or not expected < group.stop <= count:
            raise ValueError(
                f"groups[{g}] ({group}) must be a non-empty range from {expected} to at most "
                f"{count}; list consecutive groups in order"
            )
        expected = group.stop
    if expected != count:
        raise ValueError(
            f"groups ({len(groups)} ranges) must end at {count} instead of {expected}; "
            "cover every bucket"
        )
