"""Layer sets of one period: which buckets are averaged in which iteration (DreamDDP).

Buckets are numbered in backward order (0: output side, first gradient ready). All methods
minimize `period_cost`; the forward passes of a period are the same for all of them.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import combinations_with_replacement, pairwise

import numpy as np
from numpy.typing import NDArray

from offbeat.strategies.solvers import inputs as _check
from offbeat.strategies.solvers.balancing import balance
from offbeat.strategies.solvers.inputs import Numbers

Sets = tuple[tuple[int, ...], ...]  # per iteration of the period: its buckets, ascending

_Ends = NDArray[np.intp]

# Two costs that differ by less than this share of the backward time are rounding apart.
_ROUNDING = 1e-12


def finish(
    members: Iterable[int], ready_s: Sequence[float], communication_s: Sequence[float]
) -> float:
    """End of the last message of one set, seconds from the start of backward; 0 for an empty set.

    `members` ascend; messages are sent first in, first out. Source: DreamDDP, Eq. 7 (tau_COMM).
    """
    end_s = 0.0
    for i in members:
        end_s = max(ready_s[i], end_s) + communication_s[i]
    return end_s


def cost(
    members: Iterable[int], ready_s: Sequence[float], communication_s: Sequence[float]
) -> float:
    """Seconds from the start of backward to the end of both backward and the set's messages.

    Source: DreamDDP, Eq. 7, without the additive form into which Eq. 10 slips.
    """
    backward_end_s = ready_s[-1] if len(ready_s) else 0.0
    return max(backward_end_s, finish(members, ready_s, communication_s))


def period_cost(
    sets: Sequence[Sequence[int]], backward_s: Sequence[float], communication_s: Sequence[float]
) -> float:
    """Seconds that one period needs without its forward passes: the sum of its sets' costs.

    Times are per bucket, in seconds. Raises ValueError. Source: DreamDDP, Eq. 7.
    """
    ready_s, comm_s = _lists(backward_s, communication_s)
    _check_sets(sets, len(comm_s))
    return sum(cost(members, ready_s, comm_s) for members in sets)


def dfs(backward_s: Sequence[float], communication_s: Sequence[float], period: int) -> Sets:
    """Search over contiguous sets; optimal, but up to 2^min(L-H, H) leaves.

    Times are per bucket, in seconds. Raises ValueError. Source: DreamDDP, Algorithm 2, with line
    28 searching Psi_-, line 30 searching set h+1, and the exact cost instead of the additive one.
    """
    ready_s, comm_s = _problem(backward_s, communication_s, period)
    count, backward_end_s = len(comm_s), (ready_s[-1] if ready_s else 0.0)
    best_s = np.inf
    best_starts: tuple[int, ...] = (0,)
    # One entry per pending call of SolveSubProblem: the next bucket, the first bucket of every
    # set so far, the finish of the open set, and the cost of the closed ones.
    pending: list[tuple[int, tuple[int, ...], float, float]] = [(0, (0,), 0.0, 0.0)]
    while pending:
        i, starts, end_s, closed_s = pending.pop()
        while i < count and len(starts) < period:
            longer_s = max(ready_s[i], end_s) + comm_s[i]
            if i == starts[-1] or longer_s <= backward_end_s:  # at least one; optimal hiding
                i, end_s = i + 1, longer_s
                continue
            if end_s <= backward_end_s:  # neither hidden nor delayed: search both
                pending.append((i + 1, starts, longer_s, closed_s))
            starts, end_s, closed_s = (*starts, i), 0.0, closed_s + max(backward_end_s, end_s)
        if i < count:  # h == H: the last set takes what is left
            end_s = finish(range(i, count), ready_s, comm_s)
        empty_s = (period - len(starts)) * backward_end_s
        total_s = closed_s + max(backward_end_s, end_s) + empty_s
        if total_s < best_s:
            best_s, best_starts = total_s, starts
    return _split(best_starts, count, period)


def brute_force(backward_s: Sequence[float], communication_s: Sequence[float], period: int) -> Sets:
    """The best of all C(L+H-1, H-1) contiguous splits, empty sets included.

    Times are per bucket, in seconds. Raises ValueError. Source: DreamDDP, Section 3.3.
    """
    ready_s, comm_s = _problem(backward_s, communication_s, period)
    count = len(comm_s)
    cost_s = {
        (start, end): cost(range(start, end), ready_s, comm_s)
        for start, end in combinations_with_replacement(range(count + 1), 2)
    }

    def total_s(cuts: tuple[int, ...]) -> float:
        return sum(cost_s[interval] for interval in pairwise((0, *cuts, count)))

    cuts = min(combinations_with_replacement(range(count + 1), period - 1), key=total_s)
    return _split((0, *cuts), count, period)


def optimal(backward_s: Sequence[float], communication_s: Sequence[float], period: int) -> Sets:
    """The best contiguous sets, exactly, in O(L (H + log L)).

    Times are per bucket, in seconds. Raises ValueError. Source: ours. A set that starts at a given
    bucket has two candidate ends: its longest hidden prefix, since the sets after it gain nothing
    from a shorter one, and one bucket more, since every further bucket would add all of its
    communication here and at most that much in the next set.
    """
    return _contiguous(*_problem_arrays(backward_s, communication_s, period), period)


def _contiguous(ready_s: Numbers, comm_s: Numbers, period: int) -> Sets:
    count = len(comm_s)
    if count == 0:
        return ((),) * period
    hidden, longer = _candidate_ends(ready_s, comm_s)
    longer_overflow_s = _overflow_s(ready_s, comm_s, longer)
    left_s = np.append(_overflow_s(ready_s, comm_s, np.full(count, count)), 0.0)
    choices: list[_Ends] = []
    # left_s[i] is the least overflow of the buckets from i on in the sets so far; more sets than
    # buckets change nothing.
    for _ in range(min(period, count) - 1):
        one_more_s = longer_overflow_s + left_s[longer]
        one_more = (hidden == np.arange(count)) | (one_more_s < left_s[hidden])
        choices.append(np.where(one_more, longer, hidden))
        left_s = np.append(np.where(one_more, one_more_s, left_s[hidden]), 0.0)
    starts = [0]
    for ends in reversed(choices):
        starts.append(int(ends[starts[-1]]) if starts[-1] < count else count)
    return _split(starts, count, period)


def balanced(backward_s: Sequence[float], communication_s: Sequence[float], period: int) -> Sets:
    """Sets that need not be contiguous, balanced greedily, in about O(L log L).

    Times are per bucket, in seconds. Raises ValueError. Source: ours. Buckets by decreasing
    `ready + communication` (the finish that none can avoid), each to the set whose cost grows
    least; ties: the earliest finish, then the first set.
    """
    return _scattered(*_problem_arrays(backward_s, communication_s, period), period)


def _scattered(ready_s: Numbers, comm_s: Numbers, period: int) -> Sets:
    if len(comm_s) == 0:
        return ((),) * period
    order = np.argsort(-(ready_s + comm_s), kind="stable")
    used = min(period, len(comm_s))
    sets = balance(order.tolist(), ready_s.tolist(), comm_s.tolist(), used)
    return sets + ((),) * (period - used)


def equal_number(
    backward_s: Sequence[float], communication_s: Sequence[float], period: int
) -> Sets:
    """ceil(L/H) buckets per set, in backward order, whatever the times.

    Times are per bucket, in seconds. Raises ValueError. Source: DreamDDP, Example 1 (PLSGD-ENP).
    """
    ready_s, _ = _problem(backward_s, communication_s, period)
    size = -(-len(ready_s) // period)
    return _split([h * size for h in range(period)], len(ready_s), period)


def best(backward_s: Sequence[float], communication_s: Sequence[float], period: int) -> Sets:
    """The cheaper of `optimal` and `balanced`; the contiguous sets win ties.

    Times are per bucket, in seconds. Raises ValueError. Source: ours.
    """
    ready_s, comm_s = _problem_arrays(backward_s, communication_s, period)
    contiguous = _contiguous(ready_s, comm_s, period)
    scattered = _scattered(ready_s, comm_s, period)
    contiguous_s, scattered_s = (
        sum(_fast_cost(np.array(members, dtype=np.intp), ready_s, comm_s) for members in sets)
        for sets in (contiguous, scattered)
    )
    return scattered if scattered_s < contiguous_s * (1 - _ROUNDING) else contiguous


def fill_bubbles(
    sets: Sequence[Sequence[int]], backward_s: Sequence[float], communication_s: Sequence[float]
) -> Sets:
    """Per iteration, the output-side buckets that can be averaged once more at no cost.

    Times are per bucket, in seconds; the returned buckets are not in the iteration's set. An
    iteration with an empty set stays empty: any message would make its end a barrier, at which
    unlike ranks wait for each other. Raises ValueError. Source: DreamDDP, Section 3.4, with the
    exact cost instead of Eq. 12.
    """
    ready, comm = _arrays(backward_s, communication_s)
    _check_sets(sets, len(comm))
    times = ready.tolist(), comm.tolist()
    sent_s = np.concatenate([[0.0], np.cumsum(comm)])
    idle_s = np.maximum.accumulate(ready - sent_s[:-1]) if len(comm) else ready
    # By length from 1 on, up to rounding: when the messages of a prefix end.
    prefix_s = sent_s[1:] + idle_s
    return tuple(_fill(members, *times, prefix_s) for members in sets)


def _fill(
    members: Sequence[int], ready_s: list[float], comm_s: list[float], prefix_s: Numbers
) -> tuple[int, ...]:
    """The longest prefix that fits into the set's own cost, less the set."""
    if not members:
        return ()

    def filled_s(end: int) -> float:
        later = members[bisect_right(members, end - 1) :]
        return finish([*range(end), *later], ready_s, comm_s)

    # A longer prefix never finishes earlier, not even by rounding, so it can be bisected; and the
    # same additions in the same order make "costs nothing" exact. That takes long, so it is done
    # where an estimate that is right up to rounding says that it ends.
    limit_s = cost(members, ready_s, comm_s)
    count = len(comm_s)
    near_s = _filled_s(members, ready_s, comm_s, prefix_s)
    margin_s = _ROUNDING * count * limit_s
    low, high = (
        int(np.searchsorted(near_s, limit_s + m, side="right")) for m in (-margin_s, margin_s)
    )
    fits = bisect_right(range(1, count + 1), limit_s, low, high, key=filled_s)
    own = set(members)
    return tuple(i for i in range(fits) if i not in own)


