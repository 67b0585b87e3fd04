"""Arguments of `prepare` that must be equal on all ranks, and checks of single values."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

from offbeat.core.runtime.known_profile import GivenProfile, kind_of
from offbeat.core.runtime.training_job import Watch
from offbeat.core.start.launch_request import CHECKPOINT_VARIABLE
from offbeat.core.strategy.interface import require_count
from offbeat.core.transport.topology import DIMENSIONS


@dataclass(frozen=True)
class CommonArguments:
    """Arguments of `prepare` that must be equal on all ranks; its text is compared.

    Attributes:
        observe: iterations of BSP to measure without a profile.
        min_bucket_bytes: smallest bucket; None: derived from the measured latency.
        profile: the profile, of which only its kind must be equal.
        watch: checks during training.
        servers: number of servers.
        has_checkpoints: whether the environment or a launcher names a folder of checkpoints.

    Raises:
        ValueError: a value is invalid.
    """

    observe: int
    min_bucket_bytes: int | None
    profile: GivenProfile
    watch: Watch
    servers: int
    has_checkpoints: bool

    def __post_init__(self) -> None:
        require_count("observe", self.observe, remedy="pass a profile to observe no iterations")
        if self.min_bucket_bytes is not None:
            remedy = "use None to derive it from the measured latency of a message"
            require_count("min_bucket_bytes", self.min_bucket_bytes, remedy=remedy)

    def __str__(self) -> str:
        watch = self.watch
        return (
            f"observe={self.observe}, min_bucket_bytes={self.min_bucket_bytes}, "
            f"profile={kind_of(self.profile)}, compare_every={watch.compare_every}, "
            f"on_nonfinite={watch.on_nonfinite}, broadcast_buffers={watch.broadcast_buffers}, "
            f"servers={self.servers}, "
            f"{CHECKPOINT_VARIABLE} {'set' if self.has_checkpoints else 'unset'}"
        )


def require_seconds(name: str, value: float) -> float:
    """Return a number of seconds. Raise ValueError unless it is above 0 and finite."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 < value < float("inf"):
        raise ValueError(f"{name} ({value!r}) must be a number of seconds above 0")
    return float(value)


def require_whole_job(process_group: object, mesh: object) -> None:
    """Raise ValueError if the script names a part of the job, or a mesh that is no device mesh of
    torch."""
    if process_group is not None:
        raise ValueError(
            f"process_group ({type(process_group).__name__}) must be left out: offbeat averages "
            "over all ranks of the job"
        )
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise ValueError(
            f"mesh ({type(mesh).__name__}) must be a torch.distributed.device_mesh.DeviceMesh of "
            f"two dimensions, between nodes and inside: {DIMENSIONS}"
        )
