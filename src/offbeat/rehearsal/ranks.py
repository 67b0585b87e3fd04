"""Ranks of a rehearsal: processes forked from one that has imported torch and offbeat, whose memory
they share.

`python -m offbeat.rehearsal.ranks` forks the ranks of scripts, see `main`.
"""

from __future__ import annotations

import ast
import gc
import importlib.util
import json
import os
import runpy
import signal
import sys
import sysconfig
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Self

import torch
import torch._dynamo  # the first optimizer of a process imports it
import torch.distributed

from offbeat.core.measuring.processors import processors
from offbeat.core.profile import Profile
from offbeat.core.profile.elsewhere import network_rate_bps
from offbeat.core.runtime import flat_session, prepare  # noqa: F401  needed by every rank
from offbeat.core.sim import prediction  # noqa: F401
from offbeat.experiments.script import MODULE
from offbeat.lab import Cluster, HostOverride, Link, NoLab, syscalls
from offbeat.lab.launch import rank_environment
from offbeat.lab.process import describe_exit
from offbeat.rehearsal.observer import record_rehearsal

GRACE_S = 0.5  # for other ranks, which write to their logs why they end
LOG_LINES = 3  # last lines of the log of a failed rank that the error states
LEAST_BPS, MOST_BPS = 1e3, 32e9  # of a cluster's description
WAIT_S = 600.0  # longest wait of a rank for another one; there may be many ranks per processor


class RankError(RuntimeError):
    """A rank has ended without success.

    Attributes:
        rank: number of the rank.
        code: exit code as in `subprocess`.
    """

    def __init__(self, rank: int, code: int) -> None:
        super().__init__(f"rank {rank} {describe_exit(code)}")
        self.rank, self.code = rank, code


class ForkedRanks:
    """Forks of this process, one per rank. They end with the block, or with this process.

    Attributes:
        rank: number of this rank; None in the process that has forked the ranks.
        sender: pipe of this rank to that process.
    """

    def __init__(self) -> None:
        self.rank: int | None = None
        self.sender: Connection
        self._running: dict[Connection, tuple[int, int]] = {}  # rank and process id

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.rank is not None:
            return
        for _rank, process in self._running.values():
            os.kill(process, signal.SIGKILL)
        for pipe, (_rank, process) in self._running.items():
            os.waitpid(process, 0)
            pipe.close()

    def fork(self, count: int) -> None:
        """Fork the ranks. The call returns in each rank, too, with its `rank`."""
        gc.collect()
        gc.freeze()  # collections in ranks neither visit nor copy what they share
        sys.stdout.flush()  # otherwise each rank writes it again
        parent = os.getpid()
        for rank in range(count):
            receiver, sender = Pipe(duplex=False)
            with warnings.catch_warnings():  # of threads, which the ranks do not need
                warnings.simplefilter("ignore", DeprecationWarning)
                process = os.fork()
            if process == 0:
                syscalls.set_parent_death_signal(signal.SIGKILL)
                if os.getppid() != parent:
                    os._exit(1)
                self.rank, self.sender = rank, sender
                return
            sender.close()
            self._running[receiver] = rank, process
        gc.unfreeze()

    def messages(self) -> Iterator[tuple[int, Any]]:
        """Yield rank and object of each message until all ranks have ended.

        Raises:
            RankError: a rank has ended without success.
        """
        while self._running:
            for pipe in wait([*self._running]):
                assert isinstance(pipe, Connection)
                rank, process = self._running[pipe]
                try:
                    message = pipe.recv()
                except EOFError:
                    del self._running[pipe]
                    pipe.close()
                    if code := os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]):
                        raise RankError(rank, code) from None
                else:
                    yield rank, message


def cluster_of(profile: Profile) -> Cluster:
    """Return the description of the hosts of a profile, one per replica."""
    sizes, hosts = profile.topology, profile.world_size
    most = max(sizes, default=0)
    links = [
        (link.name, min(max(network_rate_bps(link, hosts), LEAST_BPS), MOST_BPS))
        for link in profile.links
    ]
    return Cluster(
        hosts=hosts,
        ranks=most or None,
        links=tuple(Link(name=name, rate=f"{bps / 1e6:.4g}mbit") for name, bps in links),
        overrides=tuple(
            HostOverride(host=host, ranks=size) for host, size in enumerate(sizes) if size != most
        ),
        threads=max(1, processors() // profile.ranks),
    )


def environments_of(lab: NoLab) -> list[dict[str, str]]:
    """Return the variables of each rank."""
    port, ranks = lab.next_port(), lab.cluster.world_size
    return [rank_environment(lab, rank, port, ranks, 0) for rank in range(ranks)]


# ---- ranks of a script ----------------------------------------------------------------------


def main() -> None:
    """Run the scripts that lines of standard input describe, one after the other, and answer each
    with why it failed, or null. A line is {"script", "environments", "logs", "iterations"}."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what packages print at their import
    syscalls.set_parent_death_signal(signal.SIGKILL)
    for line in os.fdopen(os.dup(0)):
        work = json.loads(line)
        _import_packages(work["script"])
        with ForkedRanks() as ranks:
            ranks.fork(len(work["logs"]))
            if ranks.rank is not None:
                break
            answers.write(f"{json.dumps(_wait_for(ranks, work['logs']))}\n")
    else:
        return
    _run_script(work, ranks.rank)


def _wait_for(ranks: ForkedRanks, logs: list[str]) -> str | None:
    """Return the rank that failed first and the end of its log; None if all have ended."""
    try:
        for _ in ranks.messages():
            pass
    except RankError as error:
        time.sleep(GRACE_S)
        return ": ".join(filter(None, (str(error), _last_lines(logs[error.rank]))))
    return None


def _run_script(work: dict[str, Any], rank: int) -> None:
    """Run the script as the main program of this rank, whose interpreter then ends as usual."""
    script, log = work["script"], os.open(work["logs"][rank], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for target, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, log), (2, log)):
        os.dup2(source, target)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ.setdefault("OFFBEAT_LOG", "off")  # it compares real times with the prediction
    os.environ.update(work["environments"][rank])
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    record_rehearsal(work["iterations"])
    if script[0] == MODULE:
        sys.argv, sys.path[:0] = script[1:], [str(Path.cwd())]
        runpy.run_module(script[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[:0] = script, [str(Path(script[0]).absolute().parent)]
        runpy.run_path(script[0], run_name="__main__")


def _import_packages(script: list[str]) -> None:
    """Import the installed packages that a script imports, once for all ranks."""
    if script[0] == MODULE:
        return
    with suppress(SyntaxError):  # the ranks report it
        for node in ast.parse(Path(script[0]).read_bytes()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [str(node.module)]
            for name in names:
                with suppress(Exception):
                    if _is_installed(name.partition(".")[0]):
                        importlib.import_module(name)


def _is_installed(package: str) -> bool:
    """Return whether pip has installed a package. Other modules may read the rank."""
    spec = importlib.util.find_spec(package)
    folders = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    return spec is not None and str(spec.origin).startswith(folders)


def _last_lines(log: str) -> str:
    """Return the error that ended a rank: the last line of its log that is not indented."""
    lines = Path(log).read_text(errors="replace").splitlines()
    start = next((i for i in reversed(range(len(lines))) if lines[i][:1].strip()), None)
    return "" if start is None else " ".join(lines[start : start + LOG_LINES])


if __name__ == "__main__":
    main()
