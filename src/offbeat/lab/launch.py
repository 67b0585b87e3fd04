"""Launch of one process per rank in a lab, monitored until all processes have ended."""

import json
import os
import selectors
import signal
import subprocess
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from offbeat.core.plan import INSIDE
from offbeat.lab.errors import LabError
from offbeat.lab.lab import Lab, NoLab
from offbeat.lab.process import describe_exit, isolated
from offbeat.lab.switch.link_state import ChangePlan

TAIL_LINES = 15
_TERMINATE_S = 2.0  # seconds from SIGTERM to SIGKILL
_END_S = 15.0  # longest wait for a guard that kills its rank
_LOOK_S = 0.1  # longest time between two looks for ranks that have ended
_LONGEST_LINE_BYTES = 64 * 1024

OnLine = Callable[[int, str], None]


@dataclass(frozen=True)
class Result:
    """Result of a launch.

    Attributes:
        exit_codes: exit code of each rank as in `subprocess` (negative: number of the signal).
        wall_s: seconds from the start of the launch to the end of the last rank.
        log_files: log file of each rank.
        problem: None if all ranks ended with 0 in time; otherwise a sentence with the end of the
            log of the failed rank.
        changes: pairs (seconds after the start of the ranks, index in the cluster's `changes`).
    """

    exit_codes: tuple[int, ...]
    wall_s: float
    log_files: tuple[Path, ...]
    problem: str | None
    changes: tuple[tuple[float, int], ...] = ()


def launch(
    lab: Lab | NoLab,
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    log_dir: str | Path,
    timeout_s: float,
    on_line: OnLine | None = None,
    grace_s: float = 5.0,
    changes: bool = True,
    workers: int | None = None,
    servers: int = 0,
    survive: bool = False,
) -> Result:
    """Run a command once per rank and wait until all ranks have ended.

    If a rank fails, the other ranks may report for `grace_s` seconds. They then receive SIGTERM,
    and SIGKILL 2 seconds later. After `timeout_s` seconds they receive SIGTERM at once. No process
    outlives the call, even if an exception ends it.

    Args:
        lab: running lab.
        argv: complete command, such as [sys.executable, "script.py"].
        env: additional environment variables. They override this process's environment and
            `rank_environment`.
        log_dir: folder of the logs `rank{r}.log`.
        timeout_s: longest duration in seconds.
        on_line: called with rank and text of each line of output.
        grace_s: seconds between a failure and SIGTERM to the other ranks.
        changes: whether the cluster's changes take effect. After the launch, links have their
            initial values.
        workers: number of ranks that train; by default all ranks that are not servers.
        servers: number of ranks after the workers that serve parameters.
        survive: whether other ranks continue after a worker is killed by a signal. With servers
            they always continue.

    Returns:
        Exit codes, logs and the problem, if any.

    Raises:
        ValueError: `argv` is empty, or `timeout_s` is not positive.
        LabError: the lab has ended or is running another launch.
    """
    if not argv:
        raise ValueError("argv is empty; pass the complete command, [sys.executable, 'script.py']")
    if not timeout_s > 0:
        raise ValueError(f"timeout_s ({timeout_s}) must be positive")
    Path(log_dir).mkdir(parents=True, exist_ok=True)
    workers = lab.cluster.world_size - servers if workers is None else workers
    with lab.exclusive_launch(), ExitStack() as stack:
        port = lab.next_port()
        run = _Launch(lab, workers, survive or servers > 0, grace_s)
        stack.callback(run.finish)
        for number in range(workers + servers):
            host = lab.cluster.host_of(number)
            rank = _Rank(number, host, Path(log_dir, f"rank{number}.log"), on_line)
            own = rank_environment(lab, number, port, workers, servers)
            run.start(rank, list(map(str, argv)), {**os.environ, **own, **(env or {})})
        run.watch(timeout_s, lab.changes() if changes else [])
    return run.result()


