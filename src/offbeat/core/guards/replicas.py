"""Replicas: their tensors, comparison between ranks, and unification."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from offbeat.core.buckets.checksum import checksum
from offbeat.core.buckets.random_states import CPU, generator
from offbeat.core.buckets.shards import is_sharded, local_of, own_parameters, reshard
from offbeat.core.transport.cluster import Cluster
from offbeat.core.transport.control import Control

Named = Mapping[str, Tensor]

REPAIR = (
    "load the same checkpoint on all ranks and give every rank the same optimizer, scheduler and "
    "clipping, or average the replicas with model.consolidate(repair=True)"
)


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Return all parameters by name, including frozen ones.

    Module buffers are left out, because they may differ between ranks.
    """
    return {name: p for name, p in own_parameters(model).items() if p.numel()}


def optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Return the optimizer's tensors by `parameter.state`, and the own shards of sharded ones."""
    return {
        f"{name}.{key}": local_of(value.detach())
        for name, p in model.named_parameters()
        for key, value in optimizer.state.get(p, {}).items()
        if isinstance(value, Tensor)
    }


# ---- comparison -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """A tensor that differs between `rank` and most ranks.

    `relative` is the norm of the difference relative to the tensor's norm. It is None if the tensor
    is missing on one of both ranks.
    """

    rank: int
    other: int  # a rank with the value of most ranks
    tensor: str
    relative: float | None

    def __str__(self) -> str:
        how = (
            f"differ by {self.relative:.2g} of its norm"
            if self.relative is not None
            else "do not both have it"
        )
        return f"{self.tensor!r} of rank {self.rank} and of rank {self.other} {how}"


def find_difference(
    named: Named, control: Control, groups: Sequence[Sequence[int]] = ()
) -> Difference | None:
    """Return the first tensor in which replicas differ by more than rounding; None without one.

    Every rank must call it, and gets the same result. Checksums and sketches of all tensors are
    gathered. Processors of different kinds round differently, so a difference in the lower half of
    the digits is ignored.

    Args:
        named: tensors of this rank.
        control: control of the job.
        groups: groups of ranks to compare within; () for all ranks.
    """
    digests = {name: (checksum(t), sketch(t), _tolerance(t)) for name, t in named.items()}
    everyone = control.gather(digests)
    if are_equal(everyone):
        return None
    for name in dict.fromkeys(name for by_name in everyone for name in by_name):
        entries = [by_name.get(name) for by_name in everyone]
        for rank, other in dissenters([s and s[0] for s in entries], groups):
            a, b = entries[rank], entries[other]
            if a is None or b is None:
                return Difference(rank, other, name, None)
            relative = _relative_distance(a[1], b[1])
            if not relative <= a[2]:  # also true if `relative` is NaN
                return Difference(rank, other, name, relative)
    return None


def are_equal(values: Sequence[object]) -> bool:
    """Return whether all values are equal. Equal values that `Control.gather` returns are one
    object."""
    return all(value is values[0] or value == values[0] for value in values)


def dissenters(
    values: Sequence[Hashable], groups: Sequence[Sequence[int]] = ()
) -> Iterable[tuple[int, int]]:
    """Return (rank, reference) for each rank whose value is not the most common one of its group.

    `reference` is the first rank with the most common value. Without groups, all ranks are one.
    """
    found: list[tuple[int, int]] = []
    for group in groups or [range(len(values))]:
        # On a tie the value that occurs first.
        common = Counter(values[rank] for rank in group).most_common(1)[0][0]
        reference = next(rank for rank in group if values[rank] == common)
        found += [(rank, reference) for rank in group if values[rank] != common]
    return found


def digest_of(named: Named) -> int:
    """Return a checksum of names and contents, of at most 62 bits."""
    names = hash_text("\n".join(named))
    return (checksum(*named.values()) ^ names) >> 2


def hash_text(text: str) -> int:
    """Return a hash of the text that is the same in every process, unlike `hash`."""
    data = torch.frombuffer(bytearray(text.encode() or b"\0"), dtype=torch.uint8)
    return checksum(data) ^ len(text)


_SIGNS = 4096
_PROJECTIONS = 4


def sketch(tensor: Tensor) -> list[float]:
    """Return the norm of a tensor, and `_PROJECTIONS` sums of its elements with random signs.

    The sums of two tensors differ by about the norm of their difference (Johnson-Lindenstrauss).
    The signs are the same on every rank, so that sketches can be compared.
    """
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
    """Return the norm of the difference of two sketched tensors, relative to the larger norm."""
    norm = max(a[0], b[0])
    apart = math.dist(a[1:], b[1:]) / math.sqrt(_PROJECTIONS)
    return apart / norm if norm else 0.0


def _tolerance(tensor: Tensor) -> float:
    return math.sqrt(torch.finfo(tensor.dtype).eps) if tensor.is_floating_point() else 0.0


# ---- unification ----------------------------------------------------------------------------


Held = list[tuple[bool, Tensor]]
"""Tensors of a replica on this rank: whether only the ranks of a column hold it, and the tensor."""


def broadcast_model(model: nn.Module, cluster: Cluster) -> None:
    """Copy the parameters and buffers of replica 0 to every replica.

    They are not sent if checksums are equal already, as after initialization with equal seeds.
    """
    held = _held_tensors(model)
    if not _are_equal(held, cluster):
        _unify(held, cluster, source=0)


def take(source: int, model: nn.Module, cluster: Cluster) -> None:
    """Copy the model of one rank to all ranks, and compare checksums."""
    held = _held_tensors(model)
    _unify(held, cluster, source=source)
    _require_same(held, cluster)


def average_replicas(
    model: nn.Module,
    cluster: Cluster,
    more: Iterable[Tensor] = (),
    *,
    staged: bool = False,
) -> None:
    """Average floating-point tensors of all replicas, and copy rank 0's other tensors.

    Nothing is sent if replicas are identical. Finally checksums are compared. Shards are averaged
    over the ranks that hold them, all other tensors over all ranks.

    Args:
        model: the model.
        cluster: the cluster.
        more: further tensors to unify in the same way, such as optimizer state.
        staged: average copies, so that the replicas stay as they are if a rank fails meanwhile.

    Raises:
        RuntimeError: checksums differ afterwards.
    """
    stored = _held_tensors(model, more)
    held = [(is_shard, t.clone()) for is_shard, t in stored] if staged else stored
    if not _are_equal(held, cluster):
        _unify(held, cluster, source=None)
    _require_same(held, cluster)
    if staged:
        for (_, tensor), (_, average) in zip(stored, held, strict=True):
            tensor.copy_(average)


def repair(
    model: nn.Module, optimizer: torch.optim.Optimizer, cluster: Cluster, *, staged: bool = False
) -> None:
    """Average replicas together with their optimizer state.

    Different optimizer states would let equal weights diverge again. For `staged` see
    `average_replicas`.

    Raises:
        RuntimeError: on every rank, if ranks do not have state for the same parameters.
    """
    state = optimizer_state(optimizer, model)
    layout = [(name, tuple(t.shape), str(t.dtype)) for name, t in state.items()]
    groups = cluster.topology.holders
    if not cluster.control.is_same([hash_text(repr(layout)) >> 2], groups):
        found = find_difference(state, cluster.control, groups)
        raise RuntimeError(
            f"optimizer states cannot be averaged: {found}; load the same checkpoint on all ranks"
        )
    average_replicas(model, cluster, state.values(), staged=staged)


def require_equal(model: nn.Module, strategy: object, cluster: Cluster) -> None:
    """Require equal replicas, for strategies that keep them equal.

    Raises:
        RuntimeError: on every rank, if parameters differ by more than rounding; names rank and
            first tensor.
    """
    named, control, groups = weights(model), cluster.control, cluster.topology.holders
    if control.is_same([digest_of(named)], groups):
        return
    found = find_difference(named, control, groups)
    if found is not None:
        raise RuntimeError(
            f"replicas have diverged, although {strategy} keeps them equal: {found}; {REPAIR}"
        )


def replica_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> list[Tensor]:
    """Return all tensors of a replica on this rank, detached: parameters, buffers, and the state of
    an optimizer."""
    state = {} if optimizer is None else optimizer_state(optimizer, model)
    return [tensor for _, tensor in _held_tensors(model, state.values())]


def _held_tensors(model: nn.Module, more: Iterable[Tensor] = ()) -> Held:
    """Return parameters, including frozen ones, buffers, and `more` tensors, which may be parts of
    a sharded replica; first those that every rank holds."""
    reshard(model)
    tensors = [*model.parameters(), *model.buffers()]
    held = [(is_sharded(t), local_of(t.detach())) for t in tensors]
    held += [(any(map(is_sharded, tensors)), t) for t in more]
    return sorted((one for one in held if one[1].numel()), key=lambda one: one[0])


def _checksums(held: Held) -> list[int]:
    """Return the checksums of tensors that every rank holds, and of shards."""
    return [
        checksum(*(t for is_shard, t in held if is_shard == wanted)) >> 2
        for wanted in (False, True)
    ]


def _are_equal(held: Held, cluster: Cluster) -> bool:
    """Return whether all replicas have equal tensors; the same on all ranks."""
    (whole, shards), groups = _checksums(held), cluster.topology.holders
    if not cluster.control.is_same([whole]):
        return False
    return not groups or cluster.control.is_same([shards], groups)


def _require_same(held: Held, cluster: Cluster) -> None:
    """Raise RuntimeError if ranks differ from the first rank that holds the same tensors."""
    sums = cluster.control.gather(_checksums(held))
    odd = {rank for rank, (whole, _) in enumerate(sums) if whole != sums[0][0]}
    for own in cluster.topology.columns:
        odd.update(rank for rank in own if sums[rank][1] != sums[own[0]][1])
    if odd:
        raise RuntimeError(
            f"replicas still differ after consolidation: ranks {sorted(odd)} have other checksums "
            "than replica 0; was a parameter changed by another thread?"
        )


def _unify(held: Held, cluster: Cluster, *, source: int | None) -> None:
    """Copy the tensors of replica `source`. Without it average floating-point ones, and copy the
    others of replica 0.

    Collectives treat memory as contiguous, so on a view with gaps they would overwrite elements in
    the gaps. The copy to the links' device is for tensors on the host, such as Adam's counters.
    """
    what = "averaging replicas" if source is None else f"taking the weights of replica {source}"
    with cluster.control.collective(what), torch.no_grad():
        for is_shard, tensor in held:
            whole = tensor.to(cluster.where).contiguous()
            if source is None and tensor.is_floating_point():
                cluster.average(whole, is_shard=is_shard)
            else:
                cluster.broadcast(whole, source or 0, is_shard=is_shard)
            if whole.data_ptr() != tensor.data_ptr():
                tensor.copy_(whole)
