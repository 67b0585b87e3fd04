"""Records of jobs that no launcher of the project has started, for every kind of session."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from itertools import takewhile
from pathlib import Path

import pytest
from cases import observed_jobs
from harness.commands import ForkedPython
from harness.ranks import free_port, run_ranks, watch_ranks

from offbeat import Plan, Profile
from offbeat.experiments.record.run_directory import load_repetition
from offbeat.experiments.report.job import job_report
from offbeat.jobs.interval import Interval, combine
from offbeat.jobs.record_folder import find_runs
from offbeat.jobs.record_lines import RUN_FILE, load


@pytest.mark.parametrize(
    ("strategy", "servers"), [("dreamddp:period=2", 0), ("ddp", 0), ("a2cid2", 0), ("ssp", 1)]
)
def test_a_record_of_each_kind_of_session(strategy: str, servers: int, tmp_path: Path) -> None:
    ranks = 2 + servers
    said = run_ranks(ranks, observed_jobs.train_recorded, str(tmp_path), strategy, "text", servers)
    (folder,) = tmp_path.iterdir()
    record = load([folder])
    assert record.missing == []
    assert record.problems == []
    run = record.run
    assert [run["id"], run["job_name"], run["world_size"]] == [folder.name, "a-job", ranks]
    assert run["strategy"].startswith(strategy.partition(":")[0])
    for rank, lines in record.ranks.items():
        assert lines.head["id"] == folder.name
        assert lines.end is not None
        assert lines.end["how"] == "ended"
        if rank >= 2:  # a server trains nothing
            assert lines.intervals == []
            continue
        whole = combine(lines.intervals)
        assert [whole.first, whole.n, whole.updates] == [0, 8, 8]
        assert whole.loss is not None
        assert whole.loss.n == 8
        assert whole.links["net"].bytes > 0
        assert whole.own_s > 0
        metrics = [(m["name"], m["value"], m["n"], m["iteration"]) for m in lines.metrics]
        assert metrics == [("accuracy", 0.5, 2, 7)], "the mean of the finite values"
        assert lines.first == (2 if strategy.startswith("dreamddp") else 0)
    assert record.alive is not None
    assert [one["rank"] for one in record.alive["ranks"]] == [*range(ranks)]
    newest = Interval.from_dict(record.alive["ranks"][0]["interval"])
    assert newest == record.ranks[0].intervals[-1]
    assert f"offbeat report {folder}" in " ".join(said[0].split())
    assert said[1] in ("", "served"), "rank 0 prints for all"
    planned = (folder / "plan.json").exists()
    assert planned == (strategy == "dreamddp:period=2"), "the others measure no profile"
    if planned:
        for name, kind in (("plan.json", Plan), ("profile.json", Profile)):
            kind.from_dict(json.loads((folder / name).read_text()))


def test_messages_as_json_and_none(tmp_path: Path) -> None:
    said = run_ranks(2, observed_jobs.train_recorded, str(tmp_path), "wfbp", "json")
    lines = [json.loads(line) for line in said[0].splitlines()]
    assert {line["event"] for line in lines} >= {"start", "end"}
    assert all(isinstance(line["t"], float) and line["level"] for line in lines)
    assert lines[-1]["how"] == "ended"
    assert run_ranks(2, observed_jobs.printed_without_record, "off") == ["", ""]
    first, other = run_ranks(2, observed_jobs.printed_without_record, "text")
    assert "bsp, 2 ranks" in first
    assert other == ""


def test_every_line_of_a_job_is_json(tmp_path: Path) -> None:
    """Of a start, a stop and a restart from a checkpoint, with messages of several rooms."""
    strategy, found = "a2cid2:topology=measured", list[set[str]]()
    for signal_at, code in ((4, -signal.SIGTERM), (-1, 0)):
        act = (str(tmp_path), strategy, signal_at)
        outcomes = watch_ranks(2, observed_jobs.train_until_signal, *act)
        assert [one.exitcode for one in outcomes] == [code] * 2
        zero, one = ((tmp_path / f"stderr{rank}").read_text().splitlines() for rank in range(2))
        found.append({json.loads(line)["event"] for line in zero})
        # Torch's own message that the store of rank 0 is gone can follow at the end.
        assert [*takewhile(lambda line: not line.startswith("[rank1]:[W"), one)] == []
    assert found[0] == {"start", "graph", "join", "checkpoint", "plan", "end"}
    assert found[1] == found[0] | {"replicas"}  # a job that was stopped prints no difference


@pytest.mark.parametrize(("signal_at", "how"), [(1, "signal"), (observed_jobs.ITERATIONS, "ended")])
def test_a_signal_without_a_checkpoint(signal_at: int, how: str, tmp_path: Path) -> None:
    """While the profile is measured, which is not a part of checkpoints, and before the model is
    closed."""
    act = (str(tmp_path), "wfbp", signal_at)
    outcomes = watch_ranks(2, observed_jobs.train_until_signal, *act)
    assert [one.exitcode for one in outcomes] == [-signal.SIGTERM] * 2
    (folder,) = (tmp_path / "runs").iterdir()
    assert [(lines.end or {})["how"] for lines in load([folder]).ranks.values()] == [how] * 2
    assert not [*(tmp_path / "kept").glob("*")]


def test_ctrl_c_is_the_end_of_a_record(tmp_path: Path) -> None:
    (printed,) = run_ranks(1, observed_jobs.interrupt_recorded, str(tmp_path))
    assert "FutureWarning" not in printed, "of torch's DDP"
    (folder,) = tmp_path.iterdir()
    end = load([folder]).ranks[0].end
    assert end is not None
    assert (end["how"], end["iteration"]) == ("signal", 2)
    assert end["text"] in " ".join(printed.split())


FAILING = """
import torch, offbeat
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model, optimizer = offbeat.prepare(model, optimizer, "bsp", observe=2, timeout_s=20)
rank = torch.distributed.get_rank()
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    if rank == 1:
        raise KeyError("x")
