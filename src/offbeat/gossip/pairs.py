"""Measurement of the links between all pairs of ranks."""

from __future__ import annotations

import time

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from offbeat.core.measuring.tournament import partners
from offbeat.core.transport.control import Control

TRIPS = 4  # measurements of the delay; the first one is discarded
MOST_BYTES = 1 << 18  # size of the largest message of a measurement, in each direction

Matrix = NDArray[np.float64]


def measure_pairs(control: Control, message_bytes: int) -> tuple[Matrix, Matrix]:
    """Return `(bytes per second, seconds of delay)` between all ranks, each as a matrix [N, N].

    Every rank must call it. Both ranks of a pair send at the same time, and as many pairs as
    possible are measured at the same time, as in gossip. Messages have at most 256 KiB.
    """
    size = control.world_size
    rate, delay = np.full((2, size), np.inf)
    small, large = (
        torch.zeros(1, dtype=torch.float32, device="cpu"),
        torch.zeros(max(1, min(message_bytes, MOST_BYTES) // 4), dtype=torch.float32, device="cpu"),
    )
    for partner in partners(control.rank, size):
        control.gather(None)  # all ranks begin each round together
        if partner is None:
            continue
        least_s = min([_swap(control, partner, small) for _ in range(TRIPS)][1:])
        seconds = min(_swap(control, partner, large) for _ in range(2))
        delay[partner] = least_s
        rate[partner] = large.nbytes / max(seconds - least_s, 1e-9)
    rates, delays = (np.array(control.gather(row.tolist())) for row in (rate, delay))
    return np.minimum(rates, rates.T), np.maximum(delays, delays.T)


def _swap(control: Control, partner: int, mine: Tensor) -> float:
    """Return the seconds to send a tensor and to receive one of the same size."""
    theirs, start = torch.empty_like(mine), time.perf_counter()
    sending = dist.isend(mine, partner, group=control.group)
    dist.recv(theirs, partner, group=control.group)
    assert sending is not None
    sending.wait()
    return time.perf_counter() - start
