"""Guard against ranks that read the same batches, as without a distributed sampler."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from zlib import crc32

import torch
from torch import Tensor

ITERATIONS = 20
NUMBERS = 256  # of each input, spread over it


class InputSamples:
    """Samples of the inputs of the first `ITERATIONS` iterations of a rank.

    They stay on their device until the digests are needed, so that no iteration waits for a GPU.
    """

    def __init__(self) -> None:
        self._samples: list[list[Tensor]] = []
        self._iteration = -1

    def note(self, iteration: int, inputs: Iterable[Tensor]) -> None:
        """Keep some numbers of the inputs of the first forward of an iteration that has some."""
        if iteration == self._iteration:
            return
        kept = list[Tensor]()
        for x in inputs:
            if type(x) is Tensor and x.layout == torch.strided and not x.is_meta:
                every = max(x.numel() // NUMBERS, 1)
                kept.append(x.detach().reshape(-1)[::every][:NUMBERS].clone())
        if kept:  # a forward within a transform of torch.func has none
            self._iteration = iteration
            self._samples.append(kept)

    def digests(self) -> list[int]:
        """Return a digest of each iteration's inputs."""
        found = []
        for kept in self._samples:
            digest = 0
            for some in kept:
                digest = crc32(some.view(torch.uint8).cpu().numpy().tobytes(), digest)
            found.append(digest)
        return found


def read_same_batches(everyone: Sequence[Sequence[int]]) -> bool:
    """Whether all ranks have the same digests. Inputs that never change show nothing."""
    first = everyone[0]
    return len(everyone) > 1 and len({*first}) > 1 and all(one == first for one in everyone)
