"""Gossip as it runs: how fast an exchange is, what a thread without a partner costs, the mean.

    python benchmarks/gossip_runtime.py [--exchange] [--rate 50mbit] [--idle] [--decay N] [--mean N]

`--exchange`, with `--rate` between two hosts of their own (root, or user namespaces), else over
the loopback: two workers exchange a model of `--mb` as often as they can. The rate is that of one
direction; the target is 90 % of the link's. `--idle`: processor time of a gossip thread whose only
neighbour is busy for ever, and of one that has nobody; the target is 2 % of a core. `--decay`: how
fast N workers on a ring agree. `--mean`: eight processes on a ring, every fourth two times slower,
so many events: how far the mean of x drifts, relative to its norm.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from figures import spread
from talking_ranks import launch_ranks, own_address, publish, published

SECRET = b"benchmark"
SECONDS = 6.0
REPETITIONS = 3
IDLE_S = 10.0
UNIT_S = 0.1
DECAYS = 5


def main() -> None:
    """What was asked for, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--exchange", action="store_true")
    parser.add_argument("--rate")
    parser.add_argument("--mb", default="4,16")
    parser.add_argument("--repetitions", type=int, default=REPETITIONS)
    parser.add_argument("--idle", action="store_true")
    parser.add_argument("--decay", type=int)
    parser.add_argument("--mean", type=int)
    parser.add_argument("--role", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role:
        exchange_role(*args.role)
        return
    if args.exchange:
        for mb in args.mb.split(","):
            exchange(args.rate, mb, args.repetitions)
    if args.idle:
        idle()
    if args.decay:
        decay(args.decay)
    if args.mean:
        mean(args.mean)


# ---- the speed of an exchange ---------------------------------------------------------------


def exchange(rate: str | None, mb: str, repetitions: int) -> None:
    """Two workers that do nothing else."""
    found = [one for _ in range(repetitions) for one in launch_ranks(__file__, rate, 2, "", mb)]
    mb_s = [one["mb_s"] for one in found]
    share = ""
    if rate:
        from offbeat.core.units import parse_rate_bps

        full_bps = parse_rate_bps(rate) or 1
        each = [100 * 8e6 * one / full_bps for one in mb_s]
        share = f", {spread(each, 1)} % of {rate}"
    print(f"{rate or 'loopback'}, {mb} MB: {spread(mb_s, 0)} MB/s in each direction{share}")


def exchange_role(folder: str, mb: str) -> None:
    import torch

    torch.set_num_threads(1)
    rank, flat = int(os.environ["RANK"]), torch.randn(int(float(mb) * 1e6 / 4))
    door = socket.create_server((own_address(), 0))
    publish(Path(folder), door.getsockname(), rank)
    addresses = {n: published(Path(folder), n) for n in range(2)}
    worker = _worker(rank, _graph("complete", 2), flat, addresses, door, rate=50.0)
    worker.gossip.connect()
    worker.warm(UNIT_S)
    time.sleep(1.0)
    first, start_s = _next_end(worker), time.perf_counter()
    last = first
    while last < first + 3 or time.perf_counter() - start_s < SECONDS:
        last = _next_end(worker)
    taken_s = time.perf_counter() - start_s
    print(json.dumps({"mb_s": (last - first) * flat.nbytes / 1e6 / taken_s}), flush=True)
    worker.gossip.all_reduce([torch.zeros(1)])
    worker.gossip.close()


def _next_end(worker: _Worker) -> int:
    """Wait for the end of an exchange; how many there were."""
    counts = worker.gossip.counts.exchanges
    before = sum(counts.values())
    while sum(counts.values()) == before:
        time.sleep(0.0005)
    return sum(counts.values())


# ---- a thread without a partner -------------------------------------------------------------


def idle() -> None:
    """Nobody to exchange with: because the neighbour is busy, or has died."""
    import torch

    for what in ("busy", "dead"):
        workers = _job(_graph("complete", 2), [torch.randn(1000) for _ in range(2)], silent_s=1.0)
        for worker in workers:
            worker.warm(UNIT_S)
        if what == "busy":
            workers[1].gossip.pause()
        else:
            _kill(workers[1])
            time.sleep(2.0)
        native = workers[0].gossip._thread.native_id
        before, start_s = _cpu_s(native), time.perf_counter()
        for _ in range(int(IDLE_S / UNIT_S)):
            time.sleep(UNIT_S)
            workers[0].gossip.record_gradient(UNIT_S)
        share = (_cpu_s(native) - before) / (time.perf_counter() - start_s)
        print(f"the neighbour is {what}: {100 * share:.2f} % of a core")
        for worker in workers:
            worker.gossip.close()


def _cpu_s(native: int | None) -> float:
    words = Path(f"/proc/self/task/{native}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


# ---- the mean -------------------------------------------------------------------------------


def mean(events: int) -> None:
    """Eight processes, gradients of some milliseconds; until there were so many exchanges and
    gradients."""
    import torch

    context = multiprocessing.get_context("spawn")
    begin_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, context.Pool(8) as pool:
        ends = pool.starmap(_drift, [(n, folder, events) for n in range(8)], chunksize=1)
    flats, added, exchanges, gradients = zip(*ends, strict=True)
    expected = torch.stack([_start(n) for n in range(8)]).double().mean(0)
    expected += torch.stack(added).mean(0)
    drift = (torch.stack(flats).double().mean(0) - expected).norm() / expected.norm()
    spread = torch.stack(flats).std(0).norm() / expected.norm()
    print(
        f"{sum(exchanges) // 2} exchanges and {sum(gradients)} gradients ({min(gradients)}-"
        f"{max(gradients)}) of 8 processes in {time.perf_counter() - begin_s:.1f} s: the mean is "
        f"off by {float(drift):.1e} of its norm, workers by {float(spread):.2f}"
    )


def _start(n: int) -> Any:
    import torch

    return torch.randn(10_000, generator=torch.Generator().manual_seed(n))


def _drift(n: int, folder: str, events: int) -> tuple[Any, Any, int, int]:
    """One process: x, mixed to the common time; what its gradients have added; its events."""
    import torch

    torch.set_num_threads(1)
    door = socket.create_server(("127.0.0.1", 0))
    publish(Path(folder), door.getsockname(), n)
    addresses = {other: published(Path(folder), other) for other in range(8)}
    flat, added = _start(n), torch.zeros(10_000, dtype=torch.float64)
    worker = _worker(n, _graph("ring", 8), flat, addresses, door)
    worker.gossip.connect()
    own, slower, gradients = torch.Generator().manual_seed(n), 1 + (n % 4 == 3), 0
    counts = worker.gossip.counts.exchanges
    # Each exchange is two workers'; faster ones have more gradients.
    while sum(counts.values()) / 2 + gradients < events / 8:
        u = 0.01 * torch.randn(10_000, generator=own)
        worker.state.refresh()
        time.sleep(0.004 * slower)
        worker.state.step(worker.clock.now(), lambda u=u: flat.add_(u))
        worker.gossip.record_gradient(0.004 * slower)
        added += u.double()
        gradients += 1
    worker.gossip.all_reduce([torch.zeros(1)])
    worker.gossip.pause_all(max(worker.clock.now(), worker.state.t))
    worker.state.midpoint()
    worker.gossip.all_reduce([torch.zeros(1)])
    worker.gossip.close()
    return flat, added, sum(counts.values()), gradients


# ---- how fast workers agree -----------------------------------------------------------------


def decay(n: int) -> None:
    """Workers on a ring without gradients: by what the squared distance falls per unit."""
    import torch

    for momentum in (True, False):
        rates, done = [], []
        for seed in range(DECAYS):
            draws = torch.Generator().manual_seed(seed)
            one, other = (torch.randn(2000, generator=draws) for _ in range(2))
            flats = [  # what takes longest on a ring
                math.cos(math.tau * i / n) * one + math.sin(math.tau * i / n) * other
                for i in range(n)
            ]
            workers = _job(_graph("ring", n), flats, seed=seed, momentum=momentum)
            for worker in workers:
                worker.warm(UNIT_S)
            time.sleep(n * UNIT_S)  # x~ must have got under way
            begin, first, before = _standing(workers, flats)
            time.sleep(n * UNIT_S)
            end, last, after = _standing(workers, flats)
            rates.append(math.log(first / last) / (end - begin))
            done.append(2 * (after - before) / n / (end - begin))
            for worker in workers:
                threading.Thread(target=worker.gossip.close).start()
        print(
            f"ring of {n}, {'A2CiD2' if momentum else 'AD-PSGD'}: squared distance falls by "
            f"{spread(rates, 3)} per unit, {spread(done, 2)} exchanges per worker and unit"
        )


def _standing(workers: list[_Worker], flats: list[Any]) -> tuple[float, float, float]:
    """All stop for a moment: the label, the squared distance, exchanges so far."""
    for worker in workers:
        worker.gossip.pause()
    label = max(max(w.clock.now(), w.state.t) for w in workers)
    for worker in workers:
        worker.state.mix_until(label)
    exchanges = sum(sum(w.gossip.counts.exchanges.values()) for w in workers) / 2
    found = label, _distance(flats), exchanges
    for worker in workers:
        worker.gossip.resume()
    return found


def _distance(flats: list[Any]) -> float:
    import torch

    return float(torch.stack(flats).double().var(0, correction=0).sum())


# ---- shared ---------------------------------------------------------------------------------


def _end(worker: _Worker, flat: Any) -> None:
    """As the session consolidates."""
    import torch

    gossip, nothing = worker.gossip, [torch.zeros(1)]
    with gossip.consolidation():
        gossip.all_reduce(nothing)
        t = gossip.pause_all(max(worker.clock.now(), worker.state.t))
        worker.state.midpoint()
        sums, _, workers = gossip.all_reduce([flat.clone()])
        worker.state.set_parameters([sums[0] / workers], t)
        gossip.all_reduce(nothing)
    gossip.close()


class _Worker:
    """One worker, without a session."""

    def __init__(self, gossip: Any, state: Any, clock: Any):
        self.gossip, self.state, self.clock = gossip, state, clock

    def warm(self, unit_s: float) -> None:
        for _ in range(4):
            self.gossip.record_gradient(unit_s)


def _graph(name: str, n: int) -> Any:
    from offbeat.gossip.graphs import topology

    return topology(name, n)


def _worker(
    me: int,
    graph: Any,
    flat: Any,
    addresses: Any,
    door: socket.socket,
    place: Any = None,
    **settings: Any,
) -> _Worker:
    import torch

    from offbeat.gossip.chunks import Wire
    from offbeat.gossip.clock import Clock
    from offbeat.gossip.settings import Settings
    from offbeat.gossip.state import AVERAGING, State
    from offbeat.gossip.worker import Gossip

    wire, clock = Wire([flat]), Clock()
    state = State([flat], wire, AVERAGING)
    if place is not None:
        clock.ahead_s = place.ahead_s
        state.set_parameters([flat], 0.0)

    def packed(t: float) -> torch.Tensor:
        with state.frozen_x(t) as (x,):
            return x.clone().view(torch.uint8)

    gossip = Gossip(
        me,
        Settings(graph, **settings),
        state,
        wire,
        clock,
        SECRET,
        addresses,
        door,
        place=place,
        luggage=packed,
    )
    return _Worker(gossip, state, clock)


def _job(graph: Any, flats: list[Any], **settings: Any) -> list[_Worker]:
    doors = [socket.create_server(("127.0.0.1", 0)) for _ in flats]
    addresses = {n: door.getsockname() for n, door in enumerate(doors)}
    made = [
        _worker(n, graph, flat, addresses, doors[n], **settings) for n, flat in enumerate(flats)
    ]
    for worker in made:
        worker.gossip.connect()
    return made


def _cut(worker: _Worker) -> None:
    peers = worker.gossip._peers
    worker.gossip._commands.append(lambda: [peers.drop(n) for n in peers.reachable()] and None)
    peers.wake()


def _kill(worker: _Worker) -> None:
    gossip = worker.gossip
    gossip._commands.append(lambda: setattr(gossip, "_ended", True))
    gossip._peers.wake()
    gossip._thread.join()


if __name__ == "__main__":
    main()
