"""Slow, readable twins of the strategies: every rank trains a plain module, and averages what its
strategy's equations average, one collective per parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C import _current_graph_task_id as current_graph_task_id
from torch.autograd import Variable

from offbeat.core.derive.windows import Windows
from offbeat.core.runtime.session import Session
from offbeat.profile import Profile
from offbeat.strategies.schedulers import SchedulerGate
from offbeat.testing.equations import Changes, layer_sets


class AfterBackward:
    """Hooks that call `act` at the end of each backward pass that reaches one of the parameters,
    before `backward()` returns."""

    def __init__(self, parameters: Iterable[Tensor], act: Callable[[], None]):
        self._act, self._pass = act, -1
        self._handles = [
            p.register_post_accumulate_grad_hook(self._on_gradient) for p in parameters
        ]

    def remove(self) -> None:
        """Remove the hooks from the parameters."""
        for handle in self._handles:
            handle.remove()

    def _on_gradient(self, _: Tensor) -> None:
        current = current_graph_task_id()
        if current != self._pass:
            self._pass = current
            Variable._execution_engine.queue_callback(self._act)  # type: ignore[attr-defined]


def mean_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """A rank without a gradient counts as zero; what no rank has used keeps none."""
    for p in parameters:
        used = torch.tensor(float(p.grad is not None))
        dist.all_reduce(used)
        if used:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad.to_dense()
            average([p.grad])


def average(tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        dist.all_reduce(tensor)
        tensor /= dist.get_world_size()


class Reference(Session):
    """Local steps: nothing is averaged. An iteration ends with a step, or when its gradients are
    dropped. The first `observed` ones average the gradients of every backward, each of which
    counts. The equations begin with the iteration `begun`, after a step."""

    observed = 0

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer):
        self.module, self.optimizer = module, optimizer
        self.trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self.r, self.open, self.quiet = 0, False, False
        self.begun = 0
        self._hooks = AfterBackward(self.trained.values(), self._backward_over)
        module.register_load_state_dict_post_hook(lambda *_: self.loaded())

    def _backward_over(self) -> None:
        if not self.quiet:
            again, self.open = self.open, True
            if self.observes:
                self.average_gradients()
                self.r += again
            else:
                self.backward_ends()

    @property
    def observes(self) -> bool:
        return self.begun < self.observed

    def average_gradients(self) -> None:
        """`g = mean_k(g_k)`."""
        mean_gradients(self.trained.values())

    def backward_ends(self) -> None:
        """What code between backward and step sees."""

    def loaded(self) -> None:
        """The equations begin anew: other weights were loaded, or nothing is observed any more."""

    def before(self) -> None:
        """What comes before the update."""

    def after(self) -> None:
        """What comes after the update."""

    def update(self) -> None:
        self.optimizer.step()

    def step(self, skip_update: bool) -> None:
        self.end(skip_update)
        if self.observes and self.r >= self.observed:
            self.begun = self.r
            self.loaded()

    def end(self, skip_update: bool) -> None:
        if not self.observes:
            self.iterate(skip_update)
        else:
            if not self.open:
                self.average_gradients()
            if not skip_update:
                self.optimizer.step()
        self.r, self.open = self.r + 1, False

    def iterate(self, skip_update: bool) -> None:
        """One step of the equations."""
        self.before()
        if not skip_update:
            self.update()
        self.after()

    def forward(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    def zero_grad(self, set_to_none: bool) -> None:
        if self.open:
            self.end(skip_update=True)
        self.module.zero_grad(set_to_none)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.quiet = True
        yield
        self.quiet = False

    def consolidate(self, repairing: bool) -> None:
        pass

    def close(self) -> None:
        self._hooks.remove()

    @property
    def iteration(self) -> int:
        return self.r

    def traffic(self) -> dict[str, int]:
        return {}

    def capture_position(self) -> NoReturn:
        raise NotImplementedError

    def resume(self, position: Any) -> NoReturn:
        raise NotImplementedError


class Synchronous(Reference):
    """`g = mean_k(g_k)` in every backward."""

    def backward_ends(self) -> None:
        self.average_gradients()

    def before(self) -> None:
        if not self.open:
            self.backward_ends()


class Periodic(Reference):
    """`w = mean_k(w_k)` after every `period`-th step (LocalSGD)."""

    period = 2

    @torch.no_grad()
    def after(self) -> None:
        if (self.r + 1 - self.begun) % self.period == 0:
            average(self.trained.values())


class Partial(Reference):
    """In iteration r the layers in sets[r mod H] are averaged, before or after the update. `runs`:
    strategies and the iterations from which on they run."""

    def __init__(self, module: nn.Module, optimizer: Any, runs: Sequence[Any], profile: Profile):
        super().__init__(module, optimizer)
        self._runs = [(begin, one.when, self._sets(one, profile)) for begin, one in runs]

    @staticmethod
    def _sets(strategy: Any, profile: Profile) -> list[list[str]]:
        sets = layer_sets(strategy.plan(profile))
        assert all(piece.parts == 1 for pieces in sets for piece in pieces)
        return [
            [name for piece in pieces for b in piece.buckets for name in profile.buckets[b].tensors]
            for pieces in sets
        ]

    @torch.no_grad()
    def _average(self, when: str) -> None:
        r = self.r - self.begun
        begin, how, sets = [run for run in self._runs if run[0] <= r][-1]
        if how == when:
            names = sets[(r - begin) % len(sets)]
            average(self.trained[n] for n in names if n in self.trained)

    def before(self) -> None:
        self._average("before_update")

    def after(self) -> None:
        self._average("after_update")


class Selective(Reference):
    """All average where the gradient of some worker has changed by `delta`."""

    def __init__(self, module: nn.Module, optimizer: Any, delta: float):
        super().__init__(module, optimizer)
        self._delta, self._norms = delta, list[float]()
        self._changes = Changes("norm", 25, dist.get_world_size() / 100)
        self._norm = 0.0

    def backward_ends(self) -> None:
        grads = [p.grad for p in self.trained.values() if p.grad is not None]
        self._norm = sum(float(g.double().square().sum()) for g in grads)

    @torch.no_grad()
    def after(self) -> None:
        norm, self._norm = self._norm, 0.0
        odd = not 0 < norm < float("inf")
        if not odd:
            self._norms.append(norm)
        first = odd or len(self._norms) == 1
        said = torch.tensor(float(first or self._changes.change(self._norms) >= self._delta))
        dist.all_reduce(said)
        if said:
            average(self.trained.values())


class Late(Reference):
    """Gradients add up until an iteration closes their window; when the next one closes, their
    mean over ranks is applied."""

    def __init__(self, module: nn.Module, optimizer: Any, strategy: Any, profile: Profile):
        super().__init__(module, optimizer)
        self._windows = Windows(strategy.plan(profile))
        self._opened: dict[str, Tensor] = {}
        self._closed: dict[str, Tensor] | None = None
        self._due, self._anew = False, 0  # the plan began anew in this iteration
        self._gate = SchedulerGate(optimizer)  # schedulers step only when the optimizer does

    def backward_ends(self) -> None:
        for name, p in self.trained.items():
            if p.grad is not None:
                self._opened[name] = self._opened.get(name, 0) + p.grad.to_dense()
            p.grad = None
        if self._windows.closes_window(self.r - self._anew):
            self._close()
        if not self._due:  # a zero is seen, as torch's clip_grad_value_ fails without a gradient
            smallest = min(self.trained.values(), key=Tensor.numel)
            smallest.grad = torch.zeros_like(smallest)

    def _close(self) -> None:
        if self._closed is not None:
            self._due = True
            for name, p in self.trained.items():
                p.grad = self._closed.get(name)
            mean_gradients(self.trained.values())
        self._closed, self._opened = self._opened, {}

    def loaded(self) -> None:
        """What was added up is of other weights."""
        self._opened, self._closed, self._anew = {}, None, self.r

    def iterate(self, skip_update: bool) -> None:
        super().iterate(False)  # what is due is of other iterations

    def update(self) -> None:
        if self._due:
            self.optimizer.step()
        self._gate.on_iteration_end(self._due)
        self._due = False

    def close(self) -> None:
        super().close()
        self._gate.close()

    def before(self) -> None:
        if not self.open:
            self.backward_ends()

    def after(self) -> None:
        self.module.zero_grad(set_to_none=True)


class Handed(Reference):
    """Stages of the newest parameters, or of those one iteration older (Cyclic). Rank 0 sees the
    mean gradient, the others what they hand on."""

    def __init__(self, module: nn.Module, optimizer: Any, strategy: Any, profile: Profile):
        super().__init__(module, optimizer)
        job = strategy._job(profile)
        stages = [[n for b in run for n in profile.buckets[b].tensors] for run in job.runs]
        self._stages = [[n for n in names if n in self.trained] for names in stages]
        self._fresh = job.uses_newest
        self._newest = self._older = self._kept()

    def _kept(self) -> dict[str, Tensor]:
        return {n: p.detach().clone() for n, p in self.trained.items()}

    @torch.no_grad()
    def _use(self, kept: dict[str, Tensor], names: Iterable[str]) -> None:
        for name in names:
            self.trained[name].copy_(kept[name])

    def iterate(self, skip_update: bool) -> None:
        """Rank 0 decides whether there is an update."""
        mean_gradients(self.trained.values())
        mine = self._newest
        self._use(mine, self.trained)
        for p in self.trained.values():
            dist.broadcast(p.data, 0)  # of what every rank has loaded it counts
        skips = torch.tensor(float(skip_update))
        dist.broadcast(skips, 0)
        if not skips:
            self.optimizer.step()
        self._older, self._newest = mine, self._kept()
        self.after()

    def loaded(self) -> None:
        self._older = self._newest = self._kept()

    def after(self) -> None:
        for g, names in enumerate(self._stages):
            fresh = self._fresh(self.r + 1, dist.get_rank(), g)
            self._use(self._newest if fresh else self._older, names)

    def consolidate(self, repairing: bool) -> None:
        self._use(self._newest, self.trained)
