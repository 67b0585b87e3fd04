"""Scripts that nobody had in mind, as they would be written for one GPU."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

import offbeat
from cases.matrix.job import profile_of
from cases.workers import rank
from offbeat import Planned, Strategy
from offbeat.core.transport.failure_detector import IN_SCRIPT

STEPS = 5
RANKS = 2
Batch = Callable[[int], tuple[Tensor, Tensor]]
Script = Callable[[Any, Any, Batch], None]


def batch_of(t: int, whose: int) -> tuple[Tensor, Tensor]:
    draw = torch.randn(
        4, 8, generator=torch.Generator().manual_seed(100 * t + whose), dtype=torch.float64
    )
    return draw[:, :5], draw[:, 5:]


def all_batches(t: int) -> tuple[Tensor, Tensor]:
    """Of all ranks in one: its gradient is the mean of theirs."""
    x, y = zip(*(batch_of(t, whose) for whose in range(RANKS)), strict=True)
    return torch.cat(x), torch.cat(y)


def build(momentum: float) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    *trained, _ = model.parameters()  # the last one stays as it is
    return model, torch.optim.SGD(trained, lr=0.1, momentum=momentum)


def loss_of(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


# ---- the scripts ----------------------------------------------------------------------------


def sets_gradients(model: Any, optimizer: Any, batch: Batch) -> None:
    """No backward: some are replaced, some written in place."""
    for t in range(STEPS):
        optimizer.zero_grad(set_to_none=False)
        parameters = list(model.parameters())
        found = torch.autograd.grad(loss_of(model, batch(t)), parameters)
        for p, gradient in zip(parameters, found, strict=True):
            if t % 2 and p.grad is not None:
                p.grad.copy_(gradient)
            else:
                p.grad = gradient
        optimizer.step()


def leaves_batches_out(model: Any, optimizer: Any, batch: Batch) -> None:
    """After their backward, by taking the gradients away."""
    for t in range(STEPS):
        loss_of(model, batch(t)).backward()
        if t != 2:
            optimizer.step()
        for p in model.parameters():
            p.grad = None


def trains_noisy_weights(model: Any, optimizer: Any, batch: Batch) -> None:
    for t in range(STEPS):
        optimizer.zero_grad()
        weights = {name: p * (1 + 0.1 * t) for name, p in model.named_parameters()}
        x, y = batch(t)
        nn.functional.mse_loss(functional_call(model, weights, x), y).backward()
        optimizer.step()


def forgets_momentum(model: Any, optimizer: Any, batch: Batch) -> None:
    for t in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, batch(t)).backward()
        optimizer.step()
        if t == 2:
            optimizer.state.clear()


def begins_a_layer_anew(model: Any, optimizer: Any, batch: Batch) -> None:
    """Through a reference of its own."""
    layer = list(getattr(model, "module", model))[2]
    for t in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, batch(t)).backward()
        optimizer.step()
        torch.manual_seed(t)
        layer.reset_parameters()


def compiles_everything(model: Any, optimizer: Any, batch: Batch) -> None:
    compiled = torch.compile(model, backend="eager")
    for t in range(STEPS):
        optimizer.zero_grad()
        loss_of(compiled, batch(t)).backward()
        optimizer.step()


def loads_on_one_rank(model: Any, optimizer: Any, batch: Batch) -> None:
    kept = {name: p.clone() for name, p in model.state_dict().items()}
    for t in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, batch(t)).backward()
        optimizer.step()
        if t == 2 and rank() == 0:
            model.load_state_dict(kept)


def steps_twice(model: Any, optimizer: Any, batch: Batch) -> None:
    for t in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, batch(t)).backward()
        optimizer.step()
        optimizer.step()


def survives_an_error(model: Any, optimizer: Any, batch: Batch) -> None:
    """In the middle of the third backward."""

    def fail(_: Tensor) -> None:
        raise MemoryError

    for t in range(STEPS):
        optimizer.zero_grad()
        x, y = batch(t)
        parts = list(getattr(model, "module", model))
        middle = parts[1](parts[0](x))
        if t == 2:
            middle.register_hook(fail)
        with contextlib.suppress(MemoryError):
            nn.functional.mse_loss(parts[2](middle), y).backward()
            optimizer.step()
        model(x)  # the next iteration of a prepared model begins with its forward


def steps_after_an_error(model: Any, optimizer: Any, batch: Batch) -> None:
    """The third backward raises in its middle, and the script steps all the same."""
    _step_after_an_error(model, optimizer, batch, 2)


def steps_after_a_first_error(model: Any, optimizer: Any, batch: Batch) -> None:
    """The first backward raises, in an iteration that compares replicas in its step."""
    _step_after_an_error(model, optimizer, batch, 0)


def _step_after_an_error(model: Any, optimizer: Any, batch: Batch, broken: int) -> None:

    def fail(_: Tensor) -> None:
        raise MemoryError

    def let_backward_fail(_: Any, __: Any, output: Tensor) -> None:
        output.register_hook(fail)

    middle = list(getattr(model, "module", model))[1]
    for t in range(STEPS):
        optimizer.zero_grad()
        handle = middle.register_forward_hook(let_backward_fail) if t == broken else None
        with contextlib.suppress(MemoryError):
            loss_of(model, batch(t)).backward()
        optimizer.step()
        if handle is not None:
            handle.remove()


def steps_another_optimizer(model: Any, optimizer: Any, batch: Batch) -> None:  # noqa: ARG001
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    for t in range(STEPS):
        other.zero_grad()
        loss_of(model, batch(t)).backward()
        other.step()


def steps_the_given_optimizer(model: Any, optimizer: Any, batch: Batch) -> None:
    given = getattr(optimizer, "inner", optimizer)
    for t in range(STEPS):
        given.zero_grad()
        loss_of(model, batch(t)).backward()
        given.step()


def steps_by_two_optimizers(model: Any, optimizer: Any, batch: Batch) -> None:
    """The second has the parameter that the first does not have."""
    other = torch.optim.SGD([list(model.parameters())[-1]], lr=0.1)
    for t in range(STEPS):
        loss_of(model, batch(t)).backward()
        optimizer.step()
        other.step()
        model.zero_grad()


def wraps_in_ddp(model: Any, optimizer: Any, batch: Batch) -> None:  # noqa: ARG001
    nn.parallel.DistributedDataParallel(model)(batch(0)[0])


# ---- running them ---------------------------------------------------------------------------


def trained(script: Script, momentum: float) -> list[Tensor]:
    """Weights after a script on one process that has all data."""
    model, optimizer = build(momentum)
    script(model, optimizer, all_batches)
    return [p.detach() for p in model.parameters()]


def ends(cases: list[tuple[Strategy, int, bool]]) -> list[str]:
    """What this rank prints at the end of jobs of (strategy, iterations, whether replicas are
    consolidated before the last iteration or after it)."""
    printed = []
    for strategy, iterations, is_last in cases:
        model, optimizer = build(0.0)
        require_group()
        profile = profile_of(model) if isinstance(strategy, Planned) else None
        mine, steps = offbeat.prepare(model, optimizer, strategy, profile=profile, timeout_s=20.0)
        for t in range(iterations):
            if t == iterations - 1 and not is_last:
                mine.consolidate()
            loss_of(mine, batch_of(t, rank())).backward()
            steps.step()
            steps.zero_grad()
        if is_last:
            mine.consolidate()
            heartbeat = mine._session.cluster.control._heartbeat
            assert heartbeat is not None
            assert heartbeat.activity == IN_SCRIPT
        state, errors = torch.get_rng_state(), io.StringIO()
        with contextlib.redirect_stderr(errors):
            mine.close()
        assert torch.equal(torch.get_rng_state(), state)
        printed.append(" ".join(errors.getvalue().split()))
    return printed


def require_group() -> None:
    """The profile needs to know the number of ranks."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")


