"""Threads, sockets and files of a rank; channels that a plan does not use; devices of gloo."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import workers
from cases.models import Case
from cases.scripts import benchmark
from harness.ranks import run_ranks
from torch.distributed import distributed_c10d

import offbeat
from offbeat.core.plan import channel
from offbeat.core.transport.cluster import Cluster, connect
from offbeat.core.transport.device import CPU
from offbeat.core.transport.gloo_devices import share_devices
from offbeat.core.transport.interfaces import LinkSpec
from offbeat.strategies import DreamDDP

footprint = benchmark("footprint")
HOST = torch.device("cpu")
NET = LinkSpec("net", None, "gloo")
APART = {"net": ((0,), (1,))}  # groups of one rank
RANKS = 4
# One rank of torch's DDP has 4 threads (its own, that of gloo's device, and two that run
# collectives) and 5 sockets (3 connections, a listening one, the store).
DDP = {"threads": 4, "sockets": 5}
CALLS = 275  # Python calls of an iteration between averages


# ---- in worlds ------------------------------------------------------------------------------


def count_in_training(case: str) -> dict[str, int]:
    """Return the counts of this rank after training, without those before."""
    _, counts = footprint.train(case, "dreamddp:period=4", observe=3)
    dist.barrier()  # a rank that leaves closes its connections
    return counts


def use_channels() -> dict[str, Any]:
    """Open a channel, send on it, close it and open it again."""
    dist.init_process_group("gloo")
    cluster = connect([NET], HOST, CPU(), 30.0)
    name, found = channel("net", 1), dict[str, Any]()
    found["without"] = footprint.count()
    found["first"] = _average_on(cluster, name)
    found["open"] = footprint.count()
    link = cluster.links[name]
    link.bytes_sent = 40
    del link
    cluster.close_channels(["net"])
    found["closed"], found["links"] = footprint.count(), [*cluster.links]
    found["bytes"] = cluster.bytes_sent()
    found["again"] = _average_on(cluster, name)
    found["all"] = cluster.bytes_sent()
    cluster.close_channels([name])
    found["kept"] = [*cluster.links]
    cluster.links["net"].bytes_sent = 8
    counts = list[dict[str, int]]()
    for groups in (APART, {}, APART, {}, APART):
        cluster.open(["net"], groups)
        earlier = counts[-2:-1]
        end = time.monotonic() + 10  # threads of a closed link may still be ending
        while _grows([*earlier, now := footprint.count()]) and time.monotonic() < end:
            time.sleep(0.01)
        counts.append(now)
        dist.barrier()  # the next change, or the end of a rank, closes connections of the other
    found["divided"], found["regrouped"] = counts[0::2], counts[1::2]
    found["regrouped bytes"] = cluster.bytes_sent()
    assert cluster.close()
    return found


def _grows(counts: list[dict[str, int]]) -> bool:
    return any(now > counts[0][what] for what, now in counts[-1].items())


def _average_on(cluster: Cluster, name: str) -> list[float]:
    cluster.open([name])
    values = torch.arange(4.0) + dist.get_rank()
    cluster.links[name].collectives.by_verb["all_reduce"](values)
    return values.tolist()


def groups_of_control() -> tuple[list[bool], list[bool]]:
    """Return whether control uses the default group, and whether that one survives close()."""
    owned, survives = [], []
    case = Case("mlp", "sgd")
    for _ in range(2):  # a second model has a group of its own
        model = workers.build_model(case, seed=0)
        optimizer = workers.build_optimizer(case, model)
        profile = workers.profile_of(case, workers.world_size())
        with workers.prepared(model, optimizer, DreamDDP(period=4), profile=profile) as (model, _):
            cluster = model._session.cluster
            owned.append(cluster.control.group is dist.group.WORLD)
        value = torch.ones(1)
        dist.all_reduce(value)
        survives.append(value.item() == workers.world_size())
    return owned, survives


# ---- counts ---------------------------------------------------------------------------------


def test_at_most_twice_the_threads_and_sockets_of_ddp() -> None:
    ranks, torchs = (run_ranks(RANKS, count_in_training, case) for case in ("offbeat", "ddp"))
    for own, ddp in zip(ranks[1:], torchs[1:], strict=True):  # rank 0 hosts the store
        assert {what: ddp[what] for what in DDP} == DDP
        assert all(number <= 2 * ddp[what] for what, number in own.items()), own


@cache
def used_channels() -> list[dict[str, Any]]:
    return run_ranks(2, use_channels)


def test_channels_that_no_plan_uses_are_closed() -> None:
    for found in used_channels():
        assert found["first"] == found["again"] == [0.5, 1.5, 2.5, 3.5]
        assert found["open"]["sockets"] == found["without"]["sockets"] + 1  # one connection
        assert (
            found["open"]["threads"] == found["without"]["threads"] + 3
        )  # two of gloo, the link's
        assert found["closed"] == found["without"]
        assert found["links"] == ["net"]
        assert found["bytes"] == found["all"] == {"net": 0, "net#1": 40}
        assert found["kept"] == ["net", "net#1"]


def test_links_that_open_with_other_groups_close_the_earlier_ones() -> None:
    for found in used_channels():
        assert not _grows(found["divided"]), found["divided"]
        assert not _grows(found["regrouped"]), found["regrouped"]
        assert found["regrouped bytes"] == {"net": 8, "net#1": 40}


def test_control_messages_use_the_default_group_that_offbeat_has_created() -> None:
    for owned, survives in run_ranks(2, groups_of_control):
        assert owned == [True, False]
        assert survives == [True, True]


# ---- devices of gloo ------------------------------------------------------------------------


def test_the_class_of_groups_is_restored() -> None:
    before = distributed_c10d.ProcessGroupGloo
    with share_devices(None):
        assert distributed_c10d.ProcessGroupGloo is before

    options = SimpleNamespace(_devices=["device"])
    group: Any = SimpleNamespace(_get_backend=lambda _: SimpleNamespace(options=options))
    with suppress(KeyError), share_devices(group):
        assert issubclass(distributed_c10d.ProcessGroupGloo, before)
        assert distributed_c10d.ProcessGroupGloo is not before
        raise KeyError
    assert distributed_c10d.ProcessGroupGloo is before


def test_groups_without_devices_share_none() -> None:
    before = distributed_c10d.ProcessGroupGloo
    group: Any = object()
    with share_devices(group):
        assert distributed_c10d.ProcessGroupGloo is before


@pytest.mark.parametrize("more", [{}, {"enable_reconfigure": False}], ids=["2.13", "2.14"])
def test_a_group_of_another_thread_has_devices_of_its_own(
    more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch passes the arguments of its version to the class."""
    made = list[tuple[tuple[Any, ...], dict[str, Any]]]()

    class Group:
        _Options = SimpleNamespace

        def __init__(self, *given: Any, **named: Any):
            made.append((given, named))

    monkeypatch.setattr(distributed_c10d, "ProcessGroupGloo", Group)
    options, timeout = SimpleNamespace(_devices=["device"]), timedelta(seconds=5)
    group: Any = SimpleNamespace(_get_backend=lambda _: SimpleNamespace(options=options))
    with share_devices(group):
        create: Any = partial(
            distributed_c10d.ProcessGroupGloo, "store", 0, 1, timeout=timeout, **more
        )
        create()
        other = threading.Thread(target=create)
        other.start()
        other.join(10)
    assert made[0][0][3]._devices == ["device"]
    assert made[1:] == [(("store", 0, 1), {"timeout": timeout, **more})]
    assert distributed_c10d.ProcessGroupGloo is Group


# ---- calls between averages -----------------------------------------------------------------


def calls_of_an_iteration(strategy: str, layers: int) -> float:
    """Return the calls of this package's functions in an iteration between two averages."""
    model: Any = torch.nn.Sequential(*(torch.nn.Linear(4, 4, bias=False) for _ in range(layers)))
    for parameter in model.parameters():
        torch.nn.init.eye_(parameter)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model, optimizer = offbeat.prepare(model, optimizer, strategy, observe=2)
    source, calls = str(Path(offbeat.__file__).parent), 0

    def on_event(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(source)

    for i in range(30):  # the first ones measure, and check what the optimizer writes
        if i == 26:
            sys.setprofile(on_event)
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
    sys.setprofile(None)
    model.close()
    return calls / 4


def test_an_iteration_between_averages_makes_few_calls() -> None:
    """As many for any number of parameters, because each pass over them is one call of torch."""
    few, many = (
        run_ranks(1, calls_of_an_iteration, "local-sgd:period=1000", layers)[0]
        for layers in (3, 50)
    )
    assert many <= few + 2 * 50  # checks of at most 64 parameters per forward
    assert few <= CALLS
