"""How much several ways carry when all send at once, over TCP. Runs in the lab's own process."""

import selectors
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from offbeat.lab.probe import WIRE, Enter, connected, reset_at_close

_CHUNK = bytes(1 << 20)
_SETTLING_SHARE = 1 / 3  # of the time, in which windows open and bursts leave


def measure_at_once(enter: Enter, ways: Sequence[Mapping[str, Any]], limit_s: float) -> list[float]:
    """Bits per second on the wire of every way while all of them are full."""
    with ExitStack() as sockets, selectors.DefaultSelector() as selector:
        for number, way in enumerate(ways):
            here, there = connected(enter, way["hosts"], way["address"])
            for end, event in (
                (here, selectors.EVENT_WRITE),
                (there, selectors.EVENT_READ),
            ):
                sockets.enter_context(end)
                end.setblocking(False)
                selector.register(end, event, number)
            reset_at_close(here)
        start_s = time.monotonic()
        _received(selector, len(ways), start_s + limit_s * _SETTLING_SHARE)
        settled_s = time.monotonic()
        received = _received(selector, len(ways), start_s + limit_s)
        took_s = time.monotonic() - settled_s
    return [total * 8 * WIRE / took_s for total in received]


def _received(selector: selectors.BaseSelector, count: int, end_s: float) -> list[int]:
    """Keep all ways full until then; bytes that arrived."""
    totals, nowhere = [0] * count, bytearray(len(_CHUNK))
    while (left_s := end_s - time.monotonic()) > 0:
        for key, event in selector.select(left_s):
            end = key.fileobj
            assert isinstance(end, socket.socket)
            if event & selectors.EVENT_WRITE:
                end.send(_CHUNK)
            else:  # dropped where it arrived: copies are the ranks' business
                totals[key.data] += end.recv_into(nowhere, 0, socket.MSG_TRUNC)
    return totals
