"""ReadHook at parameters: reads of their gradients and weights while an update is still to come."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from torch import Tensor, nn

GRADIENTS = ("grad",)
WEIGHTS = ("data", "detach", "clone", "view")
"""Attributes through which scripts read weights, or write them unseen."""


class ReadHook:
    """Calls `act` whenever Python code reads one of these attributes of one of these parameters,
    between `open` and `close`.

    torch has no hook for reads, so the class of all parameters has properties of ours meanwhile;
    other parameters pass through them.
    """

    _open: ClassVar[dict[str, list[ReadHook]]] = {}

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        act: Callable[[], None],
        attributes: Iterable[str] = GRADIENTS,
    ):
        self._ids, self._act = frozenset(id(p) for p in parameters), act
        self._attributes, self.opened = [*attributes], False

    def open(self) -> None:
        """From now on."""
        for name in self._attributes if self._ids else ():
            looks = self._open.setdefault(name, [])
            if not looks:
                setattr(nn.Parameter, name, _PROPERTIES[name])
            if not self.opened:
                looks.append(self)
        self.opened = bool(self._ids)

    def close(self) -> None:
        """No longer; twice is fine."""
        for name in self._attributes if self.opened else ():
            looks = self._open[name]
            looks.remove(self)
            if not looks:
                delattr(nn.Parameter, name)
        self.opened = False

    @classmethod
    def note(cls, name: str, p: nn.Parameter) -> None:
        """An attribute of a parameter is about to be read."""
        for looks in tuple(cls._open[name]):
            if id(p) in looks._ids:
                looks._act()


def _property(name: str) -> property:
    plain: Any = getattr(Tensor, name)  # torch's own descriptor

    def read(p: nn.Parameter) -> Any:
        ReadHook.note(name, p)
        return plain.__get__(p)

    if not hasattr(plain, "__set__"):  # a method
        return property(read)
    return property(read, plain.__set__, plain.__delete__)


_PROPERTIES = {name: _property(name) for name in (*GRADIENTS, *WEIGHTS)}
