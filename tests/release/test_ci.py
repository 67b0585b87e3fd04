"""Continuous integration installs a browser if it can, and runs demo, checks and tests on one of
the machine's Pythons."""

import shutil
import subprocess
from pathlib import Path

import pytest

RUN = Path(__file__).parents[2] / ".ci" / "run"
TOOLS = ("bash", "dirname", "timeout", "chmod")
MADE = ["demo HOSTS=2 RATE=200mbit ITERATIONS=20", "check", "test"]
OLDER_DISTRIBUTION = (  # without the headless shell
    'case "$*" in *headless-shell) exit 100;; install*) '
    ': > "${0%/*}/chromium"; chmod +x "${0%/*}/chromium";; esac'
)


def ci(
    folder: Path, env: dict[str, str] | None = None, **programs: str
) -> subprocess.CompletedProcess[str]:
    """Run it where there are only some tools and these programs of one line."""
    for tool in TOOLS:
        (folder / tool).symlink_to(shutil.which(tool) or "")
    for name, line in {"make": 'echo "$@"', **programs}.items():
        path = folder / name.replace("_", "-")
        path.write_text(f"#!{folder}/bash\n{line}\n")
        path.chmod(0o755)
    argv = [str(folder / "bash"), str(RUN)]
    env = {"PATH": str(folder), **(env or {})}
    return subprocess.run(argv, env=env, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("programs", "has_browser"),
    [
        ({"chromium": "exit 1", "apt_get": "touch $0.called"}, True),
        ({"apt_get": OLDER_DISTRIBUTION}, True),
        ({"apt_get": "echo no; exit 100"}, False),
        ({}, False),
    ],
)
def test_tests_run_with_a_browser_or_without(tmp_path, programs, has_browser):
    done = ci(tmp_path, **programs)
    assert (done.returncode, done.stdout.splitlines()) == (0, MADE)
    assert not (tmp_path / "apt-get.called").exists()
    assert (tmp_path / "chromium").exists() == (not done.stderr) == has_browser


@pytest.mark.parametrize(
    ("day", "pythons", "chosen"),
    [
        ("008", "new newer", "new"),
        ("009", "old new newer missing", "newer"),  # `old` lacks a module or is below 3.11
        ("001", "missing", "python3"),  # `make` reports the cause
    ],
)
def test_pythons_take_turns(tmp_path, day, pythons, chosen):
    programs = {"make": "echo $PYTHON", "new": "exit 0", "newer": "exit 0", "old": "exit 1"}
    done = ci(tmp_path, {"DAY": day, "PYTHONS": pythons}, chromium="exit 1", **programs)
    assert (done.returncode, done.stdout.split()) == (0, [chosen] * len(MADE))
