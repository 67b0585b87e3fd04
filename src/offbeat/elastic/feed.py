"""State of the optimizer for a process that requests to join, sent while the members train.

The first rank of the job copies the state of its optimizer at a boundary, and sends the copy over a
connection of its own, at a share of the network's rate. The joining process enters at a boundary
after it has received the copy. Until then no member waits for this process.
"""

from __future__ import annotations

import json
import math
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from offbeat.core.console import console
from offbeat.core.transport import packed
from offbeat.core.transport.listeners import open_listener
from offbeat.elastic.presence import THREAD_NAME, prove_token
from offbeat.elastic.state import Bytes, create_tensors, shapes_of, tensors_of

if TYPE_CHECKING:
    from offbeat.elastic.members import JobMember
    from offbeat.membership import Epoch, JoinRequest, Rendezvous

FEED_SHARE = 0.25  # share of the network's rate for a state that is sent while the members train
LEAST_S = 1.0  # a state that takes less time at the network's rate is sent at the boundary
LEAST_BYTES = 1 << 20  # and so is a smaller one
PIECE_BYTES = 64 << 10
PIECE_S = 0.5  # longest pause between two pieces
PROOF_S = 3.0  # longest time for the proof of a connection
SIZE_BYTES = 8  # of the number in front of the header


@dataclass(frozen=True)
class StateCopy:
    """Copy of the state of a rank's optimizer, on the host.

    Attributes:
        state: state by the numbers of the parameters, as in `state_dict` of optimizers.
        iteration: number of the iterations that the rank had finished.
        member: name of the member.
    """

    state: Mapping[Any, Any]
    iteration: int
    member: str

    @classmethod
    def of(cls, state: Mapping[Any, Any], iteration: int, member: str) -> StateCopy:
        """Return a copy of a state."""

        def on_host(leaf: Any) -> Any:
            is_tensor = isinstance(leaf, Tensor)
            return leaf.detach().to("cpu", copy=True).contiguous() if is_tensor else leaf

        return cls(tree_map(on_host, state), iteration, member)

    @property
    def origin(self) -> dict[str, Any]:
        """Return the member and the iteration of the copy, for requests and epochs."""
        return {"member": self.member, "iteration": self.iteration}


def size_bytes(state: Mapping[Any, Any]) -> int:
    """Return the bytes of the tensors of a state."""
    return sum(tensor.nbytes for tensor in tensors_of(state))


class Pace:
    """Rate of all connections that share this object.

    Args:
        bytes_per_s: the rate.
    """

    def __init__(self, bytes_per_s: float = math.inf) -> None:
        self.bytes_per_s, self._free_s, self._lock = bytes_per_s, 0.0, threading.Lock()

    @property
    def piece_bytes(self) -> int:
        """Return the bytes of a message between two pauses."""
        return max(1, int(min(PIECE_BYTES, PIECE_S * self.bytes_per_s)))

    def reserve(self, size: int) -> float:
        """Return the seconds to wait before `size` bytes are sent."""
        with self._lock:
            now = time.monotonic()
            start = max(now, self._free_s)
            self._free_s = start + size / self.bytes_per_s
            return start - now


# ---- sender -----------------------------------------------------------------------------------


