"""Saved states of models in shards: joined to whole states, cut, and loaded into shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.core.buckets.shards import is_sharded, local_of, own_range, shard_like

Saved = Mapping[str, Any]
"""`model` and `optimizer`, as their `state_dict` returned them. Further entries do not change."""
Act = Callable[[list[Any], Any, str], Any]


def as_shards(
    model: nn.Module, optimizer: torch.optim.Optimizer, found: Saved, *, whole: bool
) -> Saved:
    """Return saved states of model and optimizer with DTensors where the model has shards.

    Args:
        model: the model.
        optimizer: its optimizer.
        found: saved states, with whole tensors or with the elements of this rank's shards.
        whole: whether tensors are whole.

    Raises:
        ValueError: a saved tensor has another shape than that of the model; names it.
    """
    if not any(map(is_sharded, model.parameters())):
        return found

    def act(values: list[Any], p: Any, name: str) -> Any:
        [value] = values
        if not (_is_divided(value, p) and is_sharded(p)):
            return value
        own = own_part(value, p, name) if whole else value
        if own.shape != local_of(p).shape:
            raise ValueError(
                f"the saved shard {name} has shape {tuple(own.shape)}, that of this rank "
                f"{tuple(local_of(p).shape)}; start as many nodes of as many ranks as the saved "
                "job had"
            )
        return shard_like(p, own)

    return _map_states(model, optimizer, [found], act)


def own_part(whole: Tensor, p: Any, name: str) -> Tensor:
    """Return this rank's part of a whole tensor that belongs to a sharded parameter.

    Raises:
        ValueError: the tensor does not have the shape of the parameter; names it.
    """
    if whole.shape != p.shape:
        raise ValueError(
            f"the saved tensor {name} has shape {tuple(whole.shape)}, which must be that of the "
            f"parameter, {tuple(p.shape)}, to be divided between the ranks of a node; load the "
            "checkpoint where every rank holds the whole model"
        )
    # A view would keep the whole tensor alive in the optimizer's state.
    return whole.narrow(*own_range(p)).clone(memory_format=torch.contiguous_format)


def join_shards(
    model: nn.Module, optimizer: torch.optim.Optimizer, parts: Sequence[Saved]
) -> Saved:
    """Return whole states of model and optimizer from the saved states of the ranks of a node.

    Args:
        model: a model with the same parameters, whole or sharded.
        optimizer: its optimizer.
        parts: by rank of the node, states with the elements of its shards. Other entries are those
            of the first rank.

    Raises:
        ValueError: saved tensors are not the parts of a parameter; names it.
    """
    return parts[0] if len(parts) == 1 else _map_states(model, optimizer, parts, join_parts)


def _map_states(
    model: nn.Module, optimizer: torch.optim.Optimizer, found: Sequence[Saved], act: Act
) -> Saved:
    """Return the first state, with each value replaced by `act` of the values of all states, of
    their parameter or buffer in the model, and of a name for errors."""
    like, first = model.state_dict(), found[0]
    weights = {
        name: act([one["model"][name] for one in found], like.get(name), repr(name))
        for name in first["model"]
    }
    by_index = dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))
    states = [one["optimizer"]["state"] for one in found]
    state = {
        index: {
            name: act(
                [one[index][name] for one in states],
                by_index.get(index),
                f"{name!r} of parameter {index}",
            )
            for name in entries
        }
        for index, entries in states[0].items()
    }
    return {**first, "model": weights, "optimizer": {**first["optimizer"], "state": state}}


def _is_divided(value: Any, like: Any) -> bool:
    """Whether ranks may hold parts of a value; not of numbers of steps."""
    return isinstance(value, Tensor) and isinstance(like, Tensor) and value.dim() > 0


def join_parts(values: list[Any], like: Any, name: str) -> Any:
    """Return a tensor with the shape of a parameter from its parts, or the value of all ranks if it
    is not divided."""
    if not _is_divided(values[0], like):
        return values[0]
    shape = like.shape
    for dim, length in enumerate(shape):
        others = {(*one[:dim], *one[dim + 1 :]) for one in (shape, *(v.shape for v in values))}
        if len(others) == 1 and sum(value.size(dim) for value in values) == length:
            return torch.cat(values, dim)
    if all(value.shape == shape for value in values):
        return values[0]  # buffers
    raise ValueError(
        f"the saved shards of {name} have shapes {', '.join(str(tuple(v.shape)) for v in values)}, "
        f"which must be parts of {tuple(shape)}, the shape of the parameter; build the model and "
        "the optimizer that were saved, or start the nodes that saved them"
    )
