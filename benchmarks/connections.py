"""All-reduces over links with 1, 2 and 4 connections, on clean, distant and lossy links.

    python benchmarks/connections.py

One launch per link and number of ranks. All counts of connections alternate in it. A turn is a
pause of .5 s, in which compute would run, a barrier, one message, and two more back to back. So the
first message is one after a pause, and the other two are in the middle of traffic. Rank 0 measures.
TCP has cubic and returns to its initial window after a pause, as Linux does by default (in other
labs it does not), except for the link with "window kept". If other processes took more than 30 % of
the processors, the launch is repeated once, and the less disturbed one counts. Needs root, or user
namespaces; about 12 minutes.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

COUNTS = (1, 2, 4)
SIZES_BYTES = {"64 KB": 64 << 10, "4 MB": 4 << 20}
REPETITIONS = 5
PAUSE_S = 0.5
FOREIGN = 0.3
KEPT = ", window kept"
# rate, one-way delay, loss, further setting, numbers of ranks
LINKS: tuple[tuple[str, str | None, float, str, tuple[int, ...]], ...] = (
    ("100 Mbit/s", None, 0.0, "", (2, 4)),
    ("1 Gbit/s", None, 0.0, "", (2, 4)),
    ("100 Mbit/s", "20ms", 0.0, "", (2, 4)),
    ("100 Mbit/s", "50ms", 0.0, "", (2, 4)),
    ("1 Gbit/s", "20ms", 0.0, "", (2,)),
    ("100 Mbit/s", "20ms", 0.001, "", (2,)),
    ("100 Mbit/s", "50ms", 0.0, KEPT, (2,)),
)
UNITS = {"100 Mbit/s": "100mbit", "1 Gbit/s": "1gbit"}
INITIAL_WINDOW = Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle")


def main() -> None:
    """Measure all links and write the result."""
    import tables

    paused: list[list[Any]] = []
    following: list[list[Any]] = []
    for rate, delay, loss, setting, hosts in LINKS:
        for ranks in hosts:
            asked = (ranks, UNITS[rate], delay, loss, setting)
            times, foreign, load = launched(*asked)
            if foreign > FOREIGN:
                again = launched(*asked)
                times, foreign, load = min((times, foreign, load), again, key=lambda x: x[1])
            words = [rate, delay and delay.replace("ms", " ms"), loss and f"{loss:.1%} lost"]
            link = ", ".join(word for word in words if word) + setting
            for size in SIZES_BYTES:
                for rows, name in ((paused, "paused"), (following, "following")):
                    cells = [spread(times[f"{name} {size} {count}"]) for count in COUNTS]
                    gain = round(cells[0][0] / min(cell[0] for cell in cells[1:]), 2)
                    row = [f"{link}; {ranks} ranks, {size}", *cells, gain]
                    rows.append([*row, round(100 * foreign), round(load, 1)])
                    print(rows[-1], flush=True)
            tables.save("connections", result(paused, following))


def launched(
    ranks: int, rate: str, delay: str | None, loss: float, setting: str
) -> tuple[dict[str, list[float]], float, float]:
    """Return seconds by message, the processors' share of other processes, and the load average."""
    from offbeat.jobs.machine_load import LoadSampler
    from offbeat.lab import Cluster, Lab, launch

    load = os.getloadavg()[0]
    cluster = Cluster.simple(ranks, rate, latency=delay, loss=loss)
    with Lab(cluster, "connections") as lab, tempfile.TemporaryDirectory() as folder:
        shrinks = "0" if setting == KEPT else "1"
        argv = [sys.executable, __file__, "--rank", f"{folder}/times.json", shrinks]
        with LoadSampler() as sampler:
            ended = launch(lab, argv, log_dir=Path(folder, "logs"), timeout_s=400)
        if ended.problem:
            sys.exit(ended.problem)
        measured = sampler.load()
        assert measured is not None
        times = json.loads(Path(folder, "times.json").read_text())
    return times, measured.foreign, load


def rank_main(path: Path, shrinks: str) -> None:
    """Measure on one rank; rank 0 writes the seconds.

    Args:
        path: file to write.
        shrinks: "1" if TCP returns to its initial window after a pause, else "0".
    """
    import torch
    import torch.distributed as dist

    from offbeat.core.transport.cluster import connect
    from offbeat.core.transport.device import CPU
    from offbeat.core.transport.interfaces import LinkSpec

    INITIAL_WINDOW.write_text(shrinks)
    dist.init_process_group("gloo")
    specs = [LinkSpec(str(count), "eth0", "gloo", count) for count in COUNTS]
    cluster = connect(specs, torch.device("cpu"), CPU(), 60.0)
    times: dict[str, list[float]] = {}
    for size, size_bytes in SIZES_BYTES.items():
        message = torch.ones(size_bytes // 4)
        for repetition in range(REPETITIONS + 1):  # the first one opens the windows
            for count in COUNTS:
                average = cluster.links[str(count)].collectives.by_verb["all_reduce"]
                time.sleep(PAUSE_S)
                dist.barrier()
                moments_s = [time.perf_counter()]
                for _ in range(3):
                    average(message)
                    moments_s.append(time.perf_counter())
                if repetition:
                    begin_s, first_s, _, end_s = moments_s
                    times.setdefault(f"paused {size} {count}", []).append(first_s - begin_s)
                    rest_s = (end_s - first_s) / 2
                    times.setdefault(f"following {size} {count}", []).append(rest_s)
    if dist.get_rank() == 0:
        path.write_text(json.dumps(times))
    cluster.close()
    dist.destroy_process_group()


def spread(times_s: list[float]) -> list[float]:
    """Return median, least and greatest in ms."""
    values = (statistics.median(times_s), min(times_s), max(times_s))
    return [round(1e3 * value, 1) for value in values]


def result(paused: list[list[Any]], following: list[list[Any]]) -> dict[str, Any]:
    """Return the result of both tables."""
    import torch

    columns = ["link; ranks, message", *(f"{count} connections, ms" for count in COUNTS)]
    columns[1] = "1 connection, ms"
    columns += ["gain", "other processes, %", "load average before the launch"]
    kinds = {
        "paused": (paused, f"All-reduces after a pause of {PAUSE_S} s, by number of connections"),
        "following": (following, "All-reduces back to back, by number of connections"),
    }
    return {
        "title": "Several connections per link",
        "what": (
            "All-reduces of float32 over a link with 1, 2 and 4 TCP connections between two ranks, "
            "alternating in one launch. Delays are one-way. Delay and loss are made by a switch in "
            "user space, rates by the kernel. TCP has cubic, and returns to its initial window "
            'after a pause (not with "window kept"). gain: time with 1 connection over the least '
            "other time. other processes: their share of the processors during the launch."
        ),
        "how": ["measured"],
        "date": time.strftime("%Y-%m-%d"),
        "machine": (
            f"{os.cpu_count()} cores (x86-64 virtual machine), Linux 6.18, Python 3.11.7, torch "
            f"{torch.__version__.partition('+')[0]} on CPU, gloo; other processes ran beside it"
        ),
        "command": "python benchmarks/connections.py",
        "tables": [
            {
                "name": name,
                "title": title,
                "spread": f"median [least, greatest] of {REPETITIONS}",
                "columns": columns,
                "rows": rows,
            }
            for name, (rows, title) in kinds.items()
        ],
        "misses": [],
        "notes": [],
    }


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank_main(Path(sys.argv[2]), sys.argv[3])
    else:
        main()
