"""Samples of a job whose members change: each sample once, by counting."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from harness.parts import MemberSamples, SampleStream


def nothing() -> None:
    """Change no members before a batch."""


class Job:
    """Members that read from equal streams; counts the samples of training that is not lost."""

    def __init__(self, names: list[str], *settings: int):
        self.settings, self.begun = settings, 0
        self.members = {
            n: MemberSamples(SampleStream(*settings), n, names, 0, nothing) for n in names
        }
        self.read = {name: list[list[int]]() for name in names}  # since the last change

    def run(self, iterations: int) -> bool:
        """Read batches; return whether the stream has ended."""
        for _ in range(iterations):
            batches = {name: one.next_batch() for name, one in self.members.items()}
            if any(batch is None for batch in batches.values()):
                assert all(batch is None for batch in batches.values())
                return True
            for name, batch in batches.items():
                assert batch
                self.read[name].append(batch)
        return False

    def change(self, names: list[str], failed: list[str], lost: int) -> Counter[int]:
        """Change the members; a failed one loses its last `lost` batches. Return what was read."""
        counted = Counter[int]()
        first = next(iter(self.members.values()))
        rounds = len(self.read[next(iter(self.members))])
        for name, batches in self.read.items():
            kept = batches[: max(0, rounds - lost)] if name in failed else batches
            counted.update(one for batch in kept for one in batch)
        now = self.begun + rounds
        for one in self.members.values():
            one.advance(names, now, failed, now - lost)
        state = first.stream.state
        self.members = {n: self.members[n] for n in names if n in self.members}
        for name in names:
            if name not in self.members:
                stream = SampleStream(*self.settings)
                stream.load(state)
                self.members[name] = MemberSamples(stream, name, names, now, nothing)
        self.begun, self.read = now, {name: [] for name in names}
        return counted


def test_each_sample_is_read_once_while_members_change() -> None:
    for seed in range(30):
        draw = Random(seed)
        size, batch_size, passes = draw.randint(20, 90), draw.randint(1, 4), draw.randint(1, 3)
        names = [f"m{i}" for i in range(draw.randint(1, 4))]
        job, counted, born = Job(names, size, batch_size, passes, seed), Counter[int](), len(names)
        while not job.run(draw.randint(1, 6)):
            failed = [n for n in names if draw.random() < 0.2][: len(names) - 1]
            left = [n for n in names if n not in failed and draw.random() < 0.2]
            stay = [n for n in names if n not in (*failed, *left)]
            if not stay:
                stay, failed, left = names, [], []
            new = [f"m{born + i}" for i in range(draw.randint(0, 2))]
            born += len(new)
            counted += job.change([*stay, *new], failed, draw.randint(0, 3))
            names = [*stay, *new]
        counted += job.change(names, [], 0)
        unread = size * passes - counted.total()
        assert 0 <= unread < len(names)
        assert all(counted[i] <= passes for i in range(size))
        assert set(counted) <= set(range(size))


def test_without_changes_nothing_is_left_out() -> None:
    for members in (1, 2, 3, 5):
        names = [f"m{i}" for i in range(members)]
        job = Job(names, 50, 4, 2, 7)
        assert job.run(1000)
        lengths = {len(batches) for batches in job.read.values()}
        assert len(lengths) == 1
        assert job.change(names, [], 0) == Counter(dict.fromkeys(range(50), 2))


def test_the_order_is_that_of_one_member() -> None:
    """All members together read the same samples in a round as one member with larger batches."""
    alone = SampleStream(24, 6, 1, 3)
    together = SampleStream(24, 2, 1, 3)
    for number in range(alone.rounds(1)):
        parts = [together.batch(number, rank, 3) for rank in range(3)]
        assert alone.batch(number, 0, 1) == [one for part in parts for one in part]
    assert SampleStream(4, 2, 2, shuffle=False).batch(1, 0, 1) == [2, 3]


def test_a_loader_that_reads_ahead_is_refused() -> None:
    samples = MemberSamples(SampleStream(20, 2), "a", ["a", "b"], 0, nothing)
    for _ in range(3):
        samples.next_batch()
    with pytest.raises(RuntimeError, match="has read 3 batches in 2 iterations"):
        samples.advance(["a"], 2, [], 2)


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="batch_size"):
        SampleStream(10, 0)
