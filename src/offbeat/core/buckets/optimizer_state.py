"""Optimizer state as the links see it: flat where it is averaged, dropped where it is reset."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.core.buckets.coupling import delegates, shield_parameters, trial_copy
from offbeat.core.buckets.flat import Flat, place_like
from offbeat.core.buckets.random_states import preserve_random_states

Names = dict[str, torch.dtype]


@dataclass(frozen=True)
class _Home:
    """Flat state of a run of buckets, and the place of every parameter's tensors in it."""

    tensors: tuple[Tensor, ...]
    places: tuple[tuple[nn.Parameter, str, Tensor], ...]


class StateStore:
    """Floating-point optimizer state with its parameter's shape (momentum, Adam's moments).

    A run of buckets has one flat tensor per dtype with a place for all state of all its
    parameters, so that every rank sends the same layout; what a rank does not have, since it never
    used the parameter, counts as zero. The optimizer's tensors become views of these places.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, flat: Flat):
        self._optimizer = optimizer
        self._flat = flat
        self._names: dict[tuple[int, torch.dtype], Names] = {}
        self._homes: dict[range, _Home] = {}

    def forget(self) -> None:
        """The optimizer's groups or state were replaced."""
        self._names.clear()
        self._homes.clear()

    def tensors(self, run: range) -> tuple[Tensor, ...]:
        """Flat state of a run of buckets, up to date; empty if the optimizer keeps none."""
        if run not in self._homes:
            self._homes[run] = self._build(run)
        home = self._homes[run]
        for p, name, place in home.places:
            value = self._optimizer.state.get(p, {}).get(name)
            if value is None:
                place.zero_()
            elif value is not place:
                place.copy_(value)
                self._optimizer.state[p][name] = place
        return home.tensors

    def bytes_of(self, bucket: int) -> int:
        """Bytes of one bucket's state."""
        entries = self._entries(range(bucket, bucket + 1))
        return sum(p.numel() * dtype.itemsize for p, _, dtype in entries)

    def reset(self, run: range) -> None:
        """Forget the state of these buckets; the optimizer begins it anew."""
        for b in run:
            for p in self._flat.buckets[b].parameters:
                self._optimizer.state.pop(p, None)

    def _entries(self, run: range) -> Iterator[tuple[nn.Parameter, str, torch.dtype]]:
        group_of = {id(p): g for g in self._optimizer.param_groups for p in g["params"]}
        for b in run:
            for p in self._flat.buckets[b].parameters:
                group = group_of.get(id(p))
                for name, dtype in self._names_of(group, p).items() if group is not None else ():
                    yield p, name, dtype

    def _names_of(self, group: dict[str, Any], p: nn.Parameter) -> Names:
        key = (id(group), p.dtype)
        if key not in self._names:
            self._names[key] = _tried_out(self._optimizer, group, p)
        return self._names[key]

    def _build(self, run: range) -> _Home:
        entries = list(self._entries(run))
        tensors, places = [], []
        for dtype in dict.fromkeys(dtype for _, _, dtype in entries):
            mine = [(p, name) for p, name, d in entries if d == dtype]
            size = sum(p.numel() for p, _ in mine)
            flat = torch.zeros(size, dtype=dtype, device=mine[0][0].device)
            tensors.append(flat)
            at = 0
            for p, name in mine:
                places.append((p, name, place_like(flat, p, at).detach()))
                at += p.numel()
        return _Home(tuple(tensors), tuple(places))


def _tried_out(optimizer: torch.optim.Optimizer, group: dict[str, Any], p: nn.Parameter) -> Names:
    """State that an optimizer keeps for a parameter of a group, from one step of a copy of it on
    a made-up parameter: the same answer on all ranks, whatever they have used so far."""
    if delegates(optimizer):  # the copy would step what is inside the original
        return _kept(optimizer.state.get(p, {}), p)
    trial = nn.Parameter(torch.zeros(2, 3, dtype=p.dtype, device=p.device))
    trial.grad = torch.zeros_like(trial)
    copy = trial_copy(optimizer, [{**group, "params": [trial]}])
    with preserve_random_states({p.device}), shield_parameters(optimizer):
        copy.step()
    return _kept(copy.state[trial], trial)


def _kept(state: dict[str, Any], p: Tensor) -> Names:
    return {
        name: value.dtype
        for name, value in sorted(state.items())
        if isinstance(value, Tensor) and value.is_floating_point() and value.shape == p.shape
        if value.dim() or name != "step"  # Adam's counter looks like a scalar's moment
    }
