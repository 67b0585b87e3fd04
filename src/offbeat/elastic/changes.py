"""Changes of the members of a running job: requests at boundaries, and failures at any time.

At a boundary all ranks compare the version of the membership that each has seen, by one small
message. If it is new, the first rank proposes the next epoch. All members average their replicas
once. Then the remaining and the joining members connect to each other. A process that needs a large
state of an optimizer receives it before, while the members train (`member_feed`).

After a failure the survivors meet at the membership service (`member_meeting`). Each reports its
iteration and, for each link, the last message whose result it has. A message that a survivor has
received lands on all: the other survivors get its result. Any other message of parameters counts as
skipped on all ranks, so parameters stay as they are, and a later average includes the local steps.
Any other message of gradients is repeated among the survivors, or inside a node among its ranks.
The epoch begins with the first iteration that no survivor has begun. Until then the ranks that are
behind train alone. If another member fails before all of them have begun, the survivors meet again.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from torch import Tensor

from offbeat.core.console import console
from offbeat.core.plan import INSIDE, base_link, is_vote_channel
from offbeat.core.runtime.recording import MemberChange
from offbeat.core.transport.cluster import Cluster
from offbeat.core.transport.link import Message
from offbeat.elastic.feed import StateSenders
from offbeat.elastic.meeting import (
    Report,
    exchange_results,
    following_epoch,
    meet,
    send_average,
)
from offbeat.elastic.members import JobMember
from offbeat.elastic.node import member_of, rank_names
from offbeat.elastic.outcomes import (
    await_messages,
    awaited_message,
    awaited_messages,
    settle,
)
from offbeat.elastic.repeated_averages import EVERYWHERE, INSIDE_NODE
from offbeat.elastic.samples import MemberSamples, Stream

if TYPE_CHECKING:
    from offbeat.elastic.session import MemberSession
    from offbeat.membership import Epoch

T = TypeVar("T")
END_S = 2.0  # longest wait for the service at the end of a job
ENDS: dict[str, Any] = {}  # in place of an epoch: all members leave


class MemberChanges:
    """Changes of the members of the job of one session.

    Args:
        member: this process as a member.
        session: session of this process.
        cluster: links and control of this process.

    Attributes:
        has_left: whether this process has left the job.
        snapshot: saves a checkpoint when members have changed at a request; None: nothing does.
        senders: senders of the optimizer's state to joining processes.
    """

    def __init__(self, member: JobMember, session: MemberSession, cluster: Cluster):
        self._member, self._session, self._cluster = member, session, cluster
        self._engine = session.engine
        self._repeated = session.engine.waiting.repeated
        self._engine.waiting.recover = self._repeated.recover = self.recover
        self.has_left = False
        self.snapshot: Callable[[], Any] | None = None
        self._handled = -1  # newest version of the membership that all ranks have handled
        self._begins_at: int | None = None  # iteration in which the agreed epoch begins
        self._change = _Change(0)
        self._joining: set[str] = set()  # members of the agreed epoch that need the state
        self._needs_snapshot = False  # whether all replicas are equal when the epoch begins
        self._united = 0  # number of averages of whole replicas
        self._begin(member.epoch)
        self._signalled = False
        self.senders = StateSenders(member, session, cluster.timeout_s)
        self._install_handler()

    def _begin(self, epoch: Epoch) -> None:
        """Note that an epoch has begun on this rank."""
        self._begun, self._begun_number = set(epoch.members), epoch.number
        self._unions, self._united_at = 0, -1  # averages of whole replicas; iteration of the last
        # By link: number and result of the last message that has landed, after a failure.
        self._results: dict[str, tuple[int, Sequence[Tensor]]] = {}
        self._received = set[str]()  # links of those results that other ranks have sent
        # Number and samples of an epoch that has failed on this rank after all ranks had planned.
        self._prepared: tuple[int, Any] | None = None
        self._repeated.restart()

    # ---- called by the session --------------------------------------------------------------

    def before_iteration(self) -> None:
        """Before the samples or the first forward of an iteration, join the other members after a
        failure, and begin an epoch that is due."""
        if self._session.is_in_iteration or self.has_left:
            return
        if self._begins_at is None and self._must_meet:
            self.recover(RuntimeError("another member has failed"))
        self._begin_if_due()

    def on_iteration_end(self) -> None:
        """At the end of an iteration, begin an epoch that is due, or handle requests if a period of
        the plan ends."""
        if self._begins_at is None and self._session.is_at_boundary:
            self._handle_requests()
        self._begin_if_due()

    @property
    def are_agreed(self) -> bool:
        """Whether the members of the next epoch are agreed, and it has not begun."""
        return self._begins_at is not None

    @property
    def has_ended_epoch(self) -> bool:
        """Whether the epoch has ended on this rank, by a failure of a member or because this
        process has left, and the next one has not begun."""
        return self.are_agreed or self.has_left

    def run(self, exchange: Callable[[], None]) -> None:
        """Run an exchange of all members. If another member fails in it, meet the survivors."""
        try:
            exchange()
            return
        except RuntimeError as error:
            if not self._cluster.control.blames_peers(error):
                raise
            failure = str(error)
        self.recover(RuntimeError(failure))

    def call(self, act: Callable[[], T]) -> tuple[T | None, str]:
        """Return the result of a call that every member makes between two iterations. If another
        member fails in it, return None and the failed members, as text."""
        self._engine.flush()
        await_messages(self._engine)  # so that `act` waits for no message
        self._begin_if_due()
        results, before = list[T](), self._member.epoch.members
        self.run(lambda: results.append(act()))
        if results:
            return results[0], ""
        self._begin_if_due()
        lost = [name for name in before if name not in self._member.epoch.members]
        return None, ", ".join(lost)

    def unite(self, act: Callable[[], None], tensors: Callable[[], Sequence[Tensor]]) -> None:
        """Run an average of whole replicas that every member calls between two iterations. After
        the failure of a member, the survivors complete or repeat it.

        Args:
            act: the average. It changes the replica only after all ranks have its result.
            tensors: returns the tensors of the replica that it changes.

        Raises:
            RuntimeError: it has failed, although no member has.
        """
        while not self.has_left:  # in the drain before
            self._begin_if_due()
            before, done = self._member.epoch.members, self._united
            self._united_tensors = tensors
            self.run(lambda: self._unite(act))
            has_failed = self._united == done
            self._begin_if_due()
            if self.has_left or not has_failed:
                return
            if before == self._member.epoch.members:
                raise RuntimeError(
                    "an average of all replicas has failed, although no member has; call "
                    "consolidate() on every rank, in the same place of the script"
                )

    def _unite(self, act: Callable[[], None]) -> None:
        act()
        self._note_union()
        self._cluster.control.gather(None)  # no rank trains on before all have the average

    def _note_union(self) -> None:
        """Note that this rank has completed an average of whole replicas."""
        self._unions, self._united = self._unions + 1, self._united + 1
        self._united_at = self._session.iteration

    def request_leave(self, reason: str) -> None:
        """Request to leave the job at the next boundary."""
        self._member.request_leave(reason)

    def close(self) -> None:
        """Leave the job, and record that at the service."""
        self.senders.close()
        if not self.has_left:
            thread = threading.Thread(target=self._request, args=("ended",), daemon=True)
            thread.start()
            thread.join(END_S)  # the service may not respond
        self._member.close()
        self.restore_handler()

    def create_samples(self, stream: Stream) -> MemberSamples:
        """Return the batches of this member from the samples of the job."""
        member, begun = self._member, self._session.iteration
        names = member.rank_names
        return MemberSamples(stream, member.rank_name, names, begun, self.before_iteration)

    @property
    def _must_meet(self) -> bool:
        """Whether another member has reported a failure, or the store of the epoch is lost."""
        control = self._cluster.control
        return control.needs_abort or control.has_lost_store

    # ---- requests ---------------------------------------------------------------------------

    def _handle_requests(self) -> None:
        """Change the members at a boundary if there are requests."""
        agreed: list[Epoch | None] = []
        self.run(lambda: agreed.extend(self._agree_on_requests()))
        if not agreed or self.has_ended_epoch:
            return
        if agreed[0] is not None:
            self._enter_epoch(agreed[0])
            return
        self.save_snapshot(waits=True)
        if not self.are_agreed:  # no member has failed meanwhile
            self._leave()

    def _agree_on_requests(self) -> Iterator[Epoch | None]:
        """Yield the next epoch if there are requests, after the replicas have been averaged; None
        if all members leave."""
        from offbeat.membership import Epoch, MembershipError

        control, member = self._cluster.control, self._member
        newest = max(control.gather(member.watch.version))
        if newest <= self._handled:
            return
        own, has_answer = None, True
        if control.rank == 0:
            iteration = self._session.iteration
            try:
                epoch = member.next_epoch(iteration, self._read_count(iteration), self.senders)
                own = epoch.to_dict() if epoch is not None else ENDS if member.all_leave else None
            except MembershipError:
                has_answer = False
        given, has_answer = control.gather((own, has_answer))[0]
        if has_answer:  # otherwise the next boundary repeats the request
            self._handled = newest
        if given is not None:
            self._change = _Change(self._session.iteration)
            self._united_tensors = lambda: self._session.replica_tensors
            self._session.unite()
            if self.has_ended_epoch:  # a member has failed while messages were completed
                return
            self._note_union()
            yield None if given == ENDS else Epoch.from_dict(given)

    def save_snapshot(self, *, waits: bool = False) -> None:
        """Save a checkpoint if the job keeps them. All replicas must be equal.

        Args:
            waits: whether to wait until it is on the disk.
        """
        if self.snapshot is None:
            return
        saving = self.snapshot()
        if waits:
            with suppress(RuntimeError):  # printed by the thread that saves
                saving.wait()

    def _enter_epoch(self, epoch: Epoch) -> None:
        before, member = self._member.epoch, self._member
        if member.name not in epoch.members:
            self._leave()
            return
        self._change.note_members(before.members, epoch.members)
        self._drop_groups()
        self._begins_at = self._session.iteration
        self._joining, self._needs_snapshot = set(self._change.joined), True
        try:
            self._connect(epoch)
            return
        except RuntimeError as error:
            failure = str(error)
        self._meet_again(failure)

    def _leave(self) -> None:
        """Leave the job at a boundary."""
        self.has_left = True
        if self._session.samples is not None:
            self._session.samples.has_ended = True
        text = f"left the job after iteration {self._session.iteration - 1}"
        console.print("members", text)
        self._session.end_record(text)
        self._session.close()
        if self._signalled:
            signal.raise_signal(signal.SIGTERM)

    def _connect(self, epoch: Epoch) -> None:
        """Connect to the members of an epoch. Links are opened when the epoch begins."""
        self._member.epoch = epoch
        self._member.open_group()
        self._cluster.reconnect(self._member.topology)
        self._repeated.inside = self._cluster.node

    def _begin_if_due(self) -> None:
        """Begin the agreed epoch: open the links, plan, and send the state to joining members."""
        if self._begins_at is None or self._session.iteration < self._begins_at:
            return
        epoch, failure = self._member.epoch, None
        samples, change = self._session.samples, self._change
        before = None
        if samples is not None:
            before, lost_from = samples.capture(), change.lost_from
            names = self._member.rank_names
            samples.advance(names, self._begins_at, change.former_members, lost_from)
        self._handled = -1  # joining members count anew
        try:
            self._cluster.reopen()
            names = enumerate(self._member.rank_names)
            joining = [rank for rank, name in names if member_of(name) in self._joining]
            are_united = self._united_at == self._session.iteration
            self._session.begin_epoch(joining, are_united=are_united)
        except RuntimeError as error:
            if not self._cluster.control.blames_peers(error):
                raise
            failure = str(error)
        if failure is not None:
            self._prepared = epoch.number, samples and samples.capture()
            if samples is not None:
                samples.restore(before)
            self._meet_again(failure)
            self._begin_if_due()
            return
        self._begins_at = None
        self._begin(epoch)
        iteration, ranks = self._session.iteration, self._member.node.size
        self._session.report_change(self._change.describe(epoch, iteration, ranks))
        if self._needs_snapshot or self._session.has_equal_replicas:
            self.save_snapshot()

    def _read_count(self, iteration: int) -> int:
        samples = self._session.samples
        return 0 if samples is None else samples.read_count(iteration)

    # ---- failures ---------------------------------------------------------------------------

    def recover(self, error: RuntimeError) -> None:
        """Agree with the surviving members on the outcome of all messages, and on the next epoch.

        Args:
            error: failure of this rank; raised if training cannot continue.
        """
        if not self._session.has_plan:
            self.end_without_plan(error)
        if self._begins_at is None:
            first, since_s = self._member.epoch.first_iteration, self._engine.waiting.since_s
            self._results, self._change = {}, _Change(first, since_s)
            earlier = self._session.iteration - self._engine.iteration
            for name, link in self._cluster.links.items():
                last = link.detach()
                if last is not None:
                    # Compute reads the results of this message and of earlier ones.
                    self._cluster.device.follow(last.end)
                    self._results[name] = last.order, last.tensors
                    if not (is_vote_channel(name) or base_link(name) == INSIDE):
                        landed = last.iteration + earlier
                        self._change.lost_from = max(self._change.lost_from, landed + 1)
            if self._united_at == self._session.iteration:  # the average has all iterations
                self._change.lost_from = self._session.iteration
        self._meet_again(str(error))

    def end_without_plan(self, error: RuntimeError) -> NoReturn:
        """Raise RuntimeError after a failure while the first iterations are measured."""
        member = self._member
        self._cluster.control.abort()
        self._drop_groups()
        others = [name for name in member.rank_names if name != member.rank_name]
        lost = ", ".join(map(member.describe_rank, member.lost_ranks(others)))
        raise RuntimeError(
            f"{error}. {lost or 'Another member'} has failed while the first iterations are "
            "measured, before there is a plan; start all members again, or give offbeat.prepare a "
            "profile"
        ) from None

    def _meet_again(self, failure: str) -> None:
        """Meet the surviving members, and connect to them, until this succeeds."""
        self._cluster.control.abort()
        while True:
            self._member.give_up()
            self._drop_groups()
            try:
                epoch = self._meet()
            except RuntimeError as error:
                raise RuntimeError(f"{failure}. {error}") from error
            if epoch is None:
                settle(self._engine, lambda _: (None, False))  # nothing waits any more
                self._repeated.is_alone = True  # its groups have ended
                self._leave()
                return
            self._change.note_members(self._member.epoch.members, epoch.members, failed=True)
            self._change.lost_from = epoch.details["lost_from"]
            # Only ranks that have the state of the job have reported.
            self._joining, self._needs_snapshot = set(), False
            self._complete_begin(epoch.details["begun"])
            try:
                self._connect(epoch)
                landed = epoch.details["landed"]
                results = self._results | self._repeated.results
                received = exchange_results(self._member, landed, results, self._awaited_tensors)
                tensors = self._united_tensors() if epoch.details["ununited"] else ()
                if send_average(self._member, epoch.details, tensors):
                    self._note_union()
            except RuntimeError as error:
                failure = str(error)
                continue
            break
        self._results = results
        self._received |= received
        self._repeated.results |= {n: results[n] for n in results if n in self._repeated.awaited}
        settle(self._engine, self._outcome)
        # Iterations of processes before this one count, too.
        self._begins_at = epoch.first_iteration

    def _complete_begin(self, number: int) -> None:
        """Begin an epoch that has begun on another rank, and has failed on this one after all ranks
        had adopted its plan."""
        if self._prepared is not None and self._prepared[0] == number:
            samples = self._session.samples
            prepared = self._prepared[1]
            self._begin(self._member.epoch)
            if samples is not None:
                samples.restore(prepared)
        self._prepared = None

    def _awaited_tensors(self, link: str, order: int) -> Sequence[Tensor]:
        """Return the tensors of a message that this rank awaits."""
        if link in (EVERYWHERE, INSIDE_NODE):
            return self._repeated.awaited[link]
        return awaited_message(self._engine, link, order).tensors

    def _drop_groups(self) -> None:
        """Destroy all process groups, so that other ranks do not wait for this rank."""
        self._repeated.inside = None
        for message in awaited_messages(self._engine):
            message.forget_error()
        self._cluster.abandon()

    def _meet(self) -> Epoch | None:
        """Return the next epoch, on which all survivors agree; None if this member has left.

        If a requested change has failed, its epoch exists, and members of it have not begun. The
        survivors meet in that epoch, and its joining members request to join again.
        """
        member = self._member
        while True:
            following = following_epoch(member)
            if following is None or "landed" in following.details:
                break
            if member.name not in following.members:
                return None
            self._change.note_members(member.epoch.members, following.members)
            member.epoch = following
        results = self._results | self._repeated.results
        report = Report(
            begun=self._begun_number,
            first_iteration=self._session.first_free_iteration,
            lost_from=self._change.lost_from,
            results={name: order for name, (order, _) in results.items()},
            unions=self._unions,
            has_united=self._united_at == self._session.iteration,
        )
        timeout_s = self._cluster.timeout_s
        return meet(member, self._begun, report, self._read_count, timeout_s)

    def _outcome(self, message: Message) -> tuple[Sequence[Tensor] | None, bool]:
        """Return the result of a message, or None if it counts as skipped; and whether another rank
        has sent it."""
        link = message.transfer.link
        landed = self._results.get(link)
        if landed is None or message.order > landed[0]:
            self._change.skipped += 1
            return None, False
        self._change.landed += 1
        if message.order < landed[0]:
            return message.tensors, False
        return landed[1], link in self._received

    # ---- SIGTERM ----------------------------------------------------------------------------

    def _install_handler(self) -> None:
        """Let SIGTERM request to leave, if it has its default action."""
        self._has_handler = (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        )
        if self._has_handler:
            signal.signal(signal.SIGTERM, self._on_signal)

    def restore_handler(self) -> None:
        """Restore the default action of SIGTERM."""
        if self._has_handler and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._has_handler = False

    def _on_signal(self, *_: object) -> None:
        if self._signalled:  # a second signal ends the process at once
            self.restore_handler()
            signal.raise_signal(signal.SIGTERM)
        self._signalled = True
        threading.Thread(target=self._request, args=("SIGTERM",), daemon=True).start()

    def _request(self, reason: str) -> None:
        with suppress(RuntimeError):  # without the service the job cannot change
            self._member.request_leave(reason)


class _Change:
    """Difference between two epochs, for the record.

    Args:
        lost_from: first iteration whose training is lost with the members that fail, or leave.
        since_s: monotonic time since which this rank waits; None for now.
    """

    def __init__(self, lost_from: int, since_s: float | None = None) -> None:
        self.lost_from = lost_from
        self._begun_s = time.monotonic() if since_s is None else since_s
        self.joined: list[str] = []
        self._left: list[str] = []
        self.failed: list[str] = []
        self.landed = self.skipped = 0

    def note_members(
        self, before: Sequence[str], after: Sequence[str], *, failed: bool = False
    ) -> None:
        """Add the difference between the members of two epochs."""
        self.joined += [name for name in after if name not in before]
        gone = [name for name in before if name not in after]
        self.joined = [name for name in self.joined if name not in gone]
        (self.failed if failed else self._left).extend(gone)

    @property
    def former_members(self) -> list[str]:
        """Return the names of all former members."""
        return [*self._left, *self.failed]

    def describe(self, epoch: Epoch, iteration: int, ranks: int) -> MemberChange:
        """Return the change for the record.

        Args:
            epoch: epoch that begins.
            iteration: its first iteration.
            ranks: number of ranks of each member. The record has the names of all ranks.
        """
        groups = epoch.members, self.joined, self._left, self.failed
        members, joined, left, failed = (
            tuple(rank_names(dict.fromkeys(group, ranks))) for group in groups
        )
        parts = [
            f"{', '.join(names)} {what}"
            for names, what in (
                (self._left, "left"),
                (self.failed, "failed"),
                (self.joined, "joined"),
            )
            if names
        ]
        if self.failed:
            parts.append(f"messages in progress: {self.landed} landed, {self.skipped} skipped")
        seconds = time.monotonic() - self._begun_s
        count = len(epoch.members)
        text = f"{count} members: {'; '.join(parts) or 'none changed'}; {seconds:.2f} s"
        return MemberChange(
            epoch.number,
            iteration,
            members,
            joined=joined,
            left=left,
            failed=failed,
            landed=self.landed,
            skipped=self.skipped,
            seconds=seconds,
            text=text,
        )
