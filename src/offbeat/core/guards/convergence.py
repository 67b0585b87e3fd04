"""The convergence guard: watches loss and gradient noise under strategies that delay updates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import torch

from offbeat.core.guards.loss_watch import LossWatch
from offbeat.core.measuring.loss import LossTap
from offbeat.core.measuring.noise import NoiseMeter, RankStatistics, noise_of
from offbeat.core.profile import GradientNoise
from offbeat.core.transport.control import Control

WINDOW = 10  # iterations whose losses are judged together
WINDOWS_PER_LOOK = 2  # a look is one small message on the control group
LOOKS_PER_ESTIMATE = 3  # of the noise, which leads to another plan


@dataclass(frozen=True)
class Finding:
    """What a look at one window showed, the same on every rank."""

    departed: str | None  # what is wrong with the loss
    noise: GradientNoise | None


class ConvergenceGuard:
    """Collects this rank's losses and gradient norms, and compares notes every few windows."""

    def __init__(self, control: Control, optimizer: torch.optim.Optimizer):
        self._control, self._optimizer = control, optimizer
        self.meter = NoiseMeter(control.world_size)
        self._tap = LossTap()
        self._watch = LossWatch()
        self._losses: list[torch.Tensor] = []
        self._iterations = 0

    def iteration(self) -> Finding | None:
        """An iteration is over; what the look found if it is time for one."""
        loss = self._tap.take()
        if loss is not None:
            self._losses.append(loss)
        self._iterations += 1
        looks, rest = divmod(self._iterations, WINDOW * WINDOWS_PER_LOOK)
        return self._look(looks % LOOKS_PER_ESTIMATE == 0) if rest == 0 else None

    def capture(self) -> dict[str, Any]:
        """What it has seen so far."""
        return {
            "meter": self.meter,
            "watch": self._watch,
            "losses": self._losses,
            "iterations": self._iterations,
        }

    def resume(self, captured: Mapping[str, Any]) -> None:
        """Have seen that. The meter is another one from now on."""
        self.meter, self._watch = captured["meter"], captured["watch"]
        self._losses, self._iterations = list(captured["losses"]), captured["iterations"]

    def close(self) -> None:
        self._tap.close()

    def _look(self, estimate: bool) -> Finding:
        mine = [float(loss) for loss in self._losses]
        self._losses = []
        gradients = self.meter.take() if estimate else None
        seen = RankStatistics.of(mine, gradients, self._optimizer)
        everyone = [RankStatistics(**theirs) for theirs in self._control.gather(asdict(seen))]
        means = [fmean(losses) for losses in zip(*(s.losses for s in everyone), strict=False)]
        windows = [means[i : i + WINDOW] for i in range(0, len(means), WINDOW)]
        words = [self._watch.add_window(window) for window in windows]
        noise = noise_of(everyone)
        if noise is not None:
            words.append(self._watch.add_estimate(noise))
        return Finding(next(filter(None, words), None), noise)
