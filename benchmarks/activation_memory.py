"""Activation memory over one forward and backward, extrapolated to N workers as in Fig. 4 of
Cyclic Data Parallelism; and how far that is from an interleaved execution.

    python benchmarks/activation_memory.py [--model vit,resnet,small] [--repetitions 5]

Measured: the bytes that autograd keeps, at every moment of a real forward and backward of one
worker (each change with its time; storages count once, parameters never), without the update.
Time is the processor's, on one thread, so that other load on the machine does not count.
Extrapolated: N such workers at the same time, and each 1/N of the time behind the one before; per
worker. `allocated` is everything that is in memory, temporaries as well, but for parameters and
gradients.
`small` also runs: N micro-batches in parallel, and N stages interleaved on one device.
Reductions are medians [least, most] over repetitions.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from activation_curves import Curve, memory
from cyclic_memory import Batch, Block, Bottleneck, transformer
from figures import spread
from torch import Tensor, nn

from offbeat.cyclic import Activations, Interleaved, split

WORKERS = (4, 8, 32)
PAPER = {"vit": 0.42, "resnet": 0.30}
STAGES = 4


class ViT(nn.Module):
    """ViT-B/16 for images of 224: 12 blocks, width 768, 12 heads, 197 places."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 768, 16, 16)
        self.first = nn.Parameter(torch.zeros(1, 1, 768))
        self.places = nn.Parameter(torch.randn(1, 197, 768) * 0.02)
        self.blocks = nn.Sequential(*(Block(768, 12) for _ in range(12)))
        self.norm, self.head = nn.LayerNorm(768), nn.Linear(768, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.places
        return self.head(self.norm(self.blocks(x)[:, 0]))


def resnet50() -> nn.Module:
    """ResNet-50 with batch normalization, for images of 224."""
    norm = nn.BatchNorm2d
    begin = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), norm(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    blocks, given = [], 64
    for inner, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for n in range(count):
            blocks.append(Bottleneck(given, inner, stride if n == 0 else 1, norm))
            given = 4 * inner
    end = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000)]
    return nn.Sequential(*begin, *blocks, *end)


Loss = Callable[[Tensor, Tensor], Tensor]


def images(count: int) -> Batch:
    return torch.randn(count, 3, 224, 224), torch.randint(1000, (count,))


def made(name: str, micro_batch: int) -> tuple[nn.Module, Batch, Loss]:
    """Model, micro-batch, loss."""
    torch.manual_seed(0)
    if name == "small":
        model, batch = transformer()
        return model, batch(), nn.functional.mse_loss
    model = ViT() if name == "vit" else resnet50()
    return model, images(micro_batch), nn.functional.cross_entropy


class Traced(Activations):
    """Notes every change with its time."""

    def __init__(self, model: nn.Module) -> None:
        held = [*model.parameters(), *model.buffers()]
        super().__init__(lambda: held)
        self.seen: list[tuple[float, float]] = []

    def on_storage_saved(self, key: int, size_bytes: int) -> None:
        super().on_storage_saved(key, size_bytes)
        self.seen.append((time.process_time(), self.live_bytes))

    def on_storage_freed(self, key: int) -> None:
        super().on_storage_freed(key)
        self.seen.append((time.process_time(), self.live_bytes))


def traced(model: nn.Module, batch: Batch, loss: Loss) -> Curve:
    """Of one forward and backward: jumps where something is kept or let go."""
    model.zero_grad()
    meter = Traced(model)
    begin_s = time.process_time()
    with meter:
        loss(model(batch[0]), batch[1]).backward()
    end_s = time.process_time()
    assert meter.live_bytes == 0, "all is gone after backward"
    at_s, kept, before = [0.0], [0.0], 0.0
    for now_s, live in meter.seen:
        at_s += [now_s - begin_s] * 2
        kept += [before, live]
        before = live
    return Curve((*at_s, end_s - begin_s), (*kept, 0.0))


