"""Record of an iteration at run time: its messages, votes and timestamps."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from offbeat.core.plan.cursor import Progress
from offbeat.core.runtime.stepper import Settings
from offbeat.core.transport.device import Device, Mark
from offbeat.core.transport.link import Message


@dataclass(slots=True)
class MomentTimes:
    """Times of one moment of forward or backward at which the rank has waited or applied rules.

    Attributes:
        position: position of the moment in the program.
        begin: start of the wait.
        waited: end of the wait.
        applied: end of the last rule.
    """

    position: int
    begin: Mark
    waited: Mark
    applied: Mark


@dataclass(slots=True)
class Timestamps:
    """Times of the events of one iteration, as device marks; None or empty if not marked.

    Attributes:
        begin: start of the iteration.
        begin_s: start of the iteration on the host, in `perf_counter` seconds.
        held_s: seconds for which observers have delayed the start of forward.
        first_forward: start of the first training forward.
        forward: start of the last forward.
        forward_end: end of forward.
        ready: by bucket b, completion of the gradients of buckets 0..b.
        acted: moments of forward and backward at which the rank has waited or applied rules.
        backward_end: end of backward.
        waited: arrival of the messages that the step needs.
        step: call of `optimizer.step()`.
        stepped: end of the update.
        end: end of the iteration.
    """

    begin: Mark = None
    begin_s: float = field(default_factory=time.perf_counter)
    held_s: float = 0.0
    first_forward: Mark = None
    forward: Mark = None
    forward_end: Mark = None
    ready: list[Mark] = field(default_factory=list)
    acted: list[MomentTimes] = field(default_factory=list)
    backward_end: Mark = None
    waited: Mark = None
    step: Mark = None
    stepped: Mark = None
    end: Mark = None


@dataclass(slots=True)
class BackwardSplit:
    """Split of a backward into compute and messages, where only torch's DDP sees the messages.

    All messages are on one link. They occupy the last `sent_s` seconds of backward.

    Attributes:
        link: name of the link.
        sent_bytes: bytes of all messages.
        sent_s: seconds in which messages were on the link.
        waited_s: seconds for which compute waited for messages, at the end of backward.
        measured: whether torch has measured both times; otherwise they are estimates.
    """

    link: str
    sent_bytes: int
    sent_s: float = 0.0
    waited_s: float = 0.0
    measured: bool = False


@dataclass(slots=True)
class Iteration(Progress):
    """One iteration of one rank: its progress, messages, votes and times.

    Attributes:
        number: number of the iteration in the run.
        marks: timestamps.
        messages: messages, in the order of the plan's transfers.
        skipped: whether the update is left out.
        abandoned: whether the script did not call `optimizer.step()`.
        settings: optimizer settings at the step, for later updates; None without any.
        shown: by vote, the values on which this rank has based its vote.
        voted: by vote, the ranks that voted yes.
        spared_bytes: bytes that were not sent because a vote excluded their messages.
        split: split of a backward that waits for its messages; None for other backwards.
    """

    number: int
    marks: Timestamps
    messages: list[Message]
    skipped: bool = False
    abandoned: bool = False
    settings: Settings | None = None
    shown: dict[str, Mapping[str, float]] = field(default_factory=dict)
    voted: dict[str, list[int]] = field(default_factory=dict)
    spared_bytes: int = 0
    split: BackwardSplit | None = None

    def is_reached(self, device: Device) -> bool:
        """Return whether the device has reached the end of the iteration and of its messages. The
        host does not wait."""
        ends = (self.marks.end, *(message.end for message in self.messages))
        return all(device.has_reached(end) for end in ends if end is not None)
