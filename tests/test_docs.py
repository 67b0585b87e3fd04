"""What the documents show is what the code says."""

from pathlib import Path

import pytest

from offbeat import cli
from offbeat.lab import Cluster
from offbeat.lab.cluster import Way
from offbeat.profile import Bucket, Link, Profile
from offbeat.strategies import PartialSync

DOCS = Path(__file__).parents[1] / "docs"


def test_the_plan_that_the_design_begins_with():
    buckets = tuple(Bucket(f"b{i}", 0.01, 0.02, 4000) for i in range(3))
    profile = Profile(buckets, (Link("net", 0.001, 1e6),), world_size=2)
    assert f"```\n{PartialSync(period=3).plan(profile)}\n```" in (DOCS / "design.md").read_text()


def test_the_cluster_file_of_the_readme():
    text = (DOCS.parent / "README.md").read_text()
    cluster = Cluster.from_toml(text.partition("```toml\n")[2].partition("```")[0])
    assert Cluster.from_toml(cluster.to_toml()) == cluster
    assert (cluster.speed_of(2), cluster.jitter_of(2)) == (0.5, 0.1)
    assert cluster.way(0, 3, "net") == Way(10_000_000, 0.08, 0.001)
    assert cluster.way(0, 2, "net") == Way(20_000_000, 0.04, 0.001)


def test_the_graph_of_the_gossip_page(capsys: pytest.CaptureFixture[str]):
    text = (DOCS / "gossip.md").read_text()
    command, _, shown = text.partition("```\n$ offbeat ")[2].partition("```")[0].partition("\n")
    assert cli.main(command.split()) == 0
    assert capsys.readouterr().out == shown


def test_the_commands_of_the_cyclic_page(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """With a profile of layers that keep less the deeper they are, in equal time."""
    buckets = tuple(
        Bucket(f"layers.{9 - i}", 0.01, 0.02, 4_000_000, activation_bytes=4_000_000 * (i + 5))
        for i in range(10)
    )
    monkeypatch.chdir(tmp_path)
    Profile(buckets, (Link("net", 0.001, 1e7),), 4, update_s=0.01).save("profile.json")
    blocks = (DOCS / "cyclic.md").read_text().split("```\n$ offbeat ")[1:]
    assert len(blocks) == 2
    for block in blocks:
        command, _, shown = block.partition("```")[0].partition("\n")
        assert cli.main(command.split()) == 0
        assert capsys.readouterr().out == shown
