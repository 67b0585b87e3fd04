"""Collectives over real process groups; channels; links that are not alike on all ranks."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cases.batches import Batch, Call
from harness.ranks import run_ranks, watch_ranks
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from torch.distributed.distributed_c10d import PrefixStore

import offbeat
from offbeat.cli import entry as cli
from offbeat.core.start.connecting import link_specs
from offbeat.core.start.launch_request import current_links
from offbeat.core.transport import agreement, interfaces
from offbeat.core.transport.agreement import StoreAgreement, compare_versions
from offbeat.core.transport.cluster import Cluster, connect
from offbeat.core.transport.collectives import (
    ASKED_BYTES,
    AT_ONCE_BYTES,
    Native,
    Ring,
    collectives,
    shards,
    swapping,
)
from offbeat.core.transport.control import Control, new_group
from offbeat.core.transport.device import CPU
from offbeat.core.transport.interfaces import (
    LAZY_CONNECTIONS,
    MOST_CHECKED,
    LinkSpec,
    _peers,
    group_environment,
    ipv4_of,
    parse_link,
    unreachable,
)
from offbeat.core.transport.topology import Topology
from offbeat.plan import Moment, Verb, transfer

HOST = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 2e-2, torch.float16: 2e-3}
VERBS: tuple[Verb, ...] = ("all_reduce", "reduce_scatter", "all_gather")


def sizes(world_size: int) -> list[int]:
    return [0, 1, world_size - 1, world_size, world_size + 1, 10_000, 100_003]


def values(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(rank)).to(dtype)


def exact_mean(world_size: int, size: int, dtype: torch.dtype) -> np.ndarray:
    everyone = [values(rank, size, dtype).double().numpy() for rank in range(world_size)]
    return np.mean(everyone, axis=0).reshape(size)


def own_shard(rank: int, world_size: int, size: int) -> slice:
    """By its definition: ceil(size / world_size) elements from rank times as many on."""
    each = -(-size // world_size)
    return slice(min(rank * each, size), min((rank + 1) * each, size))


LO, ANY = LinkSpec("lo", "lo", "gloo"), LinkSpec("any", None, "gloo")


# ---- in worlds ------------------------------------------------------------------------------


def join() -> tuple[int, int]:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def run_verbs(native: bool) -> list[tuple[str, bytes, bytes, bytes, int]]:
    """Per dtype and size: bytes after all_reduce, own shard after reduce_scatter, all after
    all_gather, and by how much autograd's version counters moved."""
    rank, world_size = join()
    group = new_group("gloo", 30.0)
    by_verb = dict(collectives(group, "gloo", HOST, 30.0).by_verb)
    if native:
        halves = Native(group)
        by_verb |= {"reduce_scatter": halves.reduce_scatter, "all_gather": halves.all_gather}
    done = []
    for dtype in TOLERANCE:
        for size in sizes(world_size):
            at_once, halved = (values(rank, size, dtype) for _ in range(2))
            by_verb["all_reduce"](at_once)
            by_verb["reduce_scatter"](halved)
            own = own_shard(rank, world_size, size)
            shard = halved[own].clone()
            moved = halved._version
            halved.data.masked_fill_(~mask_of(own, size), 7.0)  # the rest is unspecified
            by_verb["all_gather"](halved)
            moved += halved._version + at_once._version
            done.append((str(dtype), raw(at_once), raw(shard), raw(halved), moved))
    return done


def mask_of(own: slice, size: int) -> Tensor:
    mask = torch.zeros(size, dtype=torch.bool)
    mask[own] = True
    return mask


def raw(tensor: Tensor) -> bytes:
    return tensor.double().numpy().tobytes()


def run_alone() -> bool:
    join()
    by_verb = collectives(new_group("gloo", 30.0), "gloo", HOST, 30.0).by_verb
    tensor = torch.arange(3.0)
    for verb in VERBS:
        by_verb[verb](tensor)
    return torch.equal(tensor, torch.arange(3.0))


def run_exchange(elements: list[int]) -> list[list[float]]:
    """By size: the shards' values after an exchange, where rank r had 10 r + k in shard k."""
    rank, world_size = join()
    group = collectives(new_group("gloo", 30.0), "gloo", HOST, 30.0)
    found = []
    for size in elements:
        x = torch.zeros(size)
        for k, shard in enumerate(shards(x, world_size)):
            shard.fill_(10.0 * rank + k)
        group.exchange(x)
        found.append([v for shard in shards(x, world_size) for v in shard.unique().tolist()])
    return found


