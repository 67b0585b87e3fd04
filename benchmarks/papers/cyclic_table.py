"""Table 1 of Cyclic Data Parallelism: from timetables, and measured on processes of this machine.

    python benchmarks/papers/cyclic_table.py [--sizes 2,3,4] [--out DIR]

N processes (or 1, or N(N+1)/2) train a chain of N stages for some iterations by each placement.
Compute time is emulated: every stage sleeps 10 ms forward and 20 ms backward, so that more
processes than cores do not disturb each other. Numbers, messages and memory are real: activations
are the bytes that autograd keeps on a process at most, "held" its parameters of all versions,
gradients and optimizer state. With --out the timelines are drawn, measured beside simulated with
the measured times of stages.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from offbeat.cyclic import Interleaved, Record, merge_records, recording
from offbeat.cyclic.record import TimetableRun
from offbeat.cyclic.timetable import PLACEMENTS, Placement, Timetable
from offbeat.strategies import Cyclic

sys.path.insert(0, str(Path(__file__).parents[1]))  # modules that benchmarks share

from timetable_costs import StageFacts, costs, simulate
from timetable_page import Panel, page

WIDTH, ROWS, LAYERS, ITERATIONS = 128, 64, 4, 6
FORWARD_S, BACKWARD_S = 0.010, 0.020
SET = ROWS * WIDTH * 4 * LAYERS  # bytes that a stage keeps, without its input
STAGE = 4 * LAYERS * (WIDTH * WIDTH + WIDTH)  # bytes of its parameters


class Sleep(torch.autograd.Function):
    """Takes its time, both ways."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:  # noqa: ARG004
        time.sleep(FORWARD_S)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:  # noqa: ARG004
        time.sleep(BACKWARD_S)
        return gradient


class Stage(nn.Module):
    """Some layers."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return Sleep.apply(self.layers(x))


def train(rank: int, n: int, placement: Placement, rule: str, port: int, out: str) -> None:
    """One process."""
    torch.set_num_threads(1)
    table = Timetable(placement, n)
    if placement != "single":
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        dist.init_process_group("gloo", rank=rank, world_size=table.devices)
    torch.manual_seed(0)
    model = nn.Sequential(*[Stage() for _ in range(n)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    strategy = Cyclic(rule=rule)  # type: ignore[arg-type]
    trainer = Interleaved([*model], optimizer, nn.functional.mse_loss, strategy, placement, 30)
    batches = [(torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)) for _ in range(n)]
    with recording(trainer) as record:
        for _ in range(ITERATIONS):
            trainer.step(batches)
        trainer.finish()
    torch.save(record, Path(out, f"{rank}.pt"))
    if dist.is_initialized():
        dist.destroy_process_group()


def run(n: int, placement: Placement, rule: str) -> list[Record]:
    """All processes."""
    with tempfile.TemporaryDirectory() as out, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        devices = Timetable(placement, n).devices
        mp.spawn(train, (n, placement, rule, port, out), nprocs=devices)
        return [torch.load(Path(out, f"{r}.pt"), weights_only=False) for r in range(devices)]


def stages(measured: TimetableRun, n: int) -> StageFacts:
    """Median seconds of every stage, and what is known of sizes."""

    def took(stage: int, backward: bool) -> float:
        works = [d for d in measured.works if (d.work.stage, d.work.backward) == (stage, backward)]
        return median(d.end_s - d.begin_s for d in works)

    forward_s, backward_s = ([took(j, backward) for j in range(n)] for backward in (False, True))
    return StageFacts(forward_s, backward_s, [float(SET)] * n)


def row(n: int, placement: Placement, rule: str) -> tuple[str, list[Panel]]:
    """Measured beside the timetable, of the iterations in the middle."""
    table = Timetable(placement, n)
    records = run(n, placement, rule)
    measured = merge_records(table, records)
    facts = stages(measured, n)
    simulated = simulate(table, facts, ITERATIONS)
    found = costs(table)
    busy = range(table.period, table.period * ITERATIONS - 1)
    sent = [(m, size) for record in records for m, _, size in record.sent if m.sent in busy]
    steps = {(m.sent, m.source): 0 for m, _ in sent}
    for m, _ in sent:
        steps[m.sent, m.source] += 1
    model = sum(size for m, size in sent if m.what not in ("activation", "gradient"))
    volume = model / len(busy) / (n * STAGE)
    text = (
        f"| {n} | {placement} {rule} | {len(records)} | {found.activations:.3f} | "
        f"{max(r.peak_activation_bytes for r in records) / (n * SET):.3f} | "
        f"{found.parameters:.2f} | {max(r.peak_held_bytes for r in records) / (n * STAGE):.2f} | "
        f"{volume:.2f} | {found.messages} | {max(steps.values(), default=0)} | "
        f"{1e3 * simulated.iteration_s:.0f} | {1e3 * measured.iteration_s:.0f} |"
    )
    panels = [
        Panel(f"{placement}, {rule}", source, one, facts, "s")
        for source, one in (("simulated", simulated), ("measured", measured))
    ]
    return text, panels


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="2,3,4")
    parser.add_argument("--rules", default="v2,v1")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    print(
        "| N | placement, rule | devices | activations | measured | stages of the model | "
        "held, measured (models) | sent per time step (models) | messages | measured | "
        "ms simulated | measured |\n|" + "---|" * 12
    )
    for n in map(int, options.sizes.split(",")):
        panels: list[Panel] = []
        for placement in PLACEMENTS:
            for rule in options.rules.split(","):
                text, drawn = row(n, placement, rule)
                panels += drawn if rule == "v2" else []
                print(text, flush=True)
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            title = f"{n} micro-batches in {n} stages"
            options.out.joinpath(f"timetable{n}.html").write_text(page(title, panels))


if __name__ == "__main__":
    main()
