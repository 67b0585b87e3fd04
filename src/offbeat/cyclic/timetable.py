"""Timetables: which device computes which stage of which micro-batch in which time step.

N micro-batches pass N stages, forward and backward, one stage in each time step. In the cyclic
order each begins two steps after the one before, and iterations follow each other without a pause.
In parallel all begin together. Source: Cyclic Data Parallelism, Fig. 1 and 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, get_args

Placement = Literal["single", "workers", "pyramid", "pipeline", "zero"]
PLACEMENTS: tuple[Placement, ...] = get_args(Placement)
What = Literal["activation", "gradient", "sum", "total", "states"]


class Work(NamedTuple):
    """One stage of one micro-batch, forward or backward. Micro-batches count on over iterations;
    stages count from 0 at the input."""

    time: int
    device: int
    batch: int
    stage: int
    backward: bool


class Message(NamedTuple):
    """From one device to another: sent after the works of step `sent`, needed in step `due`.

    `activation` and `gradient` between neighbouring stages; `sum`: a stage's gradients so far, for
    the next micro-batch to add to; `total`: all of an iteration, with which each device of a stage
    updates its copy; `states`: all that there is of a stage. `batch` is whose work needs it.
    """

    sent: int
    due: int
    source: int
    target: int
    what: What
    stage: int
    batch: int


class Collective(NamedTuple):
    """What all devices of a stage do together after the works of step `sent`: `all_reduce` of
    gradients, `broadcast` of the stages, or `reduce` of their gradients to their home."""

    sent: int
    kind: Literal["all_reduce", "broadcast", "reduce"]
    stages: range
    devices: tuple[int, ...]


@dataclass(frozen=True)
class Timetable:
    """N micro-batches over N stages.

    Where they are computed: `single`, all on one device; `workers`, each micro-batch on one of N;
    `pyramid`, each stage on devices of its own, as many as it has micro-batches under way at a time
    (N-j+1 of stage j, counted from 1), of which the next one takes that which has just released its
    activations; `pipeline`, each stage on one; `zero`: as `workers`, but there is one copy of a
    stage, which travels to whoever computes with it next.
    """

    placement: Placement
    n: int
    cyclic: bool = True

    def __post_init__(self) -> None:
        if self.placement not in PLACEMENTS:
            known = ", ".join(PLACEMENTS)
            raise ValueError(f"placement ({self.placement!r}) must be one of {known}")
        if self.n < 1:
            raise ValueError(f"stages ({self.n}) must be at least 1")
        if self.placement == "pipeline" and not self.cyclic:
            raise ValueError("placement ('pipeline') exists in the cyclic order only")

    @property
    def period(self) -> int:
        """Time steps of an iteration."""
        return 2 * self.n

    @property
    def devices(self) -> int:
        """How many there are."""
        return sum(map(self.copies, range(self.n))) if self.staged else self._widths[0]

    @property
    def staged(self) -> bool:
        """Whether a device computes one stage only."""
        return self.placement in ("pyramid", "pipeline")

    def copies(self, stage: int) -> int:
        """On how many devices a stage is computed."""
        return self._widths[stage]

    @cached_property
    def _widths(self) -> list[int]:
        if self.placement in ("single", "pipeline"):
            return [1] * self.n
        if self.placement == "pyramid" and self.cyclic:
            return [self.n - stage for stage in range(self.n)]
        return [self.n] * self.n

    def device(self, batch: int, stage: int) -> int:
        """Where a stage of a micro-batch is computed; with `pyramid` and `pipeline` devices count
        from those of the first stage on."""
        before = sum(self._widths[:stage]) if self.staged else 0
        return before + batch % self._widths[stage]

    def home(self, stage: int) -> int:
        """Where the only copy of a stage is before it travels, and in the end."""
        return stage if self.placement == "zero" else self.device(0, stage)

    def stages_of(self, device: int) -> list[int]:
        """Those that a device has a copy of; with `zero`, at rest."""
        if self.placement == "zero":
            return [stage for stage in range(self.n) if self.home(stage) == device]
        on = [{self.device(batch, stage) for batch in range(self.n)} for stage in range(self.n)]
        return [stage for stage in range(self.n) if device in on[stage]]

    # ---- works ------------------------------------------------------------------------------

    def begins(self, batch: int) -> int:
        """First time step of a micro-batch."""
        iteration, i = divmod(batch, self.n)
        return self.period * iteration + (2 * i if self.cyclic else 0)

    def forward_at(self, batch: int, stage: int) -> int:
        """In which time step."""
        return self.begins(batch) + stage

    def backward_at(self, batch: int, stage: int) -> int:
        """In which time step."""
        return self.begins(batch) + self.period - 1 - stage

    def works(self, time: int) -> list[Work]:
        """What is computed in a time step, if nothing begins or ends; backward first, as it frees
        memory."""
        if not self.cyclic:
            iteration, place = divmod(time, self.period)
            batches = range(self.n * iteration, self.n * (iteration + 1))
            return [self._work(time, batch, place) for batch in batches]
        latest = time // 2
        return [
            self._work(time, batch, time - 2 * batch)
            for batch in range(latest - self.n + 1, latest + 1)
        ]

    def _work(self, time: int, batch: int, place: int) -> Work:
        backward = place >= self.n
        stage = self.period - 1 - place if backward else place
        return Work(time, self.device(batch, stage), batch, stage, backward)

    # ---- messages of the cyclic order --------------------------------------------------------

    def due(self, time: int, iterations: range) -> Iterator[Message]:
        """Messages that must be there in a time step, if these iterations are computed."""
        for work in self.works(time):
            if work.batch // self.n in iterations:
                if handed := self.handed(work):
                    yield handed
                there_is_one = self.placement == "zero"
                yield from self._travels(work, iterations) if there_is_one else self._summed(work)
            # Totals reach everybody, even if no further iteration follows.
            if not work.backward and self.total_of(work.batch, work.stage) in iterations:
                yield from self._passed(work.batch, work.stage)
        if self.placement == "zero":
            yield from self._returns(time, iterations)

    def handed(self, work: Work) -> Message | None:
        """What a work needs of the neighbouring stage, if that is computed elsewhere."""
        near = work.stage + 1 if work.backward else work.stage - 1
        if not 0 <= near < self.n or (source := self.device(work.batch, near)) == work.device:
            return None
        what: What = "gradient" if work.backward else "activation"
        return Message(work.time - 1, work.time, source, work.device, what, work.stage, work.batch)

    def total_of(self, batch: int, stage: int) -> int | None:
        """The iteration whose total the micro-batch's device gets just before its forward: the
        first that can use it, and then one after the other until all copies have it."""
        if self.placement == "zero":
            return None
        iteration, place = divmod(batch - (self.n - 1 - stage), self.n)
        return iteration - 1 if place < self.copies(stage) else None

    def _summed(self, work: Work) -> Iterator[Message]:
        """The sum of gradients, from one micro-batch to the next."""
        source = self.device(work.batch - 1, work.stage)
        if work.backward and work.batch % self.n and source != work.device:
            yield Message(
                work.time - 2, work.time, source, work.device, "sum", work.stage, work.batch
            )

    def passes(self, iteration: int, stage: int) -> Iterator[Message]:
        """A total's way: from the device that has it first to those that compute the stage next."""
        first = self.n * (iteration + 2) - 1 - stage
        for batch in range(first, first + self.copies(stage)):
            yield from self._passed(batch, stage)

    def _passed(self, batch: int, stage: int) -> Iterator[Message]:
        due = self.forward_at(batch, stage)
        since, place = divmod(batch - (self.n - 1 - stage), self.n)
        owner = self.device(self.n * since - 1, stage)  # has computed the last backward
        source = owner if place == 0 else self.device(batch - 1, stage)
        target = self.device(batch, stage)
        if target not in (source, owner):
            yield Message(due - (2 if place else 1), due, source, target, "total", stage, batch)

    def _travels(self, work: Work, iterations: range) -> Iterator[Message]:
        """The stage, from whoever has computed with it last."""
        source = self._before(work.time, work.stage, iterations)
        if source != work.device:
            yield Message(
                work.time - 1, work.time, source, work.device, "states", work.stage, work.batch
            )

    def _before(self, time: int, stage: int, iterations: range) -> int:
        """Who has computed with a stage last."""
        for earlier in range(time - 1, self.period * iterations.start - 1, -1):
            # In even steps after its first one it is used forward, in odd ones backward.
            since, backward = earlier - stage, (earlier - stage) % 2
            batch = (since - self.period + 1 + 2 * stage if backward else since) // 2
            if batch // self.n in iterations:
                return self.device(batch, stage)
        return self.home(stage)

    def _returns(self, time: int, iterations: range) -> Iterator[Message]:
        """In the end every stage goes back to where it was at first."""
        last = iterations.stop * self.n - 1
        for stage in range(self.n):
            source, target = self.device(last, stage), self.home(stage)
            if iterations and self.backward_at(last, stage) == time - 1 and source != target:
                yield Message(time - 1, time, source, target, "states", stage, last)

    # ---- collectives of the parallel order ---------------------------------------------------

    def collectives(self, iteration: int) -> Iterator[Collective]:
        """What devices do together in an iteration, if all micro-batches run at the same time. One
        all-reduce in the end, with `workers`; each stage's as soon as it can be, with `pyramid`."""
        begin, end = self.period * iteration, self.period * (iteration + 1) - 1
        if self.placement == "single" or self.n == 1:
            return
        batches = range(self.n * iteration, self.n * (iteration + 1))
        for stage in range(self.n):
            done = end - stage
            one = range(stage, stage + 1)
            members = tuple(sorted({self.device(batch, stage) for batch in batches}))
            if self.placement == "zero":
                for time in (begin + stage, done):
                    yield Collective(time - 1, "broadcast", one, members)
                yield Collective(done, "reduce", one, members)
            elif self.placement == "pyramid":
                yield Collective(done, "all_reduce", one, members)
        if self.placement == "workers":
            yield Collective(end, "all_reduce", range(self.n), tuple(range(self.n)))
