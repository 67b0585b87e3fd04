"""Turns: one replica at a time, in the order of ranks, and no wait without end."""

from __future__ import annotations

import pytest

from offbeat.rehearsal.turns import DeadlockError, Turns


class State:
    """Records when its replica runs."""

    def __init__(self, rank: int, log: list[str]) -> None:
        self.rank, self.log = rank, log

    def enter(self) -> None:
        self.log.append(f"+{self.rank}")

    def leave(self) -> None:
        self.log.append(f"-{self.rank}")


def turns_of(count: int) -> tuple[Turns, list[str]]:
    log: list[str] = []
    return Turns([State(rank, log) for rank in range(count)]), log


def test_one_replica_runs_at_a_time():
    turns, log = turns_of(3)
    arrived: list[int] = []

    def life(rank: int) -> None:
        for meeting in range(2):
            arrived.append(rank)
            assert turns.current == rank
            turns.wait_until(lambda m=meeting: len(arrived) >= 3 * (m + 1), lambda: "the others")

    turns.run(life)
    assert arrived == [0, 1, 2, 2, 0, 1]  # the last one to arrive need not wait
    inside: list[str] = []
    for entry in log:
        if entry[0] == "+":
            assert not inside
            inside.append(entry[1:])
        else:
            assert inside.pop() == entry[1:]
    assert not inside


def test_a_deadlock_names_what_each_replica_waits_for():
    turns, _ = turns_of(3)

    def life(rank: int) -> None:
        if rank:
            turns.wait_until(lambda: False, lambda: f"message {rank}")

    with pytest.raises(DeadlockError) as error:
        turns.run(life)
    text = str(error.value)
    assert "rank 0 has ended; rank 1 waits for message 1; rank 2 waits for message 2" in text


def test_the_first_error_ends_all_replicas():
    turns, _ = turns_of(3)
    ended: list[int] = []

    def life(rank: int) -> None:
        try:
            if rank == 1:
                raise KeyError("lost")
            try:
                turns.wait_until(lambda: False, lambda: "rank 1")
            except Exception:  # a script that catches errors
                pytest.fail("the end of a replica is no Exception")
        finally:
            ended.append(rank)

    with pytest.raises(KeyError, match="lost"):
        turns.run(life)
    assert sorted(ended) == [0, 1]  # rank 2 has not begun
