"""DDP: torch's own DistributedDataParallel, untouched, the yardstick of every comparison."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from offbeat.plan import Plan
from offbeat.profile import Profile
from offbeat.solve import cap_fusion
from offbeat.strategies.base import Strategy, synchronous_bound_s
from offbeat.strategies.wfbp import DDP_CAP_BYTES, DDP_FIRST_CAP_BYTES, MIB, gradients_when_ready


@dataclass(frozen=True)
class DDP(Strategy):
    """`torch.nn.parallel.DistributedDataParallel` with a bucket cap in MiB.

    None is torch's default (25, the first bucket 1). The plan only describes it, for prediction.
    """

    bucket_cap_mb: float | None = None

    name: ClassVar[str] = "ddp"
    citation: ClassVar[str] = "Li et al., PyTorch Distributed, VLDB 2020"

    def __post_init__(self) -> None:
        cap = self.bucket_cap_mb
        if cap is not None and not (isinstance(cap, (int, float)) and 0 < cap < math.inf):
            raise ValueError(
                f"bucket_cap_mb ({cap!r}) must be a number above 0, or None for torch's default"
            )

    def plan(self, profile: Profile, rank: int = 0) -> Plan:
        sizes = [bucket.size_bytes for bucket in profile.buckets]
        if self.bucket_cap_mb is None:
            groups = cap_fusion(sizes, DDP_CAP_BYTES, DDP_FIRST_CAP_BYTES)
        else:
            groups = cap_fusion(sizes, int(self.bucket_cap_mb * MIB))
        return gradients_when_ready(self.name, profile, groups)

    def bound_s(self, profile: Profile) -> float:
        return synchronous_bound_s(profile)
