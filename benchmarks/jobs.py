"""Jobs of torchrun on four hosts (namespaces): prediction, notices, ends and records.

    python benchmarks/jobs.py gpt --out runs      (as root; 8 minutes)
    python benchmarks/jobs.py causes --out runs   (8 minutes)
    python benchmarks/jobs.py steady --out runs   (10 minutes)
    python benchmarks/jobs.py ends --out runs     (3 minutes)
    python benchmarks/jobs.py cost                (2 minutes)

`gpt`: a GPT of 100 million parameters at 200 Mbit/s, one hundred iterations. `causes`: a rank that
computes slowly, a link at a quarter of its rate and a slow data loader, one after the other.
`steady`: no disturbance. `ends`: SIGKILL of a rank, an exception, SIGTERM, a full disk, a restart.
`cost`: processor time of a record, by sessions of one process that train in turns.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import partitions
from partitions import PREFIX, run

HOSTS = 4
QUIET_S, WINDOW_S = 30.0, 15.0  # shorter than in jobs, so that causes follow each other soon
PHASE_S = 75.0


# ---- what each rank runs --------------------------------------------------------------------


def small_model() -> Any:
    from torch import nn

    layers = [part for _ in range(6) for part in (nn.Linear(512, 512), nn.Tanh())]
    return nn.Sequential(*layers)


def large_model() -> Any:
    """A GPT of 101 million parameters: 12 layers of width 768, a vocabulary of 16,384."""
    import torch
    from torch import nn

    class GPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(16384, 768)
            self.layers = nn.ModuleList(
                nn.TransformerEncoderLayer(
                    768, 12, 3072, dropout=0.0, batch_first=True, norm_first=True
                )
                for _ in range(12)
            )
            self.head = nn.Linear(768, 4096, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.embed(x)
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    return GPT()


def work(task: Mapping[str, Any]) -> None:
    """Train as one rank of a job of torchrun."""
    import torch
    from torch.nn import functional

    import offbeat
    from offbeat.jobs import outlook

    if "quiet_s" in task:
        outlook.QUIET_S, outlook.WINDOW_S = task["quiet_s"], task["window_s"]
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    torch.set_num_threads(1)
    is_large = task["model"] == "gpt"
    model = large_model() if is_large else small_model()
    slow = [0.0]
    if not is_large:
        model[0].register_forward_hook(lambda *_: time.sleep(slow[0]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = offbeat.prepare(model, optimizer, task["strategy"], timeout_s=120)
    numbers = torch.Generator().manual_seed(rank)
    control = Path(task["control"])
    end_s = time.monotonic() + task["seconds"]
    done = 0
    while time.monotonic() < end_s and done < task["iterations"]:
        if not is_large and done % 5 == 0 and control.exists():
            phase = json.loads(control.read_text())
            slow[0] = phase.get("compute", {}).get(str(rank), 0.0)
            time.sleep(5 * phase.get("script", {}).get(str(rank), 0.0))
            if phase.get("raise") == rank:
                raise KeyError("no such label")
        optimizer.zero_grad()
        if is_large:
            x = torch.randint(4096, (1, 33), generator=numbers)
            loss = functional.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
        else:
            x = torch.randn(16, 512, generator=numbers)
            loss = (model(x) - x.roll(1, 1)).square().mean()
        loss.backward()
        optimizer.step()
        done += 1
    model.close()


# ---- jobs -----------------------------------------------------------------------------------


@contextlib.contextmanager
def job(
    task: dict[str, Any], out: Path, name: str, environment: Mapping[str, str]
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """An agent of torchrun on each host. What runs at the end is killed."""
    task = {**task, "control": str(out / f"{name}.control")}
    Path(task["control"]).unlink(missing_ok=True)
    (out / f"{name}.json").write_text(json.dumps(task))
    agents = [
        subprocess.Popen(
            f"ip netns exec {PREFIX}{host} {sys.executable} -m torch.distributed.run "
            f"--nnodes={HOSTS} --nproc-per-node=1 --node-rank={host} "
            f"--master-addr=10.77.0.1 --master-port=29517 "
            f"{__file__} work {out / f'{name}.json'}".split(),
            env={
                **os.environ,
                "GLOO_SOCKET_IFNAME": "eth0",
                "OFFBEAT_LINKS": "eth0",
                "OMP_NUM_THREADS": "1",
                "OFFBEAT_RECORD": str(out / "runs"),
                "OFFBEAT_JOB_NAME": name,
                **environment,
            },
            stderr=(out / f"{name}{host}.log").open("wb"),
            start_new_session=True,
        )
        for host in range(HOSTS)
    ]
    try:
        yield agents
    finally:
        for agent in agents:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(agent.pid, signal.SIGKILL)
            agent.wait()


def wait_for(agents: list[subprocess.Popen[bytes]], seconds: float) -> list[int | None]:
    """Return the exit codes after all have ended, or after some seconds."""
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s and any(agent.poll() is None for agent in agents):
        time.sleep(0.2)
    return [agent.poll() for agent in agents]


def newest_run(out: Path) -> Path:
    """Return the folder of the newest run."""
    return max((out / "runs").iterdir(), key=lambda folder: folder.stat().st_mtime)


def wait_for_iterations(out: Path, known: set[Path], seconds: float = 90.0) -> Path:
    """Return the folder of a new run once an interval is recorded."""
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        for folder in set((out / "runs").glob("*")) - known:
            lines = folder / "rank0.jsonl"
            if lines.exists() and lines.read_text().count('"interval"') > 1:
                return folder
        time.sleep(0.2)
    raise RuntimeError("no run has begun; see the logs")


def pids_of(folder: Path) -> list[int]:
    return json.loads((folder / "run.json").read_text())["pids"]


def events_of(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "rank0.jsonl").read_text().splitlines()
    parsed = [json.loads(line) for line in lines]
    return [line for line in parsed if line["kind"] == "event"]


SMALL = {"model": "small", "strategy": "wfbp", "seconds": 1e9, "iterations": 10**9}


def causes(out: Path) -> None:
    """Each cause must bring one notice with its name."""
    task = {**SMALL, "quiet_s": QUIET_S, "window_s": WINDOW_S}
    phases: list[tuple[str, dict[str, Any], str | None]] = [
        ("steady", {}, None),
        ("slow_rank", {"compute": {2: 0.3}}, None),
        ("steady", {}, None),
        ("slow_link", {}, "25mbit"),
        ("steady", {}, None),
        ("slow_script", {"script": {1: 0.3}}, None),
        ("steady", {}, None),
    ]
    with partitions.network(HOSTS, "100mbit"), job(task, out, "causes", {}):
        folder = wait_for_iterations(out, set())
        for name, control, rate in phases:
            begun = len(events_of(folder))
            (out / "causes.control").write_text(json.dumps(control))
            for host in range(HOSTS):
                run(
                    f"tc qdisc change dev {PREFIX}v{host} root tbf rate {rate or '100mbit'} "
                    "burst 64kb latency 50ms"
                )
            time.sleep(PHASE_S)
            found = [
                (event["event"], event.get("cause"), event.get("rank"))
                for event in events_of(folder)[begun:]
            ]
            print(f"{name}: {found}", flush=True)


def steady(out: Path, seconds: float) -> None:
    with (
        partitions.network(HOSTS, "100mbit"),
        job({**SMALL, "seconds": seconds}, out, "steady", {}) as agents,
    ):
        folder = wait_for_iterations(out, set())
        print(wait_for(agents, seconds + 120), events_of(folder))
    print((out / "steady0.log").read_text())


def gpt(out: Path) -> None:
    task = {"model": "gpt", "strategy": "dreamddp:period=8", "seconds": 1500, "iterations": 100}
    with (
        partitions.network(HOSTS, "200mbit"),
        job(task, out, "gpt", {"OFFBEAT_METRICS": f"tensorboard:{out}/tensorboard"}) as agents,
    ):
        print(wait_for(agents, 1600))
    print((out / "gpt0.log").read_text())


def ends(out: Path) -> None:
    """Five ends; the report must state each."""
    with partitions.network(HOSTS, "100mbit"):
        for name in ("kill", "raise", "sigterm", "disk", "restart"):
            known = set((out / "runs").glob("*")) if (out / "runs").exists() else set()
            checkpoints = {"OFFBEAT_CHECKPOINT": str(out / "checkpoints")}
            environment = checkpoints if name in ("sigterm", "restart") else {}
            with contextlib.ExitStack() as stack:
                if name == "disk":
                    disk = out / "disk"
                    disk.mkdir(exist_ok=True)
                    run(f"mount -t tmpfs -o size=24k tmpfs {disk}")
                    stack.callback(run, f"umount -l {disk}")
                    environment = {"OFFBEAT_RECORD": str(disk)}
                seconds = 30.0 if name in ("disk", "restart") else 1e9
                task = {**SMALL, "seconds": seconds}
                agents = stack.enter_context(job(task, out, name, environment))
                if name != "disk":
                    folder = wait_for_iterations(out, known)
                    pids = pids_of(folder)
                    if name == "kill":
                        os.kill(pids[1], signal.SIGKILL)
                    elif name == "raise":
                        (out / "raise.control").write_text('{"raise": 2}')
                    elif name == "sigterm":
                        for pid in pids:
                            os.kill(pid, signal.SIGTERM)
                codes = wait_for(agents, 90)
                print(f"==== {name}: exit codes of the agents {codes}", flush=True)
                if name != "disk":
                    report = [sys.executable, "-m", "offbeat", "report", str(folder)]
                    print(subprocess.run(report, capture_output=True, text=True).stdout)
                print("\n".join(
                    line for line in (out / f"{name}0.log").read_text().splitlines()
                    if line.startswith(("offbeat:", "         ")) or "record" in line
                ))  # fmt: skip


def cost(out: Path) -> None:
    """Blocks of 50 steps in turns: with a record, with a second session without one, and again."""
    import statistics

    import torch

    import offbeat

    torch.set_num_threads(1)
    x, sessions = torch.randn(192, 512), []
    for kind in ("record", "off", "off again"):
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        record = str(out / "cost") if kind == "record" else None
        os.environ["OFFBEAT_LOG"] = "off"
        prepared = offbeat.prepare(model, optimizer, "wfbp", record=record, observe=2)
        sessions.append((kind, *prepared, list[float]()))
    for block in range(25):
        for _, model, optimizer, seconds in sessions[block % 3 :] + sessions[: block % 3]:
            begun_s = time.process_time()
            for _ in range(50):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
            seconds.append((time.process_time() - begun_s) / 50)
    base = statistics.median(sessions[1][3][1:])
    for kind, model, _, seconds in sessions:
        ratios = [s / b - 1 for s, b in zip(seconds[1:], sessions[1][3][1:], strict=True)]
        low, middle, high = (statistics.quantiles(ratios, n=20)[k] for k in (0, 9, 18))
        step_ms = 1e3 * statistics.median(seconds[1:])
        spread = f"90 % of blocks: {low:+.2%} to {high:+.2%}"
        print(f"{kind}: {step_ms:.2f} ms per step, of {1e3 * base:.2f}; {middle:+.2%} ({spread})")
        model.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["gpt", "causes", "steady", "ends", "cost", "work"])
    parser.add_argument("task", nargs="?", type=Path)
    parser.add_argument("--out", type=Path, default=Path("jobs"))
    parser.add_argument("--seconds", type=float, default=600.0)
    given = parser.parse_args()
    if given.what == "work":
        work(json.loads(given.task.read_text()))
        return
    out = given.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    if given.what == "steady":
        steady(out, given.seconds)
    else:
        {"gpt": gpt, "causes": causes, "ends": ends, "cost": cost}[given.what](out)


if __name__ == "__main__":
    main()
