"""A job of gossip to which everything happens: two of eight workers are killed, one joins, and one
connection is cut for 20 s. Losses must go on falling, and the living must end with the same bits.

    python benchmarks/gossip_job.py [--seconds 80]

Processes of their own over the loopback, the digits of `slides.py`, an exponential graph.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from statistics import fmean
from typing import Any

WORKERS, KILLED, CUT = 8, (3, 5), (6, 7)
CUT_S = 20.0
SECRET = "benchmark"
WINDOW_S = 10.0
START_S = 40.0  # until everybody is there


def work(until: float) -> None:
    """One worker: trains until then, and says its losses."""
    import torch
    from slides_tasks import task_of

    import offbeat

    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank = int(os.environ.get("RANK", WORKERS))
    task = task_of("digits")
    model = task.model()
    strategy = offbeat.A2CiD2("exponential", silent_s=5.0)
    model, optimizer = offbeat.prepare(model, task.optimizer(model), strategy, timeout_s=60.0)
    gossip: Any = model._session._gossip
    signal.signal(signal.SIGUSR1, lambda *_: cut(gossip))
    losses: list[tuple[float, float]] = []
    for batch in task.batches(rank, WORKERS + 1, 0):
        if time.time() > until:
            break
        optimizer.zero_grad()
        loss = task.loss(model, batch)
        loss.backward()
        optimizer.step()
        losses.append((time.time(), loss.item()))
        time.sleep(0.05)
    edges = gossip.view.edges()
    model.consolidate()
    total = sum(float(p.detach().double().sum()) for p in model.parameters())
    found = {"me": gossip.me, "sum": total, "losses": losses, "edges": edges}
    found |= {"quality": task.quality(model.module), "met": gossip.counts.exchanges}
    print("end", json.dumps(found), flush=True)
    model.close()


def cut(gossip: Any) -> None:
    """No connection between the two for a while, whoever tries."""
    peers, other = gossip._peers, sum(CUT) - gossip.me

    def close() -> None:
        peers._tries.pop(other)
        peers.drop(other, "cut")

    def mend() -> None:
        time.sleep(CUT_S)
        gossip._commands.append(lambda: peers.expect(other))
        peers.wake()

    gossip._commands.append(close)
    peers.wake()
    threading.Thread(target=mend, daemon=True).start()


def drive(seconds: float) -> None:
    """Start, kill, add, cut; what came of it."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    begin_s = time.time() + START_S
    argv = [__file__, "--until", str(begin_s + seconds)]
    common = {**os.environ, "OFFBEAT_SECRET": SECRET, "OMP_NUM_THREADS": "1"}
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(WORKERS)}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True}
    # Before that moment the workers train, and nothing happens to them.
    ranks = []
    for n in range(WORKERS):
        stderr = subprocess.PIPE if n == 0 else subprocess.DEVNULL
        env = {**common, **world, "RANK": str(n)}
        ranks.append(subprocess.Popen([sys.executable, *argv], env=env, stderr=stderr, **pipes))
    assert ranks[0].stderr is not None
    address = next(one for one in ranks[0].stderr if "can join this job at" in one).split()[-1]
    threading.Thread(target=ranks[0].stderr.read, daemon=True).start()
    at = {"killed": 0.3, "joined": 0.45, "cut": 0.55}
    events: dict[str, float] = {}
    for what, share in at.items():
        time.sleep(max(0.0, begin_s + share * seconds - time.time()))
        events[what] = time.time() - begin_s
        if what == "killed":
            for n in KILLED:
                ranks[n].kill()
        elif what == "joined":
            joining = [sys.executable, "-m", "offbeat", "join", address, *argv]
            ranks.append(subprocess.Popen(joining, env=common, **pipes))
        else:
            ranks[CUT[0]].send_signal(signal.SIGUSR1)
    said = [rank.communicate(timeout=seconds + START_S + 120)[0] for rank in ranks]
    ends = [json.loads(text.split("end ", 1)[1]) for text in said if "end " in text]
    if len(ends) != WORKERS - len(KILLED) + 1 or len({end["sum"] for end in ends}) != 1:
        sys.exit(f"the living differ: {[(end['me'], end['sum']) for end in ends]}")
    words = ", ".join(f"{what} after {at_s:.0f} s" for what, at_s in events.items())
    print(f"{words}; ends alike: {[end['me'] for end in ends]}, quality {ends[0]['quality']}")
    print("edges at the end:", " ".join(f"{i}-{j}" for i, j in ends[0]["edges"]))
    print("exchanges of the newcomer:", ends[-1]["met"])
    for start in range(-int(START_S), int(seconds), int(WINDOW_S)):
        inside = [
            loss
            for end in ends
            for at_s, loss in end["losses"]
            if start <= at_s - begin_s < start + WINDOW_S
        ]
        if inside:
            print(f"{start:3d}-{start + WINDOW_S:.0f} s: loss {fmean(inside):.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seconds", type=float, default=80.0)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.until:
        work(options.until)
    else:
        drive(options.seconds)


if __name__ == "__main__":
    main()
