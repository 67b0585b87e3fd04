"""Text of `offbeat strategies`: all strategies in short, or one with each of its settings."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import is_dataclass
from itertools import pairwise
from typing import Any, Literal, get_args, get_origin, get_type_hints

from offbeat.core.strategy.interface import setting_fields
from offbeat.strategies import OuterSGD, Strategy

INDENT = " " * 4
TYPES = {
    int: "an integer",
    float: "a number",
    str: "text",
    bool: "True or False",
    OuterSGD: "LR/MOMENTUM",
    type(None): "None",
}


def record_of(name: str, cls: type[Strategy]) -> dict[str, Any]:
    """Return the entry of a strategy in the JSON output."""
    return {
        "name": name,
        "settings": cls().settings(),
        "summary": (cls.__doc__ or "").partition("\n")[0],
        "citation": cls.citation,
        "unadvised": cls.unadvised,
    }


def short_text(name: str, cls: type[Strategy]) -> str:
    """Return the lines of a strategy in the list of all: defaults, summary and source."""
    shown = ", ".join(f"{field.name}={field.default}" for field in setting_fields(cls))
    summary = record_of(name, cls)["summary"]
    return f"{name}  {shown}\n{INDENT}{summary}\n{INDENT}{cls.citation}"


def full_record(name: str, cls: type[Strategy]) -> dict[str, Any]:
    """Return the JSON output of one strategy: its entry, with the meaning of each setting."""
    told = {"values": _values(cls), "meanings": _meanings(cls)}
    return {**record_of(name, cls), **told}


def full_text(name: str, cls: type[Strategy], width: int) -> str:
    """Return what a strategy does, and each of its settings with default, values and meaning."""
    told, values = _meanings(cls), _values(cls)
    same = "the same numbers as DDP" if cls.synchronous else "other numbers than DDP"
    lines = [name, *_paragraphs(inspect.cleandoc(cls.__doc__ or ""), width), ""]
    lines += _wrap(f"Computes {same}. Source: {cls.citation}.", width, INDENT)
    if cls.unadvised:
        lines += _wrap(f"Never advised: {cls.unadvised}.", width, INDENT)
    settings = setting_fields(cls)
    if not settings:
        return "\n".join([*lines, "", "It has no settings."])
    lines += ["", "Settings with their defaults (change one with --set NAME=VALUE):"]
    for field in settings:
        lines.append(f"{INDENT}{field.name}={field.default}  ({values[field.name]})")
        lines += _wrap(told.get(field.name, ""), width, 2 * INDENT)
    return "\n".join(lines)


def _meanings(cls: type[Strategy]) -> dict[str, str]:
    """Return the docstring of each setting; none for classes without source code."""
    told: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not is_dataclass(base):
            continue
        try:
            (node,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        except OSError:
            continue
        assert isinstance(node, ast.ClassDef)
        for line, below in pairwise(node.body):
            match line, below:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    told[name] = " ".join(text.split())
    return {field.name: told[field.name] for field in setting_fields(cls) if field.name in told}


def _values(cls: type[Strategy]) -> dict[str, str]:
    """Return a phrase for the possible values of each setting."""
    hints = get_type_hints(cls)
    return {
        field.name: " or ".join(_value_words(hints[field.name])) for field in setting_fields(cls)
    }


def _value_words(hint: Any) -> Iterator[str]:
    if get_origin(hint) is Literal:
        yield ", ".join(map(str, get_args(hint)))
    elif get_origin(hint) is tuple:
        yield "a list with / between"
    elif get_args(hint):
        for part in get_args(hint):
            yield from _value_words(part)
    else:
        yield TYPES.get(hint, getattr(hint, "__name__", str(hint)))


def _paragraphs(text: str, width: int) -> Iterator[str]:
    for number, paragraph in enumerate(text.replace("`", "").split("\n\n")):
        if not paragraph.startswith("Source:"):
            yield from [""] * bool(number)
            yield from _wrap(paragraph, width, INDENT)


def _wrap(text: str, width: int, indent: str) -> list[str]:
    return textwrap.wrap(
        text.replace("`", ""),
        width,
        initial_indent=indent,
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    )
