"""Queue of the messages on one link, in issue order, with their simulated times."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

from offbeat.core.plan import Transfer
from offbeat.core.sim.timed_program import Slot, TimedProgram


class LinkQueue:
    """Messages of one link in issue order. The link carries one message at a time.

    Attributes:
        name: name of the link.
        pause_s: pause of the link after which a message takes additional time; None if none does.
        begins: number of the first message of each iteration.
        transfers: transfer of each message, by message number.
        ends_s: end of each message that has ended, by message number.
        message_s: seconds of each message, by message number.
        sent_s: end of the last message that took time, if `pause_s` is not None.
    """

    def __init__(self, name: str, pause_s: float | None = None) -> None:
        self.name, self.pause_s = name, pause_s
        self.begins: list[int] = []
        self.transfers: list[Transfer] = []
        self.ends_s: list[float] = []
        self.message_s: list[float] = []
        self.sent_s = 0.0

    def open_iteration(self, transfers: Sequence[Transfer], message_s: Sequence[float]) -> None:
        """Append the messages of the next iteration, with their seconds."""
        self.begins.append(len(self.message_s))
        self.transfers += transfers
        self.message_s += message_s

    def number(self, iteration: int, slot: Slot) -> int:
        """Return the number of a message among all messages of the link."""
        return self.begins[iteration - slot.lag] + slot.position

    @property
    def free_s(self) -> float:
        """Return the time from which the link is free for the first message that has not ended."""
        return self.ends_s[-1] if self.ends_s else 0.0

    def span_s(self, iteration: int, slot: Slot) -> tuple[float, float, float] | None:
        """Return when the link became free for a message, the message's start and its end.

        Return None if the message has not run.
        """
        number = self.number(iteration, slot)
        if number >= len(self.ends_s):
            return None
        end_s = self.ends_s[number]
        return self.ends_s[number - 1] if number else 0.0, end_s - self.message_s[number], end_s

    def link_busy_s(self, iteration: int) -> float:
        """Return the seconds for which the messages of an iteration occupy the link."""
        return sum(self.message_s[self._numbers(range(iteration, iteration + 1))])

    def ends_of(self, iterations: range) -> list[float]:
        """Return the ends of the messages of some iterations that have run, in issue order."""
        return self.ends_s[self._numbers(iterations)]

    def head(self) -> tuple[int, Transfer]:
        """Return iteration and transfer of the first message that has not ended."""
        number = len(self.ends_s)
        return bisect_right(self.begins, number) - 1, self.transfers[number]

    def _numbers(self, iterations: range) -> slice:
        begins = [*self.begins[iterations.start : iterations.stop + 1], len(self.message_s)]
        return slice(begins[0], begins[len(iterations)])


def is_after_pause(queues: Sequence[LinkQueue], start_s: float) -> bool:
    """Return whether a message that starts at `start_s` on the queues of its ranks follows a pause
    of the link."""
    pause_s = queues[0].pause_s
    return pause_s is not None and start_s - max(queue.sent_s for queue in queues) >= pause_s


def deadlock_error(
    program: TimedProgram, iteration: int, slot: Slot, heads: Iterable[tuple[int, Transfer]]
) -> ValueError:
    """Return the error that names the message for which a rank waits forever, and its cause.

    Args:
        program: program of the rank.
        iteration: iteration of the rank.
        slot: message for which the rank waits.
        heads: iteration and transfer at the head of each queue that holds the message.
    """
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


def undecided_vote_error(program: TimedProgram, iteration: int, name: str) -> ValueError:
    """Return the error for a rank that waits for a vote in which some rank never takes part."""
    vote = next(vote for vote in program.plan.votes if vote.name == name)
    return ValueError(
        f"the plan can never proceed: iteration {iteration} waits before {vote.due} for the vote "
        f"{name!r}, in which every rank has its say only at {vote.at}; change either moment\n"
        f"{program.plan.text(mark=[vote])}"
    )
