"""Hooks on the user's modules that copies of these modules do not inherit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn


class UncopiedHook:
    """A hook; its copies, pickled ones too, do nothing."""

    def __init__(self, act: Callable[[], None] | None = None):
        self._act = act

    def __call__(self, *_args: Any) -> None:
        if self._act is not None:
            self._act()

    def __reduce__(self) -> tuple[type[UncopiedHook], tuple[()]]:
        return UncopiedHook, ()


class NamedParameters:
    """The method `named_parameters` of a module, with a hook before it; `parameters` calls it, too.

    A copy of the module has the method of its class.
    """

    name = "named_parameters"

    def __init__(self, module: nn.Module, act: Callable[[], None]):
        self._module, self._act = module, act
        self._own = vars(module).get(self.name)  # of this module alone, not of its class
        vars(module)[self.name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        self._act()
        method = self._own or getattr(type(self._module), self.name).__get__(self._module)
        return method(*args, **kwargs)  # type: ignore[no-any-return]

    def remove(self) -> None:
        """Restore the method that the module had before."""
        if vars(self._module).get(self.name) is self:
            del vars(self._module)[self.name]
            if self._own is not None:
                vars(self._module)[self.name] = self._own

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._module, self.name)  # the copy has no such attribute yet
