"""The kernel of simulations: rates that streams share, and the order of what happens."""

from __future__ import annotations

import pytest

from offbeat.sessions.kernel import FIRST_WINDOW, Inbox, Kernel, Port, Process, Stream, fair_shares


@pytest.mark.parametrize(
    ("caps", "weights", "capacity", "rates"),
    [
        ([1.0, 10.0, 10.0], [1.0, 1.0, 1.0], 9.0, [1.0, 4.0, 4.0]),
        ([10.0, 1.0, 10.0], [1.0, 1.0, 1.0], 9.0, [4.0, 1.0, 4.0]),
        ([1.0, 10.0, 10.0], [1.0, 1.0, 1.0], 3.0, [1.0, 1.0, 1.0]),
        ([1.0, 10.0], [1.0, 1.0], 30.0, [1.0, 10.0]),
        ([8.0, 8.0, 8.0], [1.0, 2.0, 3.0], 12.0, [2.0, 4.0, 6.0]),
        ([8.0, 3.0, 5.0], [1.0, 2.0, 3.0], 12.0, [4.0, 3.0, 5.0]),
        ([2.0, 9.0, 9.0], [4.0, 1.0, 3.0], 10.0, [2.0, 2.0, 6.0]),
        ([], [], 30.0, []),
    ],
)
def test_fair_shares(
    caps: list[float], weights: list[float], capacity: float, rates: list[float]
) -> None:
    assert fair_shares(caps, weights, capacity) == pytest.approx(rates)


@pytest.mark.parametrize("later_share", [1.0, 0.5])
def test_a_port_serves_streams_as_small_steps_of_time_do(later_share: float) -> None:
    """Against streams that advance by their fair shares in steps of 1e-4 s."""
    caps, capacity, step_s = (3.0, 1.0, 8.0), 6.0, 1e-4
    starts = {0: (0.0, 4.0), 1: (0.5, 1.5), 2: (0.7, 3.0)}  # stream: seconds, bytes
    kernel, ends_s = Kernel(), dict[int, float]()
    port = Port(kernel, capacity, later_share)
    for n, (start_s, size) in starts.items():
        stream = Stream(port, lambda n: ends_s.update({n: kernel.now}), limit=caps[n])
        kernel.call(start_s, lambda sent, stream=stream: stream.send(*sent), (size, n))
    kernel.run()
    left, slow_s = {n: size for n, (_, size) in starts.items()}, {}
    for tick in range(22_000):
        now_s = tick * step_s
        active = [n for n in left if left[n] > 0 and starts[n][0] <= now_s + step_s / 2]
        weights = {n: later_share**k for k, n in enumerate(active)}  # in order of their begin
        active.sort(key=lambda n: caps[n] / weights[n])
        rest, free = sum(weights.values()), capacity
        for n in active:
            rate = min(caps[n], free * weights[n] / rest)
            rest, free = rest - weights[n], free - rate
            left[n] -= rate * step_s
            if left[n] <= 0:
                slow_s[n] = now_s + step_s
    assert ends_s == pytest.approx(slow_s, abs=5 * step_s)


def test_messages_keep_their_order_and_take_their_delay() -> None:
    """One of 5 bytes at 10 bytes per second, and one without bytes behind it."""
    kernel, seen = Kernel(), list[tuple[float, str]]()
    inbox = Inbox(kernel)
    stream = Stream(Port(kernel, 10.0), inbox.put, delay_s=0.25)

    def reader() -> Process:
        yield 0.5
        assert inbox.take_all() == []
        for _ in range(3):
            message = yield inbox
            seen.append((kernel.now, message))
        yield 1.0
        assert inbox.take_all() == ["late"]

    kernel.spawn(reader())
    for size, word in ((5, "first"), (0, "second"), (10, "third"), (0, "late")):
        stream.send(size, word)
    kernel.run()
    assert seen == [(0.75, "first"), (0.75, "second"), (1.75, "third")]


def test_a_run_ends_where_it_is_told_and_continues() -> None:
    kernel, seen = Kernel(), list[float]()

    def clock() -> Process:
        while True:
            yield 1.0
            seen.append(kernel.now)

    kernel.spawn(clock())
    kernel.run(until_s=2.5)
    assert seen == [1.0, 2.0]
    kernel.run(enough=lambda: len(seen) == 4)
    assert seen == [1.0, 2.0, 3.0, 4.0]


def test_a_window_doubles_with_each_round_trip_and_halves_in_pauses() -> None:
    """1 + 2 + 3 windows in trips of 1 s; a pause of .75 s keeps the last one, of 4, 7 s do not."""
    kernel, seen = Kernel(), list[float]()
    port = Port(kernel, FIRST_WINDOW * 1000.0)
    stream = Stream(port, lambda _: seen.append(kernel.now), delay_s=0.5)
    for begin_s in (0.0, 10.0, 13.5):
        kernel.call(begin_s, lambda _: stream.send(6 * FIRST_WINDOW, None))
    kernel.run()
    assert seen == pytest.approx([2.75 + 0.5, 12.75 + 0.5, 13.5 + 1 + 2 / 8 + 0.5])
