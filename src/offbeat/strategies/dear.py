"""DeAR: reduce-scatter under backward, all-gather under the next forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

from offbeat.core.plan import Fact, Moment, Payload, Phases, Plan, Transfer, Verb, local
from offbeat.core.profile import Profile
from offbeat.core.strategy.interface import require_count
from offbeat.strategies.compressible import NONE
from offbeat.strategies.priorities import Prioritized, compute_of
from offbeat.strategies.solvers import Fusion, cap_fusion, fusion_finish
from offbeat.strategies.wfbp import message_seconds


@dataclass(frozen=True)
class DeAR(Prioritized):
    """Split each all-reduce: reduce-scatter under backward, all-gather under the next forward.

    Groups of neighbouring buckets are reduce-scattered as soon as their gradients exist. The step
    waits for all reduce-scatters. The groups are then all-gathered under the next forward, input
    side first, and each group is updated when its all-gather has completed.

    The paper starts the all-gather of a group when the forward reaches the group before it. Here
    the step queues all of them. They never start later than in the paper, and a rank can finish its
    updates, for example to evaluate or to save, while other ranks are not in forward. With
    `update="at_step"`, groups are all-reduced under backward instead; only this variant supports a
    codec (`wire`).
    """

    fusion_bytes: int | None = None
    """Size at which a group of buckets is closed; 1: no fusion; None: tuned by equations."""

    name: ClassVar[str] = "dear"
    citation: ClassVar[str] = (
        "Zhang et al., DeAR: Accelerating Distributed Deep Learning with Fine-Grained All-Reduce "
        "Pipelining, ICDCS 2023"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fusion_bytes is not None:
            require_count(
                "fusion_bytes", self.fusion_bytes, remedy="use 1 to fuse nothing, None to tune it"
            )
        if self.wire != NONE and self.update == "on_arrival":
            raise ValueError(
                f"wire ({self.wire!r}) needs whole averages, and dear sends them in halves; use "
                f"update='at_step', or WFBP(wire={self.wire!r})"
            )

    def schedule(self, profile: Profile) -> Plan:
        cap_bytes = self.fusion_bytes or self._best_cap_bytes(profile)
        groups = cap_fusion([bucket.size_bytes for bucket in profile.buckets], cap_bytes)
        link = profile.default_link.name
        if self.update == "at_step":
            transfers, updated = _reduces(groups, link, "all_reduce"), Moment("step")
        else:
            transfers = (*_reduces(groups, link, "reduce_scatter"), *_all_gathers(groups, link))
            updated = Moment("forward", lag=1)
        return Plan(
            self.name,
            len(profile.buckets),
            transfers,
            (local(len(profile.buckets), updated, [0]),),
            facts=(Fact("fusion_bytes", cap_bytes, "a group is closed as soon as it holds them"),),
        )

    def _best_cap_bytes(self, profile: Profile) -> int:
        """Return the cap with the shortest iteration, or with `at_step` with the earliest end of
        all messages; ties go to the largest cap.

        Candidates are the sizes of the runs of buckets from the output side.
        """
        slowest, sizes = profile.slowest(), [bucket.size_bytes for bucket in profile.buckets]
        message_s = message_seconds(profile)

        def end_s(cap_bytes: int) -> float:
            groups = cap_fusion(sizes, cap_bytes)
            if self.update == "at_step":
                return fusion_finish(groups, slowest.ready_s, message_s)
            return decoupled_iteration_s(groups, slowest)

        caps = {max(total, 1) for total in (1, *accumulate(sizes))}
        return min(sorted(caps, reverse=True), key=end_s)

    def bound_s(self, profile: Profile) -> float:
        """Return `max(B, C_1) + max(F, C_2)`, where the update is part of F.

        The step separates the two halves, so each half overlaps only with backward or only with
        forward. With `update="at_step"` messages have no halves, and the bound of synchronous
        methods applies.
        """
        if self.update == "at_step":
            return super().bound_s(profile)
        slowest, everything = profile.slowest(), range(len(profile.buckets))
        forward_s = slowest.other_s + slowest.update_s + slowest.forward_s
        backward_s = slowest.backward_s
        return max(backward_s, _half_s(slowest, everything, "reduce_scatter")) + max(
            forward_s, _half_s(slowest, everything, "all_gather")
        )


def decoupled_iteration_s(groups: Sequence[range], profile: Profile) -> float:
    """Return the seconds of an iteration, from the start of backward to the end of the next
    forward."""
    compute = compute_of(profile)
    scattered_s = 0.0
    for group in groups:
        start_s = max(scattered_s, compute.ready_s[group[-1]])
        scattered_s = start_s + _half_s(profile, group, "reduce_scatter")
    released_s = max(scattered_s, compute.ready_s[-1])
    now_s, gathered_s = released_s + compute.other_s, released_s
    for group in reversed(groups):
        gathered_s += _half_s(profile, group, "all_gather")
        now_s = max(now_s, gathered_s) + sum(compute.forward_s[group.start : group.stop])
    return now_s


def _reduces(groups: Fusion, link: str, verb: Verb) -> tuple[Transfer, ...]:
    """Return the messages under backward: reduce-scatters, or all-reduces in place of both
    halves."""
    return tuple(
        Transfer(
            Payload("grad", group),
            after=Moment("grad", group[-1]),
            before=Moment("step"),
            phases=Phases([0]),
            link=link,
            verb=verb,
        )
        for group in groups
    )


def _all_gathers(groups: Fusion, link: str) -> tuple[Transfer, ...]:
    """Return the all-gathers in forward order: from the input side to the output side."""
    return tuple(
        Transfer(
            Payload("grad", group),
            after=Moment("step"),
            before=Moment("forward", group[-1], lag=1),
            phases=Phases([0]),
            link=link,
            verb="all_gather",
        )
        for group in reversed(groups)
    )


def _half_s(profile: Profile, group: range, verb: Verb) -> float:
    return profile.message_s(Payload("grad", group), profile.default_link.name, verb)
