"""Several links of real processes: wrong ones are said within seconds, right ones run at once."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from offbeat.lab import Cluster, Lab, Link, launch

pytest.importorskip("torch", exc_type=ImportError)

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("namespaces")]

PREPARE = """
import json, os, time, torch, offbeat
model = torch.nn.Linear(512, 512)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
links = json.loads(os.environ["WANTED"])[int(os.environ["RANK"])]
start = time.monotonic()
try:
    model, optimizer = offbeat.prepare(model, optimizer, links=links, observe=1)
except ValueError as error:
    print("refused", json.dumps(str(error)))
    raise SystemExit
seconds = time.monotonic() - start
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(1, 512)).sum().backward()
    optimizer.step()
session = model._session
print("profile", json.dumps(session.profile.to_dict()))
model.close()
"""

TOGETHER = """
import json, torch
from offbeat.plan import Moment, transfer
from offbeat.transport.cluster import connect
from offbeat.transport.device import CPU
from offbeat.transport.interfaces import LinkSpec
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


def run(hosts: int, code: str, wanted: list[list[str]], folder: Path) -> list[str]:
    """Each rank's last line, on two links of 80 Mbit/s."""
    two = (Link(name="a", rate="80mbit"), Link(name="b", rate="80mbit"))
    with Lab(Cluster(hosts=hosts, links=two)) as lab:
        before = lab.counters()
        argv = [sys.executable, "-c", code]
        env = {"WANTED": json.dumps(wanted)}
        result = launch(lab, argv, env=env, log_dir=folder, timeout_s=50)
        after = lab.counters()
    assert result.problem is None, result.problem
    if code == TOGETHER:
        for name in ("a", "b"):
            assert after[0][name].sent_bytes - before[0][name].sent_bytes > 2_000_000
    return [log.read_text().splitlines()[-1] for log in result.log_files]


def refusals(lines: list[str]) -> list[str]:
    assert all(line.startswith("refused ") for line in lines), lines
    return [json.loads(line.removeprefix("refused ")) for line in lines]


def test_one_host_with_its_links_swapped(tmp_path: Path) -> None:
    right = ["eth0", "eth1"]
    for words in refusals(run(3, PREPARE, [right, right, ["eth1", "eth0"]], tmp_path)):
        assert words.startswith("links must be in the same order on all ranks: rank 2 (host ")
        assert "has link 0 'eth1' in 10.77.1.0/24 where rank 0 (host " in words
        assert "has link 0 'eth0' in 10.77.0.0/24, but it is what rank 0 has as link 1" in words
        assert words.endswith("on rank 2 give links=['eth0', 'eth1']")


def test_an_interface_that_one_host_lacks(tmp_path: Path) -> None:
    for words in refusals(run(2, PREPARE, [["eth0", "eth1"], ["eth0", "eth7"]], tmp_path)):
        assert words.startswith("link 'eth7': interface 'eth7' must exist on every host; rank 1 ")
        assert words.endswith("has lo, eth0, eth1")


def test_links_of_another_network_cannot_be_reached(tmp_path: Path) -> None:
    """Rank 1's lo exists, but nobody else is there."""
    both = refusals(run(2, PREPARE, [["eth0"], ["lo"]], tmp_path))
    assert both[1].startswith("link 'eth0' (lo) must connect all ranks, but within 15 s rank 0 ")
    for words in both:
        assert "cannot reach rank 1 (host " in words
        assert "give other interfaces as links" in words


def test_two_links_carry_at_once(tmp_path: Path) -> None:
    for line in run(2, TOGETHER, [], tmp_path):
        (a_start, a_end), (b_start, b_end) = json.loads(line.removeprefix("spans "))
        assert max(a_start, b_start) < min(a_end, b_end)


def test_what_links_lose_is_measured(tmp_path: Path) -> None:
    """Two channels share one interface, two links do not."""
    lines = run(2, PREPARE, [["eth0", "eth1"]] * 2, tmp_path)
    profiles = [json.loads(line.removeprefix("profile ")) for line in lines]
    assert profiles[0] == profiles[1]
    channels, links = profiles[0]["contention"]
    print("speeds of two channels and of two links:", channels["speeds"], links["speeds"])
    assert (channels["links"], links["links"]) == (["eth0", "eth0"], ["eth0", "eth1"])
    assert sum(channels["speeds"]) < sum(links["speeds"])
