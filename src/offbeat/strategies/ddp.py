"""DDP: torch's own DistributedDataParallel, unchanged, as the reference of comparisons."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, ClassVar, Literal

from offbeat.core.plan import Buffer, Plan
from offbeat.core.profile import Profile
from offbeat.core.profile.elsewhere import extrapolate, repeated_ranks
from offbeat.core.sim import simulate
from offbeat.core.strategy.interface import Needs, Planned, Strategy, synchronous_bound_s
from offbeat.strategies.equations import Equations, synchronous
from offbeat.strategies.solvers import cap_fusion, fusion_finish
from offbeat.strategies.wfbp import (
    DDP_CAP_BYTES,
    MIB,
    channels_bound_s,
    fuse_as_ddp,
    gradients_when_ready,
    message_seconds,
)

if TYPE_CHECKING:
    from offbeat.core.runtime.session import Session
    from offbeat.core.runtime.training_job import TrainingJob

SIMULTANEOUS = 2  # all_reduces that gloo executes at the same time, by default


@dataclass(frozen=True)
class DDP(Planned):
    """torch's own `DistributedDataParallel`, with a configurable bucket cap.

    The plan describes the communication of DDP for predictions only.
    """

    bucket_cap_mb: float | Literal["tuned"] | None = None
    """Cap of torch's buckets in MiB; None: torch's default (25, the first bucket 1); `tuned`: the
    cap with the shortest predicted iteration."""

    name: ClassVar[str] = "ddp"
    citation: ClassVar[str] = "Li et al., PyTorch Distributed, VLDB 2020"
    needs: ClassVar[Needs] = Needs(measures=False, sparse_gradients=True, nodes=True)

    def __post_init__(self) -> None:
        cap = self.bucket_cap_mb
        if cap not in (None, "tuned") and not (
            isinstance(cap, (int, float)) and 0 < cap < math.inf
        ):
            raise ValueError(
                f"bucket_cap_mb ({cap!r}) must be a number above 0, 'tuned', or None for "
                "torch's default"
            )

    def participants(self, profile: Profile) -> Profile:
        return with_replica_per_rank(profile)

    def schedule(self, profile: Profile) -> Plan:
        cap = self.cap_mb(profile)
        if cap is None:
            groups = fuse_as_ddp(profile)
        else:
            groups = cap_fusion([bucket.size_bytes for bucket in profile.buckets], int(cap * MIB))
        return gradients_when_ready(self.name, profile, groups, _channels(profile))

    def cap_mb(self, profile: Profile) -> float | None:
        """Return the bucket cap in MiB for torch; None for torch's default.

        With "tuned", the size of each run of buckets from the output side is a candidate. The
        candidate with the earliest end of all messages wins; on a distant link, the one with the
        shortest simulated iteration.

        Args:
            profile: profile of the job.
        """
        if self.bucket_cap_mb != "tuned":
            return self.bucket_cap_mb
        profile = self.participants(profile)
        slowest, message_s = profile.slowest(), message_seconds(profile)
        ready_s, sizes = slowest.ready_s, [bucket.size_bytes for bucket in profile.buckets]
        channels = _channels(profile)

        def end_s(cap_bytes: int) -> float:
            groups = cap_fusion(sizes, cap_bytes)
            if channels == 1:
                return fusion_finish(groups, ready_s, message_s)
            plan = gradients_when_ready(self.name, profile, groups, channels)
            return max(
                ends_s[-1] for ends_s in simulate(plan, slowest, iterations=8, record=0).ends_s
            )

        caps = {total for total in accumulate(sizes) if total} or {DDP_CAP_BYTES}
        return min(sorted(caps), key=end_s) / MIB

    @classmethod
    def suggestions(cls, profile: Profile, max_staleness: int) -> Iterable[Strategy]:
        return cls(), cls(bucket_cap_mb="tuned")

    def extra_buffers(self, profile: Profile, plan: Plan | None) -> Sequence[Buffer]:
        # torch copies gradients into the buckets that it sends (gradient_as_bucket_view=False).
        return (Buffer("buckets", kind="grad"),)

    def open(self, job: TrainingJob) -> Session:
        # torch's DDP supports no shards; then the same messages follow FSDP's reduce-scatter.
        if job.request.stop_after_profile or job.cluster.topology.sharded:
            return super().open(job)
        from offbeat.strategies.ddp_session import open_ddp_session

        profile = job.profile
        if self.bucket_cap_mb == "tuned" and profile is None:
            raise ValueError(
                "bucket_cap_mb ('tuned') needs a profile; pass profile= (see `offbeat profile`) or "
                "a number of MiB"
            )
        cap_mb = self.cap_mb(profile) if profile else self.bucket_cap_mb
        plan = self.plan(profile) if profile else None
        return open_ddp_session(job, cap_mb, str(self), plan)  # type: ignore[arg-type]

    def equations(self, plan: Plan) -> Equations:
        return synchronous()

    def bound_s(self, profile: Profile) -> float:
        channels = _channels(profile)
        if channels > 1:
            return channels_bound_s(profile, channels)
        return synchronous_bound_s(profile, fused=True)


def _channels(profile: Profile) -> int:
    """Return the number of channels that represent DDP's messages.

    Gloo executes two all_reduces at the same time. On a distant link, each uses the rate while the
    other waits for a round trip; elsewhere both together take as long as one after the other.
    """
    return SIMULTANEOUS if profile.is_distant(profile.default_link.name) else 1


def with_replica_per_rank(profile: Profile) -> Profile:
    """Return the profile of the same job if every rank holds a replica of its own.

    A ring of all ranks in order passes each link between nodes once in each step, so that its
    messages take as long as those of a cluster with as many hosts. The ranks of a single node use
    the link inside it. Sharded replicas stay as they are, because no rank holds a whole one.
    """
    if not profile.topology or profile.sharded:
        return profile
    flat = profile.of_replicas()
    if profile.world_size == 1 and profile.inside is not None:
        return replace(
            repeated_ranks(flat, profile.ranks),
            links=tuple(replace(profile.inside, name=link.name) for link in profile.links),
            buckets=tuple(replace(bucket, communication_s={}) for bucket in profile.buckets),
            contention=(),
        )
    return extrapolate(flat, hosts=profile.ranks)