def allocated(model: nn.Module, batch: Batch, loss: Loss) -> Curve:
    """Everything that is allocated meanwhile, temporaries as well; gradients exist already."""
    model.zero_grad(set_to_none=False)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        loss(model(batch[0]), batch[1]).backward()
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    found = profiler.profiler.kineto_results.events()  # `profiler.events()` gives them to operators
    events = [(e.start_ns(), e.nbytes()) for e in found if e.name() == "[memory]"]
    events.sort(key=lambda event: event[0])
    begin_ns = events[0][0]
    at_s, kept, live = [0.0], [0.0], 0.0
    for now_ns, size_bytes in events:
        at_s += [(now_ns - begin_ns) / 1e9] * 2
        kept += [live, live + size_bytes]
        live += size_bytes
    return Curve(tuple(at_s), tuple(kept))


def plain_s(model: nn.Module, batch: Batch, loss: Loss) -> float:
    """Seconds of the same without hooks."""
    model.zero_grad()
    begin_s = time.process_time()
    loss(model(batch[0]), batch[1]).backward()
    return time.process_time() - begin_s


def show(name: str, curves: list[Curve], all_: list[Curve]) -> None:
    """One row for each number of workers."""
    wanted = f"{100 * PAPER[name]:.0f}" if name in PAPER else "-"
    for workers in WORKERS:
        found = [memory(one, workers) for one in curves]
        whole = [memory(one, workers) for one in all_]
        print(
            f"| {name} | {workers} | {found[0].parallel_bytes / 1e6:.1f} "
            f"| {spread([1e-6 * f.cyclic_bytes for f in found], 1)} "
            f"| {spread([100 * f.reduction for f in found], 1)} "
            f"| {whole[0].parallel_bytes / 1e6:.1f} "
            f"| {spread([100 * w.reduction for w in whole], 1)} | {wanted} |"
        )


def interleaved(curves: list[Curve]) -> None:
    """What N micro-batches keep on one device, beside N times what was extrapolated."""
    model, _ = transformer()
    _, batch = transformer()
    batches = [batch() for _ in range(STAGES)]
    with Activations(model.parameters) as parallel:
        losses = [nn.functional.mse_loss(model(x), y) for x, y in batches]
    del losses
    stages = split(model, STAGES, batches[0][0], balance="flops")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    trainer = Interleaved(stages, optimizer, nn.functional.mse_loss)
    with Activations(model.parameters) as meter:
        for _ in range(3):  # the last of a step end in the next one
            trainer.step(batches)
    trainer.finish()
    found = [memory(one, STAGES) for one in curves]
    expected = STAGES * median(f.cyclic_bytes for f in found)
    together = STAGES * found[0].parallel_bytes
    rows = [
        ("parallel", together, parallel.peak_bytes),
        ("interleaved, extrapolated over time", expected, meter.peak_bytes),
        ("interleaved, (N+1)/(2N)", (STAGES + 1) / (2 * STAGES) * together, meter.peak_bytes),
    ]
    print(f"\n{STAGES} micro-batches of `small` | expected MB | measured MB | expected is off by")
    for what, wanted, measured in rows:
        off = 100 * (wanted / measured - 1)
        print(f"| {what} | {wanted / 1e6:.1f} | {measured / 1e6:.1f} | {off:+.1f} % |")


def main() -> None:
    """The tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", default="vit,resnet,small")
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    print(
        "| model | N | parallel MB | cyclic MB | reduction % | allocated MB | % | paper % |\n"
        "|---|---|---|---|---|---|---|---|"
    )
    for name in args.model.split(","):
        model, batch, loss = made(name, args.micro_batch)
        plain_s(model, batch, loss)
        curves, all_, times = [], [], []
        for _ in range(args.repetitions):
            curves.append(traced(model, batch, loss))
            times.append(plain_s(model, batch, loss))
            all_.append(allocated(model, batch, loss))
        show(name, curves, all_)
        hooked = spread([one.period_s for one in curves], 1)
        print(f"{name}: {hooked} s with hooks, {spread(times, 1)} s without")
        if name == "small":
            interleaved(curves)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
