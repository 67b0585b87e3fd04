"""Question that a verdict answers, by the options of `offbeat advise`, and the answer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from offbeat.core.profile import Profile
from offbeat.core.profile.elsewhere import extrapolate
from offbeat.core.strategy.parsing import text_of
from offbeat.experiments.advice.commands import compare_command
from offbeat.experiments.advice.needs import SHARES
from offbeat.experiments.advice.place import (
    Place,
    given_rate_bps,
    place_of,
    place_on_cluster,
    require_equal_sizes,
)
from offbeat.experiments.advice.selection import (
    MAX_STALENESS,
    excluded_strategies,
    require_staleness,
)
from offbeat.experiments.advice.verdict import Predictions, Verdict, decide, require_amounts
from offbeat.experiments.advice.verdict_text import SHOWN_SHARE, rate, verdict_text
from offbeat.experiments.advice.work import Work
from offbeat.experiments.device_speed import Compute, DeviceSpeed
from offbeat.jobs.words import seconds
from offbeat.lab import Cluster

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
        require_amounts(self.device_memory, self.price)
        require_staleness(self.max_staleness)
        given_rate_bps(self.rate)

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
            place = place_of(profile, self.hosts, given_rate_bps(self.rate), *sizes)
        else:
            place = place_on_cluster(profile, Cluster.load(self.cluster), *sizes)
        if self.passes is not None:
            place = place.with_passes(self.passes)
        if self.jitter is None:
            return place
        return replace(place, profile=extrapolate(place.profile, jitter=self.jitter))

    def has_nodes(self, devices: int) -> bool:
        """Return whether the ranks of each host of the cluster file share a replica, as the devices
        of a machine do."""
        assert self.cluster is not None
        cluster = Cluster.load(self.cluster)
        sizes = {cluster.ranks_of(host) for host in range(cluster.hosts)}
        return sizes == {devices} and (devices == 1 or cluster.ranks is not None)


@dataclass(frozen=True)
class Answer:
    """Verdict of a question with its command, the device that it is for, remarks, and the record of
    a rehearsal."""

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
            "compute per iteration); --device-speed 20x or --iteration-s .035 predicts for yours"
        )

    def text(self, width: int, *, verbose: bool) -> str:
        """Return the printed output."""
        return verdict_text(
            self.verdict,
            notes=(*self.notes, self.device_text),
            command=self.command,
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
        question.place(profile) if predicted is None else predicted.place,
        work or question.work,
        predicted=predicted,
        max_staleness=question.max_staleness,
        device_memory=question.device_memory,
        price=question.price,
        shares=SHARES if question.everything else (SHOWN_SHARE,),
        everything=question.everything,
        rate_text=rate,
    )
    command = compare_command(verdict, question, profile, file)
    return Answer(verdict, command, Compute.of(profile, question.device))
