"""The convergence guard: watches loss and gradient noise under strategies that delay updates."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

import torch

from offbeat.profile import GradientNoise
from offbeat.runtime.loss import LossTap
from offbeat.runtime.noise import NoiseMeter, agreed_noise
from offbeat.solve.preserver import LossWatch
from offbeat.transport.control import Control

WINDOW = 50  # iterations between two looks, each one small message on the control group


@dataclass(frozen=True)
class Finding:
    """What a look at one window showed, the same on every rank."""

    departed: str | None  # what is wrong with the loss
    noise: GradientNoise | None


class ConvergenceGuard:
    """Collects this rank's losses and gradient norms, and compares notes once per window."""

    def __init__(self, control: Control, optimizer: torch.optim.Optimizer):
        self._control, self._optimizer = control, optimizer
        self.meter = NoiseMeter(control.world_size)
        self._tap = LossTap()
        self._watch = LossWatch()
        self._losses: list[torch.Tensor] = []
        self._iterations = 0

    def iteration(self) -> Finding | None:
        """An iteration is over; at the end of a window what was found in it."""
        loss = self._tap.take()
        if loss is not None:
            self._losses.append(loss)
        self._iterations += 1
        return self._look() if self._iterations % WINDOW == 0 else None

    def close(self) -> None:
        self._tap.close()

    def _look(self) -> Finding:
        mine = [float(loss) for loss in self._losses]
        self._losses = []
        everyone = self._control.gather(mine)
        means = [fmean(losses) for losses in zip(*everyone, strict=False)]
        rate = float(self._optimizer.param_groups[0].get("lr", 0.0))
        noise = agreed_noise(self._control, fmean(mine) if mine else None, self.meter, rate)
        return Finding(self._watch.see(means) if means else None, noise)
