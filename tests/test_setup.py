"""Setting up: the pins resolve for each supported Python, from a package index alone."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.11.2", "3.12", "3.13", "3.14")
LOCAL_FILES = ("UV_CONSTRAINT", "UV_FIND_LINKS", "UV_INDEX", "UV_EXTRA_INDEX_URL", "UV_OVERRIDE")


def compile_pins(*arguments: str | Path, text: str | None = None) -> subprocess.CompletedProcess:
    """Resolve requirements as on a machine without local packages and without settings."""
    env = {name: value for name, value in os.environ.items() if name not in LOCAL_FILES}
    argv = ["pip", "compile", "--no-config", "--no-header", "--no-annotate", *map(str, arguments)]
    return subprocess.run(
        [find_uv() or "uv", *argv],
        input=text,
        env=env | {"VIRTUAL_ENV": sys.prefix, "UV_HTTP_RETRIES": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def find_uv() -> str | None:
    return shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


@pytest.fixture(scope="module")
def index():
    if find_uv() is None:
        pytest.skip("uv is not installed (it is in the extra dev)")
    probe = compile_pins("--no-cache", "-", text="iniconfig\n")
    if probe.returncode:
        pytest.skip(f"no package index can be reached: {probe.stderr.strip()[-200:]}")


@pytest.mark.usefixtures("index")
@pytest.mark.parametrize("python", PYTHONS)
def test_the_test_extra_resolves_to_wheels(python, tmp_path):
    pins = tmp_path / "pins.txt"
    resolved = compile_pins(
        *("--python-version", python, "--python-platform", "x86_64-unknown-linux-gnu"),
        *("--only-binary", ":all:", "--extra", "test", "-c", ROOT / "constraints.txt"),
        *("-o", pins, ROOT / "pyproject.toml"),
    )
    assert resolved.returncode == 0, resolved.stderr
    constraints = {line.partition(" ;")[0] for line in read_pins(ROOT / "constraints.txt")}
    assert set(read_pins(pins)) <= constraints


@pytest.mark.usefixtures("index")
@pytest.mark.parametrize("platform", ["x86_64-pc-windows-msvc", "aarch64-apple-darwin"])
def test_the_package_resolves_to_wheels_where_it_can_plan(platform, tmp_path, monkeypatch):
    """Without the lab's pyroute2. torch has no wheels for Intel Macs, and none before macOS 14."""
    monkeypatch.setenv("MACOSX_DEPLOYMENT_TARGET", "14.0")
    pins = tmp_path / "pins.txt"
    resolved = compile_pins(
        *("--python-version", "3.12", "--python-platform", platform, "--only-binary", ":all:"),
        *("-c", ROOT / "constraints.txt", "-o", pins, ROOT / "pyproject.toml"),
    )
    assert resolved.returncode == 0, resolved.stderr
    assert not [pin for pin in read_pins(pins) if pin.startswith("pyroute2")]


@pytest.mark.usefixtures("index")
def test_the_pins_are_those_of_pyproject(tmp_path):
    """`make constraints` changes nothing."""
    pins = tmp_path / "pins.txt"
    shutil.copy(ROOT / "constraints.txt", pins)
    resolved = compile_pins(
        *("--universal", "--python-version", "3.11", "--all-extras"),
        *("-o", pins, ROOT / "pyproject.toml"),
    )
    assert resolved.returncode == 0, resolved.stderr
    assert pins.read_text() == (ROOT / "constraints.txt").read_text()


def test_pins_are_on_any_index():
    """No local versions, and nothing that is not allowed in a file of constraints."""
    lines = read_pins(ROOT / "constraints.txt")
    assert not [line for line in lines if "+" in line or line.startswith("-") or "://" in line]


def read_pins(path: Path) -> list[str]:
    return path.read_text().splitlines()
