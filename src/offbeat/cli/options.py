"""Options that several commands share, and the objects that they describe."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from offbeat.cli import texts
from offbeat.core.units import parse_duration_s, parse_rate_bps, parse_whole

if TYPE_CHECKING:  # lab is imported only by the commands that need it
    from offbeat.experiments.comparison import Setup
    from offbeat.lab import Cluster


def read(parse: Callable[[str, str], Any], *names: str) -> Parameter:
    """Return the declaration of an option that `parse` reads from its text and its name."""
    return Parameter(
        names or None, converter=lambda _, tokens: parse(tokens[0].value, tokens[0].keyword)
    )


def number(least: int | None = 1, most: int | None = None, *names: str) -> Parameter:
    """Return the declaration of an option whose value is a whole number in a range."""
    return read(partial(parse_whole, least=least, most=most), *names)


Positive = Annotated[int, number()]
Count = Annotated[int | None, number()]
Seconds = Annotated[float, read(parse_duration_s)]


@Parameter(name="*")
@dataclass(frozen=True)
class RunOutput:
    """Options of all commands whose result is a run.

    Attributes:
        out: New directory for the run.  [default: runs/TIME-SCRIPT]
        json_: Print only JSON.
        verbose: Print all numbers.
    """

    out: Path | None = None
    json_: bool = False
    verbose: bool = False


@Parameter(name="*")
@dataclass(frozen=True)
class Where:
    """Options of all commands that run a script.

    Attributes:
        hosts: Number of hosts.  [default: 4]
        rate: Rate of every link.  [default: 100mbit]
        per_node: Ranks on each host, which share a replica.  [default: 1]
        inside: Rate between the ranks of a host.  [default: unlimited]
        servers: More hosts, for parameter servers (ssp, ps-bsp).
        cluster: Cluster file (TOML), instead of --hosts and --rate.
        lab: none: loopback, unshaped, no privileges needed.
        links: With --lab none: interfaces, as in eth0*2,gloo:eth1.
        seed: OFFBEAT_SEED; each repetition adds 1.
        secret: File with the job's secret; else OFFBEAT_SECRET.
        timeout: Longest time of a launch, in seconds.
        wait: Longest wait for a rank, in seconds.
        pace: Hosts compute at 1/K of a core: K, none, or auto: the least K, where cores are few.
        min_bucket: Smallest size of a bucket, in bytes.
    """

    hosts: Count = None
    rate: str | None = None
    per_node: Count = None
    inside: str | None = None
    servers: Annotated[int, number(0)] = 0
    cluster: Path | None = None
    lab: Literal["auto", "none"] = "auto"
    links: str | None = None
    seed: Annotated[int, number(None)] = 0
    secret: Path | None = None
    timeout: Seconds | None = None
    wait: Seconds = 120.0
    pace: str | None = None
    min_bucket: Count = None

    def setup(self, *script: str) -> Setup:
        """Return the setup of a script."""
        from offbeat.experiments.comparison import NO_LIMIT_S, Setup

        cluster = self.cluster_with_servers()
        texts.set_secret(self.secret)
        return Setup(
            script=script,
            cluster=cluster,
            shaped=self.lab == "auto",
            seed=self.seed,
            timeout_s=self.timeout or NO_LIMIT_S,
            wait_s=self.wait,
            links=tuple(link.strip() for link in self.links.split(",")) if self.links else (),
            pace=texts.parse_pace(self.pace),
            servers=self.servers * cluster.processes_per_host,
            min_bucket_bytes=self.min_bucket,
        )

    def cluster_with_servers(self) -> Cluster:
        """Return the cluster with the hosts of its servers."""
        cluster = self._workers()
        if not self.servers:
            return cluster
        more = {"hosts": cluster.hosts + self.servers}
        return type(cluster).model_validate({**cluster.record(), **more})

    def _workers(self) -> Cluster:
        from offbeat.lab import Cluster

        if self.cluster is not None:
            names = ("hosts", "rate", "per_node", "inside")
            replaced = {name: getattr(self, name) for name in names}
            return texts.load_cluster(self.cluster, **replaced)
        parse_rate_bps(self.rate, "--rate")
        parse_rate_bps(self.inside, "--inside")
        short = {"hosts": self.hosts or 4, "rate": self.rate or "100mbit"}
        short |= {"ranks": self.per_node, "inside": self.inside}
        given = {key: value for key, value in short.items() if value is not None}
        # As text of a cluster file, so that errors are the same as there.
        return Cluster.from_toml("\n".join(f"{k} = {json.dumps(v)}" for k, v in given.items()))


@Parameter(name="*")
@dataclass(frozen=True)
class Rehearsing:
    """Options of all commands that rehearse a script.

    Attributes:
        jitter: Relative standard deviation of compute times.
        seeds: One rehearsal of each strategy per seed, as in 0,1,2.
        target: Report the time to loss=4.3.
        resume: Interrupted rehearsal of this command, to complete.
    """

    jitter: float | None = None
    seeds: str = "0"
    target: str | None = None
    resume: Path | None = None

    def settings(self, iterations: int | None) -> dict[str, Any]:
        """Return the arguments of `rehearse_script` that the options describe."""
        metric, target_loss = texts.parse_target(self.target)
        if metric is not None:
            raise ValueError(
                f"--target ({self.target}) must be a loss in a rehearsal, as in loss=4.3"
            )
        return {
            "iterations": iterations,
            "seeds": texts.parse_seeds(self.seeds, None, 0),
            "target_loss": target_loss,
        }


OUTPUT, WHERE, REHEARSING = RunOutput(), Where(), Rehearsing()


def require_one_folder(out: Path | None, resume: Path | None) -> None:
    """Raise ValueError if a run that is resumed has another folder."""
    if resume is not None and out is not None:
        raise ValueError(f"--out ({out}) is the folder of --resume ({resume}); leave --out out")
