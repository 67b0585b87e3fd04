"""Kernel of the simulations of jobs without a plan: a virtual clock, processes and connections.

A process is a generator. It yields a number of seconds, or an `Inbox` whose next message it waits
for. What happens at equal times happens in the order in which it was scheduled, so equal seeds give
equal runs.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Sequence
from heapq import heappop, heappush
from typing import Any

Process = Generator[Any, Any, None]
LEAST_WEIGHT = 1e-6  # of a stream, relative to the stream that began first
# TCP's first window of 10 segments, and the least pause after which it begins anew, beside a round
# trip
FIRST_WINDOW, PAUSE_S = 14600, 0.2
LEAST_RATE = 1e-300  # bytes per second; avoids a division by 0


class Kernel:
    """Virtual clock and agenda. `now` is in seconds since the start."""

    def __init__(self) -> None:
        self.now = 0.0
        self._agenda: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._scheduled = 0

    def call(self, after_s: float, function: Callable[[Any], None], argument: Any = None) -> None:
        """Call `function(argument)` after some seconds."""
        self._scheduled += 1
        heappush(self._agenda, (self.now + after_s, self._scheduled, function, argument))

    def spawn(self, process: Process) -> None:
        """Begin a process at the present time."""
        self.call(0.0, self._resume, (process, None))

    def resume(self, process: Process, value: Any) -> None:
        """Continue a process with the value that it has waited for."""
        self.call(0.0, self._resume, (process, value))

    def run(self, until_s: float = math.inf, enough: Callable[[], bool] = lambda: False) -> None:
        """Run until nothing is left to happen, the next event is later than `until_s`, or `enough`
        returns true."""
        while self._agenda and self._agenda[0][0] <= until_s and not enough():
            self.now, _, function, argument = heappop(self._agenda)
            function(argument)

    def _resume(self, turn: tuple[Process, Any]) -> None:
        process, value = turn
        try:
            wait = process.send(value)
        except StopIteration:
            return
        if isinstance(wait, Inbox):
            wait.await_message(process)
        else:
            self.call(wait, self._resume, (process, None))


class Inbox:
    """Messages in the order of their arrival, for one process."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel, self._messages = kernel, deque[Any]()
        self._process: Process | None = None

    def put(self, message: Any) -> None:
        """Add a message, or hand it to the process that waits for it."""
        if self._process is None:
            self._messages.append(message)
        else:
            process, self._process = self._process, None
            self._kernel.resume(process, message)

    def take_all(self) -> list[Any]:
        """Remove and return the messages that have arrived."""
        messages = [*self._messages]
        self._messages.clear()
        return messages

    def await_message(self, process: Process) -> None:
        """Continue a process with the next message."""
        if self._messages:
            self._kernel.resume(process, self._messages.popleft())
        else:
            self._process = process


class Port:
    """Rate that streams share: weighted max-min fair, none above its own limit.

    In the order in which the present streams began, each has `later_share` times the weight of the
    previous one.
    """

    def __init__(self, kernel: Kernel, rate: float, later_share: float = 1.0) -> None:
        self.kernel, self.rate, self._later_share = kernel, rate, later_share
        self._left: dict[Stream, float] = {}  # bytes, in the order in which streams began
        self._rates: dict[Stream, float] = {}
        self._since_s = 0.0
        self._version = 0  # an end that was planned for an earlier one is void

    def begin(self, stream: Stream, size_bytes: float) -> None:
        """Begin to send bytes of a stream."""
        self._advance()
        self._left[stream] = size_bytes
        self._share()

    def _end(self, planned: tuple[Stream, int]) -> None:
        stream, version = planned
        if version == self._version:
            self._advance()
            del self._left[stream]
            self._share()
            stream.end()

    def _advance(self) -> None:
        elapsed_s, self._since_s = self.kernel.now - self._since_s, self.kernel.now
        for stream, rate in self._rates.items():
            self._left[stream] -= rate * elapsed_s

    def double_window(self, stream: Stream) -> None:
        """Double the window of a stream, if it limits the rate at present."""
        if self._rates.get(stream, 0.0) >= stream.limit:
            stream.window *= 2
            self._advance()
            self._share()

    def _share(self) -> None:
        """Set the rates from now on, and plan the end of the next message."""
        self._version += 1
        weights = [max(self._later_share**n, LEAST_WEIGHT) for n in range(len(self._left))]
        shares = fair_shares([stream.limit for stream in self._left], weights, self.rate)
        self._rates = dict(zip(self._left, shares, strict=True))
        for stream, rate in self._rates.items():
            if rate >= stream.limit:
                stream.await_growth()
        ends_s = {s: self._left[s] / max(rate, LEAST_RATE) for s, rate in self._rates.items()}
        if ends_s:
            first = min(ends_s, key=ends_s.__getitem__)
            self.kernel.call(max(ends_s[first], 0.0), self._end, (first, self._version))


