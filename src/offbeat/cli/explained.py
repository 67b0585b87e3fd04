"""Text of `offbeat strategies`: all strategies in short, or one with each of its settings."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from docstring_parser import parse_from_object

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
    """Return the JSON output of a strategy, with values and meaning of each setting."""
    hints, known = get_type_hints(cls), [field.name for field in setting_fields(cls)]
    return {
        "name": name,
        "settings": cls().settings(),
        "summary": (cls.__doc__ or "").partition("\n")[0],
        "citation": cls.citation,
        "unadvised": cls.unadvised,
        "values": {setting: " or ".join(_value_words(hints[setting])) for setting in known},
        "meanings": {name: text for name, text in _meanings(cls).items() if name in known},
    }


def short_text(record: dict[str, Any]) -> str:
    """Return the lines of a strategy in the list of all: defaults, summary and source."""
    shown = ", ".join(f"{name}={value}" for name, value in record["settings"].items())
    return f"{record['name']}  {shown}\n{INDENT}{record['summary']}\n{INDENT}{record['citation']}"


def full_text(name: str, cls: type[Strategy], width: int) -> str:
    """Return what a strategy does, and each of its settings with default, values and meaning."""
    record = record_of(name, cls)
    same = "the same numbers as DDP" if cls.synchronous else "other numbers than DDP"
    paragraphs = inspect.cleandoc(cls.__doc__ or "").split("\n\n")
    told = "\n\n".join(
        _wrap(text, width, INDENT) for text in paragraphs if not text.startswith("Source:")
    )
    lines = [name, told, "", _wrap(f"Computes {same}. Source: {cls.citation}.", width, INDENT)]
    if cls.unadvised:
        lines.append(_wrap(f"Never advised: {cls.unadvised}.", width, INDENT))
    if not record["values"]:
        return "\n".join([*lines, "", "It has no settings."])
    lines += ["", "Settings with their defaults (change one with --set NAME=VALUE):"]
    for field in setting_fields(cls):
        lines.append(f"{INDENT}{field.name}={field.default}  ({record['values'][field.name]})")
        lines.append(_wrap(record["meanings"].get(field.name, ""), width, 2 * INDENT))
    return "\n".join(lines)


def _meanings(cls: type[Strategy]) -> dict[str, str]:
    """Return the docstring of each field; none for classes without source code."""
    return {
        told.arg_name: " ".join((told.description or "").split())
        for base in filter(is_dataclass, reversed(cls.__mro__))
        for told in parse_from_object(base).params
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


def _wrap(text: str, width: int, indent: str) -> str:
    return textwrap.fill(
        text.replace("`", ""),
        width,
        initial_indent=indent,
        subsequent_indent=indent,
        break_on_hyphens=False,
        break_long_words=False,
    )
