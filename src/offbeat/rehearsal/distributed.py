"""Functions of torch.distributed for scripts in a rehearsal, between replicas in memory."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from offbeat.rehearsal.cluster import Exchange

REPLACED = (
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "destroy_process_group",
    "get_backend",
    "get_rank",
    "get_world_size",
    "init_process_group",
    "is_initialized",
    "reduce",
)
REFUSED = (
    "all_to_all",
    "all_to_all_single",
    "gather",
    "gather_object",
    "init_device_mesh",
    "irecv",
    "isend",
    "new_group",
    "recv",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "send",
)


class _DoneWork:
    """Handle of a collective that is complete."""

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


@dataclass
class ScriptGroup:
    """The process group of all replicas, as one script sees it.

    Attributes:
        rank: rank of the replica.
        ranks: number of replicas.
        exchange: exchange of the replicas for these calls.
        initialized: whether the script has called `init_process_group`, or `offbeat.prepare`.
    """

    rank: int
    ranks: int
    exchange: Exchange
    initialized: bool = field(default=False)

    def init_process_group(self, *_: Any, **__: Any) -> None:
        self.initialized = True

    def destroy_process_group(self, *_: Any, **__: Any) -> None:
        self.initialized = False

    def is_initialized(self) -> bool:
        return self.initialized

    def get_rank(self, *_: Any, **__: Any) -> int:
        return self.rank

    def get_world_size(self, *_: Any, **__: Any) -> int:
        return self.ranks

    def get_backend(self, *_: Any, **__: Any) -> str:
        return "gloo"

    def barrier(self, *_: Any, **__: Any) -> _DoneWork:
        self.exchange.gather(self.rank, None, "torch.distributed.barrier")
        return _DoneWork()

    def all_reduce(
        self,
        tensor: Tensor,
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> _DoneWork:
        given = self._share(tensor, "torch.distributed.all_reduce")
        with torch.no_grad():
            tensor.copy_(_reduce(given, op))
        return _DoneWork()

    def reduce(
        self,
        tensor: Tensor,
        dst: int = 0,
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> _DoneWork:
        given = self._share(tensor, "torch.distributed.reduce")
        if self.rank == dst:
            with torch.no_grad():
                tensor.copy_(_reduce(given, op))
        return _DoneWork()

    def broadcast(
        self,
        tensor: Tensor,
        src: int = 0,
        group: Any = None,
        async_op: bool = False,
    ) -> _DoneWork:
        given = self._share(tensor, "torch.distributed.broadcast")
        with torch.no_grad():
            tensor.copy_(given[src])
        return _DoneWork()

    def all_gather(
        self, tensor_list: list[Tensor], tensor: Tensor, *_: Any, **__: Any
    ) -> _DoneWork:
        given = self._share(tensor, "torch.distributed.all_gather")
        with torch.no_grad():
            for into, value in zip(tensor_list, given, strict=True):
                into.copy_(value)
        return _DoneWork()

    def all_gather_object(self, object_list: list[Any], obj: Any, *_: Any, **__: Any) -> None:
        object_list[:] = self._exchange_copies(obj, "torch.distributed.all_gather_object")

    def broadcast_object_list(
        self, object_list: list[Any], src: int = 0, *_: Any, **__: Any
    ) -> None:
        what = "torch.distributed.broadcast_object_list"
        object_list[:] = self._exchange_copies(list(object_list), what)[src]

    def _exchange_copies(self, value: Any, what: str) -> list[Any]:
        """Return copies of every rank's object: a process has its own ones, which others do not
        change."""
        return deepcopy(self.exchange.gather(self.rank, deepcopy(value), what))

    def _share(self, tensor: Tensor, what: str) -> list[Tensor]:
        return self.exchange.gather(self.rank, tensor.detach().clone(), what)


def _reduce(given: list[Tensor], op: Any) -> Tensor:
    stacked = torch.stack(given)
    if op == dist.ReduceOp.AVG:
        return stacked.mean(0)
    if op == dist.ReduceOp.SUM:
        return stacked.sum(0)
    if op == dist.ReduceOp.MAX:
        return stacked.amax(0)
    if op == dist.ReduceOp.MIN:
        return stacked.amin(0)
    if op == dist.ReduceOp.PRODUCT:
        return stacked.prod(0)
    raise ValueError(f"op ({op}) must be SUM, AVG, MAX, MIN or PRODUCT in a rehearsal")


GROUP: ContextVar[ScriptGroup] = ContextVar("group")
"""Process group of the script that runs in this thread."""


def replace_functions() -> None:
    """Replace functions of torch.distributed in this process, which only rehearses scripts."""
    for name in REPLACED:
        setattr(dist, name, _forward_call(name))
    for name in REFUSED:
        if hasattr(dist, name):
            setattr(dist, name, _refuse_call(name))


def _forward_call(name: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(GROUP.get(), name)(*args, **kwargs)

    return call


def _refuse_call(name: str) -> Callable[..., Any]:
    def call(*_: Any, **__: Any) -> Any:
        raise ValueError(
            f"torch.distributed.{name} cannot be rehearsed; a rehearsal has {', '.join(REPLACED)}"
        )

    return call
