"""Profiles: measurements of one model on one cluster."""

from offbeat.core.profile import (
    SIMULTANEOUS_SPEED,
    Bucket,
    CodecSpeed,
    Contention,
    GradientNoise,
    Link,
    Profile,
    ScriptUsage,
)

__all__ = [
    "SIMULTANEOUS_SPEED",
    "Bucket",
    "CodecSpeed",
    "Contention",
    "GradientNoise",
    "Link",
    "Profile",
    "ScriptUsage",
]
