"""Profiles: measurements of one model on one cluster, and the message times that follow."""

from offbeat.core.profile.facts import (
    SIMULTANEOUS_SPEED,
    Bucket,
    CodecSpeed,
    Contention,
    GradientNoise,
    Link,
    Profile,
    ScriptUsage,
)