def fair_shares(limits: Sequence[float], weights: Sequence[float], rate: float) -> list[float]:
    """Return the weighted max-min fair shares of a rate: in proportion to the weights, none above
    its limit."""
    shares, left, total = [0.0] * len(limits), rate, sum(weights)
    if all(w * rate <= limit * total for limit, w in zip(limits, weights, strict=True)):
        return [rate * w / total for w in weights]
    for n in sorted(range(len(limits)), key=lambda n: limits[n] / weights[n]):
        shares[n] = min(limits[n], left * weights[n] / total)
        left, total = left - shares[n], total - weights[n]
    return shares


class Stream:
    """One direction of a connection. Messages arrive in the order in which they were sent.

    As with TCP, at most a window of bytes is under way. After a pause the window begins small, and
    doubles with each round trip.

    Args:
        port: port that it shares with other streams.
        deliver: called with the content of a message `delay_s` after its last byte was sent.
        delay_s: seconds of delay.
        limit: highest rate in bytes per second.
    """

    def __init__(
        self,
        port: Port,
        deliver: Callable[[Any], None],
        delay_s: float = 0.0,
        limit: float = math.inf,
    ) -> None:
        self._port, self._deliver, self._delay_s = port, deliver, delay_s
        self._highest, self.window = min(limit, port.rate), FIRST_WINDOW
        self._queue: deque[tuple[float, Any]] = deque()
        self._grows = False  # whether its window will be doubled
        self._ended_s = 0.0

    @property
    def limit(self) -> float:
        """Highest rate at present, in bytes per second."""
        trip_s = 2 * self._delay_s
        return min(self._highest, self.window / trip_s if trip_s else math.inf)

    def send(self, size_bytes: float, content: Any) -> None:
        """Send a message behind all earlier ones."""
        self._queue.append((size_bytes, content))
        if len(self._queue) == 1:
            self._begin()

    def end(self) -> None:
        """Deliver the first message, whose last byte was sent, and begin the next ones."""
        self._ended_s = self._port.kernel.now
        self._pass_on()
        self._begin()

    def await_growth(self) -> None:
        """Double the window after a round trip, unless it is large enough."""
        if not self._grows and self.limit < self._highest:
            self._grows = True
            self._port.kernel.call(2 * self._delay_s, self._grow)

    def _begin(self) -> None:
        while self._queue:
            if self._queue[0][0] > 0 and self._highest < math.inf:
                pauses = (self._port.kernel.now - self._ended_s) // (PAUSE_S + 2 * self._delay_s)
                self.window = max(self.window / 2 ** min(pauses, 64), FIRST_WINDOW)
                self._port.begin(self, self._queue[0][0])
                return
            self._pass_on()

    def _grow(self, _: object) -> None:
        self._grows = False
        self._port.double_window(self)

    def _pass_on(self) -> None:
        self._port.kernel.call(self._delay_s, self._deliver, self._queue.popleft()[1])
