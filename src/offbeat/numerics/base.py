"""What a rule is given: one worker's storage, by buffer and buckets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from offbeat.plan import Apply, Vote

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


Rule = Callable[[Context, Apply], None]
VoteRule = Callable[[Context, Vote, range], bool]
"""This worker's say; the range is the whole model's buckets."""
WireRule = Callable[[Any, dict[str, Any]], Any]
"""What arrives of one array that is sent, with the wire's settings; a new array."""
