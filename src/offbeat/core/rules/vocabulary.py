"""Types and registries of rules: context, settings and effects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from offbeat.core.plan import Apply, Kind, Vote

Arrays = Sequence[Any]
"""Views of a run of buckets, one per dtype and device; NumPy arrays or tensors."""


class Context(Protocol):
    """Access of a rule to one worker at one moment. Arrays are views: writing changes the
    storage."""

    rank: int

    def read(self, buffer: str, buckets: range, age: int = 0) -> Arrays:
        """Return a buffer for reading.

        Args:
            buffer: name of the buffer.
            buckets: run of buckets.
            age: copy of the buffer; 0 for the newest.
        """
        ...

    def write(self, buffer: str, buckets: range, age: int = 0) -> Arrays:
        """Return a buffer to change in place.

        Args:
            buffer: name of the buffer.
            buckets: run of buckets.
            age: copy of the buffer; 0 for the newest.
        """
        ...

    def parameters(self, buffer: str, buckets: range) -> Arrays:
        """Return the parameters of a buffer to change in place, without running statistics.

        Args:
            buffer: name of the buffer.
            buckets: run of buckets.
        """
        ...

    def squared_norm(self, buffer: str, buckets: range) -> Any:
        """Return the sum of squares of a buffer, without the absence counters behind gradients.

        The result is a number or a tensor with one element. `float` waits for the device to compute
        it.

        Args:
            buffer: name of the buffer.
            buckets: run of buckets.
        """
        ...

    def scale(self, buffer: str, buckets: range, factor: float) -> None:
        """Multiply a buffer, without the absence counters behind gradients.

        Args:
            buffer: name of the buffer.
            buckets: run of buckets.
            factor: factor of each number.
        """
        ...

    def swap(self, a: str, b: str, buckets: range) -> None:
        """Exchange the parameters of two buffers. Running statistics are not exchanged.

        Args:
            a: name of one buffer.
            b: name of the other buffer.
            buckets: run of buckets.
        """
        ...

    def rotate(self, buffer: str) -> None:
        """Increase the age of each copy of a buffer by one. The oldest copy becomes the newest.

        Args:
            buffer: name of the buffer.
        """
        ...

    def local(self, apply: Apply) -> None:
        """Step the user's optimizer. This uses up the gradients.

        Args:
            apply: apply with the buckets to step.
        """
        ...

    def reset(self, buckets: range) -> None:
        """Reset the optimizer's state to its initial values.

        Args:
            buckets: run of buckets.
        """
        ...

    def recall(self, name: str) -> Any:
        """Return the value that `keep` has stored on this worker; None at first.

        Args:
            name: name of the value.
        """
        ...

    def keep(self, name: str, value: Any) -> None:
        """Store a value on this worker.

        Args:
            name: name of the value.
            value: number, tensor or record.
        """
        ...

    def show(self, name: str, numbers: Mapping[str, float]) -> None:
        """Record numbers of a vote in this iteration, for metrics and records.

        Args:
            name: name of the vote.
            numbers: numbers by name.
        """
        ...


Use = Literal["reads", "writes", "changes"]
Role = Literal["update", "close"]
Rule = Callable[[Context, Apply], None]
"""Function that executes a rule on one worker, given the apply with buckets and settings."""
VoteRule = Callable[[Context, Vote, range], bool]
"""Function that returns the vote of a worker. The range is the buckets of the vote."""


@dataclass(frozen=True)
class Setting:
    """Setting of a rule, a vote or a codec. A setting without a default is required, unless
    `optional`.

    Attributes:
        what: "buffer" for the name of a buffer, "number", "count" for a whole number, "numbers"
            for one number per rank, "word" for one of `words`.
        default: default value; None for none.
        kind: required kind of a buffer; None for any kind.
        least: smallest value of a number.
        most: largest value of a number.
        words: allowed words.
        above: whether a number must be greater than `least`.
        optional: whether the setting may be omitted.
        use: whether the rule reads a buffer, overwrites it ("writes") or updates it
            ("changes").
        common: whether a buffer must be equal on all ranks. Otherwise the rule makes replicas
            differ.
        origin: whether the rule can take differences from a buffer.
        contracts: whether a number is the share of a difference between replicas that remains
            after the rule. `check` reduces it, so that replicas become equal after few
            iterations.
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
"""Settings of each rule, vote and codec, by its name."""


@dataclass(frozen=True)
class Effects:
    """Effects of a rule that do not depend on its settings.

    Attributes:
        reads: which of `grad`, `param` and `state` the rule reads.
        writes: which of `grad`, `param` and `state` the rule changes.
        role: "update" for a step of the user's optimizer, which uses up gradients; "close" for
            the end of an accumulation window; None for other rules.
        conserves: whether a plan with the rule still applies each gradient to the weights exactly
            once. `check` tests plans against this claim.
        by_bucket: whether the result for a run of buckets equals the results for each bucket.
    """

    reads: frozenset[str]
    writes: frozenset[str]
    role: Role | None
    conserves: bool
    by_bucket: bool


EFFECTS: dict[str, Effects] = {}
"""Effects of each rule, by its name."""
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
    """Register the decorated function as a rule. The name of the function is the name of the rule.

    Args:
        reads: see `Effects`.
        writes: see `Effects`.
        role: see `Effects`.
        conserves: see `Effects`.
        by_bucket: see `Effects`.
        settings: settings of the rule by name.

    Raises:
        ValueError: a rule, vote or codec with this name is registered already.
    """

    def register(function: Function) -> Function:
        name = _unused_name(function)
        RULES[name], SETTINGS[name] = function, settings
        EFFECTS[name] = Effects(frozenset(reads), frozenset(writes), role, conserves, by_bucket)
        return function

    return register


def vote(**settings: Setting) -> Callable[[Function], Function]:
    """Register the decorated function as the rule of a vote.

    Args:
        settings: settings of the rule by name.
    """

    def register(function: Function) -> Function:
        name = _unused_name(function)
        VOTES[name], SETTINGS[name] = function, settings
        return function

    return register


def _unused_name(function: Callable[..., Any]) -> str:
    """Return the name of a function. Raise ValueError if a rule, vote or codec has it."""
    name = function.__name__
    if name in SETTINGS:
        raise ValueError(
            f"rule ({name!r}) must have a name that no rule, vote or codec has; choose another name"
        )
    return name