"""


def test_the_rank_that_fails_is_told_from_the_one_that_waits_for_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FAILING)
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    place |= {"OFFBEAT_RECORD": str(tmp_path / "runs"), "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        ForkedPython(
            [sys.executable, str(tmp_path / "train.py")],
            stderr=subprocess.PIPE,
            env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            ends=True,
        )
        for rank in range(2)
    ]
    errors = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 1], errors
    (folder,) = (tmp_path / "runs").iterdir()
    other, failed = (lines.end or {} for _, lines in sorted(load([folder]).ranks.items()))
    assert (failed["how"], failed["text"], failed["iteration"]) == ("raised", "KeyError: 'x'", 1)
    assert (other["how"], other["waited"], failed.get("waited", False)) == ("raised", True, False)


def test_a_run_names_the_run_that_it_continues(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    run_ranks(2, observed_jobs.train_twice, str(runs), str(tmp_path / "checkpoints"))
    records = sorted((load([folder]) for folder in runs.iterdir()), key=lambda r: r.run["started"])
    first, second = records
    events = [e for e in second.ranks[1].events if e["event"] == "checkpoint"]
    assert [(e["continues"], e["iteration"]) for e in events] == [(first.run["id"], 8)]
    whole = combine(second.ranks[1].intervals)
    assert [whole.first, whole.n] == [8, 8]
    assert not [e for e in first.ranks[1].events if e["event"] == "checkpoint"]


@pytest.mark.parametrize("job", ["night", "none"])
def test_attempts_of_torchrun_are_linked(job: str, tmp_path: Path) -> None:
    """Without a checkpoint an attempt continues the one before it, and a run of another job never
    does."""
    runs = tmp_path / "runs"
    earlier = runs / "other"
    earlier.mkdir(parents=True)
    other = {"job": "other", "agent": "other:1", "restarts": 0}
    (earlier / RUN_FILE).write_text(json.dumps({"id": "other", "started": 1.0, "torchrun": other}))
    act = (str(runs), job, str(tmp_path / "kept"))
    run_ranks(1, observed_jobs.train_at_every_attempt, *act)
    records = [load([folder]) for folder in find_runs(runs)][1:]
    found = [
        [(e["event"], e["continues"]) for e in record.ranks[0].events if "continues" in e]
        for record in records
    ]
    ids = [record.run["id"] for record in records]
    assert found == [
        [],
        [("restart", ids[0])],
        [("restart", ids[1])],
        [("restart", ids[2]), ("checkpoint", ids[2])],
    ]
    last = job_report(records[-1], 0.0)
    chain = [(one.run, one.iteration) for one in last.restarts]
    assert chain == [(ids[2], 8), (ids[1], 0), (ids[0], 0)]


def test_forks_write_close_and_end_nothing(tmp_path: Path) -> None:
    """Workers of a DataLoader, children of multiprocessing, and os.fork of every rank."""
    for codes in run_ranks(2, observed_jobs.train_with_forks, str(tmp_path)):
        assert codes == [7, 0, 7, 1, 7, 0, 7, 0], "of os.fork and multiprocessing in turn"
    (folder,) = (tmp_path / "runs").iterdir()
    record = load([folder])
    for lines in record.ranks.values():
        whole = combine(lines.intervals)
        assert [whole.first, whole.n] == [0, 8]
        assert lines.metrics == []
        assert [event["text"] for event in lines.events if "fork" in event["text"]] == []
        assert lines.end is not None
        assert (lines.end["how"], lines.damaged, lines.torn) == ("ended", 0, False)
    names = {"run", "alive", "plan", "profile", "predicted"}
    assert {path.name.partition(".")[0] for path in folder.iterdir()} == names | {"rank0", "rank1"}


def test_the_launcher_has_no_record_of_a_server(tmp_path: Path) -> None:
    """Reports join the iterations of all records of a launched run."""
    said = run_ranks(3, observed_jobs.train_launched, str(tmp_path), "ssp", 1)
    assert said[2] == "served"
    repetition = load_repetition(tmp_path, 0)
    assert [record.rank for record in repetition.ranks] == [0, 1]
    assert repetition.complete
    assert repetition.trace.iterations == observed_jobs.ITERATIONS
