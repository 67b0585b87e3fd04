"""Log of the votes of one rank, with the bytes that were sent and spared."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from offbeat.core.runtime.iteration import Iteration


class VoteLog:
    """One entry per iteration with a vote. Bytes exclude the messages of the votes."""

    def __init__(self) -> None:
        self._keys: dict[str, list[str]] = {}  # columns of each vote, as in its first entry
        self._reset()

    def _reset(self) -> None:
        self._iterations: list[int] = []
        self._sent: list[int] = []
        self._spared: list[int] = []
        self._votes: dict[str, list[dict[str, Any]]] = defaultdict(list)

    def add_iteration(self, done: Iteration, votes: Sequence[str]) -> None:
        """Add a finished iteration with these votes."""
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
        """Return the entries since the last call in JSON form, as columns of equal length.

        `yes` lists the ranks that voted yes in an iteration, None if unknown.
        """
        by_vote = {
            name: {key: [entry.get(key) for entry in entries] for key in self._keys[name]}
            for name, entries in self._votes.items()
        }
        columns = {
            "iterations": self._iterations,
            "sent_bytes": self._sent,
            "spared_bytes": self._spared,
            "by_vote": by_vote,
        }
        self._reset()
        return columns
