"""Guard for parameters that only the session may change."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from offbeat.core.buckets.checksum import checksum


class WeightChanges:
    """Detects parameters that user code has written or moved since `note`.

    Versions show in-place writes, except those through `parameter.data`. Checksums show all
    changes. With checksums, weights that are written and then restored do not count, such as those
    of an evaluation with averaged weights.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]):
        self._named = list(named)
        self.note()

    def note(self, *, contents: bool = False) -> None:
        """Record versions and addresses, or checksums if `contents`. Later changes are reported."""
        self._contents = contents
        self._known = self._states()

    def forget(self) -> None:
        """Allow changes until the next `note`."""
        self._known = []

    def changed_name(self) -> str | None:
        """Return the name of the first parameter that has changed since `note`, or None."""
        return next(iter(self.changed_names()), None)

    def changed_names(self) -> list[str]:
        """Return the names of all parameters that have changed since `note`."""
        if not self._known:
            return []
        states = zip(self._named, self._known, self._states(), strict=True)
        return [name for (name, _), known, now in states if now != known]

    def _states(self) -> list[object]:
        if self._contents:
            return [checksum(p) for _, p in self._named]
        return [(p._version, p.data_ptr()) for _, p in self._named]
