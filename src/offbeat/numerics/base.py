"""What a rule is given: one worker's storage, by buffer and buckets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from offbeat.plan import Apply, Kind, Vote

Arrays = Sequence[Any]
"""Views of a run of buckets, one per dtype and device; NumPy arrays or tensors."""


class Context(Protocol):
    """One worker at one moment. Arrays are views: writing in place changes the storage."""

    rank: int

    def read(self, buffer: str, buckets: range, age: int = 0) -> Arrays:
        """A buffer's content, only to be read."""
        ...

    def write(self, buffer: str, buckets: range, age: int = 0) -> Arrays:
        """A buffer's content, to be changed in place."""
        ...

    def parameters(self, buffer: str, buckets: range) -> Arrays:
        """A buffer of the parameters' shape without running statistics, to be changed in place."""
        ...

    def squared_norm(self, buffer: str, buckets: range) -> float:
        """The sum of a buffer's squares, without what travels behind gradients."""
        ...

    def scale(self, buffer: str, buckets: range, factor: float) -> None:
        """Multiply a buffer, without what travels behind gradients."""
        ...

    def swap(self, a: str, b: str, buckets: range) -> None:
        """Exchange the parameters of two buffers, without running statistics."""
        ...

    def rotate(self, buffer: str) -> None:
        """Every copy becomes one older; the oldest becomes the newest."""
        ...

    def local(self, apply: Apply) -> None:
        """The user's optimizer on these buckets; the gradients are used up."""
        ...

    def reset(self, buckets: range) -> None:
        """Forget the optimizer's state of these buckets."""
        ...

    def recall(self, name: str) -> Any:
        """A number or tensor that the rule has kept on this worker, None at first."""
        ...

    def keep(self, name: str, value: Any) -> None:
        """Keep it."""
        ...

    def show(self, name: str, numbers: Mapping[str, float]) -> None:
        """Numbers of a vote in this iteration, for whoever records them."""
        ...


Use = Literal["reads", "writes", "changes"]
Role = Literal["update", "close"]
Rule = Callable[[Context, Apply], None]
VoteRule = Callable[[Context, Vote, range], bool]
"""This worker's say; the range is the buckets that the vote is about."""


@dataclass(frozen=True)
class Setting:
    """What a plan may say to a rule: the name of a buffer, a number, one per rank, or a word.

    Without a default it must be given, unless it is `optional`. A buffer may have to be of one
    kind; a number must lie within `least` and `most` (with `above`, not be `least` itself), a word
    be one of `words`.

    Of a buffer, `use` is what the rule does with it; a `common` one must be the same on all ranks
    for the rule to leave replicas alike; an `origin` is what changes may be counted from. A number that `contracts` is the share of a difference
    between replicas that the rule leaves: `check` makes it small, so that they meet soon.
    """

    what: Literal["buffer", "number", "count", "numbers", "word"]
    default: Any = None
    kind: Kind | None = None
    least: float = float("-inf")
    most: float = float("inf")
    words: tuple[str, ...] = ()
    above: bool = False
    optional: bool = False
    use: Use = "changes"
    common: bool = False
    origin: bool = False
    contracts: bool = False


SETTINGS: dict[str, dict[str, Setting]] = {}
"""Of every rule, vote and wire, by its name."""


@dataclass(frozen=True)
class Effects:
    """What others must know about a rule beside its settings.

    `reads`, `writes`: what it uses of `grad`, `param` and `state` whatever its settings say.
    `role`: `update` is a step of the user's optimizer, which uses gradients up; `close` ends an
    accumulation window. `conserves`: with it, too, every gradient must arrive in the weights once,
    which `check` then demands. `by_bucket`: applied to a run of buckets it does what it does when
    applied to each.
    """

    reads: frozenset[str]
    writes: frozenset[str]
    role: Role | None
    conserves: bool
    by_bucket: bool


EFFECTS: dict[str, Effects] = {}
"""Of every rule, by its name."""
RULES: dict[str, Rule] = {}
VOTES: dict[str, VoteRule] = {}

Function = TypeVar("Function", bound=Callable[..., Any])


def rule(
    *,
    reads: Iterable[str] = (),
    writes: Iterable[str] = (),
    role: Role | None = None,
    conserves: bool,
    by_bucket: bool = True,
    **settings: Setting,
) -> Callable[[Function], Function]:
    """Make a function a rule: what it does to whom, and what settings it has."""

    def declared(function: Function) -> Function:
        name = function.__name__
        if name in RULES:
            raise ValueError(f"rule {name!r} is there twice; give one another name")
        RULES[name], SETTINGS[name] = function, settings
        EFFECTS[name] = Effects(frozenset(reads), frozenset(writes), role, conserves, by_bucket)
        return function

    return declared


def vote(**settings: Setting) -> Callable[[Function], Function]:
    """Make a function the rule of a vote, with the settings that it has."""

    def declared(function: Function) -> Function:
        VOTES[function.__name__], SETTINGS[function.__name__] = function, settings
        return function

    return declared
