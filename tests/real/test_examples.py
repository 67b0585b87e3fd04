"""The examples run as users run them: alone, as two processes that share the work, by torchrun.

All are forks of the server that has torch. (lab/test_image.py starts gpt.py by torchrun with an
import of torch for each process.)
"""

import contextlib
import io
import os
import re
import runpy
import signal
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
from harness.commands import ForkedPython
from harness.ranks import free_port, run_ranks

from offbeat.profile import Bucket, Link, Profile

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = "--layers 1 --width 32 --heads 2 --context 32 --steps 31 --lr 0.01"
TINY_GPT = ["gpt.py", *TINY.split()]
TINY_DIGITS = ["digits.py", "--width", "64", "--steps", "41"]
LIMIT_S = 100  # of a test: torch takes seconds to import on a busy machine
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def environment(**more: str) -> dict[str, str]:
    """No launcher's variables, one thread, the loopback."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OFFBEAT_", "TORCHELASTIC_"))}
    for name in LAUNCHER:
        kept.pop(name, None)
    return kept | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **more}


def example(script: str, *args: str) -> list[str]:
    return [str(EXAMPLES / script), *args]


def run_here(argv: list[str], *, is_alone: bool = False) -> str:
    """Run a script in this process, a rank or alone, and return what it has printed."""
    for name in LAUNCHER if is_alone else ():
        os.environ.pop(name, None)
    sys.argv = argv
    sys.path.insert(0, str(EXAMPLES))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(argv[0], run_name="__main__")
    return printed.getvalue()


def run_alone(script: str, *args: str) -> str:
    [printed] = run_ranks(1, partial(run_here, is_alone=True), example(script, *args))
    return printed


def run_as_two(argv: list[str]) -> str:
    """Rank 0's output; rank 1 must print nothing."""
    printed, nothing = run_ranks(2, run_here, argv)
    assert nothing == ""
    return printed


def losses(printed: str) -> list[float]:
    return [float(value) for value in re.findall(r"  loss ([0-9.]+)", printed)]


def number(label: str, printed: str) -> float:
    found = re.search(rf"^{label} ([0-9.]+)$", printed, re.MULTILINE)
    assert found, printed
    return float(found[1])


@pytest.mark.timeout(LIMIT_S)
def test_gpt_learns():
    printed = run_as_two(example(*TINY_GPT))
    first, *_, last = losses(printed)
    assert last < 0.8 * first
    assert number("held-out loss", printed) < 0.8 * first


@pytest.mark.timeout(LIMIT_S)
def test_digits_learns_under_torchrun():
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    where = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [sys.executable, *torchrun, *where, *example(*TINY_DIGITS)]
    launcher = ForkedPython(
        command, env=environment(), start_new_session=True, workers=True, **pipes
    )
    try:
        printed, errors = launcher.communicate(timeout=LIMIT_S - 10)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
    assert launcher.returncode == 0, errors
    assert "Traceback" not in errors
    assert "terminate called" not in errors
    first, *_, last = losses(printed)
    assert last < 0.5 * first
    assert number("held-out accuracy", printed) > 0.8


@pytest.mark.timeout(LIMIT_S)
def test_emulated_learns(tmp_path):
    buckets = tuple(Bucket(f"layer.{i}", 0.001, 0.002, 80_000) for i in reversed(range(4)))
    Profile(buckets, (Link("net", 0.001, 1e7),), world_size=1).save(tmp_path / "profile.json")
    printed = run_alone("emulated.py", "--profile", str(tmp_path / "profile.json"), "--lr", "0.03")
    first, *_, last = losses(printed)
    assert last < 0.8 * first


def test_the_script_of_the_demo_learns():
    found = find_spec("offbeat.experiments.demo")
    first, last = losses(run_as_two([found.origin, "--iterations", "11"]))
    assert last < 0.9 * first


def test_the_emulated_example_is_as_documented():
    profile = Profile.load(EXAMPLES / "emulated_20.json")
    assert [bucket.size_bytes for bucket in profile.buckets] == [400_000] * 20
    assert profile.forward_s == pytest.approx(0.1)
    assert profile.backward_s == pytest.approx(0.2)


@pytest.mark.parametrize("script", ["gpt.py", "digits.py", "emulated.py"])
def test_one_line_is_changed(script):
    lines = (EXAMPLES / script).read_text().splitlines()
    changed = [line.strip() for line in lines if "prepare(" in line]
    marked = "model, optimizer = offbeat.prepare(model, optimizer)  # <- the one changed line"
    assert changed == [marked]
    assert len(lines) < 150
