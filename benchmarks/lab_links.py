"""Goodput between 4 shaped hosts against the asked rate: plain sockets, gloo, several groups.

    python benchmarks/lab_links.py [MBIT_PER_S ...]

Bound: a ring all-reduce moves 2 (n - 1) / n of the bytes through each host's link in each
direction, so bus bandwidth = 2 (n - 1) / n * bytes / seconds can at most reach the asked rate
(about 95 % of it: headers take the rest; a small message may exceed it by the shaper's burst).

For each rate: a ring of plain sockets, in which every host sends to the next one for 2 s, with the
segments that TCP sent again; all-reduces over one group, and the same bytes cut in as many parts as
there are groups, all at once. Medians, [lowest, highest]. All rates are measured in one launch:
they are changed while it runs, and connections are made anew. Needs torch and root, or user
namespaces; about two minutes.
"""

import os
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from figures import spread

HOSTS = 4
RATES = (25, 50, 100, 200, 500, 1000)  # Mbit/s
SIZES_BYTES = {"64 KB": 64 * 1024, "1 MB": 1 << 20, "4 MB": 4 << 20, "16 MB": 16 << 20}
MOST_S = 3.0  # of the bound, that the repetitions of one line take
REPETITIONS = 15
GROUPS = (1, 2, 4)
FEWEST_FOR_GROUPS = 200  # Mbit/s: below it one group reaches the bound
RING_S = 2.0
PORT = 7100
SETUPS = 5


def main(rates: list[int]) -> None:
    """Measure the set-up time, then launch this file once per host and show what it prints."""
    from offbeat.lab import Cluster, Lab, launch

    setups_s = []
    for _ in range(SETUPS):
        with Lab(Cluster.simple(HOSTS, "25mbit")) as lab:
            setups_s.append(lab.setup_s)
    print(f"set-up of the lab: {spread([1e3 * s for s in setups_s], 1)} ms, {SETUPS} times")
    print(f"{HOSTS} hosts, {os.cpu_count()} cores; median [lowest, highest]")
    cluster = Cluster.simple(HOSTS, "25mbit")
    with Lab(cluster, "lab_links") as lab, tempfile.TemporaryDirectory() as folder:

        def on_line(rank: int, line: str) -> None:
            if line.startswith("please set "):
                for host in range(HOSTS):
                    lab.set_rate(host, "net", f"{line.split()[-1]}mbit")
                Path(folder, line.split()[-1]).touch()
            elif rank == 0:
                print(line, flush=True)

        argv = [sys.executable, __file__, "--rank", folder, *map(str, rates)]
        env = {f"HOST{host}": lab.address(host) for host in range(HOSTS)}
        result = launch(
            lab, argv, env=env, log_dir=Path(folder, "logs"), timeout_s=400, on_line=on_line
        )
    if result.problem:
        sys.exit(result.problem)


