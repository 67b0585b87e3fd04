"""Tree reductions of a worker on two channels, with restarts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from offbeat.frames.frames import Frame, WireError
from offbeat.gossip.peers import Peers
from offbeat.gossip.protocol import Kind, finite
from offbeat.gossip.tree_reduction import Output, TreeReduction
from offbeat.gossip.view import View

# channels: USER for reductions of the training thread, OWN for agreements of gossip
USER, OWN = 1, 0
RESULT = -1  # digest of frames with a result, which is valid in any tree
QUIET_S = 0.05  # seconds without a change of the graph before a restarted reduction sends frames
AWAY = (
    "the others have taken this worker for dead, and have consolidated without it; begin it anew "
    "with `offbeat join`, or raise silent_s"
)


class TreeReductions:
    """Sequences of tree reductions. All members begin the same reductions of a channel in the same
    order.

    If the view changes, the reductions in progress restart in the new tree. A member that already
    has the result sends it instead of taking part again. The result is unique, because a different
    result would need the numbers of all remaining members. A member must not leave by itself before
    all members have the result.

    Only members that were unreachable from each other can have different results: a stopped member
    with a result counts as failed, and the others compute another result without it. Callers that
    need equal bits compare the results afterwards.

    Members do not wait for a failed worker. If it continues after they have completed USER
    reductions without it, its error says that it must join the job again.

    Attributes:
        held: completed reductions by channel.
    """

    def __init__(self, view: View, peers: Peers, held: Mapping[int, int] | None = None):
        self._view, self._peers = view, peers
        self._rounds: dict[int, TreeReduction] = {}  # reductions in progress by channel
        self._callbacks: dict[int, Callable[[TreeReduction], None]] = {}
        self.held = {USER: 0, OWN: 0, **(held or {})}
        self._results: dict[int, TreeReduction] = {}  # the last one by channel
        # Frames that wait until the view is unchanged for `QUIET_S`, because changes arrive in
        # bursts.
        self._postponed: list[tuple[int, int, Output]] = []
        self._quiet_at: float | None = None
        # frames of reductions that this worker has not begun
        self._early_frames: list[tuple[int, Frame[Kind]]] = []

    def is_under_way(self, channel: int) -> bool:
        """Return whether a reduction is in progress on a channel."""
        return channel in self._rounds

    def is_requested(self, channel: int) -> bool:
        """Return whether a neighbour has begun a reduction that this worker has not."""
        return any(frame.header.clock % 2 == channel for _, frame in self._early_frames)

    def begin(
        self,
        channel: int,
        numbers: Sequence[Tensor],
        largest: float,
        then: Callable[[TreeReduction], None],
        note: Callable[[], Any] | None = None,
    ) -> None:
        """Begin a reduction.

        Args:
            channel: `USER` or `OWN`.
            numbers: flat tensors on the host to be summed.
            largest: number whose maximum is computed.
            then: callback for the completed reduction.
            note: callable that returns the note, called on the root.
        """
        self._rounds[channel] = now = TreeReduction(numbers, largest, note)
        self._callbacks[channel] = then
        place = self._view.place()
        if place is not None:
            self._send(channel, now.start(place))
        early, self._early_frames = self._early_frames, []
        for peer, frame in early:
            self.on_frame(peer, frame)
        self._finish_rounds()

    def restart(self) -> None:
        """Restart all reductions in progress after a change of the view."""
        place = self._view.place()
        self._postponed.clear()
        self._quiet_at = time.monotonic() + QUIET_S if self._rounds else None
        for channel, now in self._rounds.items():
            if place is not None:
                self._send(channel, now.start(place))
        self._send_results()
        self._finish_rounds()

    @property
    def wait_s(self) -> float | None:
        """Return the seconds until postponed frames are due; None without such frames."""
        return None if self._quiet_at is None else self._quiet_at - time.monotonic()

    def send_postponed(self) -> None:
        """Send postponed frames if they are due."""
        if self._quiet_at is not None and time.monotonic() >= self._quiet_at:
            later, self._postponed, self._quiet_at = self._postponed, [], None
            for channel, digest, out in later:
                self._send_frame(channel, self.held[channel], out, digest)

    def take_missed_result(self, frame: Frame[Kind]) -> bool:
        """Return whether a frame is the result of an OWN reduction without this worker. If so,
        update the count, and end a reduction that the others have completed earlier.
        """
        held, channel = divmod(frame.header.clock, 2)
        result = frame.header.kind is Kind.DOWN and frame.meta.get("digest") == RESULT
        if channel != OWN or not result or held < self.held[OWN]:
            return False
        if OWN in self._rounds:
            if held == self.held[OWN]:  # the result of this reduction
                return False
            del self._rounds[OWN], self._callbacks[OWN]
            self._postponed = [waiting for waiting in self._postponed if waiting[0] != OWN]
        self.held[OWN] = held
        self._results.pop(OWN, None)  # of an earlier reduction
        return True

    def on_count(self, count: Any) -> None:
        """Process the number of USER reductions that a neighbour has completed.

        Raises:
            WireError: the number is invalid.
            RuntimeError: the others have completed reductions without this worker.
        """
        if type(count) is not int:
            raise WireError(f"held ({count!r}) must be a count")
        self._require_part(count)

    def _require_part(self, completed: int) -> None:
        """Raise RuntimeError if a neighbour has completed USER reductions without this worker."""
        if completed > self.held[USER] + (USER in self._rounds):
            raise RuntimeError(AWAY)

    def on_frame(self, peer: int, frame: Frame[Kind]) -> None:  # noqa: C901
        """Process a chunk of a neighbour.

        Raises:
            WireError: the chunk is invalid.
            RuntimeError: the others have completed reductions without this worker.
        """
        held, channel = divmod(frame.header.clock, 2)
        reduction, digest = self._rounds.get(channel), frame.meta.get("digest")
        if channel == USER:
            self._require_part(held + (frame.header.kind is Kind.DOWN))
        if held < self.held[channel]:
            return
        if reduction is None or held > self.held[channel]:
            if frame.header.kind is Kind.UP:
                self._early_frames.append((peer, frame))
            return
        place = reduction.place
        if place is None:
            return  # the sender restarts the reduction after the view has changed
        elsewhere = digest != place.digest
        if frame.header.kind is Kind.DOWN:
            if frame.header.shard != reduction.results:
                return  # a chunk that is known already, or that follows a lost chunk
            if elsewhere and frame.header.shard == 0:
                reduction.copy_result()
        elif elsewhere:
            return  # chunk of another tree, whose sender restarts the reduction
        self._apply_frame(channel, peer, frame)
        done = reduction.done
        self._finish_rounds()
        if done and elsewhere:  # ancestors in the tree of this worker wait for the result
            self._send_results()

    def missing_workers(self, channel: int) -> list[int] | None:
        """Return the workers whose numbers or result are missing; None if the graph is
        disconnected.
        """
        now = self._rounds.get(channel)
        place = now.place if now is not None else None
        if now is None or place is None or self._view.place() is None:
            return None
        behind = now.incomplete_children()
        return behind or [worker for worker in [place.parent] if worker is not None]

    def _apply_frame(self, channel: int, peer: int, frame: Frame[Kind]) -> None:
        reduction = self._rounds[channel]
        chunk, largest = frame.header.shard, finite(frame.meta.get("largest"))
        try:
            body = reduction.as_numbers(chunk, frame.body)
            if frame.header.kind is Kind.UP:
                self._send(channel, reduction.add_child(peer, chunk, body, largest))
            else:
                self._send(
                    channel, reduction.take_result(chunk, body, largest, frame.meta.get("note"))
                )
        except ValueError as error:
            raise WireError(str(error)) from None

    def _send(self, channel: int, outs: Iterable[Output]) -> None:
        reduction = self._rounds[channel]
        for out in outs:
            assert reduction.place is not None
            if self._quiet_at is None:
                self._send_frame(channel, self.held[channel], out, reduction.place.digest)
            else:
                self._postponed.append((channel, reduction.place.digest, out))

    def _send_postponed_of(self, channel: int) -> None:
        """Send the postponed frames of a completed reduction, which no restart would send again."""
        for other, digest, out in self._postponed:
            if other == channel:
                self._send_frame(channel, self.held[channel], out, digest)
        self._postponed = [waiting for waiting in self._postponed if waiting[0] != channel]

    def _send_results(self) -> None:
        for channel, last in self._results.items():
            for out in last.outputs(self._peers.reachable()):
                self._send_frame(channel, self.held[channel] - 1, out, RESULT)

    def _send_frame(self, channel: int, number: int, out: Output, digest: int) -> None:
        self._peers.send(
            out.to,
            Kind.UP if out.up else Kind.DOWN,
            out.body,
            shard=out.chunk,
            clock=2 * number + channel,
            meta={"digest": digest, "largest": out.largest, "note": out.note},
        )

    def _finish_rounds(self) -> None:
        for channel, now in list(self._rounds.items()):
            if now.done:
                self._send_postponed_of(channel)
                del self._rounds[channel]
                self._results[channel] = now
                self.held[channel] += 1
                self._callbacks[channel](now)
