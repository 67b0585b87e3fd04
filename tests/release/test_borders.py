"""Borders between rooms: floors of imports, unique names in the core, what a job loads."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "offbeat"
SHARED_FILES = {"__init__.py"}


def test_import_contracts_hold() -> None:
    """The contracts are in pyproject.toml: thirteen floors, no circle. The only exceptions are what
    the runtime knows of members."""
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    excepted = re.findall(r'"(\S+) -> (\S+)"', (ROOT / "pyproject.toml").read_text())
    assert len(excepted) == 1
    for one, other in excepted:
        assert one.startswith("offbeat.core.runtime.")
        assert other.startswith("offbeat.elastic.")


def test_every_room_has_a_floor() -> None:
    """A new room must be placed in the contract."""
    text = (ROOT / "pyproject.toml").read_text()
    rooms = {path.parent for path in SOURCE.rglob("*.py")} - {SOURCE, SOURCE / "core"}
    top = {room for room in rooms if room.parent in (SOURCE, SOURCE / "core")}
    for room in top:
        name = ".".join(["offbeat", *room.relative_to(SOURCE).parts])
        assert f"{name} " in text or f'{name}"' in text, name


def test_names_of_files_and_classes_are_unique_within_the_core() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in (SOURCE / "core").rglob("*.py"):
        if path.name not in SHARED_FILES:
            places[path.name].append(str(path))
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_jobs_write_to_stderr_through_one_console() -> None:
    """Otherwise OFFBEAT_LOG=json would let lines of text through."""
    commands = {"cli", "lab", "experiments", "check"}
    found = [
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if path.relative_to(SOURCE).parts[0] not in commands
        and any(
            isinstance(node, ast.keyword) and node.arg == "file" and "stderr" in ast.dump(node)
            for node in ast.walk(ast.parse(path.read_text()))
        )
    ]
    assert found == ["core/console/__init__.py"]


TRAIN = """
import sys, torch, offbeat
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = offbeat.prepare(model, optimizer, offbeat.WFBP(), observe=1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
model.close()
rooms = ("gossip", "server", "cyclic", "lab", "experiments", "testing", "frames", "check")
rooms += ("membership",)
loaded = [m for m in sys.modules if m.startswith(tuple(f"offbeat.{room}" for room in rooms))]
print(sorted(loaded + ["networkx"] * ("networkx" in sys.modules)))
"""


def test_training_with_one_strategy_loads_no_other_room() -> None:
    done = subprocess.run([sys.executable, "-c", TRAIN], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_no_strategy_is_tested_by_its_class() -> None:
    """A strategy states what it needs; nobody outside its room asks for its class."""
    rooms = {"strategies", "gossip", "server", "cyclic"}
    found = []
    for path in SOURCE.rglob("*.py"):
        where = path.relative_to(SOURCE)
        if where.parts[0] in rooms:
            continue
        nodes = [*ast.walk(ast.parse(path.read_text()))]
        classes = {
            alias.asname or alias.name
            for node in nodes
            if isinstance(node, ast.ImportFrom)
            and node.module is not None
            and node.module.split(".")[1:2] == ["strategies"]
            for alias in node.names
        }
        for node in nodes:
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
                named = {n.id for n in ast.walk(node.args[1]) if isinstance(n, ast.Name)}
                if named & (classes - {"Strategy"}):
                    found.append(f"{where}:{node.lineno}")
    assert not found
