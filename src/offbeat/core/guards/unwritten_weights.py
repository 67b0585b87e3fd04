"""Guard for parameters that only the session may change."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn


class WeightChanges:
    """Detects parameters that user code has written or moved since `note`.

    Writes through `parameter.data` are not detected, because they do not change the version.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]):
        self._named = list(named)
        self._known: list[tuple[int, int]] = []
        self.note()

    def note(self) -> None:
        """Record versions and addresses. Later changes are reported."""
        self._known = [(p._version, p.data_ptr()) for _, p in self._named]

    def forget(self) -> None:
        """Allow changes until the next `note`."""
        self._known = []

    def changed_name(self) -> str | None:
        """Return the name of the first parameter that has changed since `note`, or None."""
        for (name, p), known in zip(self._named if self._known else (), self._known, strict=True):
            if (p._version, p.data_ptr()) != known:
                return name
        return None
