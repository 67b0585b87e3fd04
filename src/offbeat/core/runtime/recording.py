"""Recorder: interface of the sessions to an observer of a rank, and reports of their decisions."""

from __future__ import annotations

import os
import socket
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from offbeat.core.console import console
from offbeat.core.observers import Observer
from offbeat.core.plan import Plan
from offbeat.core.profile import Profile

if TYPE_CHECKING:
    from offbeat.core.runtime.engine import Engine
    from offbeat.core.runtime.session import Session


def process_facts() -> dict[str, Any]:
    """Return host and number (`pid`) of this process."""
    return {"host": socket.gethostname(), "pid": os.getpid()}


def joined_processes(everyone: Sequence[Any]) -> dict[int, dict[str, Any]]:
    """Return host and number of the processes that join, by rank.

    Args:
        everyone: by rank, facts that are sent when members join. The facts of a joining process
            have the key "joins".
    """
    return {rank: own["joins"] for rank, own in enumerate(everyone) if own and "joins" in own}


@dataclass(frozen=True)
class MemberChange:
    """Change of the members of a job, as one member has seen it.

    Attributes:
        epoch: number of the epoch that begins.
        iteration: its first iteration.
        members: names of the members, by rank.
        joined: names of the members that have joined.
        left: names of the members that have left on request.
        failed: names of the members that have failed.
        landed: number of messages in progress at a failure that count as received.
        skipped: number of messages in progress at a failure that do not.
        seconds: seconds without progress of this member.
        text: description.
    """

    epoch: int
    iteration: int
    members: Sequence[str]
    joined: Sequence[str]
    left: Sequence[str]
    failed: Sequence[str]
    landed: int
    skipped: int
    seconds: float
    text: str


class Recorder(Observer):
    """Recorder of one rank. A subclass overrides what it records; the base records nothing.

    Attributes:
        id: id of the run in checkpoints; None for a run that no checkpoint names.
        splits_every: iterations between two reads of torch's own times of a backward (DDP only).
        ends_at_signal: whether SIGTERM ends the record; not where a launcher ends the ranks.
        origin_s: `perf_counter` seconds at the start of the record.
        plan: plan that runs; None before planning, and for strategies without a plan.
        notes: facts about the run.
        warnings: warnings since the last block of the record.
        pace: adherence of an emulated host to its pace; None for a host at full speed.
        is_uneven: whether workers do not wait for each other, so that their iterations differ.
    """

    def __init__(self) -> None:
        self.splits_every = 1
        self.id: str | None = None
        self.ends_at_signal = False
        self.origin_s: float = time.perf_counter()
        self.plan: Plan | None = None
        self.notes: dict[str, Any] = {}
        self.warnings: list[str] = []
        self.pace: dict[str, float] | None = None
        self.is_uneven = False

    def start(
        self, strategy: str, plan: Plan | None, observed: int, profile: Profile | None = None
    ) -> None:
        """Begin the iterations of the strategy, after `observed` profiled iterations."""

    def set_plan(self, plan: Plan, profile: Profile | None = None) -> None:
        """Handle the plan that runs from now on, and the profile from which it was made; None: that
        of `start`."""
        self.plan = plan

    def on_load(self, record: str | None, iteration: int) -> None:
        """Handle a loaded checkpoint of a run with the id `record`; None: it was not recorded."""

    def set_sample(self, create: Callable[[], Any] | None) -> None:
        """Set the function that creates the sample of the parameters. None: their storage has
        changed."""

    def on_step_begin(self, iteration: int) -> None:
        """Handle the begin of `optimizer.step()`."""

    def on_step_end(self, iteration: int) -> None:
        """Handle the end of `optimizer.step()`, or of the forward that completes its update."""

    def decide(self, iteration: int, what: str, warning: str | None) -> None:
        """Record a decision of the runtime, such as a new plan or a fallback."""

    def on_members(self, change: MemberChange, joined: Mapping[int, Mapping[str, Any]]) -> None:
        """Record a change of the members of the job.

        Args:
            change: the change.
            joined: by rank of each member that has joined, its host and process (`pid`).
        """

    def joining_facts(self) -> dict[str, Any] | None:
        """Return what the observer of a joining process needs; None if it records nothing."""
        return None

    def attach(self, session: Session) -> None:
        """Handle the session that has been opened."""

    def end(self, how: str, text: str = "") -> None:
        """Record how the job ended: "ended", "raised", "signal", or "left" for a member that leaves
        it."""

    def write(self, bytes_sent: Mapping[str, int]) -> None:
        """Write the rest of the record, and close it."""


class Decisions:
    """Reports of a session about its decisions, in the record of each rank and on rank 0's stderr.

    Args:
        recorder: recorder of this rank; None: no record.
        engine: engine of this rank, whose iteration a report names.
    """

    def __init__(self, recorder: Recorder | None, engine: Engine) -> None:
        self._recorder = Recorder() if recorder is None else recorder
        self._engine = engine

    def record(self, what: str, warning: str | None = None) -> None:
        """Add a decision to the record."""
        self._recorder.decide(self._engine.iteration, what, warning)

    def print(self, what: str) -> None:
        """Add a decision to the record, and print it on rank 0."""
        self.record(what)
        if self._engine.control.rank == 0:
            console.print("decision", what, iteration=self._engine.iteration)

    def warn(self, what: str) -> None:
        """Add a decision to the record, and warn of it on rank 0."""
        warning = f"iteration {self._engine.iteration}: {what}"
        self.record(what, warning)
        if self._engine.control.rank == 0:
            warnings.warn(warning, stacklevel=2)
