"""Micro-batches on one device: peak activation memory and time of four ways to compute a step.

    python benchmarks/cyclic_memory.py [--model transformer,resnet] [--micro 4,8] [--repetitions 5]

N micro-batches, measured: `parallel`, as N workers would have them at the same time (all forwards,
then all backwards); `interleaved`, the cyclic order; `checkpointed`, parallel, but of each child of
the model only its input is kept and the rest computed again; `accumulated`, one after the other.
Bytes are those that autograd keeps for backward (saved-tensor hooks), the most at any time in a
step. Seconds are medians [least, most] of steps in turns, without hooks. Parameters, gradients and
optimizer state are not counted; the cyclic order keeps older parameters of a stage beside the
newest ones while a backward under way needs them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from offbeat.cyclic import Activations, Interleaved, split

Batch = tuple[Tensor, Tensor]


class Block(nn.Module):
    """Of a transformer: attention and two layers, each added to what comes in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        b, t, w = x.shape
        qkv = self.qkv(self.before(x)).view(b, t, 3, self.heads, w // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, w))
        return x + self.wide(self.between(x))


class Bottleneck(nn.Module):
    """Of a ResNet, with normalization by groups of channels; `norm` makes another one, which the
    way past the body has too."""

    def __init__(
        self, given: int, inner: int, stride: int, norm: Callable[[int], nn.Module] | None = None
    ) -> None:
        super().__init__()
        taken, normal = 4 * inner, norm or partial(nn.GroupNorm, 8)
        self.body = nn.Sequential(
            nn.Conv2d(given, inner, 1, bias=False),
            normal(inner),
            nn.ReLU(),
            nn.Conv2d(inner, inner, 3, stride, 1, bias=False),
            normal(inner),
            nn.ReLU(),
            nn.Conv2d(inner, taken, 1, bias=False),
            normal(taken),
        )
        same = given == taken and stride == 1
        self.past = nn.Identity() if same else nn.Conv2d(given, taken, 1, stride, bias=False)
        if norm and not same:
            self.past = nn.Sequential(self.past, norm(taken))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.past(x))


def transformer() -> tuple[nn.Sequential, Callable[[], Batch]]:
    """12 blocks of width 192, 128 places, micro-batches of 2."""
    model = nn.Sequential(nn.Linear(32, 192), *(Block(192, 6) for _ in range(12)))
    return model, lambda: (torch.randn(2, 128, 32), torch.randn(2, 128, 192))


def resnet() -> tuple[nn.Sequential, Callable[[], Batch]]:
    """The 16 blocks of ResNet-50 at a quarter of its width, images of 64, micro-batches of 2."""
    blocks: list[nn.Module] = [nn.Conv2d(3, 16, 7, 2, 3, bias=False)]
    given = 16
    for inner, count, stride in ((16, 3, 1), (32, 4, 2), (64, 6, 2), (128, 3, 2)):
        for n in range(count):
            blocks.append(Bottleneck(given, inner, stride if n == 0 else 1))
            given = 4 * inner
    model = nn.Sequential(*blocks)
    return model, lambda: (torch.randn(2, 3, 64, 64), torch.randn(2, 512, 4, 4))


MODELS = {"transformer": transformer, "resnet": resnet}


def ways(
    make: Callable[[], tuple[nn.Sequential, Callable[[], Batch]]], micro: int
) -> dict[str, tuple[nn.Module, Callable[[], None]]]:
    """By name: a model, and one step of its training."""
    found: dict[str, tuple[nn.Module, Callable[[], None]]] = {}
    for name in ("parallel", "interleaved", "checkpointed", "accumulated"):
        torch.manual_seed(0)
        model, batch = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        batches = [batch() for _ in range(micro)]
        if name == "interleaved":
            stages = split(model, micro, batches[0][0], balance="flops")
            trainer = Interleaved(stages, optimizer, nn.functional.mse_loss)

            def step(trainer: Interleaved = trainer, batches: list[Batch] = batches) -> None:
                trainer.step(batches)

        else:

            def step(
                name: str = name,
                model: nn.Sequential = model,
                optimizer: torch.optim.Optimizer = optimizer,
                batches: list[Batch] = batches,
            ) -> None:
                optimizer.zero_grad()
                losses = []
                for x, y in batches:
                    if name == "checkpointed":
                        for child in model:
                            x = checkpoint(child, x.requires_grad_(), use_reentrant=True)
                    else:
                        x = model(x)
                    losses.append(nn.functional.mse_loss(x, y) / micro)
                    if name == "accumulated":
                        losses.pop().backward()
                for loss in losses:
                    loss.backward()
                optimizer.step()

        found[name] = model, step
    return found


def main() -> None:
    """A table of each model and number of micro-batches."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", default="transformer,resnet")
    parser.add_argument("--micro", default="4,8")
    parser.add_argument("--repetitions", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for model in args.model.split(","):
        for micro in map(int, args.micro.split(",")):
            print(f"\n{model}, {micro} micro-batches; (N+1)/(2N) = {(micro + 1) / (2 * micro):.3f}")
            contestants = ways(MODELS[model], micro)
            peaks = {}
            for name, (module, step) in contestants.items():
                # What began in one step ends in the next: the first ones are not complete.
                meter = Activations(module.parameters)
                with meter:
                    for _ in range(3):
                        step()
                peaks[name] = meter.peak_bytes
            times: dict[str, list[float]] = {name: [] for name in contestants}
            for _ in range(args.repetitions):
                for name, (_, step) in contestants.items():
                    begin_s = time.perf_counter()
                    step()
                    times[name].append(time.perf_counter() - begin_s)
            for name, seconds in times.items():
                ratio = median(a / b for a, b in zip(seconds, times["parallel"], strict=True))
                share = peaks[name] / peaks["parallel"]
                print(
                    f"  {name:12} {peaks[name] / 1e6:8.1f} MB, {share:.3f} "
                    f"of parallel; {1e3 * median(seconds):.0f} [{1e3 * min(seconds):.0f}, "
                    f"{1e3 * max(seconds):.0f}] ms, {ratio:.3f} of parallel"
                )


if __name__ == "__main__":
    main()
