"""What the documents show is what the code says."""

from pathlib import Path

from offbeat.profile import Bucket, Link, Profile
from offbeat.strategies import PartialSync

DOCS = Path(__file__).parents[1] / "docs"


def test_the_plan_that_the_design_begins_with():
    buckets = tuple(Bucket(f"b{i}", 0.01, 0.02, 4000) for i in range(3))
    profile = Profile(buckets, (Link("net", 0.001, 1e6),), world_size=2)
    assert f"```\n{PartialSync(period=3).plan(profile)}\n```" in (DOCS / "design.md").read_text()
