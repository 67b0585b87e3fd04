"""Options that several commands share, and the objects that they describe."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from offbeat.cli import texts

if TYPE_CHECKING:  # lab is imported only by the commands that need it
    from offbeat.experiments.comparison import Setup
    from offbeat.lab import Cluster


def option(help_: str, *names: str) -> Parameter:
    """Return the declaration of an option. Flags have no --no- form."""
    # Accept values that begin with a hyphen, so that errors name a negative number as the value.
    return Parameter(name=names or None, help=help_, negative="", allow_leading_hyphen=True)


def number(help_: str, *names: str) -> Parameter:
    """Return the declaration of an option whose value is a whole number."""
    return Parameter.combine(option(help_, *names), Parameter(converter=texts.parse_whole_number))


Verbose = Annotated[
    bool, Parameter("--verbose", help="Print all numbers.", negative="", show_default=False)
]
Json = Annotated[
    bool, Parameter("--json", help="Print only JSON.", negative="", show_default=False)
]
Settings = Annotated[
    list[str] | None, option("Setting of the strategy, as in --set period=5; repeatable.", "--set")
]
EverySetting = Annotated[
    list[str] | None,
    option(
        "Setting of all strategies that have it (period=5), or of one (dreamddp.period=5).", "--set"
    ),
]
ScriptArgs = Annotated[str, Parameter(help="Passed to the script as they are.")]
Script = Annotated[str, Parameter(help="The training script, or -m and the name of a module.")]
OutDir = Annotated[
    Path | None, option("New directory for the run.  [default: runs/TIME-SCRIPT]", "--out")
]
ProfileIn = Annotated[Path, option("Measured profile (JSON).", "--profile")]
ReuseProfile = Annotated[
    Path | None, option("Reuse this profile instead of measuring one.", "--profile")
]
DeviceSpeed = Annotated[
    str | None,
    option("Predicted device: 20x this machine, or 35ms."),
]


@Parameter(name="*")
@dataclass(frozen=True)
class Where:
    """Options of all commands that run a script."""

    hosts: Annotated[int | None, number("Number of hosts.  [default: 4]")] = None
    rate: Annotated[str | None, option("Rate of every link.  [default: 100mbit]")] = None
    per_node: Annotated[
        int | None, number("Ranks on each host, which share a replica.  [default: 1]")
    ] = None
    inside: Annotated[
        str | None, option("Rate between the ranks of a host.  [default: unlimited]")
    ] = None
    servers: Annotated[int, number("More hosts, for parameter servers (ssp, ps-bsp).")] = 0
    cluster: Annotated[
        Path | None, option("Cluster file (TOML), instead of --hosts and --rate.")
    ] = None
    lab: Annotated[
        Literal["auto", "none"], option("none: loopback, unshaped, no privileges needed.")
    ] = "auto"
    links: Annotated[str | None, option("With --lab none: interfaces, as in eth0*2,gloo:eth1.")] = (
        None
    )
    seed: Annotated[int, number("OFFBEAT_SEED; each repetition adds 1.")] = 0
    secret: Annotated[
        Path | None,
        option("File with the job's secret; else OFFBEAT_SECRET."),
    ] = None
    timeout: Annotated[float | None, option("Longest time of a launch, in seconds.")] = None
    wait: Annotated[float, option("Longest wait for a rank, in seconds.")] = 120.0
    pace: Annotated[
        str | None,
        option(
            "Hosts compute at 1/K of a core: K, auto (the least K) or none.  "
            "[default: auto where ranks outnumber cores]"
        ),
    ] = None
    min_bucket_bytes: Annotated[
        int | None,
        number("Smallest size of a bucket, in bytes.", "--min-bucket"),
    ] = None


@Parameter(name="*")
@dataclass(frozen=True)
class Rehearsing:
    """Options of all commands that rehearse a script."""

    jitter: Annotated[float | None, option("Relative standard deviation of compute times.")] = None
    seeds: Annotated[str, option("One rehearsal of each strategy per seed, as in 0,1,2.")] = "0"
    processes: Annotated[int, number("Strategies that are rehearsed at the same time.")] = 1
    target: Annotated[str | None, option("Report the time to loss=4.3.")] = None
    resume: Annotated[
        Path | None, option("Interrupted rehearsal of this command, to complete.")
    ] = None

    def settings(self, iterations: int | None) -> dict[str, Any]:
        """Return the arguments of `ScriptRehearsal` that the options describe."""
        for name, value in (("--iterations", iterations), ("--processes", self.processes)):
            if value is not None:
                texts.require_range(name, value, 1, "leave it out")
        metric, target_loss = texts.parse_target(self.target, None)
        if metric is not None:
            raise ValueError(
                f"--target ({self.target}) must be a loss in a rehearsal, as in loss=4.3"
            )
        return {
            "iterations": iterations,
            "seeds": texts.parse_seeds(self.seeds, None, 0),
            "processes": self.processes,
            "target_loss": target_loss,
        }


WHERE, REHEARSING = Where(), Rehearsing()


# --- options to objects ---


def require_one_folder(out: Path | None, resume: Path | None) -> None:
    """Raise ValueError if a run that is resumed has another folder."""
    if resume is not None and out is not None:
        raise ValueError(f"--out ({out}) is the folder of --resume ({resume}); leave --out out")


def setup_of(where: Where, script: str, args: Sequence[str]) -> Setup:
    """Return the setup of a script."""
    from offbeat.experiments.comparison import NO_LIMIT_S, Setup

    cluster = cluster_of(where)
    for name, value in (("--timeout", where.timeout), ("--wait", where.wait)):
        if value is not None:
            texts.require_duration(name, value, NO_LIMIT_S)
    if where.min_bucket_bytes is not None:
        texts.require_range("--min-bucket", where.min_bucket_bytes, 1, "leave it out")
    texts.set_secret(where.secret)
    return Setup(
        script=(script, *args),
        cluster=cluster,
        shaped=where.lab == "auto",
        seed=where.seed,
        timeout_s=NO_LIMIT_S if where.timeout is None else where.timeout,
        wait_s=where.wait,
        links=tuple(link.strip() for link in where.links.split(",")) if where.links else (),
        pace=texts.parse_pace(where.pace),
        servers=where.servers * cluster.processes_per_host,
        min_bucket_bytes=where.min_bucket_bytes,
    )


def cluster_of(where: Where) -> Cluster:
    """Return the cluster with the hosts of its servers."""
    texts.require_range("--servers", where.servers, 0, "leave it out for none")
    cluster = _worker_cluster(where)
    if not where.servers:
        return cluster
    more = {"hosts": cluster.hosts + where.servers}
    return type(cluster).model_validate({**cluster.record(), **more})


def _worker_cluster(where: Where) -> Cluster:
    from offbeat.lab import Cluster
    from offbeat.lab.description import MAX_HOSTS
    from offbeat.lab.units import parse_rate_bps

    if where.cluster is None:
        hosts, rate = where.hosts, where.rate
        if hosts is not None:
            texts.require_range("--hosts", hosts, 1, "give the number of hosts", MAX_HOSTS)
        parse_rate_bps(rate, "--rate")
        # As text of a cluster file, so that errors are the same as there.
        short = f"hosts = {4 if hosts is None else hosts}\nrate = {json.dumps(rate or '100mbit')}"
        if where.per_node is not None:
            texts.require_range("--per-node", where.per_node, 1, "give the number of ranks")
            short += f"\nranks = {where.per_node}"
        if where.inside is not None:
            parse_rate_bps(where.inside, "--inside")
            short += f"\ninside = {json.dumps(where.inside)}"
        return Cluster.from_toml(short)
    for name, value in (("per-node", where.per_node), ("inside", where.inside)):
        if value is not None:
            raise ValueError(
                f"--{name} must be left out with --cluster; put it into the cluster file"
            )
    return texts.load_cluster(where.cluster, hosts=where.hosts, rate=where.rate)
