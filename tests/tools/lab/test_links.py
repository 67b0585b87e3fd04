"""Several links of real processes: wrong ones are said within seconds, right ones run at once."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from harness.commands import launch_forks

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
from pathlib import Path
os.chdir(os.environ["FOLDER"])
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
        how = {"observe": 1, "record": f"runs-{name}"}
        model, optimizer = offbeat.prepare(model, optimizer, links=links, **how)
    except ValueError as error:
        print(json.dumps([name, "refused", str(error)]))
        continue
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(1, 512)).sum().backward()
        optimizer.step()
    model.close()
    torch.distributed.barrier()
    (path,) = Path(f"runs-{name}").glob("*/profile.json")
    print(json.dumps([name, "prepared", json.loads(path.read_text())]))
"""


def run(hosts: int, folder: Path) -> list[list[str]]:
    """Each rank's lines, on two links of 20 Mbit/s."""
    two = (Link(name="a", rate="20mbit"), Link(name="b", rate="20mbit"))
    with Lab(Cluster(hosts=hosts, links=two)) as lab:
        script = folder / "script.py"
        script.write_text(PREPARE)
        env = {"WANTED": json.dumps(WANTED), "FOLDER": str(folder)}
        how = {"env": env, "log_dir": folder, "timeout_s": 50.0}
        result = launch_forks(lab, [sys.executable, str(script)], workers=hosts, **how)
    assert result.problem is None, result.problem
    return [log.read_text().splitlines() for log in result.log_files]


@pytest.fixture(scope="module")
def prepared(_support: str | None, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """Per rank and name: what became of it, and its words or its profile."""
    if _support is not None:
        pytest.skip(_support)
    ranks = run(3, tmp_path_factory.mktemp("links"))
    told = [[json.loads(line) for line in lines if line.startswith('["')] for lines in ranks]
    return [{name: tuple(what) for name, *what in lines} for lines in told]


def refusals(prepared: list[dict], name: str) -> list[str]:
    assert all(rank[name][0] == "refused" for rank in prepared), prepared
    return [rank[name][1] for rank in prepared]


# the case, and what its refusal names on every rank
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("swapped", ("rank 2", "'eth1'", "10.77.1.0/24", "rank 0", "links=['eth0', 'eth1']")),
        ("lacking", ("'eth7'", "rank 1", "lo, eth0, eth1")),
        ("elsewhere", ("link 'eth0'", "rank 1")),  # rank 1's lo exists, but nobody else is there
    ],
)
def test_wrong_links_are_refused_on_every_rank(
    name: str, words: tuple[str, ...], prepared: list[dict]
) -> None:
    for text in refusals(prepared, name):
        assert [word for word in words if word not in text] == []


def test_what_links_lose_is_measured(prepared: list[dict]) -> None:
    """Two channels share one interface, two links do not."""
    assert {rank["right"][0] for rank in prepared} == {"prepared"}, prepared
    first, *others = [rank["right"][1] for rank in prepared]
    assert all(other == first for other in others)
    channels, links = first["contention"]
    print("speeds of two channels and of two links:", channels["speeds"], links["speeds"])
    assert (channels["links"], links["links"]) == (["eth0", "eth0"], ["eth0", "eth1"])
    assert sum(channels["speeds"]) < sum(links["speeds"])