def run_swaps(connections: int) -> list[list[float]]:
    """What each rank has after exchanges of pairs; the sizes are of one piece and of several."""
    rank, world_size = join()
    group = collectives(new_group("gloo", 30.0), "gloo", HOST, 30.0, connections)
    found = []
    for distance, size in ((1, 5), (2, 100_003)):
        other = rank ^ distance
        x = torch.full((size,), float(rank))
        pair = sorted((rank, other))
        if other < world_size:
            group.swap(x, *pair)
        found.append(x.unique().tolist())
    return found


def run_lazily() -> list[Any]:
    """Connections of groups whose pairs connect with their first message, and their results."""
    os.environ[LAZY_CONNECTIONS] = "1"
    rank, _ = join()
    files = len([*Path("/proc/self/fd").iterdir()])
    control = Control(30.0)
    found: list[Any] = [control.gather(rank)]
    group = collectives(control.group, "gloo", HOST, 30.0)
    for verb in ("all_reduce", "reduce_scatter", "all_gather"):
        x = torch.full((40_000,), float(rank))
        group.by_verb[verb](x)
        found.append(x.mean().item() if verb != "reduce_scatter" else None)
    control.close()
    return [*found, len([*Path("/proc/self/fd").iterdir()]) > files]


def wait_for_a_silent_rank(limit_s: float) -> list[float]:
    """Seconds until each half gives up on the last rank, which never takes part."""
    rank, world_size = join()
    found = []
    for verb in ("reduce_scatter", "all_gather"):
        halves = collectives(new_group("gloo", limit_s), "gloo", HOST, limit_s)
        dist.barrier()
        start = time.monotonic()
        if rank < world_size - 1:
            with suppress(RuntimeError):
                halves.by_verb[verb](torch.ones(100))
                start = time.monotonic()
        found.append(time.monotonic() - start)
        dist.barrier()
    return found


@contextmanager
def connected(*specs: LinkSpec) -> Iterator[Cluster]:
    join()
    cluster = connect(specs, HOST, CPU(), 30.0)
    yield cluster
    assert cluster.close()


def use_channels() -> list[Any]:
    """Messages on two channels, released in another order on every rank."""
    with connected(LinkSpec("net", None, "gloo")) as cluster:
        names = ["net", "net#1", "net#2"]
        cluster.open(names)
        cluster.open(["net#1"])
        rank = cluster.control.rank
        buffers = {name: torch.full((1000,), float(i + rank)) for i, name in enumerate(names)}
        messages = {name: cluster.links[name].enqueue(rule(name), 0) for name in names}
        for i in range(len(names)):
            name = names[(i + rank) % len(names)]
            cluster.links[name].release(messages[name], (buffers[name],))
        arrived = all(message.wait(20.0) for message in messages.values())
        apart = len({id(group) for group in cluster.groups.values()})
        try:
            cluster.open(["other#1"])
        except ValueError as error:
            words = str(error)
        found = [float(buffers[name].mean()) for name in names]
        return [arrived, list(cluster.links), apart, found, words]


def rule(link: str, verb: Verb = "all_reduce"):
    return transfer(
        "grad",
        range(1),
        after=Moment("step"),
        before=Moment("end"),
        phases=[0],
        link=link,
        verb=verb,
    )


def connect_deaf() -> None:
    """Rank 1 has an address, but nobody listens there."""
    rank = int(os.environ["RANK"])
    if rank == 1:
        interfaces.socket.create_server = lambda address, **_: bound(address)  # type: ignore[assignment]
    with connected(LO):
        pass


def bound(address: tuple[str, int]) -> socket.socket:
    s = socket.socket()
    s.bind(address)
    return s


def connect_with(specs: list[tuple[LinkSpec, ...]]) -> list[str]:
    """Names of the links that one gets with `specs[rank]`."""
    with_mine = specs[int(os.environ["RANK"])]
    with connected(*with_mine) as cluster:
        return list(cluster.links)


# ---- collectives ----------------------------------------------------------------------------


