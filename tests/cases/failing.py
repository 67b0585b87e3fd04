"""What the ranks do in the tests of preparation and of failures."""

from __future__ import annotations

import gc
import io
import json
import os
import signal
import subprocess
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, redirect_stderr, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import offbeat
from cases.models import Case, batch, build_model, loss_of, profile_of
from cases.oddities import build
from cases.workers import bits, bits_of, prepared, rank, snapshot, world_size
from offbeat import BSP, DDP, WFBP, LocalSGD, Planned, Profile, Strategy
from offbeat.core.measuring import network_check
from offbeat.core.transport.heartbeat import publish_exception
from offbeat.metrics import Metrics
from offbeat.testing import inspect

CASE = Case("mlp", "nesterov")


def iterate(model: Any, optimizer: Any, t: int, case: Case = CASE) -> None:
    optimizer.zero_grad()
    loss_of(model, *batch(case, rank(), t)).backward()
    optimizer.step()


# ---- failures -------------------------------------------------------------------------------


def train_until(
    strategy: Strategy, how: str, who: int, timeout_s: float, observe: bool, **options: Any
) -> str:
    """Four whole iterations; in the fifth something happens to one rank."""
    model, optimizer = build(CASE)
    if not {"profile", "observe"} & {*options}:
        options |= {"observe": 20} if observe else {"profile": profile_of(CASE, world_size())}
    model, optimizer = offbeat.prepare(model, optimizer, strategy, timeout_s=timeout_s, **options)
    for t in range(12):
        if t == 4 and rank() == who:
            happen(how)
            break
        iterate(model, optimizer, t)
    model.consolidate()
    model.close()
    return "done"


def consolidate_on(who: int, strategy: Strategy, timeout_s: float) -> str:
    """Consolidate once on all ranks, and then on rank `who` alone; the others leave."""
    model, optimizer = build(CASE)
    profile = profile_of(CASE, world_size())
    model, optimizer = offbeat.prepare(
        model, optimizer, strategy, profile=profile, timeout_s=timeout_s
    )
    iterate(model, optimizer, 0)
    model.consolidate()
    iterate(model, optimizer, 1)
    if rank() == who:
        model.consolidate()
    model.close()
    return "left"


def happen(how: str) -> None:
    if how == "raises":
        raise KeyError("a mistake in the user's loop")
    if how == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "is stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    assert how == "has less data"


def stop_for_a_moment(strategy: Strategy, seconds: float, servers: int = 0) -> list[str]:
    """Bits after six iterations, without and with a stop of rank 1 in the third one; none of a
    server. Servers add up in the order of arrival, so rounding is left out there."""
    if servers:
        os.environ["OFFBEAT_SERVERS"] = str(servers)
    options = {"profile": profile_of(CASE, world_size())} if isinstance(strategy, Planned) else {}
    found: list[str] = []
    for stops in (False, True):
        module, plain = build(CASE)
        with (
            suppress(SystemExit),
            prepared(module, plain, strategy, **options) as (model, optimizer),
        ):
            for t in range(6):
                if stops and t == 3 and rank() == 1:
                    subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
                    os.kill(os.getpid(), signal.SIGSTOP)
                iterate(model, optimizer, t)
            model.consolidate()
            tensors = model.state_dict().values()
            found.append(bits_of(t.round(decimals=9) for t in tensors) if servers else bits(model))
    return found


def train_on_after_failure() -> list[str]:
    """Words of the first failure and of the step after it, on the rank that survives."""
    model, optimizer = build(CASE)
    model, optimizer = offbeat.prepare(
        model, optimizer, WFBP(), profile=profile_of(CASE, world_size()), timeout_s=4
    )
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    words = []
    for t in range(2):
        try:
            iterate(model, optimizer, t)
        except RuntimeError as error:
            words.append(str(error))
    model.close()
    return words


def meet(timeout_s: float) -> None:
    model, optimizer = build(CASE)
    offbeat.prepare(model, optimizer, BSP(), timeout_s=timeout_s)


# ---- differences between ranks --------------------------------------------------------------


