"""Processes that other launchers than torchrun start."""

from __future__ import annotations

import contextlib
import io
import os

import pytest
import torch
from harness.ranks import run_ranks

import offbeat
from offbeat.core.start.launchers import LOOPBACK, first_host, torchrun_variables
from offbeat.core.transport.addresses import parse_address
from offbeat.core.transport.job_place import current_place
from offbeat.core.transport.topology import Topology
from offbeat.jobs.startup import _describe_nodes, _nodes_notice

SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_NODELIST": "gpu[07-10],big1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "1830486017",
}
PMI = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2", "MASTER_PORT": "29500"}


def test_srun() -> None:
    found = torchrun_variables(SRUN)
    assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_RANK"]) == ("5", "8", "1")
    assert found["MASTER_ADDR"] == "gpu07"
    # All tasks of a job find the same port, another job another one.
    assert found["MASTER_PORT"] == torchrun_variables(SRUN | {"SLURM_PROCID": "2"})["MASTER_PORT"]
    assert (
        found["MASTER_PORT"] != torchrun_variables(SRUN | {"SLURM_JOB_ID": "4712"})["MASTER_PORT"]
    )
    assert 1024 < int(found["MASTER_PORT"]) < 32768


def test_mpirun_on_one_host_and_on_several() -> None:
    assert torchrun_variables(OPEN_MPI)["MASTER_ADDR"] == LOOPBACK
    several = OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "4"}
    with pytest.raises(ValueError, match=r"MASTER_ADDR must be set where mpirun"):
        torchrun_variables(several)
    assert torchrun_variables(several | {"MASTER_ADDR": "10.0.0.1"})["MASTER_ADDR"] == "10.0.0.1"


def test_jobs_on_one_host_have_ports_of_their_own() -> None:
    of_two_steps = [SRUN | {"SLURM_STEP_ID": step} for step in ("0", "1")]
    of_two_jobs = [OPEN_MPI | {"PMIX_NAMESPACE": job} for job in ("prterun-a-7@1", "prterun-a-9@1")]
    for first, second in (of_two_steps, of_two_jobs):
        ports = [torchrun_variables(job)["MASTER_PORT"] for job in (first, second)]
        assert ports[0] != ports[1]


@pytest.mark.parametrize(
    ("environment", "remedy"),
    [
        # PMI_ID is the number of a process.
        ({k: v for k, v in PMI.items() if k != "MASTER_PORT"} | {"PMI_ID": "1"}, "mpiexec -genv "),
        ({k: v for k, v in OPEN_MPI.items() if k != "PMIX_NAMESPACE"}, "mpirun -x "),
    ],
)
def test_a_job_without_a_number_needs_a_port(environment: dict[str, str], remedy: str) -> None:
    with pytest.raises(ValueError, match="MASTER_PORT must be set where mpi") as caught:
        torchrun_variables(environment)
    assert remedy + "MASTER_PORT" in str(caught.value)
    assert torchrun_variables(environment | {"MASTER_PORT": "7"})["MASTER_PORT"] == "7"


@pytest.mark.parametrize(
    "environment",
    [
        {},
        SRUN | {"RANK": "0"},  # torchrun's word counts
        {k: v for k, v in SRUN.items() if k != "SLURM_STEP_ID"},  # a batch script itself
        SRUN | {"SLURM_NTASKS": "1"},
    ],
)
def test_alone_or_started_by_torchrun(environment: dict[str, str]) -> None:
    assert torchrun_variables(environment) == {}


TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}
TRAIN_JOB = TORCHRUN | {
    "PET_NNODES": "4",
    "PET_NPROC_PER_NODE": "1",
    "PET_NODE_RANK": "3",
    "PET_MASTER_ADDR": "offbeat-node-0-0.offbeat",
    "PET_MASTER_PORT": "29500",
    "MASTER_ADDR": "offbeat-node-0-0.offbeat",
}
RAY = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "41234",
    "RAY_JOB_ID": "02000000",
    "RAY_RAYLET_PID": "7",
}


