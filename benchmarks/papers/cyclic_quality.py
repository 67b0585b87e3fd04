"""What cyclic data parallelism has learnt after equal samples, as in its authors' Table 2.

    python benchmarks/papers/cyclic_quality.py --out DIR [--models cnn,resnet,gpt]
                                        [--rules DP/v1/v2]
                                        [--seeds 0,1,2] [--rates 0.01] [--seconds 400]
    python benchmarks/papers/cyclic_quality.py --out DIR --table

Four micro-batches, four stages of even FLOPs, one process: `Interleaved` trains the numbers of four
workers. `DP` gives all micro-batches the same parameters. All rules of a seed begin with the same
weights and read the same samples in the same order. SGD with momentum and weight decay; the rate
drops to a fifth after 30, 60 and 90 % of the iterations, as the authors' does. Before a drop all
micro-batches end (`finish`), so every update has the rate of its iteration, and the held-out data
are looked at. Without `--rates` the rate is the one that suits DP best, of a seed of its own:

    python benchmarks/papers/cyclic_quality.py --out DIR --models cnn --rules DP --seeds 9
                                        --iterations 350 --rates 0.02,0.05,0.1

All 27 runs take about 25 minutes of a core. Each is appended to DIR/runs.jsonl; what is there is
left out, and no run begins after `--seconds`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise, product
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from offbeat.cyclic import Interleaved, split
from offbeat.strategies import Cyclic

sys.path.insert(0, str(Path(__file__).parents[1]))  # modules that benchmarks share

from tasks import digits, gpt

N = 4  # stages, micro-batches
MOMENTUM, DROP, DROPS = 0.9, 0.2, (0.3, 0.6, 0.9)  # of the rate, after these shares
HELD_OUT_PICTURES, HELD_OUT_WINDOWS = 900, 256
PICTURES, WINDOWS = 64, 16  # per iteration
LAYERS, WIDTH, HEADS, CONTEXT, DEVIATION = 4, 64, 4, 64, 0.1  # of the GPT, and its first weights
EARLY, LATE = 0.05, 0.1  # shares of the iterations, from both ends
DIGITS = (3, 2)  # after the point: of losses, of accuracies in percent

RULES = {
    "DP": None,
    "v1": Cyclic(rule="v1"),
    "v2": Cyclic(rule="v2"),
    "v1, skip": Cyclic(rule="v1", start="skip"),
    "random": Cyclic(rule="random"),
}

Batch = tuple[Tensor, Tensor]
Run = dict[str, Any]


def loss_of(scores: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(scores.flatten(0, -2), labels.flatten())


# ---- models ---------------------------------------------------------------------------------


def cnn() -> nn.Sequential:
    """Four convolutions and two linear layers, no normalization."""
    widths, layers = (1, 16, 32, 32, 64), []
    for n, (given, taken) in enumerate(pairwise(widths)):
        pooled = nn.MaxPool2d(2) if n == 2 else nn.Identity()
        layers.append(nn.Sequential(nn.Conv2d(given, taken, 3, padding=1), nn.ReLU(), pooled))
    hidden = nn.Sequential(nn.Flatten(), nn.Linear(16 * 64, 128), nn.ReLU())
    model = nn.Sequential(*layers, hidden, nn.Linear(128, 10))
    for matrix in (p for p in model.parameters() if p.dim() >= 2):
        nn.init.kaiming_normal_(matrix, nonlinearity="relu")
    return model


class Residual(nn.Module):
    """The basic block of a ResNet, with normalization by groups of channels."""

    def __init__(self, given: int, taken: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(given, taken, 3, stride, 1, bias=False),
            nn.GroupNorm(4, taken),
            nn.ReLU(),
            nn.Conv2d(taken, taken, 3, 1, 1, bias=False),
            nn.GroupNorm(4, taken),
        )
        same = given == taken and stride == 1
        self.past = nn.Identity() if same else nn.Conv2d(given, taken, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.past(x))


def resnet() -> nn.Sequential:
    """ResNet-18 at a quarter of its width, its beginning as the authors have it for CIFAR-10."""
    stem = nn.Sequential(nn.Conv2d(1, 16, 3, 1, 1, bias=False), nn.GroupNorm(4, 16), nn.ReLU())
    blocks, given = [], 16
    for taken, stride in product((16, 32, 64, 128), (2, 1)):
        blocks.append(Residual(given, taken, 1 if taken == 16 else stride))
        given = taken
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(given, 10))
    return nn.Sequential(stem, *blocks, head)


class Embedded(nn.Module):
    """The GPT's bytes and places."""

    def __init__(self, token: nn.Embedding, position: nn.Embedding) -> None:
        super().__init__()
        self.token, self.position = token, position

    def forward(self, tokens: Tensor) -> Tensor:
        return self.token(tokens) + self.position(torch.arange(tokens.shape[1]))


