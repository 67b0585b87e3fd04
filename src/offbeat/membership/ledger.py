"""Registry with a journal and with the withdrawal of requests of silent processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from offbeat.membership.errors import MembershipError
from offbeat.membership.journal import Journal, replay
from offbeat.membership.registry import Answer, Command, Registry

RENEWAL_S = 30.0  # a join request that is not renewed for this time is withdrawn
SYNCED = {"propose", "join", "leave", "death", "withdraw"}  # operations that outlast the host


class JournalError(MembershipError):
    """The journal cannot be written. The command has no effect."""


class Ledger:
    """Executes commands on a registry. One thread may use it at a time.

    Args:
        journal: journal that restores the state; None keeps the state in memory alone.
        clock: monotonic time in seconds.
    """

    def __init__(self, journal: Journal | None = None, clock: Callable[[], float] = time.monotonic):
        self.registry, self._journal, self._clock = Registry(), journal, clock
        if journal is not None:
            try:
                replay(journal, self.registry.restore, self._apply)
            except BaseException:
                journal.close()
                raise
            self._shorten(journal)
        self._renewed_s: dict[str, float] = {}

    def _apply(self, command: Command) -> None:
        if (commit := self.registry.answer(command).commit) is not None:
            commit()

    def execute(self, command: object) -> Answer:
        """Return the answer to a command, after its change has been written and applied.

        Raises:
            RequestRefusedError, EpochReplacedError: as `Registry.answer`.
            JournalError: the journal cannot be written, as on a full disk.
        """
        answer = self.registry.answer(command)
        assert isinstance(command, dict)
        if answer.commit is not None:
            self._write(command)
            answer.commit()
        self._renew(command)
        return answer

    def withdraw_expired(self) -> None:
        """Withdraw the join requests that were not renewed for `RENEWAL_S` seconds.

        The joining process has ended, or cannot reach the service.

        Raises:
            JournalError: the journal cannot be written.
        """
        now = self._clock()
        joining = [request.member for request in self.registry.state.joining]
        # A service that has restarted grants the whole time.
        self._renewed_s = {name: self._renewed_s.get(name, now) for name in joining}
        for member, renewed_s in list(self._renewed_s.items()):
            if now - renewed_s > RENEWAL_S:
                self.execute({"op": "withdraw", "member": member})

    def close(self) -> None:
        """Close the journal."""
        if self._journal is not None:
            self._journal.close()

    def _renew(self, command: Command) -> None:
        member = command.get("member")
        if command["op"] == "join":
            member = command["request"]["member"]
        if isinstance(member, str) and (command["op"] == "join" or member in self._renewed_s):
            self._renewed_s[member] = self._clock()

    def _shorten(self, journal: Journal) -> None:
        """Replace the commands of the journal by a snapshot, unless the disk is full."""
        with suppress(OSError):
            journal.rewrite(self.registry.snapshot())

    def _write(self, command: Command) -> None:
        if self._journal is None:
            return
        try:
            if self._journal.is_long:
                self._shorten(self._journal)
            self._journal.append(command, sync=command["op"] in SYNCED)
        except OSError as error:
            raise JournalError(
                f"the journal ({error.filename}) cannot be written: {error.strerror}; free space "
                "on that disk"
            ) from error
