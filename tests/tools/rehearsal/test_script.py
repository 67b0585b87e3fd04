"""`offbeat rehearse` runs a script as it is, and its results are those of `offbeat.rehearse`."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from cases import rehearsed

from offbeat.cli import main
from offbeat.experiments.record.run_directory import load_repetition
from offbeat.jobs.record_lines import rank_files

HELPER = """
import os
RANK = int(os.environ["RANK"])  # of the process, for a job of processes
"""
SCRIPT = """
import sys
import random
import numpy as np
import torch
import torch.distributed as dist
import offbeat
import helper
from cases import rehearsed

seed = int(sys.argv[1])
dist.init_process_group("gloo")
rank = dist.get_rank()
assert rank == helper.RANK and dist.get_world_size() == 3
random.seed(seed + rank)
np.random.seed(seed + rank)
torch.manual_seed(seed + rank)
module = rehearsed.make_model()
model, optimizer = offbeat.prepare(module, rehearsed.make_optimizer(module), "bsp")
for i, batch in enumerate(rehearsed.batches(rank)):
    optimizer.zero_grad()
    loss = model(*batch)
    loss.backward()
    optimizer.step()
    offbeat.report_metric("rank", rank)
    mean = loss.detach().clone()
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    print(f"rank {rank} iteration {i} mean {mean.item():.12f}")
offbeat.save("checkpoints", model, optimizer).wait()
model.consolidate()
found = [None] * 3
dist.all_gather_object(found, rehearsed.flat(module).sum().item())
print("equal", len(set(found)) == 1)
settings = [{"rank": 0} if rank == 0 else None]
dist.broadcast_object_list(settings)
settings[0]["rank"] += rank  # a copy of its own, as in a process
dist.all_gather_object(found, settings[0])
found[0]["rank"] += 10
dist.barrier()
print("own", settings[0]["rank"] == rank, [one["rank"] for one in found])
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scripts")
    (path / "helper.py").write_text(HELPER)
    (path / "train.py").write_text(SCRIPT)
    rehearsed.profile_of(2).save(path / "profile.json")
    return path


def losses_in(repetition: Path) -> np.ndarray:
    """The losses of a repetition, mean over the ranks."""
    records = load_repetition(repetition, 0).ranks
    return np.mean([[loss for _, _, loss in record.losses] for record in records], axis=0)


def command(folder: Path, out: str, strategies: str, *more: str, resume: bool = False) -> list[str]:
    where = ["--resume" if resume else "--out", str(folder / out)]
    options = ["--profile", str(folder / "profile.json"), "--ranks", "3", *where]
    return ["rehearse", *options, "--strategies", strategies, *more]


def test_a_script_as_it_is(folder, monkeypatch):
    """The script equals the function, and --resume keeps what is complete."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)
    typed = command(folder, "run", "dreamddp:period=3", "--jitter", "0.1")
    script = [str(folder / "train.py"), "5"]
    assert main([*typed, *script]) == 0
    repetition = folder / "run" / "dreamddp-period=3" / "rep0"

    _, expected = rehearsed.rehearse("dreamddp:period=3", more_ranks=3, seed=5, jitter=0.1)
    records = load_repetition(repetition, 0).ranks
    np.testing.assert_allclose(losses_in(repetition), expected.losses, rtol=1e-8)
    assert [len(record.trace.ends_s[0]) for record in records] == [rehearsed.ITERATIONS] * 3
    inputs = rehearsed.ITERATIONS * (rehearsed.ROWS * 5 + rehearsed.ROWS)  # x and y
    assert [record.trace.notes["input_elements"] for record in records] == [inputs] * 3

    logs = [(repetition / f"rank{r}.log").read_text() for r in range(3)]
    for rank, log in enumerate(logs):
        assert log.splitlines()[-2:] == ["equal True", "own True [10, 1, 2]"]
        assert f"rank {rank} iteration 0 mean " in log
    assert len({log.partition("mean ")[2].split()[0] for log in logs}) == 1
    assert (folder / "checkpoints").exists()
    assert (folder / "run" / "report.html").exists()
    reported = [[i, value] for i, _, value in records[2].metrics["rank"]]
    assert reported == [[i, 2.0] for i in range(rehearsed.ITERATIONS)]

    written = (repetition / "rank0.jsonl").stat().st_mtime_ns
    again = command(folder, "run", "dreamddp:period=3", "--jitter", "0.1", resume=True)
    assert main([*again, *script]) == 0
    assert (repetition / "rank0.jsonl").stat().st_mtime_ns == written
    for other in (["--iterations", "3"], ["--device-speed", "2x"]):
        assert main([*again, *other, *script]) == 2


@pytest.mark.usefixtures("forked_rehearsals")
def test_a_script_that_prepares_nothing(folder):
    (folder / "nothing.py").write_text("print('nothing')")
    typed = command(folder, "nothing", "bsp")
    assert main([*typed, str(folder / "nothing.py")]) == 1
    assert "prepare" in (folder / "nothing" / "bsp" / "rep0" / "problem.txt").read_text()


def test_wrong_use(folder, capsys):
    for typed, named in (
        (command(folder, "x", "ssp"), "strategy"),
        (command(folder, "x", "wfbp", "--target", "accuracy=.9"), "loss"),
        (["rehearse", "--profile", str(folder / "one.json")], "ranks"),
    ):
        rehearsed.profile_of(1).save(folder / "one.json")
        assert main([*typed, str(folder / "train.py")]) == 2
        assert named in capsys.readouterr().err
    assert not (folder / "x").exists()


STOPPED = """
import os
import time

