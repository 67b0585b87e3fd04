"""Generated parts of the pages: plans, pictures, tables of settings and of public names.

`fill.py` writes them between markers; each function here makes the text of one marker.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import io
import os
import re
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import is_dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from _lanes import iterations_picture, svg_file, workers_picture

import offbeat
from offbeat import cli
from offbeat.core.sim.trace import Span
from offbeat.core.strategy.interface import setting_fields
from offbeat.core.strategy.parsing import parse
from offbeat.experiments.report.boxes import Picture
from offbeat.experiments.report.gossip import gossip_picture, predicted_gossip, visible_part
from offbeat.jobs.sinks import SERIES
from offbeat.profile import Link, Profile
from offbeat.server.simulation import simulate_served, spans_of
from offbeat.sessions.separate_workers import server_of
from offbeat.sim import Ranks, predict, simulate
from offbeat.strategies import SSP, OuterSGD, Strategy, find, strategy_names

DOCS = Path(__file__).parent
PICTURES = DOCS / "pictures"
COLUMNS = 80  # width of printed tables
SLOW = (1.0, 1.0, 1.0, 2.0)  # one worker computes half as fast
FAST_LINK = 10  # times as fast, where whole models travel between two
UNEVEN = f"Worker 3 computes half as fast; links are {FAST_LINK} times as fast as on other pages."


# --- views ---------------------------------------------------------------------------------------


def output(command: str) -> str:
    """Return a command of offbeat with its output; it runs in this folder."""
    program, *argv = shlex.split(command)
    assert program == "offbeat", "only offbeat is run"
    printed = io.StringIO()
    with contextlib.chdir(DOCS), contextlib.redirect_stdout(printed), _columns(COLUMNS):
        code = cli.main(argv)
    assert code == 0, f"the command ends with {code}"
    return f"```console\n$ {command}\n{printed.getvalue().rstrip()}\n```\n"


@contextlib.contextmanager
def _columns(width: int) -> Iterator[None]:
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(width)
    try:
        yield
    finally:
        os.environ.pop("COLUMNS")
        if before is not None:
            os.environ["COLUMNS"] = before


def picture(text: str) -> str:
    """Return an image of the simulated timeline of a strategy, and what it shows in words."""
    _, seen, words = drawn(text)
    return f"![{seen}](pictures/{file_name(text)})\n\n{words}\n"


def file_name(text: str) -> str:
    """Return the name of the picture of a strategy with settings."""
    return re.sub(r"\W+", "-", text) + ".svg"


@cache
def drawn(text: str) -> tuple[str, str, str]:
    """Return the picture of a strategy as an SVG file, a sentence about it, and its caption."""
    picture, seen, words = _drawn(parse(text), text)
    return svg_file(picture), seen, words


def settings(name: str) -> str:
    """Return a table of a strategy's settings."""
    cls = find(name)
    meaning, hints = meanings(cls), get_type_hints(cls)
    if not setting_fields(cls):
        return f"`{name}` has no settings.\n"
    lines = ["| setting | default | values | meaning |", "|---|---|---|---|"]
    for field in setting_fields(cls):
        assert field.name in meaning, f"{cls.__name__}.{field.name} has no docstring below it"
        values = " or ".join(_values(hints[field.name]))
        lines.append(f"| `{field.name}` | `{field.default}` | {values} | {meaning[field.name]} |")
    return "\n".join(lines) + "\n"


def source(name: str) -> str:
    """Return the names of a strategy and its publication."""
    cls = find(name)
    home = "offbeat" if cls.__name__ in offbeat.__all__ else "offbeat.strategies"
    arguments = f"`--strategy {name}`, in a script `{home}.{cls.__name__}()`"
    same = "the same numbers as DDP" if cls.synchronous else "other numbers than DDP"
    return f"On the command line {arguments}. It computes {same}.\n\nSource: {cls.citation}.\n"


def strategies(_: None) -> str:
    """Return a table of all strategies."""
    lines = ["| name | idea | same numbers as DDP |", "|---|---|---|"]
    for name in strategy_names():
        cls = find(name)
        first = " ".join((cls.__doc__ or "").partition("\n\n")[0].split())
        same = "it is DDP" if name == "ddp" else "yes" if cls.synchronous else "no"
        lines.append(f"| [`{name}`]({name}.md) | {first} | {same} |")
    return "\n".join(lines) + "\n"


def names(module: str) -> str:
    """Return a table of a module's public names, functions first."""
    lines = ["| name | meaning |", "|---|---|"]
    public = importlib.import_module(module).__all__
    for name in sorted(public, key=lambda name: (name[0].isupper(), name)):
        home, text = _home(module, name), _docstring(module, name)
        target = f"{home}.{name}"
        if target in sys.modules:
            target += f".{name}"  # the function of a module of the same name
        assert text, f"{target} has no docstring"
        first = re.split(r"(?<=[^.]\.)\s|\n\n", text)[0]
        file = "" if home == module else f"{home.rpartition('.')[2]}.md"
        lines.append(f"| [`{name}`]({file}#{target}) | {' '.join(first.split())} |")
    return "\n".join(lines) + "\n"


def series(_: None) -> str:
    """Return a table of the series of Prometheus."""
    lines = ["| series | type | meaning |", "|---|---|---|"]
    for row in SERIES:
        labels = f"{{{','.join(row.labels)}}}" if row.labels else ""
        lines.append(f"| `{row.name}{labels}` | {row.kind} | {row.help} |")
    return "\n".join(lines) + "\n"


