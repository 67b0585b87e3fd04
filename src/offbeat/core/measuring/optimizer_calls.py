"""Measurement of the fixed cost of an optimizer step."""

from __future__ import annotations

import time
from statistics import median

import torch

from offbeat.core.buckets.coupling import is_wrapper, stand_in, trial_steps
from offbeat.core.transport.device import Device

CALLS, FIRST = 9, 2  # timed calls, and untimed calls before them, which create state


def call_s(optimizer: torch.optim.Optimizer, device: Device) -> float:
    """Return the seconds of a step of one tiny parameter per group.

    Return 0 if a copy of the optimizer cannot be stepped. The user's tensors, state and random
    states are not changed.
    """
    if is_wrapper(optimizer):
        return 0.0
    seconds = []
    try:
        trial = stand_in(optimizer)
        with trial_steps(optimizer):
            for _ in range(FIRST + CALLS):
                device.finish()
                start_s = time.perf_counter()
                trial.step()
                device.finish()
                seconds.append(time.perf_counter() - start_s)
    except Exception:  # a user's optimizer may raise any error
        return 0.0
    return median(seconds[FIRST:])
