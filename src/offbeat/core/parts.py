"""Parts of upper rooms that lower rooms open, imported at their first use.

`offbeat/__init__.py` lists them, so that no lower room names a module of an upper one.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any

_PATHS: dict[str, str] = {}  # `module:name` by name


def register_parts(paths: Iterable[str]) -> None:
    """Make parts known by their names.

    Args:
        paths: each as `module:name`.
    """
    _PATHS.update({path.partition(":")[2]: path for path in paths})


def part(name: str) -> Any:
    """Return the part of this name; imports its module.

    Args:
        name: name of a class or function that is registered.
    """
    return load_object(_PATHS[name])


def load_object(path: str) -> Any:
    """Return the object named by `module:name`."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
