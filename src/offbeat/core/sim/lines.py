"""Lines: the messages of one link, as the ranks on it see them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

from offbeat.core.plan import Transfer
from offbeat.core.sim.timed_program import Slot, TimedProgram


class Line:
    """Messages in issue order, one at a time.

    `ends_s[n]` is the end of the n-th message, which took `message_s[n]`; those of iteration i
    begin at `begins[i]`.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.begins: list[int] = []
        self.ends_s: list[float] = []
        self.message_s: list[float] = []

    def open(self, message_s: Sequence[float]) -> None:
        """Number the messages of the next iteration."""
        self.begins.append(len(self.message_s))
        self.message_s += message_s

    def number(self, iteration: int, slot: Slot) -> int:
        """A message's place among all on the link."""
        return self.begins[iteration - slot.lag] + slot.position

    @property
    def free_s(self) -> float:
        """When the link is free for the first message that has not ended."""
        return self.ends_s[-1] if self.ends_s else 0.0

    def span_s(self, iteration: int, slot: Slot) -> tuple[float, float, float] | None:
        """When the link became free for a message, when it began and ended; None: it never ran."""
        number = self.number(iteration, slot)
        if number >= len(self.ends_s):
            return None
        end_s = self.ends_s[number]
        return self.ends_s[number - 1] if number else 0.0, end_s - self.message_s[number], end_s

    def busy_s(self, iteration: int) -> float:
        """Seconds for which the messages of an iteration keep the link busy."""
        return sum(self.message_s[self._numbers(range(iteration, iteration + 1))])

    def ends_of(self, iterations: range) -> list[float]:
        """Ends of the messages of some iterations, in issue order, as far as they have run."""
        return self.ends_s[self._numbers(iterations)]

    def head(self, program: TimedProgram) -> tuple[int, Transfer]:
        """Iteration and transfer of the first message that has not ended."""
        number = len(self.ends_s)
        iteration = bisect_right(self.begins, number) - 1
        return iteration, program.queues(iteration)[self.name][number - self.begins[iteration]]

    def _numbers(self, iterations: range) -> slice:
        begins = [*self.begins[iterations.start : iterations.stop + 1], len(self.message_s)]
        return slice(begins[0], begins[len(iterations)])


class SharedLine(Line):
    """A link on which every message is of all ranks, and ends on all at once.

    A message starts when the last rank has released it and the link is free. The messages of a
    coupled link end only when `Shared` says so.
    """

    def __init__(self, name: str, *, coupled: bool = False) -> None:
        super().__init__(name)
        self.coupled = coupled
        self.released_s: dict[int, float] = {}

    def end_s(self, number: int) -> float | None:
        """End of a message; None as long as it or one before it is not released."""
        if len(self.ends_s) <= number:
            self.issue()
        return self.ends_s[number] if number < len(self.ends_s) else None

    def issue(self) -> None:
        """Run every message that is released, in order; not on a coupled link."""
        if self.coupled:
            return
        ends_s, released_s, message_s = self.ends_s, self.released_s, self.message_s
        number, free_s = len(ends_s), self.free_s
        while (start_s := released_s.pop(number, None)) is not None:
            free_s = (start_s if start_s > free_s else free_s) + message_s[number]
            ends_s.append(free_s)
            number += 1

    def waiting(self) -> tuple[float, float] | None:
        """Start and seconds of the first message that has not ended; None before its release."""
        number = len(self.ends_s)
        released_s = self.released_s.get(number)
        if released_s is None:
            return None
        return max(released_s, self.free_s), self.message_s[number]

    def land(self, start_s: float, end_s: float) -> None:
        """End the first message that has not ended."""
        number = len(self.ends_s)
        del self.released_s[number]
        self.message_s[number] = end_s - start_s
        self.ends_s.append(end_s)


def stuck(
    program: TimedProgram, iteration: int, slot: Slot, heads: Iterable[tuple[int, Transfer]]
) -> ValueError:
    """What a rank waits for, and what that message waits for in turn: the `heads` of the lines
    that carry it."""
    awaited_in = iteration - slot.lag
    awaited = program.queues(awaited_in)[slot.link][slot.position]
    others = [(i, t) for i, t in heads if (i, t) != (awaited_in, awaited)]
    cause, marked = f"which is released only after {awaited.after}", [awaited]
    if others:
        before, head = others[0]
        cause = f"behind {head.id} of iteration {before}, released only after {head.after}"
        marked.append(head)
    return ValueError(
        f"the plan can never proceed: iteration {iteration} waits before {awaited.before} for "
        f"{awaited.id}, {cause}; change the order of the transfers or the deadline\n"
        f"{program.plan.text(mark=marked)}"
    )


def undecided(program: TimedProgram, iteration: int, name: str) -> ValueError:
    """A rank waits for the outcome of a vote that some rank never takes part in."""
    vote = next(vote for vote in program.plan.votes if vote.name == name)
    return ValueError(
        f"the plan can never proceed: iteration {iteration} waits before {vote.due} for the vote "
        f"{name!r}, in which every rank has its say only at {vote.at}; change either moment\n"
        f"{program.plan.text(mark=[vote])}"
    )