TWO, THREE, FOUR = Batch(2), Batch(3), Batch(4)
MEANS = [TWO.add(run_verbs, False), THREE.add(run_verbs, False), FOUR.add(run_verbs, True)]


@pytest.mark.parametrize("call", MEANS, ids=["2", "3", "4"])
def test_verbs_are_the_mean(call: Call) -> None:
    """Against float64, of every dtype and of sizes that do not divide; all ranks bit by bit."""
    ranks, world_size = call.results, call.batch.world_size
    cases = [(dtype, size) for dtype in TOLERANCE for size in sizes(world_size)]
    for i, (dtype, size) in enumerate(cases):
        expected, tolerance = exact_mean(world_size, size, dtype), TOLERANCE[dtype]
        for rank, done in enumerate(ranks):
            name, *results, moved = done[i]
            at_once, shard, halves = (np.frombuffer(result) for result in results)
            own = own_shard(rank, world_size, size)
            np.testing.assert_allclose(at_once, expected, atol=tolerance)
            np.testing.assert_allclose(shard, expected[own], atol=tolerance)
            np.testing.assert_allclose(halves, expected, atol=tolerance)
            assert halves.tobytes() == ranks[0][i][3], "replicas must stay identical"
            assert shard.tobytes() == halves[own].tobytes(), "all_gather keeps the owner's bits"
            assert (name, moved) == (str(dtype), 0)


def test_alone_nothing_happens() -> None:
    assert run_ranks(1, run_alone) == [True]


@THREE.given(wait_for_a_silent_rank, 1.0)
def test_a_half_gives_up_after_its_timeout(call: Call) -> None:
    for waited in call.results[:2]:
        assert all(0.5 < seconds < 2.5 for seconds in waited)


EDGES = [3 * AT_ONCE_BYTES // 4, 3 * ASKED_BYTES // 4]
ELEMENTS = [3, EDGES[0], EDGES[0] + 3, EDGES[1] - 3, EDGES[1], 99_999]


@THREE.given(run_exchange, ELEMENTS)
def test_an_exchange_hands_every_rank_its_shards(call: Call) -> None:
    """At once and, of larger shards, one rank after the other."""
    for rank, found in enumerate(call.results):
        assert found == [[10.0 * source + rank for source in range(3)]] * len(ELEMENTS)


SWAPS = [batch.add(run_swaps, 2) for batch in (THREE, FOUR)]


def test_two_ranks_exchange_tensors_in_both_directions() -> None:
    three, four = (call.results for call in SWAPS)
    for found, first in zip(three, (1.0, 0.0, 2.0), strict=True):
        assert found[0] == [first]
    assert [row[1] for row in four] == [[2.0], [3.0], [0.0], [1.0]]


class Eager:
    """A group whose messages arrive as soon as a rank is ready to receive them."""

    def __init__(self) -> None:
        self.sent: list[list[float]] = []

    def recv(self, tensors: list[Tensor], _peer: int, _tag: int) -> Any:
        tensors[0].fill_(7.0)
        return SimpleNamespace(wait=lambda _: None)

    def send(self, tensors: list[Tensor], _peer: int, _tag: int) -> Any:
        self.sent.append(tensors[0].tolist())
        return SimpleNamespace(wait=lambda _: None)


def test_an_exchange_sends_the_values_from_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both directions use one tensor, and the other rank's values may arrive first."""
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_group_rank", lambda _, rank: rank)
    group, tensor = Eager(), torch.arange(3.0)
    swapping(cast("Any", group), 1.0, 1)(tensor, 0, 1)
    assert group.sent == [[0.0, 1.0, 2.0]]
    assert tensor.tolist() == [7.0] * 3


def test_groups_work_if_pairs_connect_with_their_first_message() -> None:
    expected = [[0, 1, 2, 3, 4], 2.0, None, 2.0, True]
    assert run_ranks(5, run_lazily) == [expected] * 5


def train_lazily() -> list[float]:
    os.environ[LAZY_CONNECTIONS] = "1"
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = offbeat.prepare(model, optimizer, "bsp", links=["lo"], timeout_s=20.0)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.full((1, 2), dist.get_rank() + 1.0)).sum().backward()
        optimizer.step()
    model.close()
    return [w for p in model.parameters() for w in p.flatten().tolist()]


