"""Layers of published models: parameters and multiplications of a forward, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from offbeat.profile import Bucket, Contention, Link, Profile

FORWARD_SHARE = 1 / 3  # of compute; a backward computes gradients of inputs and of weights


class Layer(NamedTuple):
    """One layer, from the input side."""

    parameters: int
    multiplications: int  # of a forward


def resnet(blocks: Sequence[int], *, bottleneck: bool, image: int, classes: int) -> list[Layer]:
    """Return the layers of a residual network; below 64 pixels the stem keeps the image's size."""
    layers: list[Layer] = []
    small = image < 64

    def convolution(inputs: int, outputs: int, kernel: int, size: int) -> None:
        weights = inputs * outputs * kernel**2
        layers.append(Layer(weights + 2 * outputs, weights * size**2))

    size = image if small else image // 2
    convolution(3, 64, 3 if small else 7, size)
    size = size if small else size // 2
    inputs = 64
    for stage, count in enumerate(blocks):
        width = 64 * 2**stage
        outputs = 4 * width if bottleneck else width
        for block in range(count):
            size = size // 2 if stage and not block else size
            if bottleneck:
                convolution(inputs, width, 1, size)
                convolution(width, width, 3, size)
                convolution(width, outputs, 1, size)
            else:
                convolution(inputs, width, 3, size)
                convolution(width, width, 3, size)
            if not block and inputs != outputs:
                convolution(inputs, outputs, 1, size)
            inputs = outputs
    layers.append(Layer(inputs * classes + classes, inputs * classes))
    return layers


def transformer(
    blocks: int, width: int, hidden: Sequence[int], vocabulary: int, *, tied: bool
) -> list[Layer]:
    """Return the layers of a decoder; `hidden`: outputs of each matrix of a feed-forward network.

    Multiplications are those of a token, without attention's products of positions.
    """
    table = vocabulary * width
    matrices = [3 * width * width, width * width, *(width * outputs for outputs in hidden)]
    layers = [Layer(table, 0)]
    layers += [Layer(weights, weights) for _ in range(blocks) for weights in matrices]
    return [*layers, Layer(width if tied else table, table)]


def profile(
    layers: Sequence[Layer],
    compute_s: float,
    communication_s: float,
    workers: int,
    rates: Sequence[float] = (1.0,),
    together: float | None = None,
) -> Profile:
    """Return a profile whose compute and messages have these sums.

    Compute is divided by multiplications, communication by parameters; a message has no latency.

    Args:
        layers: layers of the model, from the input side.
        compute_s: seconds of forward and backward.
        communication_s: seconds to average all gradients on the first link.
        workers: number of workers.
        rates: rate of each link relative to the first.
        together: rate of two simultaneous messages relative to one, if they are possible.
    """
    parameters = sum(layer.parameters for layer in layers)
    multiplications = sum(layer.multiplications for layer in layers)
    buckets = [
        Bucket(
            f"layer {number}",
            FORWARD_SHARE * compute_s * layer.multiplications / multiplications,
            (1 - FORWARD_SHARE) * compute_s * layer.multiplications / multiplications,
            4 * layer.parameters,
        )
        for number, layer in enumerate(layers)
    ]
    links = [
        Link(f"link {number}", 0.0, rate * 4 * parameters / communication_s)
        for number, rate in enumerate(rates)
    ]
    speeds = None if together is None else (together / 2, together / 2)
    shared = () if speeds is None else (Contention(("link 0", "link 0"), speeds),)
    return Profile(tuple(reversed(buckets)), tuple(links), workers, contention=shared)
