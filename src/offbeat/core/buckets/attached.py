"""Hooks on the user's modules, which have no effect in copies of them, and on gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from offbeat.core.buckets.shards import is_sharded


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


class GradientHook:
    """Hook that runs after each gradient of a parameter, which may be frozen now.

    Args:
        p: the parameter.
        act: called with the parameter.
        lasting: whether the hook stays for the whole training. torch cannot remove a
            post-accumulate hook without a trace: every backward still takes the interpreter's lock
            for each parameter that has had one. So a hook of a few iterations is on the node that
            accumulates gradients, which autograd replaces when nothing refers to it. FSDP calls
            only lasting hooks of shards.
    """

    def __init__(self, p: nn.Parameter, act: Callable[[Tensor], None], *, lasting: bool):
        self._node: Node | None = None
        self._handle: RemovableHandle
        trains = p.requires_grad
        p.requires_grad_(True)  # torch refuses hooks on a parameter that the script has frozen
        if lasting or is_sharded(p):
            self._handle = p.register_post_accumulate_grad_hook(act)
        else:
            self._node = get_gradient_edge(p).node  # which would otherwise be freed
            self._handle = self._node.register_hook(lambda *_: act(p))
        p.requires_grad_(trains)

    def remove(self) -> None:
        """Remove the hook."""
        self._handle.remove()
        self._node = None
