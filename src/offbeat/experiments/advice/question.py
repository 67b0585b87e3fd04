"""Question that a verdict answers, by the options of `offbeat advise`, and the answer with the
commands that follow from it."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from offbeat.core.profile import Profile
from offbeat.core.profile.elsewhere import extrapolate, network_rate_bps
from offbeat.core.strategy.parsing import text_of
from offbeat.core.units import (
    MAX_RATE_BPS,
    MIN_RATE_BPS,
    format_rounded_rate,
    parse_given_rate_bps,
)
from offbeat.core.words import seconds
from offbeat.experiments.advice.needs import SHARES
from offbeat.experiments.advice.place import (
    Place,
    place_of,
    place_on_cluster,
    require_equal_sizes,
)
from offbeat.experiments.advice.selection import (
    MAX_STALENESS,
    excluded_strategies,
    require_staleness,
)
from offbeat.experiments.advice.verdict import (
    Predictions,
    Verdict,
    decide,
    predict_methods,
)
from offbeat.experiments.advice.verdict_text import SHOWN_SHARE, verdict_text
from offbeat.experiments.advice.work import Work
from offbeat.experiments.device_speed import Compute, DeviceSpeed
from offbeat.experiments.profile_for_network import Hosts, compute_for
from offbeat.lab import Cluster

DEFAULT_LINK = "net"  # name of the only link of a cluster that is given by options, not by a file
MEASURES = ("change", "staleness", "iteration_s", "update_s")  # fields in the JSON output


@dataclass(frozen=True)
class Question:
    """Options of `offbeat advise`.

    Attributes:
        work: amount of training.
        hosts: number of machines; None for the profile's.
        rate: text of the rate of the network; None for the measured one.
        devices: number of devices of each machine.
        cluster: cluster file instead of `hosts` and `rate`.
        max_staleness: largest staleness of the advised strategy.
        device: the user's device; None for the measured one.
        device_text: option that describes it in a command of `compare`.
        device_memory: bytes of a device; None if not given.
        price: price of a machine and hour; None if not given.
        jitter: relative standard deviation of compute times; None for that of the profile.
        passes: backward passes per step of each machine; None for the measured number.
        everything: whether all strategies and all shares of computing time are computed.
        script: script or module with its arguments; empty if it is not given.

    Raises:
        ValueError: a number is out of range, or the rate is no number.
    """

    work: Work
    hosts: int | None = None
    rate: str | None = None
    devices: int | None = None
    cluster: Path | None = None
    max_staleness: int = MAX_STALENESS
    device: DeviceSpeed | None = None
    device_text: str | None = None
    device_memory: float | None = None
    price: float | None = None
    jitter: float | None = None
    passes: int | None = None
    everything: bool = False
    script: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("device_memory", "price"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} ({value:g}) must be a number above 0")
        require_staleness(self.max_staleness)
        parse_given_rate_bps(self.rate)

    def place(self, profile: Profile) -> Place:
        """Return the machines of the question, with the model of a profile."""
        if self.device is not None:
            profile = self.device.apply(profile)
        if profile.sharded:
            raise ValueError(
                "the profile must be of whole replicas, as sizes of shards do not state the memory "
                "of a model; measure it on one device with `offbeat advise train.py`"
            )
        # The legs of messages inside a machine are part of the profile's message times.
        if self.devices is None:
            require_equal_sizes(profile.topology, "topology of the profile")
        measured = max(profile.topology, default=1)
        sizes, profile = (self.devices or measured, measured), profile.of_replicas()
        if (cluster := self.described) is None:
            place = place_of(profile, self.hosts, parse_given_rate_bps(self.rate), *sizes)
        else:
            place = place_on_cluster(profile, cluster, *sizes)
        if self.passes is not None:
            place = place.with_passes(self.passes)
        if self.jitter is None:
            return place
        return replace(place, profile=extrapolate(place.profile, jitter=self.jitter))

    @property
    def described(self) -> Cluster | None:
        """Return the cluster of the cluster file; None without a file."""
        return None if self.cluster is None else Cluster.load(self.cluster)


@dataclass(frozen=True)
class Answer:
    """Verdict of a question with the commands that compare and that train, the device that it is
    for, remarks, and the record of a rehearsal."""

    verdict: Verdict
    command: str | None
    launch: str | None
    compute: Compute
    notes: tuple[str, ...] = ()
    rehearsal: dict[str, Any] | None = None

    @property
    def data(self) -> dict[str, Any]:
        """Return the JSON output."""
        advice = self.verdict.advice
        found = {
            **self.verdict.to_dict(),
            "command": self.command,
            "passes": self.verdict.place.profile.usage.backwards,
            "advised": text_of(advice.chosen.strategy),
            "compared": [text_of(option.strategy) for option in advice.compared],
            "notes": [*advice.notes, *self.notes],
            "never_advised": {
                name: reason for reason, names in excluded_strategies().items() for name in names
            },
            "options": [
                {
                    "strategy": text_of(option.strategy),
                    **{name: getattr(option, name) for name in MEASURES},
                    "bytes_per_iteration": option.bytes,
                }
                for option in advice.options
            ],
            "compute": self.compute.record(),
        }
        return found if self.rehearsal is None else {**found, "rehearsal": self.rehearsal}

    @property
    def device_text(self) -> str:
        """Return a sentence about the device whose times these are."""
        return self.compute.text or (
            f"these times are of the profile's device ({seconds(self.compute.iteration_s)} of "
            "compute per iteration); --device-speed 20x or 35ms predicts for yours"
        )

    def text(self, width: int, *, verbose: bool) -> str:
        """Return the printed output."""
        return verdict_text(
            self.verdict,
            notes=(*self.notes, self.device_text),
            command=self.command,
            launch=self.launch,
            width=width,
            verbose=verbose,
        )


def answer(
    question: Question,
    profile: Profile,
    file: Path | None,
    predicted: Predictions | None = None,
    work: Work | None = None,
) -> Answer:
    """Return the answer to a question.

    Args:
        question: options of the command.
        profile: measured profile.
        file: its file, if it is kept.
        predicted: predictions for the machines of the question, if they are known.
        work: amount of training, if it is not that of the question.
    """
    verdict = decide(
        predicted
        or predict_methods(
            question.place(profile),
            max_staleness=question.max_staleness,
            everything=question.everything,
        ),
        work or question.work,
        device_memory=question.device_memory,
        price=question.price,
        shares=SHARES if question.everything else (SHOWN_SHARE,),
    )
    command = compare_command(verdict, question, profile, file)
    launch = launch_command(verdict, question.script)
    return Answer(verdict, command, launch, Compute.of(profile, question.device))


def compare_command(
    verdict: Verdict, question: Question, profile: Profile, file: Path | None
) -> str | None:
    """Return the command that compares the advised strategies on these machines; None if they have
    several devices and the cluster file does not state these.

    It reuses the profile in `file`, if `compare` can convert it and passes are as measured.
    `--hosts` and `--rate` can describe one link without delay; other clusters need a cluster file.
    """
    devices, cluster = verdict.place.devices, question.described
    if cluster is not None:
        if Hosts.of(cluster, cluster.world_size).sizes != (devices,):
            return None
        where = ["--cluster", str(question.cluster)]
        convertible = _is_convertible(profile, cluster)
    else:
        where = _options_of_place(verdict.place.profile)
        if where is None and devices > 1:
            return None
        where = where or ["--cluster", "cluster.toml"]
        where += ["--per-node", str(devices)] if devices > 1 else []
        convertible = max(profile.topology, default=1) == devices
    if file is not None and profile.world_size > 1 and convertible and question.passes is None:
        where += ["--profile", str(file)]
    where += ["--device-speed", question.device_text] if question.device_text else []
    if verdict.work.target_loss is not None:
        where += ["--target", f"loss={verdict.work.target_loss:.4g}"]
    strategies = [option.strategy for option in verdict.advice.compared]
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


def launch_command(verdict: Verdict, script: Sequence[str]) -> str | None:
    """Return the command that trains one replica per machine by the advised strategy; None if the
    best method is not a strategy, or if machines have one device."""
    place, best = verdict.place, verdict.best.method
    if place.devices == 1 or best.strategy is None:
        return None
    nodes = "" if verdict.best.sharded else "OFFBEAT_NODES=auto "  # or the mesh of the script
    return (
        f"OFFBEAT_STRATEGY={shlex.quote(best.label)} {nodes}torchrun --nnodes {place.machines} "
        f"--nproc-per-node {place.devices} {shlex.join(script or ('train.py',))}"
    )


def _options_of_place(profile: Profile) -> list[str] | None:
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
