"""Python commands in forks of the server that has torch, whose import takes seconds."""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import reduction
from pathlib import Path
from types import ModuleType
from typing import Any

from harness.ranks import enter, free_port, namespaces_of, start_fork
from offbeat.lab import NoLab
from offbeat.lab.launch import Result, rank_environment


class ForkedPython:
    """`python SCRIPT ...` or `python -m MODULE ...` with the interface of `subprocess.Popen`.

    `workers` are those of torchrun, which are forks too if it is True. `ends`: the interpreter
    reports exceptions and ends as for a program, with its threads and objects. `namespace` is a
    file of the network namespace.
    """

    def __init__(
        self,
        args: Sequence[Any],
        stdout: Any = None,
        stderr: Any = None,
        env: Mapping[str, str] | None = None,
        *,
        stdin: Any = None,
        text: bool = True,
        cwd: Path | None = None,
        start_new_session: bool = False,
        workers: bool = False,
        ends: bool = False,
        namespace: str = "",
        start: Callable[..., Any] = start_fork,
    ) -> None:
        first, *rest = map(str, args)
        assert (first, text) == (sys.executable, True), args
        self._pipes = {}
        files = {} if stdin is None else {0: _Descriptor(stdin.fileno())}
        for number, file in ((1, stdout), (2, stdout if stderr is subprocess.STDOUT else stderr)):
            if file is subprocess.PIPE:
                file = self._pipes[number] = tempfile.TemporaryFile("w+")  # noqa: SIM115
            if file is not None:
                files[number] = _Descriptor(file.fileno())
        own = dict(os.environ if env is None else env)
        how = {"in_session": start_new_session, "forks_workers": workers, "ends": ends}
        how["namespace"] = namespace
        self._process = start(_run, rest, own, str(cwd or Path.cwd()), files, how)
        self.pid = self._process.pid
        self.terminate, self.kill = self._process.terminate, self._process.kill

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a forked command", timeout or 0.0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Return what stdout and stderr received as PIPE, after the end."""
        self.wait(timeout)
        texts = dict[int, str]()
        for number, pipe in self._pipes.items():
            with pipe:
                pipe.seek(0)
                texts[number] = pipe.read()
        return texts.get(1, ""), texts.get(2, "")


class PipedPython(ForkedPython):
    """`python -P -m MODULE` with pipes for stdin and stdout."""

    def __init__(self, args: Sequence[Any], *, env: Mapping[str, str], **_: Any) -> None:
        (there_in, here_in), (here_out, there_out) = os.pipe(), os.pipe()
        self.stdin, self.stdout = os.fdopen(here_in, "w"), os.fdopen(here_out)
        how: dict[str, Any] = {"env": env, "start_new_session": True}
        with os.fdopen(there_in) as stdin, os.fdopen(there_out, "w") as stdout:
            super().__init__([args[0], *args[2:]], stdout, stdin=stdin, **how)

    def __enter__(self) -> PipedPython:
        return self

    def __exit__(self, *_: object) -> None:
        self.stdin.close()
        self.wait()
        self.stdout.close()


def launch_forks(
    lab: Any,
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    log_dir: Path,
    timeout_s: float,
    workers: int,
    servers: int = 0,
    **_: Any,
) -> Result:
    """Run a command once per rank as `offbeat.lab.launch` does, without a lab's processes, but in
    the namespaces of its hosts."""
    files = [Path(log_dir, f"rank{rank}.log") for rank in range(workers + servers)]
    ranks, port = list[ForkedPython](), free_port()
    hosts = [] if isinstance(lab, NoLab) else namespaces_of(lab)[1:]
    begun_s = time.monotonic()
    try:
        for rank, file in enumerate(files):
            own = {**os.environ, **rank_environment(lab, rank, port, workers, servers), **env}
            where = hosts[lab.cluster.host_of(rank)] if hosts else ""
            with file.open("w") as log:
                ranks.append(ForkedPython(argv, stdout=log, stderr=log, env=own, namespace=where))
        codes = tuple(rank.wait(min(timeout_s, 90.0)) for rank in ranks)
    finally:
        for fork in ranks:
            fork.kill()
    problem = "".join(file.read_text() for file in files) if any(codes) else None
    return Result(codes, time.monotonic() - begun_s, tuple(files), problem)


class _Descriptor:
    """File descriptor that the fork gets a copy of."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _detach, (reduction.DupFd(self._number),)


def _detach(copy: Any) -> int:
    return copy.detach()


def _fork(function: Callable[..., Any], *args: Any) -> Any:
    """Fork this process, which has torch."""
    process = multiprocessing.get_context("fork").Process(target=function, args=args)
    process.start()
    return process


def _run(  # noqa: C901
    args: list[str], env: dict[str, str], cwd: str, files: dict[int, int], how: dict[str, Any]
) -> None:
    """Run a command as the interpreter would, with stdout and stderr in `files`."""
    import torch
    from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import (
        SubprocessHandler,
    )

    if how["in_session"]:
        os.setsid()
    if how["namespace"]:
        enter(how["namespace"])
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if how["forks_workers"]:
        SubprocessHandler._popen = _start_worker  # type: ignore[method-assign,assignment]
    for stream, copy in files.items():
        os.dup2(copy, stream)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    if "OMP_NUM_THREADS" in env:
        torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
    args = [word for word in args if word != "-u"]
    module = args[1] if args[0] == "-m" else ""
    sys.argv = args[1:] if module else args
    first = cwd if module else str(Path(args[0]).parent.resolve())
    sys.path[:0] = [first, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    if how["ends"] and not module:
        _run_to_the_end(args[0])
    try:
        if module:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(args[0], run_name="__main__")
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        raise SystemExit(1) from None
    finally:
        atexit._run_exitfuncs()


def _run_to_the_end(script: str) -> None:
    """Run a script as the main module, and end the interpreter."""
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__file__ = script
    code = 0
    try:
        exec(compile(Path(script).read_text(), script, "exec"), vars(main))
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        code, sys.last_value = 1, error
        sys.excepthook(type(error), error, error.__traceback__)
    ctypes.pythonapi.Py_Exit(code)


def _start_worker(_: object, args: Sequence[str], env: dict[str, str]) -> ForkedPython:
    """Start a worker of torchrun."""
    return ForkedPython(args, env=env, start_new_session=True, ends=True, start=_fork)
