"""Outputs: the tensors in what a forward returns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor


def tensors_of(output: object) -> Iterator[Tensor]:
    """All tensors in it, in containers within containers, too."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for part in output.values():
            yield from tensors_of(part)
    elif isinstance(output, list | tuple):
        for part in output:
            yield from tensors_of(part)