class StateSender:
    """Sends a copy once, by a thread, to the process that proves to have the token.

    Args:
        copy: the copy. It is released when it has been sent.
        address: address of this host.
        pace: rate.
        timeout_s: longest wait for the other process, in seconds.

    Attributes:
        copy: the copy; None when the thread has ended.
        token: token of the connection.
        has_connected: whether the other process has connected.
        has_sent: whether all bytes have been sent.
        place: host, port and token.
        thread: thread that sends.
    """

    def __init__(self, copy: StateCopy, address: str, pace: Pace, timeout_s: float) -> None:
        self.copy: StateCopy | None = copy
        self.token, self.has_connected, self.has_sent = secrets.token_hex(16), False, False
        self._pace, self._timeout_s = pace, timeout_s
        self._closed = threading.Event()
        self._sockets = [open_listener(address)]
        host, port, *_ = self._sockets[0].getsockname()
        self.place = [host, port, self.token]
        self.thread = threading.Thread(target=self._serve, name=THREAD_NAME, daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        try:
            connection = self._accept()
            if connection is not None and self.copy is not None:
                self._send(connection, self.copy)
        except OSError:  # the other process has ended, or does not receive
            pass
        finally:
            self.copy = None
            self.close()

    def _accept(self) -> socket.socket | None:
        """Return a connection of a process with the token; None after the timeout."""
        end_s = time.monotonic() + self._timeout_s
        while (left_s := end_s - time.monotonic()) > 0 and not self._closed.is_set():
            self._sockets[0].settimeout(left_s)
            connection, _ = self._sockets[0].accept()
            with suppress(OSError):  # of a stranger
                prove_token(connection, self.token, connects=False, limit_s=PROOF_S)
                connection.settimeout(self._timeout_s)
                self._sockets.append(connection)
                self.has_connected = True
                return connection
            connection.close()
        return None

    def _send(self, connection: socket.socket, copy: StateCopy) -> None:
        """Send the shapes, then the bytes of the tensors."""
        head = packed.serialize({"origin": copy.origin, "state": shapes_of(copy.state)})
        connection.sendall(head.numel().to_bytes(SIZE_BYTES, "little") + head.numpy().tobytes())
        whole, step = Bytes(tensors_of(copy.state)), self._pace.piece_bytes
        for start in range(0, whole.size, step):
            run = range(start, min(whole.size, start + step))
            if self._closed.wait(self._pace.reserve(len(run))):
                return
            for view in whole.views(run):
                connection.sendall(view.numpy().data)
        self.has_sent = True

    def close(self) -> None:
        """Close the connection. The thread ends and releases the copy."""
        self._closed.set()
        for one in self._sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


class Sending(Protocol):
    """Session whose state is sent ahead."""

    @property
    def sends_state_ahead(self) -> bool:
        """Whether the state is large and may differ between members."""
        ...

    @property
    def network_bytes_per_s(self) -> float:
        """Rate of the network."""
        ...

    def copy_state(self) -> Any:
        """Return a copy of the state."""


class StateSenders:
    """Copies of the optimizer's state of the first rank for processes that request to join.

    Every rank has this object. That of the first rank is used.

    Args:
        member: this process as a member.
        session: session of this process.
        timeout_s: longest wait for a joining process, in seconds.
    """

    def __init__(self, member: JobMember, session: Sending, timeout_s: float) -> None:
        self._member, self._session, self._timeout_s = member, session, timeout_s
        self._senders: dict[str, tuple[int, StateSender]] = {}  # by member, with the epoch
        self._pace = Pace()

    def select(
        self, requests: Sequence[JoinRequest]
    ) -> tuple[Sequence[JoinRequest], dict[str, Any]]:
        """Begin to send the state to joining processes that need it and have none.

        Args:
            requests: requests of all joining processes.

        Returns:
            Requests of processes that can join now. By name, the origins of the states that these
            processes have; none if the state is sent when members change.
        """
        names = {request.member for request in requests}
        for name in [name for name in self._senders if name not in names]:
            self._senders.pop(name)[1].close()
        if not (requests and self._session.sends_state_ahead):
            return requests, {}
        ready = [request for request in requests if request.details.get("state") is not None]
        for request in requests:
            if request not in ready:
                self._serve(request)
        return ready, {request.member: request.details["state"] for request in ready}

    def _serve(self, request: JoinRequest) -> None:
        """Begin to send the state to a process, unless that is under way."""
        member, name, number = self._member, request.member, self._member.epoch.number
        if (known := self._senders.get(name)) is not None:
            begun, sender = known
            is_found = sender.has_connected or begun == number  # keys of an epoch end with it
            is_lost = request.details.get("lost") == sender.token
            if not is_lost and (sender.has_sent or (sender.copy is not None and is_found)):
                return
            sender.close()
            del self._senders[name]
        copies = [one.copy for _, one in self._senders.values()]
        copy = next((one for one in copies if one is not None), None) or self._session.copy_state()
        self._pace.bytes_per_s = FEED_SHARE * self._session.network_bytes_per_s
        sender = StateSender(copy, member.address, self._pace, self._timeout_s)
        try:
            keys = member.membership.rendezvous(number)
            keys.set(_key_of(name), json.dumps(sender.place).encode())
        except RuntimeError:  # the service does not respond
            sender.close()
            raise
        self._senders[name] = number, sender
        console.print(
            "members",
            f"{name} requests to join: {size_bytes(copy.state) / 1e6:.1f} MB of optimizer state "
            "are sent while training continues",
            iteration=copy.iteration,
        )

    def close(self) -> None:
        """Close all connections."""
        while self._senders:
            self._senders.popitem()[1][1].close()


def _key_of(name: str) -> str:
    return f"state/{name}"


# ---- receiver ---------------------------------------------------------------------------------


class StateReceiver:
    """State that this process has received before it joins a running job.

    Args:
        timeout_s: longest wait for the sender, in seconds.

    Attributes:
        copy: the state; None before it has arrived.
        lost: token of the last connection that has failed; "" for none.
        losses: number of connections that have failed.
    """

    def __init__(self, timeout_s: float) -> None:
        self.copy: StateCopy | None = None
        self.lost, self.losses, self._timeout_s = "", 0, timeout_s
        self._members = set[str]()  # of the newest epoch since the state has arrived

    def find_sender(self, epoch: Epoch, keys: Rendezvous, name: str) -> list[Any] | None:
        """Return the place of the sender for this process; None if there is none.

        Args:
            epoch: newest epoch of the job.
            keys: its keys.
            name: name of this process in the job.
        """
        from offbeat.membership import MembershipError

        if self.copy is not None:
            if self._members.isdisjoint(epoch.members):  # the state is that of an earlier run
                self.copy = None
            self._members = {*epoch.members}
            return None
        self._members = {*epoch.members}
        with suppress(MembershipError, TimeoutError):
            if keys.check([_key_of(name)]):
                place = json.loads(keys.get(_key_of(name), 1.0))
                return None if place[2] == self.lost else place
        return None

    def receive(self, place: Sequence[Any], on_progress: Callable[[], None] | None = None) -> bool:
        """Receive the state. Return whether it has arrived.

        Args:
            place: host, port and token of the sender.
            on_progress: called after each received piece.
        """
        (host, port, token), self.copy = place, None
        try:
            with socket.create_connection((host, port), self._timeout_s) as connection:
                prove_token(connection, token, connects=True, limit_s=PROOF_S)
                connection.settimeout(self._timeout_s)
                self.copy = _receive_copy(connection, on_progress)
        except (OSError, ValueError):
            self.lost, self.losses = token, self.losses + 1
        return self.copy is not None

    def facts(self) -> dict[str, Any]:
        """Return the details of a request to join."""
        return {"state": None if self.copy is None else self.copy.origin, "lost": self.lost}


def _receive_copy(
    connection: socket.socket, on_progress: Callable[[], None] | None = None
) -> StateCopy:
    size = bytearray(SIZE_BYTES)
    _receive(connection, memoryview(size))
    head = torch.empty(int.from_bytes(size, "little"), dtype=torch.uint8, device="cpu")
    _receive(connection, head.numpy().data)
    described = packed.load(head)
    state = create_tensors(described["state"], torch.device("cpu"))
    whole = Bytes(tensors_of(state))
    for start in range(0, whole.size, PIECE_BYTES):
        for view in whole.views(range(start, min(whole.size, start + PIECE_BYTES))):
            _receive(connection, view.numpy().data)
        if on_progress is not None:
            on_progress()
    return StateCopy(state, **described["origin"])


def _receive(connection: socket.socket, into: memoryview) -> None:
    """Fill a buffer. Raise ConnectionResetError if the other end has closed the connection."""
    while len(into):
        count = connection.recv_into(into)
        if not count:
            raise ConnectionResetError("the sender of the state has closed the connection")
        into = into[count:]
