"""The guard of parameters that only the session may change."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


class WeightChanges:
    """Sees parameters that somebody else has written to, or put elsewhere, since `note`.

    What is written through `parameter.data` is not seen: torch does not count it.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]):
        self._named = list(named)
        self._known: list[tuple[int, int]] = []
        self.note()

    def note(self) -> None:
        """From here on they must stay as they are."""
        self._known = [(p._version, p.data_ptr()) for _, p in self._named]

    def forget(self) -> None:
        """Until the next `note` they may change."""
        self._known = []

    def changed_name(self) -> str | None:
        """The name of the first parameter that is not as it was noted."""
        for (name, p), known in zip(self._named if self._known else (), self._known, strict=True):
            if (p._version, p.data_ptr()) != known:
                return name
        return None
