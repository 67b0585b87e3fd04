"""Changes of the members of a running job: requests at boundaries, and failures at any time.

At a boundary all ranks compare the version of the membership that each has seen, by one small
message. If it is new, the first rank proposes the next epoch. All members average their replicas
once. Then the remaining and the joining members connect to each other.

After a failure the survivors meet at the membership service. Each reports its iteration and, for
each link, the last message whose result it has. A message that a survivor has received lands on
all: the other survivors get its result. Any other message of parameters counts as skipped on all
ranks, so parameters stay as they are, and a later average includes the local steps. Any other
message of gradients is repeated among the survivors. The epoch begins with the
first iteration that no survivor has begun. Until then the ranks that are behind train alone.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.core.console import console
from offbeat.core.plan import Plan, is_vote_channel
from offbeat.core.runtime.member_samples import MemberSamples, Stream
from offbeat.core.runtime.members import LOOK_EVERY_S, JobMember, require_supported_plan
from offbeat.core.runtime.recording import MemberChange
from offbeat.core.strategy.interface import Strategy
from offbeat.core.transport.cluster import Cluster
from offbeat.core.transport.link import Message

if TYPE_CHECKING:
    from offbeat.core.runtime.plan_session import FlatSession
    from offbeat.membership import Epoch

END_S = 2.0  # longest wait for the service at the end of a job
FIRST = "first_iteration"


class MemberChanges:
    """Changes of the members of the job of one session.

    Args:
        member: this process as a member.
        session: session of this process.
        cluster: links and control of this process.

    Attributes:
        has_left: whether this process has left the job.
    """

    def __init__(self, member: JobMember, session: FlatSession, cluster: Cluster):
        self._member, self._session, self._cluster = member, session, cluster
        self._engine = session.engine
        self._engine.waiting.recover = self.recover
        self.has_left = False
        self._handled = -1  # newest version of the membership that all ranks have handled
        self._begins_at: int | None = None  # iteration in which the agreed epoch begins
        # By link: number and result of the last message that has landed, after a failure.
        self._results: dict[str, tuple[int, Sequence[Tensor]]] = {}
        self._change = _Change(0)
        self._begun = set(member.epoch.members)  # of the newest epoch that has begun
        self._united_for = -1  # number of the newest epoch before which replicas were averaged
        self._signalled = False
        self._install_handler()

    # ---- called by the session --------------------------------------------------------------

    def before_iteration(self) -> None:
        """Before the first forward of an iteration, join the other members after a failure, and
        begin an epoch that is due."""
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

    def require_supported(self, plan: Plan, strategy: Strategy) -> None:
        """Raise ValueError if a plan cannot run while members change."""
        require_supported_plan(plan, strategy, self._member.settings)

    def request_leave(self, reason: str) -> None:
        """Request to leave the job at the next boundary."""
        self._member.request_leave(reason)

    def close(self) -> None:
        """Leave the job, and record that at the service."""
        if not self.has_left:
            thread = threading.Thread(target=self._request, args=("ended",), daemon=True)
            thread.start()
            thread.join(END_S)  # the service may not respond
        self._member.close()
        self._restore_handler()

    def create_samples(self, stream: Stream) -> MemberSamples:
        """Return the batches of this member from the samples of the job."""
        member, begun = self._member, self._session.iteration
        return MemberSamples(
            stream, member.name, member.epoch.members, begun, self._begin_before_batch
        )

    def _begin_before_batch(self) -> None:
        """Begin an epoch that is due before samples of the next iteration are dealt. A failure may
        be noticed between iterations, when averages are awaited late."""
        if not self._session.is_in_iteration:
            self._begin_if_due()

    @property
    def _must_meet(self) -> bool:
        """Whether another member has reported a failure, or the store of the epoch is lost."""
        control = self._cluster.control
        return control.needs_abort or control.has_lost_store

    # ---- requests ---------------------------------------------------------------------------

    def _handle_requests(self) -> None:
        """Change the members at a boundary if there are requests."""
        agreed: list[Epoch] = []
        self.run(lambda: agreed.extend(self._agree_on_requests()))
        if agreed and not self.are_agreed:
            self._enter_epoch(agreed[0])

    def _agree_on_requests(self) -> Iterator[Epoch]:
        """Yield the next epoch if there are requests, after the replicas have been averaged."""
        from offbeat.membership import Epoch

        control = self._cluster.control
        newest = control.largest(self._member.watch.version)
        if newest <= self._handled:
            return
        own = None
        if control.rank == 0:
            iteration = self._session.iteration
            epoch = self._member.next_epoch(iteration, self._read_count(iteration))
            own = None if epoch is None else epoch.to_dict()
        given = control.gather(own)[0]
        self._handled = newest
        if given is not None:
            self._change = _Change(self._session.iteration)
            self._session.unite()
            self._united_for = Epoch.from_dict(given).number
            yield Epoch.from_dict(given)

    def _enter_epoch(self, epoch: Epoch) -> None:
        before, member = self._member.epoch, self._member
        if member.name not in epoch.members:
            self._leave()
            return
        self._change.note_members(before.members, epoch.members)
        self._drop_groups()
        self._begins_at = self._session.iteration
        try:
            self._connect(epoch)
            self._united_for = -1  # all members have completed the average before they connect
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
        self._cluster.reconnect()

    def _begin_if_due(self) -> None:
        """Begin the agreed epoch: open the links, plan, and send the state to joining members."""
        if self._begins_at is None or self._session.iteration < self._begins_at:
            return
        epoch, failure = self._member.epoch, None
        samples = self._session.samples
        if samples is not None:
            change = self._change
            samples.advance(epoch.members, self._begins_at, change.former_members, change.lost_from)
        self._results, self._handled = {}, -1  # links and joining members count anew
        try:
            self._cluster.reopen()
            self._session.begin_epoch(has_joining=bool(self._change.joined))
        except RuntimeError as error:
            failure = str(error)
        if failure is not None:
            self._meet_again(failure)
            self._begin_if_due()
            return
        self._begins_at, self._begun = None, set(epoch.members)
        self._session.report_change(self._change.describe(epoch, self._session.iteration))

    def _read_count(self, iteration: int) -> int:
        samples = self._session.samples
        return 0 if samples is None else samples.read_count(iteration)

    # ---- failures ---------------------------------------------------------------------------

    def recover(self, error: RuntimeError) -> None:
        """Agree with the surviving members on the outcome of all messages, and on the next epoch.

        Args:
            error: failure of this rank; raised if training cannot continue.
        """
        if self._begins_at is None:
            first, since_s = self._member.epoch.first_iteration, self._engine.waiting.since_s
            self._results, self._change = {}, _Change(first, since_s)
            earlier = self._session.iteration - self._engine.iteration
            for name, link in self._cluster.links.items():
                last = link.detach()
                if last is not None:
                    self._results[name] = last.order, last.tensors
                    if not is_vote_channel(name):
                        landed = last.iteration + earlier
                        self._change.lost_from = max(self._change.lost_from, landed + 1)
        self._meet_again(str(error))

    def _meet_again(self, failure: str) -> None:
        """Meet the surviving members, and connect to them, until this succeeds."""
        self._cluster.control.abort()
        while True:
            self._drop_groups()
            try:
                epoch = self._meet()
            except RuntimeError as error:
                raise RuntimeError(f"{failure}. {error}") from error
            if epoch is None:
                self._leave()
                return
            self._change.note_members(self._member.epoch.members, epoch.members, failed=True)
            self._change.lost_from = epoch.details["lost_from"]
            try:
                self._connect(epoch)
                self._exchange_results(epoch.details["landed"])
                self._take_average(epoch.details["united"])
            except RuntimeError as error:
                failure = str(error)
                continue
            break
        self._engine.run.settle(self._outcome)
        # Iterations of processes before this one count, too.
        self._begins_at = epoch.first_iteration

    def _drop_groups(self) -> None:
        """Destroy all process groups, so that other ranks do not wait for this rank."""
        self._engine.run.forget_errors()
        self._cluster.abandon()

    def _meet(self) -> Epoch | None:
        """Return the next epoch, on which all survivors agree; None if this member has left.

        If a requested change has failed, its epoch exists, and members of it have not begun. The
        survivors meet in that epoch, and its joining members request to join again.
        """
        member = self._member
        while True:
            following = member.membership.epoch(member.epoch.number + 1)
            if following is None or "landed" in following.details:
                break
            if member.name not in following.members:
                return None
            self._change.note_members(member.epoch.members, following.members)
            member.epoch = following
        before = member.epoch
        keys = member.membership.rendezvous(before.number)
        report = {
            "lost_from": self._change.lost_from,
            FIRST: self._session.iteration + self._has_begun,
            "results": {name: order for name, (order, _) in self._results.items()},
            "united": self._united_for == before.number,
        }
        keys.set(f"survivor/{member.name}", json.dumps(report).encode())
        end_s = time.monotonic() + self._cluster.timeout_s
        begun = [name for name in before.members if name in self._begun]
        missing = [name for name in begun if name != member.name]
        while (epoch := member.membership.epoch(before.number + 1)) is None:
            missing = [name for name in missing if not keys.check([f"survivor/{name}"])]
            waits = time.monotonic() < end_s
            if any(waits and not member.is_gone(name) for name in missing):
                time.sleep(LOOK_EVERY_S)
                continue
            alive = [name for name in begun if keys.check([f"survivor/{name}"])]
            self._require_enough(alive)
            reports = {n: json.loads(keys.get(f"survivor/{n}", 1.0)) for n in alive}
            first = max(one[FIRST] for one in reports.values())
            united = [name for name, one in reports.items() if one["united"]]
            lost_from = max(one["lost_from"] for one in reports.values())
            more = {
                "landed": find_landed(reports),
                # The average before a requested change contains all training before it.
                "lost_from": max(lost_from, before.first_iteration) if united else lost_from,
                "united": united,
            }
            read = self._read_count(first)
            epoch = member.propose(alive, first, read, before.details["addresses"], more)
        if member.name not in epoch.members:
            raise RuntimeError(
                "The other members continue without this one, whose report came too late; start it "
                "again to join the job"
            )
        return epoch

    @property
    def _has_begun(self) -> bool:
        """Whether the next iteration has begun, or its samples have been read."""
        samples, iteration = self._session.samples, self._session.iteration
        has_read = samples is not None and samples.has_read(iteration)
        return self._session.is_in_iteration or has_read

    def _require_enough(self, alive: Sequence[str]) -> None:
        least = self._member.settings.least
        if len(alive) < least:
            lost = [name for name in self._member.epoch.members if name not in alive]
            raise RuntimeError(
                f"{len(alive)} members are left after the failure of {', '.join(lost)}, and least "
                f"in Members is {least}; start the job again from its last checkpoint"
            )

    def _exchange_results(self, landed: Mapping[str, Any]) -> None:
        """Send the results of landed messages to the members that have not received them."""
        names = self._member.epoch.members
        for link, entry in sorted(landed.items()):
            holder = entry["holder"]
            for receiver in entry["missing"]:
                if self._member.name == holder:
                    for tensor in self._results[link][1]:
                        dist.send(tensor.detach().cpu().contiguous(), names.index(receiver))
                elif self._member.name == receiver:
                    message = self._engine.run.awaited_message(link, entry["order"])
                    received = [torch.empty_like(x, device="cpu") for x in message.tensors]
                    for tensor in received:
                        dist.recv(tensor, names.index(holder))
                    like = zip(received, message.tensors, strict=True)
                    results = [tensor.to(x.device) for tensor, x in like]
                    self._results[link] = entry["order"], results

    def _take_average(self, united: Sequence[str]) -> None:
        """Send the average before a requested change to the members that have not completed it.

        Args:
            united: names of the members that have.
        """
        names, own = self._member.epoch.members, self._member.name
        receivers = [name for name in names if name not in united] if united else []
        for receiver in receivers:
            for tensor in self._session.replica_tensors:
                if own == united[0]:
                    dist.send(tensor.cpu().contiguous(), names.index(receiver))
                elif own == receiver:
                    received = torch.empty_like(
                        tensor, device="cpu", memory_format=torch.contiguous_format
                    )
                    dist.recv(received, names.index(united[0]))
                    tensor.copy_(received)
        self._united_for = -1

    def _outcome(self, message: Message) -> Sequence[Tensor] | None:
        """Return the result of a message, or None if it counts as skipped."""
        landed = self._results.get(message.transfer.link)
        if landed is None or message.order > landed[0]:
            self._change.skipped += 1
            return None
        self._change.landed += 1
        return landed[1] if message.order == landed[0] else message.tensors

    # ---- SIGTERM ----------------------------------------------------------------------------

    def _install_handler(self) -> None:
        """Let SIGTERM request to leave, if it has its default action."""
        self._has_handler = (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        )
        if self._has_handler:
            signal.signal(signal.SIGTERM, self._on_signal)

    def _restore_handler(self) -> None:
        if self._has_handler and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._has_handler = False

    def _on_signal(self, *_: object) -> None:
        if self._signalled:  # a second signal ends the process at once
            self._restore_handler()
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

    def describe(self, epoch: Epoch, iteration: int) -> MemberChange:
        """Return the change for the record.

        Args:
            epoch: epoch that begins.
            iteration: its first iteration.
        """
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
            epoch.members,
            joined=tuple(self.joined),
            left=tuple(self._left),
            failed=tuple(self.failed),
            landed=self.landed,
            skipped=self.skipped,
            seconds=seconds,
            text=text,
        )


def find_landed(reports: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return by link the last message that a survivor has received, as its number (`order`), the
    first survivor that has its result (`holder`), and the survivors without it (`missing`).

    Args:
        reports: reports of the survivors by name.
    """
    landed = {}
    for link in sorted({link for report in reports.values() for link in report["results"]}):
        orders = {name: report["results"].get(link, -1) for name, report in reports.items()}
        order = max(orders.values())
        holder = next(name for name, one in orders.items() if one == order)
        missing = [name for name, one in orders.items() if one < order]
        landed[link] = {"order": order, "holder": holder, "missing": missing}
    return landed
