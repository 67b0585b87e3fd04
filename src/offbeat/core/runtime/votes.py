"""Votes: decisions of all ranks during training."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offbeat.core.buckets.flat import Flat
from offbeat.core.plan import Apply, Moment, Payload, Phases, Transfer, Vote
from offbeat.core.plan.semantics import is_active
from offbeat.core.runtime.waiting import Waiting
from offbeat.core.transport.link import Message, MessageLink


class Votes:
    """Votes of one rank; all votes of a moment share one message, which gives every rank all
    ballots."""

    def __init__(
        self, link: MessageLink | None, waiting: Waiting, flat: Flat, rank: int, world_size: int
    ):
        self._link, self._waiting, self._flat = link, waiting, flat
        self._rank, self._world_size = rank, world_size
        self._pending: dict[tuple[str, int], tuple[Message, int]] = {}
        self.outcomes: dict[tuple[str, int], list[int]] = {}
        """By name of the vote and number of the iteration in the plan: the ranks that voted yes."""

    def send_ballots(self, votes: Sequence[Vote], planned: int, ballots: Sequence[bool]) -> None:
        """Send this rank's ballots in the votes of a moment.

        Args:
            votes: votes of the moment.
            planned: number of the iteration in the plan.
            ballots: by vote, this rank's ballot.
        """
        assert self._link is not None
        rule = Transfer(
            Payload("vote", range(1)), votes[0].at, Moment("end"), Phases(), self._link.name
        )
        # On the host, so that the decision does not wait for the device.
        table = torch.zeros(len(votes), self._world_size, dtype=torch.float32, device="cpu")
        table[:, self._rank] = torch.tensor(ballots, dtype=table.dtype, device="cpu")
        message = self._link.enqueue(rule, planned)
        self._link.release(message, (table,))
        for row, vote in enumerate(votes):
            self._pending[vote.name, planned] = message, row

    def decide(self, vote: Vote, planned: int) -> list[int]:
        """Wait for the ballots of all ranks. Return the ranks that voted yes."""
        message, row = self._pending[vote.name, planned]
        self._waiting.wait(message, self._flat)  # after a failure it settles all pending messages
        del self._pending[vote.name, planned]
        table = [] if message.passed else message.tensors[0][row].tolist()
        yes = [rank for rank, ballot in enumerate(table) if ballot]
        self.outcomes[vote.name, planned] = yes
        return yes

    @property
    def pending(self) -> list[Message]:
        """Messages of the votes whose outcome is not known yet."""
        return [message for message, _ in self._pending.values()]

    def allows(self, rule: Transfer | Apply, planned: int) -> bool:
        """Return whether the outcome of a rule's vote allows the rule in iteration `planned`."""
        return is_active(rule, planned, lambda vote, ago: self.outcomes[vote, planned - ago])

    def forget(self, before: int) -> None:
        """Delete the outcomes of iterations before `before`, which no rule needs any more."""
        for key in [key for key in self.outcomes if key[1] < before]:
            del self.outcomes[key]
