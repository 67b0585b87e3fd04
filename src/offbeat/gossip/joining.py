"""Joining: how a worker finds a place in a job of gossip that runs.

It asks any member. Who is asked tells it which worker it is, who its neighbours are and what all
workers have agreed on, and gives it its own x. The neighbours hear of it before it connects to
them. Nothing waits for a worker that never comes.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from offbeat.core.buckets.flat import memory_of
from offbeat.frames.frames import Frame, Header, Reader, WireError, pack
from offbeat.frames.greeting import Greeting
from offbeat.frames.secret import VARIABLE as SECRET
from offbeat.gossip.agreement import Agreement
from offbeat.gossip.clock import Line, RoundTrip, offset_s
from offbeat.gossip.protocol import Kind, pairs
from offbeat.gossip.state import Change
from offbeat.gossip.view import Edge, Known

Address = tuple[str, int]

NOBODY = 0xFFFF  # in place of an id that is still to be given
TRIPS = 8  # round trips by which clocks are compared
AGAIN_S = 0.2  # between two questions
GREETING_S = 20.0  # for the proof of the secret: what is no worker may wait for ever


@dataclass(frozen=True)
class Place:
    """Where a worker comes in: who it is, the job's first edges, those that have changed, addresses
    of its neighbours, how constants and labels run, and how many meetings there were."""

    me: int
    first: list[Edge]
    known: list[Known]
    near: dict[int, Address]
    course: list[Change]
    line: Line
    agreed: Agreement
    held: dict[int, int]

    def pack(self) -> dict[str, Any]:
        """As JSON."""
        near = {str(peer): address for peer, address in self.near.items()}
        return {**asdict(self), "near": near, "held": [*self.held.items()]}

    @staticmethod
    def unpack(said: dict[str, Any]) -> Place:
        """From JSON. WireError if it cannot be."""
        try:
            agreed = said["agreed"]
            return Place(
                int(said["me"]),
                pairs(said["first"]),
                [tuple(known) for known in said["known"]],
                {int(peer): (str(host), int(port)) for peer, (host, port) in said["near"].items()},
                [Change(*change) for change in said["course"]],
                Line(*said["line"]),
                Agreement(**{**agreed, "edges": pairs(agreed["edges"])}),
                {int(channel): int(count) for channel, count in said["held"]},
            )
        except (KeyError, TypeError, ValueError) as error:
            raise WireError(f"the place that was given cannot be: {error}") from None


@dataclass(frozen=True)
class Welcome:
    """A place, what the common clock is ahead of this worker's own, and the state to begin with."""

    place: Place
    ahead_s: float
    luggage: Tensor


def ask(address: Address, secret: bytes, about: dict[str, Any], limit_s: float) -> Welcome:
    """A place in the job of the worker at this address; asks again while that one has no time.

    RuntimeError if there is none: nobody is there, the secret is another one, or what it says.
    """
    end, where = time.monotonic() + limit_s, f"{address[0]}:{address[1]}"
    try:
        with socket.create_connection(address, timeout=min(limit_s, GREETING_S)) as sock:
            said = _Talk(sock, secret)
            sock.settimeout(limit_s)
            trips = [said.trip() for _ in range(TRIPS)]
            while True:
                answer = said.answer(Kind.JOIN, about)
                if answer.header.kind is not Kind.LATER:
                    break
                if time.monotonic() > end:
                    raise RuntimeError(
                        f"the worker at {where} had no time within {limit_s:g} s: it consolidates, "
                        "or has not trained yet; ask another one"
                    )
                time.sleep(AGAIN_S)
    except (OSError, WireError) as error:
        raise RuntimeError(
            f"the worker at {where} cannot be joined: {error}; is it the address of a worker that "
            f"gossips, and {SECRET} the job's?"
        ) from error
    if answer.header.kind is not Kind.WELCOME:
        raise RuntimeError(f"the worker at {where} refuses: {answer.meta.get('why')}")
    return Welcome(Place.unpack(answer.meta), offset_s(trips), answer.body)


class _Talk:
    """Questions and answers over a blocking socket."""

    def __init__(self, sock: socket.socket, secret: bytes):
        self._sock, self._reader = sock, Reader(Kind, _room)
        greeting, proved = Greeting(secret, asks=True), False
        while greeting.wants:
            data = sock.recv(greeting.wants)
            if not data:
                why = f"does not accept this {SECRET}" if proved else "has closed the connection"
                raise ConnectionResetError(f"it {why}")
            greeting.feed(data)
            sock.sendall(greeting.outgoing)
            proved = proved or bool(greeting.outgoing)

    def trip(self) -> RoundTrip:
        left_s = time.perf_counter()
        frame = self.answer(Kind.TIME, {})
        if frame.header.kind is not Kind.TIME:
            raise WireError(str(frame.meta.get("why")))
        return RoundTrip(left_s, float(frame.meta["now_s"]), time.perf_counter())

    def answer(self, kind: Kind, about: dict[str, Any]) -> Frame[Kind]:
        self._sock.sendall(pack(kind, NOBODY, meta=about))
        while True:
            frame = self._reader.read(self._receive)
            if frame is not None:
                return frame

    @property
    def _receive(self) -> Callable[[memoryview], int]:
        return self._sock.recv_into


def _room(header: Header[Kind]) -> tuple[Any, memoryview]:
    body = torch.empty(header.body_bytes, dtype=torch.uint8, device="cpu")
    return body, memory_of(body)
