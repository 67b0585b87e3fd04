"""The votes of a run: what this rank saw, who said yes, what was sent and what was spared."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from offbeat.core.runtime.iteration import Iteration


class VoteLog:
    """One entry per iteration with a vote. Bytes are those of its messages, votes left out."""

    def __init__(self) -> None:
        self._keys: dict[str, list[str]] = {}  # columns, those of a vote's first entry
        self._reset()

    def _reset(self) -> None:
        self._iterations: list[int] = []
        self._sent: list[int] = []
        self._spared: list[int] = []
        self._votes: dict[str, list[dict[str, Any]]] = defaultdict(list)

    def add_iteration(self, done: Iteration, votes: Sequence[str]) -> None:
        """Take in one finished iteration with these votes."""
        self._iterations.append(done.number)
        sent = [m for m in done.messages if not m.passed]
        self._sent.append(sum(x.nbytes for m in sent for x in m.tensors))
        self._spared.append(done.spared_bytes)
        for name in votes:
            numbers = {k: float(f"{x:.6g}") for k, x in done.shown.get(name, {}).items()}
            entry = {**numbers, "yes": done.voted.get(name)}
            self._keys.setdefault(name, [*entry])
            self._votes[name].append(entry)

    def pop_columns(self) -> dict[str, Any]:
        """What has come since it was last taken, JSON-ready: columns, the same length for all;
        `yes` are the ranks, None: not known."""
        by_vote = {
            name: {key: [entry.get(key) for entry in entries] for key in self._keys[name]}
            for name, entries in self._votes.items()
        }
        found = {
            "iterations": self._iterations,
            "sent_bytes": self._sent,
            "spared_bytes": self._spared,
            "by_vote": by_vote,
        }
        self._reset()
        return found
