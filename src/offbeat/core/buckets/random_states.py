"""Random states: of Python, NumPy and torch, on the host and on the model's device."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

CPU = torch.device("cpu")


def capture(device: torch.device) -> dict[str, Any]:
    """Return the random states of the process, and of one device if it is a GPU."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def restore(states: Mapping[str, Any], device: torch.device) -> None:
    """Set the random states that `capture` has returned."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


def normal(size: int | Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """Return standard normal numbers in single precision on the host, from a generator of ours.

    The result does not depend on the default dtype and device of the script, and the generators
    of the script are not used.
    """
    shape = (size,) if isinstance(size, int) else size
    return torch.randn(shape, generator=generator, dtype=torch.float32, device=CPU)


def generator() -> torch.Generator:
    """Return a generator on the host with a fixed seed."""
    return torch.Generator(CPU).manual_seed(0)


@contextmanager
def preserve_random_states(devices: Iterable[torch.device] = ()) -> Iterator[None]:
    """Restore the random states of the process and of these devices at the end of the block.

    The user's optimizer may draw random numbers when a copy of it is tried. The training script
    must draw the same numbers with and without the trial.
    """
    states = [(device, capture(device)) for device in {CPU, *devices}]
    try:
        yield
    finally:
        for device, state in states:
            restore(state, device)


def seed_all(seed: int, devices: Iterable[torch.device] = ()) -> None:
    """Seed Python, NumPy, torch's generator of the host and those of these devices.

    `torch.manual_seed` would also seed the GPUs that the script has not used yet.
    """
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)
    for device in devices:
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)


def count_unseeded_loaders() -> int:
    """Return how many DataLoaders of this process draw from torch's global generator.

    Each of their iterators draws a seed when it is created, so an iterator that a resumed script
    creates in the middle of a pass takes numbers that the uninterrupted run used elsewhere. Loaders
    with a `state_dict` of their own restore their iterators themselves.
    """
    return sum(
        issubclass(type(thing), DataLoader)
        and thing.generator is None
        and not hasattr(thing, "state_dict")
        for thing in gc.get_objects()
    )
