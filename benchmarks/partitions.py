"""Cuts of the network that end: does training go on, after how long, and who is named if not?

    python benchmarks/partitions.py --out partitions.json    (as root)

Three hosts (namespaces) on a bridge at 100 Mbit/s; one port drops everything for a while, silently.
Measured: whether all ranks end well, and by how much the longest iteration outlasts the cut.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

PREFIX = f"of{os.getpid() % 100000}x"
BRIDGE = f"{PREFIX}br"
HOSTS, TIMEOUT_S, LASTS_S = 3, 20.0, 45.0
CUTS = {"none": [], "5 s": [5.0], "4 x .4 s": [0.4] * 4, "12 s": [12.0], "30 s": [30.0]}
STRATEGIES = ["wfbp", "ddp", "dreamddp:period=4", "a2cid2"]


def work(strategy: str, out: Path) -> None:
    """Train until it has lasted long enough, by rank 0's clock."""
    import torch
    from torch import nn

    import offbeat

    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(256, 256), nn.Tanh())))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    said: dict[str, object] = {}
    longest_s, begun = 0.0, time.time()
    try:
        model, optimizer = offbeat.prepare(
            model, optimizer, strategy, observe=3, timeout_s=TIMEOUT_S
        )
        (out / f"ready{rank}").touch()
        begun = time.time()
        iterations = int(LASTS_S / 0.1)
        last_s = time.monotonic()
        for _ in range(iterations):
            optimizer.zero_grad()
            model(torch.randn(8, 256)).square().mean().backward()
            optimizer.step()
            time.sleep(0.05)
            longest_s = max(longest_s, time.monotonic() - last_s)
            last_s = time.monotonic()
        model.consolidate()
        model.close()
    except Exception as error:
        said = {"error": str(error), "after_s": time.time() - begun}
        raise
    finally:
        (out / f"said{rank}").write_text(json.dumps({**said, "longest_s": longest_s}))


@contextlib.contextmanager
def network(hosts: int = HOSTS, rate: str = "100mbit") -> Iterator[None]:
    """Namespaces with 10.77.0.1, .2, .3 on a bridge, which sends at most `rate` to each."""
    run(f"ip link add {BRIDGE} type bridge")
    try:
        run(f"ip link set {BRIDGE} up")
        for host in range(hosts):
            run(f"ip netns add {PREFIX}{host}")
            run(f"ip link add {PREFIX}v{host} type veth peer name eth0 netns {PREFIX}{host}")
            run(f"ip link set {PREFIX}v{host} master {BRIDGE} up")
            run(f"ip -n {PREFIX}{host} addr add 10.77.0.{host + 1}/24 dev eth0")
            run(f"ip -n {PREFIX}{host} link set eth0 up")
            run(f"ip -n {PREFIX}{host} link set lo up")
            run(f"tc qdisc add dev {PREFIX}v{host} root tbf rate {rate} burst 64kb latency 50ms")
        yield
    finally:
        for host in range(hosts):
            run(f"ip netns del {PREFIX}{host}", check=False)
        run(f"ip link del {BRIDGE}", check=False)
        while any(Path("/sys/class/net").glob(f"{PREFIX}v*")):  # namespaces go when they like
            time.sleep(0.1)


def run(command: str, check: bool = True) -> None:
    """One command of iproute2."""
    subprocess.run(command.split(), check=check, capture_output=not check)


def cut(seconds: float) -> None:
    """Drop everything to and from host 1, and tell nobody."""
    run(f"bridge link set dev {PREFIX}v1 state 0")
    time.sleep(seconds)
    run(f"bridge link set dev {PREFIX}v1 state 3")


def measure(strategy: str, name: str) -> dict[str, object]:
    """One job with its cuts."""
    with tempfile.TemporaryDirectory() as folder, network():
        out = Path(folder)
        command = [sys.executable, __file__, "work", strategy, folder]
        processes = [
            subprocess.Popen(
                ["ip", "netns", "exec", f"{PREFIX}{rank}", *command],
                env={
                    **os.environ, "RANK": str(rank), "LOCAL_RANK": "0",
                    "WORLD_SIZE": str(HOSTS), "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29511",
                    "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1",
                },
                stderr=(out / f"log{rank}").open("wb"),
            )
            for rank in range(HOSTS)
        ]  # fmt: skip
        try:
            end_s = time.monotonic() + 60
            while time.monotonic() < end_s and len(list(out.glob("ready*"))) < HOSTS:
                time.sleep(0.2)
            time.sleep(3)
            for seconds in CUTS[name]:
                cut(seconds)
                time.sleep(1)
            end_s = time.monotonic() + LASTS_S + 3 * TIMEOUT_S
            while time.monotonic() < end_s and any(p.poll() is None for p in processes):
                time.sleep(0.2)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
        said = [json.loads((out / f"said{rank}").read_text()) for rank in range(HOSTS)]
        return {
            "strategy": strategy,
            "cut": name,
            "rc": [p.returncode for p in processes],
            "longest_s": [round(s["longest_s"], 2) for s in said],
            "errors": [s.get("error", "") for s in said],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="?", default="measure")
    parser.add_argument("strategy", nargs="?")
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--only")
    parser.add_argument("--cut")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.what == "work":
        work(args.strategy, args.folder)
        return
    found = []
    for strategy in [args.only] if args.only else STRATEGIES:
        for name in [args.cut] if args.cut else CUTS:
            found.append(measure(strategy, name))
            print(json.dumps(found[-1])[:900], flush=True)
    if args.out:
        args.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
