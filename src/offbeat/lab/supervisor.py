"""Supervisor process of a lab: holds the namespaces, starts ranks in them, and ends all of them.

The process is a new single-threaded interpreter, so that it may enter user namespaces and fork. The
owner (threads, torch, a notebook) may not do so. The supervisor imports only the standard library
and, for a network, pyroute2. It ends with its owner for any reason, and all processes below it end
first:

* The supervisor adopts orphans, so no descendant can escape by a fork or a new session.
* Each rank receives SIGKILL when the supervisor dies, even if SIGKILL ends the supervisor.
"""

import os
import selectors
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbeat.lab import syscalls
from offbeat.lab.control_channel import Channel
from offbeat.lab.errors import LabError
from offbeat.lab.switch.link_state import ChangePlan, LinkPlan

if TYPE_CHECKING:
    from offbeat.lab.network import Network

_OWNER_CHANGED = signal.SIGUSR1
_KILL_LIMIT_S = 10.0


def main(control_fd: int, events_fd: int, owner: int) -> None:
    """Serve the owner (a process id) until it closes the control socket or ends."""
    control = Channel(socket.socket(fileno=control_fd))
    events = Channel(socket.socket(fileno=events_fd))
    supervisor = _Supervisor(control, events, owner)
    try:
        supervisor.serve()
    except (BrokenPipeError, KeyboardInterrupt):
        pass
    finally:
        supervisor.end()


class Schedule:
    """Pending changes of one launch; times are seconds of the caller's clock."""

    def __init__(self, start_s: float, changes: Sequence[ChangePlan]) -> None:
        self._start_s = start_s
        # stable sort: equal times keep their order
        self._left = sorted(changes, key=lambda change: change.at_s)

    def wait_s(self, now_s: float) -> float | None:
        """Return the seconds until the next change; None without one."""
        return max(0.0, self._start_s + self._left[0].at_s - now_s) if self._left else None

    def pop_due(self, now_s: float) -> list[ChangePlan]:
        """Remove and return the changes that are due."""
        count = sum(self._start_s + change.at_s <= now_s for change in self._left)
        due, self._left = self._left[:count], self._left[count:]
        return due

    def since_start_s(self, now_s: float) -> float:
        """Return the seconds since the start of the launch."""
        return now_s - self._start_s


