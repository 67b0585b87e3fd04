"""State of a job for joining members at a boundary, of which every member sends a part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from offbeat.core.transport.cluster import Cluster
from offbeat.core.transport.packed import broadcast_state

PIECE_BYTES = 4 << 20  # of one message between two ranks


@dataclass(frozen=True)
class Feeding:
    """Ranks that have the state of the job, and ranks that need it.

    Each source sends an equal part of the bytes to the first rank of each joining node, so that a
    node receives them once. This rank sends them to the other ranks of its node.

    Attributes:
        cluster: links between all ranks.
        joining: ranks that need the state.
    """

    cluster: Cluster
    joining: Sequence[int]

    @property
    def sources(self) -> list[int]:
        """Return the ranks that have the state."""
        return [r for r in range(self.cluster.topology.ranks) if r not in self.joining]

    def send(self, tensors: Iterable[Tensor], *, are_equal: bool) -> None:
        """Copy tensors to the joining ranks, in place. Every rank must call this method.

        Args:
            tensors: tensors of this rank, of the same shapes everywhere.
            are_equal: whether all sources have equal tensors; otherwise the first one sends them.
        """
        held, sources = [*tensors], self.sources if are_equal else self.sources[:1]
        firsts = [node[0] for node in self.cluster.topology.nodes if node[0] in self.joining]
        with self.cluster.control.collective("sending the state to joining members"):
            self.cluster.control.run_checked(lambda: self._send_all(held, sources, firsts))

    def _send_all(
        self, held: Sequence[Tensor], sources: Sequence[int], firsts: Sequence[int]
    ) -> None:
        """Send tensors from the sources to the first ranks of joining nodes, and from these to the
        other ranks of their nodes."""
        self._send(held, sources, firsts)
        for node in self.cluster.topology.nodes:
            if node[0] in firsts:
                self._send(held, node[:1], node[1:])

    def _send(self, held: Sequence[Tensor], sources: Sequence[int], to: Sequence[int]) -> None:
        """Send an equal part of each run of bytes from each source to each of other ranks."""
        rank = self.cluster.control.rank
        if rank not in (*sources, *to):
            return
        whole, count = Bytes(held), len(sources)
        for start in range(0, whole.size, PIECE_BYTES * count):
            run = range(start, min(whole.size, start + PIECE_BYTES * count))
            parts = [run[len(run) * i // count : len(run) * (i + 1) // count] for i in range(count)]
            if rank in to:
                received = [
                    torch.empty(len(part), dtype=torch.uint8, device="cpu") for part in parts
                ]
                self._exchange(dist.irecv, zip(received, sources, strict=True))
                views = whole.views(run)
                data = torch.cat(received).split([len(view) for view in views])
                for view, arrived in zip(views, data, strict=True):
                    view.copy_(arrived)
            elif views := whole.views(parts[sources.index(rank)]):
                part = torch.cat([view.cpu() for view in views])
                self._exchange(dist.isend, ((part, target) for target in to))
        if rank in to:
            whole.copy_back()

    def _exchange(self, act: Callable[..., Any], pairs: Iterable[tuple[Tensor, int]]) -> None:
        """Send or receive tensors to or from other ranks, all at the same time."""
        group = self.cluster.everyone
        works = [act(data, other, group=group) for data, other in pairs if data.numel()]
        for work in works:
            work.wait()

    def send_state(self, state: Any, *, are_equal: bool) -> Any:
        """Return the state of the first source on the joining ranks, otherwise `state`.

        Args:
            state: tensors, numbers and containers, such as the state of an optimizer.
            are_equal: whether all sources have equal states.
        """
        control, first = self.cluster.control, self.sources[0]
        shapes = shapes_of(state) if control.rank == first else None
        with control.collective("sending the shapes of the optimizer's state"):
            shapes = broadcast_state(shapes, first, control.group)
        if control.rank in self.joining:
            state = create_tensors(shapes, self.cluster.where)
        self.send(tensors_of(state), are_equal=are_equal)
        return state


SHAPE = "shape of a tensor"  # key of the dict that stands for it


def tensors_of(state: Any) -> list[Tensor]:
    """Return the tensors of a state, such as that of an optimizer."""
    return [leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]


def shapes_of(state: Any) -> Any:
    """Return a state with shapes in place of its tensors."""
    return tree_map(_shape_of, state)


def create_tensors(shapes: Any, where: torch.device) -> Any:
    """Return a state with new tensors in place of shapes.

    Args:
        shapes: result of `shapes_of` of another rank.
        where: device of the tensors that are not on the host of that rank.
    """
    leaves, spec = tree_flatten(shapes, is_leaf=_is_shape)
    return tree_unflatten([_create(leaf, where) for leaf in leaves], spec)


def _create(leaf: Any, where: torch.device) -> Any:
    if not _is_shape(leaf):
        return leaf
    place = torch.device("cpu") if leaf["on_host"] else where
    return torch.empty(leaf[SHAPE], dtype=getattr(torch, leaf["dtype"]), device=place)


def _shape_of(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    dtype = str(leaf.dtype).removeprefix("torch.")
    return {SHAPE: tuple(leaf.shape), "dtype": dtype, "on_host": leaf.device.type == "cpu"}


def _is_shape(value: Any) -> bool:
    return isinstance(value, dict) and SHAPE in value


class Bytes:
    """Bytes of tensors, one after the other. Tensors with gaps are copied."""

    def __init__(self, tensors: Sequence[Tensor]):
        self._own = [tensor for tensor in tensors if tensor.nbytes]
        self._held = [tensor.contiguous() for tensor in self._own]
        self.size = sum(tensor.nbytes for tensor in self._held)

    def views(self, run: range) -> list[Tensor]:
        """Return views of the bytes of a run, one per tensor."""
        found, before = list[Tensor](), 0
        for tensor in self._held:
            first, last = max(run.start - before, 0), min(run.stop - before, tensor.nbytes)
            if first < last:
                found.append(tensor.view(-1).view(torch.uint8)[first:last])
            before += tensor.nbytes
        return found

    def copy_back(self) -> None:
        """Copy to the tensors with gaps."""
        for own, held in zip(self._own, self._held, strict=True):
            if own is not held:
                own.copy_(held)