@pytest.mark.parametrize(
    ("environment", "place", "address"),
    [
        (SRUN, ("5", "8", "1"), "gpu07"),
        (SRUN | {"MASTER_ADDR": "10.0.0.1"}, ("5", "8", "1"), "10.0.0.1"),
        (OPEN_MPI, ("1", "2", "1"), LOOPBACK),
        (PMI, ("1", "2", "0"), LOOPBACK),
        (TORCHRUN, ("3", "4", "0"), "10.0.0.1"),
        (SRUN | TORCHRUN, ("3", "4", "0"), "10.0.0.1"),  # srun torchrun ...
        (TRAIN_JOB, ("3", "4", "0"), "offbeat-node-0-0.offbeat"),
        (RAY, ("1", "2", "1"), "10.0.0.1"),
        (SRUN | RAY, ("1", "2", "1"), "10.0.0.1"),  # nodes of Ray that srun has started
    ],
)
def test_rank_and_address(
    environment: dict[str, str], place: tuple[str, str, str], address: str
) -> None:
    """Variables as each launcher sets them, with no launcher installed."""
    found = environment | torchrun_variables(environment)
    assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_RANK"]) == place
    assert found["MASTER_ADDR"] == address
    assert 1024 < int(found["MASTER_PORT"]) < 65536


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("a", "a"),
        ("a,b", "a"),
        ("n[3-5]", "n3"),
        ("n[03,07]x,y", "n03x"),
        ("n-1-[2-4]", "n-1-2"),
        ("rack[1-2]node[3-4],z", "rack1node3"),
    ],
)
def test_first_host(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


def test_place_of_a_process_with_variables_of_offbeat_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OFFBEAT_RANK", "3")
    monkeypatch.setenv("OFFBEAT_WORLD_SIZE", "4")
    assert current_place() == (3, 4)


def test_address_of_ipv6() -> None:
    assert parse_address("[::1]:4000") == ("::1", 4000)
    assert parse_address("10.0.0.1:4000") == ("10.0.0.1", 4000)


def lines_of_prepare(local_world_sizes: list[str]) -> list[list[str]]:
    """Per value of LOCAL_WORLD_SIZE what this rank prints."""
    found = []
    for size in local_world_sizes:
        os.environ["LOCAL_WORLD_SIZE"] = size
        model, said = torch.nn.Linear(2, 2), io.StringIO()
        with contextlib.redirect_stderr(said):
            mine, _ = offbeat.prepare(
                model, torch.optim.SGD(model.parameters(), lr=0.1), offbeat.DDP(), timeout_s=20.0
            )
        mine.close()
        lines = said.getvalue().splitlines()  # of which some are torch's
        found.append([line for line in lines if line.startswith("offbeat:")])
    return found


def test_rank_0_says_once_that_nodes_are_not_known() -> None:
    first, *others = run_ranks(3, lines_of_prepare, ["2", "1", "3", ""])
    assert [len(lines) for lines in first] == [2, 1, 1, 1]
    assert "LOCAL_WORLD_SIZE (2)" in first[0][0]
    assert others == [[[]] * 4] * 2


def test_remedy_for_ranks_without_nodes() -> None:
    local = {"LOCAL_WORLD_SIZE": "2"}
    assert "give nodes='auto'" in (_nodes_notice(local, offbeat.DreamDDP(), 4) or "")
    gossip = _nodes_notice(local, offbeat.ADPSGD(), 4)
    assert "start one rank per node, or use a strategy such as dreamddp" in (gossip or "")
    assert _nodes_notice(local, offbeat.DreamDDP(), 2) is None


@pytest.mark.parametrize("sharded", [False, True])
def test_a_single_node_has_no_other_one_to_average_with(sharded: bool) -> None:
    one, two = (Topology(nodes, sharded) for nodes in (((0, 1),), ((0, 1), (2, 3))))
    assert _describe_nodes(one, offbeat.DreamDDP()).endswith("no other node to average with")
    assert _describe_nodes(two, offbeat.DreamDDP()).endswith(
        "dreamddp averages between the 2 nodes"
    )
