"""What the ranks of the tests of checkpoints do."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import io
import os
import random
import resource
import signal
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import offbeat
from cases.models import (
    Case,
    batch,
    build_model,
    build_optimizer,
    build_scheduler,
    loss_of,
    profile_of,
)
from cases.workers import TIMEOUT_S, bits, rank, world_size
from offbeat import Strategy
from offbeat.core.checkpoint import shard
from offbeat.core.checkpoint.folder import Folder
from offbeat.core.checkpoint.frozen import freeze
from offbeat.core.checkpoint.saving import SaveGroup, save_together
from offbeat.data import DefDP

CASE = Case("conv", "nesterov", "step")


class Job:
    """A training script: model, optimizer and scheduler of a case, and a loop with random numbers
    of every kind."""

    def __init__(
        self, strategy: Strategy, case: Case = CASE, clip: float | None = None, **options: Any
    ):
        for seed in (random.seed, np.random.seed, torch.default_generator.manual_seed):
            seed(100 + rank())
        model = build_model(case, seed=rank())
        torch.manual_seed(100 + rank())
        options = {"profile": profile_of(case, world_size())} | options
        self.case, self.clip = case, clip
        self.model, self.optimizer = offbeat.prepare(
            model, build_optimizer(case, model), strategy, timeout_s=TIMEOUT_S, **options
        )
        self.scheduler = build_scheduler(case, self.optimizer)
        self.extra = {"scheduler": self.scheduler} if self.scheduler else {}

    def iterate(self, t: int) -> None:
        self.optimizer.zero_grad()
        noise = float(torch.rand(())) + random.random() + float(np.random.rand())
        (noise * loss_of(self.model, *batch(self.case, rank(), t))).backward()
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()

    def train(self, iterations: range) -> None:
        for t in iterations:
            self.iterate(t)

    def save(self, path: str, **options: Any) -> Any:
        return offbeat.save(path, self.model, self.optimizer, self.extra, **options)

    def load(self, path: str) -> Any:
        return offbeat.load(path, self.model, self.optimizer, self.extra)

    def digest(self) -> str:
        """Of all bits of weights, buffers, optimizer state and settings."""
        found = hashlib.sha256()
        state = self.optimizer.state_dict()
        for name, tensor in self.model.state_dict().items():
            found.update(name.encode() + tensor.detach().numpy().tobytes())
        for index, mine in sorted(state["state"].items()):
            for name, value in sorted(mine.items()):
                array = value.numpy() if isinstance(value, torch.Tensor) else np.array(value)
                found.update(f"{index}{name}".encode() + array.tobytes())
        found.update(repr([{**g, "params": 0} for g in state["param_groups"]]).encode())
        return found.hexdigest()


@contextmanager
def job(strategy: Strategy, case: Case = CASE, **options: Any) -> Iterator[Job]:
    made = Job(strategy, case, **options)
    yield made
    made.model.close()


class Trial(NamedTuple):
    """A job to be resumed at every position; `clip` is done by its script, which some strategies
    allow in a variant only."""

    strategy: Strategy
    case: Case
    iterations: int
    clip: float | None = None


def train_and_save(trials: Sequence[Trial], folder: str) -> list[str]:
    """Per trial the digest after all iterations of a run that was saved at every position. The run
    that continues from position 0 and is not saved shows whether saving disturbs training."""
    digests = []
    for number, (strategy, case, iterations, clip) in enumerate(trials):
        with job(strategy, case, clip=clip) as saved:
            for t in range(iterations):
                saved.save(f"{folder}/{number}", keep=iterations).wait()
                saved.iterate(t)
            digests.append(saved.digest())
    return digests


def resume_everywhere(
    trials: Sequence[Trial], folder: str
) -> list[tuple[str, list[tuple[int, str]]]]:
    """Per trial the digests after going on from every position.

    Each trial has one new job. It goes on from one position, which differs between trials, and then
    from all others, with the state of the last iteration before each load. `prepare` takes several
    times as long as these iterations.
    """
    found = []
    for number, (strategy, case, iterations, clip) in enumerate(trials):
        digests = []
        names = sorted(p.name for p in Path(folder, str(number)).iterdir())
        first = number % len(names)
        with job(strategy, case, clip=clip) as resumed:
            for name in [*names[first:], *names[:first]]:
                checkpoint = resumed.load(f"{folder}/{number}/{name}")
                assert checkpoint.exact
                start = offbeat.iteration(resumed.model)
                resumed.train(range(start, iterations))
                digests.append((start, resumed.digest()))
        found.append((str(strategy), sorted(digests)))
    return found


# ---- what goes wrong ------------------------------------------------------------------------


def full_disk(folder: str) -> dict[str, Any]:
    """Rank 1 may write no file above 2 KB in its second save."""
    found: dict[str, Any] = {}
    with job(offbeat.LocalSGD(period=3)) as mine:
        mine.iterate(0)
        mine.save(folder).wait()
        mine.iterate(1)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        if rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2048, before[1]))
        saving = mine.save(folder)
        try:
            saving.wait()
        except RuntimeError as error:
            found["error"] = str(error)
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        found["left"] = Folder(folder).names()  # another rank may still remove what is unfinished
        mine.iterate(2)
        found["after"] = mine.save(folder, keep=1).wait().name
        found["kept"] = sorted(path.name for path in Path(folder).iterdir())
    return found


def killed_while_saving(folder: str) -> str:
    """Rank 1 dies when its files are written and its manifest is not."""
    with job(offbeat.LocalSGD(period=3)) as mine:
        mine.iterate(0)
        mine.save(folder).wait()
        mine.iterate(1)
        if rank() == 1:
            shard._size_and_crc = lambda _: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        saving = mine.save(folder)
        try:
            saving.wait()
        except RuntimeError as error:
            return str(error)
    return ""


def goes_on(folder: str, strategy: Strategy) -> tuple[int, str, bool]:
    """Where a new job begins, and its weights."""
    with job(strategy) as mine:
        found = mine.load(folder)
        mine.model.consolidate()
        return offbeat.iteration(mine.model), mine.digest(), found.exact


def deaths(folder: str) -> list[tuple[bool, list[int]]]:
    """For every n: a process saves twice, and in the second time is killed at the n-th thing that
    is done to the disk, if there are as many. Whether it was, and what is whole then."""
    found = []
    while not found or found[-1][0]:
        here = Path(folder, str(len(found)))
        child = os.fork()
        if not child:
            dies_at(str(here), len(found) + 1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        names = Folder(here).manifests(0)
        whole = [shard.read(Folder(here).shard(name, 0))["number"] for name in names]
        found.append((os.WIFSIGNALED(status), whole))
    return found


def dies_at(folder: str, step: int) -> None:
    """Save twice; in the second time be killed at the n-th thing that is done to the disk."""

    def saved(number: int) -> None:
        manifest = shard.Manifest(0, 1, number, "x", alike=True)
        frozen = freeze({"number": number, "weight": torch.full((50,), float(number))}, {})
        name = f"{number:06d}-iteration-{number}"
        assert save_together(Folder(folder), name, frozen, manifest, SaveGroup(None), 1) is None

    saved(1)
    left = [step]

    def fatal(act: Any) -> Any:
        def acting(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            return act(*args, **kwargs)

        return acting

    for where, what in ((os, "fsync"), (os, "unlink"), (os, "rmdir"), (Path, "rename")):
        setattr(where, what, fatal(getattr(where, what)))
    os.mkdir, Path.mkdir = fatal(os.mkdir), fatal(Path.mkdir)  # type: ignore[method-assign]
    saved(2)


def refused(folder: str) -> dict[str, str]:
    """What is said when something is used in a wrong way."""
    said: dict[str, str] = {}

    def words(name: str, act: Any) -> None:
        try:
            act()
        except (ValueError, RuntimeError, FileNotFoundError) as error:
            said[name] = f"{type(error).__name__}: {error}"

    with job(offbeat.LocalSGD(period=3)) as mine:
        words("nothing", lambda: mine.load(folder))
        words("module", lambda: offbeat.save(folder, mine.model.module, mine.optimizer))
        words("optimizer", lambda: offbeat.save(folder, mine.model, mine.optimizer.inner))
        words("keep", lambda: mine.save(folder, keep=0))
        mine.model(batch(CASE, rank(), 0)[0])
        words("within", lambda: mine.save(folder))
        mine.iterate(0)
        lock = {"lock": threading.Lock()}
        words("extra", lambda: offbeat.save(folder, mine.model, mine.optimizer, lock))
        path = mine.save(folder).wait()
        words("one", lambda: mine.save(str(path)))
        missing = {"sampler": mine.scheduler}
        words("missing", lambda: offbeat.load(folder, mine.model, mine.optimizer, missing))
    with job(offbeat.LocalSGD(period=4)) as mine:
        words("strategy", lambda: mine.load(folder))
    with job(offbeat.LocalSGD(period=3), profile=None, observe=3) as mine:
        mine.iterate(0)
        words("observing", lambda: mine.save(folder))
    words("closed", lambda: mine.save(folder))
    return said


def served() -> list[str]:
    os.environ["OFFBEAT_SERVERS"] = "1"
    try:
        mine = Job(offbeat.SSP(s=0), Case("mlp"), profile=None)
    except SystemExit:
        return []
    words = []
    for act in (mine.save, mine.load):
        try:
            act("/nowhere")
        except ValueError as error:
            words.append(str(error))
    mine.model.close()
    return words


# ---- other worlds ---------------------------------------------------------------------------


def save_consolidated(folder: str) -> tuple[str, dict[str, Any]]:
    """Two runs go on apart; then they are made one, and saved with values of their own."""
    with job(offbeat.LocalSGD(period=10)) as mine:
        mine.train(range(3))
        mine.save(f"{folder}/apart").wait()
        mine.model.consolidate()
        extra = {**mine.extra, "epoch": 7, "rank": rank()}
        offbeat.save(f"{folder}/one", mine.model, mine.optimizer, extra).wait()
        return mine.digest(), {n: t.clone() for n, t in mine.model.state_dict().items()}


def load_elsewhere(folder: str, strategy: Strategy) -> tuple[str, dict[str, Any], Any, str]:
    with job(strategy) as mine:
        try:
            mine.load(f"{folder}/apart")
            said = ""
        except ValueError as error:
            said = str(error)
        found = mine.load(f"{folder}/one")
        weights = {n: t.clone() for n, t in mine.model.state_dict().items()}
        digest = mine.digest()
        mine.train(range(offbeat.iteration(mine.model), 6))
        mine.save(f"{folder}/{world_size()}").wait()
        return digest, weights, (found.exact, found.iteration, found.extra), said


# ---- plans that are measured, gossip, launchers ---------------------------------------------


def observed(folder: str, resuming: bool) -> tuple[str, str, int]:
    """A run whose plan comes from what it has measured, resumed by one that has measured nothing,
    or is in the middle of measuring."""
    with job(offbeat.PartialSync(period=2), profile=None, observe=2) as mine:
        start = 0
        if resuming:
            start = mine.load(folder).iteration
        for t in range(start, 7):
            mine.iterate(t)
            if t == 4 and not resuming:
                mine.save(folder).wait()
        return mine.digest(), mine.model._session.plan.digest, start


def watched(folder: str, resuming: bool) -> tuple[str, str, str]:
    """A run whose loss is watched, and that plans again by the noise of its gradients."""
    case = Case("mlp", "nesterov")
    with job(offbeat.DeFT(), case) as mine:
        start = mine.load(folder).iteration if resuming else 0
        for t in range(start, 65):
            mine.iterate(t)
            if t == 24 and not resuming:
                mine.save(folder).wait()
        session = mine.model._session
        seen = session.planner.convergence.capture()
        watch = f"{seen['watch']} {seen['iterations']} {[float(x) for x in seen['losses']]}"
        return mine.digest(), f"{watch} {session.profile.noise}", session.plan.digest


def gossiping(folder: str, strategy: Strategy, resuming: bool) -> tuple[int, dict[str, Any]]:
    """Each worker's own weights when it has saved, or has loaded."""
    with job(strategy, Case("mlp", "nesterov"), profile=None) as mine:
        if resuming:
            checkpoint = mine.load(folder)
            assert checkpoint.path.parent.name == f"worker-{rank()}"
        else:
            mine.train(range(4 + rank()))
            mine.save(folder).wait()
        found = {k: v.clone() for k, v in mine.optimizer.state_dict()["state"][0].items()}
        iteration = offbeat.iteration(mine.model)
        mine.iterate(iteration)
        return iteration, found


