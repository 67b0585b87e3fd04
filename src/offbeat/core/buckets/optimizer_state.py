"""Optimizer state in flat tensors, for plans that average or reset it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.core.buckets.coupling import is_wrapper, trial_copy, trial_steps
from offbeat.core.buckets.flat import Flat, align, place_like
from offbeat.core.buckets.shards import is_sharded, local_of, shard_like

Names = dict[str, torch.dtype]


Home = tuple[tuple[Tensor, ...], list[tuple[nn.Parameter, str, Tensor]]]
"""Flat state tensors of a run of buckets, and (parameter, state name, view) of each entry."""


class StateStore:
    """Floating-point optimizer state with its parameter's shape (momentum, Adam's moments).

    A run of buckets has one flat tensor per dtype with a slice for each state tensor of each
    parameter, so that all ranks send the same layout. State of a parameter that a rank has never
    used is zero. The optimizer's state tensors become views of these slices.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, flat: Flat):
        self._optimizer = optimizer
        self._flat = flat
        self._names: dict[tuple[int, torch.dtype], Names] = {}
        self._homes: dict[tuple[range, int | None], Home] = {}

    def forget(self) -> None:
        """Drop the flat tensors after the optimizer's groups or state were replaced."""
        self._names.clear()
        self._homes.clear()

    def tensors(self, run: range, moment: int | None = None) -> tuple[Tensor, ...]:
        """Return the current flat state of a run of buckets, or one moment of it; empty for a
        stateless optimizer."""
        if (run, moment) not in self._homes:
            self._homes[run, moment] = self._build(run, moment)
        tensors, places = self._homes[run, moment]
        for p, name, place in places:
            value = self._optimizer.state.get(p, {}).get(name)
            if value is None:
                place.zero_()
            elif local_of(value).data_ptr() != place.data_ptr():
                place.copy_(local_of(value))
                moved = shard_like(value, place) if is_sharded(value) else place
                self._optimizer.state[p][name] = moved
        return tensors

    def bytes_of(self, bucket: int, moment: int | None = None) -> int:
        """Return the bytes of one bucket's state, or of one moment of it."""
        entries = self._entries(range(bucket, bucket + 1), moment)
        return sum(local_of(p).numel() * dtype.itemsize for p, _, dtype in entries)

    def reset(self, run: range) -> None:
        """Delete the state of these buckets. The optimizer creates it again in its next step."""
        for b in run:
            for p in self._flat.buckets[b].parameters:
                self._optimizer.state.pop(p, None)

    def _entries(
        self, run: range, moment: int | None
    ) -> Iterator[tuple[nn.Parameter, str, torch.dtype]]:
        group_of = {id(p): g for g in self._optimizer.param_groups for p in g["params"]}
        for b in run:
            for p in self._flat.buckets[b].parameters:
                group = group_of.get(id(p))
                found = [] if group is None else [*self._names_of(group, p).items()]
                for name, dtype in found if moment is None else found[moment : moment + 1]:
                    yield p, name, dtype

    def _names_of(self, group: dict[str, Any], p: nn.Parameter) -> Names:
        key = (id(group), p.dtype)
        if key not in self._names:
            self._names[key] = _trial_names(self._optimizer, group, p)
        return self._names[key]

    def _build(self, run: range, moment: int | None) -> Home:
        entries = list(self._entries(run, moment))
        tensors, places = [], []
        for dtype in dict.fromkeys(dtype for _, _, dtype in entries):
            mine = [(p, name) for p, name, d in entries if d == dtype]
            alignment = max(1, self._flat.alignment_bytes // dtype.itemsize)
            sizes = (align(local_of(p).numel(), alignment) for p, _ in mine)
            *offsets, size = accumulate(sizes, initial=0)
            flat = torch.zeros(size, dtype=dtype, device=mine[0][0].device)
            tensors.append(flat)
            for (p, name), at in zip(mine, offsets, strict=True):
                places.append((p, name, place_like(flat, local_of(p), at).detach()))
        return tuple(tensors), places


def _trial_names(optimizer: torch.optim.Optimizer, group: dict[str, Any], p: nn.Parameter) -> Names:
    """Return names and dtypes of the state that an optimizer keeps for a parameter of a group.

    A copy of the optimizer steps a trial parameter once. So the result is the same on all ranks,
    although ranks may have used different parameters so far. If it cannot, the first parameter of
    the group with a state counts.
    """
    if is_wrapper(optimizer):  # a copy would step the parameters of the inner optimizer
        return _state_names(optimizer.state.get(p, {}), p)
    trial = nn.Parameter(torch.zeros(2, 3, dtype=p.dtype, device=p.device))
    trial.grad = torch.zeros_like(trial)
    copy = trial_copy(optimizer, [{**group, "params": [trial]}])
    try:
        with trial_steps(optimizer):
            copy.step()
    except Exception as error:  # of a user's optimizer, which may have created its state before
        known = next((q for q in group["params"] if optimizer.state.get(q)), None)
        if known is None:
            raise ValueError(
                f"{type(optimizer).__name__}.step() failed with a synthetic parameter ({error}), "
                "so the state that it keeps is unknown; let it read p.grad of its param_groups and "
                "no other attribute of p, or use strategy DDP()"
            ) from error
        return _state_names(optimizer.state[known], known)
    return _state_names(copy.state[trial], trial)


def _state_names(state: dict[str, Any], p: Tensor) -> Names:
    return {
        name: value.dtype
        for name, value in sorted(state.items())
        if isinstance(value, Tensor) and value.is_floating_point() and value.shape == p.shape
        if value.dim() or name != "step"  # Adam's counter has the shape of a scalar parameter
    }
