"""Replicas: what makes one, whether all are the same, and how they are made so."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from offbeat.core.buckets.checksum import checksum
from offbeat.core.buckets.random_states import CPU, generator
from offbeat.core.plan import Plan
from offbeat.core.plan.types import BUFFERS
from offbeat.core.transport.cluster import Cluster
from offbeat.core.transport.collectives import averaging
from offbeat.core.transport.control import Control

Named = Mapping[str, Tensor]

REPAIR = (
    "load the same checkpoint on all ranks and give every rank the same optimizer, scheduler and "
    "clipping, or average the replicas with model.consolidate(repair=True)"
)


def only_gradients(plan: Plan) -> bool:
    """Whether of all that is trained nothing but gradients moves, always: then equal replicas
    stay equal, bit for bit."""
    return all(t.payload.buffer in ("grad", BUFFERS) and t.when is None for t in plan.transfers)


def weights(model: nn.Module) -> dict[str, Tensor]:
    """All parameters, frozen ones too; not the buffers, of which each rank may have its own."""
    return {name: p.detach() for name, p in model.named_parameters() if p.numel()}


def optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The optimizer's tensors, by parameter and their own name."""
    return {
        f"{name}.{key}": value.detach()
        for name, p in model.named_parameters()
        for key, value in optimizer.state.get(p, {}).items()
        if isinstance(value, Tensor)
    }


# ---- comparing ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """A tensor that one rank has otherwise than most; `relative` to the tensor's norm, None where
    it is missing on one of the two ranks or of another size."""

    rank: int
    other: int  # a rank that has what most ranks have
    tensor: str
    relative: float | None

    def __str__(self) -> str:
        how = (
            f"differ by {self.relative:.2g} of its norm"
            if self.relative is not None
            else "do not both have it"
        )
        return f"{self.tensor!r} of rank {self.rank} and of rank {self.other} {how}"


def difference(named: Named, control: Control) -> Difference | None:
    """The first tensor in which replicas differ by more than rounding, the same on every rank.

    Every rank must call it. One small collective if all bits are the same. If not, checksums and
    sketches of all tensors are gathered: processors of different kinds round differently, so
    what differs by less than half the digits counts as the same.
    """
    return None if control.is_same([digest_of(named)]) else find_difference(named, control)


def find_difference(named: Named, control: Control) -> Difference | None:
    """`difference` for ranks that know that some bits differ."""
    mine = {name: (checksum(t), sketch(t), _tolerance(t)) for name, t in named.items()}
    everyone = control.gather(mine)
    for name in dict.fromkeys(name for theirs in everyone for name in theirs):
        seen = [theirs.get(name) for theirs in everyone]
        for rank, other in dissenters([s and s[0] for s in seen]):
            a, b = seen[rank], seen[other]
            if a is None or b is None:
                return Difference(rank, other, name, None)
            relative = _relative_distance(a[1], b[1])
            if not relative <= a[2]:  # also where it is not a number
                return Difference(rank, other, name, relative)
    return None


def dissenters(values: Sequence[Hashable]) -> Iterable[tuple[int, int]]:
    """(rank, a rank that has what most have) for all whose value is not that of most ranks."""
    common = Counter(values).most_common(1)[0][0]  # of equally many, rank 0's
    reference = values.index(common)
    return [(rank, reference) for rank, value in enumerate(values) if value != common]


def digest_of(named: Named) -> int:
    """Of names and bits, at most 62 bits."""
    names = hash_text("\n".join(named))
    return (checksum(*named.values()) ^ names) >> 2


def hash_text(text: str) -> int:
    """The same in every process, unlike `hash`."""
    data = torch.frombuffer(bytearray(text.encode() or b"\0"), dtype=torch.uint8)
    return checksum(data) ^ len(text)


_SIGNS = 4096
_PROJECTIONS = 4


def sketch(tensor: Tensor) -> list[float]:
    """Norm, and sums with random signs: those of two tensors differ by about the norm of their
    difference (Johnson-Lindenstrauss). The same signs on every rank, so that lists compare."""
    flat = tensor.detach().contiguous().view(-1)
    flat = (torch.view_as_real(flat).view(-1) if flat.is_complex() else flat).cpu()
    random = generator()
    rows = -(-flat.numel() // _SIGNS)
    columns = _signs((_SIGNS, _PROJECTIONS), random)
    by_row = _signs((rows, _PROJECTIONS), random)
    sums = torch.zeros(_PROJECTIONS, dtype=torch.float64, device=CPU)
    square = 0.0
    for i, row in enumerate(flat.split(_SIGNS)):
        exact = row.double()
        sums += (exact @ columns[: row.numel()]) * by_row[i]
        square += float(exact @ exact)
    return [math.sqrt(square), *sums.tolist()]


def _signs(shape: tuple[int, int], random: torch.Generator) -> Tensor:
    signs = torch.randint(0, 2, shape, generator=random, dtype=torch.int64, device=CPU)
    return signs.double() * 2 - 1


def _relative_distance(a: Sequence[float], b: Sequence[float]) -> float:
    """Norm of the difference of two sketched tensors, relative to the larger one's."""
    norm = max(a[0], b[0])
    apart = math.dist(a[1:], b[1:]) / math.sqrt(_PROJECTIONS)
    return apart / norm if norm else 0.0


