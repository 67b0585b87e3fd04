"""What pages show of the code, made when the site is built.

A comment alone on a line stands for it:

    <!-- output: offbeat plan --profile example.json --strategy bsp -->   a command and its output
    <!-- picture: dreamddp:period=3 -->     the simulated timeline of a strategy
    <!-- settings: dreamddp -->             its settings, from its dataclass
    <!-- source: dreamddp -->               what it is called, and where it was published
    <!-- strategies -->                     all of them
    <!-- names: offbeat.plan -->            a table of a module's public names, with links
    <!-- not run: REASON -->                the example that follows is not executed by the tests
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import re
import shlex
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from _lanes import LEGEND, gossip_svg, iterations_svg, legend_kinds, workers_svg
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

from offbeat import cli
from offbeat.core.sim.separate_workers import compute_seconds, server_of
from offbeat.core.sim.trace import Span
from offbeat.core.strategy.parsing import parse
from offbeat.experiments.report.page import asset
from offbeat.profile import Link, Profile
from offbeat.server.simulation import run_served, spans_of
from offbeat.sim import Ranks, predict, simulate
from offbeat.strategies import SSP, OuterSGD, Strategy, find, strategy_names

DOCS = Path(__file__).parent
MARKER = re.compile(r"^<!-- (\w+(?: run)?)(?:: (.*?))? -->\n", re.MULTILINE)
COLOURS = "stylesheets/colours.css"
SCHEMES = ("default", "slate")  # Material's names of light and dark
SLOW = (1.0, 1.0, 1.0, 2.0)  # one worker computes half as fast
GROUPS = ("Same numbers as DDP", "Rare or late averages", "With servers", "Gossip")
FAST_LINK = 10  # times as fast, where whole models travel between two
APART = f"Worker 3 computes half as fast; links are {FAST_LINK} times as fast as on other pages."


def on_config(config: Any) -> Any:
    """A menu of all strategies, by what runs them."""
    groups: dict[str, list[str]] = {}
    for name in strategy_names():
        cls = find(name)
        groups.setdefault(_group(cls), []).append(f"strategies/{name}.md")
    menu = next(entry["Strategies"] for entry in config.nav if "Strategies" in entry)
    menu += [{title: groups[title]} for title in GROUPS if title in groups]
    return config


def on_files(files: Any, config: Any) -> Any:
    """The report's colours, for both schemes of the site."""
    files.append(File.generated(config, COLOURS, content=colours()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page with what its comments stand for."""

    def shown(found: re.Match[str]) -> str:
        what, of = found.groups()
        if what == "not run":
            return ""
        if what not in VIEWS:
            raise PluginError(f"{page.file.src_path}: there is no view {what!r}")
        try:
            return VIEWS[what](of) + "\n"
        except (ValueError, TypeError, KeyError, AssertionError) as error:
            raise PluginError(f"{page.file.src_path}: {found.group().strip()}: {error}") from error

    return MARKER.sub(shown, markdown)


def _group(cls: type[Strategy]) -> str:
    same, other, served, gossip = GROUPS
    if cls.needs.allows_joining:
        return gossip
    if cls.needs.servers:
        return served
    return same if cls.synchronous else other


# --- views ---------------------------------------------------------------------------------------


def output(command: str) -> str:
    """A command of offbeat with what it prints, run in this folder."""
    program, *argv = shlex.split(command)
    assert program == "offbeat", "only offbeat is run"
    said = io.StringIO()
    with contextlib.chdir(DOCS), contextlib.redirect_stdout(said):
        code = cli.main(argv)
    assert code == 0, f"the command ends with {code}"
    return f"```\n$ {command}\n{said.getvalue().rstrip()}\n```\n"


def picture(text: str) -> str:
    """The simulated timeline of a strategy, with a legend."""
    drawn, words = _drawn(parse(text), text)
    swatches: dict[str, str] = {}
    for kind in legend_kinds(drawn):
        swatches[LEGEND[kind]] = swatches.get(LEGEND[kind], "") + f'<i class="{kind}"></i>'
    legend = "".join(f'<span class="key">{i}{text}</span>' for text, i in swatches.items())
    return (
        f'<figure class="timeline" tabindex="0">\n<div class="scroll">{drawn}</div>\n'
        f"<figcaption>{legend}<span>{words}</span></figcaption>\n</figure>\n"
    )


def settings(name: str) -> str:
    """A table of a strategy's settings."""
    cls = find(name)
    told, hints = meanings(cls), get_type_hints(cls)
    if not fields(cls):
        return f"`{name}` has no settings.\n"
    lines = ["| setting | default | values | meaning |", "|---|---|---|---|"]
    for field in fields(cls):
        assert field.name in told, f"{cls.__name__}.{field.name} has no docstring below it"
        values = " or ".join(_values(hints[field.name]))
        lines.append(f"| `{field.name}` | `{field.default}` | {values} | {told[field.name]} |")
    return "\n".join(lines) + "\n"


def source(name: str) -> str:
    """How a strategy is called, and where it was published."""
    cls = find(name)
    arguments = f"`--strategy {name}`, in a script `offbeat.{cls.__name__}()`"
    same = "the same numbers as DDP" if cls.synchronous else "other numbers than DDP"
    return f"On the command line {arguments}. It computes {same}.\n\nSource: {cls.citation}.\n"


def strategies(_: None) -> str:
    """A table of all."""
    lines = ["| name | idea | same numbers as DDP |", "|---|---|---|"]
    for name in strategy_names():
        cls = find(name)
        first = " ".join((cls.__doc__ or "").partition("\n\n")[0].split())
        same = "it is DDP" if name == "ddp" else "yes" if cls.synchronous else "no"
        lines.append(f"| [`{name}`]({name}.md) | {first} | {same} |")
    return "\n".join(lines) + "\n"


def names(module: str) -> str:
    """A table of a module's public names, functions first."""
    loaded = _sources()[module]
    lines = ["| name | meaning |", "|---|---|"]
    for name in sorted(loaded.exports, key=lambda name: (name[0].isupper(), name)):
        member = loaded[name]
        target = f"{_home(module, name)}.{name}"
        if member.is_module:  # the function of a module of the same name
            target, member = f"{target}.{name}", member[name]
        assert member.docstring is not None, f"{target} has no docstring"
        first = re.split(r"(?<=[^.]\.)\s|\n\n", member.docstring.value)[0]
        lines.append(f"| [`{name}`][{target}] | {' '.join(first.split())} |")
    return "\n".join(lines) + "\n"


@cache
def _sources() -> Any:
    """The package as griffe reads it, without importing it."""
    import griffe

    loader = griffe.GriffeLoader(search_paths=[DOCS.parent / "src"])
    loader.load("offbeat")
    loader.resolve_aliases()
    return loader.modules_collection


def _home(module: str, name: str) -> str:
    """The module whose page explains a name: strategies and types have pages of their own."""
    if module == "offbeat":
        for other in ("plan", "profile", "strategies"):
            if name in _sources()[f"offbeat.{other}"].exports:
                return f"offbeat.{other}"
    return module


VIEWS: dict[str, Callable[[Any], str]] = {
    "output": output,
    "picture": picture,
    "settings": settings,
    "source": source,
    "strategies": strategies,
    "names": names,
}


# --- pictures ------------------------------------------------------------------------------------


@cache
def example() -> Profile:
    """The made-up model of all pictures."""
    return Profile.load(DOCS / "example.json")


def faster() -> Profile:
    """The same model on faster links."""
    link = example().default_link
    fast = Link(link.name, link.latency_s / FAST_LINK, link.bytes_per_s * FAST_LINK)
    return replace(example(), links=(fast,))


def _drawn(strategy: Strategy, text: str) -> tuple[str, str]:
    """A picture and words about it."""
    if strategy.needs.allows_joining:
        told = predict(strategy, faster(), ranks=Ranks(scale=SLOW)).trace
        return gossip_svg(told, text, units=5), APART
    if strategy.needs.servers:
        return workers_svg(_served(strategy), text, until_s=1.8), f"{APART} Numbers are iterations."
    return _planned(strategy, text)


def _planned(strategy: Strategy, text: str) -> tuple[str, str]:
    """Whole periods of a plan once its pipeline is full."""
    plan = strategy.plan(example())
    count = plan.period if 1 < plan.period < 6 else 2 if plan.period == 1 else 4
    begin = plan.prologue + plan.period * -(-8 // plan.period)
    trace = simulate(plan, example(), iterations=begin + count + 4, record=count + 12)
    shown = range(begin, begin + count)
    names = [f"iteration {plan.phase(i)}" for i in shown] if plan.period > 1 else ["one iteration"]
    iteration_s = predict(strategy, example()).iteration_s
    bound = "" if plan.bound_s is None else f", the bound is {1e3 * plan.bound_s:.0f} ms"
    words = f"Predicted: {1e3 * iteration_s:.0f} ms per iteration{bound}. Numbers are buckets."
    return iterations_svg(trace, text, shown, names), words


def _served(strategy: Strategy) -> Iterator[Span]:
    """The first clocks of all workers."""
    profile, ranks, count = faster(), Ranks(scale=SLOW), 12
    compute_s = compute_seconds(profile, ranks, count, seed=0)
    server = server_of(profile, 1, ranks)
    assert isinstance(strategy, SSP)
    course = run_served(server, compute_s, strategy.s, each_push=strategy.apply == "push")
    for worker in range(profile.world_size):
        yield from spans_of(course, worker, range(count))


def colours() -> str:
    """Custom properties of the report's page, for the site's schemes."""
    found = re.findall(r":root \{(.*?)\}", asset("page.css"), re.DOTALL)
    assert len(found) == len(SCHEMES)
    kept = [re.sub(r"color-scheme:.*?;", "", block) for block in found]
    return "".join(
        f'[data-md-color-scheme="{scheme}"] {{{block}}}\n'
        for scheme, block in zip(SCHEMES, (kept[0], "".join(kept)), strict=True)
    )


# --- settings ------------------------------------------------------------------------------------


def meanings(cls: type) -> dict[str, str]:
    """What the strings below a dataclass's fields say, inherited ones included."""
    told: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not is_dataclass(base):
            continue
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(node, ast.ClassDef)
        for line, below in pairwise(node.body):
            match line, below:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    told[name] = " ".join(text.split())
    return told


def _values(hint: Any) -> Iterator[str]:
    """What a setting may be, in words."""
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
