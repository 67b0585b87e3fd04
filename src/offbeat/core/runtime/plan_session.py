"""Opening of the session of a strategy with a plan."""

from __future__ import annotations

from torch import nn

from offbeat.core.buckets.flat import Flat
from offbeat.core.buckets.layout import BucketSpec, specs_of_profile
from offbeat.core.profile import Profile
from offbeat.core.runtime.flat_session import FlatSession
from offbeat.core.runtime.training_job import TrainingJob
from offbeat.core.strategy.interface import Planned
from offbeat.elastic.session import MemberSession


def build_flat(model: nn.Module, profile: Profile | None, alignment_bytes: int = 1) -> Flat:
    """Return flat storage with the profile's buckets, or one bucket per parameter in reverse
    order."""
    if profile is not None:
        specs = specs_of_profile(model, profile)
    else:
        names = [name for name, p in model.named_parameters() if p.requires_grad]
        specs = [BucketSpec(name, (name,)) for name in reversed(names)]
    return Flat(model, specs, alignment_bytes=alignment_bytes)


def open_plan_session(strategy: Planned, job: TrainingJob) -> FlatSession:
    """Return the session that runs the strategy's plan. It measures a profile if none is known."""
    flat = build_flat(job.model, job.profile, job.cluster.alignment_bytes)
    session = (FlatSession if job.member is None else MemberSession)(strategy, job, flat)
    try:
        session.begin()
        session.engine.begin()
    except BaseException:
        session.cancel()
        raise
    return session
