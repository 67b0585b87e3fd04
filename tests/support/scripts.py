"""Benchmarks as modules: scripts beside the package, whose functions some tests call."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def benchmark(name: str) -> ModuleType:
    """Return a script of benchmarks/ as a module; skip the test where there are none."""
    path = BENCHMARKS / f"{name}.py"
    if not path.exists():
        pytest.skip("benchmarks are not in the source distribution", allow_module_level=True)
    if str(BENCHMARKS) not in sys.path:
        sys.path.append(str(BENCHMARKS))  # scripts import each other
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