def language_model() -> nn.Sequential:
    """The GPT of the examples, as modules in a row; it begins with larger weights, as SGD hardly
    leaves those that AdamW begins with."""
    whole = gpt.GPT(LAYERS, WIDTH, HEADS, CONTEXT)
    for matrix in (p for p in whole.parameters() if p.dim() >= 2):
        nn.init.normal_(matrix, std=DEVIATION)
    head = nn.Sequential(whole.norm, whole.head)
    return nn.Sequential(Embedded(whole.token, whole.position), *whole.blocks, head)


# ---- data -----------------------------------------------------------------------------------


@cache
def pictures(size: int) -> tuple[Batch, Batch]:
    """Images of size x size and labels: to train on, and held out."""
    x, y = digits.digits()
    x = x if size == 8 else nn.functional.interpolate(x, size=(size, size), mode="bilinear")
    cut = HELD_OUT_PICTURES
    return (x[cut:], y[cut:]), (x[:cut], y[:cut])


def picture_batches(size: int, seed: int) -> Iterator[Batch]:
    """Epoch by epoch; each image is moved by at most an eighth, as crops of CIFAR-10 are."""
    (x, y), _ = pictures(size)
    by, places = size // 8, torch.arange(size)
    padded = nn.functional.pad(x, (by,) * 4)
    rng = torch.Generator().manual_seed(seed)
    while True:
        for chosen in torch.randperm(len(x), generator=rng).split(PICTURES):
            if len(chosen) < PICTURES:
                continue
            moved = torch.randint(2 * by + 1, (2, PICTURES, 1), generator=rng) + places
            rows, columns = moved[0, :, :, None], moved[1, :, None, :]
            yield padded[chosen[:, None, None], 0, rows, columns][:, None], y[chosen]


@cache
def text() -> tuple[Tensor, Batch]:
    """Bytes to train on, and held-out windows."""
    train, held_out = gpt.corpus()
    rng = torch.Generator().manual_seed(0)
    return train, gpt.batch_of(held_out, HELD_OUT_WINDOWS, CONTEXT, rng)


def text_batches(seed: int) -> Iterator[Batch]:
    """Random windows, for ever."""
    rng = torch.Generator().manual_seed(seed)
    while True:
        yield gpt.batch_of(text()[0], WINDOWS, CONTEXT, rng)


# ---- training -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """A model, its batches by seed, its held-out data; rate, weight decay, iterations."""

    model: Callable[[], nn.Sequential]
    batches: Callable[[int], Iterator[Batch]]
    held_out: Callable[[], Batch]
    rate: float
    decay: float
    iterations: int

    def quality(self, model: nn.Module) -> tuple[float, float]:
        """Held-out loss and accuracy."""
        x, y = self.held_out()
        with torch.no_grad():
            scores = torch.cat([model(part) for part in x.split(PICTURES)])
        return loss_of(scores, y).item(), (scores.argmax(-1) == y).float().mean().item()


TASKS = {
    "cnn": Task(cnn, partial(picture_batches, 8), lambda: pictures(8)[1], 0.05, 5e-4, 700),
    "resnet": Task(resnet, partial(picture_batches, 16), lambda: pictures(16)[1], 0.01, 5e-4, 350),
    "gpt": Task(language_model, text_batches, lambda: text()[1], 0.1, 1e-4, 400),
}


class Trainer(Protocol):
    def step(self, batches: Sequence[Batch], /) -> list[Tensor]: ...
    def finish(self) -> list[Tensor]: ...


