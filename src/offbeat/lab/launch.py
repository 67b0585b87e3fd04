"""Launch of one process per rank in a lab, monitored until all processes have ended."""

import json
import os
import selectors
import signal
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from offbeat.core.plan import INSIDE
from offbeat.lab.errors import LabError
from offbeat.lab.lab import Lab, NoLab
from offbeat.lab.process import describe_exit

TAIL_LINES = 15
_TERMINATE_S = 2.0  # seconds from SIGTERM to SIGKILL
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
    with lab.process.exclusive_launch():
        watch = _Watch(lab, Path(log_dir), on_line, workers, servers, survive or servers > 0)
        try:
            watch.start([str(part) for part in argv], env or {}, changes=changes)
            watch.run(timeout_s, grace_s)
        finally:
            watch.finish()
        return watch.result()


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
    if lab.host_key(host) is not None:  # otherwise NCCL takes all hosts of the lab for one host
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
        # relative to other hosts; used if ranks are paced
        "OFFBEAT_SPEED": repr(cluster.speed_of(host)),
        "OFFBEAT_JITTER": repr(cluster.jitter_of(host)),
        "PYTHONUNBUFFERED": "1",  # otherwise the last output of a killed rank is lost
        "GLOO_SOCKET_IFNAME": lab.interface(0),
        "OFFBEAT_LINKS": json.dumps(interfaces),
        **own,
    }


@dataclass
class _Rank:
    """State of one rank during the launch."""

    number: int
    host: int
    key: str
    log_file: Path
    log: IO[bytes]
    pipe: int
    has_log: bool = True  # False after a failed write to the log
    started: bool = False
    exit_code: int | None = None
    partial: bytes = b""
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))

    @property
    def is_running(self) -> bool:
        return self.started and self.exit_code is None

    def close_pipe(self) -> None:
        if self.pipe >= 0:
            os.close(self.pipe)
            self.pipe = -1

    def close(self) -> None:
        self.close_pipe()
        self.log.close()


