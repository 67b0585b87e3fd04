"""Looks at gradients: who reads `p.grad` where it is not what the step will apply."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from torch import Tensor, nn

_plain: Any = Tensor.grad  # torch's own descriptor


class Looks:
    """Calls `act` whenever Python code reads the gradient of one of these parameters, between
    `open` and `close`.

    torch tells nobody of reads, so the class of all parameters has a property of ours meanwhile;
    other parameters pass through it.
    """

    _open: ClassVar[dict[int, Callable[[], None]]] = {}

    def __init__(self, parameters: Iterable[nn.Parameter], act: Callable[[], None]):
        self._ids, self._act = [id(p) for p in parameters], act

    def open(self) -> None:
        """From now on."""
        if not self._ids:
            return
        if not self._open:
            nn.Parameter.grad = property(_read, _write, _delete)  # type: ignore[assignment]
        self._open.update(dict.fromkeys(self._ids, self._act))

    def close(self) -> None:
        """No longer; twice is fine."""
        if not self._open:
            return
        for one in self._ids:
            self._open.pop(one, None)
        if not self._open:
            del nn.Parameter.grad


def _read(p: nn.Parameter) -> Tensor | None:
    act = Looks._open.get(id(p))
    if act is not None:
        act()
    return _plain.__get__(p)


def _write(p: nn.Parameter, gradient: Tensor | None) -> None:
    _plain.__set__(p, gradient)


def _delete(p: nn.Parameter) -> None:
    _plain.__delete__(p)
