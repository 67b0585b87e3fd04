"""Calls: what every call of an optimizer costs, however little it steps."""

from __future__ import annotations

import time
from statistics import median

import torch

from offbeat.core.buckets.coupling import delegates, devices_of, shield_parameters, stand_in
from offbeat.core.buckets.random_states import preserve_random_states
from offbeat.core.transport.device import Device

CALLS, FIRST = 9, 2  # timed, and before them: state is made in the first


def call_s(optimizer: torch.optim.Optimizer, device: Device) -> float:
    """Seconds of a step of one tiny parameter per group; 0 for an optimizer that cannot be tried.

    The user's tensors, state and random numbers are not touched.
    """
    if delegates(optimizer):
        return 0.0
    seconds = []
    try:
        trial = stand_in(optimizer)
        with preserve_random_states(devices_of(trial)), shield_parameters(optimizer):
            for _ in range(FIRST + CALLS):
                device.finish()
                start_s = time.perf_counter()
                trial.step()
                device.finish()
                seconds.append(time.perf_counter() - start_s)
    except Exception:  # whatever a user's optimizer finds wrong with it
        return 0.0
    return median(seconds[FIRST:])
