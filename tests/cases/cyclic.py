"""A chain of stages, and a direct transcription of the equations of cyclic data parallelism."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from offbeat.strategies import Cyclic

ITERATIONS, ROWS, WIDTH = 6, 3, 5


def chain(stages: int) -> nn.Sequential:
    torch.manual_seed(3)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(stages)]
    return nn.Sequential(*layers).double()


def batch(i: int, t: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(100 * t + i)
    x, y = torch.randn(2, ROWS, WIDTH, generator=made, dtype=torch.float64)
    return x, y


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name == "adam":
        return torch.optim.Adam(model.parameters(), lr=0.02)
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def equations(
    n: int,
    name: str,
    strategy: Cyclic,
    iterations: int = ITERATIONS,
    anew: int | None = None,
    fall: float = 1.0,
) -> tuple[list[list[float]], dict[str, Tensor]]:
    """Losses of every micro-batch, and the parameters in the end; Eq. 5 to 7, counted from 1."""
    model, rules = chain(n), strategy.rules(n)
    optimizer = optimizer_of(name, model)
    theta = {k: p.detach().clone() for k, p in model.named_parameters()}
    before, losses = theta, []
    for t in range(iterations):
        before = theta if t == anew else before
        total = {k: torch.zeros_like(p) for k, p in theta.items()}
        losses.append([])
        for i in range(1, n + 1):
            hat = {}
            for k in theta:
                j = int(k.split(".")[0]) + 1
                fresh = {"v1": False, "v2": j >= n - i + 1}.get(strategy.rule)
                fresh = rules[t % len(rules)][i - 1][n - j] if fresh is None else fresh
                hat[k] = theta[k] if fresh else before[k]
            model.load_state_dict(hat)
            model.zero_grad()
            x, y = batch(i, t)
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            losses[-1].append(loss.item())
            for k, p in model.named_parameters():
                total[k] += p.grad / n
        model.load_state_dict(theta)
        for k, p in model.named_parameters():
            p.grad = total[k]
        if strategy.clip:
            for stage in model:
                nn.utils.clip_grad_norm_(stage.parameters(), strategy.clip)
        if t or strategy.start == "repeat":
            optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] *= fall
        before, theta = theta, {k: p.detach().clone() for k, p in model.named_parameters()}
    return losses, theta
