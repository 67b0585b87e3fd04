"""Layer sets of DreamDDP: the buckets that are averaged in each iteration of a period.

Buckets are numbered in backward order: bucket 0 is at the output side, and its gradient is ready
first. All methods minimize `period_cost`, which leaves out the forward passes because these are
equal for all sets.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import combinations_with_replacement, pairwise

import numpy as np
from numpy.typing import NDArray

from offbeat.strategies.solvers import inputs as _check
from offbeat.strategies.solvers.balancing import balance
from offbeat.strategies.solvers.inputs import Numbers

Sets = tuple[tuple[int, ...], ...]  # ascending buckets of each iteration of the period

_Ends = NDArray[np.intp]

# Costs that differ by less than this share of the backward time are equal up to rounding.
_ROUNDING = 1e-12


def finish(
    members: Iterable[int], ready_s: Sequence[float], communication_s: Sequence[float]
) -> float:
    """Return the end of a set's last message, in seconds from the start of backward.

    Messages are sent first in, first out.

    Args:
        members: ascending buckets of the set.
        ready_s: seconds from the start of backward to each bucket's gradient.
        communication_s: seconds of each bucket's message.

    Returns:
        Seconds; 0 for an empty set.

    Source: DreamDDP, Eq. 7 (tau_COMM).
    """
    end_s = 0.0
    for i in members:
        end_s = max(ready_s[i], end_s) + communication_s[i]
    return end_s


def cost(
    members: Iterable[int], ready_s: Sequence[float], communication_s: Sequence[float]
) -> float:
    """Return the seconds from the start of backward to the end of backward and a set's messages.

    Args:
        members: ascending buckets of the set.
        ready_s: seconds from the start of backward to each bucket's gradient.
        communication_s: seconds of each bucket's message.

    Source: DreamDDP, Eq. 7; Eq. 10 of the paper uses a different, additive form.
    """
    backward_end_s = ready_s[-1] if len(ready_s) else 0.0
    return max(backward_end_s, finish(members, ready_s, communication_s))


def period_cost(
    sets: Sequence[Sequence[int]], backward_s: Sequence[float], communication_s: Sequence[float]
) -> float:
    """Return the seconds of one period without its forward passes: the sum of its sets' costs.

    Args:
        sets: ascending buckets of each set.
        backward_s: seconds of each bucket's backward.
        communication_s: seconds of each bucket's message.

    Raises:
        ValueError: an argument is invalid.

    Source: DreamDDP, Eq. 7.
    """
    ready_s, comm_s = _lists(backward_s, communication_s)
    _check_sets(sets, len(comm_s))
    return sum(cost(members, ready_s, comm_s) for members in sets)


def dfs(backward_s: Sequence[float], communication_s: Sequence[float], period: int) -> Sets:
    """Return the best contiguous sets by depth-first search with up to 2^min(L-H, H) leaves.

    Args:
        backward_s: seconds of each bucket's backward.
        communication_s: seconds of each bucket's message.
        period: number of sets H.

    Raises:
        ValueError: an argument is invalid.

    Source: DreamDDP, Algorithm 2, with three changes: line 28 searches Psi_-, line 30 searches set
    h+1, and the cost is exact instead of additive.
    """
    ready_s, comm_s = _lists(backward_s, communication_s, period)
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
            # A set takes at least one bucket, and every bucket whose message backward hides.
            if i == starts[-1] or longer_s <= backward_end_s:
                i, end_s = i + 1, longer_s
                continue
            # The bucket is partly hidden: search with it in this set and in the next one.
            if end_s <= backward_end_s:
                pending.append((i + 1, starts, longer_s, closed_s))
            starts, end_s, closed_s = (*starts, i), 0.0, closed_s + max(backward_end_s, end_s)
        if i < count:  # h == H: the last set takes all remaining buckets
            end_s = finish(range(i, count), ready_s, comm_s)
        empty_s = (period - len(starts)) * backward_end_s
        total_s = closed_s + max(backward_end_s, end_s) + empty_s
        if total_s < best_s:
            best_s, best_starts = total_s, starts
    return _split(best_starts, count, period)


def brute_force(backward_s: Sequence[float], communication_s: Sequence[float], period: int) -> Sets:
    """Return the best of all C(L+H-1, H-1) contiguous splits, including empty sets.

    Args:
        backward_s: seconds of each bucket's backward.
        communication_s: seconds of each bucket's message.
        period: number of sets H.

    Raises:
        ValueError: an argument is invalid.

    Source: DreamDDP, Section 3.3.
    """
    ready_s, comm_s = _lists(backward_s, communication_s, period)
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
    """Return the best contiguous sets, exactly, in O(L (H + log L)).

    A set that starts at a given bucket has two candidate ends. The first is the end of its longest
    hidden prefix, because later sets gain nothing from a shorter one. The second is one bucket
    more. Any further bucket adds all of its communication to this set, and would add at most as
    much to the next set.

    Args:
        backward_s: seconds of each bucket's backward.
        communication_s: seconds of each bucket's message.
        period: number of sets H.

    Raises:
        ValueError: an argument is invalid.

    Source: ours.
    """
    ready_s, comm_s = _arrays(backward_s, communication_s, period)
    count = len(comm_s)
    if count == 0:
        return ((),) * period
    hidden, longer = _candidate_ends(ready_s, comm_s)
    longer_overflow_s = _overflow_s(ready_s, comm_s, longer)
    left_s = np.append(_overflow_s(ready_s, comm_s, np.full(count, count)), 0.0)
    choices: list[_Ends] = []
    # left_s[i] is the least overflow of buckets i, i + 1, ... in the sets so far. More sets than
    # buckets do not reduce it.
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
    """Return greedily balanced sets, which need not be contiguous, in about O(L log L).

    The buckets are taken by decreasing `ready + communication`, the earliest end of the bucket's
    message. Each bucket is assigned to the set whose cost grows least. Ties are broken by the
    earliest finish, then by the first set.

    Args:
        backward_s: seconds of each bucket's backward.
        communication_s: seconds of each bucket's message.
        period: number of sets H.

    Raises:
        ValueError: an argument is invalid.

    Source: ours.
    """
    ready_s, comm_s = _arrays(backward_s, communication_s, period)
    if len(comm_s) == 0:
        return ((),) * period
    order = np.argsort(-(ready_s + comm_s), kind="stable")
    used = min(period, len(comm_s))
    sets = balance(order.tolist(), ready_s.tolist(), comm_s.tolist(), used)
    return sets + ((),) * (period - used)


def equal_number(
    backward_s: Sequence[float], communication_s: Sequence[float], period: int
) -> Sets:
    """Return sets of ceil(L/H) buckets each, in backward order, independent of the times.

    Args:
        backward_s: seconds of each bucket's backward.
        communication_s: seconds of each bucket's message.
        period: number of sets H.

    Raises:
        ValueError: an argument is invalid.

    Source: DreamDDP, Example 1 (PLSGD-ENP).
    """
    ready_s, _ = _arrays(backward_s, communication_s, period)
    size = -(-len(ready_s) // period)
    return _split([h * size for h in range(period)], len(ready_s), period)


def best(backward_s: Sequence[float], communication_s: Sequence[float], period: int) -> Sets:
    """Return the cheaper sets of `optimal` and `balanced`; if the costs are equal, `optimal`.

    Args:
        backward_s: seconds of each bucket's backward.
        communication_s: seconds of each bucket's message.
        period: number of sets H.

    Raises:
        ValueError: an argument is invalid.

    Source: ours.
    """
    ready_s, comm_s = _arrays(backward_s, communication_s, period)
    contiguous = optimal(backward_s, communication_s, period)
    scattered = balanced(backward_s, communication_s, period)
    contiguous_s, scattered_s = (
        sum(_fast_cost(np.array(members, dtype=np.intp), ready_s, comm_s) for members in sets)
        for sets in (contiguous, scattered)
    )
    return scattered if scattered_s < contiguous_s * (1 - _ROUNDING) else contiguous


def fill_bubbles(
    sets: Sequence[Sequence[int]], backward_s: Sequence[float], communication_s: Sequence[float]
) -> Sets:
    """Return for each iteration the output-side buckets that can be averaged again at no cost.

    An iteration with an empty set gets no buckets: a message would make its end a barrier, at which
    ranks of different speed wait for each other.

    Args:
        sets: ascending buckets of each set.
        backward_s: seconds of each bucket's backward.
        communication_s: seconds of each bucket's message.

    Returns:
        For each iteration, buckets that are not in its set.

    Raises:
        ValueError: an argument is invalid.

    Source: DreamDDP, Section 3.4, with the exact cost instead of Eq. 12.
    """
    ready, comm = _arrays(backward_s, communication_s)
    _check_sets(sets, len(comm))
    times = ready.tolist(), comm.tolist()
    sent_s = np.concatenate([[0.0], np.cumsum(comm)])
    idle_s = np.maximum.accumulate(ready - sent_s[:-1]) if len(comm) else ready
    # prefix_s[n - 1]: end of the messages of the first n buckets, up to rounding.
    prefix_s = sent_s[1:] + idle_s
    return tuple(_fill(members, *times, prefix_s) for members in sets)


def _fill(
    members: Sequence[int], ready_s: list[float], comm_s: list[float], prefix_s: Numbers
) -> tuple[int, ...]:
    """Return the longest prefix of buckets that fits into the set's cost, without the set."""
    if not members:
        return ()

    def prefix_end_s(end: int) -> float:
        later = members[bisect_right(members, end - 1) :]
        return finish([*range(end), *later], ready_s, comm_s)

    # A longer prefix never finishes earlier, not even by rounding, so bisection applies. Equal
    # additions in equal order make the comparison with the cost exact. The exact finish is slow to
    # compute, so bisect only between bounds from an estimate that is right up to rounding.
    limit_s = cost(members, ready_s, comm_s)
    count = len(comm_s)
    near_s = _prefix_ends_s(members, ready_s, comm_s, prefix_s)
    margin_s = _ROUNDING * count * limit_s
    low, high = (
        int(np.searchsorted(near_s, limit_s + m, side="right")) for m in (-margin_s, margin_s)
    )
    fits = bisect_right(range(1, count + 1), limit_s, low, high, key=prefix_end_s)
    own = set(members)
    return tuple(i for i in range(fits) if i not in own)


