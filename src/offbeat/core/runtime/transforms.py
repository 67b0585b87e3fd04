"""Transforms of torch.func, within which a script may call a prepared model."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

F = TypeVar("F", bound=Callable[..., Any])
_functorch: Any = torch._C._functorch  # type: ignore[attr-defined]


def is_transformed(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is one of a transform, so that its graph is not the script's."""
    return bool(_functorch.is_functorch_wrapped_tensor(tensor))


def is_transforming() -> bool:
    """Return whether the caller computes a transform."""
    return _functorch.peek_interpreter_stack() is not None


def outside_transforms(method: F) -> F:
    """Return the method, which then runs outside of the transforms that its caller computes.

    A transform forbids in-place writes of other tensors, such as updates, and hooks on them.
    """

    @wraps(method)
    def run(*args: Any) -> Any:
        if not is_transforming():
            return method(*args)
        with temporarily_clear_interpreter_stack():
            return method(*args)

    return cast(F, run)
