"""`offbeat run --checkpoint`: what reaches the runtime, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from offbeat import cli
from offbeat.core.start.launch_request import LaunchRequest
from offbeat.experiments import launcher
from offbeat.lab.launch import Result
from offbeat.profile import Bucket, Link, Profile


def asked(
    options: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, list[dict[str, Any]]]:
    """The command's exit code, and the jobs that it would have launched."""
    jobs: list[dict[str, Any]] = []

    def launched(*_: Any, env: dict[str, str], **__: Any) -> Result:
        jobs.append(json.loads(Path(env["OFFBEAT_JOB"]).read_text()))
        return Result((1,), 0.0, (), "it was not launched", ())

    monkeypatch.chdir(here)
    monkeypatch.setattr(launcher, "launch", launched)
    (here / "train.py").write_text("")
    bucket = Bucket("b", 0.01, 0.02, 4000)
    Profile((bucket,), (Link("net", 0.001, 1e6),), world_size=1).save(here / "p.json")
    argv = f"run --lab none --hosts 1 --profile p.json {options} train.py"
    return cli.main(argv.split()), jobs


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--checkpoint kept --every 5 --resume", (True, 5)),
        ("--checkpoint kept --every 5", (False, 5)),
        ("--checkpoint kept --resume", (True, None)),
    ],
)
def test_jobs(
    options: str, expected: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, [job] = asked(f"--strategy wfbp {options}", tmp_path, monkeypatch)
    told = LaunchRequest(**{key: value for key, value in job.items() if key != "schema"})
    assert told.checkpoint == str(tmp_path / "kept")
    assert (told.resume, told.checkpoint_every) == expected


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--every 5", "--every and --resume need --checkpoint"),
        ("--resume", "--every and --resume need --checkpoint"),
        ("--checkpoint kept", "checkpoint (kept) needs --every N"),
        ("--checkpoint kept --every 0", "every (0) must be at least 1"),
        ("--checkpoint kept --every 3 --strategy ssp --servers 1", "is not for ssp"),
    ],
)
def test_refused(
    options: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, jobs = asked(options, tmp_path, monkeypatch)
    assert code == 2
    assert not jobs
    assert words in " ".join(capsys.readouterr().err.split())
