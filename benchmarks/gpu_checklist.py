"""Check-list for the first minutes on a GPU: each step prints what was seen, and ends in time.

    python benchmarks/gpu_checklist.py                  # all steps, about 10 minutes
    python benchmarks/gpu_checklist.py --only 1,3,10    # some of them
    python benchmarks/gpu_checklist.py --device cpu     # without a GPU, to try the script itself

A step that needs two GPUs is skipped with one. No step ends the others. The last lines repeat the
result of every step; `--json FILE` also writes them to a file.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
STEP_S = 180.0  # longest time of one job of a step
ITERATIONS = 8
RESULT = "result: "  # begins the line in which a worker reports
STRATEGIES = ["wfbp", "selsync:delta=0.0", "p3", "dear", "wfbp:wire=int8"]


class SkippedError(Exception):
    """A step that cannot run here; the text is the reason."""


class FailedError(Exception):
    """A step that has not shown what it should; the text is what was seen."""


# ---- jobs of a step -----------------------------------------------------------------------------


@dataclass
class Ended:
    """One rank of a job: exit code (None: had to be killed), result, and the end of its output."""

    code: int | None
    result: Any
    output: str

    @property
    def last_words(self) -> str:
        return " ".join(self.output.split())[-400:]


def run_ranks(
    ranks: int,
    work: str,
    *,
    disturb: Callable[[Sequence[subprocess.Popen[str]], Sequence[Path]], None] | None = None,
    **settings: Any,
) -> list[Ended]:
    """Run `work` of this script on some ranks of this machine.

    Args:
        ranks: number of processes.
        work: name of a function in `WORK`.
        disturb: called with the processes and the files of their outputs.
        settings: arguments of the work; names in capitals are environment variables.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    variables = {name: str(value) for name, value in settings.items() if name.isupper()}
    arguments = {name: value for name, value in settings.items() if not name.isupper()}
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, f"{rank}.txt") for rank in range(ranks)]
        processes = []
        for rank, path in enumerate(outputs):
            own = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                "NCCL_HOSTID": str(rank),  # two ranks may share a GPU
            }
            command = [sys.executable, __file__, "--work", work, json.dumps(arguments)]
            environ = {**os.environ, **own, **variables}
            with path.open("w") as output:
                processes.append(
                    subprocess.Popen(
                        command, env=environ, stdout=output, stderr=subprocess.STDOUT, text=True
                    )
                )
        if disturb is not None:
            disturb(processes, outputs)
        codes = wait_for(processes, STEP_S)
        return [
            Ended(code, result_of(path.read_text()), path.read_text())
            for code, path in zip(codes, outputs, strict=True)
        ]


def await_that(condition: Callable[[], bool], limit_s: float = STEP_S / 2) -> None:
    """Wait until a condition holds, at most `limit_s` seconds."""
    end_s = time.monotonic() + limit_s
    while not condition() and time.monotonic() < end_s:
        time.sleep(0.2)


def wait_for(processes: Sequence[subprocess.Popen[str]], limit_s: float) -> list[int | None]:
    """Return the exit codes. Processes that still run after the limit are killed."""
    end_s, codes = time.monotonic() + limit_s, list[int | None]()
    for process in processes:
        try:
            codes.append(process.wait(max(0.1, end_s - time.monotonic())))
        except subprocess.TimeoutExpired:
            codes.append(None)
            process.kill()
            process.wait()
    return codes


def result_of(output: str) -> Any:
    lines = [line for line in output.splitlines() if line.startswith(RESULT)]
    return json.loads(lines[-1].removeprefix(RESULT)) if lines else None


def require_results(ended: Sequence[Ended]) -> list[Any]:
    """Return the results of all ranks; raise FailedError with the last words of one without."""
    for rank, one in enumerate(ended):
        if one.code != 0 or one.result is None:
            raise FailedError(f"rank {rank} ended with {one.code}: {one.last_words}")
    return [one.result for one in ended]


def require_alike(ended: Sequence[Ended]) -> str:
    """Return the losses of rank 0. Raise FailedError unless all ranks have equal weights."""
    results = require_results(ended)
    if any(found["digest"] != results[0]["digest"] for found in results):
        raise FailedError(f"weights differ between ranks: {[r['digest'] for r in results]}")
    first, *_, last = results[0]["losses"]
    return f"losses {first:.4f} to {last:.4f}, {1e3 * results[0]['iteration_s']:.2f} ms"


