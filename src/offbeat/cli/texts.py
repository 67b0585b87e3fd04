"""Parsing of command-line text: strategies, settings, contestants, files, targets, the secret."""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from offbeat.core.plan import Plan
from offbeat.core.profile import Profile
from offbeat.core.sim import Votes
from offbeat.core.strategy.interface import Strategy, require_choice
from offbeat.core.strategy.parsing import create_from_texts, pairs, parts, strategy
from offbeat.core.strategy.registry import read_plan, setting_names
from offbeat.core.units import parse_count, parse_duration_s
from offbeat.core.verify.check import raise_if_wrong
from offbeat.experiments.device_speed import DeviceSpeed
from offbeat.jobs.reported import LOSS, is_name

if TYPE_CHECKING:  # imported by the commands that need it
    from offbeat.experiments.comparison import Contestant
    from offbeat.lab import Cluster

_READABLE_BY_OTHERS = 0o077  # bits of the mode of a file


def contestants(names: str, settings: Sequence[str]) -> tuple[Contestant, ...]:
    """Return the contestants of names such as "ddp,dreamddp:period=8" and of --set texts.

    Settings in `names` override those of --set. Raises ValueError for an unknown strategy or
    setting and names the most similar one.
    """
    from offbeat.experiments.comparison import Contestant

    items = [parts(item) for item in names.split(",")]
    chosen = [name for name, *_ in items]
    known = {name: setting_names(name) for name in chosen}
    shared: dict[str, dict[str, str]] = {name: {} for name in chosen}
    for key, text in pairs(settings).items():
        for name, setting in _resolve_key(key, known):
            shared[name][setting] = text
    return tuple(
        Contestant("-".join([name, *inline]), create_from_texts(name, shared[name] | pairs(inline)))
        for name, *inline in items
    )


def _resolve_key(key: str, known: Mapping[str, Sequence[str]]) -> list[tuple[str, str]]:
    """Return the (strategy, setting) pairs that the key of a --set text refers to.

    `dreamddp.period` refers to one strategy, `period` to all strategies with this setting.
    """
    scope, _, setting = key.rpartition(".")
    if scope:
        require_choice("strategy of --set", scope, known)
        return [(scope, setting)]
    every = dict.fromkeys(setting for settings in known.values() for setting in settings)
    require_choice(f"setting of {', '.join(known)}", key, every)
    return [(name, key) for name in known if key in known[name]]


def parse_strategies(names: str, settings: Sequence[str] | None) -> list[Strategy]:
    """Return the strategies of names such as "ddp,dreamddp:period=8".

    A single name gets all of `settings`.
    """
    if "," not in names and ":" not in names:
        return [strategy(names, settings)]
    return [contestant.strategy for contestant in contestants(names, settings or [])]


def load_profile(path: Path) -> Profile:
    """Load a profile from a file. A ValueError names the file."""
    require_file(path, "measure one with `offbeat profile`")
    return Profile.load(path)


def load_cluster(path: Path, *, example: int = 4, **replaced: object) -> Cluster:
    """Load a cluster file.

    Args:
        path: file.
        example: number of hosts in the remedy of an error.
        replaced: values of the options that the file replaces, by name.

    Raises:
        ValueError: one of these options is given, or the file does not exist or is invalid.
    """
    from offbeat.lab import Cluster

    if given := [name for name, value in replaced.items() if value is not None]:
        names = " and ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ValueError(f"--cluster replaces {names}; give one or the other")
    require_file(path, f'write one with the lines hosts = {example} and rate = "100mbit"')
    return Cluster.load(path)


def load_plan(path: Path, facts: Profile) -> Plan:
    """Load a plan from a file and check it against the profile. A ValueError names the file."""
    require_file(path, "write one with `offbeat plan -o`")
    try:
        plan = read_plan(json.loads(path.read_text()))
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no plan ({error}); write it with `offbeat plan`") from None
    raise_if_wrong(plan, facts)
    return plan


def parse_pace(text: str | None) -> float | Literal["auto", "none"] | None:
    """Parse the option --pace: a number, "auto" or "none"."""
    if text is None or text == "auto" or text == "none":
        return text
    with suppress(ValueError):
        return float(text)
    raise ValueError(f"--pace ({text!r}) must be a number of at least 1, auto or none")


def parse_seeds(text: str | None, repeat: int | None, seed: int) -> tuple[int, ...]:
    """Parse the option --seeds, such as "0,1,2"; empty without it."""
    if text is None:
        return ()
    if repeat is not None or seed:
        other = "--repeat" if repeat is not None else "--seed"
        raise ValueError(f"--seeds ({text}) replaces {other}; give one or the other")
    try:
        seeds = tuple(int(item) for item in text.split(","))
    except ValueError:
        raise ValueError(f"--seeds ({text!r}) must be whole numbers, as in 0,1,2") from None
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"--seeds ({text}) must differ: equal seeds give equal losses")
    return seeds


