"""Samples that this member reads from the stream of its job."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from offbeat.elastic.node import member_of


class Stream(Protocol):
    """Samples of a job, see `offbeat.data.sample_stream.SampleStream`."""

    @property
    def settings(self) -> dict[str, Any]: ...

    @property
    def state(self) -> Sequence[tuple[int, int]]: ...

    def load(self, state: Any, /) -> None: ...

    def rounds(self, members: int, /) -> int: ...

    def batch(self, number: int, rank: int, members: int, /) -> list[int]: ...

    def read_count(self, rounds: int, members: int, /) -> int: ...

    def advance(
        self, rounds: int, members: int, lost: Mapping[int, int] | None = None, /
    ) -> None: ...


class MemberSamples:
    """Batches of this rank between changes of the members.

    Args:
        stream: samples of the job.
        name: name of this rank.
        members: names of all ranks of all members.
        begun: iteration with which the present members have begun.
        before_batch: begins a change of the members that is due, before a batch is read.

    Attributes:
        stream: samples of the job.
        has_ended: whether this member has left the job.
    """

    def __init__(
        self,
        stream: Stream,
        name: str,
        members: Sequence[str],
        begun: int,
        before_batch: Callable[[], None],
    ):
        self.stream, self.has_ended, self._name = stream, False, name
        self._before_batch = before_batch
        self._set_members(members, begun)

    def _set_members(self, members: Sequence[str], begun: int) -> None:
        self._members, self._begun, self._read = tuple(members), begun, 0

    def capture(self) -> Any:
        """Return the state of this object, for `restore`."""
        return self.stream.state, self._members, self._begun, self._read

    def restore(self, state: Any) -> None:
        """Restore a state after a change of members that has failed."""
        positions, self._members, self._begun, self._read = state
        self.stream.load(positions)

    @property
    def unread(self) -> Sequence[tuple[int, int]]:
        """Positions of the stream that the members have not read after equally many rounds."""
        before = self.stream.state
        self.stream.advance(self._read, len(self._members))
        after = self.stream.state
        self.stream.load(before)
        return after

    def resume(self, positions: Sequence[tuple[int, int]] | None, iteration: int) -> None:
        """Continue before an iteration, from the positions that a saved job has not read; None
        keeps those of this object."""
        if positions is not None:
            self.stream.load(positions)
        self._begun, self._read = iteration, 0

    def next_batch(self) -> list[int] | None:
        """Return the samples of the next iteration; None if no samples remain for all members, or
        if this member has left."""
        self._before_batch()
        count = len(self._members)
        if self.has_ended or self._read == self.stream.rounds(count):
            return None
        self._read += 1
        return self.stream.batch(self._read - 1, self._members.index(self._name), count)

    def read_count(self, iteration: int) -> int:
        """Return the number of samples that all members have read before an iteration."""
        return self.stream.read_count(iteration - self._begun, len(self._members))

    def has_read(self, iteration: int) -> bool:
        """Return whether this member has read the batch of an iteration."""
        return self._read > iteration - self._begun

    def advance(
        self, members: Sequence[str], iteration: int, gone: Collection[str], lost_from: int
    ) -> None:
        """Deal the rest of the stream to other members.

        Args:
            members: names of all ranks of the members.
            iteration: iteration with which they begin.
            gone: names of the members that have failed or left.
            lost_from: first iteration whose training was lost with them.

        Raises:
            RuntimeError: this member has not read one batch in each iteration.
        """
        rounds = iteration - self._begun
        if self._read != rounds:
            raise RuntimeError(
                f"the data loader has read {self._read} batches in {rounds} iterations since the "
                "last change of members, so samples would be lost; read one batch in each "
                "iteration, with num_workers=0"
            )
        ranks = [rank for rank, name in enumerate(self._members) if member_of(name) in gone]
        first = max(lost_from - self._begun, 0)
        self.stream.advance(rounds, len(self._members), dict.fromkeys(ranks, first))
        self._set_members(members, iteration)


def require_equal_settings(own: Mapping[str, Any], others: Mapping[str, Any]) -> None:
    """Raise ValueError if the stream of a joining member is not that of the job."""
    for name, value in own.items():
        if others.get(name) != value:
            raise ValueError(
                f"{name} ({value}) of the samples must be that of the running job "
                f"({others.get(name)}); create MemberSampler with the same arguments everywhere"
            )
