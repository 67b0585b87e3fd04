"""The pins resolve for each supported Python, from a package index alone."""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PINS = ROOT / "constraints.txt"
LOCAL_FILES = ("UV_CONSTRAINT", "UV_FIND_LINKS", "UV_INDEX", "UV_EXTRA_INDEX_URL", "UV_OVERRIDE")
WHEELS = ("--only-binary", ":all:", "-c", PINS)
LINUX = (*WHEELS, "--extra", "test", "--python-platform", "x86_64-unknown-linux-gnu")
ELSEWHERE = (*WHEELS, "--python-version", "3.12")
RUNS = {
    **{
        python: (*LINUX, "--python-version", python)
        for python in ("3.11.2", "3.12", "3.13", "3.14")
    },
    "windows": (*ELSEWHERE, "--python-platform", "x86_64-pc-windows-msvc"),
    "macos": (*ELSEWHERE, "--python-platform", "aarch64-apple-darwin"),
    "all": ("--universal", "--python-version", "3.11", "--all-extras"),
}


def compile_pins(*arguments: str | Path, text: str | None = None) -> subprocess.CompletedProcess:
    """Resolve requirements as on a machine without local packages and without settings."""
    env = {name: value for name, value in os.environ.items() if name not in LOCAL_FILES}
    uv = Path(sys.executable).with_name("uv")
    return subprocess.run(
        [uv, "pip", "compile", "--no-config", "--no-header", "--no-annotate", *arguments],
        input=text,
        # torch has no wheels for Intel Macs, and none before macOS 14.
        env=env
        | {"VIRTUAL_ENV": sys.prefix, "UV_HTTP_RETRIES": "1", "MACOSX_DEPLOYMENT_TARGET": "14.0"},
        capture_output=True,
        text=True,
    )


def read_pins(path: Path) -> list[str]:
    return path.read_text().splitlines()


@pytest.fixture(scope="module")
def resolved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The pins of each run. All run at the same time, as each mostly waits for the index."""
    probe = compile_pins("--no-cache", "-", text="iniconfig\n")
    if probe.returncode:
        pytest.skip(f"no package index can be reached: {probe.stderr.strip()[-200:]}")
    folder = tmp_path_factory.mktemp("pins")
    shutil.copy(PINS, folder / "all")

    def resolve(name: str) -> list[str]:
        done = compile_pins(*RUNS[name], "-o", folder / name, ROOT / "pyproject.toml")
        assert done.returncode == 0, done.stderr
        return read_pins(folder / name)

    with ThreadPoolExecutor(len(RUNS)) as pool:
        return dict(zip(RUNS, pool.map(resolve, RUNS), strict=True))


@pytest.mark.timeout(400)
def test_pins_resolve_to_wheels(resolved):
    """The extra test on Linux, and the package where it can plan, without the lab's pyroute2."""
    constraints = {line.partition(" ;")[0] for line in read_pins(PINS)}
    for python in RUNS.keys() - {"windows", "macos", "all"}:
        assert {*resolved[python]} <= constraints, python
    for pin in resolved["windows"] + resolved["macos"]:
        assert not pin.startswith("pyroute2")


def test_the_pins_are_those_of_pyproject(resolved):
    """`make constraints` changes nothing."""
    assert resolved["all"] == read_pins(PINS)


def test_pins_are_on_any_index():
    """No local versions, and nothing that is not allowed in a file of constraints."""
    lines = read_pins(PINS)
    assert not [line for line in lines if "+" in line or line.startswith("-") or "://" in line]
