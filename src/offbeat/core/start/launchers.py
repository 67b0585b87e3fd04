"""Environment variables of srun, mpirun and mpiexec, translated to the variables of torchrun."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

LOOPBACK = "127.0.0.1"
FIRST_PORT, PORTS = 20000, 12000  # below the ephemeral ports of operating systems


class _Variables(NamedTuple):
    """Names of a launcher's environment variables."""

    launcher: str
    rank: str
    size: str
    step_size: str  # takes precedence over `size` if it is set
    local_rank: str
    local_size: str
    job: tuple[str, ...]  # equal on all ranks, other for every job; none: PMI_ID is of a process
    export: str  # option that passes a variable to all ranks


LAUNCHERS = (
    _Variables(
        "srun", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "",
        ("SLURM_JOB_ID", "SLURM_STEP_ID"), "--export=ALL,{}={}",
    ),
    _Variables(
        "mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "",
        "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
        ("PMIX_NAMESPACE",), "-x {}={}",
    ),
    _Variables(
        "mpiexec", "PMI_RANK", "PMI_SIZE", "", "MPI_LOCALRANKID", "MPI_LOCALNRANKS",
        (), "-genv {} {}",
    ),
)  # fmt: skip


def torchrun_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT as torchrun would set them.

    Args:
        environment: environment variables of this process.

    Returns:
        The variables by name. Empty if torchrun has set them or no known launcher has started this
        process.

    Raises:
        ValueError: the address of rank 0 is unknown, or the launcher gives no number of the job
            from which to derive a port.
    """
    if "RANK" in environment:
        return {}
    for names in LAUNCHERS:
        size = environment.get(names.step_size) or environment.get(names.size, "")
        rank = environment.get(names.rank, "")
        # A process in a SLURM allocation that srun has not started trains alone.
        if not rank.isdecimal() or not size.isdecimal() or int(size) < 2:
            continue
        if names.launcher == "srun" and "SLURM_STEP_ID" not in environment:
            continue
        return {
            "RANK": rank,
            "WORLD_SIZE": size,
            "LOCAL_RANK": environment.get(names.local_rank, "0"),
            "MASTER_ADDR": environment.get("MASTER_ADDR") or _address(names, environment),
            "MASTER_PORT": environment.get("MASTER_PORT") or _port(names, environment),
        }
    return {}


def _address(names: _Variables, environment: Mapping[str, str]) -> str:
    """Return the address of rank 0's host."""
    hosts = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    if names.launcher == "srun" and hosts:
        return first_host(hosts)
    if environment.get(names.local_size) == environment.get(names.size):
        return LOOPBACK
    raise ValueError(
        f"MASTER_ADDR must be set where {names.launcher} starts processes on several hosts; export "
        "it with the address of rank 0's host "
        f"({names.launcher} {names.export.format('MASTER_ADDR', '10.0.0.1')} ...)"
    )


def _port(names: _Variables, environment: Mapping[str, str]) -> str:
    """Return a port that depends only on the job's number, so that all ranks of a job get the same
    port."""
    job = ".".join(environment[name] for name in names.job if environment.get(name))
    if not job:
        raise ValueError(
            f"MASTER_PORT must be set where {names.launcher} starts processes without a number of "
            "the job, because two jobs on one host need two ports; export a free port "
            f"({names.launcher} {names.export.format('MASTER_PORT', '29500')} ...)"
        )
    return str(FIRST_PORT + sum(ord(c) * 31**k for k, c in enumerate(job)) % PORTS)


def first_host(hosts: str) -> str:
    """Return the first host of SLURM's host list: `node01` of `node[01-03,07],login`."""
    match = re.match(r"[^,\[]+(?:\[[^\]]*\][^,\[]*)*", hosts)
    if match is None:
        raise ValueError(f"SLURM's list of hosts ({hosts!r}) must begin with a host")
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", match.group())
