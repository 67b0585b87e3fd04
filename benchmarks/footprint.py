"""Threads, sockets and files of a rank, and the seconds in which all ranks start.

    python benchmarks/footprint.py [--ranks 4,64] [--strategy dreamddp:period=4]
    python benchmarks/footprint.py --imports    # processor seconds of a process that starts alone

So many processes on the loopback, forked from one that has imported all modules of a start. A rank
that hosts the store has the sockets of all others, so counts are those of the last rank, after
`ITERATIONS` iterations: its thread, and what training has added. Starts are the seconds from the
moment when all processes wait until the last one has returned from `prepare`, or from DDP's
constructor, and the mean processor seconds of a rank in this time. With `initialized` the script
has called `init_process_group` before `prepare`. The times need a quiet machine, the counts do not,
and processor seconds vary less.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import offbeat

ITERATIONS = 12  # six observed ones, then the plan's
LIMIT_S = 300.0
CASES = ("ddp", "offbeat", "offbeat, initialized")
STAGES = {
    "import torch": "import torch",
    "first optimizer, for which torch imports its compiler": """
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)""",
    "import offbeat.prepare": "from offbeat import prepare",
    "prepare in a world of one": "prepare(model, optimizer, STRATEGY)",
}


def count() -> dict[str, int]:
    """Return the threads, sockets and open files of this process."""
    gc.collect()  # process groups close with their last reference
    targets = []
    for path in Path("/proc/self/fd").iterdir():
        try:
            targets.append(str(path.readlink()))
        except FileNotFoundError:  # the folder itself
            continue
    threads = len(list(Path("/proc/self/task").iterdir()))
    sockets = sum(target.startswith("socket:") for target in targets)
    return {"threads": threads, "sockets": sockets, "files": len(targets)}


def train(case: str, strategy: str, observe: int = 6) -> tuple[tuple[float, float], dict[str, int]]:
    """Return the time at which this rank has started and the processor seconds of its start, and
    its counts after training without those before."""
    before, begun_s = count(), time.process_time()
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    if case != "offbeat":
        dist.init_process_group("gloo")
    if case == "ddp":
        prepared: Any = nn.parallel.DistributedDataParallel(model)
    else:
        prepared, optimizer = offbeat.prepare(model, optimizer, strategy, observe=observe)
    started = time.monotonic(), time.process_time() - begun_s
    for _ in range(ITERATIONS):
        optimizer.zero_grad()
        prepared(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
    added = {what: number - before[what] for what, number in count().items()}
    return started, {**added, "threads": 1 + added["threads"]}


def run_rank(case: str, strategy: str, environment: dict[str, str], pipe: Any) -> None:
    """Body of one process: wait for the others, train, and report with the imported modules."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    pipe.send("ready")
    pipe.recv()
    pipe.send((*train(case, strategy), [*sys.modules]))
    pipe.recv()  # a rank that leaves closes connections of the others
    dist.barrier()
    os._exit(0)


def measure(case: str, strategy: str, ranks: int) -> tuple[list[float], dict[str, int], list[str]]:
    """Return the seconds of the start of all ranks and the mean processor seconds of a rank, and
    the counts and the modules of the last one."""
    context = multiprocessing.get_context("fork")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    pipes, processes = [], []
    for rank in range(ranks):
        environment = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OFFBEAT_LOG": "off",
        }
        here, there = context.Pipe()
        process = context.Process(target=run_rank, args=(case, strategy, environment, there))
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    try:
        _receive(pipes)
        begun_s = time.monotonic()
        for pipe in pipes:
            pipe.send("start")
        started, counts, modules = zip(*_receive(pipes), strict=True)
        for pipe in pipes:
            pipe.send("leave")
    finally:
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()
    ends_s, spent_s = zip(*started, strict=True)
    return [max(ends_s) - begun_s, mean(spent_s)], counts[-1], modules[-1]


def _receive(pipes: list[Any]) -> list[Any]:
    end_s = time.monotonic() + LIMIT_S
    for rank, pipe in enumerate(pipes):
        if not pipe.poll(max(0.0, end_s - time.monotonic())):
            raise TimeoutError(f"rank {rank} has not answered within {LIMIT_S:g} s")
    return [pipe.recv() for pipe in pipes]


def import_modules_of(case: str, strategy: str) -> None:
    """Import what a start imports, so that forks of this process share it."""
    *_, modules = measure(case, strategy, 1)
    for name in sorted({*modules} - {*sys.modules}):
        with suppress(ImportError):  # some are made by other modules
            import_module(name)


def print_imports(strategy: str) -> None:
    """Print the processor seconds of a process that starts alone, and of 64 on all cores."""
    cores = os.cpu_count() or 1
    lines = ["import time", f"STRATEGY = {strategy!r}", "spent_s = [time.process_time()]"]
    for code in STAGES.values():
        lines += [code, "spent_s.append(time.process_time())"]
    code = "\n".join([*lines, "print(*spent_s)"])
    runs = []
    for _ in range(3):
        command, environment = [sys.executable, "-c", code], {**os.environ, "OFFBEAT_LOG": "off"}
        made = subprocess.run(command, env=environment, capture_output=True, check=True, text=True)
        ends_s = [*map(float, made.stdout.split()[-len(STAGES) - 1 :])]
        runs.append([end_s - begin_s for begin_s, end_s in pairwise(ends_s)])
    print(f"| | processor s of a process | of 64 on {cores} cores |\n|---|---|---|")
    for name, seconds in zip(STAGES, zip(*runs, strict=True), strict=True):
        print(f"| {name} | {median(seconds):.2f} | {64 * median(seconds) / cores:.0f} |")


def main() -> None:
    """Print a table of all cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="4,64")
    parser.add_argument("--strategy", default="dreamddp:period=4")
    parser.add_argument("--cases", default=";".join(CASES))
    parser.add_argument("--imports", action="store_true")
    args = parser.parse_args()
    if args.imports:
        print_imports(args.strategy)
        return
    for case in args.cases.split(";"):
        import_modules_of(case, args.strategy)
    print("| ranks | case | threads | sockets | files | start, s | processor s of a rank |")
    print("|---" * 7 + "|")
    for ranks in map(int, args.ranks.split(",")):
        for case in args.cases.split(";"):
            (start_s, spent_s), counts, _ = measure(case, args.strategy, ranks)
            cells = " | ".join(map(str, counts.values()))
            print(f"| {ranks} | {case} | {cells} | {start_s:.1f} | {spent_s:.2f} |", flush=True)


if __name__ == "__main__":
    main()
