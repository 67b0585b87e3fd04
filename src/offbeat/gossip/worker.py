"""Worker of a gossip job: the thread of its gossip, and what the training thread asks of it.

Exchanges are in `exchanging`, neighbours and news in `neighbours`, joining workers in `joining`,
the unit of time and constants in `agreement`, sums over all workers in `tree_reductions`.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial

import torch
from torch import Tensor

from offbeat.core.buckets.checksum import checksum
from offbeat.gossip.agreement import Agreements
from offbeat.gossip.chunks import Wire
from offbeat.gossip.clock import Clock
from offbeat.gossip.exchanging import Exchanging
from offbeat.gossip.joining import Admission, Place
from offbeat.gossip.neighbours import Neighbours
from offbeat.gossip.peers import Address, Peers
from offbeat.gossip.protocol import Kind, ids_text
from offbeat.gossip.settings import Member, Settings
from offbeat.gossip.state import State as Shared
from offbeat.gossip.tree_reduction import TreeReduction
from offbeat.gossip.tree_reductions import AWAY, TreeReductions
from offbeat.gossip.view import View

DRAIN_S = 1.0  # longest time to send queued frames after a failure
NOTHING_ELSE = torch.empty(0, dtype=torch.uint8, device="cpu")


class Gossip:
    """Gossip of worker `me`, with its own thread.

    Args:
        me: id of this worker.
        settings: settings of the job.
        shared: parameters, shared with the training thread.
        wire: chunks of the parameters.
        clock: common clock.
        secret: secret of the job.
        addresses: addresses of the neighbours.
        door: socket on which this worker accepts connections.
        place: place in a running job, for a joining worker; otherwise None.
        luggage: callable that returns the initial state for a joining worker, mixed up to a label.
    """

    def __init__(
        self,
        me: int,
        settings: Settings,
        shared: Shared,
        wire: Wire,
        clock: Clock,
        secret: bytes,
        addresses: Mapping[int, Address],
        door: socket.socket,
        *,
        place: Place | None = None,
        luggage: Callable[[float], Tensor] = lambda _: NOTHING_ELSE,
    ):
        self.me, self._settings, self.clock = me, settings, clock
        self.view = view = View(me, settings.graph.edges)
        self._member = member = Member(settings, clock, shared, view, has_joined=place is not None)
        self.counts = member.counts
        near = place.near if place else {peer: addresses[peer] for peer in view.neighbours_of(me)}
        self._peers = peers = Peers(
            me, secret, near, door, settings.silent_s, joins=member.has_joined
        )
        self._exchanging = exchanging = Exchanging(member, wire, peers)
        self._reductions = TreeReductions(view, peers, place.held if place else 0)
        self._agreements = Agreements(member, exchanging.redraw)
        self._neighbours = neighbours = Neighbours(
            member,
            peers,
            exchanging,
            self._reductions,
            self._agreements,
            {**addresses, me: door.getsockname()[:2]},
            near,
        )
        self._admission = Admission(member, neighbours, luggage)
        peers.receiver, peers.answer = neighbours, self._admission.answer
        self._changed = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()
        self._error: Exception | None = None
        self._ended = False
        if place:
            neighbours.merge(place.news)
        else:
            neighbours.update_rates()
            shared.change_mixing(0.0, self._agreements.constants)
        self._thread = threading.Thread(target=self._run, name=f"offbeat-gossip-{me}", daemon=True)
        self._thread.start()

    # ---- training thread --------------------------------------------------------------------

    def connect(self) -> None:
        """Wait until all neighbours have connected.

        A joining worker waits for at most `silent_s` seconds, because neighbours may have failed
        since it received its place. It continues if at least one neighbour has connected.

        Raises:
            RuntimeError: neighbours are missing after `timeout_s` seconds; the message names them.
        """
        late = self._neighbours.never_came
        if self._member.has_joined:
            with self._changed:
                self._changed.wait_for(
                    lambda: not late or self._error is not None, self._settings.silent_s
                )
            self.check()
            if late and self._peers.reachable():
                self._member.warn(f"workers {ids_text(late)} do not answer; it begins without them")
                return
        self._wait(lambda: not late, lambda: f"workers {ids_text(late)} to connect")

    def record_gradient(self, seconds: float) -> None:
        """Update the mean gradient time with the duration of a gradient."""
        self.check()
        if self._agreements.record_gradient(seconds):
            self._peers.wake()

    def check(self) -> None:
        """Raise the error of the gossip thread, if it has failed."""
        if self._error is not None:
            raise self._error

    def take_notices(self) -> list[str]:
        """Return and remove all notices for the user."""
        notices = self._member.notices
        return [notices.popleft() for _ in range(len(notices))]

    def all_reduce(
        self, numbers: Sequence[Tensor], largest: float = 0.0
    ) -> tuple[list[Tensor], float, int]:
        """Return the sums of the numbers of all workers, the maximum of `largest`, and the number
        of workers.

        Waits until all workers have called it.
        """
        found: list[TreeReduction] = []
        brought = [*numbers, torch.ones(1, dtype=torch.float32, device="cpu")]
        begin = partial(self._reductions.begin, brought, largest, found.append)
        self._submit(lambda: self._admission.when_all_came(begin))
        self._wait(lambda: bool(found), lambda: f"all workers to meet: {self._describe_missing()}")
        *sums, workers = found[0].result
        return sums, found[0].largest, int(workers)

    def agree_on_means(self, means: Sequence[Tensor]) -> list[Tensor]:
        """Return means with equal bits on all workers. Waits until all workers have called it.

        `means` are the results of the last reduction. If the workers hold several different means,
        these are averaged again.

        Raises:
            RuntimeError: the others have compared their means without this worker.
        """
        while True:
            own = _checksum_words(checksum(*means))
            (sums_of_words,), _, workers = self.all_reduce([torch.cat([own, own * own])])
            words, squares = sums_of_words.view(2, -1)
            if bool((words * words != workers * squares).any()):
                sums, _, workers = self.all_reduce(means)
                means = [total / workers for total in sums]
            elif torch.equal(words, workers * own):
                return list(means)
            else:
                raise RuntimeError(AWAY)

    @contextmanager
    def consolidation(self) -> Iterator[None]:
        """Let workers that want to join wait until the end of several reductions."""
        self._member.consolidates = True
        try:
            yield
        finally:
            self._member.consolidates = False

    def pause(self) -> None:
        """Begin no more exchanges and wait for the end of the current one."""
        pairing = self._exchanging.pairing
        self._submit(lambda: self._exchanging.perform(pairing.pause(paused=True)))
        self._wait(
            lambda: pairing.paused and pairing.is_idle,
            lambda: f"the exchange with {pairing.partner} to end",
        )

    def pause_all(self, t: float) -> float:
        """Pause all workers and wait for them. Return the latest of their labels.

        Settles exchanges in doubt: an exchange is kept if the partner has completed it or has
        failed; otherwise it is reverted.
        """
        self.pause()
        exchanges = self._exchanging.exchanges
        whole = torch.zeros(len(self.view.first), 2, dtype=torch.float64, device="cpu")
        for number, edge in enumerate(self.view.first):
            if self.me in edge:  # 0 marks a failed worker, which cannot report its last exchange
                here = edge.index(self.me)
                whole[number, here] = 1 + exchanges.completed_number(edge[1 - here])
        (both,), latest, _ = self.all_reduce([whole.reshape(-1)], t)
        settled = threading.Event()
        self._submit(lambda: self._settle_exchanges(both.reshape(-1, 2).tolist(), settled))
        self._wait(settled.is_set, lambda: "its own gossip")
        return latest

    def _settle_exchanges(self, both: list[list[float]], settled: threading.Event) -> None:
        completed = dict(zip(self.view.first, both, strict=True))
        for partner in self._exchanging.exchanges.partners_in_doubt():
            edge = min(self.me, partner), max(self.me, partner)
            whole = int(completed.get(edge, (0, 0))[edge.index(partner)]) - 1
            self._exchanging.exchanges.settle(partner, None if whole < 0 else whole)
        settled.set()

    def resume(self) -> None:
        """Continue to exchange."""
        pairing = self._exchanging.pairing
        if pairing.paused:
            self._submit(lambda: self._exchanging.perform(pairing.pause(paused=False)))

    def close(self) -> None:
        """Leave the job and notify the neighbours."""
        if self._thread.is_alive():
            with self._changed:
                self._commands.append(self._send_goodbye)
            self._peers.wake()
            self._thread.join(self._settings.timeout_s)

    @property
    def bytes_sent(self) -> int:
        """Return the bytes sent to all neighbours."""
        return self._peers.bytes_sent

    def _submit(self, command: Callable[[], None]) -> None:
        """Queue a command for the gossip thread."""
        self.check()
        self._commands.append(command)
        self._peers.wake()

    def _wait(self, done: Callable[[], bool], what: Callable[[], str]) -> None:
        """Wait until `done` returns true. Raise RuntimeError after `timeout_s`, with the text of
        `what`.
        """
        timeout_s = self._settings.timeout_s
        with self._changed:
            self._changed.wait_for(lambda: done() or self._error is not None, timeout_s)
        self.check()
        if not done():
            raise RuntimeError(
                f"worker {self.me} waited {timeout_s:g} s for {what()}; see their logs, or raise "
                "timeout_s"
            )

    def _describe_missing(self) -> str:
        """Return text on the workers that have not sent their numbers, as far as known on this
        worker.
        """
        if self._admission.is_awaited:
            expected = ids_text(self._neighbours.joining)
            return f"workers {expected}, which were given a place, have not come"
        behind = self._reductions.missing_workers()
        if behind is None:
            lost = ids_text(self._neighbours.down_times())
            return f"the graph is broken, {lost} cannot be reached"
        return f"nothing from {ids_text(behind)}, or from workers behind"

    # ---- gossip thread ----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._ended:
                self._peers.process_events(self._wait_s())
                while self._commands:
                    self._commands.popleft()()
                self._exchanging.request_due()
                self._admission.give_up_lost()
                self._neighbours.give_up_lost()
                self._neighbours.publish([], self._agreements.advance())
                self._reductions.start_due()
                with self._changed:
                    self._changed.notify_all()
        except Exception as error:
            self._error = error
            with suppress(Exception):  # queued frames may contain news for other workers
                self._peers.drain(DRAIN_S)
        finally:
            self._peers.close()
            with self._changed:
                self._changed.notify_all()

    def _wait_s(self) -> float:
        """Return the seconds until the thread has work without a new frame."""
        labels = [self._exchanging.next_at, self._agreements.due_at]
        waits = [self.clock.seconds_until(label) for label in labels if label is not None]
        silent_s, now = self._settings.silent_s, time.monotonic()
        since = [*self._neighbours.down_times().values(), *self._neighbours.joining.values()]
        waits += [at + silent_s - now for at in since]
        waits.append(self._reductions.wait_s)
        return min([60.0, *(wait for wait in waits if wait is not None)])

    def _send_goodbye(self) -> None:
        for peer in self._peers.reachable():
            self._peers.send(peer, Kind.BYE)
        self._peers.finish(self._settings.silent_s)
        self._ended = True


def _checksum_words(checksum: int) -> Tensor:
    """Return the checksum as four numbers below 2^16. Sums of their squares over a thousand workers
    are exact.
    """
    words = [checksum >> shift & 0xFFFF for shift in (0, 16, 32, 48)]
    return torch.tensor(words, dtype=torch.float64, device="cpu")
