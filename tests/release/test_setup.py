"""Setting up: the pins resolve for each supported Python, from a package index alone."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHONS = ("3.11.2", "3.12", "3.13", "3.14")
PLATFORMS = ("x86_64-pc-windows-msvc", "aarch64-apple-darwin")
LOCAL_FILES = ("UV_CONSTRAINT", "UV_FIND_LINKS", "UV_INDEX", "UV_EXTRA_INDEX_URL", "UV_OVERRIDE")


def compile_pins(*arguments: str | Path, text: str | None = None) -> subprocess.CompletedProcess:
    """Resolve requirements as on a machine without local packages and without settings."""
    env = {name: value for name, value in os.environ.items() if name not in LOCAL_FILES}
    argv = ["pip", "compile", "--no-config", "--no-header", "--no-annotate", *map(str, arguments)]
    return subprocess.run(
        [find_uv() or "uv", *argv],
        input=text,
        # torch has no wheels for Intel Macs, and none before macOS 14.
        env=env
        | {"VIRTUAL_ENV": sys.prefix, "UV_HTTP_RETRIES": "1", "MACOSX_DEPLOYMENT_TARGET": "14.0"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def find_uv() -> str | None:
    return shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


@pytest.fixture(scope="module")
def _index():
    if find_uv() is None:
        pytest.skip("uv is not installed (it is in the extra dev)")
    probe = compile_pins("--no-cache", "-", text="iniconfig\n")
    if probe.returncode:
        pytest.skip(f"no package index can be reached: {probe.stderr.strip()[-200:]}")


@pytest.fixture(scope="module")
def pins_of(
    _index: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], list[str]]]:
    """A function of a Python, a platform or "all": the pins that uv resolves. All resolve at the
    same time, as each mostly waits for the index."""
    folder, linux = tmp_path_factory.mktemp("pins"), "x86_64-unknown-linux-gnu"
    wheels = ("--only-binary", ":all:", "-c", ROOT / "constraints.txt")
    shutil.copy(ROOT / "constraints.txt", folder / "all")
    runs = {
        **{
            python: ("--python-version", python, "--python-platform", linux, "--extra", "test")
            for python in PYTHONS
        },
        **{
            platform: ("--python-version", "3.12", "--python-platform", platform)
            for platform in PLATFORMS
        },
    }
    runs = {name: (*options, *wheels) for name, options in runs.items()}
    runs["all"] = ("--universal", "--python-version", "3.11", "--all-extras")

    def resolve(name: str) -> list[str]:
        done = compile_pins(*runs[name], "-o", folder / name, ROOT / "pyproject.toml")
        assert done.returncode == 0, done.stderr
        return read_pins(folder / name)

    with ThreadPoolExecutor(len(runs)) as pool:
        resolved = {name: pool.submit(resolve, name) for name in runs}
        yield lambda name: resolved[name].result()


@pytest.mark.parametrize("python", PYTHONS)
def test_the_test_extra_resolves_to_wheels(python, pins_of):
    constraints = {line.partition(" ;")[0] for line in read_pins(ROOT / "constraints.txt")}
    assert set(pins_of(python)) <= constraints


@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_package_resolves_to_wheels_where_it_can_plan(platform, pins_of):
    """Without the lab's pyroute2."""
    assert not [pin for pin in pins_of(platform) if pin.startswith("pyroute2")]


def test_the_pins_are_those_of_pyproject(pins_of):
    """`make constraints` changes nothing."""
    assert pins_of("all") == read_pins(ROOT / "constraints.txt")


def test_pins_are_on_any_index():
    """No local versions, and nothing that is not allowed in a file of constraints."""
    lines = read_pins(ROOT / "constraints.txt")
    assert not [line for line in lines if "+" in line or line.startswith("-") or "://" in line]


def read_pins(path: Path) -> list[str]:
    return path.read_text().splitlines()
