"""Settings of a job: sources, precedence, agreement of all ranks, and masked secrets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch.distributed as dist
from harness.ranks import run_ranks

from offbeat.core.transport.control import Control
from offbeat.jobs.settings import (
    JobSettings,
    SinkSetting,
    choose_record,
    default_name,
    find_write_error,
    launcher_name,
    mask_secrets,
    parse_log,
    parse_sinks,
    read_settings,
    require_same_settings,
)

UUID = "0f8fad5b-d9cb-469f-a165-70867728950e"


def test_defaults_and_all_variables() -> None:
    names = {"record_name": "record", "metrics_name": "metrics"}
    assert read_settings({}, ["train.py"]) == JobSettings(None, (), "text", "train", **names)
    environment = {
        "OFFBEAT_RECORD": "runs",
        "OFFBEAT_METRICS": "prometheus:9400, tensorboard:/var/tb",
        "OFFBEAT_LOG": "json",
        "OFFBEAT_JOB_NAME": "night",
    }
    sinks = (SinkSetting("prometheus", "9400"), SinkSetting("tensorboard", "/var/tb"))
    found = read_settings(environment, ["train.py"], metrics="prometheus:1")
    assert found == JobSettings("runs", sinks, "json", "night")
    assert read_settings({}, [], metrics="prometheus:1").sinks == (("prometheus", "1"),)


# launcher's folder, OFFBEAT_RECORD, argument of prepare; the folder that counts, and how many of
# them are not used, each of which is a notice that names the variable or argument
RECORDS = [
    (None, None, None, None, []),
    (None, "", None, None, []),
    (None, None, "off", None, []),
    (None, None, Path("mine"), "mine", []),
    (None, "runs", None, "runs", []),
    (None, "runs", "runs", "runs", []),
    (None, "runs", "mine", "runs", ["record="]),
    (None, "off", "mine", None, ["record="]),
    ("lab", None, None, "lab", []),
    ("lab", "runs", None, "lab", ["OFFBEAT_RECORD"]),
    ("lab", None, "mine", "lab", ["record="]),
]


def test_precedence_of_the_record() -> None:
    for launcher, variable, argument, folder, unused in RECORDS:
        environment = {} if variable is None else {"OFFBEAT_RECORD": variable}
        found, notices = choose_record(environment, argument, launcher)
        assert (found, len(notices)) == (folder, len(unused))
        for name, notice in zip(unused, notices, strict=True):
            assert notice.startswith(name)


def test_texts_of_sinks_limits_and_formats() -> None:
    for text, sinks in (
        (None, []),
        ("", []),
        ("prometheus:[::1]:9400", [("prometheus", "[::1]:9400")]),
        ("tensorboard:C:/tb", [("tensorboard", "C:/tb")]),
        ("tensorboard:a, prometheus:h:1 ", [("tensorboard", "a"), ("prometheus", "h:1")]),
    ):
        assert list(parse_sinks("OFFBEAT_METRICS", text)) == sinks
    assert [parse_log(text) for text in (None, "", "json", "off")] == [
        *("text", "text", "json", "off"),
    ]
    limits = [
        read_settings({"OFFBEAT_RECORD_LIMIT": text}, ["train.py"]).record_limit
        for text in ("5GB", ".5 GB", "")
    ]
    assert limits == [5 * 10**9, 5 * 10**8, None]


REFUSED = [
    ("OFFBEAT_METRICS", "promtheus:9400"),
    ("OFFBEAT_METRICS", "prometheus"),
    ("OFFBEAT_METRICS", "tensorboard:"),
    ("OFFBEAT_METRICS", ":9400"),
    ("OFFBEAT_METRICS", "tensorboard:a,,x"),
    ("OFFBEAT_METRICS", "prometheus:web"),
    ("OFFBEAT_METRICS", "prometheus:0"),
    ("OFFBEAT_METRICS", "prometheus:65536"),
    ("OFFBEAT_METRICS", "prometheus:host:"),
    ("OFFBEAT_LOG", "yaml"),
    ("OFFBEAT_RECORD_LIMIT", "5 apples"),
]


def test_wrong_values_are_refused_by_the_name_of_the_variable() -> None:
    for variable, value in REFUSED:
        with pytest.raises(ValueError, match=rf"^{variable} \('"):
            read_settings({variable: value}, ["train.py"])


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
        {"OFFBEAT_METRICS": ("tensorboard:a", "tensorboard:b")[control.rank]},
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
    """All ranks refuse the same, and name the values of both; a folder that one of them cannot
    write, by the name of the variable or argument."""
    first, second = run_ranks(2, errors_of_settings, str(tmp_path))
    assert first == second
    assert first[:3] == ["", "", ""]
    for text, words in zip(
        first[3:],
        (
            ("record", "'runs'", "'off'"),
            ("metrics", "'tensorboard:a'", "'tensorboard:b'"),
            ("job name", "'a'", "'b'"),
            ("OFFBEAT_RECORD ('file')", "rank 1"),
            ("record ('file')", "rank 1"),
        ),
        strict=True,
    ):
        assert [word for word in words if word not in text] == []
    assert find_write_error(str(tmp_path / "a" / "b")) is None
    assert list((tmp_path / "a" / "b").iterdir()) == []
    assert find_write_error("/proc/none")


# ---- launcher and name ----------------------------------------------------------------------


LAUNCHERS = [
    ({}, "none", "train"),
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
]


def test_launcher_and_name() -> None:
    for environment, launcher, name in LAUNCHERS:
        assert launcher_name(environment) == launcher
        assert default_name(environment, ["/jobs/train.py"]) == name


def test_name_of_the_script() -> None:
    for argv, name in (
        (["a/train.py"], "train"),
        (["/x/package/__main__.py"], "package"),
        (["-c"], "python"),
        ([], "python"),
    ):
        assert default_name({}, argv) == name


# ---- secrets --------------------------------------------------------------------------------


MASKED = [
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
]


def test_secrets_are_masked() -> None:
    for line, masked in MASKED:
        assert " ".join(mask_secrets(line.split())) == masked
    for word, masked in (
        ('{"lr": 1, "api_key": "x y", "b": 2}', '{"lr": 1, "api_key": ***'),
        ("Authorization: Bearer x", "Authorization: ***"),
        ("import os; token = 'x'\nrun()", "import os; token = ***"),
    ):
        assert mask_secrets(["--header", word]) == ["--header", masked]
