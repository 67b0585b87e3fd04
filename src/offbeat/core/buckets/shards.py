"""Parameters that `fully_shard` has divided between the ranks of a node.

The only module that uses private names of `torch.distributed.fsdp` and of DTensors. Each rank
stores one part of every parameter, its shard, padded to equal sizes on all ranks of the node. FSDP
gathers whole parameters from the padded shards before a forward and reduces gradients to shards in
backward. Ranks with the same place in their nodes hold equal parts, so averages of replicas are
averages of shards.

Shards move into flat memory if torch's private names are as expected. Otherwise they are staged:
they stay where FSDP has them, and are copied to the flat memory before each use there and back
after it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

MEMORY = "_sharded_param_data"
"""Attribute of torch's `FSDPParam` that holds the padded shard of a parameter, [n]."""


def is_sharded(p: Tensor) -> bool:
    """Whether a parameter is a DTensor."""
    return hasattr(p, "placements")  # importing the class of DTensors takes .8 s


def local_of(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor that this rank holds, without padding, in their own memory.

    A tensor that is no DTensor is returned itself.
    """
    return tensor._local_tensor if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def set_local(tensor: Any, memory: Tensor) -> None:
    """Use other memory for the elements that this rank holds of a DTensor."""
    tensor._local_tensor = memory


def shard_bytes(p: Tensor) -> int:
    """Return the bytes that each rank stores of a parameter, with padding."""
    shape = _padded_shape(p) if is_sharded(p) else p.shape
    return math.prod(shape) * p.element_size()


def _padded_shape(p: Any) -> list[int]:
    """Return the shape of each rank's shard of a parameter, with padding."""
    shape, dim = list(p.shape), p.placements[0].dim
    shape[dim] = -(-shape[dim] // p.device_mesh.size())
    return shape


def _without_padding(flat: Tensor, p: Any) -> Tensor:
    """Return a view of a padded shard, [n], as the elements that this rank holds."""
    dim, _, length = _own_range(p)
    return flat.view(_padded_shape(p)).narrow(dim, 0, length)


def _own_range(p: Any) -> tuple[int, int, int]:
    """Return the dimension along which a parameter is cut, and begin and length of what this rank
    holds along it."""
    dim = p.placements[0].dim
    each = _padded_shape(p)[dim]
    begin = min(p.device_mesh.get_local_rank() * each, p.size(dim))
    return dim, begin, min(each, p.size(dim) - begin)


class Shards:
    """Memory of the sharded parameters of a model.

    Args:
        model: the model, outside of a forward and a backward.
    """

    def __init__(self, model: nn.Module):
        parameters = [*model.parameters()]
        self._where = parameters[0].device
        sharded = [p for p in parameters if is_sharded(p)]
        self._group: dist.ProcessGroup | None = None  # of the ranks that share the replica
        if sharded:
            self._group = sharded[0].device_mesh.get_group()  # type: ignore[attr-defined]
        # torch's FSDPParam by id of the parameter; empty if shards are staged
        self._stored = _stored_shards(model)
        self.are_staged: bool = bool(sharded) and not self._stored
        self._staged: dict[int, Tensor] = {}  # flat memory of staged shards, by id of the parameter

    def memory_of(self, p: Tensor) -> Tensor:
        """Return the memory of a parameter: its padded shard as [n], or itself if it is whole. Of a
        staged shard, return the flat memory with the present elements."""
        if not is_sharded(p):
            return p
        if not self.are_staged:
            return getattr(self._stored[id(p)], MEMORY)
        memory = self._staged.get(id(p))
        if memory is None:
            memory = local_of(p).new_zeros(math.prod(_padded_shape(p)))
        _without_padding(memory, p).copy_(local_of(p).detach())
        return memory

    def view_of(self, flat: Tensor, p: Tensor, start: int) -> Tensor:
        """Return a tensor with the shape of a parameter in other memory.

        Args:
            flat: flat memory, [elements].
            p: a sharded parameter.
            start: first element of `flat` to use; as many as `memory_of(p)` has.

        Returns:
            DTensor whose local elements are a view of `flat`, without padding.
        """
        size = math.prod(_padded_shape(p))
        return _shard_like(p, _without_padding(flat[start : start + size], p))

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
        if not is_sharded(p):
            p.data = memory
        elif self.are_staged:
            self._staged[id(p)] = memory
        else:
            setattr(self._stored[id(p)], MEMORY, memory)
            set_local(p, _without_padding(memory, p))

    def copy_in(self, parameters: Iterable[Tensor]) -> None:
        """Copy staged shards to their flat memory, before code uses it."""
        for p in parameters if self.are_staged else ():
            self.memory_of(p)

    def copy_out(self, parameters: Iterable[Tensor]) -> None:
        """Copy the flat memory of staged shards to FSDP's, after code has changed it."""
        for p in parameters if self.are_staged else ():
            local_of(p).detach().copy_(_without_padding(self._staged[id(p)], p))


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


def _torch_records(model: nn.Module) -> dict[int, Any]:
    """Return torch's `FSDPParam` of sharded parameters, by id; nothing if its names are unknown."""
    found: dict[int, Any] = {}
    for module in sharded_modules(model):
        state = getattr(module, "_get_fsdp_state", lambda: None)()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # torch had a single group per module before
            groups = [getattr(state, "_fsdp_param_group", None)]
        for group in groups:
            for one in getattr(group, "fsdp_params", ()):
                found[id(getattr(one, "sharded_param", None))] = one
    return found


def _stored_shards(model: nn.Module) -> dict[int, Any]:
    """Return torch's `FSDPParam` of all sharded parameters, by id; nothing if one of them stores
    its shard otherwise than expected."""
    found = _torch_records(model)
    for p in model.parameters():
        if is_sharded(p) and not _is_memory_of(p, found.get(id(p))):
            return {}
    return found


def _is_memory_of(p: Tensor, one: Any) -> bool:
    """Return whether the elements of a parameter are a view of the padded shard of a record."""
    padded, own = getattr(one, MEMORY, None), local_of(p)
    if padded is None or padded.numel() != math.prod(_padded_shape(p)):
        return False
    return not own.numel() or padded.data_ptr() == own.data_ptr()


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
    records = _torch_records(model)
    managed = records or {id(p) for group in _parameter_groups(model) for _, p in group}
    for name, p in named:
        if id(p) not in managed:
            raise ValueError(
                f"parameter {name!r} is a DTensor that fully_shard does not manage; shard it with "
                "fully_shard, or keep it whole"
            )
        _require_plain_storage(name, p, records.get(id(p)))
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


def _require_plain_storage(name: str, p: Any, one: Any) -> None:
    """Raise ValueError if a parameter's shard is not a plain tensor on the device of training."""
    if getattr(one, "offload_to_cpu", p.device.type != p.device_mesh.device_type):
        raise ValueError(
            f"parameter {name!r} is offloaded to the CPU (offload_policy), but its shard must stay "
            "on the device of training; leave offload_policy out of fully_shard"
        )
    if hasattr(local_of(p), "fsdp_pre_all_gather"):
        raise ValueError(
            f"parameter {name!r} ({type(local_of(p)).__name__}) must be a plain "
            "tensor, not one that FSDP gathers in another format (fp8); leave the conversion out"
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
    parameters = _parameters_by_index(optimizer)
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


def cut_whole(
    model: nn.Module, optimizer: torch.optim.Optimizer, found: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Return whole saved states of model and optimizer with the elements of this rank's shards
    where the model has shards, as `as_shards` takes them.

    Args:
        model: the model.
        optimizer: its optimizer.
        found: `model` and `optimizer` as the `state_dict` of a whole model and its optimizer; other
            entries are returned unchanged.

    Raises:
        ValueError: a saved tensor does not have the shape of its parameter; names it.
    """
    shards = {name: t for name, t in model.state_dict().items() if is_sharded(t)}
    if not shards:
        return found
    weights = {
        name: _own_part(shards[name], value, repr(name)) if name in shards else value
        for name, value in found["model"].items()
    }
    by_index = _parameters_by_index(optimizer)
    state = {
        index: {
            name: _own_part(by_index[index], value, f"{name!r} of parameter {index}")
            if isinstance(value, Tensor) and value.dim()  # not numbers of steps
            else value
            for name, value in entries.items()
        }
        for index, entries in found["optimizer"]["state"].items()
    }
    return {**found, "model": weights, "optimizer": {**found["optimizer"], "state": state}}


def _own_part(p: Any, whole: Tensor, name: str) -> Tensor:
    """Return this rank's part of a whole tensor that belongs to a parameter."""
    if not is_sharded(p):
        return whole
    if whole.shape != p.shape:
        raise ValueError(
            f"the saved tensor {name} has shape {tuple(whole.shape)}, which must be that of the "
            f"parameter, {tuple(p.shape)}, to be divided between the ranks of a node; load the "
            "checkpoint where every rank holds the whole model"
        )
    # A view would keep the whole tensor alive in the optimizer's state.
    return whole.narrow(*_own_range(p)).clone(memory_format=torch.contiguous_format)


def join_shards(
    model: nn.Module, optimizer: torch.optim.Optimizer, parts: Sequence[Mapping[str, Any]]
) -> Mapping[str, Any]:
    """Return whole states of model and optimizer from the saved states of the ranks of a node.

    Args:
        model: a model with the same parameters, whole or sharded.
        optimizer: its optimizer.
        parts: by rank of the node, `model` and `optimizer` as their `state_dict` returned them with
            the elements of its shards. Other entries are those of the first rank.

    Raises:
        ValueError: saved tensors are not the parts of a parameter; names it.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    like, by_index = model.state_dict(), _parameters_by_index(optimizer)
    weights = {
        name: _join_parts([part["model"][name] for part in parts], like.get(name), repr(name))
        for name in first["model"]
    }
    states = [part["optimizer"]["state"] for part in parts]
    state = {
        index: {
            name: _join_parts(
                [one[index][name] for one in states],
                by_index.get(index),
                f"{name!r} of parameter {index}",
            )
            for name in entries
        }
        for index, entries in states[0].items()
    }
    return {**first, "model": weights, "optimizer": {**first["optimizer"], "state": state}}


def _join_parts(values: Sequence[Any], like: Any, name: str) -> Any:
    """Return a tensor with the shape of a parameter from its parts, or the value of all ranks if it
    is not divided."""
    if not (isinstance(values[0], Tensor) and isinstance(like, Tensor) and values[0].dim()):
        return values[0]  # numbers of steps
    shape = like.shape
    for dim, length in enumerate(shape):
        others = {(*one[:dim], *one[dim + 1 :]) for one in (shape, *(v.shape for v in values))}
        if len(others) == 1 and sum(value.size(dim) for value in values) == length:
            return torch.cat([*values], dim)
    if all(value.shape == shape for value in values):
        return values[0]  # buffers
    raise ValueError(
        f"the saved shards of {name} have shapes {', '.join(str(tuple(v.shape)) for v in values)}, "
        f"which must be parts of {tuple(shape)}, the shape of the parameter; build the model and "
        "the optimizer that were saved, or start the nodes that saved them"
    )


def _parameters_by_index(optimizer: torch.optim.Optimizer) -> dict[int, Tensor]:
    """Return the parameters of an optimizer by their numbers in its `state_dict`."""
    return dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))


def _shard_like(shard: Any, own: Tensor) -> Tensor:
    """Return a DTensor like `shard` whose elements on this rank are `own`."""
    return type(shard).from_local(
        own, shard.device_mesh, shard.placements, shape=shard.size(), stride=shard.stride()
    )
