"""Hooks on the user's modules that copies of these modules do not inherit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Attached:
    """A hook; its copies, pickled ones too, do nothing."""

    def __init__(self, act: Callable[[], None] | None = None):
        self._act = act

    def __call__(self, *_args: Any) -> None:
        if self._act is not None:
            self._act()

    def __reduce__(self) -> tuple[type[Attached], tuple[()]]:
        return Attached, ()
