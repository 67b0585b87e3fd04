"""Votes of a repetition: yes votes of each rank, outcomes and spared bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offbeat.core import words
from offbeat.experiments.record.run_directory import RankRecord, Repetition


@dataclass(frozen=True)
class Votes:
    """Votes in all iterations with votes.

    Attributes:
        iterations: iterations with votes.
        yes: number of yes votes by rank, for each of `iterations`.
        sent_bytes: bytes sent by one rank.
        spared_bytes: bytes omitted by one rank.
        odd: number of norms of all ranks that were zero or not finite.
        averaged: number of iterations in which something was averaged.
    """

    iterations: tuple[int, ...]
    yes: tuple[Mapping[int, int], ...]
    sent_bytes: int
    spared_bytes: int
    odd: int
    averaged: int = 0

    @property
    def lssr(self) -> float:
        """Share of omitted synchronizations by bytes: spared / (sent + spared)."""
        both = self.sent_bytes + self.spared_bytes
        return self.spared_bytes / both if both else 0.0

    def yes_iterations(self, rank: int) -> list[int]:
        """Return the iterations with at least one yes vote of a rank."""
        return [i for i, yes in zip(self.iterations, self.yes, strict=True) if yes.get(rank)]


def votes_of(rep: Repetition) -> Votes | None:
    """Return the votes of a repetition, from the record of rank 0; None without votes.

    All ranks record the same outcomes. Only `odd` is counted over all ranks.
    """
    if not rep.ranks or not rep.ranks[0].votes.get("iterations"):
        return None
    log = rep.ranks[0].votes
    by_vote: Mapping[str, Mapping[str, Sequence[Any]]] = log["by_vote"]
    iterations = tuple(map(int, log["iterations"]))
    yes: list[dict[int, int]] = [{} for _ in iterations]
    for columns in by_vote.values():
        for counts, ranks in zip(yes, columns["yes"], strict=True):
            for rank in ranks or ():
                counts[rank] = counts.get(rank, 0) + 1
    return Votes(
        iterations,
        tuple(yes),
        sum(log["sent_bytes"]),
        sum(log["spared_bytes"]),
        sum(map(_count_odd_norms, rep.ranks)),
        sum(map(bool, log["sent_bytes"])),
    )


def describe_votes(rep: Repetition, votes: Votes) -> str:
    """Return sentences about spared bytes and about the share of yes votes of each rank."""
    total = len(votes.iterations)
    shares = [
        f"rank {r.rank} in {100 * len(votes.yes_iterations(r.rank)) / total:.0f} %"
        for r in rep.ranks
    ]
    less = f", {words.digits(1 / (1 - votes.lssr))} times less" if 0 < votes.lssr < 1 else ""
    odd = f"; {votes.odd:,} norms were zero or not finite" if votes.odd else ""
    return (
        f"Averaged in {votes.averaged:,} of {total:,} iterations: a rank has averaged "
        f"{words.size(votes.sent_bytes)}{less}, and votes have spared "
        f"{words.size(votes.spared_bytes)}. Votes to average: {', '.join(shares)} of the "
        f"iterations{odd}."
    )


def _count_odd_norms(record: RankRecord) -> int:
    norms = (norm for votes in record.votes.get("by_vote", {}).values() for norm in votes["norm"])
    return sum(norm is None or not 0 < norm < math.inf for norm in norms)
