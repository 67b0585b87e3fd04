"""Several ranks on each host of a lab, which share a replica."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from offbeat.cli import main
from offbeat.cli.options import Where
from offbeat.experiments.compare import given_profile
from offbeat.experiments.comparison import Setup
from offbeat.experiments.report import load, summarize
from offbeat.lab import Cluster, HostOverride, Lab, Link, NoLab, launch
from offbeat.lab.launch import rank_environment
from offbeat.profile import Bucket, Profile
from offbeat.profile import Link as Facts

UNEVEN = Cluster(
    hosts=3,
    ranks=2,
    inside="10gbit",
    links=(Link(name="net", rate="100mbit"),),
    overrides=(HostOverride(host=1, ranks=3),),
)


def test_places_of_ranks() -> None:
    assert UNEVEN.world_size == 7
    assert [UNEVEN.host_of(rank) for rank in range(7)] == [0, 0, 1, 1, 1, 2, 2]
    assert [UNEVEN.ranks_of(host) for host in range(3)] == [2, 3, 2]
    assert [UNEVEN.first_rank(host) for host in range(3)] == [0, 2, 5]


def test_variables_of_ranks() -> None:
    with NoLab(UNEVEN) as lab:
        found = [rank_environment(lab, rank, 29500, 7, 0) for rank in range(7)]
    assert [one["LOCAL_RANK"] for one in found] == [*"0101201"]
    assert [one["LOCAL_WORLD_SIZE"] for one in found] == [*"2233322"]
    assert [one["GROUP_RANK"] for one in found] == [*"0011122"]
    assert {one["OFFBEAT_NODES"] for one in found} == {"auto"}
    links = [{"name": "net", "interface": "lo"}, {"name": "inside", "interface": "lo"}]
    assert all(json.loads(one["OFFBEAT_LINKS"]) == links for one in found)


def test_ranks_with_a_replica_each_are_no_nodes() -> None:
    with NoLab(Cluster.simple(2, processes_per_host=2)) as lab:
        found = rank_environment(lab, 3, 29500, 4, 0)
    assert "OFFBEAT_NODES" not in found
    assert (found["LOCAL_RANK"], found["LOCAL_WORLD_SIZE"]) == ("1", "2")
    assert [link["name"] for link in json.loads(found["OFFBEAT_LINKS"])] == ["net"]


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text('hosts = 3\nranks = 2\ninside = "10gbit"\nrate = "100mbit"\n'
                    "[[overrides]]\nhost = 1\nranks = 3\n")  # fmt: skip
    assert Cluster.load(path) == UNEVEN
    assert Cluster.from_toml(UNEVEN.to_toml()) == UNEVEN
    assert Cluster(**UNEVEN.record()) == UNEVEN
    assert not {"ranks", "inside"} & set(Cluster.simple(2).record())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"inside": "1gbit"}, r"inside \(1gbit\)"),
        ({"overrides": [{"host": 1, "ranks": 2}]}, "ranks"),
        ({"ranks": 2, "processes_per_host": 2}, r"processes_per_host \(2\)"),
        ({"ranks": 0}, "ranks"),
        ({"ranks": 2, "links": [{"name": "inside"}]}, "'inside'"),
    ],
)
def test_wrong_clusters(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        Cluster.model_validate({"hosts": 2, **given})


def test_options() -> None:
    made = Where(hosts=2, per_node=4, inside="10gbit", rate="50mbit").cluster_with_servers()
    assert made == Cluster.simple(2, "50mbit", ranks=4, inside="10gbit")
    for wrong, name in (
        (Where(inside="10gbit"), r"inside \(10gbit\)"),
        (Where(per_node=2, cluster=Path("cluster.toml")), "--cluster.*--per-node"),
    ):
        with pytest.raises(ValueError, match=name):
            wrong.cluster_with_servers()


# ---- given profiles -------------------------------------------------------------------------


def profile_of(sizes: tuple[int, ...]) -> Profile:
    return Profile(
        (Bucket("b", 0.5, 0.5, 1000),),
        (Facts("net", 0.0, 1e7, asked_rate_bps=1e8),),
        len(sizes),
        topology=sizes,
        inside=Facts("inside", 0.0, 1e9),
    )


def converted(profile: Profile, cluster: Cluster, folder: Path) -> Profile:
    path = folder / "profile.json"
    profile.save(path)
    return given_profile(Setup((sys.executable, __file__), cluster), path).profile


def test_a_profile_for_more_nodes(tmp_path: Path) -> None:
    found = converted(profile_of((2, 2)), Cluster.simple(4, "100mbit", ranks=2), tmp_path)
    assert (found.world_size, found.topology, found.ranks) == (4, (2, 2, 2, 2), 8)
    assert found.links[0].asked_rate_bps == 1e8


@pytest.mark.parametrize(
    ("sizes", "ranks"), [((2, 2), None), ((2, 2), 3), ((3, 3), 2)], ids=["flat", "more", "fewer"]
)
def test_a_profile_of_other_nodes(
    sizes: tuple[int, ...], ranks: int | None, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="ranks per replica"):
        converted(profile_of(sizes), Cluster.simple(2, "100mbit", ranks=ranks), tmp_path)


# ---- the rate inside ------------------------------------------------------------------------

TRANSFER = """
import os, socket, time
rank, there = int(os.environ["LOCAL_RANK"]), (os.environ["SINK"], 7000)
if rank == 0:
    server = socket.create_server(there)
    peer, _ = server.accept()
    peer.sendall(b"go")
    start_s, left = time.monotonic(), 1_000_000
    while left:
        left -= len(peer.recv(65536))
    print("took", time.monotonic() - start_s, flush=True)
    peer.sendall(b"thanks")