def _prefix_ends_s(
    members: Sequence[int], ready_s: list[float], comm_s: list[float], prefix_s: Numbers
) -> Numbers:
    """Return for each prefix length from 1 on the end of its and the later members' messages.

    The ends are right up to rounding.
    """
    own = np.array(members, dtype=np.intp)
    own_s = np.array(comm_s)[own]
    left_s = np.append(own_s[::-1].cumsum()[::-1], 0.0)  # seconds of the messages from member n on
    starts_s = np.array(ready_s)[own] + left_s[:-1]
    ends_s = np.append(np.maximum.accumulate(starts_s[::-1])[::-1], 0.0)  # ends of these messages
    behind = np.searchsorted(own, np.arange(len(comm_s)), side="right")
    return np.maximum.accumulate(np.maximum(prefix_s + left_s[behind], ends_s[behind]))


def _candidate_ends(ready_s: Numbers, comm_s: Numbers) -> tuple[_Ends, _Ends]:
    """Return for each first bucket the end of its longest hidden prefix, and this end plus one."""
    sent_s = np.concatenate([[0.0], np.cumsum(comm_s)])
    # Messages start..end-1 are hidden iff ready_j + (sent_end - sent_j) <= backward end for each j.
    limit_s = ready_s[-1] - ready_s + sent_s[:-1]
    reach = np.searchsorted(sent_s, limit_s, side="right") - 1
    hidden = np.minimum.accumulate(reach[::-1])[::-1]
    return hidden, np.minimum(hidden + 1, len(comm_s))


