"""Iterations: what happened in one, and when."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from offbeat.core.plan import Plan
from offbeat.core.plan.program import Step
from offbeat.core.runtime.stepper import Settings
from offbeat.core.transport.device import Mark
from offbeat.core.transport.link import Message


@dataclass(slots=True)
class MomentTimes:
    """What was waited for and applied at one moment of forward or backward, and when."""

    position: int
    begin: Mark
    waited: Mark
    applied: Mark


@dataclass(slots=True)
class Timestamps:
    """When things happened in one iteration, as device marks; None or empty: not marked.

    `ready[b]`: the gradients of buckets 0..b are complete. `acted`: moments of forward and backward
    that waited for something or applied something.
    """

    begin: Mark = None
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
    """Backward of an iteration whose messages only torch's DDP sees, on one link.

    Messages were on the link in its last `sent_s` seconds, and compute waited for them in its last
    `waited_s` seconds. `measured`: torch has timed them; else both are estimated.
    """

    link: str
    sent_bytes: int
    sent_s: float = 0.0
    waited_s: float = 0.0
    measured: bool = False


@dataclass(slots=True)
class Iteration:
    """One iteration: its number, its times, its messages; `planned` is its number in the plan,
    which may begin anew. Of its votes: what this rank `shown`, who `voted` yes; `spared_bytes`
    were not sent, as votes said no. `split`: of a backward that waits for messages within."""

    number: int
    marks: Timestamps
    messages: list[Message]
    planned: int = 0
    steps: tuple[Step, ...] = ()
    rest: tuple[int, ...] = ()  # buckets that are updated at the step, whatever the plan says
    skipped: bool = False  # its update is not done
    abandoned: bool = False  # no step was asked for
    settings: Settings | None = None  # the optimizer's when its update was asked for
    outstanding: set[int] = field(default_factory=set)  # messages that are still to be awaited
    over: bool = False
    shown: dict[str, Mapping[str, float]] = field(default_factory=dict)
    undecided: set[str] = field(default_factory=set)  # votes whose outcome is not known
    voted: dict[str, list[int]] = field(default_factory=dict)
    spared_bytes: int = 0
    split: BackwardSplit | None = None

    @property
    def complete(self) -> bool:
        """Whether it is over and none of its messages and votes is still to be awaited."""
        return self.over and not self.outstanding and not self.undecided

    def at(self, point: str, plan: Plan) -> Step:
        """What is to do at `step` or `end`."""
        position = 2 * plan.buckets + (point == "end")
        return next((s for s in self.steps[-2:] if s.position == position), Step(position))


class Reports:
    """Hands iterations on when they are complete, in their order."""

    def __init__(self) -> None:
        self.listener: Callable[[Iteration], None] | None = None
        self.watcher: Callable[[Iteration], None] | None = None  # told as well, before
        self._recent: deque[Iteration] = deque()

    def add(self, done: Iteration) -> None:
        """An iteration is over; some of its messages may still be awaited."""
        self._recent.append(done)

    def deliver(self, *, rest: bool = False) -> None:
        """Those that are complete, or at the end the `rest` as well. The listener may attach
        another storage and adopt another plan."""
        while self._recent and (rest or self._recent[0].complete):
            done = self._recent.popleft()
            if self.watcher is not None:
                self.watcher(done)
            if self.listener is not None:
                self.listener(done)