class _Supervisor:
    def __init__(self, control: Channel, events: Channel, owner: int) -> None:
        self._control = control
        self._events = events
        self._owner = owner
        self._network: Network | None = None
        self._schedule = Schedule(0.0, ())
        self._initial_plans: list[LinkPlan] | None = None  # before the first change of a launch
        self._ending = False
        self._keys: dict[int, str] = {}  # key of the owner by process id of the rank
        self._wakeup = _catch_signals()
        syscalls.adopt_orphans()
        self._watch_owner()

    def serve(self) -> None:
        """Answer requests and report ended ranks until the owner has ended."""
        selector = selectors.DefaultSelector()
        selector.register(self._control, selectors.EVENT_READ)
        selector.register(self._wakeup, selectors.EVENT_READ)
        while os.getppid() == self._owner:
            limit_s = self._schedule.wait_s(time.monotonic())
            ready = [key.fileobj for key, _ in selector.select(limit_s)]
            if self._wakeup in ready and signal.SIGTERM in self._wakeup.recv(4096):
                return
            self._reap()
            self._apply_due_changes()
            if self._control in ready and not self._serve_ready():
                return

    def end(self) -> None:
        """End all processes below this one."""
        self._ending = True
        self.kill_all()

    def kill_all(self, spared: int | None = None) -> None:
        """Kill every descendant except `spared` by SIGKILL, in any process group or session."""
        limit_s = time.monotonic() + _KILL_LIMIT_S
        while time.monotonic() < limit_s:
            left = [child for child in _children() if child != spared]
            for child in left:
                # a set-user-id program cannot be killed, but may end by itself
                with suppress(PermissionError):
                    os.kill(child, signal.SIGKILL)
            if not self._reap() or not left:
                return
            time.sleep(0.002)

    def _serve_ready(self) -> bool:
        item = self._control.receive()
        while item is not None:
            if item[0]["do"] == "close":
                return False
            self._control.send(self._execute_request(*item))
            item = self._control.next_message()
            if item is None:
                return True
        return False

    def _execute_request(self, message: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        try:
            return {"id": message["id"], "result": self._dispatch(message, fds)}
        except LabError as error:
            return {"id": message["id"], "error": str(error)}
        except Exception as error:  # the owner reports the error, and this process continues
            return {"id": message["id"], "error": f"{type(error).__name__}: {error}"}
        finally:
            for fd in fds:
                os.close(fd)

    def _dispatch(self, message: dict[str, Any], fds: list[int]) -> Any:  # noqa: C901
        match message["do"]:
            case "build":
                return self._build(message["plan"])
            case "start":
                return self._start_rank(message, fds[0])
            case "signal":
                return self._signal_ranks(message["keys"], message["signal"])
            case "kill_all":
                return self._kill_ranks()
            case "change":
                return self._require_network().change(ChangePlan(**message["change"]))
            case "begin":
                return self._begin_launch(message["changes"])
            case "probe":
                return self._probe(message)
            case "flood":
                return self._flood(message)
            case "counters":
                return self._require_network().counters()
            case "inside_counters":
                return self._require_network().inside_counters()
        raise AssertionError(f"unknown request {message['do']!r}")

    def _build(self, message: dict[str, Any]) -> dict[str, Any]:
        from offbeat.lab.network import Network, NetworkPlan  # import pyroute2 only if needed

        self._network = Network(NetworkPlan.from_message(message))
        self._watch_owner()  # entering a user namespace clears the death signal
        return {
            "congestion_control": self._network.congestion_control,
            "inodes": self._network.inodes(),
            "switched": self._network.switched,
        }

    def _begin_launch(self, changes: list[dict[str, Any]]) -> None:
        """Start the schedule of changes at the beginning of a launch."""
        self._schedule = Schedule(time.monotonic(), [ChangePlan(**change) for change in changes])

    def _kill_ranks(self) -> None:
        """Kill all processes except the switch and restore the links at the end of a launch."""
        self._schedule = Schedule(0.0, ())
        self.kill_all(spared=self._switch_pid)
        if self._initial_plans is not None:
            self._require_network().apply_plans(self._initial_plans)
            self._initial_plans = None

    def _apply_due_changes(self) -> None:
        """Apply the changes that are due and report them."""
        for change in self._schedule.pop_due(time.monotonic()):
            network = self._require_network()
            self._initial_plans = self._initial_plans or network.plans_in_force()
            network.change(change)
            at_s = self._schedule.since_start_s(time.monotonic())
            with suppress(OSError):  # the owner has ended
                self._events.send({"change": change.number, "at_s": at_s})

    def _probe(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        from offbeat.lab.probe import measure

        return measure(self._require_network().enter, message["ways"], message["budget_s"])

    def _flood(self, message: dict[str, Any]) -> list[float]:
        from offbeat.lab.probe import measure_at_once

        return measure_at_once(self._require_network().enter, message["ways"], message["limit_s"])

    @property
    def _switch_pid(self) -> int | None:
        switch = None if self._network is None else self._network.switch
        return None if switch is None else switch.pid

    def _require_network(self) -> "Network":
        assert self._network is not None, "no network was built"
        return self._network

    def _start_rank(self, message: dict[str, Any], output: int) -> int:
        host = message["host"]
        namespace = None if host is None else self._require_network().host_fd(host)
        supervisor = os.getpid()
        process = os.fork()
        if process == 0:
            _execute(message, output, namespace, supervisor)
        self._keys[process] = message["key"]
        return process

    def _signal_ranks(self, keys: list[str], number: int) -> None:
        for process, key in self._keys.items():  # contains only ranks that have not been reaped
            if key in keys:
                _signal_group(process, number)

    def _reap(self) -> bool:
        """Collect ended children and report ranks among them; return False if no child is left."""
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return False
            if ended is None:
                return True
            # Until the child is reaped, no other process group can have its number.
            if ended.si_pid in self._keys:
                _signal_group(ended.si_pid, signal.SIGKILL)
            _, status = os.waitpid(ended.si_pid, 0)
            self._report(ended.si_pid, os.waitstatus_to_exitcode(status))

    def _report(self, process: int, exit_code: int) -> None:
        if process == self._switch_pid and not self._ending:
            raise LabError(f"the switch between the hosts ended with code {exit_code}")
        key = self._keys.pop(process, None)
        if key is None:
            return
        with suppress(OSError):  # the owner has ended
            self._events.send({"key": key, "exit_code": exit_code})

    def _watch_owner(self) -> None:
        # The signal also arrives if only a thread of the owner ends, so `serve` checks the owner.
        syscalls.set_parent_death_signal(_OWNER_CHANGED)


def _catch_signals() -> socket.socket:
    """Return a socket that becomes readable with the numbers of the received signals."""
    wakeup, inner = socket.socketpair()
    inner.setblocking(False)
    signal.set_wakeup_fd(inner.detach(), warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM, _OWNER_CHANGED):
        signal.signal(number, lambda _number, _frame: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return wakeup


def _execute(message: dict[str, Any], output: int, namespace: int | None, supervisor: int) -> None:
    """Enter the namespace and execute the rank's command in the forked child. Never returns."""
    try:
        if namespace is not None:
            syscalls.setns(namespace, syscalls.CLONE_NEWNET)
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
            # the executed program would inherit ignored signals
            signal.signal(number, signal.SIG_DFL)
        syscalls.set_parent_death_signal(signal.SIGKILL)
        if os.getppid() != supervisor:
            os._exit(1)
        os.chdir(message["cwd"])
        os.execvpe(message["argv"][0], message["argv"], message["env"])
    except BaseException as error:
        os.write(2, f"offbeat lab: cannot start {message['argv'][0]!r}: {error}\n".encode())
    finally:
        os._exit(127)


def _signal_group(process: int, number: int) -> None:
    try:
        os.killpg(process, number)
    except ProcessLookupError:
        # A rank that has just been forked has no process group yet.
        with suppress(ProcessLookupError):
            os.kill(process, number)


def _children() -> list[int]:
    """Return the process ids of the direct children, including adopted ones."""
    own = os.getpid()
    listed = Path(f"/proc/{own}/task/{own}/children")
    if listed.exists():
        return [int(process) for process in listed.read_text().split()]
    return [process for process in _all_processes() if _parent(process) == own]


def _all_processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _parent(process: int) -> int | None:
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None
