"""Global states of a script: training leaves them as they are, and does not depend on them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

import numpy as np
import torch

T = TypeVar("T")
Context = Callable[[], AbstractContextManager[object]]


def of(change: Callable[..., object], value: object, usual: object) -> Context:
    @contextmanager
    def setting() -> Iterator[None]:
        change(value)
        try:
            yield
        finally:
            change(usual)

    return setting


THROUGHOUT: dict[str, Context] = {
    "threads": of(torch.set_num_threads, 3, 1),
    # Nothing of ours may be made on the default device unless the model is there.
    "meta": of(torch.set_default_device, "meta", None),
    "no_grad": of(torch.set_grad_enabled, False, True),
    "bfloat16": of(torch.set_default_dtype, torch.bfloat16, torch.float32),
    "deterministic": of(torch.use_deterministic_algorithms, True, False),
    "float16": of(torch.set_default_dtype, torch.float16, torch.float32),
}
IN_PREPARE: dict[str, Context] = {"inference": torch.inference_mode}
SETTINGS = (*THROUGHOUT, *IN_PREPARE)


@contextmanager
def within(setting: str, prepared: AbstractContextManager[T]) -> Iterator[T]:
    """Enter `prepared` under a global setting ("": the usual ones). When it is left, all random
    streams and settings are as before."""
    with THROUGHOUT.get(setting, nullcontext)(), ExitStack() as stack:
        before = states()
        with IN_PREPARE.get(setting, nullcontext)():
            entered = stack.enter_context(prepared)
        yield entered
        stack.close()
        after = states()
        assert [name for name in before if after[name] != before[name]] == []


def states() -> dict[str, Any]:
    """Random streams of torch on the host and on every GPU, of Python and of NumPy; and torch's
    global settings."""
    kind, numbers, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "gpus": [state.numpy().tobytes() for state in torch.cuda.get_rng_state_all()],
        "python": random.getstate(),
        "numpy": (kind, bytes(numbers), rest),  # type: ignore[arg-type]
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "threads": torch.get_num_threads(),
        "gradients": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "precision": torch.get_float32_matmul_precision(),
    }