def test_a_job_trains_if_pairs_connect_with_their_first_message() -> None:
    """Its groups do not share the devices of gloo, which would wait forever."""
    first, *others = run_ranks(3, train_lazily)
    assert others == [first] * 2


class Noted:
    """A group of three that notes what its rank 0 sends, takes and waits for."""

    def __init__(self) -> None:
        self.notes: list[tuple[str, int, int]] = []

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 3

    def recv(self, tensors: list[Tensor], peer: int, _tag: int) -> Any:
        return SimpleNamespace(wait=lambda _: self.notes.append(("has", tensors[0].nbytes, peer)))

    def send(self, tensors: list[Tensor], peer: int, _tag: int) -> Any:
        self.notes.append(("sends", tensors[0].nbytes, peer))
        return SimpleNamespace(wait=lambda _: None)


@pytest.mark.parametrize("shard", [ASKED_BYTES - 4, ASKED_BYTES])
def test_large_shards_are_sent_to_who_has_asked(shard: int) -> None:
    """In every step of an exchange, and before an all-gather begins."""

    def step(to: int, *, asked: bool) -> list[tuple[str, int, int]]:
        words = [("sends", 1, 3 - to), ("has", 1, to)] if asked else []
        return [*words, ("sends", shard, to), ("has", shard, 3 - to)]

    asked, group = shard == ASKED_BYTES, Noted()
    ring = Ring(cast("Any", group), 1.0)
    ring.exchange(torch.zeros(3 * shard // 4))
    assert group.notes == step(1, asked=asked) + step(2, asked=asked)
    group.notes.clear()
    ring.all_gather(torch.zeros(3 * shard // 4))
    assert group.notes == step(1, asked=asked) + step(1, asked=False)


@pytest.mark.parametrize("size", [0, 1, 5, 6, 7, 12])
def test_shards_follow_their_definition(size: int) -> None:
    tensor = torch.arange(float(size))
    cut = shards(tensor, 6)
    assert torch.equal(torch.cat(cut), tensor)
    for rank, shard in enumerate(cut):
        assert torch.equal(shard, tensor[own_shard(rank, 6, size)])


# ---- channels -------------------------------------------------------------------------------


@TWO.given(use_channels)
def test_channels_are_groups_of_their_own(call: Call) -> None:
    for arrived, links, apart, means, words in call.results:
        assert arrived
        assert links == ["net", "net#1", "net#2"]
        assert apart == 3
        assert means == [0.5, 1.5, 2.5]
        assert words == "link ('other#1') must be one of net, or a channel of one"


# ---- what a link is -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("eth0", LinkSpec("eth0", "eth0", None)),
        ("gloo:eth1", LinkSpec("gloo:eth1", "eth1", "gloo")),
        ("nccl:", LinkSpec("nccl", None, "nccl")),
        ("nccl", LinkSpec("nccl", None, "nccl")),
        ("eth0:1", LinkSpec("eth0:1", "eth0:1", None)),
        ("wan=eth0", LinkSpec("wan", "eth0", None)),
        ("wan=gloo:eth0*2", LinkSpec("wan", "eth0", "gloo", 2)),
        ("wan=nccl", LinkSpec("wan", None, "nccl")),
    ],
)
def test_syntax_of_a_link(text: str, spec: LinkSpec) -> None:
    assert parse_link(text) == spec


@pytest.mark.parametrize("text", ["", "eth0#1", "wan=", "wan=eth0#1"])
def test_wrong_syntax_of_a_link(text: str) -> None:
    with pytest.raises(ValueError, match="must read INTERFACE or BACKEND:INTERFACE"):
        parse_link(text)


@pytest.mark.parametrize("text", ["=eth0", "wan#1=eth0", "gloo:wan=eth0", "wan*2=eth0", "a=b=eth0"])
def test_wrong_name_of_a_link(text: str) -> None:
    with pytest.raises(ValueError, match="must read NAME=INTERFACE or NAME=BACKEND:INTERFACE"):
        parse_link(text)


@pytest.mark.parametrize(
    ("text", "specs"),
    [
        (None, [LinkSpec("net")]),
        ("eth0, gloo:eth1", [LinkSpec("eth0", "eth0"), LinkSpec("gloo:eth1", "eth1", "gloo")]),
        ('[{"name": "wan", "interface": "eth1"}]', [LinkSpec("wan", "eth1")]),
    ],
)
def test_links_of_the_environment(
    text: str | None, specs: list[LinkSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OFFBEAT_LINKS", raising=False)
    if text is not None:
        monkeypatch.setenv("OFFBEAT_LINKS", text)
    assert current_links() == specs


@pytest.mark.parametrize(
    ("links", "device", "text"),
    [
        (["nccl:eth0"], "cpu", "link 'nccl:eth0' (eth0) needs a model on a GPU (cpu); give gloo:"),
        (
            ["nccl:eth0", "nccl:eth1"],
            "cuda",
            "link 'nccl:eth0' (eth0) and link 'nccl:eth1' (eth1) must not both use NCCL, which",
        ),
    ],
)
def test_links_that_nccl_cannot_be(links: list[str], device: str, text: str) -> None:
    with pytest.raises(ValueError) as caught:
        link_specs(links, torch.device(device))
    assert text in str(caught.value)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_links_use_gloo_unless_they_name_nccl(device: str) -> None:
    [spec] = link_specs(["eth0"], torch.device(device))
    assert spec.backend == "gloo"
    assert link_specs(["nccl:eth0"], torch.device("cuda"))[0].backend == "nccl"


def test_address_of_an_interface() -> None:
    assert str(ipv4_of("lo")) == "127.0.0.1/8"
    assert ipv4_of("nonexistent0") is None


def test_who_cannot_be_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # nobody listens: refused
        others = {1: server.getsockname(), 2: silent.getsockname()}
        assert unreachable("127.0.0.1", others, 5.0) == {2: "Connection refused"}
        assert unreachable("127.0.0.1", {1: others[1]}, 5.0) == {}


# ---- groups that belong to no link ----------------------------------------------------------


def interfaces_of_groups(variable: str) -> list[str | None]:
    """The interface of the default group, of that of the link and of that for saving."""
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    if variable:
        os.environ["GLOO_SOCKET_IFNAME"] = variable
    found: list[str | None] = []

    def note(create: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            found.append(os.environ.get("GLOO_SOCKET_IFNAME"))
            return create(*args, **options)

        return call

    dist.init_process_group, dist.new_group = note(dist.init_process_group), note(dist.new_group)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, _ = offbeat.prepare(model, optimizer, "bsp", links=["lo"], timeout_s=20.0)
    found.append(os.environ.get("GLOO_SOCKET_IFNAME"))
    model._session.cluster.control.create_group()
    model.close()
    return found


@pytest.mark.parametrize("variable", ["", "lo,lo"])
def test_all_groups_are_on_the_first_link_unless_the_variable_names_another_interface(
    variable: str,
) -> None:
    named = variable or "lo"
    expected = [named, "lo", variable or None, named]
    assert run_ranks(2, interfaces_of_groups, variable) == [expected] * 2


def agreement_of(store: Any, rank: int, version: str, limit_s: float = 10.0) -> str:
    try:
        with StoreAgreement(store, rank, 2, limit_s) as ranks:
            ranks.hosts = compare_versions(ranks, version, "2.13.0")
            return str(ranks.gather([rank, ranks.hosts == [socket.gethostname()] * 2]))
    except (RuntimeError, ValueError) as error:
        return str(error)


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("1", "[[0, True], [1, True]]"),
        ("2", f"rank 1 ({socket.gethostname()}) has offbeat 2, rank 0 has 1; install one version"),
    ],
)
def test_ranks_agree_by_the_store(version: str, expected: str) -> None:
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(agreement_of, [store] * 2, range(2), ["1", version])
        assert list(found) == [expected] * 2


def test_the_store_sends_one_summary_to_each_rank() -> None:
    """Ranks other than 0 wait for one key and read one value, whatever the number of ranks."""
    reads: list[tuple[int, int]] = []

    class Counted(PrefixStore):
        rank = 0

        def wait(self, keys: list[str], timeout: Any = None) -> None:
            reads.append((self.rank, len(keys)))
            super().wait(keys, timeout)

        def multi_get(self, keys: list[str]) -> list[bytes]:
            reads.append((self.rank, len(keys)))
            return super().multi_get(keys)

    store, ranks = HashStore(), 6

    def gather(rank: int) -> list[Any]:
        counted = Counted("all", store)
        counted.rank = rank
        return StoreAgreement(counted, rank, ranks, 10.0).gather(("value", rank % 2))

    with ThreadPoolExecutor(ranks) as pool:
        assert [*pool.map(gather, range(ranks))] == [
            [("value", r % 2) for r in range(ranks)]
        ] * ranks
    assert sorted(reads) == [(0, ranks), (0, ranks), *((rank, 1) for rank in range(1, ranks))]


def test_only_the_ranks_that_collectives_use_are_checked_in_large_jobs() -> None:
    few, many = Topology.flat(MOST_CHECKED), Topology.flat(1000)
    assert [*_peers(LO, 3, few)] == [*range(MOST_CHECKED)]
    everyone = [_peers(LO, rank, many) for rank in range(1000)]
    for rank, peers in enumerate(everyone):
        assert rank not in peers
        assert {(rank + 1) % 1000, (rank - 1) % 1000} <= {*peers}
        assert len(peers) == 20
        assert all(rank in everyone[peer] for peer in peers)
    nodes = Topology(tuple((2 * node, 2 * node + 1) for node in range(100)))
    assert all(peer % 2 == 1 for peer in _peers(LO, 7, nodes))


def test_large_jobs_connect_pairs_with_their_first_message(monkeypatch: pytest.MonkeyPatch) -> None:
    for given, ranks, expected in ((None, 64, None), (None, 65, "1"), ("0", 65, "0")):
        monkeypatch.delenv(LAZY_CONNECTIONS, raising=False)
        if given is not None:
            monkeypatch.setenv(LAZY_CONNECTIONS, given)
        with group_environment(LO, ranks):
            assert os.environ.get(LAZY_CONNECTIONS) == expected
        assert os.environ.get(LAZY_CONNECTIONS) == given


def test_a_rank_that_does_not_answer_in_the_store_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "STAYS_S", 0.0)
    text = agreement_of(HashStore(), 0, "1", 0.1)
    assert text.startswith("rank 1 has not answered within 0.1 s: it has failed, or has another")


# ---- links that are not alike ---------------------------------------------------------------


@TWO.given(connect_with, [(LO,), (LinkSpec("loopback", "lo", "gloo"),)])
def test_names_are_rank_0_s(call: Call) -> None:
    """The same network may be called otherwise on another host."""
    assert call.results == [["lo"]] * 2


@pytest.mark.parametrize(
    ("specs", "text"),
    [
        (
            [(LO,), (LinkSpec("b", "eth77", "gloo"),)],
            "link 'b': interface 'eth77' must exist on every host; rank 1 (host",
        ),
        (
            [(ANY, LinkSpec("b", None, "gloo")), (LinkSpec("b", None, "gloo"), ANY)],
            "has link 0 'b' where rank 0 (host",
        ),
        ([(ANY, LO), (ANY,)], "the backends of the links must be the same on all ranks: rank 0"),
    ],
)
def test_differences_are_said_on_every_rank(specs: Any, text: str) -> None:
    for outcome in watch_ranks(2, connect_with, specs):
        assert outcome.kind == "ValueError", outcome.error
        assert text in outcome.error
        assert outcome.seconds < 20


def test_a_rank_that_nobody_reaches_is_named() -> None:
    outcomes = watch_ranks(3, connect_deaf)
    for outcome in outcomes:
        assert outcome.kind == "ValueError", outcome.error
        assert outcome.error.startswith("link 'lo' must connect all ranks, but within 15 s rank 0 ")
        assert outcome.error.count("cannot reach rank 1 (host") == 2
        assert "reach rank 0" not in outcome.error
        assert "reach rank 2" not in outcome.error


# ---- the command line -----------------------------------------------------------------------


def test_links_of_the_command_line_reach_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("echo.py").write_text("import os, sys; sys.exit(os.environ['OFFBEAT_LINKS'])")
    argv = ["run", "--lab", "none", "--hosts", "1", "--links", "lo, gloo:lo", "echo.py"]
    assert cli.main(argv) == 1
    assert "    lo,gloo:lo" in capsys.readouterr().err  # the end of rank 0's log


def test_links_are_for_machines_without_the_lab(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.touch()
    assert cli.main(["run", "--links", "eth0,eth1", str(script)]) == cli.WRONG_USE
    assert "links (eth0, eth1) must be left to the cluster's" in capsys.readouterr().err