if os.environ["RANK"] == "0":
    launches = sum(name.startswith("launch") for name in os.listdir({folder!r}))
    open({folder!r} + f"/launch{{launches}}", "w").close()
    if launches == 1:
        time.sleep(60)
"""


@pytest.mark.usefixtures("forked_rehearsals")
def test_what_was_interrupted_is_rehearsed_after_what_is_kept(folder, tmp_path, monkeypatch):
    """Ctrl-C in the second strategy; then what is missing."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)
    (tmp_path / "helper.py").write_text(HELPER)
    script = [str(tmp_path / "train.py"), "5"]
    (tmp_path / "train.py").write_text(STOPPED.format(folder=str(tmp_path)) + SCRIPT)
    names = ["wfbp", "local-sgd:period=2"]

    def interrupt() -> None:
        while not (tmp_path / "launch1").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore it
    try:
        threading.Thread(target=interrupt, daemon=True).start()
        assert main([*command(folder, "cut", ",".join(names)), *script]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    paths = [folder / "cut" / n.replace(":", "-") / "rep0" for n in names]
    assert [(path / "problem.txt").exists() for path in paths] == [False, True]
    assert [len(rank_files(path)) for path in paths] == [3, 0]  # no measured times
    written = (paths[0] / "rank0.jsonl").stat().st_mtime_ns
    again = command(folder, "cut", ",".join(names), resume=True)
    assert main([*again, *script]) == 0
    assert (paths[0] / "rank0.jsonl").stat().st_mtime_ns == written
    for name, path in zip(names, paths, strict=True):
        _, expected = rehearsed.rehearse(name, more_ranks=3, seed=5)
        np.testing.assert_allclose(losses_in(path), expected.losses, rtol=1e-8)


NODES = """
import os
import offbeat
from cases import rehearsed
import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
assert not dist.is_initialized()  # prepare creates the group, as in a job
place = [os.environ[name] for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")]
torch.manual_seed(rank)
module = rehearsed.make_model()
model, optimizer = offbeat.prepare(module, rehearsed.make_optimizer(module), nodes="auto")
assert dist.is_initialized() and dist.get_world_size() == 6
for batch in offbeat.join(list(rehearsed.batches(rank))[: 3 + rank]):
    optimizer.zero_grad()
    model(*batch).backward()
    optimizer.step()
print(" ".join(place), rehearsed.flat(module)[:6].tolist())
"""


@pytest.mark.usefixtures("forked_rehearsals")
def test_replicas_of_two_ranks(folder, monkeypatch):
    """`--per-node 2`: both ranks of a node print the same weights, and the report has all ranks.
    The shortest loader ends the loops of all ranks."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)
    (folder / "nodes.py").write_text(NODES)
    typed = command(folder, "nodes", "local-sgd:period=2", "--per-node", "2")
    assert main([*typed, str(folder / "nodes.py")]) == 0
    repetition = folder / "nodes" / "local-sgd-period=2" / "rep0"
    logs = [(repetition / f"rank{r}.log").read_text().splitlines() for r in range(6)]
    words = [next(line for line in log if line[0] in "01").split(maxsplit=3) for log in logs]
    assert [line[:3] for line in words] == [[str(r % 2), "2", str(r // 2)] for r in range(6)]
    assert [words[r][3] for r in (0, 2, 4)] == [words[r][3] for r in (1, 3, 5)]
    assert len(losses_in(repetition)) == 3
    assert json.loads((folder / "nodes" / "run.json").read_text())["cluster"]["ranks"] == 2


ACCELERATE = """
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from offbeat.integrations.accelerate import prepare
from cases import rehearsed

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
module = rehearsed.make_model()
data = [(torch.full((5,), float(i), dtype=torch.float64), i % 3) for i in range(24)]
loader = DataLoader(data, batch_size=2)
optimizer = rehearsed.make_optimizer(module)
model, optimizer, loader = prepare(accelerator, module, optimizer, loader)
seen = []
for x, y in loader:
    accelerator.backward(model(x, y))
    optimizer.step()
    optimizer.zero_grad()
    seen += x[:, 0].tolist()
found = accelerator.gather(torch.tensor([accelerator.process_index]))
print(accelerator.process_index, found.tolist(), accelerator.is_main_process, seen)
"""


@pytest.mark.usefixtures("forked_rehearsals")
def test_accelerate_deals_the_data(folder, monkeypatch):
    """accelerate keeps its rank once per process; each replica has its own."""
    pytest.importorskip("accelerate")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)
    (folder / "accelerated.py").write_text(ACCELERATE)
    assert main([*command(folder, "accelerated", "wfbp"), str(folder / "accelerated.py")]) == 0
    repetition = folder / "accelerated" / "wfbp" / "rep0"
    logs = [(repetition / f"rank{r}.log").read_text().splitlines() for r in range(3)]
    lines = [log[-1].split(maxsplit=1) for log in logs]  # after warnings of accelerate
    shares = [[float(i) for i in range(24) if i // 2 % 3 == rank] for rank in range(3)]
    expected = [[str(r), f"[0, 1, 2] {r == 0} {shares[r]}"] for r in range(3)]
    assert lines == expected
