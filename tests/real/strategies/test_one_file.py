"""A new method is one file: it plans, is checked, simulated, advised on, rehearsed and trained.

The file is added to a copy of the package, whose other files are links to the installed ones.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import offbeat

METHOD = '''
"""Elastic averages: after a period each worker keeps a share of its own parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from offbeat.core.plan import Apply, Buffer, Moment, Payload, Phases, Plan, Transfer, local
from offbeat.core.profile import Profile
from offbeat.core.rules.vocabulary import Context, Setting, rule
from offbeat.core.strategy.interface import Planned, periodic_bound_s, require_count
from offbeat.strategies.equations import Equations, World

STEP, END = Moment("step"), Moment("end")


@rule(
    reads=("param",),
    writes=("param",),
    conserves=False,
    share=Setting("number", 0.5, least=0.0, most=1.0, contracts=True),
    center=Setting("buffer", "center", kind="param", use="reads"),
)
def pull_to_center(context: Context, apply: Apply) -> None:
    share = apply.arg("share", 0.5)
    centers = context.read(apply.arg("center", "center"), apply.buckets)
    for w, center in zip(context.write("param", apply.buckets), centers, strict=True):
        w *= share
        w += (1 - share) * center


@dataclass(frozen=True)
class Elastic(Planned):
    """Local steps; the distance to the average of all workers shrinks after each period."""

    period: int = 4
    """Local steps between two averages."""
    share: float = 0.5
    """Share of the distance that remains."""

    name: ClassVar[str] = "elastic-pull"
    synchronous: ClassVar[bool] = False
    citation: ClassVar[str] = "a test"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count("period", self.period)

    def schedule(self, profile: Profile) -> Plan:
        everything, last = range(len(profile.buckets)), Phases([self.period - 1])
        copied = (("source", "param"), ("target", "center"))
        link = profile.default_link.name
        return Plan(
            self.name,
            len(everything),
            (Transfer(Payload("center", everything), STEP, END, last, link),),
            (
                local(len(everything), STEP, range(self.period)),
                Apply("copy", everything, STEP, last, args=copied),
                Apply("pull_to_center", everything, END, last, args=(("share", self.share),)),
            ),
            buffers=(Buffer("center"),),
            period=self.period,
        )

    def equations(self, plan: Plan) -> Equations:
        def pull(w):
            return self.share * w + (1 - self.share) * w.mean(axis=0)

        def advance(world: World, iteration: int) -> None:
            world.gradients(iteration)
            world.step()
            if (iteration + 1) % self.period == 0:
                world.change(None, pull)
            world.end()

        return advance

    def bound_s(self, profile: Profile) -> float:
        return periodic_bound_s(profile, self.period, fused=True)
'''

SCRIPT = '''
import os
import socket
import sys
from multiprocessing import get_context
from pathlib import Path

import torch
import torch._dynamo  # before the fork, as the first optimizer of each process imports it

import offbeat
from offbeat.cli import main
from offbeat.core.strategy.registry import create, strategy_names
from offbeat.plan import check
from offbeat.profile import Bucket, Link, Profile
from offbeat.sim import predict
from offbeat.testing.conformance import conforms

NAME, RANKS, ITERATIONS, RATE = "elastic-pull", 2, 7, 0.25
assert Path(offbeat.__file__).parent.parent == Path(os.environ["PYTHONPATH"])
assert NAME in strategy_names()

layers = [("2.weight", 24), ("1.weight", 24), ("0.weight", 24)]
buckets = tuple(
    Bucket(name[0], 0.01, 0.02, 8 * size, tensors=(name,)) for name, size in layers
)
profile = Profile(buckets, (Link("net", 0.01, 1e4),), RANKS)
profile.save("profile.json")

# ---- planned, checked, simulated
strategy = create(NAME, {"period": 3})
assert not check(strategy.plan(profile), profile)
conforms(strategy, profile)
alone_s = predict(strategy, profile).iteration_s
assert alone_s > profile.slowest().compute_s
for command in ("plan", "simulate"):
    argv = [command, "--profile", "profile.json", "--strategy", NAME, "--set", "period=3"]
    assert main(argv) == 0, command

# ---- trained by two processes, and rehearsed
def make_model():
    torch.manual_seed(0)
    sizes = [(4, 6), (6, 4), (4, 6)]
    return torch.nn.Sequential(*(torch.nn.Linear(*s, bias=False) for s in sizes)).double()


def batches(rank):
    numbers = torch.Generator().manual_seed(rank)
    for _ in range(ITERATIONS):
        yield (torch.randn(5, 4, dtype=torch.float64, generator=numbers),)


def loss_of(model, batch):
    return model(*batch).square().mean()


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=RATE)


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def train(pipe, rank, port):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    module = make_model()
    model, optimizer = offbeat.prepare(
        module, optimizer_of(module), f"{NAME}:period=3", profile=profile,
        min_bucket_bytes=1, timeout_s=60.0,
    )
    for batch in batches(rank):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    model.close()
    pipe.send(flat(module).numpy())


def equations():
    """A plain loop over both workers."""
    models = [make_model() for _ in range(RANKS)]
    streams = [batches(rank) for rank in range(RANKS)]
    for iteration in range(ITERATIONS):
        for model, stream in zip(models, streams):
            optimizer = optimizer_of(model)
            loss_of(model, next(stream)).backward()
            optimizer.step()
            model.zero_grad()
        if (iteration + 1) % 3 == 0:
            for tensors in zip(*(model.parameters() for model in models)):
                mean = sum(t.detach() for t in tensors) / RANKS
                for t in tensors:
                    t.data.copy_(0.5 * t.data + 0.5 * mean)
    return [flat(model) for model in models]


with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
context, pipes = get_context("fork"), []
for rank in range(RANKS):
    here, there = context.Pipe()
    context.Process(target=train, args=(there, rank, port), daemon=True).start()
    there.close()
    pipes.append(here)
assert all(pipe.poll(60) for pipe in pipes)
expected = equations()
for pipe, wanted in zip(pipes, expected):
    torch.testing.assert_close(torch.from_numpy(pipe.recv()), wanted, rtol=0, atol=1e-12)
assert (expected[0] - expected[1]).abs().max() > 1e-6

made = []
def make():
    made.append(make_model())
    return made[-1]
def kept(rank):  # in a fork, which leaves the weights of its replica in a file
    try:
        yield from batches(rank)
    finally:
        torch.save(flat(made[-1]), f"weights{rank}.pt")
offbeat.rehearse(
    make, optimizer_of, kept, f"{NAME}:period=3", profile, iterations=ITERATIONS, loss=loss_of
)
for rank, wanted in enumerate(expected):
    torch.testing.assert_close(torch.load(f"weights{rank}.pt"), wanted, rtol=0, atol=1e-12)
print("one file")
'''


def test_a_new_method_needs_no_change_elsewhere(tmp_path: Path) -> None:
    copy = tmp_path / "packages" / "offbeat"
    shutil.copytree(Path(offbeat.__file__).parent, copy, copy_function=os.symlink)
    (copy / "strategies" / "methods" / "elastic_pull.py").write_text(METHOD)
    (tmp_path / "job.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "job.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(copy.parent)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "one file"
