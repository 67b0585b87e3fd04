"""Several links of real processes: wrong ones are said within seconds, right ones run at once."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from support.forking import launch_forks

from offbeat.lab import Cluster, Lab, Link

pytest.importorskip("torch", exc_type=ImportError)

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("namespaces")]

# One launch tries all of them, one after the other.
RIGHT = ["eth0", "eth1"]
WANTED = {
    "swapped": [RIGHT, RIGHT, ["eth1", "eth0"]],
    "lacking": [RIGHT, ["eth0", "eth7"], RIGHT],
    "elsewhere": [["eth0"], ["lo"], ["eth0"]],
    "right": [RIGHT, RIGHT, RIGHT],
}

PREPARE = """
import json, os, torch, offbeat
from offbeat.core.measuring import contention, links as measuring
from offbeat.core.transport import interfaces
# Few long messages: a busy machine delays each of them by tens of milliseconds.
contention.COUNT, measuring.TOGETHER = 3, 0.5
for name, wanted in json.loads(os.environ["WANTED"]).items():
    model = torch.nn.Linear(512, 512)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    links = wanted[int(os.environ["RANK"])]
    interfaces.CHECK_S = 4.0 if name == "elsewhere" else 15.0  # no connection will come about
    try:
        model, optimizer = offbeat.prepare(model, optimizer, links=links, observe=1)
    except ValueError as error:
        print(json.dumps([name, "refused", str(error)]))
        continue
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(1, 512)).sum().backward()
        optimizer.step()
    print(json.dumps([name, "prepared", model._session.profile.to_dict()]))
    model.close()
"""

TOGETHER = """
import json, torch
from offbeat.plan import Moment, transfer
from offbeat.core.transport.cluster import connect
from offbeat.core.transport.device import CPU
from offbeat.core.transport.interfaces import LinkSpec
torch.distributed.init_process_group("gloo")
specs = [LinkSpec("a", "eth0", "gloo"), LinkSpec("b", "eth1", "gloo")]
cluster = connect(specs, torch.device("cpu"), CPU(), 30.0)
cluster.control.gather(None)
messages = []
for name in ("a", "b"):
    when = {"after": Moment("step"), "before": Moment("end"), "phases": [0]}
    rule = transfer("grad", range(1), link=name, **when)
    messages.append(cluster.links[name].enqueue(rule, 0))
for message in messages:
    cluster.links[message.transfer.link].release(message, (torch.ones(500_000),))
assert all(message.wait(20) and message.error is None for message in messages)
print("spans", json.dumps([(message.start, message.end) for message in messages]))
cluster.close()
torch.distributed.destroy_process_group()
"""


def run(hosts: int, code: str, folder: Path) -> list[list[str]]:
    """Each rank's lines, on two links of 20 Mbit/s."""
    two = (Link(name="a", rate="20mbit"), Link(name="b", rate="20mbit"))
    with Lab(Cluster(hosts=hosts, links=two)) as lab:
        before = lab.counters()
        script = folder / "script.py"
        script.write_text(code)
        how = {"env": {"WANTED": json.dumps(WANTED)}, "log_dir": folder, "timeout_s": 50.0}
        result = launch_forks(lab, [sys.executable, str(script)], workers=hosts, **how)
        after = lab.counters()
    assert result.problem is None, result.problem
    if code == TOGETHER:
        for name in ("a", "b"):
            assert after[0][name].sent_bytes - before[0][name].sent_bytes > 2_000_000
    return [log.read_text().splitlines() for log in result.log_files]


@pytest.fixture(scope="module")
def prepared(_support: str | None, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """Per rank and name: what became of it, and its words or its profile."""
    if _support is not None:
        pytest.skip(_support)
    ranks = run(3, PREPARE, tmp_path_factory.mktemp("links"))
    told = [[json.loads(line) for line in lines if line.startswith('["')] for lines in ranks]
    return [{name: tuple(what) for name, *what in lines} for lines in told]


def refusals(prepared: list[dict], name: str) -> list[str]:
    assert all(rank[name][0] == "refused" for rank in prepared), prepared
    return [rank[name][1] for rank in prepared]


def test_one_host_with_its_links_swapped(prepared: list[dict]) -> None:
    for words in refusals(prepared, "swapped"):
        assert words.startswith("links must be in the same order on all ranks: rank 2 (host ")
        assert "has link 0 'eth1' in 10.77.1.0/24 where rank 0 (host " in words
        assert "has link 0 'eth0' in 10.77.0.0/24, but that is rank 0's link 1" in words
        assert words.endswith("on rank 2 give links=['eth0', 'eth1']")


def test_an_interface_that_one_host_lacks(prepared: list[dict]) -> None:
    for words in refusals(prepared, "lacking"):
        assert words.startswith("link 'eth7': interface 'eth7' must exist on every host; rank 1 ")
        assert words.endswith("has lo, eth0, eth1")


def test_links_of_another_network_cannot_be_reached(prepared: list[dict]) -> None:
    """Rank 1's lo exists, but nobody else is there."""
    every = refusals(prepared, "elsewhere")
    assert every[1].startswith("link 'eth0' (lo) must connect all ranks, but within 4 s rank 0 ")
    for words in every:
        assert "cannot reach rank 1 (host " in words
        assert "give other interfaces as links" in words


def test_what_links_lose_is_measured(prepared: list[dict]) -> None:
    """Two channels share one interface, two links do not."""
    assert {rank["right"][0] for rank in prepared} == {"prepared"}, prepared
    first, *others = [rank["right"][1] for rank in prepared]
    assert all(other == first for other in others)
    channels, links = first["contention"]
    print("speeds of two channels and of two links:", channels["speeds"], links["speeds"])
    assert (channels["links"], links["links"]) == (["eth0", "eth0"], ["eth0", "eth1"])
    assert sum(channels["speeds"]) < sum(links["speeds"])


def test_two_links_carry_at_once(tmp_path: Path) -> None:
    for lines in run(2, TOGETHER, tmp_path):
        [spans] = [line for line in lines if line.startswith("spans ")]
        (a_start, a_end), (b_start, b_end) = json.loads(spans.removeprefix("spans "))
        assert max(a_start, b_start) < min(a_end, b_end)
