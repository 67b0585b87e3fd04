"""Which tests may run beside each other, and what no test leaves to the next."""

import gc
import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

# The tests start hundreds of processes; each would compile all of offbeat anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Tensors of tests are tiny, and tests run beside each other: a second thread would only spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Imports make a million objects that stay. Collections would visit them again and again.
gc.disable()

LABS = (
    "tests/tools/lab/",
    "tests/real/runtime/test_links.py",
    "tests/tools/test_cli.py",
    "tests/tools/test_compare.py",
)
# Long, and nothing to share: these go one by one to whichever process is free at the end.
SPREAD = (
    "tests/real/runtime/test_failures.py",
    "tests/real/runtime/test_random_plans.py",
    "tests/real/test_examples.py",
)
# Long, but a single test: xdist starts the files with the most tests first.
EARLY = {"tests/release/test_types.py": "tests/release/test_docs.py"}


def group_of(nodeid: str) -> str:
    """A file's tests stay in one process, as they share what is trained once; so do all tests
    that make labs, as they look for what others have left behind."""
    path = nodeid.partition("::")[0]
    if path.startswith(SPREAD):
        return nodeid
    return "labs" if path.startswith(LABS) else EARLY.get(path, path)


def destroy_group() -> bool:
    """Destroy torch's default process group and return True if this process has one. Processes
    without torch do not import it for that."""
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_initialized():
        return False
    dist.destroy_process_group()
    return True


@pytest.fixture
def own_group() -> Iterator[None]:
    """Default process group of a test that calls `offbeat.prepare` in this process."""
    yield
    destroy_group()


@pytest.fixture
def forked_rehearsals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of rehearsals, forked by a fork of a process that has imported torch already."""
    from harness.commands import PipedPython

    own = SimpleNamespace(Popen=PipedPython, PIPE=-1)
    monkeypatch.setattr("offbeat.rehearsal.command.subprocess", own)


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of runs and comparisons, likewise."""
    from harness.commands import launch_forks

    monkeypatch.setattr("offbeat.experiments.launcher.launch", launch_forks)


@pytest.fixture
def no_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """As before any process group: an earlier test of this process may have joined one."""
    import torch

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Report a default process group that a test leaves to the next, which may create its own."""
    yield
    if destroy_group():
        pytest.fail(f"{item.nodeid} must destroy its process group; use the fixture own_group")


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Groups with `--dist loadgroup`. Marks would not do: pytest-xdist 3.8 hands them on in the
    ids of tests, which pytest 9.2 does not let it change."""
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Grouped(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return Grouped(config, log)
