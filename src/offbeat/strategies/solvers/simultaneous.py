"""Fusion of consecutive buckets for simultaneous messages on several channels of a link."""

from collections.abc import Sequence

from offbeat.strategies.solvers import inputs as _check
from offbeat.strategies.solvers.fusion import Fusion, MessageSeconds


def simultaneous_fusion(
    ready_s: Sequence[float], message_s: MessageSeconds, speeds: Sequence[float]
) -> tuple[Fusion, list[float]]:
    """Return groups of buckets and the end of each group's message.

    Group i is sent on channel i % len(speeds). A bucket joins the previous group if that group's
    message still waits for its channel when the bucket is ready. Otherwise it starts a group.

    Args:
        ready_s: seconds from the start of backward to each bucket's gradient, non-decreasing.
        message_s: function from a group to the seconds of its message if only one channel is busy.
        speeds: relative speed of each message while n channels are busy, as `speeds[n - 1]`.

    Returns:
        Groups, and the end of each message in seconds from the start of backward.

    Raises:
        ValueError: an argument is invalid.

    Source: ASC-WFBP.
    """
    ready = _check.ready(ready_s)
    _check_speeds(speeds)
    groups: list[range] = []
    left_s = [0.0] * len(speeds)  # remaining seconds of each channel at full speed
    ends_s: list[float] = []
    on_channel = [0] * len(speeds)
    waiting, now_s = range(0), 0.0
    while waiting.stop < len(ready) or waiting or any(left_s):
        channel = len(groups) % len(speeds)
        if waiting and not left_s[channel]:
            left_s[channel], on_channel[channel] = message_s(waiting), len(groups)
            groups.append(waiting)
            ends_s.append(now_s)
            waiting = range(waiting.stop, waiting.stop)
        elif waiting.stop < len(ready) and ready[waiting.stop] <= now_s:
            waiting = range(waiting.start, waiting.stop + 1)
        else:
            until_s = float(ready[waiting.stop]) if waiting.stop < len(ready) else float("inf")
            now_s, left_s, ended = _run(now_s, until_s, left_s, speeds)
            for channel in ended:
                ends_s[on_channel[channel]] = now_s
    return tuple(groups), ends_s


def _run(
    now_s: float, until_s: float, left_s: list[float], speeds: Sequence[float]
) -> tuple[float, list[float], list[int]]:
    """Advance the busy channels until one of them ends or until `until_s`.

    Returns:
        New time, remaining seconds of each channel, and channels that have ended.
    """
    busy = [channel for channel, left in enumerate(left_s) if left]
    speed = speeds[len(busy) - 1]
    end_s = min([until_s, *(now_s + left_s[channel] / speed for channel in busy)])
    # Compare ends instead of remaining seconds, so that rounding leaves no tiny rest on a channel.
    ended = [channel for channel in busy if now_s + left_s[channel] / speed <= end_s]
    left_s = [max(left - (end_s - now_s) * speed, 0.0) if left else 0.0 for left in left_s]
    for channel in ended:
        left_s[channel] = 0.0
    return end_s, left_s, ended


def _check_speeds(speeds: Sequence[float]) -> None:
    if not speeds:
        raise ValueError("speeds ([]) must have a value per channel; give [1.0] for one channel")
    for i, speed in enumerate(_check.numbers("speeds", speeds)):
        if speed == 0:
            raise ValueError(f"speeds[{i}] (0) must be above 0; use fewer channels")
