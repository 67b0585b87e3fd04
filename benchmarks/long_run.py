"""A long run under kills, cuts and changing rates beside an undisturbed one.

    python benchmarks/long_run.py --minutes 30 --out long    (as root)

Three hosts (namespaces) with an agent of torchrun each, DreamDDP, a checkpoint every
100 iterations. A worker is killed every 4 minutes or so, a port drops everything for .4 s every
minute, and rates change between 20 and 200 Mbit/s. The undisturbed run has the same plan and the
same data on the loopback, as fast as it goes. Measured: losses of both (the bits must be the same),
and memory, threads and open files of every process over time, as a table and a picture.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import partitions
from partitions import HOSTS, PREFIX, run

RESTARTS = 1000
COLORS = ["#2563eb", "#ea580c", "#16a34a"]


def work(job: dict[str, Any]) -> None:
    """Train from the newest checkpoint, or from the beginning."""
    import torch
    from torch import nn

    import offbeat

    rank, out = int(os.environ["RANK"]), Path(job["out"])
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(128, 128), nn.Tanh())))
    target = nn.Sequential(nn.Linear(128, 128), nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = offbeat.prepare(
        model, optimizer, "dreamddp:period=5", profile=job["profile"], observe=5, timeout_s=20
    )
    extra: dict[str, Any] = {"losses": []}
    if Path(job["folder"]).exists():
        extra["losses"] = offbeat.load(job["folder"], model, optimizer).extra["losses"]
    (out / f"pid{rank}").write_text(str(os.getpid()))
    for t in range(offbeat.iteration(model), job["iterations"]):
        x = torch.randn(16, 128, generator=torch.Generator().manual_seed(1000 * t + rank))
        optimizer.zero_grad()
        with torch.no_grad():
            y = target(x)
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        if t % 20 == 0:
            extra["losses"].append(loss.item())
        if t % 100 == 99 and t > 10:
            offbeat.save(job["folder"], model, optimizer, extra)
        time.sleep(job["sleep_s"])
    model.consolidate()
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    said = {"digest": hashlib.sha256(weights).hexdigest(), "losses": extra["losses"]}
    (out / f"end{rank}.json").write_text(json.dumps(said))


def watch(out: Path, rows: list[dict[str, Any]], begun_s: float, over: threading.Event) -> None:
    """Note what every process takes, every 5 s."""
    while not over.wait(5):
        for rank in range(HOSTS):
            try:
                pid = int((out / f"pid{rank}").read_text())
                status = Path(f"/proc/{pid}/status").read_text()
                files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
            except (OSError, ValueError):
                continue
            field = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
            if "VmRSS" not in field:  # it has just been killed
                continue
            rows.append(
                {
                    "t": round(time.monotonic() - begun_s, 1),
                    "rank": rank,
                    "pid": pid,
                    "MB": int(field["VmRSS"].split()[0]) / 1024,
                    "threads": int(field["Threads"]),
                    "files": files,
                }
            )


def disturb(out: Path, events: list[dict[str, Any]], begun_s: float, over: threading.Event) -> None:
    """Kills, cuts and rates, until the run is over."""
    draw, kill_s, cut_s, rate_s = random.Random(0), 60.0, 30.0, 40.0
    while not over.wait(0.5):
        now_s = time.monotonic() - begun_s
        if now_s > kill_s:
            kill_s = now_s + draw.uniform(180, 300)
            rank = draw.randrange(HOSTS)
            os.kill(int((out / f"pid{rank}").read_text()), signal.SIGKILL)
            events.append({"t": now_s, "what": "kill", "rank": rank})
        if now_s > cut_s:
            cut_s = now_s + draw.uniform(40, 80)
            partitions.cut(0.4)
            events.append({"t": now_s, "what": "cut"})
        if now_s > rate_s:
            rate_s = now_s + draw.uniform(30, 60)
            host, rate = draw.randrange(HOSTS), draw.choice([20, 50, 100, 200])
            run(
                f"tc qdisc change dev {PREFIX}v{host} root tbf rate {rate}mbit burst 64kb "
                "latency 50ms"
            )
            events.append({"t": now_s, "what": f"{rate} Mbit/s", "rank": host})


def disturbed(job: dict[str, Any]) -> dict[str, Any]:
    out = Path(job["out"])
    rows: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    over, begun_s = threading.Event(), time.monotonic()
    with partitions.network():
        agents = [
            subprocess.Popen(
                f"ip netns exec {PREFIX}{host} {sys.executable} -m torch.distributed.run "
                f"--nnodes={HOSTS} --nproc-per-node=1 --max-restarts={RESTARTS} --rdzv-id=long "
                "--rdzv-backend=c10d --rdzv-endpoint=10.77.0.1:29512 "
                f"--rdzv-conf=is_host={host == 0} --local-addr=10.77.0.{host + 1} "
                f"{__file__} work {out / 'job.json'}".split(),
                env={**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"},
                stderr=(out / f"log{host}").open("wb"),
            )
            for host in range(HOSTS)
        ]
        others = [
            threading.Thread(target=act, args=(out, notes, begun_s, over), daemon=True)
            for act, notes in ((watch, rows), (disturb, events))
        ]
        try:
            end_s = begun_s + 2 * job["minutes"] * 60
            while not all((out / f"pid{rank}").exists() for rank in range(HOSTS)):
                if time.monotonic() > begun_s + 120:
                    raise RuntimeError((out / "log0").read_text()[-2000:])
                time.sleep(0.2)
            for other in others:
                other.start()
            while time.monotonic() < end_s and any(a.poll() is None for a in agents):
                time.sleep(0.5)
        finally:
            over.set()
            for agent in agents:
                if agent.poll() is None:
                    agent.kill()
                agent.wait()
            for other in others:
                if other.is_alive():
                    other.join()
    ends = [json.loads((out / f"end{r}.json").read_text()) for r in range(HOSTS)]
    seconds = time.monotonic() - begun_s
    return {"rows": rows, "events": events, "ends": ends, "seconds": seconds}


def undisturbed(job: dict[str, Any]) -> dict[str, Any]:
    out = Path(job["out"])
    subprocess.run(
        f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node={HOSTS} "
        f"{__file__} work {out / 'job.json'}".split(),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
    )
    return {"ends": [json.loads((out / f"end{r}.json").read_text()) for r in range(HOSTS)]}


def picture(found: dict[str, Any], other: dict[str, Any]) -> str:
    """Four strips over time: loss of both runs, memory, threads, open files."""
    width, height, left = 900, 130, 70
    rows, seconds = found["rows"], found["seconds"]
    parts = []

    def strip(n: int, name: str, curves: list[tuple[str, list[tuple[float, float]]]]) -> None:
        top = 20 + n * (height + 30)
        ys = [y for _, curve in curves for _, y in curve]
        low, high = min(0.0, *ys), max(ys) * 1.05 or 1.0
        xs = max(x for _, curve in curves for x, _ in curve) or 1.0
        parts.append(f'<text x="4" y="{top + 12}">{name}</text>')
        parts.append(f'<text x="4" y="{top + 28}">{high / 1.05:.4g}</text>')
        parts.append(f'<line x1="{left}" y1="{top + height}" x2="{width}" y2="{top + height}"/>')
        for color, curve in curves:
            points = " ".join(
                f"{left + x / xs * (width - left):.1f},"
                f"{top + height - (y - low) / (high - low) * height:.1f}"
                for x, y in curve
            )
            parts.append(f'<polyline points="{points}" style="stroke:{color}"/>')

    both = [("#9ca3af", other), ("#2563eb", found)]
    strip(0, "loss", [(c, [*map(tuple, enumerate(f["ends"][0]["losses"]))]) for c, f in both])  # type: ignore[misc]
    for n, name in enumerate(("MB", "threads", "files"), start=1):
        curves = [
            (COLORS[rank], [(row["t"], row[name]) for row in rows if row["rank"] == rank])
            for rank in range(HOSTS)
        ]
        strip(n, name, curves)
    for event in found["events"]:
        if event["what"] == "kill":
            x = left + event["t"] / seconds * (width - left)
            parts.append(f'<line class="kill" x1="{x:.0f}" y1="180" x2="{x:.0f}" y2="640"/>')
    style = (
        "text{font:12px sans-serif;fill:#6b7280}line{stroke:#9ca3af}"
        ".kill{stroke:#dc2626;stroke-dasharray:3}polyline{fill:none;stroke-width:1.2}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 660">'
        f"<style>{style}</style>{''.join(parts)}</svg>\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="?", default="measure")
    parser.add_argument("job", nargs="?")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--out", type=Path, default=Path("long"))
    args = parser.parse_args()
    if args.what == "work":
        work(json.loads(Path(args.job).read_text()))
        return
    ends = []
    # The first one, a short one, only measures the profile of both.
    for name, act in (("first", undisturbed), ("run", disturbed), ("other", undisturbed)):
        out = (args.out / name).absolute()
        out.mkdir(parents=True)
        job = {
            "out": str(out),
            "folder": str(out / "saved"),
            "profile": str((args.out / "profile.json").absolute()),
            "iterations": 10 if name == "first" else int(args.minutes * 60 / 0.12),
            "sleep_s": 0.08 if act is disturbed else 0.0,
            "minutes": args.minutes,
        }
        (out / "job.json").write_text(json.dumps(job))
        ends.append(act(job))
        (args.out / f"{name}.json").write_text(json.dumps(ends[-1]))
    _, found, other = ends
    (args.out / "long_run.svg").write_text(picture(found, other))
    kinds = [event["what"] for event in found["events"]]
    print(
        f"{found['seconds'] / 60:.1f} min, {kinds.count('kill')} kills, {kinds.count('cut')} cuts"
    )
    same = [e["digest"] for e in found["ends"]] == [e["digest"] for e in other["ends"]]
    print(f"the same weights: {same}; last losses {found['ends'][0]['losses'][-1]:.6f} and "
          f"{other['ends'][0]['losses'][-1]:.6f}")  # fmt: skip
    lives: dict[int, list[dict[str, Any]]] = {}
    for row in found["rows"]:
        lives.setdefault(row["pid"], []).append(row)
    for name in ("MB", "threads", "files"):
        long = [life for life in lives.values() if len(life) > 8]
        growth = [life[-1][name] - life[len(life) // 4][name] for life in long]
        print(f"{name}: growth over the last three quarters of a life: {min(growth):+.1f} to "
              f"{max(growth):+.1f}")  # fmt: skip


if __name__ == "__main__":
    main()