def _filled_s(
    members: Sequence[int], ready_s: list[float], comm_s: list[float], prefix_s: Numbers
) -> Numbers:
    """By length from 1 on, up to rounding: the end of a prefix and the members behind it."""
    own = np.array(members, dtype=np.intp)
    own_s = np.array(comm_s)[own]
    left_s = np.append(own_s[::-1].cumsum()[::-1], 0.0)  # messages from the n-th member on,
    starts_s = np.array(ready_s)[own] + left_s[:-1]
    ends_s = np.append(np.maximum.accumulate(starts_s[::-1])[::-1], 0.0)  # and when they end
    behind = np.searchsorted(own, np.arange(len(comm_s)), side="right")
    return np.maximum.accumulate(np.maximum(prefix_s + left_s[behind], ends_s[behind]))


def _candidate_ends(ready_s: Numbers, comm_s: Numbers) -> tuple[_Ends, _Ends]:
    """For a set starting at each bucket: the end of its longest hidden prefix, and one more."""
    sent_s = np.concatenate([[0.0], np.cumsum(comm_s)])
    # Messages start..end-1 are hidden iff ready_j + (sent_end - sent_j) <= backward end for each j.
    limit_s = ready_s[-1] - ready_s + sent_s[:-1]
    reach = np.searchsorted(sent_s, limit_s, side="right") - 1
    hidden = np.minimum.accumulate(reach[::-1])[::-1]
    return hidden, np.minimum(hidden + 1, len(comm_s))


