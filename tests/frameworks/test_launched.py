"""Launchers: srun's variables, a Kubernetes manifest, and Ray, where it is installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field
from support.worlds import TESTS

EXAMPLES = TESTS.parent / "examples"
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
LIMIT_S = 100


# ---- SLURM ----------------------------------------------------------------------------------

FAKE_SRUN = """#!{python}
# Starts two tasks as srun does on one node; its own options end at the command.
import os, random, subprocess, sys
command = sys.argv[sys.argv.index("python"):]
job = str(random.randrange(10**6))  # of which the port is made
def task(rank):
    of_task = {{"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NTASKS": "2",
               "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": job,
               "SLURM_STEP_NODELIST": "localhost"}}
    return subprocess.Popen([sys.executable, *command[1:]], env={{**os.environ, **of_task}})
sys.exit(max(process.wait() for process in [task(0), task(1)]))
"""


@pytest.mark.timeout(LIMIT_S)
def test_the_batch_script_of_slurm(tmp_path: Path) -> None:
    """Two tasks with srun's variables, and no others, find each other."""
    srun = tmp_path / "srun"
    srun.write_text(FAKE_SRUN.format(python=sys.executable))
    srun.chmod(0o755)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OFFBEAT_", "SLURM_"))}
    environment = {k: v for k, v in kept.items() if k not in LAUNCHER}
    environment |= {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_CPUS_PER_TASK": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    batch = ["bash", str(EXAMPLES / "slurm" / "dreamddp.sbatch"), str(EXAMPLES / "launched.py")]
    done = subprocess.run(
        batch, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"2 ranks, loss \d\.\d{4}\n", done.stdout)  # of rank 0 alone
    assert "dreamddp(period=8), 2 ranks" in done.stderr


def test_the_batch_script_asks_for_what_slurm_knows() -> None:
    text = (EXAMPLES / "slurm" / "dreamddp.sbatch").read_text()
    head = text.partition("\n\n")[0].splitlines()
    assert head[0] == "#!/bin/bash"
    options = {line.split()[1].partition("=")[0] for line in head[1:]}
    assert options == {"--job-name", "--nodes", "--ntasks-per-node", "--cpus-per-task", "--time"}


# ---- Kubernetes -----------------------------------------------------------------------------


class Strict(BaseModel):
    """Unknown fields are mistakes: the API server drops or refuses them."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Variable(Strict):
    name: str
    value: str  # a number must be quoted


class Resources(Strict):
    limits: dict[str, str | int] = {}
    requests: dict[str, str | int] = {}


class Container(Strict):
    """Those of core/v1 that a training needs."""

    name: Literal["pytorch"]  # the operator's default container name
    image: str
    command: list[str]
    env: list[Variable] = []
    resources: Resources = Resources()


class PodSpec(Strict):
    containers: Annotated[list[Container], Field(min_length=1)]


class Template(Strict):
    spec: PodSpec


class Replica(Strict):
    replicas: Annotated[int, Field(ge=1)]
    restartPolicy: Literal["Always", "OnFailure", "Never", "ExitCode"]  # noqa: N815 - the API's
    template: Template


class Replicas(Strict):
    Master: Replica
    Worker: Replica


class RunPolicy(Strict):
    cleanPodPolicy: Literal["All", "Running", "None"]  # noqa: N815
    backoffLimit: int  # noqa: N815


class Spec(Strict):
    nprocPerNode: str  # noqa: N815
    runPolicy: RunPolicy  # noqa: N815
    pytorchReplicaSpecs: Replicas  # noqa: N815


class Metadata(Strict):
    name: Annotated[str, Field(pattern=r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")]


class PyTorchJob(Strict):
    """The fields of Kubeflow's training operator, kubeflow.org/v1, that the manifest may use."""

    apiVersion: Literal["kubeflow.org/v1"]  # noqa: N815
    kind: Literal["PyTorchJob"]
    metadata: Metadata
    spec: Spec


def manifest() -> Any:
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load((EXAMPLES / "kubernetes" / "pytorchjob.yaml").read_text())


def test_the_manifest_of_kubernetes() -> None:
    job = PyTorchJob.model_validate(manifest())
    replicas = job.spec.pytorchReplicaSpecs
    assert replicas.Master.replicas == 1  # rank 0
    for replica in (replicas.Master, replicas.Worker):
        (container,) = replica.template.spec.containers
        script = container.command[1]
        assert (TESTS.parent / script).is_file()
        variables = {variable.name for variable in container.env}
        assert not variables & set(LAUNCHER)  # which the operator sets


@pytest.mark.parametrize(
    "path", [("kind",), ("spec", "pytorchReplicaSpecs", "Master"), ("metadata", "name")]
)
def test_the_schema_finds_what_is_missing(path: tuple[str, ...]) -> None:
    job = manifest()
    *way, last = path
    inner = job
    for name in way:
        inner = inner[name]
    del inner[last]
    with pytest.raises(ValueError, match=last):
        PyTorchJob.model_validate(job)


# ---- Ray ------------------------------------------------------------------------------------


@pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")
@pytest.mark.timeout(300)
def test_the_script_of_ray() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "frameworks" / "with_ray.py")],
        env=os.environ | {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = re.search(r"'first': ([\d.]+), 'last': ([\d.]+)", done.stdout)
    assert found, done.stdout
    assert float(found[2]) < 0.9 * float(found[1])
