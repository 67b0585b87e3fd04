"""Launchers: srun's variables, a Kubernetes manifest, and Ray, where it is installed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from harness.commands import ForkedPython
from harness.ranks import TESTS, free_port
from pydantic import BaseModel, ConfigDict, Field

LAUNCH = TESTS.parent / "examples" / "launch"
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
FOREIGN = ("OFFBEAT_", "SLURM_", "PET_", "TORCHELASTIC_", "RAY_")
LIMIT_S = 100


def environment(tmp_path: Path, **more: str) -> dict[str, str]:
    """Return variables of this process without any launcher's, and with a folder for records."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN) and k not in LAUNCHER}
    return kept | {
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "OFFBEAT_RECORD": str(tmp_path / "record"),
        **more,
    }


def recorded(tmp_path: Path) -> tuple[str, str, set[str]]:
    """Return launcher and name of the one recorded job, and the files of ranks in its record."""
    (folder,) = (tmp_path / "record").iterdir()
    facts = json.loads((folder / "run.json").read_text())
    ranks = {path.name for path in folder.glob("rank?.jsonl")}
    return facts["launcher"], facts["job_name"], ranks


BOTH_RANKS = {"rank0.jsonl", "rank1.jsonl"}


# ---- SLURM ----------------------------------------------------------------------------------

FAKE_SRUN = """#!{python}
# Starts two tasks as srun does on one node; its own options end at the command. Tasks are forks,
# so that torch is imported once.
import os, random, runpy, sys
import offbeat, torch
script, *arguments = sys.argv[sys.argv.index("python") + 1:]
job = str(random.randrange(10**6))  # of which the port is made
tasks = []
for rank in range(2):
    if not (task := os.fork()):
        os.environ |= {{"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NTASKS": "2",
                       "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": job,
                       "SLURM_STEP_NODELIST": "localhost", "SLURM_JOB_NAME": "night"}}
        sys.argv, sys.path[0] = [script, *arguments], os.path.dirname(script)
        runpy.run_path(script, run_name="__main__")
        sys.exit()
    tasks.append(task)
sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(task, 0)[1]) for task in tasks))
"""


@pytest.mark.timeout(LIMIT_S)
def test_the_batch_script_of_slurm(tmp_path: Path) -> None:
    """Two tasks with srun's variables, and no others, find each other."""
    srun = tmp_path / "srun"
    srun.write_text(FAKE_SRUN.format(python=sys.executable))
    srun.chmod(0o755)
    variables = environment(
        tmp_path, PATH=f"{tmp_path}:{os.environ['PATH']}", SLURM_CPUS_PER_TASK="1"
    )
    batch = ["bash", str(LAUNCH / "srun.sbatch"), str(LAUNCH / "train.py")]
    done = subprocess.run(
        batch, env=variables, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"2 ranks, loss \d\.\d{4}\n", done.stdout)  # of rank 0 alone
    assert "dreamddp(period=8), 2 ranks" in done.stderr
    assert recorded(tmp_path) == ("srun", "night", BOTH_RANKS)


def test_the_batch_script_asks_for_what_slurm_knows() -> None:
    text = (LAUNCH / "srun.sbatch").read_text()
    head = text.partition("\n\n")[0].splitlines()
    assert head[0] == "#!/bin/bash"
    options = {line.split()[1].partition("=")[0] for line in head[1:]}
    assert options == {"--job-name", "--nodes", "--ntasks-per-node", "--cpus-per-task", "--time"}


# ---- Kubernetes -----------------------------------------------------------------------------


