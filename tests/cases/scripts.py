"""Scripts beside the package as modules, whose functions some tests call."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


def benchmark(name: str) -> ModuleType:
    """Return a script of benchmarks/ as a module; skip the test where there are none."""
    return _load(ROOT / "benchmarks" / f"{name}.py")


def docs_script(name: str) -> ModuleType:
    """Return a script of docs/ as a module; skip the test where there are none."""
    return _load(ROOT / "docs" / f"{name}.py")


def _load(path: Path) -> ModuleType:
    if not path.exists():
        pytest.skip(f"{path.parent.name}/{path.name} is not there", allow_module_level=True)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # scripts import each other
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
