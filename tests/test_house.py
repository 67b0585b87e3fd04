"""The rules of the house: circles of imports, sizes, names. Exceptions are in house.json."""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FrameType

import networkx as nx

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "offbeat"
REGISTRY = "offbeat.core.strategy.registry"  # names strategies as text, which counts as no edge
PUBLIC = "offbeat"  # lists public names and what upper rooms register, by their modules
LONGEST_FILE, LONGEST_FUNCTION = 450, 60  # lines of code
LISTED = json.loads((Path(__file__).parent / "house.json").read_text())
"""Today's exceptions: the largest circle, and by name files, functions and classes. It only
shrinks; write it anew with `python tests/test_house.py`."""


@cache
def trees() -> dict[str, ast.Module]:
    """Return the syntax tree of each module by name."""
    return {
        ".".join(["offbeat", *path.relative_to(SOURCE).with_suffix("").parts]).removesuffix(
            ".__init__"
        ): ast.parse(path.read_text())
        for path in sorted(SOURCE.rglob("*.py"))
    }


def path_of(module: str) -> Path:
    path = SOURCE.joinpath(*module.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


# ---- circles --------------------------------------------------------------------------------


def named_modules(module: str) -> Iterator[str]:
    """Yield what a module imports anywhere, also for type checking, and names as text."""
    for node in nodes(module):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
    yield from modules_as_text(module)


def modules_as_text(module: str) -> set[str]:
    """Return the modules that a module names as text."""
    if module == REGISTRY:
        return set()
    texts = {str(node.value) for node in nodes(module) if isinstance(node, ast.Constant)}
    return {text.partition(":")[0] for text in texts} & set(trees()) - {module, PUBLIC}


@cache
def circles() -> list[set[str]]:
    """Return the circles of imports, the largest first."""
    graph: nx.DiGraph[str] = nx.DiGraph()
    for module in trees():
        for name in named_modules(module) if module != PUBLIC else ():
            known = name if name in trees() else name.rpartition(".")[0]
            if known in trees() and known != module:
                graph.add_edge(module, known)
    found = [set(part) for part in nx.strongly_connected_components(graph) if len(part) > 1]
    return sorted(found, key=len, reverse=True)


def test_the_largest_circle_of_imports_does_not_grow() -> None:
    assert max(map(len, circles()), default=0) <= LISTED["largest circle"]


# ---- sizes ----------------------------------------------------------------------------------


@cache
def nodes(module: str) -> list[ast.AST]:
    """Return all nodes of a module."""
    return [*ast.walk(trees()[module])]


@cache
def code_lines(module: str) -> frozenset[int]:
    """Return the numbers of the lines without blank lines, comments and docstrings."""
    text = path_of(module).read_text().splitlines()
    lines = {n for n, line in enumerate(text, 1) if line.strip() and line.strip()[0] != "#"}
    for node in nodes(module):
        if isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str):
            lines.difference_update(range(node.lineno, (node.end_lineno or 0) + 1))
    return frozenset(lines)


def long_files() -> dict[str, int]:
    """Return the lines of code of the files that are longer than allowed."""
    sizes = {module: len(code_lines(module)) for module in trees()}
    return {module: size for module, size in sizes.items() if size > LONGEST_FILE}


def long_functions() -> dict[str, int]:
    """Return the lines of code of the functions that are longer than allowed."""
    found = {}
    for module in trees():
        lines = code_lines(module)
        for node in nodes(module):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                size = sum(n in lines for n in range(node.lineno, (node.end_lineno or 0) + 1))
                if size > LONGEST_FUNCTION:
                    found[f"{module}.{node.name}"] = size
    return found


def test_no_file_or_function_is_too_long_but_those_of_the_list() -> None:
    assert long_files() == LISTED["long files"]
    assert long_functions() == LISTED["long functions"]


def budgets() -> Iterator[tuple[list[str], int]]:
    """Yield the rooms of each row of the table in docs/design.md and their largest size."""
    text = (ROOT / "docs" / "design.md").read_text()
    table = text.partition("| room | lines of code at most |")[2].partition("\n\n")[0]
    for row in table.splitlines()[2:]:
        rooms, most = (cell.strip() for cell in row.strip("| ").split("|"))
        yield re.findall(r"`([\w/.]+)`", rooms), int(most.replace(",", ""))