class Strict(BaseModel):
    """Unknown fields are mistakes: the API server drops or refuses them."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Metadata(Strict):
    name: Annotated[str, Field(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$")]


class Variable(Strict):
    name: str
    value: str  # a number must be quoted


class Resources(Strict):
    limits: dict[str, str | int]


class RuntimeReference(Strict):
    kind: Literal["TrainingRuntime", "ClusterTrainingRuntime"]
    name: str


class Trainer(Strict):
    command: list[str]
    env: list[Variable]
    resourcesPerNode: Resources  # noqa: N815 - the API's


class TrainJobSpec(Strict):
    runtimeRef: RuntimeReference  # noqa: N815
    trainer: Trainer


class TrainJob(Strict):
    """The fields of Kubeflow Trainer, trainer.kubeflow.org/v1alpha1, that the manifest may use."""

    apiVersion: Literal["trainer.kubeflow.org/v1alpha1"]  # noqa: N815
    kind: Literal["TrainJob"]
    metadata: Metadata
    spec: TrainJobSpec


def manifests() -> list[Any]:
    yaml = pytest.importorskip("yaml")
    return list(yaml.safe_load_all((LAUNCH / "trainjob.yaml").read_text()))


def test_the_manifest_of_kubernetes() -> None:
    claim, runtime, job = manifests()
    checked = TrainJob.model_validate(job)
    assert (runtime["kind"], runtime["metadata"]["name"]) == (
        checked.spec.runtimeRef.kind,
        checked.spec.runtimeRef.name,
    )
    script = next(word for word in checked.spec.trainer.command if word.endswith(".py"))
    assert (TESTS.parent / script).is_file()
    variables = {variable.name: variable.value for variable in checked.spec.trainer.env}
    assert not [name for name in variables if name.startswith("PET_") or name in LAUNCHER]

    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    labels = node["template"]["metadata"]["labels"]
    assert labels == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    pod = node["template"]["spec"]["template"]["spec"]
    (container,), (volume,) = pod["containers"], pod["volumes"]
    assert node["name"] == container["name"] == "node"  # names that the operator requires
    (mount,) = container["volumeMounts"]
    assert mount == {"name": volume["name"], "mountPath": variables["OFFBEAT_RECORD"]}
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]


@pytest.mark.parametrize("path", [("kind",), ("spec", "runtimeRef", "name"), ("metadata", "name")])
def test_the_schema_finds_what_is_missing(path: tuple[str, ...]) -> None:
    job = manifests()[2]
    *way, last = path
    inner = job
    for name in way:
        inner = inner[name]
    del inner[last]
    with pytest.raises(ValueError, match=last):
        TrainJob.model_validate(job)


@pytest.mark.timeout(LIMIT_S)
def test_the_command_of_the_trainjob(tmp_path: Path) -> None:
    """Two pods with the operator's variables train together, with one process each."""
    trainer = TrainJob.model_validate(manifests()[2]).spec.trainer
    assert trainer.command[0] == "torchrun"
    command = [sys.executable, "-m", "torch.distributed.run", *trainer.command[1:]]
    port = str(free_port())
    variables = environment(
        tmp_path,
        OFFBEAT_STRATEGY="dreamddp:period=8",
        PET_NNODES="2",
        PET_NPROC_PER_NODE="2",  # of the operator on pods with two processors
        PET_MASTER_ADDR="localhost",
        PET_MASTER_PORT=port,
    )
    pods = [
        ForkedPython(
            command,
            cwd=TESTS.parent,
            env=variables | {"PET_NODE_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            workers=True,
        )
        for rank in range(2)
    ]
    try:
        (first, words), (second, _) = [pod.communicate(timeout=LIMIT_S - 10) for pod in pods]
    finally:
        for pod in pods:
            pod.terminate()  # torchrun ends its process
    assert [pod.returncode for pod in pods] == [0, 0], words
    assert re.fullmatch(r"2 ranks, loss \d\.\d{4}\n", first)
    assert second == ""
    assert "dreamddp(period=8), 2 ranks" in words
    assert recorded(tmp_path) == ("TrainJob", "train", BOTH_RANKS)


# ---- Ray ------------------------------------------------------------------------------------


@pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")
@pytest.mark.timeout(300)
def test_the_script_of_ray(tmp_path: Path) -> None:
    """Two real workers of Ray Train get the driver's variables and train together."""
    variables = environment(
        tmp_path,
        HOME=str(tmp_path),  # for Ray's results
        RAY_AUTH_MODE="disabled",
        RAY_USAGE_STATS_ENABLED="0",
        OFFBEAT_STRATEGY="dreamddp:period=4",
    )
    with subprocess.Popen(
        [sys.executable, str(LAUNCH / "with_ray.py")],
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as driver:
        try:
            printed, _ = driver.communicate(timeout=280)
        finally:  # a driver that is killed leaves processes of Ray
            with contextlib.suppress(ProcessLookupError):
                os.killpg(driver.pid, signal.SIGKILL)
    assert driver.returncode == 0, printed
    assert "dreamddp(period=4), 2 ranks" in printed
    found = re.search(r"loss ([\d.]+) to ([\d.]+)", printed)
    assert found, printed
    assert float(found[2]) < 0.9 * float(found[1])
    assert recorded(tmp_path) == ("Ray", "ray", BOTH_RANKS)
