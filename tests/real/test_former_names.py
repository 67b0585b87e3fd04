"""Former names work until version 0.3, with a warning that states the new name."""

from __future__ import annotations

import copy
import pickle
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from packaging.version import Version

import offbeat
from offbeat import former_names

ROOT = Path(__file__).parents[2]
CASES = {
    "from offbeat.numerics import RULES, Setting": "offbeat.rules",
    "from offbeat.plan.check import check": "offbeat.plan",
    "from offbeat.solve import knapsack": "offbeat.strategies.solvers",
    "from offbeat.strategies.base import Strategy": "offbeat.strategies",
    "from offbeat.trace import Trace": "offbeat",
}


@pytest.mark.parametrize("line", CASES)
def test_a_former_name_warns_and_works(line: str) -> None:
    code = f"import warnings; warnings.simplefilter('always'); {line}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert f"is now {CASES[line]};" in done.stderr
    assert done.stderr.count("FutureWarning") == 1


def test_objects_are_those_of_the_new_module() -> None:
    sys.modules.pop("offbeat.trace", None)
    with pytest.warns(FutureWarning, match="is now"):
        former = import_module("offbeat.trace")
    assert former.Trace is offbeat.Trace
    assert former.__spec__.name == "offbeat.core.sim.trace"


def test_former_names_are_removed_when_they_are_due() -> None:
    """CHANGELOG.md and docs/migration.md state the same versions."""
    assert Version(offbeat.__version__) < Version(former_names.REMOVED_IN)
    page = (ROOT / "docs" / "migration.md").read_text()
    assert set(re.findall(r"\| ([^|`]+) \|$", page, re.MULTILINE)) == {
        *("removed in", "gone"),
        former_names.REMOVED_IN,
    }
    versions = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == offbeat.__version__
    assert versions == sorted(versions, key=Version, reverse=True)


def test_unknown_modules_stay_unknown() -> None:
    with pytest.raises(ModuleNotFoundError):
        __import__("offbeat.never")
    assert set(former_names.PUBLIC) <= set(former_names.MODULES)


def test_former_methods_of_profiles() -> None:
    profile = offbeat.Profile.from_dict(
        {
            "world_size": 2,
            "links": [{"name": "net", "latency_s": 1e-3, "bytes_per_s": 1e6}],
            "buckets": [{"name": "a", "forward_s": 1.0, "backward_s": 1.0, "size_bytes": 4}],
        }
        | {"schema": 1}
    )
    with pytest.warns(FutureWarning, match="is now Profile.with_pace"):
        assert profile.paced(2.0) == profile.with_pace(2.0)
    with pytest.raises(AttributeError, match="no attribute 'never'"):
        _ = profile.never
    assert copy.deepcopy(profile) == pickle.loads(pickle.dumps(profile)) == profile
