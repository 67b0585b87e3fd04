"""The page "Where do I find ...": one row per room, and paths and names that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

import offbeat.plan

SOURCE = Path(offbeat.plan.__file__).parent
PAGE = Path(__file__).parents[1] / "docs" / "map.md"

pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="not a checkout")


def rooms_of_the_tree() -> list[str]:
    """Return all packages except the root and `core`, which holds only rooms."""
    folders = {path.parent for path in SOURCE.rglob("__init__.py")} - {SOURCE, SOURCE / "core"}
    return sorted(folder.relative_to(SOURCE).as_posix() for folder in folders)


def references() -> list[tuple[str, str]]:
    """Return (path, name or "") of each reference of the page to a folder, a file or a name."""
    quoted = re.findall(r"`([\w./]+?(?:\.py)?)(?:::([\w.]+))?`", PAGE.read_text())
    example = ("file.py", "name")
    return [
        (path, name)
        for path, name in quoted
        if (name or "/" in path or path.endswith(".py")) and (path, name) != example
    ]


@cache
def names_in(path: Path) -> set[str]:
    """Return functions, classes and values of a module, and members as `Class.member`."""
    names: set[str] = set()

    def add(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(prefix + node.name)
                if isinstance(node, ast.ClassDef):
                    add(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names.update(prefix + t.id for t in targets if isinstance(t, ast.Name))

    add(ast.parse(path.read_text()).body, "")
    return names


def test_every_room_has_one_row() -> None:
    table = PAGE.read_text().partition("## Rooms")[2].partition("\n## ")[0]
    assert sorted(re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)) == rooms_of_the_tree()


def test_every_path_and_name_exists() -> None:
    named = references()
    assert len(named) > 60
    missing = [
        f"{path}::{name}" if name else path
        for path, name in named
        if path != "src/offbeat"
        and (not (SOURCE / path).exists() or (name != "" and name not in names_in(SOURCE / path)))
    ]
    assert missing == []


def test_a_missing_name_is_found() -> None:
    names = names_in(SOURCE / "core" / "plan" / "types.py")
    assert {"Plan", "Plan.digest", "VERBS"} <= names
    assert "Plan.no_such_member" not in names
