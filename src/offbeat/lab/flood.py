"""Measurement of the throughput of several ways that send at once over TCP, in the supervisor
process."""

import selectors
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from offbeat.lab.probe import WIRE, Enter, connect, reset_at_close

_CHUNK = bytes(1 << 20)
# share of the time before the measurement, in which TCP windows open and bursts end
_SETTLING_SHARE = 1 / 3


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
    totals, nowhere = [0] * count, bytearray(len(_CHUNK))
    while (left_s := end_s - time.monotonic()) > 0:
        for key, event in selector.select(left_s):
            end = key.fileobj
            assert isinstance(end, socket.socket)
            if event & selectors.EVENT_WRITE:
                end.send(_CHUNK)
            # MSG_TRUNC discards the data without a copy, as copies are not part of the link's cost
            else:
                totals[key.data] += end.recv_into(nowhere, 0, socket.MSG_TRUNC)
    return totals
