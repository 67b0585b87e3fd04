"""Measurement of the ways of a built network, one after the other or all at once, over TCP.

It runs in the supervisor process. A socket belongs to the namespace in which it was created, so one
process can hold both ends.
"""

import select
import selectors
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from statistics import median
from typing import Any

# minimum time of a way in seconds and round trips, in which queues fill and windows open
LEAST_S, LEAST_TRIPS = 0.25, 20
_CONNECT_S = 3.0
_PINGS = 9
_PING_SHARE = 0.25  # share of the time of a way
_CHUNK, _LARGE_CHUNK = bytes(65536), bytes(1 << 20)  # of one way, of several at once
# share of the time of several ways at once, in which TCP windows open and bursts end
_SETTLING_SHARE = 1 / 3
_LEAST_BYTES = 32 * 1024  # minimum number of bytes from which a rate is computed
WIRE = 1514 / 1448  # Ethernet, IP and TCP headers of a full packet
NOTHING: dict[str, float | None] = {"rate_bps": None, "latency_s": None}

Enter = Callable[[int], None]


def measure(
    enter: Enter, ways: Sequence[Mapping[str, Any]], budget_s: float
) -> list[dict[str, float | None]]:
    """Return the rate and one-way delay of every way, as far as the time budget permits.

    Args:
        enter: moves the process into a host.
        ways: requests as of `message` in `probe_report`.
        budget_s: seconds for all ways together.
    """
    results: list[dict[str, float | None]] = []
    left_s = budget_s
    for way in ways:
        needed_s = LEAST_S + LEAST_TRIPS * 2 * way["latency_s"]
        if results and needed_s > left_s:
            results.append(NOTHING)
            continue
        start_s = time.monotonic()
        results.append(_measure_way(enter, way, min(needed_s, budget_s)))
        left_s -= time.monotonic() - start_s
    return results


def _measure_way(enter: Enter, way: Mapping[str, Any], limit_s: float) -> dict[str, float | None]:
    try:
        here, there = connect(enter, way["hosts"], way["address"])
    except OSError:  # no connection within 3 seconds, for example with heavy loss
        return NOTHING
    with here, there:
        end_s = time.monotonic() + limit_s
        trips_s = _round_trips_s(here, there, time.monotonic() + limit_s * _PING_SHARE)
        points = _send_bulk(here, there, end_s) if way["rate"] else []
    return {
        "rate_bps": rate_bps(points),
        "latency_s": median(trips_s) / 2 if trips_s else None,
    }


def rate_bps(points: Sequence[tuple[float, int]]) -> float | None:
    """Return the bits per second on the wire in the last third of the time.

    In this third, queues are full and TCP windows open.

    Args:
        points: pairs (seconds, bytes so far).

    Returns:
        Rate, or None if fewer than 32 KiB arrived in this third.
    """
    if len(points) < 3:
        return None
    late_s = (points[0][0] + 2 * points[-1][0]) / 3
    begin_s, begin = next(point for point in points if point[0] >= late_s)
    end_s, end = points[-1]
    if end - begin < _LEAST_BYTES:
        return None
    return (end - begin) * 8 * WIRE / (end_s - begin_s)


def connect(enter: Enter, hosts: Sequence[int], to: str) -> tuple[socket.socket, socket.socket]:
    """Return both ends of a connection from one host to the other's address; raise OSError after 3
    s."""
    one, other = hosts
    enter(other)
    with socket.create_server((to, 0)) as server:
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


def _send_bulk(here: socket.socket, there: socket.socket, end_s: float) -> list[tuple[float, int]]:
    """Send at the highest rate; return pairs (seconds, bytes so far) of the arrivals."""
    points, total = [(time.monotonic(), 0)], 0
    here.setblocking(False)
    there.setblocking(False)
    while (left_s := end_s - time.monotonic()) > 0:
        readable, writable, _ = select.select([there], [here], [], left_s)
        if writable:
            here.send(_CHUNK)
        if readable:
            total += len(there.recv(1 << 20))
            points.append((time.monotonic(), total))
    reset_at_close(here)
    return points


def reset_at_close(sending: socket.socket) -> None:
    """Close with a reset: data still in flight is discarded without waiting."""
    sending.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


# --- all ways at once ---


def measure_at_once(enter: Enter, ways: Sequence[Mapping[str, Any]], limit_s: float) -> list[float]:
    """Return the bits per second on the wire of every way while all ways are saturated."""
    with ExitStack() as sockets, selectors.DefaultSelector() as selector:
        for number, way in enumerate(ways):
            here, there = connect(enter, way["hosts"], way["address"])
            for end, event in (
                (here, selectors.EVENT_WRITE),
                (there, selectors.EVENT_READ),
            ):
                sockets.enter_context(end)
                end.setblocking(False)
                selector.register(end, event, number)
            reset_at_close(here)
        start_s = time.monotonic()
        _receive_bytes(selector, len(ways), start_s + limit_s * _SETTLING_SHARE)
        settled_s = time.monotonic()
        received = _receive_bytes(selector, len(ways), start_s + limit_s)
        took_s = time.monotonic() - settled_s
    return [total * 8 * WIRE / took_s for total in received]


def _receive_bytes(selector: selectors.BaseSelector, count: int, end_s: float) -> list[int]:
    """Keep all ways saturated until `end_s` and return the bytes received by each."""
    totals, nowhere = [0] * count, bytearray(len(_LARGE_CHUNK))
    while (left_s := end_s - time.monotonic()) > 0:
        for key, event in selector.select(left_s):
            end = key.fileobj
            assert isinstance(end, socket.socket)
            if event & selectors.EVENT_WRITE:
                end.send(_LARGE_CHUNK)
            # MSG_TRUNC discards the data without a copy, as copies are not part of the link's cost
            else:
                totals[key.data] += end.recv_into(nowhere, 0, socket.MSG_TRUNC)
    return totals
