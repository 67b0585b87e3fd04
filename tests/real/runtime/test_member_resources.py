"""Descriptors and threads of a process whose job changes its members again and again."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch.distributed as dist
from cases.member_jobs import CASE, Scenario, enter_environment, membership_service
from cases.models import batch, build_model, build_optimizer, loss_of
from harness.ranks import run_ranks

import offbeat
from offbeat import LocalSGD, Members
from offbeat.core.transport.collectives import Collectives, Levels, two_levels
from offbeat.core.transport.device import CPU
from offbeat.core.transport.link import LinkThread, Message, MessageLink

SCENARIO = Scenario(LocalSGD(period=2), 0, first=2)
BEFORE, AFTER = 2, 10  # epochs with both members, in which the resources are counted
MORE = 4  # iterations of the last epoch
SETTLES_S = 10.0  # longest time until connections and threads of earlier epochs have ended
Counts = tuple[int, int]


def count() -> Counts:
    """Return the open descriptors and the threads of this process."""
    descriptors, threads = (len([*Path(f"/proc/self/{name}").iterdir()]) for name in ("fd", "task"))
    return descriptors, threads


def least(limit: Counts | None = None) -> Counts:
    """Return the least counts of some looks. With a limit, look until the counts are below it."""
    looks, end_s = [count()], time.monotonic() + SETTLES_S
    while len(looks) < 20 or not (limit is None or _is_below(looks[-1], limit)):
        if time.monotonic() > end_s:
            break
        time.sleep(0.01)
        looks.append(count())
    descriptors, threads = zip(*looks, strict=True)
    return min(descriptors), min(threads)


def _is_below(counts: Counts, limit: Counts) -> bool:
    return counts[0] < limit[0] and counts[1] < limit[1]


def prepare(address: str, who: int) -> tuple[Any, Any]:
    model: Any = build_model(CASE, seed=who)
    optimizer: Any = build_optimizer(CASE, model)
    return offbeat.prepare(
        model,
        optimizer,
        SCENARIO.strategy,
        profile=SCENARIO.profile,
        timeout_s=30.0,
        members=Members(address, first=2),
    )


def step(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    loss_of(model, *batch(CASE, 0, offbeat.iteration(model))).backward()
    optimizer.step()


def train(model: Any, optimizer: Any, before_step: Callable[[int], None]) -> dict[int, Counts]:
    """Train for some iterations of the last epoch. Return the counts of two epochs."""
    found, changes = dict[int, Counts](), model._session.changes
    member = changes._member
    while True:
        number = member.epoch.number
        if number in (BEFORE, AFTER) and number not in found and not changes.are_agreed:
            before = found.get(BEFORE)  # boards of intervals may open a few connections later
            limit = before and (before[0] + AFTER - BEFORE, before[1] + AFTER - BEFORE)
            found[number] = least(limit)
        if number >= AFTER and not changes.are_agreed:
            last = member.epoch.first_iteration + MORE
            if offbeat.iteration(model) >= last:
                return found
        before_step(number)
        if model.has_left:
            return found
        step(model, optimizer)


def survive_failures(address: str) -> dict[int, Counts]:
    """Process 1 loses the connection in a message of each epoch."""
    who, failed = enter_environment(SCENARIO), set[int]()
    send = LinkThread._send

    def send_or_fail(link: LinkThread, message: Message) -> None:
        send(link, message)
        number = model._session.changes._member.epoch.number
        if who == 1 and number < AFTER and number not in failed:
            failed.add(number)
            raise RuntimeError("the connection of this test has failed")

    LinkThread._send = send_or_fail  # type: ignore[method-assign]
    model, optimizer = prepare(address, who)
    found = train(model, optimizer, lambda _: None)
    model.close()
    return found


def survive_requests(address: str) -> dict[int, Counts]:
    """Process 1 leaves and joins again and again."""
    who, asked = enter_environment(SCENARIO), set[int]()

    def leave(model: Any, number: int) -> None:
        if who == 1 and number < AFTER and number not in asked:
            asked.add(number)
            model.request_leave()

    while True:
        model, optimizer = prepare(address, who)
        found = train(model, optimizer, partial(leave, model))
        has_left = model.has_left
        model.close()
        if not has_left:
            return found
        dist.destroy_process_group()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
@pytest.mark.parametrize("job", [survive_failures, survive_requests])
def test_descriptors_and_threads_do_not_grow(job: Callable[[str], Any]) -> None:
    with membership_service() as address:
        stays, *_ = run_ranks(2, job, address, timeout_s=110.0)
    (descriptors, threads), (later_descriptors, later_threads) = stays[BEFORE], stays[AFTER]
    assert later_descriptors < descriptors + AFTER - BEFORE
    assert later_threads < threads + AFTER - BEFORE


def test_a_link_of_two_levels_keeps_no_collectives_of_its_groups() -> None:
    inside, column = (Collectives({}, lambda *_: None) for _ in range(2))
    levels = Levels(inside, column, owners=1, weight=1.0, rank=0, ranks=2)
    remaining = [ref(inside), ref(column)]
    link = MessageLink("net", two_levels(levels), CPU())
    del inside, column, levels
    assert all(one() is not None for one in remaining)
    link.drop_group()
    assert [one() for one in remaining] == [None, None]
