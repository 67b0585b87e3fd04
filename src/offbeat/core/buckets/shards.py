"""Parameters that `fully_shard` has divided between the ranks of a node.

The only module that uses a private name of DTensors. Each rank stores one part of every parameter,
its shard. Ranks with the same place in their nodes hold equal parts, so averages of replicas are
averages of shards.

Shards stay in the memory of FSDP. Messages and rules use copies of them in the flat memory, padded
to equal sizes on all ranks of the node.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def is_sharded(p: Tensor) -> bool:
    """Whether a parameter is a DTensor."""
    return hasattr(p, "placements")  # importing the class of DTensors takes .8 s


def local_of(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor that this rank holds, in their own memory.

    A tensor that is no DTensor is returned itself.
    """
    return tensor._local_tensor if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def shard_like(shard: Any, own: Tensor) -> Tensor:
    """Return a DTensor like `shard` whose elements on this rank are `own`."""
    return type(shard).from_local(
        own, shard.device_mesh, shard.placements, shape=shard.size(), stride=shard.stride()
    )


def stored_elements(p: Tensor) -> int:
    """Return the elements of a parameter in the flat memory of each rank, with padding."""
    return math.prod(_padded_shape(p) if is_sharded(p) else p.shape)


def _padded_shape(p: Any) -> list[int]:
    """Return the shape of each rank's shard of a parameter, with padding."""
    shape, dim = list(p.shape), p.placements[0].dim
    shape[dim] = -(-shape[dim] // p.device_mesh.size())
    return shape


def own_range(p: Any) -> tuple[int, int, int]:
    """Return the dimension along which a parameter is cut, and begin and length of what this rank
    holds along it."""
    dim = p.placements[0].dim
    each = _padded_shape(p)[dim]
    begin = min(p.device_mesh.get_local_rank() * each, p.size(dim))
    return dim, begin, min(each, p.size(dim) - begin)


def place_of_shard(flat: Tensor, p: Tensor, offset: int) -> Tensor:
    """Return a view of the elements that this rank holds of a parameter, without padding, in flat
    memory at `offset`."""
    dim, _, length = own_range(p)
    padded = flat[offset : offset + stored_elements(p)].view(_padded_shape(p))
    return padded.narrow(dim, 0, length)


def squared_norm(tensors: Iterable[Tensor], p: Any) -> float:
    """Return the squared norm of tensors of the replica, of which each rank gives its part.

    All ranks of the node must call it at the same place.

    Args:
        tensors: this rank's part.
        p: a parameter that is divided between the ranks of the node.
    """
    squares = [torch.linalg.vector_norm(t).double().square() for t in tensors if t.numel()]
    # A rank without elements takes part, too, with a tensor where the backend expects it.
    nothing = torch.zeros((), dtype=torch.float64, device=local_of(p).device)
    total = torch.stack([nothing, *squares]).sum()
    dist.all_reduce(total, group=p.device_mesh.get_group())
    return float(total)


def sharded_modules(model: nn.Module) -> list[Any]:
    """Return the modules that `fully_shard` was applied to."""
    return [m for m in model.modules() if _is_sharded_module(m)]


def _is_sharded_module(module: nn.Module) -> bool:
    # Importing the class takes .8 s, and models without it need no import.
    return any(cls.__name__ == "FSDPModule" for cls in type(module).__mro__)


def _parameter_groups(model: nn.Module) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield the named parameters that each sharded module gathers, which are all of its parameters
    except those of sharded modules within it."""
    names = {id(p): name for name, p in model.named_parameters()}
    taken: set[int] = set()
    for module in reversed(sharded_modules(model)):
        own = [p for p in module.parameters() if id(p) not in taken and is_sharded(p)]
        taken.update(map(id, own))
        yield [(names.get(id(p), "?"), p) for p in own]


def reshard(model: nn.Module) -> None:
    """Let `named_parameters` return the shards, also after a forward that has left whole
    parameters. Call it outside of a forward and a backward."""
    for module in sharded_modules(model):
        module.reshard()


def shard_ranks(model: nn.Module) -> tuple[int, ...] | None:
    """Return the ranks that share this rank's replica; None if no parameter is sharded.

    Raises:
        ValueError: a parameter is sharded in a way that cannot be averaged; names it.
    """
    managed = {id(p) for group in _parameter_groups(model) for _, p in group}
    meshes: dict[tuple[int, ...], str] = {}
    for name, p in model.named_parameters():
        if is_sharded(p):
            _require_supported(name, p, is_managed=id(p) in managed)
            meshes.setdefault(tuple(p.device_mesh.mesh.flatten().tolist()), name)  # type: ignore[attr-defined]
    if not meshes:
        return None
    if len(meshes) > 1:
        (one, first), (other, second) = list(meshes.items())[:2]
        raise ValueError(
            f"parameter {second!r} is sharded over ranks {list(other)} and {first!r} over "
            f"{list(one)}; give every fully_shard the same mesh, mesh['inside']"
        )
    for name, p in model.named_parameters():
        if p.requires_grad and not is_sharded(p):
            raise ValueError(
                f"parameter {name!r} is trained and not sharded, while others are, so the ranks of "
                "a node would not average its gradients; apply fully_shard to the whole model"
            )
    return next(iter(meshes))


def _require_supported(name: str, p: Any, *, is_managed: bool) -> None:
    """Raise ValueError unless a parameter's shard is a plain tensor on the device of training, that
    FSDP has cut along one dimension."""
    kinds, own = [type(placement).__name__ for placement in p.placements], local_of(p)
    if p.device_mesh.ndim != 1 or kinds != ["Shard"]:
        raise ValueError(
            f"parameter {name!r} is a DTensor with placements ({', '.join(kinds)}) on a mesh of "
            f"{p.device_mesh.ndim} dimensions, which must be one Shard on one: HSDP averages "
            "gradients between nodes itself, and tensor parallelism is not supported beside it; "
            "give fully_shard the dimension inside a node, mesh['inside']"
        )
    if not is_managed:
        raise ValueError(
            f"parameter {name!r} is a DTensor that fully_shard does not manage; shard it with "
            "fully_shard, or keep it whole"
        )
    if own.device.type != p.device_mesh.device_type:
        raise ValueError(
            f"parameter {name!r} is offloaded to the CPU (offload_policy), but its shard must stay "
            "on the device of training; leave offload_policy out of fully_shard"
        )
    if hasattr(own, "fsdp_pre_all_gather"):
        raise ValueError(
            f"parameter {name!r} ({type(own).__name__}) must be a plain tensor, not one that FSDP "
            "gathers in another format (fp8); leave the conversion out"
        )


def describe_shards(model: nn.Module) -> dict[str, str]:
    """Return by name of a sharded parameter the dimension that is cut, and the parameters that
    FSDP gathers together with it. They must be equal in all nodes."""
    found: dict[str, str] = {}
    for group in _parameter_groups(model):
        for name, p in group:
            together = f"gathered with {group[0][0]!r} to {group[-1][0]!r} ({len(group)})"
            cut = f"cut along dimension {p.placements[0].dim}"  # type: ignore[attr-defined]
            found[f"sharding of parameter {name!r}"] = f"{cut} and {together}"
    return found


def own_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return what this rank holds of all parameters, by name."""
    reshard(model)
    return {name: local_of(p.detach()) for name, p in model.named_parameters()}
