"""Search for tensors in the output of a forward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass

from torch import Tensor


def tensors_of(output: object) -> Iterator[Tensor]:
    """Yield all tensors in containers and dataclasses, nested ones included.

    For other objects yield the attributes that are tensors or lists of tensors.
    """
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for part in output.values():
            yield from tensors_of(part)
    elif isinstance(output, list | tuple):
        for part in output:
            yield from tensors_of(part)
    elif is_dataclass(output):
        for part in fields(output):
            yield from tensors_of(getattr(output, part.name, None))
    elif output is not None:
        for part in getattr(output, "__dict__", {}).values():
            if isinstance(part, Tensor | list | tuple):
                yield from tensors_of(part)
