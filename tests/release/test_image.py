"""The image of examples/docker: the Dockerfile is linted, its files exist, its containers fit.

No Docker daemon is needed. `test_wheel.py` builds the wheel from the files of the context, and
`tests/tools/lab/test_image.py` runs the commands of the containers.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "examples" / "docker"


@pytest.fixture(scope="module")
def compose():
    return yaml.safe_load((DOCKER / "compose.yaml").read_text())


def test_the_dockerfile_has_no_faults():
    command = [Path(sys.executable).with_name("hadolint"), DOCKER / "Dockerfile"]
    done = subprocess.run(command, capture_output=True, text=True)
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
