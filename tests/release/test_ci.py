"""What continuous integration runs: a browser is installed if that is possible, then the demo and
the tests on one of the machine's Pythons."""

import shutil
import subprocess
from pathlib import Path

import pytest

RUN = Path(__file__).parents[2] / ".ci" / "run"
TOOLS = ("bash", "dirname", "timeout", "chmod")
MADE = """made demo HOSTS=2 RATE=200mbit ITERATIONS=20
made .venv/installed-dev
made test
"""
SAID = "chromium is missing and cannot be installed here: the browser tests will skip\n"


def ci(
    folder: Path, env: dict[str, str] | None = None, **programs: str
) -> subprocess.CompletedProcess[str]:
    """Run it where there are only some tools and these programs of one line."""
    for tool in TOOLS:
        (folder / tool).symlink_to(shutil.which(tool) or "")
    for name, line in {"make": 'echo made "$@"', **programs}.items():
        path = folder / name.replace("_", "-")
        path.write_text(f"#!{folder}/bash\n{line}\n")
        path.chmod(0o755)
    argv = [str(folder / "bash"), str(RUN)]
    return subprocess.run(
        argv,
        env={"PATH": str(folder), **(env or {})},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("programs", "said"),
    [
        ({"chromium": "exit 1", "apt_get": "touch $0.asked"}, ""),
        ({"apt_get": "echo no; exit 100"}, SAID),
        ({}, SAID),
        (
            # As a distribution without the headless shell.
            {
                "apt_get": 'case "$*" in *headless-shell) exit 100;; install*) '
                ': > "${0%/*}/chromium"; chmod +x "${0%/*}/chromium";; esac'
            },
            "",
        ),
    ],
)
def test_tests_run_with_a_browser_or_without(tmp_path, programs, said):
    done = ci(tmp_path, **programs)
    assert (done.returncode, done.stdout, done.stderr) == (0, MADE, said)
    assert not (tmp_path / "apt-get.asked").exists()
    if not said:
        assert (tmp_path / "chromium").exists()


@pytest.mark.parametrize(
    ("day", "pythons", "chosen"),
    [
        ("008", "new newer", "new"),
        ("009", "new newer", "newer"),
        ("009", "old new newer missing", "newer"),  # `old` lacks a module or is below 3.11
        ("364", "old newer", "newer"),
        ("001", "missing", "python3"),  # `make` reports the cause
    ],
)
def test_pythons_take_turns(tmp_path, day, pythons, chosen):
    done = ci(
        tmp_path,
        {"DAY": day, "PYTHONS": pythons},
        chromium="exit 1",
        make="echo $PYTHON",
        new="exit 0",
        newer="exit 0",
        old="exit 1",
    )
    assert (done.returncode, done.stdout.split()) == (0, [chosen] * 3)
