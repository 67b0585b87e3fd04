"""Reports of a rank to the others by its heartbeat, and reports of failed ranks."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from offbeat.core.transport.agreement import Agreement
from offbeat.core.transport.failure_detector import (
    ABORTED,
    ACTIVE,
    FAILED,
    IN_SCRIPT,
    REPORTED,
    RUNNING,
    WAITING,
    FailureDetector,
    RankStatus,
)
from offbeat.core.transport.heartbeat import Heartbeat, LazyText, as_text
from offbeat.core.transport.peer_errors import describe_exception, is_peer_error, mark_peer_error

SHOWN = 16  # ranks in a report
STAYS_S = 2.0  # longest time for which rank 0 keeps its store open after a failure report
NOBODY = (
    "No rank is missing: all ranks are alive and waiting. The network between them may have "
    "failed, or they wait in different calls: one rank may have less data (see offbeat.join), or "
    "not every rank calls consolidate, save or load."
)
STORE_IS_SILENT = (
    "The store of rank 0 does not respond: rank 0 has failed, its host is gone, or the network "
    "between it and this rank is cut."
)
STORE_HAS_ENDED = (
    "Rank 0 has ended after a failed wait, and its store with it. The first report in the logs of "
    "all ranks names the cause."
)


class Reports(Agreement):
    """What a rank reports to the others by its heartbeat, and what it reports of them.

    Attributes:
        nodes: number of each rank's node, for reports; () if every rank is a node of its own.
        fails_on_silence: whether a rank without heartbeats counts as failed.
    """

    nodes: Sequence[int] = ()
    fails_on_silence = False
    _heartbeat: Heartbeat | None = None  # None for a process that trains alone

    @property
    def has_failed(self) -> bool:
        """Return whether an exception ends training on this rank: an uncaught one, or one that was
        published before."""
        published = self._heartbeat is not None and self._heartbeat.state == FAILED
        return published or getattr(sys, "last_value", None) is not None

    def abort(self) -> None:
        """Publish that this rank has stopped waiting, so that other ranks stop, too."""
        if self._heartbeat is not None and self._heartbeat.state in ACTIVE:
            self._heartbeat.publish(ABORTED, f"gave up {as_text(self._heartbeat.activity)}")

    def close(self, failure: BaseException | None = None) -> None:
        """Stop the heartbeat, and publish `failure` if this rank has failed."""
        if self._heartbeat is not None:
            reason = None if failure is None else f"failed with {describe_exception(failure)}"
            self._heartbeat.stop(reason)

    def set_iteration(self, iteration: int) -> None:
        """Set the iteration of this rank, published with its next heartbeat."""
        if self._heartbeat is not None:
            self._heartbeat.iteration = iteration

    def set_activity(self, activity: str) -> None:
        """Set the activity of this rank ("in forward"), published with its next heartbeat."""
        if self._heartbeat is not None:
            self._heartbeat.activity = activity

    def set_wait_in_torch(self, activity: str | None) -> None:
        """Set the state of this rank at the start of a wait in C++ code of torch, and at its end.

        Args:
            activity: activity during the wait; None at its end.
        """
        heartbeat = self._heartbeat
        if heartbeat is not None and heartbeat.state in ACTIVE:
            heartbeat.state = RUNNING if activity is None else WAITING
            heartbeat.activity = IN_SCRIPT if activity is None else activity

    @contextmanager
    def waiting(self, words: LazyText) -> Iterator[None]:
        """Set the state of this rank to `WAITING` while the body waits for other ranks.

        A RuntimeError that the body raises is marked as an error of a wait.
        """
        try:
            with nullcontext() if self._heartbeat is None else self._heartbeat.waiting(words):
                yield
        except RuntimeError as error:
            mark_peer_error(error)
            raise

    def statuses(self) -> list[dict[str, Any]]:
        """Return by rank the iteration, state and activity of its last heartbeat, and its age in
        seconds. A process that trains alone has no heartbeat."""
        heartbeat, now_s = self._heartbeat, time.monotonic()
        if heartbeat is None:
            return [{"age_s": 0.0, "iteration": -1, "state": RUNNING, "activity": IN_SCRIPT}]
        return [
            {
                "age_s": round(now_s - status.received_s, 3),
                "iteration": status.iteration,
                "state": status.state,
                "activity": status.activity,
            }
            for status in heartbeat.detector.statuses
        ]

    @property
    def detector(self) -> FailureDetector | None:
        """Failure detector of this job; None in a job of one rank."""
        return None if self._heartbeat is None else self._heartbeat.detector

    def blames_peers(self, error: BaseException) -> bool:
        """Return whether an error is the end of a wait for other ranks, and not this rank's own."""
        aborted = self._heartbeat is not None and self._heartbeat.state in (ABORTED, REPORTED)
        return aborted or is_peer_error(error, error.__traceback__)

    @property
    def needs_abort(self) -> bool:
        """Whether this rank needs to stop waiting, because another rank has failed or aborted."""
        detector = self.detector
        if detector is None:
            return False
        return detector.needs_abort or (self.fails_on_silence and bool(detector.dead_peers()))

    @property
    def has_lost_store(self) -> bool:
        """Whether a request to the store has failed."""
        detector = self.detector
        return detector is not None and detector.failed_request_s is not None

    def report_failure(self, waiting_in: int | None = None, waited_s: float = 0.0) -> str:
        """Return a report of the suspects, of the last status of every rank, and of the remedy.

        Publishes that this rank has aborted, waits for a heartbeat timeout so that a rank that has
        just died becomes suspect (up to 3 s), and publishes the suspects.

        Args:
            waiting_in: iteration in which this rank has waited, if it was not published.
            waited_s: seconds for which this rank has waited.
        """
        heartbeat = self._heartbeat
        if heartbeat is None:
            return ""
        if waiting_in is not None:
            heartbeat.iteration = waiting_in
        reason, detector = f"gave up {as_text(heartbeat.activity)}", heartbeat.detector
        heartbeat.publish(ABORTED, reason)
        heartbeat.wait_for_failed_peers()
        suspects = detector.suspects(waited_s)
        parts = [f"Rank {self._at(rank)} {detector.describe_suspect(rank)}." for rank in suspects]
        if detector.has_unexplained_store_loss:
            parts.append(STORE_IS_SILENT)
        elif not parts:
            parts.append(NOBODY if detector.store_lost_s is None else STORE_HAS_ENDED)
        parts.append(self._last_heard(detector.statuses))
        if remedy := detector.remedy(suspects, self.timeout_s):
            parts.append(remedy)
        heartbeat.publish(REPORTED, reason, suspects)
        heartbeat.keep_store_open(STAYS_S, excluded=suspects)
        return " ".join(parts)

    def _at(self, rank: int) -> str:
        node = f", node {self.nodes[rank]}" if self.nodes else ""
        return f"{rank} ({self.hosts[rank] if self.hosts else '?'}{node})"

    def _last_heard(self, statuses: Sequence[RankStatus]) -> str:
        """Return the last status of the first `SHOWN` ranks."""
        now_s, shown = time.monotonic(), []
        for rank, status in enumerate(statuses[:SHOWN]):
            age_s = now_s - status.received_s
            shown.append(f"rank {self._at(rank)}: {status}, {age_s:.0f} s ago")
        if self.world_size > SHOWN:
            shown.append(f"and {self.world_size - SHOWN} more")
        return "Last heard of: " + "; ".join(shown) + "."
