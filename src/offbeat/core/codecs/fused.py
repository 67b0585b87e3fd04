"""Fusion of elementwise operations into one kernel by `torch.compile`, for large GPU tensors.

Requires Triton.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import wraps
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

LEAST = 1 << 20  # elements; with fewer, kernel launches take more time than memory accesses
HAS_TRITON = find_spec("triton") is not None


def fuse_kernels(work: Callable[..., None]) -> Callable[..., None]:
    """Compile a method that changes tensors in place, and use it for large GPU tensors.

    The first call with a large tensor compiles, which takes seconds. If compilation fails, warn and
    use the uncompiled method.
    """
    compiled: Callable[..., None] | None = None

    @wraps(work)
    def run_work(self: Any, x: Tensor, *others: Any) -> None:
        nonlocal compiled
        if not is_worth_compiling(x) or compiled is work:
            work(self, x, *others)
            return
        try:
            compiled = compiled or torch.compile(work, dynamic=True)
            compiled(self, x, *others)
        except RuntimeError as error:
            from torch._dynamo.exc import TorchDynamoException  # slow to import

            if not isinstance(error, TorchDynamoException):
                raise  # the kernel has started, so x may have changed
            compiled = work
            warnings.warn(f"{work.__qualname__} could not be compiled: {error}", stacklevel=2)
            work(self, x, *others)

    return run_work


def is_worth_compiling(x: Tensor) -> bool:
    """Return whether compiled kernels save time on this tensor."""
    return HAS_TRITON and x.is_cuda and x.numel() >= LEAST
