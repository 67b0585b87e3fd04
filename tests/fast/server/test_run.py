"""Jobs with servers as the command line starts them."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from offbeat import BSP, SSP, Profile, SelSync
from offbeat.cli import main
from offbeat.experiments.comparison import Comparison, Contestant, Setup
from offbeat.lab import Cluster, NoLab, launch
from offbeat.profile import Bucket, Link
from offbeat.sim import predict

SAY = "import os; print({k: v for k, v in os.environ.items() if 'RANK' in k or 'WORLD' in k})"


def lines(tmp_path: Path, code: str, **options: Any) -> tuple[Any, dict[int, str]]:
    """How a launch of three ranks ended, and what they said."""
    said: dict[int, str] = {}
    with NoLab(Cluster.simple(3)) as lab:
        result = launch(
            lab,
            [sys.executable, "-c", code],
            log_dir=tmp_path,
            timeout_s=30,
            on_line=lambda rank, line: said.update({rank: line}),
            **options,
        )
    return result, said


def test_scripts_see_workers_only(tmp_path: Path) -> None:
    """Servers are told some worker's rank: they build a model and split data like everybody."""
    result, said = lines(tmp_path, SAY, servers=1)
    assert result.problem is None
    seen = {rank: json.loads(words.replace("'", '"')) for rank, words in said.items()}
    assert [seen[rank]["RANK"] for rank in range(3)] == ["0", "1", "0"]
    assert {env["WORLD_SIZE"] for env in seen.values()} == {"2"}
    assert [seen[rank]["OFFBEAT_RANK"] for rank in range(3)] == ["0", "1", "2"]
    assert {env["OFFBEAT_WORLD_SIZE"] for env in seen.values()} == {"3"}


def test_without_servers_only_workers_start(tmp_path: Path) -> None:
    result, said = lines(tmp_path, SAY, workers=2)
    assert len(result.exit_codes) == 2
    assert "OFFBEAT" not in said[0]


KILLED = """
import os, signal, time
if os.environ.get("OFFBEAT_RANK", os.environ["RANK"]) == "{}":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(.3)
"""


@pytest.mark.long
def test_a_killed_worker_is_not_the_jobs_end_but_a_server_is(tmp_path: Path) -> None:
    result, _ = lines(tmp_path / "worker", KILLED.format(1), servers=1)
    assert result.problem is None
    assert result.exit_codes == (0, -9, 0)
    result, _ = lines(tmp_path / "gossip", KILLED.format(1), survive=True)
    assert result.problem is None
    result, _ = lines(tmp_path / "server", KILLED.format(2), servers=1)
    assert "rank 2" in result.problem


@pytest.mark.parametrize(
    ("hosts", "servers", "strategy", "words"),
    [
        (2, 0, SSP(), "servers (0) must be at least 1 for ssp"),
        (3, 1, BSP(), "servers (1) must be 0"),
        (3, 1, SelSync(), "servers (1) must be 0"),
        (2, 2, SSP(), "servers (2) must be below the number of ranks (2)"),
    ],
)
def test_comparisons_that_cannot_be(hosts: int, servers: int, strategy: Any, words: str) -> None:
    def made() -> Comparison:
        setup = Setup((__file__,), Cluster.simple(hosts), shaped=False, servers=servers)
        return Comparison(setup, (Contestant(strategy.name, strategy),))

    with pytest.raises(ValueError, match=re.escape(words)):
        made()


def test_simulate_and_plan_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "profile.json"
    profile = Profile((Bucket("a", 0.1, 0.2, 4000),), (Link("net", 0.0, 1e5),), 4)
    profile.save(path)
    common = ["--profile", str(path), "--strategy", "ssp", "--set", "s=0"]
    assert main(["simulate", *common, "--servers", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["iteration_s"] == predict(SSP(s=0), profile, servers=2).iteration_s
    assert main(["plan", *common]) == 2
    assert "no plan" in capsys.readouterr().err
    assert main(["simulate", "--profile", str(path), "--strategy", "ssp", "--votes", "1"]) == 2
    assert "votes (1) must be left out" in capsys.readouterr().err