class _Watch:
    """Monitor of all ranks of one launch."""

    def __init__(
        self,
        lab: Lab | NoLab,
        log_dir: Path,
        on_line: OnLine | None,
        workers: int | None,
        servers: int,
        survive: bool,
    ) -> None:
        self._lab, self._survive = lab, survive
        self._workers = lab.cluster.world_size - servers if workers is None else workers
        self._servers = servers
        self._process = lab.process
        self._on_line = on_line
        self._port = lab.next_port()
        self._start_s = time.monotonic()
        self._wall_s = 0.0
        self._problem: str | None = None
        self._failed: tuple[_Rank, float] | None = None
        self._actions: list[tuple[float, int]] = []  # (time, signal), earliest first
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._process.events, selectors.EVENT_READ)
        self._log_dir = log_dir
        self._ranks: list[_Rank] = []
        # time by index of the change; with several links that of the last one
        self._changes: dict[int, float] = {}

    def start(self, argv: list[str], env: Mapping[str, str], *, changes: bool) -> None:
        self._process.request("begin", changes=self._lab.changes() if changes else [])
        for number in range(self._workers + self._servers):
            own = rank_environment(self._lab, number, self._port, self._workers, self._servers)
            self._start_rank(number, argv, {**os.environ, **own, **env})

    def run(self, timeout_s: float, grace_s: float) -> None:
        """Wait until every rank has ended by itself or by a signal."""
        while any(rank.is_running for rank in self._ranks):
            now_s = self._time_s()
            if not self._actions and now_s >= timeout_s:
                self._stop_after_timeout(now_s)
            self._send_due_signals(now_s)
            limit_s = self._actions[0][0] if self._actions else timeout_s
            self._wait_for_events(max(0.0, limit_s - self._time_s()))
            if self._failed is not None and self._problem is None:
                self._stop_after_failure(grace_s)
        self._wall_s = self._time_s()

    def finish(self) -> None:
        """Kill remaining processes, read the remaining output, and close all files."""
        with suppress(LabError):  # the lab has ended, and all processes with it
            self._process.request("kill_all")
        try:
            with suppress(LabError):
                self._collect_exits()
            for rank in self._ranks:
                self._read_rest(rank)
        finally:
            for rank in self._ranks:
                rank.close()
            self._selector.close()

    def result(self) -> Result:
        problem = self._problem
        if self._failed is not None and not problem:
            problem = self._describe_failure()
        return Result(
            exit_codes=tuple(_require_exit_code(rank.exit_code) for rank in self._ranks),
            wall_s=self._wall_s,
            log_files=tuple(rank.log_file for rank in self._ranks),
            problem=problem and f"{problem}{self._log_tail_text()}",
            changes=tuple((at_s, number) for number, at_s in self._changes.items()),
        )

    # --- starting and reading ----------------------------------------------------------------

    def _start_rank(self, number: int, argv: list[str], env: dict[str, str]) -> None:
        host = self._lab.cluster.host_of(number)
        log_file = self._log_dir / f"rank{number}.log"
        pipe, output = os.pipe()
        os.set_blocking(pipe, False)
        log = log_file.open("wb", buffering=0)
        rank = _Rank(number, host, f"{self._port}/{number}", log_file, log, pipe)
        self._ranks.append(rank)
        self._selector.register(pipe, selectors.EVENT_READ, rank)
        try:
            self._process.request(
                "start",
                fds=[output],
                key=rank.key,
                argv=argv,
                env=env,
                cwd=str(Path.cwd()),
                host=self._lab.host_key(host),
            )
        finally:
            os.close(output)
        rank.started = True

    def _wait_for_events(self, limit_s: float) -> None:
        for key, _ in self._selector.select(limit_s):
            if key.data is None:
                self._collect_exits()
            else:
                self._read_output(key.data)

    def _collect_exits(self) -> None:
        messages = self._process.events.receive_ready()
        if messages is None:
            self._process.request("kill_all")  # raises an error with the exit code of the process
            raise LabError("the lab's own process closed its events")
        ranks = {rank.key: rank for rank in self._ranks}
        for message in messages:
            if "change" in message:
                self._changes[message["change"]] = message["at_s"]
                continue
            rank = ranks.get(message["key"])
            if rank is not None:  # unknown keys belong to an earlier launch that was interrupted
                self._record_exit(rank, message["exit_code"])

    def _record_exit(self, rank: _Rank, exit_code: int) -> None:
        rank.exit_code = exit_code
        if self._is_expendable(rank):
            return
        if exit_code != 0 and self._failed is None and self._problem is None:
            self._failed = (rank, self._time_s())

    def _is_expendable(self, rank: _Rank) -> bool:
        """Return whether a killed worker does not end the launch, because other workers
        continue."""
        killed = rank.exit_code is not None and rank.exit_code < 0
        others = any(other.is_running for other in self._ranks[: self._workers])
        return self._survive and killed and rank.number < self._workers and others

    def _read_output(self, rank: _Rank) -> bool:
        """Read available output of a rank; return False at its end or if nothing is available."""
        if rank.pipe < 0:
            return False
        try:
            data = os.read(rank.pipe, 65536)
        except BlockingIOError:
            return False
        if not data:
            self._selector.unregister(rank.pipe)
            rank.close_pipe()
            return False
        if rank.has_log:
            try:
                rank.log.write(data)
            except OSError as error:
                rank.has_log = False
                warnings.warn(
                    f"log ({rank.log_file}) cannot be written any more: {error.strerror}; the "
                    "launch goes on without it. Make room there, or give another --out",
                    RuntimeWarning,
                    stacklevel=2,
                )
        self._split_lines(rank, data)
        return True

    def _split_lines(self, rank: _Rank, data: bytes) -> None:
        *lines, rest = (rank.partial + data).split(b"\n")
        if len(rest) > _LONGEST_LINE_BYTES:  # for example a progress bar without line ends
            lines, rest = [*lines, rest], b""
        rank.partial = rest
        for line in lines:
            self._emit_line(rank, line)

    def _emit_line(self, rank: _Rank, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip("\r")
        rank.tail.append(text)
        if self._on_line is not None:
            self._on_line(rank.number, text)

    def _read_rest(self, rank: _Rank) -> None:
        while self._read_output(rank):
            pass
        if rank.partial:
            last, rank.partial = rank.partial, b""
            self._emit_line(rank, last)

    # --- ending ------------------------------------------------------------------------------

    def _stop_after_failure(self, grace_s: float) -> None:
        self._problem = self._describe_failure()
        at_s = self._time_s() + grace_s
        self._actions = [(at_s, signal.SIGTERM), (at_s + _TERMINATE_S, signal.SIGKILL)]

    def _stop_after_timeout(self, now_s: float) -> None:
        running = [rank for rank in self._ranks if rank.is_running]
        self._failed = (running[0], now_s)
        self._problem = (
            f"timeout: after {now_s:.1f} s {_describe_ranks(running)} still running, of "
            f"{len(self._ranks)}, and got stopped"
        )
        self._actions = [(now_s, signal.SIGTERM), (now_s + _TERMINATE_S, signal.SIGKILL)]

    def _send_due_signals(self, now_s: float) -> None:
        while self._actions and self._actions[0][0] <= now_s:
            _, number = self._actions.pop(0)
            keys = [rank.key for rank in self._ranks if rank.is_running]
            self._process.request("signal", keys=keys, signal=int(number))
            if not self._actions:
                self._actions = [(now_s + _TERMINATE_S, number)]  # repeat while a rank is running

    def _time_s(self) -> float:
        return time.monotonic() - self._start_s

    def _describe_failure(self) -> str:
        assert self._failed is not None
        rank, at_s = self._failed
        how = describe_exit(_require_exit_code(rank.exit_code))
        return f"rank {rank.number} (host {rank.host}) {how} after {at_s:.1f} s"

    def _log_tail_text(self) -> str:
        assert self._failed is not None
        rank, _ = self._failed
        if not rank.tail:
            return f"; rank {rank.number} wrote nothing to its log ({rank.log_file})"
        lines = "".join(f"\n    {line}" for line in rank.tail)
        return f"; the end of rank {rank.number}'s log ({rank.log_file}):{lines}"


def _require_exit_code(exit_code: int | None) -> int:
    assert exit_code is not None, "every rank has ended when this is asked"
    return exit_code


def _describe_ranks(ranks: list[_Rank]) -> str:
    numbers = ", ".join(str(rank.number) for rank in ranks)
    return f"rank {numbers} was" if len(ranks) == 1 else f"ranks {numbers} were"