def rank_environment(
    lab: Lab | NoLab, rank: int, port: int, workers: int, servers: int
) -> dict[str, str]:
    """Return the environment variables of one rank: those of torchrun, and threads, pace and
    interfaces of the lab.

    With servers, RANK and WORLD_SIZE count only workers, because scripts split their data by them.
    A server, which does not train, has the RANK of a worker.
    """
    own = {}
    if servers:
        own = {
            "OFFBEAT_SERVERS": str(servers),
            "OFFBEAT_RANK": str(rank),
            "OFFBEAT_WORLD_SIZE": str(workers + servers),
        }
    cluster = lab.cluster
    host = cluster.host_of(rank)
    if isinstance(lab, Lab):  # otherwise NCCL takes all hosts of the lab for one host
        own["NCCL_HOSTID"] = f"{lab.name}-{host}"
    interfaces = [
        {"name": link.name, "interface": lab.interface(index)}
        for index, link in enumerate(cluster.links)
    ]
    if cluster.ranks is not None:
        own["OFFBEAT_NODES"] = "auto"
        interfaces.append({"name": INSIDE, "interface": "lo"})
    return {
        "RANK": str(rank % workers),
        "LOCAL_RANK": str(rank - cluster.first_rank(host)),
        "WORLD_SIZE": str(workers),
        "LOCAL_WORLD_SIZE": str(cluster.ranks_of(host)),
        "GROUP_RANK": str(host),
        "GROUP_WORLD_SIZE": str(cluster.hosts),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(rank % workers),
        "ROLE_WORLD_SIZE": str(workers),
        "MASTER_ADDR": lab.address(0),
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": lab.name,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "False",  # rank 0 hosts the store, as there is no agent
        "OMP_NUM_THREADS": str(cluster.threads_of(host)),
        "OFFBEAT_LAUNCHER": str(os.getpid()),  # its descendants are no other programs
        # relative to other hosts; used if ranks are paced
        "OFFBEAT_SPEED": repr(cluster.speed_of(host)),
        "OFFBEAT_JITTER": repr(cluster.jitter_of(host)),
        "PYTHONUNBUFFERED": "1",  # otherwise the last output of a killed rank is lost
        "GLOO_SOCKET_IFNAME": lab.interface(0),
        "OFFBEAT_LINKS": json.dumps(interfaces),
        **own,
    }