def launched(file: str, iterations: int) -> tuple[int, str]:
    """A script that knows nothing of checkpoints but where to begin."""
    os.environ["OFFBEAT_JOB"] = file
    with job(offbeat.PartialSync(period=3), Case("conv", "nesterov")) as mine:
        start = offbeat.iteration(mine.model)
        mine.train(range(start, iterations))
        return start, mine.digest()


def reloads(folder: str) -> tuple[int, list[str]]:
    """Where a job goes on, and what was said."""
    with (
        warnings.catch_warnings(record=True) as said,
        job(offbeat.PartialSync(period=3), Case("conv", "nesterov")) as mine,
    ):
        warnings.simplefilter("always")
        try:
            at = mine.load(folder).iteration
        except RuntimeError as error:
            return -1, [str(error)]
        return at, [str(w.message) for w in said]


def count_notices_about_batches(folder: str) -> list[int]:
    """Save twice each: without a batch in `extra`, with one, with a sampler."""
    found = []
    for number, more in enumerate(({}, {"batch": torch.ones(2)}, {"sampler": DefDP([1.0, 2.0])})):
        with contextlib.redirect_stderr(io.StringIO()) as err:
            job = Job(offbeat.BSP())
            for t in range(2):
                job.iterate(t)
                extra = {**job.extra, "name": "a job", "best": 1.5, **more}
                offbeat.save(f"{folder}/{number}", job.model, job.optimizer, extra).wait()
            job.model.close()
        found.append(" ".join(err.getvalue().split()).count("extra of offbeat.save"))
    return found


