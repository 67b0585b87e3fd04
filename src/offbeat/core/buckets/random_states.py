"""Random states of Python, NumPy and torch, on the host and on the model's device."""

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
    """Return standard normal float32 numbers on the host, drawn from `generator`.

    The result does not depend on the default dtype and device of the script.
    """
    shape = (size,) if isinstance(size, int) else size
    return torch.randn(shape, generator=generator, dtype=torch.float32, device=CPU)


def generator() -> torch.Generator:
    """Return a generator on the host with a fixed seed."""
    return torch.Generator(CPU).manual_seed(0)


@contextmanager
def preserve_random_states(devices: Iterable[torch.device] = ()) -> Iterator[None]:
    """Restore the random states of the process and of these devices at the end of the block.

    A trial step of a copy of the user's optimizer may draw random numbers. The training script must
    draw the same numbers with and without the trial.
    """
    states = [(device, capture(device)) for device in {CPU, *devices}]
    try:
        yield
    finally:
        for device, state in states:
            restore(state, device)


def seed_all(seed: int, devices: Iterable[torch.device] = ()) -> None:
    """Seed Python, NumPy, and torch's generators of the host and of `devices`.

    `torch.manual_seed` would also seed GPUs that the script has not used yet.
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

    Each new iterator of such a loader draws a seed. A resumed script creates an iterator in the
    middle of a pass, so it draws a number that the uninterrupted run used elsewhere. Loaders with a
    `state_dict` restore their iterators themselves and are not counted.
    """
    kinds = [DataLoader]
    for kind in kinds:  # the list grows by the subclasses of its members
        kinds += kind.__subclasses__()
    # An object refers to its class. A Python loop over all objects takes longer.
    return sum(
        type(thing) in kinds and thing.generator is None and not hasattr(thing, "state_dict")
        for thing in gc.get_referrers(*kinds)
    )
