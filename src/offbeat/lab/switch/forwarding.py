"""Forwarding of frames between hosts, with loss, rates and delays; a pure simulation on the
caller's clock."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

from offbeat.lab.shaping import burst_bytes, queue_bytes
from offbeat.lab.switch.link_state import LinkPlan

Deliver = Callable[[int, bytes], None]  # (host, frame)


class Gate:
    """Token bucket with a queue: frames leave in order, at an average rate of `rate_bps`.

    A frame may leave while the number of tokens is positive and may overdraw them. Its sender has
    already shaped it, so a second gate of the same rate adds no time.
    """

    def __init__(self, rate_bps: int | None, on_leave: Callable[[float, bytes, int], None]) -> None:
        self._set_limits(rate_bps)
        self.on_leave = on_leave  # callback for a frame that leaves: (time, frame, bytes)
        self.queue: deque[tuple[bytes, int]] = deque()
        self.queued_bytes = 0
        self.next_s = -1.0  # time of the valid wake-up; earlier wake-ups are ignored
        self._free_s = -math.inf  # time at which the number of tokens is no longer negative

    def pass_at_once(self, now_s: float, size: int) -> bool:
        """Take the tokens of a frame that need not wait; return False if the frame must wait."""
        if self.rate_bps is None:
            return not self.queue
        if self.queue or self._free_s > now_s:
            return False
        self._spend_tokens(now_s, size)
        return True

    def queue_frame(self, frame: bytes, size: int) -> bool:
        """Queue a frame; return False if the queue is full, so that the frame is dropped."""
        if self.queued_bytes + size > self._most_bytes:
            return False
        self.queue.append((frame, size))
        self.queued_bytes += size
        return True

    def ready_s(self, now_s: float) -> float:
        """Return the time at which the first frame may leave."""
        return now_s if self.rate_bps is None else max(now_s, self._free_s)

    def pop_frame(self, now_s: float) -> tuple[bytes, int]:
        """Remove and return the first frame."""
        frame, size = self.queue.popleft()
        self.queued_bytes -= size
        if self.rate_bps is not None:
            self._spend_tokens(now_s, size)
        return frame, size

    def set_rate(self, now_s: float, rate_bps: int | None) -> None:
        """Change the rate. Overdrawn tokens keep their number of bytes."""
        if self.rate_bps is not None and rate_bps is not None and self._free_s > now_s:
            self._free_s = now_s + (self._free_s - now_s) * self.rate_bps / rate_bps
        self._set_limits(rate_bps)

    def _set_limits(self, rate_bps: int | None) -> None:
        self.rate_bps = rate_bps
        self._burst_s = 0.0 if rate_bps is None else burst_bytes(rate_bps) * 8 / rate_bps
        self._most_bytes = math.inf if rate_bps is None else queue_bytes(rate_bps)

    def _spend_tokens(self, now_s: float, size: int) -> None:
        assert self.rate_bps is not None
        full_s = now_s - self._burst_s
        free_s = self._free_s if self._free_s > full_s else full_s
        self._free_s = free_s + size * 8 / self.rate_bps


class _Way:
    """Way from one host to another: loss, the pair's gate, delay."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.latency_s = self.loss = self.last_s = 0.0


class Crossbar:
    """Forwarding of frames between the hosts of one link.

    Each frame may be lost, passes the gate of its pair, is delayed, and passes the gate of its
    destination host. `deliver(host, frame)` is called on arrival. Frames of a pair keep their
    order. The sending host's rate is not applied here, because the host shapes its own traffic.

    Args:
        plan: initial rates, delays and losses.
        deliver: called with destination host and frame.
        seed: seed of the random losses.
    """

    def __init__(self, plan: LinkPlan, deliver: Deliver, seed: int = 0) -> None:
        self._random = random.Random(seed).random
        self._events: list[tuple[float, int, Gate, bytes | None, int]] = []
        self._numbers = count()
        hosts = range(len(plan.rates_bps))
        self._ports = [Gate(None, self._delivery(deliver, host)) for host in hosts]
        self._ways = {(a, b): self._way(b) for a in hosts for b in hosts if a != b}
        self.dropped = 0
        self.change(0.0, plan)

    def change(self, now_s: float, plan: LinkPlan) -> None:
        """Apply new rates, delays and losses."""
        for host, port in enumerate(self._ports):
            self._set_rate(now_s, port, plan.rates_bps[host])
        for (a, b), way in self._ways.items():
            way.latency_s, way.loss = plan.latency_s(a, b), plan.loss(a, b)
            self._set_rate(now_s, way.gate, plan.pair(a, b).rate_bps)

    def forward(self, now_s: float, source: int, to: int, frame: bytes, size: int) -> None:
        """Forward a frame that a host has sent; `size` is its number of bytes on the wire."""
        way = self._ways[source, to]
        if way.loss and self._random() < way.loss:
            self.dropped += 1
        else:
            self._enqueue(now_s, way.gate, frame, size)

    def next_s(self) -> float | None:
        """Return the time at which `advance` must be called; None if no event is pending."""
        return self._events[0][0] if self._events else None

    def advance(self, now_s: float) -> None:
        """Process all events up to now: arrivals of delayed frames, and gates that may release a
        frame."""
        events = self._events
        while events and events[0][0] <= now_s:
            at_s, _, gate, frame, size = heappop(events)
            if frame is not None:
                self._enqueue(at_s, gate, frame, size)
            elif at_s == gate.next_s:
                self._release_frames(at_s, gate)

    def _way(self, to: int) -> _Way:
        port = self._ports[to]

        def cross(now_s: float, frame: bytes, size: int) -> None:
            # A frame never overtakes the previous one, even if the delay has become shorter.
            at_s = now_s + way.latency_s
            if at_s < way.last_s:
                at_s = way.last_s
            way.last_s = at_s
            if at_s <= now_s:
                self._enqueue(now_s, port, frame, size)
            else:
                heappush(self._events, (at_s, next(self._numbers), port, frame, size))

        way = _Way(Gate(None, cross))
        return way

    def _delivery(self, deliver: Deliver, host: int) -> Callable[[float, bytes, int], None]:
        return lambda _now_s, frame, _size: deliver(host, frame)

    def _enqueue(self, now_s: float, gate: Gate, frame: bytes, size: int) -> None:
        if gate.pass_at_once(now_s, size):
            gate.on_leave(now_s, frame, size)
        elif not gate.queue_frame(frame, size):
            self.dropped += 1
        elif len(gate.queue) == 1:
            self._schedule_wakeup(gate, gate.ready_s(now_s))

    def _release_frames(self, now_s: float, gate: Gate) -> None:
        """Release the frames that may leave now."""
        while gate.queue and gate.ready_s(now_s) <= now_s:
            gate.on_leave(now_s, *gate.pop_frame(now_s))
        if gate.queue:
            self._schedule_wakeup(gate, gate.ready_s(now_s))

    def _schedule_wakeup(self, gate: Gate, at_s: float) -> None:
        gate.next_s = at_s
        heappush(self._events, (at_s, next(self._numbers), gate, None, 0))

    def _set_rate(self, now_s: float, gate: Gate, rate_bps: int | None) -> None:
        if rate_bps != gate.rate_bps:
            gate.set_rate(now_s, rate_bps)
            if gate.queue:
                self._schedule_wakeup(gate, gate.ready_s(now_s))
