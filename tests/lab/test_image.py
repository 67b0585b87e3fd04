"""The image of examples/docker: linted, and its two commands joined by a network.

No Docker daemon is needed. `tests/release/test_wheel.py` builds the wheel from the files of its context.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.checking import namespaces_of
from support.forking import ForkedPython

from offbeat.lab import Cluster, Lab

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "examples" / "docker"
TINY = "--layers 1 --width 32 --heads 2 --context 32"  # the test is of the launch


@pytest.fixture(scope="module")
def compose():
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed (extra test)")
    return yaml.safe_load((DOCKER / "compose.yaml").read_text())


def test_the_dockerfile_has_no_faults():
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        pytest.skip("hadolint is not installed (it is in the extra dev)")
    done = subprocess.run(
        [hadolint, DOCKER / "Dockerfile"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout


def test_files_of_the_image_exist(compose):
    copied = re.findall(r"^COPY (?!\. \.)(\S+)", (DOCKER / "Dockerfile").read_text(), re.MULTILINE)
    assert copied == ["examples/gpt.py"]
    ignored = (DOCKER / "Dockerfile.dockerignore").read_text().splitlines()
    for service in compose["services"].values():
        assert (DOCKER / service["build"]["context"]).resolve() == ROOT
        assert (ROOT / service["build"]["dockerfile"]).exists()
    assert all((ROOT / name).exists() and f"!{name}" in ignored for name in copied)


def test_the_containers_are_one_job(compose):
    first, second = compose["services"].values()
    assert second["depends_on"] == ["host0"]  # its name must resolve
    assert first["networks"] == second["networks"] == list(compose["networks"])
    assert first["command"].replace("--node-rank 0", "--node-rank 1") == second["command"]
    for name, service in compose["services"].items():
        assert service["hostname"] == name
        assert "--master-addr host0 " in service["command"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root enters the namespaces of a lab")
@pytest.mark.usefixtures("namespaces")
def test_the_commands_train_in_two_namespaces(compose, tmp_path):
    """As the containers do, but for names: the lab has addresses. torch is imported once for all
    processes."""
    (strategy,) = {
        re.sub(r"^\$\{\w+:-(.*)\}$", r"\1", service["environment"]["OFFBEAT_STRATEGY"])
        for service in compose["services"].values()
    }
    logs = [tmp_path / f"{name}.log" for name in compose["services"]]
    with Lab(Cluster.simple(2, "1gbit")) as lab:
        environment = os.environ | {
            "OFFBEAT_STRATEGY": strategy,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": lab.interface(0),  # a container's name has its address
        }
        containers = []
        try:
            for service, host, log in zip(
                compose["services"].values(), namespaces_of(lab)[1:], logs, strict=True
            ):
                program, *argv = shlex.split(service["command"].replace("host0", lab.address(0)))
                assert program == "torchrun"
                argv[argv.index("gpt.py")] = str(ROOT / "examples" / "gpt.py")
                command = [sys.executable, "-m", "torch.distributed.run", *argv, *TINY.split()]
                with log.open("w") as file:
                    containers.append(
                        ForkedPython(command, file, file, environment, workers=True, namespace=host)
                    )
            codes = [container.wait(50) for container in containers]
        finally:
            for container in containers:
                container.terminate()  # torchrun ends its process
    first, second = (log.read_text() for log in logs)
    assert codes == [0, 0], first + second
    assert "dreamddp" in first
    assert "held-out loss" in first
    assert "held-out loss" not in second
