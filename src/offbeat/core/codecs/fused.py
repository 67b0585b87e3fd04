"""Passes over memory in one kernel: large tensors on a GPU, by `torch.compile`, where Triton is."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import wraps
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

LEAST = 1 << 20  # elements; fewer take less time than it takes to launch kernels
HAS_TRITON = find_spec("triton") is not None


def fused(work: Callable[..., None]) -> Callable[..., None]:
    """A method that changes tensors in place, as it is or compiled. The first large tensor waits
    until it is compiled, seconds. If that fails, all go on as they are, with a warning."""
    compiled: Callable[..., None] | None = None

    @wraps(work)
    def either(self: Any, x: Tensor, *others: Any) -> None:
        nonlocal compiled
        if not worth_it(x) or compiled is work:
            work(self, x, *others)
            return
        try:
            compiled = compiled or torch.compile(work, dynamic=True)
            compiled(self, x, *others)
        except torch.OutOfMemoryError:
            raise  # while it ran, so x may have changed
        except RuntimeError as error:  # before anything ran
            compiled = work
            warnings.warn(f"{work.__qualname__} could not be compiled: {error}", stacklevel=2)
            work(self, x, *others)

    return either


def worth_it(x: Tensor) -> bool:
    """Whether compiled kernels save time."""
    return HAS_TRITON and x.is_cuda and x.numel() >= LEAST
