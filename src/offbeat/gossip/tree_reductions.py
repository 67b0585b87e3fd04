"""Tree reductions of a worker, one after the other, which restart when members change."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from offbeat.frames.frames import Frame, WireError
from offbeat.gossip.peers import Peers
from offbeat.gossip.protocol import Kind, finite
from offbeat.gossip.tree_reduction import Output, TreeReduction
from offbeat.gossip.view import View

RESULT = -1  # digest of frames with a result, which is valid in any tree
QUIET_S = 0.05  # seconds without a change of the graph before a reduction restarts
AWAY = (
    "the others have taken this worker for dead, and have consolidated without it; begin it anew "
    "with `offbeat join`, or raise silent_s"
)


class TreeReductions:
    """Sequence of tree reductions. All members begin the same ones in the same order.

    If the view changes, the reduction in progress restarts in the new tree. A member that already
    has the result sends it instead of taking part again. The result is unique, because a different
    result would need the numbers of all remaining members. A member must not leave by itself before
    all members have the result.

    Only members that were unreachable from each other can have different results: a stopped member
    with a result counts as failed, and the others compute another result without it. Callers that
    need equal bits compare the results afterwards.

    Members do not wait for a failed worker. If it continues after they have completed reductions
    without it, its error says that it must join the job again.

    Attributes:
        held: number of completed reductions.
    """

    def __init__(self, view: View, peers: Peers, held: int = 0):
        self._view, self._peers, self.held = view, peers, held
        self._now: TreeReduction | None = None
        self._then: Callable[[TreeReduction], None]
        self._last: TreeReduction | None = None  # the last one that is complete
        self._quiet_at: float | None = None  # when a restarted reduction starts
        # frames of a reduction that this worker has not started
        self._early_frames: list[tuple[int, Frame[Kind]]] = []

    def begin(
        self, numbers: Sequence[Tensor], largest: float, then: Callable[[TreeReduction], None]
    ) -> None:
        """Begin a reduction.

        Args:
            numbers: flat tensors on the host to be summed.
            largest: number whose maximum is computed.
            then: callback for the completed reduction.
        """
        self._now, self._then = TreeReduction(numbers, largest), then
        self._start()

    def restart(self) -> None:
        """Restart the reduction in progress after a change of the view, once the view is unchanged
        for `QUIET_S`, because changes arrive in bursts."""
        if self._now is not None:
            self._now.place, self._quiet_at = None, time.monotonic() + QUIET_S
        self._send_result()

    @property
    def wait_s(self) -> float | None:
        """Return the seconds until the reduction restarts; None if it has started."""
        return None if self._quiet_at is None else self._quiet_at - time.monotonic()

    def start_due(self) -> None:
        """Start the restarted reduction if it is due."""
        if self._quiet_at is not None and time.monotonic() >= self._quiet_at:
            self._start()

    def on_count(self, count: Any) -> None:
        """Process the number of reductions that a neighbour has completed.

        Raises:
            WireError: the number is invalid.
            RuntimeError: the others have completed reductions without this worker.
        """
        if type(count) is not int:
            raise WireError(f"held ({count!r}) must be a count")
        if count > self.held + (self._now is not None):
            raise RuntimeError(AWAY)

    def on_frame(self, peer: int, frame: Frame[Kind]) -> None:
        """Process a chunk of a neighbour.

        Raises:
            WireError: the chunk is invalid.
            RuntimeError: the others have completed reductions without this worker.
        """
        number, is_result = frame.header.clock, frame.header.kind is Kind.DOWN
        self.on_count(number + is_result)
        if number < self.held:
            return
        if number > self.held or self._now is None or self._now.place is None:
            self._early_frames.append((peer, frame))
            return
        elsewhere = frame.meta.get("digest") != self._now.place.digest
        if elsewhere and not is_result:
            return  # chunk of another tree, whose sender restarts the reduction
        if is_result and frame.header.shard != self._now.results:
            return  # a chunk that is known already, or that follows a lost chunk
        if elsewhere and frame.header.shard == 0:
            self._now.copy_result()
        self._apply_frame(self._now, peer, frame)
        done = self._now.done
        self._finish()
        if done and elsewhere:  # ancestors in the tree of this worker wait for the result
            self._send_result()

    def missing_workers(self) -> list[int] | None:
        """Return the workers whose numbers or result are missing; None if the graph is
        disconnected.
        """
        place = self._now.place if self._now is not None else None
        if self._now is None or place is None or self._view.place() is None:
            return None
        behind = self._now.incomplete_children()
        return behind or [worker for worker in [place.parent] if worker is not None]

    def _start(self) -> None:
        self._quiet_at, place = None, self._view.place()
        if self._now is None or place is None:
            return
        self._send(self._now, self._now.start(place))
        early, self._early_frames = self._early_frames, []
        for peer, frame in early:
            self.on_frame(peer, frame)
        self._finish()

    def _apply_frame(self, now: TreeReduction, peer: int, frame: Frame[Kind]) -> None:
        chunk, largest = frame.header.shard, finite(frame.meta.get("largest"))
        try:
            body = now.as_numbers(chunk, frame.body)
            if frame.header.kind is Kind.UP:
                self._send(now, now.add_child(peer, chunk, body, largest))
            else:
                self._send(now, now.take_result(chunk, body, largest))
        except ValueError as error:
            raise WireError(str(error)) from None

    def _send(self, now: TreeReduction, outs: Iterable[Output]) -> None:
        for out in outs:
            assert now.place is not None
            self._send_frame(self.held, out, now.place.digest)

    def _send_result(self) -> None:
        if self._last is not None:
            for out in self._last.outputs(self._peers.reachable()):
                self._send_frame(self.held - 1, out, RESULT)

    def _send_frame(self, number: int, out: Output, digest: int) -> None:
        self._peers.send(
            out.to,
            Kind.UP if out.up else Kind.DOWN,
            out.body,
            shard=out.chunk,
            clock=number,
            meta={"digest": digest, "largest": out.largest},
        )

    def _finish(self) -> None:
        if self._now is not None and self._now.done:
            self._now, self._last = None, self._now
            self.held += 1
            self._then(self._last)
