"""What the lab's tests share: skip without namespaces, small programs to run."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from offbeat.lab import Cluster, LabError, check_support

SOURCE = Path(__file__).parents[3] / "src"


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
