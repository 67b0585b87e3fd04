"""Emulated accelerators: real parameters and gradients, and compute that only takes time."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.profile import Bucket, Profile

_ELEMENT_BYTES = 4  # float32
_SAMPLE = 1024  # number of elements of a layer in its loss
_OVERHEAD_S = 2e-4  # upper bound of the framework's time that counts as a layer's time
# limit of the delay that later sleeps make up for; a stalled machine exceeds it
_MOST_LATE_S = 0.02


class EmulatedModel(nn.Module):
    """Chain of layers that sleep for their forward and backward times, as a GPU leaves the CPU
    idle.

    `model(inputs)` is the mean squared distance of the parameters to the mean of `inputs`. So
    gradients are real and cheap, and differ between ranks as much as the inputs.

    Args:
        layers: profile, or buckets in backward order. Each bucket becomes a layer of its name with
            `size_bytes` of float32 parameters.
        slowdown: factor on all times of the profile.

    Raises:
        ValueError: a layer or the slowdown is invalid.
    """

    emulated = True  # recorded by the runtime; the report shows "emulated compute"

    def __init__(self, layers: Profile | Sequence[Bucket], *, slowdown: float = 1.0):
        super().__init__()
        if not 0 < slowdown < math.inf:
            raise ValueError(f"slowdown ({slowdown!r}) must be above 0; 1 is the profile's speed")
        buckets = layers.buckets if isinstance(layers, Profile) else tuple(layers)
        if not buckets:
            raise ValueError("layers ([]) must not be empty")
        clock = _Clock()
        chain = [_Layer(b, len(buckets), slowdown, clock) for b in reversed(buckets)]
        named = [(b.name, layer) for b, layer in zip(reversed(buckets), chain, strict=True)]
        for name, layer in sorted(named, key=lambda item: item[0].count(".")):
            _add_layer(self, name, layer)
        self._chain = tuple(chain)  # a tuple does not register the layers a second time

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the loss, a scalar."""
        target = inputs.detach().mean()
        loss = torch.zeros_like(target)
        for layer in self._chain:
            loss = layer(loss, target)
        return loss


class _Clock:
    """Sleeps without accumulated errors: a sleep that is too long shortens the next one.

    The host's time before a layer counts as the layer's time, because an accelerator works while
    its host prepares the next layer. Between two layers of backward (hooks, updates) up to the
    layer's own time counts. Elsewhere at most `_OVERHEAD_S` counts, because the host may be waiting
    for messages, during which an accelerator is idle.
    """

    def __init__(self) -> None:
        self._late_s = 0.0
        self._woken_s = 0.0
        self._in_backward = False

    def end_s_of(self, seconds: float, *, backward: bool) -> float:
        """Return the end of a layer that begins now and takes `seconds`."""
        now_s = time.perf_counter()
        hidden_s = seconds if backward and self._in_backward else _OVERHEAD_S
        self._in_backward = backward
        return now_s + seconds - self._late_s - min(now_s - self._woken_s, hidden_s)

    def sleep_until(self, end_s: float) -> None:
        left_s = end_s - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)
        self._woken_s = time.perf_counter()
        self._late_s = min(self._woken_s - end_s, _MOST_LATE_S)


class _Layer(nn.Module):
    """Parameters of one bucket and its times."""

    def __init__(self, bucket: Bucket, layers: int, slowdown: float, clock: _Clock):
        super().__init__()
        elements, rest = divmod(bucket.size_bytes, _ELEMENT_BYTES)
        if rest or not elements:
            raise ValueError(
                f"size_bytes of bucket {bucket.name!r} ({bucket.size_bytes}) must be a positive "
                f"multiple of {_ELEMENT_BYTES}; emulated parameters are float32"
            )
        self.weight = nn.Parameter(torch.randn(elements))
        self.forward_s = bucket.forward_s * slowdown
        self.backward_s = bucket.backward_s * slowdown
        self.share = 0.5 / layers
        self.clock = clock

    def forward(self, loss: Tensor, target: Tensor) -> Tensor:
        return _Compute.apply(loss, self.weight, target, self)  # type: ignore[no-any-return]


class _Compute(torch.autograd.Function):
    """Forward and backward of one layer. The time of the small real computation is part of the
    layer's time."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, weight: Tensor, target: Tensor, layer: _Layer) -> Tensor:
        end_s = layer.clock.end_s_of(layer.forward_s, backward=False)
        ctx.save_for_backward(weight, target)
        ctx.layer = layer
        loss = loss + layer.share * (weight[:_SAMPLE] - target).square().mean()
        layer.clock.sleep_until(end_s)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        layer: _Layer = ctx.layer
        end_s = layer.clock.end_s_of(layer.backward_s, backward=True)
        weight, target = ctx.saved_tensors
        # Do not divide by the number of elements, so that a learning rate has the same effect at
        # any size.
        gradient = (weight - target).mul_(grads[0])
        layer.clock.sleep_until(end_s)
        return grads[0], gradient, None, None


def _add_layer(model: nn.Module, name: str, layer: nn.Module) -> None:
    """Register a layer under a dotted name and create its parent modules."""
    *path, last = name.split(".")
    for part in path:
        if part not in model._modules:
            model.add_module(part, nn.Module())
        model = model.get_submodule(part)
    if last in model._modules:
        raise ValueError(f"layer name ({name!r}) must be unique; rename one of the two")
    model.add_module(last, layer)
