"""The promised names, and their docstrings."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

MODULES = (
    "offbeat",
    "offbeat.plan",
    "offbeat.profile",
    "offbeat.sim",
    "offbeat.rules",
    "offbeat.metrics",
    "offbeat.strategies",
    "offbeat.data",
    "offbeat.lab",
    "offbeat.testing",
    "offbeat.testing.conformance",
    "offbeat.testing.equations",
)


def promised() -> Iterator[tuple[str, str]]:
    """Yield module and name of everything promised."""
    for module in MODULES:
        for name in import_module(module).__all__:
            yield module, name


def gaps(module: str, name: str) -> list[str]:
    """Return what the docstring of a promised name lacks; for a class, also those of its public
    methods and properties."""
    thing = getattr(import_module(module), name)
    if inspect.isclass(thing):
        return list(_of_class(thing))
    if inspect.isfunction(thing):
        return list(_of_function(name, thing))
    return [] if has_text_below(module, name) else [f"{name}: no string below the assignment"]


def entries(text: str, title: str) -> set[str]:
    """Return the names that a section of a docstring explains."""
    section = re.search(rf"^{title}:\n((?:[ ]+.*\n|\n)*)", text + "\n", re.MULTILINE)
    return set(re.findall(r"^    \*{0,2}(\w+):", section[1], re.MULTILINE)) if section else set()


def has_text_below(module: str, name: str) -> bool:
    """Return whether a string follows the assignment of a name, in the module that assigns it."""
    source = Path(inspect.getfile(import_module(module))).read_text()
    for node, below in pairwise([*ast.parse(source).body, ast.Pass()]):
        if isinstance(node, ast.ImportFrom) and name in [alias.name for alias in node.names]:
            return has_text_below(str(node.module), name)
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if name in [target.id for target in targets if isinstance(target, ast.Name)]:
                return _is_text(below)
    return False


def _of_function(path: str, function: Any) -> Iterator[str]:
    text = inspect.getdoc(function) or ""
    if not text:
        yield f"{path}: no docstring"
        return
    names = {name for name in inspect.signature(function).parameters if name not in ("self", "cls")}
    told = entries(text, "Args")
    if names != told:
        yield f"{path}: Args has {sorted(told)}, not {sorted(names)}"


def _of_class(cls: type) -> Iterator[str]:
    name = cls.__name__
    if not cls.__dict__.get("__doc__"):
        yield f"{name}: no docstring"
    lacking = [field for field in _fields(cls) if field not in _explained(cls)]
    if lacking:
        yield f"{name}: {', '.join(lacking)} not explained"
    for key, value in vars(cls).items():
        if key.startswith("_"):
            continue
        if isinstance(value, classmethod | staticmethod):
            value = value.__func__
        if inspect.isfunction(value) and not _overrides(cls, key):
            yield from _of_function(f"{name}.{key}", value)
        elif (get := getattr(value, "fget", None) or getattr(value, "func", None)) is not None and (
            not inspect.getdoc(get) and not _overrides(cls, key)
        ):
            yield f"{name}.{key}: no docstring"


def _overrides(cls: type, name: str) -> bool:
    """Return whether a base class documents a method; overriding it changes no arguments."""
    return any(name in vars(base) and vars(base)[name].__doc__ for base in cls.__mro__[1:])


def _fields(cls: type) -> list[str]:
    """Return the fields of a class, or the parameters of its constructor."""
    if dataclasses.is_dataclass(cls):
        return [field.name for field in dataclasses.fields(cls) if not field.name.startswith("_")]
    if "__init__" not in vars(cls) or getattr(cls, "_is_protocol", False):
        return list(getattr(cls, "model_fields", ()))
    if cls.__name__ == "Saving":  # created by offbeat.save alone
        return []
    return list(inspect.signature(cls.__init__).parameters)[1:]


@cache
def _explained(cls: type) -> frozenset[str]:
    """Return the fields that sections of docstrings or strings below fields explain."""
    told: set[str] = set()
    for base in cls.__mro__:
        text = inspect.cleandoc(vars(base).get("__doc__") or "")
        told |= entries(text, "Attributes") | entries(text, "Args")
        if dataclasses.is_dataclass(base):
            (node,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
            assert isinstance(node, ast.ClassDef)
            for line, below in pairwise(node.body):
                if isinstance(line, ast.AnnAssign) and _is_text(below):
                    told.add(ast.unparse(line.target))
    return frozenset(told)


def _is_text(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
