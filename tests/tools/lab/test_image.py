"""The image of examples/docker: the commands of its two containers, joined by a network."""

import os
import re
import shlex
import sys
from pathlib import Path

import pytest
import yaml
from harness.commands import ForkedPython
from harness.ranks import namespaces_of

from offbeat.lab import Cluster, Lab

ROOT = Path(__file__).parents[3]
DOCKER = ROOT / "examples" / "docker"
TINY = "--layers 1 --width 32 --heads 2 --context 32"  # the test is of the launch


@pytest.mark.skipif(os.geteuid() != 0, reason="only root enters the namespaces of a lab")
@pytest.mark.usefixtures("namespaces")
def test_the_commands_train_in_two_namespaces(tmp_path):
    """As the containers do, but for names: the lab has addresses. torch is imported once for all
    processes."""
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    (strategy,) = {
        re.sub(r"^\$\{\w+:-(.*)\}$", r"\1", service["environment"]["OFFBEAT_STRATEGY"])
        for service in services.values()
    }
    logs = [tmp_path / f"{name}.log" for name in services]
    with Lab(Cluster.simple(2, "1gbit")) as lab:
        environment = os.environ | {
            "OFFBEAT_STRATEGY": strategy,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": lab.interface(0),  # a container's name has its address
        }
        containers = []
        try:
            for service, host, log in zip(
                services.values(), namespaces_of(lab)[1:], logs, strict=True
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
