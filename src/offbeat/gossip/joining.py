"""Protocol by which a worker joins a running gossip job.

A joining worker sends a request to any member. The member assigns its id and neighbours, sends the
agreed state of the job and its own x, and notifies the neighbours before the joining worker
connects to them. Members wait at most `silent_s` seconds for a joining worker that does not
connect.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offbeat.core.buckets.flat import memory_of
from offbeat.frames.connection import Connection
from offbeat.frames.frames import Frame, Header, WireError, pack
from offbeat.frames.secret import VARIABLE as SECRET
from offbeat.gossip.clock import RoundTrip, offset_s
from offbeat.gossip.neighbours import ANOTHER_MODEL, Neighbours
from offbeat.gossip.peers import Address
from offbeat.gossip.protocol import Kind, ids_text, parse_edges
from offbeat.gossip.settings import Member
from offbeat.gossip.view import Edge

NO_ID = 0xFFFF  # sender id of a worker without an id
TRIPS = 8  # round trips to measure the clock offset
AGAIN_S = 0.2  # seconds between two requests
# limit of the proof of the secret; the address may belong to another program, which never answers
GREETING_S = 20.0


@dataclass(frozen=True)
class Place:
    """Place of a joining worker in a running job.

    Attributes:
        me: id of the joining worker.
        first: initial edges of the job.
        near: addresses of the neighbours.
        news: all that the admitting worker knows of the job.
        held: number of completed reductions.
        ahead_s: seconds by which the common clock is ahead of the local clock.
        luggage: initial state of the joining worker.
    """

    me: int
    first: list[Edge]
    near: dict[int, Address]
    news: dict[str, Any]
    held: int
    ahead_s: float
    luggage: Tensor

    @staticmethod
    def unpack(data: dict[str, Any], ahead_s: float, luggage: Tensor) -> Place:
        """Return the place of a WELCOME frame. Raise WireError if the data is invalid."""
        try:
            near = {
                int(peer): (str(host), int(port)) for peer, (host, port) in data["near"].items()
            }
            first, held = parse_edges(data["first"]), int(data["held"])
            return Place(int(data["me"]), first, near, data, held, ahead_s, luggage)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise WireError(f"the place that was given cannot be: {error}") from None


class Admission:
    """Answers of a worker to those that want to join, and the wait for those that may.

    Args:
        member: this worker.
        neighbours: its neighbours, which expect joining workers.
        luggage: callable that returns the initial state for a joining worker, mixed up to a label.
    """

    def __init__(
        self, member: Member, neighbours: Neighbours, luggage: Callable[[float], Tensor]
    ) -> None:
        self._member, self._neighbours, self._luggage = member, neighbours, luggage
        self._postponed: list[Callable[[], None]] = []

    @property
    def is_awaited(self) -> bool:
        """Whether a reduction waits for joining workers."""
        return bool(self._postponed)

    def when_all_came(self, act: Callable[[], None]) -> None:
        """Call `act` once all joining workers have connected or have been given up: they take part
        in all reductions after their place was assigned."""
        self._postponed.append(act)
        self.give_up_lost()

    def give_up_lost(self) -> None:
        """Give up joining workers that have not connected within `silent_s` seconds."""
        now, joining = time.monotonic(), self._neighbours.joining
        silent_s = self._member.settings.silent_s
        for worker in [w for w, at in joining.items() if now - at > silent_s]:
            del joining[worker]
            self._member.warn(f"worker {worker} was given a place, but has not come")
        while self._postponed and not joining:
            self._postponed.pop(0)()

    def answer(self, frame: Frame[Kind]) -> tuple[bytes, memoryview | None]:
        """Return the answer to a worker that is not a neighbour. Raise WireError to refuse it."""
        clock, me = self._member.clock, self._member.view.me
        if frame.header.kind is Kind.TIME:
            return pack(Kind.TIME, me, meta={"now_s": clock.common_s()}), None
        paused = self._neighbours.exchanging.pairing.paused
        if paused or self._member.consolidates or self._postponed or clock.unit_s is None:
            return pack(Kind.LATER, me), None
        return self._admit(frame.meta)

    def _admit(self, request: dict[str, Any]) -> tuple[bytes, memoryview]:
        """Return the WELCOME frame for a joining worker, and publish its edges.

        Raises:
            WireError: model or strategy differ, or the requested id is not available.
        """
        settings, view, neighbours = self._member.settings, self._member.view, self._neighbours
        if request.get("layout") != settings.layout:
            raise WireError(ANOTHER_MODEL)
        if request.get("strategy") != settings.strategy:
            raise WireError(f"its strategy ({request.get('strategy')}) must be {settings.strategy}")
        worker, around = self._assign_id(request.get("id"))
        neighbours.publish(view.add_worker(worker, around))
        if view.me in around:
            neighbours.peers.expect(worker)
            neighbours.joining[worker] = time.monotonic()
        body = self._luggage(self._member.clock.now())
        near = {str(peer): neighbours.addresses[peer] for peer in around}
        place = {"me": worker, "first": view.first, "near": near, **neighbours.knowledge()}
        return pack(Kind.WELCOME, view.me, meta=place, body_bytes=len(body)), memory_of(body)

    def _assign_id(self, former: Any) -> tuple[int, list[int]]:
        """Return the id and the neighbours of a joining worker.

        A returning worker keeps its former neighbours that are still members. A new worker receives
        the neighbours of this worker. Both become neighbours of this worker.

        Args:
            former: former id of a returning worker; None for a new one.

        Raises:
            WireError: the id is not available, or this worker has joined itself.
        """
        view, me = self._member.view, self._member.view.me
        members, workers = view.members(), view.workers
        if former is not None:
            if former not in workers or former in members:
                why = "there already" if former in members else f"none of {ids_text(workers)}"
                raise WireError(f"worker {former!r} is {why}")
            known = set(members) & set(self._neighbours.addresses)
            return former, sorted(known & set(view.neighbours_of(former)) | {me})
        count = 1 + max(end for edge in view.first for end in edge)
        if me >= count:
            raise WireError(f"worker {me} has joined itself; ask one of 0 to {count - 1}")
        # Ids are unique even if two workers accept joining workers at the same time.
        worker = workers[-1] + 1 + (me - workers[-1] - 1) % count
        return worker, sorted([me, *self._neighbours.peers.reachable()])


def get_place(address: Address, secret: bytes, about: dict[str, Any], limit_s: float) -> Place:
    """Return a place in the job of the worker at an address. Repeat the request while that worker
    is busy.

    Args:
        address: host and port of a member.
        secret: secret of the job.
        about: model layout, strategy and requested id.
        limit_s: limit of the repetition, in seconds.

    Raises:
        RuntimeError: no worker answers at the address, the secret is wrong, or the worker refuses.
    """
    end, where = time.monotonic() + limit_s, f"{address[0]}:{address[1]}"
    try:
        with socket.create_connection(address, timeout=min(limit_s, GREETING_S)) as sock:
            connection = Connection(sock, Kind, _room, secret, connects=True)
            trips = [_round_trip(connection, min(limit_s, GREETING_S)) for _ in range(TRIPS)]
            answer = _request(connection, Kind.JOIN, about, limit_s)
            while answer.header.kind is Kind.LATER:
                if time.monotonic() > end:
                    raise RuntimeError(
                        f"the worker at {where} had no time within {limit_s:g} s: it consolidates, "
                        "or has not trained yet; ask another one"
                    )
                time.sleep(AGAIN_S)
                answer = _request(connection, Kind.JOIN, about, limit_s)
        if answer.header.kind is not Kind.WELCOME:
            raise RuntimeError(f"the worker at {where} refuses: {answer.meta.get('why')}")
        return Place.unpack(answer.meta, offset_s(trips), answer.body)
    except (OSError, WireError) as error:
        raise RuntimeError(
            f"the worker at {where} cannot be joined: {error}; is it the address of a worker that "
            f"gossips, and {SECRET} the job's?"
        ) from error


def _round_trip(connection: Connection[Kind], limit_s: float) -> RoundTrip:
    left_s = time.perf_counter()
    frame = _request(connection, Kind.TIME, {}, limit_s)
    if frame.header.kind is not Kind.TIME:
        raise WireError(str(frame.meta.get("why")))
    return RoundTrip(left_s, float(frame.meta["now_s"]), time.perf_counter())


def _request(
    connection: Connection[Kind], kind: Kind, about: dict[str, Any], limit_s: float
) -> Frame[Kind]:
    connection.send(pack(kind, NO_ID, meta=about))
    return connection.await_frame(limit_s)


def _room(header: Header[Kind]) -> tuple[Any, memoryview]:
    body = torch.empty(header.body_bytes, dtype=torch.uint8, device="cpu")
    return body, memory_of(body)