def _overflow_s(ready_s: Numbers, comm_s: Numbers, ends: _Ends) -> Numbers:
    """Return for each start the time by which messages start..ends[start]-1 end after backward."""
    sent_s = np.concatenate([[0.0], np.cumsum(comm_s)])
    idle_s = _range_max(ready_s - sent_s[:-1], ends)
    return np.maximum(sent_s[ends] + idle_s - ready_s[-1], 0.0)


def _range_max(values: Numbers, ends: _Ends) -> Numbers:
    """Return max(values[start:ends[start]]) for each start, in O(L log L)."""
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
    """Return `cost` up to rounding.

    The set's messages end at the maximum, over its buckets, of the ready time plus the seconds of
    the bucket's and all later messages.
    """
    if not len(members):
        return float(ready_s[-1]) if len(ready_s) else 0.0
    left_s = comm_s[members][::-1].cumsum()[::-1]
    return float(max(ready_s[-1], (ready_s[members] + left_s).max()))


def _split(starts: Sequence[int], count: int, period: int) -> Sets:
    """Return contiguous sets that begin at `starts`, padded with empty sets up to the period."""
    bounds = [min(start, count) for start in starts] + [count] * (period + 1 - len(starts))
    return tuple(tuple(range(start, end)) for start, end in pairwise(bounds))


def _arrays(
    backward_s: Sequence[float], communication_s: Sequence[float], period: int = 1
) -> tuple[Numbers, Numbers]:
    """Check the arguments; return ready and communication times as arrays."""
    _check.period(period)
    durations_s = _check.numbers("backward_s", backward_s)
    comm_s = _check.numbers("communication_s", communication_s)
    _check.same_length("communication_s", comm_s, "backward_s", durations_s)
    return np.cumsum(durations_s), comm_s


def _lists(
    backward_s: Sequence[float], communication_s: Sequence[float], period: int = 1
) -> tuple[list[float], list[float]]:
    """Check the arguments; return ready and communication times as lists."""
    ready_s, comm_s = _arrays(backward_s, communication_s, period)
    return ready_s.tolist(), comm_s.tolist()


def _check_sets(sets: Sequence[Sequence[int]], count: int) -> None:
    for h, members in enumerate(sets):
        if any(a >= b for a, b in pairwise((-1, *members, count))):
            raise ValueError(
                f"sets[{h}] ({tuple(members)}) must hold ascending bucket indices below {count}; "
                "sort it and remove what is repeated or unknown"
            )
