"""Votes: decisions that all ranks make together while training."""

from __future__ import annotations

import torch

from offbeat.plan import CHANNEL, Moment, Payload, Phases, Transfer, Vote
from offbeat.runtime.waiting import Waiting
from offbeat.storage.flat import Flat
from offbeat.transport.link import Link, Message

VOTES = "votes"


def vote_channel(link: str) -> str:
    """The channel of a link that votes take, so that no bulk message holds them up."""
    return f"{link}{CHANNEL}{VOTES}"


class Votes:
    """One small message per vote; afterwards every rank knows who has said yes."""

    def __init__(self, link: Link | None, waiting: Waiting, flat: Flat, rank: int, world_size: int):
        self._link, self._waiting, self._flat = link, waiting, flat
        self._rank, self._world_size = rank, world_size
        self._asked: dict[tuple[str, int], Message] = {}
        self.outcomes: dict[tuple[str, int], list[int]] = {}
        """By name and iteration in the plan: the ranks that said yes."""

    def ask(self, vote: Vote, planned: int, say: bool) -> None:
        """This rank has its say."""
        assert self._link is not None
        rule = Transfer(
            Payload("vote", range(1)), vote.at, Moment("end"), Phases(), self._link.name
        )
        where = self._flat.everything()[0].device
        says = torch.zeros(self._world_size, device=where)
        says[self._rank] = float(say)
        message = self._link.enqueue(rule, planned)
        self._link.release(message, (says,))
        self._asked[vote.name, planned] = message

    def decide(self, vote: Vote, planned: int) -> None:
        """Wait for everyone's say."""
        message = self._asked.pop((vote.name, planned), None)
        if message is None:
            return
        self._waiting.wait(message, self._flat)
        yes = [rank for rank, said in enumerate(message.tensors[0].tolist()) if said]
        self.outcomes[vote.name, planned] = yes

    def goes(self, when: str | None, planned: int) -> bool:
        """Whether what depends on a vote happens."""
        return when is None or bool(self.outcomes[when, planned])

    def forget(self, before: int) -> None:
        """Outcomes of iterations before this one are not asked for any more."""
        for key in [key for key in self.outcomes if key[1] < before]:
            del self.outcomes[key]
