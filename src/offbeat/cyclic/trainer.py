"""Interleaved: cyclic data parallelism, stage by stage.

N micro-batches pass N stages, each two time steps behind the one before. So at any time they hold
about (N+1)/2 of the N whole sets of activations that N micro-batches in parallel would hold. All
may be computed on one device, or each stage of each micro-batch where a timetable says.

Nobody waits for ever: a process takes the time steps in order, is ready to receive in the step in
which a message is sent, and waits only for what was sent in earlier steps.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from offbeat.core.buckets.coupling import couples
from offbeat.core.guards.comparison import agree_on_optimizer
from offbeat.core.runtime.stepper import BucketStepper, Settings
from offbeat.cyclic.exchange import Exchange
from offbeat.cyclic.splitting import require_stages
from offbeat.cyclic.stage import Stage
from offbeat.cyclic.timetable import Message, Placement, Timetable, What, Work
from offbeat.cyclic.traffic import Traffic
from offbeat.cyclic.vectors import Vectors
from offbeat.cyclic.versions import Versions
from offbeat.strategies.compressible import NONE
from offbeat.strategies.cyclic import Cyclic

Batch = tuple[Tensor, Any]
Loss = Callable[[Tensor, Any], Tensor]


@dataclass
class _Passed:
    """A stage that a micro-batch has passed forward: input, output, parameters."""

    x: Tensor
    y: Tensor
    version: Vectors
    leaves: dict[str, Tensor]


@dataclass
class _Passing:
    """One micro-batch: the stages that it has passed here, and the gradient on its way back."""

    passed: dict[int, _Passed] = field(default_factory=dict)
    gradient: Tensor | None = None


class Interleaved:
    """Trains stages with as many micro-batches as there are stages, each two stages behind the
    other. `loss(output, target)` is of one micro-batch; gradients are averaged over them.

    Parameters of a forward are the newest, or those of one iteration before, by the rule of
    `Cyclic` (rule, table, chance, seed, start, clip). Older ones are kept only while something
    still needs them. The optimizer must treat parameters independently of each other.

    `step` passes one iteration's time: the last micro-batch of an iteration ends in the next step,
    or in `finish`.

    With a `placement` other than `single` (see `Timetable`) every process of torch.distributed
    makes the same model and optimizer, and calls the same methods with the same batches. Each
    computes its part, and keeps the parameters of its own stages; the others are empty until
    `consolidate`. No wait for another process outlasts `timeout_s`.

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
        if coupled := couples(optimizer):
            raise ValueError(f"{coupled}, so it cannot step stage by stage; use another optimizer")
        self.table = Timetable(placement, len(stages))
        strategy = strategy or Cyclic()
        if strategy.wire != NONE:
            raise ValueError(
                f"wire ({strategy.wire!r}) is for messages between workers of prepare(); here "
                "stages travel as they are: leave it out"
            )
        skipped = int(strategy.start == "skip")
        self._versions = Versions(self.table, strategy.rules(len(stages)), skipped)
        self._clip, self._loss, self._optimizer = strategy.clip, loss, optimizer
        self._stages = [Stage(module, optimizer) for module in stages]
        trained = [[*stage.trained.values()] for stage in self._stages]
        self._stepper = BucketStepper(optimizer, trained, "step the whole model at once")
        self._stepper.require_independent()
        self._rank, self._exchange = _joined(self.table, timeout_s, self._stages, optimizer)
        self._traffic = Traffic(self.table, self._rank, self._exchange)
        self._travels = placement == "zero"
        self._stateful = [self._travels and stage.state.present for stage in self._stages]
        self._passing: dict[int, _Passing] = defaultdict(_Passing)
        self._batches: dict[int, Sequence[Batch]] = {}  # by iteration
        # By iteration: learning rates and so on, as they are when it begins.
        self._settings: dict[int, Settings] = {}
        self._coming: dict[tuple[What, int, int], Vectors] = {}  # what, stage and micro-batch
        self._with_state: dict[int, bool] = {}  # by stage that is coming
        self._time = 0
        self._failed = False
        self._losses: list[Tensor] = []
        # For a record: after each work with its seconds, for each message with its bytes.
        self.on_work: Callable[[Work, float, float], None] | None = None
        self._span_s = (0.0, 0.0)  # of the last work, without waiting for messages
        self.on_sent: Callable[[Message, int], None] | None = None
        self._keep_own()

    def step(self, batches: Sequence[Batch]) -> list[Tensor]:
        """Begin an iteration with N micro-batches (input, target); the losses of those that have
        reached the output here since the last call, oldest first."""
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
        self._optimizer._opt_called = True  # type: ignore[attr-defined] # what schedulers ask
        self._versions.series = range(series.start, series.stop + 1)
        return self._until(self.table.period * (series.stop + 1))

    def finish(self) -> list[Tensor]:
        """Let every micro-batch that has begun end; the rest of the losses. All parameters are the
        newest then, and training can go on: the next iteration begins as the first one did."""
        series = self._versions.series
        if not series:
            return []
        losses = self._until(self.table.period * (series.stop + 2))
        for j in range(self.table.n):  # those that go back to rest
            self._arrive(j, self._versions.last(series.stop - 1))
        self._time = self.table.period * series.stop
        self._traffic.restart(self._time)
        self._versions.series = range(series.stop, series.stop)
        for stage in self._stages:
            if stage.versions:
                stage.keep([])
        return losses

    def consolidate(self) -> list[Tensor]:
        """`finish`; then every process has the newest parameters and optimizer state of all stages,
        until the next step. So each can evaluate, and one can save them."""
        losses = self.finish()
        if self._exchange is not None and not self._whole:
            for j, stage in enumerate(self._stages):
                stage.share(
                    self.table.home(j), self._versions.series.start, self._exchange.connected
                )
        self._whole = True
        return losses

    def held_bytes(self) -> int:
        """Bytes of parameters of all versions, gradients and optimizer state that are here."""
        return sum(stage.nbytes for stage in self._stages)

    def held(self) -> Iterator[Tensor]:
        """Parameters of all versions that are here, flat."""
        for stage in self._stages:
            yield from stage.held()

    def _keep_own(self) -> None:
        """Only the stages that are ours are here."""
        own = self.table.stages_of(self._rank)
        for j, stage in enumerate(self._stages):
            if j in own:
                stage.begin(self._versions.series.stop)
            else:
                stage.leave()
        self._whole = False

    # ---- time steps -------------------------------------------------------------------------

    def _until(self, until: int) -> list[Tensor]:
        """Pass the time steps before this one."""
        if self._failed:
            raise RuntimeError(
                "training has failed in the middle of an iteration; make model, optimizer and "
                "trainer again, and load the last checkpoint"
            )
        self._failed = True  # unless all goes well
        self._traffic.expect(self._time, until, self._versions.series)
        # What was due beyond the last iteration's time steps, and is due now.
        self._traffic.receive(self._time - 1, self._room)
        self._traffic.send(self._time - 1, self._load, self.on_sent)
        while self._time < until:
            self._tick()
        self._failed = False
        losses, self._losses = self._losses, []
        return losses

    def _tick(self) -> None:
        self._traffic.receive(self._time, self._room)
        for work in self.table.works(self._time):
            if work.device == self._rank:
                self._renew(work)
                if work.batch // self.table.n in self._versions.series:
                    self._arrive(work.stage, work.batch)
                    (self._backward if work.backward else self._forward)(work)
                    if self.on_work is not None:
                        self.on_work(work, *self._span_s)
        self._traffic.send(self._time, self._load, self.on_sent)
        self._time += 1
        last = self._versions.last
        for t in [t for t in self._batches if self.table.backward_at(last(t), 0) < self._time]:
            del self._batches[t]
            self._settings.pop(t - 1, None)  # all copies have stepped with it

    def _forward(self, work: Work) -> None:
        batch, j, last = work.batch, work.stage, self.table.n - 1
        stage, passing = self._stages[j], self._passing[batch]
        x, target = self._batches[batch // self.table.n][batch % self.table.n]
        if j:
            if self._traffic.awaits("activation", j, batch):
                x = self._traffic.take("activation", j, batch, stage.device)[0]
            else:
                x = passing.passed[j - 1].y.detach()
            x.requires_grad_()
        begin_s = time.perf_counter()
        number = self._versions.number(batch, j)
        y, leaves = stage.forward(x, number)
        if not isinstance(y, Tensor) or not (j == last or y.is_floating_point()):
            kind = y.dtype if isinstance(y, Tensor) else type(y).__name__
            raise ValueError(f"stage {j + 1} returned {kind}; it must be one floating-point tensor")
        if j == last:
            y = self._loss(y, target)
            self._losses.append(y.detach())
        self._span_s = begin_s, time.perf_counter()
        if j < last and self.table.device(batch, j + 1) != self._rank:
            self._traffic.give("activation", j + 1, batch, [y.detach()])
        passing.passed[j] = _Passed(x, y, stage.versions[number], leaves)
        self._forget(j, self._time + 1)

    def _backward(self, work: Work) -> None:
        batch, j = work.batch, work.stage
        stage, passing = self._stages[j], self._passing[batch]
        one, gradient = passing.passed.pop(j), passing.gradient
        if self._traffic.awaits("gradient", j, batch):
            gradient = self._traffic.take("gradient", j, batch, stage.device)[0]
        begin_s = time.perf_counter()
        wanted = [one.leaves[name] for name in stage.trained]
        found = torch.autograd.grad(
            one.y, [one.x, *wanted] if j else wanted, gradient, allow_unused=True
        )
        self._span_s = begin_s, time.perf_counter()
        if j:
            passing.gradient = torch.zeros_like(one.x) if found[0] is None else found[0]
            found = found[1:]
            if self.table.device(batch, j - 1) != self._rank:
                self._traffic.give("gradient", j - 1, batch, [passing.gradient])
        if not passing.passed:
            del self._passing[batch]
        self._add(batch, j, found)

    # ---- gradients and versions -------------------------------------------------------------

    def _add(self, batch: int, j: int, found: Sequence[Tensor | None]) -> None:
        """Add gradients to the stage's sum, which then waits here, goes on, or is complete."""
        stage = self._stages[j]
        if self._traffic.awaits("sum", j, batch):
            self._traffic.take("sum", j, batch, stage.device)
            stage.sum = self._coming.pop(("sum", j, batch))
        stage.add(found)
        if batch == self._versions.last(batch // self.table.n):
            self._complete(batch // self.table.n, j)
        elif not self._travels and self.table.device(batch + 1, j) != self._rank:
            assert stage.sum is not None
            self._traffic.give("sum", j, batch + 1, stage.sum.flats)
            stage.sum = None

    def _complete(self, t: int, j: int) -> None:
        """All micro-batches of iteration t have added to the sum: it becomes the gradient."""
        stage = self._stages[j]
        mean, stage.sum = stage.sum, None
        assert mean is not None
        for flat in mean.flats:
            flat.div_(self.table.n)
        if self._clip is not None:
            norm = nn.utils.get_total_norm([*mean.views.values()])
            for flat in mean.flats:
                flat.mul_((self._clip / (norm + 1e-6)).clamp(max=1.0))  # as torch does
        self._update(t, j, mean)

    def _renew(self, work: Work) -> None:
        """Update our copy of a stage, if its gradient is due before this work."""
        if not work.backward and self._traffic.awaits("total", work.stage, work.batch):
            self._traffic.take("total", work.stage, work.batch, self._stages[work.stage].device)
            t = self.table.total_of(work.batch, work.stage)
            assert t is not None
            self._update(t, work.stage, self._coming.pop(("total", work.stage, work.batch)))

    def _update(self, t: int, j: int, mean: Vectors) -> None:
        """Step a stage with its gradient, which then goes on to the next copy."""
        stage = self._stages[j]
        if t < self._versions.skipped:
            stage.versions[t + 1] = stage.versions[t]
        else:
            stage.begin_update(t + 1, mean)
            self._stepper.step(range(j, j + 1), self._settings[t], compare=True)
            stage.end_update()
        self._forget(j, self._time)
        for message in self.table.passes(t, j):
            if message.source == self._rank:
                self._traffic.give("total", j, message.batch, mean.flats)

    def _forget(self, j: int, since: int) -> None:
        """Versions that nobody here uses from a time step on."""
        # A stage that travels leaves them behind when it goes.
        if not self._travels and len(self._stages[j].versions) > 1:
            self._stages[j].keep(self._versions.used_on(self._rank, j, since))

    # ---- messages ---------------------------------------------------------------------------

    def _room(self, message: Message) -> list[Tensor] | None:
        """Where a message lands; None for an activation, whose shape is not ours to know."""
        what, j, batch = message.what, message.stage, message.batch
        stage = self._stages[j]
        if what == "activation":
            return None
        if what == "gradient":
            y = self._passing[batch].passed[j].y
            # What is sent is contiguous, whatever the output's memory looks like.
            return [torch.empty_like(y, memory_format=torch.contiguous_format)]
        if what != "states":
            self._coming[what, j, batch] = stage.vectors()
            return self._coming[what, j, batch].flats
        there = self._versions.contents(j, message.due, self._stateful[j])
        self._with_state[j] = there.stateful
        room = stage.arrive(there.versions)
        if there.summing:
            stage.sum = stage.vectors()
            room += stage.sum.flats
        return room + (stage.state.room() if there.stateful else [])

    def _arrive(self, j: int, batch: int) -> None:
        """A stage that travels is here from now on."""
        if self._traffic.awaits("states", j, batch):
            stage = self._stages[j]
            self._traffic.take("states", j, batch, stage.device)
            stage.show_newest()
            if self._with_state.pop(j):
                stage.state.give()

    def _load(self, message: Message) -> tuple[list[Tensor], Callable[[], None]]:
        """A stage that travels leaves; what is to be done when it has gone."""
        stage = self._stages[message.stage]
        there = self._versions.contents(message.stage, message.due, self._stateful[message.stage])
        left = [stage.versions[number] for number in there.versions]
        tensors = [flat for version in left for flat in version.flats]
        if there.summing:
            assert stage.sum is not None
            tensors += stage.sum.flats
        tensors += stage.state.taken() if there.stateful else []
        stage.leave()

        def gone() -> None:
            for version in left:
                version.release()

        return tensors, gone


def _joined(
    table: Timetable, timeout_s: float, stages: Sequence[Stage], optimizer: torch.optim.Optimizer
) -> tuple[int, Exchange | None]:
    """Our rank, and the way to the others."""
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
    for stage in stages:  # seeds may differ; rank 0's weights count
        stage.receive_from(0, exchange.connected)
    return exchange.control.rank, exchange
