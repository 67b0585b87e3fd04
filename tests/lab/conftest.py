"""What the lab's tests share: skip without namespaces, look for what is left behind."""

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from offbeat.lab import Cluster, LabError, check_support

SOURCE = Path(__file__).parents[2] / "src"


@pytest.fixture(scope="session")
def _support() -> str | None:
    try:
        check_support(Cluster.simple(1, "10mbit"))
    except LabError as error:
        return str(error)
    return None


@pytest.fixture
def namespaces(_support: str | None) -> None:
    """Skip the test, with the reason, where no lab can be built."""
    if _support is not None:
        pytest.skip(_support)


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str], list[str]]:
    """Write a Python program and return the argv that runs it."""

    def write(code: str) -> list[str]:
        path = tmp_path / f"program{len(list(tmp_path.glob('program*.py')))}.py"
        path.write_text(code)
        return [sys.executable, "-S", str(path)]

    return write


@pytest.fixture
def owner(tmp_path: Path) -> Callable[[str], subprocess.Popen[str]]:
    """Start a separate process that owns a lab (`tmp` is a folder for it)."""

    def start(code: str) -> subprocess.Popen[str]:
        path = tmp_path / "owner.py"
        path.write_text(f"tmp = {str(tmp_path)!r}\n{code}")
        return subprocess.Popen(
            [sys.executable, str(path)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(SOURCE)},
        )

    return start


def namespace_users(inodes: list[int]) -> list[str]:
    """Processes that are in one of these network namespaces or hold one open."""
    wanted = {f"net:[{inode}]" for inode in inodes}
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            links = [process / "ns" / "net", *(process / "fd").iterdir()]
            for link in links:
                with contextlib.suppress(OSError):
                    if str(link.readlink()) in wanted:
                        found.append(str(link))
    return found


def alive(process: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def eventually(condition: Callable[[], bool], limit_s: float = 10.0) -> bool:
    """Wait until it holds; False only when the limit is over."""
    end_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.02)
    return True
