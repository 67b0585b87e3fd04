"""Channel between the lab's supervisor process and its owner: JSON lines with attached file
descriptors."""

import array
import json
import socket
from collections.abc import Sequence
from typing import Any


class Channel:
    """One end of a stream socket. A message is a JSON object and a list of open files."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._buffer = b""
        self._fds: list[int] = []

    def fileno(self) -> int:
        """Return the descriptor to wait on. Messages that have already been read need `take`
        first."""
        return self._socket.fileno()

    def send(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Send one message; raise BrokenPipeError if the peer has closed the socket."""
        data = json.dumps(message | {"fds": len(fds)}).encode() + b"\n"
        sent = socket.send_fds(self._socket, [data], fds) if fds else self._socket.send(data)
        self._socket.sendall(data[sent:])

    def receive(self) -> tuple[dict[str, Any], list[int]] | None:
        """Wait for one message; return None if the peer has closed the socket."""
        while b"\n" not in self._buffer:
            if not self._read():
                return None
        return self.next_message()

    def next_message(self) -> tuple[dict[str, Any], list[int]] | None:
        """Return the next message that has already been read, or None."""
        line, newline, rest = self._buffer.partition(b"\n")
        if not newline:
            return None
        self._buffer = rest
        message = json.loads(line)
        count = message.pop("fds")
        fds, self._fds = self._fds[:count], self._fds[count:]
        return message, fds

    def receive_ready(self) -> list[dict[str, Any]] | None:
        """Return all messages that are available without waiting, without their files; None at the
        end of the stream."""
        messages = []
        open_ = True
        while open_:
            try:
                open_ = self._read(socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
        while (item := self.next_message()) is not None:
            messages.append(item[0])
        return messages if messages or open_ else None

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _read(self, flags: int = 0) -> bool:
        size = array.array("i").itemsize
        try:
            data, ancillary, _, _ = self._socket.recvmsg(
                65536, socket.CMSG_SPACE(8 * size), flags | socket.MSG_CMSG_CLOEXEC
            )
        except ConnectionResetError:
            return False
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds = array.array("i", content[: len(content) - len(content) % size])
                self._fds.extend(fds)
        self._buffer += data
        return bool(data)
