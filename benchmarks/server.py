"""The parameter server: goodput against plain TCP, memory, and random kills without a lost update.

    python benchmarks/server.py [--transport] [--loopback] [--rate 1gbit] [--kill-minutes 20]

`--transport` compares one sender to one receiver over gloo and over a plain socket. `--loopback`
and `--rate` (root, or user namespaces: hosts of their own, shaped) let 4 workers push and pull a
model of `--mb` as fast as they can, and then send as much over plain sockets. Goodput is what the
server's link carried inwards; the target is 80 % of the rate. Memory is what the server's process
grew by, over its share of the model; the target is 2, beside the optimizer's state.
`--kill-minutes` (`--kills`: seconds) kills and restarts workers at random, and counts: every
acknowledged update must be in the parameters, and at most one more per kill.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import socket
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from figures import spread
from talking_ranks import launch_ranks, own_address, publish, published

WORKERS = 4
SECONDS = 5.0
CHUNK_BYTES = 4 << 20
SECRET = b"benchmark"
REPETITIONS = 3


def main() -> None:
    """What was asked for, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--transport", action="store_true")
    parser.add_argument("--loopback", action="store_true")
    parser.add_argument("--rate")
    parser.add_argument("--kills", type=float, default=0.0)
    parser.add_argument("--kill-minutes", type=float, default=0.0)
    parser.add_argument("--mb", type=float, default=40.0)
    parser.add_argument("--optimizer", default="SGD")
    parser.add_argument("--repetitions", type=int, default=REPETITIONS)
    parser.add_argument("--role", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role:
        ROLES[args.role[0]](*args.role[1:])
        return
    if args.transport:
        transport()
    if args.loopback:
        goodput(None, args)
    if args.rate:
        goodput(args.rate, args)
    if seconds := args.kills + 60 * args.kill_minutes:
        kills(seconds)


# ---- one sender, one receiver ---------------------------------------------------------------


def transport() -> None:
    """Gloo's send and recv against a plain socket, with the processor time of both ends."""
    for kind in ("gloo", "tcp"):
        found = launch_ranks(__file__, None, 2, "transport", kind)
        rates = [line["mb_s"] for line in found if "mb_s" in line]
        cpu = sum(line["cpu_s_per_gb"] for line in found)
        print(f"{kind}: {spread(rates, 0)} MB/s, {cpu:.2f} s of processors per GB")


def transport_role(folder: str, kind: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank, data = int(os.environ["RANK"]), torch.ones(CHUNK_BYTES // 4)
    count = 100
    dist.init_process_group("gloo")
    if kind == "tcp":
        sock = _pair(Path(folder), rank)
        view = memoryview(data.view(torch.uint8).numpy())

        def move() -> None:
            if rank:
                sock.sendall(view)
            else:
                _fill(sock, view)
    else:

        def move() -> None:
            dist.send(data, 0) if rank else dist.recv(data, 1)

    move()
    rates = []
    used_s = time.process_time()
    for _ in range(REPETITIONS):
        start_s = time.perf_counter()
        for _ in range(count):
            move()
        rates.append(count * CHUNK_BYTES / 1e6 / (time.perf_counter() - start_s))
    gb = REPETITIONS * count * CHUNK_BYTES / 1e9
    _say(cpu_s_per_gb=(time.process_time() - used_s) / gb, **({} if rank else {"mb_s": max(rates)}))


def _pair(folder: Path, rank: int) -> socket.socket:
    if rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            publish(folder, listener.getsockname())
            return listener.accept()[0]
    return socket.create_connection(published(folder))


# ---- goodput --------------------------------------------------------------------------------


def goodput(rate: str | None, args: argparse.Namespace) -> None:
    """The server beside plain sockets, in the same lab."""
    where = rate or "loopback"
    for kind, ways in (("plain", "in"), ("plain", "both"), ("server", "in"), ("server", "both")):
        rates, memory = [], []
        for _ in range(args.repetitions):
            role = [kind, ways, str(args.mb), args.optimizer]
            found = launch_ranks(__file__, rate, WORKERS + 1, *role)
            rates.append(sum(line["mb_s"] for line in found if "mb_s" in line))
            memory += [line["copies"] for line in found if "copies" in line]
        words = f", server's memory {spread(memory, 2)} copies of its share" if memory else ""
        bits = [8 * r / 1e3 for r in rates]
        print(
            f"{where}, {kind}, {ways}: {spread(rates, 0)} MB/s in ({spread(bits, 2)} Gbit/s){words}"
        )


def plain_role(folder: str, ways: str, *_: str) -> None:
    rank = int(os.environ["RANK"])
    if rank == WORKERS:
        listener = socket.create_server((own_address(), 0))
        publish(Path(folder), listener.getsockname())
        socks = [listener.accept()[0] for _ in range(WORKERS)]
        threads = [threading.Thread(target=_drain, args=(sock,)) for sock in socks]
        if ways == "both":
            threads += [threading.Thread(target=_flood, args=(sock,)) for sock in socks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return
    sock = socket.create_connection(published(Path(folder)))
    data, sent = memoryview(bytes(CHUNK_BYTES)), 0
    if ways == "both":
        threading.Thread(target=_drain, args=(sock,), daemon=True).start()
    start_s = time.perf_counter()
    while time.perf_counter() - start_s < SECONDS:
        sock.sendall(data)
        sent += len(data)
    _say(mb_s=sent / 1e6 / (time.perf_counter() - start_s))
    sock.close()


def server_role(folder: str, ways: str, mb: str, optimizer: str) -> None:
    import torch

    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    _, opt, layout = _model(int(float(mb) * 1e6 / 4), optimizer)
    if rank == WORKERS:
        _serve(Path(folder), opt, layout)
        return
    from offbeat.server.optimizers import settings_of

    client = _client(Path(folder), layout, rank)
    client.average(torch.zeros(0, dtype=torch.float64))
    sent, start_s = 0, time.perf_counter()
    while time.perf_counter() - start_s < SECONDS:
        client.settle()
        client.push(settings_of(opt))
        if client.arrived_clock() is not None:
            client.release_incoming()
        if ways == "both" and not client.pulling:
            client.pull(0)
        sent += layout.bytes
    client.settle()
    _say(mb_s=sent / 1e6 / (time.perf_counter() - start_s))
    client.close()


def _serve(folder: Path, opt: Any, layout: Any) -> None:
    import torch

    from offbeat.server.parameters import Store
    from offbeat.server.service import Service

    for _ in range(2):  # what the first steps of an optimizer import is no model's
        trial = torch.nn.Parameter(torch.zeros(4))
        trial.grad = torch.zeros(4)
        type(opt)([trial], lr=0.1).step()
    before = _resident_bytes("VmRSS")
    store = Store(layout, 0, opt, "push", range(WORKERS))
    listener = socket.create_server((own_address(), 0))
    publish(folder, listener.getsockname())
    Service(store, listener, SECRET, silent_s=5.0).serve()
    state = sum(
        value.nbytes
        for shard in store.shards.values()
        for states in shard.optimizer.state.values()
        for value in states.values()
        if isinstance(value, torch.Tensor)
    )
    grown = _resident_bytes("VmHWM") - before - state
    _say(copies=grown / layout.bytes)


# ---- random kills ---------------------------------------------------------------------------


def kills(seconds: float) -> None:
    """Kill and restart workers at random; every acknowledged update must be there."""
    import torch._dynamo  # noqa: F401 - once, for all forks: an optimizer imports it

    choose = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        server = _forked(counting_server_role, folder)
        workers = [_forked(counter_role, folder, rank) for rank in range(WORKERS)]
        killed = 0
        begin_s = said_s = time.monotonic()
        while (now_s := time.monotonic()) < begin_s + seconds:
            if now_s > said_s + 60:
                said_s = now_s
                print(f"{(now_s - begin_s) / 60:.0f} min, {killed} kills", flush=True)
            if not server.is_alive():
                sys.exit("the server has died")
            time.sleep(choose.uniform(0.05, 1.0))
            rank = choose.randrange(WORKERS)
            workers[rank].kill()
            workers[rank].join()
            killed += 1
            workers[rank] = _forked(counter_role, folder, rank)
        for worker in workers:
            worker.kill()
            worker.join()
        server.join(60)
        held = json.loads(Path(folder, "held.json").read_text())
        logs = [Path(folder, f"acknowledged{rank}") for rank in range(WORKERS)]
        acknowledged = [log.stat().st_size if log.exists() else 0 for log in logs]
    extra = [h - a for h, a in zip(held, acknowledged, strict=True)]
    print(
        f"{seconds:g} s, {killed} kills: {sum(acknowledged)} updates acknowledged, "
        f"{-sum(min(e, 0) for e in extra):g} of them lost; {sum(extra):g} more were taken, whose "
        "worker was killed before it had noted the word"
    )
    if min(extra) < 0 or sum(extra) > killed + WORKERS:
        sys.exit("updates were lost or counted twice")


def _forked(role: Any, *args: Any) -> Any:
    process = multiprocessing.get_context("fork").Process(target=role, args=args, daemon=True)
    process.start()
    return process


def counting_server_role(folder: str) -> None:
    """Parameter r counts the updates of rank r: each adds 1 to it and to a whole block."""
    import warnings

    import torch

    warnings.simplefilter("ignore")
    _, opt, layout = _model(WORKERS * 1000, "SGD", lr=float(WORKERS))
    from offbeat.server.parameters import Store
    from offbeat.server.service import Service

    store = Store(layout, 0, opt, "push", range(WORKERS))
    listener = socket.create_server((own_address(), 0))
    publish(Path(folder), listener.getsockname())
    with suppress(RuntimeError):  # all were killed in the end
        Service(store, listener, SECRET, silent_s=3.0).serve()
    flat = torch.cat([shard.parameters for shard in store.shards.values()])
    blocks = flat.view(WORKERS, 1000)
    assert bool((blocks == blocks[:, :1]).all()), "an update was taken in part"
    Path(folder, "held.json").write_text(json.dumps((-blocks[:, 0]).tolist()))


def counter_role(folder: str, rank: int) -> None:
    import torch

    from offbeat.server.optimizers import settings_of

    _, opt, layout = _model(WORKERS * 1000, "SGD", lr=float(WORKERS))
    client = _client(Path(folder), layout, rank)
    client.outgoing[torch.float32].view(WORKERS, 1000)[rank] = 1.0
    with Path(folder, f"acknowledged{rank}").open("ab", buffering=0) as file:
        while True:
            client.push(settings_of(opt))
            client.settle()
            file.write(b"\n")
            time.sleep(0.005)


# ---- shared ---------------------------------------------------------------------------------


def _model(elements: int, optimizer: str, lr: float = 0.1) -> tuple[Any, Any, Any]:
    import torch

    from offbeat.server.layout import Layout

    parameter = torch.nn.Parameter(torch.zeros(elements))
    opt = getattr(torch.optim, optimizer)([parameter], lr=lr)
    return parameter, opt, Layout([[parameter]], 1)


def _client(folder: Path, layout: Any, rank: int) -> Any:
    from offbeat.server.client import Client

    servers = [("server 0", published(folder))]
    return Client(layout, servers, rank, SECRET, timeout_s=60.0, beat_s=0.5)


def _drain(sock: socket.socket) -> None:
    buffer = bytearray(CHUNK_BYTES)
    with suppress(OSError):
        while sock.recv_into(buffer):
            pass


def _flood(sock: socket.socket) -> None:
    data = bytes(CHUNK_BYTES)
    with suppress(OSError):
        while True:
            sock.sendall(data)


def _fill(sock: socket.socket, view: memoryview) -> None:
    while len(view):
        view = view[sock.recv_into(view) :]


def _resident_bytes(what: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(what)))


def _say(**values: float) -> None:
    print(json.dumps(values), flush=True)


ROLES = {
    "transport": transport_role,
    "plain": plain_role,
    "server": server_role,
}

if __name__ == "__main__":
    main()
