"""Optimizer state as the links see it: flat where it is averaged, dropped where it is reset."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from offbeat.runtime.flat import Flat


class StateStore:
    """Floating-point optimizer state with its parameter's shape (momentum, Adam's moments).

    Tensors are made views of one flat tensor per run of buckets when that run is first averaged;
    optimizers write their state in place, so the views stay.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, flat: Flat):
        self._optimizer = optimizer
        self._flat = flat
        self._homes: dict[tuple[int, int], tuple[Tensor, ...]] = {}

    def tensors(self, run: range) -> tuple[Tensor, ...]:
        """Flat state of a run of buckets; empty while the optimizer has none."""
        key = (run.start, run.stop)
        if key not in self._homes:
            homes = self._move(run)
            if not homes:
                return ()
            self._homes[key] = homes
        return self._homes[key]

    def bytes_of(self, bucket: int) -> int:
        """Bytes of one bucket's state."""
        return sum(
            t.numel() * t.element_size() for _, _, t in self._entries(range(bucket, bucket + 1))
        )

    def reset(self, run: range) -> None:
        """Forget the state of these buckets; the optimizer begins it anew."""
        for b in run:
            for p in self._flat.buckets[b].parameters:
                self._optimizer.state.pop(p, None)
        self._homes.clear()

    def _entries(self, run: range) -> list[tuple[nn.Parameter, str, Tensor]]:
        return [
            (p, name, value)
            for b in run
            for p in self._flat.buckets[b].parameters
            for name, value in sorted(self._optimizer.state.get(p, {}).items())
            if isinstance(value, Tensor) and value.is_floating_point() and value.shape == p.shape
            if value.dim() or name != "step"  # Adam's counter looks like a scalar's moment
        ]

    def _move(self, run: range) -> tuple[Tensor, ...]:
        entries = self._entries(run)
        flats: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        for key in dict.fromkeys((v.dtype, v.device) for _, _, v in entries):
            mine = [(p, n, v) for p, n, v in entries if (v.dtype, v.device) == key]
            flat = flats[key] = torch.empty(
                sum(v.numel() for _, _, v in mine), dtype=key[0], device=key[1]
            )
            at = 0
            for p, name, value in mine:
                view = flat[at : at + value.numel()].view(value.shape)
                view.copy_(value)
                self._optimizer.state[p][name] = view
                at += value.numel()
        return tuple(flats.values())