def _overflow_s(ready_s: Numbers, comm_s: Numbers, ends: _Ends) -> Numbers:
    """For each start: by how much the messages start..ends[start]-1 outlast backward."""
    sent_s = np.concatenate([[0.0], np.cumsum(comm_s)])
    idle_s = _range_max(ready_s - sent_s[:-1], ends)
    return np.maximum(sent_s[ends] + idle_s - ready_s[-1], 0.0)


def _range_max(values: Numbers, ends: _Ends) -> Numbers:
    """max(values[start:ends[start]]) for each start, in O(L log L)."""
    tables = [values]  # tables[k][i]: maximum of the 2^k values from i
    while 2 ** len(tables) <= len(values):
        half = 2 ** (len(tables) - 1)
        tables.append(np.maximum(tables[-1][:-half], tables[-1][half:]))
    result = np.full(len(values), -np.inf)
    position = np.arange(len(values))
    for k in reversed(range(len(tables))):
        fits = position + 2**k <= ends
        result[fits] = np.maximum(result[fits], tables[k][position[fits]])
        position[fits] += 2**k
    return result


def _fast_cost(members: _Ends, ready_s: Numbers, comm_s: Numbers) -> float:
    """`cost` up to rounding: a set ends when, after some bucket, nothing has to be waited for."""
    if not len(members):
        return float(ready_s[-1]) if len(ready_s) else 0.0
    left_s = comm_s[members][::-1].cumsum()[::-1]
    return float(max(ready_s[-1], (ready_s[members] + left_s).max()))


def _split(starts: Sequence[int], count: int, period: int) -> Sets:
    """Contiguous sets from their first buckets, padded with empty sets up to the period."""
    bounds = [min(start, count) for start in starts] + [count] * (period + 1 - len(starts))
    return tuple(tuple(range(start, end)) for start, end in pairwise(bounds))


def _problem(
    backward_s: Sequence[float], communication_s: Sequence[float], period: int
) -> tuple[list[float], list[float]]:
    """Checked ready and communication times as lists."""
    _check.period(period)
    return _lists(backward_s, communication_s)


def _problem_arrays(
    backward_s: Sequence[float], communication_s: Sequence[float], period: int
) -> tuple[Numbers, Numbers]:
    """Checked ready and communication times as arrays."""
    _check.period(period)
    return _arrays(backward_s, communication_s)


def _arrays(
    backward_s: Sequence[float], communication_s: Sequence[float]
) -> tuple[Numbers, Numbers]:
    durations_s = _check.numbers("backward_s", backward_s)
    comm_s = _check.numbers("communication_s", communication_s)
    _check.same_length("communication_s", comm_s, "backward_s", durations_s)
    return np.cumsum(durations_s), comm_s


def _lists(
    backward_s: Sequence[float], communication_s: Sequence[float]
) -> tuple[list[float], list[float]]:
    ready_s, comm_s = _arrays(backward_s, communication_s)
    return ready_s.tolist(), comm_s.tolist()


def _check_sets(sets: Sequence[Sequence[int]], count: int) -> None:
    for h, members in enumerate(sets):
        if any(a >= b for a, b in pairwise((-1, *members, count))):
            raise ValueError(
                f"sets[{h}] ({tuple(members)}) must hold ascending bucket indices below {count}; "
                "sort it and remove what is repeated or unknown"
            )