def outcomes(
    cases: list[tuple[Script, Strategy]], momentum: float, timeout_s: float = 20.0
) -> list[list[Tensor] | str]:
    """Of each script under a strategy on this rank: its weights, or how it failed."""
    found: list[list[Tensor] | str] = []
    for script, strategy in cases:
        model, optimizer = build(momentum)
        require_group()
        options = {"profile": profile_of(model), "timeout_s": timeout_s}
        mine, steps = offbeat.prepare(model, optimizer, strategy, **options)
        try:
            script(mine, steps, lambda t: batch_of(t, rank()))
            found.append([p.detach().clone() for p in mine.parameters()])
        except (RuntimeError, ValueError) as error:
            found.append(f"{type(error).__name__}: {error}")
        mine.close()
    return found


def begins_anew(strategy: Strategy) -> tuple[str, list[Tensor]]:
    """A job that fails by one rank's NaN, closes, and is prepared again in the same processes:
    what was said, and the weights in the end."""
    said, weights = "", list[Tensor]()
    for fails in (True, False):
        torch.manual_seed(0)
        ends = nn.Linear(5, 6), nn.Linear(6, 3)
        model = nn.Sequential(ends[0], nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), ends[1]).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {"observe": 1, "min_bucket_bytes": 1, "timeout_s": 30}
        mine, steps = offbeat.prepare(model, optimizer, strategy, **options)
        try:
            for t in range(STEPS):
                steps.zero_grad()
                bad = float("nan") if fails and (t, rank()) == (2, 1) else 1.0
                (loss_of(mine, batch_of(t, rank())) * bad).backward()
                steps.step()
            mine.consolidate()
            weights = [p.detach().clone() for p in mine.parameters()]
        except RuntimeError as error:
            said = str(error)
        mine.close()
    return said, weights


def saves_alone(path: str) -> str:
    """Rank 0 saves, rank 1 does not; what is said."""
    model, optimizer = build(0.0)
    mine, steps = offbeat.prepare(model, optimizer, observe=1, timeout_s=3)
    loss_of(mine, batch_of(0, rank())).backward()
    steps.step()
    loss_of(mine, batch_of(1, rank())).backward()
    steps.step()
    if rank() == 0:
        try:
            offbeat.save(path, mine, steps)
        except RuntimeError as error:
            return str(error)
    return ""