# ---- work of a rank -----------------------------------------------------------------------------


def build_model(compiled: bool = False) -> Any:
    """Return blocks and a head of 10 classes, whose bias pushes what follows out of line."""
    import torch
    from torch import nn

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            blocks = [nn.Sequential(nn.Linear(257, 257), nn.Tanh()) for _ in range(6)]
            self.blocks = nn.ModuleList(torch.compile(b) if compiled else b for b in blocks)
            self.head = nn.Linear(257, 10)

        def forward(self, x: Any) -> Any:
            for block in self.blocks:
                x = x + block(x)
            return self.head(x)

    return Blocks()


class Script:
    """A training script on one rank."""

    def __init__(
        self,
        device: str,
        strategy: str = "wfbp",
        links: Sequence[str] = ("lo",),
        *,
        index: int | None = None,
        set_device: bool = False,
        compiled: bool = False,
        optimizer: str = "sgd",
        scaled: bool = False,
        plain: bool = False,
        gpt: bool = False,
        **options: Any,
    ) -> None:
        import torch
        from step import GPT

        import offbeat

        rank = int(os.environ["RANK"])
        if device == "cuda":
            number = rank % torch.cuda.device_count() if index is None else index
            self.where = torch.device("cuda", number)
            if set_device:
                torch.cuda.set_device(self.where)
        else:
            self.where = torch.device("cpu")
        torch.manual_seed(0)
        self.gpt = gpt  # 49 million parameters instead of .4 million, on a GPU
        small = {"width": 64, "layers": 2} if device == "cpu" else {}
        model = GPT(**small) if gpt else build_model(compiled)
        self.model: Any = model.to(self.where)
        fused = {"fused": True} if self.where.type == "cuda" else {}
        make = {
            "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
            "adam": lambda p: torch.optim.Adam(p, 1e-3, **fused),
        }[optimizer]
        self.optimizer: Any = make(self.model.parameters())
        self.scaler = torch.amp.GradScaler(self.where.type, 1024.0, enabled=scaled)
        if not plain:
            options = {"observe": 3, "min_bucket_bytes": 1, "timeout_s": 60.0, **options}
            self.model, self.optimizer = offbeat.prepare(
                self.model, self.optimizer, strategy, links=list(links), **options
            )

    def iterate(self, t: int) -> Any:
        import torch

        random = torch.Generator().manual_seed(10 * t + int(os.environ["RANK"]))
        if self.gpt:
            x, y = torch.randint(0, 512, (2, 8, 256), generator=random).to(self.where)
        else:
            x = torch.randn(32, 257, generator=random).to(self.where)
            y = torch.randint(0, 10, (32,), generator=random).to(self.where)
        self.optimizer.zero_grad()
        found = self.model(x)
        loss = torch.nn.functional.cross_entropy(found.flatten(0, -2), y.flatten())
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()

    def digest(self) -> str:
        import hashlib

        found = hashlib.sha256()
        for tensor in self.model.state_dict().values():
            found.update(tensor.detach().cpu().numpy().tobytes())
        return found.hexdigest()[:12]


def report(result: Any) -> None:
    print(RESULT + json.dumps(result), flush=True)


def work_train(device: str, iterations: int = ITERATIONS, **settings: Any) -> None:
    """Report losses, a digest of the weights and the seconds of an iteration."""
    import torch

    script = Script(device, **settings)
    losses = [script.iterate(t) for t in range(iterations)]
    begun_s = time.perf_counter()
    losses += [script.iterate(t) for t in range(iterations, 2 * iterations)]
    values = torch.stack(losses).tolist()  # waits for the device
    seconds = (time.perf_counter() - begun_s) / iterations
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    if not settings.get("plain"):
        script.model.consolidate()
    report(
        {"losses": values, "digest": script.digest(), "iteration_s": seconds, "peak_bytes": peak}
    )
    if not settings.get("plain"):
        script.model.close()


def work_fail(device: str, **settings: Any) -> None:
    """Train until the job fails, and report the error and its time."""
    script = Script(device, **settings)
    for t in range(5):
        script.iterate(t)
    report({"running": True})
    begun_s = time.time()
    try:
        for t in range(5, 100_000):
            script.iterate(t)
    except RuntimeError as error:
        report({"error": str(error), "at_s": time.time(), "waited_s": time.time() - begun_s})
        raise


