"""Settings of a job: sources, precedence, agreement of all ranks, and masked secrets."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import pytest
import torch.distributed as dist
from support.worlds import run_world

from offbeat.core.transport.control import Control
from offbeat.jobs import settings
from offbeat.jobs.settings import (
    JobSettings,
    SinkSetting,
    choose_record,
    default_name,
    find_missing_package,
    find_write_error,
    launcher_name,
    mask_secrets,
    parse_log,
    parse_sinks,
    read_settings,
    require_same_settings,
)

UUID = "0f8fad5b-d9cb-469f-a165-70867728950e"


def test_defaults() -> None:
    names = {"record_name": "record", "metrics_name": "metrics"}
    assert read_settings({}, ["train.py"]) == JobSettings(None, (), "text", "train", **names)


def test_all_variables() -> None:
    environment = {
        "OFFBEAT_RECORD": "runs",
        "OFFBEAT_METRICS": "prometheus:9400, textfile:/var/x.prom",
        "OFFBEAT_LOG": "json",
        "OFFBEAT_JOB_NAME": "night",
    }
    sinks = (SinkSetting("prometheus", "9400"), SinkSetting("textfile", "/var/x.prom"))
    assert read_settings(environment, ["train.py"]) == JobSettings("runs", sinks, "json", "night")


@pytest.mark.parametrize(
    ("launcher", "variable", "argument", "folder", "notices"),
    [
        (None, None, None, None, []),
        (None, "", None, None, []),
        (None, None, "off", None, []),
        (None, None, Path("mine"), "mine", []),
        (None, "runs", None, "runs", []),
        (None, "runs", "runs", "runs", []),
        (
            None,
            "runs",
            "mine",
            "runs",
            ["record= of the script ('mine') is not used: OFFBEAT_RECORD records in runs"],
        ),
        (
            None,
            "off",
            "mine",
            None,
            ["record= of the script ('mine') is not used: OFFBEAT_RECORD turns the record off"],
        ),
        ("lab", None, None, "lab", []),
        (
            "lab",
            "runs",
            None,
            "lab",
            ["OFFBEAT_RECORD ('runs') is not used: the launcher records in lab"],
        ),
        (
            "lab",
            None,
            "mine",
            "lab",
            ["record= of the script ('mine') is not used: the launcher records in lab"],
        ),
    ],
)
def test_precedence_of_the_record(
    launcher: str | None,
    variable: str | None,
    argument: str | Path | None,
    folder: str | None,
    notices: list[str],
) -> None:
    environment = {} if variable is None else {"OFFBEAT_RECORD": variable}
    assert choose_record(environment, argument, launcher) == (folder, tuple(notices))


def test_the_variable_of_metrics_precedes_the_argument() -> None:
    environment = {"OFFBEAT_METRICS": "textfile:a"}
    assert read_settings(environment, [], metrics="textfile:b").sinks == (("textfile", "a"),)
    assert read_settings({}, [], metrics="textfile:b").sinks == (("textfile", "b"),)


@pytest.mark.parametrize(
    ("text", "sinks"),
    [
        (None, []),
        ("", []),
        ("prometheus:9400", [("prometheus", "9400")]),
        ("prometheus:[::1]:9400", [("prometheus", "[::1]:9400")]),
        ("tensorboard:C:/tb", [("tensorboard", "C:/tb")]),
        ("textfile:a, prometheus:h:1", [("textfile", "a"), ("prometheus", "h:1")]),
    ],
)
def test_sinks(text: str | None, sinks: list[tuple[str, str]]) -> None:
    assert list(parse_sinks("OFFBEAT_METRICS", text)) == sinks


@pytest.mark.parametrize(
    "text",
    ["promtheus:9400", "prometheus", "prometheus:", "textfile:", ":9400", "textfile:a,,x"],
)
def test_sinks_that_are_none(text: str) -> None:
    error = r"OFFBEAT_METRICS \('.*'\) must be prometheus:PORT, textfile:PATH or tensorboard:DIR"
    with pytest.raises(ValueError, match=error):
        parse_sinks("OFFBEAT_METRICS", text)


@pytest.mark.parametrize("port", ["web", "0", "65536", "host:", "-1", "9400 "])
def test_ports_that_are_none(port: str) -> None:
    if port.endswith(" "):  # spaces around a sink are allowed
        assert parse_sinks("OFFBEAT_METRICS", f"prometheus:{port}") == (("prometheus", "9400"),)
        return
    with pytest.raises(ValueError, match="with a port from 1 to 65535"):
        parse_sinks("OFFBEAT_METRICS", f"prometheus:{port}")


def test_an_unknown_format_of_the_log() -> None:
    assert [parse_log(text) for text in (None, "", "json", "off")] == [
        "text",
        "text",
        "json",
        "off",
    ]
    with pytest.raises(ValueError, match=re.escape("OFFBEAT_LOG ('yaml') must be text, json or")):
        parse_log("yaml")


# ---- agreement of all ranks -----------------------------------------------------------------


def errors_of_settings(folder: str) -> list[str]:
    """Return the error of each job, or ""."""
    dist.init_process_group("gloo")
    control = Control(20.0)
    here = Path(folder, str(control.rank))
    here.mkdir()
    os.chdir(here)
    if control.rank == 1:
        Path("file").touch()
    errors = []
    for environment in (
        {},
        {"OFFBEAT_RECORD": "runs", "OFFBEAT_JOB_NAME": "a"},
        {"OFFBEAT_LOG": ("json", "off")[control.rank]},
        {"OFFBEAT_RECORD": ("runs", "off")[control.rank]},
        {"OFFBEAT_METRICS": ("textfile:a", "textfile:b")[control.rank]},
        {"OFFBEAT_JOB_NAME": ("a", "b")[control.rank]},
        {"OFFBEAT_RECORD": "file"},
        {"record": "file"},
    ):
        record = environment.get("record")
        own = read_settings(environment, [f"script{control.rank}.py"], record=record)
        try:
            require_same_settings(own, environment, control)
            errors.append("")
        except ValueError as error:
            errors.append(str(error))
    control.close()
    dist.destroy_process_group()
    return errors


def test_ranks_that_differ_are_refused_by_name(tmp_path: Path) -> None:
    first, second = run_world(errors_of_settings, 2, str(tmp_path))
    assert first == second
    assert first[:3] == ["", "", ""]
    for text, name, a, b in zip(
        first[3:6],
        ("record", "metrics", "job name"),
        ("runs", "textfile:a", "a"),
        ("off", "textfile:b", "b"),
        strict=True,
    ):
        pattern = f"must be the same on all ranks: rank 0 has .*{name} '{a}'.* rank 1 has .*{name} "
        assert re.search(f"{pattern}'{b}'.*; set OFFBEAT_RECORD, .* alike on every host", text)
    for text, name in zip(first[6:], ("OFFBEAT_RECORD", "record"), strict=True):
        assert text == (
            f"{name} ('file') must be a folder that every rank may write; "
            f"rank 1 ({socket.gethostname()}): File exists. Give another, or off"
        )


def test_a_folder_is_tried_and_left_empty(tmp_path: Path) -> None:
    assert find_write_error(str(tmp_path / "a" / "b")) is None
    assert list((tmp_path / "a" / "b").iterdir()) == []
    assert find_write_error("/proc/none") == "No such file or directory"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(settings.PACKAGES, "tensorboard", "no_such_package")
    error = "metrics ('tensorboard:tb') needs no_such_package; pip install it"
    assert find_missing_package(parse_sinks("", "textfile:a,tensorboard:tb"), "metrics") == error
    assert find_missing_package(parse_sinks("", "textfile:a"), "metrics") is None


# ---- launcher and name ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environment", "launcher", "name"),
    [
        ({}, "none", "train"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "none", "train"),
        ({"TORCHELASTIC_RUN_ID": "none"}, "torchrun", "train"),
        ({"TORCHELASTIC_RUN_ID": UUID}, "torchrun", "train"),  # of --standalone
        ({"TORCHELASTIC_RUN_ID": "night"}, "torchrun", "night"),
        ({"SLURM_PROCID": "0", "SLURM_JOB_NAME": "gpt"}, "srun", "gpt"),
        (
            {"SLURM_PROCID": "0", "SLURM_JOB_NAME": "gpt", "TORCHELASTIC_RUN_ID": "x"},
            "torchrun",
            "gpt",
        ),
        ({"OMPI_COMM_WORLD_RANK": "1"}, "mpirun", "train"),
        ({"PMI_RANK": "1"}, "mpiexec", "train"),
        ({"RAY_JOB_ID": "01000000", "RAY_RAYLET_PID": "7", "RANK": "0"}, "Ray", "ray"),
        ({"OFFBEAT_JOB": "job.json", "TORCHELASTIC_RUN_ID": "x"}, "offbeat run", "x"),
        (
            {
                "KUBERNETES_SERVICE_HOST": "10.0.0.1",
                "TORCHELASTIC_RUN_ID": "none",
                "PET_NNODES": "4",
                "PET_MASTER_ADDR": "my-job-node-0-0.my-job",
            },
            "TrainJob",
            "my-job",
        ),
        (
            {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "MASTER_ADDR": "offbeat-master-0"},
            "none",
            "offbeat",
        ),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "MASTER_ADDR": "10.0.0.2"}, "none", "train"),
    ],
)
def test_launcher_and_name(environment: dict[str, str], launcher: str, name: str) -> None:
    assert launcher_name(environment) == launcher
    assert default_name(environment, ["/jobs/train.py"]) == name


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        (["a/train.py"], "train"),
        (["/x/package/__main__.py"], "package"),
        (["-c"], "python"),
        ([""], "python"),
        ([], "python"),
    ],
)
def test_name_of_the_script(argv: list[str], name: str) -> None:
    assert default_name({}, argv) == name


# ---- secrets --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "masked"),
    [
        ("train.py --lr 0.1 --steps=5 -v", "train.py --lr 0.1 --steps=5 -v"),
        ("--token x --lr 1", "--token *** --lr 1"),
        ("--token=x", "--token=***"),
        ("--hub_token x", "--hub_token ***"),
        ("--Api-Key=x y", "--Api-Key=*** y"),
        ("--wandb-api-key x", "--wandb-api-key ***"),
        ("--db-password -x9 --lr 1", "--db-password *** --lr 1"),
        ("--secrets a b c -v d", "--secrets *** *** *** -v d"),
        ("--credentials-file a.json", "--credentials-file ***"),
        ("--use-auth --lr 1", "--use-auth --lr 1"),
        ("-token x", "-token ***"),
        ("HF_TOKEN=x python", "HF_TOKEN=*** python"),
        ("+hub.token=x lr=1", "+hub.token=*** lr=1"),
        ("--set hub.secret=a=b", "--set hub.secret=***"),
        ("--url https://user:pa:ss@host/x", "--url https://***@host/x"),
        ("--url=postgres://u:p/w@host:5/db", "--url=postgres://***@host:5/db"),
        ("https://ghp_abc@github.com/a/b", "https://***@github.com/a/b"),
        ("https://host/a?token=x&b=1", "https://host/a?token=***"),
        ("s3://bucket/a@b /x/keys/train.py", "s3://bucket/a@b /x/keys/train.py"),
        ("--keys https://a/b", "--keys ***"),
    ],
)
def test_secrets_are_masked(line: str, masked: str) -> None:
    assert " ".join(mask_secrets(line.split())) == masked


@pytest.mark.parametrize(
    ("word", "masked"),
    [
        ('{"lr": 1, "api_key": "x y", "b": 2}', '{"lr": 1, "api_key": ***'),
        ("Authorization: Bearer x", "Authorization: ***"),
        ("import os; token = 'x'\nrun()", "import os; token = ***"),
    ],
)
def test_secrets_within_a_word(word: str, masked: str) -> None:
    assert mask_secrets(["--header", word]) == ["--header", masked]
