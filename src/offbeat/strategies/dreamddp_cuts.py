"""Cuts of DreamDDP: which buckets are sent in slices, and what the pieces of a cut cost.

A cut is the set of the buckets in slices. Each of them has one slice per iteration of the period;
the other buckets are whole.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from offbeat.core.profile import Profile
from offbeat.core.strategy.interface import StatePolicy
from offbeat.strategies.local_sgd import kinds_of

MOST_SLICES = 4000  # largest number of slices of all buckets: more save little and plan slowly
# Every number of sliced buckets at either end is tried up to this one, above it powers of two.
FEW_ENDS = 8


def cuts_at_ends(size: int, period: int) -> list[frozenset[int]]:
    """Return the cuts to try: combinations of some first and some last buckets, and all
    buckets."""
    most = min(period, size)
    ends = {*range(min(most, FEW_ENDS) + 1), *(2**n for n in range(most.bit_length())), most}
    some = [
        frozenset((*range(a), *range(size - z, size))) for a in sorted(ends) for z in sorted(ends)
    ]
    return list(dict.fromkeys([*some[1:], frozenset(range(size))]))


def input_side_cuts(size: int, period: int) -> list[frozenset[int]]:
    """Return cuts to try: the last 1, 2, 4, ... buckets, which the next forward needs first, up
    to all."""
    some = {2**n for n in range(size.bit_length())} | {size}
    most = max(MOST_SLICES - size, 0) // max(period - 1, 1)
    fitting = (last for last in sorted(some) if last <= min(size, most))
    return [frozenset(range(size - last, size)) for last in fitting]


def least_costs_s(
    cuts: Sequence[frozenset[int]],
    backward_s: Sequence[float],
    whole_s: Sequence[float],
    slice_s: Sequence[float],
    period: int,
) -> list[float]:
    """Return, for each cut, a lower bound on the cost of all sets.

    An iteration that sends messages of `c` seconds from the buckets k, k+1, ... ends at
    `ready_s[k] + c` or later, counted from the start of its backward. Over a period the values
    of c add up to all messages of these buckets.
    """
    ready_s = np.cumsum(backward_s)
    least_s = []
    for sliced in cuts:
        messages_s = np.array(whole_s)
        some = list(sliced)
        if some:
            messages_s[some] = period * np.array(slice_s)[some]
        later_s = messages_s[::-1].cumsum()[::-1]
        latest_s = (ready_s + later_s / period).max()
        least_s.append(period * float(max(ready_s[-1], latest_s)))
    return least_s


def message_cpu_s(
    profile: Profile, cuts: Sequence[frozenset[int]], period: int, state: StatePolicy
) -> list[float]:
    """Return, for each cut, the processor seconds of all messages, each sent once."""
    link = profile.default_link
    whole_s = more_s = np.zeros(len(profile.buckets))
    for kind in kinds_of(state):
        sizes = np.array([bucket.payload_bytes(kind) for bucket in profile.buckets])
        per_message_s = link.cpu_s_per_message * (sizes > 0)
        whole_s = whole_s + per_message_s + link.cpu_s_per_byte * sizes
        more_s = more_s + (period - 1) * per_message_s
    total_s = float(whole_s.sum())
    return [total_s + float(more_s[list(sliced)].sum()) for sliced in cuts]


def cut_times(
    sliced: Collection[int],
    parts: int,
    backward_s: Sequence[float],
    whole_s: Sequence[float],
    slice_s: Sequence[float],
) -> tuple[list[float], list[float]]:
    """Return backward and communication seconds of the pieces of all buckets.

    Buckets in `sliced` have `parts` slices of `slice_s` seconds each, which are ready together. The
    other buckets are whole.
    """
    if not sliced:
        return list(backward_s), list(whole_s)
    some, counts = list(sliced), np.ones(len(backward_s), dtype=np.intp)
    counts[some] = parts
    message_s = np.array(whole_s)
    message_s[some] = np.array(slice_s)[some]
    pieces_s = np.zeros(counts.sum())
    # the first slice has all backward seconds of its bucket
    pieces_s[np.cumsum(counts) - counts] = backward_s
    return pieces_s.tolist(), np.repeat(message_s, counts).tolist()
