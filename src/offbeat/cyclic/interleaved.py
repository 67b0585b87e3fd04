"""Interleaved: cyclic data parallelism on one device.

N micro-batches pass N stages, each two stages behind the one before. So at any time they hold about
(N+1)/2 of the N whole sets of activations that N micro-batches in parallel would hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from offbeat.cyclic.stages import require_stages
from offbeat.runtime.stepper import BucketStepper
from offbeat.storage.coupling import couples
from offbeat.strategies.cyclic import Cyclic

Batch = tuple[Tensor, Any]
Loss = Callable[[Tensor, Any], Tensor]


@dataclass
class _Passing:
    """One micro-batch: its inputs and outputs of the stages that it has passed forward."""

    target: Any
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    parameters: list[dict[str, Tensor]] = field(default_factory=list)
    gradient: Tensor | None = None


class Interleaved:
    """Trains stages with as many micro-batches as there are stages, each two stages behind the
    other. `loss(output, target)` is of one micro-batch; gradients are averaged over them.

    Parameters of a forward are the newest, or those of one iteration before, by the rule of
    `Cyclic` (rule, table, chance, seed, start, clip). Older ones are kept only while a backward
    still needs them. The optimizer must treat parameters independently of each other.

    `step` passes one iteration's time: the last micro-batch of an iteration ends in the next step,
    or in `finish`. Source: Cyclic Data Parallelism, Eq. 5 to 7 and Fig. 1.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        strategy: Cyclic | None = None,
    ) -> None:
        require_stages(stages)
        if coupled := couples(optimizer):
            raise ValueError(f"{coupled}, so it cannot step stage by stage; use another optimizer")
        self.stages, self._optimizer, self._loss = list(stages), optimizer, loss
        strategy = strategy or Cyclic()
        self._rules = strategy.rules(len(stages))
        self._skipped, self._clip = int(strategy.start == "skip"), strategy.clip
        self._stepper = BucketStepper(optimizer, [self._trained(s) for s in self.stages])
        self._stepper.require_independent("use one micro-batch at a time")
        # By stage and iteration: the parameters that it begins with, as forwards use them.
        self._versions = [{0: self._leaves(stage)} for stage in self.stages]
        self._sums: list[list[Tensor] | None] = [None] * len(stages)
        self._passing: dict[tuple[int, int], _Passing] = {}  # by iteration and micro-batch
        self._batches: dict[int, Sequence[Batch]] = {}
        self._time = 0
        self._begun = 0  # iterations
        self._losses: list[Tensor] = []

    def step(self, batches: Sequence[Batch]) -> list[Tensor]:
        """Begin an iteration with N micro-batches (input, target); the losses of those that have
        reached the output since the last call, oldest first."""
        count = len(self.stages)
        if len(batches) != count:
            raise ValueError(
                f"batches ({len(batches)}) must be as many as stages ({count}); cut the batch into "
                f"{count} micro-batches"
            )
        self._batches[self._begun] = batches
        self._begun += 1
        for _ in range(2 * count):
            self._tick()
        return self._taken()

    def finish(self) -> list[Tensor]:
        """Let every micro-batch that has begun end; the rest of the losses. All parameters are the
        newest then, and training can go on: the next iteration begins as the first one did."""
        while self._batches:
            self._tick()
        self._time = 2 * len(self.stages) * self._begun
        self._versions = [{self._begun: versions[self._begun]} for versions in self._versions]
        return self._taken()

    def _taken(self) -> list[Tensor]:
        losses, self._losses = self._losses, []
        return losses

    # ---- one time step ----------------------------------------------------------------------

    def _tick(self) -> None:
        """Each micro-batch passes one stage, those first that go backward: they free memory."""
        count, forward = len(self.stages), []
        for i in range(count):
            since = self._time - 2 * i
            iteration, place = divmod(since, 2 * count)
            if since < 0 or iteration not in self._batches:
                continue
            if place < count:
                forward.append((iteration, i, place))
            else:
                self._backward(iteration, i, 2 * count - 1 - place)
        for one in forward:
            self._forward(*one)
        self._time += 1

    def _forward(self, t: int, i: int, stage: int) -> None:
        if stage == 0:
            given, target = self._batches[t][i]
            self._passing[t, i] = _Passing(target)
        else:
            given = self._passing[t, i].outputs[-1]
        one = self._passing[t, i]
        x = given.detach().requires_grad_(given.is_floating_point())
        versions = self._versions[stage]
        # Before the first iteration, and before one that follows `finish`, they were the same.
        number = t if self._fresh(t, i, stage) or t - 1 not in versions else t - 1
        parameters = versions[number]
        self._drop(t, stage, self._time + 1)
        y = functional_call(self.stages[stage], parameters, (x,))
        if stage == len(self.stages) - 1:
            y = self._loss(y, one.target)
            self._losses.append(y.detach())
        one.inputs.append(x)
        one.outputs.append(y)
        one.parameters.append(parameters)

    def _backward(self, t: int, i: int, stage: int) -> None:
        one = self._passing[t, i]
        x, y, parameters = one.inputs.pop(), one.outputs.pop(), one.parameters.pop()
        trained = [p for p in parameters.values() if p.requires_grad]
        wanted = [x, *trained] if x.requires_grad else trained
        found = torch.autograd.grad(y, wanted, one.gradient, allow_unused=True)
        if x.requires_grad:
            one.gradient, found = found[0], found[1:]
        self._add(stage, found, trained)
        if i == len(self.stages) - 1:
            self._update(t, stage)
        if stage == 0:
            del self._passing[t, i]
            if i == len(self.stages) - 1:
                del self._batches[t]

    def _add(self, stage: int, found: Sequence[Tensor | None], trained: Sequence[Tensor]) -> None:
        given = [
            torch.zeros_like(p) if g is None else g for g, p in zip(found, trained, strict=True)
        ]
        sums = self._sums[stage]
        if sums is None:
            self._sums[stage] = given
            return
        for total, g in zip(sums, given, strict=True):
            total.add_(g)

    # ---- versions ---------------------------------------------------------------------------

    def _update(self, t: int, stage: int) -> None:
        """All micro-batches have brought their gradients of a stage: step it, in new memory, as a
        forward or backward under way may need the old one."""
        sums, parameters = self._sums[stage], self._trained(self.stages[stage])
        assert sums is not None
        self._sums[stage] = None
        versions = self._versions[stage]
        if t < self._skipped:
            versions[t + 1] = versions[t]
            self._drop(t + 1, stage, self._time)
            return
        for p, total in zip(parameters, sums, strict=True):
            p.grad = total.div_(len(self.stages))
            p.data = p.data.clone()
        if self._clip is not None:
            torch.nn.utils.clip_grad_norm_(parameters, self._clip)
        self._stepper.step(range(stage, stage + 1), None, "step the whole model at once")
        for p in parameters:
            p.grad = None
        versions[t + 1] = self._leaves(self.stages[stage])
        self._drop(t + 1, stage, self._time)

    def _fresh(self, t: int, i: int, stage: int) -> bool:
        return self._rules[t % len(self._rules)][i][len(self.stages) - 1 - stage]

    def _drop(self, t: int, stage: int, since: int) -> None:
        """Forget what iteration t - 1 began with, if no forward of iteration t will use it from a
        time step on."""
        count, versions = len(self.stages), self._versions[stage]
        begins = [2 * count * t + 2 * i + stage for i in range(count)]
        if t in versions and not any(
            at >= since and not self._fresh(t, i, stage) for i, at in enumerate(begins)
        ):
            versions.pop(t - 1, None)

    @staticmethod
    def _trained(stage: nn.Module) -> list[nn.Parameter]:
        return [p for p in stage.parameters() if p.requires_grad]

    @staticmethod
    def _leaves(stage: nn.Module) -> dict[str, Tensor]:
        """The parameters as they are now: leaves of their own on the same memory, with version
        counters of their own."""
        return {
            name: p.data.requires_grad_(p.requires_grad) for name, p in stage.named_parameters()
        }
