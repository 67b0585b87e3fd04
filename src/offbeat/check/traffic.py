"""Measurement over open connections: round trips, clock offset and throughput."""

from __future__ import annotations

import selectors
import socket
import struct
import time
from collections.abc import Sequence

from offbeat.check.connections import read_exactly

TRIPS = 20
TRIPS_S = 0.4  # the exchange of round trips ends after this time
WARM_UP = 0.3  # share of the time before the count begins: TCP first enlarges its window
DRAIN_S = 1.0  # longest time until the end of a transfer has arrived
ACKNOWLEDGED_EVERY_S = 0.001  # time between two looks at the acknowledgements of a sent message
CHUNK = memoryview(bytes(1 << 16))
_RECEIVED_BYTES = 1 << 20
_ONE, _TWO = struct.Struct("!d"), struct.Struct("!dd")
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: discard unsent bytes and reset the connection
_TCP_INFO_BYTES, _BYTES_ACKED = 232, 120  # linux/tcp.h: tcp_info.tcpi_bytes_acked


def measure_trips(s: socket.socket) -> tuple[float, float]:
    """Return the lowest round trip in seconds, and the peer's clock minus the own one.

    The peer must call `answer_trips`. Each trip has four timestamps, as in NTP; the offset is that
    of the fastest trip.
    """
    best, end_s = (float("inf"), 0.0), time.monotonic() + TRIPS_S
    for _ in range(TRIPS):
        sent = time.time()
        s.sendall(_ONE.pack(sent))
        arrived, answered = _TWO.unpack(read_exactly(s, _TWO.size))
        back = time.time()
        trip_s = (back - sent) - (answered - arrived)
        best = min(best, (trip_s, ((arrived - sent) + (answered - back)) / 2))
        if time.monotonic() > end_s:
            break
    return best


def answer_trips(s: socket.socket) -> None:
    """Answer the round trips of the peer until it closes the connection."""
    while data := s.recv(_ONE.size):
        arrived = time.time()
        read_exactly(s, _ONE.size - len(data))
        s.sendall(_TWO.pack(arrived, time.time()))


def transfer(  # noqa: C901
    sending: Sequence[socket.socket], receiving: Sequence[socket.socket], seconds: float
) -> float:
    """Send for some seconds on some connections and receive on others, all at once.

    The sender resets its connections at the end, so that filled buffers do not delay the next
    measurement. All connections are closed.

    Returns:
        Bits per second that the peers' kernels have acknowledged, without the time of `WARM_UP`.
    """
    begin_s = time.monotonic()
    end_s = begin_s + seconds
    first: tuple[float, int] | None = None
    rate_bps = 0.0
    is_sending = bool(sending)
    into = bytearray(_RECEIVED_BYTES)
    try:
        with selectors.DefaultSelector() as selector:
            for s in (*sending, *receiving):
                s.setblocking(False)
                event = selectors.EVENT_WRITE if s in sending else selectors.EVENT_READ
                selector.register(s, event)
            while selector.get_map() and (now_s := time.monotonic()) < end_s + DRAIN_S:
                if is_sending and first is None and now_s > begin_s + WARM_UP * seconds:
                    first = _read_acknowledged(sending)
                if is_sending and now_s >= end_s:
                    last, is_sending = _read_acknowledged(sending), False
                    if first is not None and last[0] > first[0]:
                        rate_bps = 8 * (last[1] - first[1]) / (last[0] - first[0])
                    for s in sending:
                        selector.unregister(s)
                        s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                        s.close()
                for key, event in selector.select(0.02):
                    s = key.fileobj
                    assert isinstance(s, socket.socket)
                    if event == selectors.EVENT_WRITE:
                        s.send(CHUNK)
                    elif not _receive(s, into):
                        selector.unregister(s)
    finally:
        for s in (*sending, *receiving):
            s.close()
    return rate_bps


def send_message(sockets: Sequence[socket.socket], size_bytes: int, until_s: float) -> float:
    """Send a message, divided between connections, and wait for the acknowledgements of the peer.

    Args:
        sockets: connections to one peer. They stay open.
        size_bytes: bytes of the message.
        until_s: monotonic time at which the wait ends.

    Returns:
        Bits per second from the start to the last acknowledgement.
    """
    begin_s, before = _read_acknowledged(sockets)
    unsent = dict.fromkeys(sockets, max(1, size_bytes // len(sockets)))
    total, now_s, acknowledged = sum(unsent.values()), begin_s, 0
    with selectors.DefaultSelector() as selector:
        for s in sockets:
            s.setblocking(False)
            selector.register(s, selectors.EVENT_WRITE)
        while acknowledged < total and now_s < until_s:
            if not selector.get_map():
                time.sleep(ACKNOWLEDGED_EVERY_S)
            for key, _ in selector.select(0.02) if selector.get_map() else ():
                s = key.fileobj
                assert isinstance(s, socket.socket)
                unsent[s] -= s.send(CHUNK[: unsent[s]])
                if not unsent[s]:
                    selector.unregister(s)
            now_s, count = _read_acknowledged(sockets)
            acknowledged = count - before
    return 8 * acknowledged / max(now_s - begin_s, ACKNOWLEDGED_EVERY_S)


def _receive(s: socket.socket, into: bytearray) -> bool:
    """Receive and discard bytes; return False at the end of the connection."""
    try:
        return s.recv_into(into) > 0
    except ConnectionResetError:
        return False


def _read_acknowledged(sockets: Sequence[socket.socket]) -> tuple[float, int]:
    """Return the time, and the bytes that the peers' kernels have acknowledged until then."""
    total = 0
    for s in sockets:
        info = s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        total += struct.unpack_from("Q", info, _BYTES_ACKED)[0]
    return time.monotonic(), total