def prepare_differently(what: str) -> None:
    """The last rank does one thing differently."""
    model = build_model(CASE)
    options: dict[str, Any] = {"strategy": LocalSGD(period=4), "observe": 2}
    rate = 0.1
    if rank() == world_size() - 1:
        options |= OPTIONS.get(what, {})
        CHANGES.get(what, lambda _: None)(model)
        rate = 0.2 if what == "rate" else rate
    names = ("SGD", "Adam") if what == "optimizer" else ("SGD", "SGD")
    cls = getattr(torch.optim, names[rank() == world_size() - 1])
    offbeat.prepare(model, cls(model[6].parameters(), lr=rate), timeout_s=20, **options)


OPTIONS: dict[str, dict[str, Any]] = {
    "strategy": {"strategy": BSP()},
    "settings": {"strategy": LocalSGD(period=5)},
    "observe": {"observe": 3},
    "profile": {"profile": profile_of(CASE, 3)},
}
CHANGES: dict[str, Callable[[Any], object]] = {
    "shape": lambda model: setattr(model, "6", nn.Linear(7, 4).double()),
    "dtype": lambda model: model.float(),
    "frozen": lambda model: model[4].requires_grad_(False),
    "more": lambda model: model.append(nn.Linear(3, 3).double()),
    "strides": lambda model: setattr(model[1], "weight", turned(model[1].weight)),
    "buffers": lambda model: model.register_buffer("extra", torch.zeros(2)),
}


def turned(p: nn.Parameter) -> nn.Parameter:
    """The same numbers, stored by columns."""
    return nn.Parameter(p.detach().t().contiguous().t())


# ---- preparation ----------------------------------------------------------------------------