def parse_target(text: str | None) -> tuple[tuple[str, float] | None, float | None]:
    """Return (metric and value, loss) of the option --target."""
    if text is None:
        return None, None
    name, _, number = map(str.strip, text.partition("="))
    with suppress(ValueError):
        if is_name(name) and math.isfinite(value := float(number)):
            return (None, value) if name == LOSS else ((name, value), None)
    raise ValueError(f"--target ({text!r}) must be a metric and a number, as in accuracy=.97")


def with_arguments(
    chosen: Sequence[Contestant], given: Sequence[str] | None
) -> tuple[Contestant, ...]:
    """Return the contestants with their arguments from texts such as 'dreamddp=--lr 3e-4'.

    A text refers to a label, or to all contestants with a strategy of that name.
    """
    arguments = {contestant.label: contestant.arguments for contestant in chosen}
    for text in given or ():
        # a label holds "=" if it has settings: dreamddp:period=8=--lr 3e-4
        typed, _, words = text.partition("=-")
        words = f"-{words}" if words else ""
        if not words:
            raise ValueError(
                f"--args ({text!r}) must be a strategy and its arguments, as in "
                'dreamddp="--lr 3e-4"'
            )
        label = typed.replace(":", "-")
        found = [c.label for c in chosen if label in (c.label, c.strategy.name)]
        if not found:
            require_choice("strategy of --args", typed, [c.label for c in chosen])
        for name in found:
            arguments[name] += tuple(shlex.split(words))
    return tuple(replace(c, arguments=arguments[c.label]) for c in chosen)


def parse_device(text: str | None) -> DeviceSpeed | None:
    """Parse the option --device-speed, such as "20x" or "35ms"."""
    if text is None:
        return None
    name, known = "--device-speed", text.strip().lower()
    if known.endswith("x"):
        return DeviceSpeed(factor=parse_count(known[:-1], name))
    if known.endswith("s"):
        return DeviceSpeed(iteration_s=parse_duration_s(known, name))
    raise ValueError(
        f"{name} ({text!r}) must be a number above 0 with a unit; write 20x (of the measured "
        "machine) or 35ms (compute per iteration)"
    )


def parse_votes(text: str | None, chosen: Strategy | Plan, facts: Profile) -> Votes:
    """Return the results of a strategy's or plan's votes from the option --votes.

    The text is the share of accepted votes, or the path of a run's record with votes.
    """
    if text is None:
        return {}
    is_plan = isinstance(chosen, Plan)
    names = [vote.name for vote in chosen.votes] if is_plan else chosen.vote_names(facts)
    if not names:
        raise ValueError(f"votes ({text}) must be left out: there are none")
    with suppress(ValueError):
        return dict.fromkeys(names, float(text))
    from offbeat.experiments.predictions import outcomes_of

    path = Path(text)
    require_file(path, "give a share of yes such as .2, or the rank0.jsonl of a run")
    outcomes = outcomes_of(path)
    if not outcomes:
        raise ValueError(f"{path} must be the record of a run with votes")
    return outcomes


def require_file(path: Path, remedy: str, name: str = "file") -> None:
    """Raise ValueError unless the file exists."""
    if not path.is_file():
        raise ValueError(f"{name} ({path}) must exist; {remedy}")


def set_secret(path: Path | None) -> None:
    """Set the secret of this process and its children to that of a file. None: do nothing.

    The secret comes from a file, as every user can read a command line.

    Raises ValueError if the file is missing or empty, or if the environment variable holds another
    secret. Prints a warning to stderr if other users can read the file.
    """
    if path is None:
        return
    from offbeat.frames.secret import VARIABLE, read_secret

    require_file(path, f"write the secret into a file, or set {VARIABLE}", "--secret")
    text = read_secret(path).decode()
    if os.environ.get(VARIABLE, text) != text:
        raise ValueError(f"--secret ({path}) and {VARIABLE} are two secrets; unset the variable")
    warn_if_readable(path)
    os.environ[VARIABLE] = text


def warn_if_readable(path: Path) -> None:
    """Print a warning to stderr if other users can read a file with a secret."""
    if path.stat().st_mode & _READABLE_BY_OTHERS:
        text = f"offbeat: {path} can be read by other users; chmod 600 {path}"
        print(text, file=sys.stderr, flush=True)
