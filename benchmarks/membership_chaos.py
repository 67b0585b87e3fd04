"""A membership service that is killed again and again, and the members that use it.

    python benchmarks/membership_chaos.py [--seconds 300] [--members 6] [--seed 0]

The service runs as a process and gets SIGKILL at random times. In the first half of the time the
members add to one number and compete for locks; in the second half they propose epochs, each of
which counts one more sample. Strangers open connections and send random bytes. At the end the
number must equal the answered additions, each lock must have one owner, and the samples must equal
the number of epochs. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from offbeat.membership import Epoch, MembershipClient, RequestRefusedError

SECRET = b"secret of this benchmark"
LIMIT_S = 60.0  # longest time without an answer, and until the members end


def main() -> None:
    """Kill the service until the time is over, then compare the results of the members."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--members", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(_run(Path(folder), args.seconds, args.members, args.seed)))


def _run(folder: Path, seconds: float, members: int, seed: int) -> dict[str, Any]:
    draw, context = random.Random(seed), multiprocessing.get_context("spawn")
    (folder / "secret").write_bytes(SECRET)
    (folder / "secret").chmod(0o600)
    reserved = socket.socket()  # so that no connection of this host gets the port of the service
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    port = reserved.getsockname()[1]
    services, sizes = [_start(folder, port)], list[int]()
    address, names = f"127.0.0.1:{port}", tuple(f"m{n}" for n in range(members))
    client = MembershipClient(address, SECRET, LIMIT_S)
    client.propose(Epoch(0, names))
    found, barrier, half_s = context.Queue(), context.Barrier(members), seconds / 2
    children = [
        context.Process(target=_work, args=(address, n, names, half_s, barrier, found), daemon=True)
        for n in range(members)
    ]
    children.append(context.Process(target=_disturb, args=(port, seed), daemon=True))
    for child in children:
        child.start()
    end_s = time.monotonic() + seconds
    try:
        while time.monotonic() < end_s:
            time.sleep(draw.uniform(0.2, 2.0))
            sizes.append(_resident_bytes(services[-1].pid))
            services[-1].kill()
            services[-1].wait()
            services.append(_start(folder, port))
        results = [found.get(timeout=2 * LIMIT_S) for _ in range(members)]
        state = client.state()
    finally:
        reserved.close()
        services[-1].kill()
        children[-1].kill()
    assert state.epoch is not None
    locks = [lock for one in results for lock in one["locks"]]
    return {
        "kills": len(services) - 1,
        "requests": sum(one["requests"] for one in results),
        "lost or repeated additions": max(one["sum"] for one in results)
        - sum(one["additions"] for one in results),
        "locks with two owners": len(locks) - len({*locks}),
        "epochs": state.epoch.number,
        "epochs counted twice or not at all": state.epoch.samples - state.epoch.number,
        "longest answer, s": round(max(one["longest_s"] for one in results), 2),
        "memory of the service, MB": [round(one / 1e6) for one in (min(sizes), max(sizes))],
        "journal, bytes": (folder / "journal").stat().st_size,
    }


def _start(folder: Path, port: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "offbeat", "membership", "--host", "127.0.0.1"]
    options = {"--port": port, "--journal": folder / "journal", "--secret": folder / "secret"}
    arguments = [str(part) for option in options.items() for part in option]
    return subprocess.Popen([*command, *arguments], stdout=subprocess.DEVNULL)


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def _work(
    address: str, number: int, names: tuple[str, ...], half_s: float, barrier: Any, found: Any
) -> None:
    """Add and lock, meet the other members, then propose epochs."""
    client = MembershipClient(address, SECRET, LIMIT_S)
    keys, own, locks, longest_s, requests = client.rendezvous(0), 0, list[int](), 0.0, 0
    end_s = time.monotonic() + half_s
    while (begin_s := time.monotonic()) < end_s:
        keys.add("sum", 1)
        own += 1
        owner = keys.compare_set(f"lock{own}", b"", names[number].encode())
        if owner == names[number].encode():
            locks.append(own)
        requests += 2
        longest_s = max(longest_s, (time.monotonic() - begin_s) / 2)
    barrier.wait(LIMIT_S)
    total = keys.add("sum", 0)
    barrier.wait(LIMIT_S)
    end_s = time.monotonic() + half_s
    while (begin_s := time.monotonic()) < end_s:
        newest = client.state().epoch
        assert newest is not None
        owned = replace(newest, number=newest.number + 1, samples=newest.samples + 1)
        with suppress(RequestRefusedError):  # sixteen epochs have been written in the meantime
            written = client.propose(owned)
            assert written == owned
        requests += 2
        longest_s = max(longest_s, (time.monotonic() - begin_s) / 2)
    found.put(
        {
            "additions": own,
            "sum": total,
            "locks": locks,
            "longest_s": longest_s,
            "requests": requests,
        }
    )
    client.close()


def _disturb(port: int, seed: int) -> None:
    """Connect, send random bytes, and leave, until this process is killed."""
    draw, held = random.Random(seed), list[socket.socket]()
    while True:
        with suppress(OSError):
            held.append(socket.create_connection(("127.0.0.1", port), 1.0))
            held[-1].sendall(draw.randbytes(draw.choice([0, 1, 63, 64, 1000])))
        while len(held) > 100:
            held.pop(draw.randrange(len(held))).close()
        time.sleep(0.002)


if __name__ == "__main__":
    main()