def work_resume(device: str, folder: str, **settings: Any) -> None:
    """Report the losses after a checkpoint, of the saved run and of the resumed one."""
    import offbeat

    found = []
    for again in (False, True):
        script = Script(device, **settings)
        if again:
            offbeat.load(folder, script.model, script.optimizer)
        else:
            for t in range(ITERATIONS):
                script.iterate(t)
            offbeat.save(folder, script.model, script.optimizer).wait()
        found.append([float(script.iterate(t)) for t in range(ITERATIONS, 2 * ITERATIONS)])
        script.model.close()
    report(found)


def work_serve(device: str, **settings: Any) -> None:
    """Report the last loss of a worker; the server reports its end."""
    try:
        script = Script(device, **settings)
    except SystemExit:
        report("served")
        return
    losses = [float(script.iterate(t)) for t in range(ITERATIONS)]
    script.model.close()
    report(losses)


def work_memory(device: str, **settings: Any) -> None:
    """Report the bytes of the device at most: of plain training, while offbeat prepares and
    observes, and with its plan."""
    import torch

    def most() -> int:
        if device == "cpu":
            return 0
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return peak

    script, found = Script(device, plain=True, gpt=True, **settings), dict[str, int]()
    for t in range(ITERATIONS):
        script.iterate(t)
    found["model"] = sum(p.nbytes for p in script.model.parameters())
    del script
    most()
    script = Script(device, plain=True, gpt=True, **settings)
    for t in range(ITERATIONS):
        script.iterate(t)
    found["plain"] = most()
    del script
    most()
    script = Script(device, gpt=True, **settings)
    for t in range(ITERATIONS):
        script.iterate(t)
    found["prepared"] = most()
    for t in range(ITERATIONS, 2 * ITERATIONS):
        script.iterate(t)
    found["with a plan"] = most()
    script.model.close()
    report(found)


def work_waits(device: str, **settings: Any) -> None:
    """Report the places at which the host waits for the GPU in ten iterations, by count."""
    import torch

    script = Script(device, **settings)
    for t in range(ITERATIONS):
        script.iterate(t)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        for t in range(10):
            script.iterate(t)
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    places = Counter(
        f"{Path(w.filename).name}:{w.lineno}" for w in caught if "synchroniz" in str(w.message)
    )
    script.model.close()
    report(dict(places))


def work_trace(device: str, path: str, **settings: Any) -> None:
    """Write a trace of three iterations; report copies, their overlap with kernels, and gaps."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    script = Script(device, gpt=True, **settings)
    for t in range(ITERATIONS):
        script.iterate(t)
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(activities=kinds) as trace:
        for t in range(3):
            script.iterate(t)
        if device == "cuda":
            torch.cuda.synchronize()
    own = f"{path}.rank{os.environ['RANK']}.json"
    trace.export_chrome_trace(own)
    script.model.close()
    report({"file": own, **busy_times(json.loads(Path(own).read_text())["traceEvents"])})


def busy_times(events: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return milliseconds of kernels and of copies, and of copies while a kernel runs."""
    spans: dict[str, list[tuple[float, float]]] = {"kernel": [], "gpu_memcpy": []}
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in spans:
            spans[event["cat"]].append((event["ts"], event["ts"] + event["dur"]))
    kernels, copies = merged(spans["kernel"]), merged(spans["gpu_memcpy"])
    both = sum(
        max(0.0, min(end, stop) - max(begin, start))
        for begin, end in copies
        for start, stop in kernels
    )
    total = {"kernels": kernels, "copies": copies}
    return {
        **{f"{name}_ms": sum(z - a for a, z in found) / 1e3 for name, found in total.items()},
        "overlap_ms": both / 1e3,
    }