def room_of(path: Path) -> str:
    """Return the folder of `src/offbeat` with the file, or `offbeat` for a file beside them."""
    parts = path.relative_to(SOURCE).parts
    return "offbeat" if len(parts) == 1 else parts[0]


def test_rooms_stay_within_their_budgets() -> None:
    sizes: Counter[str] = Counter()
    for module in trees():
        path = path_of(module)
        sizes[room_of(path)] += len(code_lines(module))
        if path.is_relative_to(SOURCE / "core" / "runtime"):
            sizes["core/runtime"] += len(code_lines(module))
    known = list(budgets())
    assert {room for rooms, _ in known for room in rooms} == set(sizes)
    over = [(rooms, sum(sizes[r] for r in rooms), most) for rooms, most in known]
    assert [one for one in over if one[1] > one[2]] == []


# ---- names ----------------------------------------------------------------------------------


def repeated_classes() -> dict[str, list[str]]:
    """Return the modules of each name that several public classes have."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for module, tree in trees().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(module)
    return {name: where for name, where in sorted(places.items()) if len(where) > 1}


def test_no_two_classes_have_one_name_but_those_of_the_list() -> None:
    assert repeated_classes() == LISTED["repeated classes"]


def text_imports() -> dict[str, int]:
    """Return how many modules each module outside of the registry names as text."""
    counts = {module: len(modules_as_text(module)) for module in trees()}
    return {module: count for module, count in counts.items() if count}


def test_modules_are_named_as_text_in_no_further_place() -> None:
    assert text_imports() == LISTED["modules as text"]


# ---- borders between objects ----------------------------------------------------------------


def assigned(module: str) -> Iterator[ast.Attribute]:
    """Yield the attributes of objects that a module assigns."""
    for node in nodes(module):
        whole = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in whole:
            parts = target.elts if isinstance(target, ast.Tuple) else [target]
            yield from (part for part in parts if isinstance(part, ast.Attribute))


def foreign_attributes() -> dict[str, int]:
    """Return how many attributes of an attribute each module assigns, as in `self.other.x = 1`."""
    counts = {m: sum(isinstance(a.value, ast.Attribute) for a in assigned(m)) for m in trees()}
    return {module: count for module, count in counts.items() if count}


def test_objects_set_no_further_attributes_of_others() -> None:
    before = LISTED["foreign attributes"]
    assert {m: n for m, n in foreign_attributes().items() if n > before.get(m, 0)} == {}


def patches() -> dict[str, list[str]]:
    """Return what each module replaces in classes and modules of other packages."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for module in trees():
        outer = set[str]()
        for node in nodes(module):
            if isinstance(node, ast.Import):
                names = ((one.asname or one.name).partition(".")[0] for one in node.names)
                outer.update(name for name in names if name != PUBLIC)
            elif isinstance(node, ast.ImportFrom) and not f"{node.module}.".startswith("offbeat."):
                outer.update(one.asname or one.name for one in node.names)
        for node in nodes(module):
            name = getattr(getattr(node, "func", None), "id", "")
            if name == "setattr" and isinstance(node, ast.Call) and root(node.args[0]) in outer:
                found[module].add(ast.unparse(node.args[0]))
        for target in assigned(module):
            if root(target) in outer:
                found[module].add(ast.unparse(target))
    return {module: sorted(what) for module, what in sorted(found.items())}


