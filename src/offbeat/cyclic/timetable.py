"""Timetables of cyclic training: device and time step of each stage's compute.

N micro-batches pass N stages, forward and backward, one stage per time step. Each micro-batch
begins two time steps after the previous one, and iterations follow each other without a pause.

Source: Cyclic Data Parallelism, Fig. 1 and 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from offbeat.core.strategy.interface import require_choice, require_count

Placement = Literal["single", "workers", "pyramid", "pipeline", "zero"]
PLACEMENTS: tuple[Placement, ...] = get_args(Placement)
What = Literal["activation", "gradient", "sum", "total", "states"]
Key = tuple[What, int, int]  # kind, and the stage and micro-batch that need the message


class Work(NamedTuple):
    """Forward or backward of one micro-batch through one stage.

    Micro-batches are numbered across iterations, stages from 0 at the input.
    """

    time: int
    device: int
    batch: int
    stage: int
    backward: bool


class Message(NamedTuple):
    """Message from one device to another, sent after time step `sent` and needed in step `due`.

    Kinds: `activation` and `gradient` between neighbouring stages; `sum`, the sum of a stage's
    gradients so far, to which the next micro-batch adds; `total`, the complete gradient of an
    iteration, for the update of each copy of a stage; `states`, parameters, gradient sum and
    optimizer state of a stage. `batch` is the micro-batch whose work needs the message.
    """

    sent: int
    due: int
    source: int
    target: int
    what: What
    stage: int
    batch: int

    @property
    def key(self) -> Key:
        """What the message is, whoever sends it."""
        return self.what, self.stage, self.batch


@dataclass(frozen=True)
class Timetable:
    """Timetable of `n` micro-batches over `n` stages, in cyclic order.

    Placements:

    - `single`: one device computes everything.
    - `workers`: each of `n` devices computes one micro-batch and has a copy of every stage.
    - `pyramid`: each stage has devices of its own, one per simultaneous micro-batch: n - j + 1 for
      stage j, counted from 1. The next micro-batch gets the device that has just released its
      activations.
    - `pipeline`: each stage has one device.
    - `zero`: as `workers`, but with one copy of each stage, which moves to the device that computes
      with it next.
    """

    placement: Placement
    n: int

    def __post_init__(self) -> None:
        require_choice("placement", self.placement, PLACEMENTS)
        require_count("stages", self.n)

    @property
    def period(self) -> int:
        """Time steps per iteration."""
        return 2 * self.n

    @property
    def devices(self) -> int:
        """Number of devices."""
        return sum(map(self.copies, range(self.n))) if self.is_staged else self.copies(0)

    @property
    def is_staged(self) -> bool:
        """Whether each device computes only one stage."""
        return self.placement in ("pyramid", "pipeline")

    def copies(self, stage: int) -> int:
        """Return the number of devices that compute a stage."""
        if self.placement in ("single", "pipeline"):
            return 1
        return self.n - stage if self.placement == "pyramid" else self.n

    def device(self, batch: int, stage: int) -> int:
        """Return the device that computes a stage of a micro-batch.

        With `pyramid` and `pipeline` devices are numbered stage by stage, from the input on.
        """
        before = sum(map(self.copies, range(stage))) if self.is_staged else 0
        return before + batch % self.copies(stage)

    def home(self, stage: int) -> int:
        """Return the device of a stage's first copy; with `zero` that of the copy at rest."""
        return stage if self.placement == "zero" else self.device(0, stage)

    def stages_of(self, device: int) -> list[int]:
        """Return the stages of which a device has a copy, with `zero` at rest."""
        if self.placement == "zero":
            return [device]
        on = [{self.device(batch, stage) for batch in range(self.n)} for stage in range(self.n)]
        return [stage for stage in range(self.n) if device in on[stage]]

    # ---- works ------------------------------------------------------------------------------

    def first_step(self, batch: int) -> int:
        """Return the first time step of a micro-batch."""
        return 2 * batch

    def forward_at(self, batch: int, stage: int) -> int:
        """Return the time step of a forward."""
        return self.first_step(batch) + stage

    def backward_at(self, batch: int, stage: int) -> int:
        """Return the time step of a backward."""
        return self.first_step(batch) + self.period - 1 - stage

    def works(self, time: int) -> list[Work]:
        """Return the works of a time step in an endless run, without begin or end.

        Backwards come first because they free memory.
        """
        latest = time // 2
        return [self._work(time, batch) for batch in range(latest - self.n + 1, latest + 1)]

    def _work(self, time: int, batch: int) -> Work:
        place = time - self.first_step(batch)
        backward = place >= self.n
        stage = self.period - 1 - place if backward else place
        return Work(time, self.device(batch, stage), batch, stage, backward)

    # ---- messages ---------------------------------------------------------------------------

    def due_messages(self, time: int, iterations: range) -> Iterator[Message]:
        """Yield the messages that are due in a time step, if only these iterations are computed."""
        for work in self.works(time):
            if work.batch // self.n in iterations:
                if handed := self.input_message(work):
                    yield handed
                if self.placement == "zero":
                    yield from self._state_messages(work, iterations)
                else:
                    yield from self._sum_messages(work)
            # Every copy gets the gradient of the last iteration, too, though no iteration follows.
            if not work.backward and self.arriving_total(work.batch, work.stage) in iterations:
                yield from self._total_messages_of(work.batch, work.stage)
        if self.placement == "zero":
            yield from self._return_messages(time, iterations)

    def input_message(self, work: Work) -> Message | None:
        """Return the message from the neighbouring stage; None if it is on the same device."""
        near = work.stage + 1 if work.backward else work.stage - 1
        if not 0 <= near < self.n or (source := self.device(work.batch, near)) == work.device:
            return None
        what: What = "gradient" if work.backward else "activation"
        return Message(work.time - 1, work.time, source, work.device, what, work.stage, work.batch)

    def arriving_total(self, batch: int, stage: int) -> int | None:
        """Return the iteration whose complete gradient arrives just before this forward, or None.

        The first micro-batch that can use the gradient receives it first. The following
        micro-batches receive it one by one until all copies of the stage have it.
        """
        if self.placement == "zero":
            return None
        iteration, place = divmod(batch - (self.n - 1 - stage), self.n)
        return iteration - 1 if place < self.copies(stage) else None

    def _sum_messages(self, work: Work) -> Iterator[Message]:
        """Yield the message with the gradient sum of the previous micro-batch."""
        source = self.device(work.batch - 1, work.stage)
        if work.backward and work.batch % self.n and source != work.device:
            yield Message(
                work.time - 2, work.time, source, work.device, "sum", work.stage, work.batch
            )

    def total_messages(self, iteration: int, stage: int) -> Iterator[Message]:
        """Yield the messages that carry the complete gradient of an iteration to all copies of a
        stage."""
        first = self.n * (iteration + 2) - 1 - stage
        for batch in range(first, first + self.copies(stage)):
            yield from self._total_messages_of(batch, stage)

    def _total_messages_of(self, batch: int, stage: int) -> Iterator[Message]:
        due = self.forward_at(batch, stage)
        since, place = divmod(batch - (self.n - 1 - stage), self.n)
        owner = self.device(self.n * since - 1, stage)  # computed the iteration's last backward
        source = owner if place == 0 else self.device(batch - 1, stage)
        target = self.device(batch, stage)
        if target not in (source, owner):
            yield Message(due - (2 if place else 1), due, source, target, "total", stage, batch)

    def _state_messages(self, work: Work, iterations: range) -> Iterator[Message]:
        """Yield the message that moves the stage from the device of its previous work."""
        source = self._previous_device(work.time, work.stage, iterations)
        if source != work.device:
            yield Message(
                work.time - 1, work.time, source, work.device, "states", work.stage, work.batch
            )

    def _previous_device(self, time: int, stage: int, iterations: range) -> int:
        """Return the device of the last work with a stage before a time step, or its home."""
        for earlier in range(time - 1, self.period * iterations.start - 1, -1):
            # The even time steps after the stage's first one are forwards, the odd ones backwards.
            since, backward = earlier - stage, (earlier - stage) % 2
            batch = (since - self.period + 1 + 2 * stage if backward else since) // 2
            if batch // self.n in iterations:
                return self.device(batch, stage)
        return self.home(stage)

    def _return_messages(self, time: int, iterations: range) -> Iterator[Message]:
        """Yield the messages that move stages to their homes after the last iteration."""
        last = iterations.stop * self.n - 1
        for stage in range(self.n):
            source, target = self.device(last, stage), self.home(stage)
            if iterations and self.backward_at(last, stage) == time - 1 and source != target:
                yield Message(time - 1, time, source, target, "states", stage, last)