def resume_within_a_pass(folder: str, seeded: bool) -> tuple[bool, list[str]]:
    """Train with dropout over a DataLoader, save within a pass, and resume: whether the weights
    equal those of the uninterrupted run, and the warnings of `load`."""
    samples = torch.arange(96.0).reshape(24, 4) / 96

    def train(resuming: bool) -> list[torch.Tensor]:
        torch.manual_seed(1)
        layers = (torch.nn.Linear(4, 8), torch.nn.Dropout(), torch.nn.Linear(8, 1))
        module = torch.nn.Sequential(*layers)
        model, optimizer = offbeat.prepare(module, torch.optim.SGD(module.parameters(), 0.1), "bsp")
        sampler = DefDP(samples)
        generator = torch.Generator() if seeded else None
        loader = torch.utils.data.DataLoader(samples, 2, sampler=sampler, generator=generator)
        if resuming:
            offbeat.load(folder, model, optimizer, {"sampler": sampler})
        for x in loader:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            if not resuming and offbeat.iteration(model) == 9:
                offbeat.save(folder, model, optimizer, {"sampler": sampler}).wait()
        model.close()
        return [p.detach().clone() for p in module.parameters()]

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        whole = train(resuming=False)
        gc.collect()
        resumed = train(resuming=True)
    equal = all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))
    return equal, [str(w.message) for w in caught if "DataLoader" in str(w.message)]


