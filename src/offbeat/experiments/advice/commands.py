"""Shell commands that follow from a verdict: comparison of its strategies, and a launch."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from offbeat.core.profile import Profile
from offbeat.core.profile.elsewhere import network_rate_bps
from offbeat.core.strategy.parsing import text_of
from offbeat.experiments.advice.verdict import Verdict
from offbeat.experiments.profile_for_network import compute_for
from offbeat.lab import Cluster

if TYPE_CHECKING:
    from offbeat.experiments.advice.question import Question

DEFAULT_LINK = "net"  # name of the only link of a cluster that is given by options, not by a file


def compare_command(
    verdict: Verdict, question: Question, profile: Profile, file: Path | None
) -> str | None:
    """Return the command that compares the advised strategies on these machines; None if they have
    several devices and the cluster file does not state these.

    It reuses the profile in `file`, if `compare` can convert it and passes are as measured.
    `--hosts` and `--rate` can describe one link without delay; other clusters need a cluster file.
    """
    place, options = verdict.place, verdict.advice.compared
    where = _options_of_place(place.profile) or ["--cluster", "cluster.toml"]
    if question.cluster is not None:
        where = ["--cluster", str(question.cluster)]
        if not question.has_nodes(place.devices):
            return None
    elif place.devices > 1 and where[0] == "--cluster":
        return None
    elif place.devices > 1:
        where += ["--per-node", str(place.devices)]
    same_nodes = max(profile.topology, default=1) == place.devices
    if question.cluster is not None:
        same_nodes = _is_convertible(profile, Cluster.load(question.cluster))
    if file is not None and profile.world_size > 1 and same_nodes and question.passes is None:
        where += ["--profile", str(file)]
    where += ["--device-speed", question.device_text] if question.device_text else []
    if verdict.work.target_loss is not None:
        where += ["--target", f"loss={verdict.work.target_loss:.4g}"]
    strategies = [option.strategy for option in options]
    if (best := verdict.best.method.strategy) is not None and best not in strategies:
        strategies.insert(0, best)  # by the time to a loss it can be another one
    names = ",".join(map(text_of, strategies))
    script = question.script or ("train.py",)
    return shlex.join(["offbeat", "compare", *where, "--strategies", names, *script])


def _is_convertible(profile: Profile, cluster: Cluster) -> bool:
    try:
        compute_for(profile, cluster, cluster.world_size, shaped=True, pace=None, file="")
    except ValueError:
        return False
    return True


def launch_command(verdict: Verdict) -> str | None:
    """Return the command that trains one replica per machine by the advised strategy; None if the
    best method is not a strategy, or if machines have one device."""
    place, best = verdict.place, verdict.best.method
    if place.devices == 1 or best.strategy is None:
        return None
    nodes = "" if verdict.best.sharded else "OFFBEAT_NODES=auto "  # or the mesh of the script
    return (
        f"OFFBEAT_STRATEGY={best.label} {nodes}torchrun --nnodes {place.machines} "
        f"--nproc-per-node {place.devices} train.py"
    )


def _options_of_place(profile: Profile) -> list[str] | None:
    from offbeat.lab.units import MAX_RATE_BPS, MIN_RATE_BPS, format_rounded_rate

    link, hosts = profile.default_link, ["--hosts", str(profile.world_size)]
    uneven = profile.pace and (profile.rank_scale or profile.rank_jitter or profile.jitter)
    plain = link.name == DEFAULT_LINK and not link.asked_latency_s and not link.asked_loss
    if len(profile.links) > 1 or uneven or not plain:
        return None
    if profile.world_size < 2:
        return hosts
    rate_bps = network_rate_bps(link, profile.world_size)
    if not MIN_RATE_BPS <= rate_bps <= MAX_RATE_BPS:
        return hosts
    return [*hosts, "--rate", format_rounded_rate(rate_bps)]