def merged(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the union of spans, in order."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


WORK: dict[str, Callable[..., None]] = {
    name.removeprefix("work_"): function
    for name, function in globals().copy().items()
    if name.startswith("work_")
}


# ---- steps --------------------------------------------------------------------------------------


def gpus() -> int:
    import torch

    return torch.cuda.device_count()


def require_gpus(count: int, device: str) -> None:
    if device == "cpu" or gpus() < count:
        raise SkippedError(f"needs {count} GPU{'s' * (count > 1)}; open")


def versions(device: str) -> str:
    """versions, device count"""
    import torch

    import offbeat

    found = [f"offbeat {offbeat.__version__}", f"torch {torch.__version__}"]
    if device == "cuda":
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        names = Counter(torch.cuda.get_device_name(i) for i in range(gpus()))
        found += [f"CUDA {torch.version.cuda}", f"NCCL {nccl}"]
        found += [f"{count} x {name}" for name, count in names.items()]
        if torch.cuda.nccl.version() < (2, 26):
            raise FailedError(f"NCCL must be at least 2.26: {', '.join(found)}")
    return ", ".join(found)


def tests(device: str) -> str:
    """pytest -m gpu"""
    require_gpus(1, device)
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/real/runtime/test_gpu.py"]
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=4 * STEP_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise FailedError(f"not ended after {4 * STEP_S:g} s") from None
    lines = done.stdout.strip().splitlines() or [done.stderr.strip()[-400:]]
    if done.returncode:
        failed = [line for line in lines if line.startswith("FAILED")]
        raise FailedError("; ".join([*failed, lines[-1]]))
    return lines[-1]


def share_a_gpu(device: str) -> str:
    """two ranks on one GPU over gloo, without set_device; equal weights, and those of CPUs"""
    own = run_ranks(2, "train", device=device, index=0)
    text = require_alike(own)
    plain = require_results(run_ranks(2, "train", device="cpu"))[0]["losses"]
    apart = max(abs(a - b) for a, b in zip(own[0].result["losses"], plain, strict=True))
    if apart > 1e-2:
        raise FailedError(f"losses differ from those of CPUs by {apart:.3g}; {text}")
    return f"{text}; losses differ from those of CPUs by {apart:.2g}"


def other_gpu(device: str) -> str:
    """a model on cuda:1, without and with set_device; no context on GPU 0"""
    require_gpus(2, device)
    texts = [require_alike(run_ranks(1, "train", device=device, index=1))]
    texts.append(require_alike(run_ranks(1, "train", device=device, index=1, set_device=True)))
    return "; ".join([*texts, "look at nvidia-smi meanwhile: rank 1 must not be on GPU 0"])


def nccl(device: str) -> str:
    """NCCL between two ranks, and the same with other strategies"""
    require_gpus(1, device)
    texts = []
    for strategy in STRATEGIES:
        found = run_ranks(
            2, "train", device=device, links=["nccl:lo"], strategy=strategy, NCCL_SOCKET_IFNAME="lo"
        )
        texts.append(f"{strategy}: {require_alike(found)}")
    return "; ".join(texts)


def gloo(device: str) -> str:
    """gloo between two ranks, with the same strategies"""
    return "; ".join(
        f"{strategy}: {require_alike(run_ranks(2, 'train', device=device, strategy=strategy))}"
        for strategy in STRATEGIES
    )


def two_links(device: str) -> str:
    """a link of NCCL and one of gloo on one hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1)"""
    require_gpus(1, device)
    found = run_ranks(
        2,
        "train",
        device=device,
        strategy="deft",
        links=["nccl:lo", "second=lo"],
        CUDA_DEVICE_MAX_CONNECTIONS=1,
        NCCL_SOCKET_IFNAME="lo",
    )
    return require_alike(found)


def lost_rank(device: str, links: Sequence[str], number: signal.Signals, **settings: Any) -> str:
    """Return seconds, words and exit code of the survivor of a job whose rank 1 gets a signal."""
    sent_s = 0.0

    def disturb(processes: Sequence[subprocess.Popen[str]], outputs: Sequence[Path]) -> None:
        nonlocal sent_s
        await_that(lambda: all(RESULT in path.read_text() for path in outputs))
        sent_s = time.time()
        processes[1].send_signal(number)
        await_that(lambda: processes[0].poll() is not None)
        processes[1].kill()

    settings = {"timeout_s": 30.0, **settings}
    survivor = run_ranks(2, "fail", device=device, links=links, disturb=disturb, **settings)[0]
    found = survivor.result or {}
    if "error" not in found:
        raise FailedError(f"exit code {survivor.code} without an error: {survivor.last_words}")
    words = " ".join(found["error"].split())
    text = f"{number.name} over {links[0]}: {found['at_s'] - sent_s:.1f} s, exit {survivor.code}"
    if "rank 1" not in words or survivor.code != 1:
        raise FailedError(f"{text}, {words[:200]}")
    return text


def lost_ranks(device: str) -> str:
    """kill -9 and kill -STOP of one rank, over gloo and NCCL"""
    links = [["lo"], *([["nccl:lo"]] if device == "cuda" else [])]
    signals = (signal.SIGKILL, signal.SIGSTOP)
    texts = [lost_rank(device, own, number) for own in links for number in signals]
    if device == "cuda":
        try:
            own = lost_rank(device, ["nccl:lo"], signal.SIGKILL, TORCH_NCCL_ASYNC_ERROR_HANDLING=3)
        except FailedError as error:
            own = str(error)
        texts.append(f"with torch's own handling of errors: {own[:200]}")
    return "; ".join(texts)


def ignored_values(device: str) -> str:
    """on_nonfinite="ignore" and kill -STOP: the wait has a timeout"""
    links = ["nccl:lo"] if device == "cuda" else ["lo"]
    return lost_rank(device, links, signal.SIGSTOP, on_nonfinite="ignore")


def compiled(device: str) -> str:
    """torch.compile per block, a head of 10 classes, buckets that change after the compilation"""
    settings = {"device": device, "iterations": ITERATIONS}
    one = require_results(run_ranks(1, "train", compiled=True, **settings))[0]["losses"]
    other = require_results(run_ranks(1, "train", **settings))[0]["losses"]
    apart = max(abs(a - b) for a, b in zip(one, other, strict=True))
    if apart > 1e-2:
        raise FailedError(f"losses differ from those without compilation by {apart:.3g}")
    return f"losses differ from those without compilation by {apart:.2g}"


def mixed_precision(device: str) -> str:
    """GradScaler and Adam(fused=True) against a plain loop"""
    settings = {"device": device, "optimizer": "adam", "scaled": True, "gpt": True}
    ours = require_results(run_ranks(1, "train", **settings))[0]
    plain = require_results(run_ranks(1, "train", plain=True, **settings))[0]
    apart = max(abs(a - b) for a, b in zip(ours["losses"], plain["losses"], strict=True))
    if apart > 1e-3:
        raise FailedError(f"losses differ from those of a plain loop by {apart:.3g}")
    more_s = 1e3 * (ours["iteration_s"] - plain["iteration_s"])
    more = (ours["peak_bytes"] - plain["peak_bytes"]) / 1e6
    return f"losses differ by {apart:.2g}, {more_s:+.2f} ms per iteration, {more:+.1f} MB at most"


COMPARED = """
import sys
sys.argv = ["train.py"]
sys.path.insert(0, {folder!r})
from gpu_checklist import Script
script = Script({device!r}, observe=6)
for t in range(60):
    script.iterate(t)
script.model.close()
"""


def comparison(device: str) -> str:
    """offbeat compare, with and without a pace"""
    texts = []
    for pace in ("auto", "none"):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "train.py")
            path.write_text(COMPARED.format(folder=str(Path(__file__).parent), device=device))
            command = ["compare", "--lab", "none", "--hosts", "2", "--strategies", "bsp,wfbp"]
            command += ["--repeat", "1", "--pace", pace, "--out", f"{folder}/run", str(path)]
            try:
                done = subprocess.run(
                    [sys.executable, "-m", "offbeat", *command],
                    cwd=folder,
                    capture_output=True,
                    text=True,
                    timeout=2 * STEP_S,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                raise FailedError(f"--pace {pace}: not ended after {2 * STEP_S:g} s") from None
            if done.returncode:
                words = " ".join((done.stdout + done.stderr).split())[-400:]
                raise FailedError(f"--pace {pace}: exit {done.returncode}, {words}")
            rows = json.loads(Path(folder, "run", "summary.json").read_text())["rows"]
            if lost := [row["label"] for row in rows if row["iteration_s"] is None]:
                raise FailedError(f"--pace {pace}: no time of {', '.join(lost)}")
            found = [f"{row['label']} {1e3 * row['iteration_s']:.2f} ms" for row in rows]
            texts.append(f"--pace {pace}: {', '.join(found)}")
    return "; ".join(texts)


def stored_state(device: str) -> str:
    """save and load with wire=powersgd, and SSP(accumulate=2)"""
    with tempfile.TemporaryDirectory() as folder:
        ended = run_ranks(
            2, "resume", device=device, folder=folder, strategy="wfbp:wire=powersgd:2"
        )
        for saved, resumed in require_results(ended):
            if saved != resumed:
                raise FailedError(f"losses {saved} before and {resumed} after the load")
    served = require_results(
        run_ranks(3, "serve", device=device, strategy="ssp:s=0:accumulate=2", OFFBEAT_SERVERS=1)
    )
    return f"a resumed run has equal losses; losses of SSP's worker {served[0][0]:.3f} to " + (
        f"{served[0][-1]:.3f}"
    )


def host_waits(device: str) -> str:
    """places at which the host waits for the GPU in ten iterations"""
    texts = []
    for strategy in ("wfbp", "selsync:delta=0.0", "local-sgd:period=2"):
        places = require_results(run_ranks(2, "waits", device=device, strategy=strategy))[0]
        found = ", ".join(f"{place} {count} times" for place, count in sorted(places.items()))
        texts.append(f"{strategy}: {found or 'none'}")
    return "; ".join(texts)


def overlap(device: str) -> str:
    """a trace of three iterations: kernels, copies, and their overlap"""
    path = str(Path(tempfile.gettempdir(), "offbeat-gpu-trace"))
    found = require_results(run_ranks(2, "trace", device=device, path=path))[0]
    times = [f"{name} {value:.2f}" for name, value in found.items() if name != "file"]
    return f"{', '.join(times)}; {found['file']}"


def memory(device: str) -> str:
    """memory of a model of 49 million parameters with Adam, alone: plain, prepared, with a plan"""
    found = require_results(run_ranks(1, "memory", device=device, optimizer="adam"))[0]
    model = found.pop("model")
    return ", ".join(f"{name} {size / model:.2f} models" for name, size in found.items())


STEPS: dict[int, Callable[[str], str]] = {
    1: versions,
    2: tests,
    3: share_a_gpu,
    4: other_gpu,
    5: gloo,
    6: nccl,
    7: two_links,
    8: lost_ranks,
    9: ignored_values,
    10: compiled,
    11: mixed_precision,
    12: comparison,
    13: stored_state,
    14: host_waits,
    15: overlap,
    16: memory,
}


@dataclass
class Step:
    """Result of a step."""

    number: int
    title: str
    outcome: str = "ok"
    seen: str = ""
    seconds: float = field(default=0.0)

    def __str__(self) -> str:
        return f"{self.number:2d} {self.outcome:7s} {self.seconds:6.1f} s  {self.title}"


def run_step(number: int, device: str) -> Step:
    """Run one step. An error of any kind is its result."""
    function, begun_s = STEPS[number], time.monotonic()
    step = Step(number, (function.__doc__ or "").strip().partition("\n")[0])
    try:
        step.seen = function(device)
    except SkippedError as reason:
        step.outcome, step.seen = "skipped", str(reason)
    except FailedError as error:
        step.outcome, step.seen = "FAILED", str(error)
    except Exception as error:
        step.outcome, step.seen = "FAILED", f"{type(error).__name__}: {error}"
    step.seconds = time.monotonic() - begun_s
    return step


def numbers_of(text: str | None) -> list[int]:
    """Return the steps of a list such as "1,3,10"; all steps for None."""
    if text is None:
        return [*STEPS]
    if not re.fullmatch(r"\d+(,\d+)*", text) or {*map(int, text.split(","))} - {*STEPS}:
        raise SystemExit(f"--only ({text}) must be numbers of 1 to {len(STEPS)}, as 1,3,10")
    return [int(number) for number in text.split(",")]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the steps and print their results. Return 1 if a step has failed."""
    if argv is None and sys.argv[1:2] == ["--work"]:
        WORK[sys.argv[2]](**json.loads(sys.argv[3]))
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", help="numbers of the steps to run, as 1,3,10")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", help="file for the results")
    given = parser.parse_args(argv)
    if given.device == "cuda" and not gpus():
        print("no CUDA device; --device cpu tries the script itself")
        return 1
    steps = []
    for number in numbers_of(given.only):
        steps.append(run_step(number, given.device))
        print(f"{steps[-1]}\n           {steps[-1].seen}", flush=True)
    print("\n" + "\n".join(map(str, steps)))
    if given.json:
        Path(given.json).write_text(json.dumps([asdict(step) for step in steps], indent=1) + "\n")
    return int(any(step.outcome == "FAILED" for step in steps))


if __name__ == "__main__":
    raise SystemExit(main())
