"""Random failures: does every survivor name the right rank, soon; does torchrun bring the job back?

    python benchmarks/kills.py named --cases 60 --out kills.json
    python benchmarks/kills.py restarted --cases 12 --out restarts.json

`named`: four processes on the loopback; one is killed, is stopped, or raises: in forward, in
backward, in a message, in `consolidate`, while saving, or while it serves. A report is right if it
accuses that rank and no other; it is in time within `timeout_s` + 3 s. Workers that gossip, and
workers whose servers live, may also go on and end well. `restarted`: under `torchrun
--max-restarts=3` ranks are killed at random iterations; the job ends with the bits of an
undisturbed one. Measured, on this machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

RANKS, TIMEOUT_S, START_S = 4, 10.0, 120.0
LIMIT_S = 60.0  # a server gives up its workers after 30 s of silence
STRATEGIES = [
    "bsp", "ddp", "wfbp", "asc-wfbp", "p3", "dear", "bytescheduler", "us-byte", "deft",
    "dreamddp:period=4", "dreamddp:period=4:due=forward", "dreamddp:period=4:due=delayed",
    "local-sgd:period=4", "fedavg:local_steps=4", "selsync:delta=0.05", "cyclic", "a2cid2", "ssp",
]  # fmt: skip
GOING_ON = ("a2cid2", "ssp")
PLACES = ["forward", "backward", "message", "consolidate", "save"]
WAYS = ["killed", "killed", "killed", "stopped", "raises"]
ACCUSED = re.compile(
    r"[Rr]ank (\d+) (?:\([^)]*\) )?"
    "(?:has died or stands still|has left|keeps the others|cannot be reached|failed with)"
)


# ---- one process ------------------------------------------------------------------------------


def work(job: dict[str, Any]) -> None:
    """Train; if this rank is the victim, something happens to it."""
    import torch
    from torch import nn

    import offbeat

    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(256, 256), nn.Tanh())))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    attempt = _attempt()
    happens = job["happens"][attempt] if attempt < len(job["happens"]) else None
    mine = happens is not None and happens["who"] == rank
    note = Path(job["out"]) / f"rank{rank}.json"
    if mine and happens["place"] == "serving":  # prepare does not return there
        threading.Thread(target=_serving, args=(happens, Path(job["out"])), daemon=True).start()
    try:
        model, optimizer = offbeat.prepare(
            model,
            optimizer,
            job["strategy"],
            profile=job.get("profile"),
            observe=3,
            timeout_s=TIMEOUT_S,
        )
        extra: dict[str, Any] = {"losses": []}
        if job.get("folder") and (Path(job["folder"]).exists()):
            extra["losses"] = offbeat.load(job["folder"], model, optimizer).extra["losses"]
        begun = offbeat.iteration(model)
        Path(job["out"], f"begun-{attempt}-{rank}").write_text(f"{begun} {time.time()}")
        for t in range(begun, job["iterations"]):
            at = happens["place"] if mine and t == happens["iteration"] else ""
            if at in ("forward", "backward", "message"):
                _meet(at, happens["way"], model, Path(job["out"]), happens["delay_s"])
            data = torch.Generator().manual_seed(100 * t + rank)
            x = torch.randn(32, 256, generator=data)
            optimizer.zero_grad()
            loss = (model(x) - x.roll(1, 1)).square().mean()
            loss.backward()
            optimizer.step()
            extra["losses"].append(loss.item())
            time.sleep(0.02)
            if at == "save":
                _later(happens["way"], Path(job["out"]), happens["delay_s"])
            if job.get("folder") and t >= 3 and (t % 10 == 9 or at == "save"):
                saving = offbeat.save(job["folder"], model, optimizer, extra)
                if at == "save":
                    saving.wait()
        if mine and happens["place"] == "consolidate":
            _later(happens["way"], Path(job["out"]), happens["delay_s"])
            time.sleep(happens["delay_s"] / 2)
        model.consolidate()
        weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
        said = {"digest": hashlib.sha256(weights).hexdigest(), "losses": extra["losses"]}
    except BaseException as error:
        note.write_text(json.dumps({"error": str(error), "at": time.time()}))
        raise
    note.write_text(json.dumps({**said, "at": time.time()}))


def _attempt() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _meet(place: str, way: str, model: Any, out: Path, delay_s: float) -> None:
    """Have it happen at a place of this iteration."""
    if place == "forward":
        model.module[4].register_forward_pre_hook(lambda *_: _happen(way, out))
    elif place == "backward":
        model.module[4].weight.register_hook(lambda _: _happen(way, out))
    else:
        model.module[0].weight.register_hook(lambda _: _later(way, out, delay_s / 10))


def _serving(happens: dict[str, Any], out: Path) -> None:
    """It happens while the workers train, about half of a second after they have begun."""
    while not (out / "begun-0-0").exists():
        time.sleep(0.05)
    time.sleep(20 * happens["delay_s"])
    _happen(happens["way"], out)


def _later(way: str, out: Path, delay_s: float) -> None:
    """Killed or stopped by another thread, whatever this one does; raising needs this one."""
    if way == "raises":
        _happen(way, out)
    threading.Timer(delay_s, _happen, (way, out)).start()


def _happen(way: str, out: Path) -> None:
    (out / f"happened-{_attempt()}").write_text(str(time.time()))
    if way == "raises":
        raise KeyError("a mistake of the script")
    os.kill(os.getpid(), signal.SIGKILL if way == "killed" else signal.SIGSTOP)


# ---- who is named -------------------------------------------------------------------------------


def named(cases: int, seed: int, only: str | None) -> list[dict[str, Any]]:
    draw, found = random.Random(seed), []
    for n in range(cases):
        strategy = STRATEGIES[n % len(STRATEGIES)]
        place = draw.choice(PLACES)
        if place == "save" and strategy == "ssp":
            place = "forward"  # servers keep what is newest: saving is refused
        who, way = draw.randrange(RANKS), draw.choice(WAYS)
        if strategy == "ssp" and (who == RANKS - 1 or n == len(STRATEGIES) - 1):
            who, place, way = RANKS - 1, "serving", "killed" if way == "raises" else way
        case = {
            "strategy": strategy,
            "who": who,
            "place": place,
            "way": way,
            "iteration": draw.randrange(20, 60),
            "delay_s": round(draw.uniform(0.001, 0.03), 4),
        }
        if only is None or only == strategy:
            found.append({**case, **_watch(case)})
            print(json.dumps(found[-1])[:600], flush=True)
    return found


def _watch(case: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        job = {
            "strategy": case["strategy"],
            "iterations": 60,
            "out": folder,
            "happens": [case],
            "folder": str(out / "saved") if case["place"] == "save" else None,
        }
        (out / "job.json").write_text(json.dumps(job))
        processes = _start(out, servers=1 if case["strategy"] == "ssp" else 0)
        reports = _reports(processes, case, out)
        happened = out / "happened-0"
        if all(report["rc"] == 0 for report in reports.values()):
            return {"verdict": "all ended before, or went on", "reports": reports}
        if not happened.exists():
            return {"verdict": "did not happen", "reports": reports}
        since_s = float(happened.read_text())
        for report in reports.values():
            report["after_s"] = round(report.pop("at", time.time()) - since_s, 2)
        return {"verdict": _verdict(case, reports), "reports": reports}


def _start(out: Path, servers: int) -> dict[int, subprocess.Popen[bytes]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    base = {
        **os.environ,
        "WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "OFFBEAT_SERVERS": str(servers),
    }
    command = [sys.executable, __file__, "work", str(out / "job.json")]
    return {
        rank: subprocess.Popen(
            command,
            env={**base, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=(out / f"log{rank}").open("wb"),
        )
        for rank in range(RANKS)
    }


def _reports(
    processes: dict[int, subprocess.Popen[bytes]], case: dict[str, Any], out: Path
) -> dict[int, dict[str, Any]]:
    """What the survivors said. Whoever does not end in time after it happened is killed, and
    hangs."""
    begun_s, happened = time.time(), out / "happened-0"
    try:
        survivors = {rank: p for rank, p in processes.items() if rank != case["who"]}
        while any(p.poll() is None for p in survivors.values()):
            since_s = happened.stat().st_mtime if happened.exists() else begun_s + START_S
            if time.time() > since_s + LIMIT_S:
                break
            time.sleep(0.1)
    finally:
        for process in processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()
    found = {}
    for rank, process in survivors.items():
        note, log = out / f"rank{rank}.json", (out / f"log{rank}").read_text(errors="replace")
        said = json.loads(note.read_text()) if note.exists() else {}
        report: dict[str, Any] = {"rc": process.returncode}
        if "at" in said:
            report["at"] = said["at"]
        report["accused"] = sorted({int(r) for r in ACCUSED.findall(said.get("error", "") + log)})
        report["error"] = said.get("error", "" if said else log[-300:])[:400]
        found[rank] = report
    return found


def _verdict(case: dict[str, Any], reports: dict[int, dict[str, Any]]) -> str:
    """`named`, `went on`, or what is wrong with the first report that is wrong."""
    verdict = "named"
    for rank, report in reports.items():
        if report["rc"] == -signal.SIGKILL:
            return f"rank {rank} hangs"
        if report["rc"] == 0 and case["strategy"] in GOING_ON:
            verdict = "went on"
        elif report["accused"] != [case["who"]]:
            words = f"rank {case['who']}"
            if words not in report["error"] or report["accused"]:
                return f"rank {rank} accuses {report['accused']}"
        elif report["after_s"] > TIMEOUT_S + 3:
            return f"rank {rank} was late"
    return verdict


# ---- restarts -----------------------------------------------------------------------------------


def restarted(cases: int, seed: int, only: str | None) -> list[dict[str, Any]]:
    draw, found = random.Random(seed), []
    strategies = [s for s in STRATEGIES if s != "ssp"]
    for n in range(cases):
        strategy = strategies[n % len(strategies)]
        happens = [
            {
                "who": draw.randrange(RANKS),
                "place": draw.choice(PLACES[:3] + PLACES[4:]),
                "way": draw.choice(["killed", "raises"]),
                "iteration": iteration,
                "delay_s": round(draw.uniform(0.001, 0.03), 4),
            }
            for iteration in sorted(draw.sample(range(12, 60), 2))
        ]
        if only is None or only == strategy:
            found.append(
                {"strategy": strategy, "happens": happens, **_bring_back(strategy, happens)}
            )
            print(json.dumps({**found[-1], "happens": len(happens)}), flush=True)
    return found


def _bring_back(strategy: str, happens: list[dict[str, Any]]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        ends = []
        # The first one, a short one, only measures the profile of both.
        for name, disturbed in (("first", []), ("plain", []), ("disturbed", happens)):
            out = Path(folder) / name
            out.mkdir()
            job = {
                "strategy": strategy,
                "iterations": 8 if name == "first" else 60,
                "out": str(out),
                "happens": disturbed,
                "profile": str(Path(folder) / "profile.json"),
                "folder": str(out / "saved"),
            }
            (out / "job.json").write_text(json.dumps(job))
            command = [
                sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=3",
                f"--nproc-per-node={RANKS}", __file__, "work", str(out / "job.json"),
            ]  # fmt: skip
            done = subprocess.run(
                command,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                capture_output=True,
                timeout=300,
            )
            said = [
                json.loads((out / f"rank{r}.json").read_text())
                for r in range(RANKS)
                if (out / f"rank{r}.json").exists()
            ]
            ends.append({"rc": done.returncode, "said": said})
        lost, back_s = [], []
        for attempt, event in enumerate(happens):
            files = [out / f"begun-{attempt + 1}-{r}" for r in range(RANKS)]
            if all(f.exists() for f in files):
                pairs = [map(float, f.read_text().split()) for f in files]
                began, at_s = zip(*pairs, strict=True)
                happened_s = float((out / f"happened-{attempt}").read_text())
                lost.append(event["iteration"] - int(min(began)))
                back_s.append(round(max(at_s) - happened_s, 1))
        _, plain, disturbed_end = ends
        same = [s.get("digest") for s in plain["said"]] == [
            s.get("digest") for s in disturbed_end["said"]
        ]
        curves = [[s.get("losses") for s in end["said"]] for end in (plain, disturbed_end)]
        return {
            "rc": disturbed_end["rc"],
            "same weights": same,
            "losses differ by": _distance(*curves),
            "iterations lost": lost,
            "seconds": back_s,
        }


def _distance(one: list[Any], other: list[Any]) -> float | None:
    """The largest difference between two ranks' losses, relative; None if some are missing."""
    if [r and len(r) for r in one] != [r and len(r) for r in other] or None in one or not one:
        return None
    pairs = [pair for a, b in zip(one, other, strict=True) for pair in zip(a, b, strict=True)]
    return max(abs(a - b) / abs(a) for a, b in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["named", "restarted", "work"])
    parser.add_argument("job", nargs="?")
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.what == "work":
        work(json.loads(Path(args.job).read_text()))
        return
    found = (named if args.what == "named" else restarted)(args.cases, args.seed, args.only)
    if args.out:
        args.out.write_text(json.dumps(found, indent=1))
    if args.what == "named":
        verdicts = [f["verdict"] for f in found]
        after = [r["after_s"] for f in found for r in f["reports"].values() if r.get("accused")]
        print({v: verdicts.count(v) for v in set(verdicts)})
        if after:
            print(f"reports after {statistics.median(after):.1f} s [{min(after)}, {max(after)}]")


if __name__ == "__main__":
    main()
