"""Text form of strategies, as in `dreamddp:period=8`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from offbeat.core.strategy.interface import Strategy, changed_settings, require_choice
from offbeat.core.strategy.registry import create, find, reference_of, setting_names

BITS = {"0": False, "1": True}

# By type of a setting: the description of its values in errors, and the parser of its text.
KINDS: dict[Any, tuple[str, Callable[[str], Any]]] = {
    NoneType: ("none", lambda text: {"none": None}[text.lower()]),
    bool: ("true or false", lambda text: {"true": True, "false": False}[text.lower()]),
    int: ("an integer", int),
    float: ("a number", float),
    str: ("text", str),
    tuple[int, ...]: (
        "integers with / between",
        lambda text: tuple(int(part) for part in text.split("/")),
    ),
    tuple[float, ...]: (
        "numbers with / between",
        lambda text: tuple(float(part) for part in text.split("/")),
    ),
    tuple[tuple[bool, ...], ...]: (
        "rows of 0 and 1 with / between",
        lambda text: tuple(tuple(BITS[bit] for bit in row) for row in text.split("/")),
    ),
}
UNIONS = (Union, UnionType)


def parse(text: str) -> Strategy:
    """Return a strategy from its text, as in `dreamddp:period=8:average=before_update`. Raise
    ValueError for invalid text."""
    return strategy(text, None)


def text_of(strategy: Strategy) -> str:
    """Return the text of a strategy: its name, and the settings that differ from the defaults.
    Inverse of `parse`."""
    changed = changed_settings(strategy).items()
    return ":".join([reference_of(strategy), *(f"{k}={_value_text(v)}" for k, v in changed)])


def _value_text(value: Any) -> str:
    """Return the text of a setting.

    Elements of a tuple are joined by `/`. An element that is a tuple of flags is written as digits,
    such as 0110.
    """
    if not isinstance(value, tuple):
        return str(value)
    return "/".join(
        "".join(str(int(bit)) for bit in part) if isinstance(part, tuple) else str(part)
        for part in value
    )


def parts(text: str) -> list[str]:
    """Return the name and the settings of a strategy's text. Values may contain colons, as in
    wire=topk:0.01."""
    name, *rest = text.strip().split(":")
    if rest and "=" not in rest[0]:
        name = f"{name}:{rest.pop(0)}"  # module:Class
    settings: list[str] = []
    for part in rest:
        first, comma, second = part.partition(",")
        if comma and "=" in second:
            raise ValueError(
                f"settings of a strategy ({part!r}) must have ':' between them, as in "
                f"{name}:{first}:{second}"
            )
        if settings and "=" not in part:
            settings[-1] += f":{part}"
        else:
            settings.append(part)
    return [name, *settings]


def parse_value(setting: str, text: str, hint: Any) -> Any:
    """Return the value of a setting from its text and its type. Raise ValueError if the type has no
    such value.

    Literals take precedence, because "none" may be a literal.
    """
    kinds = get_args(hint) if get_origin(hint) in UNIONS else (hint,)
    literal = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
    words = {str(word).lower() if isinstance(word, bool) else str(word): word for word in literal}
    given = text.lower() if text in ("True", "False") else text
    if given in words:
        return words[given]
    readers = KINDS | {kind: (kind.FORM, kind.parse) for kind in kinds if hasattr(kind, "parse")}
    for kind, (_, values) in readers.items():
        with suppress(ValueError, KeyError):
            if kind in kinds:
                return values(text)
    if len(words) > 1:
        require_choice(setting, text, words)
    allowed = [*words, *(name for kind, (name, _) in readers.items() if kind in kinds)]
    raise ValueError(f"{setting} ({text!r}) must be {' or '.join(allowed)}")


def pairs(texts: Sequence[str] | None) -> dict[str, str]:
    """Return NAME=VALUE texts as a dictionary by name. Raise ValueError for other texts."""
    for text in texts or []:
        if not text.partition("=")[0] or "=" not in text:
            raise ValueError(f"setting ({text!r}) must read NAME=VALUE, as in period=5")
    return {text.partition("=")[0]: text.partition("=")[2] for text in texts or []}


def strategy(text: str, settings: Sequence[str] | None) -> Strategy:
    """Return a strategy from its text and further settings such as "period=5". Raise ValueError for
    invalid text."""
    name, *own = parts(text)
    return create_from_texts(name, pairs([*own, *(settings or [])]))


def with_setting(strategy: Strategy, setting: str, text: str) -> Strategy:
    """Return the strategy with one setting changed to the value of a text. Raise ValueError for
    invalid text."""
    value = parse_value(setting, text.strip(), get_type_hints(type(strategy))[setting])
    return replace(strategy, **{setting: value})


def create_from_texts(name: str, settings: Mapping[str, str]) -> Strategy:
    """Return a strategy from its name and the texts of its settings. Raise ValueError for invalid
    text."""
    known = setting_names(name)
    hints = {k: hint for k, hint in get_type_hints(find(name)).items() if k in known}
    # `create` raises the error for unknown settings.
    values = {k: parse_value(k, t, hints[k]) if k in hints else t for k, t in settings.items()}
    return create(name, values)
