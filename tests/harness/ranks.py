"""Ranks of a job: processes forked from a server that has torch, on this host or in the network
namespaces of a lab, or threads of this process."""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import os
import pickle
import random
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import pytest

from offbeat.lab import Lab
from offbeat.lab.launch import rank_environment

TESTS = Path(__file__).parents[1]
GRACE_S = 0.5  # for a rank that hangs
_CHOSEN_PORTS = set[int]()


@dataclass(frozen=True)
class Outcome:
    """How one rank ended. `exitcode` is None if it had to be killed; `error` is the exception's
    type and text, empty on success; `seconds` counts from the start of the world."""

    rank: int
    result: Any = None
    kind: str = ""
    error: str = ""
    traceback: str = ""
    exitcode: int | None = None
    seconds: float = 0.0


class WorldError(AssertionError):
    """At least one rank did not return a result."""


def run_ranks(
    n: int,
    function: Callable[..., Any],
    *args: Any,
    where: Literal["fork", "threads", "netns"] = "fork",
    doomed: Sequence[int] = (),
    timeout_s: float = 60.0,
    imports: Sequence[str] = (),
) -> list[Any]:
    """Results of `function(*args)` on every rank; None for the `doomed` ones, which end early.

    "threads" are threads of this process, which call `function(world, rank, *args)`. "netns" are
    processes on hosts of a lab, with links of 1 Gbit/s, as `lab_of` makes it. The modules of
    `imports`, which take seconds, are imported once for all forked ranks.

    Raises:
        WorldError: with the tracebacks of the ranks that failed; whoever still runs at the timeout
            is killed.
    """
    if where == "threads":
        from harness.threads import run_threads  # imports torch

        return run_threads(n, function, *args)
    if imports:
        nested = (n, function, args, doomed, timeout_s, imports)
        return run_ranks(1, _fork_ranks, *nested, timeout_s=timeout_s)[0]
    if where == "netns":
        with lab_of(n) as lab:
            ended = watch_ranks(n, function, *args, lab=lab, doomed=doomed, timeout_s=timeout_s)
    else:
        ended = watch_ranks(n, function, *args, doomed=doomed, timeout_s=timeout_s)
    bad = [o for o in ended if o.rank not in doomed and (o.exitcode != 0 or o.kind)]
    if bad:
        raise WorldError("\n".join(_words(o) for o in bad))
    return [o.result for o in ended]


def one_of(
    n: int, function: Callable[..., Any], calls: tuple[tuple[Any, ...], ...], i: int
) -> list[Any]:
    """Per rank what the i-th call returns. All share a world, which costs as much as a training;
    only if that fails has each its own."""
    together = _at_once(n, function, calls)
    if together is None:
        return run_ranks(n, function, *calls[i])
    return [rank[i] for rank in together]


@cache
def _at_once(
    n: int, function: Callable[..., Any], calls: tuple[tuple[Any, ...], ...]
) -> list[Any] | None:
    with contextlib.suppress(WorldError):
        return run_ranks(n, in_turn, function, calls, timeout_s=80.0)
    return None


def call(function: Callable[..., Any], *args: Any) -> Any:
    """What a function returns; for `in_turn` with several functions."""
    return function(*args)


