"""Checkpoints of jobs whose members change."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases.member_jobs import (
    Outcome,
    Scenario,
    epochs_of,
    membership_service,
    train_member,
)
from harness.ranks import watch_ranks

from offbeat import LocalSGD


def train(address: str, scenario: Scenario) -> list[Outcome | None]:
    """Run a scenario. Return the outcomes by process, None for killed ones."""
    killed = [*scenario.inject]
    ended = watch_ranks(
        scenario.processes, train_member, address, scenario, timeout_s=110, doomed=killed
    )
    for one in ended:
        assert one.rank in killed or not one.kind, one.error + one.traceback
    return [one.result for one in ended]


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("place", ["end in save", "end in write"])
def test_a_member_dies_while_a_checkpoint_is_saved(place: str, tmp_path: Path) -> None:
    """The others train on. The checkpoint is not saved, those before and after it are."""
    scenario = Scenario(
        LocalSGD(period=3), 12, inject={1: place}, saves=(1, 4, 8), folder=str(tmp_path)
    )
    with membership_service() as address:
        outcomes = train(address, scenario)
        epochs = epochs_of(address)
    assert [len(epoch.members) for epoch in epochs] == [3, 2]
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome is not None
        assert [*outcome.weights] == [*range(12)]
        first, second, third = outcome.saved
        assert first == "000001-iteration-2"
        assert "was not saved" in second
        assert third.endswith("-iteration-9")
    assert names_in(tmp_path) == sorted(["000001-iteration-2", third])


def test_a_job_starts_again_with_another_number_of_members(tmp_path: Path) -> None:
    """A snapshot follows each change of members, and the end of all members. The next job uses the
    same journal, continues from the average, and reads the rest of the samples."""
    first = Scenario(
        LocalSGD(period=3), 100, leaves={2: 4, 0: 7, 1: 7}, samples=301, folder=str(tmp_path),
        snapshots=True,
    )  # fmt: skip
    again = Scenario(
        LocalSGD(period=3), 100, first=3, samples=301, folder=str(tmp_path), snapshots=True
    )
    with membership_service() as address:
        before = [one for one in train(address, first) if one is not None]
        assert [name.partition("-")[2] for name in names_in(tmp_path)] == [
            "iteration-6",
            "iteration-9",
        ]
        after = [one for one in train(address, again) if one is not None]
        epochs = epochs_of(address)
    assert [len(epoch.members) for epoch in epochs] == [3, 2, 3]
    assert all(one.has_left for one in before)
    last = before[0].weights[8]
    for one in (*after, before[1]):
        begun = one.start if 9 in one.weights else one.weights[8]
        assert all(last[name].equal(begun[name]) for name in last)
    assert all(min(one.weights) == 9 for one in after)
    read = [i for one in (*before, *after) for batch in one.samples.values() for i in batch]
    assert len(read) == len(set(read)) > 301 - 3