def _tolerance(tensor: Tensor) -> float:
    return math.sqrt(torch.finfo(tensor.dtype).eps) if tensor.is_floating_point() else 0.0


# ---- making them the same -------------------------------------------------------------------


def broadcast_model(model: nn.Module, cluster: Cluster) -> None:
    """Rank 0's parameters and buffers on every rank; nothing is sent if all agree already, as
    equal seeds make them do."""
    tensors = _replica_tensors(model)
    if cluster.control.is_same([checksum(*tensors) >> 2]):
        return
    with cluster.control.collective("taking rank 0's weights"):
        for tensor in tensors:
            _from_rank(0, tensor, cluster)


def unite(model: nn.Module, cluster: Cluster, more: Iterable[Tensor] = ()) -> None:
    """Average the floating-point state of all replicas unless they are identical already, take
    rank 0's integers, and compare checksums. `more`: tensors to treat alike."""
    tensors = [*_replica_tensors(model), *more]
    if not cluster.control.is_same([checksum(*tensors) >> 2]):
        with cluster.control.collective("averaging replicas"):
            for tensor in tensors:
                if tensor.is_floating_point():
                    _in_place(tensor, cluster.where, averaging(cluster.everyone))
                else:
                    _from_rank(0, tensor, cluster)
    _require_same(tensors, cluster)


def take(source: int, model: nn.Module, cluster: Cluster) -> None:
    """Make all replicas like that of one rank, and compare checksums."""
    tensors = _replica_tensors(model)
    with cluster.control.collective(f"taking the weights of rank {source}"):
        for tensor in tensors:
            _from_rank(source, tensor, cluster)
    _require_same(tensors, cluster)


def _require_same(tensors: Sequence[Tensor], cluster: Cluster) -> None:
    sums = cluster.control.gather(checksum(*tensors))
    odd = [rank for rank, value in enumerate(sums) if value != sums[0]]
    if odd:
        raise RuntimeError(
            f"replicas still differ after consolidation: ranks {odd} have other checksums than "
            "rank 0; was a parameter changed by another thread?"
        )


def require_equal(model: nn.Module, strategy: object, control: Control) -> None:
    """RuntimeError on every rank, naming rank and first tensor, if parameters differ by more
    than rounding: for strategies that keep replicas equal."""
    found = difference(weights(model), control)
    if found is not None:
        raise RuntimeError(
            f"replicas have diverged, although {strategy} keeps them equal: {found}; {REPAIR}"
        )


def repair(model: nn.Module, optimizer: torch.optim.Optimizer, cluster: Cluster) -> None:
    """Average replicas with their optimizer state, which would drive them apart again.

    RuntimeError on every rank if ranks do not keep state for the same parameters.
    """
    state = optimizer_state(optimizer, model)
    layout = [(name, tuple(t.shape), str(t.dtype)) for name, t in state.items()]
    if not cluster.control.is_same([hash_text(repr(layout)) >> 2]):
        found = find_difference(state, cluster.control)
        raise RuntimeError(
            f"optimizer states cannot be averaged: {found}; load the same checkpoint on all ranks"
        )
    unite(model, cluster, state.values())


def _from_rank(source: int, tensor: Tensor, cluster: Cluster) -> None:
    group = cluster.everyone
    _in_place(tensor, cluster.where, lambda t: dist.broadcast(t, src=source, group=group))


def _in_place(tensor: Tensor, where: torch.device, collective: Callable[[Tensor], object]) -> None:
    """A collective on a tensor of any strides: it reads and writes memory as if contiguous, so
    on a view with gaps it would write over what lies between. Done on the links' device: Adam
    keeps its counters on the host."""
    with torch.no_grad():
        whole = tensor.to(where).contiguous()
        collective(whole)
        if whole.data_ptr() != tensor.data_ptr():
            tensor.copy_(whole)


def _replica_tensors(model: nn.Module) -> list[Tensor]:
    """Everything that makes a replica: parameters, frozen ones too, and buffers."""
    return [t.detach() for t in (*model.parameters(), *model.buffers()) if t.numel()]
