"""Strategies of other packages: named by an entry point or as module:Class, predicted and run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness.commands import ForkedPython

from offbeat import WFBP
from offbeat.cli import main
from offbeat.core.strategy import registry
from offbeat.core.strategy.registry import read_plan
from offbeat.plan import Plan
from offbeat.strategies import create, find, reference_of, strategy_names

MODULE = '''
from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import ClassVar

from offbeat.core.runtime.iteration import Iteration, Timestamps
from offbeat.core.runtime.session import Position, Session
from offbeat.core.sim.prediction import predict_under
from offbeat.strategies import Planned, Strategy, synchronous_bound_s
from offbeat.strategies.wfbp import gradients_when_ready


@dataclass(frozen=True)
class Whole(Planned):
    """All gradients in one message."""

    name: ClassVar[str] = "foreign-planned"
    citation: ClassVar[str] = "a test"

    def schedule(self, profile):
        return gradients_when_ready(self.name, profile, (range(len(profile.buckets)),))

    def bound_s(self, profile):
        return synchronous_bound_s(profile, fused=True)


class LocalSession(Session):
    """Every rank trains alone."""

    def __init__(self, job):
        self._job, self._cluster, self._iteration = job, job.cluster, 0
        self._listener = None

    iteration = property(lambda self: self._iteration)

    def capture_position(self):
        return Position(self._iteration, alike=False)

    def resume(self, iteration, state):
        self._iteration = iteration

    def forward(self, call, *args, **kwargs):
        return call(*args, **kwargs)

    def step(self, skip_update):
        if not skip_update:
            self._job.optimizer.step()
        self._iteration += 1

    def zero_grad(self, set_to_none):
        self._job.model.zero_grad(set_to_none)

    def no_sync(self):
        return nullcontext()

    def flush(self):
        pass

    def consolidate(self, repairing):
        pass

    def traffic(self):
        return {}

    def listen(self, listener):
        self._listener = listener

    def close(self):
        if not self._job.cluster.closed:
            self._job.cluster.close()


@dataclass(frozen=True)
class Alone(Strategy):
    """A session of its own, without a plan."""

    name: ClassVar[str] = "foreign-alone"
    citation: ClassVar[str] = "a test"
    synchronous: ClassVar[bool] = False

    def open(self, job):
        return LocalSession(job)

    def predict(self, profile, conditions, ran=None):
        return predict_under(Whole().plan(profile), profile, conditions, str(self))

    def bound_s(self, profile):
        return synchronous_bound_s(profile, fused=True)
'''
SCRIPT = """
import os, sys, torch, offbeat
from offbeat.core.strategy import registry
registry._entry_points.cache_clear()  # of the process of which this one is a fork
for name in sys.argv[1:]:
    os.environ["OFFBEAT_STRATEGY"] = name
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = offbeat.prepare(model, optimizer, observe=2)
    for t in range(6):
        optimizer.zero_grad()
        model(torch.full((3, 4), float(t))).pow(2).mean().backward()
        optimizer.step()
    print("TRAINED", name, offbeat.iteration(model))
    model.close()
"""
METADATA = "Metadata-Version: 2.1\nName: foreign\nVersion: 1\n"
POINTS = """[offbeat.strategies]
foreign = foreign_strategies:Whole
foreign-alone = foreign_strategies:Alone
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with two strategies, as an installer leaves it on the path."""
    (tmp_path / "foreign_strategies.py").write_text(MODULE)
    for name in ("foreign", "rival"):
        folder = tmp_path / f"{name}-1.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(METADATA.replace("foreign", name))
    (tmp_path / "foreign-1.dist-info" / "entry_points.txt").write_text(POINTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    registry._entry_points.cache_clear()
    yield tmp_path
    sys.modules.pop("foreign_strategies", None)
    registry._entry_points.cache_clear()


@pytest.mark.usefixtures("package")
def test_names_of_entry_points_and_of_classes() -> None:
    assert {"foreign", "foreign-alone"} <= {*strategy_names()}
    by_point, by_class = find("foreign"), find("foreign_strategies:Whole")
    assert by_point is by_class
    assert create("foreign") == create("foreign_strategies:Whole")
    # The class calls itself by another name than its entry point, so the reference is the class.
    assert reference_of(create("foreign")) == "foreign_strategies:Whole"
    assert reference_of(create("foreign-alone")) == "foreign-alone"
    assert reference_of(WFBP()) == "wfbp"
    with pytest.raises(ValueError, match="did you mean 'foreign'"):
        find("foreing")
    with pytest.raises(ValueError, match="must be a class that can be imported"):
        find("foreign_strategies:Missing")
    with pytest.raises(ValueError, match=r"must be a subclass of offbeat\.Strategy"):
        find("json:JSONDecoder")


def test_two_packages_with_one_name(package: Path) -> None:
    (package / "rival-1.dist-info" / "entry_points.txt").write_text(POINTS)
    registry._entry_points.cache_clear()
    with pytest.raises(ValueError, match=r"foreign\) is declared by foreign and rival"):
        find("foreign")


@pytest.mark.usefixtures("package")
def test_plans_load_the_module_of_their_strategy() -> None:
    """It may register the rules of the plan."""
    plan = Plan("foreign-alone", 1, ())
    assert "foreign_strategies" not in sys.modules
    assert read_plan(plan.to_dict()) == plan
    assert "foreign_strategies" in sys.modules


def test_plans_of_a_name_of_two_packages_load_no_module(package: Path) -> None:
    (package / "rival-1.dist-info" / "entry_points.txt").write_text(POINTS)
    registry._entry_points.cache_clear()
    plan = Plan("foreign-alone", 1, ())
    assert read_plan(plan.to_dict()) == plan
    assert "foreign_strategies" not in sys.modules


NAMES = ("foreign_strategies:Whole", "foreign-alone")


def test_they_run(package: Path) -> None:
    """In a process that finds them on its path."""
    script = package / "script.py"
    script.write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": str(package)}
    for gone in ("RANK", "WORLD_SIZE", "OFFBEAT_JOB"):
        environment.pop(gone, None)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = ForkedPython([sys.executable, script, *NAMES], env=environment, **pipes)
    printed, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert printed.splitlines() == [f"TRAINED {name} 6" for name in NAMES]


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("name", NAMES)
def test_they_are_simulated(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    profile = Path(__file__).parents[3] / "docs" / "example.json"
    argv = ["simulate", "--profile", str(profile), "--strategy", name, "--json"]
    assert main(argv) == 0
    assert json.loads(capsys.readouterr().out)["iteration_s"] > 0
