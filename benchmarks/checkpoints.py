"""What a checkpoint costs: how long the loop waits, how long it is being written, and its size.

    python benchmarks/checkpoints.py [--layers N] [--width N] [--folder DIR]

One process, AdamW. torch.save of the same states, with fsync, is the yardstick. Takes a minute.
"""

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import nn

import offbeat

REPETITIONS = 5


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = nn.Sequential(*(nn.Linear(args.width, args.width) for _ in range(args.layers)))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    model, optimizer = offbeat.prepare(model, optimizer, "wfbp", observe=1)
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    for _ in range(3):
        iterate(model, optimizer, args.width)
    rows = {"an iteration": timed(lambda: iterate(model, optimizer, args.width))}
    waits, whole = [], []
    for _ in range(REPETITIONS):
        start = time.perf_counter()
        saving = offbeat.save(folder, model, optimizer)
        waits.append(time.perf_counter() - start)
        saving.wait()
        whole.append(time.perf_counter() - start)
    rows |= {"`save` returns after": waits, "on the disk after": whole}
    rows["torch.save"] = timed(lambda: plainly(folder / "plain", model, optimizer))
    rows["`load`"] = timed(lambda: offbeat.load(folder, model, optimizer))
    for _ in range(REPETITIONS):
        offbeat.save(folder, model, optimizer)
        rows.setdefault("an iteration beside a save", []).extend(
            timed(lambda: iterate(model, optimizer, args.width), 1)
        )
    shard = next(folder.glob("0*/rank-0"))
    print(
        f"{sum(p.nbytes for p in model.parameters()) / 1e6:.0f} MB of weights; the checkpoint has"
    )
    print(f"{sum(file.stat().st_size for file in shard.iterdir()) / 1e6:.1f} MB,")
    print(f"torch.save's file {(folder / 'plain').stat().st_size / 1e6:.1f} MB\n")
    print("| what | ms |\n|---|---|")
    for name, times in rows.items():
        least, middle, most = (1e3 * f(times) for f in (min, median, max))
        print(f"| {name} | {middle:.0f} [{least:.0f}, {most:.0f}] |")
    model.close()
    shutil.rmtree(folder)


def iterate(model: nn.Module, optimizer: torch.optim.Optimizer, width: int) -> None:
    optimizer.zero_grad()
    model(torch.randn(32, width)).square().mean().backward()
    optimizer.step()


def plainly(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with path.open("wb") as file:
        torch.save([model.state_dict(), optimizer.state_dict()], file)
        file.flush()
        os.fsync(file.fileno())


def timed(work: Callable[[], object], repetitions: int = REPETITIONS) -> list[float]:
    """Seconds of each."""
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return times


if __name__ == "__main__":
    main()