def root(node: ast.expr) -> str | None:
    """Return the name at the begin of a chain of attributes."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def test_nothing_else_of_torch_or_python_is_replaced() -> None:
    assert patches() == LISTED["patches"]


# ---- the way of a step and of a gradient ----------------------------------------------------


def read_an_iteration() -> dict[str, int]:
    """Return how many frames lie between the script and the user's optimizer, and between the hook
    of a gradient and its collective; and the files of `offbeat` that the iteration calls."""
    import torch
    from cases.models import Case, build_model, profile_of

    import offbeat

    stacks, files, watching = dict[str, list[str]](), set[str](), [False]

    def own_frames() -> list[str]:
        stack = (frame.filename for frame in inspect.stack(0))
        return [name for name in stack if name.startswith(str(SOURCE))]

    class Recording(torch.optim.SGD):
        def step(self, closure=None):
            stacks["step to the user's optimizer"] = own_frames()
            return super().step(closure)

    def note(frame: FrameType, event: str, _: object) -> None:
        name, thread = frame.f_code.co_filename, threading.current_thread().name
        observed = watching[0] and thread.startswith(("MainThread", "offbeat-link"))
        if observed and event == "call" and name.startswith(str(SOURCE)):
            files.add(name)
            if frame.f_code.co_name == "_submit":
                stacks["gradient to the thread of its link"] = own_frames()
            if name.endswith("collectives.py"):
                stacks["thread of a link to the collective"] = own_frames()

    threading.setprofile(note)  # before the threads of links begin
    case = Case("mlp")
    model = build_model(case)
    optimizer = Recording([p for p in model.parameters() if p.requires_grad], lr=0.1)
    given = profile_of(case, 2)
    model, optimizer = offbeat.prepare(model, optimizer, offbeat.WFBP(), profile=given)
    sys.setprofile(note)
    for number in range(4):
        watching[0] = number == 3
        optimizer.zero_grad()
        model(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
        optimizer.step()
    watching[0] = False
    sys.setprofile(None)
    threading.setprofile(None)
    model.close()
    return {"files": len(files), **{name: len(frames) for name, frames in stacks.items()}}


def way_of_an_iteration() -> dict[str, int]:
    from harness.ranks import run_ranks

    return run_ranks(2, read_an_iteration)[0]


def test_an_iteration_is_read_in_no_more_files_and_frames() -> None:
    known = LISTED["iteration"]
    assert {k: n for k, n in way_of_an_iteration().items() if n > known[k]} == {}


# ---- listening sockets ----------------------------------------------------------------------

LISTENING = {"open_listener", "create_server", "start_http_server", "TCPStore"}
LISTENERS = {  # modules whose sockets others can reach, with the first words of their row
    "offbeat.check.command": "`offbeat check`",
    "offbeat.elastic.feed": "optimizer's state for a joining member",
    "offbeat.elastic.presence": "presence of a member",
    "offbeat.elastic.members": "torch's store",
    "offbeat.core.transport.addresses": "check of links",  # ports that it closes at once
    "offbeat.core.transport.interfaces": "check of links",
    "offbeat.core.transport.rendezvous": "torch's store",
    "offbeat.gossip.startup": "gossip",
    "offbeat.jobs.sinks": "metrics",
    "offbeat.lab.probe": "probe of the lab's links",
    "offbeat.membership.service": "membership service",
    "offbeat.server.serving": "parameter server",
}
OPENER = "offbeat.core.transport.listeners"  # opens the sockets of other modules


def listens(module: str) -> bool:
    """Return whether a module opens a listening socket."""
    calls = (node.func for node in nodes(module) if isinstance(node, ast.Call))
    names = {getattr(f, "id", None) or getattr(f, "attr", None) for f in calls}
    return bool(names & LISTENING)


def test_each_listening_socket_has_a_row_in_the_page_on_security() -> None:
    table = (ROOT / "docs" / "security.md").read_text().partition("## Listening sockets")[2]
    rows = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| ")]
    assert set(filter(listens, trees())) == {*LISTENERS, OPENER}
    assert [m for m, row in LISTENERS.items() if not any(r.startswith(row) for r in rows)] == []


if __name__ == "__main__":
    found = {
        "largest circle": max(map(len, circles()), default=0),
        "foreign attributes": foreign_attributes(),
        "iteration": way_of_an_iteration(),
        "long files": long_files(),
        "long functions": long_functions(),
        "modules as text": text_imports(),
        "patches": patches(),
        "repeated classes": repeated_classes(),
    }
    (Path(__file__).parent / "house.json").write_text(json.dumps(found, indent=1) + "\n")
