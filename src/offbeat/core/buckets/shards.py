"""Parameters that `fully_shard` has divided between the ranks of a node.

The only module that uses private names of `torch.distributed.fsdp`. Each rank stores one part of
every parameter, its shard, padded to equal sizes on all ranks of the node. FSDP gathers whole
parameters from the padded shards before a forward and reduces gradients to shards in backward.
Ranks with the same place in their nodes hold equal parts, so averages of replicas are averages of
shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def is_sharded(p: Tensor) -> bool:
    """Whether a parameter is a DTensor."""
    return hasattr(p, "placements")  # importing the class of DTensors takes .8 s


def local_of(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor that this rank holds, without padding, in their own memory.

    A tensor that is no DTensor is returned itself.
    """
    return tensor._local_tensor if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def shard_bytes(p: Tensor) -> int:
    """Return the bytes that each rank stores of a parameter, with padding."""
    if not is_sharded(p):
        return p.numel() * p.element_size()
    dim, ranks = p.placements[0].dim, p.device_mesh.size()  # type: ignore[attr-defined]
    rows = -(-p.size(dim) // ranks)
    return rows * (p.numel() // max(p.size(dim), 1)) * p.element_size()


class Shards:
    """Memory of the sharded parameters of a model.

    Args:
        model: the model, outside of a forward and a backward.
    """

    def __init__(self, model: nn.Module):
        self._where = next(model.parameters()).device
        self._group: dist.ProcessGroup | None = None  # of the ranks that share the replica
        self._stored: dict[int, Any] = {}  # torch's FSDPParam by id of the parameter
        for module in sharded_modules(model):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                self._stored |= {id(one.sharded_param): one for one in group.fsdp_params}
                self._group = group.mesh_info.mesh.get_group()

    def memory_of(self, p: Tensor) -> Tensor:
        """Return the memory of a parameter: its padded shard as [n], or itself if it is whole."""
        one = self._stored.get(id(p))
        return p if one is None else one._sharded_param_data

    def view_of(self, flat: Tensor, p: Tensor, start: int) -> Tensor:
        """Return a tensor with the shape of a parameter in other memory.

        Args:
            flat: flat memory, [elements].
            p: a sharded parameter.
            start: first element of `flat` to use; as many as `memory_of(p)` has.

        Returns:
            DTensor whose local elements are a view of `flat`, without padding.
        """
        one = self._stored[id(p)]
        padded = flat[start : start + one._sharded_param_data.numel()]
        padded = padded.view(one.padded_sharded_param_size)
        dim = one.fsdp_placement.dim
        return one.to_sharded_dtensor(padded.narrow(dim, 0, one.sharded_size[dim]))

    def squared_norm(self, tensors: Iterable[Tensor]) -> float:
        """Return the squared norm of tensors of the replica, of which each rank gives its part.

        All ranks of the node must call it at the same place.
        """
        squares = [torch.linalg.vector_norm(t).double().square() for t in tensors if t.numel()]
        # A rank without elements takes part, too, with a tensor where the backend expects it.
        nothing = torch.zeros((), dtype=torch.float64, device=self._where)
        total = torch.stack([nothing, *squares]).sum()
        if self._group is not None:
            dist.all_reduce(total, group=self._group)
        return float(total)

    def is_any(self, tensor: Tensor) -> bool:
        """Return whether a tensor of the replica has an element that is not zero.

        All ranks of the node must call it at the same place.
        """
        found = local_of(tensor).any().to(torch.int32)
        if self._group is not None:
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._group)
        return bool(found)

    def move(self, p: Tensor, memory: Tensor) -> None:
        """Use other memory for a parameter. Its contents are the caller's task.

        Args:
            p: the parameter.
            memory: tensor of the shape of `memory_of(p)`.
        """
        one = self._stored.get(id(p))
        if one is None:
            p.data = memory
            return
        shard, dim = one.sharded_param, one.fsdp_placement.dim
        length = shard._local_tensor.size(dim) if shard._local_tensor.numel() else 0
        one._sharded_param_data = memory
        shard._local_tensor = memory.view(one.padded_sharded_param_size).narrow(dim, 0, length)


def sharded_modules(model: nn.Module) -> list[Any]:
    """Return the modules that `fully_shard` was applied to."""
    return [m for m in model.modules() if hasattr(m, "_get_fsdp_state")]


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
    meshes: dict[tuple[int, ...], str] = {}
    named = [(name, p) for name, p in model.named_parameters() if is_sharded(p)]
    for name, p in named:
        _require_one_dimension(name, p.device_mesh, p.placements)  # type: ignore[attr-defined]
    managed = Shards(model)._stored
    for name, p in named:
        if id(p) not in managed:
            raise ValueError(
                f"parameter {name!r} is a DTensor that fully_shard does not manage; shard it with "
                "fully_shard, or keep it whole"
            )
        _require_plain_storage(name, managed[id(p)])
        meshes.setdefault(tuple(p.device_mesh.mesh.flatten().tolist()), name)  # type: ignore[attr-defined]
    if not meshes:
        return None
    if len(meshes) > 1:
        (one, first), (other, second) = list(meshes.items())[:2]
        raise ValueError(
            f"parameter {second!r} is sharded over ranks {list(other)} and {first!r} over "
            f"{list(one)}; give every fully_shard the same mesh, mesh['inside']"
        )
    _require_trained_shards(model)
    return next(iter(meshes))


def _require_one_dimension(name: str, mesh: DeviceMesh, placements: Iterable[Any]) -> None:
    kinds = [type(placement).__name__ for placement in placements]
    if mesh.ndim != 1 or kinds != ["Shard"]:
        raise ValueError(
            f"parameter {name!r} is a DTensor with placements ({', '.join(kinds)}) on a mesh of "
            f"{mesh.ndim} dimensions, which must be one Shard on one: HSDP averages gradients "
            "between nodes itself, and tensor parallelism is not supported beside it; give "
            "fully_shard the dimension inside a node, mesh['inside']"
        )


def _require_plain_storage(name: str, one: Any) -> None:
    """Raise ValueError if a parameter's shard is not a plain tensor on the parameter's device."""
    if one.offload_to_cpu:
        raise ValueError(
            f"parameter {name!r} is offloaded to the CPU (offload_policy), but its shard must stay "
            "on the device of training; leave offload_policy out of fully_shard"
        )
    if hasattr(one._sharded_local_tensor, "fsdp_pre_all_gather"):
        raise ValueError(
            f"parameter {name!r} ({type(one._sharded_local_tensor).__name__}) must be a plain "
            "tensor, not one that FSDP gathers in another format (fp8); leave the conversion out"
        )


def describe_shards(model: nn.Module) -> dict[str, str]:
    """Return by name of a sharded parameter the dimension that is cut, and the parameters that
    FSDP gathers together with it. They must be equal in all nodes."""
    names = {id(p): name for name, p in model.named_parameters()}
    found: dict[str, str] = {}
    for module in sharded_modules(model):
        for group in module._get_fsdp_state()._fsdp_param_groups:
            own = [names.get(id(one.sharded_param), "?") for one in group.fsdp_params]
            together = f"gathered with {own[0]!r} to {own[-1]!r} ({len(own)})"
            for name, one in zip(own, group.fsdp_params, strict=True):
                cut = f"cut along dimension {one.fsdp_placement.dim}"
                found[f"sharding of parameter {name!r}"] = f"{cut} and {together}"
    return found


def _require_trained_shards(model: nn.Module) -> None:
    """Raise ValueError for whole trained parameters beside shards: no code averages their gradients
    inside the node."""
    for name, p in model.named_parameters():
        if p.requires_grad and not is_sharded(p):
            raise ValueError(
                f"parameter {name!r} is trained and not sharded, while others are, so the ranks of "
                "a node would not average its gradients; apply fully_shard to the whole model"
            )


def own_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return what this rank holds of all parameters, by name."""
    reshard(model)
    return {name: local_of(p.detach()) for name, p in model.named_parameters()}


def as_shards(
    model: nn.Module, optimizer: torch.optim.Optimizer, found: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return saved states of model and optimizer with DTensors where the model has shards.

    Args:
        model: the model.
        optimizer: its optimizer.
        found: `model` and `optimizer`, as their `state_dict` returned them on this rank, with the
            elements of its shards; other entries are returned unchanged.

    Raises:
        ValueError: a saved shard has another shape than that of the model; names the parameter.
    """
    like = {name: t for name, t in model.state_dict().items() if is_sharded(t)}
    if not like:
        return found
    weights = dict(found["model"])
    for name, shard in like.items():
        if weights[name].shape != local_of(shard).shape:
            raise ValueError(
                f"the saved shard of {name!r} has shape {tuple(weights[name].shape)}, that of this "
                f"rank {tuple(local_of(shard).shape)}; start as many nodes of as many ranks as the "
                "saved job had"
            )
        weights[name] = _shard_like(shard, weights[name])
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = {
        index: {
            name: _shard_like(parameters[index], value)
            if isinstance(value, Tensor) and value.shape == local_of(parameters[index]).shape
            else value
            for name, value in entries.items()
        }
        for index, entries in found["optimizer"]["state"].items()
    }
    return {**found, "model": weights, "optimizer": {**found["optimizer"], "state": state}}


def _shard_like(shard: Any, own: Tensor) -> Tensor:
    """Return a DTensor like `shard` whose elements on this rank are `own`."""
    return type(shard).from_local(
        own, shard.device_mesh, shard.placements, shape=shard.size(), stride=shard.stride()
    )
