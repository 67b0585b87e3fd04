"""Connection between two processes of the lab for Python objects."""

import pickle
import socket
from typing import Any, Self


class Channel:
    """One end of a pair of sockets, which have no address."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket, self._file = sock, sock.makefile("rwb")

    @classmethod
    def pair(cls) -> tuple[Self, Self]:
        """Return both ends."""
        one, other = socket.socketpair()
        return cls(one), cls(other)

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._socket.fileno()

    def send(self, value: Any) -> None:
        """Send an object; raise BrokenPipeError if the peer has ended."""
        pickle.dump(value, self._file)
        self._file.flush()

    def receive(self) -> Any:
        """Wait for an object; raise EOFError if the peer has ended."""
        return pickle.load(self._file)

    def close(self) -> None:
        """Close this end."""
        with self._socket:
            self._file.close()
