"""The vocabulary of rules: their context, settings and effects, and the registries by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from offbeat.core.plan import Apply, Kind, Vote

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
        """Report numbers of a vote in this iteration to the record."""
        ...


Use = Literal["reads", "writes", "changes"]
Role = Literal["update", "close"]
Rule = Callable[[Context, Apply], None]
VoteRule = Callable[[Context, Vote, range], bool]
"""This worker's say; the range is the buckets that the vote is about."""


@dataclass(frozen=True)
class Setting:
    """A setting of a rule: the name of a buffer, a number, one number per rank, or a word.

    A setting without a default is required, unless it is `optional`. A buffer may be restricted to
    one `kind`. A number lies within `least` and `most`; with `above`, it is greater than `least`. A
    word is one of `words`.

    For a buffer, `use` states whether the rule reads it, overwrites it or changes it. A `common`
    buffer must be equal on all ranks, else the rule makes replicas differ. From an `origin` buffer
    the rule can count changes. A number that `contracts` is the share of a difference between
    replicas that remains after the rule; `check` makes it small, so that replicas meet early.
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
    """Effects of a rule that do not depend on its settings.

    Attributes:
        reads: which of `grad`, `param` and `state` the rule reads.
        writes: which of them it changes.
        role: "update" for a step of the user's optimizer, which uses gradients up; "close" for the
            end of an accumulation window.
        conserves: whether every gradient still arrives in the weights once.
            `check` tests plans against this claim.
        by_bucket: whether the result for a run of buckets equals the results for each bucket.
    """

    reads: frozenset[str]
    writes: frozenset[str]
    role: Role | None
    conserves: bool
    by_bucket: bool


EFFECTS: dict[str, Effects] = {}
"""Effects of every rule, by its name."""
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
    """Register a function as a rule with these effects and settings."""

    def register(function: Function) -> Function:
        name = function.__name__
        if name in RULES:
            raise ValueError(f"rule ({name!r}) is registered already; give this rule another name")
        RULES[name], SETTINGS[name] = function, settings
        EFFECTS[name] = Effects(frozenset(reads), frozenset(writes), role, conserves, by_bucket)
        return function

    return register


def vote(**settings: Setting) -> Callable[[Function], Function]:
    """Make a function the rule of a vote, with the settings that it has."""

    def register(function: Function) -> Function:
        VOTES[function.__name__], SETTINGS[function.__name__] = function, settings
        return function

    return register
