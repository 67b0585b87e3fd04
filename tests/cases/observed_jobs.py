"""Jobs that keep a record without a launcher, as ranks of a world."""

from __future__ import annotations

import atexit
import io
import json
import math
import multiprocessing
import os
import signal
import warnings
from contextlib import redirect_stderr, suppress
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

import offbeat
from cases.models import Case, build_model, build_optimizer
from cases.workers import batch, loss_of, rank

CASE = Case("mlp", "sgd")
ITERATIONS = 8


def train(strategy: str, checkpoint: str | None = None, servers: int = 0) -> str:
    """Train a few iterations; return what this rank has printed."""
    if servers:
        os.environ["OFFBEAT_SERVERS"] = str(servers)
    model = build_model(CASE)
    text = io.StringIO()
    with redirect_stderr(text), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, optimizer = offbeat.prepare(
            model, build_optimizer(CASE, model), strategy, observe=2, timeout_s=20
        )
        if checkpoint is not None and Path(checkpoint).exists():
            offbeat.load(checkpoint, model, optimizer)
        for t in range(ITERATIONS):
            optimizer.zero_grad()
            loss_of(model, *batch(CASE, rank(), t)).backward()
            optimizer.step()
        for value in (0.25, math.nan, 0.75, math.inf):
            offbeat.report_metric("accuracy", value)
        if checkpoint is not None:
            offbeat.save(checkpoint, model, optimizer).wait()
        model.close()
    return text.getvalue()


def train_recorded(folder: str, strategy: str, log: str = "text", servers: int = 0) -> str:
    os.environ |= {"OFFBEAT_RECORD": folder, "OFFBEAT_LOG": log, "OFFBEAT_JOB_NAME": "a-job"}
    try:
        return train(strategy, servers=servers)
    except SystemExit:  # of a server
        return "served"


def train_launched(folder: str, strategy: str, servers: int) -> str:
    """Train as a rank of a launcher, with a record in a folder."""
    job = Path(folder, f"job{rank()}.json")
    job.write_text(json.dumps({"schema": 1, "record_dir": folder}))
    os.environ["OFFBEAT_JOB"] = str(job)
    try:
        return train(strategy, servers=servers)
    except SystemExit:  # of a server
        return "served"


def train_twice(folder: str, checkpoint: str) -> list[str]:
    """Train, save, and continue in another run."""
    os.environ |= {"OFFBEAT_RECORD": folder}
    return [train("wfbp", checkpoint) for _ in range(2)]


def train_at_every_attempt(folder: str, job: str, checkpoint: str) -> list[str]:
    """Train in four attempts of a job of torchrun. Only the last one loads a checkpoint."""
    os.environ |= {"OFFBEAT_RECORD": folder, "TORCHELASTIC_RUN_ID": job}
    printed = list[str]()
    for restarts, saved in ((0, None), (1, None), (2, checkpoint), (3, checkpoint)):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(restarts)
        printed.append(train("wfbp", saved))
    return printed


def train_until_signal(folder: str, strategy: str, signal_at: int) -> None:
    """Train with a record, checkpoints and messages as JSON, all of stderr in a file. Before
    iteration `signal_at`, or before the model is closed, this rank receives SIGTERM."""
    log = os.open(f"{folder}/stderr{rank()}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 2)
    os.environ |= {"OFFBEAT_LOG": "json", "OFFBEAT_RECORD": f"{folder}/runs"}
    os.environ |= {"OFFBEAT_CHECKPOINT": f"{folder}/kept", "OFFBEAT_SECRET": "of a test"}
    model = build_model(CASE)
    model, optimizer = offbeat.prepare(model, build_optimizer(CASE, model), strategy, timeout_s=20)
    for t in range(offbeat.iteration(model), ITERATIONS):
        if t == signal_at:
            os.kill(os.getpid(), signal.SIGTERM)
        optimizer.zero_grad()
        loss_of(model, *batch(CASE, rank(), t)).backward()
        optimizer.step()
    if signal_at == ITERATIONS:
        os.kill(os.getpid(), signal.SIGTERM)
    model.close()


def interrupt_recorded(folder: str) -> str:
    """What is printed at Ctrl-C after two iterations."""
    os.environ |= {"OFFBEAT_RECORD": folder}
    text = io.StringIO()
    with redirect_stderr(text):
        model = build_model(CASE)
        model, optimizer = offbeat.prepare(model, build_optimizer(CASE, model), "ddp")
        for t in range(2):
            optimizer.zero_grad()
            loss_of(model, *batch(CASE, rank(), t)).backward()
            optimizer.step()
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            model.close()
    return text.getvalue()


def printed_without_record(log: str) -> str:
    os.environ |= {"OFFBEAT_LOG": log}
    return train("bsp")


class Reporting(Dataset[torch.Tensor]):
    """Samples whose workers report metrics and train a model of their own."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        offbeat.report_metric("of_a_worker", index)
        weight = torch.ones(2, requires_grad=True)
        weight.sum().backward()
        return weight.grad  # type: ignore[return-value]


def train_with_forks(folder: str) -> list[int]:
    """Train while forks of this process load data, close the model, fail, and exit as scripts do.

    Returns:
        Exit codes of the forks.
    """
    os.environ |= {"OFFBEAT_RECORD": f"{folder}/runs", "OFFBEAT_LOG": "off"}
    model = build_model(CASE)
    model, optimizer = offbeat.prepare(
        model, build_optimizer(CASE, model), "wfbp", observe=2, timeout_s=20
    )

    def leave_by_close() -> None:
        model.close()

    def fail() -> None:
        raise KeyError("of a fork")

    def exit_as_scripts_do() -> None:
        atexit._run_exitfuncs()

    def report() -> None:
        offbeat.report_metric("of_a_fork", 1.0)

    codes, forked = [], multiprocessing.get_context("fork")
    loader = DataLoader(Reporting(), batch_size=4, num_workers=1, multiprocessing_context=forked)
    for t, act in enumerate((leave_by_close, fail, exit_as_scripts_do, report)):
        for _ in loader:
            optimizer.zero_grad()
            loss_of(model, *batch(CASE, rank(), t)).backward()
            optimizer.step()
        if not (child := os.fork()):
            signal.alarm(20)
            with suppress(KeyError):
                act()
            os._exit(7)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        process = forked.Process(target=act)
        process.start()
        process.join(20)
        codes.append(process.exitcode)
    model.close()
    return codes
