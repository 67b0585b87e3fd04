"""Former module names work for one release, with a warning that names the new one."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from importlib import import_module

import pytest

import offbeat
from offbeat import former_names

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


def test_unknown_modules_stay_unknown() -> None:
    with pytest.raises(ModuleNotFoundError):
        __import__("offbeat.never")
    assert set(former_names.PROMISED) <= set(former_names.MODULES)


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
