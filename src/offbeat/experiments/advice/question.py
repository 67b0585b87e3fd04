"""Question that a verdict answers, by the options of `offbeat advise`, and the answer with the
commands that follow from it."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from offbeat.core.profile import Profile
from offbeat.core.profile.elsewhere import extrapolate, network_rate_bps
from offbeat.core.strategy.parsing import text_of
from offbeat.core.units import format_rounded_rate, parse_given_rate_bps
from offbeat.core.words import seconds
from offbeat.experiments.advice.place import Place, place_of, place_on_cluster
from offbeat.experiments.advice.selection import MAX_STALENESS, require_staleness
from offbeat.experiments.advice.verdict import (
    Predictions,
    Verdict,
    Work,
    decide,
    predict_methods,
)
from offbeat.experiments.advice.verdict_text import verdict_text
from offbeat.experiments.device_speed import Compute, DeviceSpeed
from offbeat.experiments.elsewhere import require_equal_sizes
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
        device_memory: bytes of a device; None if not given.
        price: price of a machine and hour; None if not given.
        jitter: relative standard deviation of compute times; None for that of the profile.
        passes: backward passes per step of each machine; None for the measured number.
        everything: whether all strategies are predicted with their default settings.
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
        if self.cluster is None:
            place = place_of(profile, self.hosts, parse_given_rate_bps(self.rate), *sizes)
        else:
            place = place_on_cluster(profile, Cluster.load(self.cluster), *sizes)
        if self.passes is not None:
            place = place.with_passes(self.passes)
        if self.jitter is None:
            return place
        return replace(place, profile=extrapolate(place.profile, jitter=self.jitter))


@dataclass(frozen=True)
class Answer:
    """Verdict of a question.

    Attributes:
        verdict: the verdict.
        command: command that compares the advised strategies; None if no options describe the
            machines.
        compute: device that the times are of.
        notes: remarks about a rehearsal.
        rehearsal: record of a rehearsal.
    """

    verdict: Verdict
    command: str | None
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

    def text(self, width: int) -> str:
        """Return the printed output."""
        device = self.compute.text or (
            f"these times are of the profile's device ({seconds(self.compute.iteration_s)} of "
            "compute per iteration); --device-speed 20x or 35ms predicts for yours"
        )
        notes, best = [*self.notes, device], self.verdict.best
        if self.verdict.place.devices > 1 and best.method.strategy is not None:
            nodes = "" if best.sharded else " OFFBEAT_NODES=auto"  # or the mesh of the script
            strategy = shlex.quote(best.method.label)
            notes.append(f"on these machines set OFFBEAT_STRATEGY={strategy}{nodes} for all ranks")
        return verdict_text(self.verdict, notes, self.command, width)


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
    if predicted is None:
        place, most = question.place(profile), question.max_staleness
        predicted = predict_methods(place, max_staleness=most, everything=question.everything)
    verdict = decide(
        predicted,
        work or question.work,
        device_memory=question.device_memory,
        price=question.price,
    )
    command = compare_command(verdict, question, profile, file)
    return Answer(verdict, command, Compute.of(profile, question.device))


def compare_command(
    verdict: Verdict, question: Question, profile: Profile, file: Path | None
) -> str | None:
    """Return the command that compares the advised strategies on these machines; None if neither
    the cluster file nor `--hosts`, `--rate` and `--per-node` describe them.

    It reuses the profile in `file`, if `compare` can convert it and passes are as measured.
    """
    if question.cluster is None:
        where, cluster = _options_of(verdict.place)
    else:
        where, cluster = ["--cluster", str(question.cluster)], Cluster.load(question.cluster)
    if cluster is None or Hosts.of(cluster, cluster.world_size).sizes != (verdict.place.devices,):
        return None
    reused = file is not None and profile.world_size > 1 and question.passes is None
    if reused and _is_convertible(profile, cluster):
        where += ["--profile", str(file)]
    where += ["--device-speed", str(question.device)] if question.device else []
    if verdict.work.target_loss is not None:
        where += ["--target", f"loss={verdict.work.target_loss:.4g}"]
    strategies = [option.strategy for option in verdict.advice.compared]
    if (best := verdict.best.method.strategy) is not None and best not in strategies:
        strategies.insert(0, best)  # by the time to a loss it can be another one
    names = ",".join(map(text_of, strategies))
    script = question.script or ("train.py",)
    return shlex.join(["offbeat", "compare", *where, "--strategies", names, *script])


def _options_of(place: Place) -> tuple[list[str], Cluster | None]:
    """Return the options of a cluster of one link without delay, and the cluster; None if they do
    not describe the place."""
    profile, link, devices = place.profile, place.profile.default_link, place.devices
    uneven = profile.pace and (profile.rank_scale or profile.rank_jitter or profile.jitter)
    plain = link.name == DEFAULT_LINK and not link.asked_latency_s and not link.asked_loss
    rate = format_rounded_rate(network_rate_bps(link, place.machines))
    options = ["--hosts", str(place.machines), "--rate", rate]
    options += ["--per-node", str(devices)] if devices > 1 else []
    try:
        cluster = Cluster.simple(place.machines, rate, ranks=devices if devices > 1 else None)
    except ValueError:  # more hosts or another rate than the lab can have
        return options, None
    return options, None if len(profile.links) > 1 or uneven or not plain else cluster


def _is_convertible(profile: Profile, cluster: Cluster) -> bool:
    try:
        compute_for(profile, cluster, cluster.world_size, shaped=True, pace=None, file="")
    except ValueError:
        return False
    return True
