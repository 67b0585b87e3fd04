"""Hooks on the user's modules that have no effect in copies of these modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn


class UncopiedHook:
    """Hook that calls `act`. Its copies, also pickled ones, do nothing."""

    def __init__(self, act: Callable[[], None] | None = None):
        self._act = act

    def __call__(self, *_args: Any) -> None:
        if self._act is not None:
            self._act()

    def __reduce__(self) -> tuple[type[UncopiedHook], tuple[()]]:
        return UncopiedHook, ()


class NamedParameters:
    """Replacement for the method `named_parameters` of a module that calls `act` first.

    `nn.Module.parameters` calls this method, too. A copy of the module has the method of its class.
    """

    name = "named_parameters"
    __func__ = None  # torch.compile compares it with that of a bound method

    def __init__(self, module: nn.Module, act: Callable[[], None]):
        self._module, self._act = module, act
        self._own = vars(module).get(self.name)  # attribute of the instance, if it has one
        vars(module)[self.name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        self._act()
        method = self._own or getattr(type(self._module), self.name).__get__(self._module)
        return method(*args, **kwargs)  # type: ignore[no-any-return]

    def remove(self) -> None:
        """Restore the previous method of the module."""
        if vars(self._module).get(self.name) is self:
            del vars(self._module)[self.name]
            if self._own is not None:
                vars(self._module)[self.name] = self._own

    def __reduce__(self) -> tuple[Any, ...]:
        # `copy` and `pickle` replace this object by the method of the module's class.
        return getattr, (self._module, self.name)
