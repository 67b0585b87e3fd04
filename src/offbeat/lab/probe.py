"""Measurement of the ways of a built network, one after the other or all at once, over TCP.

It runs in the process that holds the network. A socket belongs to the namespace in which it was
created, so one process can hold both ends.
"""

import selectors
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from statistics import median

from offbeat.lab.probe_report import ProbeResult, ProbeTarget

# minimum time of a way in seconds and round trips, in which queues fill and windows open
LEAST_S, LEAST_TRIPS = 0.25, 20
_CONNECT_S = 3.0
_PINGS = 9
_PING_SHARE = 0.25  # share of the time of a way
_CHUNK = bytes(1 << 20)
# share of the time of one way and of several at once, in which TCP windows open and bursts end
_SETTLING_ONE, _SETTLING_ALL = 2 / 3, 1 / 3
_LEAST_BYTES = 32 * 1024  # minimum number of bytes from which a rate is computed
WIRE = 1514 / 1448  # Ethernet, IP and TCP headers of a full packet

Enter = Callable[[int], None]
Arrivals = list[tuple[float, int]]  # (seconds, bytes so far)


def measure(enter: Enter, ways: Sequence[ProbeTarget], budget_s: float) -> list[ProbeResult]:
    """Return the rate and one-way delay of every way, as far as the time budget permits.

    Args:
        enter: moves the process into a host.
        ways: ways to measure.
        budget_s: seconds for all ways together.
    """
    results: list[ProbeResult] = []
    left_s = budget_s
    for asked in ways:
        needed_s = LEAST_S + LEAST_TRIPS * 2 * asked.way.latency_s
        result = ProbeResult(asked)
        if not results or needed_s <= left_s:
            start_s = time.monotonic()
            with suppress(OSError):  # no connection within 3 seconds, for example with heavy loss
                result = _measure_way(enter, asked, min(needed_s, budget_s))
            left_s -= time.monotonic() - start_s
        results.append(result)
    return results


def _measure_way(enter: Enter, asked: ProbeTarget, limit_s: float) -> ProbeResult:
    here, there = _connect(enter, asked)
    with here, there:
        start_s, rate_bps = time.monotonic(), None
        trips_s = _round_trips_s(here, there, start_s + limit_s * _PING_SHARE)
        if asked.way.rate_bps is not None:  # otherwise there is no rate to measure
            [arrivals] = _send_bulk([(here, there)], start_s + limit_s)
            rate_bps = settled_rate_bps(arrivals, _SETTLING_ONE)
    return ProbeResult(asked, rate_bps, median(trips_s) / 2 if trips_s else None)


def measure_at_once(enter: Enter, ways: Sequence[ProbeTarget], limit_s: float) -> list[float]:
    """Return the bits per second on the wire of every way while all ways are saturated."""
    with ExitStack() as sockets:
        pairs = [_connect(enter, asked) for asked in ways]
        for end in (end for pair in pairs for end in pair):
            sockets.enter_context(end)
        arrivals = _send_bulk(pairs, time.monotonic() + limit_s)
    return [settled_rate_bps(each, _SETTLING_ALL) or 0.0 for each in arrivals]


def settled_rate_bps(arrivals: Arrivals, settling: float) -> float | None:
    """Return the bits per second on the wire after a share of the time, in which queues fill and
    TCP windows open; None if fewer than 32 KiB arrived later."""
    settled_s = arrivals[0][0] * (1 - settling) + arrivals[-1][0] * settling
    begin_s, begin = next(each for each in arrivals if each[0] >= settled_s)
    end_s, end = arrivals[-1]
    if end - begin < _LEAST_BYTES:
        return None
    return (end - begin) * 8 * WIRE / (end_s - begin_s)


def _connect(enter: Enter, asked: ProbeTarget) -> tuple[socket.socket, socket.socket]:
    """Return both ends of a connection; raise OSError after 3 s."""
    one, other = asked.hosts
    enter(other)
    with socket.create_server((asked.to_address, 0)) as server:
        server.settimeout(_CONNECT_S)
        enter(one)
        here = socket.create_connection(server.getsockname(), _CONNECT_S)
        try:
            there, _ = server.accept()
        except OSError:
            here.close()
            raise
    for end in (here, there):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.settimeout(_CONNECT_S)
    return here, there


def _round_trips_s(here: socket.socket, there: socket.socket, end_s: float) -> list[float]:
    """Return the round-trip seconds of single bytes, without the first round trip."""
    trips_s: list[float] = []
    while len(trips_s) < 2 or (len(trips_s) <= _PINGS and time.monotonic() < end_s):
        start_s = time.perf_counter()
        try:
            for end, to in ((here, there), (there, here)):
                end.sendall(b"?")
                to.recv(1)
        except OSError:  # the byte was lost repeatedly
            break
        trips_s.append(time.perf_counter() - start_s)
    return trips_s[1:]


def _send_bulk(
    pairs: Sequence[tuple[socket.socket, socket.socket]], end_s: float
) -> list[Arrivals]:
    """Saturate all ways until `end_s`; return the arrivals of each."""
    arrivals: list[Arrivals] = [[(time.monotonic(), 0)] for _ in pairs]
    nowhere = bytearray(len(_CHUNK))
    with selectors.DefaultSelector() as selector:
        for (here, there), found in zip(pairs, arrivals, strict=True):
            here.setblocking(False)
            there.setblocking(False)
            # close with a reset: data still in flight is discarded without waiting
            here.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            selector.register(here, selectors.EVENT_WRITE, (here, None))
            selector.register(there, selectors.EVENT_READ, (there, found))
        while (left_s := end_s - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                end, found = key.data
                if found is None:
                    end.send(_CHUNK)
                else:
                    # discards the data without a copy, as copies are not part of the link's cost
                    size = end.recv_into(nowhere, 0, socket.MSG_TRUNC)
                    found.append((time.monotonic(), found[-1][1] + size))
    return arrivals
