"""Tests stay on the public level, so that they survive a redesign of what is below."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
LISTED: dict[str, int] = json.loads((TESTS / "private_names.json").read_text())
"""Places by file that use private names of offbeat or replace its names. Numbers only shrink."""
PROTECTED = (TESTS / "protected.txt").read_text().split()
UNIT_LINES = 2600  # at most, of all files test_*_unit.py, which may use everything
PATCHES = ("setattr", "delattr", "patch", "object")
PUBLIC = {
    *("", "plan", "profile", "sim", "rules", "metrics", "strategies", "data", "lab", "testing"),
    *("testing.conformance", "testing.equations", "strategies.solvers"),
    *("cyclic", "integrations", "membership"),
}  # modules that protected files may import names from


def imports(tree: ast.Module) -> Iterator[tuple[str, str, int]]:
    """Yield the module or name that each import names, the name that it binds, and its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                bound = alias.asname or alias.name.partition(".")[0]
                yield module + alias.name, bound, node.lineno


def root_of(node: ast.AST) -> str:
    """Return the variable at which a chain of attributes begins."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def private_places(tree: ast.Module) -> set[int]:
    """Return the lines that use a private name of offbeat or replace one of its names."""
    found, ours, others = set(), set(), {"self", "cls", "torch"}
    for name, bound, line in imports(tree):
        (ours if name.startswith("offbeat") else others).add(bound)
        if name.startswith("offbeat") and "._" in name.replace(".__", ""):
            found.add(line)
    for node in ast.walk(tree):
        changed = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            if not node.attr.startswith("__") and root_of(node) not in others:
                found.add(node.lineno)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in PATCHES:
            changed = node.args[:1]
        for target in changed:
            text = target.value if isinstance(target, ast.Constant) else ""
            attribute = isinstance(node, ast.Call) or isinstance(target, ast.Attribute)
            if str(text).startswith("offbeat") or (attribute and root_of(target) in ours):
                found.add(node.lineno)
    return found


def test_private_names_of_the_tests() -> None:
    found = {
        str(path.relative_to(TESTS)): len(private_places(ast.parse(path.read_text())))
        for path in TESTS.rglob("*.py")
        if not path.name.endswith("_unit.py")
    }
    assert {name: places for name, places in found.items() if places} == LISTED


@pytest.mark.parametrize("name", PROTECTED)
def test_protected_files_use_promised_names(name: str) -> None:
    modules = {n.rpartition(".")[0] for n, *_ in imports(ast.parse((TESTS / name).read_text()))}
    ours = {module[8:] for module in modules if module.partition(".")[0] == "offbeat"}
    assert ours <= PUBLIC | {n for n in ours if n.startswith("strategies.solvers.")}
    assert name not in LISTED


def test_unit_files_stay_small() -> None:
    files = TESTS.rglob("test_*_unit.py")
    assert sum(path.read_text().count("\n") for path in files) <= UNIT_LINES