def in_turn(function: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Several calls in one world."""
    return [function(*args) for args in calls]


def watch_ranks(
    n: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = 60.0,
    only: Sequence[int] | None = None,
    doomed: Sequence[int] = (),
    lab: Lab | None = None,
) -> list[Outcome]:
    """How every rank ended, failures included. Ranks are on the hosts of a lab, if there is one.
    `only` some are started (default: all); nobody waits for the `doomed` ones."""
    ctx = _context()
    port = free_port()
    hosts = namespaces_of(lab)[1:] if lab else [""] * n
    started = time.monotonic()
    processes, pipes = {}, {}
    try:
        for rank in range(n) if only is None else only:
            here, there = ctx.Pipe(duplex=False)
            environment = variables(rank, n, port)
            if lab is not None:
                environment |= rank_environment(lab, rank, port, n, 0)
            own = (there, environment, hosts[rank], function, args)
            process = ctx.Process(target=_rank, args=own)
            process.start()
            there.close()
            processes[rank], pipes[rank] = process, here
        reports, ended = _collect(pipes, set(doomed), started, timeout_s)
        return [
            _outcome(rank, process, reports.get(rank), rank in ended)
            for rank, process in processes.items()
        ]
    finally:
        for process in processes.values():
            if process.is_alive():
                process.kill()
            process.join()
        for pipe in pipes.values():
            pipe.close()


def _fork_ranks(
    n: int,
    function: Callable[..., Any],
    args: Sequence[Any],
    doomed: Sequence[int],
    timeout_s: float,
    imports: Sequence[str],
) -> list[Any]:
    """Run a world of children of this process, which has the imported modules."""
    global _context
    for name in imports:
        importlib.import_module(name)
    gc.freeze()  # collections in ranks neither visit nor copy what they share
    _context = partial(multiprocessing.get_context, "fork")
    return run_ranks(n, function, *args, doomed=doomed, timeout_s=timeout_s)


@cache
def _context() -> Any:
    """A forkserver that imports torch once, which takes seconds; it is ready on return."""
    ctx = multiprocessing.get_context("forkserver")
    ctx.set_forkserver_preload(["harness.preloaded"])
    first = ctx.Process(target=_require_preloaded)
    # The server does not get this process's sys.path.
    paths = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        first.start()
    first.join()
    assert first.exitcode == 0, "harness.preloaded cannot be imported"
    return ctx


def _require_preloaded() -> None:
    """Fail if the server, which ignores an import that fails, has not imported the modules."""
    sys.exit(getattr(sys.modules.get("harness.preloaded"), "DONE", None) is None)


def start_fork(function: Callable[..., Any], *args: Any) -> Any:
    """Process that runs a function and has torch."""
    process = _context().Process(target=function, args=args)
    process.start()
    return process


def _collect(
    pipes: dict[int, Connection], doomed: set[int], started: float, timeout_s: float
) -> tuple[dict[int, tuple[dict[str, Any], float]], set[int]]:
    """What the ranks reported, and when, until all have that somebody waits for; and the ranks that
    have ended or are about to."""
    reports: dict[int, tuple[dict[str, Any], float]] = {}
    open_pipes = dict(pipes)
    while set(open_pipes) - doomed:
        left = started + timeout_s - time.monotonic()
        ready = wait(list(open_pipes.values()), timeout=max(0.0, left))
        if not ready:
            break
        for rank in [r for r, pipe in open_pipes.items() if pipe in ready]:
            with contextlib.suppress(EOFError, ConnectionResetError):
                reports[rank] = (
                    pickle.loads(open_pipes[rank].recv_bytes()),
                    time.monotonic() - started,
                )
            del open_pipes[rank]
    return reports, set(pipes) - set(open_pipes)


def _outcome(
    rank: int, process: Any, report: tuple[dict[str, Any], float] | None, has_ended: bool
) -> Outcome:
    if report is None:  # died or hangs: no word from it
        process.join(10 if has_ended else GRACE_S)
        return Outcome(rank, kind="silent", error="no report", exitcode=process.exitcode)
    process.join(10)
    return Outcome(rank, exitcode=process.exitcode, seconds=report[1], **report[0])


def _words(o: Outcome) -> str:
    how = "had to be killed" if o.exitcode is None else f"ended with exit code {o.exitcode}"
    return f"rank {o.rank} {how}: {o.kind} {o.error}\n{o.traceback}"


def variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What torchrun sets."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }


def free_port() -> int:
    """A port below the ephemeral range, so that no outgoing connection takes it meanwhile, from the
    part of this worker of pytest-xdist, and none that this process has chosen before."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    while True:
        port = random.SystemRandom().randrange(20000, 24000) + 4000 * (worker % 3)
        if port in _CHOSEN_PORTS:
            continue
        _CHOSEN_PORTS.add(port)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


@contextlib.contextmanager
def lab_of(n: int, rate: str = "1gbit") -> Iterator[Lab]:
    """A lab with a host for each rank."""
    from offbeat.lab import Cluster

    with Lab(Cluster.simple(n, rate)) as lab:
        yield lab


def namespaces_of(lab: Lab) -> list[str]:
    """Paths of the lab's network namespaces: the center, then the hosts."""
    folder = Path(f"/proc/{lab.process.pid}/fd")
    paths = {path.stat().st_ino: str(path) for path in folder.iterdir() if path.exists()}
    return [paths[inode] for inode in lab.inodes()]


def enter(namespace: str) -> None:
    """Move this process into a network namespace."""
    from offbeat.lab import syscalls

    fd = os.open(namespace, os.O_RDONLY)
    syscalls.setns(fd, syscalls.CLONE_NEWNET)
    os.close(fd)


def _rank(
    pipe: Connection,
    variables: dict[str, str],
    namespace: str,
    function: Callable[..., Any],
    args: Any,
) -> None:
    """Body of one process."""
    import torch
    import torch.distributed as dist

    from offbeat.testing import quick

    os.environ.update(variables)
    if namespace:
        enter(namespace)
    torch.set_num_threads(1)
    quick()
    try:
        report: dict[str, Any] = {"result": function(*args)}
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        report = {"kind": type(error).__name__, "error": str(error), "traceback": text}
    pipe.send_bytes(pickle.dumps(report))  # plain pickles: torch would share memory that goes
    pipe.close()
    if "error" in report:
        os._exit(0)  # like a script that failed: no clean leave, but no abort either
    if dist.is_initialized():
        dist.destroy_process_group()