def train_alone() -> tuple[str, int]:
    """Without a launcher, without a strategy."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    model, optimizer = build(CASE)
    model, optimizer = offbeat.prepare(model, optimizer, observe=2, timeout_s=10)
    for t in range(4):
        optimizer.zero_grad()
        loss_of(model, *batch(CASE, 0, t)).backward()
        optimizer.step()
    model.consolidate()
    name = inspect(model).plan.strategy
    model.close()
    return name, dist.get_world_size()


def prepare_again() -> list[str]:
    """Errors of prepare on what is prepared already; then once more after close()."""
    model, plain = build(CASE)
    profile = profile_of(CASE, 1)
    wrapped, optimizer = offbeat.prepare(model, plain, BSP(), profile=profile)
    words = []
    for again in ((wrapped, plain), (model, plain), (model, optimizer)):
        try:
            offbeat.prepare(*again, BSP(), profile=profile)
        except ValueError as error:
            words.append(str(error))
    wrapped.close()
    wrapped.close()
    again = wrapped.module, optimizer.inner
    model, optimizer = offbeat.prepare(*again, LocalSGD(), profile=profile)
    iterate(model, optimizer, 0)
    model.close()
    return words


def close_after_an_exception() -> str:
    """How the ranks end if a framework reports an exception of rank 1 and closes the model."""
    model, plain = build(CASE)
    options = {"profile": profile_of(CASE, world_size()), "timeout_s": 60.0}
    model, optimizer = offbeat.prepare(model, plain, WFBP(), **options)
    iterate(model, optimizer, 0)
    if rank() == 1:
        publish_exception(KeyError("x"), None)
        model.close()
        return "closed"
    try:
        iterate(model, optimizer, 1)
    except RuntimeError as error:
        return str(error)
    return "went on"


def followed_iterations(strategy: Strategy) -> list[int]:
    """Iterations after which metrics were logged: two with an update and one without, and not one
    whose backward was dropped."""
    model, plain = build(CASE)
    profile = profile_of(CASE, world_size())
    seen = list[int]()
    metrics = Metrics(lambda _, iteration: seen.append(iteration), every=1)
    model, optimizer = offbeat.prepare(model, plain, strategy, profile=profile, metrics=metrics)
    iterate(model, optimizer, 0)
    model.skip_step()
    loss_of(model, *batch(CASE, rank(), 2)).backward()
    optimizer.zero_grad()  # drops the backward
    iterate(model, optimizer, 3)
    model.close()
    return seen


def pass_without_steps(strategy: Strategy, passes: int) -> list[list[str]]:
    """Warnings of `passes` backward passes without a step: all, and all within no_sync()."""
    found = []
    for accumulates in (False, True):
        model, plain = build(CASE)
        model, _ = offbeat.prepare(model, plain, strategy, profile=profile_of(CASE, world_size()))
        with warnings.catch_warnings(record=True) as caught, ExitStack() as stack:
            warnings.simplefilter("always")
            if accumulates:
                stack.enter_context(model.no_sync())
            for t in range(passes):
                loss_of(model, *batch(CASE, rank(), t)).backward()
        found.append([str(one.message) for one in caught if "backward passes" in str(one.message)])
        model.close()
    return found


def prepare_two_as_job(job: dict[str, Any]) -> str:
    """What a second model is told in a process that `offbeat run` has started."""
    path = Path(job["record_dir"]) / "job.json"
    path.write_text(json.dumps({"schema": 1, **job}))
    os.environ["OFFBEAT_JOB"] = str(path)
    offbeat.prepare(*build(CASE), observe=2, timeout_s=10)
    try:
        offbeat.prepare(*build(CASE), observe=2, timeout_s=10)
    except ValueError as error:
        return str(error)
    return ""


def prepare_after_an_error() -> list[str]:
    """A prepare that fails leaves nothing behind: neither threads nor hooks."""
    model, optimizer = build(CASE)
    profile = profile_of(CASE, world_size() + 1)
    try:
        offbeat.prepare(model, optimizer, BSP(), profile=profile, timeout_s=10)
    except ValueError as error:
        words = str(error)
    threads, deadline_s = ["offbeat"], time.monotonic() + 10
    while threads and time.monotonic() < deadline_s:  # they end by themselves
        time.sleep(0.01)
        threads = [t.name for t in threading.enumerate() if t.name.startswith("offbeat")]
    with prepared(model, optimizer, BSP(), observe=1) as (model, optimizer):
        for t in range(3):
            iterate(model, optimizer, t)
    return [words, *threads]


def prepare_alone() -> str:
    """What rank 0 says if rank 1 does not come to a second prepare."""
    with prepared(*build(CASE), BSP(), profile=profile_of(CASE, world_size())):
        pass
    if rank() == 1:
        return ""
    try:
        offbeat.prepare(*build(CASE), BSP(), timeout_s=0.5)
    except RuntimeError as error:
        return str(error)
    return ""


def go_on_after_close(
    strategies: Sequence[Strategy], servers: int = 0
) -> list[tuple[bool, list[str]]]:
    """By strategy: whether an evaluation still sees the trained weights, and what forward, step and
    consolidate say."""
    os.environ["OFFBEAT_SERVERS"] = str(servers)
    found = []
    for strategy in strategies:
        with suppress(SystemExit):  # of a server
            found.append(_go_on_after_close(strategy))
    return found


def _go_on_after_close(strategy: Strategy) -> tuple[bool, list[str]]:
    model, optimizer = build(CASE)
    profile = profile_of(CASE, world_size())
    model, optimizer = offbeat.prepare(model, optimizer, strategy, profile=profile, timeout_s=10)
    iterate(model, optimizer, 0)
    model.close()
    x, _ = batch(CASE, 0, 1)
    words = []
    for use in (lambda: model(x), optimizer.step, model.consolidate):
        try:
            use()
        except RuntimeError as error:
            words.append(str(error))
    model.eval()
    with torch.no_grad():
        return torch.equal(model(x), model.module(x)) and bool(model.state_dict()), words


def differentiate_in_evaluation(strategy: Strategy) -> bool:
    """Rank 0 alone takes a derivative with respect to the input between two iterations; whether
    training goes on as if nothing had been."""
    x, _ = batch(CASE, 0, 5)
    ends = []
    for look in (True, False):
        model, optimizer = build(CASE)
        profile = profile_of(CASE, world_size())
        with prepared(model, optimizer, strategy, profile=profile) as (model, optimizer):
            for t in range(3):
                iterate(model, optimizer, t)
                if look and rank() == 0:
                    model.eval()
                    inputs = x.clone().requires_grad_()
                    torch.autograd.grad(model(inputs).sum(), inputs)
                    model.train()
            ends.append(bits(model))
    return ends[0] == ends[1]


def settled_threads(least: int | None) -> int:
    """Threads of this process once their number is `least`, which is waited for, or by default once
    it has been the same for .2 s."""
    counts, deadline_s = list[int](), time.monotonic() + 10
    while time.monotonic() < deadline_s:
        counts.append(sum(1 for _ in Path("/proc/self/task").iterdir()))
        if counts[-1] == least or (least is None and counts[-20:] == counts[-1:] * 20):
            break
        time.sleep(0.01)
    return counts[-1]


def left_after_close(strategies: Sequence[Strategy]) -> list[tuple[int, int]]:
    """By strategy: how many models and parameters are left once nothing refers to them, and
    how many threads more than after the first."""
    threads: list[int] = []
    kept: list[Any] = []
    found = []
    for strategy in strategies:
        model, optimizer = offbeat.prepare(*build(CASE), strategy, observe=1)
        for t in range(4):
            iterate(model, optimizer, t)
        kept += [weakref.ref(model), weakref.ref(next(iter(model.parameters())))]
        model.close()
        del model, optimizer
        gc.collect()
        threads.append(settled_threads(threads[0] if threads else None))
        found.append((sum(one() is not None for one in kept), threads[-1] - threads[0]))
    return found


def looks() -> dict[str, Any]:
    """How a prepared model and optimizer look from outside."""
    plain, raw = build(Case("conv", "adamw"))
    expected, groups = list(plain.state_dict()), raw.param_groups
    plain.some_attribute = "kept"
    scheduler = torch.optim.lr_scheduler.StepLR(raw, 1, 0.5)
    with prepared(plain, raw, LocalSGD(), observe=1) as (model, optimizer):
        for t in range(3):
            iterate(model, optimizer, t, Case("conv"))
            scheduler.step()
        state = optimizer.state_dict()
        seen = {
            "keys": list(model.state_dict()) == expected,
            "groups": optimizer.param_groups is groups,
            "state": state["state"].keys() == raw.state_dict()["state"].keys(),
            "rates": [group["lr"] for group in optimizer.param_groups],
            "attribute": model.some_attribute,
            "module": model.module is plain,
            "training": (model.eval().module.training, model.train().module.training),
            "repr": "SGD" in repr(optimizer) or "lr" in repr(optimizer),
        }
        errors = {}
        for name, call in {
            "missing": lambda: model.no_such_thing,
            "group": lambda: optimizer.add_param_group({"params": [torch.zeros(1)]}),
            "assign": lambda: model.load_state_dict(model.state_dict(), assign=True),
            "double": lambda: model.float(),
        }.items():
            try:
                call()
            except (ValueError, AttributeError) as error:
                errors[name] = type(error).__name__
        model.double()  # what it is already
        average = torch.optim.swa_utils.AveragedModel(model)
        average.update_parameters(model)
        seen["average"] = torch.equal(average.module[1].weight, plain[1].weight)
        seen["saved"] = saved_bytes(model) - saved_bytes(build_model(Case("conv")))
        return {**seen, "errors": errors}


def saved_bytes(model: nn.Module) -> int:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    return len(file.getvalue())


def reload_in_the_middle(strategy: Strategy) -> list[bool]:
    """Load weights and optimizer state into a session that goes on, twice: whether training
    moves the weights, and both times in the same way."""
    model, optimizer = build(CASE)
    with prepared(model, optimizer, strategy, profile=profile_of(CASE, 1)) as (model, optimizer):
        for t in range(2):
            iterate(model, optimizer, t)
        saved = snapshot([model.state_dict(), optimizer.state_dict()])
        ends = []
        for _ in range(2):
            weights, state = snapshot(saved)
            model.load_state_dict(weights)
            optimizer.load_state_dict(state)
            for t in range(2, 4):
                iterate(model, optimizer, t)
            ends.append(bits(model))
        model.load_state_dict(saved[0])
        return [bits(model) != ends[0], ends[0] == ends[1]]


def sparse_gradients() -> None:
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with prepared(model, optimizer, BSP(), observe=1) as (model, _):
        for p in model.parameters():
            p.grad = None
        model(torch.arange(3)).sum().backward()


def compile_whole() -> list[str]:
    """Warnings of prepare."""
    model, optimizer = build(CASE)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = torch.compile(model, backend="eager")
        with prepared(model, optimizer, BSP(), profile=None, observe=1):
            pass
    return [str(w.message) for w in caught]


# ---- profiles and jobs ----------------------------------------------------------------------


def train_with_cache(path: str, name: str, ratio: float = 2.0) -> tuple[str, bool]:
    """Fingerprint of the profile, and whether it was there from the start. Messages may take
    `ratio` times as long as by the profile."""
    network_check.RATIO = ratio
    case = Case(name, "nesterov")
    model, optimizer = build(case)
    with prepared(model, optimizer, WFBP(), profile=path, observe=2) as (model, optimizer):
        known = inspect(model).profile is not None
        for t in range(3):
            iterate(model, optimizer, t, case)
        return inspect(model).profile.model, known


def prepare_elsewhere(measured: str, written: str) -> list[tuple[bool, list[str], float]]:
    """With a measured and a hand-written file, and an object, of a network with 20 s of latency:
    whether it is used, what rank 0 states, and the latency in the profile that counts."""
    kept, found = Profile.load(written), []
    for profile in (measured, written, kept):
        text = io.StringIO()
        with redirect_stderr(text):
            both = prepared(*build(CASE), WFBP(), profile=profile, observe=2)
            with both as (model, optimizer):
                used = inspect(model).profile is not None
                for t in range(3):
                    iterate(model, optimizer, t, CASE)
                latency_s = inspect(model).profile.links[0].latency_s
        lines = [line for line in text.getvalue().splitlines() if "another network" in line]
        found.append((used, lines, latency_s))
    return found


def prepare_with(profile: Any, case: Case = CASE, links: Any = None) -> None:
    model, optimizer = build(case)
    with prepared(model, optimizer, WFBP(), profile=profile, links=links):
        pass


def prepare_tuned(profile: Profile | None) -> bool:
    model, optimizer = build(CASE)
    with prepared(model, optimizer, DDP(bucket_cap_mb="tuned"), profile=profile):
        return True


def prepare_named(strategy: str, variable: str | None) -> tuple[tuple[str, int], str]:
    """Name and period of the strategy in use, and what prepare wrote to stderr."""
    if variable is not None:
        os.environ["OFFBEAT_STRATEGY"] = variable
    said = io.StringIO()
    with redirect_stderr(said), prepared(*build(CASE), strategy, observe=2) as (model, optimizer):
        text = said.getvalue().replace("\n         ", " ")  # a line may be wrapped
        for t in range(3):
            iterate(model, optimizer, t)
        plan = inspect(model).plan
        return (plan.strategy, plan.period), text


def train_as_job(job: dict[str, Any], given: Strategy | str | None) -> dict[str, Any]:
    """As a process that `offbeat run` has started."""
    path = Path(job["record_dir"]) / f"job{rank()}.json"
    path.write_text(json.dumps({"schema": 1, **job}))
    os.environ["OFFBEAT_JOB"] = str(path)
    model, optimizer = build(CASE)
    losses = []
    with prepared(model, optimizer, given, observe=2) as (model, optimizer):
        for t in range(8):
            optimizer.zero_grad()
            loss = loss_of(model, *batch(CASE, rank(), t))
            losses.append(loss.item())
            loss.backward()
            optimizer.step()
        profile: Profile = inspect(model).profile
        plan = inspect(model).plan
    return {"losses": losses, "plan": plan, "profile": profile}


def train_without_cache(path: str) -> list[str]:
    """The warnings of a training whose profile cannot be written."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train_with_cache(path, "mlp")
    return [str(warning.message) for warning in caught]
