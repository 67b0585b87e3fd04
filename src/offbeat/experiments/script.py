"""Scripts of a run: a file, or `-m` and a module."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

MODULE = "-m"


def require_runnable(script: Sequence[str]) -> None:
    """Raise ValueError unless `script` begins with an existing file, or with -m and a module.

    The module is searched, not imported.
    """
    if not script or script[0] != MODULE:
        if not script or not Path(script[0]).is_file():
            raise ValueError(
                f"script ({' '.join(script)!r}) must begin with an existing file, or with "
                "-m and a module"
            )
        return
    if len(script) < 2:
        raise ValueError("-m must be followed by a module, as in -m package.train")
    name = script[1]
    if problem := _find_problem(name):
        raise ValueError(
            f"module ({name!r}) {problem}; run from the folder that holds its package, or install "
            "it, and write it with dots, as in -m package.train"
        )


def script_name(script: Sequence[str]) -> str:
    """Return the file or the module of a script."""
    return script[1] if script[0] == MODULE else script[0]


def _find_problem(name: str) -> str | None:
    """Return the reason why `python -m` cannot run a module; None if it can."""
    parts = name.split(".")
    if not all(part.isidentifier() for part in parts):
        return "must be a module's name"
    spec = PathFinder.find_spec(parts[0], [str(Path.cwd())]) or importlib.util.find_spec(parts[0])
    for stop in range(2, len(parts) + 1):
        spec = _find_spec(spec, ".".join(parts[:stop]))
    if spec is None:
        return "must exist"
    if spec.submodule_search_locations is not None and _find_spec(spec, f"{name}.__main__") is None:
        return "is a package and must have a __main__.py"
    return None


def _find_spec(package: ModuleSpec | None, name: str) -> ModuleSpec | None:
    if package is None or package.submodule_search_locations is None:
        return None
    return PathFinder.find_spec(name, list(package.submodule_search_locations))