def _docstring(module: str, name: str) -> str:
    """Return the docstring of a public name; for a value, the string below its assignment."""
    member = getattr(importlib.import_module(module), name)
    if inspect.isclass(member) or inspect.isfunction(member):
        return inspect.cleandoc(member.__doc__ or "")
    return inspect.cleandoc(_values_of_the_package().get(name, ""))


@cache
def _values_of_the_package() -> dict[str, str]:
    """Return the docstrings of values of modules by name, except names with two."""
    found: dict[str, set[str]] = {}
    for path in sorted((DOCS.parent / "src").rglob("*.py")):
        for name, text in _described(ast.parse(path.read_text()).body):
            found.setdefault(name, set()).add(text)
    return {name: texts.pop() for name, texts in found.items() if len(texts) == 1}


def _described(body: Sequence[ast.stmt]) -> Iterator[tuple[str, str]]:
    """Yield the assigned names of a body that have a docstring below, and this docstring."""
    for line, below in pairwise(body):
        match line, below:
            case (
                (ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)])),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                yield name, text


def _home(module: str, name: str) -> str:
    """Return the module whose page explains a name: strategies and types have their own pages."""
    if module == "offbeat":
        for other in ("plan", "profile", "strategies"):
            if name in importlib.import_module(f"offbeat.{other}").__all__:
                return f"offbeat.{other}"
    return module


VIEWS: dict[str, Callable[[Any], str]] = {
    "output": output,
    "picture": picture,
    "settings": settings,
    "source": source,
    "strategies": strategies,
    "names": names,
    "series": series,
}


# --- pictures ------------------------------------------------------------------------------------


@cache
def example() -> Profile:
    """Return the made-up model of all pictures."""
    return Profile.load(DOCS / "example.json")


def faster() -> Profile:
    """Return the same model on faster links."""
    link = example().default_link
    fast = Link(link.name, link.latency_s / FAST_LINK, link.bytes_per_s * FAST_LINK)
    return replace(example(), links=(fast,))


def _drawn(strategy: Strategy, text: str) -> tuple[Picture, str, str]:
    """Return a picture, a sentence about it, and its caption."""
    if strategy.needs.allows_joining:
        trace = predict(strategy, faster(), ranks=Ranks(scale=SLOW)).trace
        seen = f"Four workers under {text}: gradients without waiting, and exchanges of pairs"
        gossip = predicted_gossip(trace)
        assert gossip is not None
        return gossip_picture(visible_part(gossip, 5 * gossip.unit_s), text), seen, UNEVEN
    if strategy.needs.servers:
        assert isinstance(strategy, SSP)
        part = "iteration" if strategy.accumulate == 1 else "round"
        seen = f"Four workers under {text}: {part}s, and the times in which workers wait"
        shown = workers_picture(_served(strategy), text, 1.8 * strategy.accumulate, part)
        return shown, seen, f"{UNEVEN} Numbers are {part}s."
    return _planned(strategy, text)


def _planned(strategy: Strategy, text: str) -> tuple[Picture, str, str]:
    """Draw whole periods of a plan once its pipeline is full."""
    plan = strategy.plan(example())
    count = plan.period if 1 < plan.period < 6 else 2 if plan.period == 1 else 4
    begin = plan.prologue + plan.period * -(-8 // plan.period)
    trace = simulate(plan, example(), iterations=begin + count + 4, record=count + 12)
    shown = range(begin, begin + count)
    names = [f"iteration {plan.phase(i)}" for i in shown] if plan.period > 1 else ["one iteration"]
    iteration_s = predict(strategy, example()).iteration_s
    bound = "" if plan.bound_s is None else f", the bound is {1e3 * plan.bound_s:.0f} ms"
    seen = f"{count} iterations of {text}: compute above, messages on the links below"
    words = f"Predicted: {1e3 * iteration_s:.0f} ms per iteration{bound}. Numbers are buckets."
    return iterations_picture(trace, text, shown, names), seen, words


def _served(strategy: SSP) -> Iterator[Span]:
    """Yield the first clocks of all workers."""
    profile, ranks, count = faster(), Ranks(scale=SLOW), 12
    server = server_of(profile, 1, ranks)
    course, _ = simulate_served(strategy, profile, ranks, server, count, seed=0)
    for worker in range(profile.world_size):
        yield from spans_of(course, worker, range(count))


# --- settings ------------------------------------------------------------------------------------


def meanings(cls: type) -> dict[str, str]:
    """Return the docstrings of a dataclass's fields, inherited fields included."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not is_dataclass(base):
            continue
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(node, ast.ClassDef)
        for name, text in _described(node.body):
            found[name] = " ".join(text.split())
    return found


def _values(hint: Any) -> Iterator[str]:
    """Yield the kinds of values of a setting, in words."""
    if get_origin(hint) is Literal:
        yield from (f"`{word}`" for word in get_args(hint))
    elif get_origin(hint) is tuple:
        yield f"{_plural(get_args(hint)[0])} with `/` between"
    elif get_args(hint):
        for part in get_args(hint):
            yield from _values(part)
    else:
        yield WORDS.get(hint, "`None`")


def _plural(kind: Any) -> str:
    return {int: "integers", float: "numbers"}.get(kind, "rows of 0 and 1")


WORDS = {
    int: "an integer",
    float: "a number",
    str: "text",
    bool: "`True`, `False`",
    OuterSGD: "`LR/MOMENTUM`",
}
