"""Convergence guard: checks of loss and gradient noise with strategies that delay updates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch

from offbeat.core.measuring.loss import LossTap
from offbeat.core.profile import GradientNoise
from offbeat.core.strategy.interface import Planned
from offbeat.strategies.gradient_noise import Metering, RankStatistics, Training, noise_of
from offbeat.strategies.loss_watch import LossWatch

if TYPE_CHECKING:
    from offbeat.core.runtime.planner import Planner

WINDOW = 10  # iterations in a window of losses
WINDOWS_PER_LOOK = 2  # a look is one small collective on the control group
LOOKS_PER_ESTIMATE = 3  # each estimate of gradient noise leads to a new plan


@dataclass(frozen=True)
class Finding:
    """Result of a look, the same on every rank."""

    problem: str | None  # description of the problem of the loss, by `LossWatch`; None if none
    noise: GradientNoise | None


class ConvergenceGuard(Metering):
    """Records losses and gradient norms of this rank, and gathers them every few windows. Then all
    ranks run the fallback if the loss has a problem, or plan again with the noise of the gradients.

    Args:
        engine: engine of this rank.
        planner: planner of the session.
        fallback: strategy that takes over.
    """

    def __init__(self, engine: Training, planner: Planner, fallback: Planned) -> None:
        super().__init__(engine)
        self._planner, self._fallback = planner, fallback
        self._control, self._optimizer = engine.control, engine.optimizer
        self._tap = LossTap()
        self._watch = LossWatch()
        self._losses: list[torch.Tensor] = []
        self._iterations = 0

    def iteration(self) -> Finding | None:
        """Record the end of an iteration. Return a finding if a look is due, otherwise None."""
        loss = self._tap.take()
        if loss is not None:
            self._losses.append(loss)
        self._iterations += 1
        looks, rest = divmod(self._iterations, WINDOW * WINDOWS_PER_LOOK)
        return self._look(looks % LOOKS_PER_ESTIMATE == 0) if rest == 0 else None

    def on_step_end(self) -> None:
        """Record the end of an iteration, and change the plan after a finding."""
        finding, planner = self.iteration(), self._planner
        if finding is not None and finding.problem is not None:
            planner.stop_watching()
            if planner.change(self._fallback) is not None:
                planner.decisions.warn(
                    f"{finding.problem}: fell back from {planner.strategy} to {self._fallback}"
                )
        elif finding is not None and finding.noise is not None:
            plan = planner.change(profile=replace(planner.profile, noise=finding.noise))
            if plan is not None:
                why = plan.fact("why") or plan.fact("preserver", {}).get("decision")
                planner.decisions.record(f"planned again, {why or 'the gradient noise changed'}")

    def capture(self) -> dict[str, Any]:
        """Return the state of the guard for a checkpoint."""
        return {
            "meter": self.meter,
            "watch": self._watch,
            "losses": self._losses,
            "iterations": self._iterations,
        }

    def resume(self, captured: Mapping[str, Any]) -> None:
        """Restore the result of `capture`."""
        self.meter, self._watch = captured["meter"], captured["watch"]
        self._losses, self._iterations = list(captured["losses"]), captured["iterations"]

    def close(self) -> None:
        self._tap.close()

    def _look(self, estimate: bool) -> Finding:
        losses = [float(loss) for loss in self._losses]
        self._losses = []
        gradients = self.meter.take() if estimate else None
        seen = RankStatistics.of(losses, gradients, self._optimizer)
        everyone = [RankStatistics(**fields) for fields in self._control.gather(asdict(seen))]
        means = [fmean(losses) for losses in zip(*(s.losses for s in everyone), strict=False)]
        windows = [means[i : i + WINDOW] for i in range(0, len(means), WINDOW)]
        words = [self._watch.add_window(window) for window in windows]
        noise = noise_of(everyone)
        if noise is not None:
            words.append(self._watch.add_estimate(noise))
        return Finding(next(filter(None, words), None), noise)
