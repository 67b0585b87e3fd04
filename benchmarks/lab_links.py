"""Goodput of gloo all-reduce between 4 shaped hosts, against the asked rate; set-up of the lab.

    python benchmarks/lab_links.py

Bound: a ring all-reduce moves 2 (n - 1) / n of the bytes through each host's link in each
direction, so bus bandwidth = 2 (n - 1) / n * bytes / seconds can at most reach the asked rate
(about 95 % of it: headers take the rest; a small message may exceed it by the shaper's burst). All
rates are measured in one launch: they are changed while it runs. Needs torch and root, or user
namespaces; about a minute.
"""

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

HOSTS = 4
RATES = (25, 50, 100, 200)  # Mbit/s
SIZES = {"64 KB": 64 * 1024, "1 MB": 1 << 20, "4 MB": 4 << 20}
REPETITIONS = {"64 KB": 15, "1 MB": 9, "4 MB": 5}
SETUPS = 5


def main() -> None:
    """Measure the set-up time, then launch this file once per host and show what it prints."""
    from offbeat.lab import Cluster, Lab, launch

    setups_s = []
    for _ in range(SETUPS):
        with Lab(Cluster.simple(HOSTS, "25mbit")) as lab:
            setups_s.append(lab.setup_s)
    print(f"set-up of the lab: {_spread([1e3 * s for s in setups_s], 'ms')}, {SETUPS} times")
    print(f"{HOSTS} hosts, gloo all-reduce, {os.cpu_count()} cores; median [lowest, highest]")
    cluster = Cluster.simple(HOSTS, "25mbit")
    with Lab(cluster, "lab_links") as lab, tempfile.TemporaryDirectory() as folder:

        def on_line(rank: int, line: str) -> None:
            if line.startswith("please set "):
                for host in range(HOSTS):
                    lab.set_rate(host, "net", f"{line.split()[-1]}mbit")
                Path(folder, line.split()[-1]).touch()
            elif rank == 0:
                print(line, flush=True)

        argv = [sys.executable, __file__, folder]
        result = launch(lab, argv, log_dir=Path(folder, "logs"), timeout_s=85, on_line=on_line)
    if result.problem:
        sys.exit(result.problem)


def rank_main(folder: Path) -> None:
    """What every rank does: all sizes at all rates, all ranks at the same time."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    for rate in RATES:
        if dist.get_rank() == 0:
            print(f"please set {rate}", flush=True)
            while not (folder / str(rate)).exists():
                time.sleep(0.01)
        dist.barrier()
        for label, size_bytes in SIZES.items():
            tensor = torch.ones(size_bytes // 4)
            dist.all_reduce(tensor)
            times_s = [_timed(dist, tensor) for _ in range(REPETITIONS[label])]
            if dist.get_rank() == 0:
                _show(rate, label, size_bytes, times_s)
    dist.destroy_process_group()


def _timed(dist, tensor) -> float:
    dist.barrier()
    start_s = time.perf_counter()
    dist.all_reduce(tensor)
    return time.perf_counter() - start_s


def _show(rate: int, label: str, size_bytes: int, times_s: list[float]) -> None:
    moved_bits = 2 * (HOSTS - 1) / HOSTS * size_bytes * 8
    goodputs = [moved_bits / time_s / 1e6 for time_s in times_s]
    share = statistics.median(goodputs) / rate
    print(
        f"{rate:4d} Mbit/s  {label:>5s}  {_spread(goodputs, 'Mbit/s')}  {share:4.0%} of the rate  "
        f"{_spread([1e3 * s for s in times_s], 'ms')}  {len(times_s)} times"
    )


def _spread(values: list[float], unit: str) -> str:
    return f"{statistics.median(values):7.1f} [{min(values):.1f}, {max(values):.1f}] {unit}"


if __name__ == "__main__":
    if "RANK" in os.environ and len(sys.argv) == 2:
        rank_main(Path(sys.argv[1]))
    else:
        main()
