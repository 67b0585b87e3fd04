"""Profile that is known before a job trains: given, of a file or of the launcher, if it fits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import nn

from offbeat.core.buckets.layout import parameter_counts
from offbeat.core.measuring.network_check import compare_network
from offbeat.core.parts import part
from offbeat.core.profile import Profile
from offbeat.core.runtime.model_checks import fingerprint_of
from offbeat.core.start.launch_request import LaunchRequest
from offbeat.core.transport.cluster import Cluster

GivenProfile = Profile | str | Path | None
"""Argument `profile` of `prepare`."""


@dataclass(frozen=True)
class KnownProfile:
    """Profile of a job before its first iteration, the same on all ranks.

    Attributes:
        profile: the profile; None to measure one.
        save_to: file for a measured profile; None: not saved.
        difference: how the network differs from the profile, and what follows; None if it does not.
    """

    profile: Profile | None
    save_to: str | None
    difference: str | None = None


def kind_of(given: GivenProfile) -> str:
    """Return the words for the argument `profile` of `prepare`."""
    if given is None:
        return "none"
    return "given" if isinstance(given, Profile) else "a file"


def find_profile(  # noqa: C901
    given: GivenProfile, job: LaunchRequest, model: nn.Module, cluster: Cluster
) -> KnownProfile:
    """Return the profile to plan from, after a comparison with model, job and network.

    A Profile and the launcher's file must match. A user's file is a cache and is measured again if
    it does not match. Rank 0 reads the file for all ranks. Where members change, the profile may be
    of another number of replicas, at least 2.
    """
    if job.stop_after_profile or (given is None and job.profile is None):
        return KnownProfile(None, job.save_profile)
    known, problem = None, None
    if cluster.control.rank == 0:
        try:
            known = _read_profile(given, job)
        except (OSError, ValueError) as error:
            problem = error
    own_result = {"problem": problem and str(problem), "profile": known and known.to_dict()}
    result = cluster.control.gather(own_result)[0]
    if result["problem"] is not None:
        raise problem or ValueError(result["problem"])
    cache = None if isinstance(given, Profile) else str(given) if given else None
    if not result["profile"]:
        return KnownProfile(None, cache)
    known = Profile.from_dict(result["profile"])
    if cluster.control.has_members and known.world_size > 1:
        known = part("for_members")(known, cluster.topology.replicas)
    mismatch = _find_mismatch(known, model, cluster, job)
    is_cache = cache is not None and job.profile is None and known.model
    if mismatch is not None and not is_cache:
        raise ValueError(
            f"the profile does not match: {mismatch}; measure it again with `offbeat profile`"
        )
    if mismatch is not None:
        return KnownProfile(None, cache)
    difference = compare_network(cluster, known)
    if difference is None:
        return KnownProfile(known, cache)
    if is_cache:
        return KnownProfile(None, cache, f"{difference}; it is measured again")
    remedy = "plan and predictions do not fit, so measure it again"
    return KnownProfile(known, cache, f"{difference}; {remedy}")


def _read_profile(given: GivenProfile, job: LaunchRequest) -> Profile | None:
    if job.profile is not None:
        return Profile.load(job.profile)
    if isinstance(given, Profile):
        return given
    assert given is not None
    return Profile.load(given) if Path(given).exists() else None


def _find_mismatch(
    profile: Profile, model: nn.Module, cluster: Cluster, job: LaunchRequest
) -> str | None:
    if profile.model and profile.model != fingerprint_of(model):
        return f"it was measured on another model; {parameter_counts(model, profile)}"
    topology = cluster.topology
    if profile.world_size != topology.replicas:
        return f"its world_size ({profile.world_size}) must be {topology.replicas}"
    sizes = () if topology.is_flat else topology.sizes
    if (profile.topology, profile.sharded) != (sizes, topology.sharded):
        return f"the numbers of ranks of its replicas ({profile.topology}) must be {sizes}"
    if profile.pace and not job.pace:
        return (
            f"it is of emulated hosts (pace {profile.pace:g}), and this machine is to be used as "
            "it is"
        )
    names = [link.name for link in profile.links]
    if names != list(cluster.specs):
        return f"its links ({', '.join(names)}) must be {', '.join(cluster.specs)}"
    return None