def resume_two_optimizers(folder: str) -> tuple[str, str, list[float], list[str]]:
    """Bits of a run of two optimizers and of one that resumes in its middle; the learning rates of
    the param groups that step in the latter after a change; refusals of other lists."""
    ends, rates, refused = [], [], []
    for first in (0, 2):
        model = build_model(CASE)
        some, others = list(model.parameters())[:2], list(model.parameters())[2:]
        two = [
            torch.optim.Adam(some, lr=0.01),
            torch.optim.SGD(others, lr=0.05, momentum=0.9),
        ]
        profile = profile_of(CASE, world_size())
        wrapped, optimizers = offbeat.prepare(model, two, offbeat.WFBP(), profile=profile)
        if first:
            assert offbeat.load(folder, wrapped, optimizers).exact
            optimizers[1].param_groups[0]["lr"] = 0.02
            rates = [part.param_groups[0]["lr"] for part in two]
            optimizers[1].param_groups[0]["lr"] = 0.05
        for t in range(first, 4):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss_of(wrapped, *batch(CASE, rank(), t)).backward()
            for optimizer in optimizers:
                optimizer.step()
            if t == 1:
                offbeat.save(folder, wrapped, optimizers).wait()
                for other in ([], optimizers[::-1], optimizers[:1]):
                    try:
                        offbeat.save(folder, wrapped, other)
                    except ValueError as error:
                        refused.append(str(error))
        ends.append(bits(model))
        wrapped.close()
    return ends[0], ends[1], rates, refused
