"""Text of the command line to objects: strategies, settings, contestants, files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbeat.plan import Plan
from offbeat.plan.check import raise_if_wrong
from offbeat.profile import Profile
from offbeat.strategies import STRATEGIES, Strategy, create
from offbeat.strategies.base import require_choice

if TYPE_CHECKING:  # imported by the commands that need it
    from offbeat.compare import Contestant


def contestants(names: str, settings: Sequence[str]) -> tuple[Contestant, ...]:
    """Contestants of "ddp,dreamddp:period=8" and of --set texts; settings inline win.

    ValueError for a strategy or setting that does not exist, with the nearest one.
    """
    from offbeat.compare import Contestant

    items = [item.strip().split(":") for item in names.split(",")]
    chosen = [name for name, *_ in items]
    for name in chosen:
        require_choice("strategy", name, STRATEGIES)
    shared: dict[str, dict[str, Any]] = {name: {} for name in chosen}
    for key, value in _pairs(settings).items():
        for name, setting in _addressed(key, chosen):
            shared[name][setting] = value
    return tuple(
        Contestant("-".join([name, *inline]), create(name, shared[name] | _pairs(inline)))
        for name, *inline in items
    )


def _addressed(key: str, chosen: Sequence[str]) -> list[tuple[str, str]]:
    """(strategy, setting) of `dreamddp.period`, or of `period` for all strategies that have it."""
    scope, _, setting = key.rpartition(".")
    if scope:
        require_choice("strategy of --set", scope, chosen)
        return [(scope, setting)]
    known = {name: [f.name for f in fields(STRATEGIES[name])] for name in chosen}
    every = dict.fromkeys(setting for settings in known.values() for setting in settings)
    require_choice(f"setting of {', '.join(known)}", key, every)
    return [(name, key) for name in known if key in known[name]]


def parse_value(text: str) -> int | float | bool | str | None:
    """Value of a setting: int, float, true, false, none, else the text."""
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def _pairs(texts: Sequence[str] | None) -> dict[str, Any]:
    for text in texts or []:
        if not text.partition("=")[0] or "=" not in text:
            raise ValueError(f"setting ({text!r}) must read NAME=VALUE, as in period=5")
    return {text.partition("=")[0]: parse_value(text.partition("=")[2]) for text in texts or []}


def strategy(name: str, settings: Sequence[str] | None) -> Strategy:
    """A strategy of settings as "period=5"; ValueError if there is none."""
    return create(name, _pairs(settings))


def load_profile(path: Path) -> Profile:
    """A profile's file; ValueError naming it."""
    require_file(path, "measure one with `offbeat profile`")
    return Profile.load(path)


def load_plan(path: Path, facts: Profile) -> Plan:
    """A plan's file, checked against the profile; ValueError naming the file."""
    require_file(path, "write one with `offbeat plan -o`")
    try:
        plan = Plan.from_dict(json.loads(path.read_text()))
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no plan ({error}); write it with `offbeat plan`") from None
    raise_if_wrong(plan, facts)
    return plan


def require_file(path: Path, remedy: str) -> None:
    """ValueError unless the file exists."""
    if not path.is_file():
        raise ValueError(f"file ({path}) must exist; {remedy}")
