"""Job of which one process is stopped until the others have gone on without it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from cases.member_jobs import Outcome, Scenario, train_member
from offbeat.core.runtime.waiting import Waiting
from offbeat.core.transport.link import LinkThread, Message
from offbeat.elastic import changes as member_changes
from offbeat.elastic.changes import MemberChanges

STOPPED, WAKING = 1, 0  # process that is stopped, and the one that lets it continue
STOPS_AT = 5  # iteration in whose message it is stopped
# Timeouts of the waits for this process, in seconds. All other waits have that of the scenario.
MESSAGE_S, MEETING_S = 1.0, 5.0


def train(address: str, scenario: Scenario) -> Outcome:
    """Train as one process of a scenario whose folder is empty."""
    who, pid = int(os.environ["RANK"]), Path(scenario.folder) / "pid"
    if who == STOPPED:
        _stop_in_message(pid)
    else:
        _shorten_waits()
    if who == WAKING:
        _wake_after_epoch(pid)
    return train_member(address, scenario)


def _stop_in_message(pid: Path) -> None:
    send = LinkThread._send

    def stop_and_send(link: LinkThread, message: Message) -> None:
        if message.iteration == STOPS_AT:
            pid.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        send(link, message)

    LinkThread._send = stop_and_send  # type: ignore[method-assign]


def _shorten_waits() -> None:
    """Shorten the wait for the message in which the process is stopped, and for its report."""
    wait, meet = Waiting.wait, member_changes.meet

    def wait_for_message(self: Waiting, message: Message, *args: Any) -> None:
        usual_s = self._timeout_s
        self._timeout_s = MESSAGE_S if message.iteration == STOPS_AT else usual_s
        try:
            wait(self, message, *args)
        finally:
            self._timeout_s = usual_s

    def meet_others(member: Any, begun: Any, report: Any, read_count: Any, _: float) -> Any:
        return meet(member, begun, report, read_count, MEETING_S)

    Waiting.wait = wait_for_message  # type: ignore[method-assign]
    member_changes.meet = meet_others


def _wake_after_epoch(pid: Path) -> None:
    """Let the stopped process continue when the epoch without it has begun."""
    begin = MemberChanges._begin

    def begin_and_wake(self: MemberChanges, epoch: Any) -> None:
        begin(self, epoch)
        if epoch.number == 1:
            os.kill(int(pid.read_text()), signal.SIGCONT)

    MemberChanges._begin = begin_and_wake  # type: ignore[method-assign]
