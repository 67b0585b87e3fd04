"""A new synchronous strategy is one file, one line and one golden."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
TOY = '''"""Toy: all gradients in two messages, the output side's first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from offbeat.plan import Plan
from offbeat.profile import Profile
from offbeat.core.strategy.interface import Planned, synchronous_bound_s
from offbeat.strategies.wfbp import gradients_when_ready
from offbeat.strategies.equations import Equations, synchronous


@dataclass(frozen=True)
class Toy(Planned):
    """Two messages."""

    name: ClassVar[str] = "toy"
    citation: ClassVar[str] = "nobody"

    def schedule(self, profile: Profile) -> Plan:
        size = len(profile.buckets)
        groups = tuple(run for run in (range(size // 2), range(size // 2, size)) if run)
        return gradients_when_ready(self.name, profile, groups)

    def equations(self, plan: Plan) -> Equations:
        return synchronous()

    def bound_s(self, profile: Profile) -> float:
        return synchronous_bound_s(profile, fused=True)
'''
LINE = '    "toy": "offbeat.strategies.toy:Toy",\n'
GOLDEN = """toy: 4 buckets, period 1 iteration
   grad[0:2]   after grad(1)  before step  in 0  on net
   grad[2:4]   after grad(3)  before step  in 0  on net
   local[0:4]  at step                     in 0"""
USE = """
import sys
from offbeat.profile import Bucket, Link, Profile
from offbeat.sim import predict
from offbeat.strategies import create, strategy_names
from offbeat.testing.conformance import conforms
if "toy" not in strategy_names():
    sys.exit("no toy")
buckets = tuple(Bucket(f"b{i}", 0.01, 0.02, 4000) for i in range(4))
profile = Profile(buckets, (Link("net", 0.001, 1e6),), world_size=2)
conforms(create("toy"), profile)
assert predict(create("toy"), profile).iteration_s > 0
print(create("toy").plan(profile))
"""


def use(source):
    environment = os.environ | {"PYTHONPATH": str(source)}
    return subprocess.run(
        [sys.executable, "-c", USE], env=environment, capture_output=True, text=True, timeout=60
    )


def test_adding_and_removing_a_toy(tmp_path):
    source = tmp_path / "src"
    shutil.copytree(ROOT / "src" / "offbeat", source / "offbeat")
    room = source / "offbeat" / "strategies"
    registry = source / "offbeat" / "core" / "strategy" / "registry.py"
    before = registry.read_text()
    (room / "toy.py").write_text(TOY)
    last = '    "us-byte"'
    registry.write_text(before.replace(last, LINE + last))
    added = use(source)
    assert added.returncode == 0, added.stderr
    assert added.stdout.strip() == GOLDEN
    (room / "toy.py").unlink()
    registry.write_text(before)
    assert use(source).stderr.strip() == "no toy"