def rank_main(folder: Path, rates: list[int]) -> None:
    """What every rank does: everything at all rates, all ranks at the same time."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    for number, rate in enumerate(rates):
        if dist.get_rank() == 0:
            print(f"please set {rate}", flush=True)
            while not (folder / str(rate)).exists():
                time.sleep(0.01)
        dist.barrier()
        _show_ring(dist, rate, PORT + number)
        groups: list[Any] = [dist.new_group() for _ in range(max(GROUPS))]
        for label, size_bytes in SIZES_BYTES.items():
            bound_s = _moved_bits(size_bytes) / rate / 1e6
            repetitions = min(REPETITIONS, int(MOST_S / bound_s))
            if repetitions < 3:
                continue
            counts = GROUPS if rate >= FEWEST_FOR_GROUPS else (1,)
            times_s = _alternating(dist, groups, counts, size_bytes, repetitions)
            if dist.get_rank() == 0:
                for count in counts:
                    _show(rate, f"{label} in {count}", size_bytes, times_s[count])
        for group in groups:
            dist.destroy_process_group(group)
    dist.destroy_process_group()


# --- a ring of plain sockets ---------------------------------------------------------------------


def _show_ring(dist, rate: int, port: int) -> None:
    """All hosts send to the next one; rank 0 shows what arrived where least did, and all resent."""
    import torch

    goodput, resent, sent = _ring(dist, port)
    found = [torch.zeros(3, dtype=torch.float64) for _ in range(HOSTS)]
    dist.all_gather(found, torch.tensor([goodput, resent, sent], dtype=torch.float64))
    if dist.get_rank() == 0:
        goodputs = [one[0].item() for one in found]
        again = sum(one[1].item() for one in found)
        share = statistics.median(goodputs) / rate
        print(
            f"{rate:4d} Mbit/s  plain ring  {spread(goodputs, 1)} Mbit/s  {share:4.0%} of the rate"
            f"  {again:.0f} of {sum(one[2].item() for one in found):.0f} segments sent again"
        )


def _ring(dist, port: int) -> tuple[float, int, int]:
    """Mbit/s received; segments sent again and segments sent."""
    import threading

    rank, chunk, end_s = dist.get_rank(), bytes(1 << 18), RING_S
    with socket.create_server((os.environ[f"HOST{rank}"], port)) as server:
        dist.barrier()
        there = socket.create_connection((os.environ[f"HOST{(rank + 1) % HOSTS}"], port))
        here, _ = server.accept()
    dist.barrier()
    start_s = time.perf_counter()

    def send() -> None:
        while time.perf_counter() - start_s < end_s:
            there.sendall(chunk)
        there.shutdown(socket.SHUT_WR)

    sender = threading.Thread(target=send)
    sender.start()
    buffer, total = bytearray(1 << 20), 0
    while count := here.recv_into(buffer):
        total += count
    took_s = time.perf_counter() - start_s
    sender.join()
    again, sent = _segments(there)
    here.close()
    there.close()
    return total * 8 / took_s / 1e6, again, sent


def _segments(connection: socket.socket) -> tuple[int, int]:
    """Sent again, and sent at all (`tcpi_total_retrans`, `tcpi_segs_out` of Linux)."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
    return int.from_bytes(info[100:104], sys.byteorder), int.from_bytes(
        info[136:140], sys.byteorder
    )


# --- all-reduces ---------------------------------------------------------------------------------


def _alternating(dist, groups, counts, size_bytes: int, repetitions: int) -> dict[int, list[float]]:
    """Seconds of all-reduces of so many bytes in total, by number of groups."""
    import torch

    parts = {count: torch.ones(size_bytes // 4).chunk(count) for count in counts}
    times_s: dict[int, list[float]] = {count: [] for count in counts}
    for repetition in range(repetitions + 1):  # the first one warms up
        for count in counts:
            time_s = _timed(dist, groups, parts[count])
            if repetition:
                times_s[count].append(time_s)
    return times_s


def _timed(dist, groups, parts) -> float:
    dist.barrier()
    start_s = time.perf_counter()
    works = [
        dist.all_reduce(part, group=groups[number], async_op=True)
        for number, part in enumerate(parts)
    ]
    for work in works:
        work.wait()
    return time.perf_counter() - start_s


def _moved_bits(size_bytes: int) -> float:
    return 2 * (HOSTS - 1) / HOSTS * size_bytes * 8


def _show(rate: int, label: str, size_bytes: int, times_s: list[float]) -> None:
    goodputs = [_moved_bits(size_bytes) / time_s / 1e6 for time_s in times_s]
    share = statistics.median(goodputs) / rate
    print(
        f"{rate:4d} Mbit/s  {label:>10s}  {spread(goodputs, 1)} Mbit/s  {share:4.0%} of the rate  "
        f"{spread([1e3 * s for s in times_s], 1)} ms  {len(times_s)} times"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank_main(Path(sys.argv[2]), [int(rate) for rate in sys.argv[3:]])
    else:
        main([int(rate) for rate in sys.argv[1:]] or list(RATES))
