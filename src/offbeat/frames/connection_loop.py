"""Loop of one thread over the connections of a process."""

from __future__ import annotations

import selectors
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from typing import Any, Generic, TypeVar

from offbeat.frames.connection import Connection
from offbeat.frames.frames import Frame, WireError, pack

P = TypeVar("P")
"""Type of a peer: an object with the attribute `connection`, which may be None if it is closed."""


class ConnectionLoop(ABC, Generic[P]):
    """Reads and writes frames of several peers, accepts connections, and can be woken.

    Args:
        me: sender of all frames.
        listener: socket on which other processes connect; None if none do.
    """

    def __init__(self, me: int, listener: socket.socket | None = None):
        self.me = me
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._wake_sender, self._wake_receiver = socket.socketpair()
        self._wake_sender.setblocking(False)
        for sock in filter(None, (self._wake_receiver, listener)):
            sock.setblocking(False)
            self._selector.register(sock, selectors.EVENT_READ)

    @abstractmethod
    def _is_open(self, peer: P) -> bool:
        """Return whether the connection of a peer is open."""

    def _on_accept(self, sock: socket.socket) -> None:
        """Add the connection of a process that has connected to the listener."""
        sock.close()

    @abstractmethod
    def _on_frame(self, peer: P, frame: Frame[Any]) -> None:
        """Process a frame. Raise WireError if it is invalid."""

    @abstractmethod
    def _on_invalid_frame(self, peer: P, error: WireError) -> None:
        """Process an invalid frame."""

    @abstractmethod
    def _on_connection_error(self, peer: P, error: OSError) -> None:
        """Process the failure of a connection, or its end."""

    def wake(self) -> None:
        """Wake the thread of the loop. Any thread may call this method."""
        with suppress(OSError):  # the loop is closed, or the socket is full of earlier wake-ups
            self._wake_sender.send(b"!")

    def _process_sockets(self, wait_s: float) -> None:
        """Wait for at most `wait_s` seconds for events of the sockets, and process them."""
        for key, events in self._selector.select(max(0.0, wait_s)):
            if key.fileobj is self._wake_receiver:
                self._wake_receiver.recv(4096)
            elif self._listener is not None and key.fileobj is self._listener:
                with suppress(OSError):  # the other end has closed the connection
                    self._on_accept(self._listener.accept()[0])
            else:
                if events & selectors.EVENT_READ:
                    self._guard(key.data, self._read)
                if events & selectors.EVENT_WRITE:
                    self._guard(key.data, self._write)

    def _register(self, peer: P) -> None:
        connection = _connection(peer)
        self._selector.register(connection.sock, connection.events, peer)

    def _guard(self, peer: P, act: Callable[[P], None]) -> None:
        """Call `act` on a peer whose connection is open, and process errors."""
        try:
            if self._is_open(peer):
                act(peer)
        except WireError as error:
            self._on_invalid_frame(peer, error)
        except OSError as error:
            self._on_connection_error(peer, error)

    def _read(self, peer: P) -> None:
        for frame in _connection(peer).receive():
            if self._is_open(peer):
                self._on_frame(peer, frame)
            if not self._is_open(peer):
                return
        self._update_events(peer)

    def _write(self, peer: P) -> None:
        """Send queued frames as far as the socket accepts them."""
        _connection(peer).flush()
        self._update_events(peer)

    def _queue(self, peer: P, kind: IntEnum, body: memoryview | None = None, **header: Any) -> None:
        size = 0 if body is None else len(body)
        _connection(peer).send(pack(kind, self.me, body_bytes=size, **header), body)

    def _send(self, peer: P, kind: IntEnum, body: memoryview | None = None, **header: Any) -> None:
        """Queue a frame, and send as far as the socket accepts it."""
        if self._is_open(peer):
            self._queue(peer, kind, body, **header)
            self._guard(peer, self._write)

    def _update_events(self, peer: P) -> None:
        """Wait for the socket events that the connection needs."""
        connection = _connection(peer)
        if connection.events != self._selector.get_key(connection.sock).events:
            self._selector.modify(connection.sock, connection.events, peer)

    def _close_sockets(self) -> None:
        """Close the listener, the selector and the sockets that wake the thread."""
        self._selector.close()
        for sock in filter(None, (self._listener, self._wake_sender, self._wake_receiver)):
            sock.close()


class ServiceLoop(ConnectionLoop[P]):
    """Connection loop of a service, which forgets peers whose connection has ended.

    Args:
        me: sender of all frames.
        listener: socket on which other processes connect.
    """

    def __init__(self, me: int, listener: socket.socket):
        super().__init__(me, listener)
        self._peers: set[P] = set()

    def close(self) -> None:
        """Close all sockets."""
        for peer in list(self._peers):
            self._drop(peer)
        self._close_sockets()

    def _is_open(self, peer: P) -> bool:
        return peer in self._peers

    def _add_peer(self, peer: P) -> None:
        self._peers.add(peer)
        self._register(peer)

    def _on_connection_error(self, peer: P, error: OSError) -> None:
        self._drop(peer)

    def _drop(self, peer: P) -> None:
        if peer in self._peers:
            self._peers.remove(peer)
            connection = _connection(peer)
            self._selector.unregister(connection.sock)
            connection.close()


def _connection(peer: Any) -> Connection[Any]:
    assert peer.connection is not None
    return peer.connection
