"""Trainer for cyclic data parallelism by stages.

N micro-batches pass N stages, each two time steps behind the previous one. At any time they hold
about (N+1)/2 sets of activations, where N simultaneous micro-batches would hold N. A timetable
assigns the stages of each micro-batch to one or several devices.

Processes cannot deadlock: each process passes the time steps in order, starts to receive a message
in the step in which it is sent, and waits only for messages that were sent in earlier steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from offbeat.core.buckets.coupling import find_coupling
from offbeat.core.guards.comparison import agree_on_optimizer
from offbeat.core.runtime.stepper import BucketStepper, Settings
from offbeat.cyclic.exchange import Exchange
from offbeat.cyclic.splitting import end_of_work_s, require_stages
from offbeat.cyclic.stage import Stage
from offbeat.cyclic.timetable import Key, Message, Placement, Timetable, Work
from offbeat.cyclic.traffic import Traffic
from offbeat.cyclic.vectors import Vectors
from offbeat.cyclic.versions import Versions
from offbeat.strategies.compressible import NONE
from offbeat.strategies.cyclic import Cyclic

Batch = tuple[Tensor, Any]
Loss = Callable[[Tensor, Any], Tensor]


class _Forward(NamedTuple):
    """Forward of a micro-batch through a stage: input, output, and the parameters it has used."""

    x: Tensor
    y: Tensor
    version: Vectors


class Interleaved:
    """Trainer of N stages with N micro-batches per iteration, each two time steps apart.

    A forward uses the newest parameters or those of the previous iteration, by the rule of
    `strategy`. Older parameters are kept only while a forward or backward needs them.

    `step` passes the time steps of one iteration. The last micro-batches of an iteration end in the
    next `step`, or in `finish`.

    With a `placement` other than "single" every process of torch.distributed creates the same model
    and optimizer and calls the same methods with the same batches. Each process computes the works
    of its device and holds the parameters of its own stages. The other stages are empty until
    `consolidate`.

    Args:
        stages: modules that run one after the other, see `split`.
        optimizer: optimizer of all stages. It must step each parameter independently of others.
        loss: `loss(output, target)` of one micro-batch. Gradients are averaged over micro-batches.
        strategy: rule, table, chance, seed, start and clip of `Cyclic`.
        placement: devices of the stages, see `Timetable`.
        timeout_s: longest wait for another process, in seconds.

    Attributes:
        stages: stages of the model, of which other devices may hold the parameters.
        table: works of each device by time step.

    Raises:
        ValueError: the stages, the optimizer or the number of processes do not fit.

    Source: Cyclic Data Parallelism, Eq. 5 to 7, Fig. 1 and 2.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        strategy: Cyclic | None = None,
        placement: Placement = "single",
        timeout_s: float = 60.0,
    ) -> None:
        require_stages(stages)
        if coupled := find_coupling(optimizer):
            raise ValueError(f"{coupled}, so it cannot step stage by stage; use another optimizer")
        self.table = Timetable(placement, len(stages))
        strategy = strategy or Cyclic()
        if strategy.wire != NONE:
            raise ValueError(
                f"wire ({strategy.wire!r}) is for messages between workers of prepare(); here "
                "messages are not compressed: leave it out"
            )
        skipped = int(strategy.start == "skip")
        self._clip, self._loss, self._optimizer = strategy.clip, loss, optimizer
        self._travels = placement == "zero"
        self.stages = [Stage(module, optimizer, self._travels) for module in stages]
        trained = [[*stage.trained.values()] for stage in self.stages]
        self._stepper = BucketStepper(optimizer, trained, "step the whole model at once")
        self._stepper.require_independent()
        present = optimizer.state.keys()
        stateful = [j for j, parameters in enumerate(trained) if {*parameters} & present]
        self._versions = Versions(self.table, strategy.rules(len(stages)), skipped, stateful)
        self._rank, self._exchange = _join_processes(self.table, timeout_s, self.stages, optimizer)
        room = self._receive_buffers, self._unload_stage
        self._traffic = Traffic(self.table, self._rank, self._exchange, *room)
        self._forwards: dict[tuple[int, int], _Forward] = {}  # by micro-batch and stage
        self._gradients: dict[int, Tensor] = {}  # of the outputs, by micro-batch in its backward
        self._batches: dict[int, Sequence[Batch]] = {}  # by iteration
        # By iteration: settings of the optimizer, such as learning rates, at its start.
        self._settings: dict[int, Settings] = {}
        self._coming: dict[Key, Vectors] = {}
        self._time = 0
        self._failed = False
        self._losses: list[Tensor] = []
        # Callbacks of a record: after each work with begin and end, at each message with its bytes.
        self.on_work: Callable[[Work, float, float], None] | None = None
        self.on_sent: Callable[[Message, int], None] | None = None
        self._keep_own()

    def step(self, batches: Sequence[Batch]) -> list[Tensor]:
        """Begin an iteration and pass its time steps.

        Args:
            batches: (input, target) of each of the N micro-batches.

        Returns:
            Losses of the micro-batches that have reached the output on this device since the last
            call, in their order.
        """
        count, series = self.table.n, self._versions.series
        if len(batches) != count:
            raise ValueError(
                f"batches ({len(batches)}) must be as many as stages ({count}); cut the batch into "
                f"{count} micro-batches"
            )
        if self._whole:
            self._keep_own()
        self._batches[series.stop] = batches
        self._settings[series.stop] = self._stepper.settings()
        self._optimizer._opt_called = True  # type: ignore[attr-defined] # read by schedulers
        self._versions.series = range(series.start, series.stop + 1)
        return self._run_until(self.table.period * (series.stop + 1))

    def finish(self) -> list[Tensor]:
        """Complete all micro-batches and return the remaining losses.

        Afterwards all parameters are the newest ones. A further `step` begins like the first one.
        """
        series = self._versions.series
        if not series:
            return []
        losses = self._run_until(self.table.period * (series.stop + 2))
        for j in range(self.table.n):  # stages that return to their homes
            self._activate_stage(j, self._versions.last(series.stop - 1))
        self._time = self.table.period * series.stop
        self._traffic.restart(self._time)
        self._versions.series = range(series.stop, series.stop)
        for stage in self.stages:
            if stage.versions:
                stage.keep_versions([])
        return losses

    def consolidate(self) -> list[Tensor]:
        """Call `finish` and give every process all stages, until the next `step`.

        Each process then has the newest parameters and optimizer state, to evaluate or save them.
        """
        losses = self.finish()
        if self._exchange is not None and not self._whole:
            group = self._exchange.open_group
            for j, stage in enumerate(self.stages):
                with self._exchange.reporting(f"the broadcast of stage {j}"):
                    stage.broadcast_newest(self.table.home(j), self._versions.series.start, group)
        self._whole = True
        return losses

    def _keep_own(self) -> None:
        """Keep the stages of this device and remove the others."""
        own = self.table.stages_of(self._rank)
        for j, stage in enumerate(self.stages):
            if j in own:
                stage.begin(self._versions.series.stop)
            else:
                stage.remove_tensors()
        self._whole = False

    # ---- time steps -------------------------------------------------------------------------

    def _run_until(self, until: int) -> list[Tensor]:
        """Pass the time steps before `until`. Return the losses since the last call."""
        if self._failed:
            raise RuntimeError(
                "training has failed in the middle of an iteration; make model, optimizer and "
                "trainer again, and load the last checkpoint"
            )
        self._failed = True  # until the end of this method
        self._traffic.expect(self._time, until, self._versions.series)
        # Messages that could not be sent before this iteration began.
        self._traffic.receive(self._time - 1)
        self._traffic.send(self._time - 1, self.on_sent)
        while self._time < until:
            self._run_time_step()
        self._failed = False
        losses, self._losses = self._losses, []
        return losses

    def _run_time_step(self) -> None:
        self._traffic.receive(self._time)
        for work in self.table.works(self._time):
            if work.device == self._rank:
                self._apply_total(work)
                if work.batch // self.table.n in self._versions.series:
                    self._activate_stage(work.stage, work.batch)
                    span_s = (self._backward if work.backward else self._forward)(work)
                    if self.on_work is not None:
                        self.on_work(work, *span_s)
        self._traffic.send(self._time, self.on_sent)
        self._time += 1
        last = self._versions.last
        for t in [t for t in self._batches if self.table.backward_at(last(t), 0) < self._time]:
            del self._batches[t]
            self._settings.pop(t - 1, None)  # all copies have stepped with it

    def _forward(self, work: Work) -> tuple[float, float]:
        """Return begin and end in seconds, without waiting for messages."""
        batch, j, last = work.batch, work.stage, self.table.n - 1
        stage = self.stages[j]
        x, target = self._batches[batch // self.table.n][batch % self.table.n]
        if j:
            came = self._traffic.take("activation", j, batch)
            x = came[0].to(stage.device) if came else self._forwards[batch, j - 1].y.detach()
            x.requires_grad_()
        begin_s = self._time_s(stage)
        number = self._versions.version_of(batch, j)
        y = stage.forward(x, number)
        if not isinstance(y, Tensor) or not (j == last or y.is_floating_point()):
            kind = y.dtype if isinstance(y, Tensor) else type(y).__name__
            raise ValueError(f"stage {j + 1} returned {kind}; it must be one floating-point tensor")
        if j == last:
            y = self._loss(y, target)
            self._losses.append(y.detach())
        end_s = self._time_s(stage)
        if j < last and self.table.device(batch, j + 1) != self._rank:
            self._traffic.provide("activation", j + 1, batch, [y.detach()])
        self._forwards[batch, j] = _Forward(x, y, stage.versions[number])
        self._remove_old_versions(j, self._time + 1)
        return begin_s, end_s

    def _time_s(self, stage: Stage) -> float:
        """Return the time in seconds, with a record after all work of the stage's device."""
        return end_of_work_s(() if self.on_work is None else (stage.device,))

    def _backward(self, work: Work) -> tuple[float, float]:
        """Return begin and end in seconds, without waiting for messages."""
        batch, j = work.batch, work.stage
        stage = self.stages[j]
        came = self._traffic.take("gradient", j, batch)
        gradient = came[0] if came else self._gradients.pop(batch, None)
        one = self._forwards.pop((batch, j))
        begin_s = self._time_s(stage)
        wanted = [*([one.x] if j else []), *one.version.views.values()]
        gradients = torch.autograd.grad(one.y, wanted, gradient, allow_unused=True)
        end_s = self._time_s(stage)
        if j:
            gradient, *gradients = gradients
            gradient = torch.zeros_like(one.x) if gradient is None else gradient
            if self.table.device(batch, j - 1) == self._rank:
                self._gradients[batch] = gradient
            else:
                self._traffic.provide("gradient", j - 1, batch, [gradient])
        self._add(batch, j, gradients)
        return begin_s, end_s

    # ---- gradients and versions -------------------------------------------------------------

    def _add(self, batch: int, j: int, found: Sequence[Tensor | None]) -> None:
        """Add gradients to the stage's sum, and pass the sum on or complete it where it is due."""
        stage = self.stages[j]
        if self._traffic.take("sum", j, batch):
            stage.sum = self._coming.pop(("sum", j, batch))
        stage.add(found)
        if batch == self._versions.last(batch // self.table.n):
            self._complete(batch // self.table.n, j)
        elif not self._travels and self.table.device(batch + 1, j) != self._rank:
            assert stage.sum is not None
            self._traffic.provide("sum", j, batch + 1, stage.sum.flats)
            stage.sum = None

    def _complete(self, t: int, j: int) -> None:
        """Turn the complete sum of iteration t into the average, clip it, and update the stage."""
        stage = self.stages[j]
        mean, stage.sum = stage.sum, None
        assert mean is not None
        for flat in mean.flats:
            flat.div_(self.table.n)
        if self._clip is not None:
            norm = nn.utils.get_total_norm([*mean.views.values()])
            for flat in mean.flats:
                flat.mul_((self._clip / (norm + 1e-6)).clamp(max=1.0))  # as torch does
        self._update(t, j, mean)

    def _apply_total(self, work: Work) -> None:
        """Update the local copy of a stage, if an iteration's gradient is due before this work."""
        if not work.backward and self._traffic.take("total", work.stage, work.batch):
            t = self.table.arriving_total(work.batch, work.stage)
            assert t is not None
            self._update(t, work.stage, self._coming.pop(("total", work.stage, work.batch)))

    def _update(self, t: int, j: int, mean: Vectors) -> None:
        """Step a stage with the gradient of iteration t, and pass the gradient to the next copy."""
        stage, copies = self.stages[j], self.table.total_messages(t, j)
        onward = [message for message in copies if message.source == self._rank]
        # Optimizers may write to gradients in their step, as Nesterov momentum does.
        given = [flat.clone() for flat in mean.flats] if onward else []
        if t < self._versions.skipped:
            stage.versions[t + 1] = stage.versions[t]
        else:
            stage.begin_update(t + 1, mean)
            self._stepper.step(range(j, j + 1), self._settings[t], compare=True)
            stage.end_update()
        self._remove_old_versions(j, self._time)
        for message in onward:
            self._traffic.provide("total", j, message.batch, given)

    def _remove_old_versions(self, j: int, since: int) -> None:
        """Remove versions that this device does not use from a time step on."""
        # With "zero" a stage drops its old versions when it moves.
        if not self._travels and len(self.stages[j].versions) > 1:
            self.stages[j].keep_versions(self._versions.versions_used_on(self._rank, j, since))

    # ---- messages ---------------------------------------------------------------------------

    def _receive_buffers(self, message: Message) -> list[Tensor] | None:
        """Return the tensors to receive a message into; None for an activation of unknown shape."""
        stage = self.stages[message.stage]
        if message.what == "activation":
            return None
        if message.what == "gradient":
            y = self._forwards[message.batch, message.stage].y
            # Messages are contiguous, even if the output is not.
            return [torch.empty_like(y, memory_format=torch.contiguous_format)]
        if message.what != "states":
            self._coming[message.key] = stage.new_vectors()
            return self._coming[message.key].flats
        return stage.expect(self._versions.contents(message.stage, message.due))

    def _activate_stage(self, j: int, batch: int) -> None:
        """Wait for a stage that moves to this device before this work, and activate it."""
        if self._traffic.take("states", j, batch):
            self.stages[j].activate()

    def _unload_stage(self, message: Message) -> tuple[list[Tensor], Callable[[], None]]:
        there = self._versions.contents(message.stage, message.due)
        return self.stages[message.stage].unload(there)


def _join_processes(
    table: Timetable, timeout_s: float, stages: Sequence[Stage], optimizer: torch.optim.Optimizer
) -> tuple[int, Exchange | None]:
    """Check that all processes agree and broadcast rank 0's weights. Return rank and exchange."""
    if table.placement == "single":
        return 0, None
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if ranks != table.devices:
        raise ValueError(
            f"placement ({table.placement!r}) of {table.n} stages needs {table.devices} processes "
            f"of torch.distributed, but there are {ranks}; start as many"
        )
    if not dist.is_initialized():  # one stage
        return 0, None
    exchange = Exchange(timeout_s)
    shapes = [[(n, str(p.dtype), *p.shape) for n, p in stage.trained.items()] for stage in stages]
    exchange.control.agree(
        "stages", [table.placement, shapes], "make the same model and stages on every rank"
    )
    modules = nn.ModuleList(stage.module for stage in stages)
    agree_on_optimizer(exchange.control, optimizer, modules)
    with exchange.reporting("the broadcast of rank 0's weights"):  # weights may differ
        for tensor in [*modules.parameters(), *modules.buffers()]:
            if tensor.numel():
                dist.broadcast(tensor.data, 0, exchange.open_group)
    return exchange.control.rank, exchange