class _Rank:
    """One rank of a launch: its guard process, its output and its log."""

    def __init__(self, number: int, host: int, log_file: Path, on_line: OnLine | None) -> None:
        self.number, self.host, self.log_file = number, host, log_file
        self.exit_code: int | None = None
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._on_line = on_line
        self._log = log_file.open("wb", buffering=0)
        self._has_log = True  # False after a failed write to the log
        self._partial = b""

    def start(self, command: list[str], env: Mapping[str, str]) -> int:
        """Start the guard. Return the descriptor of the output."""
        self._process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            start_new_session=True,  # only the owner reacts to Ctrl-C in the terminal
        )
        assert self._process.stdout is not None
        self._output = self._process.stdout
        os.set_blocking(self._output.fileno(), False)
        return self._output.fileno()

    def terminate(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Let the guard kill the rank and all its descendants."""
        self._process.send_signal(signal.SIGUSR2)

    def wait(self, limit_s: float) -> None:
        """Wait for the end of the guard, which has the exit code of the rank."""
        with suppress(subprocess.TimeoutExpired):
            self.exit_code = self._process.wait(limit_s)

    def read_output(self) -> bytes | None:
        """Read available output. Return b"" at its end, and None if nothing is available."""
        data = self._output.read(65536)
        if not data:
            return data
        self._write_log(data)
        *lines, rest = (self._partial + data).split(b"\n")
        if len(rest) > _LONGEST_LINE_BYTES:  # for example a progress bar without line ends
            lines, rest = [*lines, rest], b""
        self._partial = rest
        for line in lines:
            self._emit_line(line)
        return data

    def read_rest(self) -> None:
        """Read the output that is left, also a last line without its end."""
        while self.read_output():
            pass
        if self._partial:
            last, self._partial = self._partial, b""
            self._emit_line(last)

    def tail_text(self) -> str:
        if not self.tail:
            return f"; rank {self.number} wrote nothing to its log ({self.log_file})"
        lines = "".join(f"\n    {line}" for line in self.tail)
        return f"; the end of rank {self.number}'s log ({self.log_file}):{lines}"

    def close(self) -> None:
        """End a guard that still runs, and close the files."""
        self._process.kill()
        self.exit_code = self._process.wait()
        self._output.close()
        self._log.close()

    def _write_log(self, data: bytes) -> None:
        if not self._has_log:
            return
        try:
            self._log.write(data)
        except OSError as error:
            self._has_log = False
            warnings.warn(
                f"log ({self.log_file}) cannot be written any more: {error.strerror}; the launch "
                "goes on without it. Make room there, or give another --out",
                RuntimeWarning,
                stacklevel=2,
            )

    def _emit_line(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip("\r")
        self.tail.append(text)
        if self._on_line is not None:
            self._on_line(self.number, text)


class _Launch:
    """All ranks of one launch."""

    def __init__(self, lab: Lab | NoLab, workers: int, survive: bool, grace_s: float) -> None:
        self._lab, self._workers, self._survive, self._grace_s = lab, workers, survive, grace_s
        self._start_s = time.monotonic()
        self._wall_s = 0.0
        self._problem: tuple[_Rank, str] | None = None
        self._actions: list[tuple[float, Callable[[_Rank], None]]] = []  # (time, call)
        self._selector = selectors.DefaultSelector()
        self._ranks: list[_Rank] = []
        # time by index of the change; with several links that of the last one
        self._changes: dict[int, float] = {}

    def start(self, rank: _Rank, argv: list[str], env: Mapping[str, str]) -> None:
        """Start one rank."""
        command = isolated("guard", os.getpid(), self._lab.namespace(rank.host), argv=argv)
        self._selector.register(rank.start(command, env), selectors.EVENT_READ, rank)
        self._ranks.append(rank)

    def watch(self, timeout_s: float, changes: list[ChangePlan]) -> None:
        """Wait until every rank has ended by itself or by a signal."""
        while self._running:
            now_s = self._time_s()
            if not self._actions and now_s >= timeout_s:
                self._stop_after_timeout(now_s)
            while changes and changes[0].at_s <= now_s:
                self._lab.apply(changes[0])
                self._changes[changes.pop(0).number] = self._time_s()
            self._do_due_actions(now_s)
            due_s = self._actions[0][0] if self._actions else timeout_s
            due_s = min([due_s, now_s + _LOOK_S, *(change.at_s for change in changes[:1])])
            self._wait_for_events(max(0.0, due_s - self._time_s()))
            self._lab.require_running()
        self._wall_s = self._time_s()

    def finish(self) -> None:
        """Kill remaining processes, read the remaining output, restore the links, and close all
        files."""
        for rank in self._running:
            rank.kill()
        try:
            if self._changes:
                with suppress(LabError):  # the network has ended
                    self._lab.restore()
            for rank in self._ranks:
                rank.wait(_END_S)
                rank.read_rest()
        finally:
            for rank in self._ranks:
                rank.close()
            self._selector.close()

    def result(self) -> Result:
        return Result(
            exit_codes=tuple(rank.exit_code or 0 for rank in self._ranks),
            wall_s=self._wall_s,
            log_files=tuple(rank.log_file for rank in self._ranks),
            problem=self._problem and f"{self._problem[1]}{self._problem[0].tail_text()}",
            changes=tuple((at_s, number) for number, at_s in self._changes.items()),
        )

    @property
    def _running(self) -> list[_Rank]:
        return [rank for rank in self._ranks if rank.exit_code is None]

    def _wait_for_events(self, limit_s: float) -> None:
        ended = list[_Rank]()
        for key, _ in self._selector.select(limit_s):
            if key.data.read_output() == b"":
                self._selector.unregister(key.fd)
                ended.append(key.data)
        for rank in self._running:
            rank.wait(1.0 if rank in ended else 0.0)  # it closes its output immediately before
            if rank.exit_code:
                self._stop_after_failure(rank, rank.exit_code)

    def _stop_after_failure(self, rank: _Rank, exit_code: int) -> None:
        is_killed_worker = exit_code < 0 and rank.number < self._workers
        others = any(other.exit_code is None for other in self._ranks[: self._workers])
        if self._problem is None and not (self._survive and is_killed_worker and others):
            now_s, how = self._time_s(), describe_exit(exit_code)
            text = f"rank {rank.number} (host {rank.host}) {how} after {now_s:.1f} s"
            self._stop(rank, text, now_s + self._grace_s)

    def _stop_after_timeout(self, now_s: float) -> None:
        running = self._running
        numbers = ", ".join(str(rank.number) for rank in running)
        were = f"rank {numbers} was" if len(running) == 1 else f"ranks {numbers} were"
        text = f"timeout: after {now_s:.1f} s {were} still running, of {len(self._ranks)}, "
        self._stop(running[0], f"{text}and got stopped", now_s)

    def _stop(self, rank: _Rank, problem: str, at_s: float) -> None:
        self._problem = rank, problem
        self._actions = [(at_s, _Rank.terminate), (at_s + _TERMINATE_S, _Rank.kill)]

    def _do_due_actions(self, now_s: float) -> None:
        while self._actions and self._actions[0][0] <= now_s:
            _, act = self._actions.pop(0)
            for rank in self._running:
                act(rank)
            if not self._actions:
                self._actions = [(now_s + _TERMINATE_S, act)]  # repeat while a rank is running

    def _time_s(self) -> float:
        return time.monotonic() - self._start_s