else:
    while True:
        try:
            peer = socket.create_connection(there)
            break
        except ConnectionRefusedError:
            time.sleep(0.02)
    assert peer.recv(2) == b"go"
    peer.sendall(bytes(1_000_000))
    assert peer.recv(6) == b"thanks"
"""


@pytest.mark.usefixtures("namespaces")
@pytest.mark.timeout(80)
def test_ranks_of_a_host_send_at_the_rate_inside(program: Any, tmp_path: Path) -> None:
    """Also to the address of the host on a faster link: the kernel uses the loopback."""
    lines: list[str] = []
    cluster = Cluster.simple(1, "1gbit", ranks=2, inside="20mbit")
    with Lab(cluster, "inside") as lab:
        result = launch(
            lab, program(TRANSFER), env={"SINK": lab.address(0)}, log_dir=tmp_path, timeout_s=30,
            on_line=lambda _, line: lines.append(line),
        )  # fmt: skip
        inside, between = lab.inside_counters()[0], lab.counters()[0]["net"]
    assert result.problem is None, result.problem
    [took] = [float(line.split()[1]) for line in lines if line.startswith("took")]
    assert took >= 0.8 * 8e6 / 20e6  # the first burst passes at once
    assert inside.sent_bytes >= 1_000_000
    assert between.sent_bytes < 100_000


# ---- a comparison ---------------------------------------------------------------------------

SCRIPT = """
import os, torch, torch.distributed as dist, offbeat
from offbeat.core.measuring import codec_speed, links

links.BUDGET_S, codec_speed.MANY = 0.3, 1 << 14
codec_speed.REPEATS = {codec_speed.FEW: 1, codec_speed.MANY: 1}

def counters():
    rows = [line.split(":") for line in open("/proc/self/net/dev").read().splitlines()[2:]]
    sent = {name.strip(): int(rest.split()[8]) for name, rest in rows}
    return sum(sent.values()) - sent["lo"], sent["lo"]

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(99, 2000), torch.nn.ReLU(), torch.nn.Linear(2000, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
model, optimizer = offbeat.prepare(model, optimizer, min_bucket_bytes=1)
inputs = torch.full((8, 99), 1.0 + int(os.environ["RANK"]))
for iteration in range(16):
    if iteration == 8:
        dist.barrier()
        before = counters()
        dist.barrier()
    loss = model(inputs).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
model.consolidate()
dist.barrier()
for name, first, last in zip(("between", "inside"), before, counters()):
    offbeat.report_metric(name, (last - first) / 8)
dist.barrier()
"""
MODEL_BYTES = 4 * (100 * 2000 + 2001 * 3)


@pytest.mark.usefixtures("namespaces", "forked_ranks")
@pytest.mark.timeout(110)
def test_compare_on_hosts_of_two_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the kernel's counters, a host sends `2 (M - 1) / M` models per average to other hosts, as
    with one rank. Its ranks send `2 (K - 1)` models to each other for gradients, and for an
    average."""
    script, run_dir = tmp_path / "train.py", tmp_path / "run"
    script.write_text(SCRIPT)
    argv = ["compare", "--hosts", "2", "--per-node", "2", "--inside", "10gbit", "--rate", "400mbit"]
    argv += ["--strategies", "local-sgd:period=2", "--repeat", "1", "--pace", "none"]
    assert main([*argv, "--keep-disturbed", "--out", str(run_dir), str(script)]) == 0
    text = " ".join(capsys.readouterr().out.replace("\u00a0", " ").split())
    assert "2 hosts of 2 ranks on this machine, 400 Mbit/s, 10 Gbit/s inside" in text
    run = load(run_dir)
    [row] = summarize(run)
    assert run.profile is not None
    assert (run.profile.topology, run.profile.links[0].asked_rate_bps) == ((2, 2), 4e8)
    assert len(run.contestants[0].repetitions[0].ranks) == 4
    assert row.predicted_s is not None
    assert row.sent_bytes == pytest.approx(MODEL_BYTES / 2)
    assert row.metrics["between"] == pytest.approx(MODEL_BYTES / 2, rel=0.03)
    assert row.metrics["inside"] == pytest.approx(2 * MODEL_BYTES * 1.5, rel=0.05)
    page = (run_dir / "report.html").read_text()
    assert 'data-n="between"' in page
    assert 'data-n="inside"' in page