class Simultaneous:
    """Data parallelism: all micro-batches have the same parameters, and end with the step."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer

    def step(self, batches: Sequence[Batch], /) -> list[Tensor]:
        self._optimizer.zero_grad()
        losses = [loss_of(self._model(x), y) for x, y in batches]
        torch.stack(losses).mean().backward()
        self._optimizer.step()
        return [loss.detach() for loss in losses]

    def finish(self) -> list[Tensor]:
        return []


def train(task: Task, rule: Cyclic | None, seed: int, rate: float) -> Run:
    """Training loss of every iteration, held-out quality before every drop and in the end."""
    begin_s = time.perf_counter()
    torch.manual_seed(seed)
    model, batches = task.model(), task.batches(seed)
    optimizer = torch.optim.SGD(model.parameters(), rate, MOMENTUM, weight_decay=task.decay)
    trainer: Trainer = Simultaneous(model, optimizer)
    if rule is not None:
        example = next(task.batches(seed))[0][: PICTURES // N]
        stages = split(model, N, example, balance="flops")
        trainer = Interleaved(stages, optimizer, loss_of, rule)
    drops = [round(share * task.iterations) for share in DROPS]
    losses, quality = [], []
    for t in range(task.iterations):
        if t in drops:
            losses += trainer.finish()
            quality.append((t, *task.quality(model)))
            optimizer.param_groups[0]["lr"] *= DROP
        losses += trainer.step([*zip(*(whole.chunk(N) for whole in next(batches)), strict=True)])
    losses += trainer.finish()
    quality.append((task.iterations, *task.quality(model)))
    means = torch.stack(losses).view(task.iterations, N).mean(1)
    return {
        "losses": [round(loss, 5) for loss in means.tolist()],
        "quality": quality,
        "took_s": time.perf_counter() - begin_s,
    }


# ---- runs and the table ---------------------------------------------------------------------


def known(out: Path) -> list[Run]:
    path = out / "runs.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def runs(options: argparse.Namespace) -> None:
    """All that are not known yet; no run begins after `--seconds`."""
    begin_s, done = time.perf_counter(), known(options.out)
    options.out.mkdir(parents=True, exist_ok=True)
    for seed, model, rule in product(options.seeds, options.models, options.rules):
        task = replace(TASKS[model], iterations=options.iterations or TASKS[model].iterations)
        for rate in options.rates or [task.rate]:
            key = {"model": model, "rule": rule, "seed": seed, "rate": rate}
            key["iterations"] = task.iterations
            if any(key.items() <= run.items() for run in done):
                continue
            if time.perf_counter() - begin_s > options.seconds:
                return
            found = train(task, RULES[rule], seed, rate)
            with (options.out / "runs.jsonl").open("a") as file:
                file.write(json.dumps(key | found) + "\n")
            last = fmean(found["losses"][-task.iterations // 10 :])
            print(key, found["quality"][-1][1:], last, f"{found['took_s']:.1f} s", flush=True)


def figures(run: Run) -> dict[str, float]:
    """What the table tells of a run; iterations are counted in shares of all."""
    losses, count = run["losses"], run["iterations"]
    early, drop, late = (round(share * count) for share in (EARLY, DROPS[0], 1 - LATE))
    _, held_out, accuracy = run["quality"][-1]
    return {
        "accuracy": 100 * accuracy,
        "held-out loss": held_out,
        f"training loss, first {EARLY:.0%}": fmean(losses[:early]),
        f"to {DROPS[0]:.0%}": fmean(losses[early:drop]),
        f"last {LATE:.0%}": fmean(losses[late:]),
    }


def later(run: Run) -> Run:
    """Its losses as if every iteration had the parameters of the one before."""
    return run | {"losses": [run["losses"][0], *run["losses"][:-1]]}


def tables(options: argparse.Namespace) -> Iterator[str]:
    """One for each model and rate with which there are runs of its whole length."""
    every = known(options.out)
    for model in options.models:
        kind = {"model": model, "iterations": TASKS[model].iterations}
        mine = [r for r in every if kind.items() <= r.items() and r["seed"] in options.seeds]
        for rate in sorted({run["rate"] for run in mine}):
            yield f"\n{model}, {kind['iterations']} iterations, rate {rate:g}\n"
            yield from table([run for run in mine if run["rate"] == rate])


def table(found: Sequence[Run]) -> Iterator[str]:
    """A row for each rule: means over seeds [least, most], and differences from DP by seed."""
    rows = {rule: [run for run in found if run["rule"] == rule] for rule in RULES}
    rows["DP, one iteration later"] = [later(run) for run in rows["DP"]]
    base = {run["seed"]: figures(run) for run in rows["DP"]}
    names = [*figures(found[0])]
    apart = names[0], names[2]
    titles = ["rule", "seeds", *names, *(f"less DP's: {name}" for name in apart)]
    yield f"| {' | '.join(titles)} |"
    yield "|" + "---|" * len(titles)
    for rule, ran in rows.items():
        told = {run["seed"]: figures(run) for run in ran if math.isfinite(run["losses"][-1])}
        lost = len(ran) - len(told)
        cells = [rule, f"{len(ran)}, {lost} diverged" if lost else str(len(ran))]
        cells += [spread(name, [one[name] for one in told.values()]) for name in names]
        for name in apart:
            less = [one[name] - base[seed][name] for seed, one in told.items() if seed in base]
            cells.append(", ".join(f"{x:+.{DIGITS[name == names[0]]}f}" for x in less))
        if ran:
            yield f"| {' | '.join(cells)} |"


def spread(name: str, values: Sequence[float]) -> str:
    """Mean [least, most]."""
    if not values:
        return ""
    shown = f".{DIGITS[name == 'accuracy']}f"
    least, most = (f"{end(values):{shown}}" for end in (min, max))
    return f"{fmean(values):{shown}}" + (f" [{least}, {most}]" if len(values) > 1 else "")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", type=lambda w: w.split(","), default=[*TASKS])
    parser.add_argument("--rules", type=lambda w: w.split("/"), default=["DP", "v1", "v2"])
    parser.add_argument("--seeds", type=lambda w: [*map(int, w.split(","))], default=[0, 1, 2])
    parser.add_argument("--rates", type=lambda w: [*map(float, w.split(","))], default=None)
    parser.add_argument("--iterations", type=int)
    parser.add_argument("--seconds", type=float, default=400.0)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.table:
        print("\n".join(tables(options)))
    else:
        runs(options)


if __name__ == "__main__":
    main()
