"""Growth with the number of ranks: plans, simulations, heartbeats, graphs of gossip, `prepare`.

    python benchmarks/scale.py model [--ranks 4,16,64,256,1024,8192]
    python benchmarks/scale.py prepare [--processes 2,4,8,16,32] [--label after]
    python benchmarks/scale.py tables

`model` takes one process: seconds and peak memory of plans and simulations, of one read of the
heartbeat at rank 0, and of the constants of a graph. `prepare` starts real processes on the
loopback interface, which all prepare the same small model from a given profile: processor seconds,
open files, threads, and the traffic of each process with the store by the counters of its TCP
connections. With `--lazy`, gloo connects two ranks with their first message. `tables` fits
`a + b N + c N^2` with non-negative terms to what `prepare` has measured, and writes
results/scale.json. Parts are kept in `--out`, and a second start goes on from there. `model` takes
about 3 minutes, `prepare` about 2. Processor seconds do not need a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import resource
import socket
import struct
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import tables

from offbeat.core.strategy.parsing import parse
from offbeat.plan import INSIDE, check
from offbeat.profile import Bucket, Link, Profile
from offbeat.sim import predict_plan

RANKS = (4, 16, 64, 256, 1024, 8192)
PROCESSES = (2, 4, 8, 16, 32)
TARGETS = (64, 1024, 8192)
STRATEGIES = {
    "wfbp": 8192,
    "dreamddp:period=8": 8192,
    "diloco:period=50": 8192,
    "deft": 8192,
    "noloco:period=50": 64,
}  # with the largest number of ranks that is tried
NODE = 8  # ranks of each replica of plans with nodes
WITH_NODES = ("wfbp", "dreamddp:period=8", "diloco:period=50")
BUCKETS, BUCKET_BYTES = 24, 4 << 20
RECEIVED_BYTES = 480  # most bytes that the host of the store receives in a heartbeat
GRAPHS = {"ring": 8192, "exponential": 8192, "torus": 1024}
# Offsets in `struct tcp_info` of linux/tcp.h: acknowledged and received bytes, segments with data.
TCP_INFO_BYTES, BYTES, SEGMENTS_SENT = 160, 120, 156


def profile_of(replicas: int, *, node: int = 1, unlike: bool = False) -> Profile:
    """Return a profile of equal buckets on a link of 10 Gbit/s, with `node` ranks per replica."""
    rate = 1.25e9 * replicas / (2 * (replicas - 1))
    return Profile(
        tuple(Bucket(f"h.{i}", 2e-3, 4e-3, BUCKET_BYTES) for i in range(BUCKETS)),
        (Link("net", 3e-4 * (replicas - 1), rate),),
        replicas,
        update_s=5e-3,
        rank_scale=tuple(1 + 0.2 * k / replicas for k in range(replicas)) if unlike else (),
        jitter=0.05 if unlike else 0.0,
        topology=(node,) * replicas if node > 1 else (),
        inside=Link(INSIDE, 1e-5, 2.5e10) if node > 1 else None,
    )


# ---- one process ----------------------------------------------------------------------------


def cost_of(act: Callable[[], Any]) -> tuple[float, float]:
    """Return the seconds of a call, and the MB at its peak in a second call."""
    start_s = time.process_time()
    act()
    seconds = time.process_time() - start_s
    tracemalloc.start()
    act()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return seconds, peak / 1e6


def planning(text: str, replicas: int, node: int = 1) -> dict[str, float]:
    """Return the costs of the plan of a strategy and of its simulation, for equal hosts and not."""
    strategy, costs = parse(text), dict[str, float]()
    for name, unlike in (("equal", False), ("unlike", True)):
        profile = profile_of(replicas, node=node, unlike=unlike)
        plan = strategy.plan(profile)
        if name == "equal":
            costs["plan_s"], costs["plan_mb"] = cost_of(partial(strategy.plan, profile))
            costs["transfers"] = len(plan.transfers)
            start_s = time.process_time()
            assert not check(plan, profile)
            costs["check_s"] = time.process_time() - start_s
        seconds, megabytes = cost_of(partial(predict_plan, plan, profile))
        costs |= {f"{name}_s": seconds, f"{name}_mb": megabytes}
    return costs


class _DictStore:
    """Store in memory, with the requests that a heartbeat makes."""

    def __init__(self) -> None:
        self.values = dict[str, bytes]()

    def set(self, key: str, value: str | bytes) -> None:
        self.values[key] = value.encode() if isinstance(value, str) else value

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.values[key] for key in keys]

    def compare_set(self, key: str, _expected: str, desired: str) -> bytes:
        return self.values.setdefault(key, desired.encode())


def heartbeat(ranks: int) -> dict[str, float]:
    """Return the costs of a read of rank 0, and the times that follow from the number of
    ranks."""
    from offbeat.core.transport import heartbeat as module
    from offbeat.core.transport.failure_detector import interval_s

    store: Any = _DictStore()
    first = module.Heartbeat(store, 0, ranks)
    status = [812, module.RUNNING, "in backward, waiting for grad of bucket layers.10.fc2", []]
    for rank in range(1, ranks):
        store.set(str(rank), json.dumps([7, status], separators=(",", ":")))
    first._exchange_heartbeats()
    seconds = cost_of(first._exchange_heartbeats)[0]
    detector = first.detector
    return {
        "interval_s": interval_s(ranks),
        "timeout_s": detector.timeout_s,
        "received_kbps": 8 * RECEIVED_BYTES * (ranks - 1) / interval_s(ranks) / 1e3,
        "read_s": seconds,
        "busy_share": seconds / detector.poll_s,
        "table_kb": len(store.values[module.TABLE]) / 1e3,
    }


def graph(name: str, ranks: int) -> dict[str, float]:
    """Return the costs of a graph of gossip and of its constants."""
    from offbeat.gossip.graphs import constants, edge_rates, topology

    seconds, megabytes = cost_of(lambda: constants(edge_rates(topology(name, ranks)), ranks))
    return {"seconds": seconds, "mb": megabytes}


def model_parts(ranks: Sequence[int]) -> Iterator[tuple[str, Callable[[], Any]]]:
    for count in ranks:
        yield f"heartbeat|{count}", partial(heartbeat, count)
        for text, most in STRATEGIES.items():
            if count <= most:
                yield f"{text}|{count}", partial(planning, text, count)
        for text in WITH_NODES if count > RANKS[0] * NODE else ():
            yield f"{text}|{count // NODE} x {NODE}", partial(planning, text, count // NODE, NODE)
        for name, most in GRAPHS.items():
            if count <= most:
                yield f"graph {name}|{count}", partial(graph, name, count)


# ---- real processes -------------------------------------------------------------------------


def store_traffic(port: int) -> dict[str, int]:
    """Return bytes and segments with data that this process has exchanged with the store, over the
    connections that are open."""
    sent = received = requests = connections = 0
    for path in [*Path("/proc/self/fd").iterdir()]:
        try:
            one = socket.socket(fileno=os.dup(int(path.name)))
        except OSError:
            continue
        with one:
            try:
                if one.getpeername()[1] != port:
                    continue
                info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
            except (OSError, IndexError):
                continue
        out, back = struct.unpack_from("QQ", info, BYTES)
        sent, received = sent + out, received + back
        requests += struct.unpack_from("I", info, SEGMENTS_SENT)[0]
        connections += 1
    return {
        "store_sent": sent,
        "store_received": received,
        "store_requests": requests,
        "store_connections": connections,
    }


def life(pipe: Any, rank: int, ranks: int, port: int, *, lazy: bool) -> None:
    """Prepare and train one iteration; send what it took."""
    import torch

    import offbeat

    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCH_GLOO_LAZY_INIT": str(int(lazy)),
    }
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(16)))
    sizes = [sum(p.nbytes for p in layer.parameters()) for layer in model]
    names = [tuple(f"{i}.{name}" for name in ("weight", "bias")) for i in range(16)]
    facts = list(zip(sizes, names, strict=True))[::-1]
    buckets = tuple(Bucket(n[0], 1e-3, 2e-3, size, tensors=n) for size, n in facts)
    profile = Profile(buckets, (Link("lo", 1e-3, 1e8),), ranks)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    pipe.recv()
    spent_s, start_s = time.process_time(), time.perf_counter()
    model, optimizer = offbeat.prepare(
        model, optimizer, "local-sgd:period=4", profile=profile, links=["lo"], timeout_s=300.0
    )
    found = {"cpu_s": time.process_time() - spent_s, "s": time.perf_counter() - start_s}
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
    found |= store_traffic(port)
    control, begun_s = model._session.cluster.control, time.perf_counter()
    for _ in range(10):
        control.gather(rank)
    found["gather_s"] = (time.perf_counter() - begun_s) / 10
    found["files"] = len([*Path("/proc/self/fd").iterdir()])
    found["threads"] = len([*Path("/proc/self/task").iterdir()])
    found["mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    pipe.send(found)
    pipe.recv()  # all ranks measure while all are connected
    model.close()
    pipe.send(None)
    pipe.recv()  # the store of rank 0 outlives the other ranks
    os._exit(0)


def prepare(ranks: int, *, lazy: bool) -> dict[str, float]:
    """Return the costs of a job: of the rank with the largest cost, or the sum over all ranks."""
    context = multiprocessing.get_context("fork")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pipes, processes = [], []
    for rank in range(ranks):
        here, there = context.Pipe()
        process = context.Process(
            target=life, args=(there, rank, ranks, port), kwargs={"lazy": lazy}, daemon=True
        )
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    try:
        for pipe in pipes:
            pipe.send(None)
        rows = [pipe.recv() for pipe in pipes]
        for pipe in pipes:
            pipe.send(None)
        for pipe in pipes:
            pipe.recv()
        for pipe in pipes:
            pipe.send(None)
    finally:
        for process in processes:
            process.join(10)
            process.kill()
    most = ("s", "gather_s", "files", "threads", "store_received", "store_requests", "mb")
    costs = {name: max(row[name] for row in rows[1:]) for name in most}
    costs["files of rank 0"] = rows[0]["files"]  # with its end of each connection to the store
    costs["cpu_s"] = median(row["cpu_s"] for row in rows)
    costs["cpu_s of rank 0"] = rows[0]["cpu_s"]
    for name in ("store_sent", "store_received", "store_requests", "store_connections"):
        costs[f"all {name}"] = sum(row[name] for row in rows)
    return costs


# ---- fits and tables ------------------------------------------------------------------------


def fit(ranks: Sequence[float], values: Sequence[float]) -> tuple[float, float, float]:
    """Return (a, b, c) of `a + b N + c N^2`, none negative, with the least relative error."""
    n, y = np.array(ranks, dtype=float), np.array(values, dtype=float)
    terms = np.stack([n**0, n, n**2], axis=1) / y[:, None]
    best, least = np.zeros(3), np.inf
    for count in (1, 2, 3):
        for chosen in combinations(range(3), count):
            columns = terms[:, chosen]
            found = np.linalg.lstsq(columns, np.ones(len(y)), rcond=None)[0]
            error = float(((columns @ found - 1) ** 2).sum())
            # A further term must explain at least a tenth of the remaining error.
            if (found >= 0).all() and error < 0.9 * least:
                best, least = np.zeros(3), error
                best[list(chosen)] = found
    return float(best[0]), float(best[1]), float(best[2])


def at(terms: Sequence[float], ranks: int) -> float:
    return terms[0] + terms[1] * ranks + terms[2] * ranks**2


def digits(value: float) -> float | int:
    """Return a number with three digits."""
    short = float(f"{value:.3g}")
    return int(short) if short >= 100 else short


MEASURED = (
    ("processor seconds of a rank", "cpu_s", 1.0),
    ("open files of rank 0, which hosts the store", "files of rank 0", 1.0),
    ("threads of a rank", "threads", 1.0),
    ("KB that a rank receives from the store", "store_received", 1e-3),
    ("requests of a rank to the store", "store_requests", 1.0),
    ("MB that the store sends", "all store_received", 1e-6),
    ("MB of memory of a rank, with torch", "mb", 1.0),
    ("ms of an exchange of one number between all ranks, on two cores", "gather_s", 1e3),
)


def prepare_table(known: Mapping[str, Any], label: str, title: str) -> dict[str, Any] | None:
    """Return the table of one series of runs, with fits; None if it was not measured."""
    runs = {int(k.split("|")[1]): v for k, v in known.items() if k.startswith(f"{label}|")}
    counts = sorted(runs)
    if len(counts) < 3:
        return None
    rows = []
    for text, name, unit in MEASURED:
        values = [runs[n][name] * unit for n in counts]
        terms = fit(counts, values)
        # Seconds of many processes on two cores say nothing about as many hosts.
        grown = [None if name == "gather_s" else digits(at(terms, n)) for n in TARGETS]
        rows.append(
            [
                text,
                *map(digits, values),
                *(None if n in runs else g for n, g in zip(TARGETS, grown, strict=True)),
            ]
        )
    columns = ["", *(f"{n} ranks" for n in counts), *(f"{n:,} (fit)" for n in TARGETS)]
    name = label.replace(" ", "-")
    return {"name": name, "title": title, "how": ["measured"], "columns": columns, "rows": rows}


def planning_table(known: Mapping[str, Any], ranks: Sequence[int]) -> dict[str, Any]:
    rows = []
    for text in STRATEGIES:
        nodes = [(f"{count // NODE} x {NODE}", f"{count // NODE:,} x {NODE}") for count in ranks]
        for part, shown in (*((str(count), f"{count:,}") for count in ranks), *nodes):
            found = known.get(f"{text}|{part}")
            if found is not None:
                keys = ("plan_s", "plan_mb", "check_s", "equal_s", "unlike_s", "unlike_mb")
                rows.append([f"{text}, {shown}", *(digits(found[key]) for key in keys)])
    columns = [
        "strategy, ranks, or replicas x ranks of each",
        "plan, s",
        "plan, MB",
        "check of the plan, s",
    ]
    columns += ["simulation of equal hosts, s", "of unlike hosts with jitter, s", "its MB"]
    title = "Processor seconds and peak memory of a plan, its check, and its simulation"
    return {"name": "planning", "title": title, "columns": columns, "rows": rows}


def heartbeat_table(known: Mapping[str, Any], ranks: Sequence[int]) -> dict[str, Any]:
    keys = ("interval_s", "timeout_s", "received_kbps", "busy_share", "table_kb")
    rows = [
        [f"{count:,}", *(digits(known[f"heartbeat|{count}"][key]) for key in keys)]
        for count in ranks
        if f"heartbeat|{count}" in known
    ]
    columns = ["ranks", "interval, s", "timeout, s", "received by the store, kbit/s"]
    columns += ["share of a core of rank 0", "table, KB"]
    title = "Heartbeats: times, traffic, and rank 0"
    return {"name": "heartbeats", "title": title, "columns": columns, "rows": rows}


def graph_table(known: Mapping[str, Any], ranks: Sequence[int]) -> dict[str, Any]:
    rows = []
    for count in ranks:
        cells = [known.get(f"graph {name}|{count}") for name in GRAPHS]
        found = [cell and digits(cell["seconds"]) for cell in cells]
        if any(cell is not None for cell in found):
            rows.append([f"{count:,}", *found])
    title = "Processor seconds of a graph of gossip and its constants"
    return {"name": "graphs", "title": title, "columns": ["workers", *GRAPHS], "rows": rows}


SERIES = {
    "before": "`prepare` on loopback, before agreement in logarithmic rounds",
    "after": "`prepare` on loopback, gloo connects all pairs",
    "after lazy": "`prepare` on loopback, gloo connects pairs with their first message",
}


def write(known: Mapping[str, Any], ranks: Sequence[int]) -> None:
    """Write results/scale.json."""
    import torch

    made = [prepare_table(known, label, title) for label, title in SERIES.items()]
    found = [table for table in made if table is not None]
    found += [make(known, ranks) for make in (heartbeat_table, planning_table, graph_table)]
    machine = f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}"
    result = {
        "title": "Growth with the number of ranks",
        "what": "Costs of `prepare` of real processes on one machine, with fits a + b N + c N^2; "
        "costs of plans, simulations, heartbeats and graphs of up to 8,192 ranks in one process. "
        "Processor seconds; the machine had other work.",
        "how": ["measured"],
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{machine}, torch {torch.__version__.split('+')[0]} on CPU, gloo",
        "command": "python benchmarks/scale.py model; python benchmarks/scale.py prepare; "
        "python benchmarks/scale.py tables",
        "tables": found,
        "misses": [],
        "notes": [],
    }
    tables.save("scale", result)


def remembered(path: Path, key: str, act: Callable[[], Any]) -> None:
    """Run a part unless its result is known, and keep the result."""
    known = json.loads(path.read_text()) if path.exists() else {}
    if key in known:
        return
    known[key] = act()
    path.write_text(json.dumps(known, indent=1))
    print(key, {name: digits(value) for name, value in known[key].items()}, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("model", "prepare", "tables"))
    parser.add_argument("--ranks", default=",".join(map(str, RANKS)))
    parser.add_argument("--processes", default=",".join(map(str, PROCESSES)))
    parser.add_argument("--label", default="after", help="name of a series of `prepare`")
    parser.add_argument("--lazy", action="store_true", help="gloo connects pairs when they send")
    parser.add_argument("--out", type=Path, default=Path("scale-parts.json"))
    options = parser.parse_args()
    ranks = [*map(int, options.ranks.split(","))]
    if options.what == "model":
        for key, act in model_parts(ranks):
            remembered(options.out, key, act)
    elif options.what == "prepare":
        import torch._dynamo  # noqa: F401  # imported by the first optimizer; forks share it

        import offbeat.core.runtime.prepare  # noqa: F401

        label = f"{options.label}{' lazy' if options.lazy else ''}"
        for count in map(int, options.processes.split(",")):
            key = f"{label}|{count}"
            remembered(options.out, key, partial(prepare, count, lazy=options.lazy))
    else:
        write(json.loads(options.out.read_text()), ranks)


if __name__ == "__main__":
    main()
