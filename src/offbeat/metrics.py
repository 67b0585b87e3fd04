"""Metrics of a running job, and adapters to monitoring tools."""

from offbeat.jobs.metrics import (
    BYTES,
    DIVERGENCE,
    EXPOSED,
    LOSS,
    SECONDS,
    Log,
    Metrics,
    TensorBoard,
    WandB,
)

__all__ = [
    "BYTES",
    "DIVERGENCE",
    "EXPOSED",
    "LOSS",
    "SECONDS",
    "Log",
    "Metrics",
    "TensorBoard",
    "WandB",
]
