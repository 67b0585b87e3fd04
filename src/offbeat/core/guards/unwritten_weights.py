"""Guard for parameters that only the session may change."""

from __future__ import annotations

from operator import attrgetter, methodcaller

from torch import nn

from offbeat.core.buckets.checksum import checksum

States = tuple[list[int], ...]
"""Columns of numbers, one number per parameter in each."""
_version, _address = attrgetter("_version"), methodcaller("data_ptr")


class WeightChanges:
    """Detects parameters that user code has written or moved since `note`.

    Versions show in-place writes, except those through `parameter.data`. Checksums show all
    changes. With checksums, weights that are written and then restored do not count, such as those
    of an evaluation with averaged weights.

    Args:
        model: the model, whose trained parameters are watched.
    """

    def __init__(self, model: nn.Module):
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self._names, self._parameters = [n for n, _ in named], [p for _, p in named]
        self.forget()

    def note(self, *, contents: bool = False) -> None:
        """Record versions and addresses, or checksums if `contents`. Later changes are reported."""
        self._contents = contents
        self._known = self._states()

    def forget(self) -> None:
        """Allow changes until the next `note`."""
        self._known: States | None = None
        self._contents = False

    def changed_names(self) -> list[str]:
        """Return the names of all parameters that have changed since `note`."""
        if self._known is None or (now := self._states()) == self._known:
            return []
        before_and_now = zip(zip(*self._known, strict=True), zip(*now, strict=True), strict=True)
        changed = [before != state for before, state in before_and_now]
        return [name for name, has_changed in zip(self._names, changed, strict=True) if has_changed]

    def _states(self) -> States:
        # One call of `map` per column: every step and every forward read all parameters.
        columns = (checksum,) if self._contents else (_version, _address)
        return tuple([*map(column, self._parameters)] for column in columns)
