"""Files of an earlier version still load: checkpoints, plans, a profile and the record of a run.

`tests/artifacts/VERSION.tar.xz` was written by that version, by `support/artifacts.py` since 0.2.0.
Digests are of bits as they were saved, so no arithmetic of this machine enters them.
"""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from cases.artifacts import STRATEGIES
from cases.checkpoint_jobs import job
from harness.ranks import run_ranks

import offbeat
from offbeat.experiments.record.run_directory import load
from offbeat.experiments.report.write import SUMMARY, write

# Since 0.2.0 time to a loss counts from the end of the first iteration, and measured parts are
# means over all recorded periods.
CHANGED = {"0.1.0": {"repeated", "target_s", "split"}}
ARCHIVES = sorted((Path(__file__).parents[1] / "artifacts").glob("*.tar.xz"))


@pytest.fixture(scope="module", params=ARCHIVES, ids=lambda path: path.name)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked files of one version."""
    target = tmp_path_factory.mktemp("artifacts")
    with tarfile.open(request.param) as archive:
        # Python 3.11 before 3.11.4 has no filters.
        archive.extractall(
            target, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {})
        )
    return target


def _load_checkpoints(folder: str) -> list[tuple[str, int, str, bool]]:
    """By strategy: iteration and bits after loading, and whether training then goes on."""
    found = []
    for name in sorted(path.name for path in Path(folder).iterdir()):
        with job(STRATEGIES[name]) as loaded:
            loaded.load(f"{folder}/{name}")
            start, bits = offbeat.iteration(loaded.model), loaded.digest()
            loaded.train(range(start, start + 2))
            found.append((name, start, bits, loaded.digest() != bits))
    return found


def test_checkpoints_load_bit_for_bit(folder: Path) -> None:
    expected: list[dict[str, str]] = json.loads((folder / "checkpoints.json").read_text())
    found = run_ranks(2, _load_checkpoints, str(folder / "checkpoints"), timeout_s=90)
    for rank, digests in enumerate(expected):
        assert found[rank] == [(name, 4, digests[name], True) for name in sorted(digests)]


def _load_newer_checkpoint(folder: str) -> str:
    """Error of a checkpoint whose shard on rank 1 states a later schema, beside an earlier one."""
    with job(offbeat.BSP()) as loaded:
        loaded.save(folder).wait()
        loaded.train(range(1))
        loaded.save(folder).wait()
        newest = sorted(Path(folder).glob("*/rank-1/manifest.json"))[-1]
        if dist.get_rank() == 1:
            newest.write_text(newest.read_text().replace('"schema": 1', '"schema": 2'))
        with pytest.raises(ValueError) as caught:
            loaded.load(folder)
        return str(caught.value)


def test_checkpoint_of_a_later_schema_is_refused_on_every_rank(tmp_path: Path) -> None:
    for error in run_ranks(2, _load_newer_checkpoint, str(tmp_path), timeout_s=90):
        assert error.startswith("the checkpoint could not be loaded: rank 1: schema (2) of ")
        assert error.endswith(
            "/rank-1 must be at most 1: a later version of offbeat has written it; install that "
            "version"
        )


def test_record_of_a_later_schema_is_refused(folder: Path, tmp_path: Path) -> None:
    """Its blocks name the schema in the report's problems, and run.json in the error."""
    record = shutil.copytree(folder / "record", tmp_path / "record")
    [blocks, *_] = sorted(record.rglob("rank0.jsonl"))
    blocks.write_text(blocks.read_text().replace('"schema":2', '"schema":3'))
    words = "schema (3) of every block must be at most 2: a later version of offbeat has written it"
    assert any(words in problem for problem in load(record).failures()), load(record).failures()
    run = record / "run.json"
    run.write_text(json.dumps(json.loads(run.read_text()) | {"schema": 2}))
    with pytest.raises(ValueError, match=r"schema \(2\) of .*run.json must be at most 1"):
        load(record)


def test_plans_keep_their_digests(folder: Path) -> None:
    plans: dict[str, dict[str, Any]] = json.loads((folder / "plans.json").read_text())
    assert len(plans) == 16
    for name, saved in plans.items():
        plan = offbeat.Plan.from_dict(saved["plan"])
        assert plan.digest == saved["digest"], name
        assert json.loads(json.dumps(plan.to_dict())) == saved["plan"], name


def test_a_profile_is_written_as_it_was_read(folder: Path) -> None:
    profile = offbeat.Profile.load(folder / "profile.json")
    text = (folder / "profile.json").read_text()
    assert json.loads(json.dumps(profile.to_dict())) == json.loads(text)


def test_a_record_gives_the_same_summary(folder: Path) -> None:
    record = folder / "record"
    before = json.loads((record / SUMMARY).read_text())
    write(record)
    after = json.loads((record / SUMMARY).read_text())
    version = json.loads((record / "run.json").read_text())["versions"]["offbeat"]
    changed = CHANGED.get(version, set())
    for old, new in zip(before["rows"], after["rows"], strict=True):
        assert {name: new[name] for name in old.keys() - changed} == {
            name: value for name, value in old.items() if name not in changed
        }
        if old["split"] is not None:
            kept = {name: new["split"][name] for name in old["split"].keys() - {"measured"}}
            assert kept == {name: value for name, value in old["split"].items() if name in kept}
            assert new["split"]["measured"].keys() == old["split"]["measured"].keys()
