"""Client of the supervisor process of a lab: start, requests and end."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from offbeat.lab.control_channel import Channel
from offbeat.lab.errors import LabError

_CLOSE_LIMIT_S = 15.0

# Create the packages without their __init__, which may import torch (seconds) or pydantic.
_BOOT = """
import json, sys, types
boot = json.loads(sys.argv[1])
sys.path[:] = boot["path"]
for name, folder in boot["packages"]:
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = [folder]
from offbeat.lab import supervisor
supervisor.main(*boot["arguments"])
"""


class LabProcess:
    """Running supervisor process. When it or this object's process ends, all ranks end."""

    def __init__(self) -> None:
        if sys.platform != "linux":
            raise LabError(f"the lab needs Linux (this is {sys.platform})")
        self._lock = threading.Lock()
        self._launching = threading.Lock()
        self._requests = 0
        control, control_there = socket.socketpair()
        events, events_there = socket.socketpair()
        self._control = Channel(control)
        self.events = Channel(events)
        with control_there, events_there:
            try:
                self._process = _start_supervisor(control_there, events_there)
            except OSError as error:
                self._control.close()
                self.events.close()
                raise LabError(f"cannot start {sys.executable}: {error.strerror}") from error

    @property
    def pid(self) -> int:
        """Process id of the supervisor."""
        return self._process.pid

    def request(self, do: str, fds: Sequence[int] = (), **arguments: Any) -> Any:
        """Send one request and wait for its result; raise LabError with the supervisor's message if
        it fails."""
        with self._lock:
            self._requests += 1
            number = self._requests
            try:
                self._control.send({"do": do, "id": number, **arguments}, fds)
                answer = self._receive_answer(number)
            except (BrokenPipeError, ConnectionResetError):
                answer = None
        if answer is None:
            raise LabError(f"the lab's own process ended unexpectedly ({self._describe_end()})")
        if "error" in answer:
            raise LabError(answer["error"])
        return answer["result"]

    @contextmanager
    def exclusive_launch(self) -> Iterator[None]:
        """Exclude other launches during the block, because the end of a launch kills all ranks.

        Raises:
            LabError: another launch is running.
        """
        if not self._launching.acquire(blocking=False):
            raise LabError("this lab is running a launch already; wait, or make a second Lab")
        try:
            yield
        finally:
            self._launching.release()

    def close(self) -> None:
        """End all ranks and then the supervisor. Further calls have no effect."""
        with suppress(OSError):  # the supervisor has already ended
            self._control.send({"do": "close", "id": 0})
        self._control.close()
        try:
            self._process.wait(_CLOSE_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.events.close()

    def _receive_answer(self, number: int) -> dict[str, Any] | None:
        """Return the answer to request `number`; discard answers to requests interrupted by
        Ctrl-C."""
        while (item := self._control.receive()) is not None:
            if item[0]["id"] == number:
                return item[0]
        return None

    def _describe_end(self) -> str:
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return "it closed its socket"
        return describe_exit(code)


def describe_exit(code: int) -> str:
    """Return "exited with code 3" or "was killed by SIGKILL" for an exit code of `subprocess`."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _start_supervisor(control: socket.socket, events: socket.socket) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _BOOT, _boot_arguments(control, events)],
        stdin=subprocess.DEVNULL,
        pass_fds=(control.fileno(), events.fileno()),
        start_new_session=True,  # only the owner reacts to Ctrl-C in the terminal
    )


def _boot_arguments(control: socket.socket, events: socket.socket) -> str:
    here = Path(__file__).resolve().parent
    return json.dumps(
        {
            "path": [entry or os.getcwd() for entry in sys.path],  # noqa: PTH109 (text wanted)
            "packages": [("offbeat", str(here.parent)), (str(__package__), str(here))],
            "arguments": [control.fileno(), events.fileno(), os.getpid()],
        }
    )
