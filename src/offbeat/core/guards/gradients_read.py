"""Hooks on reads of gradients and weights while an update is pending."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from torch import Tensor, nn

GRADIENTS = ("grad",)
WEIGHTS = ("data", "detach", "clone", "view")
"""Attributes through which scripts read weights, or write them without a version change."""


class ReadHook:
    """Calls `act` before Python code reads an attribute of a parameter, between `open` and `close`.

    torch has no hooks for reads. So properties are set on the class of all parameters. For other
    parameters these properties do nothing else than torch's own attributes.

    Args:
        parameters: parameters to watch.
        act: function to call.
        attributes: names of the attributes to watch.
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
        """Start watching reads."""
        for name in self._attributes if self._ids else ():
            looks = self._open.setdefault(name, [])
            if not looks:
                setattr(nn.Parameter, name, _PROPERTIES[name])
            if not self.opened:
                looks.append(self)
        self.opened = bool(self._ids)

    def close(self) -> None:
        """Stop watching reads. Further calls do nothing."""
        for name in self._attributes if self.opened else ():
            looks = self._open[name]
            looks.remove(self)
            if not looks:
                delattr(nn.Parameter, name)
        self.opened = False

    @classmethod
    def on_read(cls, name: str, p: nn.Parameter) -> None:
        """Call the hooks of a parameter before its attribute `name` is read."""
        for looks in tuple(cls._open[name]):
            if id(p) in looks._ids:
                looks._act()


def _property(name: str) -> property:
    plain: Any = getattr(Tensor, name)  # torch's own descriptor

    def read(p: nn.Parameter) -> Any:
        ReadHook.on_read(name, p)
        return plain.__get__(p)

    if not hasattr(plain, "__set__"):  # methods have no setter
        return property(read)
    return property(read, plain.__set__, plain.__delete__)


_PROPERTIES = {name: _property(name) for name in (*GRADIENTS, *WEIGHTS)}
