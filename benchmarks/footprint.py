"""Threads, sockets and files of a rank, and the seconds in which all ranks start.

    python benchmarks/footprint.py [--ranks 4,64] [--strategy dreamddp:period=4]

So many processes on the loopback, forked from one that has imported torch and offbeat. A rank that
hosts the store has the sockets of all others, so counts are those of the last rank, after
`ITERATIONS` iterations: its thread, and what training has added. Starts are the seconds from the
moment when all processes wait until the last one has returned from `prepare`, or from DDP's
constructor. With `initialized` the script has called `init_process_group` before `prepare`. The
times need a quiet machine, the counts do not.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import socket
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import offbeat

ITERATIONS = 12  # six observed ones, then the plan's
LIMIT_S = 300.0
CASES = ("ddp", "offbeat", "offbeat, initialized")


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


def train(case: str, strategy: str, observe: int = 6) -> tuple[float, dict[str, int]]:
    """Return the time of this rank's start, and its counts after training without those before."""
    before = count()
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    if case != "offbeat":
        dist.init_process_group("gloo")
    if case == "ddp":
        prepared: Any = nn.parallel.DistributedDataParallel(model)
    else:
        prepared, optimizer = offbeat.prepare(model, optimizer, strategy, observe=observe)
    started_s = time.monotonic()
    for _ in range(ITERATIONS):
        optimizer.zero_grad()
        prepared(torch.randn(4, 64)).square().mean().backward()
        optimizer.step()
    added = {what: number - before[what] for what, number in count().items()}
    return started_s, {**added, "threads": 1 + added["threads"]}


def run_rank(case: str, strategy: str, environment: dict[str, str], pipe: Any) -> None:
    """Body of one process: wait for the others, train, and report."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    pipe.send("ready")
    pipe.recv()
    pipe.send(train(case, strategy))
    pipe.recv()  # a rank that leaves closes connections of the others
    dist.barrier()
    os._exit(0)


def measure(case: str, strategy: str, ranks: int) -> tuple[float, dict[str, int]]:
    """Return the seconds of the start of all ranks, and the counts of the last one."""
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
        started_s, counts = zip(*_receive(pipes), strict=True)
        for pipe in pipes:
            pipe.send("leave")
    finally:
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()
    return max(started_s) - begun_s, counts[-1]


def _receive(pipes: list[Any]) -> list[Any]:
    end_s = time.monotonic() + LIMIT_S
    for rank, pipe in enumerate(pipes):
        if not pipe.poll(max(0.0, end_s - time.monotonic())):
            raise TimeoutError(f"rank {rank} has not answered within {LIMIT_S:g} s")
    return [pipe.recv() for pipe in pipes]


def main() -> None:
    """Print a table of all cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="4,64")
    parser.add_argument("--strategy", default="dreamddp:period=4")
    parser.add_argument("--cases", default=";".join(CASES))
    args = parser.parse_args()
    print("| ranks | case | threads | sockets | files | start, s |\n|---|---|---|---|---|---|")
    for ranks in map(int, args.ranks.split(",")):
        for case in args.cases.split(";"):
            seconds, counts = measure(case, args.strategy, ranks)
            cells = " | ".join(map(str, counts.values()))
            print(f"| {ranks} | {case} | {cells} | {seconds:.1f} |", flush=True)


if __name__ == "__main__":
    main()
