"""Search for tensors in the output of a forward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass

from torch import Tensor

from offbeat.core.runtime.transforms import is_transformed


def tensors_of(output: object) -> Iterator[Tensor]:
    """Yield all tensors in containers and dataclasses, nested ones included.

    For other objects yield the attributes that are tensors or lists of tensors. Tensors of
    transforms of torch.func are left out.
    """
    parts: Iterable[object]
    if isinstance(output, Tensor):
        if not is_transformed(output):
            yield output
        return
    if isinstance(output, Mapping):
        parts = output.values()
    elif isinstance(output, list | tuple):
        parts = output
    elif is_dataclass(output):
        parts = (getattr(output, field.name, None) for field in fields(output))
    else:
        attributes = getattr(output, "__dict__", {}).values()
        parts = (value for value in attributes if isinstance(value, Tensor | list | tuple))
    for part in parts:
        yield from tensors_of(part)
