"""Text of the command line to objects: strategies, settings, contestants, files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from offbeat.plan import Plan
from offbeat.plan.check import raise_if_wrong
from offbeat.profile import Profile
from offbeat.sim import Votes
from offbeat.strategies import Gossip, Served, Strategy, create, methods
from offbeat.strategies.base import require_choice

if TYPE_CHECKING:  # imported by the commands that need it
    from offbeat.run.compare import Contestant

BITS = {"0": False, "1": True}

# Types that a setting may have: how an error calls their values, and what makes one of text.
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


def contestants(names: str, settings: Sequence[str]) -> tuple[Contestant, ...]:
    """Contestants of "ddp,dreamddp:period=8" and of --set texts; settings inline win.

    ValueError for a strategy or setting that does not exist, with the nearest one.
    """
    from offbeat.run.compare import Contestant

    items = [item.strip().split(":") for item in names.split(",")]
    chosen = [name for name, *_ in items]
    for name in chosen:
        require_choice("strategy", name, methods())
    shared: dict[str, dict[str, str]] = {name: {} for name in chosen}
    for key, text in _pairs(settings).items():
        for name, setting in _addressed(key, chosen):
            shared[name][setting] = text
    return tuple(
        Contestant("-".join([name, *inline]), _create(name, shared[name] | _pairs(inline)))
        for name, *inline in items
    )


def _addressed(key: str, chosen: Sequence[str]) -> list[tuple[str, str]]:
    """(strategy, setting) of `dreamddp.period`, or of `period` for all strategies that have it."""
    scope, _, setting = key.rpartition(".")
    if scope:
        require_choice("strategy of --set", scope, chosen)
        return [(scope, setting)]
    known = {name: [f.name for f in fields(methods()[name])] for name in chosen}
    every = dict.fromkeys(setting for settings in known.values() for setting in settings)
    require_choice(f"setting of {', '.join(known)}", key, every)
    return [(name, key) for name in known if key in known[name]]


def parse_value(setting: str, text: str, hint: Any) -> Any:
    """Value of a setting from its text and its type: a word of a Literal (first, as a word may be
    "none"), none, true or false, int, float. ValueError if the type has no such value."""
    kinds = get_args(hint) if get_origin(hint) in UNIONS else (hint,)
    literal = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
    words = {str(word).lower() if isinstance(word, bool) else str(word): word for word in literal}
    given = text.lower() if text in ("True", "False") else text
    if given in words:
        return words[given]
    for kind, (_, values) in KINDS.items():
        with suppress(ValueError, KeyError):
            if kind in kinds:
                return values(text)
    if len(words) > 1:
        require_choice(setting, text, words)
    allowed = [*words, *(name for kind, (name, _) in KINDS.items() if kind in kinds)]
    raise ValueError(f"{setting} ({text!r}) must be {' or '.join(allowed)}")


def _pairs(texts: Sequence[str] | None) -> dict[str, str]:
    for text in texts or []:
        if not text.partition("=")[0] or "=" not in text:
            raise ValueError(f"setting ({text!r}) must read NAME=VALUE, as in period=5")
    return {text.partition("=")[0]: text.partition("=")[2] for text in texts or []}


def strategy(name: str, settings: Sequence[str] | None) -> Strategy:
    """A strategy of settings as "period=5"; ValueError if there is none."""
    return _create(name, _pairs(settings))


def several(names: str, settings: Sequence[str] | None) -> list[Strategy]:
    """Strategies of "ddp,dreamddp:period=8"; a single name takes all settings."""
    if "," not in names and ":" not in names:
        return [strategy(names, settings)]
    return [contestant.strategy for contestant in contestants(names, settings or [])]


def with_setting(strategy: Strategy, setting: str, text: str) -> Strategy:
    """The strategy with one setting from its text; ValueError if it has no such value."""
    value = parse_value(setting, text.strip(), get_type_hints(type(strategy))[setting])
    return replace(strategy, **{setting: value})


def _create(name: str, settings: Mapping[str, str]) -> Strategy:
    cls = methods().get(name)
    known = {field.name for field in fields(cls)} if cls is not None else ()
    hints = {k: hint for k, hint in get_type_hints(cls).items() if k in known} if cls else {}
    # `create` knows best what to say about names that there are not.
    values = {k: parse_value(k, t, hints[k]) if k in hints else t for k, t in settings.items()}
    return create(name, values)


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


def pace(text: str | None) -> float | Literal["auto", "none"] | None:
    """A number, "auto" or "none"; ValueError on anything else."""
    if text is None or text == "auto" or text == "none":
        return text
    try:
        return float(text)
    except ValueError:
        raise ValueError(
            f"--pace ({text!r}) must be a number of at least 1, auto or none"
        ) from None


def votes(text: str | None, chosen: Strategy | Plan, facts: Profile) -> Votes:
    """What the votes of a strategy or plan say: a share of yes, or what a run's record holds;
    ValueError."""
    if text is None:
        return {}
    names = _vote_names(chosen, facts)
    if not names:
        raise ValueError(f"votes ({text}) must be left out: there are none")
    with suppress(ValueError):
        return dict.fromkeys(names, float(text))
    from offbeat.run.compare import outcomes_of

    path = Path(text)
    require_file(path, "give a share of yes such as .2, or the rank0.json of a run")
    outcomes = outcomes_of(json.loads(path.read_text()))
    if not outcomes:
        raise ValueError(f"{path} must be the record of a run with votes")
    return outcomes


def _vote_names(chosen: Strategy | Plan, facts: Profile) -> Sequence[str]:
    if isinstance(chosen, Gossip):
        return ()
    if isinstance(chosen, Served):
        return chosen.votes
    plan = chosen.plan(facts) if isinstance(chosen, Strategy) else chosen
    return [vote.name for vote in plan.votes]


def require_file(path: Path, remedy: str) -> None:
    """ValueError unless the file exists."""
    if not path.is_file():
        raise ValueError(f"file ({path}) must exist; {remedy}")
