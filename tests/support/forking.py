"""Python commands in forks of the server that has torch, whose import takes seconds."""

from __future__ import annotations

import atexit
import os
import runpy
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing import reduction
from pathlib import Path
from typing import Any

from support.worlds import start_fork


class ForkedPython:
    """`python SCRIPT ...` or `python -m MODULE ...` with the interface of `subprocess.Popen`."""

    def __init__(
        self,
        args: Sequence[str],
        stdout: Any = None,
        stderr: Any = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        assert args[0] == sys.executable, args
        files = [_Descriptor(file.fileno()) for file in (stdout, stderr) if file is not None]
        own = dict(os.environ if env is None else env)
        self._process = start_fork(_run, args[1:], own, str(Path.cwd()), files)
        self.terminate = self._process.terminate

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked command", timeout or 0.0)
        return self._process.exitcode


class _Descriptor:
    """File descriptor that the fork gets a copy of."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _detach, (reduction.DupFd(self._number),)


def _detach(copy: Any) -> int:
    return copy.detach()


def _run(args: list[str], env: dict[str, str], cwd: str, files: list[int]) -> None:
    """Run a command as the interpreter would, with stdout and stderr in `files`."""
    import torch

    for stream, copy in zip((1, 2), files, strict=False):
        os.dup2(copy, stream)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    if "OMP_NUM_THREADS" in env:
        torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
    module = args[1] if args[0] == "-m" else ""
    sys.argv = args[1:] if module else args
    first = cwd if module else str(Path(args[0]).parent.resolve())
    sys.path[:0] = [first, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
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
